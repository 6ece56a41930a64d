"""Through the webserver's own API with the daemon running, and through a browser."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from resources.embedded.engines import status
from resources.runtime import Runtime
from tests.dagster.support import LOCATION, ROOT, Server, give_back, serving, until, withdraw
from tests.e2e.conftest import Truth

pytestmark = pytest.mark.timeout(600)  # runs start one after the other, each in a process of its own

SHOTS = ROOT / "build" / "screenshots"
FAILS = "2013-07-02"


@pytest.fixture(scope="module")
def backfilled(server: Server, runtime: Runtime) -> dict[str, str]:
    """Three days in a backfill, the second of them without source rows: day -> its run."""
    withdraw(runtime.engines.pg.conninfo, FAILS)
    backfill = server.backfill(["2013-07-01", FAILS, "2013-07-03"])
    until("the backfill", lambda: server.backfill_status(backfill) not in ("REQUESTED", "FAILING"), seconds=280)
    assert server.backfill_status(backfill) == "COMPLETED_FAILED"
    return server.runs_of(backfill)


def test_a_backfill_publishes_each_day_on_its_own(server: Server, truth: Truth, backfilled: dict[str, str]) -> None:
    assert sorted(backfilled) == ["2013-07-01", FAILS, "2013-07-03"]
    materialized, failed = server.partitions()
    assert {"2013-07-01", "2013-07-03"} <= materialized
    assert FAILS in failed
    assert FAILS not in materialized
    for day in ("2013-07-01", "2013-07-03"):
        truth.assert_published(day)
    assert truth.target_rows(FAILS) == []
    assert truth.states(FAILS) == ["FAILED_PRE_COMMIT"]
    run = server.run(backfilled[FAILS])
    assert run["status"] == "FAILURE"
    ((operation,),) = truth.sql(
        "select operation_id from dpone_control.operation where scope_start = %s::timestamp", FAILS
    )
    assert run["tags"]["dpone/operation_id"] == operation
    # The check's history is one a day: red for one, green for its neighbours.
    assert server.check_states("min_rows", ["2013-07-01", FAILS, "2013-07-03"]) == ["SUCCEEDED", "FAILED", "SUCCEEDED"]
    assert server.check_states("row_count", ["2013-07-01", FAILS, "2013-07-03"]) == ["SUCCEEDED"] * 3


def test_a_browser_sees_partitions_and_checks(server: Server, backfilled: dict[str, str]) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    from playwright.sync_api import sync_playwright

    SHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=[
                "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
                "--disable-sync", "--no-first-run",
            ],
        )  # fmt: skip
        try:
            page = browser.new_page(viewport={"width": 1500, "height": 1000})

            def see(address: str, shot: str, *texts: str) -> None:
                page.goto(server.url + address)
                for text in texts:
                    page.get_by_text(text).first.wait_for(timeout=60_000)
                page.screenshot(path=SHOTS / f"{shot}.png")

            see(
                "/assets/flights",
                "overview",
                "Scheduled departures from New York",
                "datetime2(6) → DateTime64(6,'UTC')",
            )
            see(
                "/assets/flights?view=partitions&partition=2013-07-01",
                "partition",
                "Failed (1)",
                "published in marts.flights as generation",
                "dagster/partition_row_count",
                "exchange",
            )
            see(
                f"/assets/flights?view=partitions&partition={FAILS}",
                "failed-partition",
                "did not materialize this asset",
            )
            see(
                "/assets/flights?view=checks&checkDetail=min_rows", "check", "blocking", "Rows of the day in ClickHouse"
            )
            see(f"/runs/{backfilled[FAILS]}", "failed-run", "Blocking gates failed: flights.min_rows.")
            see("/asset-groups", "lineage", "daily_carrier_delays", "airports", "366 partitions")
        finally:
            browser.close()
    assert all((SHOTS / f"{name}.png").stat().st_size > 20_000 for name in ("overview", "partition", "check"))


def test_a_reexecuted_run_is_the_next_try_and_restores_the_day(
    server: Server, runtime: Runtime, truth: Truth, backfilled: dict[str, str]
) -> None:
    give_back(runtime.engines.pg.conninfo, FAILS)

    run = server.ended(server.reexecute(backfilled[FAILS]))

    assert run["status"] == "SUCCESS", run["messages"]
    truth.assert_published(FAILS)
    executions = truth.sql(
        """select workflow_execution_id from dpone_control.operation
           where scope_start = %s::timestamp order by admitted_at""",
        FAILS,
    )
    root = backfilled[FAILS]
    tries = [execution.split(":")[:4] for (execution,) in executions]
    assert tries == [[root, "flights_daily", FAILS, "1"], [root, "flights_daily", FAILS, "2"]]


def test_a_termination_during_dbt_ends_its_sql_and_the_run(server: Server, runtime: Runtime, truth: Truth) -> None:
    day = "2013-07-04"
    # The strategy waits behind this lock, inside dbt, for as long as it is held.
    with psycopg.connect(runtime.engines.pg.conninfo) as blocker:
        blocker.execute("lock table marts.flights in share row exclusive mode")
        run = server.launch(day)
        until("dbt to wait for the lock", lambda: waiting(runtime))
        server.terminate(run)
        ended = server.ended(run)
        # Ended while the lock is still held: nothing of the run waits in PostgreSQL any more.
        assert ended["status"] == "CANCELED", ended["messages"]
        assert waiting(runtime) == []
    assert truth.states(day) == ["FAILED_PRE_COMMIT"]
    assert failure_code(truth, day) == "DPONE_CANCELLED"
    assert (truth.mart_rows(day), truth.target_rows(day)) == ([], [])

    assert server.ended(server.launch(day))["status"] == "SUCCESS"
    truth.assert_published(day)


def test_a_termination_during_staging_stops_before_a_reader_sees_anything(
    server: Server, runtime: Runtime, truth: Truth
) -> None:
    day = "2013-07-05"
    (engine,) = (e for e in status(runtime.home) if e.name == "clickhouse")
    assert engine.pid
    stopped = False
    try:
        # dbt waits; meanwhile ClickHouse is stopped, so that the run comes to a halt where staging needs it.
        with psycopg.connect(runtime.engines.pg.conninfo) as blocker:
            blocker.execute("lock table marts.flights in share row exclusive mode")
            run = server.launch(day)
            until("dbt to wait for the lock", lambda: waiting(runtime))
            os.kill(engine.pid, signal.SIGSTOP)
            stopped = True
        until("staging", lambda: "flights: stage" in server.run(run)["messages"])
        server.terminate(run)
    finally:
        if stopped:
            os.kill(engine.pid, signal.SIGCONT)
    ended = server.ended(run)
    assert ended["status"] == "CANCELED", ended["messages"]
    assert truth.states(day) == ["FAILED_PRE_COMMIT"]
    assert failure_code(truth, day) == "DPONE_CANCELLED"
    assert truth.scratch() == []
    assert truth.target_rows(day) == []
    assert len(truth.mart_rows(day)) == len(truth.source_rows(day))  # the SQL day was committed; it is restored next

    assert server.ended(server.launch(day))["status"] == "SUCCESS"
    truth.assert_published(day)
    assert [mode for (mode,) in truth.sql(
        "select mode from dpone_control.operation where scope_start = %s::timestamp order by admitted_at", day
    )] == ["normal", "failed_precommit_replacement"]  # fmt: skip


def test_a_killed_run_is_tried_once_more_and_publishes(server: Server, runtime: Runtime, truth: Truth) -> None:
    day = "2013-07-06"
    with psycopg.connect(runtime.engines.pg.conninfo) as blocker:
        blocker.execute("lock table marts.flights in share row exclusive mode")
        run = server.launch(day)
        until("dbt to wait for the lock", lambda: waiting(runtime))
        os.kill(server.process_of(run), signal.SIGKILL)
    assert server.ended(run)["status"] == "FAILURE"
    retry = until("the retry", lambda: server.retry_of(run))
    assert server.ended(retry)["status"] == "SUCCESS"
    assert truth.states(day) == ["FAILED_PRE_COMMIT", "COMPLETE"]
    truth.assert_published(day)


def waiting(runtime: Runtime) -> list[tuple[Any, ...]]:
    with psycopg.connect(runtime.engines.pg.conninfo) as connection:
        return connection.execute(
            """select application_name from pg_stat_activity
               where application_name like 'dpone-%' and wait_event_type = 'Lock'"""
        ).fetchall()


def failure_code(truth: Truth, day: str) -> str:
    ((code,),) = truth.sql(
        "select facts::json->>'failure_code' from dpone_control.operation where scope_start = %s::timestamp", day
    )
    return str(code)


def test_dg_dev_serves_the_same_assets(environment: dict[str, str], tmp_path: Path) -> None:
    home = tmp_path / "dagster"
    home.mkdir()
    shutil.copy(ROOT / "dagster.yaml", home)
    with serving(("dg", "dev"), {**environment, "DAGSTER_HOME": str(home)}, tmp_path / "dg-dev.log") as own:
        found = own.graphql("{ assetNodes { assetKey { path } repository { location { name } } } }")["assetNodes"]
    assert {node["repository"]["location"]["name"] for node in found} == {LOCATION}
    assert ["flights"] in [node["assetKey"]["path"] for node in found]
