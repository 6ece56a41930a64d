"""The ``schema`` gate: a pandera schema over the staged rows, block by block, so that memory stays flat.

A schema is refused where judging blocks would lie (uniqueness, aggregates) or where pandera would change rows before it
judges them (coercion, defaults, parsers, dropped rows). Only counts leave this module, never failing values.
"""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pandas as pd
import pandera.pandas as pandera
import pyarrow as pa
from pandera.config import ValidationDepth, config_context
from pandera.errors import SchemaErrorReason, SchemaErrors

from dpone_dagster.contracts.mart import arrow_schema
from dpone_dagster.declarations.manifest import SchemaGate
from dpone_dagster.errors import DponeError
from dpone_dagster.ports import Columns, GateOutcome, ProbePort

# By contract, not by block: a column is of one dtype whether or not a block of it has a NULL.
_NULLABLE: dict[pa.DataType, Any] = {
    pa.uint8(): pd.UInt8Dtype(),
    pa.int16(): pd.Int16Dtype(),
    pa.int32(): pd.Int32Dtype(),
    pa.int64(): pd.Int64Dtype(),
    pa.bool_(): pd.BooleanDtype(),
}
# An empty block, or one of NULLs, would otherwise be of another dtype.
_TEXT: dict[pa.DataType, Any] = {pa.string(): pd.StringDtype(na_value=float("nan"))}


class PanderaSchemaGate:
    """Evaluates ``schema`` gates; implements ``SchemaGateHandler``."""

    def evaluate(self, gate: SchemaGate, source: ProbePort | None, staged: ProbePort) -> GateOutcome:
        """Judge every staged row.

        Returns:
            ``passed`` and the metrics ``rows``, ``blocks``, ``failing_rows`` and ``failing_checks``.

        Raises:
            DponeError: DPONE_GATE_UNAVAILABLE when the reference does not lead to a pandas schema of pandera's, the
                schema is one that blocks cannot be judged by, or a check of it raises.
        """
        schema = _load(gate.ref)
        _refuse_what_blocks_cannot_show(schema)
        rows = blocks = failing_rows = 0
        failing_checks: set[tuple[Any, ...]] = set()
        for batch in _never_none(staged):
            frame = to_frame(batch, staged.columns)
            with _strictly():
                if not blocks:
                    _refuse_aggregates(schema, frame)
                bad_rows, bad_checks = _judge(schema, frame)
            rows, blocks = rows + len(frame), blocks + 1
            failing_rows += len(bad_rows)
            failing_checks |= bad_checks
        return GateOutcome(
            passed=not failing_checks,
            metrics={
                "rows": rows,
                "blocks": blocks,
                "failing_rows": failing_rows,
                "failing_checks": len(failing_checks),
            },
        )


def to_frame(batch: pa.RecordBatch, columns: Columns) -> pd.DataFrame:
    """Turn a block into pandas without changing a value.

    NOT NULL integers and bits have numpy dtypes, nullable ones pandas' own (``Int64``, ``boolean``), never floats;
    decimals stay ``Decimal`` and dates ``date`` (dtype ``object``); datetimes are ``datetime64[us, UTC]``; text and
    UUIDs have the dtype ``str``.
    """
    nullable = {column.name: column.nullable for column in columns}
    series = {}
    for field, array in zip(batch.schema, batch.columns, strict=True):
        extension = nullable.get(field.name, True) or array.null_count
        dtypes = {**_TEXT, **_NULLABLE} if extension else _TEXT
        series[field.name] = array.to_pandas(types_mapper=dtypes.get)
    return pd.DataFrame(series)


def _never_none(staged: ProbePort) -> Iterator[pa.RecordBatch]:
    """Yield the staged blocks, an empty one where there is no row: columns and dtypes are judged all the same."""
    some = False
    for batch in staged.blocks():
        if batch.num_rows:
            some = True
            yield batch
    if not some:
        schema = arrow_schema(staged.columns)
        yield pa.RecordBatch.from_pylist([], schema=schema)


def _load(ref: str) -> pandera.DataFrameSchema:
    module, _, attribute = ref.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
        if isinstance(found, type) and issubclass(found, pandera.DataFrameModel):
            found = found.to_schema()
    except Exception as error:  # noqa: BLE001 - somebody else's module; what it raises may carry anything
        raise DponeError(
            "DPONE_GATE_UNAVAILABLE", f"The schema {ref} does not load ({type(error).__name__}).", field="ref"
        ) from None
    if not isinstance(found, pandera.DataFrameSchema):
        _refuse(f"{ref} is no pandas DataFrameSchema or DataFrameModel of pandera's")
    return found


def _refuse_what_blocks_cannot_show(schema: pandera.DataFrameSchema) -> None:
    for part, where in ((schema, "the schema"), *((c, f"column {name}") for name, c in schema.columns.items())):
        for trait, there in (
            ("unique, which a block cannot show: use a unique gate", getattr(part, "unique", None)),
            ("coerce, which changes rows", getattr(part, "coerce", False)),
            ("drop_invalid_rows, which changes rows", getattr(part, "drop_invalid_rows", False)),
            ("parsers, which change rows", getattr(part, "parsers", None)),
            ("a default, which changes rows", getattr(part, "default", None) is not None),
            ("add_missing_columns, which changes rows", getattr(part, "add_missing_columns", False)),
            ("strict='filter', which changes rows", getattr(part, "strict", False) == "filter"),
            ("an index, which staged rows do not have", getattr(part, "index", None) is not None),
            ("a check with groupby, which a block cannot show", any(c.groupby is not None for c in part.checks)),
            # It would pass with a warning that nobody sees; a gate has its severity for that.
            ("a check that only warns", any(c.raise_warning for c in part.checks)),
        ):
            if there:
                _refuse(f"{where} has {trait}")


def _refuse_aggregates(schema: pandera.DataFrameSchema, frame: pd.DataFrame) -> None:
    """Refuse checks with one answer for all rows; they are asked once, since only their answer shows it."""
    subjects: list[tuple[Any, Any]] = [(check, frame) for check in schema.checks]
    for name, column in schema.columns.items():
        names = [n for n in frame.columns if n == name]
        if column.regex:
            with _mapped():
                names = list(column.get_regex_columns(frame))
        subjects += [(check, frame[n]) for n in names for check in column.checks]
    for check, subject in subjects:
        with _mapped():
            answer = check(subject).check_output
        if not isinstance(answer, pd.Series | pd.DataFrame):
            _refuse("a check has one answer for all rows, which a block cannot show")


def _judge(schema: pandera.DataFrameSchema, frame: pd.DataFrame) -> tuple[set[Any], set[tuple[Any, ...]]]:
    """Return the labels of the failing rows and the identities of the failing checks."""
    try:
        with _mapped():
            schema.validate(frame, lazy=True)
    except SchemaErrors as errors:
        rows: set[Any] = set()
        checks: set[tuple[Any, ...]] = set()
        for error in errors.schema_errors:
            if error.reason_code is SchemaErrorReason.CHECK_ERROR:
                _refuse("a check of the schema raised an error")
            cases = error.failure_cases
            if isinstance(cases, pd.DataFrame) and "index" in cases:
                rows.update(cases["index"].dropna())
            about = cases if isinstance(cases, str) else getattr(error.schema, "name", None)
            checks.add((about, error.reason_code, error.check_index, str(getattr(error.check, "name", error.check))))
        return rows, checks
    return set(), set()


@contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except SchemaErrors:
        raise
    except Exception as error:  # noqa: BLE001 - pandera's and the checks' own texts carry values
        raise DponeError(
            "DPONE_GATE_UNAVAILABLE", f"The schema cannot be applied to the rows ({type(error).__name__})."
        ) from None


@contextmanager
def _strictly() -> Iterator[None]:
    """Judge in full whatever the environment says: it can switch validation off, and everything would pass."""
    with (
        config_context(validation_enabled=True, validation_depth=ValidationDepth.SCHEMA_AND_DATA),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # their texts carry values
        yield


def _refuse(fault: str) -> NoReturn:
    raise DponeError("DPONE_GATE_UNAVAILABLE", f"{fault[0].upper()}{fault[1:]}.", field="ref")
