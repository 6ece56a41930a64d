"""Column types: the closed list that crosses from SQL Server to ClickHouse exactly, and their domains.

A type is named as SQL Server names it (``datetime2(6)``, ``decimal(18,4)``, ``nvarchar(20)``). The PostgreSQL
stand-in's own names are mapped onto these one to one by its dialect in ``resources``. The pairs and domains
are those of spec R, "Effective key and event time"; strings are business columns only, never keys.
"""

import re
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from dpone_dagster.errors import DponeError

Mapping = Literal[
    "bit_bool",
    "integer_width_preserving",
    "uniqueidentifier_uuid",
    "date_date",
    "datetime2_utc",
    "decimal_exact",
    "string_utf8",
]

_INTEGERS = {
    "tinyint": ("UInt8", pa.uint8()),
    "smallint": ("Int16", pa.int16()),
    "int": ("Int32", pa.int32()),
    "bigint": ("Int64", pa.int64()),
}
_DECIMAL = re.compile(r"decimal\(([1-9][0-9]?),(0|[1-9][0-9]?)\)")
_STRING = re.compile(r"(nvarchar|varchar|nchar|char)\(([1-9][0-9]{0,3}|(?<=varchar\()max)\)")


@dataclass(frozen=True)
class ColumnType:
    """One admitted type.

    Attributes:
        name: canonical SQL Server name, e.g. ``decimal(18,4)``.
        mapping: the rule that carries it over.
        clickhouse: ClickHouse type when not nullable, e.g. ``Decimal(18,4)``.
        arrow: Arrow type in the sealed artifact.
        domain: inclusive ends in canonical text where ClickHouse holds less than SQL Server, else None.
        may_be_key: whether equality on both engines is the same injective relation.
        precision, scale: of decimals; 0 otherwise.
        max_length: of bounded strings, in characters; None for ``max`` and for other types.
        padded: ``char(n)``/``nchar(n)``: trailing blanks are not part of the value.
    """

    name: str
    mapping: Mapping
    clickhouse: str
    arrow: pa.DataType
    domain: tuple[str, str] | None = None
    may_be_key: bool = True
    precision: int = 0
    scale: int = 0
    max_length: int | None = None
    padded: bool = False

    def clickhouse_column(self, nullable: bool) -> str:
        """Return the exact ClickHouse column type."""
        return f"Nullable({self.clickhouse})" if nullable else self.clickhouse


DATE_DOMAIN = ("1970-01-01", "2149-06-06")
DATETIME_DOMAIN = ("1900-01-01T00:00:00.000000", "2299-12-31T23:59:59.999999")


def column_type(name: str) -> ColumnType:
    """Look up an admitted type by its canonical name.

    Raises:
        DponeError: DPONE_TYPE_UNSUPPORTED for every other name: floats, money, time, datetime, xml and so on.
    """
    if name in _INTEGERS:
        clickhouse, arrow = _INTEGERS[name]
        return ColumnType(name, "integer_width_preserving", clickhouse, arrow)
    if name == "bit":
        return ColumnType(name, "bit_bool", "Bool", pa.bool_())
    if name == "uniqueidentifier":
        # 16 bytes would be smaller; text is what both engines and every Parquet reader agree on.
        return ColumnType(name, "uniqueidentifier_uuid", "UUID", pa.string())
    if name == "date":
        return ColumnType(name, "date_date", "Date", pa.date32(), domain=DATE_DOMAIN)
    if name == "datetime2(6)":
        return ColumnType(
            name, "datetime2_utc", "DateTime64(6,'UTC')", pa.timestamp("us", tz="UTC"), domain=DATETIME_DOMAIN
        )
    if match := _DECIMAL.fullmatch(name):
        precision, scale = int(match[1]), int(match[2])
        if 1 <= precision <= 38 and scale <= precision:
            return ColumnType(
                name,
                "decimal_exact",
                f"Decimal({precision},{scale})",
                pa.decimal128(precision, scale),
                precision=precision,
                scale=scale,
            )
    if match := _STRING.fullmatch(name):
        return ColumnType(
            name,
            "string_utf8",
            "String",
            pa.string(),
            may_be_key=False,
            max_length=None if match[2] == "max" else int(match[2]),
            padded=match[1] in ("nchar", "char"),
        )
    raise DponeError("DPONE_TYPE_UNSUPPORTED", f"Type {name!r} has no exact mapping.", type=name)
