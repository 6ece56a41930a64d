"""What the journal knows of a load, as Dagster shows it: evidence of a load, and the words of a failure."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import dagster as dg

from checks.loads import Judged, acceptance_of
from dpone_dagster.contracts.mart import Scope
from dpone_dagster.errors import DponeError
from dpone_dagster.governance.audit import MIB, audit_enabled, state_schema
from dpone_dagster.journal.port import LoadJournalPort, LoadRecord
from dpone_dagster.planning.load_plan import LoadPlan
from dpone_dagster.ports import Visibility
from dpone_dagster.publication.load import LoadFailed, LoadReport, summary
from resources.clickhouse.finalizers import describe

_ACTIONS = {
    "loaded": "loaded",
    "finished": "loaded by an earlier run, finished now,",
    "hooks_finished": "loaded by an earlier run, whose hooks were finished now,",
    "skipped": "loaded earlier",
}
_SEEN = {
    Visibility.ATOMIC: "the whole table as before or as after",
    Visibility.PER_PARTITION: "each partition as before or as after",
    Visibility.PARTIAL: "rows as they arrive",
}


def visibility(loading: LoadPlan) -> str:
    """Say what a reader of the target sees while a load changes it."""
    return _SEEN[describe(loading.process.sink.strategy, legacy=loading.process.legacy).visibility]


def judged(kept: Mapping[str, Any]) -> Judged:
    """Return what the checks came to, from a load's kept summary."""
    return Judged(
        gates=(kept.get("gates") or {}).get("results", ()),
        snapshots=kept.get("acceptance_metrics") or (),
        acceptance_status=kept.get("acceptance_status"),
        differences=kept.get("acceptance_differences") or (),
        why_skipped="the run that finished the load did not run it",
    )


def judged_failure(error: DponeError, loading: LoadPlan) -> Judged:
    """Return what the checks came to, from a failure."""
    why = f"the run stopped before ({error.code})"
    if not isinstance(error, LoadFailed):
        return Judged(why_skipped=why)
    kept = summary(error.report)
    status, differences = kept["acceptance_status"], kept["acceptance_differences"]
    if error.code in ("DPONE_ACCEPTANCE_FAILED", "DPONE_ACCEPTANCE_UNAVAILABLE"):
        status, differences = "failed", error.details.get("differences", differences)
    elif (policy := acceptance_of(loading.process)) and policy.capture.target and not _has_target(kept):
        status = None  # what was compared by then is half of what was asked for
    return Judged(
        gates=(kept["gates"] or {}).get("results", ()),
        snapshots=kept["acceptance_metrics"],
        acceptance_status=status,
        differences=differences,
        why_skipped=why,
    )


def _has_target(kept: Mapping[str, Any]) -> bool:
    return any(snapshot["side"] == "target" for snapshot in kept["acceptance_metrics"])


# ------------------------------------------------------------------------------------------------- a success


def loaded(loading: LoadPlan, load: LoadRecord) -> dict[str, Any]:
    """Return the metadata of a COMPLETE load: a sentence, its steps, numbers that plot, then identities.

    Args:
        loading: what was loaded.
        load: as the journal has it, with its ``report``.
    """
    kept = load.facts["report"]
    rows, target_rows = kept["staged_rows"], kept["target_rows"]
    day = f" of {load.scope.key}" if load.scope else ""
    numbers: dict[str, int | float | None] = {
        "dagster/partition_row_count": rows if load.scope else None,
        "dagster/row_count": target_rows,
        "rows_extracted": kept["extracted_rows"],
        "rows_staged": rows,
        "rows_replaced": kept["rows_replaced"],
        "seconds_total": kept["seconds"],
        **_seconds(kept["steps"]),
        **metrics(kept["acceptance_metrics"]),
    }
    window = kept["window"] or {}
    identities = {
        "strategy": load.strategy,
        "finalization": kept["governance_finalization"],
        "readers_see_meanwhile": visibility(loading),
        "source_snapshot": kept["source_snapshot"],
        "watermark_above": window.get("above"),
        "watermark_up_to": window.get("up_to"),
        "load_id": load.load_id,
        "plan_digest": load.plan_sha256,
        "audit": _audit(loading, load.load_id),
    }
    tables = {"steps": steps_table(kept["steps"])}
    if kept["hooks"]:
        tables["hooks"] = _hooks_table(kept["hooks"])
    known = {name: value for name, value in {**numbers, **identities}.items() if value is not None}
    return {"summary": f"{rows:,} rows{day} {_ACTIONS[kept['action']]} in {load.target}.", **tables, **known}


def metrics(snapshots: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return every acceptance count under a name of its own, so that each plots over time.

    ``acceptance/<side>/row_count`` and ``acceptance/<side>/<metric>/<column>``: the column's name comes last and as it
    is, so no two columns share a name.
    """
    found: dict[str, int] = {}
    for snapshot in snapshots:
        if snapshot["status"] != "succeeded":
            continue
        prefix = f"acceptance/{snapshot['side']}"
        if snapshot.get("row_count") is not None:
            found[f"{prefix}/row_count"] = snapshot["row_count"]
        for metric in ("null_count", "distinct_count"):
            for column, count in snapshot.get(f"{metric}s", {}).items():
                found[f"{prefix}/{metric}/{column}"] = count
    return found


def _seconds(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for step in steps:
        if step["kind"] == "step":
            name = f"seconds_{step['phase']}"
            seconds[name] = round(seconds.get(name, 0.0) + step["seconds"], 3)
    return seconds


def steps_table(steps: Sequence[Mapping[str, Any]]) -> dg.TableMetadataValue:
    """Lay out the steps with their throughput: a counter divided by wall clock."""
    lines = []
    for step in steps:
        if step["kind"] != "step":
            continue
        started = datetime.fromisoformat(step["started_at"]).strftime("%H:%M:%S.%f")[:-3]
        seconds, rows, size = step["seconds"], step["rows"], step["bytes"]
        lines.append(
            {
                "step": step["phase"],
                "seconds": f"{seconds:.3f}",
                "rows": "" if rows is None else f"{rows:,}",
                "rows/s": f"{rows / seconds:,.0f}" if rows and seconds else "",
                "MiB/s": f"{size / seconds / MIB:,.1f}" if size and seconds else "",
                "started (UTC)": started,
                "status": step["status"],
            }
        )
    return _table(("step", "seconds", "rows", "rows/s", "MiB/s", "started (UTC)", "status"), lines)


def _hooks_table(hooks: Sequence[Mapping[str, Any]]) -> dg.TableMetadataValue:
    lines = [
        {
            "hook": hook["id"],
            "phase": hook["phase"],
            "kind": hook["kind"],
            "status": hook["status"],
            "seconds": f"{hook['seconds']:.3f}",
            "attempts": str(hook["attempts"]),
            "SQL": hook["sql_hash"] or "",
        }
        for hook in hooks
    ]
    return _table(("hook", "phase", "kind", "status", "seconds", "attempts", "SQL"), lines)


def _table(names: Sequence[str], lines: Sequence[Mapping[str, str]]) -> dg.TableMetadataValue:
    return dg.MetadataValue.table(
        records=[dg.TableRecord(dict(line)) for line in lines],
        schema=dg.TableSchema(columns=[dg.TableColumn(name, "string") for name in names]),
    )


def _audit(loading: LoadPlan, load_id: str) -> str | None:
    process = loading.process
    return f"{state_schema(process)}.__dpone__load_steps, load_id {load_id}" if audit_enabled(process) else None


# ------------------------------------------------------------------------------------------------- failures


def failure(
    error: DponeError, *, loading: LoadPlan, scope: Scope | None, journal: LoadJournalPort | None
) -> dg.Failure:
    """Say what was refused, what a reader of the target sees, whether a retry is safe, and the next command.

    Args:
        error: the refusal.
        loading: what was to be loaded.
        scope: the day of a daily load.
        journal: the authority; None when it could not be reached.
    """
    report = error.report if isinstance(error, LoadFailed) else None
    target, retry = target_state(report, loading), retry_advice(report, loading, journal)
    blocked = [
        f"Gate {gate.gate_id}: {gate.message}."
        for gate in (report.gates.results if report and report.gates else ())
        if gate.blocks
    ]
    sentences = [
        f"{error.code}: {error.sentence}",
        *blocked,
        f"Target: {target}",
        f"Retry: {retry}",
        f"Next: {error.next_step}",
        f"More: {loading.command('plan')}",
    ]
    metadata: dict[str, Any] = {"code": error.code, "target": target, "retry": retry, "next": error.next_step}
    if scope is not None:
        metadata["day"] = scope.key
    if report is not None:
        metadata["boundary"] = report.boundary or ""
        metadata["target_state"] = report.target_state
        metadata["load_id"] = report.load_id or ""
        metadata["steps"] = steps_table(summary(report)["steps"])
        metadata |= metrics([snapshot.as_json() for snapshot in report.acceptance])
    details = {f"detail_{name}": str(value) for name, value in error.details.items()}
    return dg.Failure(description="\n".join(sentences), metadata={**details, **metadata}, allow_retries=False)


def target_state(report: LoadReport | None, loading: LoadPlan) -> str:
    """Say what the readers of the target see now, as far as it is proven."""
    target = loading.target
    if report is None:
        return f"{target} unchanged by this run; readers see what they saw before."
    if report.target_state == "unchanged":
        return f"{target} unchanged; readers see what they saw before."
    if report.target_state == "unknown":
        return f"{target} may have changed: readers see {visibility(loading)}, and which of it is not proven."
    if report.boundary == "legacy_post_finalize":
        return (
            f"{target} has changed, and readers see the rows: this load writes straight into it "
            "(legacy_post_finalize), so its gates only judge what is there already."
        )
    return f"{target} has changed and is not rolled back; readers see the rows of this load."


def retry_advice(report: LoadReport | None, loading: LoadPlan, journal: LoadJournalPort | None) -> str:
    """Say whether the load may just be run again, as the journal has it."""
    try:
        if journal is None:
            return "safe once the journal answers; it decides what a new run may do."
        guard = journal.guard(loading.process.name)
    except DponeError:
        return "safe once the journal answers; it decides what a new run may do."
    if guard is not None:
        return f"refused until an operator has looked: the route is guarded ({guard.status})."
    if report is not None and report.target_state == "changed":
        return "safe. A new run finishes this load and loads nothing twice."
    return "safe. A new run first settles what this one left, and never loads twice."
