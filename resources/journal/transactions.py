"""Sessions and transactions of the journal: tagged, bounded, retried only while they merely conflict."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa

from dpone_dagster.contracts.names import session_tag
from dpone_dagster.errors import DponeError
from resources.journal.dialect import Fault, dialect_for, engine_errors, refusal

R = TypeVar("R")
_NOBODY = "dpone-reader"


@dataclass(frozen=True, kw_only=True)
class JournalPolicy:
    """Bounds, all in seconds but ``tries``.

    Attributes:
        poll_first, poll_last: the pause between two looks at a busy lock grows from one to the other.
        say_every: how often a waiter is told whom it waits for.
        tries: how often a journal-only transaction is tried when it conflicts with another.
        quiet: how long ended or dead sessions may take to disappear.
        row_lock: how long a journal transaction waits for a row, e.g. a guard that an open mutation locks.
    """

    poll_first: float = 0.02
    poll_last: float = 0.5
    say_every: float = 5
    tries: int = 12
    quiet: float = 20
    row_lock: int = 10


class Sessions:
    """Connections tagged with the worker they work for, so that a takeover can find and end them.

    Journal transactions of a worker share a small pool that ``release`` empties; a lock connection is never pooled.
    """

    def __init__(self, url: str | sa.URL, policy: JournalPolicy) -> None:
        address = sa.make_url(url)
        if address.drivername == "postgresql":
            address = address.set(drivername="postgresql+psycopg")
        self.dialect = dialect_for(address)
        self.policy = policy
        self._url = address
        self._engines: dict[str, sa.Engine] = {}
        self._mutex = threading.Lock()

    def lock_connection(self, worker_id: str) -> sa.Connection:
        """Open a connection of its own, in autocommit, for session locks; closing it releases them."""
        engine = self._new_engine(session_tag(worker_id), poolclass=sa.pool.NullPool)
        return engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def release(self, worker_id: str) -> None:
        """Close a worker's pooled sessions: takeover takes a session with its tag for a sign of life."""
        with self._mutex:
            engine = self._engines.pop(session_tag(worker_id), None)
        if engine is not None:
            engine.dispose()

    def close(self) -> None:
        """Close every pooled session."""
        with self._mutex:
            engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            engine.dispose()

    def read(self, work: Callable[[sa.Connection], R]) -> R:
        """Run a reading transaction."""
        with engine_errors(self.dialect, "reading"), self._engine(_NOBODY).connect() as connection:
            return work(connection)

    def write(
        self,
        worker_id: str | None,
        doing: str,
        work: Callable[[sa.Connection], R],
        *,
        serializable: bool = False,
        relaxed: bool = False,
        settle: Callable[[sa.Connection], bool] | None = None,
    ) -> R:
        """Run one journal transaction, again a bounded number of times while it only conflicts with others.

        Args:
            worker_id: whose session it is; None for an operator's.
            doing: what to call it in a refusal.
            work: runs inside the transaction; may be called again.
            relaxed: do not wait for the disk; for what nothing rests on.
            settle: says, on a fresh connection and after the old session is gone, whether the transaction
                whose acknowledgement was lost has committed.

        Raises:
            DponeError: DPONE_JOURNAL_BUSY when conflicts do not stop; DPONE_COMMIT_UNKNOWN when the
                acknowledgement was lost and nothing settles it; DPONE_ENGINE_UNAVAILABLE when the engine was lost
                before COMMIT, which therefore did not happen.
        """
        tag = session_tag(worker_id) if worker_id else _NOBODY
        for attempt in range(self.policy.tries):
            if attempt:
                time.sleep(random.uniform(0, 0.02 * 2 ** min(attempt, 5)))  # noqa: S311
            committing = False
            try:
                with self._engine(tag).connect() as connection:
                    if serializable:
                        connection.execution_options(isolation_level="SERIALIZABLE")
                    session = self.dialect.session_id(connection)
                    if relaxed:
                        self.dialect.relax(connection)
                    result = work(connection)
                    committing = True
                    connection.commit()
                    return result
            except sa.exc.DBAPIError as error:
                fault = self.dialect.fault(error)
                if committing and fault is Fault.UNAVAILABLE:
                    if self._settled(tag, session, doing, settle):
                        return result
                elif fault is not Fault.RETRY:
                    raise refusal(self.dialect, error, doing) from None
        raise DponeError("DPONE_JOURNAL_BUSY", f"Journal, {doing}: {self.policy.tries} tries met conflicts.")

    def _settled(self, tag: str, session: int, doing: str, settle: Callable[[sa.Connection], bool] | None) -> bool:
        """Whether a COMMIT without an acknowledgement happened; False only when it never will."""
        if settle is not None:
            try:
                # As long as the session lives, a COMMIT on its way may still arrive.
                if self._gone(tag, session):
                    return self.read(settle)
            except DponeError as error:
                if error.code != "DPONE_ENGINE_UNAVAILABLE":
                    raise
        raise DponeError("DPONE_COMMIT_UNKNOWN", f"Journal, {doing}: the answer to COMMIT was lost.") from None

    def wait_quiet(self, worker_id: str) -> None:
        """Return once a former worker has no session left.

        Raises:
            DponeError: DPONE_OPERATION_HELD when it still has one at the end of the policy's quiet time.
        """
        if not self._gone(session_tag(worker_id)):
            raise DponeError(
                "DPONE_OPERATION_HELD",
                "The former worker has lost its locks but still has SQL sessions.",
                worker_id=worker_id,
            )

    def _gone(self, tag: str, session: int | None = None) -> bool:
        """Poll until no session with the tag is left, or not that one; False when the time is over."""
        end = time.monotonic() + self.policy.quiet
        while (left := self.read(lambda c: self.dialect.sessions(c, tag))) and session in (None, *left):
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)
        return True

    def _engine(self, tag: str) -> sa.Engine:
        with self._mutex:
            if tag not in self._engines:
                self._engines[tag] = self._new_engine(tag, pool_size=1, max_overflow=8, pool_pre_ping=True)
            return self._engines[tag]

    def _new_engine(self, tag: str, **options: Any) -> sa.Engine:
        return sa.create_engine(
            self._url,
            connect_args=self.dialect.connect_arguments(self._url, tag, lock_seconds=self.policy.row_lock),
            hide_parameters=True,  # values must not reach a traceback through SQLAlchemy either
            **options,
        )
