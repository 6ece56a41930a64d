"""Engines killed in mid-phase, lost acknowledgements, interrupts and overtaken workers, on a home of their own.

Every outcome is read by plain SQL. Workers that stand still are threads where a process start would only cost time.
"""

import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from click.testing import Result
from typer.testing import CliRunner

from assets.sources.flights import load_flights
from dpone_dagster.cli import app
from dpone_dagster.contracts.mart import Scope
from dpone_dagster.errors import DponeError
from dpone_dagster.faults import BOUNDARIES
from dpone_dagster.journal.graph import State
from resources.embedded import clickhouse_server, postgres
from resources.embedded.engines import down
from resources.embedded.home import Home
from resources.embedded.processes import end
from resources.runtime import Runtime
from tests.e2e.conftest import Truth, dpone, identity
from tests.e2e.faulty import Standing, failing

pytestmark = pytest.mark.xdist_group("lost")

_DAYS = count(1)


class Lost:
    """A home whose engines are killed, with the flights in it."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.again()

    def again(self) -> None:
        """What `dpone up` does; with clients of the engines that run now."""
        self.runtime = Runtime.open(self.home)
        self.truth = Truth(self.runtime.engines)

    def publish(self, day: str, *, replay: bool = False) -> str:
        return self.runtime.publish("flights", Scope.day(day), identity=identity(), replay=replay)["flights"].action

    def kill_clickhouse(self) -> None:
        record = clickhouse_server.find(self.home)
        assert record is not None
        assert end(psutil.Process(record.pid), signal.SIGKILL, 10)

    def kill_postgres(self) -> None:
        found = postgres.find(self.home)
        assert found is not None
        assert end(psutil.Process(found.pid), signal.SIGQUIT, 10)  # immediate shutdown: no checkpoint, no goodbye

    def assert_settled(self, day: str) -> None:
        """The day is published exactly once and nothing else is left anywhere."""
        self.truth.assert_published(day)
        assert self.truth.states(day).count("COMPLETE") == 1
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        ((live, head),) = self.truth.generations()
        assert live == head
        assert self.truth.scratch() == []
        assert self.truth.sql("select count(*) from pg_tables where schemaname = 'dpone_images'") == [(0,)]
        assert self.truth.sql(
            "select state from dpone_control.operation where state not in ('COMPLETE', 'FAILED_PRE_COMMIT')"
        ) == []  # fmt: skip

    def world(self) -> list[Any]:
        """Everything that an overtaken worker could change."""
        return [
            self.truth.clickhouse("select name, toString(uuid), total_rows from system.tables where database='marts'"
                                  " order by 1"),
            self.truth.sql("select operation_id, state, worker_id, fencing_epoch from dpone_control.operation"
                           " order by 1"),
            self.truth.sql("select * from dpone_control.scope_head order by mart, scope_start"),
            self.truth.sql("select * from dpone_control.generation_head"),
            self.truth.sql("select * from dpone_control.model_receipt order by operation_id"),
            self.truth.sql("select tablename from pg_tables where schemaname = 'dpone_images' order by 1"),
            self.truth.sql("select count(*), max(xmin::text::bigint) from marts.flights"),
        ]  # fmt: skip


@pytest.fixture(scope="module")
def lost() -> Iterator[Lost]:
    root = Path(tempfile.mkdtemp(prefix="dpone-lost-")).resolve()
    root.chmod(0o711)
    home = Home(root=root / "home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPONE_HOME", str(home.root))
        made = Lost(home)
        load_flights(made.runtime.engines.pg.conninfo)
        made.runtime.create_baseline("flights", identity=identity())
        yield made
        down(home)
    shutil.rmtree(root)


@pytest.fixture
def day() -> str:
    """A day of this test's own."""
    day = Scope.day("2013-02-01").start.toordinal() + next(_DAYS)
    return Scope.day(type(Scope.day("2013-02-01").start).fromordinal(day).date()).key


def stopped_at(process: "subprocess.Popen[str]") -> None:
    """Wait until the process has stopped itself at its boundary."""
    deadline = time.monotonic() + 120
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def command(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, [*arguments, "--format", "json"])


def refused(result: Result) -> dict[str, Any]:
    """The one JSON object of a command that refused."""
    assert result.exit_code == 1, (result.stdout, result.stderr, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.stdout + result.stderr
    return _error(result.stdout)


def _error(out: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(out)["result"]
    assert result["status"] == "error"
    assert result["error_code"].startswith("DPONE_")
    assert result["next_step"]
    return result


def refusal(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The one JSON object that a run which refused has printed; no traceback anywhere."""
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()  # a no-op once it has ended
    assert "Traceback" not in out + err
    result = _error(out)
    # As a shell says of a command that an interrupt ended.
    assert process.returncode == (130 if result["error_code"] == "DPONE_CANCELLED" else 1), (out, err)
    return result


# ------------------------------------------------------------------------------------ an engine is killed


def assert_refused(result: dict[str, Any], day: str) -> None:
    assert result["days"] == []
    assert result["not_published"] == [day]
    assert result["error_code"] in ("DPONE_ENGINE_UNAVAILABLE", "DPONE_COMMIT_UNKNOWN", "DPONE_LEASE_LOST")


@pytest.mark.parametrize(
    ("engine", "boundary"),
    [
        ("clickhouse", "stage.in_load"),
        ("clickhouse", "exchange.before"),
        ("clickhouse", "exchange.after"),
        ("postgres", "seal.before_chunk"),
        ("postgres", "publish.before"),
    ],
)
def test_an_engine_killed_in_mid_phase(lost: Lost, day: str, engine: str, boundary: str) -> None:
    with Standing(boundary, lambda: command("run", "--mart", "flights", "--from", day)) as worker:
        lost.kill_clickhouse() if engine == "clickhouse" else lost.kill_postgres()
        worker.go_on()
    assert_refused(refused(worker.result), day)
    lost.again()
    assert "COMPLETE" not in lost.truth.states(day)
    assert len(lost.truth.target_rows(day)) in (0, len(lost.truth.source_rows(day)))
    assert lost.publish(day) == ("finished" if boundary.startswith(("exchange", "publish")) else "published")
    lost.assert_settled(day)


def test_postgres_killed_before_the_commit(lost: Lost, day: str) -> None:
    run = dpone(
        "run", "--mart", "flights", "--from", day, "--format", "json", fault="mutate.before_commit:stop", wait=False
    )
    try:
        stopped_at(run)
        lost.kill_postgres()
        run.send_signal(signal.SIGCONT)
        assert_refused(refusal(run), day)
    finally:
        run.poll() is None and run.kill()
    lost.again()
    assert lost.truth.mart_rows(day) == []
    assert lost.publish(day) == "published"
    lost.assert_settled(day)


# --------------------------------------------------------------------------------- an acknowledgement is lost


def after(boundary: str, *, since: str) -> bool:
    order = list(BOUNDARIES)
    return order.index(boundary) >= order.index(since)


FAILING = [
    "admit.after", "mutate.before_commit", "mutate.after_commit", "seal.before_manifest", "stage.before",
    "shadow.after_attach", "prepared.after", "exchange.before", "exchange.after", "publish.before", "publish.after",
]  # fmt: skip


@pytest.mark.parametrize("boundary", FAILING)
def test_a_boundary_that_fails(lost: Lost, day: str, boundary: str) -> None:
    with failing(boundary):
        refused(command("run", "--mart", "flights", "--from", day))
    rows = len(lost.truth.source_rows(day))
    if after(boundary, since="publish.after"):
        assert lost.truth.states(day) == ["COMPLETE"]
    elif after(boundary, since="prepared.after"):
        assert lost.truth.states(day)[0] in ("PREPARED", "COMMITTING", "TARGET_COMMITTED")
    else:
        assert lost.truth.states(day) == ["PREPARING" if boundary == "admit.after" else "FAILED_PRE_COMMIT"]
        assert lost.truth.scratch() == []
    assert len(lost.truth.target_rows(day)) == (rows if after(boundary, since="exchange.after") else 0)
    if boundary == "publish.after":
        assert lost.publish(day) == "skipped"
        assert lost.publish(day, replay=True) == "published"
        lost.truth.assert_published(day)
        lost.assert_nothing_left()
    else:
        assert lost.publish(day) == ("finished" if after(boundary, since="exchange.before") else "published")
        lost.assert_settled(day)


def test_a_commit_that_dbt_did_not_see_is_not_published_untested(lost: Lost, day: str) -> None:
    with failing("mutate.after_commit"):
        result = refused(command("run", "--mart", "flights", "--from", day))
    assert result["error_code"] == "DPONE_DBT_TEST_NOT_RUN"
    expected = lost.truth.source_rows(day)
    assert set(lost.truth.mart_rows(day)) == expected  # the receipt proved the commit
    assert lost.truth.target_rows(day) == []
    assert lost.publish(day) == "published"
    lost.assert_settled(day)


def test_what_is_no_refusal_is_told_without_its_text_unless_one_asks(lost: Lost, day: str) -> None:
    with failing("gate.after"):
        result = refused(command("run", "--mart", "flights", "--from", day))
    assert result["error_code"] == "DPONE_UNEXPECTED"
    assert result["message"].startswith("InjectedFault at faults.py:")
    assert "gate.after" not in json.dumps(result)
    with failing("exchange.before"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPONE_DEBUG", "1")
        told = command("run", "--mart", "flights", "--from", day)
    assert told.exit_code == 1
    assert "InjectedFault: exchange.before" in told.stderr
    assert lost.publish(day) == "finished"
    lost.assert_settled(day)


# ---------------------------------------------------------------------------------------------- interrupts


def test_a_termination_while_dbt_waits_for_a_lock(lost: Lost, day: str) -> None:
    with psycopg.connect(lost.runtime.engines.pg.conninfo) as writer:
        writer.execute("lock table marts.flights in row exclusive mode")
        run = dpone("run", "--mart", "flights", "--from", day, "--format", "json", wait=False)
        waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%%dpone%%'"
        deadline = time.monotonic() + 60
        while lost.truth.sql(waiting) == [(0,)]:
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        assert refusal(run)["error_code"] == "DPONE_CANCELLED"
    assert lost.truth.states(day) == ["FAILED_PRE_COMMIT"]
    assert lost.truth.mart_rows(day) == []
    assert lost.publish(day) == "published"
    lost.assert_settled(day)


@pytest.mark.parametrize(
    ("number", "boundary"), [(signal.SIGINT, "mutate.before_commit"), (signal.SIGTERM, "stage.in_load")]
)
def test_an_interrupt_before_the_barrier(lost: Lost, day: str, number: int, boundary: str) -> None:
    run = dpone("run", "--mart", "flights", "--from", day, "--format", "json", fault=f"{boundary}:stop", wait=False)
    stopped_at(run)
    run.send_signal(number)
    run.send_signal(signal.SIGCONT)
    assert refusal(run)["error_code"] == "DPONE_CANCELLED"
    assert lost.truth.states(day) == ["FAILED_PRE_COMMIT"]
    assert lost.truth.target_rows(day) == []
    assert lost.truth.scratch() == []
    assert lost.publish(day) == "published"
    lost.assert_settled(day)


def test_an_interrupt_after_committing_finishes_the_day_and_ends_the_range(lost: Lost, day: str) -> None:
    following = f"{day[:-2]}{int(day[-2:]) + 1:02d}" if day[-2:] != "28" else "2013-03-01"
    next(_DAYS)
    run = dpone(
        "run", "--mart", "flights", "--from", day, "--to", following, "--format", "json",
        fault="exchange.before:stop", wait=False,
    )  # fmt: skip
    stopped_at(run)
    run.send_signal(signal.SIGTERM)
    run.send_signal(signal.SIGCONT)
    result = refusal(run)
    assert result["error_code"] == "DPONE_CANCELLED"
    assert [(d["day"], d["action"]) for d in result["days"]] == [(day, "published")]
    assert result["not_published"] == [following]
    lost.assert_settled(day)
    assert lost.truth.states(following) == []


def test_a_run_that_hangs_obeys_nobody_and_is_overtaken(lost: Lost, day: str) -> None:
    run = dpone("run", "--mart", "flights", "--from", day, fault="stage.in_load:hang", wait=False)
    try:
        deadline = time.monotonic() + 60
        while not any("stage" in name for name in lost.truth.scratch()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)
        run.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert run.poll() is None  # it is at no boundary; to conclude anything from its process would be wrong
        assert lost.truth.states(day) == ["PREPARING"]
        lost.runtime.takeover("flights", Scope.day(day), reason="test")
        assert lost.publish(day) == "published"
    finally:
        run.kill()
        run.communicate()
    lost.assert_settled(day)


# ----------------------------------------------------------------------------------- overtaken and continued

# dbt runs once at a time in a process, so a boundary in its thread needs a process; see the test below.
STANDING = [
    "admit.before", "mutate.before", "mutate.after", "seal.before_manifest", "stage.before", "stage.in_load",
    "shadow.before", "shadow.after_attach", "prove.after", "prepared.after", "exchange.before", "exchange.after",
    "target_committed.after", "publish.before", "publish.after", "clean.after",
]  # fmt: skip


@pytest.mark.parametrize("boundary", STANDING)
def test_an_overtaken_worker_changes_nothing_any_more(lost: Lost, day: str, boundary: str) -> None:
    with Standing(boundary, lambda: Lost(lost.home).publish(day)) as worker:
        lost.runtime.takeover("flights", Scope.day(day), reason="test")
        complete = after(boundary, since="publish.after")
        action = lost.publish(day, replay=complete)
        assert action == ("finished" if after(boundary, since="exchange.before") and not complete else "published")
        before = lost.world()
        worker.go_on()
        assert lost.world() == before
    if complete:
        assert worker.result == "published"  # which is what it did
        lost.truth.assert_published(day)
        lost.assert_nothing_left()
    else:
        assert isinstance(worker.error, DponeError)
        assert worker.error.code in ("DPONE_LEASE_LOST", "DPONE_FENCED", "DPONE_ENGINE_REFUSED")
        lost.assert_settled(day)


def test_a_worker_stopped_before_its_sql_commit_is_overtaken(lost: Lost, day: str) -> None:
    run = dpone(
        "run", "--mart", "flights", "--from", day, "--format", "json", fault="mutate.before_commit:stop", wait=False
    )
    try:
        stopped_at(run)
        lost.runtime.takeover("flights", Scope.day(day), reason="test")
        assert lost.publish(day) == "published"
        before = lost.world()
        run.send_signal(signal.SIGCONT)
        assert refusal(run)["error_code"] in ("DPONE_LEASE_LOST", "DPONE_COMMIT_UNKNOWN", "DPONE_ENGINE_UNAVAILABLE")
        assert lost.world() == before
    finally:
        run.poll() is None and run.kill()
    lost.assert_settled(day)


def take_over_and_die(lost: Lost, day: str) -> None:
    """Take the day's open operation over and do nothing with it, as a worker that dies right there."""
    workflow = lost.runtime.workflow_of("flights")
    with lost.runtime.journal.hold(
        workflow.resources, identity=identity(), scope=Scope.day(day), deadline_seconds=5, on_wait=lambda _: None
    ) as lease:
        (operation,) = lost.runtime.journal.open_operations("flights")
        lost.runtime.journal.take_over(lease, [operation.operation_id])


@pytest.mark.parametrize("boundary", ["exchange.before", "target_committed.after"])
def test_a_successor_that_dies_before_it_renames_leaves_the_shadow_to_the_next(
    lost: Lost, day: str, boundary: str
) -> None:
    with Standing(boundary, lambda: Lost(lost.home).publish(day)) as worker:
        lost.runtime.takeover("flights", Scope.day(day), reason="test")
        take_over_and_die(lost, day)
        assert lost.publish(day) == "finished"
        before = lost.world()
        worker.go_on()  # from exchange.before it sends its EXCHANGE now
        assert lost.world() == before
    assert isinstance(worker.error, DponeError)
    lost.assert_settled(day)
    kept = lost.truth.clickhouse(
        "select count() from system.tables where database = 'marts' and name like '%dpone_prev%'"
    )
    assert kept[0][0] <= 2


def test_an_exchange_that_arrives_after_it_was_seen_not_to_have(lost: Lost, day: str) -> None:
    with failing("prepared.after"), pytest.raises(DponeError):
        lost.publish(day)
    assert lost.truth.states(day) == ["PREPARED"]
    (shadow,) = (name for name in lost.truth.scratch() if "shadow" in name)
    lost.runtime.analytics("test-").exchange(
        lost.runtime.mart("flights").target, lost.runtime.mart("flights").target.model_copy(update={"name": shadow})
    )
    assert lost.publish(day) == "finished"
    lost.assert_settled(day)


def test_closing_an_operation_that_was_taken_over_meanwhile_drops_nothing(lost: Lost, day: str) -> None:
    """The lease is checked, then the worker stands still, then it reads the operation: the successor's by now."""
    journal_type = type(lost.runtime.journal)
    late: list[Callable[[], None]] = []

    def operation(self: Any, operation_id: str) -> Any:
        if late and self is not lost.runtime.journal:
            late.pop()()
        return original(self, operation_id)

    original = journal_type.operation
    before: list[Any] = []

    def overtake() -> None:
        lost.runtime.takeover("flights", Scope.day(day), reason="test")
        take_over_and_die(lost, day)
        (found,) = lost.runtime.journal.open_operations("flights")
        assert found.state is State.PREPARING
        before.append(lost.world())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_type, "operation", operation)
        late.append(overtake)
        with failing("shadow.after"), pytest.raises(DponeError):
            Lost(lost.home).publish(day)
    assert len(before) == 1
    assert lost.world() == before[0]
    assert lost.publish(day) == "published"
    lost.assert_settled(day)
