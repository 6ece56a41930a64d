"""From PREPARED to COMPLETE, mart by mart in plan order; and the same again, forward, after a crash.

The UUID map decides what happened to an EXCHANGE, never its reply. Before each EXCHANGE the intent is durable
(COMMITTING); an EXCHANGE is sent once an intent, since a second one would swap the tables back.
"""

from dpone_dagster.contracts.documents import (
    ClickHouseTerminalReceipt,
    DurableWorkflowSummary,
    GateReport,
    PublicationTerminalReceipt,
)
from dpone_dagster.contracts.mart import MartSpec
from dpone_dagster.errors import DponeError
from dpone_dagster.faults import reach
from dpone_dagster.journal.facts import Facts
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import JournalPort, OperationRecord
from dpone_dagster.ports import TestResult
from dpone_dagster.publication.attempt import Attempt, MartResult, predecessor_of, shadow_of
from dpone_dagster.publication.cleaning import clean


def commit_all(
    attempt: Attempt, operations: list[OperationRecord], *, action: str = "published"
) -> dict[str, MartResult]:
    """Commit every PREPARED (or later) operation of one workflow in plan order, then clean up."""
    results = commit(attempt, operations, action=action)
    for result in results.values():
        clean(attempt, result.operation)
    return results


def commit(attempt: Attempt, operations: list[OperationRecord], *, action: str = "published") -> dict[str, MartResult]:
    """Commit every PREPARED (or later) operation of one workflow in plan order.

    Interrupts are no longer obeyed from here on: after the first EXCHANGE the rest go forward.
    """
    reach("prepared.after")
    results = {}
    for operation in operations:
        complete = finish(attempt, operation)
        gates, tests = judged(attempt.ports.journal, complete)
        results[operation.mart] = MartResult(action=action, operation=complete, gates=gates, tests=tests)
    if set(results) == {m.name for m in attempt.workflow.marts}:
        summarize(attempt, [r.operation for r in results.values()])
    return results


def judged(journal: JournalPort, operation: OperationRecord) -> tuple[GateReport | None, tuple[TestResult, ...]]:
    """What gates and dbt tests said of an operation, as the journal keeps it, whoever ran them."""
    facts = Facts.of(operation)
    body = journal.document(facts.gate_report_sha256) if facts.gate_report_sha256 else None
    tests = tuple(TestResult(**test.model_dump()) for test in facts.dbt_tests)
    return (GateReport.parse(body) if body else None), tests


def summarize(attempt: Attempt, operations: list[OperationRecord]) -> None:
    """Keep the document that says that every mart of the workflow is COMPLETE."""
    journal, publications = attempt.ports.journal, []
    for operation in operations:
        facts = Facts.of(operation)
        terminal = journal.document(facts.terminal_receipt_sha256 or "") or {}
        publications.append(
            {
                "operation_id": operation.operation_id,
                "operation_plan_sha256": operation.operation_plan_sha256,
                "workflow_execution_binding_sha256": facts.execution_binding_sha256,
                "attempt_binding_sha256": operation.attempt_binding_sha256,
                "scope_revision": operation.revision,
                "target_generation": terminal.get("target_generation"),
                "artifact_manifest_sha256": facts.artifact_manifest_sha256,
                "clickhouse_terminal_receipt_sha256": facts.clickhouse_receipt_sha256,
                "terminal_receipt_sha256": facts.terminal_receipt_sha256,
                "status": "COMPLETE",
            }
        )
    first = operations[0]
    summary = DurableWorkflowSummary.seal(
        workflow_execution_id=first.workflow_execution_id,
        workflow_execution_binding_sha256=Facts.of(first).execution_binding_sha256,
        workflow_plan_sha256=first.workflow_plan_sha256,
        expected_operation_ids=[o.operation_id for o in operations],
        publications=publications,
        status="FULLY_COMPLETE",
    )
    journal.record(first, {"durable_summary_sha256": summary.sha256}, documents=[summary])


def finish(attempt: Attempt, operation: OperationRecord) -> OperationRecord:
    """Take one operation from wherever it stands, PREPARED or later, to COMPLETE."""
    if operation.state is State.PREPARED and Facts.of(operation).target_outcome == "NOT_REQUIRED_EMPTY_SCOPE":
        return _publish(attempt, operation)
    if operation.state is State.PREPARED:
        operation = _exchange(attempt, operation)
    elif operation.state in (State.COMMITTING, State.COMMIT_UNKNOWN):
        operation = settle(attempt, operation)
        if operation.state is State.PREPARED:
            operation = _exchange(attempt, operation)
    if operation.state in (State.TARGET_COMMITTED, State.COMMITTED_INCOMPLETE):
        operation = _publish(attempt, _after_exchange(attempt, operation))
    if operation.state is not State.COMPLETE:
        raise DponeError(
            "DPONE_JOURNAL_CORRUPT", f"{operation.mart} is {operation.state} after its workflow's barrier."
        )
    return operation


def _exchange(attempt: Attempt, operation: OperationRecord) -> OperationRecord:
    mart, analytics = attempt.mart(operation), attempt.analytics(operation)
    attempt.lease.check()
    operation = attempt.ports.journal.transition(operation, State.COMMITTING)
    with attempt.phase(operation, "exchange"):
        attempt.lease.check()
        reach("exchange.before")
        try:
            analytics.exchange(mart.target, shadow_of(mart, operation))
        except DponeError:
            # Refused, lost or late: the reply says nothing. Let no request of ours run on, then read the map.
            analytics.quiesce(analytics.query_prefix)
        reach("exchange.after")
        operation = settle(attempt, operation)
    if operation.state is not State.TARGET_COMMITTED:
        raise DponeError(
            "DPONE_EXCHANGE_NOT_DONE",
            f"The UUID map of {mart.target.dotted} proves that the exchange did not happen.",
        )
    return operation


def settle(attempt: Attempt, operation: OperationRecord) -> OperationRecord:
    """Read the UUID map and take the edge that it proves, out of COMMITTING or COMMIT_UNKNOWN.

    Raises:
        DponeError: DPONE_COMMIT_UNKNOWN when the map proves neither side; the operation is COMMIT_UNKNOWN then.
    """
    journal, mart, facts = attempt.ports.journal, attempt.mart(operation), Facts.of(operation)
    try:
        target, beside = _uuid_map(attempt, mart, operation)
    except DponeError:
        if operation.state is State.COMMITTING:
            journal.transition(operation, State.COMMIT_UNKNOWN)
        raise
    if target == facts.shadow_uuid:
        receipt = ClickHouseTerminalReceipt.seal(
            operation_id=operation.operation_id,
            fencing_epoch=operation.fencing_epoch,
            target=mart.target.dotted,
            predecessor_uuid=facts.predecessor_uuid,
            successor_uuid=facts.shadow_uuid,
            physical_design_sha256=facts.physical_design_sha256,
            proof_sha256=facts.proof_sha256,
            after_image_sha256=facts.after.digest.sha256 if facts.after else None,
        )
        return journal.transition(
            operation,
            State.TARGET_COMMITTED,
            facts={"clickhouse_receipt_sha256": receipt.sha256},
            documents=[receipt],
        )
    if operation.state is State.COMMITTING:
        operation = journal.transition(operation, State.COMMIT_UNKNOWN)
    if target == facts.predecessor_uuid and beside in (facts.shadow_uuid, None):
        return journal.transition(operation, State.PREPARED)
    raise DponeError(
        "DPONE_COMMIT_UNKNOWN",
        f"Target {mart.target.dotted} is neither the predecessor nor the successor of the operation.",
        next_step="Somebody replaced the table. Put the generation back that `dpone explain` names, then run again.",
        target_uuid=target,
    )


def _uuid_map(attempt: Attempt, mart: MartSpec, operation: OperationRecord) -> tuple[str | None, str | None]:
    analytics = attempt.analytics(operation)
    return analytics.uuid(mart.target), analytics.uuid(shadow_of(mart, operation))


def _after_exchange(attempt: Attempt, operation: OperationRecord) -> OperationRecord:
    """Put the replaced generation aside, let merges run again, and observe the target's design once more."""
    reach("target_committed.after")
    journal, mart, facts = attempt.ports.journal, attempt.mart(operation), Facts.of(operation)
    analytics = attempt.analytics(operation)
    assert facts.predecessor_uuid is not None
    shadow = shadow_of(mart, operation)
    if analytics.uuid(shadow) == facts.predecessor_uuid:
        analytics.rename(shadow, predecessor_of(mart, facts.predecessor_uuid), facts.predecessor_uuid)
    analytics.start_merges(mart.target)
    design = analytics.design(mart.target)
    if design is None or design.uuid != facts.shadow_uuid or design.sha256 != facts.physical_design_sha256:
        if operation.state is State.TARGET_COMMITTED:
            journal.transition(operation, State.COMMITTED_INCOMPLETE)
        raise DponeError(
            "DPONE_TARGET_CHANGED_AFTER_EXCHANGE",
            f"Target {mart.target.dotted} no longer has the physical design that was proven.",
        )
    return operation


def _publish(attempt: Attempt, operation: OperationRecord) -> OperationRecord:
    """One SERIALIZABLE transaction: generation head, scope head, checkpoint, journal COMPLETE."""
    journal, mart, facts = attempt.ports.journal, attempt.mart(operation), Facts.of(operation)
    assert facts.after is not None
    assert facts.artifact_manifest_sha256 is not None
    assert facts.target_outcome is not None
    target_uuid = facts.shadow_uuid if facts.target_outcome == "EXCHANGED" else facts.predecessor_uuid
    assert target_uuid is not None
    head = journal.generation(mart.target.dotted)
    assert head is not None
    receipt = PublicationTerminalReceipt.seal(
        operation_id=operation.operation_id,
        state=str(State.COMPLETE),
        scope_revision=operation.revision,
        target_generation=head.generation + (0 if head.uuid == target_uuid else 1),
        rows=facts.after.rows,
        after_image_sha256=facts.after.digest.sha256,
        artifact_manifest_sha256=facts.artifact_manifest_sha256,
        clickhouse_terminal_receipt_sha256=facts.clickhouse_receipt_sha256,
        target_mutation_outcome=facts.target_outcome,
    )
    attempt.lease.check()
    reach("publish.before")
    with attempt.phase(operation, "publish"):
        operation = journal.publish(
            operation,
            target_uuid=target_uuid,
            rows=facts.after.rows,
            after_image_sha256=facts.after.digest.sha256,
            artifact_manifest_sha256=facts.artifact_manifest_sha256,
            facts={"terminal_receipt_sha256": receipt.sha256},
            documents=[receipt],
        )
    reach("publish.after")
    return operation
