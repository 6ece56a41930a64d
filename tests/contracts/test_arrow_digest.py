"""What the Arrow digest gives for rows worked out with ``sha256sum``, and what it refuses."""

from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from dpone_dagster.contracts.arrow_digest import digest_batches, row_texts
from dpone_dagster.contracts.mart import Column
from dpone_dagster.contracts.set_digest import EMPTY, SetDigest
from dpone_dagster.errors import DponeError


def column(type_name: str, *, nullable: bool = True, name: str = "c") -> Column:
    return Column(name=name, type=type_name, nullable=nullable)


def batch(type_name: str, values: list[Any], name: str = "c") -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, column(type_name).spec.arrow)], names=[name])


PAIR = (column("int", name="a"), column("nvarchar(9)", name="b"), column("date", name="d"))


def pairs(values: list[tuple[int | None, str | None]]) -> pa.RecordBatch:
    return pa.record_batch(
        [
            pa.array([a for a, _ in values], pa.int32()),
            pa.array([b for _, b in values], pa.string()),
            pa.array([None] * len(values), pa.date32()),
        ],
        names=["a", "b", "d"],
    )


# printf '1:12:ab~' | sha256sum
ONE = SetDigest(1, (0x9A1C5931761F2942, 0xDC1F3D523725AB4B, 0xBD71C55424C62473, 0xBF36A130B7A3EF3F))


def test_one_row_is_its_sha256() -> None:
    assert digest_batches(PAIR, [pairs([(1, "ab")])]) == ONE


def test_no_batches_and_empty_batches_are_empty() -> None:
    assert digest_batches(PAIR, []) == EMPTY
    assert digest_batches(PAIR, [pairs([])]) == EMPTY


def test_cuts_between_batches_mean_nothing() -> None:
    rows = [(i if i % 7 else None, "x" * (i % 5) if i % 3 else None) for i in range(20_000)]
    whole = pairs(rows)
    assert digest_batches(PAIR, [whole]).rows == 20_000
    for size in (1999, 8192, 8193):
        cut = [whole.slice(i, size) for i in range(0, whole.num_rows, size)]
        assert digest_batches(PAIR, cut) == digest_batches(PAIR, [whole])
    copied = pairs(rows[5_000:5_050])
    assert digest_batches(PAIR, [whole.slice(5_000, 50)]) == digest_batches(PAIR, [copied])


def test_columns_are_found_by_name() -> None:
    first = pairs([(1, "ab")])
    turned = first.select(["d", "b", "a"]).append_column("__dpone_seal_ordinal", pa.array([7], pa.int64()))
    assert digest_batches(PAIR, [turned]) == ONE


@pytest.mark.parametrize(
    ("type_name", "value", "text"),
    [
        ("tinyint", 255, "3:255"),
        ("bigint", -(2**63), "20:-9223372036854775808"),
        ("bit", True, "1:1"),
        ("bit", False, "1:0"),
        ("decimal(4,2)", Decimal("-0.05"), "5:-0.05"),
        ("decimal(4,2)", Decimal("0"), "4:0.00"),
        ("decimal(4,2)", Decimal("-99.99"), "6:-99.99"),
        ("decimal(9,8)", Decimal("0.00000001"), "10:0.00000001"),
        ("decimal(5,0)", Decimal("-12"), "3:-12"),
        ("date", date(2149, 6, 6), "10:2149-06-06"),
        ("datetime2(6)", datetime(1969, 12, 31, 23, 59, 59, 999999, UTC), "26:1969-12-31T23:59:59.999999"),
        ("datetime2(6)", datetime(1900, 1, 1, tzinfo=UTC), "26:1900-01-01T00:00:00.000000"),
        (
            "uniqueidentifier",
            "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
            "36:a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
        ),
        ("nvarchar(max)", "é ", "3:é "),
        ("nvarchar(max)", "", "0:"),
        ("nchar(4)", "é  ", "2:é"),
        ("nchar(4)", "\t ", "1:\t"),
        ("nvarchar(2)", "longer", "6:longer"),
        ("int", None, "~"),
    ],
)
def test_texts(type_name: str, value: Any, text: str) -> None:
    texts = row_texts([column(type_name)], batch(type_name, [value, None, value]))
    assert texts.to_pylist() == [text, "~", text]


def refused(column_: Column, rows: pa.RecordBatch) -> str:
    with pytest.raises(DponeError) as caught:
        digest_batches([column_], [rows])
    assert column_.name in caught.value.sentence
    return caught.value.code


def raw_text(data: bytes) -> pa.RecordBatch:
    offsets = pa.array([0, 2, 2 + len(data)], pa.int32()).buffers()[1]
    return pa.record_batch([pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ok" + data))], names=["c"])


@pytest.mark.parametrize(
    "data",
    [b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xed\xa0\xbd\xed\xb8\x80", b"\xff", b"\xc3"],
    ids=["high surrogate", "low surrogate", "pair in three bytes each", "no UTF-8", "cut short"],
)
def test_text_that_is_not_utf8_is_refused(data: bytes) -> None:
    assert refused(column("nvarchar(max)"), raw_text(data)) == "DPONE_VALUE_OUTSIDE_DOMAIN"


def test_null_where_the_contract_has_none_is_refused() -> None:
    assert refused(column("int", nullable=False), batch("int", [1, None])) == "DPONE_VALUE_NULL"


@pytest.mark.parametrize(
    ("type_name", "value"),
    [
        ("date", date(1969, 12, 31)),
        ("date", date(2149, 6, 7)),
        ("datetime2(6)", datetime(1899, 12, 31, 23, 59, 59, 999999, UTC)),
        ("datetime2(6)", datetime(2300, 1, 1, tzinfo=UTC)),
        ("uniqueidentifier", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"),
        ("uniqueidentifier", "a0eebc999c0b4ef8bb6d6bb9bd380a11"),
        ("uniqueidentifier", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11\n"),
    ],
)
def test_values_without_an_encoding_are_refused(type_name: str, value: Any) -> None:
    assert refused(column(type_name), batch(type_name, [None, value])) == "DPONE_VALUE_OUTSIDE_DOMAIN"


@pytest.mark.parametrize(
    ("type_name", "array"),
    [
        ("bigint", pa.array([1], pa.int32())),
        ("decimal(4,2)", pa.array([Decimal("1.5")], pa.decimal128(4, 1))),
        ("datetime2(6)", pa.array([datetime(2024, 1, 1)], pa.timestamp("us"))),
        ("datetime2(6)", pa.array([datetime(2024, 1, 1, tzinfo=UTC)], pa.timestamp("ns", tz="UTC"))),
        ("nvarchar(max)", pa.array(["a"], pa.large_string())),
    ],
)
def test_another_arrow_type_is_refused(type_name: str, array: Any) -> None:
    assert refused(column(type_name), pa.record_batch([array], names=["c"])) == "DPONE_ARTIFACT_SCHEMA"


def test_a_missing_or_repeated_column_is_refused() -> None:
    assert refused(column("int"), batch("int", [1], name="other")) == "DPONE_ARTIFACT_SCHEMA"
    twice = pa.record_batch([pa.array([1], pa.int32())] * 2, names=["c", "c"])
    assert refused(column("int"), twice) == "DPONE_ARTIFACT_SCHEMA"


def test_memory_stays_flat() -> None:
    text = column("nvarchar(max)")
    seen: list[int] = []

    def stream() -> Iterator[pa.RecordBatch]:
        for _ in range(40):
            seen.append(pa.total_allocated_bytes())
            yield batch("nvarchar(max)", ["x" * 200] * 5_000)

    before = pa.total_allocated_bytes()
    assert digest_batches([text], stream()).rows == 200_000
    # One batch is 1 MB; nothing of the 39 before it is kept.
    assert max(seen) - before < 8_000_000
    assert pa.total_allocated_bytes() - before < 8_000_000
