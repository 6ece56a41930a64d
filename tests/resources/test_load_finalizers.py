"""Every strategy against rows worked out by hand; what readers see meanwhile; what a lost answer leaves."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from load_case import COLUMNS, DAY, LoadCase, Row, at

from dpone_dagster.errors import DponeError
from dpone_dagster.ports import FinalizeOutcome, Visibility
from resources.clickhouse import finalizers, staged_sink
from resources.clickhouse.client import ClickHouseClient, connect
from resources.clickhouse.finalizers import describe
from resources.clickhouse.statements import Statements
from resources.embedded.engines import Engines

DAILY = {"mode": "daily", "column": "at", "start_date": "2024-01-01"}
OLD: list[Row] = [(at(9), 1, "a"), (at(9), 2, None), (at(10), 3, "c"), (at(10), 4, "d"), (at(11), 5, "e")]
NEW: list[Row] = [(at(10), 3, "C"), (at(10), 6, "f"), (at(12), 7, None)]
TODAY: list[Row] = [(at(10), 3, "C"), (at(10), 6, "f")]


@pytest.fixture
def make(clickhouse: ClickHouseClient, ch_database: str) -> Callable[..., LoadCase]:
    def case(strategy: str, **changes: Any) -> LoadCase:
        if strategy == "merge":
            changes.setdefault("unique_key", ("id",))
        return LoadCase(client=clickhouse, database=ch_database, strategy=strategy, **changes)

    return case


def code(refused: pytest.ExceptionInfo[DponeError]) -> str:
    return refused.value.code


# Strategy, how the source is read, target before, staged rows, target after, rows that went.
RESULTS: list[tuple[str, dict[str, Any], list[Row], list[Row], list[Row], int]] = [
    ("full_refresh", {}, OLD, NEW, NEW, 5),
    ("full_refresh", {}, OLD, [], [], 5),
    ("full_refresh", {}, [], NEW, NEW, 0),
    ("append", {}, OLD, NEW, OLD + NEW, 0),
    ("append", {}, OLD, [], OLD, 0),
    ("append", {}, [], NEW, NEW, 0),
    ("merge", {}, OLD, NEW, [OLD[0], OLD[1], OLD[3], OLD[4], *NEW], 1),
    ("merge", {}, OLD, [], OLD, 0),
    ("merge", {}, [], NEW, NEW, 0),
    # A key that moves to another day leaves the day where it was.
    (
        "merge",
        {},
        OLD,
        [(at(20), 1, "moved"), (at(9), 5, "back")],
        [*OLD[1:4], (at(20), 1, "moved"), (at(9), 5, "back")],
        2,
    ),
    ("replace", {}, OLD, NEW, NEW, 5),
    ("replace", {}, OLD, [], [], 5),
    ("replace", DAILY, OLD, TODAY, [OLD[0], OLD[1], OLD[4], *TODAY], 2),
    ("replace", DAILY, OLD, [], [OLD[0], OLD[1], OLD[4]], 2),
    ("replace", DAILY, OLD[:2], TODAY, [*OLD[:2], *TODAY], 0),
    ("partition_replace", {}, OLD, NEW, [OLD[0], OLD[1], OLD[4], *NEW], 2),
    ("partition_replace", {}, OLD, [], OLD, 0),
    ("partition_replace", DAILY, OLD, TODAY, [OLD[0], OLD[1], OLD[4], *TODAY], 2),
    ("partition_replace", DAILY, OLD, [], [OLD[0], OLD[1], OLD[4]], 2),
]


@pytest.mark.parametrize(("strategy", "read", "before", "staged", "after", "went"), RESULTS)
def test_rows_by_hand(
    make: Callable[..., LoadCase],
    strategy: str,
    read: dict[str, Any],
    before: list[Row],
    staged: list[Row],
    after: list[Row],
    went: int,
) -> None:
    case = make(strategy, read=read)
    first = case.create(before)
    _, report = case.load(staged)
    assert case.rows() == Counter(after)
    assert (report.rows, report.rows_replaced, report.target_rows) == (len(staged), went, len(after))
    assert (report.target_uuid == first) == (strategy == "partition_replace")
    assert case.scratch() == []


@pytest.mark.parametrize("strategy", ["append", "merge", "replace", "partition_replace"])
def test_month_partitions_and_a_second_load(make: Callable[..., LoadCase], strategy: str) -> None:
    case = make(strategy)
    case.create([(at(9, 2), 1, "a"), (at(9), 2, "b"), (at(10), 3, "c")], partition_by="toYYYYMM(at)")
    case.load([(at(20), 3, "C"), (at(1, 4), 4, "d")])
    case.load([(at(21), 3, "CC")])
    expected: dict[str, list[Row]] = {
        "append": [
            (at(9, 2), 1, "a"),
            (at(9), 2, "b"),
            (at(10), 3, "c"),
            (at(20), 3, "C"),
            (at(1, 4), 4, "d"),
            (at(21), 3, "CC"),
        ],
        "merge": [(at(9, 2), 1, "a"), (at(9), 2, "b"), (at(1, 4), 4, "d"), (at(21), 3, "CC")],
        "replace": [(at(21), 3, "CC")],
        "partition_replace": [(at(9, 2), 1, "a"), (at(1, 4), 4, "d"), (at(21), 3, "CC")],
    }
    assert case.rows() == Counter(expected[strategy])


@pytest.mark.parametrize("strategy", ["full_refresh", "append", "merge", "replace", "partition_replace"])
@pytest.mark.parametrize("rows", [[], NEW])
def test_a_first_load_makes_the_target(make: Callable[..., LoadCase], strategy: str, rows: list[Row]) -> None:
    case = make(strategy, unique_key=("id",), partition_by="toYYYYMM(at)")
    _, report = case.load(rows)
    assert case.rows() == Counter(rows)
    assert (report.visibility, report.retry_safe, report.rows_replaced) == (Visibility.ATOMIC, True, 0)
    design = case.client.query(
        "SELECT engine, partition_key, sorting_key FROM system.tables WHERE database = {d:String} AND name = 'orders'",
        parameters={"d": case.database},
    ).result_rows
    assert design == [("MergeTree", "toYYYYMM(at)", "id")]
    assert case.scratch() == []


@pytest.mark.parametrize("strategy", ["full_refresh", "append", "merge", "replace", "partition_replace"])
@pytest.mark.parametrize("with_target", [True, False])
def test_staging_in_another_database(make: Callable[..., LoadCase], strategy: str, with_target: bool) -> None:
    case = make(strategy)
    case = replace(case, staging=f"{case.database}_ops")
    if with_target:
        case.create(OLD)
    try:
        sink = case.sink()
        staged = case.prepared(sink, NEW)
        assert {table["schema"] for table in staged.tables.values()} == {f"{case.database}_ops"}
        sink.finalize(case.process, staged)
        sink.cleanup(case.process, staged)
        expected = {
            "append": OLD + NEW,
            "merge": [OLD[0], OLD[1], OLD[3], OLD[4], *NEW],
            "partition_replace": [OLD[0], OLD[1], OLD[4], *NEW],
        }
        assert case.rows() == Counter(expected.get(strategy, NEW) if with_target else NEW)
        assert case.scratch() == []
    finally:
        case.sql(f"DROP DATABASE {case.database}_ops SYNC")


def test_merge_in_buckets(make: Callable[..., LoadCase], monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("merge")
    case.create([(at(1 + i % 28), i, "old") for i in range(100)])
    monkeypatch.setattr("resources.clickhouse.shadow.BUCKET_ROWS", 7)
    case.load([(at(1 + (i + 1) % 28), i, "new") for i in range(50, 120)])
    assert case.rows() == Counter(
        [(at(1 + i % 28), i, "old") for i in range(50)] + [(at(1 + (i + 1) % 28), i, "new") for i in range(50, 120)]
    )


def test_a_rebuilt_partition_keeps_its_repeated_rows_and_its_rows_without_a_time(make: Callable[..., LoadCase]) -> None:
    columns = (COLUMNS[0].model_copy(update={"nullable": True}), *COLUMNS[1:])
    case = make("replace", columns=columns, read=DAILY)
    before = [(None, 1, "no time"), (at(10), 2, "old"), (at(9), 3, "twice"), (at(9), 3, "twice")]
    case.create(before, partition_by="")
    case.load(TODAY)
    assert case.rows() == Counter([before[0], before[2], before[3], *TODAY])


def test_untouched_partitions_are_the_targets_own_parts(make: Callable[..., LoadCase]) -> None:
    case = make("merge")
    case.create(OLD)

    def parts() -> dict[str, str]:
        return dict(
            case.client.query(
                "SELECT partition_id, any(hash_of_all_files) FROM system.parts"
                " WHERE database = {d:String} AND table = 'orders' AND active GROUP BY partition_id",
                parameters={"d": case.database},
            ).result_rows
        )

    before = parts()
    staged, _ = case.load(TODAY)
    assert (staged.facts["touched_partitions"], staged.facts["untouched_by_parts"]) == (1, 2)
    after = parts()
    assert {key for key in before if before[key] != after[key]} == {"20240310"}


# -------------------------------------------------------------------------------------------------- refusals


def test_two_staged_rows_of_one_key(make: Callable[..., LoadCase]) -> None:
    case = make("merge")
    case.create(OLD)
    sink = case.sink()
    with pytest.raises(DponeError) as refused:
        case.prepared(sink, [*NEW, (at(9), 7, "again"), (at(9), 7, "and again")])
    assert (code(refused), refused.value.details["surplus_rows"]) == ("DPONE_KEY_NOT_UNIQUE", 2)
    assert case.rows() == Counter(OLD)


def test_null_in_a_key(make: Callable[..., LoadCase]) -> None:
    case = make("merge", unique_key=("note",))
    case.create(OLD)
    with pytest.raises(DponeError) as refused:
        case.prepared(case.sink(), [(at(10), 3, None), (at(10), 4, "x")])
    assert (code(refused), refused.value.details["rows"]) == ("DPONE_KEY_NULL", 1)
    # One in a partition that would be rebuilt could be lost, since NULL is in no share of the keys.
    with pytest.raises(DponeError) as refused:
        case.prepared(case.sink(), [(at(9), 3, "x")])
    assert (code(refused), refused.value.details["rows"]) == ("DPONE_KEY_NULL", 1)
    assert case.rows() == Counter(OLD)


def test_a_partition_wider_than_the_day(make: Callable[..., LoadCase]) -> None:
    case = make("partition_replace", read=DAILY)
    case.create(OLD, partition_by="toYYYYMM(at)")
    with pytest.raises(DponeError) as refused:
        case.prepared(case.sink(), TODAY)
    assert (code(refused), refused.value.details["rows"]) == ("DPONE_PARTITION_WIDER_THAN_SCOPE", 3)
    assert case.rows() == Counter(OLD)


@pytest.mark.parametrize("strategy", ["replace", "partition_replace"])
def test_staged_rows_of_another_day(make: Callable[..., LoadCase], strategy: str) -> None:
    case = make(strategy, read=DAILY)
    case.create(OLD)
    with pytest.raises(DponeError) as refused:
        case.prepared(case.sink(), NEW)
    assert (code(refused), refused.value.details["rows"]) == ("DPONE_STAGE_MISMATCH", 1)


REFUSED_TARGETS = [
    ("DPONE_TARGET_TTL", "ALTER TABLE $t MODIFY TTL toDateTime(at) + INTERVAL 100 YEAR"),
    (
        "DPONE_TARGET_READ_BY_VIEW",
        "CREATE MATERIALIZED VIEW {d}.mv ENGINE = MergeTree ORDER BY id AS SELECT id FROM $t",
    ),
    ("DPONE_TARGET_WRITTEN_BY_VIEW", "CREATE MATERIALIZED VIEW {d}.mv TO $t AS SELECT at, id, note FROM {d}.other"),
    ("DPONE_TARGET_COLUMNS", "ALTER TABLE $t ADD COLUMN more Int64"),
    ("DPONE_TARGET_COLUMNS", "ALTER TABLE $t DROP COLUMN note"),
    ("DPONE_TARGET_COLUMNS", "ALTER TABLE $t RENAME COLUMN note TO Note"),
]


@pytest.mark.parametrize(("wanted", "change"), REFUSED_TARGETS)
@pytest.mark.parametrize("when", ["stage", "prepare", "recheck"])
def test_a_target_that_an_exchange_would_harm(
    make: Callable[..., LoadCase], wanted: str, change: str, when: str
) -> None:
    case = make("append")
    case.create(OLD)
    case.sql(f"CREATE TABLE {case.database}.other AS $t")
    change = change.replace("{d}", case.database)
    sink = case.sink()
    if when == "stage":
        case.sql(change)
        with pytest.raises(DponeError) as refused:
            case.staged(sink, NEW)
        assert case.scratch() == sorted(["other", *(["mv"] if "mv" in change else []), *inner(case)])
    elif when == "prepare":
        staged = case.staged(sink, NEW)
        case.sql(change)
        with pytest.raises(DponeError) as refused:
            sink.prepare(case.process, case.columns, staged, case.window)
    else:
        staged = case.prepared(sink, NEW)
        case.sql(change)
        with pytest.raises(DponeError) as refused:
            sink.recheck(case.process, staged)
        wanted = "DPONE_TARGET_DESIGN_CHANGED"
        with pytest.raises(DponeError):
            sink.finalize(case.process, staged)
        assert sink.outcome(case.process, staged) == "NOT_COMMITTED"
    assert code(refused) == wanted


def inner(case: LoadCase) -> list[str]:
    return [name for name in case.scratch() if name.startswith(".inner")]


def test_other_engines_and_databases(make: Callable[..., LoadCase]) -> None:
    case = make("append")
    case.sql(
        "CREATE TABLE $t (at DateTime64(6,'UTC'), id Int64, note Nullable(String))"
        " ENGINE = ReplacingMergeTree ORDER BY id"
    )
    with pytest.raises(DponeError) as refused:
        case.staged(case.sink(), NEW)
    assert code(refused) == "DPONE_TARGET_ENGINE"
    memory = replace(case, staging=f"{case.database}_memory", name="fresh")
    case.sql(f"CREATE DATABASE {case.database}_memory ENGINE = Memory")
    try:
        with pytest.raises(DponeError) as refused:
            memory.staged(case.sink(), NEW)
        assert code(refused) == "DPONE_STAGING_DATABASE_ENGINE"
    finally:
        case.sql(f"DROP DATABASE {case.database}_memory SYNC")


def test_a_cluster_is_refused_before_anything_is_sent(make: Callable[..., LoadCase]) -> None:
    case = make("append", cluster="main")
    with pytest.raises(DponeError) as refused:
        case.staged(case.sink(), NEW)
    assert code(refused) == "DPONE_CLUSTER_UNAVAILABLE"
    assert case.scratch() == []


def test_constraints_of_the_target_are_checked_and_kept(make: Callable[..., LoadCase]) -> None:
    for strategy in ("full_refresh", "append", "merge", "partition_replace"):
        case = make(strategy, name=f"orders_{strategy}")
        case.create(OLD)
        case.sql("ALTER TABLE $t ADD CONSTRAINT positive CHECK id > 0")
        with pytest.raises(DponeError) as refused:
            case.prepared(case.sink(), [(at(10), -1, "bad")])
        assert code(refused) == "DPONE_ENGINE_REFUSED"
        assert case.rows() == Counter(OLD)
        case.load(NEW)
        assert "positive" in case.sql("SHOW CREATE TABLE $t")
        expected = {
            "full_refresh": NEW,
            "append": OLD + NEW,
            "merge": [OLD[0], OLD[1], OLD[3], OLD[4], *NEW],
            "partition_replace": [OLD[0], OLD[1], OLD[4], *NEW],
        }
        assert case.rows() == Counter(expected[strategy])


# ------------------------------------------------------------------------------------------------- strangers


WRITES: list[str] = [
    "INSERT INTO $t VALUES ('2024-03-09 00:00:00', 99, 'stranger')",
    "ALTER TABLE $t DELETE WHERE id = 5 SETTINGS mutations_sync = 1",
    "ALTER TABLE $t UPDATE note = 'x' WHERE id = 5 SETTINGS mutations_sync = 1",
    "DELETE FROM $t WHERE id = 5",
    "ALTER TABLE $t DROP PARTITION ID '20240311'",
    "TRUNCATE TABLE $t",
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(("strategy", "read"), [("append", {}), ("merge", {}), ("partition_replace", DAILY)])
def test_a_stranger_between_prepare_and_finalize(
    make: Callable[..., LoadCase], write: str, strategy: str, read: dict[str, Any]
) -> None:
    case = make(strategy, read=read)
    case.create(OLD)
    sink = case.sink()
    staged = case.prepared(sink, TODAY)
    sink.recheck(case.process, staged)
    case.sql(write)
    theirs = case.rows()
    for refuse in (sink.recheck, sink.finalize):
        with pytest.raises(DponeError) as refused:
            refuse(case.process, staged)
        assert code(refused) == "DPONE_TARGET_CHANGED"
    assert case.rows() == theirs
    # Prepared anew, the stranger's change is kept.
    again = case.prepare_again(sink, staged)
    sink.finalize(case.process, again)
    keeps = Counter(r for r in theirs.elements() if strategy == "append" or r[0].date() != DAY or r[1] == 4)
    if strategy == "partition_replace":
        keeps = Counter(r for r in keeps.elements() if r[0].date() != DAY)
    assert case.rows() == keeps + Counter(TODAY)
    sink.cleanup(case.process, again)
    assert case.scratch() == []


def test_merges_change_nothing_of_it(make: Callable[..., LoadCase]) -> None:
    case = make("append")
    case.create(OLD)
    case.insert([(at(9), 8, "h")])
    sink = case.sink()
    staged = case.prepared(sink, NEW)
    case.sql("OPTIMIZE TABLE $t FINAL")
    sink.finalize(case.process, staged)
    assert case.rows() == Counter([*OLD, (at(9), 8, "h"), *NEW])


def test_a_replaced_target(make: Callable[..., LoadCase]) -> None:
    case = make("append")
    case.create(OLD)
    sink = case.sink()
    staged = case.prepared(sink, NEW)
    case.sql("DROP TABLE $t SYNC")
    for act in (sink.recheck, sink.finalize):
        with pytest.raises(DponeError) as refused:
            act(case.process, staged)
        assert code(refused) == "DPONE_TARGET_REPLACED"
    case.create([(at(1), 100, "another")])
    with pytest.raises(DponeError) as refused:
        sink.prepare(case.process, case.columns, staged, case.window)
    assert code(refused) == "DPONE_TARGET_REPLACED"
    assert sink.outcome(case.process, staged) == "NOT_COMMITTED"
    sink.cleanup(case.process, staged)
    assert case.rows() == Counter([(at(1), 100, "another")])
    assert case.scratch() == []


def test_a_first_load_that_somebody_else_was_faster_with(make: Callable[..., LoadCase]) -> None:
    case = make("append")
    sink = case.sink()
    staged = case.prepared(sink, NEW)
    case.create(OLD)
    with pytest.raises(DponeError) as refused:
        sink.finalize(case.process, staged)
    assert code(refused) == "DPONE_TARGET_REPLACED"
    with pytest.raises(DponeError):
        sink._statements.run(staged_sink.Ddl().rename(staged_sink._table(staged, "shadow"), case_table(case)))
    assert sink.outcome(case.process, staged) == "NOT_COMMITTED"
    assert case.rows() == Counter(OLD)


def case_table(case: LoadCase) -> staged_sink.Table:
    return staged_sink.Table(schema_name=case.database, name=case.name)


def test_a_tampered_shadow(make: Callable[..., LoadCase]) -> None:
    case = make("append")
    case.create(OLD)
    sink = case.sink()
    staged = case.prepared(sink, NEW)
    shadow = f"{case.database}.`{staged.tables['shadow']['name']}`"
    case.sql(f"INSERT INTO {shadow} VALUES ('2024-03-09 00:00:00', 99, 'stranger')")
    with pytest.raises(DponeError) as refused:
        sink.finalize(case.process, staged)
    assert code(refused) == "DPONE_PROOF_FAILED"
    case.sql(f"DROP TABLE {shadow} SYNC")
    with pytest.raises(DponeError) as refused:
        sink.finalize(case.process, staged)
    assert code(refused) == "DPONE_SHADOW_LOST"
    assert case.rows() == Counter(OLD)


def test_a_shadow_that_lacks_a_row_is_not_proven(
    make: Callable[..., LoadCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make("merge")
    case.create(OLD)
    build = finalizers._staying
    monkeypatch.setattr(finalizers, "_staying", lambda *a: build(*a) + " AND id != 4")
    with pytest.raises(DponeError) as refused:
        case.prepared(case.sink(), NEW)
    assert (code(refused), refused.value.details) == ("DPONE_PROOF_FAILED", {"expected_rows": 7, "observed_rows": 6})


# ------------------------------------------------------------------------------------------ lost answers


class Unreachable:
    """A client that loses one statement, before or after it took effect."""

    def __init__(self, client: ClickHouseClient, word: str, *, after: bool, at: int = 1) -> None:
        self._client, self._word, self._after, self._left = client, word, after, at

    def command(self, sql: str, **kwargs: Any) -> Any:
        if self._word in sql:
            self._left -= 1
            if self._left == 0:
                if self._after:
                    self._client.command(sql, **kwargs)
                raise DponeError("DPONE_ENGINE_UNAVAILABLE", "ClickHouse did not answer (test).")
        return self._client.command(sql, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


EXCHANGED = ["full_refresh", "append", "merge", "replace"]


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("strategy", EXCHANGED)
@pytest.mark.parametrize("first", [True, False])
def test_an_answer_lost_round_the_exchange(
    make: Callable[..., LoadCase], strategy: str, after: bool, first: bool
) -> None:
    case = make(strategy)
    if not first:
        case.create(OLD)
    broken: Any = Unreachable(case.client, "RENAME TABLE" if first else "EXCHANGE TABLES", after=after)
    sink = case.sink(broken)
    staged = case.prepared(sink, NEW)
    with pytest.raises(DponeError) as lost:
        sink.finalize(case.process, staged)
    assert code(lost) == "DPONE_ENGINE_UNAVAILABLE"
    heir = case.sink()
    assert heir.outcome(case.process, staged) == ("COMMITTED" if after else "NOT_COMMITTED")
    if not after:
        assert (case.uuid() == "") if first else (case.rows() == Counter(OLD))
        before, staged = staged, case.prepare_again(heir, staged)
        # What the dead sent arrives late and finds no table.
        with pytest.raises(DponeError):
            heir._statements.run(staged_sink.Ddl().exchange(case_table(case), staged_sink._table(before, "shadow")))
        heir.finalize(case.process, staged)
        assert heir.outcome(case.process, staged) == "COMMITTED"
    else:
        with pytest.raises(DponeError):
            heir.finalize(case.process, staged)  # it would swap back
    expected = {"append": OLD + NEW, "merge": [OLD[0], OLD[1], OLD[3], OLD[4], *NEW]}
    assert case.rows() == Counter(NEW if first else expected.get(strategy, NEW))
    heir.cleanup(case.process, staged)
    assert case.scratch() == []
    assert case.rows() == Counter(NEW if first else expected.get(strategy, NEW))


@pytest.mark.parametrize(
    ("at_", "after", "wanted"),
    [(1, False, "NOT_COMMITTED"), (1, True, "UNKNOWN"), (2, False, "UNKNOWN"), (2, True, "COMMITTED")],
)
def test_an_answer_lost_between_partitions(make: Callable[..., LoadCase], at_: int, after: bool, wanted: str) -> None:
    case = make("partition_replace")
    case.create(OLD)
    broken: Any = Unreachable(case.client, "REPLACE PARTITION", after=after, at=at_)
    sink = case.sink(broken)
    staged = case.prepared(sink, NEW)  # the days 10 and 12
    with pytest.raises(DponeError):
        sink.finalize(case.process, staged)
    heir = case.sink()
    assert heir.outcome(case.process, staged) == wanted
    for _ in range(2):  # forward, and once more
        heir.finalize(case.process, staged)
        assert heir.outcome(case.process, staged) == "COMMITTED"
        assert case.rows() == Counter([OLD[0], OLD[1], OLD[4], *NEW])
    case.sql("OPTIMIZE TABLE $t FINAL")
    assert heir.outcome(case.process, staged) == "COMMITTED"
    heir.cleanup(case.process, staged)
    assert case.scratch() == []


@pytest.mark.parametrize("after", [True, False])
def test_an_answer_lost_while_an_emptied_day_goes(make: Callable[..., LoadCase], after: bool) -> None:
    case = make("partition_replace", read=DAILY)
    case.create(OLD)
    broken: Any = Unreachable(case.client, "MOVE PARTITION", after=after)
    sink = case.sink(broken)
    staged = case.prepared(sink, [])
    with pytest.raises(DponeError):
        sink.finalize(case.process, staged)
    heir = case.sink()
    assert heir.outcome(case.process, staged) == ("COMMITTED" if after else "NOT_COMMITTED")
    heir.finalize(case.process, staged)
    assert heir.outcome(case.process, staged) == "COMMITTED"
    assert case.rows() == Counter([OLD[0], OLD[1], OLD[4]])
    heir.cleanup(case.process, staged)
    assert case.scratch() == []


def test_strangers_in_a_touched_partition_leave_the_outcome_unknown(make: Callable[..., LoadCase]) -> None:
    case = make("partition_replace")
    case.create(OLD)
    sink = case.sink()
    staged = case.prepared(sink, NEW)
    sink.finalize(case.process, staged)
    case.sql("INSERT INTO $t VALUES ('2024-03-10 00:00:00', 99, 'stranger')")
    assert sink.outcome(case.process, staged) == "UNKNOWN"
    with pytest.raises(DponeError) as refused:
        sink.finalize(case.process, staged)
    assert code(refused) == "DPONE_TARGET_CHANGED"


def test_an_engine_that_cannot_be_asked(make: Callable[..., LoadCase]) -> None:
    case = make("append")
    case.create(OLD)
    staged = case.prepared(case.sink(), NEW)

    class Gone(Unreachable):
        def query(self, *args: Any, **kwargs: Any) -> Any:
            raise DponeError("DPONE_ENGINE_UNAVAILABLE", "ClickHouse did not answer (test).")

    gone: Any = Gone(case.client, "", after=False)
    assert case.sink(gone).outcome(case.process, staged) is FinalizeOutcome.UNKNOWN


def test_nothing_prepared_is_not_committed(make: Callable[..., LoadCase]) -> None:
    case = make("append")
    sink = case.sink()
    assert sink.outcome(case.process, case.staged(sink, NEW)) == "NOT_COMMITTED"


# --------------------------------------------------------------------------------------------------- readers


@pytest.mark.parametrize(
    ("strategy", "other_database"), [("full_refresh", False), ("append", True), ("merge", False), ("replace", True)]
)
def test_readers_see_before_or_after(
    make: Callable[..., LoadCase], engines: Engines, strategy: str, other_database: bool
) -> None:
    case = make(strategy)
    if other_database:
        case = replace(case, staging=f"{case.database}_ops")
    case.create([(at(1 + i % 20), i, "old") for i in range(1000)])
    fresh: list[Row] = [(at(1 + i % 20), i, "new") for i in range(500, 2100)]
    after = {"append": 2600, "merge": 2100}.get(strategy, 1600)
    seen: set[tuple[int, int]] = set()
    stop = threading.Event()

    def read() -> None:
        client = connect(engines.clickhouse)
        while not stop.is_set():
            seen.add(tuple(client.query(f"SELECT count(), countIf(note = 'new') FROM {case.table}").result_rows[0]))
        client.close()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        sink = case.sink()
        staged = case.prepared(sink, fresh)
        assert seen <= {(1000, 0)}
        sink.finalize(case.process, staged)
        sink.cleanup(case.process, staged)
        until = time.monotonic() + 20
        while (after, 1600) not in seen and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        stop.set()
        reader.join()
        if other_database:
            case.sql(f"DROP DATABASE {case.database}_ops SYNC")
    assert seen == {(1000, 0), (after, 1600)}
    assert len(case.rows()) == (2600 if strategy == "append" else after)


def test_what_each_strategy_promises() -> None:
    for strategy in EXCHANGED:
        assert (describe(strategy).visibility, describe(strategy).retry_safe) == ("atomic", True)
    assert (describe("partition_replace").visibility, describe("partition_replace").retry_safe) == (
        "per_partition",
        True,
    )
    assert (describe("append", legacy=True).visibility, describe("append", legacy=True).retry_safe) == (
        "partial",
        False,
    )


# --------------------------------------------------------------------------------------------------- cleanup


@pytest.mark.parametrize("strategy", ["append", "partition_replace"])
def test_cleanup_before_a_finalize_leaves_the_target(make: Callable[..., LoadCase], strategy: str) -> None:
    case = make(strategy)
    uuid = case.create(OLD)
    sink = case.sink()
    staged = case.prepared(sink, NEW)
    for _ in range(2):
        sink.cleanup(case.process, staged)
        assert (case.scratch(), case.uuid(), case.rows()) == ([], uuid, Counter(OLD))


def test_cleanup_drops_what_was_never_recorded(make: Callable[..., LoadCase]) -> None:
    case = make("append")
    case.create(OLD)
    sink = case.sink()
    staged = case.prepared(sink, NEW)
    case.prepared(sink, NEW)  # another load's
    others = set(case.scratch())
    sink.cleanup(case.process, replace(staged, tables={}, facts={}))
    assert len(others) == 4
    assert set(case.scratch()) == others - {table["name"] for table in staged.tables.values()}


def test_a_manifest_that_moves_meanwhile_changes_nothing_of_a_staged_load(make: Callable[..., LoadCase]) -> None:
    case = make("append")
    case.create(OLD)
    sink = case.sink()
    staged = case.prepared(sink, NEW)
    moved = replace(case, name="elsewhere", staging=f"{case.database}_ops")
    for act in (sink.recheck, sink.finalize):
        with pytest.raises(DponeError) as refused:
            act(moved.process, staged)
        assert code(refused) == "DPONE_TARGET_REPLACED"
    sink.finalize(case.process, staged)
    assert sink.outcome(moved.process, staged) == "COMMITTED"
    assert sink.report(moved.process, case.columns, staged).target_rows == 8
    sink.cleanup(moved.process, staged)
    assert case.scratch() == []
    assert case.rows() == Counter(OLD + NEW)


def test_cleanup_leaves_a_strangers_table_alone(make: Callable[..., LoadCase]) -> None:
    case = make("append")
    case.create(OLD)
    sink = case.sink()
    staged = case.prepared(sink, NEW)
    name = staged.tables["stage"]["name"]
    case.sql(f"DROP TABLE {case.database}.`{name}` SYNC")
    case.sql(f"CREATE TABLE {case.database}.`{name}` (x Int8) ENGINE = Memory")
    with pytest.raises(DponeError) as refused:
        sink.cleanup(case.process, staged)
    assert code(refused) == "DPONE_TABLE_REPLACED"
    assert name in case.scratch()


def test_cleanup_keeps_the_last_copy(make: Callable[..., LoadCase]) -> None:
    case = make("append")
    case.create(OLD)
    sink = case.sink()
    staged = case.prepared(sink, NEW)
    sink.finalize(case.process, staged)
    case.sql("DROP TABLE $t SYNC")
    with pytest.raises(DponeError) as refused:
        sink.cleanup(case.process, staged)
    assert code(refused) == "DPONE_TABLE_REPLACED"
    assert staged.tables["shadow"]["name"] in case.scratch()


def test_rows_that_arrive_in_the_exchanged_table_are_kept(make: Callable[..., LoadCase]) -> None:
    case = make("append")
    case.create(OLD)
    sink = case.sink()
    staged = case.prepared(sink, NEW)
    sink.finalize(case.process, staged)
    replaced = f"{case.database}.`{staged.tables['shadow']['name']}`"
    case.sql(f"OPTIMIZE TABLE {replaced} FINAL")
    case.sql(f"INSERT INTO {replaced} VALUES ('2024-03-09 00:00:00', 99, 'late')")
    assert sink.outcome(case.process, staged) == "COMMITTED"
    for _ in range(2):
        with pytest.raises(DponeError) as refused:
            sink.cleanup(case.process, staged)
        assert code(refused) == "DPONE_TARGET_CHANGED"
    assert int(case.sql(f"SELECT count() FROM {replaced} WHERE note = 'late'")) == 1
    case.sql(f"INSERT INTO $t SELECT * FROM {replaced} WHERE note = 'late'")
    case.sql(f"DROP TABLE {replaced} SYNC")
    sink.cleanup(case.process, staged)
    assert case.scratch() == []


def test_merges_run_again_after_cleanup(make: Callable[..., LoadCase]) -> None:
    case = make("append")
    case.create(OLD)
    case.load([(at(9), 8, "h")])

    def parts() -> int:
        return int(
            case.sql(
                f"SELECT count() FROM system.parts WHERE database = '{case.database}' AND table = 'orders' AND active"
                " AND partition_id = '20240309'"
            )
        )

    assert parts() == 2
    case.sql("OPTIMIZE TABLE $t FINAL")
    assert parts() == 1


def test_statements_of_the_load_are_ended(make: Callable[..., LoadCase], engines: Engines) -> None:
    case = make("append")
    sink = case.sink()
    slow = Statements(connect(engines.clickhouse), sink.query_prefix)
    ended = threading.Event()

    def run() -> None:
        with contextlib.suppress(DponeError):
            slow.rows("SELECT sum(sleepEachRow(0.5)) FROM numbers(100) SETTINGS max_block_size = 1")
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    mine = f"SELECT count() FROM system.processes WHERE startsWith(Settings['log_comment'], '{sink.query_prefix}')"
    while not int(case.sql(mine)):
        pass
    sink.quiesce(case.staged(case.sink(), NEW))
    assert ended.wait(20)
    thread.join()
