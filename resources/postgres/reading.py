"""How rows leave PostgreSQL as Arrow, and what an error of its drivers means; one place for marts, loads and hooks."""

from collections.abc import Iterator, Sequence
from typing import Any

import adbc_driver_postgresql.dbapi as adbc
import psycopg
import pyarrow as pa

from dpone_dagster.contracts.mart import Column, arrow_schema
from dpone_dagster.errors import DponeError
from resources.arrow import exact_batch
from resources.postgres import dialect

BATCH_BYTES = 4 * 1024 * 1024  # of one record batch; what a reader holds at a time
_AWAY = ("08", "57P")  # classes of SQLSTATE that mean "ask again later", never "refused"


def is_away(error: psycopg.Error) -> bool:
    """Return whether an error says that the session is gone, and nothing of what was asked."""
    return error.sqlstate is None or error.sqlstate.startswith(_AWAY)


def raise_if_away(error: psycopg.Error) -> None:
    """Raise DPONE_ENGINE_UNAVAILABLE for an error after which nothing is known of what was asked."""
    if is_away(error):
        raise DponeError("DPONE_ENGINE_UNAVAILABLE", "The SQL engine ended the session.") from None


def stream(
    uri: str, columns: Sequence[Column], rest_sql: str, *, what: str, before: Sequence[str] = ()
) -> Iterator[pa.RecordBatch]:
    """Stream the columns of a query in batches of a few MiB, cast safely to ``ColumnType.arrow``.

    Args:
        uri: the engine as a libpq URI.
        rest_sql: what follows the select list: ``from ..``, and what else there is.
        what: what is read, for people.
        before: statements that go first, on the same session.

    Raises:
        DponeError: DPONE_VALUE_OUTSIDE_DOMAIN, DPONE_ENGINE_UNAVAILABLE, DPONE_SOURCE_REFUSED.
    """
    # Numbered, because a name may be anything; the Arrow schema puts the names back by position.
    selected = ", ".join(f"{_carried(column)} as c{i}" for i, column in enumerate(columns))
    schema = arrow_schema(columns)
    try:
        with (
            adbc.connect(uri) as connection,
            connection.cursor(adbc_stmt_kwargs={"adbc.postgresql.batch_size_hint_bytes": BATCH_BYTES}) as cursor,
        ):
            for statement in before:
                cursor.execute(statement)
            cursor.execute(f"select {selected} {rest_sql}")
            for batch in _told_apart(connection, cursor.fetch_record_batch(), what):
                yield exact_batch(batch, schema)
    except (adbc.OperationalError, OSError):  # the latter once the stream has begun
        raise DponeError("DPONE_ENGINE_UNAVAILABLE", f"The SQL engine ended the read of {what}.") from None
    except adbc.Error as error:
        raise DponeError("DPONE_SOURCE_REFUSED", f"The read of {what} was refused ({type(error).__name__}).") from None


def _carried(column: Column) -> str:
    """Select a column in a type that the Arrow driver carries without loss."""
    name = dialect.quote(column.name)
    # The driver gives numerics as an opaque string; text says so, and char(n) loses its padding here.
    return f"{name}::text" if column.spec.mapping in ("uniqueidentifier_uuid", "string_utf8", "decimal_exact") else name


def _told_apart(connection: Any, batches: Iterator[pa.RecordBatch], what: str) -> Iterator[pa.RecordBatch]:
    """Tell a refused statement from a lost session: the driver reports both alike once the stream has begun."""
    try:
        yield from batches
    except (pa.ArrowException, OSError):
        try:
            connection.rollback()  # a session that still answers refused the statement
        except (adbc.Error, OSError):
            raise DponeError("DPONE_ENGINE_UNAVAILABLE", f"The SQL engine ended the read of {what}.") from None
        raise DponeError("DPONE_SOURCE_REFUSED", f"The SQL engine refused the read of {what} midway.") from None
