"""Governed loads on the command line: exit codes, one JSON object on stdout whatever happens, and no SQL in it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpone_dagster.cli import app
from resources.embedded.engines import Engines
from resources.embedded.home import Home
from resources.runtime import Runtime
from tests.e2e.conftest import ROOT, Truth
from tests.e2e.load_case import ORDERS, Case, expected


@pytest.fixture
def case(home: Home, engines: Engines, tmp_path: Path, pg_schema: str, ch_database: str) -> Case:
    case = Case.make(Runtime.open(home), Truth(engines), tmp_path, pg_schema, ch_database)
    case.manifest["source"]["options"] = {
        "hooks": {
            "pre_hook": [
                case.hook("second", case.call("secret-2"), depends_on=["first"]),
                case.hook("first", case.call("secret-1")),
            ]
        }
    }
    return case


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout


def told(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the one JSON object."""
    code, stdout = run(*arguments, "--format", "json")
    found = json.loads(stdout)
    assert isinstance(found, dict)
    assert "secret" not in stdout
    return code, found


def test_plan_asks_no_engine_and_shows_no_sql(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.plan()
    monkeypatch.setenv("DPONE_HOME", "/nowhere/at/all")
    code, planned = told("plan", str(case.path))
    assert code == 0
    assert planned["target"] == f"{case.database}.orders"
    assert [hook["id"] for hook in planned["hooks"]["pre_hook"]] == ["first", "second"]
    assert all(hook["sql_hash"].startswith("sha256:") for hook in planned["hooks"]["pre_hook"])
    assert [gate["id"] for gate in planned["gates"]] == ["same_rows", "same_values"]
    again = told("plan", str(case.path))[1]
    assert again["plan_sha256"] == planned["plan_sha256"]
    # What a hook's SQL says is part of what the plan is.
    case.manifest["source"]["options"]["hooks"]["pre_hook"][1]["sql"] += " -- and more"
    case.plan()
    assert told("plan", str(case.path))[1]["plan_sha256"] != planned["plan_sha256"]
    code, text = run("plan", str(case.path))
    assert code == 0
    assert "first → second" in text
    assert "secret" not in text


def test_a_load_that_passes(case: Case) -> None:
    case.plan()
    code, answer = told("run", str(case.path), "--selector", case.name)
    assert code == 0
    assert (answer["passed"], answer["manifest"], answer["selector"]) == (True, "orders.yaml", case.name)
    result = answer["result"]
    assert (result["status"], result["inserted_rows"], result["final_rows"], result["extracted_rows"]) == (
        "success",
        10,
        10,
        10,
    )
    assert result["reconciliation_metrics"]["governance_finalization"] == "pre_finalize"
    assert case.target() == expected()
    code, text = run("run", str(case.path))
    assert code == 0
    assert "gate same_values" in text
    assert "Target: changed" in text


def test_a_blocking_gate_as_the_spec_shows_it(case: Case) -> None:
    case.plan(quality={"gates": [{"id": "enough", "type": "min_rows", "side": "source", "threshold": 11}]})
    code, answer = told("run", str(case.path), "--selector", case.name)
    assert code == 1
    assert answer["passed"] is False
    assert (answer["attempts"], answer["max_attempts"], answer["retry_backoff_seconds"]) == (0, 1, 0.0)
    result = answer["result"]
    assert (result["status"], result["error_code"]) == ("error", "DPONE_QUALITY_GATES_FAILED")
    assert (result["inserted_rows"], result["updated_rows"], result["final_rows"]) == (0, 0, 0)
    assert result["errors"][0].startswith("DPONE_QUALITY_GATES_FAILED: ")
    (gate,) = result["quality_gates"]["results"]
    assert (gate["gate_id"], gate["type"], gate["status"], gate["severity"]) == (
        "enough",
        "min_rows",
        "failed",
        "error",
    )
    assert gate["metrics"]["row_count"] == 10
    assert (result["failure_boundary"], result["target_state"]) == ("pre_finalize", "unchanged")
    code, text = run("run", str(case.path))
    assert code == 1
    assert "Target: unchanged" in text
    assert "DPONE_QUALITY_GATES_FAILED" in text


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "DPONE_MANIFEST_INVALID"),
        ("kind: dpone.batch.v1\nname: x\nsorce: {}\n", "DPONE_MANIFEST_INVALID"),
        ("\x00\xff", "DPONE_MANIFEST_INVALID"),
        ("{" * 500, "DPONE_MANIFEST_INVALID"),
    ],
)
def test_a_bad_manifest_is_one_json_object(tmp_path: Path, text: str, code: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="latin-1")
    for command in ("run", "plan"):
        exit_code, answer = told(command, str(path))
        assert (exit_code, answer["passed"], answer["result"]["error_code"]) == (1, False, code)


def test_a_bad_manifest_names_file_line_and_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "kind: dpone.batch.v1\nname: x\nsource:\n  type: mssql\n  table: {schema: a, name: b}\n"
        "sink:\n  type: clickhouse\n  table: {schema: a, name: b}\n  stratgy: append\n"
    )
    _, answer = told("plan", str(path))
    message = answer["result"]["message"]
    assert "bad.yaml:9" in message
    assert "strategy" in message
    assert told("plan", str(tmp_path / "none.yaml"))[1]["result"]["error_code"] == "DPONE_MANIFEST_ABSENT"


def test_days_are_asked_for_where_they_are_loaded_and_only_there(case: Case) -> None:
    case.plan()
    assert told("run", str(case.path), "--from", "2024-03-01")[1]["result"]["error_code"] == "DPONE_SCOPE_NOT_A_DAY"
    case.manifest["source"]["read"] = {"mode": "daily", "column": "at", "start_date": "2024-03-01"}
    case.manifest["sink"]["strategy"] = "replace"
    case.plan()
    assert told("run", str(case.path))[1]["result"]["error_code"] == "DPONE_SCOPE_NOT_A_DAY"
    code, answer = told("run", str(case.path), "--from", "2024-03-01", "--to", "2024-03-03")
    assert code == 0
    assert [(d["day"], d["action"], d["rows"]) for d in answer["days"]] == [
        ("2024-03-01", "loaded", 3),
        ("2024-03-02", "loaded", 4),
        ("2024-03-03", "loaded", 3),
    ]
    assert answer["not_loaded"] == []
    assert case.target() == expected()
    # Order 9 leaves the source; days that are loaded are skipped until they are asked for again.
    case.sql(f"delete from {case.schema}.orders where id = 9")
    _, answer = told("run", str(case.path), "--from", "2024-03-02", "--to", "2024-03-03")
    assert [d["action"] for d in answer["days"]] == ["skipped", "skipped"]
    _, answer = told("run", str(case.path), "--from", "2024-03-03", "--replay")
    assert [d["rows"] for d in answer["days"]] == [2]
    assert case.target() == expected([*ORDERS[:8], ORDERS[9]])


def test_hooks_execute_plans_and_runs_one_phase_or_one_hook(case: Case, tmp_path: Path) -> None:
    case.plan()
    output = tmp_path / "runs" / "orders" / "first.json"
    code, dry = told(
        "hooks", "execute", str(case.path), "--phase", "pre_hook", "--hook-id", "first", "--dry-run",
        "--output", str(output),
    )  # fmt: skip
    assert code == 0
    assert [(h["id"], h["status"]) for h in dry["hooks"]] == [("first", "planned")]
    assert json.loads(output.read_text()) == dry
    assert case.calls() == []
    code, ran = told("hooks", "execute", str(case.path), "--phase", "pre_hook")
    assert code == 0
    assert [(h["id"], h["status"]) for h in ran["hooks"]] == [("first", "succeeded"), ("second", "succeeded")]
    assert case.calls() == ["secret-1", "secret-2"]
    code, none = told("hooks", "execute", str(case.path), "--phase", "post_hook", "--hook-id", "first")
    assert (code, none["result"]["error_code"]) == (1, "DPONE_HOOK_UNKNOWN")
    case.manifest["source"]["options"]["hooks"]["pre_hook"][1]["sql"] = "CALL secret_that_is_not_there()"
    case.plan()
    code, failed = told("hooks", "execute", str(case.path), "--phase", "pre_hook")
    assert code == 1
    assert failed["passed"] is False
    assert [(h["id"], h["status"]) for h in failed["hooks"]] == [("first", "failed"), ("second", "skipped")]


def test_a_load_without_a_guard_has_none_to_show_or_clear(case: Case) -> None:
    case.plan()
    assert told("guard", "show", str(case.path)) == (0, {"guard": None})
    code, answer = told("guard", "clear", str(case.path), "--reason", "test")
    assert (code, answer["result"]["error_code"]) == (1, "DPONE_LOAD_NOT_GUARDED")


@pytest.mark.parametrize(
    "arguments", [["run", "--format", "json"], ["run", "--no-such-option", "--format=json"], ["--format", "json", "x"]]
)
def test_even_a_wrong_command_line_answers_in_json(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dpone_dagster.cli", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert json.loads(done.stdout)["result"]["error_code"] == "DPONE_USAGE"


def test_the_python_api_says_what_the_command_says(case: Case) -> None:
    plan = case.plan()
    told("run", str(case.path))
    by_command = case.runtime.journal.loads.last_load(case.name)
    report = case.run(plan)
    by_api = case.runtime.journal.loads.load(report.load_id or "")
    assert by_command is not None
    assert by_api is not None
    volatile = {"seconds", "steps", "rows_replaced", "decisions"}  # the first load replaced nothing
    one, other = ({k: v for k, v in load.facts["report"].items() if k not in volatile} for load in (by_command, by_api))
    for summary in (one, other):
        for hook in summary["hooks"]:
            hook.pop("seconds")
        for snapshot in summary["acceptance_metrics"]:
            snapshot.pop("dataset")
    assert one == other
    assert by_command.plan_sha256 == by_api.plan_sha256 == plan.sha256


def test_a_flow_runs_in_order_and_stops_at_the_first_failure(case: Case) -> None:
    import copy

    def process(name: str, **quality: Any) -> dict[str, Any]:
        one = copy.deepcopy({k: v for k, v in case.manifest.items() if k != "kind"})
        one["name"] = f"{case.name}_{name}"
        one["source"].pop("options")
        one["sink"]["table"]["name"] = f"orders_{name}"
        one["quality"] = quality
        return one

    first, second, third = (process(name) for name in ("first", "second", "third"))
    first["depends_on"] = [second["name"]]
    first["quality"] = {"gates": [{"id": "enough", "type": "min_rows", "threshold": 11}]}
    third["depends_on"] = [first["name"]]
    case.path.parent.mkdir(exist_ok=True)
    import yaml

    flow = {"kind": "dpone.flow.v1", "name": "several", "processes": [first, second, third]}
    case.path.write_text(yaml.safe_dump(flow, sort_keys=False))
    code, planned = told("plan", str(case.path))
    assert code == 0
    assert [each["process"] for each in planned["processes"]] == [second["name"], first["name"], third["name"]]
    code, answer = told("run", str(case.path))
    assert code == 1
    assert [(each["process"], each["passed"]) for each in answer["processes"]] == [
        (second["name"], True),
        (first["name"], False),
    ]
    assert answer["not_run"] == [third["name"]]
    assert (answer["passed"], answer["result"]["error_code"]) == (False, "DPONE_QUALITY_GATES_FAILED")
    tables = f"select name from system.tables where database = '{case.database}' and name like 'orders%'"
    assert case.truth.clickhouse(tables) == [("orders_second",)]


def test_markdown_and_text_answer_on_stdout(case: Case) -> None:
    case.plan(quality={"gates": [{"id": "enough", "type": "min_rows", "threshold": 11}]})
    code, stdout = run("run", str(case.path), "--format", "markdown")
    assert code == 1
    assert f"## {case.name}: **failed**" in stdout
    assert "DPONE_QUALITY_GATES_FAILED: Blocking gates failed: enough." in stdout
    assert "| enough | min_rows | error | failed | 10 rows, at least 11 wanted |" in stdout
    assert "| target_state | unchanged |" in stdout
    assert "secret" not in stdout
    code, stdout = run("run", str(case.path.with_name("none.yaml")))
    assert code == 1
    assert "DPONE_MANIFEST_ABSENT" in stdout


def test_the_run_id_is_the_journals(case: Case) -> None:
    case.plan()
    _, answer = told("run", str(case.path))
    load = case.runtime.journal.loads.last_load(case.name)
    assert load is not None
    assert load.run_id == answer["run_id"]
    rows = case.truth.clickhouse(f"select run_id from {case.database}.__dpone__loads final")
    assert rows == [(answer["run_id"],)]


def test_what_a_plan_refuses_is_told_with_file_and_line(case: Case) -> None:
    hooks = case.manifest["source"]["options"]["hooks"]["pre_hook"]
    for change, code, said in (
        ({"type": "sqll"}, "DPONE_PROVIDER_UNKNOWN", "Did you mean sql?"),
        ({"depends_on": ["frist"]}, "DPONE_HOOK_GRAPH", "Did you mean first?"),
        ({"mutates_source": False}, "DPONE_HOOK_MUTATES", "pre_hook.second"),
    ):
        before = dict(hooks[0])
        hooks[0].update(change)
        case.plan_file()
        _, answer = told("plan", str(case.path))
        result = answer["result"]
        assert result["error_code"] == code
        assert said in result["message"]
        assert result["message"].startswith("manifests/orders.yaml:")
        written = case.path.read_text().splitlines()[result["details"]["line"] - 1]
        assert "pre_hook:" in written or "id: second" in written
        hooks[0].clear()
        hooks[0].update(before)


def test_an_answer_that_cannot_be_kept_stops_before_anything_runs(case: Case) -> None:
    case.plan()
    blocked = case.folder / "file"
    blocked.write_text("")
    code, answer = told("hooks", "execute", str(case.path), "--phase", "pre_hook", "--output", str(blocked / "x.json"))
    assert (code, answer["result"]["error_code"]) == (1, "DPONE_OUTPUT_UNWRITABLE")
    assert case.calls() == []
