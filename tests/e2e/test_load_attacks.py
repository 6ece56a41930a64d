"""Attacks on governed loads: changed manifests, operators who race, lost answers, overtaken and interrupted workers.

Outcomes are read by plain SQL and worked out by hand.
"""

import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dpone_dagster.declarations.manifest import Process
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import LoadRecord
from dpone_dagster.ports import StagedLoad
from dpone_dagster.publication.load import LoadFailed, query_prefix
from resources.clickhouse import loading
from resources.clickhouse.audit import ClickHouseAudit
from resources.clickhouse.staged_sink import ClickHouseDirectSink, ClickHouseStagedSink
from resources.clickhouse.statements import Statements
from resources.embedded.engines import Engines
from resources.embedded.home import Home
from resources.journal.loads import SqlLoadJournal
from resources.runtime import Runtime
from tests.e2e.conftest import Truth, dpone, identity
from tests.e2e.faulty import Standing, failing
from tests.e2e.load_case import ORDERS, Case, expected

LINEAGE = {"enabled": True, "row_identity": {"mode": "off"}}
LEGACY = {"load_governance": {"finalization_phase": "legacy_post_finalize"}, "lineage": LINEAGE}
DAILY_PARTITIONS = {"storage": {"clickhouse": {"partition_by": "toDate(at)"}}}
GONE = DponeError("DPONE_ENGINE_UNAVAILABLE", "The engine did not answer.")


@pytest.fixture
def case(home: Home, engines: Engines, tmp_path: Path, pg_schema: str, ch_database: str) -> Case:
    return Case.make(Runtime.open(home), Truth(engines), tmp_path, pg_schema, ch_database)


def watermark(case: Case) -> None:
    """Append above a watermark, six orders loaded and four to come: a row lost or doubled would show."""
    case.manifest["source"]["read"] = {"mode": "watermark", "column": "id"}
    case.manifest["sink"] |= {"strategy": "append", "options": {"lineage": LINEAGE}}
    case.sql(f"delete from {case.schema}.orders where id > 6")
    case.run()
    for order in ORDERS[6:]:
        case.sql(f"insert into {case.schema}.orders values (%s, %s, %s, %s)", *order)


def legacy(case: Case) -> None:
    watermark(case)
    case.manifest["sink"]["options"] = LEGACY


def clear(case: Case, word: Any = None) -> str:
    return case.loads.clear_guard(case.plan(), identity=identity(), reason="looked at it", word=word).proven


def settled(case: Case) -> None:
    """All ten rows once, the checkpoint at the last of them, nothing left anywhere."""
    assert case.target() == expected()
    assert (case.guard(), case.scratch(), case.journal()[-1]) == (None, [], "COMPLETE")


def readers(case: Case) -> list[Any]:
    """Locks on the source's table: each session that reads it has one until it ends."""
    return case.sql(
        "select l.pid, l.mode from pg_locks l join pg_class c on c.oid = l.relation"
        " join pg_namespace n on n.oid = c.relnamespace where n.nspname = %s and c.relname = 'orders'",
        case.schema,
    )


def lose(patch: pytest.MonkeyPatch, to: State, error: DponeError, *, after: bool) -> None:
    """Let the journal's transition to a state fail, before it is written or after."""
    transition = SqlLoadJournal.transition

    def lost(self: SqlLoadJournal, load: LoadRecord, state: State, **more: Any) -> LoadRecord:
        if state is not to:
            return transition(self, load, state, **more)
        if after:
            transition(self, load, state, **more)
        raise error

    patch.setattr(SqlLoadJournal, "transition", lost)


# --------------------------------------------------------------------------------------------- the operator


def test_looking_at_a_guard_ends_no_statement_of_a_running_load(case: Case) -> None:
    watermark(case)
    with Standing("load.before_finalize", case.run) as worker:
        (load,) = [each for each in case.runtime.journal.loads.loads(case.name) if each.state is State.COMMITTING]
        failures: list[DponeError] = []

        def work() -> None:
            try:
                statements = Statements(case.runtime.clickhouse, f"{query_prefix(load.load_id)}worker-")
                statements.run("SELECT sleepEachRow(0.1) FROM numbers(15) SETTINGS max_block_size = 1")
            except DponeError as error:
                failures.append(error)

        running = threading.Thread(target=work)
        running.start()
        while not case.truth.clickhouse("select count() from system.processes where query like '%sleepEachRow(0.1)%'"
                                        " and query not like '%system.processes%'")[0][0]:  # fmt: skip
            assert running.is_alive()
        view = case.loads.guard(case.plan())
        assert view is not None
        assert (view.status, view.proven) == ("armed", "nothing")  # it may take effect yet
        running.join()
        assert failures == []
        view = case.loads.guard(case.plan())
        assert view is not None
        assert view.proven == "not-committed"
        # Clearing waits for nobody who works.
        with pytest.raises(DponeError) as held:
            clear(case)
        assert held.value.code == "DPONE_OPERATION_HELD"
        worker.go_on()
    assert worker.error is None
    settled(case)


@pytest.mark.parametrize(("committed", "proven", "action"), [(True, "committed", "finished"),
                                                             (False, "not-committed", "loaded")])  # fmt: skip
def test_an_operator_who_is_stopped_while_clearing_clears_again(
    case: Case, monkeypatch: pytest.MonkeyPatch, committed: bool, proven: str, action: str
) -> None:
    watermark(case)
    finalize, change = ClickHouseStagedSink.finalize, SqlLoadJournal._change

    def lost(self: ClickHouseStagedSink, process: Process, staged: StagedLoad) -> None:
        if committed:
            finalize(self, process, staged)
        raise GONE

    with monkeypatch.context() as patch:
        patch.setattr(ClickHouseStagedSink, "finalize", lost)
        lose(patch, State.COMMIT_UNKNOWN, GONE, after=False)  # killed, to the journal
        with pytest.raises(LoadFailed):
            case.run()
    assert (case.journal()[-1], case.guard()) == ("COMMITTING", "armed")
    tries = 0
    while True:
        left = [tries]

        def stopped(*arguments: Any, left: list[int] = left, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise GONE
            return change(*arguments, **options)

        tries += 1
        with monkeypatch.context() as patch:
            patch.setattr(SqlLoadJournal, "_change", stopped)
            try:
                said = clear(case)
            except DponeError as error:
                said = error.code
        assert said in (proven, "DPONE_ENGINE_UNAVAILABLE")
        if case.guard() is None:  # what is left now is the next run's to do
            break
    assert tries > 2
    with pytest.raises(DponeError) as twice:
        clear(case)
    assert twice.value.code == "DPONE_LOAD_NOT_GUARDED"
    assert case.run().action == action
    settled(case)


def test_a_guard_that_came_while_the_operator_waited_is_the_one_that_is_cleared(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(ClickHouseStagedSink, "finalize", lambda *_: (_ for _ in ()).throw(GONE))
            with pytest.raises(LoadFailed):
                case.run()

    watermark(case)
    broken()
    plan, looked = case.plan(), SqlLoadJournal.guard
    meanwhile: list[int] = []

    def guard(self: SqlLoadJournal, process: str) -> Any:
        found = looked(self, process)
        if not meanwhile:
            meanwhile.append(1)
            clear(case)  # somebody else is quicker, runs the load, and leaves a guard of its own
            broken()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(SqlLoadJournal, "guard", guard)
        case.loads.clear_guard(plan, identity=identity(), reason="looked at it", word=None)
    assert case.journal() == ["COMPLETE", "FAILED_PRE_COMMIT", "FAILED_PRE_COMMIT"]
    case.run()
    settled(case)


@pytest.mark.parametrize("word", [None, "committed"])
def test_partitions_that_were_stopped_midway_are_sent_forward(
    case: Case, monkeypatch: pytest.MonkeyPatch, word: str | None
) -> None:
    case.manifest["sink"] |= {"physical_design": DAILY_PARTITIONS, "strategy": "partition_replace"}
    case.run()
    case.sql(f"update {case.schema}.orders set note = 'new'")
    run, sent = Statements.run, []

    def second_is_lost(self: Statements, sql: str, **settings: Any) -> None:
        if "REPLACE PARTITION" in sql:
            sent.append(sql)
            if len(sent) == 2:
                raise GONE
        run(self, sql, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(Statements, "run", second_is_lost)
        with pytest.raises(LoadFailed) as failed:
            case.run()
    assert failed.value.report.target_state == "unknown"
    assert [note for *_, note in case.target()].count("new") == 3  # the first day's
    view = case.loads.guard(case.plan())
    assert view is not None
    assert view.proven == "nothing"
    assert clear(case, word) == "committed"
    assert case.run().action == "finished"
    assert case.target() == expected([(id_, at, amount, "new") for id_, at, amount, _ in ORDERS])
    assert (case.guard(), case.scratch()) == (None, [])


# ------------------------------------------------------------------------------------ the manifest has changed


def test_a_lost_legacy_load_is_proven_nothing_whatever_the_manifest_says_by_now(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    legacy(case)
    load = ClickHouseDirectSink.load

    def lost(self: ClickHouseDirectSink, *arguments: Any, **options: Any) -> Any:
        load(self, *arguments, **options)
        raise GONE

    with monkeypatch.context() as patch:
        patch.setattr(ClickHouseDirectSink, "load", lost)
        with pytest.raises(LoadFailed):
            case.run()
    assert case.target() == expected()
    case.manifest["sink"]["options"] = {"lineage": LINEAGE}
    with pytest.raises(DponeError) as needed:
        clear(case)
    assert needed.value.code == "DPONE_GUARD_WORD_NEEDED"
    clear(case, "committed")
    # Its gates never ran, and the source that they ask is gone: they are not taken for passed.
    with pytest.raises(LoadFailed) as failed:
        case.run()
    assert (failed.value.code, case.guard()) == ("DPONE_QUALITY_GATES_FAILED", "checkpoint_incomplete")
    assert case.checkpoint() == "6"
    clear(case)
    report = case.run()
    assert (report.action, report.finalization) == ("finished", "legacy_post_finalize")
    assert case.checkpoint() == "10"
    settled(case)


def test_a_staged_load_is_proven_and_cleaned_though_the_manifest_is_legacy_by_now(case: Case) -> None:
    watermark(case)
    with failing("load.committed"), pytest.raises(DponeError):
        case.run()
    assert case.scratch() != []
    case.manifest["sink"]["options"] = LEGACY
    assert clear(case) == "committed"
    assert case.run().action == "finished"
    settled(case)


@pytest.mark.parametrize("strategy", ["partition_replace", "append", "merge"])
def test_a_committed_load_is_finished_by_its_own_strategy(case: Case, strategy: str) -> None:
    case.manifest["quality"]["acceptance"] = {"enabled": True, "mode": "required"}
    with failing("load.committed"), pytest.raises(DponeError):
        case.run()
    case.manifest["sink"]["strategy"] = strategy
    clear(case)
    report = case.run()
    assert (report.action, report.strategy, report.acceptance_status) == ("finished", "full_refresh", "passed")
    settled(case)


def test_a_checkpoint_moves_to_what_the_load_has_read_though_the_manifest_reads_otherwise_by_now(case: Case) -> None:
    watermark(case)
    with failing("load.before_checkpoint"), pytest.raises(LoadFailed):
        case.run()
    case.manifest["source"]["read"] = {"mode": "whole"}
    clear(case)
    assert case.run().action == "finished"
    assert case.checkpoint() == "10"
    case.manifest["source"]["read"] = {"mode": "watermark", "column": "id"}
    assert case.run().staged_rows == 0
    settled(case)


@pytest.mark.parametrize("boundary", ["stage.in_load", "load.gated", "load.before_checkpoint"])
def test_what_was_left_in_another_target_is_settled_there_and_the_new_target_is_loaded(
    case: Case, boundary: str
) -> None:
    case.run()
    case.sql(f"delete from {case.schema}.orders where id = 10")
    assert dpone("run", str(case.path), fault=f"{boundary}:kill").returncode == -signal.SIGKILL
    assert case.scratch() != [] or boundary == "load.before_checkpoint"
    case.manifest["sink"]["table"]["name"] = "elsewhere"
    if boundary == "load.before_checkpoint":
        clear(case)
    report = case.run()
    assert (report.action, report.target) == ("loaded", f"{case.database}.elsewhere")
    assert case.truth.clickhouse(f"select count() from {case.database}.elsewhere") == [(9,)]
    assert case.target() == expected(ORDERS[:9] if boundary == "load.before_checkpoint" else ORDERS)
    assert (case.guard(), case.scratch()) == (None, [])
    assert case.journal()[1:] == [
        "COMPLETE" if boundary == "load.before_checkpoint" else "FAILED_PRE_COMMIT",
        "COMPLETE",
    ]


def test_a_checkpoint_of_another_column_or_target_leaves_no_row_out(case: Case) -> None:
    case.sql(f"alter table {case.schema}.orders add column seq integer not null default 0")
    watermark_of = {"mode": "watermark", "column": "id"}
    case.manifest["source"]["read"] = watermark_of
    case.manifest["sink"]["strategy"] = "append"
    case.run()
    case.sql(f"insert into {case.schema}.orders values (11, '2024-03-04', 1, 'x', 5)")
    for changed in (
        {"source__read": {"mode": "watermark", "column": "seq"}},
        {"sink__table": {"schema": case.database, "name": "elsewhere"}},
    ):
        with pytest.raises(LoadFailed) as refused:
            case.run(case.plan(**changed))
        assert (refused.value.code, refused.value.report.target_state) == ("DPONE_CHECKPOINT_FOREIGN", "unchanged")
    assert case.checkpoint() == "10"
    assert case.run().staged_rows == 1
    assert case.checkpoint() == "11"


# --------------------------------------------------------------------------------------- answers that are lost


@pytest.mark.parametrize("route", [watermark, legacy])
def test_an_intent_that_cannot_be_written_is_a_failure_before_anything_changed(
    case: Case, monkeypatch: pytest.MonkeyPatch, route: Callable[[Case], None]
) -> None:
    route(case)
    with monkeypatch.context() as patch:
        lose(patch, State.COMMITTING, GONE, after=False)
        with pytest.raises(LoadFailed) as failed:
            case.run()
    report = failed.value.report
    assert (failed.value.code, report.boundary, report.target_state) == (
        "DPONE_ENGINE_UNAVAILABLE",
        "pre_finalize",
        "unchanged",
    )
    assert readers(case) == []
    assert (case.journal()[-1], case.guard(), case.scratch()) == ("FAILED_PRE_COMMIT", None, [])
    assert case.truth.clickhouse(
        f"select status from {case.database}.__dpone__loads final where load_id = '{report.load_id}'"
    ) == [("failed",)]
    case.run()
    settled(case)


@pytest.mark.parametrize("strategy", ["full_refresh", "partition_replace"])
def test_an_intent_whose_answer_was_lost_is_proven_not_committed(
    case: Case, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    case.manifest["sink"] |= {"physical_design": DAILY_PARTITIONS, "strategy": strategy}
    case.sql(f"delete from {case.schema}.orders where id = 10")
    case.run()
    case.sql(f"insert into {case.schema}.orders values (%s, %s, %s, %s)", *ORDERS[9])
    with monkeypatch.context() as patch:
        lose(patch, State.COMMITTING, DponeError("DPONE_COMMIT_UNKNOWN", "The answer was lost."), after=True)
        with pytest.raises(LoadFailed) as failed:
            case.run()
    assert (failed.value.code, failed.value.report.target_state) == ("DPONE_COMMIT_UNKNOWN", "unchanged")
    assert (case.journal()[-1], case.guard()) == ("COMMITTING", "armed")
    assert clear(case) == "not-committed"
    case.run()
    settled(case)


def test_hooks_that_succeeded_do_not_run_again_whatever_failed_after_them(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.manifest["source"]["options"] = {
        "hooks": {"post_hook": [case.hook("one", case.call("one")), case.hook("two", case.call("two"))]}
    }
    with monkeypatch.context() as patch:
        lose(patch, State.COMPLETE, GONE, after=False)
        with pytest.raises(LoadFailed):
            case.run()
    assert (case.journal(), case.guard()) == (["COMMITTED_INCOMPLETE"], None)
    report = case.run()
    assert (report.action, [h.status for h in report.hooks]) == ("hooks_finished", ["skipped", "skipped"])
    assert case.calls() == ["one", "two"]
    settled(case)


def test_evidence_that_cannot_be_written_does_not_hide_why_a_load_stopped(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise ValueError("secret 4711")

    with monkeypatch.context() as patch:
        patch.setattr(ClickHouseAudit, "end", broken)
        with pytest.raises(LoadFailed) as failed:
            case.run(case.plan(quality__gates=[{"id": "enough", "type": "min_rows", "threshold": 99}]))
        assert failed.value.code == "DPONE_QUALITY_GATES_FAILED"
        assert case.journal() == ["FAILED_PRE_COMMIT"]
        patch.setattr(ClickHouseStagedSink, "finalize", broken)
        with pytest.raises(LoadFailed) as unknown:
            case.run()
    assert unknown.value.code == "DPONE_TARGET_OUTCOME_UNKNOWN"
    # Nor does what others' errors say reach whoever prints the exception with its causes.
    assert "4711" not in "".join(traceback.format_exception(unknown.value))
    clear(case)
    case.run()
    settled(case)


def test_a_read_that_is_broken_off_leaves_no_session_behind(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.sql(f"insert into {case.schema}.orders select n, '2024-03-05', 1, repeat('x', 10)"
             " from generate_series(100, 200000) n")  # fmt: skip
    monkeypatch.setattr(loading, "INSERT_ROWS", 1)  # more than one insert, so that the reader is still open
    with failing("stage.in_load"), pytest.raises(LoadFailed) as failed:
        case.run()
    assert failed.value.code == "DPONE_UNEXPECTED"  # held here, and with it every frame that it passed
    assert readers(case) == []
    assert (case.journal(), case.scratch()) == (["FAILED_PRE_COMMIT"], [])


# ------------------------------------------------------------------------------- overtaken and interrupted


@pytest.mark.parametrize("route", [watermark, legacy])
def test_a_worker_that_was_overtaken_before_finalize_adds_nothing(case: Case, route: Callable[[Case], None]) -> None:
    route(case)
    with Standing("load.before_finalize", case.run) as worker:
        load = case.runtime.journal.loads.open_load(case.name)
        assert load is not None
        case.runtime.journal.end_worker(load.worker_id, reason="it stands still")
        clear(case, None if route is watermark else "not-committed")
        case.run()
        worker.go_on()
    assert isinstance(worker.error, DponeError)
    settled(case)
    assert case.journal() == ["COMPLETE", "FAILED_PRE_COMMIT", "COMPLETE"]


class Interrupted(BaseException):
    """As Dagster's own interrupt: no ``Exception``."""


def interrupted_at(function: str, nth: int, work: Callable[[], Any]) -> bool:
    """Do the work and interrupt it at the nth line of a function of the route; return whether it got there."""
    lines = 0

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == nth:
                raise Interrupted
        return local

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        here = frame.f_code.co_filename.endswith("load_route.py") and frame.f_code.co_name == function
        return local if here and lines < nth else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize(
    ("function", "nth"),
    [("_arm", 2), ("_arm", 3), ("finalize", 3), ("finalize", 6), ("_close_source", 3), ("persist", 7), ("complete", 3)],
)
def test_an_interrupt_at_any_line_is_settled(case: Case, function: str, nth: int) -> None:
    watermark(case)
    case.manifest["source"]["options"] = {"hooks": {"post_hook": [case.hook("told", case.call("post"))]}}
    assert interrupted_at(function, nth, case.run)
    assert len(case.target()) in (6, 10)
    assert readers(case) == []
    if case.guard() is not None:
        assert clear(case) in ("committed", "not-committed")
    case.run()
    assert case.checkpoint() == "10"
    assert case.calls() == ["post"]
    settled(case)
