"""What the ClickHouse publication tests share: one mart, its rows as Python tuples, and a merge done by hand."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa

from dpone_dagster.contracts.mart import Column, MartSpec, Relation, Scope
from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.ports import PhysicalDesign, ProofReport, ShadowReport
from resources.clickhouse.client import ClickHouseClient
from resources.clickhouse.publisher import ClickHousePublisher

Row = tuple[Any, ...]

COLUMNS = (
    Column(name="at", type="datetime2(6)", nullable=False),
    Column(name="id", type="bigint", nullable=False),
    Column(name="amount", type="decimal(18,4)", nullable=True),
    Column(name="qty", type="int", nullable=True),
    Column(name="returned", type="int", nullable=True),
    Column(name="ref", type="uniqueidentifier", nullable=True),
    Column(name="flag", type="bit", nullable=True),
    Column(name="due", type="date", nullable=True),
    Column(name="note", type="nvarchar(50)", nullable=True),
)
DAY = date(2024, 3, 10)
SCOPE = Scope.day(DAY)
OTHER_DAY = date(2024, 3, 9)


def row(day: date, id_: int, **changes: Any) -> Row:
    """One row of a day; ``changes`` name columns."""
    values = {
        "at": datetime(day.year, day.month, day.day, id_ % 24, id_ % 60, 1, 250001, tzinfo=UTC),
        "id": id_,
        "amount": Decimal(id_) / 4 + Decimal("0.0001"),
        "qty": id_ % 7,
        "returned": None if id_ % 3 == 0 else id_ % 5,
        "ref": UUID(int=id_ * 7919 % 2**128),
        "flag": None if id_ % 5 == 0 else id_ % 2 == 0,
        "due": day + timedelta(days=id_ % 30),
        "note": None if id_ % 4 == 0 else f"n'{id_}\\ü",
        **changes,
    }
    return tuple(values[c.name] for c in COLUMNS)


def merged(old: Iterable[Row], staged: Iterable[Row]) -> Counter[Row]:
    """What the next generation must hold: old rows whose key (at, id) is not staged, then the staged rows."""
    staged = list(staged)
    keys = {r[:2] for r in staged}
    result = Counter(r for r in old if r[:2] not in keys)
    result.update(staged)
    return result


def digest_by_hand(rows: Iterable[Row]) -> SetDigest:
    """The set digest of rows, from its definition in words."""

    def text(value: Any) -> str | None:
        if value is None:
            return None
        if isinstance(value, bool):
            return "1" if value else "0"
        if isinstance(value, datetime):
            return value.strftime("%Y-%m-%dT%H:%M:%S.%f")
        if isinstance(value, Decimal):
            return f"{value:.4f}"
        return str(value)

    count, lanes = 0, [0, 0, 0, 0]
    for r in rows:
        encoded = b"".join(
            b"~" if (t := text(v)) is None else str(len(t.encode())).encode() + b":" + t.encode() for v in r
        )
        hashed = hashlib.sha256(encoded).digest()
        for i in range(4):
            lanes[i] = (lanes[i] + int.from_bytes(hashed[8 * i : 8 * i + 8], "big")) % 2**64
        count += 1
    return SetDigest(count, (lanes[0], lanes[1], lanes[2], lanes[3]))


def batches(rows: Iterable[Row], size: int = 1000) -> Iterable[pa.RecordBatch]:
    """Rows as Arrow batches with the contract's types."""
    rows = list(rows)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        arrays = []
        for i, column in enumerate(COLUMNS):
            values = [str(r[i]) if isinstance(r[i], UUID) else r[i] for r in part]
            arrays.append(pa.array(values, column.spec.arrow))
        yield pa.RecordBatch.from_arrays(arrays, names=[c.name for c in COLUMNS])


@dataclass(kw_only=True)
class Case:
    """One mart's target in a database of the test's own."""

    client: ClickHouseClient
    database: str
    partition_by: str = "day"
    publisher: ClickHousePublisher = field(init=False)
    mart: MartSpec = field(init=False)

    def __post_init__(self) -> None:
        # A prefix of its own: an ATTACH that is repeated first ends whatever runs under its attempt's prefix.
        self.publisher = ClickHousePublisher(self.client, f"dpone-{uuid4().hex[:16]}-")
        self.mart = MartSpec(
            name="sales",
            model_unique_id="model.demo.sales",
            workflow="daily",
            source=Relation(schema_name="marts", name="sales"),
            target=self.table("sales"),
            event_time="at",
            key=("at", "id"),
            columns=COLUMNS,
            partition_by=self.partition_by,
            start_date=date(2020, 1, 1),
        )

    def table(self, name: str) -> Relation:
        return Relation(schema_name=self.database, name=name)

    @property
    def stage(self) -> Relation:
        return self.table("sales__stage")

    @property
    def shadow(self) -> Relation:
        return self.table("sales__shadow")

    def sql(self, statement: str) -> Any:
        """Run a statement past the code under test; ``$t``, ``$g`` and ``$s`` are target, staging and shadow."""
        for mark, name in (("$t", "sales"), ("$g", "sales__stage"), ("$s", "sales__shadow")):
            statement = re.sub(re.escape(mark) + r"\b", f"{self.database}.{name}", statement)
        return self.client.command(statement)

    def insert(self, rows: Iterable[Row], table: str = "sales") -> None:
        """Insert rows past the code under test, through the driver's own row format."""
        rows = list(rows)
        if rows:
            self.client.insert(
                table,
                [[int(v) if isinstance(v, bool) else v for v in r] for r in rows],
                column_names=[c.name for c in COLUMNS],
                database=self.database,
                settings={"max_partitions_per_insert_block": 0},
            )

    def rows(self, table: str = "sales") -> Counter[Row]:
        """Every row of a table, through the driver's own row format."""
        found = self.client.query(f"SELECT * FROM {self.database}.{table}", tz_mode="aware").result_rows
        return Counter(tuple(r) for r in found)

    def create(self, rows: Iterable[Row] = ()) -> PhysicalDesign:
        self.publisher.create_target(self.mart)
        self.insert(rows)
        return self.design()

    def design(self) -> PhysicalDesign:
        design = self.publisher.design(self.mart.target)
        assert design is not None
        return design

    def staged(self, rows: Iterable[Row]) -> None:
        self.publisher.create_stage(self.mart, self.stage.name)
        self.publisher.load(self.stage, iter(batches(rows)), lambda _: None)

    def build(self, design: PhysicalDesign) -> ShadowReport:
        return self.publisher.build_shadow(self.mart, design, self.stage, self.shadow, SCOPE)

    def prove(self, design: PhysicalDesign, after: Iterable[Row]) -> ProofReport:
        return self.publisher.prove(self.mart, design, self.stage, self.shadow, SCOPE, digest_by_hand(after))

    def parts(self, table: str) -> Counter[tuple[str, str, int]]:
        found = self.client.query(
            "SELECT partition_id, hash_of_all_files, rows FROM system.parts"
            f" WHERE database = '{self.database}' AND table = '{table}' AND active AND rows > 0"
        ).result_rows
        return Counter((p, h, n) for p, h, n in found)
