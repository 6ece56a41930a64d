"""ClickHouse as the source of a governed load, and a whole table of it for a Python asset."""

# ruff: noqa: S608 - names are quoted; values are checked texts of a closed form.

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from dpone_dagster.contracts.mart import Column, Scope, arrow_schema
from dpone_dagster.declarations.manifest import Process, TableRef
from dpone_dagster.errors import DponeError
from dpone_dagster.ports import Columns
from resources.arrow import exact_batch
from resources.asset_rows import RESERVED, refuse_values
from resources.clickhouse import dialect
from resources.clickhouse.client import ClickHouseClient
from resources.clickhouse.probe import ClickHouseProbe
from resources.clickhouse.statements import BOUNDED, Statements, literal
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
            query = query_text(process, dialect="clickhouse")
            relation = f"(\n{query}\n)"
        else:
            relation = _clickhouse_table(self._statements, table)
        columns = clickhouse_columns(self._statements, relation)
        window, where = settle(_ClickHouse(self._statements, relation), process, columns, scope=scope, above=above)
        for column in key_columns(process, columns):
            nulls = self._statements.value(
                f"SELECT countIf(isNull({dialect.quote(column.name)})) FROM {relation} WHERE {where}"
            )
            if nulls:
                raise key_is_null(column, nulls)
        columns = proven(process, columns)
        probe = ClickHouseProbe(
            self._statements,
            columns=columns,
            relation_sql=relation,
            where_sql=where,
            side="source",
            dataset=dataset(process, query),
        )

        def rows() -> Iterator[pa.RecordBatch]:
            return clickhouse_rows(self._statements, columns, relation, where)

        yield Session(columns=columns, window=window, probe=probe, snapshot=False, rows=rows)


def _clickhouse_table(statements: Statements, table: TableRef) -> str:
    if not statements.value(
        f"SELECT count() FROM system.tables WHERE database = {literal(table.schema_name)}"
        f" AND name = {literal(table.name)}"
    ):
        raise absent(table)
    return f"{dialect.quote(table.schema_name)}.{dialect.quote(table.name)}"


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
    return load_columns(shapes, _clickhouse_canonical)


def clickhouse_rows(statements: Statements, columns: Columns, relation: str, where: str) -> Iterator[pa.RecordBatch]:
    """Stream rows with the Arrow types of the columns, in the engine's blocks.

    Raises:
        DponeError: DPONE_VALUE_OUTSIDE_DOMAIN for a text that is not UTF-8 or a moment out of range.
    """
    # ClickHouse lets an alias hide a column of its name everywhere in the query; no column has this prefix.
    selected = ", ".join(
        f"{'toString' if c.spec.mapping == 'uniqueidentifier_uuid' else ''}({dialect.quote(c.name)}) AS {RESERVED}{i}"
        for i, c in enumerate(columns)
    )
    schema = arrow_schema(columns)
    for batch in statements.stream(f"SELECT {selected} FROM {relation} WHERE {where}"):
        exact = exact_batch(batch, schema)
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
    return pa.Table.from_batches(held, schema=arrow_schema(columns))


class _ClickHouse:
    """ClickHouse's side of ``settle``."""

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
        return dialect.quote(name)

    def day(self, name: str, scope: Scope) -> str:
        return dialect.scope_predicate(name, scope)


def _clickhouse_canonical(physical: str) -> str:
    if name := _CLICKHOUSE_TYPES.get(physical):
        return name
    if (match := _DECIMAL.fullmatch(physical)) and int(match[1]) <= 38:
        return f"decimal({int(match[1])},{int(match[2])})"
    raise DponeError("DPONE_TYPE_UNSUPPORTED", f"ClickHouse type {physical} has no exact mapping.", type=physical)
