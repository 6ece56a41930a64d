"""What people type, in processes of their own, with Dagster's own storage."""

from resources.runtime import Runtime
from tests.dagster.support import give_back, tool, withdraw
from tests.e2e.conftest import Truth


def test_dagster_asset_materialize_fails_with_the_reason_and_succeeds_after_the_repair(
    runtime: Runtime, truth: Truth, environment: dict[str, str]
) -> None:
    day = "2013-06-01"
    command = ("asset", "materialize", "--select", "flights", "--partition", day, "-m", "dpone_dagster.definitions")
    withdraw(runtime.engines.pg.conninfo, day)
    before = truth.generations()

    failed = tool("dagster", *command, environment=environment)

    assert failed.returncode == 1
    assert "DPONE_QUALITY_GATES_FAILED: Blocking gates failed: flights.min_rows." in failed.stderr
    assert "Target: marts.flights unchanged; readers see what they saw before." in failed.stderr
    assert "Asset check 'min_rows' on 'flights' did not pass" in failed.stderr
    assert "Materialized value" not in failed.stderr
    assert (truth.generations(), truth.target_rows(day), truth.scratch()) == (before, [], [])

    give_back(runtime.engines.pg.conninfo, day)

    repaired = tool("dagster", *command, environment=environment)

    assert repaired.returncode == 0, repaired.stderr
    truth.assert_published(day)


def test_dg_launch_publishes_a_day(truth: Truth, environment: dict[str, str]) -> None:
    day = "2013-06-02"
    launched = tool("dg", "launch", "--assets", "flights", "--partition", day, environment=environment)
    assert launched.returncode == 0, launched.stdout + launched.stderr
    truth.assert_published(day)


def test_a_range_in_one_run_refuses(truth: Truth, environment: dict[str, str]) -> None:
    launched = tool(
        "dg", "launch", "--assets", "flights", "--partition-range", "2013-06-03...2013-06-04", environment=environment
    )
    assert launched.returncode != 0
    assert truth.states("2013-06-03") == truth.states("2013-06-04") == []
