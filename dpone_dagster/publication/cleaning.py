"""What a COMPLETE operation leaves to be cleaned, by exact UUID; losing this step loses no truth."""

from dpone_dagster.errors import DponeError
from dpone_dagster.faults import reach
from dpone_dagster.journal.facts import Facts
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import OperationRecord
from dpone_dagster.publication.attempt import Attempt, predecessor_of, stage_of


def clean(attempt: Attempt, operation: OperationRecord) -> None:
    """Drop what finished operations of the mart left: staging, images, generations beyond the policy's newest.

    A failure here is noted and changes nothing: the operation stays COMPLETE, and the next publication of the
    mart cleans for this one as well.
    """
    try:
        with attempt.phase(operation, "clean"):
            attempt.lease.check()  # whoever was overtaken must not clear up after its successor
            _drop_leftovers(attempt, operation)
            _drop_old_generations(attempt, operation)
    except DponeError as error:
        attempt.ports.progress.note(f"Cleaning {operation.mart} was left for the next run ({error.code}).")
    reach("clean.after")


def _drop_leftovers(attempt: Attempt, operation: OperationRecord) -> None:
    journal, mart = attempt.ports.journal, attempt.mart(operation)
    for finished in journal.uncleaned(mart.name):
        if not _superseded(attempt, finished):
            continue
        stage_uuid = Facts.of(finished).stage_uuid
        if stage_uuid:
            attempt.analytics(operation).drop(stage_of(mart, finished), stage_uuid)
        attempt.ports.source.drop_images(finished)
        journal.operation_cleaned(finished.operation_id)


def _superseded(attempt: Attempt, finished: OperationRecord) -> bool:
    """Whether nobody can need the images any more: COMPLETE, or failed and followed by a COMPLETE operation."""
    if finished.state is State.COMPLETE:
        return True
    day = attempt.ports.journal.history(finished.mart, finished.scope)
    later = day[[o.operation_id for o in day].index(finished.operation_id) + 1 :]
    return any(o.state is State.COMPLETE for o in later)


def _drop_old_generations(attempt: Attempt, operation: OperationRecord) -> None:
    journal, mart = attempt.ports.journal, attempt.mart(operation)
    for uuid in journal.retired_generations(mart.target.dotted)[attempt.ports.policy.kept_predecessors :]:
        attempt.analytics(operation).drop(predecessor_of(mart, uuid), uuid)
        journal.generation_dropped(mart.target.dotted, uuid)
