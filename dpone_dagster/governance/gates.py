"""Gates: pure rules over counted facts of the source image and of staging, before the target changes.

The engines count; this module only compares. A number that could not be had is None and never zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dpone_dagster.contracts.documents import GateReport, GateResult
from dpone_dagster.contracts.mart import GateSpec
from dpone_dagster.contracts.set_digest import SetDigest

# The one gate that nobody can leave out: staging equals the after image value by value.
STAGING_PROOF = GateSpec(id="dpone_staging_equals_source", type="typed_hash_reconciliation", severity="error")


@dataclass(frozen=True, kw_only=True)
class Side:
    """What an engine counted on one side; None where it could not."""

    rows: int | None
    digest: SetDigest | None


def evaluate(*, operation_id: str, gates: Sequence[GateSpec], source: Side, staged: Side) -> GateReport:
    """Evaluate every declared gate and the built-in staging proof.

    Args:
        operation_id: the operation whose rows these are.
        gates: the mart's declared gates.
        source: the after image in SQL Server.
        staged: the staging table in ClickHouse.

    Returns:
        A report with one result a gate, in declared order; ``passed`` is False when an error gate failed.
    """
    results = tuple(_evaluate(gate, source, staged) for gate in (*gates, STAGING_PROOF))
    passed = not any(r.blocks for r in results)
    return GateReport.seal(operation_id=operation_id, passed=passed, results=results)


def _evaluate(gate: GateSpec, source: Side, staged: Side) -> GateResult:
    if gate.type == "row_count_reconciliation":
        return _row_counts(gate, source.rows, staged.rows)
    if gate.type == "min_rows":
        return _min_rows(gate, source.rows if gate.side == "source" else staged.rows)
    return _typed_hash(gate, source.digest, staged.digest)


def _row_counts(gate: GateSpec, source: int | None, staged: int | None) -> GateResult:
    allowed = gate.tolerance.value if gate.tolerance else 0
    metrics: dict[str, int | str | None] = {
        "source_row_count": source,
        "target_row_count": staged,
        "allowed_difference": allowed,
    }
    if source is None or staged is None:
        return _result(gate, ok=False, metrics=metrics, message="a row count is missing")
    difference = abs(source - staged)
    metrics["difference"] = difference
    # Rows out of nothing are never a tolerable difference.
    ok = difference <= allowed and not (source == 0 and staged > 0)
    return _result(gate, ok=ok, metrics=metrics, message="" if ok else f"row counts differ by {difference}")


def _min_rows(gate: GateSpec, rows: int | None) -> GateResult:
    assert gate.threshold is not None
    metrics: dict[str, int | str | None] = {
        "row_count": rows,
        "threshold": gate.threshold,
        "side": gate.side or "target",
    }
    if rows is None:
        return _result(gate, ok=False, metrics=metrics, message="the row count is missing")
    ok = rows >= gate.threshold
    return _result(gate, ok=ok, metrics=metrics, message="" if ok else f"{rows} rows, at least {gate.threshold} wanted")


def _typed_hash(gate: GateSpec, source: SetDigest | None, staged: SetDigest | None) -> GateResult:
    metrics: dict[str, int | str | None] = {
        "source_digest": source.sha256 if source else None,
        "target_digest": staged.sha256 if staged else None,
        "source_row_count": source.rows if source else None,
        "target_row_count": staged.rows if staged else None,
    }
    ok = source is not None and source == staged
    message = "" if ok else ("a digest is missing" if source is None or staged is None else "the digests differ")
    return _result(gate, ok=ok, metrics=metrics, message=message)


def _result(gate: GateSpec, *, ok: bool, metrics: dict[str, int | str | None], message: str) -> GateResult:
    return GateResult(
        gate_id=gate.id,
        type=gate.type,
        severity=gate.severity,
        status="passed" if ok else "failed" if gate.severity == "error" else "warned",
        metrics=metrics,
        message=message,
    )
