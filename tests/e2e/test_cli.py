"""The `dpone` command as people and machines use it, on the real engines."""

import json
import re
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from dpone_dagster import cli
from resources.runtime import Runtime
from tests.e2e.conftest import Truth

pytestmark = pytest.mark.xdist_group("flights")

DAYS = ("2013-05-01", "2013-05-02", "2013-05-03")


def dpone(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "110"})
    assert done.exit_code == code, done.output
    return done.stdout


def dpone_json(*arguments: str, code: int = 0) -> Any:
    return json.loads(dpone(*arguments, "--format", "json", code=code))


@pytest.fixture(scope="module")
def published(runtime: Runtime) -> dict[str, Any]:
    """What `dpone run` says of three days."""
    done: dict[str, Any] = dpone_json("run", "--mart", "flights", "--from", DAYS[0], "--to", DAYS[-1])
    return done


def test_run_reports_every_day_and_skips_what_is_complete(published: dict[str, Any], truth: Truth) -> None:
    rows = {d: len(truth.source_rows(d)) for d in DAYS}
    assert published["passed"]
    days = published["result"]["days"]
    assert {d["day"]: d["rows"] for d in days} == rows
    assert {d["action"] for d in days} == {"published"}
    assert [d["inserted_rows"] for d in days] == list(rows.values())
    assert set(days[0]["gates"].values()) == {"passed"}
    assert set(days[0]["dbt_tests"].values()) == {"pass"}
    again = dpone_json("run", "--mart", "flights", "--from", DAYS[0], "--to", DAYS[-1])
    assert {d["action"] for d in again["result"]["days"]} == {"skipped"}
    text = dpone("run", "--mart", "flights", "--from", DAYS[0])
    assert re.search(rf"{DAYS[0]}\s+skipped\s+{rows[DAYS[0]]}\b", text)
    assert "0 published, 1 already complete" in text


def test_status_says_what_is_published(published: dict[str, Any], truth: Truth) -> None:
    (mart,) = dpone_json("status")["marts"]
    ((days, rows),) = truth.sql("select count(*), sum(row_count) from dpone_control.scope_head where mart = 'flights'")
    assert (mart["mart"], mart["days_complete"], mart["rows"]) == ("flights", days, rows)
    ((live, head),) = truth.generations()
    assert mart["generation_uuid"] == live == head
    assert "flights" in dpone("status")


def test_explain_tells_a_days_story(published: dict[str, Any], truth: Truth) -> None:
    story = dpone_json("explain", "flights", DAYS[1])
    assert story["published"]
    assert story["rows"] == len(truth.source_rows(DAYS[1]))
    (operation,) = story["operations"]
    assert operation["state"] == "COMPLETE"
    assert [p["name"] for p in operation["phases"]] == [
        "mutate", "observe", "seal", "stage", "gate", "shadow", "prove", "exchange", "publish", "clean",
    ]  # fmt: skip
    states = [t["to_state"] for t in operation["transitions"]]
    assert list(dict.fromkeys(states)) == ["PREPARING", "PREPARED", "COMMITTING", "TARGET_COMMITTED", "COMPLETE"]
    assert {g["gate_id"]: g["status"] for g in operation["gates"]} == {
        "row_count": "passed", "min_rows": "passed", "typed_hash": "passed", "dpone_staging_equals_source": "passed",
    }  # fmt: skip
    text = dpone("explain", "flights", DAYS[1])
    assert "PREPARING → PREPARED → COMMITTING → TARGET_COMMITTED → COMPLETE" in text
    assert "Nothing was ever published" in dpone("explain", "flights", "2013-12-30")


def test_verify_compares_all_sides_and_exits_1_when_they_differ(published: dict[str, Any], truth: Truth) -> None:
    found = dpone_json("verify", "flights", DAYS[2])
    rows = len(truth.source_rows(DAYS[2]))
    assert found["agrees"]
    assert [(s["side"], s["rows"]) for s in found["sides"]] == [
        ("sealed artifact", rows), ("SQL mart", rows), ("ClickHouse target", rows),
    ]  # fmt: skip
    assert len({s["sha256"] for s in found["sides"]} | {found["sha256"]}) == 1

    change = (
        "update marts.flights set arr_delay = coalesce(arr_delay, 0) + {} where time_hour::date = %s and flight = %s"
    )
    ((flight,),) = truth.sql(
        "select min(flight) from marts.flights where time_hour::date = %s and arr_delay is not null", DAYS[2]
    )
    with psycopg.connect(truth.engines.pg.conninfo) as connection:
        connection.execute(change.format(1), [DAYS[2], flight])
    try:
        found = dpone_json("verify", "flights", DAYS[2], code=1)
        assert [s["agrees"] for s in found["sides"]] == [True, False, True]
    finally:
        with psycopg.connect(truth.engines.pg.conninfo) as connection:
            connection.execute(change.format(-1), [DAYS[2], flight])
    assert dpone_json("verify", "flights", DAYS[2])["agrees"]
    refused = dpone_json("verify", "flights", "2013-12-30", code=1)
    assert refused["result"]["error_code"] == "DPONE_PARTITION_NOT_PUBLISHED"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("run", "--mart", "nope", "--from", "2013-05-01"), "DPONE_MART_UNKNOWN"),
        (("run", "--mart", "flights", "--from", "2013-5-1"), "DPONE_SCOPE_NOT_A_DAY"),
        (("run", "--mart", "flights", "--from", "2013-05-01T00:00"), "DPONE_SCOPE_NOT_A_DAY"),
        (("run", "--mart", "flights", "--from", "2013-02-30"), "DPONE_SCOPE_NOT_A_DAY"),
        (("run", "--mart", "flights", "--from", "2012-12-31"), "DPONE_SCOPE_BEFORE_START"),
        (("run", "--mart", "flights", "--from", "2999-01-01"), "DPONE_SCOPE_IN_FUTURE"),
        (("run", "--mart", "flights", "--from", "2013-05-02", "--to", "2013-05-01"), "DPONE_RANGE_EMPTY"),
        (("explain", "nope", "2013-05-01"), "DPONE_MART_UNKNOWN"),
        (("takeover", "flights", "2013-05-01", "--reason", "test"), "DPONE_NOT_HELD"),
        (("baseline", "create", "flights"), "DPONE_BASELINE_"),
    ],
)
def test_a_refusal_is_one_json_object_and_exit_code_1(
    published: dict[str, Any], arguments: tuple[str, ...], error: str
) -> None:
    answer = dpone_json(*arguments, code=1)
    assert answer["passed"] is False
    assert answer["result"]["status"] == "error"
    assert answer["result"]["error_code"].startswith(error)
    assert answer["result"]["message"]
    assert answer["result"]["next_step"]
