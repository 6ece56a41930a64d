"""The questions of gates and acceptance, asked of PostgreSQL."""

# ruff: noqa: S608 - names are quoted, values are quoted literals of a checked form.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql as psycopg_sql
from psycopg.pq import TransactionStatus

from dpone_dagster.contracts.mart import arrow_schema
from dpone_dagster.contracts.set_digest import LANE_MODULUS
from dpone_dagster.errors import DponeError
from dpone_dagster.ports import Columns, LoadColumn
from resources.postgres import dialect
from resources.postgres.reading import is_away
from resources.probes import Probe, closed

BLOCK_ROWS = 50_000
SORT_MEMORY_MIB = 256  # for all distinct counts of a query together


class PostgresProbe(Probe):
    """PostgreSQL standing in for SQL Server. The caller's connection says which snapshot is judged.

    Every question is asked in a read-only savepoint of the caller's transaction (or in a transaction of its own), so
    that a refused one leaves the snapshot as it was.
    """

    _dialect = dialect
    _guard = "postgres"
    _null_count = "count(*) FILTER (WHERE {} IS NULL)"
    _distinct_count = "count(DISTINCT {})"

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        *,
        columns: Columns,
        relation_sql: str,
        where_sql: str = "true",
        side: str,
        dataset: str,
    ) -> None:
        super().__init__(columns=columns, relation_sql=relation_sql, where_sql=where_sql, side=side, dataset=dataset)
        self._connection = connection

    def newest(self, column: str) -> datetime | None:
        """Return the greatest value of a datetime2(6) column, aware UTC; None without rows or values."""
        found = self._row(f"SELECT max({self._moments(column)}) FROM {self._relation} WHERE {self._where}")[0]
        return found.replace(tzinfo=UTC) if isinstance(found, datetime) else None

    def blocks(self) -> Iterator[pa.RecordBatch]:
        """Stream the rows in bounded blocks with the Arrow types of the columns; ask nothing else meanwhile."""
        schema = arrow_schema(self.columns)
        selected = ", ".join(
            f"{self._quote(c)}::text" if c.spec.mapping in ("uniqueidentifier_uuid", "string_utf8") else self._quote(c)
            for c in self.columns
        )
        sql = f"SELECT {selected} FROM {self._relation} WHERE {self._where}"
        with self._reading() as cursor, closed(cursor.stream(sql)) as rows:
            while block := list(islice(rows, BLOCK_ROWS)):
                arrays = [
                    pa.array(values, field.type) for values, field in zip(zip(*block, strict=True), schema, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _row(self, sql: str) -> Sequence[Any]:
        return self._ask(sql)

    def _aggregate(self, sql: str, distinct: int) -> Sequence[Any]:
        # Each distinct count sorts its column; what does not fit into its share of the memory goes through the disk.
        return self._ask(sql, work_mem_mib=max(4, SORT_MEMORY_MIB // max(1, distinct)))

    def _ask(self, sql: str, *, work_mem_mib: int | None = None) -> Sequence[Any]:
        with self._reading() as cursor:
            if work_mem_mib is not None:
                cursor.execute(f"SET LOCAL work_mem = '{work_mem_mib}MB'")
            cursor.execute(sql)
            row: Sequence[Any] | None = cursor.fetchone()
        assert row is not None
        return row

    def _read_only(self, sql: str) -> Sequence[Sequence[Any]]:
        # Streamed, because the extended protocol takes one statement only, and no more rows than are looked at.
        with self._reading() as cursor, closed(cursor.stream(sql)) as rows:
            return list(islice(rows, 2))

    @contextmanager
    def _reading(self) -> Iterator[psycopg.Cursor[Any]]:
        connection = self._connection
        try:
            with connection.transaction(force_rollback=True):
                connection.execute("SET LOCAL transaction_read_only = on")
                with connection.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
                    yield cursor
        except psycopg.Error as error:
            away = connection.closed or connection.info.transaction_status == TransactionStatus.UNKNOWN
            # A driver's error without a SQLSTATE is no lost session where the connection still answers.
            if away or (error.sqlstate and is_away(error)):
                raise DponeError("DPONE_ENGINE_UNAVAILABLE", "The SQL engine ended the session.") from None
            raise DponeError(
                "DPONE_SOURCE_REFUSED",
                f"The SQL engine refused a question (SQLSTATE {error.sqlstate or type(error).__name__}).",
            ) from None

    def _key(self, column: LoadColumn) -> str:
        # A column's own collation may call two texts equal; the cast drops the padding of character(n).
        name = self._quote(column)
        return f'{name}::text COLLATE "C"' if column.spec.mapping == "string_utf8" else name

    def _field(self, column: LoadColumn) -> str:
        return f'({super()._field(column)}) COLLATE "C"'

    def _sampled(self, key: Columns, modulus: int) -> str:
        hashed = f"sha256(convert_to({dialect.row_text_sql(key)}, 'UTF8'))"
        if 256 % modulus == 0:
            # A power of two of at most a byte: the lane's last byte decides, without arithmetic on 64 bits.
            return f"get_byte({hashed}, 7) & {modulus - 1} = 0"
        # bigint is signed, so the upper half of the lanes arrives negative.
        signed = f"('x' || encode(substring({hashed} from 1 for 8), 'hex'))::bit(64)::bigint::numeric"
        return f"mod(mod({signed} + {LANE_MODULUS}, {LANE_MODULUS}), {modulus}) = 0"

    def _literal(self, text: str) -> str:
        return psycopg_sql.Literal(text).as_string(self._connection)
