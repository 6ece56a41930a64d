"""A failure before the ClickHouse commit: establish where both engines stand, clear the scratch, close the books.

The SQL day may be committed by then. It stays, with its before image, and the next run restores it and rebuilds
(`failed_precommit_replacement`). Where an outcome cannot be established, nothing is closed: the operation stays
open or becomes COMMIT_UNKNOWN, and the next run reconciles it.
"""

from collections.abc import Sequence

from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.contracts.documents import FailedWorkflowSummary
from dpone_dagster.errors import DponeError, unexpected
from dpone_dagster.journal.facts import Facts
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import OperationRecord
from dpone_dagster.ports import MutationOutcome
from dpone_dagster.publication.attempt import Attempt, PublicationFailed, shadows_of, stage_of


def fail_before_commit(attempt: Attempt, operation_ids: Sequence[str], error: BaseException) -> BaseException:
    """Close a workflow's operations as FAILED_PRE_COMMIT, if that can be proven now.

    Returns:
        What the caller should raise: PublicationFailed, or ``error`` itself where it is an interrupt.
    """
    refusal = error if isinstance(error, DponeError) else unexpected(error)
    try:
        close_before_commit(attempt, operation_ids, code=refusal.code, sentence=refusal.sentence)
        closed = True
    except DponeError as second:
        # The first reason is the one to tell; the second only says that the books stay open.
        attempt.ports.progress.note(f"The operation stays open for the next run ({second.code}).")
        closed = False
    if not isinstance(error, Exception):
        return error
    failure = PublicationFailed(
        refusal.code, refusal.sentence, next_step=_next_step(refusal, closed), **refusal.details
    )
    failure.gates, failure.tests, failure.target_untouched = attempt.gates, attempt.tests, closed
    return failure


def close_before_commit(
    attempt: Attempt, operation_ids: Sequence[str], *, code: str, sentence: str
) -> list[OperationRecord]:
    """Prove every operation's SQL outcome, drop its ClickHouse scratch, and write FAILED_PRE_COMMIT.

    Raises:
        DponeError: DPONE_COMMIT_UNKNOWN when an outcome is unknown (that operation is COMMIT_UNKNOWN then), or
            whatever kept the engines from being asked.
    """
    journal = attempt.ports.journal
    attempt.lease.check()  # whoever was overtaken must not clear up after its successor
    operations = []
    for operation_id in operation_ids:
        operation = journal.operation(operation_id)
        assert operation is not None
        if operation.worker_id != attempt.identity.worker_id:
            # Taken over since the check: its names in ClickHouse are the successor's by now.
            raise DponeError("DPONE_FENCED", f"Another worker holds the operation of {operation.mart} now.")
        operations.append(operation)
    outcomes: dict[str, str] = {}
    unknown: list[str] = []
    for operation in operations:
        _drop_scratch(attempt, operation)
        outcome, _ = attempt.ports.source.outcome(operation)
        outcomes[operation.operation_id] = str(outcome)
        if outcome is MutationOutcome.COMMIT_UNKNOWN:
            unknown.append(operation.mart)
            if operation.state is State.PREPARING:
                journal.transition(operation, State.COMMIT_UNKNOWN, facts={"outcome": str(outcome)})
    if unknown:
        raise DponeError("DPONE_COMMIT_UNKNOWN", f"The SQL outcome of {', '.join(unknown)} cannot be established.")
    summary = _summary(operations, outcomes)
    operations = [_no_longer_unknown(attempt, o, outcomes[o.operation_id]) for o in operations]
    return [
        operation
        if operation.state is State.FAILED_PRE_COMMIT
        else journal.transition(
            operation,
            State.FAILED_PRE_COMMIT,
            facts={
                "outcome": outcomes[operation.operation_id],
                "failure_code": code,
                "failure_sentence": sentence,
                "failed_summary_sha256": summary.sha256,
            },
            documents=[summary],
        )
        for operation in operations
    ]


def _no_longer_unknown(attempt: Attempt, operation: OperationRecord, outcome: str) -> OperationRecord:
    """Leave COMMIT_UNKNOWN by the edge that says the commit is proven; the other edge says that it is not."""
    if operation.state is State.COMMIT_UNKNOWN and outcome == MutationOutcome.COMMITTED_WITH_IMAGES:
        return attempt.ports.journal.transition(operation, State.PREPARING, facts={"outcome": outcome})
    return operation


def _drop_scratch(attempt: Attempt, operation: OperationRecord) -> None:
    """Drop staging and shadow by the UUID that their operation-specific names have now.

    Raises:
        DponeError: DPONE_COMMIT_UNKNOWN, and nothing is dropped, when a shadow's name has the published generation.
    """
    mart, analytics = attempt.mart(operation), attempt.analytics(operation)
    analytics.quiesce(analytics.query_prefix)
    head = attempt.ports.journal.generation(mart.target.dotted)
    found = {r: analytics.uuid(r) for r in (stage_of(mart, operation), *shadows_of(attempt, operation))}
    if head and head.uuid in found.values():
        raise DponeError(
            "DPONE_COMMIT_UNKNOWN", f"The published generation of {mart.target.dotted} is under its shadow's name."
        )
    for relation, uuid in found.items():
        if uuid:
            analytics.drop(relation, uuid)


def _summary(operations: Sequence[OperationRecord], outcomes: dict[str, str]) -> FailedWorkflowSummary:
    first = operations[0]
    return FailedWorkflowSummary.seal(
        workflow_id=first.workflow_execution_id,
        workflow_plan_sha256=first.workflow_plan_sha256,
        workflow_execution_binding_sha256=Facts.of(first).execution_binding_sha256,
        status="FAILED_PRE_COMMIT",
        expected_operation_ids=[o.operation_id for o in operations],
        models=[
            {
                "operation_id": o.operation_id,
                "attempt_binding_sha256": o.attempt_binding_sha256,
                "mssql_outcome": outcomes[o.operation_id],
                "mssql_evidence_sha256": Facts.of(o).build_receipt_sha256
                or sha256_of({"schema": "dpone.no-receipt.v1", "operation_id": o.operation_id}),
            }
            for o in operations
        ],
    )


def _next_step(error: DponeError, closed: bool) -> str:
    if not closed:
        return error.next_step + " The operation stays open; the next run of the day settles it first."
    if "again" not in error.next_step:
        again = " Then run the day again: a committed SQL day is restored from its before image and rebuilt."
    else:
        again = " A committed SQL day is kept with its before image; the next run restores it and rebuilds."
    return f"{error.next_step}{again} ClickHouse is unchanged and staging is gone."
