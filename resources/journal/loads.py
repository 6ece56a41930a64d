"""Governed loads in the journal: ``LoadJournalPort`` on the sessions, locks and guards of the marts' journal."""

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from dpone_dagster.contracts.mart import Scope
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.graph import TERMINAL, State, step
from dpone_dagster.journal.port import Checkpoint, GuardStatus, Lease, LoadedDay, LoadGuard, LoadRecord, RunIdentity
from resources.journal import tables as t
from resources.journal.guards import lock_guards, raise_guards
from resources.journal.locks import Locks, load_resource, target_resource
from resources.journal.records import json_text
from resources.journal.transactions import Sessions

_OPEN = t.load.c.state.not_in([state.value for state in sorted(TERMINAL)])


class SqlLoadJournal:
    """``LoadJournalPort``; see there. One transaction a method, each settled when its acknowledgement is lost."""

    def __init__(self, sessions: Sessions, locks: Locks) -> None:
        self._sessions = sessions
        self._locks = locks

    def hold(
        self,
        resources: Iterable[str],
        *,
        identity: RunIdentity,
        scope: Scope,
        deadline_seconds: float,
        on_wait: Callable[[str], None],
    ) -> AbstractContextManager[Lease]:
        """See ``JournalPort.hold``."""
        return self._locks.hold(
            resources, identity=identity, scope=scope, deadline_seconds=deadline_seconds, on_wait=on_wait
        )

    # ------------------------------------------------------------------------------------------- changes

    def begin(
        self,
        lease: Lease,
        *,
        load_id: str,
        process: str,
        target: str,
        strategy: str,
        plan_sha256: str,
        scope: Scope | None,
    ) -> LoadRecord:
        """See ``LoadJournalPort.begin``."""
        resources = [load_resource(process), target_resource(target)]
        self._locks.require(lease, resources)
        worker = lease.identity.worker_id
        change_id = str(uuid.uuid4())

        def work(connection: sa.Connection) -> LoadRecord:
            epochs = lock_guards(connection, resources)
            # A route is known by its target as well: a process may have been renamed.
            for earlier in _loads(connection, (t.load.c.process == process) | (t.load.c.target == target), _OPEN):
                raise DponeError(
                    "DPONE_LOAD_OPEN",
                    f"A load of {earlier.process} into {earlier.target} is {earlier.state} and must be settled first.",
                    load_id=earlier.load_id,
                    state=str(earlier.state),
                )
            if (guard := _guard(connection, process) or _guard_of(connection, target)) is not None:
                raise guard.refusal()
            mart = connection.scalar(sa.select(t.baseline.c.mart).where(t.baseline.c.target == target))
            if mart is not None:
                raise DponeError("DPONE_TARGET_OF_A_MART", f"Target {target} is published by the mart {mart}.")
            epochs = raise_guards(connection, epochs, worker, {})
            now = datetime.now(UTC)
            load = LoadRecord(
                load_id=load_id,
                process=process,
                target=target,
                strategy=strategy,
                plan_sha256=plan_sha256,
                run_id=lease.identity.run_id,
                scope=scope,
                state=step(None, State.PREPARING).target,
                version=1,
                unknown_since=None,
                fencing_epoch=epochs[load_resource(process)],
                worker_id=worker,
                facts={},
                admitted_at=now,
                updated_at=now,
            )
            connection.execute(t.load.insert().values(**_columns(load), admitted_epoch=load.fencing_epoch))
            _append(connection, load, "begin", None, {}, None, change_id)
            return load

        return self._sessions.write(worker, "admitting a load", work, serializable=True, settle=_changed(change_id))

    def take_over(self, lease: Lease, load: LoadRecord) -> LoadRecord:
        """See ``LoadJournalPort.take_over``.

        Raises:
            DponeError: DPONE_OPERATION_HELD when the former worker still has sessions.
        """
        resources = [load_resource(load.process), target_resource(load.target)]
        self._locks.require(lease, resources)
        worker = lease.identity.worker_id
        if load.worker_id != worker:
            self._sessions.wait_quiet(load.worker_id)
        change_id = str(uuid.uuid4())

        def work(connection: sa.Connection) -> LoadRecord:
            epochs = raise_guards(connection, lock_guards(connection, resources), worker, {})
            successor = replace(
                load,
                version=load.version + 1,
                fencing_epoch=epochs[load_resource(load.process)],
                worker_id=worker,
                updated_at=datetime.now(UTC),
            )
            _replace(connection, load, successor)
            _append(connection, successor, "take_over", load.state, {}, _status(connection, load.process), change_id)
            return successor

        return self._sessions.write(worker, "taking a load over", work, settle=_changed(change_id))

    def transition(
        self, load: LoadRecord, to: State, *, facts: Mapping[str, Any] | None = None, guard: GuardStatus | None
    ) -> LoadRecord:
        """See ``LoadJournalPort.transition``."""
        edge = step(load.state, to, unknown_since=load.unknown_since)
        unknown_since = load.state if edge.target is State.COMMIT_UNKNOWN else None
        successor = replace(load, state=edge.target, unknown_since=unknown_since)
        return self._change(load, successor, "transition", facts or {}, lambda c: _set_guard(c, load, guard))

    def record(self, load: LoadRecord, facts: Mapping[str, Any], *, guard: GuardStatus | None = None) -> LoadRecord:
        """See ``LoadJournalPort.record``."""
        return self._change(
            load, load, "record", facts, lambda c: None if guard is None else _set_guard(c, load, guard)
        )

    def persist_state(self, load: LoadRecord, *, watermark: str | None, rows: int) -> LoadRecord:
        """See ``LoadJournalPort.persist_state``."""

        def move(connection: sa.Connection) -> None:
            now = datetime.now(UTC)
            checkpoint = {"watermark": watermark, "load_id": load.load_id, "moved_at": now}
            _upsert(connection, t.load_checkpoint, {"process": load.process}, checkpoint)
            if load.scope is not None:
                day = {
                    "scope_end": load.scope.end,
                    "load_id": load.load_id,
                    "plan_sha256": load.plan_sha256,
                    "row_count": rows,
                    "loaded_at": now,
                }
                _upsert(connection, t.load_day, {"process": load.process, "scope_start": load.scope.start}, day)
            _set_guard(connection, load, None)

        return self._change(load, load, "persist_state", {"state_persisted": True}, move)

    def clear_guard(self, load: LoadRecord, *, reason: str) -> LoadRecord:
        """See ``LoadJournalPort.clear_guard``."""
        who = self._sessions.read(self._sessions.dialect.login)
        facts = {"guard_cleared_by": who, "guard_cleared_because": reason[:400]}
        return self._change(load, load, "clear_guard", facts, lambda c: _set_guard(c, load, None))

    def _change(
        self,
        load: LoadRecord,
        successor: LoadRecord,
        kind: str,
        facts: Mapping[str, Any],
        also: Callable[[sa.Connection], None],
    ) -> LoadRecord:
        resource, change_id = load_resource(load.process), str(uuid.uuid4())
        if not self._locks.holds(resource, load.worker_id):
            raise _fenced(load, "this process does not hold the lease that goes with it")

        def work(connection: sa.Connection) -> LoadRecord:
            epoch = lock_guards(connection, [resource])[resource]
            if epoch != load.fencing_epoch:
                raise _fenced(load, f"the process's epoch is {epoch}, the load's {load.fencing_epoch}")
            after = replace(
                successor,
                version=load.version + 1,
                facts={**load.facts, **facts},
                updated_at=datetime.now(UTC),
            )
            _replace(connection, load, after)
            also(connection)
            _append(connection, after, kind, load.state, facts, _status(connection, load.process), change_id)
            return after

        return self._sessions.write(load.worker_id, f"{kind} of a load", work, settle=_changed(change_id))

    # ----------------------------------------------------------------------------------------- readers

    def open_load(self, process: str) -> LoadRecord | None:
        """See ``LoadJournalPort.open_load``."""
        found = self._sessions.read(lambda c: _loads(c, t.load.c.process == process, _OPEN))
        return found[0] if found else None

    def processes(self) -> list[str]:
        """The names of all processes that were ever loaded."""
        query = sa.select(t.load.c.process).distinct().order_by(t.load.c.process)
        return self._sessions.read(lambda c: list(c.scalars(query)))

    def load(self, load_id: str) -> LoadRecord | None:
        """One load."""
        found = self._sessions.read(lambda c: _loads(c, t.load.c.load_id == load_id))
        return found[0] if found else None

    def last_load(self, process: str) -> LoadRecord | None:
        """The load that was admitted last."""
        found = self.loads(process, limit=1)
        return found[0] if found else None

    def loads(self, process: str, *, limit: int = 20) -> list[LoadRecord]:
        """See ``LoadJournalPort.loads``."""
        return self._sessions.read(lambda c: _loads(c, t.load.c.process == process, limit=limit))

    def events(self, load_id: str) -> list[dict[str, Any]]:
        """See ``LoadJournalPort.events``."""
        query = sa.select(t.load_event).where(t.load_event.c.load_id == load_id).order_by(t.load_event.c.version)
        rows = self._sessions.read(lambda c: [dict(row) for row in c.execute(query).mappings()])
        return [{**row, "facts": json.loads(row["facts"])} for row in rows]

    def guard(self, process: str) -> LoadGuard | None:
        """The route's guard; None while all is well."""
        return self._sessions.read(lambda c: _guard(c, process))

    def checkpoint(self, process: str) -> Checkpoint | None:
        """What the last accepted load read up to."""
        query = sa.select(t.load_checkpoint).where(t.load_checkpoint.c.process == process)
        row = self._sessions.read(lambda c: c.execute(query).mappings().first())
        return Checkpoint(**row) if row else None

    def loaded_day(self, process: str, scope: Scope) -> LoadedDay | None:
        """The last accepted load of one day."""
        found = self._days((t.load_day.c.process == process) & (t.load_day.c.scope_start == scope.start))
        return found[0] if found else None

    def loaded_days(self, process: str) -> list[LoadedDay]:
        """The last accepted load of every day, by day."""
        return self._days(t.load_day.c.process == process)

    def _days(self, wanted: sa.ColumnElement[bool]) -> list[LoadedDay]:
        query = sa.select(t.load_day).where(wanted).order_by(t.load_day.c.scope_start)
        return [
            LoadedDay(
                process=row.process,
                scope=Scope(start=row.scope_start, end=row.scope_end),
                load_id=row.load_id,
                plan_sha256=row.plan_sha256,
                rows=row.row_count,
                loaded_at=row.loaded_at,
            )
            for row in self._sessions.read(lambda c: c.execute(query).all())
        ]


def open_load_of(connection: sa.Connection, target: str) -> str | None:
    """The process whose load into a target is not settled; None where there is none."""
    found = _loads(connection, t.load.c.target == target, _OPEN)
    return found[0].process if found else None


# ------------------------------------------------------------------------------- steps inside a transaction


def _changed(change_id: str) -> Callable[[sa.Connection], bool]:
    query = sa.select(sa.func.count()).where(t.load_event.c.change_id == change_id)
    return lambda connection: bool(connection.scalar(query))


def _columns(load: LoadRecord) -> dict[str, Any]:
    other = {"admitted_epoch", "scope_start", "scope_end", "state", "unknown_since", "facts"}
    return {
        **{name: getattr(load, name) for name in set(t.load.columns.keys()) - other},
        "state": load.state.value,
        "unknown_since": load.unknown_since.value if load.unknown_since else None,
        "scope_start": load.scope.start if load.scope else None,
        "scope_end": load.scope.end if load.scope else None,
        "facts": json_text(load.facts),
    }


def _loads(connection: sa.Connection, *wanted: sa.ColumnElement[bool], limit: int | None = None) -> list[LoadRecord]:
    """Loads, newest first."""
    query = sa.select(t.load).where(*wanted).order_by(t.load.c.admitted_epoch.desc()).limit(limit)
    found = []
    for row in connection.execute(query).mappings():
        values = dict(row)
        del values["admitted_epoch"]
        start, end = values.pop("scope_start"), values.pop("scope_end")
        values["scope"] = Scope(start=start, end=end) if start is not None else None
        values["state"] = State(values["state"])
        values["unknown_since"] = State(values["unknown_since"]) if values["unknown_since"] else None
        values["facts"] = json.loads(values["facts"])
        found.append(LoadRecord(**values))
    return found


def _guard(connection: sa.Connection, process: str) -> LoadGuard | None:
    row = connection.execute(sa.select(t.load_guard).where(t.load_guard.c.process == process)).mappings().first()
    return LoadGuard(**{**row, "status": GuardStatus(row["status"])}) if row else None


def _guard_of(connection: sa.Connection, target: str) -> LoadGuard | None:
    process = connection.scalar(sa.select(t.load_guard.c.process).where(t.load_guard.c.target == target))
    return _guard(connection, process) if process is not None else None


def _status(connection: sa.Connection, process: str) -> str | None:
    guard = _guard(connection, process)
    return str(guard.status) if guard else None


def _set_guard(connection: sa.Connection, load: LoadRecord, status: GuardStatus | None) -> None:
    if status is None:
        connection.execute(t.load_guard.delete().where(t.load_guard.c.process == load.process))
        return
    values = {
        "target": load.target,
        "strategy": load.strategy,
        "status": str(status),
        "load_id": load.load_id,
        "set_at": datetime.now(UTC),
    }
    _upsert(connection, t.load_guard, {"process": load.process}, values)


def _upsert(connection: sa.Connection, table: sa.Table, key: dict[str, Any], values: dict[str, Any]) -> None:
    # The guard's row is locked, so nobody else writes rows of this process.
    mine = sa.and_(*(table.c[name] == value for name, value in key.items()))
    if connection.execute(table.update().where(mine).values(**values)).rowcount == 0:
        connection.execute(table.insert().values(**key, **values))


def _replace(connection: sa.Connection, current: LoadRecord, successor: LoadRecord) -> None:
    """The compare-and-set: nothing is written unless the row is exactly the caller's."""
    row = t.load.c
    mine = sa.and_(
        row.load_id == current.load_id,
        row.version == current.version,
        row.state == current.state.value,
        row.fencing_epoch == current.fencing_epoch,
        row.worker_id == current.worker_id,
    )
    changing = ("state", "version", "unknown_since", "fencing_epoch", "worker_id", "facts", "updated_at")
    columns = _columns(successor)
    if connection.execute(t.load.update().where(mine).values(**{n: columns[n] for n in changing})).rowcount != 1:
        raise _fenced(current, "somebody else has changed it")


def _append(
    connection: sa.Connection,
    load: LoadRecord,
    kind: str,
    source: State | None,
    facts: Mapping[str, Any],
    guard: str | None,
    change_id: str,
) -> None:
    connection.execute(
        t.load_event.insert().values(
            load_id=load.load_id,
            version=load.version,
            change_id=change_id,
            kind=kind,
            from_state=source.value if source else None,
            to_state=load.state.value,
            guard=guard,
            fencing_epoch=load.fencing_epoch,
            worker_id=load.worker_id,
            facts=json_text(dict(facts)),
            changed_at=load.updated_at,
        )
    )


def _fenced(load: LoadRecord, why: str) -> DponeError:
    return DponeError(
        "DPONE_FENCED",
        f"Load {load.load_id} of {load.process}: {why}.",
        load_id=load.load_id,
        fencing_epoch=load.fencing_epoch,
        worker_id=load.worker_id,
    )
