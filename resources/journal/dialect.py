"""What the journal needs natively: session application locks, tagged sessions, and what an error means.

One class per dialect holds the statements; what can be said in SQLAlchemy Core is said in ``store``.
"""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, ClassVar

import sqlalchemy as sa

from dpone_dagster.errors import DponeError


class Fault(Enum):
    """What a driver's error means to the journal."""

    UNAVAILABLE = "the engine does not answer, or ended the session"
    RETRY = "a conflict with another transaction; nothing was written"
    BUSY = "a lock or a statement took too long; nothing was written"
    MISSING = "the journal's tables are not there"
    REFUSED = "the engine refused the statement"


class Dialect(ABC):
    """Locks and sessions of one engine. Every statement is one round trip.

    Class attributes (SQL): ``:lock`` is ``lock_argument`` of a resource, ``:tag`` a session tag.
        TRY_LOCK: 1 when this session got the exclusive lock at once, else 0.
        UNLOCK: release it.
        HOLDS: 1 when this session holds it.
        HOLDER: the tag of the session that holds it, if any.
        SESSIONS: ids of the other sessions with a tag.
        SESSION_ID: id of this session.
        MAY_TAKE_OVER: 1 for members of the role ``dpone_takeover`` and administrators.
        LOGIN: name of the login.
        RELAX: let the transaction's commit not wait for the disk; None where that has no statement.
    """

    TRY_LOCK: ClassVar[str]
    UNLOCK: ClassVar[str]
    HOLDS: ClassVar[str]
    HOLDER: ClassVar[str]
    SESSIONS: ClassVar[str]
    SESSION_ID: ClassVar[str]
    MAY_TAKE_OVER: ClassVar[str]
    LOGIN: ClassVar[str]
    RELAX: ClassVar[str | None] = None

    @abstractmethod
    def connect_arguments(self, url: sa.URL, tag: str, *, lock_seconds: int) -> dict[str, Any]:
        """Driver arguments of a tagged session whose waits for row locks end."""

    @abstractmethod
    def lock_argument(self, resource: str) -> Any:
        """What stands for a resource in the engine's lock table; equal names, equal arguments."""

    @abstractmethod
    def end_session(self, connection: sa.Connection, session: int) -> None:
        """Ask the engine to end one session; it may need a moment."""

    @abstractmethod
    def sqlstate(self, error: sa.exc.DBAPIError) -> str | None:
        """SQLSTATE of a driver's error, None where the driver itself gave up."""

    @abstractmethod
    def fault(self, error: sa.exc.DBAPIError) -> Fault:
        """Classify a driver's error."""

    def try_lock(self, connection: sa.Connection, resource: str) -> bool:
        """Take the session's exclusive lock on a resource if it is free."""
        return bool(connection.scalar(sa.text(self.TRY_LOCK), {"lock": self.lock_argument(resource)}))

    def unlock(self, connection: sa.Connection, resource: str) -> None:
        """Release the session's lock on a resource."""
        connection.execute(sa.text(self.UNLOCK), {"lock": self.lock_argument(resource)})

    def holds(self, connection: sa.Connection, resources: Iterable[str]) -> bool:
        """Whether this very session still holds every lock; one round trip."""
        locks = {f"lock{n}": self.lock_argument(resource) for n, resource in enumerate(resources)}
        questions = ", ".join(f"({self.HOLDS.replace(':lock', f':{name}')})" for name in locks)
        return all(connection.execute(sa.text(f"select {questions}"), locks).one())

    def holder(self, connection: sa.Connection, resource: str) -> str | None:
        """Tag of the session that holds a resource's lock; None when it is free."""
        tag: str | None = connection.scalar(sa.text(self.HOLDER), {"lock": self.lock_argument(resource)})
        return tag

    def sessions(self, connection: sa.Connection, tag: str) -> list[int]:
        """Ids of the other sessions with this tag."""
        return list(connection.scalars(sa.text(self.SESSIONS), {"tag": tag}))

    def session_id(self, connection: sa.Connection) -> int:
        """Id of this session."""
        return int(connection.scalar(sa.text(self.SESSION_ID)))

    def relax(self, connection: sa.Connection) -> None:
        """Let this transaction's commit be lost with the machine's power, though never with a process."""
        if self.RELAX:
            connection.execute(sa.text(self.RELAX))

    def may_take_over(self, connection: sa.Connection) -> bool:
        """Whether this login may end other workers' sessions."""
        return bool(connection.scalar(sa.text(self.MAY_TAKE_OVER)))

    def login(self, connection: sa.Connection) -> str:
        """Name of this login."""
        return str(connection.scalar(sa.text(self.LOGIN)))


class PostgresDialect(Dialect):
    """Advisory locks on 64 bits of the name's SHA-256; sessions by ``application_name``.

    Two names with equal 64 bits would only wait for each other: what a lock means is in the guard row, which
    has the whole name.
    """

    # An advisory lock of one 64-bit key shows as two halves in pg_locks.
    _LOCKS: ClassVar[str] = (
        "from pg_locks l where l.locktype = 'advisory' and l.objsubid = 1 and l.granted"
        " and l.database = (select oid from pg_database where datname = current_database())"
        " and ((cast(l.classid as bigint) << 32) | cast(l.objid as bigint)) = :lock"
    )
    TRY_LOCK = "select pg_try_advisory_lock(:lock)"
    UNLOCK = "select pg_advisory_unlock(:lock)"
    HOLDS = f"select count(*) {_LOCKS} and l.pid = pg_backend_pid()"
    HOLDER = f"select (select a.application_name from pg_stat_activity a where a.pid = l.pid) {_LOCKS}"  # noqa: S608
    SESSIONS = (
        "select pid from pg_stat_activity where application_name = :tag and pid <> pg_backend_pid()"
        " and datname = current_database()"
    )
    SESSION_ID = "select pg_backend_pid()"
    MAY_TAKE_OVER = (
        "select count(*) from pg_roles me where me.rolname = current_user and (me.rolsuper or exists"
        " (select 1 from pg_roles r where r.rolname = 'dpone_takeover' and pg_has_role(r.oid, 'member')))"
    )
    LOGIN = "select session_user"
    RELAX = "set local synchronous_commit = off"

    def connect_arguments(self, url: sa.URL, tag: str, *, lock_seconds: int) -> dict[str, Any]:
        """Driver arguments of psycopg."""
        options = (
            "-c timezone=UTC -c idle_session_timeout=0 -c idle_in_transaction_session_timeout=0"
            f" -c lock_timeout={lock_seconds}s -c statement_timeout=60s"
            # A worker whose machine is gone must lose its locks within a minute; ignored on Unix sockets.
            " -c tcp_keepalives_idle=30 -c tcp_keepalives_interval=10 -c tcp_keepalives_count=3"
        )
        given = url.query.get("options", "")
        return {
            "application_name": tag,
            "connect_timeout": 10,
            "options": f"{given if isinstance(given, str) else ' '.join(given)} {options}".strip(),
        }

    def lock_argument(self, resource: str) -> int:
        """The first 64 bits of the name's SHA-256, signed."""
        return int.from_bytes(hashlib.sha256(resource.encode()).digest()[:8], "big", signed=True)

    def end_session(self, connection: sa.Connection, session: int) -> None:
        """Terminate one backend."""
        connection.execute(sa.text("select pg_terminate_backend(:session)"), {"session": session})

    def sqlstate(self, error: sa.exc.DBAPIError) -> str | None:
        """SQLSTATE, from psycopg."""
        state: str | None = getattr(error.orig, "sqlstate", None)
        return state

    def fault(self, error: sa.exc.DBAPIError) -> Fault:
        """Classify by SQLSTATE."""
        state = self.sqlstate(error)
        if state in ("55P03", "57014"):  # lock_timeout, statement_timeout
            return Fault.BUSY
        if error.connection_invalidated or state is None or state[:2] in ("08", "53", "57"):
            return Fault.UNAVAILABLE
        if state in ("40001", "40P01", "23505"):  # serialization, deadlock, a racer's insert came first
            return Fault.RETRY
        if state in ("42P01", "3F000", "42703"):
            return Fault.MISSING
        return Fault.REFUSED


class SqlServerDialect(Dialect):
    """The same on SQL Server; written down, not run here, and refused until it has been.

    ``HOLDER`` and ``SESSIONS`` need VIEW SERVER STATE; ending a session needs ALTER ANY CONNECTION.
    """

    TRY_LOCK = (
        "declare @got int; exec @got = sp_getapplock @Resource = :lock, @LockMode = 'Exclusive',"
        " @LockOwner = 'Session', @LockTimeout = 0; select case when @got >= 0 then 1 else 0 end"
    )
    UNLOCK = "exec sp_releaseapplock @Resource = :lock, @LockOwner = 'Session'"
    HOLDS = "case when applock_mode('public', :lock, 'Session') = 'Exclusive' then 1 else 0 end"
    # The description shows the first 32 characters of the resource: 'dpone:' and 104 bits of the digest.
    HOLDER = (
        "select s.program_name from sys.dm_tran_locks l join sys.dm_exec_sessions s"
        " on s.session_id = l.request_session_id where l.resource_type = 'APPLICATION'"
        " and l.request_status = 'GRANT' and l.resource_database_id = db_id()"
        " and charindex(left(:lock, 32), l.resource_description) > 0"
    )
    SESSIONS = "select session_id from sys.dm_exec_sessions where program_name = :tag and session_id <> @@spid"
    SESSION_ID = "select @@spid"
    MAY_TAKE_OVER = (
        "select case when is_rolemember('dpone_takeover') = 1 or is_srvrolemember('sysadmin') = 1 then 1 else 0 end"
    )
    LOGIN = "select original_login()"

    def __init__(self) -> None:
        raise DponeError(
            "DPONE_PROFILE_UNAVAILABLE",
            "The journal has not been run on SQL Server, so it does not start there.",
        )

    def connect_arguments(self, url: sa.URL, tag: str, *, lock_seconds: int) -> dict[str, Any]:
        """Driver arguments of pyodbc; ``set lock_timeout`` has no connection attribute and is still to be sent."""
        return {"APP": tag, "timeout": 10}

    def lock_argument(self, resource: str) -> str:
        """A name that fits nvarchar(255) whatever the resource is called."""
        return "dpone:" + hashlib.sha256(resource.encode()).hexdigest()

    def end_session(self, connection: sa.Connection, session: int) -> None:
        """KILL takes no parameter."""
        connection.execute(sa.text(f"kill {int(session)}"))

    def sqlstate(self, error: sa.exc.DBAPIError) -> str | None:
        """SQLSTATE, the first argument of pyodbc's errors."""
        arguments = getattr(error.orig, "args", ())
        return str(arguments[0]) if arguments else None

    def fault(self, error: sa.exc.DBAPIError) -> Fault:
        """Classify by SQLSTATE."""
        state = self.sqlstate(error)
        if error.connection_invalidated or state is None or state[:2] == "08":
            return Fault.UNAVAILABLE
        known = {"40001": Fault.RETRY, "23000": Fault.RETRY, "HYT00": Fault.BUSY, "42S02": Fault.MISSING}
        return known.get(state, Fault.REFUSED)


def dialect_for(url: sa.URL) -> Dialect:
    """Return the dialect of an engine's address.

    Raises:
        DponeError: DPONE_PROFILE_UNAVAILABLE for everything but PostgreSQL.
    """
    if url.get_backend_name() == "postgresql":
        return PostgresDialect()
    if url.get_backend_name() == "mssql":
        return SqlServerDialect()
    raise DponeError("DPONE_PROFILE_UNAVAILABLE", f"The journal does not speak to {url.get_backend_name()} engines.")


def refusal(dialect: Dialect, error: sa.exc.DBAPIError, doing: str) -> DponeError:
    """Turn a driver's error into a refusal; keeps its class and SQLSTATE, never its message or values."""
    fault = dialect.fault(error)
    code = {
        Fault.UNAVAILABLE: "DPONE_ENGINE_UNAVAILABLE",
        Fault.RETRY: "DPONE_JOURNAL_BUSY",
        Fault.BUSY: "DPONE_JOURNAL_BUSY",
        Fault.MISSING: "DPONE_JOURNAL_MISSING",
        Fault.REFUSED: "DPONE_JOURNAL_REFUSED",
    }[fault]
    return DponeError(
        code,
        f"Journal, {doing}: {fault.value}.",
        error_class=type(error.orig).__name__,
        sqlstate=dialect.sqlstate(error),
    )


@contextmanager
def engine_errors(dialect: Dialect, doing: str) -> Iterator[None]:
    """Map every driver's error inside to a DPONE_* code."""
    try:
        yield
    except sa.exc.DBAPIError as error:
        raise refusal(dialect, error, doing) from None


def wait_for_lock(dialect: Dialect, connection: sa.Connection, resource: str, deadline_seconds: float) -> None:
    """Poll for a session lock; polling keeps the deadline ours and never leaves a half-taken lock behind.

    Raises:
        DponeError: DPONE_JOURNAL_BUSY when the deadline passes.
    """
    end = time.monotonic() + deadline_seconds
    while not dialect.try_lock(connection, resource):
        if time.monotonic() >= end:
            raise DponeError("DPONE_JOURNAL_BUSY", f"Somebody else kept {resource} until the deadline.")
        time.sleep(0.05)
