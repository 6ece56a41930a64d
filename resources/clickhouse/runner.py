"""ClickHouse, as hooks use it."""

import math
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpone_dagster.errors import DponeError
from dpone_dagster.governance.sql_guard import require_reading, split
from resources.clickhouse.client import ClickHouseClient, ClickHouseEndpoint, connect, mapped_errors
from resources.runners import CONNECT_SECONDS, GRACE_SECONDS, not_sent, one_number

# Errors after which other servers, or the server itself later, may still do what was asked.
_MAY_STILL_RUN = {209, 210, 319, 341}
_DDL_TIMEOUT = 159


class ClickHouseRunner:
    """ClickHouse; implements ``SqlRunner``. It has no transactions: every statement stands for itself.

    Args:
        prefix: every statement's query id and ``log_comment`` begin with it, so that it can be found and ended.
        grace_seconds: as for ``PostgresRunner``.
    """

    dialect = "clickhouse"

    def __init__(self, endpoint: ClickHouseEndpoint, prefix: str, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self._endpoint = endpoint
        self._prefix = prefix
        self._grace = grace_seconds

    def execute(self, sql: str, *, autocommit: bool, read_only: bool, timeout_seconds: int) -> int | None:
        """Run a body, statement by statement, each to its end: mutations are waited for, inserts are not queued.

        Returns:
            The rows that were written, as far as ClickHouse says.

        Raises:
            DponeError: DPONE_HOOK_FAILED with ``statement`` and ``number``; DPONE_ENGINE_UNAVAILABLE.
        """
        statements = split(sql, self.dialect)
        if not autocommit:
            raise DponeError("DPONE_HOOK_FAILED", "ClickHouse has no transactions.", repeatable=True)
        until = time.monotonic() + timeout_seconds
        rows: int | None = None
        with self._connection(timeout_seconds) as client:
            for number, text in enumerate(statements, 1):
                with _clickhouse_errors(number, repeatable=read_only, on_cluster="cluster" in text.lower()):
                    summary = client.command(text, settings=self._settings(until, read_only=read_only))
                written = getattr(summary, "written_rows", 0)
                if written:
                    rows = (rows or 0) + int(written)
        return rows

    def query_number(self, sql: str, *, timeout_seconds: int) -> int | None:
        """As ``PostgresRunner.query_number``."""
        text = require_reading(sql, self.dialect)
        settings = self._settings(time.monotonic() + timeout_seconds, read_only=True)
        with (
            self._connection(timeout_seconds) as client,
            _clickhouse_errors(1, repeatable=True, on_cluster=False),
        ):
            rows = []
            with client.query_row_block_stream(text, settings=settings) as blocks, mapped_errors():
                for block in blocks:
                    rows += list(block)[:2]
                    if len(rows) > 1:
                        break
        return one_number(rows)

    def _settings(self, until: float, *, read_only: bool) -> dict[str, Any]:
        query_id = f"{self._prefix}{uuid.uuid4().hex[:12]}"
        return {
            "query_id": query_id,
            "log_comment": query_id,
            "max_execution_time": max(1, math.ceil(until - time.monotonic())),
            "wait_end_of_query": 1,  # an error at the end is then an error, not a broken answer
            "mutations_sync": 1,
            "async_insert": 0,
            **({"readonly": 2} if read_only else {}),
        }

    @contextmanager
    def _connection(self, timeout_seconds: int) -> Iterator[ClickHouseClient]:
        try:
            client = connect(
                self._endpoint,
                connect_timeout_seconds=CONNECT_SECONDS,
                timeout_seconds=math.ceil(timeout_seconds + self._grace),
            )
        except DponeError as error:
            raise not_sent("ClickHouse", error) from None
        try:
            yield client
        finally:
            client.close()


@contextmanager
def _clickhouse_errors(statement: int, *, repeatable: bool, on_cluster: bool) -> Iterator[None]:
    try:
        yield
    except DponeError as error:
        if error.code != "DPONE_ENGINE_REFUSED":
            raise
        number = error.details.get("number")
        if not repeatable and (number in _MAY_STILL_RUN or (number == _DDL_TIMEOUT and on_cluster)):
            raise DponeError(
                "DPONE_ENGINE_UNAVAILABLE",
                f"ClickHouse may still run statement {statement} of a hook (its error number {number}).",
                engine="clickhouse",
                number=number,
                statement=statement,
            ) from None
        raise DponeError(
            "DPONE_HOOK_FAILED",
            f"Statement {statement} of a hook was refused (ClickHouse's error number {number}).",
            number=number,
            statement=statement,
            repeatable=repeatable,
        ) from None
