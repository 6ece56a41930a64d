"""Schemas that the tests of the ``schema`` gate refer to by ``module:attribute``."""

from decimal import Decimal
from typing import Any

import pandas as pd
import pandera.pandas as pa

GOOD = pa.DataFrameSchema(
    {
        "id": pa.Column("int64", pa.Check.ge(1)),
        "qty": pa.Column("Int32", pa.Check.lt(100), nullable=True),
        "price": pa.Column(object, pa.Check(lambda s: s >= Decimal("0.10")), nullable=True),
        "at": pa.Column("datetime64[us, UTC]", nullable=True),
        "note": pa.Column(str, pa.Check.str_length(max_value=5), nullable=True),
        "ok": pa.Column("boolean", nullable=True),
    },
    strict=True,
)


class Model(pa.DataFrameModel):
    id: int = pa.Field(ge=1)
    note: str = pa.Field(nullable=True)


def with_column(**options: Any) -> pa.DataFrameSchema:
    return pa.DataFrameSchema({"id": pa.Column("int64", **options)})


REGEX = pa.DataFrameSchema({"q.*": pa.Column("Int32", pa.Check.lt(100), nullable=True, regex=True)})
ROWWISE = pa.DataFrameSchema({}, checks=pa.Check(lambda d: d["id"] > d["qty"].fillna(0)))
ABSENT = pa.DataFrameSchema({"absent": pa.Column(int)})
FLOATS = pa.DataFrameSchema({"qty": pa.Column(float, nullable=True)})

UNIQUE = pa.DataFrameSchema({"id": pa.Column("int64")}, unique=["id"])
UNIQUE_COLUMN = with_column(unique=True)
COERCE = pa.DataFrameSchema({"id": pa.Column("int64")}, coerce=True)
COERCE_COLUMN = with_column(coerce=True)
DROP = pa.DataFrameSchema({"id": pa.Column("int64", pa.Check.gt(5))}, drop_invalid_rows=True)
FILTER = pa.DataFrameSchema({"id": pa.Column("int64")}, strict="filter")
ADD = pa.DataFrameSchema({"new": pa.Column("int64", default=1)}, add_missing_columns=True)
DEFAULT = with_column(default=1)
PARSED = with_column(parsers=pa.Parser(lambda s: s.clip(lower=1)))
INDEX = pa.DataFrameSchema({"id": pa.Column("int64")}, index=pa.Index(int))
GROUPED = pa.DataFrameSchema(
    {"id": pa.Column("int64", pa.Check(lambda groups: True, groupby="ok")), "ok": pa.Column("boolean", nullable=True)}
)
ONLY_WARNS = with_column(checks=pa.Check(lambda s: s > 10**9, raise_warning=True))
AGGREGATE = with_column(checks=pa.Check(lambda s: s.mean() > 0))
AGGREGATE_OF_FRAME = pa.DataFrameSchema({}, checks=pa.Check(lambda d: len(d) > 0))
RAISES = with_column(checks=pa.Check(lambda s: s / pd.Series(["secret-4711"])))
NOT_A_SCHEMA = {"id": int}
