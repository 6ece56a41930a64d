"""Staging, lineage, odd names, probes, and the sink without staging."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from load_case import COLUMNS, LOADED_AT, LoadCase, Row, at, batches

from dpone_dagster.errors import DponeError
from dpone_dagster.ports import LoadColumn, Visibility, Window
from resources.clickhouse.client import ClickHouseClient
from resources.clickhouse.dialect import quote
from resources.clickhouse.staged_sink import ClickHouseDirectSink, table_columns

DAILY = {"mode": "daily", "column": "at", "start_date": "2024-01-01"}
ROWS: list[Row] = [(at(10), 3, "C"), (at(10), 6, None), (at(12), 7, "ü")]
OLD: list[Row] = [(at(9), 1, "a"), (at(10), 3, "c"), (at(10), 4, "d")]
STRATEGIES = ["full_refresh", "append", "merge", "replace", "partition_replace"]

ODD = (
    LoadColumn(name="it's", type="bigint", nullable=False),
    LoadColumn(name="a`b\\c", type="datetime2(6)", nullable=False),
    LoadColumn(name="dash-dot.", type="nvarchar(10)", nullable=True),
    LoadColumn(name="Й", type="int", nullable=True),
    LoadColumn(name="x y", type="int", nullable=True),
    LoadColumn(name="x-y", type="int", nullable=True),
    LoadColumn(name="X Y", type="int", nullable=True),
    LoadColumn(name="`x`", type="int", nullable=True),
    LoadColumn(name='"q"', type="int", nullable=True),
    LoadColumn(name="h", type="int", nullable=True),
    LoadColumn(name="a", type="int", nullable=False),
    LoadColumn(name="count()", type="int", nullable=True),
    LoadColumn(name="rows", type="int", nullable=True),
    LoadColumn(name="select", type="int", nullable=True),
)


def odd_row(key: int, day: int, note: str) -> Row:
    return (key, at(day), note, *range(key, key + 11))


@pytest.fixture
def make(clickhouse: ClickHouseClient, ch_database: str) -> Callable[..., LoadCase]:
    def case(strategy: str = "append", **changes: Any) -> LoadCase:
        if strategy == "merge":
            changes.setdefault("unique_key", ("id",))
        return LoadCase(client=clickhouse, database=ch_database, strategy=strategy, **changes)

    return case


def code(refused: pytest.ExceptionInfo[DponeError]) -> str:
    return refused.value.code


# ---------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("lineage", [True, False])
def test_names_of_any_kind(make: Callable[..., LoadCase], strategy: str, first: bool, lineage: bool) -> None:
    case = make(
        strategy,
        columns=ODD,
        name="orders 'of' the-day.`х`",
        unique_key=("it's", "a"),
        partition_by=f"toYYYYMM({quote(ODD[1].name)})",
        lineage={"enabled": lineage},
    )
    old = [odd_row(1, 9, "old"), odd_row(2, 9, "old")]
    if not first:
        case.load(old)
        assert case.rows() == Counter(old)
    fresh = [odd_row(2, 10, "new"), odd_row(3, 10, "new")]
    sink = case.sink()
    staged = case.staged(sink, fresh)
    assert sink.staged_probe(case.process, case.columns, staged).row_count() == 2
    staged = sink.prepare(case.process, case.columns, staged, case.window)
    sink.finalize(case.process, staged)
    assert sink.outcome(case.process, staged) == "COMMITTED"
    kept = {"append": old, "merge": old[:1]}.get(strategy, [])
    assert case.rows() == Counter([*fresh, *(() if first else kept)])
    sink.cleanup(case.process, staged)
    assert case.scratch() == []


@pytest.mark.parametrize("name", ["__dpone__load_id", "__dpone__mine", "_partition_id"])
def test_reserved_names(make: Callable[..., LoadCase], name: str) -> None:
    case = make(columns=(*COLUMNS, LoadColumn(name=name, type="int", nullable=True)))
    with pytest.raises(DponeError) as refused:
        case.staged(case.sink(), [])
    assert (code(refused), refused.value.details["field"]) == ("DPONE_COLUMN_RESERVED", name)
    with pytest.raises(DponeError) as refused:
        ClickHouseDirectSink(case.client, query_prefix="t-").check(case.process, case.columns)
    assert code(refused) == "DPONE_COLUMN_RESERVED"


def test_a_name_that_leaves_no_room(make: Callable[..., LoadCase]) -> None:
    case = make(name="т" * 40)  # 240 bytes of a file name by itself
    with pytest.raises(DponeError) as refused:
        case.staged(case.sink(), [])
    assert code(refused) == "DPONE_NAME_TOO_LONG"
    longest = make("full_refresh", name="t" * 120)
    longest.load(ROWS)
    longest.load(ROWS)
    assert longest.rows() == Counter(ROWS)


# -------------------------------------------------------------------------------------------------- staging


def test_scratch_tables_carry_the_load_id_and_the_epoch(make: Callable[..., LoadCase]) -> None:
    case = make(lineage={"enabled": True})
    sink = case.sink()
    staged = case.prepared(sink, ROWS, epoch=7)
    short = staged.load_id.replace("-", "")[:16]
    assert {role: table["name"] for role, table in staged.tables.items()} == {
        "stage": f"orders__dpone_load__{short}",
        "projected": f"orders__dpone_projected__{short}",
        "shadow": f"orders__dpone_shadow__{short}_7",
    }
    assert staged.target_uuid is None
    assert case.uuid() == ""


def test_a_leftover_of_the_same_load_is_replaced(make: Callable[..., LoadCase]) -> None:
    case = make()
    case.create(OLD)
    sink, load_id = case.sink(), str(uuid4())

    def broken() -> Any:
        yield from batches(COLUMNS, ROWS)
        raise ConnectionError("the source went away")

    with pytest.raises(ConnectionError):
        sink.stage(case.process, COLUMNS, broken(), load_id=load_id, epoch=1)
    assert case.rows() == Counter(OLD)
    staged, rows = sink.stage(case.process, COLUMNS, batches(COLUMNS, ROWS), load_id=load_id, epoch=2)
    assert rows == 3
    assert sink.staged_probe(case.process, COLUMNS, staged).row_count() == 3
    assert len(case.scratch()) == 1


def test_the_targets_order_of_columns_need_not_be_the_sources(make: Callable[..., LoadCase]) -> None:
    case = make(columns=COLUMNS[::-1])
    case.create(partition_by="")
    mirrored = replace(case, columns=COLUMNS)
    mirrored.load(ROWS)
    assert mirrored.rows() == Counter(ROWS)


def test_a_batch_with_other_columns(make: Callable[..., LoadCase]) -> None:
    case = make()
    with pytest.raises(DponeError) as refused:
        case.sink().stage(
            case.process, COLUMNS, batches(COLUMNS[:2], [r[:2] for r in ROWS]), load_id=str(uuid4()), epoch=1
        )
    assert code(refused) == "DPONE_ARTIFACT_SCHEMA"


def test_null_where_there_may_be_none(make: Callable[..., LoadCase]) -> None:
    case = make()
    with pytest.raises(DponeError) as refused:
        case.staged(case.sink(), [(at(9), None, "x")])
    assert code(refused) == "DPONE_VALUE_NULL"


def test_staged_rows_that_went_missing(make: Callable[..., LoadCase]) -> None:
    case = make()
    case.create(OLD)
    sink = case.sink()
    staged = case.staged(sink, ROWS)
    case.sql(f"TRUNCATE TABLE {case.database}.`{staged.tables['stage']['name']}`")
    with pytest.raises(DponeError) as refused:
        sink.prepare(case.process, case.columns, staged, case.window)
    assert code(refused) == "DPONE_STAGE_MISMATCH"


# -------------------------------------------------------------------------------------------------- lineage

LINEAGE = "`__dpone__load_id`, toString(`__dpone__loaded_at`), `__dpone__row_id`"


@pytest.mark.parametrize("first", [True, False])
def test_lineage_columns_by_hand(make: Callable[..., LoadCase], first: bool) -> None:
    case = make("merge", unique_key=("id", "note"), lineage={"enabled": True})
    if not first:
        full = replace(case, columns=table_columns(case.process, COLUMNS))
        full.create(partition_by="", order_by="id")
    rows = [(at(10), 3, "C"), (at(12), 70, "üb")]
    staged, _ = case.load(rows)
    found = case.client.query(f"SELECT id, {LINEAGE} FROM {case.table} ORDER BY id").result_rows
    assert found == [
        (3, staged.load_id, "2024-03-11 04:05:06.789012", hashlib.sha256(b"1:3" + b"1:C").hexdigest()),
        (70, staged.load_id, "2024-03-11 04:05:06.789012", hashlib.sha256(b"2:70" + "3:üb".encode()).hexdigest()),
    ]
    columns = case.client.query(
        f"SELECT name, type FROM system.columns WHERE database = '{case.database}' AND table = 'orders'"
        " AND startsWith(name, '__dpone__') ORDER BY name"
    ).result_rows
    assert columns == [
        ("__dpone__load_id", "String"),
        ("__dpone__loaded_at", "DateTime64(6, 'UTC')"),
        ("__dpone__row_id", "String"),
    ]


@pytest.mark.parametrize(
    ("identity", "key", "row_id", "decisions"),
    [
        ({}, ("id",), True, 0),
        ({"mode": "required"}, ("id",), True, 0),
        ({"mode": "off"}, ("id",), False, 0),
        ({}, None, False, 1),
        ({"unsupported_policy": "skip"}, None, False, 0),
        ({"mode": "off"}, None, False, 0),
    ],
)
def test_a_row_id_only_where_a_key_makes_it_deterministic(
    make: Callable[..., LoadCase], identity: dict[str, Any], key: Any, row_id: bool, decisions: int
) -> None:
    case = make(unique_key=key, lineage={"enabled": True, "row_identity": identity})
    staged, _ = case.load(ROWS)
    names = case.client.query(f"SELECT * FROM {case.table}").column_names
    assert ("__dpone__row_id" in names) is row_id
    assert staged.facts["decisions"] == decisions * [
        {"decision": "row_identity", "chosen": "none", "reason": "no unique_key"}
    ]


def test_a_target_needs_exactly_the_lineage_columns_of_the_load(make: Callable[..., LoadCase]) -> None:
    case = make(lineage={"enabled": True})
    case.create(OLD)
    with pytest.raises(DponeError) as refused:
        case.staged(case.sink(), ROWS)
    assert (code(refused), refused.value.details["field"]) == ("DPONE_TARGET_COLUMNS", "__dpone__load_id")
    with_them, without = make(name="other", lineage={"enabled": True}), make(name="other")
    with_them.load(ROWS)
    with pytest.raises(DponeError) as refused:
        without.staged(without.sink(), ROWS)
    assert (code(refused), refused.value.details["field"]) == ("DPONE_TARGET_COLUMNS", "__dpone__load_id")


# --------------------------------------------------------------------------------------------------- probes


@pytest.mark.parametrize(
    ("strategy", "read", "lineage", "rows", "judged"),
    [
        ("full_refresh", {}, False, ROWS, 3),
        ("append", {}, True, ROWS, 3),
        ("merge", {}, False, ROWS, 3),
        ("replace", {}, False, ROWS, 3),
        ("replace", DAILY, False, ROWS[:2], 2),
        ("partition_replace", {}, False, ROWS, 3),
        ("partition_replace", {}, False, [], 0),
        ("partition_replace", DAILY, False, ROWS[:2], 2),
    ],
)
def test_what_is_judged_in_the_target(
    make: Callable[..., LoadCase], strategy: str, read: dict[str, Any], lineage: bool, rows: list[Row], judged: int
) -> None:
    case = make(strategy, read=read, lineage={"enabled": lineage}, partition_by="toYYYYMMDD(at)")
    before = replace(case, strategy="append", read={})
    before.load([(at(8), 1, "other day"), (at(9), 2, "other day")])
    sink = case.sink()
    staged = case.prepared(sink, rows)
    sink.finalize(case.process, staged)
    probe = sink.target_probe(case.process, case.columns, staged, case.window)
    assert (probe.side, probe.dataset) == ("target", f"{case.database}.orders")
    assert (probe.row_count(), probe.rows_with_null(["note"])) == (judged, 1 if judged else 0)
    mine = sink.staged_probe(case.process, case.columns, staged)
    assert mine.side == "staged"
    assert mine.digest(case.columns) == probe.digest(case.columns)


def test_an_append_without_lineage_cannot_be_told_apart(make: Callable[..., LoadCase]) -> None:
    case = make()
    case.create(OLD)
    sink = case.sink()
    staged = case.prepared(sink, ROWS)
    with pytest.raises(DponeError) as refused:
        sink.target_probe(case.process, case.columns, staged, case.window)
    assert code(refused) == "DPONE_ACCEPTANCE_UNAVAILABLE"


# -------------------------------------------------------------------------------------------- without staging


def direct(case: LoadCase) -> ClickHouseDirectSink:
    return ClickHouseDirectSink(case.client, query_prefix=f"dpone-load-{uuid4().hex[:8]}-")


@pytest.mark.parametrize("engine", ["ReplacingMergeTree ORDER BY id", "Log", "MergeTree ORDER BY id"])
def test_a_straight_insert_into_any_engine(make: Callable[..., LoadCase], engine: str) -> None:
    case = make(legacy=True, lineage={"enabled": True})
    case.sql(
        "CREATE TABLE $t (note Nullable(String), at DateTime64(6,'UTC'), id Int64, `__dpone__load_id` String,"
        f" `__dpone__loaded_at` DateTime64(6,'UTC')) ENGINE = {engine}"
    )
    sink = direct(case)
    for n in (1, 2):
        report = sink.load(
            case.process, COLUMNS, batches(COLUMNS, [(at(n), n, "x")]), load_id=f"load-{n}", loaded_at=LOADED_AT
        )
        assert (report.rows, report.rows_replaced, report.target_rows) == (1, 0, n)
        assert (report.visibility, report.retry_safe) == (Visibility.PARTIAL, False)
    assert case.rows() == Counter([(at(1), 1, "x"), (at(2), 2, "x")])
    assert sink.target_probe(case.process, COLUMNS, Window(), load_id="load-2").row_count() == 1
    assert case.client.query(f"SELECT DISTINCT toString(`__dpone__loaded_at`) FROM {case.table}").result_rows == [
        ("2024-03-11 04:05:06.789012",)
    ]


def test_what_was_inserted_before_an_error_stays(
    make: Callable[..., LoadCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(legacy=True)
    case.create()
    monkeypatch.setattr("resources.clickhouse.loading.INSERT_ROWS", 2)

    def broken() -> Any:
        yield from batches(COLUMNS, ROWS[:2], 2)
        raise ConnectionError("the source went away")

    with pytest.raises(ConnectionError):
        direct(case).load(case.process, COLUMNS, broken(), load_id="x", loaded_at=LOADED_AT)
    assert case.rows() == Counter(ROWS[:2])


def test_refusals_before_a_straight_insert(make: Callable[..., LoadCase]) -> None:
    case = make(legacy=True)

    def refusal(case: LoadCase) -> str:
        with pytest.raises(DponeError) as refused:
            direct(case).load(case.process, COLUMNS, iter([]), load_id="x", loaded_at=LOADED_AT)
        return code(refused)

    assert refusal(case) == "DPONE_TARGET_ABSENT"
    case.sql("CREATE VIEW $t AS SELECT 1 AS x")
    assert refusal(case) == "DPONE_TARGET_NOT_A_TABLE"
    case.sql("DROP VIEW $t SYNC")
    case.create()
    case.sql("ALTER TABLE $t ADD COLUMN more Int64")
    assert refusal(case) == "DPONE_TARGET_COLUMNS"
    assert refusal(replace(case, cluster="main")) == "DPONE_CLUSTER_UNAVAILABLE"
    strict = replace(
        case, unique_key=("id",), lineage={"enabled": True, "row_identity": {"unsupported_policy": "error"}}
    )
    assert refusal(strict) == "DPONE_ROW_IDENTITY_UNSUPPORTED"
    with pytest.raises(DponeError) as refused:
        direct(case).target_probe(case.process, COLUMNS, Window(), load_id="x")
    assert code(refused) == "DPONE_ACCEPTANCE_UNAVAILABLE"


SAMPLE: dict[str, Any] = {
    "bit": True,
    "date": at(29, 2).date(),
    "decimal(38,10)": Decimal("12345.6789"),
    "uniqueidentifier": "6f9619ff-8b86-d011-b42d-00c04fc964ff",
    "varchar(max)": "text",
}


def test_types_of_every_kind_arrive_exactly(make: Callable[..., LoadCase]) -> None:
    columns = tuple(
        LoadColumn(name=f"c{i}", type=type_, nullable=nullable)
        for i, (type_, nullable) in enumerate(
            (type_, nullable)
            for type_ in (
                "tinyint",
                "smallint",
                "int",
                "bit",
                "date",
                "decimal(38,10)",
                "uniqueidentifier",
                "varchar(max)",
            )
            for nullable in (False, True)
        )
    )
    case = make("full_refresh", columns=columns, lineage={"enabled": True})
    row = pa.RecordBatch.from_arrays(
        [pa.array([None if c.nullable else SAMPLE.get(c.type, 1)], c.spec.arrow) for c in columns],
        names=[c.name for c in columns],
    )
    sink = case.sink()
    staged, _ = sink.stage(case.process, columns, iter([row]), load_id=str(uuid4()), epoch=1)
    staged = sink.project(case.process, columns, staged, loaded_at=LOADED_AT)
    staged = sink.prepare(case.process, columns, staged, Window())
    sink.finalize(case.process, staged)
    found = case.client.query(
        f"SELECT {', '.join(f'toString({c.name})' for c in columns)} FROM {case.table}"
    ).result_rows
    texts = ["1", "1", "1", "true", "2024-02-29", "12345.6789", "6f9619ff-8b86-d011-b42d-00c04fc964ff", "text"]
    assert found == [tuple(value for text in texts for value in (text, None))]
