"""What every run does first: settle what an earlier run of the same marts left behind.

An operation that may have changed ClickHouse is finished forward, and with it the rest of its workflow. Any
other is closed as FAILED_PRE_COMMIT once its outcome is proven, and the planner goes on from there. What cannot
be proven refuses.
"""

from dpone_dagster.contracts.names import query_prefix
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.facts import Facts
from dpone_dagster.journal.graph import FORWARD_ONLY, TERMINAL, State
from dpone_dagster.journal.port import OperationRecord
from dpone_dagster.publication.attempt import Attempt, MartResult, shadows_of
from dpone_dagster.publication.closing import close_before_commit
from dpone_dagster.publication.commit import commit_all, settle
from dpone_dagster.publication.preflight import prove_again


def reconcile(attempt: Attempt) -> dict[str, MartResult] | None:
    """Settle every open operation of the workflow's marts.

    Returns:
        The results of this very scope when an earlier run's operations of it were finished forward; else None.

    Raises:
        DponeError: DPONE_COMMIT_UNKNOWN, DPONE_WORKFLOW_CHANGED, DPONE_ENGINE_UNAVAILABLE.
    """
    journal, finished = attempt.ports.journal, None
    executions: dict[str, None] = {}
    for mart in attempt.workflow.marts:
        for operation in journal.open_operations(mart.name):
            executions[operation.workflow_execution_id] = None
    for execution in executions:
        results = _settle_execution(attempt, execution)
        whole = set(results) == {m.name for m in attempt.workflow.marts}
        if whole and all(r.operation.scope == attempt.scope for r in results.values()):
            finished = results
    return finished


def _settle_execution(attempt: Attempt, execution: str) -> dict[str, MartResult]:
    journal = attempt.ports.journal
    operations = journal.workflow_operations(execution)
    targets = {m.name: m.target.dotted for m in attempt.workflow.marts}
    if strangers := sorted({o.mart for o in operations if targets.get(o.mart) != o.target}):
        raise DponeError(
            "DPONE_WORKFLOW_CHANGED",
            f"An unfinished operation also covers {', '.join(strangers)}, now elsewhere.",
        )
    operations.sort(key=lambda o: list(targets).index(o.mart))  # plan order
    opened = [o for o in operations if o.state not in TERMINAL]
    if not opened:  # its own worker, that we took for dead, has just finished it
        return {}
    attempt.ports.progress.note(f"Settling what an earlier run of {opened[0].scope.key} left behind.")
    taken = {o.operation_id: o for o in _take_over(attempt, opened)}
    for operation in list(taken.values()):
        _move_shadow(attempt, operation)
        taken[operation.operation_id] = _believe_the_map(attempt, operation)
    operations = [taken.get(o.operation_id, o) for o in operations]
    if not any(_may_have_exchanged(o) for o in operations):
        close_before_commit(
            attempt,
            list(taken),
            code="DPONE_RUN_LOST",
            sentence="The run that worked on this ended without a word.",
        )
        return {}
    return commit_all(attempt, _still_provable(attempt, operations), action="finished")


def _still_provable(attempt: Attempt, operations: list[OperationRecord]) -> list[OperationRecord]:
    """Settle what the UUID map settles; prove again what was only PREPARED, and close what no longer holds.

    Time has passed since the dead worker's proof, so it is not believed. An operation that is closed here goes
    to the planner; the others of its workflow go forward all the same.
    """
    forward = []
    for operation in operations:
        if operation.state in (State.COMMITTING, State.COMMIT_UNKNOWN):
            operation = settle(attempt, operation)
        if operation.state is State.PREPARED:
            try:
                prove_again(attempt, operation)
            except DponeError as error:
                if error.code == "DPONE_ENGINE_UNAVAILABLE":
                    raise
                close_before_commit(attempt, [operation.operation_id], code=error.code, sentence=error.sentence)
                continue
        if operation.state is not State.FAILED_PRE_COMMIT:
            forward.append(operation)
    return forward


def _may_have_exchanged(operation: OperationRecord) -> bool:
    unknown = operation.state is State.COMMIT_UNKNOWN and operation.unknown_since is State.COMMITTING
    return operation.state in FORWARD_ONLY or operation.state is State.COMPLETE or unknown


def _take_over(attempt: Attempt, operations: list[OperationRecord]) -> list[OperationRecord]:
    """Become the holder. The dead hold no lock, but a statement of theirs may still run: it is ended first."""
    journal, ids = attempt.ports.journal, [o.operation_id for o in operations]
    for operation in operations:
        attempt.analytics(operation).quiesce(query_prefix(operation.operation_id))
    try:
        return journal.take_over(attempt.lease, ids)
    except DponeError as error:
        if error.code != "DPONE_OPERATION_HELD":
            raise
    for worker_id in {o.worker_id for o in operations} - {attempt.identity.worker_id}:
        journal.end_worker(worker_id, reason="its lock was free and its statement still running")
    return journal.take_over(attempt.lease, ids)


def _move_shadow(attempt: Attempt, operation: OperationRecord) -> None:
    """Give the shadow this attempt's epoch, so that a late EXCHANGE of the dead finds no table."""
    analytics = attempt.analytics(operation)
    new, *older = shadows_of(attempt, operation)
    for old in older:
        if uuid := analytics.uuid(old):
            analytics.rename(old, new, uuid)


def _believe_the_map(attempt: Attempt, operation: OperationRecord) -> OperationRecord:
    """Take up an EXCHANGE that got through after its worker had seen that it did not: the map decides."""
    shadow_uuid = Facts.of(operation).shadow_uuid
    if operation.state is not State.PREPARED or shadow_uuid is None:
        return operation
    if attempt.analytics(operation).uuid(attempt.mart(operation).target) != shadow_uuid:
        return operation
    return attempt.ports.journal.transition(operation, State.COMMITTING)
