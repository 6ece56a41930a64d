"""Rows into staging and out of a generation, exactly: Arrow both ways, nothing converted but UUID text."""

# ruff: noqa: S608 - names match ``contracts.mart.Identifier`` and are quoted; values go through ``literal``.

import re
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from dpone_dagster.contracts.mart import MartSpec, Relation, Scope, arrow_schema
from dpone_dagster.errors import DponeError
from dpone_dagster.faults import reach
from resources.clickhouse.dialect import quote, relation_sql, scope_predicate
from resources.clickhouse.statements import Statements, literal

# One insert makes one part a partition: large enough for few parts, small enough to hold in memory.
INSERT_ROWS = 500_000
INSERT_BYTES = 64 << 20

_ARROW = {
    "UInt8": pa.uint8(),
    "Int16": pa.int16(),
    "Int32": pa.int32(),
    "Int64": pa.int64(),
    "Bool": pa.bool_(),
    "UUID": pa.string(),
    "Date": pa.date32(),
    "DateTime64(6, 'UTC')": pa.timestamp("us", tz="UTC"),
    "String": pa.string(),
}
_NULLABLE = re.compile(r"Nullable\((.+)\)")
_DECIMAL = re.compile(r"Decimal\((\d+), (\d+)\)")
_UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
_READ_ATTEMPTS = 3


def load(
    statements: Statements, stage: Relation, batches: Iterator[pa.RecordBatch], on_rows: Callable[[int], None]
) -> int:
    """Insert batches into staging, several to an insert; return the number of rows.

    Raises:
        DponeError: DPONE_ARTIFACT_SCHEMA when a batch does not have the staging table's columns and types;
            DPONE_VALUE_OUTSIDE_DOMAIN for a UUID that is not in canonical text; DPONE_VALUE_NULL.
    """
    columns = statements.columns(stage)
    total = 0
    for rows in _inserts(batches):
        _check(rows, columns)
        statements.insert(stage, rows)
        if total == 0:
            reach("stage.in_load")
        total += rows.num_rows
        on_rows(rows.num_rows)
    return total


def read(statements: Statements, mart: MartSpec, uuid: str, scope: Scope) -> pa.Table:
    """Return one generation's rows of a scope in key order, with the contract's Arrow types.

    Raises:
        DponeError: DPONE_GENERATION_GONE when no table of the target's database has the UUID.
    """
    columns = ", ".join(
        f"toString({quote(c.name)}) AS {quote(c.name)}" if c.spec.mapping == "uniqueidentifier_uuid" else quote(c.name)
        for c in mart.columns
    )
    schema = arrow_schema(mart.columns)
    order = ", ".join(f"t.{quote(name)}" for name in mart.key)
    for _ in range(_READ_ATTEMPTS):
        table = _find(statements, mart.target.schema_name, uuid)
        if table is None:
            break
        try:
            rows = statements.arrow(
                f"SELECT {columns} FROM {relation_sql(table)} AS t"
                f" WHERE {scope_predicate(mart.event_time, scope)} ORDER BY {order}",
                output_format_arrow_date_as_uint16=0,
            )
        except DponeError as error:
            if error.code != "DPONE_ENGINE_REFUSED" or _find(statements, table.schema_name, uuid) == table:
                raise
            continue
        # A name can move to another table between two statements; the UUID cannot.
        if statements.find_uuid(table) == uuid:
            return rows.cast(schema)
    raise DponeError(
        "DPONE_GENERATION_GONE", f"No table of database {mart.target.schema_name} has the published UUID.", uuid=uuid
    )


def _find(statements: Statements, database: str, uuid: str) -> Relation | None:
    found = statements.rows(
        f"SELECT name FROM system.tables WHERE database = {literal(database)} AND toString(uuid) = {literal(uuid)}"
    )
    return Relation(schema_name=database, name=found[0][0]) if found else None


def _inserts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
        if sum(b.num_rows for b in held) >= INSERT_ROWS or sum(b.nbytes for b in held) >= INSERT_BYTES:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


def _check(rows: pa.Table, columns: dict[str, str]) -> None:
    if rows.column_names != list(columns):
        raise DponeError("DPONE_ARTIFACT_SCHEMA", "The rows do not have the staging table's columns in order.")
    for name, type_ in columns.items():
        nullable = _NULLABLE.fullmatch(type_)
        plain = nullable[1] if nullable else type_
        column = rows.column(name)
        decimal = _DECIMAL.fullmatch(plain)
        expected = pa.decimal128(int(decimal[1]), int(decimal[2])) if decimal else _ARROW.get(plain)
        if column.type != expected:
            raise DponeError(
                "DPONE_ARTIFACT_SCHEMA", f"Column {name} is {column.type} where {type_} needs {expected}.", field=name
            )
        if not nullable and column.null_count:
            raise DponeError("DPONE_VALUE_NULL", f"Column {name} has NULLs and may not.", field=name)
        # The engine reads malformed UUID text without a complaint.
        if plain == "UUID" and not pc.all(pc.match_substring_regex(column, _UUID), min_count=0).as_py():
            raise DponeError(
                "DPONE_VALUE_OUTSIDE_DOMAIN", f"Column {name} has a UUID that is not in canonical text.", field=name
            )
