"""PostgreSQL, as hooks use it."""

import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from dpone_dagster.errors import DponeError
from dpone_dagster.governance.sql_guard import require_reading, split
from resources.postgres.reading import is_away
from resources.runners import CONNECT_SECONDS, GRACE_SECONDS, not_sent, one_number

_TIMED_OUT = "57014"
_WRITES = ("INSERT", "UPDATE", "DELETE", "MERGE", "COPY")


class PostgresRunner:
    """PostgreSQL, which stands in for SQL Server; implements ``SqlRunner``.

    Every body gets a session of its own, so nothing that it sets outlives it.

    Args:
        conninfo: libpq connection string.
        application_name: tag of the sessions.
        grace_seconds: after the hook's own deadline the server has so long to say so, then the session is given up.
    """

    dialect = "postgres"

    def __init__(
        self, conninfo: str, *, application_name: str = "dpone-hook", grace_seconds: float = GRACE_SECONDS
    ) -> None:
        self._conninfo = conninfo
        self._application_name = application_name
        self._grace = grace_seconds

    def execute(self, sql: str, *, autocommit: bool, read_only: bool, timeout_seconds: int) -> int | None:
        """Run a body, statement by statement: each for itself, or all in one transaction.

        Returns:
            The rows that INSERT, UPDATE, DELETE, MERGE and COPY say they affected; None where none of them ran.

        Raises:
            DponeError: DPONE_HOOK_FAILED with ``statement`` and ``sqlstate``; DPONE_ENGINE_UNAVAILABLE.
        """
        statements = split(sql, self.dialect)
        rows: int | None = None
        with self._session(timeout_seconds, read_only=read_only) as session:
            session.repeatable = read_only or not autocommit
            if not autocommit:
                session.send("BEGIN")
            for session.statement, text in enumerate(statements, 1):
                cursor = session.send(text)
                if (cursor.statusmessage or "").startswith(_WRITES):
                    rows = (rows or 0) + max(cursor.rowcount, 0)
            if not autocommit and session.send("COMMIT").statusmessage != "COMMIT":
                raise DponeError("DPONE_HOOK_FAILED", "PostgreSQL rolled the hook back.", repeatable=True)
        return rows

    def query_number(self, sql: str, *, timeout_seconds: int) -> int | None:
        """Run one reading query in a read-only session and return its one whole number, or None for NULL.

        Raises:
            DponeError: DPONE_HOOK_FAILED, DPONE_ENGINE_UNAVAILABLE, DPONE_SQL_NOT_READING.
        """
        text = require_reading(sql, self.dialect)
        with self._session(timeout_seconds, read_only=True) as session:
            session.repeatable = True
            session.statement = 1
            session.set_deadline()
            rows = []
            for row in session.connection.cursor().stream(text.encode()):  # row by row: two are too many already
                rows.append(row)
                if len(rows) > 1:
                    break
            # Before the session ends: a stream that is left early would otherwise be drained.
            return one_number(rows)

    @contextmanager
    def _session(self, timeout_seconds: int, *, read_only: bool) -> Iterator["_Session"]:
        try:
            connection = psycopg.connect(
                self._conninfo,
                autocommit=True,
                application_name=self._application_name,
                connect_timeout=CONNECT_SECONDS,
            )
        except psycopg.Error as error:
            raise not_sent("PostgreSQL", error) from None
        session = _Session(connection, timeout_seconds)
        # A handle of its own: the driver's may belong to another session by the time the watch ends.
        line = socket.socket(fileno=os.dup(connection.fileno()))
        watch = threading.Timer(timeout_seconds + self._grace, _hang_up, [line])
        watch.daemon = True
        watch.start()
        try:
            if read_only:
                connection.execute("SET default_transaction_read_only = on")
            yield session
        except psycopg.Error as error:
            raise session.failure(error) from None
        finally:
            watch.cancel()
            line.close()
            with suppress(psycopg.Error, OSError):
                connection.close()


class _Session:
    """One body's session, and where in the body it is."""

    def __init__(self, connection: psycopg.Connection[Any], timeout_seconds: int) -> None:
        self.connection = connection
        self.statement = 0
        self.repeatable = False
        self._timeout = timeout_seconds
        self._until = time.monotonic() + timeout_seconds

    def set_deadline(self) -> None:
        """Let the server end the next statement at the body's deadline."""
        left = max(1, math.ceil((self._until - time.monotonic()) * 1000))
        self.connection.execute("SELECT set_config('statement_timeout', %s, false)", [str(left)])

    def send(self, text: str) -> psycopg.Cursor[Any]:
        """Send one statement once."""
        self.set_deadline()
        return self.connection.execute(text.encode())

    def failure(self, error: psycopg.Error) -> DponeError:
        """Tell what an error of the driver means."""
        state = error.sqlstate
        if is_away(error):
            if self.statement == 0:
                return not_sent("PostgreSQL", error)
            return DponeError(
                "DPONE_ENGINE_UNAVAILABLE",
                f"PostgreSQL was lost after it had been sent statement {self.statement} ({type(error).__name__}).",
                engine="postgres",
                statement=self.statement,
            )
        what = f"ran past {self._timeout} seconds" if state == _TIMED_OUT else "was refused"
        return DponeError(
            "DPONE_HOOK_FAILED",
            f"Statement {self.statement} of a hook {what} (SQLSTATE {state}).",
            sqlstate=state,
            statement=self.statement,
            repeatable=self.repeatable,
        )


def _hang_up(line: socket.socket) -> None:
    with suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
