"""Admission, transitions, publication and baselines: what is written, and that nothing is written otherwise."""

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import journal_support as support
import psycopg
import pytest
from journal_support import (
    ALL_TABLES,
    BASE_UUID,
    DAY,
    NEW_UUID,
    NEXT,
    TARGET,
    Note,
    adopt,
    committed,
    everything,
    publish,
)

from dpone_dagster.contracts.mart import Scope
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import Lease, OperationRecord, PlanBundle, Predecessors
from resources.embedded.postgres import PostgresEndpoint
from resources.journal.store import SqlJournal
from resources.journal.transactions import JournalPolicy

Open = Callable[..., psycopg.Connection[Any]]
S = State


# ------------------------------------------------------------------------------------------------ admission


def test_admission_writes_guards_documents_bindings_and_history(journal: SqlJournal, pg: Open) -> None:
    marts, targets = ["sales", "stock"], ["analytics.sales", "analytics.stock"]
    resources = ["workflow:daily", "mart:sales", "mart:stock", "target:analytics.sales", "target:analytics.stock"]
    seen: list[dict[str, Predecessors]] = []

    def build(found: dict[str, Predecessors]) -> PlanBundle:
        seen.append(found)
        return support.bundle(found, targets=dict(zip(marts, targets, strict=True)), facts={"restore_from": "x"})

    me = support.identity()
    with journal.hold(resources, identity=me, scope=DAY, deadline_seconds=5, on_wait=print) as lease:
        both = journal.admit(
            lease, workflow="daily", marts=marts, targets=targets, scope=DAY, build=build, bind=support.bind
        )
    assert [o.mart for o in both] == marts
    assert [found.last_operation for found in seen[0].values()] == [None, None]
    connection = pg()
    guards = connection.execute("select resource_id, epoch, worker_id, operation_id from dpone_control.resource_guard")
    first, second = (o.operation_id for o in both)
    assert sorted(guards.fetchall()) == [
        ("mart:sales", 1, me.worker_id, first),
        ("mart:stock", 1, me.worker_id, second),
        ("target:analytics.sales", 1, me.worker_id, first),
        ("target:analytics.stock", 1, me.worker_id, second),
        ("workflow:daily", 1, me.worker_id, None),
    ]
    # What the dbt strategy reads, in its own words.
    fence = connection.execute(
        "select g.epoch, g.worker_id, g.operation_id, o.state, o.operation_plan_sha256, o.scope_start, o.scope_end"
        " from dpone_control.resource_guard g join dpone_control.operation o on o.operation_id = g.operation_id"
        " where g.resource_id = 'mart:sales' for update of g"
    ).fetchone()
    plan = support.digest("plan", first)
    assert fence == (1, me.worker_id, first, "PREPARING", plan, datetime(2024, 3, 1), datetime(2024, 3, 2))
    bodies = [journal.document(o.attempt_binding_sha256) for o in both]
    assert [body and body["text"] for body in bodies] == [f"binding {first} 1", f"binding {second} 1"]
    [change] = journal.transitions(first)
    assert (change["kind"], change["from_state"], change["to_state"]) == ("admit", None, "PREPARING")
    assert change["documents"] == [Note.seal(text="plan 2024-03-01").sha256, both[0].attempt_binding_sha256]
    assert journal.operation(first) == both[0]
    assert both[0].facts == {"restore_from": "x"}
    assert journal.workflow_operations(both[0].workflow_execution_id) == both


def refuse(found: dict[str, Predecessors]) -> PlanBundle:
    raise DponeError("DPONE_BASELINE_MISSING", "Mart sales has no adopted baseline.")


@pytest.mark.parametrize(
    ("build", "bind", "code"),
    [
        (refuse, support.bind, "DPONE_BASELINE_MISSING"),
        (support.bundle, lambda *_: refuse({}), "DPONE_BASELINE_MISSING"),
        (lambda found: support.bundle(found, scope=NEXT), support.bind, "DPONE_CONTRACT_INVALID"),
        (lambda found: replace(support.bundle(found), workflow="other"), support.bind, "DPONE_CONTRACT_INVALID"),
        (lambda found: replace(support.bundle(found), operations=()), support.bind, "DPONE_CONTRACT_INVALID"),
        (lambda found: support.bundle(found, targets={"sales": "x.y"}), support.bind, "DPONE_CONTRACT_INVALID"),
    ],
)
def test_a_refused_admission_leaves_nothing(journal: SqlJournal, pg: Open, build: Any, bind: Any, code: str) -> None:
    with support.hold(journal, support.identity()) as lease, pytest.raises(DponeError) as refused:
        journal.admit(lease, workflow="daily", marts=["sales"], targets=[TARGET], scope=DAY, build=build, bind=bind)
    assert refused.value.code == code
    assert everything(pg()) == {table: [] for table in ALL_TABLES}


def test_the_second_marts_failure_takes_the_first_back(journal: SqlJournal, pg: Open) -> None:
    resources = ["workflow:daily", "mart:sales", "mart:stock", "target:a.sales", "target:a.stock"]
    targets = {"sales": "a.sales", "stock": "a.stock"}
    bound: list[str] = []

    def bind(plan: PlanBundle, operation_id: str, epoch: int) -> Note:
        if bound:
            raise ZeroDivisionError
        bound.append(operation_id)
        return support.bind(plan, operation_id, epoch)

    with (
        journal.hold(resources, identity=support.identity(), scope=DAY, deadline_seconds=5, on_wait=print) as lease,
        pytest.raises(ZeroDivisionError),
    ):
        journal.admit(
            lease,
            workflow="daily",
            marts=list(targets),
            targets=list(targets.values()),
            scope=DAY,
            build=lambda found: support.bundle(found, targets=targets),
            bind=bind,
        )
    assert bound
    assert everything(pg()) == {table: [] for table in ALL_TABLES}


def test_an_operation_is_admitted_once(journal: SqlJournal, pg: Open) -> None:
    with support.hold(journal, support.identity()) as lease:
        operation = support.admit(journal, lease)
        journal.transition(operation, S.FAILED_PRE_COMMIT)
        before = everything(pg())
        with pytest.raises(DponeError) as refused:
            support.admit(journal, lease)
    assert refused.value.code == "DPONE_OPERATION_EXISTS"
    assert everything(pg()) == before


def test_another_body_under_a_known_digest_is_corruption(journal: SqlJournal, pg: Open) -> None:
    plan = Note.seal(text="plan 2024-03-01")
    pg().execute(
        "insert into dpone_control.document values (%s, 'test.note.v1', '{}', now() at time zone 'utc')",
        [plan.sha256],
    )
    before = everything(pg())
    with support.hold(journal, support.identity()) as lease, pytest.raises(DponeError) as refused:
        support.admit(journal, lease)
    assert refused.value.code == "DPONE_JOURNAL_CORRUPT"
    assert everything(pg()) == before


def test_admissions_of_different_marts_at_once_all_succeed(journal: SqlJournal, fresh_db: PostgresEndpoint) -> None:
    together, failed = threading.Barrier(6), []

    def admit(n: int) -> None:
        own, mart, target = SqlJournal(fresh_db.sqlalchemy_url), f"m{n}", f"a.m{n}"
        resources = [f"workflow:w{n}", f"mart:{mart}", f"target:{target}"]
        try:
            with own.hold(
                resources, identity=support.identity(), scope=DAY, deadline_seconds=20, on_wait=print
            ) as lease:
                together.wait(20)
                own.admit(
                    lease,
                    workflow=f"w{n}",
                    marts=[mart],
                    targets=[target],
                    scope=DAY,
                    build=lambda found: replace(support.bundle(found, targets={mart: target}), workflow=f"w{n}"),
                    bind=support.bind,
                )
        except DponeError as error:
            failed.append(error)
        finally:
            own.close()

    threads = [threading.Thread(target=admit, args=[n]) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sum(len(journal.open_operations(f"m{n}")) for n in range(6)) == 6


# ---------------------------------------------------------------------------------------------- transitions


def test_transitions_merge_facts_and_keep_history(journal: SqlJournal) -> None:
    with support.hold(journal, support.identity()) as lease:
        operation = support.admit(journal, lease)
        operation = journal.record(operation, {"stage_uuid": "a", "source_rows": 1})
        receipt = Note.seal(text="receipt")
        operation = journal.transition(operation, S.PREPARED, facts={"source_rows": 2}, documents=[receipt])
    assert journal.operation(operation.operation_id) == operation
    assert (operation.state, operation.version) == (S.PREPARED, 3)
    assert operation.facts == {"stage_uuid": "a", "source_rows": 2}
    changes = journal.transitions(operation.operation_id)
    assert [(c["kind"], c["from_state"], c["to_state"], c["version"]) for c in changes] == [
        ("admit", None, "PREPARING", 1),
        ("record", "PREPARING", "PREPARING", 2),
        ("transition", "PREPARING", "PREPARED", 3),
    ]
    assert changes[2]["facts"] == {"source_rows": 2}
    assert changes[2]["documents"] == [receipt.sha256]
    assert journal.document(receipt.sha256) == receipt.as_json()


def test_unknown_remembers_since_when(journal: SqlJournal) -> None:
    with support.hold(journal, support.identity()) as lease:
        operation = support.admit(journal, lease)
        operation = journal.transition(operation, S.COMMIT_UNKNOWN)
        assert operation.unknown_since is S.PREPARING
        with pytest.raises(DponeError) as refused:
            journal.transition(operation, S.TARGET_COMMITTED)
        assert refused.value.code == "DPONE_TRANSITION_ILLEGAL"
        operation = journal.transition(operation, S.PREPARING)
        assert operation.unknown_since is None
        operation = journal.transition(journal.transition(operation, S.PREPARED), S.COMMITTING)
        operation = journal.transition(operation, S.COMMIT_UNKNOWN)
        assert journal.operation(operation.operation_id) == operation
        assert operation.unknown_since is S.COMMITTING
        assert journal.transition(operation, S.PREPARED).state is S.PREPARED


def test_stale_and_foreign_records_write_nothing(journal: SqlJournal, fresh_db: PostgresEndpoint, pg: Open) -> None:
    with support.hold(journal, support.identity()) as lease:
        old = support.admit(journal, lease)
        now = journal.record(old, {"stage_uuid": "a"})
        before = everything(pg())

        def code(record: OperationRecord, by: SqlJournal = journal) -> str:
            with pytest.raises(DponeError) as refused:
                by.transition(record, S.PREPARED, facts={"stage_uuid": "b"}, documents=[Note.seal(text="late")])
            assert everything(pg()) == before
            return refused.value.code

        assert code(old) == "DPONE_TRANSITION_ILLEGAL"  # an earlier version of its own
        assert code(replace(now, state=S.COMMIT_UNKNOWN, unknown_since=S.COMMITTING)) == "DPONE_TRANSITION_ILLEGAL"
        assert code(replace(now, fencing_epoch=7)) == "DPONE_FENCED"
        assert code(replace(now, worker_id="stranger")) == "DPONE_FENCED"
        other = SqlJournal(fresh_db.sqlalchemy_url)  # read the record, but has no lease for it
        assert code(now, by=other) == "DPONE_FENCED"
        other.close()
        pg().execute("update dpone_control.resource_guard set epoch = 2 where resource_id = 'mart:sales'")
        before = everything(pg())
        assert code(now) == "DPONE_FENCED"
    assert code(now) == "DPONE_FENCED"  # the lease is over


def test_only_publish_writes_complete(journal: SqlJournal) -> None:
    with support.hold(journal, support.identity()) as lease:
        adopt(journal, lease)
        operation = committed(journal, lease)
        with pytest.raises(DponeError) as refused:
            journal.transition(operation, S.COMPLETE)
    assert refused.value.code == "DPONE_TRANSITION_ILLEGAL"


def test_a_locked_guard_is_waited_for_within_bounds(fresh_db: PostgresEndpoint, journal: SqlJournal, pg: Open) -> None:
    hurried = SqlJournal(fresh_db.sqlalchemy_url, policy=JournalPolicy(row_lock=1))
    with support.hold(hurried, support.identity()) as lease:
        operation = support.admit(hurried, lease)
        mutation = pg(autocommit=False)
        mutation.execute("select 1 from dpone_control.resource_guard where resource_id = 'mart:sales' for update")
        with pytest.raises(DponeError) as refused:
            hurried.record(operation, {"stage_uuid": "a"})
        assert refused.value.code == "DPONE_JOURNAL_BUSY"
        assert refused.value.details["sqlstate"] == "55P03"
        mutation.rollback()
        hurried.record(operation, {"stage_uuid": "a"})
    hurried.close()


def test_takeover_fences_its_predecessor(journal: SqlJournal, pg: Open) -> None:
    with support.hold(journal, support.identity("first")) as lease:
        operation = journal.transition(support.admit(journal, lease), S.PREPARED)
    second = support.identity("second")
    with support.hold(journal, second) as lease:
        [taken] = journal.take_over(lease, [operation.operation_id])
        assert (taken.state, taken.fencing_epoch, taken.worker_id) == (S.PREPARED, 2, second.worker_id)
        guards = pg().execute("select epoch, worker_id from dpone_control.resource_guard").fetchall()
        assert guards == [(2, second.worker_id)] * 3
        with pytest.raises(DponeError) as fenced:
            journal.transition(operation, S.COMMITTING)
        assert fenced.value.code == "DPONE_FENCED"
        done = journal.transition(taken, S.FAILED_PRE_COMMIT)
        with pytest.raises(DponeError) as over:
            journal.take_over(lease, [done.operation_id])
        assert over.value.code == "DPONE_TRANSITION_ILLEGAL"
        with pytest.raises(DponeError) as unknown:
            journal.take_over(lease, [support.digest("nothing")])
        assert unknown.value.code == "DPONE_TRANSITION_ILLEGAL"
    with journal.hold(["mart:sales"], identity=second, scope=DAY, deadline_seconds=5, on_wait=print) as narrow:
        with pytest.raises(DponeError) as uncovered:
            journal.take_over(narrow, [done.operation_id])
        assert uncovered.value.code == "DPONE_LEASE_LOST"


def test_whoever_holds_the_mart_may_add_facts_to_a_finished_operation(journal: SqlJournal) -> None:
    with support.hold(journal, support.identity("first")) as lease:
        failed = journal.transition(support.admit(journal, lease), S.FAILED_PRE_COMMIT)
    with pytest.raises(DponeError) as refused:
        journal.record(failed, {"cleaned": True})
    assert refused.value.code == "DPONE_FENCED"
    with support.hold(journal, support.identity("second"), scope=NEXT) as lease:
        support.admit(journal, lease, scope=NEXT)
        assert journal.record(failed, {"cleaned": True}).facts == {"cleaned": True}


# ---------------------------------------------------------------------------------------------- publication


def test_publication_moves_heads_checkpoint_and_state_together(journal: SqlJournal, pg: Open) -> None:
    with support.hold(journal, support.identity(), scope=NEXT) as lease:
        adopt(journal, lease)
        operation = publish(journal, committed(journal, lease, scope=NEXT))
    assert operation.state is S.COMPLETE
    assert journal.operation(operation.operation_id) == operation
    head = journal.generation(TARGET)
    assert head is not None
    assert (head.uuid, head.generation, head.operation_id) == (NEW_UUID, 2, operation.operation_id)
    assert journal.retired_generations(TARGET) == [BASE_UUID]
    scope = journal.scope_head("sales", NEXT)
    assert scope is not None
    assert (scope.rows, scope.revision, scope.target_uuid, scope.operation_id) == (
        5,
        1,
        NEW_UUID,
        operation.operation_id,
    )
    assert scope.after_image_sha256 == support.digest("after", 5)
    assert abs(scope.published_at - datetime.now(UTC)) < timedelta(minutes=1)
    checkpoint = "select last_scope_start, operation_id from dpone_control.checkpoint where mart = 'sales'"
    assert pg().execute(checkpoint).fetchone() == (datetime(2024, 3, 2), operation.operation_id)

    # An earlier day later: the checkpoint stays.
    third = "00000000-0000-0000-0000-000000000003"
    with support.hold(journal, support.identity()) as lease:
        publish(journal, committed(journal, lease), uuid=third)
    assert pg().execute(checkpoint).fetchone() == (datetime(2024, 3, 2), operation.operation_id)
    assert [h.scope.key for h in journal.scope_heads("sales")] == ["2024-03-01", "2024-03-02"]
    assert journal.retired_generations(TARGET) == [NEW_UUID, BASE_UUID]
    journal.generation_dropped(TARGET, BASE_UUID)
    journal.generation_dropped(TARGET, BASE_UUID)
    assert journal.retired_generations(TARGET) == [NEW_UUID]
    for never in (third, "00000000-0000-0000-0000-00000000000f"):
        with pytest.raises(DponeError) as refused:
            journal.generation_dropped(TARGET, never)
        assert refused.value.code == "DPONE_TRANSITION_ILLEGAL"


def test_a_replay_is_the_next_revision(journal: SqlJournal) -> None:
    with support.hold(journal, support.identity()) as lease:
        adopt(journal, lease)
        publish(journal, committed(journal, lease))
        again = committed(journal, lease)
        assert again.revision == 2
        publish(journal, again, uuid="00000000-0000-0000-0000-000000000003", rows=6)
    head = journal.scope_head("sales", DAY)
    assert head is not None
    assert (head.revision, head.rows) == (2, 6)
    assert [o.revision for o in journal.history("sales", DAY)] == [1, 2]


def test_an_empty_day_publishes_without_a_new_generation(journal: SqlJournal) -> None:
    with support.hold(journal, support.identity()) as lease:
        adopt(journal, lease)
        operation = journal.transition(support.admit(journal, lease), S.PREPARED)
        with pytest.raises(DponeError) as refused:
            publish(journal, operation, rows=0)
        assert refused.value.code == "DPONE_JOURNAL_CORRUPT"
        assert publish(journal, operation, uuid=BASE_UUID, rows=0).state is S.COMPLETE
    head = journal.generation(TARGET)
    assert head is not None
    assert (head.uuid, head.generation, head.operation_id) == (BASE_UUID, 1, None)
    assert journal.retired_generations(TARGET) == []


def test_incomplete_publication_is_finished(journal: SqlJournal) -> None:
    with support.hold(journal, support.identity()) as lease:
        adopt(journal, lease)
        operation = journal.transition(committed(journal, lease), S.COMMITTED_INCOMPLETE)
        assert publish(journal, operation).state is S.COMPLETE


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        ("update dpone_control.generation_head set uuid = 'x'", "DPONE_JOURNAL_CORRUPT"),
        ("delete from dpone_control.generation_head", "DPONE_BASELINE_MISSING"),
        ("delete from dpone_control.generation", "DPONE_JOURNAL_CORRUPT"),
        (
            "insert into dpone_control.scope_head values ('sales', '2024-03-01', '2024-03-02', 1, 'o', 1, 'a', 'm',"
            " 'u', '2024-03-03')",
            "DPONE_JOURNAL_CORRUPT",
        ),
        ("update dpone_control.resource_guard set epoch = epoch + 1", "DPONE_FENCED"),
        ("update dpone_control.operation set version = version + 1", "DPONE_TRANSITION_ILLEGAL"),
    ],
)
def test_publication_is_all_or_nothing(journal: SqlJournal, pg: Open, spoil: str, code: str) -> None:
    with support.hold(journal, support.identity()) as lease:
        adopt(journal, lease)
        operation = committed(journal, lease)
        pg().execute(spoil)
        before = everything(pg())
        with pytest.raises(DponeError) as refused:
            publish(journal, operation)
    assert refused.value.code == code
    assert everything(pg()) == before


def test_a_swap_must_have_changed_the_target(journal: SqlJournal) -> None:
    with support.hold(journal, support.identity()) as lease:
        adopt(journal, lease)
        operation = committed(journal, lease)
        with pytest.raises(DponeError) as refused:
            publish(journal, operation, uuid=BASE_UUID)
    assert refused.value.code == "DPONE_JOURNAL_CORRUPT"


# ------------------------------------------------------------------------------------- baselines and readers


def test_a_baseline_is_adopted_once(journal: SqlJournal, pg: Open) -> None:
    with support.hold(journal, support.identity()) as lease:
        receipt = adopt(journal, lease)
        before = everything(pg())
        adopt(journal, lease)
        assert everything(pg()) == before
        other = Note.seal(text="another")
        for uuid, note in ((BASE_UUID, other), (NEW_UUID, receipt)):
            with pytest.raises(DponeError) as refused:
                journal.adopt_baseline(lease, mart="sales", target=TARGET, target_uuid=uuid, receipt=note)
            assert refused.value.code == "DPONE_BASELINE_EXISTS"
        assert everything(pg()) == before
    assert journal.baseline("sales") == receipt.sha256
    assert journal.generation(TARGET) is not None
    # Another mart cannot adopt the same target.
    with (
        journal.hold(
            ["mart:thief", f"target:{TARGET}"],
            identity=support.identity(),
            scope=DAY,
            deadline_seconds=5,
            on_wait=print,
        ) as lease,
        pytest.raises(DponeError) as taken,
    ):
        adopt(journal, lease, mart="thief")
    assert taken.value.code == "DPONE_BASELINE_EXISTS"


def test_the_planner_is_told_what_came_before(journal: SqlJournal, pg: Open) -> None:
    seen: list[Predecessors] = []

    def look(lease: Lease, salt: str) -> OperationRecord:
        def build(found: dict[str, Predecessors]) -> PlanBundle:
            seen.append(found["sales"])
            return support.bundle(found, salt=salt)

        [operation] = journal.admit(
            lease,
            workflow="daily",
            marts=["sales"],
            targets=[TARGET],
            scope=DAY,
            build=build,
            bind=support.bind,
        )
        return operation

    def receipt(operation: OperationRecord) -> None:
        lanes = ", ".join(f"{side}_l{lane}" for side in ("before", "after") for lane in range(4))
        pg().execute(
            "insert into dpone_control.model_receipt (operation_id, operation_plan_sha256, workflow_execution_id,"
            " fencing_epoch, worker_id, before_schema, before_name, after_schema, after_name, before_rows, after_rows,"
            f" updated_rows, inserted_rows, source_rows, created_at, {lanes}) values (%s, 'p', 'e', 1, 'w', 's', 'b',"
            " 's', 'a', 0, 5, 0, 5, 5, now() at time zone 'utc', 1, 1, 1, 1, 1, 1, 1, 1)",
            [operation.operation_id],
        )

    with support.hold(journal, support.identity()) as lease:
        baseline = adopt(journal, lease)
        first = look(lease, "1")
        receipt(first)
        first = journal.transition(first, S.FAILED_PRE_COMMIT)
        second = journal.transition(look(lease, "2"), S.FAILED_PRE_COMMIT)  # rolled back: no receipt
        assert journal.failed_scopes("sales") == [second]
        third = look(lease, "3")
        assert journal.failed_scopes("sales") == []
        receipt(third)
        third = journal.record(third, {"predecessor_uuid": BASE_UUID})
        for state in (S.PREPARED, S.COMMITTING, S.TARGET_COMMITTED):
            third = journal.transition(third, state)
        third = publish(journal, third)
        look(lease, "4")
    fresh, after_first, after_second, after_third = seen
    assert (fresh.last_operation, fresh.scope_head, fresh.committed_since_head) == (None, None, None)
    assert fresh.baseline_sha256 == baseline.sha256
    assert fresh.generation is not None
    assert fresh.generation.uuid == BASE_UUID
    assert (after_first.last_operation, after_first.committed_since_head) == (first, first)
    assert (after_second.last_operation, after_second.committed_since_head) == (second, first)
    assert (after_third.last_operation, after_third.committed_since_head) == (third, None)
    assert after_third.scope_head == journal.scope_head("sales", DAY)


def test_overview_and_phases(journal: SqlJournal) -> None:
    days = [Scope.day(f"2024-03-{n:02}") for n in (5, 3)]
    with support.hold(journal, support.identity()) as lease:
        adopt(journal, lease)
        for n, day in enumerate(days):
            publish(journal, committed(journal, lease, scope=day), uuid=f"00000000-0000-0000-0000-00000000001{n}")
        journal.transition(support.admit(journal, lease, scope=NEXT), S.FAILED_PRE_COMMIT)
        opened = support.admit(journal, lease, scope=DAY)
        began = datetime(2024, 4, 1, 12, tzinfo=UTC)
        journal.phase(opened.operation_id, opened.worker_id, "stage", started=began, seconds=1.5, rows=3, bytes_=9)
        journal.phase(opened.operation_id, opened.worker_id, "seal", started=began - timedelta(seconds=2), seconds=2.0)
    [mart] = journal.marts_overview()
    assert mart.mart == "sales"
    assert mart.baseline_sha256 == journal.baseline("sales")
    assert mart.states == {S.COMPLETE: 2, S.FAILED_PRE_COMMIT: 1, S.PREPARING: 1}
    assert (mart.complete_days, mart.first_complete, mart.last_complete) == (2, days[1], days[0])
    assert mart.open_operations == (opened,)
    assert [o.scope for o in journal.failed_scopes("sales")] == [NEXT]
    seal, stage = journal.phases(opened.operation_id)
    assert (seal["name"], seal["seconds"], seal["rows"]) == ("seal", 2.0, None)
    assert (stage["name"], stage["started"], stage["rows"], stage["bytes"]) == ("stage", began, 3, 9)


def test_the_engine_itself_keeps_one_open_operation_a_mart(journal: SqlJournal, pg: Open) -> None:
    with support.hold(journal, support.identity()) as lease:
        support.admit(journal, lease)
    copy = (
        "insert into dpone_control.operation select 'another', operation_plan_sha256, workflow_plan_sha256,"
        " workflow_execution_id, workflow, mart, target, scope_start, scope_end, revision, replacement_ordinal, mode,"
        " attempt_binding_sha256, {state}, version, unknown_since, fencing_epoch, worker_id, admitted_epoch, facts,"
        " admitted_at, updated_at from dpone_control.operation"
    )
    with pytest.raises(psycopg.errors.UniqueViolation):
        pg().execute(copy.format(state="'PREPARED'"))
    with pytest.raises(psycopg.errors.CheckViolation):
        pg().execute(copy.format(state="'DONE'"))
    pg().execute(copy.format(state="'FAILED_PRE_COMMIT'"))
