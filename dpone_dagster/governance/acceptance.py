"""Acceptance: exact counts of source, staging and target that outlive the cleanup, and what they say together.

The order is: ``validate`` before the target changes, ``capture`` of each requested side when it exists, ``compare``
after each boundary. Under ``required`` what cannot be measured and what disagrees fail; under ``warn_only`` they are
kept as warnings and never become a success.
"""

from collections.abc import Callable, Collection, Sequence
from enum import StrEnum

from dpone_dagster.contracts.loads import (
    AcceptanceBoundary,
    AcceptanceDifference,
    AcceptanceSide,
    AcceptanceSnapshot,
)
from dpone_dagster.declarations.manifest import Acceptance, AcceptanceChecks
from dpone_dagster.declarations.manifest import Columns as Selection
from dpone_dagster.errors import DponeError
from dpone_dagster.governance import rules
from dpone_dagster.governance.gate_runner import NEVER_A_VERDICT
from dpone_dagster.ports import Columns, MetricSnapshot, ProbePort

FRAMEWORK_PREFIX = "__dpone__"
SIDES: tuple[AcceptanceSide, ...] = ("source", "staged", "target")

_UNAVAILABLE = "DPONE_ACCEPTANCE_UNAVAILABLE"


class LoadPath(StrEnum):
    """How a load reaches its target."""

    STAGED = "staged"
    LEGACY = "legacy"
    RESUME_ONLY = "resume_only"


# The sides that exist on a path, and where each is measured.
_BOUNDARIES: dict[LoadPath, dict[AcceptanceSide, AcceptanceBoundary]] = {
    LoadPath.STAGED: {"source": "pre_commit", "staged": "pre_commit", "target": "post_commit"},
    LoadPath.LEGACY: {"source": "pre_commit", "target": "post_commit"},
    LoadPath.RESUME_ONLY: {"source": "resume_validation", "target": "resume_validation"},
}


def physical_sides(path: LoadPath) -> tuple[AcceptanceSide, ...]:
    """Return the sides that exist on a path, in order."""
    return tuple(_BOUNDARIES[path])


def requested_sides(policy: Acceptance) -> tuple[AcceptanceSide, ...]:
    """Return the sides that a policy asks for, in order; none of a disabled one."""
    return tuple(side for side in SIDES if policy.enabled and getattr(policy.capture, side))


def select(selection: Selection, columns: Columns) -> tuple[str, ...]:
    """Return the names of the columns that a selector means, in the side's order or the author's.

    ``off``, ``none`` and ``false`` mean none. ``true``, ``all_columns``, ``business_columns``, ``strict`` and
    ``source_and_binary_semantics`` all mean every business column: counts are exact and strings are compared byte by
    byte in any case, so the last two ask for what is done anyway.

    Raises:
        DponeError: DPONE_ACCEPTANCE_UNAVAILABLE for a listed name that the side does not have.
    """
    business = business_columns(columns)
    if isinstance(selection, tuple):
        if missing := [name for name in selection if name not in business]:
            raise DponeError(_UNAVAILABLE, f"There is no business column {missing[0]}.", field=missing[0])
        return selection
    return () if selection in (False, "off", "none") else business


def business_columns(columns: Columns) -> tuple[str, ...]:
    """Return the names of all columns but the framework's."""
    return tuple(column.name for column in columns if not column.name.startswith(FRAMEWORK_PREFIX))


def validate(
    policy: Acceptance, *, path: LoadPath, columns: Columns, probed: Collection[str] = SIDES
) -> tuple[AcceptanceSnapshot, ...]:
    """Check before the target changes that every requested side can be measured.

    Args:
        path: how this load reaches its target.
        columns: the load's columns.
        probed: the sides for which there is or will be a probe.

    Returns:
        One warning snapshot a side that is asked for and cannot be measured; ``capture`` is for the others.

    Raises:
        DponeError: DPONE_ACCEPTANCE_UNAVAILABLE under ``required``.
    """
    warnings = []
    for side in requested_sides(policy):
        boundary = _BOUNDARIES[path].get(side)
        before: AcceptanceBoundary = "resume_validation" if path is LoadPath.RESUME_ONLY else "pre_commit"
        if boundary is None:
            fault = f"The path {path} has no {side} side."
        elif side not in probed:
            fault = f"The {side} side cannot be measured: it has no probe."
        else:
            if policy.mode == "required":
                for selection in (policy.checks.null_counts, policy.checks.distinct_counts):
                    select(selection, columns)
            continue
        if policy.mode == "required":
            raise DponeError(_UNAVAILABLE, fault, side=side, boundary=before)
        warnings.append(_warning(side, boundary or before, _UNAVAILABLE, columns=columns))
    return tuple(warnings)


def capture(
    side: AcceptanceSide,
    probe: ProbePort | Callable[[], ProbePort],
    policy: Acceptance,
    *,
    path: LoadPath,
    columns: Columns,
) -> AcceptanceSnapshot:
    """Measure one side, with one aggregate query.

    Args:
        probe: the side's probe, or what makes it and may refuse to.
        columns: the load's columns; the side is measured in these.

    Raises:
        DponeError: DPONE_ACCEPTANCE_UNAVAILABLE under ``required``, with side and boundary, when the side cannot be
            measured or answers with impossible counts. Under both modes what stops the load itself
            (``NEVER_A_VERDICT``).
    """
    boundary = _BOUNDARIES[path].get(side)
    if boundary is None:
        raise DponeError(_UNAVAILABLE, f"The path {path} has no {side} side.", side=side)
    dataset = None
    try:
        asked = probe() if callable(probe) else probe
        dataset = asked.dataset
        measured = asked.metrics(policy.checks)
        return _snapshot(side, boundary, measured, policy.checks, columns)
    except DponeError as error:
        if error.code in NEVER_A_VERDICT:
            raise
        if policy.mode == "required":
            raise DponeError(
                _UNAVAILABLE,
                f"The {side} side could not be measured ({error.code}). {error.sentence}",
                side=side,
                boundary=boundary,
                cause=error.code,
            ) from None
        return _warning(side, boundary, error.code, dataset=dataset, columns=columns)


def compare(
    snapshots: Sequence[AcceptanceSnapshot], policy: Acceptance, *, same_rows_in_target: bool
) -> tuple[AcceptanceDifference, ...]:
    """Compare every side that was measured with the first of them, count by count.

    Args:
        snapshots: what was captured so far; warnings compare with nothing.
        same_rows_in_target: whether the target was measured over the very rows of the load: its day or its keys, or a
            table that the load replaced. An appended target holds older rows too and is not compared.

    Returns:
        The differences under ``warn_only``; empty where the sides agree.

    Raises:
        DponeError: DPONE_ACCEPTANCE_FAILED under ``required``, naming count, column and sides of the first difference,
            with all of them and the last boundary in ``details``.
    """
    measured = [s for s in snapshots if s.status == "succeeded" and (s.side != "target" or same_rows_in_target)]
    if len(measured) < 2:
        return ()
    first, *others = sorted(measured, key=lambda snapshot: SIDES.index(snapshot.side))
    differences = tuple(difference for other in others for difference in _differences(first, other))
    if differences and policy.mode == "required":
        raise DponeError(
            "DPONE_ACCEPTANCE_FAILED",
            f"{len(differences)} counts disagree: {differences[0].sentence()}.",
            boundary=others[-1].boundary,
            differences=[difference.as_json() for difference in differences],
        )
    return differences


def _differences(first: AcceptanceSnapshot, other: AcceptanceSnapshot) -> list[AcceptanceDifference]:
    def difference(metric: str, column: str | None, ours: int | None, theirs: int | None) -> AcceptanceDifference:
        return AcceptanceDifference.model_validate(
            {
                "metric": metric,
                "column": column,
                "side": first.side,
                "count": ours,
                "other_side": other.side,
                "other_count": theirs,
            }
        )

    found = []
    if first.row_count != other.row_count:
        found.append(difference("row_count", None, first.row_count, other.row_count))
    for metric, ours, theirs in (
        ("null_count", first.null_counts, other.null_counts),
        ("distinct_count", first.distinct_counts, other.distinct_counts),
    ):
        for column in dict.fromkeys((*ours, *theirs)):
            if ours.get(column) != theirs.get(column):
                found.append(difference(metric, column, ours.get(column), theirs.get(column)))
    return found


def _snapshot(
    side: AcceptanceSide,
    boundary: AcceptanceBoundary,
    measured: MetricSnapshot,
    checks: AcceptanceChecks,
    columns: Columns,
) -> AcceptanceSnapshot:
    """Take over what a probe measured, if it is exactly what was asked for."""
    wanted = {
        "null_counts": select(checks.null_counts, columns),
        "distinct_counts": select(checks.distinct_counts, columns),
    }
    row_count = rules.count(measured.row_count)
    if checks.row_count and row_count is None:
        raise DponeError(_UNAVAILABLE, "The row count is missing or impossible.", field="row_count")
    counts: dict[str, dict[str, int]] = {}
    for field, names in wanted.items():
        given = getattr(measured, field)
        found = {name: number for name in names if (number := rules.count(given.get(name))) is not None}
        if len(found) < len(names):
            raise DponeError(_UNAVAILABLE, f"{field} lacks a column or has an impossible count.", field=field)
        counts[field] = found
    return AcceptanceSnapshot(
        schema="dpone.acceptance.metric_snapshot.v1",
        side=side,
        dataset=measured.dataset,
        boundary=boundary,
        status="succeeded",
        columns=business_columns(columns),
        row_count=row_count if checks.row_count else None,
        null_counts=counts["null_counts"],
        distinct_counts=counts["distinct_counts"],
    )


def _warning(
    side: AcceptanceSide,
    boundary: AcceptanceBoundary,
    code: str,
    *,
    columns: Columns,
    dataset: str | None = None,
) -> AcceptanceSnapshot:
    return AcceptanceSnapshot(
        schema="dpone.acceptance.metric_snapshot.v1",
        side=side,
        dataset=dataset,
        boundary=boundary,
        status="warning",
        columns=business_columns(columns),
        error_code=code,
    )
