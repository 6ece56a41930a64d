"""A load's gates and its acceptance as asset checks: what is declared, and what each came to for one load.

A declared check is never left unevaluated: what did not run is a warning with ``status: skipped`` and says why.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from dpone_dagster.declarations.manifest import (
    Acceptance,
    AcceptedValuesGate,
    CustomSqlGate,
    FreshnessGate,
    Gate,
    MinRowsGate,
    NotNullGate,
    Process,
    RowCountGate,
    SchemaGate,
    TypedHashGate,
    UniqueGate,
)

# Gates may not begin with dpone_.
ACCEPTANCE = "dpone_acceptance"
POST_HOOKS = "dpone_post_hooks"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What became of a load's checks, as the journal or a failure's report has it; all JSON.

    Attributes:
        gates: one result a gate that was evaluated.
        snapshots: acceptance counts, one a side.
        acceptance_status: ``passed``, ``warned``, ``failed``; None where nothing was compared.
        differences: the counts that disagree.
        why_skipped: the sentence for a check that was not evaluated.
    """

    gates: Sequence[Mapping[str, Any]] = ()
    snapshots: Sequence[Mapping[str, Any]] = ()
    acceptance_status: str | None = None
    differences: Sequence[Mapping[str, Any]] = ()
    why_skipped: str = "the load did not come that far"


def load_check_specs(
    process: Process,
    *,
    asset_key: dg.AssetKey,
    partitions_def: dg.PartitionsDefinition[str] | None = None,
) -> list[dg.AssetCheckSpec]:
    """Build the specs of one load: its gates in declared order, then acceptance.

    Args:
        process: the load.
        asset_key: its asset.
        partitions_def: the days of a daily load; it makes the history of a check one a day (preview API of Dagster).
    """
    declared = [(gate.id, demand(gate), gate.severity == "error") for gate in process.quality.gates]
    declared += [(old.id, _OLD, False) for old in process.quality.skipped_checks]
    if (policy := acceptance_of(process)) is not None:
        declared.append((ACCEPTANCE, _acceptance_demand(policy), policy.mode == "required"))
    return [_spec(name, text, blocks, asset_key, partitions_def) for name, text, blocks in declared]


def post_hooks_check(
    *, asset_key: dg.AssetKey, partitions_def: dg.PartitionsDefinition[str] | None = None
) -> dg.AssetCheckSpec:
    """Build the spec of the check that tells whether post-hooks ran, where they are steps of their own."""
    text = "The post-hooks that are steps of their own ran; the rows are in the target, whether they did or not."
    return _spec(POST_HOOKS, text, False, asset_key, partitions_def)


def _spec(
    name: str,
    text: str,
    blocks: bool,
    asset_key: dg.AssetKey,
    partitions_def: dg.PartitionsDefinition[str] | None,
) -> dg.AssetCheckSpec:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return dg.AssetCheckSpec(
            name=name, asset=asset_key, description=text, blocking=blocks, partitions_def=partitions_def
        )


def acceptance_of(process: Process) -> Acceptance | None:
    """Return the acceptance policy in force; None where nothing is measured."""
    policy = process.quality.acceptance
    return policy if policy is not None and policy.enabled else None


_OLD = "A check of the older form that nobody can run; it proves nothing."
_ROWS = {"source": "the rows that were read", "target": "the staged rows"}


def demand(gate: Gate) -> str:
    """Say in one sentence what a gate demands."""
    side = _ROWS[getattr(gate, "side", "target")]
    match gate:
        case RowCountGate():
            tolerance = gate.tolerance
            unit = " %" if tolerance.mode == "pct" else " rows"
            tolerated = f" A difference of up to {tolerance.value}{unit} is tolerated." if tolerance.value else ""
            return f"As many rows are staged as were read.{tolerated}"
        case MinRowsGate():
            return f"{side.capitalize()} are {gate.threshold} or more."
        case TypedHashGate():
            share = "" if gate.mode == "full" else f", one key in {gate.modulus or 'some'}"
            return f"The staged rows are the very rows that were read, value by value{share}."
        case CustomSqlGate():
            ends = [f"at least {gate.min}"] * (gate.min is not None) + [f"at most {gate.max}"] * (gate.max is not None)
            return f"A query over {side} yields {' and '.join(ends)}."
        case NotNullGate():
            return f"{side.capitalize()} have no NULL in {', '.join(gate.columns)}."
        case UniqueGate():
            return f"No two of {side} agree in {', '.join(gate.columns)}."
        case FreshnessGate():
            reference = "the start of the run" if gate.reference == "run_start" else "the end of the day"
            return f"The newest {gate.column} of {side} is at most {gate.max_age_seconds} s before {reference}."
        case AcceptedValuesGate():
            return f"{side.capitalize()} have one of {len(gate.values)} accepted values in {gate.column}."
        case SchemaGate():
            return f"The pandera schema {gate.ref} holds for the staged rows."
        case _:
            return f"The provider {gate.type} accepts {side}."


def _acceptance_demand(policy: Acceptance) -> str:
    sides = ", ".join(side for side in ("source", "staged", "target") if getattr(policy.capture, side))
    stops = "a difference fails the load" if policy.mode == "required" else "a difference only warns"
    return f"The counts of {sides} agree; {stops}."


def load_check_results(process: Process, judged: Judged, *, asset_key: dg.AssetKey) -> Iterator[dg.AssetCheckResult]:
    """Give every declared check of a load its result."""
    evaluated = {gate["gate_id"]: gate for gate in judged.gates}
    for declared in (*process.quality.gates, *process.quality.skipped_checks):
        gate = evaluated.get(declared.id)
        if gate is None:
            yield skipped(asset_key, declared.id, judged.why_skipped)
        else:
            yield _of_gate(asset_key, gate)
    if (policy := acceptance_of(process)) is not None:
        yield _of_acceptance(asset_key, policy, judged)


def skipped(asset_key: dg.AssetKey, name: str, why: str) -> dg.AssetCheckResult:
    """Say that a check was not evaluated."""
    return dg.AssetCheckResult(
        asset_key=asset_key,
        check_name=name,
        passed=False,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"Not evaluated: {why}",
        metadata={"status": "skipped"},
    )


def _of_gate(asset_key: dg.AssetKey, gate: Mapping[str, Any]) -> dg.AssetCheckResult:
    numbers = {name: value for name, value in gate["metrics"].items() if value is not None}
    praise = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in numbers.items() if type(value) is int)
    return dg.AssetCheckResult(
        asset_key=asset_key,
        check_name=gate["gate_id"],
        passed=gate["status"] == "passed",
        severity=_severity(gate["severity"] == "error"),
        description=gate["message"] or praise or "the rule held",
        metadata={**numbers, "status": gate["status"]},
    )


def _of_acceptance(asset_key: dg.AssetKey, policy: Acceptance, judged: Judged) -> dg.AssetCheckResult:
    if judged.acceptance_status is None:
        return skipped(asset_key, ACCEPTANCE, judged.why_skipped)
    unmeasured = [f"{s['side']} ({s['error_code']})" for s in judged.snapshots if s["status"] != "succeeded"]
    measured = [s["side"] for s in judged.snapshots if s["status"] == "succeeded"]
    sentences = []
    if judged.differences:
        sentences.append(f"{len(judged.differences)} counts disagree")
    if unmeasured:
        sentences.append(f"not measured: {', '.join(unmeasured)}")
    if not sentences:
        sentences.append(f"{', '.join(measured)} agree in every count" if len(measured) > 1 else "measured")
    rows = {f"{s['side']}_row_count": s["row_count"] for s in judged.snapshots if s.get("row_count") is not None}
    tables = {"differences": _differences(judged.differences)} if judged.differences else {}
    if counts := counts_table(judged.snapshots):
        tables["counts"] = counts
    return dg.AssetCheckResult(
        asset_key=asset_key,
        check_name=ACCEPTANCE,
        passed=judged.acceptance_status == "passed",
        severity=_severity(policy.mode == "required"),
        description="; ".join(sentences),
        metadata={"status": judged.acceptance_status, **rows, **tables},
    )


def _differences(differences: Sequence[Mapping[str, Any]]) -> dg.TableMetadataValue:
    names = ("metric", "column", "side", "count", "other_side", "other_count")
    return _table(names, [[_text(each.get(name)) for name in names] for each in differences])


def counts_table(snapshots: Sequence[Mapping[str, Any]]) -> dg.TableMetadataValue | None:
    """Lay the counts of columns side by side, a row a column and metric; None where only rows were counted."""
    sides = [s for s in snapshots if s["status"] == "succeeded"]
    lines = []
    for metric in ("null_counts", "distinct_counts"):
        for column in dict.fromkeys(name for side in sides for name in side.get(metric, {})):
            counted = [_text(side.get(metric, {}).get(column)) for side in sides]
            lines.append([column, metric.removesuffix("_counts"), *counted])
    return _table(("column", "metric", *(side["side"] for side in sides)), lines) if lines else None


def _table(names: Sequence[str], lines: Sequence[Sequence[str]]) -> dg.TableMetadataValue:
    return dg.MetadataValue.table(
        records=[dg.TableRecord(dict(zip(names, line, strict=True))) for line in lines],
        schema=dg.TableSchema(columns=[dg.TableColumn(name, "string") for name in names]),
    )


def _text(value: object) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _severity(error: bool) -> dg.AssetCheckSeverity:
    return dg.AssetCheckSeverity.ERROR if error else dg.AssetCheckSeverity.WARN
