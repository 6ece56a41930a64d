"""Rows as Arrow has them, for every engine alike."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dpone_dagster.errors import DponeError


def exact_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Cast a batch, column by position, without rounding, truncation or wrapping.

    Raises:
        DponeError: DPONE_VALUE_OUTSIDE_DOMAIN for a value that its type cannot hold exactly.
    """
    try:
        arrays = [_exactly(batch.column(i), field) for i, field in enumerate(schema)]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise DponeError("DPONE_VALUE_OUTSIDE_DOMAIN", "A value does not fit its Arrow type.") from None
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _exactly(array: Any, field: Any) -> Any:
    # A datetime2(6) without a zone is UTC by definition.
    if pa.types.is_timestamp(array.type) and array.type.tz is None:
        array = pc.assume_timezone(array, "UTC")
    return array.cast(field.type, safe=True)
