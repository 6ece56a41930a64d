"""A manifest's load in data: its plan, the ports it needs, the report it fills, and how an attempt is closed."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal

from dpone_dagster.contracts.loads import AcceptanceSnapshot, LoadGateReport
from dpone_dagster.contracts.mart import Scope
from dpone_dagster.contracts.policy import Policy
from dpone_dagster.declarations.manifest import Process
from dpone_dagster.errors import DponeError
from dpone_dagster.governance.audit import throughput
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import Lease, LoadJournalPort, LoadRecord
from dpone_dagster.ports import (
    AuditPort,
    AuditStep,
    Columns,
    FinalizeReport,
    GateProvider,
    HookContext,
    HookProvider,
    HookStep,
    LegacySinkPort,
    LoadColumn,
    LoadSourcePort,
    ProgressPort,
    SchemaGateHandler,
    SqlRunner,
    StagedLoad,
    StagedLoadPort,
    Window,
)

Boundary = Literal["pre_hook", "pre_finalize", "finalize", "legacy_post_finalize", "post_commit", "resume_validation"]


@dataclass(frozen=True, kw_only=True)
class LoadPorts:
    """Everything from outside that a load needs.

    Attributes:
        source: the source of a process; for a Python asset, its rows.
        sink, legacy: sinks whose query ids start with the given prefix.
        runners: ``source`` and ``sink`` -> the engine that runs a hook's SQL, for a process.
        hook_providers: makes the providers of the given types, for one run.
    """

    journal: LoadJournalPort
    source: Callable[[Process], LoadSourcePort]
    sink: Callable[[str], StagedLoadPort]
    legacy: Callable[[str], LegacySinkPort]
    audit: AuditPort
    runners: Callable[[Process], Mapping[str, SqlRunner]]
    hook_providers: Callable[[Collection[str], HookContext], Mapping[str, HookProvider]]
    gate_providers: Mapping[str, GateProvider]
    schema_gate: SchemaGateHandler
    policy: Policy
    progress: ProgressPort


@dataclass(kw_only=True)
class LoadReport:
    """What a load came to, filled as it goes; what the command line, Dagster and the audit tables tell.

    Attributes:
        action: ``loaded``; ``finished`` or ``hooks_finished`` (an earlier run's load went forward); ``skipped``.
        boundary: where it failed; None where it did not.
        target_state: what a reader of the target sees: ``unchanged``, ``changed`` or ``unknown``.
    """

    process: str
    target: str
    strategy: str
    finalization: str
    run_id: str
    load_id: str | None = None
    scope: Scope | None = None
    action: str = "loaded"
    boundary: Boundary | None = None
    error_code: str | None = None
    target_state: str = "unchanged"
    extracted_rows: int = 0
    extracted_bytes: int = 0
    staged_rows: int = 0
    window: Window | None = None
    source_snapshot: bool | None = None
    finalized: FinalizeReport | None = None
    gates: LoadGateReport | None = None
    acceptance: list[AcceptanceSnapshot] = field(default_factory=list)
    acceptance_status: str | None = None
    differences: list[Mapping[str, Any]] = field(default_factory=list)
    hooks: list[HookStep] = field(default_factory=list)
    steps: list[AuditStep] = field(default_factory=list)
    decisions: list[Mapping[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


class LoadFailed(DponeError):
    """A load that did not come to its end, with everything known of it.

    Attributes:
        report: what was done and where it stopped.
    """

    report: LoadReport


def query_prefix(load_id: str) -> str:
    """What every ClickHouse query id of a load starts with."""
    return f"dpone-load-{load_id[:8]}-"


def take_over(ports: LoadPorts, lease: Lease, load: LoadRecord) -> LoadRecord:
    """Become the holder of a dead worker's load; a statement of it that still runs is ended first."""
    ports.sink(query_prefix(load.load_id)).quiesce(staged_of(load))
    return ports.journal.take_over(lease, load)


def close(
    ports: LoadPorts, process: Process, load: LoadRecord, *, boundary: Boundary, code: str, sentence: str = ""
) -> LoadRecord:
    """Drop what was staged and write FAILED_PRE_COMMIT; target and checkpoint are as they were."""
    sink, staged = ports.sink(query_prefix(load.load_id)), staged_of(load)
    sink.quiesce(staged)
    sink.cleanup(process, staged)
    return ports.journal.transition(
        load,
        State.FAILED_PRE_COMMIT,
        facts={"boundary": boundary, "failure_code": code, "failure_sentence": sentence},
        guard=None,
    )


def staged_of(load: LoadRecord) -> StagedLoad:
    """The scratch tables that the journal knows of a load."""
    kept = load.facts.get("staged")
    if kept is None:
        places = load.facts.get("places")
        facts = {"places": places} if places else {}
        return StagedLoad(load_id=load.load_id, epoch=load.fencing_epoch, facts=facts)
    return StagedLoad(**kept)


def was_staged(load: LoadRecord) -> bool:
    """Whether a load that reached PREPARED went through staging, whatever the manifest says by now."""
    return "staged" in load.facts


def places_of(process: Process) -> dict[str, Any]:
    """Where a load's tables are: the load's to say once it has begun, whatever becomes of the manifest."""
    target = process.sink.table
    return {
        "target": {"schema": target.schema_name, "name": target.name},
        "scratch_schema": process.sink.staging.schema_name or target.schema_name,
    }


def as_admitted(process: Process, load: LoadRecord) -> Process:
    """The process with the strategy that the load was admitted with, by which it has to be finished."""
    sink = process.sink.model_copy(update={"strategy": load.strategy})
    return process.model_copy(update={"sink": sink})


def columns_of(load: LoadRecord) -> Columns:
    """The columns that a load settled at its extraction."""
    return tuple(LoadColumn.parse(column) for column in load.facts.get("columns", ()))


def window_of(load: LoadRecord) -> Window:
    """The window that a load settled at its extraction."""
    kept = load.facts.get("window", {})
    return Window(scope=load.scope, above=kept.get("above"), up_to=kept.get("up_to"))


def summary(report: LoadReport) -> dict[str, Any]:
    """What the journal, the audit tables and Dagster keep of a report: names, numbers, digests."""
    finalized = report.finalized
    kept: dict[str, Any] = plain(
        {
            "governance_finalization": report.finalization,
            "action": report.action,
            "boundary": report.boundary,
            "extracted_rows": report.extracted_rows,
            "extracted_bytes": report.extracted_bytes,
            "staged_rows": report.staged_rows,
            "target_rows": finalized.target_rows if finalized else None,
            "rows_replaced": finalized.rows_replaced if finalized else None,
            "seconds": round(report.seconds, 3),
            "source_snapshot": report.source_snapshot,
            "window": {"above": report.window.above, "up_to": report.window.up_to} if report.window else None,
            "gates": report.gates.as_json() if report.gates else None,
            "acceptance_status": report.acceptance_status,
            "acceptance_differences": list(report.differences),
            "acceptance_metrics": [snapshot.as_json() for snapshot in report.acceptance],
            "hooks": [asdict(hook) for hook in report.hooks],
            "decisions": list(report.decisions),
            "steps": [_step_summary(step) for step in report.steps],
        }
    )
    return kept


def _step_summary(step: AuditStep) -> dict[str, Any]:
    measured = throughput(step) or {}
    return {
        "step_id": step.step_id,
        "phase": step.phase,
        "kind": step.kind,
        "status": step.status,
        "started_at": step.started_at,
        "seconds": round(step.seconds, 4),
        "rows": measured.get("row_count"),
        "bytes": measured.get("byte_count"),
    }


def plain(value: Any) -> Any:
    """JSON data of a dataclass's dict: no tuples, enums as text, datetimes in ISO 8601."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value if value is None or isinstance(value, bool | int | float) else str(value)
