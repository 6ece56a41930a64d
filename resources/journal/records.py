"""Rows to records and back: every query that only reads, on a connection of the caller's."""

import json
from typing import Any

import sqlalchemy as sa

from dpone_dagster.contracts.canonical import canonical_json
from dpone_dagster.contracts.mart import Scope
from dpone_dagster.journal.graph import TERMINAL, State
from dpone_dagster.journal.port import GenerationHead, MartOverview, OperationRecord, Predecessors, ScopeHead
from resources.journal import tables as t

OPEN = t.operation.c.state.not_in([state.value for state in sorted(TERMINAL)])


def json_text(value: Any) -> str:
    """Canonical JSON, as the journal's text columns hold it."""
    return canonical_json(value).decode("ascii")


def operation_columns(operation: OperationRecord) -> dict[str, Any]:
    """The columns of an operation's row that the record knows; all but ``admitted_epoch``."""
    other = {"admitted_epoch", "cleaned_at", "scope_start", "scope_end", "state", "unknown_since", "facts"}
    return {
        **{name: getattr(operation, name) for name in set(t.operation.columns.keys()) - other},
        "state": operation.state.value,
        "unknown_since": operation.unknown_since.value if operation.unknown_since else None,
        "scope_start": operation.scope.start,
        "scope_end": operation.scope.end,
        "facts": json_text(operation.facts),
    }


def operations(
    connection: sa.Connection, *conditions: sa.ColumnElement[bool], lock: bool = False
) -> list[OperationRecord]:
    """Operations by mart and order of admission."""
    query = sa.select(t.operation).where(*conditions).order_by(t.operation.c.mart, t.operation.c.admitted_epoch)
    if lock:
        query = query.with_for_update().with_hint(t.operation, "WITH (UPDLOCK, HOLDLOCK)", "mssql")
    found = []
    for row in connection.execute(query).mappings():
        values = dict(row)
        del values["admitted_epoch"], values["cleaned_at"]
        values["scope"] = Scope(start=values.pop("scope_start"), end=values.pop("scope_end"))
        values["state"] = State(values["state"])
        values["unknown_since"] = State(values["unknown_since"]) if values["unknown_since"] else None
        values["facts"] = json.loads(values["facts"])
        found.append(OperationRecord(**values))
    return found


def operation(connection: sa.Connection, operation_id: str, *, lock: bool = False) -> OperationRecord | None:
    """One operation."""
    found = operations(connection, t.operation.c.operation_id == operation_id, lock=lock)
    return found[0] if found else None


def failed_scopes(connection: sa.Connection, mart: str) -> list[OperationRecord]:
    """See ``JournalPort.failed_scopes``."""
    latest = (
        sa.select(sa.func.max(t.operation.c.admitted_epoch))
        .where(t.operation.c.mart == mart)
        .group_by(t.operation.c.scope_start)
    )
    failed = operations(
        connection,
        t.operation.c.mart == mart,
        t.operation.c.state == State.FAILED_PRE_COMMIT.value,
        t.operation.c.admitted_epoch.in_(latest),
    )
    return sorted(failed, key=lambda record: record.scope.start)


def scope_heads(connection: sa.Connection, mart: str, *conditions: sa.ColumnElement[bool]) -> list[ScopeHead]:
    """Published scopes by day."""
    query = sa.select(t.scope_head).where(t.scope_head.c.mart == mart, *conditions)
    return [
        ScopeHead(
            mart=row.mart,
            scope=Scope(start=row.scope_start, end=row.scope_end),
            revision=row.revision,
            operation_id=row.operation_id,
            rows=row.row_count,
            after_image_sha256=row.after_image_sha256,
            artifact_manifest_sha256=row.artifact_manifest_sha256,
            target_uuid=row.target_uuid,
            published_at=row.published_at,
        )
        for row in connection.execute(query.order_by(t.scope_head.c.scope_start))
    ]


def scope_head(connection: sa.Connection, mart: str, scope: Scope) -> ScopeHead | None:
    """The last publication of one scope."""
    found = scope_heads(connection, mart, t.scope_head.c.scope_start == scope.start)
    return found[0] if found else None


def generation_head(connection: sa.Connection, target: str) -> GenerationHead | None:
    """The current generation of a target."""
    row = connection.execute(sa.select(t.generation_head).where(t.generation_head.c.target == target)).first()
    if row is None:
        return None
    return GenerationHead(target=row.target, uuid=row.uuid, generation=row.generation, operation_id=row.operation_id)


def baseline(connection: sa.Connection, mart: str) -> str | None:
    """Digest of a mart's baseline receipt."""
    return connection.scalar(sa.select(t.baseline.c.receipt_sha256).where(t.baseline.c.mart == mart))


def predecessors(connection: sa.Connection, mart: str, target: str, scope: Scope) -> Predecessors:
    """See ``Predecessors``. A mutation is known to be committed by the receipt it wrote."""
    head = scope_head(connection, mart, scope)
    earlier = operations(connection, t.operation.c.mart == mart, t.operation.c.scope_start == scope.start)
    committed: set[str] = set(
        connection.scalars(
            sa.select(t.model_receipt.c.operation_id).where(
                t.model_receipt.c.operation_id.in_([record.operation_id for record in earlier])
            )
        )
    )
    since_head: list[OperationRecord] = []
    for record in earlier:
        if head is not None and record.operation_id == head.operation_id:
            since_head.clear()
        elif record.state is State.FAILED_PRE_COMMIT and record.operation_id in committed:
            since_head.append(record)
    return Predecessors(
        mart=mart,
        generation=generation_head(connection, target),
        baseline_sha256=baseline(connection, mart),
        scope_head=head,
        last_operation=earlier[-1] if earlier else None,
        committed_since_head=since_head[-1] if since_head else None,
    )


def marts_overview(connection: sa.Connection) -> list[MartOverview]:
    """See ``JournalPort.marts_overview``."""
    baselines = {row.mart: row.receipt_sha256 for row in connection.execute(sa.select(t.baseline))}
    states: dict[str, dict[State, int]] = {mart: {} for mart in baselines}
    counts = sa.select(t.operation.c.mart, t.operation.c.state, sa.func.count().label("n"))
    for row in connection.execute(counts.group_by(t.operation.c.mart, t.operation.c.state)):
        states.setdefault(row.mart, {})[State(row.state)] = row.n
    published = sa.select(
        t.scope_head.c.mart,
        sa.func.count().label("n"),
        sa.func.min(t.scope_head.c.scope_start).label("first"),
        sa.func.max(t.scope_head.c.scope_start).label("last"),
    ).group_by(t.scope_head.c.mart)
    days = {row.mart: row for row in connection.execute(published)}
    unfinished = operations(connection, OPEN)
    return [
        MartOverview(
            mart=mart,
            baseline_sha256=baselines.get(mart),
            states=states[mart],
            complete_days=days[mart].n if mart in days else 0,
            first_complete=Scope.day(days[mart].first.date()) if mart in days else None,
            last_complete=Scope.day(days[mart].last.date()) if mart in days else None,
            open_operations=tuple(record for record in unfinished if record.mart == mart),
        )
        for mart in sorted(states)
    ]


def transitions(connection: sa.Connection, operation_id: str) -> list[dict[str, Any]]:
    """Every change of an operation, oldest first; ``facts`` are the ones added by it."""
    query = sa.select(t.transition).where(t.transition.c.operation_id == operation_id)
    return [
        {**row, "facts": json.loads(row["facts"]), "documents": json.loads(row["documents"])}
        for row in connection.execute(query.order_by(t.transition.c.version)).mappings()
    ]


def phases(connection: sa.Connection, operation_id: str) -> list[dict[str, Any]]:
    """Durations of an operation's phases, in the order they started."""
    query = sa.select(
        t.phase.c.name,
        t.phase.c.worker_id,
        t.phase.c.started_at.label("started"),
        t.phase.c.seconds,
        t.phase.c.row_count.label("rows"),
        t.phase.c.byte_count.label("bytes"),
    ).where(t.phase.c.operation_id == operation_id)
    return [dict(row) for row in connection.execute(query.order_by(t.phase.c.started_at)).mappings()]


def retired_generations(connection: sa.Connection, target: str) -> list[str]:
    """See ``JournalPort.retired_generations``."""
    query = sa.select(t.generation.c.uuid).where(
        t.generation.c.target == target,
        t.generation.c.retired_at.is_not(None),
        t.generation.c.dropped_at.is_(None),
    )
    return list(connection.scalars(query.order_by(t.generation.c.generation.desc())))


def document(connection: sa.Connection, sha256: str) -> dict[str, Any] | None:
    """One document's JSON."""
    body = connection.scalar(sa.select(t.document.c.body).where(t.document.c.sha256 == sha256))
    found: dict[str, Any] | None = None if body is None else json.loads(body)
    return found
