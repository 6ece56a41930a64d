"""The closed list of types, against spec R's "Effective key and event time"."""

import pyarrow as pa
import pytest

from dpone_dagster.contracts.types import column_type
from dpone_dagster.errors import DponeError


@pytest.mark.parametrize(
    ("name", "mapping", "clickhouse", "arrow", "may_be_key"),
    [
        ("bit", "bit_bool", "Bool", pa.bool_(), True),
        ("tinyint", "integer_width_preserving", "UInt8", pa.uint8(), True),
        ("smallint", "integer_width_preserving", "Int16", pa.int16(), True),
        ("int", "integer_width_preserving", "Int32", pa.int32(), True),
        ("bigint", "integer_width_preserving", "Int64", pa.int64(), True),
        ("uniqueidentifier", "uniqueidentifier_uuid", "UUID", pa.string(), True),
        ("date", "date_date", "Date", pa.date32(), True),
        ("datetime2(6)", "datetime2_utc", "DateTime64(6,'UTC')", pa.timestamp("us", tz="UTC"), True),
        ("decimal(1,0)", "decimal_exact", "Decimal(1,0)", pa.decimal128(1, 0), True),
        ("decimal(18,4)", "decimal_exact", "Decimal(18,4)", pa.decimal128(18, 4), True),
        ("decimal(38,38)", "decimal_exact", "Decimal(38,38)", pa.decimal128(38, 38), True),
        ("nvarchar(20)", "string_utf8", "String", pa.string(), False),
        ("varchar(max)", "string_utf8", "String", pa.string(), False),
        ("nchar(3)", "string_utf8", "String", pa.string(), False),
    ],
)
def test_admitted(name: str, mapping: str, clickhouse: str, arrow: pa.DataType, may_be_key: bool) -> None:
    found = column_type(name)
    assert (found.name, found.mapping, found.clickhouse, found.arrow, found.may_be_key) == (
        name,
        mapping,
        clickhouse,
        arrow,
        may_be_key,
    )
    assert found.clickhouse_column(False) == clickhouse
    assert found.clickhouse_column(True) == f"Nullable({clickhouse})"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "float",
        "real",
        "money",
        "time(6)",
        "datetime",
        "datetime2",
        "datetime2(3)",
        "datetime2(7)",
        "datetimeoffset(6)",
        "xml",
        "INT",
        " int",
        "int\n",
        "decimal",
        "decimal(18)",
        "decimal(0,0)",
        "decimal(39,0)",
        "decimal(4,5)",
        "decimal(018,4)",
        "decimal(18, 4)",
        "decimal(18,04)",
        "numeric(18,4)",
        "varchar",
        "varchar(0)",
        "varchar(-1)",
        "nchar(max)",
        "char(max)",
        "text",
        "decimal(١,0)",  # Arabic digits are digits to a careless pattern
    ],
)
def test_refused(name: str) -> None:
    with pytest.raises(DponeError) as caught:
        column_type(name)
    assert caught.value.code == "DPONE_TYPE_UNSUPPORTED"


def test_domains_where_clickhouse_holds_less() -> None:
    assert column_type("date").domain == ("1970-01-01", "2149-06-06")
    assert column_type("datetime2(6)").domain == ("1900-01-01T00:00:00.000000", "2299-12-31T23:59:59.999999")
    assert all(column_type(t).domain is None for t in ("bit", "int", "decimal(9,2)", "uniqueidentifier"))


def test_sizes() -> None:
    decimal = column_type("decimal(12,3)")
    assert (decimal.precision, decimal.scale) == (12, 3)
    assert [column_type(t).max_length for t in ("nvarchar(20)", "char(5)", "nvarchar(max)", "int")] == [
        20,
        5,
        None,
        None,
    ]
    assert [column_type(t).padded for t in ("char(5)", "nchar(5)", "varchar(5)", "nvarchar(5)")] == [
        True,
        True,
        False,
        False,
    ]
