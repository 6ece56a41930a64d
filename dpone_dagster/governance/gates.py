"""Gates: pure rules over counted facts of the source image and of staging, before the target changes.

The engines count; this module only compares. A number that could not be had is None and never zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from dpone_dagster.contracts.documents import GateReport, GateResult
from dpone_dagster.contracts.mart import GateSpec
from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.governance import rules

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
    results = tuple(_result(gate, _verdict(gate, source, staged)) for gate in (*gates, STAGING_PROOF))
    passed = not any(r.blocks for r in results)
    return GateReport.seal(operation_id=operation_id, passed=passed, results=results)


def _verdict(gate: GateSpec, source: Side, staged: Side) -> rules.Verdict:
    if gate.type == "row_count_reconciliation":
        return rules.row_counts(source.rows, staged.rows, value=Decimal(gate.tolerance.value if gate.tolerance else 0))
    if gate.type == "min_rows":
        assert gate.threshold is not None
        side = gate.side or "target"
        return rules.min_rows(source.rows if side == "source" else staged.rows, threshold=gate.threshold, side=side)
    return rules.typed_hash(source.digest, staged.digest)


def _result(gate: GateSpec, verdict: rules.Verdict) -> GateResult:
    return GateResult(
        gate_id=gate.id,
        type=gate.type,
        severity=gate.severity,
        status=rules.status(verdict.ok, gate.severity),
        metrics=dict(verdict.metrics),
        message=verdict.message,
    )
