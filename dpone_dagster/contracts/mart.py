"""What a mart is and which day of it: the declaration that planning reads from dbt and all else uses."""

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Literal

import pyarrow as pa
from pydantic import Field, model_validator

from dpone_dagster.contracts.model import ClosedModel
from dpone_dagster.contracts.types import ColumnType, column_type
from dpone_dagster.errors import DponeError

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$")]
# Scratch relations add a suffix to a mart's table name.
RelationName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,149}$")]


class Scope(ClosedModel):
    """One UTC day ``[start, end)``; its key is the Dagster partition key ``YYYY-MM-DD``."""

    start: datetime
    end: datetime

    @classmethod
    def day(cls, key: str | date) -> "Scope":
        """Build the scope of one UTC day.

        Raises:
            DponeError: DPONE_SCOPE_NOT_A_DAY when ``key`` is not ``YYYY-MM-DD``.
        """
        text = key.isoformat() if isinstance(key, date) else key
        try:
            day = date.fromisoformat(text)
        except ValueError:
            day = None
        # The last day that Python knows has no midnight after it.
        if day is None or day.isoformat() != text or day == date.max:
            raise DponeError("DPONE_SCOPE_NOT_A_DAY", "The partition key is not a UTC day YYYY-MM-DD.")
        start = datetime(day.year, day.month, day.day, tzinfo=UTC)
        return cls(start=start, end=start + timedelta(days=1))

    @model_validator(mode="after")
    def _is_one_utc_day(self) -> "Scope":
        midnight = self.start.replace(hour=0, minute=0, second=0, microsecond=0)
        if self.start.utcoffset() != timedelta(0) or self.end.utcoffset() != timedelta(0):
            raise ValueError("start and end should be in UTC")
        if self.start != midnight or self.end - self.start != timedelta(days=1):
            raise ValueError("end should be the midnight after start")
        return self

    @property
    def key(self) -> str:
        """``YYYY-MM-DD``."""
        return self.start.date().isoformat()

    @property
    def start_text(self) -> str:
        """``YYYY-MM-DDT00:00:00Z``, as documents write it."""
        return f"{self.key}T00:00:00Z"

    @property
    def end_text(self) -> str:
        """``YYYY-MM-DDT00:00:00Z`` of the next day."""
        return f"{self.end.date().isoformat()}T00:00:00Z"


class Column(ClosedModel):
    """One business column, in contract order; ``type`` is the canonical SQL Server name."""

    name: Identifier
    type: str
    nullable: bool

    @property
    def spec(self) -> ColumnType:
        """The admitted type."""
        return column_type(self.type)


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    """Return the Arrow schema of business columns, in their order."""
    return pa.schema([pa.field(column.name, column.spec.arrow, nullable=column.nullable) for column in columns])


class Relation(ClosedModel):
    """A two-part name: schema (SQL Server, PostgreSQL) or database (ClickHouse), and table."""

    schema_name: Identifier
    name: RelationName

    @property
    def dotted(self) -> str:
        """``schema.name``."""
        return f"{self.schema_name}.{self.name}"


class Tolerance(ClosedModel):
    """An allowed difference; spec G's canonical form. Only whole rows here."""

    mode: Literal["absolute"]
    value: Annotated[int, Field(ge=0)]


class GateSpec(ClosedModel):
    """A data-quality rule evaluated on source and staging before the target changes (spec G)."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]
    type: Literal["row_count_reconciliation", "min_rows", "typed_hash_reconciliation"]
    severity: Literal["error", "warning"] = "error"
    tolerance: Tolerance | None = None
    side: Literal["source", "target"] | None = None
    threshold: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _fields_belong_to_the_type(self) -> "GateSpec":
        # A field on a gate that does not read it would be a silent no-op: refuse it.
        if (self.type == "min_rows") != (self.threshold is not None):
            raise ValueError("threshold belongs to min_rows, and min_rows needs it")
        if self.side and self.type != "min_rows":
            raise ValueError("side belongs to min_rows")
        if self.tolerance and self.type != "row_count_reconciliation":
            raise ValueError("tolerance belongs to row_count_reconciliation")
        return self


class MartSpec(ClosedModel):
    """One mart: where its rows come from, what they are, where they go and what must hold of them.

    Attributes:
        utc_assured: datetime2 columns that the author vouches to be UTC.
    """

    name: Identifier
    model_unique_id: str
    workflow: Identifier
    source: Relation
    target: Relation
    event_time: Identifier
    utc_assured: tuple[Identifier, ...] = ()
    key: tuple[Identifier, ...]
    columns: tuple[Column, ...]
    partition_by: Literal["day", "month", "none"] = "day"
    start_date: date
    gates: tuple[GateSpec, ...] = ()

    @property
    def key_columns(self) -> tuple[Column, ...]:
        """The effective key's columns in key order."""
        by_name = {c.name: c for c in self.columns}
        return tuple(by_name[name] for name in self.key)

    @property
    def value_columns(self) -> tuple[Column, ...]:
        """The mutable columns in contract order."""
        return tuple(c for c in self.columns if c.name not in self.key)

    @model_validator(mode="after")
    def _key_is_admitted(self) -> "MartSpec":
        names = [c.name for c in self.columns]
        if len(set(names)) != len(names) or len({n.lower() for n in names}) != len(names):
            raise ValueError("columns repeat a name")
        if missing := [n for n in (*self.key, self.event_time) if n not in names]:
            raise ValueError(f"columns lack {missing[0]}")
        if len(set(self.key)) != len(self.key):
            raise ValueError("key repeats a column")
        gates = [g.id for g in self.gates]
        if len(set(gates)) != len(gates):
            raise ValueError("gates repeat an id")
        if any(gate.startswith("dpone_") for gate in gates):
            raise ValueError("gates have an id that starts with dpone_, which is the platform's")
        if self.event_time not in self.key:
            raise ValueError("key must contain event_time")
        return self


def admit_key(mart: MartSpec) -> None:
    """Refuse keys whose equality is not the same on both engines.

    Raises:
        DponeError: DPONE_KEY_NULLABLE, DPONE_KEY_TYPE (text, float) or DPONE_EVENT_TIME_TYPE.
    """
    for column in mart.key_columns:
        admit_key_column(column)
    event = next(c for c in mart.columns if c.name == mart.event_time)
    if event.type != "datetime2(6)":
        raise DponeError("DPONE_EVENT_TIME_TYPE", f"Event time {event.name} has type {event.type}.", field=event.name)


def admit_key_column(column: Column) -> None:
    """Refuse one column as part of a key.

    Raises:
        DponeError: DPONE_KEY_NULLABLE or DPONE_KEY_TYPE; DPONE_TYPE_UNSUPPORTED for floats and the like.
    """
    if column.nullable:
        raise DponeError("DPONE_KEY_NULLABLE", f"Key column {column.name} is nullable.", field=column.name)
    if not column.spec.may_be_key:
        raise DponeError("DPONE_KEY_TYPE", f"Key column {column.name} has type {column.type}.", field=column.name)
