"""Who works: session locks, the attempts behind them, and ending a worker that does not end by itself."""

import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from dpone_dagster.contracts.mart import Scope
from dpone_dagster.contracts.names import session_tag
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.port import Holder, Lease, OperationRecord, RunIdentity
from resources.journal import tables as t
from resources.journal.dialect import Dialect, Fault, engine_errors
from resources.journal.transactions import Sessions


def workflow_resource(workflow: str) -> str:
    """Name of a workflow's lock and guard."""
    return f"workflow:{workflow}"


def mart_resource(mart: str) -> str:
    """Name of a mart's lock and guard."""
    return f"mart:{mart}"


def target_resource(target: str) -> str:
    """Name of a ClickHouse target's lock and guard; ``target`` is ``database.table``."""
    return f"target:{target}"


def load_resource(process: str) -> str:
    """Name of a governed load's lock and guard."""
    return f"load:{process}"


def resources_of(operation: OperationRecord) -> tuple[str, str]:
    """The two resources that an operation cannot share: its mart and its target."""
    return mart_resource(operation.mart), target_resource(operation.target)


class SqlLease:
    """Session locks on a dedicated connection."""

    def __init__(
        self, connection: sa.Connection, dialect: Dialect, resources: tuple[str, ...], identity: RunIdentity
    ) -> None:
        self.resources = resources
        self.identity = identity
        self._connection = connection
        self._dialect = dialect
        self._lost = False
        self._mutex = threading.Lock()

    def check(self) -> None:
        """Raise DPONE_LEASE_LOST unless this very session still holds every lock (one round trip)."""
        with self._mutex:
            if not self._lost:
                try:
                    self._lost = not self._dialect.holds(self._connection, self.resources)
                except sa.exc.SQLAlchemyError:
                    # Whatever happened to the session, we can no longer tell that nobody else works.
                    self._lost = True
            if self._lost:
                raise DponeError("DPONE_LEASE_LOST", "The session that holds this worker's locks is gone.")


class Locks:
    """Leases of this process, and what the journal says about other workers'."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._dialect = sessions.dialect
        self._policy = sessions.policy
        self._live: list[SqlLease] = []

    def require(self, lease: Lease, resources: Iterable[str]) -> None:
        """Check that the lease is ours, alive, and has these resources.

        Raises:
            DponeError: DPONE_LEASE_LOST otherwise.
        """
        if not any(lease is live for live in self._live):
            raise DponeError("DPONE_LEASE_LOST", "The lease is not one that this journal holds now.")
        if missing := sorted(set(resources) - set(lease.resources)):
            raise DponeError("DPONE_LEASE_LOST", f"The worker does not hold the lock of {missing[0]}.")
        lease.check()

    def allows(self, operation: OperationRecord, *, finished: bool) -> bool:
        """Whether a lease of this process goes with an operation: its worker's, or its mart's once finished.

        Without this question a record that anybody read from the journal would pass as its owner's.
        """
        if finished:
            return any(mart_resource(operation.mart) in lease.resources for lease in list(self._live))
        return any(lease.identity.worker_id == operation.worker_id for lease in list(self._live))

    def holds(self, resource: str, worker_id: str) -> bool:
        """Whether a lease of this process, of that very worker, has the resource."""
        return any(lease.identity.worker_id == worker_id and resource in lease.resources for lease in list(self._live))

    @contextmanager
    def hold(
        self,
        resources: Iterable[str],
        *,
        identity: RunIdentity,
        scope: Scope,
        deadline_seconds: float,
        on_wait: Callable[[str], None],
    ) -> Iterator[Lease]:
        """See ``JournalPort.hold``. Locks are taken all or none, so a waiter never blocks a third."""
        names = tuple(sorted(set(resources)))
        with engine_errors(self._dialect, "taking locks"):
            connection = self._sessions.lock_connection(identity.worker_id)
        try:
            with engine_errors(self._dialect, "taking locks"):
                self._acquire(connection, names, scope, deadline_seconds, on_wait)
                session = self._dialect.session_id(connection)
            # Between the locks and this row a waiter sees a holder without a name, and looks again.
            attempt_id = self._begin_attempt(names, identity, scope, session)
            lease = SqlLease(connection, self._dialect, names, identity)
            self._live.append(lease)
            reason = "released"
            try:
                yield lease
            except BaseException as error:
                reason = error.code if isinstance(error, DponeError) else type(error).__name__
                raise
            finally:
                self._live.remove(lease)
                _end_attempt(connection, attempt_id, reason)
        finally:
            connection.close()
            self._sessions.release(identity.worker_id)

    def _acquire(
        self,
        connection: sa.Connection,
        names: Sequence[str],
        scope: Scope,
        deadline_seconds: float,
        on_wait: Callable[[str], None],
    ) -> None:
        started = time.monotonic()
        said_at: float | None = None
        pause = self._policy.poll_first
        while (busy := self._try_all(connection, names)) is not None:
            holder = self._holder(connection, busy)
            if holder is not None and holder.scope == scope:
                raise DponeError(
                    "DPONE_OPERATION_HELD",
                    f"{busy} {scope.key} is worked on by {_describe(holder)}.",
                    **_details(holder, busy),
                )
            waited = time.monotonic() - started
            who = "somebody who is just starting or leaving"
            if holder is not None:
                who = f"{_describe(holder)}, working on {holder.scope.key}"
            if waited >= deadline_seconds:
                raise DponeError(
                    "DPONE_LOCK_DEADLINE",
                    f"{busy} was kept busy for {waited:.0f} s by {who}.",
                    **(_details(holder, busy) if holder is not None else {"resource": busy}),
                )
            # A holder without a name is mostly gone at the next look; do not bother anybody with it.
            due = said_at is None or time.monotonic() - said_at >= self._policy.say_every
            if due and (holder is not None or waited > 1):
                on_wait(f"Waiting for {busy}, held by {who}.")
                said_at = time.monotonic()
            time.sleep(max(0.001, min(pause * random.uniform(0.7, 1.3), deadline_seconds - waited)))  # noqa: S311
            pause = min(pause * 1.5, self._policy.poll_last)

    def _try_all(self, connection: sa.Connection, names: Sequence[str]) -> str | None:
        """Take every lock or none; return the one that was busy."""
        for index, name in enumerate(names):
            if not self._dialect.try_lock(connection, name):
                for taken in names[:index]:
                    self._dialect.unlock(connection, taken)
                return name
        return None

    def _begin_attempt(self, names: Sequence[str], identity: RunIdentity, scope: Scope, session: int) -> str:
        attempt_id = str(uuid.uuid4())
        same_locks = sa.select(t.attempt_resource.c.attempt_id).where(t.attempt_resource.c.resource_id.in_(names))

        def work(connection: sa.Connection) -> None:
            now = datetime.now(UTC)
            # We have their locks, so whoever left an attempt unfinished has lost them.
            connection.execute(
                t.attempt.update()
                .where(t.attempt.c.ended_at.is_(None), t.attempt.c.attempt_id.in_(same_locks))
                .values(ended_at=now, ended_reason="its lock session was gone")
            )
            connection.execute(
                t.attempt.insert().values(
                    attempt_id=attempt_id,
                    worker_id=identity.worker_id,
                    logical_run_id=identity.logical_run_id,
                    run_id=identity.run_id,
                    try_number=identity.try_number,
                    task_id=identity.task_id,
                    owner=identity.owner,
                    scope_start=scope.start,
                    scope_end=scope.end,
                    session_tag=session_tag(identity.worker_id),
                    backend_pid=session,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    started_at=now,
                )
            )
            connection.execute(
                t.attempt_resource.insert(),
                [{"attempt_id": attempt_id, "resource_id": name} for name in names],
            )

        self._sessions.write(identity.worker_id, "recording an attempt", work)
        return attempt_id

    def holder(self, resource: str) -> Holder | None:
        """See ``JournalPort.holder``."""
        return self._sessions.read(lambda connection: self._holder(connection, resource))

    def _holder(self, connection: sa.Connection, resource: str) -> Holder | None:
        """Who holds a lock: by the tag of the session that has it, and that worker's unfinished attempt."""
        tag = self._dialect.holder(connection, resource)
        if tag is None:
            return None
        row = connection.execute(
            sa.select(t.attempt)
            .join(t.attempt_resource, t.attempt_resource.c.attempt_id == t.attempt.c.attempt_id)
            .where(
                t.attempt.c.session_tag == tag,
                t.attempt.c.ended_at.is_(None),
                t.attempt_resource.c.resource_id == resource,
            )
            .order_by(t.attempt.c.started_at.desc())
            .limit(1)
        ).first()
        if row is None:
            return None
        return Holder(
            worker_id=row.worker_id,
            run_id=row.run_id,
            owner=row.owner,
            host=row.host,
            pid=row.pid,
            scope=Scope(start=row.scope_start, end=row.scope_end),
            started_at=row.started_at,
        )

    def end_worker(self, worker_id: str, *, reason: str) -> None:
        """See ``JournalPort.end_worker``. Logged before anything is ended.

        Raises:
            DponeError: DPONE_TAKEOVER_FORBIDDEN without the role ``dpone_takeover``; DPONE_OPERATION_HELD when
                sessions are left at the end of the policy's quiet time.
        """
        tag = session_tag(worker_id)
        takeover_id = str(uuid.uuid4())
        ended: set[int] = set()

        def log(connection: sa.Connection) -> None:
            if not self._dialect.may_take_over(connection):
                raise DponeError("DPONE_TAKEOVER_FORBIDDEN", "This login is not in the role dpone_takeover.")
            connection.execute(
                t.takeover_log.insert().values(
                    takeover_id=takeover_id,
                    worker_id=worker_id,
                    by_login=self._dialect.login(connection),
                    by_host=socket.gethostname(),
                    by_pid=os.getpid(),
                    reason=reason[:400],
                    logged_at=datetime.now(UTC),
                )
            )

        def finish(connection: sa.Connection) -> None:
            now = datetime.now(UTC)
            connection.execute(
                t.takeover_log.update()
                .where(t.takeover_log.c.takeover_id == takeover_id)
                .values(sessions_ended=len(ended), finished_at=now)
            )
            connection.execute(
                t.attempt.update()
                .where(t.attempt.c.worker_id == worker_id, t.attempt.c.ended_at.is_(None))
                .values(ended_at=now, ended_reason="ended by a takeover")
            )

        self._sessions.write(None, "logging a takeover", log)
        end = time.monotonic() + self._policy.quiet
        # Again and again: a worker that is only half dead may connect once more.
        while left := self._sessions.read(lambda connection: self._end_sessions(connection, tag)):
            ended.update(left)
            if time.monotonic() >= end:
                raise DponeError(
                    "DPONE_OPERATION_HELD", f"{len(left)} sessions of the worker do not end.", worker_id=worker_id
                )
            time.sleep(0.05)
        self._sessions.write(None, "logging a takeover", finish)

    def _end_sessions(self, connection: sa.Connection, tag: str) -> list[int]:
        sessions = self._dialect.sessions(connection, tag)
        try:
            for session in sessions:
                self._dialect.end_session(connection, session)
        except sa.exc.DBAPIError as error:
            if self._dialect.fault(error) is not Fault.REFUSED:
                raise
            raise DponeError(
                "DPONE_TAKEOVER_FORBIDDEN", "The engine did not let this login end the worker's sessions."
            ) from None
        return sessions


def _end_attempt(connection: sa.Connection, attempt_id: str, reason: str) -> None:
    """Mark the attempt ended, on the lock connection; where that is gone, the next holder marks it."""
    try:
        connection.execute(
            t.attempt.update()
            .where(t.attempt.c.attempt_id == attempt_id, t.attempt.c.ended_at.is_(None))
            .values(ended_at=datetime.now(UTC), ended_reason=reason)
        )
    except sa.exc.SQLAlchemyError:
        connection.invalidate()


def _describe(holder: Holder) -> str:
    since = holder.started_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"run {holder.run_id} ({holder.owner}, host {holder.host}, pid {holder.pid}, since {since})"


def _details(holder: Holder, resource: str) -> dict[str, Any]:
    return {
        "resource": resource,
        "worker_id": holder.worker_id,
        "run_id": holder.run_id,
        "host": holder.host,
        "pid": holder.pid,
        "day": holder.scope.key,
        "since": holder.started_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
