"""The envelope of one load for machines (spec G, "Quality-gate failure diagnostics"): one JSON object, redacted.

It holds names, numbers, digests and codes: a report has nothing else to give. Whatever is no refusal of ours arrives
here as DPONE_UNEXPECTED, told by its class and place only.
"""

from dataclasses import asdict
from typing import Any

from dpone_dagster.errors import DponeError, unexpected
from dpone_dagster.planning.load_plan import LoadPlan
from dpone_dagster.publication.load import LoadFailed, LoadReport, plain, summary


def envelope(
    *, manifest: str, selector: str, run_id: str, report: LoadReport | None, error: BaseException | None = None
) -> dict[str, Any]:
    """Return the envelope of a load that succeeded, failed, or never began.

    Args:
        manifest: the manifest's path as it was given.
        selector: the process that was asked for.
        report: what is known of the load; None where it was refused before it began.
        error: why it did not succeed; None where it did.
    """
    refusal = None if error is None else error if isinstance(error, DponeError) else unexpected(error)
    if report is None and isinstance(refusal, LoadFailed):
        report = refusal.report
    return {
        "manifest": manifest,
        "process": report.process if report else selector,
        "selector": selector,
        "run_id": run_id,
        "passed": refusal is None,
        "result": _result(report, refusal),
        # A load is never repeated by itself: what a repetition may do is decided by what was observed.
        "attempts": 0,
        "max_attempts": 1,
        "retry_backoff_seconds": 0.0,
    }


def _result(report: LoadReport | None, refusal: DponeError | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "status": "error" if refusal else "skipped" if report and report.action == "skipped" else "success",
        **_rows(report),
        "extracted_rows": report.extracted_rows if report else 0,
        "duration_seconds": round(report.seconds, 3) if report else 0.0,
        "errors": [f"{refusal.code}: {refusal.sentence}"] if refusal else [],
    }
    if refusal:
        result |= refusal.as_json()
    if report is None:
        return result
    result |= {
        "action": "failed" if refusal else report.action,
        "load_id": report.load_id,
        "day": report.scope.key if report.scope else None,
        "target": report.target,
        "target_state": report.target_state,
        "strategy": report.strategy,
        "failure_boundary": report.boundary,
        "hooks": [plain(asdict(hook)) for hook in report.hooks],
        "steps": [plain(asdict(step)) for step in report.steps],
        "reconciliation_metrics": {
            name: value
            for name, value in summary(report).items()
            if name not in ("gates", "hooks", "steps", "action", "boundary", "seconds")
        },
    }
    if report.finalized:
        result["finalized"] = plain(asdict(report.finalized))
    if report.gates:
        result["quality_gates"] = report.gates.as_json()
    return result


def _rows(report: LoadReport | None) -> dict[str, int]:
    """Rows that the target got, and what it holds now; zeros while nothing of the target changed."""
    if report is None or report.finalized is None:
        return {"inserted_rows": 0, "updated_rows": 0, "final_rows": 0}
    replaced = report.finalized.rows_replaced or 0
    updated = replaced if report.strategy == "merge" else 0
    return {
        "inserted_rows": report.finalized.rows - updated,
        "updated_rows": updated,
        "final_rows": report.finalized.target_rows or 0,
    }


def plan_json(plan: LoadPlan) -> dict[str, Any]:
    """What `dpone plan` prints: everything that is settled before an engine is asked; no SQL."""
    process = plan.process
    governance = process.sink.options.load_governance
    return {
        "manifest": plan.manifest,
        "process": process.name,
        "plan_sha256": plan.sha256,
        "source": {
            "type": process.source.type,
            "reads": process.source.table.dotted
            if process.source.table
            else "query"
            if process.source.options.query
            else "asset",
            **process.source.read.as_json(),
        },
        "target": plan.target,
        "strategy": process.sink.strategy,
        "finalization": governance.finalization_phase,
        "gates": [{"id": gate.id, "type": gate.type, "severity": gate.severity} for gate in process.quality.gates],
        "acceptance": process.quality.acceptance.as_json() if process.quality.acceptance else None,
        "lineage": process.sink.options.lineage.as_json(),
        "audit": governance.audit.as_json(),
        "hooks": plan.hooks.as_json(),
        "sql_files": dict(plan.document["files"]),
        "locks": list(plan.resources),
    }


def markdown(answer: dict[str, Any]) -> str:
    """Return an envelope as Markdown, for a comment in a review or a page of a run."""
    result = answer["result"]
    mark = "passed" if answer["passed"] else "**failed**"
    lines = [f"## {answer['process'] or answer['manifest']}: {mark}", ""]
    for error in result["errors"]:
        lines += [error, "", f"Next: {result['next_step']}", ""]
    facts = {
        "manifest": answer["manifest"],
        "run": answer["run_id"],
        **{name: result.get(name) for name in ("day", "target", "target_state", "failure_boundary", "strategy")},
        **{name: result[name] for name in ("extracted_rows", "inserted_rows", "updated_rows", "final_rows")},
        "seconds": result["duration_seconds"],
    }
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items() if value is not None)]
    gates = result.get("quality_gates", {}).get("results", ())
    if gates:
        lines += ["", "| gate | type | severity | status | |", "|---|---|---|---|---|"]
        lines += [f"| {g['gate_id']} | {g['type']} | {g['severity']} | {g['status']} | {g['message']} |" for g in gates]
    steps = result.get("steps", ())
    if steps:
        lines += ["", "| step | status | seconds |", "|---|---|---|"]
        lines += [f"| {step['phase']} | {step['status']} | {step['seconds']:.3f} |" for step in steps]
    return "\n".join(lines)
