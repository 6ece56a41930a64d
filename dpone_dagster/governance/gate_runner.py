"""Every gate of a governed load, asked of the engines and judged by ``governance.rules`` before the target changes.

A gate that cannot run proves nothing: under ``error`` it fails, under ``warning`` it is visibly skipped, with the code.
Only this module makes a report of a load; nobody's own report is read.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from importlib.metadata import entry_points
from typing import Any, NoReturn

from dpone_dagster.contracts.loads import LoadGateReport, LoadGateResult
from dpone_dagster.declarations.manifest import (
    AcceptedValuesGate,
    CustomSqlGate,
    FreshnessGate,
    Gate,
    MinRowsGate,
    NotNullGate,
    ProviderGate,
    RowCountGate,
    SchemaGate,
    SkippedCheck,
    TypedHashGate,
    UniqueGate,
)
from dpone_dagster.errors import DponeError
from dpone_dagster.governance import rules
from dpone_dagster.ports import Columns, GateOutcome, GateProvider, LoadColumn, ProbePort, SchemaGateHandler

PROVIDER_GROUP = "dpone.gate_providers"
SAMPLE_MODULUS = 16

# These are no verdicts on a gate: the load itself cannot go on.
NEVER_A_VERDICT = ("DPONE_CANCELLED", "DPONE_ENGINE_UNAVAILABLE", "DPONE_FENCED", "DPONE_LEASE_LOST")

_UNAVAILABLE = "DPONE_GATE_UNAVAILABLE"
_METRIC_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_METRIC_LIMIT = 50


def find_providers(gates: Sequence[Gate]) -> dict[str, GateProvider]:
    """Load the providers of the declared gates from the entry points; one that does not load is left out.

    An entry point is named like the gate's type and yields a provider, or a class that makes one without arguments.
    Two of one name are two opinions on what the gate means, so neither is taken.
    """
    found: dict[str, GateProvider] = {}
    for type_ in {gate.type for gate in gates if isinstance(gate, ProviderGate)}:
        registered = tuple(entry_points(group=PROVIDER_GROUP, name=type_))
        if len(registered) != 1:
            continue
        try:
            loaded = registered[0].load()
            found[type_] = loaded() if isinstance(loaded, type) else loaded
        except Exception:  # noqa: BLE001, S112 - somebody else's code; without it the gate cannot run, and says so
            continue
    return found


def run_gates(
    gates: Sequence[Gate],
    *,
    source: ProbePort | None,
    staged: ProbePort,
    now: datetime,
    scope_end: datetime | None = None,
    unique_key: Sequence[str] | None = None,
    providers: Mapping[str, GateProvider] | None = None,
    schema_gate: SchemaGateHandler | None = None,
    skipped: Sequence[SkippedCheck] = (),
    check: Callable[[], None] = lambda: None,
) -> LoadGateReport:
    """Evaluate every declared gate, in order.

    Args:
        gates: the process's gates; the text of an ``sql_file`` already stands in ``sql``.
        source: the rows that were read; None where the source cannot be asked.
        staged: the rows that are about to change the target; ``side: target`` of a gate means these.
        now: start of the run, aware.
        scope_end: end of the day that is loaded.
        unique_key: the sink's; what a sampled row is known by.
        providers: gate type -> provider, mostly from ``find_providers``.
        schema_gate: who evaluates ``schema`` gates.
        skipped: checks of the compatibility form that nobody can run.
        check: raises to cancel; called before each gate.

    Returns:
        One result a gate; ``passed`` is False when an ``error`` gate did not pass.

    Raises:
        DponeError: DPONE_CANCELLED, DPONE_LEASE_LOST, DPONE_FENCED or DPONE_ENGINE_UNAVAILABLE: no verdict at all.
    """
    run = _Run(
        source=source,
        staged=staged,
        now=now,
        scope_end=scope_end,
        unique_key=tuple(unique_key or ()),
        providers=providers or {},
        schema_gate=schema_gate,
    )
    results = []
    for gate in gates:
        check()
        results.append(_result(gate, _evaluate(gate, run)))
    for old in skipped:
        message = "a check of the older form that nobody can run; it proves nothing"
        verdict = rules.Verdict(ok=None, metrics={"error_code": _UNAVAILABLE}, message=message)
        results.append(_of(old.id, old.type, "warning", verdict))
    return LoadGateReport(passed=not any(r.blocks for r in results), results=tuple(results))


class _Run:
    def __init__(
        self,
        *,
        source: ProbePort | None,
        staged: ProbePort,
        now: datetime,
        scope_end: datetime | None,
        unique_key: tuple[str, ...],
        providers: Mapping[str, GateProvider],
        schema_gate: SchemaGateHandler | None,
    ) -> None:
        self.source, self.staged = source, staged
        self.now, self.scope_end = now, scope_end
        self.unique_key = unique_key
        self.providers, self.schema_gate = providers, schema_gate

    def probe(self, side: str) -> ProbePort:
        if side == "target":
            return self.staged
        if self.source is None:
            _refuse("the source cannot be asked")
        return self.source


def _evaluate(gate: Gate, run: _Run) -> rules.Verdict:
    # What a gate asks for and what it gets decide nothing else, so each is evaluated whatever the others came to.
    try:
        verdict = _judge(gate, run)
    except DponeError as error:
        if error.code in NEVER_A_VERDICT:
            raise
        metrics = {**_unmeasured(gate), "error_code": error.code}
        return rules.Verdict(ok=None, metrics=metrics, message=error.sentence)
    if verdict.ok is None:
        return rules.Verdict(ok=None, metrics={**verdict.metrics, "error_code": _UNAVAILABLE}, message=verdict.message)
    return verdict


def _judge(gate: Gate, run: _Run) -> rules.Verdict:
    match gate:
        case RowCountGate():
            source, staged = run.probe("source"), run.staged
            tolerance = gate.tolerance
            return rules.row_counts(source.row_count(), staged.row_count(), mode=tolerance.mode, value=tolerance.value)
        case MinRowsGate():
            return rules.min_rows(run.probe(gate.side).row_count(), threshold=gate.threshold, side=gate.side)
        case TypedHashGate():
            return _typed_hash(gate, run)
        case CustomSqlGate():
            if gate.sql is None:
                _refuse("the text of sql_file was not read")
            value = run.probe(gate.side).scalar(gate.sql)
            return rules.within(value, low=gate.min, high=gate.max, side=gate.side)
        case NotNullGate():
            probe = run.probe(gate.side)
            _columns(probe, gate.columns)
            rows = probe.rows_with_null(gate.columns)
            return rules.no_rows(rows, metric="rows_with_null", side=gate.side, fault="have a NULL")
        case UniqueGate():
            probe = run.probe(gate.side)
            _columns(probe, gate.columns)
            rows = probe.surplus_rows(gate.columns)
            return rules.no_rows(rows, metric="surplus_rows", side=gate.side, fault="repeat another row's values")
        case FreshnessGate():
            return _freshness(gate, run)
        case AcceptedValuesGate():
            probe = run.probe(gate.side)
            _columns(probe, (gate.column,))
            rows = probe.rows_outside(gate.column, gate.values, allow_null=gate.allow_null)
            return rules.no_rows(rows, metric="rows_outside", side=gate.side, fault="have another value")
        case SchemaGate():
            if run.schema_gate is None:
                _refuse("nobody evaluates schema gates here")
            return _of_outcome(run.schema_gate.evaluate(gate, run.source, run.staged), "the schema")
        case ProviderGate():
            return _of_outcome(_provided(gate, run), "the provider's gate")


def _typed_hash(gate: TypedHashGate, run: _Run) -> rules.Verdict:
    source, staged = run.probe("source"), run.staged
    names = gate.columns or tuple(c.name for c in source.columns)
    if gate.columns is None and set(names) != {c.name for c in staged.columns}:
        _refuse("source and staging do not have the same columns")
    ours, theirs = _columns(source, names), _columns(staged, names)
    if [c.type for c in ours] != [c.type for c in theirs]:
        _refuse("source and staging do not have the same column types")
    if gate.mode == "full":
        return rules.typed_hash(source.digest(ours), staged.digest(theirs))
    key, modulus = sampling(gate, source.columns, run.unique_key)
    verdict = rules.typed_hash(
        source.digest(ours, key=_columns(source, key), modulus=modulus),
        staged.digest(theirs, key=_columns(staged, key), modulus=modulus),
    )
    return rules.Verdict(ok=verdict.ok, metrics={**verdict.metrics, "modulus": modulus}, message=verdict.message)


def sampling(gate: TypedHashGate, columns: Columns, unique_key: Sequence[str] | None) -> tuple[tuple[str, ...], int]:
    """Return what a sampled row is known by, and the modulus of the sample."""
    return gate.key or tuple(unique_key or ()) or tuple(c.name for c in columns), gate.modulus or SAMPLE_MODULUS


def _freshness(gate: FreshnessGate, run: _Run) -> rules.Verdict:
    probe = run.probe(gate.side)
    (column,) = _columns(probe, (gate.column,))
    if column.type != "datetime2(6)":
        _refuse(f"column {gate.column} is no datetime2(6)")
    reference = run.now if gate.reference == "run_start" else run.scope_end
    if reference is None:
        _refuse("the load has no day, so it has no scope_end")
    return rules.fresh(
        probe.newest(gate.column),
        reference=reference,
        max_age=timedelta(seconds=gate.max_age_seconds),
        side=gate.side,
    )


def _provided(gate: ProviderGate, run: _Run) -> Any:
    provider = run.providers.get(gate.type)
    if provider is None:
        _refuse(f"no provider {gate.type} is registered, or it does not load")
    try:
        return provider.evaluate(gate, run.source, run.staged)
    except DponeError as error:
        if error.code in NEVER_A_VERDICT:
            raise
        # Its sentence may carry values, and so may every text below.
        raise DponeError(error.code, "The provider refused.") from None
    except Exception as error:  # noqa: BLE001 - somebody else's code; what it raises is no verdict
        raise DponeError(_UNAVAILABLE, f"The provider raised {type(error).__name__}.") from None


def _of_outcome(outcome: Any, who: str) -> rules.Verdict:
    """Take over somebody else's verdict, if it is one; never its words."""
    if not isinstance(outcome, GateOutcome) or not (outcome.passed is None or type(outcome.passed) is bool):
        _refuse(f"{who} yields no GateOutcome")
    metrics = outcome.metrics
    if (
        not isinstance(metrics, Mapping)
        or len(metrics) > _METRIC_LIMIT
        or not all(isinstance(name, str) and _METRIC_NAME.fullmatch(name) for name in metrics)
    ):
        _refuse(f"{who} yields metrics with names that are no identifiers")
    words = {True: "", False: f"{who} does not hold", None: f"{who} could not tell"}
    return rules.Verdict(
        ok=outcome.passed,
        metrics={name: _foreign_metric(value) for name, value in metrics.items()},
        message=words[outcome.passed],
    )


def _foreign_metric(value: Any) -> rules.Metric:
    if value is None or type(value) is int:
        return value
    if type(value) in (Decimal, float) and Decimal(value).is_finite():
        return str(value)
    return rules.REDACTED


def _columns(probe: ProbePort, names: Sequence[str]) -> Columns:
    """Return the probe's own columns of these names; they are checked before the engine is asked."""
    known: dict[str, LoadColumn] = {column.name: column for column in probe.columns}
    if missing := [name for name in names if name not in known]:
        _refuse(f"the {probe.side} side has no column {missing[0]}")
    return tuple(known[name] for name in names)


def _unmeasured(gate: Gate) -> dict[str, rules.Metric]:
    """The main number of a gate that could not run, so that it is missing for all to see."""
    match gate:
        case RowCountGate():
            return {"source_row_count": None, "target_row_count": None}
        case MinRowsGate():
            return {"row_count": None, "threshold": gate.threshold}
        case _:
            return {}


def _refuse(fault: str) -> NoReturn:
    raise DponeError(_UNAVAILABLE, f"{fault[0].upper()}{fault[1:]}.")


def _result(gate: Gate, verdict: rules.Verdict) -> LoadGateResult:
    return _of(gate.id, gate.type, gate.severity, verdict)


def _of(gate_id: str, type_: str, severity: Any, verdict: rules.Verdict) -> LoadGateResult:
    return LoadGateResult(
        gate_id=gate_id,
        type=type_,
        severity=severity,
        status=rules.status(verdict.ok, severity),
        metrics=rules.redacted(verdict.metrics),
        message=verdict.message,
    )
