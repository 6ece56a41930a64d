"""The embedded source: what it refuses of a mart, how it classifies a mutation, and how it streams an image."""

import json
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from dbt_support import DAY, Sandbox, pair_project, sandbox  # noqa: F401

from dpone_dagster.contracts.mart import Column, MartSpec, Relation
from dpone_dagster.contracts.set_digest import EMPTY
from dpone_dagster.errors import DponeError
from dpone_dagster.ports import MutationOutcome
from resources.postgres.marts import PostgresSource


def refusal(act: Any) -> DponeError:
    with pytest.raises(DponeError) as caught:
        act()
    return caught.value


# ------------------------------------------------------------------------------------------------ the table


def test_a_created_mart_is_admitted_once(sandbox: Sandbox) -> None:  # noqa: F811
    events = sandbox.marts["events"]
    sandbox.source.check_mart(events)
    assert refusal(lambda: sandbox.source.create_mart(events)).code == "DPONE_MART_EXISTS"
    key = sandbox.one(
        """select array_agg(a.attname order by k.n)::text[] from pg_index as i
           cross join lateral unnest(i.indkey::int2[]) with ordinality as k (attnum, n)
           join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = k.attnum
           where i.indrelid = 'marts.events'::regclass and i.indisprimary"""
    )
    assert key == ["event_at", "device"]
    assert sandbox.source.scope_digest(events, DAY) == EMPTY


DRIFTS = [
    ("drop table marts.events", "DPONE_MART_ABSENT"),
    ("drop table marts.events; create view marts.events as select 1 as device", "DPONE_MART_NOT_A_TABLE"),
    ("drop table marts.events; create materialized view marts.events as select 1 as x", "DPONE_MART_NOT_A_TABLE"),
    ("alter table marts.events set unlogged", "DPONE_MART_NOT_A_TABLE"),
    ("alter table marts.events enable row level security", "DPONE_MART_NOT_A_TABLE"),
    ("create table marts.child () inherits (marts.events)", "DPONE_MART_NOT_A_TABLE"),
    ("create rule quiet as on insert to marts.events do instead nothing", "DPONE_MART_NOT_A_TABLE"),
    (
        """create function f() returns trigger language plpgsql as 'begin return new; end';
           create trigger t before insert on marts.events for each row execute function f()""",
        "DPONE_MART_NOT_A_TABLE",
    ),
    ("create table marts.events__dbt_tmp (x int)", "DPONE_SCRATCH_CONFLICT"),
    ("create view marts.events__dbt_backup as select 1 as x", "DPONE_SCRATCH_CONFLICT"),
    ("alter table marts.events drop column note", "DPONE_CONTRACT_DRIFT"),
    ("alter table marts.events add column extra int", "DPONE_CONTRACT_DRIFT"),
    ("alter table marts.events alter reading type numeric(12,2)", "DPONE_CONTRACT_DRIFT"),
    ("alter table marts.events alter event_at type timestamptz", "DPONE_CONTRACT_DRIFT"),
    ("alter table marts.events alter event_at type timestamp(3)", "DPONE_CONTRACT_DRIFT"),
    ("alter table marts.events alter flag drop not null", "DPONE_CONTRACT_DRIFT"),
    ("alter table marts.events alter note set not null", "DPONE_CONTRACT_DRIFT"),
    ("alter table marts.events drop column small; alter table marts.events add small smallint"
     " generated always as (1) stored", "DPONE_CONTRACT_DRIFT"),
]  # fmt: skip


@pytest.mark.parametrize(("sql", "code"), DRIFTS)
def test_a_mart_that_changed_refuses(sandbox: Sandbox, sql: str, code: str) -> None:  # noqa: F811
    sandbox.sql.execute(sql)
    assert refusal(lambda: sandbox.source.check_mart(sandbox.marts["events"])).code == code


# ------------------------------------------------------------------------------------------- what is read


def test_dependencies_are_what_the_engine_resolves(sandbox: Sandbox) -> None:  # noqa: F811
    events = sandbox.marts["events"]
    compiled = sandbox.builder.manifest()["nodes"][events.model_unique_id]["compiled_code"]
    seen = sandbox.source.dependencies(events, compiled)
    assert [(r.relation.dotted, r.kind) for r in seen.relations] == [("loose.events", "BASE_TABLE")]
    assert seen.relations[0].object_id == sandbox.one("select 'loose.events'::regclass::oid::bigint")
    assert seen.reader_id == sandbox.one("select 'marts.events'::regclass::oid::bigint")
    assert sandbox.one("select count(*) from pg_class where relname = 'dpone_reads'") == 0
    before = seen.relations[0].definition_sha256
    sandbox.sql.execute("alter table loose.events add column more int")
    assert sandbox.source.dependencies(events, compiled).relations[0].definition_sha256 != before


def test_dependencies_see_through_nothing_and_miss_nothing(sandbox: Sandbox) -> None:  # noqa: F811
    events = sandbox.marts["events"]
    sandbox.sql.execute("create view loose.v as select * from loose.hours")

    def kinds(sql: str) -> list[tuple[str, str]]:
        return [(r.relation.dotted, r.kind) for r in sandbox.source.dependencies(events, sql).relations]

    assert kinds("select (select count(*) from loose.hours) as n from marts.events where false") == [
        ("loose.hours", "BASE_TABLE"),
        ("marts.events", "BASE_TABLE"),
    ] or kinds("select (select count(*) from loose.hours) as n from marts.events where false") == [
        ("marts.events", "BASE_TABLE"),
        ("loose.hours", "BASE_TABLE"),
    ]
    assert kinds("select hour from loose.v") == [("loose.v", "a view")]
    assert kinds("with x as (select 1 as a) select a from x") == []


@pytest.mark.parametrize(
    "sql",
    [
        "select 1 as a; select 2 as a",
        "select 1) as x; drop table loose.hours; select * from (select 1",
        "insert into loose.hours values (null, 1, 1) returning device",
        "with gone as (delete from loose.hours returning *) select * from gone",
        "select nowhere.column from nobody",
        "select loose.own() as a",
        "select random() as a",
        "select pg_sleep(0) is null as a from loose.hours where random() < 2",
    ],
)
def test_dependencies_refuse(sandbox: Sandbox, sql: str) -> None:  # noqa: F811
    sandbox.sql.execute("create function loose.own() returns int language sql as 'select 1'")
    error = refusal(lambda: sandbox.source.dependencies(sandbox.marts["events"], sql))
    assert error.code == "DPONE_CLOSURE_UNPROVEN"
    assert "nobody" not in error.sentence
    assert sandbox.one("select to_regclass('loose.hours')") == "loose.hours"


def test_computed_source_columns_refuse(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.sql.execute("alter table loose.hours add twice bigint generated always as (total * 2) stored")
    error = refusal(lambda: sandbox.source.dependencies(sandbox.marts["totals"], "select twice from loose.hours"))
    assert error.code == "DPONE_CLOSURE_UNPROVEN"


# ------------------------------------------------------------------------------------------------ outcomes


@pytest.fixture
def committed(sandbox: Sandbox) -> tuple[Sandbox, Any]:  # noqa: F811
    sandbox.events([{"device": 1}, {"device": 2}])
    operation = sandbox.admit("events")
    sandbox.build(operation)
    return sandbox, operation


def test_nothing_sent_and_rolled_back_differ_by_the_journal_s_fact(sandbox: Sandbox) -> None:  # noqa: F811
    operation = sandbox.admit("events")
    assert sandbox.source.outcome(operation) == (MutationOutcome.ROLLED_BACK, None)
    assert sandbox.source.outcome(replace(operation, facts={})) == (MutationOutcome.NOT_INVOKED, None)


def test_a_commit_is_proven_by_receipt_and_images(committed: tuple[Sandbox, Any]) -> None:
    sandbox, operation = committed  # noqa: F811
    outcome, receipt = sandbox.source.outcome(operation)
    assert outcome is MutationOutcome.COMMITTED_WITH_IMAGES
    assert receipt is not None
    assert receipt.after == sandbox.source.image_digest(sandbox.marts["events"], receipt.after_image)
    # A worker that took over judges it the same; its epoch is later.
    later = replace(operation, fencing_epoch=operation.fencing_epoch + 5, worker_id="another")
    assert sandbox.source.outcome(later) == (outcome, receipt)


MIXED = [
    "update {after} set note = 'touched'",
    "delete from {before}; insert into {before} select * from {after}",
    "drop table {after}",
    "drop table {before}",
    "delete from dpone_control.model_receipt",
    "update dpone_control.model_receipt set after_l2 = after_l2 + 1",
    "update dpone_control.model_receipt set operation_plan_sha256 = 'sha256:other'",
    "update dpone_control.model_receipt set workflow_execution_id = 'other'",
    "update dpone_control.model_receipt set fencing_epoch = 99",
    "update dpone_control.model_receipt set inserted_rows = 1",
    "update dpone_control.model_receipt set after_name = 'other'",
]


@pytest.mark.parametrize("sql", MIXED)
def test_mixed_evidence_is_unknown(committed: tuple[Sandbox, Any], sql: str) -> None:
    sandbox, operation = committed  # noqa: F811
    _, receipt = sandbox.source.outcome(operation)
    assert receipt is not None
    sandbox.sql.execute(sql.format(before=receipt.before_image.dotted, after=receipt.after_image.dotted))
    assert sandbox.source.outcome(operation) == (MutationOutcome.COMMIT_UNKNOWN, None)


def test_a_live_session_is_unknown(sandbox: Sandbox) -> None:  # noqa: F811
    operation = sandbox.admit("events")
    tag = f"dpone-{sandbox.worker}"
    with psycopg.connect(sandbox.database.conninfo, application_name=tag) as session:
        # The worker's own lease session idles outside a transaction: that is no mutation.
        session.autocommit = True
        session.execute("select 1")
        assert sandbox.source.outcome(operation)[0] is MutationOutcome.ROLLED_BACK
        session.autocommit = False
        session.execute("select 1")
        assert sandbox.source.outcome(operation) == (MutationOutcome.COMMIT_UNKNOWN, None)
    assert sandbox.source.outcome(operation)[0] is MutationOutcome.ROLLED_BACK


def test_an_untagged_holder_of_the_mutation_lock_is_unknown(sandbox: Sandbox) -> None:  # noqa: F811
    from resources.dbt_builder import mutation_lock_key

    operation = sandbox.admit("events")
    with psycopg.connect(sandbox.database.conninfo) as session:
        session.execute("select pg_advisory_xact_lock(%s)", [mutation_lock_key("totals")])
        assert sandbox.source.outcome(operation)[0] is MutationOutcome.ROLLED_BACK
        session.execute("select pg_advisory_xact_lock(%s)", [mutation_lock_key("events")])
        assert sandbox.source.outcome(operation) == (MutationOutcome.COMMIT_UNKNOWN, None)


def test_an_engine_that_is_away_is_unknown_and_unavailable(sandbox: Sandbox) -> None:  # noqa: F811
    operation = sandbox.admit("events")
    nowhere = "host=/nonexistent dbname=x user=x"
    away = PostgresSource(conninfo=nowhere, uri="postgresql://x@/x?host=/nonexistent", marts=sandbox.marts)
    assert away.outcome(operation) == (MutationOutcome.COMMIT_UNKNOWN, None)
    error = refusal(lambda: away.check_mart(sandbox.marts["events"]))
    assert error.code == "DPONE_ENGINE_UNAVAILABLE"
    assert "/nonexistent" not in json.dumps(error.as_json())


def test_images_are_dropped_once_and_again(committed: tuple[Sandbox, Any]) -> None:
    sandbox, operation = committed  # noqa: F811
    for _ in range(2):
        sandbox.source.drop_images(operation)
        assert sandbox.one("select count(*) from pg_class where relname like 'op\\_%'") == 0


# --------------------------------------------------------------------------------------------- Arrow reads


def spec(columns: list[tuple[str, str, bool]], key: list[str]) -> MartSpec:
    return MartSpec(
        name="wide",
        model_unique_id="model.x.wide",
        workflow="w",
        source=Relation(schema_name="marts", name="wide"),
        target=Relation(schema_name="marts", name="wide"),
        event_time=key[0],
        utc_assured=(key[0],),
        key=tuple(key),
        columns=tuple(Column(name=n, type=t, nullable=nullable) for n, t, nullable in columns),
        start_date=date(2024, 1, 1),
    )


def test_every_type_arrives_exactly_in_key_order(sandbox: Sandbox) -> None:  # noqa: F811
    wide = spec(
        [
            ("at", "datetime2(6)", False), ("n", "bigint", False), ("i", "int", True), ("s", "smallint", True),
            ("b", "bit", True), ("u", "uniqueidentifier", True), ("d", "date", True), ("t", "datetime2(6)", True),
            ("m", "decimal(38,10)", True), ("v", "nvarchar(max)", True), ("c", "nchar(4)", True),
        ],
        ["at", "n"],
    )  # fmt: skip
    sandbox.source.create_mart(wide)
    sandbox.sql.execute(
        """insert into marts.wide values
           ('2024-03-10 23:59:59.999999', 9223372036854775807, -2147483648, -32768, true,
            'AAAAAAAA-0000-0000-0000-000000000001', '1970-01-01', '2299-12-31 23:59:59.999999',
            -1234567890123456789012345678.0123456789, 'naïve 🙂 " , \n', 'ab'),
           ('2024-03-10 00:00', 2, null, null, null, null, null, null, null, null, null),
           ('2024-03-10 00:00', -1, 0, 0, false, '00000000-0000-0000-0000-000000000000', '2149-06-06',
            '1900-01-01', 0, '', '')"""
    )
    reader = sandbox.source.read_image(wide, wide.source)
    assert [(f.name, f.type, f.nullable) for f in reader.schema] == [
        ("at", pa.timestamp("us", "UTC"), False), ("n", pa.int64(), False), ("i", pa.int32(), True),
        ("s", pa.int16(), True), ("b", pa.bool_(), True), ("u", pa.string(), True), ("d", pa.date32(), True),
        ("t", pa.timestamp("us", "UTC"), True), ("m", pa.decimal128(38, 10), True), ("v", pa.string(), True),
        ("c", pa.string(), True),
    ]  # fmt: skip
    midnight = datetime(2024, 3, 10, tzinfo=UTC)
    rows = [tuple(row.values()) for row in reader.read_all().to_pylist()]
    assert rows == [
        (midnight, -1, 0, 0, False, "00000000-0000-0000-0000-000000000000", date(2149, 6, 6),
         datetime(1900, 1, 1, tzinfo=UTC), Decimal("0E-10"), "", ""),
        (midnight, 2, *[None] * 9),
        (datetime(2024, 3, 10, 23, 59, 59, 999_999, tzinfo=UTC), 2**63 - 1, -(2**31), -(2**15), True,
         "aaaaaaaa-0000-0000-0000-000000000001", date(1970, 1, 1),
         datetime(2299, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
         Decimal("-1234567890123456789012345678.0123456789"), 'naïve 🙂 " , \n', "ab"),
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["'infinity'", "'-infinity'", "'2300-01-01'", "'1899-12-31 23:59:59.999999'"])
def test_a_value_outside_the_domain_is_never_read(sandbox: Sandbox, value: str) -> None:  # noqa: F811
    wide = spec([("at", "datetime2(6)", False), ("t", "datetime2(6)", True)], ["at"])
    sandbox.source.create_mart(wide)
    sandbox.sql.execute(f"insert into marts.wide values ('2024-03-10', {value})")
    error = refusal(lambda: sandbox.source.read_image(wide, wide.source))
    assert error.code == "DPONE_VALUE_OUTSIDE_DOMAIN"


def test_an_image_streams_in_small_batches(sandbox: Sandbox) -> None:  # noqa: F811
    wide = spec([("at", "datetime2(6)", False), ("n", "int", False), ("v", "nvarchar(max)", True)], ["at", "n"])
    sandbox.source.create_mart(wide)
    sandbox.sql.execute(
        """insert into marts.wide select timestamp '2024-03-10' + n % 86400 * interval '1 second', n, repeat('x', 200)
           from generate_series(1, 60000) as n"""
    )
    sizes, last = [], None
    for batch in sandbox.source.read_image(wide, wide.source):
        sizes.append(batch.num_rows)
        first = (batch.column(0)[0].as_py(), batch.column(1)[0].as_py())
        assert last is None or last < first
        last = (batch.column(0)[-1].as_py(), batch.column(1)[-1].as_py())
    assert sum(sizes) == 60_000
    assert len(sizes) > 2


def test_an_engine_lost_in_the_middle_of_a_read_is_told_without_its_words(sandbox: Sandbox) -> None:  # noqa: F811
    wide = spec([("at", "datetime2(6)", False), ("n", "int", False), ("v", "nvarchar(max)", True)], ["at", "n"])
    sandbox.source.create_mart(wide)
    sandbox.sql.execute(
        """insert into marts.wide select timestamp '2024-03-10', n, repeat('x', 500)
           from generate_series(1, 100000) as n"""
    )
    reader = sandbox.source.read_image(wide, wide.source)
    assert reader.read_next_batch().num_rows < 50_000
    ended = sandbox.rows(
        "select pg_terminate_backend(pid) from pg_stat_activity where state = 'active' and query like '%%wide%%'"
        " and pid <> pg_backend_pid()"
    )
    assert ended == [(True,)]
    error = refusal(reader.read_all)
    assert error.code == "DPONE_ENGINE_UNAVAILABLE"
    assert "terminating" not in str(error)


def test_a_read_of_nothing_has_the_schema(sandbox: Sandbox) -> None:  # noqa: F811
    events = sandbox.marts["events"]
    table = sandbox.source.read_image(events, events.source).read_all()
    assert table.num_rows == 0
    assert table.column_names == [column.name for column in events.columns]


def test_a_missing_image_is_refused_without_the_engine_s_words(sandbox: Sandbox) -> None:  # noqa: F811
    events = sandbox.marts["events"]
    error = refusal(lambda: sandbox.source.image_digest(events, Relation(schema_name="marts", name="gone")))
    assert error.code == "DPONE_SOURCE_REFUSED"
    assert "42P01" in error.sentence
    assert "gone" not in error.sentence
