"""What the governed loads' sink tests share: a process, its rows as Python tuples, and the sink of one load."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from typing import Any
from uuid import uuid4

import pyarrow as pa

from dpone_dagster.contracts.mart import Scope
from dpone_dagster.declarations.manifest import Process
from dpone_dagster.ports import Columns, FinalizeReport, LoadColumn, StagedLoad, Window
from resources.clickhouse.client import ClickHouseClient
from resources.clickhouse.dialect import quote
from resources.clickhouse.staged_sink import ClickHouseStagedSink

Row = tuple[Any, ...]

COLUMNS: Columns = (
    LoadColumn(name="at", type="datetime2(6)", nullable=False),
    LoadColumn(name="id", type="bigint", nullable=False),
    LoadColumn(name="note", type="nvarchar(50)", nullable=True),
)
DAY = date(2024, 3, 10)
LOADED_AT = datetime(2024, 3, 11, 4, 5, 6, 789012, tzinfo=UTC)


def at(day: int, month: int = 3, hour: int = 12) -> datetime:
    """A moment of 2024."""
    return datetime(2024, month, day, hour, tzinfo=UTC)


def batches(columns: Columns, rows: Sequence[Row], size: int = 3) -> Iterator[pa.RecordBatch]:
    """Rows as Arrow batches with the columns' types."""
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        arrays = [pa.array([r[i] for r in part], c.spec.arrow) for i, c in enumerate(columns)]
        yield pa.RecordBatch.from_arrays(arrays, names=[c.name for c in columns])


@dataclass(kw_only=True)
class LoadCase:
    """One target in a database of the test's own, and the process that loads into it."""

    client: ClickHouseClient
    database: str
    strategy: str
    columns: Columns = COLUMNS
    name: str = "orders"
    unique_key: tuple[str, ...] | None = None
    read: dict[str, Any] = field(default_factory=dict)
    staging: str | None = None
    partition_by: str | None = None
    order_by: tuple[str, ...] | None = None
    lineage: dict[str, Any] | None = None
    cluster: str | None = None
    legacy: bool = False

    @property
    def process(self) -> Process:
        storage = {
            k: v
            for k, v in (("partition_by", self.partition_by), ("order_by", self.order_by), ("cluster", self.cluster))
            if v is not None
        }
        sink: dict[str, Any] = {
            "type": "clickhouse",
            "table": {"schema": self.database, "name": self.name},
            "strategy": self.strategy,
            "physical_design": {"storage": {"clickhouse": storage}},
            "options": {"lineage": self.lineage or {"enabled": False}},
        }
        if self.legacy:
            sink["options"]["load_governance"] = {"finalization_phase": "legacy_post_finalize"}
        if self.unique_key:
            sink["unique_key"] = self.unique_key
        if self.staging:
            sink["staging"] = {"schema": self.staging}
        source: dict[str, Any] = {"type": "sqlserver", "table": {"schema": "dbo", "name": "orders"}}
        if self.read:
            source["read"] = self.read
        return Process.parse({"name": "orders", "source": source, "sink": sink})

    @property
    def window(self) -> Window:
        return Window(scope=Scope.day(DAY)) if self.read.get("mode") == "daily" else Window()

    @property
    def table(self) -> str:
        return f"{self.database}.{quote(self.name)}"

    def sink(self, client: ClickHouseClient | None = None) -> ClickHouseStagedSink:
        return ClickHouseStagedSink(client or self.client, query_prefix=f"dpone-load-{uuid4().hex[:8]}-")

    def sql(self, statement: str) -> Any:
        """Run a statement past the code under test; ``$t`` is the target."""
        return self.client.command(statement.replace("$t", self.table))

    def insert(self, rows: Iterable[Row]) -> None:
        """Insert rows past the code under test."""
        rows = list(rows)
        if rows:
            self.client.insert(self.name, rows, column_names=[c.name for c in self.columns], database=self.database)

    def create(self, rows: Iterable[Row] = (), *, partition_by: str = "toYYYYMMDD(at)", order_by: str = "id") -> str:
        """Create the target past the code under test; return its UUID."""
        defined = ", ".join(f"{quote(c.name)} {c.spec.clickhouse_column(c.nullable)}" for c in self.columns)
        partition = f"PARTITION BY {partition_by}" if partition_by else ""
        self.sql(f"CREATE TABLE $t ({defined}) ENGINE = MergeTree {partition} ORDER BY {order_by}")
        self.insert(rows)
        return self.uuid()

    def uuid(self) -> str:
        found = self.client.query(
            "SELECT toString(uuid) FROM system.tables WHERE database = {d:String} AND name = {n:String}",
            parameters={"d": self.database, "n": self.name},
        ).result_rows
        return found[0][0] if found else ""

    def rows(self, columns: Columns | None = None) -> Counter[Row]:
        """The target's business rows, through the driver's own row format."""
        selected = ", ".join(quote(c.name) for c in columns or self.columns)
        found = self.client.query(f"SELECT {selected} FROM {self.table}", tz_mode="aware").result_rows
        return Counter(tuple(r) for r in found)

    def scratch(self) -> list[str]:
        """Every table of the target's and the staging database that is not the target."""
        found = self.client.query(
            "SELECT name FROM system.tables WHERE database IN ({d:String}, {s:String}) AND name != {n:String}",
            parameters={"d": self.database, "s": self.staging or self.database, "n": self.name},
        ).result_rows
        return sorted(r[0] for r in found)

    def staged(self, sink: ClickHouseStagedSink, rows: Sequence[Row], *, epoch: int = 1) -> StagedLoad:
        """Stage and project."""
        staged, count = sink.stage(
            self.process, self.columns, batches(self.columns, rows), load_id=str(uuid4()), epoch=epoch
        )
        assert count == len(rows)
        return sink.project(self.process, self.columns, staged, loaded_at=LOADED_AT)

    def prepared(self, sink: ClickHouseStagedSink, rows: Sequence[Row], *, epoch: int = 1) -> StagedLoad:
        """Stage, project and prepare."""
        return sink.prepare(self.process, self.columns, self.staged(sink, rows, epoch=epoch), self.window)

    def prepare_again(self, sink: ClickHouseStagedSink, staged: StagedLoad) -> StagedLoad:
        """Prepare under the next epoch, as whoever takes over does."""
        return sink.prepare(self.process, self.columns, replace(staged, epoch=staged.epoch + 1), self.window)

    def load(self, rows: Sequence[Row]) -> tuple[StagedLoad, FinalizeReport]:
        """The whole of a load; nothing of it is left but the target."""
        sink = self.sink()
        staged = self.prepared(sink, rows)
        # What touches nothing is in place already.
        idle = staged.facts["finalizer"] == "partition_replace" and not staged.facts["touched"]
        assert sink.outcome(self.process, staged) == ("COMMITTED" if idle else "NOT_COMMITTED")
        sink.finalize(self.process, staged)
        assert sink.outcome(self.process, staged) == "COMMITTED"
        report = sink.report(self.process, self.columns, staged)
        sink.cleanup(self.process, staged)
        return staged, report
