"""The journal's writes: atomic admission, takeover, compare-and-set transitions, atomic publication.

Row locks are taken in one order everywhere: guards sorted by name, then operations. Session locks come before any
transaction, and ClickHouse after it.
"""

import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from dpone_dagster.contracts.canonical import canonical_json
from dpone_dagster.contracts.mart import Scope
from dpone_dagster.contracts.model import Document
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.graph import TERMINAL, State, step
from dpone_dagster.journal.port import (
    GenerationHead,
    Holder,
    Lease,
    MartOverview,
    OperationRecord,
    PlanBundle,
    PlannedOperation,
    Predecessors,
    RunIdentity,
    ScopeHead,
)
from resources.journal import records
from resources.journal import tables as t
from resources.journal.guards import lock_guards, raise_guards
from resources.journal.loads import SqlLoadJournal, open_load_of
from resources.journal.locks import Locks, mart_resource, resources_of, target_resource, workflow_resource
from resources.journal.transactions import JournalPolicy, Sessions


class SqlJournal:
    """``JournalPort`` on a SQL database.

    Args:
        url: SQLAlchemy address of the database that also holds the marts (one transaction domain).
        policy: bounds of waiting and retrying.
    """

    def __init__(self, url: str | sa.URL, *, policy: JournalPolicy | None = None) -> None:
        self._sessions = Sessions(url, policy or JournalPolicy())
        self._locks = Locks(self._sessions)
        self.loads = SqlLoadJournal(self._sessions, self._locks)

    def close(self) -> None:
        """Close pooled connections. Leases have connections of their own."""
        self._sessions.close()

    # --------------------------------------------------------------------------------- locks and workers

    def hold(
        self,
        resources: Iterable[str],
        *,
        identity: RunIdentity,
        scope: Scope,
        deadline_seconds: float,
        on_wait: Callable[[str], None],
    ) -> AbstractContextManager[Lease]:
        """See ``JournalPort.hold``. ``on_wait`` gets a sentence at the start and every few seconds."""
        return self._locks.hold(
            resources, identity=identity, scope=scope, deadline_seconds=deadline_seconds, on_wait=on_wait
        )

    def holder(self, resource: str) -> Holder | None:
        """See ``JournalPort.holder``."""
        return self._locks.holder(resource)

    def end_worker(self, worker_id: str, *, reason: str) -> None:
        """See ``JournalPort.end_worker``."""
        self._locks.end_worker(worker_id, reason=reason)

    # --------------------------------------------------------------------------------------- admission

    def admit(
        self,
        lease: Lease,
        *,
        workflow: str,
        marts: Sequence[str],
        targets: Sequence[str],
        scope: Scope,
        build: Callable[[dict[str, Predecessors]], PlanBundle],
        bind: Callable[[PlanBundle, str, int], Document],
    ) -> list[OperationRecord]:
        """See ``JournalPort.admit``. ``build`` is called again when the transaction is retried.

        Args:
            targets: ``database.table`` of each mart, in the same order.

        Raises:
            DponeError: DPONE_OPERATION_OPEN, DPONE_OPERATION_EXISTS, DPONE_CONTRACT_INVALID when the bundle is
                not about what was asked, DPONE_COMMIT_UNKNOWN when the acknowledgement was lost: the operations
                are there or not, and the next run finds out.
        """
        target_of = dict(zip(marts, targets, strict=True))
        resources = [workflow_resource(workflow), *map(mart_resource, marts), *map(target_resource, targets)]
        self._locks.require(lease, resources)
        worker = lease.identity.worker_id

        def work(connection: sa.Connection) -> list[OperationRecord]:
            epochs = lock_guards(connection, resources)
            for operation in records.operations(connection, t.operation.c.mart.in_(marts), records.OPEN):
                raise DponeError(
                    "DPONE_OPERATION_OPEN",
                    f"{operation.mart} {operation.scope.key} is {operation.state} and must be reconciled first.",
                    operation_id=operation.operation_id,
                    mart=operation.mart,
                    day=operation.scope.key,
                    state=operation.state,
                )
            bundle = build({m: records.predecessors(connection, m, target_of[m], scope) for m in marts})
            _check_bundle(bundle, workflow, target_of, scope)
            owners = {
                resource: planned.operation_id
                for planned in bundle.operations
                for resource in (mart_resource(planned.mart), target_resource(planned.target))
            }
            epochs = raise_guards(connection, epochs, worker, owners)
            shared = _write_documents(connection, bundle.documents)
            admitted = []
            for planned in bundle.operations:
                if records.operation(connection, planned.operation_id) is not None:
                    raise DponeError(
                        "DPONE_OPERATION_EXISTS",
                        f"The operation planned for {planned.mart} {scope.key} was admitted before.",
                        operation_id=planned.operation_id,
                    )
                epoch = epochs[mart_resource(planned.mart)]
                binding = bind(bundle, planned.operation_id, epoch)
                operation = _admitted(bundle, planned, binding, epoch, worker)
                _write_documents(connection, [binding])
                connection.execute(
                    t.operation.insert().values(**records.operation_columns(operation), admitted_epoch=epoch)
                )
                _append(connection, operation, "admit", None, planned.facts, [*shared, binding.sha256], _change_id())
                admitted.append(operation)
            return admitted

        return self._sessions.write(worker, "admission", work, serializable=True)

    def take_over(self, lease: Lease, operation_ids: Sequence[str]) -> list[OperationRecord]:
        """See ``JournalPort.take_over``.

        Raises:
            DponeError: DPONE_OPERATION_HELD when the former worker still has sessions (``end_worker`` ends them);
                DPONE_TRANSITION_ILLEGAL for an operation that is unknown or finished.
        """
        worker = lease.identity.worker_id
        former = []
        for operation_id in operation_ids:
            found = self.operation(operation_id)
            if found is None:
                raise DponeError("DPONE_TRANSITION_ILLEGAL", "There is no such operation to take over.")
            former.append(found)
        self._locks.require(lease, [resource for operation in former for resource in resources_of(operation)])
        for former_worker in sorted({operation.worker_id for operation in former} - {worker}):
            self._sessions.wait_quiet(former_worker)
        owners = {resource: o.operation_id for o in former for resource in resources_of(o)}
        resources = [*owners, *(workflow_resource(operation.workflow) for operation in former)]
        change_id = _change_id()

        def work(connection: sa.Connection) -> list[OperationRecord]:
            epochs = raise_guards(connection, lock_guards(connection, resources), worker, owners)
            taken = []
            for operation_id in operation_ids:
                current = records.operation(connection, operation_id, lock=True)
                if current is None or current.state in TERMINAL:
                    raise DponeError("DPONE_TRANSITION_ILLEGAL", "The operation is finished; nothing to take over.")
                successor = replace(
                    current,
                    version=current.version + 1,
                    fencing_epoch=epochs[mart_resource(current.mart)],
                    worker_id=worker,
                    updated_at=datetime.now(UTC),
                )
                _replace(connection, current, successor)
                _append(connection, successor, "take_over", current.state, {}, [], change_id)
                taken.append(successor)
            return taken

        if not former:
            return []
        return self._sessions.write(worker, "takeover", work, settle=_changed(change_id))

    # ------------------------------------------------------------------------------------- transitions

    def transition(
        self,
        operation: OperationRecord,
        to: State,
        *,
        facts: dict[str, Any] | None = None,
        documents: Sequence[Document] = (),
    ) -> OperationRecord:
        """See ``JournalPort.transition``. COMPLETE is written by ``publish`` alone."""
        if to is State.COMPLETE:
            raise DponeError("DPONE_TRANSITION_ILLEGAL", "COMPLETE is written together with the heads only.")
        edge = step(operation.state, to, unknown_since=operation.unknown_since)
        unknown_since = operation.state if edge.target is State.COMMIT_UNKNOWN else None
        successor = replace(operation, state=edge.target, unknown_since=unknown_since)
        return self._change(operation, successor, "transition", facts or {}, documents)

    def record(
        self, operation: OperationRecord, facts: dict[str, Any], documents: Sequence[Document] = ()
    ) -> OperationRecord:
        """See ``JournalPort.record``. Facts of a finished operation may be added by whoever holds the mart."""
        return self._change(operation, operation, "record", facts, documents)

    def _change(
        self,
        operation: OperationRecord,
        successor: OperationRecord,
        kind: str,
        facts: dict[str, Any],
        documents: Sequence[Document],
    ) -> OperationRecord:
        self._require_lease(operation)
        change_id = _change_id()
        return self._sessions.write(
            operation.worker_id,
            f"{kind} to {successor.state}",
            lambda connection: _advance(connection, operation, successor, kind, facts, documents, change_id),
            settle=_changed(change_id),
        )

    def _require_lease(self, operation: OperationRecord) -> None:
        if not self._locks.allows(operation, finished=operation.state in TERMINAL):
            raise _fenced(operation, "this process does not hold the lease that goes with it")

    # ------------------------------------------------------------------------------------- publication

    def publish(
        self,
        operation: OperationRecord,
        *,
        target_uuid: str,
        rows: int,
        after_image_sha256: str,
        artifact_manifest_sha256: str,
        facts: dict[str, Any],
        documents: Sequence[Document] = (),
    ) -> OperationRecord:
        """See ``JournalPort.publish``.

        A changed target needs ``predecessor_uuid`` among the operation's facts: the head must still have it. From
        PREPARED (empty scope) the target must be unchanged.

        Raises:
            DponeError: DPONE_TRANSITION_ILLEGAL, DPONE_FENCED, DPONE_BASELINE_MISSING, DPONE_JOURNAL_CORRUPT when
                a head is not the one that this publication starts from.
        """
        step(operation.state, State.COMPLETE, unknown_since=operation.unknown_since)
        self._require_lease(operation)
        change_id = _change_id()
        successor = replace(operation, state=State.COMPLETE)
        head = {
            "scope_end": operation.scope.end,
            "revision": operation.revision,
            "operation_id": operation.operation_id,
            "row_count": rows,
            "after_image_sha256": after_image_sha256,
            "artifact_manifest_sha256": artifact_manifest_sha256,
            "target_uuid": target_uuid,
        }

        def work(connection: sa.Connection) -> OperationRecord:
            complete = _advance(connection, operation, successor, "publish", facts, documents, change_id)
            _move_generation(connection, operation, complete, target_uuid)
            _move_scope_head(connection, complete, head)
            _move_checkpoint(connection, complete)
            return complete

        return self._sessions.write(
            operation.worker_id,
            "publication",
            work,
            serializable=True,
            settle=lambda connection: _published(connection, operation, target_uuid, change_id),
        )

    def adopt_baseline(self, lease: Lease, *, mart: str, target: str, target_uuid: str, receipt: Document) -> None:
        """See ``JournalPort.adopt_baseline``. The same receipt again is a replay.

        Raises:
            DponeError: DPONE_BASELINE_EXISTS when the mart or the target has another one.
        """
        self._locks.require(lease, [mart_resource(mart), target_resource(target)])
        wanted = {"target": target, "target_uuid": target_uuid, "receipt_sha256": receipt.sha256}

        def adopted(connection: sa.Connection) -> bool:
            row = connection.execute(sa.select(t.baseline).where(t.baseline.c.mart == mart)).mappings().first()
            if row is None and records.generation_head(connection, target) is None:
                return False
            if row is None or any(row[name] != value for name, value in wanted.items()):
                raise DponeError("DPONE_BASELINE_EXISTS", f"{mart} or {target} has another baseline.")
            return True

        def work(connection: sa.Connection) -> None:
            if adopted(connection):
                return
            if (process := open_load_of(connection, target)) is not None:
                raise DponeError(
                    "DPONE_LOAD_OPEN", f"A load of {process} into {target} is not settled, so nobody knows its rows."
                )
            now = datetime.now(UTC)
            first = {"target": target, "uuid": target_uuid, "generation": 1}
            _write_documents(connection, [receipt])
            connection.execute(
                t.baseline.insert().values(mart=mart, worker_id=lease.identity.worker_id, adopted_at=now, **wanted)
            )
            connection.execute(t.generation_head.insert().values(**first, changed_at=now))
            connection.execute(t.generation.insert().values(**first, published_at=now))

        self._sessions.write(lease.identity.worker_id, "adopting a baseline", work, serializable=True, settle=adopted)

    def generation_dropped(self, target: str, uuid: str) -> None:
        """See ``JournalPort.generation_dropped``. A replay changes nothing.

        Raises:
            DponeError: DPONE_TRANSITION_ILLEGAL for the current generation and for one that never was.
        """
        row = (t.generation.c.target == target) & (t.generation.c.uuid == uuid)

        def gone(connection: sa.Connection) -> bool:
            return connection.scalar(sa.select(t.generation.c.dropped_at).where(row)) is not None

        def work(connection: sa.Connection) -> None:
            if gone(connection):
                return
            retired = row & t.generation.c.retired_at.is_not(None)
            update = t.generation.update().where(retired).values(dropped_at=datetime.now(UTC))
            if connection.execute(update).rowcount != 1:
                raise DponeError("DPONE_TRANSITION_ILLEGAL", f"{target} has no such retired generation.")

        self._sessions.write(None, "recording a dropped generation", work, settle=gone)

    def uncleaned(self, mart: str) -> list[OperationRecord]:
        """See ``JournalPort.uncleaned``."""
        waiting = (t.operation.c.mart == mart) & t.operation.c.cleaned_at.is_(None)
        return self._sessions.read(lambda c: records.operations(c, waiting, ~records.OPEN))

    def operation_cleaned(self, operation_id: str) -> None:
        """See ``JournalPort.operation_cleaned``. A replay changes nothing that anybody reads."""
        row = t.operation.c.operation_id == operation_id

        def work(connection: sa.Connection) -> None:
            connection.execute(t.operation.update().where(row).values(cleaned_at=datetime.now(UTC)))

        self._sessions.write(None, "recording a cleaned operation", work, settle=lambda connection: False)

    # ----------------------------------------------------------------------------------------- readers

    def operation(self, operation_id: str) -> OperationRecord | None:
        """One operation."""
        return self._sessions.read(lambda c: records.operation(c, operation_id))

    def open_operations(self, mart: str) -> list[OperationRecord]:
        """Unfinished operations of a mart; at most one."""
        return self._sessions.read(lambda c: records.operations(c, t.operation.c.mart == mart, records.OPEN))

    def failed_scopes(self, mart: str) -> list[OperationRecord]:
        """See ``JournalPort.failed_scopes``."""
        return self._sessions.read(lambda c: records.failed_scopes(c, mart))

    def workflow_operations(self, workflow_execution_id: str) -> list[OperationRecord]:
        """Operations admitted together, by mart."""
        wanted = t.operation.c.workflow_execution_id == workflow_execution_id
        return self._sessions.read(lambda c: records.operations(c, wanted))

    def history(self, mart: str, scope: Scope) -> list[OperationRecord]:
        """Every operation of a scope, oldest first."""
        wanted = (t.operation.c.mart == mart) & (t.operation.c.scope_start == scope.start)
        return self._sessions.read(lambda c: records.operations(c, wanted))

    def transitions(self, operation_id: str) -> list[dict[str, Any]]:
        """Every change of an operation, oldest first; ``facts`` are the ones added by it."""
        return self._sessions.read(lambda c: records.transitions(c, operation_id))

    def scope_head(self, mart: str, scope: Scope) -> ScopeHead | None:
        """The last publication of one scope."""
        return self._sessions.read(lambda c: records.scope_head(c, mart, scope))

    def scope_heads(self, mart: str) -> list[ScopeHead]:
        """The last publication of every scope, by day."""
        return self._sessions.read(lambda c: records.scope_heads(c, mart))

    def generation(self, target: str) -> GenerationHead | None:
        """The current generation of a target."""
        return self._sessions.read(lambda c: records.generation_head(c, target))

    def retired_generations(self, target: str) -> list[str]:
        """See ``JournalPort.retired_generations``."""
        return self._sessions.read(lambda c: records.retired_generations(c, target))

    def baseline(self, mart: str) -> str | None:
        """Digest of the mart's baseline receipt."""
        return self._sessions.read(lambda c: records.baseline(c, mart))

    def document(self, sha256: str) -> dict[str, Any] | None:
        """One document's JSON."""
        return self._sessions.read(lambda c: records.document(c, sha256))

    def marts_overview(self) -> list[MartOverview]:
        """See ``JournalPort.marts_overview``."""
        return self._sessions.read(records.marts_overview)

    def phase(
        self,
        operation_id: str,
        worker_id: str,
        name: str,
        *,
        started: datetime,
        seconds: float,
        rows: int | None = None,
        bytes_: int | None = None,
    ) -> None:
        """See ``JournalPort.phase``."""
        row = {
            "phase_id": str(uuid.uuid4()),
            "operation_id": operation_id,
            "worker_id": worker_id,
            "name": name,
            "started_at": started,
            "seconds": seconds,
            "row_count": rows,
            "byte_count": bytes_,
        }
        # A timing that is lost with the machine's power is no loss, and a day keeps a dozen.
        self._sessions.write(
            worker_id, "keeping a phase", lambda c: c.execute(t.phase.insert().values(**row)), relaxed=True
        )

    def phases(self, operation_id: str) -> list[dict[str, Any]]:
        """Durations of an operation's phases, in the order they started."""
        return self._sessions.read(lambda c: records.phases(c, operation_id))


# ------------------------------------------------------------------------------- steps inside a transaction


def _change_id() -> str:
    return str(uuid.uuid4())


def _changed(change_id: str) -> Callable[[sa.Connection], bool]:
    """Whether a change is in the history."""
    query = sa.select(sa.func.count()).where(t.transition.c.change_id == change_id)
    return lambda connection: bool(connection.scalar(query))


def _admitted(
    bundle: PlanBundle, planned: PlannedOperation, binding: Document, epoch: int, worker_id: str
) -> OperationRecord:
    now = datetime.now(UTC)
    return OperationRecord(
        operation_id=planned.operation_id,
        operation_plan_sha256=planned.operation_plan_sha256,
        workflow_plan_sha256=bundle.workflow_plan_sha256,
        workflow_execution_id=bundle.workflow_execution_id,
        workflow=bundle.workflow,
        mart=planned.mart,
        target=planned.target,
        scope=bundle.scope,
        revision=planned.revision,
        replacement_ordinal=planned.replacement_ordinal,
        mode=planned.mode,
        attempt_binding_sha256=binding.sha256,
        state=step(None, State.PREPARING).target,
        version=1,
        unknown_since=None,
        fencing_epoch=epoch,
        worker_id=worker_id,
        facts=dict(planned.facts),
        admitted_at=now,
        updated_at=now,
    )


def _write_documents(connection: sa.Connection, documents: Iterable[Document]) -> list[str]:
    """Write documents create-only; return their digests."""
    digests = []
    for document in documents:
        # A closed document checked its own digest when it was made.
        body = canonical_json(document.as_json()).decode("ascii")
        known = connection.scalar(sa.select(t.document.c.body).where(t.document.c.sha256 == document.sha256))
        if known is None:
            connection.execute(
                t.document.insert().values(
                    sha256=document.sha256,
                    schema_name=document.SCHEMA,
                    body=body,
                    created_at=datetime.now(UTC),
                )
            )
        elif known != body:
            raise DponeError("DPONE_JOURNAL_CORRUPT", f"Another document has the digest of a {document.SCHEMA}.")
        digests.append(document.sha256)
    return digests


def _advance(
    connection: sa.Connection,
    operation: OperationRecord,
    successor: OperationRecord,
    kind: str,
    facts: dict[str, Any],
    documents: Sequence[Document],
    change_id: str,
) -> OperationRecord:
    """One change of an operation: fence, compare-and-set, history and documents."""
    mart = mart_resource(operation.mart)
    epoch = lock_guards(connection, [mart])[mart]
    if epoch != operation.fencing_epoch and operation.state not in TERMINAL:
        raise _fenced(operation, f"the mart's epoch is {epoch}, the operation's {operation.fencing_epoch}")
    successor = replace(
        successor,
        version=operation.version + 1,
        facts={**operation.facts, **facts},
        updated_at=datetime.now(UTC),
    )
    _replace(connection, operation, successor)
    digests = _write_documents(connection, documents)
    _append(connection, successor, kind, operation.state, facts, digests, change_id)
    return successor


def _replace(connection: sa.Connection, current: OperationRecord, successor: OperationRecord) -> None:
    """The compare-and-set: nothing is written unless the row is exactly the caller's."""
    row = t.operation.c
    mine = sa.and_(
        row.operation_id == current.operation_id,
        row.version == current.version,
        row.state == current.state.value,
        row.fencing_epoch == current.fencing_epoch,
        row.worker_id == current.worker_id,
    )
    changing = ("state", "version", "unknown_since", "fencing_epoch", "worker_id", "facts", "updated_at")
    columns = records.operation_columns(successor)
    values = {name: columns[name] for name in changing}
    if connection.execute(t.operation.update().where(mine).values(**values)).rowcount == 1:
        return
    found = records.operation(connection, current.operation_id)
    if found is None:
        raise DponeError("DPONE_JOURNAL_CORRUPT", f"The operation of {current.mart} is not in the journal.")
    if (found.worker_id, found.fencing_epoch) != (current.worker_id, current.fencing_epoch):
        raise _fenced(current, f"worker {found.worker_id} holds it with epoch {found.fencing_epoch}")
    raise DponeError(
        "DPONE_TRANSITION_ILLEGAL",
        f"{current.mart} {current.scope.key} is {found.state} at version {found.version}, not {current.state} at"
        f" version {current.version}.",
    )


def _append(
    connection: sa.Connection,
    operation: OperationRecord,
    kind: str,
    source: State | None,
    facts: dict[str, Any],
    documents: Sequence[str],
    change_id: str,
) -> None:
    connection.execute(
        t.transition.insert().values(
            operation_id=operation.operation_id,
            version=operation.version,
            change_id=change_id,
            kind=kind,
            from_state=source.value if source else None,
            to_state=operation.state.value,
            fencing_epoch=operation.fencing_epoch,
            worker_id=operation.worker_id,
            facts=records.json_text(facts),
            documents=records.json_text(list(documents)),
            changed_at=operation.updated_at,
        )
    )


def _move_generation(
    connection: sa.Connection, before: OperationRecord, complete: OperationRecord, target_uuid: str
) -> None:
    """Advance the generation head, unless this is an empty scope, which must leave it where it is."""
    target, now = complete.target, complete.updated_at
    predecessor_uuid = complete.facts.get("predecessor_uuid")
    head = records.generation_head(connection, target)
    if head is None:
        raise DponeError("DPONE_BASELINE_MISSING", f"{target} has no generation.")
    unchanged = head.uuid == target_uuid
    if before.state is State.PREPARED and unchanged:
        return
    if before.state is State.PREPARED or unchanged or head.uuid != predecessor_uuid:
        raise DponeError(
            "DPONE_JOURNAL_CORRUPT",
            f"The generation head of {target} is not what a publication from {before.state} starts from.",
            head_uuid=head.uuid,
            predecessor_uuid=predecessor_uuid,
            target_uuid=target_uuid,
        )
    successor = {
        "uuid": target_uuid,
        "generation": head.generation + 1,
        "operation_id": complete.operation_id,
    }
    old_head = (t.generation_head.c.target == target) & (t.generation_head.c.uuid == predecessor_uuid)
    old = (t.generation.c.target == target) & (t.generation.c.uuid == predecessor_uuid)
    moved = connection.execute(t.generation_head.update().where(old_head).values(**successor, changed_at=now))
    retired = connection.execute(t.generation.update().where(old).values(retired_at=now))
    if (moved.rowcount, retired.rowcount) != (1, 1):
        raise DponeError("DPONE_JOURNAL_CORRUPT", f"{target} has a generation head that was never a generation.")
    connection.execute(t.generation.insert().values(target=target, **successor, published_at=now))


def _move_scope_head(connection: sa.Connection, complete: OperationRecord, head: dict[str, Any]) -> None:
    key = (t.scope_head.c.mart == complete.mart) & (t.scope_head.c.scope_start == complete.scope.start)
    values = {**head, "published_at": complete.updated_at}
    revision = connection.scalar(sa.select(t.scope_head.c.revision).where(key))
    if revision is None:
        connection.execute(t.scope_head.insert().values(mart=complete.mart, scope_start=complete.scope.start, **values))
    elif revision < complete.revision:
        connection.execute(t.scope_head.update().where(key).values(**values))
    else:
        raise DponeError(
            "DPONE_JOURNAL_CORRUPT",
            f"{complete.mart} {complete.scope.key}: revision {complete.revision} cannot follow the published"
            f" revision {revision}.",
        )


def _move_checkpoint(connection: sa.Connection, complete: OperationRecord) -> None:
    key = t.checkpoint.c.mart == complete.mart
    values = {
        "last_scope_start": complete.scope.start,
        "last_scope_end": complete.scope.end,
        "operation_id": complete.operation_id,
        "published_at": complete.updated_at,
    }
    last = connection.scalar(sa.select(t.checkpoint.c.last_scope_start).where(key))
    if last is None:
        connection.execute(t.checkpoint.insert().values(mart=complete.mart, **values))
    elif last <= complete.scope.start:
        connection.execute(t.checkpoint.update().where(key).values(**values))


def _published(connection: sa.Connection, operation: OperationRecord, target_uuid: str, change_id: str) -> bool:
    """After a lost acknowledgement: True for all successors, False for all predecessors, else corrupt."""
    mine = operation.operation_id
    found = records.operation(connection, mine)
    scope_head = records.scope_head(connection, operation.mart, operation.scope)
    signs = [
        _changed(change_id)(connection),
        found is not None and found.state is State.COMPLETE,
        scope_head is not None and scope_head.operation_id == mine,
    ]
    # The other two need not move: an empty scope keeps the generation, an older day keeps the checkpoint.
    if operation.state is not State.PREPARED:
        head = records.generation_head(connection, operation.target)
        signs.append(head is not None and (head.uuid, head.operation_id) == (target_uuid, mine))
    checkpoint = connection.execute(sa.select(t.checkpoint).where(t.checkpoint.c.mart == operation.mart)).first()
    if checkpoint is None or checkpoint.last_scope_start <= operation.scope.start:
        signs.append(checkpoint is not None and checkpoint.operation_id == mine)
    if len(set(signs)) != 1:
        raise DponeError(
            "DPONE_JOURNAL_CORRUPT",
            f"The publication of {operation.mart} {operation.scope.key} left some rows changed and some not.",
        )
    return signs[0]


def _check_bundle(bundle: PlanBundle, workflow: str, target_of: dict[str, str], scope: Scope) -> None:
    planned = {operation.mart: operation.target for operation in bundle.operations}
    if len(planned) != len(bundle.operations) or planned != target_of:
        raise DponeError("DPONE_CONTRACT_INVALID", "PlanBundle.operations: not one operation for each mart.")
    if (bundle.workflow, bundle.scope) != (workflow, scope):
        raise DponeError("DPONE_CONTRACT_INVALID", "PlanBundle.workflow or .scope: not the one asked for.")


def _fenced(operation: OperationRecord, why: str) -> DponeError:
    return DponeError(
        "DPONE_FENCED",
        f"{operation.mart} {operation.scope.key}: {why}.",
        operation_id=operation.operation_id,
        fencing_epoch=operation.fencing_epoch,
        worker_id=operation.worker_id,
    )
