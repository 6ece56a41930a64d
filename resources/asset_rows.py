"""A Python asset's rows as the source of a governed load: typed exactly, kept in a file, and asked there."""

import errno
import hashlib
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from dpone_dagster.contracts.arrow_digest import digest_batches, row_texts
from dpone_dagster.contracts.mart import Column, Scope
from dpone_dagster.contracts.set_digest import EMPTY, SetDigest
from dpone_dagster.contracts.types import column_type
from dpone_dagster.declarations.manifest import AcceptanceChecks, Process
from dpone_dagster.errors import DponeError
from dpone_dagster.governance.acceptance import select
from dpone_dagster.ports import Columns, LoadColumn, MetricSnapshot, Window
from resources.probes import accepted_field
from resources.session import Session

RESERVED = "__dpone__"  # columns of the platform's own
_NAME_LIMIT = 128
_SLICE_ROWS = 65_536
_SLICE_BYTES = 8 << 20  # what is converted at a time
_HASH_ROWS = 8192
_UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"

_PLAIN = {
    pa.bool_(): "bit",
    pa.uint8(): "tinyint",
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.uint16(): "int",
    pa.int32(): "int",
    pa.uint32(): "bigint",
    pa.int64(): "bigint",
    pa.date32(): "date",
    pa.uuid(): "uniqueidentifier",
}


class AssetLoadSource:
    """Rows that a Python asset hands over; ``LoadSourcePort``.

    They are written once to a temporary Arrow file, in slices of a few MiB, because a stream can be read only once and
    the gates ask the same rows again. The file needs disk in the folder for temporary files, and goes with the session.

    Args:
        rows: ``pa.Table``, ``pa.RecordBatch``, ``pa.RecordBatchReader``, an iterator of record batches,
            ``pd.DataFrame`` (its index is no column), ``polars.DataFrame`` or ``polars.LazyFrame``.
    """

    def __init__(self, rows: object) -> None:
        self._rows = rows
        self._spent = False

    @contextmanager
    def open(self, process: Process, *, scope: Scope | None = None, above: str | None = None) -> Iterator[Session]:
        """Take the rows over; an asset is read whole, whatever the day.

        Raises:
            DponeError: DPONE_IO_MANAGER_MANIFEST for a load with another source; DPONE_IO_MANAGER_NEEDS_ROWS for what
                holds no rows, and for a stream that was taken over before; DPONE_SOURCE_COLUMN;
                DPONE_TYPE_UNSUPPORTED; DPONE_VALUE_OUTSIDE_DOMAIN; DPONE_VALUE_NULL; DPONE_KEY_NULL;
                DPONE_ARTIFACT_NO_SPACE.
        """
        if process.source.type != "asset":
            raise DponeError(
                "DPONE_IO_MANAGER_MANIFEST", f"The load {process.name} reads from {process.source.type}, not an asset."
            )
        if self._spent:  # an exhausted stream looks like one without rows
            raise DponeError(
                "DPONE_IO_MANAGER_NEEDS_ROWS",
                "The asset's stream has been read already.",
                next_step="Materialize the asset again, so that it makes its rows anew.",
            )
        self._spent = isinstance(self._rows, pa.RecordBatchReader | Iterator)
        schema, batches = _batches(self._rows)
        names: list[str] = []
        for name in schema.names:
            admit_name(name, names)
            names.append(name)
        if not names:
            raise DponeError("DPONE_SOURCE_COLUMN", "The asset's rows have no column.")
        columns = tuple(LoadColumn(name=f.name, type=_canonical(f.name, f.type), nullable=f.nullable) for f in schema)
        with tempfile.TemporaryDirectory(prefix="dpone-rows-") as folder:
            spool = _Spool(Path(folder) / "rows.arrow", columns, schema)
            spool.write(batches)
            columns = _with_proven_key(process, columns, spool)
            probe = ArrowProbe(
                columns=columns, batches=spool.read, rows=spool.rows, side="source", dataset=f"asset {process.name}"
            )
            yield Session(columns=columns, window=Window(), probe=probe, snapshot=True, rows=spool.read)


def _with_proven_key(process: Process, columns: Columns, spool: "_Spool") -> Columns:
    key = process.sink.unique_key or ()
    for name in key:
        if name not in spool.nulls:
            raise DponeError("DPONE_SOURCE_COLUMN", f"The asset's rows have no key column {name!r}.", field=name)
        if nulls := spool.nulls[name]:
            raise DponeError("DPONE_KEY_NULL", f"Key column {name!r} is NULL in {nulls} rows.", field=name, rows=nulls)
    return tuple(c.model_copy(update={"nullable": False}) if c.name in key else c for c in columns)


# ----------------------------------------------------------------------------------------------- what came in


def _batches(rows: object) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the rows' schema and their batches, whatever the library that made them."""
    if isinstance(rows, pd.DataFrame):
        rows = _from_pandas(rows)
    elif callable(collect := getattr(rows, "collect", None)):  # a polars LazyFrame
        rows = collect()
    if callable(to_arrow := getattr(rows, "to_arrow", None)):  # a polars DataFrame
        rows = to_arrow()
    if isinstance(rows, pa.RecordBatch):
        return rows.schema, iter((rows,))
    if isinstance(rows, pa.Table):
        return rows.schema, iter(rows.to_batches())
    if isinstance(rows, pa.RecordBatchReader):
        return rows.schema, iter(rows)
    if isinstance(rows, Iterator):
        first = next(rows, None)
        if isinstance(first, pa.RecordBatch):
            return first.schema, _chain(first, rows)
        if first is None:
            raise DponeError(
                "DPONE_SOURCE_COLUMN",
                "The asset's stream ended before its first batch, so its columns are unknown.",
                next_step="Yield one batch without rows, or return a pyarrow.RecordBatchReader, which has a schema.",
            )
    raise DponeError(
        "DPONE_IO_MANAGER_NEEDS_ROWS", f"The asset's value is a {type(rows).__name__}, which holds no typed rows."
    )


def _chain(first: pa.RecordBatch, rest: Iterator[Any]) -> Iterator[pa.RecordBatch]:
    yield first
    for batch in rest:
        if not isinstance(batch, pa.RecordBatch):
            raise DponeError(
                "DPONE_IO_MANAGER_NEEDS_ROWS", f"The asset's stream has a {type(batch).__name__} among its batches."
            )
        yield batch


def _from_pandas(frame: pd.DataFrame) -> pa.Table:
    """Convert column by column, so that what cannot be converted is named. NaN, NaT and NA become NULL."""
    names: list[str] = []
    arrays = []
    for i, name in enumerate(frame.columns):
        if not isinstance(name, str):
            raise DponeError(
                "DPONE_SOURCE_COLUMN", f"A column of the frame is named by a {type(name).__name__}, not by text."
            )
        admit_name(name, names)
        names.append(name)
        arrays.append(_from_series(name, frame.iloc[:, i]))
    return pa.Table.from_arrays(arrays, names=names)


def _from_series(name: str, series: "pd.Series[Any]") -> Any:
    try:
        converted = pa.Table.from_pandas(series.to_frame("x"), preserve_index=False).column(0)
    except UnicodeError:
        raise DponeError(
            "DPONE_VALUE_OUTSIDE_DOMAIN", f"Column {name!r} has a text that is not UTF-8.", field=name
        ) from None
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        raise _guessed(name, "objects of no one type", "pyarrow.string()") from None
    if series.dtype != object:
        return converted
    # From objects Arrow guesses: a precision from today's values, a date where some are moments, microseconds where
    # there are nanoseconds, UTC where a zone is missing.
    if pa.types.is_decimal(converted.type):
        raise _guessed(name, "Decimal objects, which do not say their precision", "pyarrow.decimal128(18, 4)")
    if pa.types.is_timestamp(converted.type):
        raise _guessed(name, "datetime objects, each with a zone of its own", "pyarrow.timestamp('us', 'UTC')")
    if pa.types.is_date(converted.type) and any(type(value) is not date for value in series[series.notna()]):
        raise _guessed(name, "dates and moments", "pyarrow.timestamp('us', 'UTC')")
    return converted


def _guessed(name: str, what: str, dtype: str) -> DponeError:
    return DponeError(
        "DPONE_TYPE_UNSUPPORTED",
        f"Column {name!r} of the frame holds {what}.",
        next_step=f"Give it a dtype that says what it means, such as frame[column].astype(pandas.ArrowDtype({dtype})).",
        field=name,
    )


def admit_name(name: str, before: Sequence[str]) -> None:
    """Refuse one column's name.

    Raises:
        DponeError: DPONE_SOURCE_COLUMN when it is empty, too long, the platform's own, or taken.
    """
    if not name or len(name) > _NAME_LIMIT:
        raise DponeError("DPONE_SOURCE_COLUMN", f"Column {len(before) + 1} has no name, or one of over 128 characters.")
    if name.lower().startswith(RESERVED):
        raise DponeError("DPONE_SOURCE_COLUMN", f"Column {name!r} has a name that is reserved for lineage.", field=name)
    if name in before:
        raise DponeError("DPONE_SOURCE_COLUMN", f"Two columns are named {name!r}.", field=name)


def _canonical(name: str, type_: pa.DataType) -> str:
    """Return the canonical name of an Arrow type that crosses exactly.

    Raises:
        DponeError: DPONE_TYPE_UNSUPPORTED naming the column, its type and what to do.
    """
    if pa.types.is_dictionary(type_):
        if not _is_text(type_.value_type):
            raise _unsupported(name, type_, "Decode the dictionary.")
        return "nvarchar(max)"
    if _is_text(type_):
        return "nvarchar(max)"
    if plain := _PLAIN.get(type_):
        return plain
    if pa.types.is_decimal(type_):
        if 0 <= type_.scale <= type_.precision <= 38:
            return column_type(f"decimal({type_.precision},{type_.scale})").name
        raise _unsupported(name, type_, "Cast it to decimal128 with a scale between 0 and its precision.")
    if pa.types.is_timestamp(type_):
        if type_.tz is None:
            raise _unsupported(
                name,
                type_,
                "Say which zone it is in: pyarrow.compute.assume_timezone, or tz_localize('UTC') in pandas.",
            )
        return "datetime2(6)"
    if pa.types.is_floating(type_):
        raise _unsupported(
            name,
            type_,
            "Make it a decimal of the scale that you mean: pyarrow.compute.round(x, 2).cast(pa.decimal128(18, 2))."
            " Whole numbers with gaps, which pandas makes floats: .astype('Int64').",
        )
    if pa.types.is_null(type_):
        raise _unsupported(name, type_, "Every value is NULL, so the type has to be said: cast it.")
    if type_ == pa.uint64():
        raise _unsupported(name, type_, "Cast it to int64, or to decimal128(20, 0).")
    raise _unsupported(name, type_, "Cast it to an integer, decimal, date32, timestamp with a zone, bool or string.")


def _is_text(type_: pa.DataType) -> bool:
    return pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_)


def _unsupported(name: str, type_: pa.DataType, next_step: str) -> DponeError:
    return DponeError(
        "DPONE_TYPE_UNSUPPORTED",
        f"Column {name!r} has the Arrow type {type_}, which has no exact mapping.",
        next_step=next_step,
        field=name,
        type=str(type_),
    )


def refuse_values(columns: Sequence[Column], batch: pa.RecordBatch) -> None:
    """Refuse values that no engine holds exactly; the batch has the columns' Arrow types, in order.

    Raises:
        DponeError: DPONE_VALUE_OUTSIDE_DOMAIN for a text that is not UTF-8, a UUID that is not lower-case with dashes,
            and a moment out of range; DPONE_VALUE_NULL.
    """
    for i, column in enumerate(columns):
        values, spec = batch.column(i), column.spec
        if values.null_count and not column.nullable:
            raise DponeError("DPONE_VALUE_NULL", f"Column {column.name!r} has a NULL.", field=column.name)
        if spec.mapping in ("string_utf8", "uniqueidentifier_uuid"):
            try:
                values.validate(full=True)
            except pa.ArrowInvalid:
                raise _outside(column, "a text that is not UTF-8") from None
        if spec.mapping == "uniqueidentifier_uuid" and not _all(pc.match_substring_regex(values, _UUID)):
            raise _outside(column, "a UUID that is not lower-case with dashes")
        if spec.domain:
            naive = pa.timestamp("us") if pa.types.is_timestamp(spec.arrow) else spec.arrow
            low, high = (pa.scalar(end).cast(naive) for end in spec.domain)
            moments = values.view(naive)
            if not _all(pc.and_(pc.greater_equal(moments, low), pc.less_equal(moments, high))):
                raise _outside(column, f"a value outside {spec.domain[0]} to {spec.domain[1]}")


def _all(mask: Any) -> bool:
    return pc.all(mask).as_py() is not False  # NULLs do not count against it; an empty mask holds


def _outside(column: Column, what: str) -> DponeError:
    return DponeError("DPONE_VALUE_OUTSIDE_DOMAIN", f"Column {column.name!r} has {what}.", field=column.name)


# ------------------------------------------------------------------------------------------------ the spool


class _Spool:
    """The rows in one Arrow file with the columns' exact types."""

    def __init__(self, path: Path, columns: Columns, schema: pa.Schema) -> None:
        self._path = path
        self._columns = columns
        self._given = schema
        self._schema = pa.schema([pa.field(c.name, c.spec.arrow) for c in columns])
        self.rows = 0
        self.nulls = {c.name: 0 for c in columns}

    def write(self, batches: Iterator[pa.RecordBatch]) -> None:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        try:
            with (
                pa.OSFile(str(self._path), "wb") as sink,
                pa.ipc.new_stream(sink, self._schema, options=options) as writer,
            ):
                for batch in batches:
                    if not batch.schema.equals(self._given, check_metadata=False):
                        raise DponeError(
                            "DPONE_SOURCE_COLUMN", "A batch of the asset's stream has other columns than the first one."
                        )
                    for part in _slices(batch):
                        exact = self._exact(part)
                        writer.write_batch(exact)
                        self.rows += exact.num_rows
                        for name, array in zip(self.nulls, exact.columns, strict=True):
                            self.nulls[name] += array.null_count
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DponeError(
                "DPONE_ARTIFACT_NO_SPACE",
                "The folder for temporary files has not enough room for the asset's rows.",
                next_step="Free space there, or point TMPDIR to a larger disk.",
            ) from None

    def read(self) -> Iterator[pa.RecordBatch]:
        """Stream the rows."""
        with pa.OSFile(str(self._path), "rb") as source, pa.ipc.open_stream(source) as reader:
            yield from reader

    def _exact(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = []
        for column, array in zip(self._columns, batch.columns, strict=True):
            try:
                arrays.append(_exactly(array, column.spec.arrow))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError):
                raise _outside(column, f"a value that {column.type} cannot hold exactly") from None
        exact = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        refuse_values(self._columns, exact)
        return exact


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    rows = min(_SLICE_ROWS, max(1, _SLICE_BYTES * batch.num_rows // max(1, batch.nbytes)))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _exactly(array: Any, type_: pa.DataType) -> Any:
    """Cast without rounding, truncation or wrapping."""
    if array.type == pa.uuid():
        return pa.array([None if v is None else str(uuid.UUID(bytes=v)) for v in array.storage.to_pylist()], type_)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(type_, safe=True)


# ------------------------------------------------------------------------------------------------- the probe


class ArrowProbe:
    """Answers a gate's questions from Arrow batches; ``ProbePort`` for rows that are in no engine.

    Counts and digests stream. ``surplus_rows`` keeps 16 bytes a row, ``metrics`` the distinct values of one column at
    a time.

    Args:
        columns: business columns, with the Arrow types of ``ColumnType.arrow``.
        batches: yields the rows anew at each call.
        rows: how many there are.
    """

    def __init__(
        self,
        *,
        columns: Columns,
        batches: Callable[[], Iterator[pa.RecordBatch]],
        rows: int,
        side: str,
        dataset: str,
    ) -> None:
        self.columns = columns
        self.side = side
        self.dataset = dataset
        self._batches = batches
        self._rows = rows

    def row_count(self) -> int:
        """Return the number of rows."""
        return self._rows

    def digest(self, columns: Columns, *, key: Columns = (), modulus: int = 1) -> SetDigest:
        """Return the set digest of the columns, of all rows or of those that the key's digest picks."""
        if modulus == 1:
            return digest_batches(columns, self._batches())
        total = EMPTY
        for part in self._parts():
            hashes = _hashes(row_texts(key or columns, part))
            first = np.frombuffer(hashes, ">u8").reshape(-1, 4)[:, 0]
            picked = part.filter(pa.array(first.astype(np.uint64) % np.uint64(modulus) == 0))
            total += digest_batches(columns, (picked,))
        return total

    def rows_with_null(self, columns: Sequence[str]) -> int:
        """Return how many rows have a NULL in one of the columns."""
        self._refuse_unknown(columns)
        total = 0
        for batch in self._batches():
            some = pc.is_null(batch.column(columns[0]))
            for name in columns[1:]:
                some = pc.or_(some, pc.is_null(batch.column(name)))
            total += _trues(some)
        return total

    def surplus_rows(self, columns: Sequence[str]) -> int:
        """Return rows minus distinct combinations of the columns; NULLs are equal to each other."""
        chosen = self._refuse_unknown(columns)
        # Half of SHA-256 tells combinations apart as surely as anything can, in 16 bytes a row.
        halves = [
            np.frombuffer(_hashes(row_texts(chosen, part)), np.dtype("V16")).reshape(-1, 2)[:, 0]
            for part in self._parts()
        ]
        if not halves:
            return 0
        every = np.sort(np.concatenate(halves).view([("a", "u8"), ("b", "u8")]))
        return int(np.count_nonzero(every[1:] == every[:-1]))

    def rows_outside(self, column: str, values: Sequence[str | int | bool], *, allow_null: bool) -> int:
        """Return how many rows have another value than the given ones, compared as canonical text."""
        (chosen,) = self._refuse_unknown([column])
        admitted = pa.array([accepted_field(chosen, value) for value in values], pa.large_string())
        total = 0
        for part in self._parts():
            encoded = row_texts((chosen,), part)
            nulls = pc.is_null(part.column(column))
            known = pc.or_(pc.is_in(encoded, value_set=admitted), nulls if allow_null else pa.scalar(False))
            total += part.num_rows - _trues(known)
        return total

    def newest(self, column: str) -> datetime | None:
        """Return the greatest value of a datetime2(6) column, aware UTC; None without one."""
        (chosen,) = self._refuse_unknown([column])
        if chosen.type != "datetime2(6)":
            raise DponeError("DPONE_GATE_UNAVAILABLE", f"Column {column!r} is {chosen.type}, no datetime2(6).")
        tops = [pc.max(batch.column(column)).as_py() for batch in self._batches()]
        found: list[datetime] = [top for top in tops if top is not None]
        return max(found, default=None)

    def scalar(self, sql: str) -> Any:
        """Refuse: no engine holds these rows.

        Raises:
            DponeError: DPONE_GATE_UNAVAILABLE.
        """
        raise DponeError(
            "DPONE_GATE_UNAVAILABLE",
            "The rows of a Python asset are in no engine that could run SQL.",
            next_step="Let the gate judge side: target; the staged rows are in ClickHouse.",
        )

    def metrics(self, checks: AcceptanceChecks) -> MetricSnapshot:
        """Count rows, NULLs and distinct values that are not NULL, exactly."""
        nulls = select(checks.null_counts, self.columns)
        distinct = select(checks.distinct_counts, self.columns)
        null_counts = dict.fromkeys(nulls, 0)
        for batch in self._batches() if nulls else ():
            for name in nulls:
                null_counts[name] += batch.column(name).null_count
        return MetricSnapshot(
            side=self.side,
            dataset=self.dataset,
            columns=tuple(c.name for c in self.columns),
            row_count=self._rows if checks.row_count else None,
            null_counts=null_counts,
            distinct_counts={name: self._distinct(name) for name in distinct},
        )

    def blocks(self) -> Iterator[pa.RecordBatch]:
        """Stream the rows."""
        return self._batches()

    def _distinct(self, name: str) -> int:
        seen: list[Any] = []
        settled = held = 0
        for batch in self._batches():
            seen.append(batch.column(name).drop_null())
            held += len(seen[-1])
            if held > max(2 * settled, _SLICE_ROWS):  # merged when doubled, so that each value is hashed a few times
                seen = [pc.unique(pa.chunked_array(seen))]
                settled = held = len(seen[0])
        return len(pc.unique(pa.chunked_array(seen))) if seen else 0

    def _parts(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches():
            for start in range(0, batch.num_rows, _HASH_ROWS):
                yield batch.slice(start, _HASH_ROWS)

    def _refuse_unknown(self, names: Sequence[str]) -> Columns:
        by_name = {c.name: c for c in self.columns}
        if missing := [name for name in names if name not in by_name]:
            raise DponeError("DPONE_GATE_UNAVAILABLE", f"The source has no column {missing[0]!r}.", field=missing[0])
        return tuple(by_name[name] for name in names)


def _trues(mask: Any) -> int:
    return int(mask.true_count)


def _hashes(texts: Any) -> bytes:
    sha256 = hashlib.sha256
    return b"".join([sha256(text).digest() for text in texts.cast(pa.large_binary()).to_pylist()])
