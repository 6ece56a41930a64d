"""What must hold of a mart's pair of tables before anything is admitted, and again before the shadow is built."""

from dpone_dagster.contracts.mart import MartSpec
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.facts import Facts
from dpone_dagster.journal.port import OperationRecord
from dpone_dagster.ports import PhysicalDesign
from dpone_dagster.publication.attempt import Attempt, shadow_of, stage_of


def check_pair(attempt: Attempt, mart: MartSpec) -> PhysicalDesign:
    """Refuse a pair that has no baseline, has drifted, or whose target is not the journal's generation.

    Returns:
        The target's physical design as observed now.

    Raises:
        DponeError: DPONE_BASELINE_MISSING, DPONE_MART_*, DPONE_TARGET_*.
    """
    head = attempt.ports.journal.generation(mart.target.dotted)
    if head is None or attempt.ports.journal.baseline(mart.name) is None:
        raise DponeError("DPONE_BASELINE_MISSING", f"Mart {mart.name} has no adopted baseline.")
    attempt.ports.source.check_mart(mart)
    analytics = attempt.ports.analytics(f"dpone-check-{attempt.identity.worker_id[:8]}-")
    design = analytics.design(mart.target)
    analytics.check_design(mart, design)
    check_generation(attempt, mart, design.uuid if design else None)
    assert design is not None
    return design


def check_generation(attempt: Attempt, mart: MartSpec, uuid: str | None) -> None:
    """Refuse a target that is not the journal's generation.

    Args:
        attempt: whose journal says which generation it should be.
        mart: the mart.
        uuid: what the target's name has now; None when no table has it.

    Raises:
        DponeError: DPONE_TARGET_ABSENT, DPONE_TARGET_REPLACED.
    """
    if uuid is None:
        raise DponeError("DPONE_TARGET_ABSENT", f"Target {mart.target.dotted} does not exist.")
    head = attempt.ports.journal.generation(mart.target.dotted)
    if head is None or head.uuid != uuid:
        raise DponeError(
            "DPONE_TARGET_REPLACED",
            f"Target {mart.target.dotted} is not the generation that the journal published.",
            expected_uuid=head.uuid if head else None,
            observed_uuid=uuid,
        )


def prove_again(attempt: Attempt, operation: OperationRecord) -> None:
    """Repeat the proofs of an operation that another worker had PREPARED.

    Raises:
        DponeError: whatever no longer holds.
    """
    mart, facts, analytics = attempt.mart(operation), Facts.of(operation), attempt.analytics(operation)
    assert facts.after is not None
    design = check_pair(attempt, mart)
    if facts.target_outcome == "NOT_REQUIRED_EMPTY_SCOPE":
        prove_empty(attempt, operation)
        return
    shadow = shadow_of(mart, operation)
    if analytics.uuid(shadow) != facts.shadow_uuid:
        raise DponeError("DPONE_SHADOW_LOST", f"The proven shadow of {mart.name} no longer exists.")
    analytics.prove(mart, design, stage_of(mart, operation), shadow, operation.scope, facts.after.digest)


def prove_empty(attempt: Attempt, operation: OperationRecord) -> None:
    """Spec R, "Empty scope": nothing to exchange, but only if the target's day is empty as well."""
    mart = attempt.mart(operation)
    strangers = attempt.analytics(operation).count(mart.target, mart, operation.scope)
    if strangers:
        raise DponeError(
            "DPONE_TARGET_DIVERGED",
            f"The after image of {mart.name} is empty and the target holds {strangers} rows of the day.",
        )
