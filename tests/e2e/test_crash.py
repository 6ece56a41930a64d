"""Real processes killed, stopped and overtaken at boundaries; the outcome is read by plain SQL only."""

import json
import os
import signal
import time
from itertools import count

import psutil
import pytest

from dpone_dagster.contracts.mart import Scope
from resources.runtime import Runtime
from tests.e2e.conftest import Truth, dpone, identity

pytestmark = pytest.mark.xdist_group("flights")

_DAYS = count(1)


@pytest.fixture
def day(runtime: Runtime) -> str:
    """A day of March of this test's own."""
    return f"2013-03-{next(_DAYS):02d}"


# Boundary -> (what the next run of the same day does, revision that the day ends with).
KILLED = {
    "admit.after": "published",
    "mutate.before": "published",
    "mutate.before_commit": "published",
    "mutate.after_commit": "published",
    "mutate.after": "published",
    "seal.before_chunk": "published",
    "seal.before_manifest": "published",
    "stage.in_load": "published",
    "gate.after": "published",
    "shadow.after_attach": "published",
    "prove.after": "published",
    "prepared.after": "published",
    "exchange.before": "finished",
    "exchange.after": "finished",
    "target_committed.after": "finished",
    "publish.before": "finished",
    "publish.after": "published",
    "clean.after": "published",
}


@pytest.mark.parametrize("boundary", KILLED)
def test_a_killed_run_is_settled_by_the_next(runtime: Runtime, truth: Truth, day: str, boundary: str) -> None:
    expected = truth.source_rows(day)
    assert len(expected) > 500
    killed = dpone("run", "--mart", "flights", "--from", day, fault=f"{boundary}:kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # A reader sees the whole day or none of it, whatever line the process died at.
    assert len(truth.target_rows(day)) in (0, len(expected))
    results = runtime.publish("flights", Scope.day(day), identity=identity(), replay=True)
    assert results["flights"].action == KILLED[boundary]
    truth.assert_published(day)
    ((live, head),) = truth.generations()
    assert live == head
    assert truth.scratch() == []
    assert truth.sql(
        "select count(*) from dpone_control.operation where state not in ('COMPLETE','FAILED_PRE_COMMIT')"
    ) == [(0,)]
    assert truth.sql("select count(*) from pg_tables where schemaname = 'dpone_images'") == [(0,)]


def test_a_stopped_worker_is_overtaken_and_its_late_exchange_finds_no_table(
    runtime: Runtime, truth: Truth, day: str
) -> None:
    stopped = dpone("run", "--mart", "flights", "--from", day, fault="exchange.before:stop", wait=False)
    try:
        process = psutil.Process(stopped.pid)
        deadline = time.monotonic() + 120
        while process.status() != psutil.STATUS_STOPPED:
            assert stopped.poll() is None, stopped.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        refused = dpone("run", "--mart", "flights", "--from", day, "--format", "json")
        assert refused.returncode == 1
        result = json.loads(refused.stdout)["result"]
        assert result["error_code"] == "DPONE_OPERATION_HELD"
        assert result["details"]["pid"] == stopped.pid
        assert truth.target_rows(day) == []

        taken = dpone("takeover", "flights", day, "--reason", "test", "--format", "json")
        assert taken.returncode == 0, taken.stderr
        assert json.loads(taken.stdout)["pid"] == stopped.pid
        results = runtime.publish("flights", Scope.day(day), identity=identity(), replay=False)
        assert results["flights"].action == "finished"
        truth.assert_published(day)
        ((before, _),) = truth.generations()

        os.kill(stopped.pid, signal.SIGCONT)
        out, err = stopped.communicate(timeout=120)
        assert stopped.returncode == 1, (out, err)
        assert "DPONE_LEASE_LOST" in out or "DPONE_FENCED" in out
        truth.assert_published(day)
        ((after, head),) = truth.generations()
        assert before == after == head
        assert truth.scratch() == []
    finally:
        if stopped.poll() is None:
            stopped.kill()


def test_two_runs_of_one_mart_started_at_once_both_succeed(truth: Truth, day: str) -> None:
    other = day.replace("-03-", "-04-")
    runs = [dpone("run", "--mart", "flights", "--from", each, "--format", "text", wait=False) for each in (day, other)]
    outputs = [run.communicate(timeout=180) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    truth.assert_published(day)
    truth.assert_published(other)
