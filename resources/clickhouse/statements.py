"""Statements to ClickHouse under one query id prefix; the client turns every driver error into a code."""

# ruff: noqa: S608 - names match ``contracts.mart.Identifier`` and are quoted; values go through ``literal``.

import itertools
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from dpone_dagster.contracts.mart import Relation
from dpone_dagster.errors import DponeError
from resources.clickhouse.client import ClickHouseClient, mapped_errors
from resources.clickhouse.dialect import quote, relation_sql

# A user's or server's profile must not change what a statement means.
_PINNED: dict[str, Any] = {
    "apply_deleted_mask": 1,  # lightweight-deleted rows are no rows
    "async_insert": 0,
    "insert_deduplicate": 0,  # equal blocks are rows, not retries
    "insert_null_as_default": 0,  # a NULL must never become a zero
    "input_format_null_as_default": 0,
    "input_format_arrow_allow_missing_columns": 0,
    "date_time_overflow_behavior": "throw",
    "transform_null_in": 0,
    "max_partitions_per_insert_block": 0,
    "max_partition_size_to_drop": 0,  # size limits protect people, not tables named by their UUID
    "max_table_size_to_drop": 0,
}

# A day's rebuild and proof must stay flat in memory however large the day is: group-bys spill, inserts are cut.
BOUNDED: dict[str, Any] = {
    "max_threads": 2,
    "max_insert_threads": 1,
    "max_bytes_before_external_group_by": 256 << 20,
    "max_bytes_before_external_sort": 256 << 20,
    "min_insert_block_size_rows": 500_000,
    "min_insert_block_size_bytes": 64 << 20,
}


class Statements:
    """Sends statements with ids ``<prefix><token>-<n>``; the token keeps two attempts' ids apart.

    On a server the id is the query's id. The embedded engine ignores it, so it is also sent as ``log_comment``,
    which both show in ``system.processes``.
    """

    def __init__(self, client: ClickHouseClient, prefix: str) -> None:
        self._client = client
        self.prefix = prefix
        self._ids = (f"{prefix}{uuid.uuid4().hex[:8]}-{n}" for n in itertools.count(1))

    def rows(self, sql: str, **settings: Any) -> Sequence[Sequence[Any]]:
        """Return the rows of a query."""
        result: Sequence[Sequence[Any]] = self._client.query(sql, settings=self._settings(settings)).result_rows
        return result

    def value(self, sql: str, **settings: Any) -> Any:
        """Return the one value of a query."""
        return self.rows(sql, **settings)[0][0]

    def count(self, table: Relation, where: str = "1") -> int:
        """Return the number of rows that fulfil a condition."""
        return int(self.value(f"SELECT count() FROM {relation_sql(table)} WHERE {where}"))

    def columns(self, table: Relation) -> dict[str, str]:
        """Return a table's columns in order: name -> type."""
        found = self.rows(
            f"SELECT name, type FROM system.columns WHERE database = {literal(table.schema_name)}"
            f" AND table = {literal(table.name)} ORDER BY position"
        )
        return {str(name): str(type_) for name, type_ in found}

    def run(self, sql: str, **settings: Any) -> None:
        """Send one statement once."""
        self._client.command(sql, settings=self._settings(settings))

    def insert(self, table: Relation, rows: pa.Table) -> None:
        """Insert an Arrow table, column by column name."""
        sink = pa.BufferOutputStream()
        codec: Any = self._client.write_compression if self._client.write_compression in ("lz4", "zstd") else None
        with pa.ipc.new_file(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            writer.write_table(rows)
        block: Any = sink.getvalue()
        # Quoted here: the client's own insert_arrow takes a dot or a quote in a name for syntax.
        self._client.raw_insert(
            relation_sql(table),
            [quote(name) for name in rows.column_names],
            block,
            fmt="Arrow",
            settings=self._settings({}),
        )

    def arrow(self, sql: str, **settings: Any) -> pa.Table:
        """Return the rows of a query as an Arrow table."""
        return self._client.query_arrow(sql, settings=self._settings(settings), use_strings=True)

    def stream(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Stream a query's rows in the engine's blocks; abandoning the iterator ends the query."""
        settings = self._settings({**BOUNDED, "output_format_arrow_date_as_uint16": 0})
        with mapped_errors(), self._client.query_arrow_stream(sql, settings=settings, use_strings=True) as blocks:
            for block in blocks:
                yield from block.to_batches() if isinstance(block, pa.Table) else (block,)

    def find_uuid(self, table: Relation) -> str | None:
        """Return the UUID of the table of that name; None when there is none."""
        found = self.rows(
            f"SELECT toString(uuid) FROM system.tables"
            f" WHERE database = {literal(table.schema_name)} AND name = {literal(table.name)}"
        )
        return str(found[0][0]) if found else None

    def uuid_of(self, table: Relation) -> str:
        """Return the UUID of a table that was just created.

        Raises:
            DponeError: DPONE_TABLE_REPLACED when it is gone.
        """
        found = self.find_uuid(table)
        if found is None:
            raise replaced(table, expected="(just created)", observed=None)
        return found

    def create_scratch(self, table: Relation, sql: str, *, never: str | None = None) -> str:
        """Create a table that nobody merges, in place of a leftover of that name; return its UUID.

        Merged parts would no longer be the ones that a shadow is given, or was given.

        Args:
            sql: creates the table.
            never: the UUID of a table that is not dropped whatever its name is: the target's.

        Raises:
            DponeError: DPONE_TABLE_REPLACED.
        """
        leftover = self.find_uuid(table)
        if leftover is not None and leftover == never:
            raise replaced(table, expected="(none)", observed=leftover)
        if leftover is not None:
            self.drop(table, leftover)
        self.run(sql)
        self.run(f"SYSTEM STOP MERGES {relation_sql(table)}")
        return self.uuid_of(table)

    def drop(self, table: Relation, uuid: str) -> None:
        """Drop the table only if it has ``uuid``; a no-op when it is absent.

        Raises:
            DponeError: DPONE_TABLE_REPLACED when another table has the name.
        """
        found = self.find_uuid(table)
        if found is None:
            return
        if found != uuid:
            raise replaced(table, expected=uuid, observed=found)
        self.run(f"DROP TABLE {relation_sql(table)} SYNC")

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        query_id = settings.pop("query_id", None) or next(self._ids)
        return {**_PINNED, **settings, "query_id": query_id, "log_comment": query_id}


def replaced(table: Relation, *, expected: str, observed: str | None) -> DponeError:
    """The refusal to touch a table that is not the one that was recorded."""
    return DponeError(
        "DPONE_TABLE_REPLACED",
        f"Table {table.dotted} does not have the recorded UUID.",
        expected_uuid=expected,
        observed_uuid=observed,
    )


def literal(text: str) -> str:
    """Quote one string value."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def literals(texts: Iterable[str]) -> str:
    """Quote several string values, comma-separated; never empty, so that ``IN (..)`` stays valid SQL."""
    return ", ".join(map(literal, texts)) or "''"


def names(columns: Iterable[str]) -> str:
    """Quote column names, comma-separated."""
    return ", ".join(map(quote, columns))
