"""What the journal knows, as plain JSON-like data: status of marts, one day's story, and a day's verification.

The command line, Dagster and tests render these; nobody else reads the journal for people.
"""

from collections.abc import Iterable
from typing import Any

from dpone_dagster.contracts.arrow_digest import digest_batches
from dpone_dagster.contracts.documents import SealedArtifactManifest
from dpone_dagster.contracts.mart import MartSpec, Scope
from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.errors import CODES, DponeError
from dpone_dagster.journal.facts import Facts
from dpone_dagster.journal.graph import FORWARD_ONLY, TERMINAL, State
from dpone_dagster.journal.port import JournalPort, LoadJournalPort, LoadRecord, OperationRecord
from dpone_dagster.ports import AnalyticsPort, ArtifactStorePort, SourcePort
from dpone_dagster.publication.seal import open_artifact

_LOOKED_AT = 2_000  # loads of a process
_SHOWN = 10


def status(journal: JournalPort, marts: Iterable[MartSpec]) -> list[dict[str, Any]]:
    """Return one object a mart: baseline, generation, published days, rows, and what is open or failed."""
    report = []
    for mart in marts:
        heads = journal.scope_heads(mart.name)
        generation = journal.generation(mart.target.dotted)
        days = sorted(h.scope.key for h in heads)
        report.append(
            {
                "mart": mart.name,
                "workflow": mart.workflow,
                "target": mart.target.dotted,
                "baseline": journal.baseline(mart.name) is not None,
                "generation": generation.generation if generation else None,
                "generation_uuid": generation.uuid if generation else None,
                "days_complete": len(days),
                "first_day": days[0] if days else None,
                "last_day": days[-1] if days else None,
                "rows": sum(h.rows for h in heads),
                "last_published_at": max((h.published_at for h in heads), default=None),
                "open": [_brief(o) for o in journal.open_operations(mart.name)],
                "failed": [_brief(o) for o in journal.failed_scopes(mart.name)],
            }
        )
    return report


def loads(journal: LoadJournalPort) -> list[dict[str, Any]]:
    """Return one object a process that was ever loaded: its last load, what is accepted, and what is guarded."""
    found = []
    for name in journal.processes():
        last, guard, checkpoint = journal.last_load(name), journal.guard(name), journal.checkpoint(name)
        assert last is not None
        days = journal.loaded_days(name)
        found.append(
            {
                "process": name,
                "target": last.target,
                "strategy": last.strategy,
                "state": str(last.state),
                "day": last.scope.key if last.scope else None,
                "rows": None if last.state is State.FAILED_PRE_COMMIT else last.facts.get("staged_rows"),
                "load_id": last.load_id,
                "at": last.updated_at,
                "failure_code": last.facts.get("failure_code") if last.state is not State.COMPLETE else None,
                "guard": str(guard.status) if guard else None,
                "watermark": checkpoint.watermark if checkpoint else None,
                "accepted_at": checkpoint.moved_at if checkpoint else None,
                "failed_days": _failed_days(journal.loads(name, limit=_LOOKED_AT)),
                "days_loaded": len(days),
                "first_day": days[0].scope.key if days else None,
                "last_day": days[-1].scope.key if days else None,
            }
        )
    return found


def _failed_days(newest_first: list[LoadRecord]) -> list[dict[str, Any]]:
    """Days whose latest load did not end COMPLETE."""
    latest: dict[str, LoadRecord] = {}
    for load in newest_first:
        if load.scope is not None:
            latest.setdefault(load.scope.key, load)
    return [
        {"day": day, "state": str(load.state), "failure_code": load.facts.get("failure_code")}
        for day, load in sorted(latest.items())
        if load.state is not State.COMPLETE
    ]


def explain_load(journal: LoadJournalPort, process: str, scope: Scope | None) -> dict[str, Any]:
    """Return the story of a process, or of one day of it: its loads, newest first, each with what became of it."""
    found = [load for load in journal.loads(process, limit=_LOOKED_AT) if scope is None or load.scope == scope]
    guard, checkpoint = journal.guard(process), journal.checkpoint(process)
    return {
        "process": process,
        "day": scope.key if scope else None,
        "guard": str(guard.status) if guard else None,
        "watermark": checkpoint.watermark if checkpoint else None,
        "accepted_at": checkpoint.moved_at if checkpoint else None,
        "loads": [
            {
                "load_id": load.load_id,
                "day": load.scope.key if load.scope else None,
                "state": str(load.state),
                "run_id": load.run_id,
                "target": load.target,
                "strategy": load.strategy,
                "admitted_at": load.admitted_at,
                "updated_at": load.updated_at,
                "failure_code": load.facts.get("failure_code"),
                "failure_sentence": load.facts.get("failure_sentence"),
                "boundary": load.facts.get("boundary"),
                "rows": load.facts.get("staged_rows"),
                "gates": (load.facts.get("gates") or {}).get("results", []),
                "steps": (load.facts.get("report") or {}).get("steps", []),
                "changes": [
                    {"state": e["to_state"], "kind": e["kind"], "guard": e["guard"], "at": e["changed_at"]}
                    for e in journal.events(load.load_id)
                ],
            }
            for load in found[:_SHOWN]
        ],
    }


def _brief(operation: OperationRecord) -> dict[str, Any]:
    facts = Facts.of(operation)
    return {
        "day": operation.scope.key,
        "state": str(operation.state),
        "operation_id": operation.operation_id,
        "failure_code": facts.failure_code,
        "since": operation.updated_at,
    }


def explain(journal: JournalPort, mart: MartSpec, scope: Scope) -> dict[str, Any]:
    """Return the story of one mart's day: every operation of it, newest first, and what to do next."""
    operations = list(reversed(journal.history(mart.name, scope)))
    head = journal.scope_head(mart.name, scope)
    generation = journal.generation(mart.target.dotted)
    return {
        "mart": mart.name,
        "day": scope.key,
        "published": head is not None,
        "revision": head.revision if head else None,
        "rows": head.rows if head else None,
        "after_image_sha256": head.after_image_sha256 if head else None,
        "artifact_manifest_sha256": head.artifact_manifest_sha256 if head else None,
        "published_at": head.published_at if head else None,
        "generation": generation.generation if generation else None,
        "generation_uuid": generation.uuid if generation else None,
        "next_step": next_step(journal, mart, operations),
        "operations": [_story(journal, o) for o in operations],
    }


def _story(journal: JournalPort, operation: OperationRecord) -> dict[str, Any]:
    facts = Facts.of(operation)
    report = journal.document(facts.gate_report_sha256) if facts.gate_report_sha256 else None
    return {
        "operation_id": operation.operation_id,
        "mode": operation.mode,
        "state": str(operation.state),
        "unknown_since": str(operation.unknown_since) if operation.unknown_since else None,
        "revision": operation.revision,
        "replacement_ordinal": operation.replacement_ordinal,
        "fencing_epoch": operation.fencing_epoch,
        "worker_id": operation.worker_id,
        "workflow_execution_id": operation.workflow_execution_id,
        "admitted_at": operation.admitted_at,
        "updated_at": operation.updated_at,
        "facts": facts.as_json(),
        "gates": report["results"] if report else [],
        "phases": journal.phases(operation.operation_id),
        "transitions": journal.transitions(operation.operation_id),
    }


def next_step(journal: JournalPort, mart: MartSpec, operations: list[OperationRecord]) -> str:
    """Say in one sentence what a person should do about a mart's day; operations newest first."""
    if journal.baseline(mart.name) is None:
        return CODES["DPONE_BASELINE_MISSING"].next_step
    if not operations:
        return "Nothing was ever published for this day: materialize the partition or use `dpone run`."
    latest = operations[0]
    if latest.state is State.COMPLETE:
        return f"Nothing: the day is published. `dpone verify {mart.name} {latest.scope.key}` compares the tables."
    if latest.state in TERMINAL:
        return (
            f"ClickHouse is unchanged by this operation ({Facts.of(latest).failure_code}). Correct the cause, then"
            " run it again: the run restores the SQL day and rebuilds it."
        )
    if latest.state in FORWARD_ONLY:
        return (
            "Readers of ClickHouse may see the day already, and nobody claims it yet. Run the day again: the operation"
            " is finished forward; it is never undone."
        )
    if latest.state is State.COMMIT_UNKNOWN:
        return CODES["DPONE_COMMIT_UNKNOWN"].next_step
    return (
        "A run works on it, or was lost. If no run is alive, run it again; if one hangs, end it"
        f" with `dpone takeover {mart.name} {latest.scope.key}` first."
    )


def verify(
    *,
    journal: JournalPort,
    source: SourcePort,
    analytics: AnalyticsPort,
    artifacts: ArtifactStorePort,
    mart: MartSpec,
    scope: Scope,
) -> dict[str, Any]:
    """Compare a published day's head with its artifact and both live tables, each counted by its own engine.

    Returns:
        ``agrees``, and one object a side with ``rows``, ``sha256``, ``agrees`` and, where a side could not be
        read, ``error_code``.

    Raises:
        DponeError: DPONE_PARTITION_NOT_PUBLISHED.
    """
    head = journal.scope_head(mart.name, scope)
    if head is None:
        raise DponeError("DPONE_PARTITION_NOT_PUBLISHED", f"{mart.name} {scope.key} has no published generation.")
    generation = journal.generation(mart.target.dotted)

    def artifact() -> SetDigest:
        body = journal.document(head.artifact_manifest_sha256)
        if body is None:
            raise DponeError("DPONE_JOURNAL_CORRUPT", "The scope head names a manifest that the journal lacks.")
        return digest_batches(mart.columns, open_artifact(artifacts, SealedArtifactManifest.parse(body), mart))

    def table() -> SetDigest:
        if generation is None or analytics.uuid(mart.target) != generation.uuid:
            raise DponeError("DPONE_TARGET_REPLACED", f"{mart.target.dotted} is not the published generation.")
        return analytics.digest(mart, mart.target, scope)

    sides: list[dict[str, Any]] = []
    for name, read in (
        ("sealed artifact", artifact),
        ("SQL mart", lambda: source.scope_digest(mart, scope)),
        ("ClickHouse target", table),
    ):
        try:
            digest = read()
        except DponeError as error:
            sides.append({"side": name, "rows": None, "sha256": None, "agrees": False, "error_code": error.code})
            continue
        agrees = digest.rows == head.rows and digest.sha256 == head.after_image_sha256
        sides.append({"side": name, "rows": digest.rows, "sha256": digest.sha256, "agrees": agrees})
    return {
        "mart": mart.name,
        "day": scope.key,
        "rows": head.rows,
        "sha256": head.after_image_sha256,
        "revision": head.revision,
        "agrees": all(side["agrees"] for side in sides),
        "sides": sides,
    }
