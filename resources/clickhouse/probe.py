"""The questions of gates and acceptance, asked of ClickHouse."""

# ruff: noqa: S608 - names are quoted, values are quoted literals of a checked form.

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from dpone_dagster.contracts.mart import arrow_schema
from dpone_dagster.ports import Columns, LoadColumn
from resources.clickhouse import dialect
from resources.clickhouse.statements import BOUNDED, Statements, literal
from resources.probes import Probe

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DECIMAL64 = 18  # digits of the widest decimal that ClickHouse keeps in 64 bits


class ClickHouseProbe(Probe):
    """ClickHouse, as source, staging or target. Two questions may see two states of a table that others write."""

    _dialect = dialect
    _guard = "clickhouse"
    _null_count = "countIf(isNull({}))"
    _distinct_count = "uniqExact({})"

    def __init__(
        self,
        statements: Statements,
        *,
        columns: Columns,
        relation_sql: str,
        where_sql: str = "1",
        side: str,
        dataset: str,
    ) -> None:
        super().__init__(columns=columns, relation_sql=relation_sql, where_sql=where_sql, side=side, dataset=dataset)
        self._statements = statements

    def newest(self, column: str) -> datetime | None:
        """Return the greatest value of a datetime2(6) column, aware UTC; None without rows or values."""
        newest = f"toUnixTimestamp64Micro(maxOrNull({self._moments(column)}))"
        found = self._row(f"SELECT {newest} FROM {self._relation} WHERE {self._where}")[0]
        return None if found is None else _EPOCH + timedelta(microseconds=int(found))

    def blocks(self) -> Iterator[pa.RecordBatch]:
        """Stream the rows in the engine's blocks with the Arrow types of the columns."""
        schema = arrow_schema(self.columns)
        selected = ", ".join(
            f"{'toString' if c.spec.mapping == 'uniqueidentifier_uuid' else ''}({self._quote(c)}) AS __dpone__c{i}"
            for i, c in enumerate(self.columns)
        )
        for batch in self._statements.stream(f"SELECT {selected} FROM {self._relation} WHERE {self._where}"):
            arrays: list[Any] = [batch.column(i).cast(field.type) for i, field in enumerate(schema)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _row(self, sql: str) -> Sequence[Any]:
        return self._statements.rows(sql, **BOUNDED)[0]

    def _read_only(self, sql: str) -> Sequence[Sequence[Any]]:
        return self._statements.rows(
            sql,
            **BOUNDED,
            readonly=2,  # refuses every write, and a SETTINGS clause that would lift it
            max_result_rows=1,
            result_overflow_mode="throw",
            aggregate_functions_null_for_empty=1,  # the greatest of no values is not 0
        )

    def _key(self, column: LoadColumn) -> str:
        name, spec = self._quote(column), column.spec
        # The engine hashes plain integers several times faster than the types that are integers underneath.
        if spec.mapping == "datetime2_utc":
            return f"toUnixTimestamp64Micro({name})"
        if spec.mapping == "decimal_exact" and spec.precision <= _DECIMAL64:
            return f"reinterpretAsInt64({name})"
        return f"trimRight({name}, ' ')" if spec.padded else name

    def _sampled(self, key: Columns, modulus: int) -> str:
        hashed = f"SHA256({dialect.row_text_sql(key)})"
        return f"reinterpretAsUInt64(reverse(substring({hashed}, 1, 8))) % {modulus} = 0"

    def _literal(self, text: str) -> str:
        return literal(text)
