"""The set digest over Arrow record batches: what the artifact's rows are, worked out without any engine.

It encodes as ``dpone_row_v1`` (``contracts/set_digest.py``) and refuses what has no encoding. It does not
check the length of bounded strings: the source enforces it, and a digest says what is there.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpone_dagster.contracts.mart import Column
from dpone_dagster.contracts.set_digest import EMPTY, SetDigest
from dpone_dagster.errors import DponeError

_SLICE_ROWS = 8192  # bounds the memory that the texts of one step take
_UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
_TEXT = pa.large_string()  # 64-bit offsets: long strings times thousands of rows pass 2 GiB


def digest_batches(columns: Sequence[Column], batches: Iterable[pa.RecordBatch]) -> SetDigest:
    """Digest a stream of batches; memory does not grow with the number of rows.

    Args:
        columns: business columns in contract order; batches may hold others besides, which are ignored.
        batches: with the Arrow types of ``ColumnType.arrow``.

    Raises:
        DponeError: DPONE_ARTIFACT_SCHEMA for a missing column or another Arrow type; DPONE_VALUE_NULL;
            DPONE_VALUE_OUTSIDE_DOMAIN for text that is not UTF-8 (a lone surrogate is not), for a UUID that
            is not lower-case with dashes, and for dates and times outside their domain.
    """
    total = EMPTY
    for batch in batches:
        for start in range(0, batch.num_rows, _SLICE_ROWS):
            total += _digest(row_texts(columns, batch.slice(start, _SLICE_ROWS)))
    return total


def row_texts(columns: Sequence[Column], batch: pa.RecordBatch) -> "pa.Array[Any]":
    """Return the ``dpone_row_v1`` encoding of each row (large_string); refuses as ``digest_batches`` does."""
    parts = [part for column in columns for part in _field(column, _values(column, batch))]
    # A NULL leaves nothing in a join; its mark says that it is there.
    texts: pa.Array[Any] = _join(*parts, null_handling="replace", null_replacement="")
    return texts


def _digest(texts: Any) -> SetDigest:
    sha256 = hashlib.sha256
    hashes = b"".join([sha256(text).digest() for text in texts.cast(pa.large_binary()).to_pylist()])
    # Unsigned 64-bit addition wraps, which is the sum modulo 2**64.
    a, b, c, d = np.frombuffer(hashes, ">u8").reshape(-1, 4).sum(axis=0, dtype=np.uint64).tolist()
    return SetDigest(len(texts), (a, b, c, d))


def _values(column: Column, batch: pa.RecordBatch) -> Any:
    """Return the column's values, every one of them having an encoding."""
    spec = column.spec
    if batch.schema.get_field_index(column.name) < 0:
        raise DponeError("DPONE_ARTIFACT_SCHEMA", f"The rows have no column {column.name}, or several.")
    values = batch.column(column.name)
    if values.type != spec.arrow:
        raise DponeError(
            "DPONE_ARTIFACT_SCHEMA",
            f"Column {column.name} has Arrow type {values.type}, not {spec.arrow}.",
            field=column.name,
        )
    if values.null_count and not column.nullable:
        raise DponeError("DPONE_VALUE_NULL", f"Column {column.name} has a NULL.", field=column.name)
    if spec.mapping == "string_utf8" and not _is_utf8(values):
        raise _outside(column, "a text that is not UTF-8")
    if spec.mapping == "uniqueidentifier_uuid" and not _all(pc.match_substring_regex(values, _UUID)):
        raise _outside(column, "a UUID that is not lower-case with dashes")
    if spec.domain:
        low, high = (pa.scalar(end).cast(_without_zone(spec.arrow)) for end in spec.domain)
        moments = values.view(low.type)
        if not _all(pc.and_(pc.greater_equal(moments, low), pc.less_equal(moments, high))):
            raise _outside(column, f"a value outside {spec.domain[0]} to {spec.domain[1]}")
    return values


def _outside(column: Column, what: str) -> DponeError:
    return DponeError(
        "DPONE_VALUE_OUTSIDE_DOMAIN", f"Column {column.name} has {what}.", field=column.name, type=column.type
    )


def _all(mask: Any) -> bool:
    # NULLs do not count against it; an empty mask holds.
    return pc.all(mask).as_py() is not False


def _is_utf8(values: Any) -> bool:
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _without_zone(type_: pa.DataType) -> pa.DataType:
    return pa.timestamp("us") if pa.types.is_timestamp(type_) else type_


def _scalar(text: str) -> Any:
    return pa.scalar(text, _TEXT)


def _join(*parts: Any, **options: Any) -> Any:
    return pc.binary_join_element_wise(*parts, _scalar(""), **options)  # the last argument is the separator


def _field(column: Column, values: Any) -> tuple[Any, ...]:
    """Return what to join for one column: the length prefix (or ``~``) and the text (or NULL)."""
    spec = column.spec
    text: Any
    prefix: Any = None
    match spec.mapping:
        case "bit_bool":
            text, prefix = values.cast(pa.uint8()).cast(_TEXT), _scalar("1:")
        case "uniqueidentifier_uuid":
            text, prefix = values.cast(_TEXT), _scalar("36:")
        case "date_date":
            text, prefix = values.cast(_TEXT), _scalar("10:")
        case "datetime2_utc":
            # Without its zone the cast writes no Z; microseconds always have six digits.
            naive = values.view(pa.timestamp("us")).cast(_TEXT)
            text, prefix = pc.binary_replace_slice(naive, start=10, stop=11, replacement="T"), _scalar("26:")
        case "decimal_exact":
            text = _decimal_text(values, spec.scale)
        case "string_utf8":
            text = values.cast(_TEXT)
            if spec.padded:
                text = pc.ascii_rtrim(text, characters=" ")
        case _:
            text = values.cast(_TEXT)
    length = () if prefix is not None else (pc.binary_length(text).cast(_TEXT),)
    mark = _scalar(":") if prefix is None else prefix
    if values.null_count:
        mark = pc.if_else(values.is_valid(), mark, _scalar("~"))
    return (*length, mark, text)


def _decimal_text(values: Any, scale: int) -> Any:
    # Arrow writes small decimals with an exponent, so: the unscaled digits, padded, and a point put in.
    unscaled = pa.Array.from_buffers(pa.decimal128(38, 0), len(values), values.buffers(), offset=values.offset).cast(
        _TEXT
    )
    if scale == 0:
        return unscaled
    digits = pc.ascii_lpad(pc.ascii_ltrim(unscaled, characters="-"), width=scale + 1, padding="0")
    pointed = pc.binary_replace_slice(digits, start=-scale, stop=-scale, replacement=".")
    sign = pc.if_else(pc.starts_with(unscaled, "-"), _scalar("-"), _scalar(""))
    return _join(sign, pointed)
