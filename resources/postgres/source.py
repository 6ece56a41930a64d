"""PostgreSQL as the source of a governed load: one snapshot, its columns, its window and its rows."""

# ruff: noqa: S608 - names are quoted; values are checked texts of a closed form.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pyarrow as pa

from dpone_dagster.contracts.mart import Column, Scope
from dpone_dagster.declarations.manifest import Process
from dpone_dagster.errors import DponeError
from dpone_dagster.ports import Columns
from resources.postgres import dialect
from resources.postgres.probe import PostgresProbe
from resources.postgres.reading import raise_if_away, stream
from resources.session import Session
from resources.sources import (
    absent,
    dataset,
    key_columns,
    key_is_null,
    load_columns,
    proven,
    query_text,
    settle,
)


class PostgresLoadSource:
    """PostgreSQL standing in for SQL Server: a table, a view or a query; ``LoadSourcePort``.

    One REPEATABLE READ READ ONLY snapshot serves a session: the control connection exports it and the Arrow reader
    imports it, so counts, digests and extraction agree while others write. Only ``now()`` and volatile functions of a
    query may differ between them, since the two connections began at different moments.

    Args:
        conninfo: libpq connection string.
        uri: the same engine as a libpq URI, for Arrow reads.
        application_name: tag of this adapter's own sessions.
    """

    def __init__(self, *, conninfo: str, uri: str, application_name: str = "dpone-load-source") -> None:
        self._conninfo = conninfo
        self._uri = uri
        self._application_name = application_name

    @contextmanager
    def open(self, process: Process, *, scope: Scope | None, above: str | None) -> Iterator[Session]:
        """Begin the snapshot, settle columns and window, and refuse what cannot cross.

        Raises:
            DponeError: DPONE_SOURCE_ABSENT, DPONE_SOURCE_COLUMN, DPONE_TYPE_UNSUPPORTED, DPONE_WATERMARK_NULL,
                DPONE_WATERMARK_TYPE, DPONE_KEY_NULL, DPONE_VALUE_OUTSIDE_DOMAIN; DPONE_SOURCE_REFUSED for a query
                that the engine does not take; what ``sql_guard`` refuses.
        """
        query = query_text(process, dialect="postgres") if process.source.table is None else None
        try:
            connection = psycopg.connect(self._conninfo, application_name=self._application_name, autocommit=True)
        except psycopg.OperationalError:
            raise DponeError("DPONE_ENGINE_UNAVAILABLE", "The SQL engine does not answer.") from None
        try:
            with _postgres_errors():
                session = self._settle(connection, process, query, scope=scope, above=above)
            yield session
        finally:
            with suppress(psycopg.Error):
                connection.close()

    def _settle(
        self,
        connection: psycopg.Connection[Any],
        process: Process,
        query: str | None,
        *,
        scope: Scope | None,
        above: str | None,
    ) -> Session:
        connection.execute("begin isolation level repeatable read, read only")
        # While the Arrow reader streams, this session only waits, and must not be ended for it.
        connection.execute("set local idle_in_transaction_session_timeout = 0")
        found = connection.execute("select pg_export_snapshot()").fetchone()
        assert found is not None
        snapshot: str = found[0]
        relation, physical = (
            _postgres_query(connection, query) if query is not None else _postgres_table(connection, process)
        )
        columns = load_columns(physical, dialect.canonical_type)
        window, where = settle(_Postgres(connection, relation), process, columns, scope=scope, above=above)
        _examine_postgres(connection, columns, key_columns(process, columns), relation, where)
        columns = proven(process, columns)
        probe = PostgresProbe(
            connection,
            columns=columns,
            relation_sql=relation,
            where_sql=where,
            side="source",
            dataset=dataset(process, query),
        )

        def rows() -> Iterator[pa.RecordBatch]:
            in_snapshot = (
                "set transaction isolation level repeatable read, read only",
                f"set transaction snapshot '{snapshot}'",
            )
            return stream(self._uri, columns, f"from {relation} where {where}", what="the source", before=in_snapshot)

        def cancel() -> None:
            with suppress(psycopg.Error):
                connection.cancel_safe(timeout=5)

        return Session(columns=columns, window=window, probe=probe, snapshot=True, rows=rows, cancel=cancel)


class _Postgres:
    """PostgreSQL's side of ``settle``."""

    always = "true"
    never = "false"

    def __init__(self, connection: psycopg.Connection[Any], relation: str) -> None:
        self._connection = connection
        self._relation = relation

    def nulls(self, column: Column) -> int:
        found = self._connection.execute(
            f"select count(*) from {self._relation} where {self.quote(column.name)} is null"
        ).fetchone()
        assert found is not None
        return int(found[0])

    def highest(self, column: Column, where: str) -> str | None:
        match column.spec.mapping:
            case "date_date":
                text = "to_char(high, 'YYYY-MM-DD')"
            case "datetime2_utc":
                text = """to_char(high, 'YYYY-MM-DD"T"HH24:MI:SS.US')"""
            case _:
                text = "high::text"
        outside = dialect.domain_violation_sql([Column(name="high", type=column.type, nullable=True)])
        found = self._connection.execute(
            f"select high is null, {outside}, {text}"
            f" from (select max({self.quote(column.name)}) as high from {self._relation} where {where}) as top"
        ).fetchone()
        assert found is not None
        if found[1]:
            raise _outside([column.name])
        return None if found[0] else str(found[2])

    def literal(self, column: Column, text: str) -> str:
        types = {"integer_width_preserving": "bigint", "date_date": "date", "datetime2_utc": "timestamp"}
        return f"{types.get(column.spec.mapping, 'numeric')} '{text}'"

    def quote(self, name: str) -> str:
        return dialect.quote(name)

    def day(self, name: str, scope: Scope) -> str:
        return dialect.scope_predicate(name, scope)


def _postgres_table(connection: psycopg.Connection[Any], process: Process) -> tuple[str, list[tuple[str, str, bool]]]:
    table = process.source.table
    assert table is not None
    found = connection.execute(
        """select c.oid::bigint from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
           where n.nspname = %s and c.relname = %s and c.relkind in ('r', 'v', 'm', 'p', 'f')""",
        [table.schema_name, table.name],
    ).fetchone()
    if found is None:
        raise absent(table)
    columns = connection.execute(
        """select attname, format_type(atttypid, atttypmod), not attnotnull
           from pg_attribute where attrelid = %s::oid and attnum > 0 and not attisdropped order by attnum""",
        [found[0]],
    ).fetchall()
    return f"{dialect.quote(table.schema_name)}.{dialect.quote(table.name)}", columns


def _postgres_query(connection: psycopg.Connection[Any], query: str) -> tuple[str, list[tuple[str, str, bool]]]:
    relation = f"(\n{query}\n) as source"
    # Prepared, because only then does the engine itself refuse a second statement; no row is asked for.
    result = connection.execute(f"select * from {relation} limit 0", prepare=True).pgresult
    assert result is not None
    shapes = [((result.fname(i) or b"").decode(), result.ftype(i), result.fmod(i)) for i in range(result.nfields)]
    columns = []
    for name, type_, modifier in shapes:
        found = connection.execute("select format_type(%s::oid, %s)", [type_, modifier]).fetchone()
        assert found is not None
        # What an outer join or an expression may yield is known to nobody but the rows.
        columns.append((name, str(found[0]), True))
    return relation, columns


def _examine_postgres(
    connection: psycopg.Connection[Any], columns: Columns, key: Columns, relation: str, where: str
) -> None:
    """Refuse values that would become others on the way, and NULLs in the key, in one look at the window."""
    bounded = [c for c in columns if dialect.domain_violation_sql([c]) != "false"]
    parts = [f"coalesce(bool_or({dialect.domain_violation_sql([c])}), false)" for c in bounded]
    parts += [f"count(*) filter (where {dialect.quote(c.name)} is null)" for c in key]
    if not parts:
        return
    found = connection.execute(f"select {', '.join(parts)} from {relation} where {where}").fetchone()
    assert found is not None
    if outside := [c.name for c, bad in zip(bounded, found, strict=False) if bad]:
        raise _outside(outside)
    for column, nulls in zip(key, found[len(bounded) :], strict=True):
        if nulls:
            raise key_is_null(column, nulls)


def _outside(names: Sequence[str]) -> DponeError:
    return DponeError(
        "DPONE_VALUE_OUTSIDE_DOMAIN",
        f"Column {names[0]!r} has a value that ClickHouse cannot hold exactly: an infinity, NaN or a moment out of"
        " range.",
        next_step="Filter or replace such values in the source, or in source.options.query.",
        field=names[0],
        columns=list(names),
    )


@contextmanager
def _postgres_errors() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise_if_away(error)
        raise DponeError(
            "DPONE_SOURCE_REFUSED", f"The SQL engine refused to read the source (SQLSTATE {error.sqlstate})."
        ) from None
