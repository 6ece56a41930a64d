"""A side whose engine gives the answers that a test writes down."""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.declarations.manifest import AcceptanceChecks
from dpone_dagster.ports import Columns, LoadColumn, MetricSnapshot


def column(name: str, type_: str = "bigint", nullable: bool = True) -> LoadColumn:
    return LoadColumn(name=name, type=type_, nullable=nullable)


COLUMNS: Columns = (column("id", nullable=False), column("note", "nvarchar(20)"), column("at", "datetime2(6)"))


class Scripted:
    """Answers each question with ``answers[question]``; raises it when it is an exception."""

    def __init__(self, side: str = "staged", *, columns: Columns = COLUMNS, **answers: Any) -> None:
        self.side, self.dataset, self.columns = side, f"{side} rows", columns
        self.answers = answers
        self.asked: list[tuple[Any, ...]] = []

    def _answer(self, *question: Any) -> Any:
        self.asked.append(question)
        answer = self.answers[question[0]]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def row_count(self) -> int:
        return self._answer("row_count")  # type: ignore[no-any-return]

    def digest(self, columns: Columns, *, key: Columns = (), modulus: int = 1) -> SetDigest:
        return self._answer("digest", columns, key, modulus)  # type: ignore[no-any-return]

    def rows_with_null(self, columns: Sequence[str]) -> int:
        return self._answer("rows_with_null", tuple(columns))  # type: ignore[no-any-return]

    def surplus_rows(self, columns: Sequence[str]) -> int:
        return self._answer("surplus_rows", tuple(columns))  # type: ignore[no-any-return]

    def rows_outside(self, column: str, values: Sequence[str | int | bool], *, allow_null: bool) -> int:
        return self._answer("rows_outside", column, tuple(values), allow_null)  # type: ignore[no-any-return]

    def newest(self, column: str) -> Any:
        return self._answer("newest", column)

    def scalar(self, sql: str) -> Any:
        return self._answer("scalar", sql)

    def metrics(self, checks: AcceptanceChecks) -> MetricSnapshot:
        return self._answer("metrics", checks)  # type: ignore[no-any-return]

    def blocks(self) -> Iterator[pa.RecordBatch]:
        return iter(self._answer("blocks"))
