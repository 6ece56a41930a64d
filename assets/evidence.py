"""What the journal knows of a day, as Dagster shows it: evidence of a publication, and the words of a failure."""

from datetime import datetime
from typing import Any

import dagster as dg

from dpone_dagster.contracts.documents import GateReport
from dpone_dagster.contracts.mart import MartSpec, Scope
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.facts import Facts
from dpone_dagster.journal.graph import FORWARD_ONLY, State
from dpone_dagster.journal.port import JournalPort, OperationRecord
from dpone_dagster.planning.plans import Workflow
from dpone_dagster.publication.attempt import PublicationFailed

_ACTIONS = {
    "published": "published",
    "finished": "finished forward, as an earlier run had left them,",
    "skipped": "published earlier",
}


def published(journal: JournalPort, mart: MartSpec, operation: OperationRecord, *, action: str) -> dict[str, Any]:
    """Return the metadata of one COMPLETE operation: a sentence, then numbers that plot, then identities.

    Args:
        journal: the authority.
        mart: the mart.
        operation: COMPLETE.
        action: ``published``, ``finished`` or ``skipped``.
    """
    facts = Facts.of(operation)
    receipt = journal.document(facts.terminal_receipt_sha256 or "") or {}
    phases = journal.phases(operation.operation_id)
    rows = facts.after.rows if facts.after else 0
    exchanged = facts.target_outcome == "EXCHANGED"
    again = f" again (revision {operation.revision})" if operation.revision > 1 else ""
    summary = f"{rows:,} rows of {operation.scope.key} {_ACTIONS[action]}{again} in {mart.target.dotted}"
    if exchanged:
        summary += f" as generation {receipt.get('target_generation')}."
    else:
        summary += "; an empty day changes no table."
    numbers: dict[str, int | float | None] = {
        "dagster/partition_row_count": rows,
        "dagster/row_count": facts.total_rows,
        "rows_inserted": facts.inserted_rows,
        "rows_updated": facts.updated_rows,
        "artifact_bytes": facts.artifact_bytes,
        "artifact_chunks": facts.artifact_chunks,
        "partitions_rebuilt": facts.touched_partitions,
        "partitions_attached": facts.untouched_partitions,
        "generation": receipt.get("target_generation"),
        "revision": operation.revision,
        "seconds_total": _total(phases),
        **_seconds(phases),
    }
    identities = {
        "mode": operation.mode,
        "operation_id": operation.operation_id,
        "generation_uuid": facts.shadow_uuid if exchanged else facts.predecessor_uuid,
        "day_digest": facts.after.digest.sha256 if facts.after else None,
        "artifact_digest": facts.artifact_manifest_sha256,
        "plan_digest": operation.operation_plan_sha256,
        "proof_digest": facts.proof_sha256,
        "explain": f"dpone explain {mart.name} {operation.scope.key}",
    }
    known = {name: value for name, value in {**numbers, **identities}.items() if value is not None}
    return {"summary": summary, "phases": _timeline(phases), **known}


def _seconds(phases: list[dict[str, Any]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for phase in phases:
        name = f"seconds_{phase['name']}"
        seconds[name] = round(seconds.get(name, 0.0) + phase["seconds"], 3)
    return seconds


def _total(phases: list[dict[str, Any]]) -> float:
    return round(float(sum(phase["seconds"] for phase in phases)), 3)


def _timeline(phases: list[dict[str, Any]]) -> dg.TableMetadataValue:
    def clock(moment: datetime) -> str:
        return moment.strftime("%H:%M:%S.%f")[:-3]

    return dg.MetadataValue.table(
        records=[
            dg.TableRecord(
                {
                    "phase": phase["name"],
                    "started (UTC)": clock(phase["started"]),
                    "seconds": f"{phase['seconds']:.3f}",
                    "rows": "" if phase["rows"] is None else f"{phase['rows']:,}",
                    "bytes": "" if phase["bytes"] is None else f"{phase['bytes']:,}",
                }
            )
            for phase in phases
        ],
        schema=dg.TableSchema(
            columns=[
                dg.TableColumn("phase", "string"),
                dg.TableColumn("started (UTC)", "string"),
                dg.TableColumn("seconds", "string"),
                dg.TableColumn("rows", "string"),
                dg.TableColumn("bytes", "string"),
            ]
        ),
    )


# ------------------------------------------------------------------------------------------------ failures


def failure(error: DponeError, *, workflow: Workflow, scope: Scope, journal: JournalPort | None) -> dg.Failure:
    """Say what was refused, what state the target is in, whether a retry is safe, and the next command.

    Args:
        error: the refusal.
        workflow: whose day it was.
        scope: the day.
        journal: the authority; None when it could not be reached.
    """
    gates = error.gates if isinstance(error, PublicationFailed) else {}
    explain = f"dpone explain {workflow.marts[0].name} {scope.key}"
    blocked = [_blocked(mart, report) for mart, report in gates.items()]
    sentences = [
        f"{error.code}: {error.sentence}",
        *(line for lines in blocked for line in lines),
        f"Target: {target_state(error, workflow=workflow, journal=journal)}",
        "Retry: safe. A new run first settles what this one left, and never publishes twice.",
        f"Next: {error.next_step}",
        f"More: {explain}",
    ]
    return dg.Failure(
        description="\n".join(sentences),
        metadata={
            "code": error.code,
            "day": scope.key,
            "target": target_state(error, workflow=workflow, journal=journal),
            "next": error.next_step,
            "explain": explain,
            **{f"detail_{name}": str(value) for name, value in error.details.items()},
        },
        allow_retries=False,
    )


def _blocked(mart: str, report: GateReport) -> list[str]:
    return [f"Gate {mart}.{gate.gate_id}: {gate.message}." for gate in report.results if gate.blocks]


def target_state(error: DponeError, *, workflow: Workflow, journal: JournalPort | None) -> str:
    """Say what the readers of ClickHouse see now, as far as it is proven."""
    tables = ", ".join(mart.target.dotted for mart in workflow.marts)
    if isinstance(error, PublicationFailed) and error.target_untouched:
        return f"{tables} unchanged; readers see what they saw before."
    try:
        if journal is None:
            raise DponeError("DPONE_ENGINE_UNAVAILABLE", "The journal could not be reached.")
        opened = [o for mart in workflow.marts for o in journal.open_operations(mart.name)]
    except DponeError:
        return f"{tables} not known to this run, because the journal does not answer; never a part of a day."
    for operation in opened:
        if operation.state in FORWARD_ONLY or operation.unknown_since is State.COMMITTING:
            return (
                f"{operation.target} holds the whole day {operation.scope.key} either as before or as new; "
                "the next run reads which, and finishes it."
            )
    return f"{tables} unchanged by this run; readers see what they saw before."
