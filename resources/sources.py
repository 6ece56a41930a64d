"""Where the rows of a governed load come from: the SQL engine, ClickHouse, or a Python asset.

A source settles, before a row leaves it, which columns there are, which rows the run reads, and that every value can
be held exactly by ClickHouse. The process that it opens is a resolved one: SQL text in place of files. PostgreSQL
stands in for SQL Server; no sentence here says anything of SQL Server.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date, datetime
from typing import Protocol

from dpone_dagster.contracts.canonical import sha256_bytes
from dpone_dagster.contracts.mart import Column, Scope
from dpone_dagster.declarations.manifest import Process, TableRef
from dpone_dagster.errors import DponeError
from dpone_dagster.governance.sql_guard import require_reading
from dpone_dagster.ports import Columns, LoadColumn, Window
from resources.asset_rows import admit_name

# What has one order on every engine. Texts have their collation's, uuid an order of each engine's own.
_ORDERED = ("integer_width_preserving", "date_date", "datetime2_utc", "decimal_exact")
_NEXT_TYPE = "Cast the column in source.options.query, or leave it out there."


class Engine(Protocol):
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

    def literal(self, column: Column, text: str) -> str:
        """Return a checked canonical text as a literal of the column's type."""

    def quote(self, name: str) -> str:
        """Quote one identifier."""

    def day(self, name: str, scope: Scope) -> str:
        """Return the search condition of one UTC day."""


def settle(
    engine: Engine, process: Process, columns: Columns, *, scope: Scope | None, above: str | None
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


def query_text(process: Process, *, dialect: str) -> str:
    """Return the source's query, one reading statement."""
    query = process.source.options.query
    if query is None or query.sql is None:
        raise DponeError("DPONE_SOURCE_ABSENT", "The file of the source's query was not read.")
    return require_reading(query.sql, dialect)


def dataset(process: Process, query: str | None) -> str:
    """Name what is read, for people: the table, or the query by its SHA-256."""
    table = process.source.table
    return table.dotted if table is not None else f"query {sha256_bytes((query or '').encode())}"


def absent(table: TableRef) -> DponeError:
    """Refuse a table that does not exist."""
    return DponeError("DPONE_SOURCE_ABSENT", f"{table.dotted} does not exist.")


def load_columns(found: Sequence[tuple[str, str, bool]], canonical: Callable[[str], str]) -> Columns:
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


def proven(process: Process, columns: Columns) -> Columns:
    """Say NOT NULL of the columns that were looked at: the key's, and the one that the run reads by."""
    looked_at = {*(process.sink.unique_key or ()), process.source.read.column}
    return tuple(c.model_copy(update={"nullable": False}) if c.name in looked_at else c for c in columns)


def key_columns(process: Process, columns: Columns) -> Columns:
    """The unique key's columns that the engine does not call NOT NULL itself."""
    key = process.sink.unique_key or ()
    if missing := [name for name in key if name not in {c.name for c in columns}]:
        raise DponeError("DPONE_SOURCE_COLUMN", f"The source has no key column {missing[0]!r}.", field=missing[0])
    return tuple(c for c in columns if c.name in key and c.nullable)


def key_is_null(column: Column, rows: int) -> DponeError:
    """Refuse NULLs in the unique key; ``rows`` have one."""
    return DponeError(
        "DPONE_KEY_NULL", f"Key column {column.name!r} is NULL in {rows} rows.", field=column.name, rows=rows
    )
