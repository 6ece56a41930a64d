"""Ending the queries of an attempt, and knowing that none is left."""

# ruff: noqa: S608 - the prefix goes through ``literal``.

import time
import uuid

from dpone_dagster.errors import DponeError
from resources.clickhouse.statements import Statements, literal

DEADLINE_SECONDS = 60.0


def quiesce(statements: Statements, prefix: str, *, deadline_seconds: float = DEADLINE_SECONDS) -> None:
    """Kill the queries whose id starts with ``prefix`` and return once none is left.

    Whoever sent them: two attempts that share a prefix on one engine end each other's.

    Raises:
        DponeError: DPONE_ENGINE_BUSY when one is left at the deadline (a DDL statement may not be killable).
    """
    until = time.monotonic() + deadline_seconds
    while left := running(statements, prefix):
        if time.monotonic() > until:
            raise DponeError("DPONE_ENGINE_BUSY", f"{left} queries of an earlier attempt still run.", queries=left)
        statements.run(f"KILL QUERY WHERE {_mine(prefix)} ASYNC", query_id=_own_id())
        time.sleep(0.05)


def running(statements: Statements, prefix: str) -> int:
    """Return how many queries run whose id starts with ``prefix``."""
    return int(statements.value(f"SELECT count() FROM system.processes WHERE {_mine(prefix)}", query_id=_own_id()))


def _mine(prefix: str) -> str:
    return f"(startsWith(query_id, {literal(prefix)}) OR startsWith(Settings['log_comment'], {literal(prefix)}))"


def _own_id() -> str:
    """An id of another kind, so that these statements do not find themselves."""
    return f"dpone-quiesce-{uuid.uuid4().hex}"
