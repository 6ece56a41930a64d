"""Real processes killed at every boundary of a governed load; the outcome is read by plain SQL only.

The strategy is append over a watermark: a row that was loaded twice, or lost, would show.
"""

import json
import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from dpone_dagster.faults import BOUNDARIES
from resources.embedded.engines import Engines
from resources.embedded.home import Home
from resources.runtime import Runtime
from tests.e2e.conftest import Truth, dpone
from tests.e2e.load_case import ORDERS, Case, expected

# Boundary -> (guard that is left, what clearing it proves, what the next run does).
KILLED: dict[str, tuple[str | None, str | None, str]] = {
    "load.admitted": (None, None, "loaded"),
    "load.pre_hooks": (None, None, "loaded"),
    "stage.in_load": (None, None, "loaded"),
    "load.staged": (None, None, "loaded"),
    "load.gated": (None, None, "loaded"),
    "load.prepared": (None, None, "loaded"),
    "load.before_finalize": ("armed", "not-committed", "loaded"),
    "load.after_finalize": ("armed", "committed", "finished"),
    "load.committed": ("checkpoint_incomplete", "committed", "finished"),
    "load.cleaned": ("checkpoint_incomplete", "committed", "finished"),
    "load.before_checkpoint": ("checkpoint_incomplete", "committed", "finished"),
    "load.after_checkpoint": (None, None, "hooks_finished"),
}


def test_every_boundary_of_a_load_is_here() -> None:
    assert {name for name in BOUNDARIES if name.startswith("load.")} <= set(KILLED)


@pytest.fixture
def case(home: Home, engines: Engines, tmp_path: Path, pg_schema: str, ch_database: str) -> Case:
    case = Case.make(Runtime.open(home), Truth(engines), tmp_path, pg_schema, ch_database)
    case.manifest["source"]["read"] = {"mode": "watermark", "column": "id"}
    case.manifest["sink"]["strategy"] = "append"
    case.manifest["source"]["options"] = {"hooks": {"post_hook": [case.hook("told", case.call("post"))]}}
    case.manifest["quality"]["acceptance"] = {"enabled": True, "mode": "required"}
    case.sql(f"delete from {case.schema}.orders where id > 6")
    case.run()
    for order in ORDERS[6:]:
        case.sql(f"insert into {case.schema}.orders values (%s, %s, %s, %s)", *order)
    return case


@pytest.mark.parametrize("boundary", KILLED)
def test_a_killed_load_is_settled_without_losing_or_doubling_a_row(case: Case, boundary: str) -> None:
    guard, proven, action = KILLED[boundary]
    case.plan()  # writes the file
    killed = dpone("run", str(case.path), fault=f"{boundary}:kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # A reader sees the whole load or none of it, whatever line the process died at.
    assert len(case.target()) in (6, 10)
    assert case.guard() == guard
    if guard is not None:
        refused = dpone("run", str(case.path), "--format", "json")
        assert refused.returncode == 1
        assert json.loads(refused.stdout)["result"]["error_code"] == "DPONE_LOAD_GUARDED"
        shown = json.loads(dpone("guard", "show", str(case.path), "--format", "json").stdout)["guard"]
        assert (shown["status"], shown["proven"]) == (guard, proven)
        cleared = dpone("guard", "clear", str(case.path), "--reason", "looked at it", "--format", "json")
        assert cleared.returncode == 0, cleared.stdout
    finished = dpone("run", str(case.path), "--format", "json")
    assert finished.returncode == 0, finished.stdout
    assert json.loads(finished.stdout)["result"]["action"] == action
    assert case.target() == expected()
    assert case.checkpoint() == "10"
    assert (case.guard(), case.scratch()) == (None, [])
    assert set(case.journal()) <= {"COMPLETE", "FAILED_PRE_COMMIT"}
    assert case.journal()[-1] == "COMPLETE"
    assert case.calls() == ["post", "post"]


@pytest.mark.parametrize("boundary", ["load.staged", "load.before_finalize"])
def test_a_stopped_load_is_overtaken_and_its_late_exchange_finds_no_table(case: Case, boundary: str) -> None:
    case.plan()
    stopped = dpone("run", str(case.path), "--format", "json", fault=f"{boundary}:stop", wait=False)
    try:
        process = psutil.Process(stopped.pid)
        deadline = time.monotonic() + 120
        while process.status() != psutil.STATUS_STOPPED:
            assert stopped.poll() is None, stopped.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        refused = json.loads(dpone("run", str(case.path), "--format", "json").stdout)["result"]
        assert refused["error_code"] == "DPONE_OPERATION_HELD"
        assert refused["details"]["pid"] == stopped.pid
        today = datetime.now(UTC).date().isoformat()
        taken = dpone("takeover", case.name, today, "--reason", "test", "--format", "json")
        assert taken.returncode == 0, taken.stdout
        if boundary == "load.before_finalize":
            assert case.guard() == "armed"
            cleared = dpone("guard", "clear", str(case.path), "--reason", "it is stopped", "--format", "json")
            assert cleared.returncode == 0, cleared.stdout
        finished = dpone("run", str(case.path), "--format", "json")
        assert finished.returncode == 0, finished.stdout
        assert case.target() == expected()
        uuid = case.target_uuid()

        os.kill(stopped.pid, signal.SIGCONT)
        out, err = stopped.communicate(timeout=120)
        assert stopped.returncode == 1, (out, err)
        assert json.loads(out)["result"]["error_code"] in (
            "DPONE_LEASE_LOST",
            "DPONE_FENCED",
            "DPONE_TARGET_OUTCOME_UNKNOWN",
        )
        assert (case.target(), case.target_uuid()) == (expected(), uuid)
        assert (case.guard(), case.scratch(), case.checkpoint()) == (None, [], "10")
        assert case.journal()[-1] == "COMPLETE"
    finally:
        if stopped.poll() is None:
            stopped.kill()


def test_status_says_what_is_loaded_and_what_is_guarded(case: Case) -> None:
    case.plan()
    dpone("run", str(case.path), fault="load.before_finalize:kill")
    loads = json.loads(dpone("status", "--format", "json").stdout)["loads"]
    (mine,) = (load for load in loads if load["process"] == case.name)
    assert (mine["state"], mine["guard"], mine["watermark"]) == ("COMMITTING", "armed", "6")
