"""Real processes killed at every boundary of a governed load; the outcome is read by plain SQL only.

The strategy is append over a watermark: a row that was loaded twice, or lost, would show.
"""

import json
import signal
from pathlib import Path

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
