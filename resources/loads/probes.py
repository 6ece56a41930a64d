"""The questions of gates and acceptance as SQL of the two engines; no row leaves an engine but in ``blocks``.

Names may be anything, so they are quoted and no alias is built from one. In ClickHouse an alias hides the column of its
name everywhere in the query: aliases have the framework's prefix, which no business column has.
"""

# ruff: noqa: S608 - names are quoted, values are quoted literals of a checked form.

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from itertools import islice
from types import ModuleType
from typing import Any, NoReturn

import psycopg
import pyarrow as pa
from psycopg import sql as psycopg_sql
from psycopg.pq import TransactionStatus

from dpone_dagster.contracts.set_digest import LANE_MODULUS, SetDigest
from dpone_dagster.declarations.manifest import AcceptanceChecks
from dpone_dagster.errors import DponeError
from dpone_dagster.governance.acceptance import business_columns, select
from dpone_dagster.governance.sql_guard import require_reading
from dpone_dagster.ports import Columns, LoadColumn, MetricSnapshot
from resources.clickhouse.statements import BOUNDED, Statements, literal
from resources.dialects import clickhouse, postgres

__all__ = ["ClickHouseProbe", "PostgresProbe", "accepted_field"]

BLOCK_ROWS = 50_000

_AWAY = ("08", "57P")  # classes of SQLSTATE that mean "ask again later", never "refused"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EXACT = Context(prec=80, traps=[Inexact, InvalidOperation])
_RELATION = re.compile(r"\{\{\s*relation\s*\}\}")
_DECIMAL = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?")
_DATETIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?")


def accepted_field(column: LoadColumn, value: str | int | bool) -> str:
    """Return the ``dpone_row_v1`` field of a value that a manifest accepts, for comparison with a row's own field.

    Raises:
        DponeError: DPONE_GATE_UNAVAILABLE for a value of a type that the column does not have.
    """
    text = None
    with suppress(ValueError, ArithmeticError):  # ArithmeticError: more digits than the column's scale
        text = _canonical(column, value)
    if text is None or "\0" in text:
        _refuse(f"Column {column.name} has type {column.type}, which an accepted value of type {_kind(value)} is not")
    try:
        return f"{len(text.encode())}:{text}"
    except UnicodeEncodeError:
        _refuse(f"An accepted value for column {column.name} is no Unicode text")


def _canonical(column: LoadColumn, value: str | int | bool) -> str | None:
    spec = column.spec
    match spec.mapping:
        case "bit_bool":
            return str(int(value)) if isinstance(value, bool) else None
        case "integer_width_preserving":
            return str(value) if type(value) is int else None
        case "decimal_exact":
            if isinstance(value, bool) or not _DECIMAL.fullmatch(str(value)):
                return None
            exact = Decimal(value).quantize(Decimal(1).scaleb(-spec.scale), context=_EXACT)
            return format(exact if exact else abs(exact), "f")
        case _ if not isinstance(value, str):
            return None
        case "date_date":
            return value if date.fromisoformat(value).isoformat() == value else None
        case "datetime2_utc":
            if not _DATETIME.fullmatch(value):
                return None
            return datetime.fromisoformat(value).isoformat(timespec="microseconds")
        case "uniqueidentifier_uuid":
            return str(uuid.UUID(value)) if str(uuid.UUID(value)) == value.lower() else None
        case _:
            return value.rstrip(" ") if spec.padded else value


def _kind(value: object) -> str:
    return {str: "text", int: "integer", bool: "boolean"}.get(type(value), "another kind")


def _refuse(fault: str) -> NoReturn:
    raise DponeError("DPONE_GATE_UNAVAILABLE", f"{fault}.")


SORT_MEMORY_MIB = 256  # of PostgreSQL, for all distinct counts of a query together
_DECIMAL64 = 18  # digits of the widest decimal that ClickHouse keeps in 64 bits


class _Probe(ABC):
    """What both engines are asked in the same words; implements ``ProbePort``.

    Args:
        columns: the business columns of the rows, in order.
        relation_sql: a quoted table, or a parenthesised query with an alias where the engine needs one.
        where_sql: which of its rows; SQL that quotes what has to be quoted.
        dataset: what is judged, for people.
    """

    _dialect: ModuleType
    _guard: str
    _null_count: str
    _distinct_count: str

    def __init__(self, *, columns: Columns, relation_sql: str, where_sql: str, side: str, dataset: str) -> None:
        self.columns = columns
        self.side = side
        self.dataset = dataset
        self._relation = relation_sql
        self._where = where_sql

    @abstractmethod
    def _row(self, sql: str) -> Sequence[Any]:
        """Return the one row of an aggregate query."""

    @abstractmethod
    def _key(self, column: LoadColumn) -> str:
        """Return an expression that is equal for two rows exactly when the column's canonical texts are."""

    @abstractmethod
    def _sampled(self, key: Columns, modulus: int) -> str:
        """Return the condition that the key digest's first lane, unsigned, is 0 modulo ``modulus``."""

    @abstractmethod
    def _literal(self, text: str) -> str:
        """Quote a string value."""

    def row_count(self) -> int:
        """Return the number of rows."""
        return self._count("count(*)")

    def digest(self, columns: Columns, *, key: Columns = (), modulus: int = 1) -> SetDigest:
        """Return the set digest of the columns, of all rows or of those that the key's digest picks."""
        where = self._where
        if modulus > 1:
            where = f"({where}) AND {self._sampled(key or columns, modulus)}"
        row = self._row(self._dialect.set_digest_sql(columns, self._relation, where))
        digest: SetDigest = self._dialect.parse(row)
        return digest

    def rows_with_null(self, columns: Sequence[str]) -> int:
        """Return how many rows have a NULL in one of the columns."""
        some = " OR ".join(f"{self._quote(column)} IS NULL" for column in self._known(columns))
        return self._count("count(*)", some)

    def surplus_rows(self, columns: Sequence[str]) -> int:
        """Return rows minus distinct combinations of the columns; NULLs are equal to each other."""
        keys = ", ".join(self._key(column) for column in self._known(columns))
        # Groups that fit into no memory spill to disk in both engines.
        groups = f"SELECT count(*) AS __dpone__n FROM {self._relation} WHERE {self._where} GROUP BY {keys}"
        found = self._row(f"SELECT coalesce(sum(__dpone__n), 0) - count(*) FROM ({groups}) AS __dpone__groups")
        return _whole(found[0])

    def rows_outside(self, column: str, values: Sequence[str | int | bool], *, allow_null: bool) -> int:
        """Return how many rows have another value than the given ones, compared exactly, as canonical text."""
        (known,) = self._known((column,))
        # NULL has a field of its own, which is no value's.
        fields = [accepted_field(known, value) for value in values] + (["~"] if allow_null else [])
        admitted = ", ".join(self._literal(text) for text in dict.fromkeys(fields))
        return self._count("count(*)", f"{self._field(known)} NOT IN ({admitted})" if admitted else None)

    def scalar(self, sql: str) -> Any:
        """Run one reading query with ``{{ relation }}`` replaced; return its one value.

        ``{{ relation }}`` becomes a parenthesised query without an alias.

        Raises:
            DponeError: DPONE_SQL_NOT_READING or DPONE_SQL_EMPTY for what is no single reading statement;
                DPONE_GATE_UNAVAILABLE when it yields anything but one exact number or NULL.
        """
        reading = require_reading(sql, self._guard, relation=True)
        judged = f"(SELECT * FROM {self._relation} WHERE {self._where})"
        rows = self._read_only(_RELATION.sub(lambda _: judged, reading))
        if len(rows) != 1 or len(rows[0]) != 1:
            _refuse("The query yields something else than one row with one column")
        value = rows[0][0]
        if value is not None and (type(value) not in (int, Decimal) or not Decimal(value).is_finite()):
            _refuse("The query yields no exact number; cast it to an integer or a decimal")
        return value

    @abstractmethod
    def _read_only(self, sql: str) -> Sequence[Sequence[Any]]:
        """Run a query that the engine itself keeps from writing; return at most two rows."""

    def metrics(self, checks: AcceptanceChecks) -> MetricSnapshot:
        """Count rows, NULLs and distinct values in one aggregate query. NULL is no distinct value.

        Raises:
            DponeError: DPONE_ACCEPTANCE_UNAVAILABLE for a listed column that is not there.
        """
        nulls, distinct = select(checks.null_counts, self.columns), select(checks.distinct_counts, self.columns)
        parts = ["count(*)"] if checks.row_count else []
        parts += [self._null_count.format(self._quote(column)) for column in self._known(nulls)]
        parts += [self._distinct_count.format(self._key(column)) for column in self._known(distinct)]
        numbered = ", ".join(f"{part} AS __dpone__m{i}" for i, part in enumerate(parts))
        sql = f"SELECT {numbered} FROM {self._relation} WHERE {self._where}"
        found = self._aggregate(sql, len(distinct)) if parts else ()
        counts = iter([_whole(value) for value in found])
        return MetricSnapshot(
            side=self.side,
            dataset=self.dataset,
            columns=business_columns(self.columns),
            row_count=next(counts) if checks.row_count else None,
            null_counts={name: next(counts) for name in nulls},
            distinct_counts={name: next(counts) for name in distinct},
        )

    def _aggregate(self, sql: str, distinct: int) -> Sequence[Any]:
        """Return the one row of a query with so many distinct counts."""
        return self._row(sql)

    def _count(self, aggregate: str, condition: str | None = None) -> int:
        where = f"({self._where}) AND ({condition})" if condition else self._where
        return _whole(self._row(f"SELECT {aggregate} FROM {self._relation} WHERE {where}")[0])

    def _known(self, names: Sequence[str]) -> Columns:
        by_name = {column.name: column for column in self.columns}
        if missing := [name for name in names if name not in by_name]:
            _refuse(f"The {self.side} side has no column {missing[0]}")
        return tuple(by_name[name] for name in names)

    def _moments(self, column: str) -> str:
        """Return the quoted name of a datetime2(6) column."""
        (known,) = self._known((column,))
        if known.type != "datetime2(6)":
            _refuse(f"Column {column} is no datetime2(6)")
        return self._quote(known)

    def _quote(self, column: LoadColumn) -> str:
        quoted: str = self._dialect.quote(column.name)
        return quoted

    def _field(self, column: LoadColumn) -> str:
        field: str = self._dialect.row_text_sql((column,))
        return field


def _closed(stream: Any) -> AbstractContextManager[Iterator[Sequence[Any]]]:
    # A stream that is not read to its end keeps the session busy until it is closed.
    return closing(stream)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or value is None or value != int(value) or value < 0:
        _refuse("The engine yields no count")
    return int(value)


# ------------------------------------------------------------------------------------------------ PostgreSQL


class PostgresProbe(_Probe):
    """PostgreSQL standing in for SQL Server. The caller's connection says which snapshot is judged.

    Every question is asked in a read-only savepoint of the caller's transaction (or in a transaction of its own), so
    that a refused one leaves the snapshot as it was.
    """

    _dialect = postgres
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
        schema = _schema(self.columns)
        selected = ", ".join(
            f"{self._quote(c)}::text" if c.spec.mapping in ("uniqueidentifier_uuid", "string_utf8") else self._quote(c)
            for c in self.columns
        )
        sql = f"SELECT {selected} FROM {self._relation} WHERE {self._where}"
        with self._reading() as cursor, _closed(cursor.stream(sql)) as rows:
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
        with self._reading() as cursor, _closed(cursor.stream(sql)) as rows:
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
            if away or (error.sqlstate or "").startswith(_AWAY):
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
        hashed = f"sha256(convert_to({postgres.row_text_sql(key)}, 'UTF8'))"
        if 256 % modulus == 0:
            # A power of two of at most a byte: the lane's last byte decides, without arithmetic on 64 bits.
            return f"get_byte({hashed}, 7) & {modulus - 1} = 0"
        # bigint is signed, so the upper half of the lanes arrives negative.
        signed = f"('x' || encode(substring({hashed} from 1 for 8), 'hex'))::bit(64)::bigint::numeric"
        return f"mod(mod({signed} + {LANE_MODULUS}, {LANE_MODULUS}), {modulus}) = 0"

    def _literal(self, text: str) -> str:
        return psycopg_sql.Literal(text).as_string(self._connection)


# ------------------------------------------------------------------------------------------------ ClickHouse


class ClickHouseProbe(_Probe):
    """ClickHouse, as source, staging or target. Two questions may see two states of a table that others write."""

    _dialect = clickhouse
    _guard = "clickhouse"
    _null_count = "countIf(isNull({}))"
    _distinct_count = "uniqExact({})"

    def __init__(
        self,
        statements: Statements,
        *,
        columns: Columns,
        relation_sql: str,
        where_sql: str = "1",
        side: str,
        dataset: str,
    ) -> None:
        super().__init__(columns=columns, relation_sql=relation_sql, where_sql=where_sql, side=side, dataset=dataset)
        self._statements = statements

    def newest(self, column: str) -> datetime | None:
        """Return the greatest value of a datetime2(6) column, aware UTC; None without rows or values."""
        newest = f"toUnixTimestamp64Micro(maxOrNull({self._moments(column)}))"
        found = self._row(f"SELECT {newest} FROM {self._relation} WHERE {self._where}")[0]
        return None if found is None else _EPOCH + timedelta(microseconds=int(found))

    def blocks(self) -> Iterator[pa.RecordBatch]:
        """Stream the rows in the engine's blocks with the Arrow types of the columns."""
        schema = _schema(self.columns)
        selected = ", ".join(
            f"{'toString' if c.spec.mapping == 'uniqueidentifier_uuid' else ''}({self._quote(c)}) AS __dpone__c{i}"
            for i, c in enumerate(self.columns)
        )
        for batch in self._statements.stream(f"SELECT {selected} FROM {self._relation} WHERE {self._where}"):
            arrays: list[Any] = [batch.column(i).cast(field.type) for i, field in enumerate(schema)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _row(self, sql: str) -> Sequence[Any]:
        return self._statements.rows(sql, **BOUNDED)[0]

    def _read_only(self, sql: str) -> Sequence[Sequence[Any]]:
        return self._statements.rows(
            sql,
            **BOUNDED,
            readonly=2,  # refuses every write, and a SETTINGS clause that would lift it
            max_result_rows=1,
            result_overflow_mode="throw",
            aggregate_functions_null_for_empty=1,  # the greatest of no values is not 0
        )

    def _key(self, column: LoadColumn) -> str:
        name, spec = self._quote(column), column.spec
        # The engine hashes plain integers several times faster than the types that are integers underneath.
        if spec.mapping == "datetime2_utc":
            return f"toUnixTimestamp64Micro({name})"
        if spec.mapping == "decimal_exact" and spec.precision <= _DECIMAL64:
            return f"reinterpretAsInt64({name})"
        return f"trimRight({name}, ' ')" if spec.padded else name

    def _sampled(self, key: Columns, modulus: int) -> str:
        hashed = f"SHA256({clickhouse.row_text_sql(key)})"
        return f"reinterpretAsUInt64(reverse(substring({hashed}, 1, 8))) % {modulus} = 0"

    def _literal(self, text: str) -> str:
        return literal(text)


def _schema(columns: Columns) -> pa.Schema:
    return pa.schema([pa.field(column.name, column.spec.arrow, nullable=column.nullable) for column in columns])
