"""Where the rows of a governed load come from: the SQL engine, ClickHouse, or a Python asset.

A source settles, before a row leaves it, which columns there are, which rows the run reads, and that every value can
be held exactly by ClickHouse. The process that it opens is a resolved one: SQL text in place of files. PostgreSQL
stands in for SQL Server; no sentence here says anything of SQL Server.
"""

# ruff: noqa: S608 - names are quoted; values are checked texts of a closed form.

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime
from typing import Any, Protocol

import adbc_driver_postgresql.dbapi as adbc
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from dpone_dagster.contracts.canonical import sha256_bytes
from dpone_dagster.contracts.mart import Column, Scope
from dpone_dagster.declarations.manifest import Process, TableRef
from dpone_dagster.errors import DponeError
from dpone_dagster.governance.sql_guard import require_reading
from dpone_dagster.ports import Columns, LoadColumn, Window
from resources.clickhouse.statements import BOUNDED, Statements, literal
from resources.clickhouse_client import ClickHouseClient
from resources.dialects import clickhouse, postgres
from resources.loads.asset_rows import RESERVED, AssetLoadSource, admit_name, refuse_values
from resources.loads.probes import ClickHouseProbe, PostgresProbe
from resources.loads.session import Session
from resources.postgres_source import told_apart

__all__ = ["AssetLoadSource", "ClickHouseLoadSource", "PostgresLoadSource", "read_clickhouse_table"]

BATCH_BYTES = 4 * 1024 * 1024  # of one record batch; what a reader holds at a time

# What has one order on every engine. Texts have their collation's, uuid an order of each engine's own.
_ORDERED = ("integer_width_preserving", "date_date", "datetime2_utc", "decimal_exact")
_NEXT_TYPE = "Cast the column in source.options.query, or leave it out there."
_AWAY = ("08", "57P")  # classes of SQLSTATE that mean "ask again later", never "refused"

_CLICKHOUSE_TYPES = {
    "UInt8": "tinyint",
    "Int16": "smallint",
    "Int32": "int",
    "Int64": "bigint",
    "Bool": "bit",
    "UUID": "uniqueidentifier",
    "Date": "date",
    "DateTime64(6, 'UTC')": "datetime2(6)",
    "String": "nvarchar(max)",
}
_NULLABLE = re.compile(r"Nullable\((.+)\)")
_DECIMAL = re.compile(r"Decimal\((\d+), (\d+)\)")


class _Engine(Protocol):
    """What settling a window asks of an engine, and how its dialect says it."""

    always: str
    never: str

    def nulls(self, column: Column) -> int:
        """Return how many rows of the relation, not of the window, have NULL in the column."""

    def highest(self, column: Column, where: str) -> str | None:
        """Return the greatest value in canonical text; None without rows.

        Raises:
            DponeError: DPONE_VALUE_OUTSIDE_DOMAIN when it has none (infinity, NaN).
        """

    def literal(self, column: Column, text: str) -> str: ...
    def quote(self, name: str) -> str: ...
    def day(self, name: str, scope: Scope) -> str: ...


def _settle(
    engine: _Engine, process: Process, columns: Columns, *, scope: Scope | None, above: str | None
) -> tuple[Window, str]:
    """Return the window and the search condition that is exactly it."""
    read = process.source.read
    if read.column is None:
        return Window(), engine.always
    column = next((c for c in columns if c.name == read.column), None)
    if column is None:
        raise DponeError("DPONE_SOURCE_COLUMN", f"The source has no column {read.column!r}.", field=read.column)
    name = engine.quote(column.name)
    if read.mode == "daily":
        if column.type != "datetime2(6)":
            raise DponeError(
                "DPONE_SOURCE_COLUMN",
                f"Column {column.name!r} of a daily load is {column.type}; it has to be datetime2(6) in UTC.",
                field=column.name,
            )
        if scope is None:
            raise DponeError("DPONE_SCOPE_NOT_A_DAY", "A daily load needs its UTC day.")
        # A row without a time is in no day, so no run would ever load it.
        if nulls := engine.nulls(column) if column.nullable else 0:
            raise DponeError(
                "DPONE_SOURCE_COLUMN",
                f"Column {column.name!r} says which day a row belongs to and is NULL in {nulls} rows.",
                field=column.name,
                rows=nulls,
            )
        return Window(scope=scope), engine.day(column.name, scope)
    if column.spec.mapping not in _ORDERED:
        raise DponeError(
            "DPONE_WATERMARK_TYPE",
            f"Column {column.name!r} is {column.type}, which the engines do not order alike.",
            field=column.name,
        )
    if nulls := engine.nulls(column) if column.nullable else 0:
        raise DponeError(
            "DPONE_WATERMARK_NULL",
            f"The watermark column {column.name!r} is NULL in {nulls} rows.",
            field=column.name,
            rows=nulls,
        )
    lower = f"{name} > {engine.literal(column, _checked(column, above))}" if above is not None else engine.always
    highest = engine.highest(column, lower)
    if highest is None:  # nothing new, or the highest value moved backwards: the checkpoint stays where it is
        return Window(above=above, up_to=above), engine.never
    upper = f"{name} <= {engine.literal(column, highest)}"
    return Window(above=above, up_to=highest), f"({lower} AND {upper})"


def _checked(column: Column, text: str) -> str:
    """Refuse a checkpoint that is no canonical text of the column's type; what passes is safe inside SQL."""
    with suppress(ValueError):
        match column.spec.mapping:
            case "integer_width_preserving":
                if str(int(text)) == text and -(2**63) <= int(text) < 2**63:
                    return text
            case "date_date":
                if date.fromisoformat(text).isoformat() == text:
                    return text
            case "datetime2_utc":
                moment = datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%f")  # noqa: DTZ007 - UTC by definition
                if moment.isoformat(timespec="microseconds") == text:
                    return text
            case _:
                scale, precision = column.spec.scale, column.spec.precision
                fraction = rf"\.[0-9]{{{scale}}}" if scale else ""
                whole = precision - scale
                if re.fullmatch(rf"-?(0|[1-9][0-9]{{0,{max(whole - 1, 0)}}}){fraction}", text):
                    return text
    raise DponeError(
        "DPONE_WATERMARK_TYPE",
        f"The checkpoint of column {column.name!r} is no value of its type {column.type}.",
        field=column.name,
    )


def _query_text(process: Process, *, dialect: str) -> str:
    """Return the source's query, one reading statement."""
    query = process.source.options.query
    if query is None or query.sql is None:
        raise DponeError("DPONE_SOURCE_ABSENT", "The file of the source's query was not read.")
    return require_reading(query.sql, dialect)


def _dataset(process: Process, query: str | None) -> str:
    table = process.source.table
    return table.dotted if table is not None else f"query {sha256_bytes((query or '').encode())}"


def _absent(table: TableRef) -> DponeError:
    return DponeError("DPONE_SOURCE_ABSENT", f"{table.dotted} does not exist.")


def _load_columns(found: Sequence[tuple[str, str, bool]], canonical: Callable[[str], str]) -> Columns:
    """Turn (name, physical type, nullable) into columns, refusing what cannot cross.

    Raises:
        DponeError: DPONE_SOURCE_COLUMN for a reserved, empty or repeated name, or no column at all;
            DPONE_TYPE_UNSUPPORTED naming the column.
    """
    columns: list[LoadColumn] = []
    for name, physical, nullable in found:
        admit_name(name, [c.name for c in columns])
        try:
            type_ = canonical(physical)
        except DponeError as error:
            raise DponeError(
                "DPONE_TYPE_UNSUPPORTED",
                f"Column {name!r} has type {physical}, which has no exact mapping.",
                next_step=_NEXT_TYPE,
                field=name,
                type=physical,
            ) from error
        columns.append(LoadColumn(name=name, type=type_, nullable=nullable))
    if not columns:
        raise DponeError("DPONE_SOURCE_COLUMN", "The source has no column.")
    return tuple(columns)


def _proven(process: Process, columns: Columns) -> Columns:
    """Say NOT NULL of the columns that were looked at: the key's, and the one that the run reads by."""
    looked_at = {*(process.sink.unique_key or ()), process.source.read.column}
    return tuple(c.model_copy(update={"nullable": False}) if c.name in looked_at else c for c in columns)


def _key_columns(process: Process, columns: Columns) -> Columns:
    """The unique key's columns that the engine does not call NOT NULL itself."""
    key = process.sink.unique_key or ()
    if missing := [name for name in key if name not in {c.name for c in columns}]:
        raise DponeError("DPONE_SOURCE_COLUMN", f"The source has no key column {missing[0]!r}.", field=missing[0])
    return tuple(c for c in columns if c.name in key and c.nullable)


def _key_is_null(column: Column, rows: int) -> DponeError:
    return DponeError(
        "DPONE_KEY_NULL", f"Key column {column.name!r} is NULL in {rows} rows.", field=column.name, rows=rows
    )


# ------------------------------------------------------------------------------------------------ PostgreSQL


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
        query = _query_text(process, dialect="postgres") if process.source.table is None else None
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
        columns = _load_columns(physical, postgres.canonical_type)
        window, where = _settle(_Postgres(connection, relation), process, columns, scope=scope, above=above)
        _examine_postgres(connection, columns, _key_columns(process, columns), relation, where)
        columns = _proven(process, columns)
        probe = PostgresProbe(
            connection,
            columns=columns,
            relation_sql=relation,
            where_sql=where,
            side="source",
            dataset=_dataset(process, query),
        )

        def rows() -> Iterator[pa.RecordBatch]:
            return self._stream(snapshot, columns, relation, where)

        def cancel() -> None:
            with suppress(psycopg.Error):
                connection.cancel_safe(timeout=5)

        return Session(columns=columns, window=window, probe=probe, snapshot=True, rows=rows, cancel=cancel)

    def _stream(self, snapshot: str, columns: Columns, relation: str, where: str) -> Iterator[pa.RecordBatch]:
        # Numbered, because a name may be anything; the Arrow schema puts the names back by position.
        selected = ", ".join(f"{_carried(column)} as c{i}" for i, column in enumerate(columns))
        schema = _schema(columns)
        try:
            with (
                adbc.connect(self._uri) as connection,
                connection.cursor(adbc_stmt_kwargs={"adbc.postgresql.batch_size_hint_bytes": BATCH_BYTES}) as cursor,
            ):
                cursor.execute("set transaction isolation level repeatable read, read only")
                cursor.execute(f"set transaction snapshot '{snapshot}'")
                cursor.execute(f"select {selected} from {relation} where {where}")
                for batch in told_apart(connection, cursor.fetch_record_batch()):
                    yield _exact_batch(batch, schema)
        except (adbc.OperationalError, OSError):
            raise DponeError("DPONE_ENGINE_UNAVAILABLE", "The SQL engine ended the read of the source.") from None
        except adbc.Error as error:
            raise DponeError(
                "DPONE_SOURCE_REFUSED", f"The read of the source was refused ({type(error).__name__})."
            ) from None


class _Postgres:
    """PostgreSQL's side of ``_settle``."""

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
        outside = postgres.domain_violation_sql([Column(name="high", type=column.type, nullable=True)])
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
        return postgres.quote(name)

    def day(self, name: str, scope: Scope) -> str:
        return postgres.scope_predicate(name, scope)


def _postgres_table(connection: psycopg.Connection[Any], process: Process) -> tuple[str, list[tuple[str, str, bool]]]:
    table = process.source.table
    assert table is not None
    found = connection.execute(
        """select c.oid::bigint from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
           where n.nspname = %s and c.relname = %s and c.relkind in ('r', 'v', 'm', 'p', 'f')""",
        [table.schema_name, table.name],
    ).fetchone()
    if found is None:
        raise _absent(table)
    columns = connection.execute(
        """select attname, format_type(atttypid, atttypmod), not attnotnull
           from pg_attribute where attrelid = %s::oid and attnum > 0 and not attisdropped order by attnum""",
        [found[0]],
    ).fetchall()
    return f"{postgres.quote(table.schema_name)}.{postgres.quote(table.name)}", columns


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
    bounded = [c for c in columns if postgres.domain_violation_sql([c]) != "false"]
    parts = [f"coalesce(bool_or({postgres.domain_violation_sql([c])}), false)" for c in bounded]
    parts += [f"count(*) filter (where {postgres.quote(c.name)} is null)" for c in key]
    if not parts:
        return
    found = connection.execute(f"select {', '.join(parts)} from {relation} where {where}").fetchone()
    assert found is not None
    if outside := [c.name for c, bad in zip(bounded, found, strict=False) if bad]:
        raise _outside(outside)
    for column, nulls in zip(key, found[len(bounded) :], strict=True):
        if nulls:
            raise _key_is_null(column, nulls)


def _outside(names: Sequence[str]) -> DponeError:
    return DponeError(
        "DPONE_VALUE_OUTSIDE_DOMAIN",
        f"Column {names[0]!r} has a value that ClickHouse cannot hold exactly: an infinity, NaN or a moment out of"
        " range.",
        next_step="Filter or replace such values in the source, or in source.options.query.",
        field=names[0],
        columns=list(names),
    )


def _carried(column: Column) -> str:
    """Select a column in a type that the Arrow driver carries without loss."""
    name = postgres.quote(column.name)
    # The driver gives numerics as an opaque string; text says so, and char(n) loses its padding here.
    return f"{name}::text" if column.spec.mapping in ("uniqueidentifier_uuid", "string_utf8", "decimal_exact") else name


@contextmanager
def _postgres_errors() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate is None or error.sqlstate.startswith(_AWAY):
            raise DponeError("DPONE_ENGINE_UNAVAILABLE", "The SQL engine ended the session.") from None
        raise DponeError(
            "DPONE_SOURCE_REFUSED", f"The SQL engine refused to read the source (SQLSTATE {error.sqlstate})."
        ) from None


# ------------------------------------------------------------------------------------------------ ClickHouse


class ClickHouseLoadSource:
    """ClickHouse: a table, a view or a query; ``LoadSourcePort``.

    ClickHouse has no snapshot over several queries, and the session says so: counts, digests and extraction are each
    right for their own moment. A table whose engine merges rows is read as ``SELECT`` sees it, without ``FINAL``.

    Args:
        client: the connection.
        prefix: of every query id.
    """

    def __init__(self, client: ClickHouseClient, prefix: str) -> None:
        self._statements = Statements(client, prefix)

    @contextmanager
    def open(self, process: Process, *, scope: Scope | None, above: str | None) -> Iterator[Session]:
        """Settle columns and window, and refuse what cannot cross.

        Raises:
            DponeError: DPONE_SOURCE_ABSENT, DPONE_SOURCE_COLUMN, DPONE_TYPE_UNSUPPORTED, DPONE_WATERMARK_NULL,
                DPONE_WATERMARK_TYPE, DPONE_KEY_NULL; DPONE_ENGINE_REFUSED for a query that the engine does not take;
                what ``sql_guard`` refuses. Reading raises DPONE_VALUE_OUTSIDE_DOMAIN.
        """
        query = None
        table = process.source.table
        if table is None:
            query = _query_text(process, dialect="clickhouse")
            relation = f"(\n{query}\n)"
        else:
            relation = _clickhouse_table(self._statements, table)
        columns = clickhouse_columns(self._statements, relation)
        window, where = _settle(_ClickHouse(self._statements, relation), process, columns, scope=scope, above=above)
        for column in _key_columns(process, columns):
            nulls = self._statements.value(
                f"SELECT countIf(isNull({clickhouse.quote(column.name)})) FROM {relation} WHERE {where}"
            )
            if nulls:
                raise _key_is_null(column, nulls)
        columns = _proven(process, columns)
        probe = ClickHouseProbe(
            self._statements,
            columns=columns,
            relation_sql=relation,
            where_sql=where,
            side="source",
            dataset=_dataset(process, query),
        )

        def rows() -> Iterator[pa.RecordBatch]:
            return clickhouse_rows(self._statements, columns, relation, where)

        yield Session(columns=columns, window=window, probe=probe, snapshot=False, rows=rows)


def _clickhouse_table(statements: Statements, table: TableRef) -> str:
    if not statements.value(
        f"SELECT count() FROM system.tables WHERE database = {literal(table.schema_name)}"
        f" AND name = {literal(table.name)}"
    ):
        raise _absent(table)
    return f"{clickhouse.quote(table.schema_name)}.{clickhouse.quote(table.name)}"


def clickhouse_columns(statements: Statements, relation: str, *, without: str | None = None) -> Columns:
    """Return the columns that ``SELECT *`` has, as the engine describes them without running it.

    Args:
        relation: a quoted table or a query in parentheses.
        without: a prefix of names to leave out; None refuses reserved ones.
    """
    found = statements.rows(f"DESCRIBE TABLE (SELECT * FROM {relation})")
    shapes = []
    for name, physical, *_ in found:
        if without is None or not name.startswith(without):
            nullable = _NULLABLE.fullmatch(physical)
            shapes.append((str(name), str(nullable[1] if nullable else physical), nullable is not None))
    return _load_columns(shapes, _clickhouse_canonical)


def clickhouse_rows(statements: Statements, columns: Columns, relation: str, where: str) -> Iterator[pa.RecordBatch]:
    """Stream rows with the Arrow types of the columns, in the engine's blocks.

    Raises:
        DponeError: DPONE_VALUE_OUTSIDE_DOMAIN for a text that is not UTF-8 or a moment out of range.
    """
    # ClickHouse lets an alias hide a column of its name everywhere in the query; no column has this prefix.
    selected = ", ".join(
        f"{'toString' if c.spec.mapping == 'uniqueidentifier_uuid' else ''}({clickhouse.quote(c.name)})"
        f" AS {RESERVED}{i}"
        for i, c in enumerate(columns)
    )
    schema = _schema(columns)
    for batch in statements.stream(f"SELECT {selected} FROM {relation} WHERE {where}"):
        exact = _exact_batch(batch, schema)
        refuse_values(columns, exact)
        yield exact


def read_clickhouse_table(client: ClickHouseClient, prefix: str, table: TableRef, *, row_limit: int) -> pa.Table:
    """Return a whole table without its lineage columns, with the Arrow types that governed loads write.

    Raises:
        DponeError: DPONE_SOURCE_ABSENT; DPONE_IO_MANAGER_TOO_MANY_ROWS as soon as the limit is passed.
    """
    statements = Statements(client, prefix)
    relation = _clickhouse_table(statements, table)
    columns = clickhouse_columns(statements, relation, without=RESERVED)
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in clickhouse_rows(statements, columns, relation, _ClickHouse.always):
        rows += batch.num_rows
        if rows > row_limit:
            raise DponeError(
                "DPONE_IO_MANAGER_TOO_MANY_ROWS", f"{table.dotted} has more than {row_limit} rows.", limit=row_limit
            )
        held.append(batch)
    return pa.Table.from_batches(held, schema=_schema(columns))


class _ClickHouse:
    """ClickHouse's side of ``_settle``."""

    always = "1"
    never = "0"

    def __init__(self, statements: Statements, relation: str) -> None:
        self._statements = statements
        self._relation = relation

    def nulls(self, column: Column) -> int:
        return int(
            self._statements.value(f"SELECT count() FROM {self._relation} WHERE isNull({self.quote(column.name)})")
        )

    def highest(self, column: Column, where: str) -> str | None:
        # Without rows max() would be a zero.
        high = f"maxOrNull({self.quote(column.name)})"
        match column.spec.mapping:
            case "datetime2_utc":
                text = f"formatDateTime({high}, '%Y-%m-%dT%H:%i:%S.%f', 'UTC')"
            case "decimal_exact":
                text = f"toDecimalString({high}, {column.spec.scale})"
            case _:
                text = f"toString({high})"
        found = self._statements.value(f"SELECT {text} FROM {self._relation} WHERE {where}", **BOUNDED)
        return None if found is None else str(found)

    def literal(self, column: Column, text: str) -> str:
        match column.spec.mapping:
            case "integer_width_preserving":
                return f"toInt64('{text}')"
            case "date_date":
                return f"toDate('{text}')"
            case "datetime2_utc":
                return f"toDateTime64('{text.replace('T', ' ')}', 6, 'UTC')"
            case _:
                return f"toDecimal128('{text}', {column.spec.scale})"

    def quote(self, name: str) -> str:
        return clickhouse.quote(name)

    def day(self, name: str, scope: Scope) -> str:
        return clickhouse.scope_predicate(name, scope)


def _clickhouse_canonical(physical: str) -> str:
    if name := _CLICKHOUSE_TYPES.get(physical):
        return name
    if (match := _DECIMAL.fullmatch(physical)) and int(match[1]) <= 38:
        return f"decimal({int(match[1])},{int(match[2])})"
    raise DponeError("DPONE_TYPE_UNSUPPORTED", f"ClickHouse type {physical} has no exact mapping.", type=physical)


# ---------------------------------------------------------------------------------------------------- both


def _schema(columns: Columns) -> pa.Schema:
    return pa.schema([pa.field(c.name, c.spec.arrow, nullable=c.nullable) for c in columns])


def _exact_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    try:
        arrays = [_exactly(batch.column(i), field) for i, field in enumerate(schema)]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise DponeError("DPONE_VALUE_OUTSIDE_DOMAIN", "A value does not fit its Arrow type.") from None
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _exactly(array: Any, field: Any) -> Any:
    """Cast without rounding, truncation or wrapping; a datetime2(6) without a zone is UTC by definition."""
    if pa.types.is_timestamp(array.type) and array.type.tz is None:
        return pc.assume_timezone(array, "UTC").cast(field.type, safe=True)
    return array.cast(field.type, safe=True)
