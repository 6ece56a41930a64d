"""A workflow of two marts: the barrier, half-done workflows, bad input and strangers, all on the real engines."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from dbt_support import LOOSE, pair_project  # noqa: F401

from dpone_dagster.contracts.mart import Scope
from dpone_dagster.contracts.policy import Policy
from dpone_dagster.errors import DponeError
from dpone_dagster.publication.attempt import PublicationFailed
from resources.clickhouse.client import connect
from resources.embedded.engines import Engines
from resources.embedded.home import Home
from resources.embedded.postgres import PostgresEndpoint
from resources.runtime import Runtime
from tests.e2e.conftest import ROOT, identity

pytestmark = pytest.mark.xdist_group("pair")

DAY = "2024-03-10"


class Pair:
    """The two marts with their own database, and plain SQL on both engines."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.sql = psycopg.connect(runtime.engines.pg.conninfo, autocommit=True)
        self.clickhouse = connect(runtime.engines.clickhouse)

    def event(self, device: int, *, day: str = DAY, reading: str = "1.500", site: int | None = 7) -> None:
        self.sql.execute(
            """insert into loose.events values (%s, %s, %s, %s, %s, 'ok', 'ab', '2024-03-10', true, null, 5,
                                                '00000000-0000-0000-0000-0000000000aa')""",
            [f"{day} 12:00", f"{day} 12:00", device, site, reading],
        )

    def total(self, device: int, total: int, *, day: str = DAY) -> None:
        self.sql.execute("insert into loose.hours values (%s, %s, %s)", [f"{day} 12:00", device, total])

    def publish(self, day: str = DAY, *, replay: bool = False) -> dict[str, Any]:
        return self.runtime.publish("events", Scope.day(day), identity=identity(), replay=replay)

    def fail(self, day: str = DAY, *, replay: bool = False) -> DponeError:
        with pytest.raises(DponeError) as caught:
            self.publish(day, replay=replay)
        return caught.value

    def crash(self, project: Path, fault: str, day: str = DAY) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "tests.e2e.pair_worker", self.runtime.engines.pg.database, str(project), day],
            cwd=ROOT,
            env={**os.environ, "DPONE_FAULT": fault},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr

    def target(self, table: str = "events") -> list[tuple[Any, ...]]:
        columns = "device, reading" if table == "events" else "device, total"
        rows = self.clickhouse.query(f"select {columns} from marts.{table} order by 1, 2").result_rows
        return [(device, str(value)) for device, value in rows]

    def mart(self, table: str = "events") -> list[tuple[Any, ...]]:
        columns = "device, reading::text" if table == "events" else "device, total::text"
        return self.sql.execute(f"select {columns} from marts.{table} order by 1, 2").fetchall()

    def operations(self, mart: str = "events") -> list[tuple[Any, ...]]:
        return self.sql.execute(
            "select state, mode, revision, replacement_ordinal from dpone_control.operation where mart = %s"
            " order by admitted_epoch",
            [mart],
        ).fetchall()

    def scratch(self) -> list[Any]:
        query = "select name from system.tables where database = 'marts' and match(name, '^(events|totals)__dpone_s')"
        return list(self.clickhouse.query(query).result_rows)

    def uuid(self, table: str = "events") -> str:
        ((found,),) = self.clickhouse.query(
            f"select toString(uuid) from system.tables where database = 'marts' and name = '{table}'"
        ).result_rows
        return str(found)


@pytest.fixture
def pair(
    home: Home,
    engines: Engines,
    fresh_db: PostgresEndpoint,
    pair_project: Path,  # noqa: F811
) -> Iterator[Pair]:
    runtime = Runtime(home=home, engines=replace(engines, pg=fresh_db), project=pair_project)
    made = Pair(runtime)
    _drop(made)
    made.sql.execute(LOOSE)
    runtime.migrate()
    for mart in ("events", "totals"):
        runtime.create_baseline(mart, identity=identity())
    yield made
    _drop(made)
    made.sql.close()
    made.clickhouse.close()
    runtime.journal.close()


def _drop(pair: Pair) -> None:
    query = "select name from system.tables where database = 'marts' and match(name, '^(events|totals)(__|$)')"
    for (name,) in pair.clickhouse.query(query).result_rows:
        pair.clickhouse.command(f"drop table marts.`{name}` sync")


# ------------------------------------------------------------------------------------------ the plain path


def test_both_marts_are_published_and_a_replay_updates_and_keeps(pair: Pair) -> None:
    pair.event(1)
    pair.event(2, reading="2.250")
    pair.total(1, 10)
    results = pair.publish()
    assert {name: r.action for name, r in results.items()} == {"events": "published", "totals": "published"}
    assert pair.target() == pair.mart() == [(1, "1.500"), (2, "2.250")]
    assert pair.target("totals") == pair.mart("totals") == [(1, "10")]

    assert {r.action for r in pair.publish().values()} == {"skipped"}
    # The source loses one row, changes one and gains one: a mart updates and inserts, and never deletes.
    pair.sql.execute("delete from loose.events")
    pair.event(2, reading="9.000")
    pair.event(3)
    pair.publish(replay=True)
    assert pair.target() == pair.mart() == [(1, "1.500"), (2, "9.000"), (3, "1.500")]
    assert pair.operations() == [
        ("COMPLETE", "normal", 1, 0),
        ("COMPLETE", "complete_scope_replay", 2, 0),
    ]
    assert pair.scratch() == []


def test_days_do_not_touch_each_other_and_two_predecessors_are_kept(pair: Pair) -> None:
    for n in range(1, 6):
        pair.event(n, day=f"2024-03-{n:02d}")
        pair.publish(f"2024-03-{n:02d}")
    assert [device for device, _ in pair.target()] == [1, 2, 3, 4, 5]
    kept = pair.clickhouse.query(
        "select count() from system.tables where database = 'marts' and startsWith(name, 'events__dpone_prev__')"
    ).result_rows
    assert kept == [(2,)]


def test_an_empty_day_is_complete_without_an_exchange_and_refuses_strangers(pair: Pair) -> None:
    pair.event(1)
    before = pair.uuid()
    pair.publish("2024-03-09")
    assert pair.uuid() == before
    assert pair.operations() == [("COMPLETE", "normal", 1, 0)]
    heads = pair.sql.execute("select mart, row_count from dpone_control.scope_head order by 1").fetchall()
    assert heads == [("events", 0), ("totals", 0)]

    pair.clickhouse.command(
        "insert into marts.events (event_at, device, flag) values ('2024-03-08 01:00:00', 77, true)"
    )
    error = pair.fail("2024-03-08")
    assert error.code == "DPONE_TARGET_DIVERGED"
    assert pair.uuid() == before


# ---------------------------------------------------------------------------- one mart fails, or the run dies


def test_one_failing_mart_stops_the_workflow_before_clickhouse_and_the_next_run_restores(pair: Pair) -> None:
    pair.event(1)
    pair.total(1, 10)
    pair.total(1, 11)  # the same key twice
    error = pair.fail()
    assert isinstance(error, PublicationFailed)
    assert error.code == "DPONE_KEY_DUPLICATE"
    assert error.target_untouched
    assert pair.target() == pair.target("totals") == []
    assert pair.operations() == [("FAILED_PRE_COMMIT", "normal", 1, 0)]
    assert pair.mart() == [(1, "1.500")]  # this mart's SQL day is committed, and kept with its before image

    pair.sql.execute("delete from loose.hours where total = 11")
    pair.sql.execute("update loose.events set device = 5")  # without a restore, device 1 would stay as well
    pair.publish()
    assert pair.target() == pair.mart() == [(5, "1.500")]
    assert pair.target("totals") == [(1, "10")]
    assert pair.operations() == [
        ("FAILED_PRE_COMMIT", "normal", 1, 0),
        ("COMPLETE", "failed_precommit_replacement", 1, 1),
    ]
    images = pair.sql.execute("select count(*) from pg_tables where schemaname = 'dpone_images'").fetchall()
    assert images == [(0,)]


def test_a_run_killed_between_two_marts_is_finished_forward(pair: Pair, pair_project: Path) -> None:  # noqa: F811
    pair.event(1)
    pair.total(1, 10)
    pair.crash(pair_project, "publish.after:kill")
    assert [o[0] for o in pair.operations("events")] == ["COMPLETE"]
    assert [o[0] for o in pair.operations("totals")] == ["PREPARED"]
    assert pair.target() == [(1, "1.500")]
    assert pair.target("totals") == []
    # A direct reader may see one mart ahead of the other; the next run, of any day, brings it up.
    pair.event(9, day="2024-03-11")
    pair.publish("2024-03-11")
    assert pair.target("totals") == [(1, "10")]
    assert [o[0] for o in pair.operations("totals")] == ["COMPLETE", "COMPLETE"]
    assert pair.scratch() == []


def test_a_half_done_workflow_whose_rest_no_longer_holds_stays_recoverable(
    pair: Pair,
    pair_project: Path,  # noqa: F811
) -> None:
    pair.event(1)
    pair.total(1, 10)
    pair.crash(pair_project, "publish.after:kill")
    # Somebody writes into the second mart's day before it is finished: the old proof no longer holds.
    pair.clickhouse.command("insert into marts.totals values ('2024-03-10 20:00:00', 66, 1)")
    error = pair.fail()
    assert error.code == "DPONE_TARGET_DIVERGED"
    assert [o[0] for o in pair.operations("events")] == ["COMPLETE", "FAILED_PRE_COMMIT"]
    pair.clickhouse.command("delete from marts.totals where device = 66")
    pair.publish()
    assert pair.target() == [(1, "1.500")]
    assert pair.target("totals") == [(1, "10")]
    assert [o[0] for o in pair.operations("totals")][-1] == "COMPLETE"
    assert pair.scratch() == []


# ------------------------------------------------------------------------------------------------ refusals


def test_strangers_rows_in_the_scope_stop_before_the_exchange(pair: Pair) -> None:
    pair.event(1)
    pair.publish()
    before = pair.uuid()
    pair.clickhouse.command(
        "insert into marts.events (event_at, device, flag) values ('2024-03-10 13:00:00', 99, true)"
    )
    error = pair.fail(replay=True)
    assert error.code == "DPONE_TARGET_DIVERGED"
    assert pair.uuid() == before
    assert pair.scratch() == []


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        ("drop table marts.events", "DPONE_TARGET_ABSENT"),
        ("rename table marts.events to marts.events__other", "DPONE_TARGET_ABSENT"),
        ("exchange tables marts.events and marts.events__other", "DPONE_TARGET_REPLACED"),
        ("alter table marts.events modify ttl toDateTime(event_at) + interval 1 day", "DPONE_TARGET_TTL"),
        ("alter table marts.events drop column huge", "DPONE_TARGET_COLUMNS"),
    ],
)
def test_a_spoiled_target_refuses_before_anything_is_admitted(pair: Pair, spoil: str, code: str) -> None:
    pair.event(1)
    if "exchange" in spoil:
        pair.clickhouse.command("create table marts.events__other as marts.events")
    pair.clickhouse.command(spoil)
    assert pair.fail().code == code
    assert pair.operations() == []
    assert pair.mart() == []


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        ("drop table marts.events", "DPONE_MART_ABSENT"),
        ("alter table marts.events rename to old; create view marts.events as select * from marts.old",
         "DPONE_MART_NOT_A_TABLE"),
        ("alter table marts.events alter column reading type numeric(14, 3)", "DPONE_CONTRACT_DRIFT"),
        ("alter table marts.events add column extra int", "DPONE_CONTRACT_DRIFT"),
    ],
)  # fmt: skip
def test_a_spoiled_mart_refuses_before_anything_is_admitted(pair: Pair, spoil: str, code: str) -> None:
    pair.event(1)
    pair.sql.execute(spoil)
    assert pair.fail().code == code
    assert pair.operations() == []
    assert pair.target() == []


def test_a_failing_dbt_test_leaves_the_sql_day_restorable(pair: Pair) -> None:
    pair.event(1, site=None)  # the model has a not_null test on site
    error = pair.fail()
    assert error.code == "DPONE_DBT_TEST_FAILED"
    assert isinstance(error, PublicationFailed)
    assert [t.status for t in error.tests] == ["fail"]
    assert pair.mart() == [(1, "1.500")]
    assert pair.target() == []
    pair.sql.execute("update loose.events set site = 7, device = 2")
    pair.publish()
    assert pair.target() == pair.mart() == [(2, "1.500")]


def test_without_a_baseline_nothing_is_published(pair: Pair) -> None:
    pair.sql.execute("delete from dpone_control.baseline where mart = 'totals'")
    assert pair.fail().code == "DPONE_BASELINE_MISSING"
    assert pair.operations() == []


def test_a_pair_that_disagrees_is_not_adopted(pair: Pair) -> None:
    pair.sql.execute("delete from dpone_control.baseline; delete from dpone_control.generation_head")
    pair.sql.execute("insert into marts.totals values ('2024-03-10 12:00', 1, 1)")
    with pytest.raises(DponeError) as caught:
        pair.runtime.adopt_baseline("totals", identity=identity())
    assert caught.value.code == "DPONE_BASELINE_DISAGREES"
    pair.clickhouse.command("insert into marts.totals values ('2024-03-10 12:00:00', 1, 1)")
    pair.sql.execute("delete from dpone_control.generation")
    facts = pair.runtime.adopt_baseline("totals", identity=identity())
    assert facts["target_uuid"] == pair.uuid("totals")


def test_no_room_for_the_artifact_fails_before_clickhouse_and_is_recoverable(pair: Pair) -> None:
    pair.event(1)
    runtime = pair.runtime
    tight = Runtime(
        home=runtime.home,
        engines=runtime.engines,
        project=runtime.project,
        policy=Policy(artifact_free_bytes=2**60),
    )
    with pytest.raises(DponeError) as caught:
        tight.publish("events", Scope.day(DAY), identity=identity(), replay=False)
    assert caught.value.code == "DPONE_ARTIFACT_NO_SPACE"
    tight.journal.close()
    assert pair.target() == []
    pair.publish()
    assert pair.target() == [(1, "1.500")]


def test_a_changed_artifact_is_seen_by_verify(pair: Pair) -> None:
    pair.event(1)
    pair.publish()
    found = pair.runtime.verify("events", Scope.day(DAY))
    assert found["agrees"]
    assert [s["rows"] for s in found["sides"]] == [1, 1, 1]
    (chunk,) = [p for p in pair.runtime.home.artifacts.rglob("part-0001.parquet") if _of(pair, p)]
    os.chmod(chunk, 0o600)
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    found = pair.runtime.verify("events", Scope.day(DAY))
    assert not found["agrees"]
    assert [s["agrees"] for s in found["sides"]] == [False, True, True]
    assert found["sides"][0]["error_code"] == "DPONE_ARTIFACT_CORRUPT"


def _of(pair: Pair, path: Path) -> bool:
    ((operation_id,),) = pair.sql.execute(
        "select operation_id from dpone_control.operation where mart = 'events'"
    ).fetchall()
    return operation_id[7:23] in str(path)


@pytest.mark.parametrize(
    ("day", "code"),
    [("2023-12-31", "DPONE_SCOPE_BEFORE_START"), ("2999-01-01", "DPONE_SCOPE_IN_FUTURE")],
)
def test_days_outside_the_marts_time_refuse(pair: Pair, day: str, code: str) -> None:
    assert pair.fail(day).code == code
