"""dpone_scope_merge inside dbt's own transaction. Expected rows and digests are worked out here, by hand."""

import hashlib
import threading
import time
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from dbt_support import DAY, Sandbox, pair_project, sandbox  # noqa: F401
from jinja2 import Environment

from dpone_dagster.contracts.mart import Scope
from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import OperationRecord
from dpone_dagster.ports import MutationOutcome
from resources.dbt_builder import PLATFORM

ROWS = "select e::text from marts.events as e order by 1"  # as text: Python has no infinite date
EVENTS = "select event_at, device, site, reading, note from marts.events order by event_at, device"


def field(value: Any) -> str:
    """dpone_row_v1 of one value, from the text of contracts/set_digest.py."""
    if value is None:
        return "~"
    text = {
        bool: lambda: str(int(value)),
        int: lambda: str(value),
        Decimal: lambda: f"{value:f}",
        date: lambda: value.isoformat(),
        datetime: lambda: value.isoformat(timespec="microseconds"),
        str: lambda: value,
    }.get(type(value), lambda: str(value))()
    return f"{len(text.encode())}:{text}"


def digest(rows: list[tuple[Any, ...]]) -> SetDigest:
    """Reference set digest of rows."""
    lanes = [0, 0, 0, 0]
    for row in rows:
        hashed = hashlib.sha256("".join(field(value) for value in row).encode()).digest()
        for lane in range(4):
            lanes[lane] = (lanes[lane] + int.from_bytes(hashed[8 * lane : 8 * lane + 8])) % 2**64
    return SetDigest(len(rows), (lanes[0], lanes[1], lanes[2], lanes[3]))


def full_row(device: int, *, note: str | None = "ok", reading: str = "1.500", hour: int = 12) -> tuple[Any, ...]:
    """What the mart holds for an event as Sandbox.events makes it; char(4) without its padding."""
    return (
        datetime(2024, 3, 10, hour),
        device,
        7,
        Decimal(reading),
        note,
        "ab",
        date(2024, 3, 10),
        True,
        None,
        9_007_199_254_740_993,
        "00000000-0000-0000-0000-0000000000aa",
    )


def refused(sandbox: Sandbox, operation: OperationRecord, **more: Any) -> tuple[str, str]:  # noqa: F811
    """Build, expect a refusal that leaves neither image nor receipt nor a changed row; return code and sentence."""
    before = sandbox.rows(ROWS)
    result = sandbox.build(operation, **more)
    model = f"model.dpone_marts.{operation.mart}"
    assert result.model_status[model] == "error"
    assert all(test.status == "skipped" for test in result.tests)
    assert sandbox.rows(ROWS) == before
    receipts = "select count(*) from dpone_control.model_receipt where operation_id = %s"
    assert sandbox.one(receipts, operation.operation_id) == 0
    assert sandbox.source.outcome(operation) == (MutationOutcome.ROLLED_BACK, None)
    return result.error_codes[model], result.error_sentences[model]


def test_a_day_is_mutated_with_images_and_receipt(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.events([{"device": 1}, {"device": 2, "note": "zwölf"}, {"device": 3, "note": None}])
    # Another day's row of the source and of the mart stay out of it.
    sandbox.events([{"device": 1, "reported_at": "2024-03-11 00:00", "event_at": "2024-03-11 00:00"}])
    operation = sandbox.admit("events")
    result = sandbox.build(operation)
    assert result.model_status == {"model.dpone_marts.events": "success"}
    assert [(t.name, t.status, t.failures) for t in result.tests] == [("not_null_events_site", "pass", 0)]
    outcome, receipt = sandbox.source.outcome(operation)
    assert outcome is MutationOutcome.COMMITTED_WITH_IMAGES
    assert receipt is not None
    expected = digest([full_row(1), full_row(2, note="zwölf"), full_row(3, note=None)])
    assert (receipt.before, receipt.after) == (digest([]), expected)
    assert (receipt.source_rows, receipt.inserted_rows, receipt.updated_rows) == (3, 3, 0)
    assert (receipt.fencing_epoch, receipt.worker_id) == (operation.fencing_epoch, sandbox.worker)
    assert sandbox.source.scope_digest(sandbox.marts["events"], DAY) == expected
    assert [row[1] for row in sandbox.rows(EVENTS)] == [1, 2, 3]


def test_a_replay_updates_inserts_and_keeps_missing_rows(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.events([{"device": d} for d in (1, 2, 3)])
    sandbox.build(sandbox.admit("events"))
    sandbox.settle("events")
    sandbox.sql.execute("update loose.events set note = 'late' where device = 2")
    sandbox.sql.execute("delete from loose.events where device = 3")
    sandbox.events([{"device": 4}])
    operation = sandbox.admit("events")
    sandbox.build(operation)
    _, receipt = sandbox.source.outcome(operation)
    assert receipt is not None
    # Device 1 is as it was: neither updated nor inserted; device 3 is gone from the source and stays.
    assert (receipt.source_rows, receipt.updated_rows, receipt.inserted_rows) == (3, 1, 1)
    assert receipt.before == digest([full_row(d) for d in (1, 2, 3)])
    assert receipt.after == digest([full_row(1), full_row(2, note="late"), full_row(3), full_row(4)])


def test_values_become_null_and_come_back(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.events([{"device": 1}, {"device": 2, "note": None}])
    sandbox.build(sandbox.admit("events"))
    sandbox.settle("events")
    sandbox.sql.execute("update loose.events set note = case when device = 1 then null else 'x' end")
    operation = sandbox.admit("events")
    sandbox.build(operation)
    _, receipt = sandbox.source.outcome(operation)
    assert receipt is not None
    assert receipt.updated_rows == 2
    assert [row[4] for row in sandbox.rows(EVENTS)] == [None, "x"]


def test_an_empty_day_has_empty_images(sandbox: Sandbox) -> None:  # noqa: F811
    operation = sandbox.admit("events")
    sandbox.build(operation)
    outcome, receipt = sandbox.source.outcome(operation)
    assert outcome is MutationOutcome.COMMITTED_WITH_IMAGES
    assert receipt is not None
    assert (receipt.before.rows, receipt.after.rows, receipt.source_rows) == (0, 0, 0)


def test_days_do_not_share_compiled_code(sandbox: Sandbox) -> None:  # noqa: F811
    """The parsed project is handed over again and again; a scope of yesterday must not stick to it."""
    for day in (9, 10, 11):
        sandbox.events([{"reported_at": f"2024-03-{day:02} 08:00", "event_at": f"2024-03-{day:02} 08:00"}])
        operation = sandbox.admit("events", Scope.day(date(2024, 3, day)))
        sandbox.build(operation, scope=Scope.day(date(2024, 3, day)))
        sandbox.settle("events")
        assert sandbox.one("select count(*) from marts.events") == day - 8


def test_the_same_operation_does_not_mutate_twice(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.events([{"device": 1}])
    operation = sandbox.admit("events")
    sandbox.build(operation)
    first = sandbox.source.outcome(operation)
    sandbox.events([{"device": 2}])
    result = sandbox.build(operation)
    assert result.model_status == {"model.dpone_marts.events": "success"}
    assert sandbox.source.outcome(operation) == first
    assert sandbox.one("select count(*) from marts.events") == 1
    # A receipt whose day has changed since is not reconciled by looking away.
    sandbox.sql.execute("update marts.events set note = 'stranger'")
    result = sandbox.build(operation)
    assert result.error_codes == {"model.dpone_marts.events": "DPONE_MUTATION_DIVERGED"}


def test_restore_then_rebuild(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.events([{"device": 1}, {"device": 2}])
    sandbox.build(sandbox.admit("events"))
    sandbox.settle("events")
    # The failed operation changed device 2 wrongly and added device 9.
    sandbox.sql.execute("update loose.events set note = 'wrong' where device = 2")
    sandbox.events([{"device": 9}])
    failed = sandbox.admit("events")
    sandbox.build(failed)
    sandbox.settle("events", State.FAILED_PRE_COMMIT)
    sandbox.sql.execute("delete from loose.events where device = 9")
    sandbox.sql.execute("update loose.events set note = 'right' where device = 2")
    again = sandbox.admit("events")
    sandbox.build(again, restore={"events": failed})
    _, receipt = sandbox.source.outcome(again)
    assert receipt is not None
    assert receipt.before == digest([full_row(1), full_row(2)])
    assert receipt.after == digest([full_row(1), full_row(2, note="right")])
    assert [row[1] for row in sandbox.rows(EVENTS)] == [1, 2]
    # The failed operation's own images are still what its receipt says.
    assert sandbox.source.outcome(failed)[0] is MutationOutcome.COMMITTED_WITH_IMAGES


def test_a_failing_rebuild_rolls_its_restore_back(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.events([{"device": 1}])
    failed = sandbox.admit("events")
    sandbox.build(failed)
    sandbox.settle("events", State.FAILED_PRE_COMMIT)
    sandbox.events([{"device": 5}, {"device": 5}])
    again = sandbox.admit("events")
    code, _ = refused(sandbox, again, restore={"events": failed})
    assert code == "DPONE_KEY_DUPLICATE"
    assert sandbox.one("select count(*) from marts.events") == 1


def test_restore_refuses_a_changed_day(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.events([{"device": 1}])
    failed = sandbox.admit("events")
    sandbox.build(failed)
    sandbox.settle("events", State.FAILED_PRE_COMMIT)
    sandbox.sql.execute("update marts.events set note = 'stranger'")
    again = sandbox.admit("events")
    code, sentence = refused(sandbox, again, restore={"events": failed})
    assert (code, "field=scope" in sentence) == ("DPONE_RESTORE_DIVERGED", True)


BAD_ROWS = [
    ("null key", [{"device": None}], "DPONE_KEY_NULL", "field=device, rows=1, side=source"),
    ("null event time", [{"event_at": None}], "DPONE_KEY_NULL", "field=event_at, rows=1, side=source"),
    ("duplicate", [{"device": 3}, {"device": 3}, {"device": 4}], "DPONE_KEY_DUPLICATE", "rows=1, side=source"),
    ("null value", [{"flag": None}], "DPONE_VALUE_NULL", "field=flag, rows=1, side=source"),
    ("infinite event time", [{"event_at": "infinity"}], "DPONE_VALUE_OUTSIDE_DOMAIN", "field=event_at, rows=1"),
    ("early event time", [{"event_at": "1899-12-31"}], "DPONE_VALUE_OUTSIDE_DOMAIN", "field=event_at, rows=1"),
    ("late date", [{"seen_on": "2149-06-07"}], "DPONE_VALUE_OUTSIDE_DOMAIN", "field=seen_on, rows=1"),
    ("infinite date", [{"seen_on": "-infinity"}], "DPONE_VALUE_OUTSIDE_DOMAIN", "field=seen_on, rows=1"),
    ("not a number", [{"reading": "NaN"}], "DPONE_VALUE_OUTSIDE_DOMAIN", "field=reading, rows=1"),
    (
        "another day's event time",
        [{"event_at": "2024-03-11 00:00"}, {"event_at": "2024-03-09 23:59:59.999999"}],
        "DPONE_EVENT_TIME_OUTSIDE_SCOPE",
        "field=event_at, rows=2, side=source",
    ),
]


@pytest.mark.parametrize(("rows", "code", "facts"), [b[1:] for b in BAD_ROWS], ids=[b[0] for b in BAD_ROWS])
def test_bad_input_refuses(sandbox: Sandbox, rows: list[dict[str, Any]], code: str, facts: str) -> None:  # noqa: F811
    sandbox.events([{"device": 1, "note": "secret"}])
    sandbox.build(sandbox.admit("events"))
    sandbox.settle("events")
    sandbox.events([{"device": 8, "note": "secret", **row} for row in rows])
    found, sentence = refused(sandbox, sandbox.admit("events"))
    assert found == code
    assert facts in sentence
    assert "secret" not in sentence


@pytest.mark.parametrize(
    ("sql", "code"),
    [
        ("alter table marts.events drop constraint events_pkey; insert into marts.events select * from marts.events",
         "DPONE_KEY_DUPLICATE"),
        ("alter table marts.events alter flag drop not null; update marts.events set flag = null", "DPONE_VALUE_NULL"),
        ("update marts.events set seen_on = 'infinity'", "DPONE_VALUE_OUTSIDE_DOMAIN"),
    ],
    ids=["duplicate", "null", "domain"],
)  # fmt: skip
def test_bad_rows_already_in_the_mart_refuse(sandbox: Sandbox, sql: str, code: str) -> None:  # noqa: F811
    sandbox.events([{"device": 1}])
    sandbox.build(sandbox.admit("events"))
    sandbox.settle("events")
    sandbox.sql.execute(sql)
    found, sentence = refused(sandbox, sandbox.admit("events"))
    assert found == code
    assert "side=target" in sentence


def test_a_model_of_the_full_result_is_filtered(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.sql.execute(
        """insert into loose.hours values ('2024-03-09 23:00', 1, 1), ('2024-03-10 00:00', 1, 2),
                                          ('2024-03-10 23:59:59.999999', 1, 3), ('2024-03-11 00:00', 1, 4)"""
    )
    operation = sandbox.admit("totals")
    sandbox.build(operation)
    assert sandbox.rows("select total from marts.totals order by 1") == [(2,), (3,)]
    _, receipt = sandbox.source.outcome(operation)
    assert receipt is not None
    assert receipt.source_rows == 2


@pytest.mark.parametrize(
    "sql",
    [
        "update dpone_control.resource_guard set epoch = epoch + 1",
        "update dpone_control.resource_guard set worker_id = 'another'",
        "update dpone_control.resource_guard set operation_id = 'sha256:other'",
        "delete from dpone_control.resource_guard",
        "update dpone_control.operation set state = 'FAILED_PRE_COMMIT'",
        "update dpone_control.operation set fencing_epoch = 99",
        "update dpone_control.operation set worker_id = 'another'",
        "update dpone_control.operation set operation_plan_sha256 = 'sha256:other'",
    ],
)
def test_the_fence_refuses(sandbox: Sandbox, sql: str) -> None:  # noqa: F811
    sandbox.events([{"device": 1}])
    operation = sandbox.admit("events")
    sandbox.sql.execute(sql)
    assert refused(sandbox, operation)[0] == "DPONE_FENCED"


def test_an_orphan_image_refuses(sandbox: Sandbox) -> None:  # noqa: F811
    operation = sandbox.admit("events")
    name = f"op_{operation.operation_id[7:23]}_after"
    sandbox.sql.execute(f"create table dpone_images.{name} (x int)")
    result = sandbox.build(operation)
    assert result.error_codes == {"model.dpone_marts.events": "DPONE_IMAGE_CONFLICT"}
    assert sandbox.source.outcome(operation) == (MutationOutcome.COMMIT_UNKNOWN, None)


def test_a_trigger_that_changes_rows_is_found_out(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.sql.execute(
        """create function public.meddle() returns trigger language plpgsql as
           $$begin new.note := 'meddled'; return new; end$$;
           create trigger meddle before insert on marts.events for each row execute function public.meddle()"""
    )
    sandbox.events([{"device": 1}])
    assert refused(sandbox, sandbox.admit("events"))[0] == "DPONE_MUTATION_DIVERGED"


def test_an_absent_mart_is_never_created(sandbox: Sandbox) -> None:  # noqa: F811
    operation = sandbox.admit("totals")
    sandbox.sql.execute("drop table marts.totals")
    result = sandbox.build(operation)
    assert result.error_codes == {"model.dpone_marts.totals": "DPONE_MART_ABSENT"}
    assert sandbox.one("select to_regclass('marts.totals')") is None


def test_a_mart_that_became_a_view_is_never_replaced(sandbox: Sandbox) -> None:  # noqa: F811
    operation = sandbox.admit("totals")
    sandbox.sql.execute("drop table marts.totals; create view marts.totals as select * from loose.hours")
    result = sandbox.build(operation)
    assert result.model_status == {"model.dpone_marts.totals": "error"}
    assert sandbox.one("select relkind from pg_class where oid = 'marts.totals'::regclass") == "v"


def test_contract_drift_of_the_mart_refuses(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.sql.execute("alter table marts.events alter reading type numeric(12,2)")
    assert refused(sandbox, sandbox.admit("events"))[0] == "DPONE_CONTRACT_DRIFT"


def test_contract_drift_of_the_source_refuses(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.sql.execute("alter table loose.events alter reading type numeric(12,4)")
    assert refused(sandbox, sandbox.admit("events"))[0] == "DPONE_CONTRACT_DRIFT"


def test_another_writer_makes_it_wait_and_then_refuse(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.events([{"device": 1}])
    sandbox.builder._policy = sandbox.builder._policy.model_copy(update={"lock_wait_seconds": 1})
    with psycopg.connect(sandbox.database.conninfo) as writer:
        writer.execute("update marts.events set note = 'mine'")
        assert refused(sandbox, sandbox.admit("events"))[0] == "DPONE_MART_LOCKED"


def test_writers_wait_for_the_mutation(sandbox: Sandbox) -> None:  # noqa: F811
    """A stranger's INSERT of the same key, sent while the mutation is open, sees the committed row."""
    sandbox.events([{"device": d} for d in range(1, 2000)])
    refusals: list[str | None] = []
    seen = threading.Event()

    def insert_when_locked() -> None:
        with psycopg.connect(sandbox.database.conninfo, autocommit=True) as stranger:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                held = stranger.execute(
                    """select count(*) from pg_locks where relation = 'marts.events'::regclass
                       and mode = 'ShareRowExclusiveLock' and granted"""
                ).fetchone()
                if held and held[0]:
                    seen.set()
                    break
            try:
                stranger.execute(
                    "insert into marts.events (event_at, device, flag) values ('2024-03-10 12:00', 1, true)"
                )
                refusals.append(None)
            except psycopg.errors.UniqueViolation as error:
                refusals.append(error.sqlstate)

    operation = sandbox.admit("events")
    thread = threading.Thread(target=insert_when_locked)
    thread.start()
    sandbox.build(operation)
    thread.join()
    assert seen.is_set()
    assert refusals == ["23505"]
    assert sandbox.source.outcome(operation)[0] is MutationOutcome.COMMITTED_WITH_IMAGES


def test_two_marts_are_built_by_one_call(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.events([{"device": 1}])
    sandbox.sql.execute("insert into loose.hours values ('2024-03-10 05:00', 1, 11), ('2024-03-10 05:00', 1, 12)")
    events, totals = sandbox.admit("events"), sandbox.admit("totals")
    result = sandbox.build(events, totals)
    # One refuses, the other commits: each model has a transaction of its own.
    assert result.model_status == {"model.dpone_marts.events": "success", "model.dpone_marts.totals": "error"}
    assert result.error_codes == {"model.dpone_marts.totals": "DPONE_KEY_DUPLICATE"}
    assert sandbox.source.outcome(events)[0] is MutationOutcome.COMMITTED_WITH_IMAGES
    assert sandbox.source.outcome(totals)[0] is MutationOutcome.ROLLED_BACK


def test_the_t_sql_text_keeps_the_order_and_the_prohibitions() -> None:
    """Rendered, not run: the SQL Server profile has not shipped."""
    text = (PLATFORM / "dpone_platform" / "macros" / "sqlserver_scope_merge.sql").read_text()
    macros = Environment(extensions=["jinja2.ext.do"]).from_string(text.replace("dpone_platform.", ""))
    operation = {
        "event_time": "at", "columns": ["at", "k", "v"], "key": ["at", "k"], "guard": "mart:m", "epoch": 3,
        "ddl_epoch": 1, "worker_id": "w", "operation_id": "o", "operation_plan_sha256": "p", "bounded": True,
        "workflow_execution_id": "x", "image_schema": "i", "before_name": "b", "after_name": "a",
        "before_image": "[i].[b]", "after_image": "[i].[a]", "scope_digest_sql": "SELECT scope",
        "before_digest_sql": "SELECT before", "after_digest_sql": "SELECT after", "row_text_sql": "ROWTEXT",
        "event_time_violation_sql": "(1 = 0)", "restore": {"operation_id": "f", "before_image": "[i].[f]"},
        "gates": [{"code": "DPONE_KEY_NULL", "field": "k", "violation": "[k] IS NULL"}],
    }  # fmt: skip
    sql = macros.module.sqlserver__dpone_scope_merge_sql(operation, "[m].[t]", "#tmp", "S", "E", 1000)
    order = [
        "SET XACT_ABORT ON", "@@TRANCOUNT", "sp_getapplock", "ddl-freeze", "TABLOCKX", "UPDLOCK, HOLDLOCK",
        "-- 4.", "-- 4b.", "INTO [i].[b]", "DPONE_EVENT_TIME_OUTSIDE_SCOPE", "UPDATE t",
        "NOT EXISTS (\n  SELECT 1 FROM [m].[t]", "side=target", "INTO [i].[a]",
        "INSERT INTO dpone_control.model_receipt",
    ]  # fmt: skip
    positions = [sql.find(mark) for mark in order]
    assert -1 not in positions
    later = [sql.rfind(mark) if mark == "side=target" else at for mark, at in zip(order, positions, strict=True)]
    assert later == sorted(later)
    for word in ("MERGE", "BEGIN TRAN", "COMMIT TRAN", "COMMIT;", "ROLLBACK", "WAITFOR"):
        assert word not in sql.upper()
    assert sql.upper().count("DELETE FROM [M].[T]") == 1


def test_the_reference_encoding_agrees_with_the_shipped_example() -> None:
    assert field(Decimal("-0.50")) == "5:-0.50"
    assert field("é") == "2:é"
    assert field(None) == "~"
    assert field(datetime(2024, 3, 10, tzinfo=UTC).replace(tzinfo=None)) == "26:2024-03-10T00:00:00.000000"
