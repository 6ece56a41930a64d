"""The questions of gates and acceptance as SQL of the two engines; no row leaves an engine but in ``blocks``.

Names may be anything, so they are quoted and no alias is built from one. In ClickHouse an alias hides the column of its
name everywhere in the query: aliases have the framework's prefix, which no business column has.
"""

# ruff: noqa: S608 - names are quoted, values are quoted literals of a checked form.

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from datetime import date, datetime
from decimal import Context, Decimal, Inexact, InvalidOperation
from types import ModuleType
from typing import Any, NoReturn

from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.declarations.manifest import AcceptanceChecks
from dpone_dagster.errors import DponeError
from dpone_dagster.governance.acceptance import business_columns, select
from dpone_dagster.governance.sql_guard import require_reading
from dpone_dagster.ports import Columns, LoadColumn, MetricSnapshot

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


class Probe(ABC):
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


def closed(stream: Any) -> AbstractContextManager[Iterator[Sequence[Any]]]:
    """Close a stream of rows at the end: one that is not read to its end keeps the session busy until then."""
    return closing(stream)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or value is None or value != int(value) or value < 0:
        _refuse("The engine yields no count")
    return int(value)
