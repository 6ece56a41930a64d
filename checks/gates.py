"""Gates and dbt tests as partitioned asset checks: what is declared, and what each came to for one day.

A declared check is never left unevaluated: what did not run is a warning with ``status: skipped`` and says why.
"""

import warnings
from collections.abc import Iterator, Sequence

import dagster as dg

from checks.dbt_tests import DbtTest
from dpone_dagster.contracts.documents import GateReport, GateResult
from dpone_dagster.contracts.mart import GateSpec, MartSpec
from dpone_dagster.governance.gates import STAGING_PROOF
from dpone_dagster.ports import TestResult

# What a declared gate demands, for the UI; numbers come with each evaluation.
_DEMANDS = {
    "row_count_reconciliation": "ClickHouse staging holds as many rows of the day as the SQL mart.",
    "typed_hash_reconciliation": "ClickHouse staging holds the very rows of the SQL mart, value by value.",
}


def check_specs(
    mart: MartSpec,
    tests: Sequence[DbtTest],
    *,
    asset_key: dg.AssetKey,
    partitions_def: dg.PartitionsDefinition[str],
) -> list[dg.AssetCheckSpec]:
    """Build the specs of one mart: its gates in declared order, the staging proof, its dbt tests.

    Args:
        mart: the mart.
        tests: the dbt tests that its build runs.
        asset_key: the mart's asset.
        partitions_def: the asset's days; it makes the history of a check one a day (preview API of Dagster).
    """
    declared = [(g.id, gate_demand(g), g.severity == "error") for g in (*mart.gates, STAGING_PROOF)]
    declared += [(t.name, f"dbt test, before ClickHouse changes. {t.description}".strip(), t.blocks) for t in tests]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return [
            dg.AssetCheckSpec(
                name=name, asset=asset_key, description=demand, blocking=blocks, partitions_def=partitions_def
            )
            for name, demand, blocks in declared
        ]


def gate_demand(gate: GateSpec) -> str:
    """Say in one sentence what a gate demands."""
    if gate.type == "min_rows":
        side = "the SQL mart" if gate.side == "source" else "ClickHouse staging"
        return f"Rows of the day in {side}: {gate.threshold} or more."
    tolerated = gate.tolerance.value if gate.tolerance else 0
    return _DEMANDS[gate.type] + (f" A difference of up to {tolerated} rows is tolerated." if tolerated else "")


def check_results(
    mart: MartSpec,
    tests: Sequence[DbtTest],
    *,
    asset_key: dg.AssetKey,
    gates: GateReport | None,
    ran: Sequence[TestResult],
    why_skipped: str,
) -> Iterator[dg.AssetCheckResult]:
    """Give every declared check of one mart its result for one day.

    Args:
        mart: the mart.
        tests: the dbt tests that its build runs.
        asset_key: the mart's asset.
        gates: what the gates came to; None when they were not evaluated.
        ran: the dbt tests that ran, of any mart.
        why_skipped: the sentence for a check that was not evaluated.
    """
    evaluated = {g.gate_id: g for g in gates.results} if gates else {}
    for gate in (*mart.gates, STAGING_PROOF):
        found = evaluated.get(gate.id)
        if found is None or found.status == "skipped":
            yield _skipped(asset_key, gate.id, why_skipped)
        else:
            yield _of_gate(asset_key, found)
    by_id = {t.unique_id: t for t in ran}
    for test in tests:
        result = by_id.get(test.unique_id)
        if result is None or result.status == "skipped":
            yield _skipped(asset_key, test.name, why_skipped)
        else:
            yield _of_test(asset_key, test, result)


def evaluation(result: dg.AssetCheckResult, *, partition: str, blocking: bool) -> dg.AssetCheckEvaluation:
    """Turn a result into an event that belongs to no run, for evidence that was lost."""
    assert result.asset_key is not None
    assert result.check_name is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return dg.AssetCheckEvaluation(
            asset_key=result.asset_key,
            check_name=result.check_name,
            passed=result.passed,
            metadata=result.metadata,
            severity=result.severity,
            description=result.description,
            blocking=blocking,
            partition=partition,
        )


def _of_gate(asset_key: dg.AssetKey, gate: GateResult) -> dg.AssetCheckResult:
    numbers = {name: value for name, value in gate.metrics.items() if value is not None}
    return dg.AssetCheckResult(
        asset_key=asset_key,
        check_name=gate.gate_id,
        passed=gate.status == "passed",
        severity=_severity(gate.severity == "error"),
        description=gate.message or _praise(gate),
        metadata={"status": gate.status, **numbers},
    )


def _praise(gate: GateResult) -> str:
    metrics = gate.metrics
    if gate.type == "min_rows":
        return f"{metrics['row_count']} rows, at least {metrics['threshold']} wanted"
    rows = f"{metrics['source_row_count']} rows on both sides"
    return f"{rows}, equal value by value" if gate.type == "typed_hash_reconciliation" else rows


def _of_test(asset_key: dg.AssetKey, test: DbtTest, result: TestResult) -> dg.AssetCheckResult:
    # Only counts: dbt's own message may carry row values.
    rows = {"failing_rows": result.failures} if result.failures is not None else {}
    failing = f"{result.failures} failing rows" if result.failures is not None else "dbt gave no count"
    return dg.AssetCheckResult(
        asset_key=asset_key,
        check_name=test.name,
        passed=result.status == "pass",
        severity=_severity(result.status != "warn"),
        description="no failing row" if result.status == "pass" else f"{failing} (dbt status: {result.status})",
        metadata={"status": result.status, **rows},
    )


def _skipped(asset_key: dg.AssetKey, name: str, why: str) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        asset_key=asset_key,
        check_name=name,
        passed=False,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"Not evaluated: {why}",
        metadata={"status": "skipped"},
    )


def _severity(error: bool) -> dg.AssetCheckSeverity:
    return dg.AssetCheckSeverity.ERROR if error else dg.AssetCheckSeverity.WARN
