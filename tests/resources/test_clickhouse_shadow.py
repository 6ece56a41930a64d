"""Shadow, proof and exchange on the real engine, against a merge done by hand."""

import contextlib
import threading
import time
from dataclasses import replace
from datetime import date, timedelta

import pytest
from clickhouse_case import DAY, SCOPE, Case, Row, digest_by_hand, merged, row

from dpone_dagster.errors import DponeError
from resources.clickhouse import shadow as shadows
from resources.clickhouse.client import ClickHouseClient, connect
from resources.clickhouse.statements import Statements
from resources.embedded.engines import Engines

DAYS = [DAY + timedelta(days=n) for n in range(-12, 3)]
OLD = [row(day, i) for day in DAYS for i in range(20)]
# The day again: ids 0-4 as they were, 5-19 with other values, and ten new ones.
AFTER = [row(DAY, i) for i in range(5)] + [row(DAY, i, qty=None, note="new") for i in range(5, 30)]
MARCH = sum(d.month == 3 for d in DAYS)


def _case(client: ClickHouseClient, database: str, partition_by: str = "day") -> Case:
    return Case(client=client, database=database, partition_by=partition_by)


@pytest.mark.parametrize(
    ("partition_by", "touched_rows", "untouched"),
    [("day", 30, len(DAYS) - 1), ("month", MARCH * 20 + 10, 1), ("none", len(DAYS) * 20 + 10, 0)],
)
def test_shadow_is_old_rows_without_staged_keys_plus_staging(
    clickhouse: ClickHouseClient, ch_database: str, partition_by: str, touched_rows: int, untouched: int
) -> None:
    case = _case(clickhouse, ch_database, partition_by)
    design = case.create(OLD)
    case.staged(AFTER)
    before = case.parts("sales")

    report = case.build(design)
    proof = case.prove(design, AFTER)

    assert case.rows("sales__shadow") == merged(OLD, AFTER)
    assert case.rows() == merged(OLD, [])  # nothing a reader can see changed
    assert (report.touched_partitions, report.untouched_partitions) == (1, untouched)
    assert report.uuid == case.publisher.uuid(case.shadow)
    assert proof.touched_multiset_rows == touched_rows
    assert (proof.untouched_partitions_by_parts, proof.untouched_partitions_by_digest) == (untouched, 0)
    assert proof.scope == digest_by_hand(AFTER)
    assert proof.total_rows == len(OLD) + 10
    # Untouched partitions are the very same parts.
    shadow = case.parts("sales__shadow")
    touched = {p for p, _, _ in before} & {p for p, _, _ in shadow - before}
    assert len(touched) == 1
    assert {x for x in before if x[0] not in touched} == {x for x in shadow if x[0] not in touched}


def test_a_first_day_into_an_empty_target(clickhouse: ClickHouseClient, ch_database: str) -> None:
    case = _case(clickhouse, ch_database)
    design = case.create()
    case.staged(AFTER)
    assert case.build(design).untouched_parts == 0
    assert case.prove(design, AFTER).total_rows == 30
    assert case.rows("sales__shadow") == merged([], AFTER)


def test_a_new_day_beside_others_touches_none_of_them(clickhouse: ClickHouseClient, ch_database: str) -> None:
    case = _case(clickhouse, ch_database)
    old = [r for r in OLD if r[0].date() != DAY]
    design = case.create(old)
    case.staged(AFTER)
    report = case.build(design)
    assert (report.untouched_partitions, report.untouched_parts) == (len(DAYS) - 1, len(DAYS) - 1)
    proof = case.prove(design, AFTER)
    assert case.rows("sales__shadow") == merged(old, AFTER)
    # Nothing stays in a day that the target does not have: the staged parts are the day, and no row is copied.
    assert (proof.touched_partitions_by_parts, proof.touched_multiset_rows) == (1, 0)
    assert case.parts("sales__shadow") == case.parts("sales") + case.parts("sales__stage")


def test_staged_days_old_and_new_side_by_side(clickhouse: ClickHouseClient, ch_database: str) -> None:
    """Rows of two days, as only a broken writer stages them: one day is rebuilt, the other one is staging's parts."""
    case = _case(clickhouse, ch_database)
    yesterday = DAY - timedelta(days=1)
    old = [r for r in OLD if r[0].date() != DAY]
    case.create(old)
    staged = [*AFTER, row(yesterday, 3, note="new")]
    case.staged(staged)
    assert case.build(case.design()).touched_partitions == 2
    assert case.rows("sales__shadow") == merged(old, staged)
    with pytest.raises(DponeError) as refused:
        case.prove(case.design(), AFTER)
    assert refused.value.code == "DPONE_STAGE_MISMATCH"


def test_empty_staging_over_an_empty_day(clickhouse: ClickHouseClient, ch_database: str) -> None:
    case = _case(clickhouse, ch_database)
    old = [r for r in OLD if r[0].date() != DAY]
    design = case.create(old)
    case.staged([])
    assert case.build(design).touched_partitions == 0
    proof = case.prove(design, [])
    assert (proof.touched_multiset_rows, proof.scope.rows) == (0, 0)
    assert case.rows("sales__shadow") == merged(old, [])


def test_empty_staging_over_a_day_with_rows_is_divergence(clickhouse: ClickHouseClient, ch_database: str) -> None:
    case = _case(clickhouse, ch_database)
    design = case.create(OLD)
    case.staged([])
    case.build(design)
    with pytest.raises(DponeError) as refused:
        case.prove(design, [])
    assert refused.value.code == "DPONE_TARGET_DIVERGED"


def test_duplicates_of_old_rows_keep_their_number(clickhouse: ClickHouseClient, ch_database: str) -> None:
    """The engine has no unique keys: a target may hold one row twice, and it must stay so outside the day."""
    case = _case(clickhouse, ch_database, "month")
    other = date(2024, 3, 2)
    old = [row(other, 1), row(other, 1), row(other, 1), row(DAY, 1)]
    design = case.create(old)
    case.staged(AFTER)
    case.build(design)
    case.prove(design, AFTER)
    assert case.rows("sales__shadow") == merged(old, AFTER)
    assert case.rows("sales__shadow")[row(other, 1)] == 3


def test_lightweight_deleted_rows_stay_deleted(clickhouse: ClickHouseClient, ch_database: str) -> None:
    """In an untouched partition (attached with its mask) and in the touched one (rebuilt without the row)."""
    case = _case(clickhouse, ch_database)
    yesterday = DAY - timedelta(days=1)
    case.create(OLD)
    case.sql(f"DELETE FROM $t WHERE toDate(at) = '{yesterday}' AND id IN (3, 4)")
    case.sql(f"DELETE FROM $t WHERE toDate(at) = '{DAY}' AND id = 19")
    old = [
        r for r in OLD if not (r[0].date() == yesterday and r[1] in (3, 4)) and not (r[0].date() == DAY and r[1] == 19)
    ]
    after = [r for r in AFTER if r[1] != 19]
    design = case.design()
    case.staged(after)
    case.build(design)
    proof = case.prove(design, after)
    assert case.rows("sales__shadow") == merged(old, after)
    assert proof.untouched_partitions_by_digest == 0
    assert proof.total_rows == len(old) + 10


def test_the_next_generation_keeps_the_whole_physical_design(clickhouse: ClickHouseClient, ch_database: str) -> None:
    case = _case(clickhouse, ch_database)
    case.create()
    case.sql("ALTER TABLE $t MODIFY COLUMN note CODEC(ZSTD(3))")
    case.sql("ALTER TABLE $t ADD INDEX by_qty qty TYPE minmax GRANULARITY 2")
    case.sql("ALTER TABLE $t ADD PROJECTION by_id (SELECT id, amount ORDER BY id)")
    case.sql("ALTER TABLE $t ADD CONSTRAINT positive CHECK id >= 0")
    case.sql("ALTER TABLE $t MODIFY SETTING min_bytes_for_wide_part = 0")
    case.insert(OLD)
    design = case.design()
    assert design.detail["skipping_indices"] == [["by_qty", "minmax", "qty", 2]]
    assert [p[0] for p in design.detail["projections"]] == ["by_id"]
    assert design.detail["constraints"] == [["positive", "CHECK", "id >= 0"]]
    assert "ZSTD(3)" in next(c for c in design.detail["columns"] if c[0] == "note")[4]
    case.publisher.check_design(case.mart, design)
    case.staged(AFTER)
    case.build(design)
    case.prove(design, AFTER)
    shadow = case.publisher.design(case.shadow)
    assert shadow is not None
    assert shadow.sha256 == design.sha256
    assert shadow.uuid != design.uuid


@pytest.mark.parametrize("old", [OLD, []], ids=["rebuilt", "fresh"])
def test_a_staged_row_that_breaks_a_constraint_is_refused(
    clickhouse: ClickHouseClient, ch_database: str, old: list[Row]
) -> None:
    case = _case(clickhouse, ch_database)
    case.create(old)
    case.sql("ALTER TABLE $t ADD CONSTRAINT small CHECK id < 25")
    case.staged(AFTER)
    with pytest.raises(DponeError) as refused:
        case.build(case.design())
    assert refused.value.code == "DPONE_ENGINE_REFUSED"
    assert refused.value.details["number"] == 469
    assert "25" not in str(refused.value)


@pytest.mark.parametrize("bucket_rows", [7, 1_000_000])
def test_buckets_change_nothing(
    clickhouse: ClickHouseClient, ch_database: str, monkeypatch: pytest.MonkeyPatch, bucket_rows: int
) -> None:
    monkeypatch.setattr(shadows, "BUCKET_ROWS", bucket_rows)
    assert len(shadows.buckets(_case(clickhouse, ch_database).mart.key, 30)) == (5 if bucket_rows == 7 else 1)
    assert len(shadows.buckets(_case(clickhouse, ch_database).mart.key, 10**9)) == 32
    case = _case(clickhouse, ch_database)
    design = case.create(OLD)
    case.staged(AFTER)
    case.build(design)
    assert case.prove(design, AFTER).touched_multiset_rows == 30
    assert case.rows("sales__shadow") == merged(OLD, AFTER)


def test_a_leftover_shadow_is_built_anew(clickhouse: ClickHouseClient, ch_database: str) -> None:
    case = _case(clickhouse, ch_database)
    design = case.create(OLD)
    case.staged(AFTER)
    first = case.build(design)
    case.sql("INSERT INTO $s SELECT * FROM $t")  # as an attempt that died half-way might leave it
    second = case.build(design)
    assert first.uuid != second.uuid
    case.prove(design, AFTER)
    assert case.rows("sales__shadow") == merged(OLD, AFTER)


def test_an_attach_of_unknown_outcome_is_never_repeated_on_the_same_table(
    clickhouse: ClickHouseClient, ch_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The acknowledgement of the first ATTACH is lost after its effect."""
    case = _case(clickhouse, ch_database)
    design = case.create(OLD)
    case.staged(AFTER)
    run, attached = Statements.run, []

    def lossy(self: Statements, sql: str, **settings: object) -> None:
        run(self, sql, **settings)
        if "ATTACH PARTITION" in sql:
            attached.append(self.find_uuid(case.shadow))
            if len(attached) == 1:
                raise DponeError("DPONE_ENGINE_UNAVAILABLE", "lost")

    monkeypatch.setattr(Statements, "run", lossy)
    report = case.build(design)
    assert len(set(attached)) == 2
    assert report.uuid == attached[1]
    case.prove(design, AFTER)
    assert case.rows("sales__shadow") == merged(OLD, AFTER)


def test_a_repeated_attach_ends_its_own_attempts_statements_only(
    clickhouse: ClickHouseClient, engines: Engines, ch_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = _case(clickhouse, ch_database)
    design = case.create(OLD)
    case.staged(AFTER)
    others = connect(replace(engines.clickhouse, database=ch_database))
    neighbour = _case(others, ch_database).publisher
    prefixes = (case.publisher.query_prefix, neighbour.query_prefix)

    def slow(prefix: str) -> None:
        with contextlib.suppress(DponeError):
            Statements(others, prefix).rows(
                "SELECT sum(sleepEachRow(0.1)) FROM numbers(300) SETTINGS max_block_size = 1"
            )

    def running() -> list[bool]:
        found = clickhouse.query("SELECT Settings['log_comment'] FROM system.processes").result_rows
        return [any(row[0].startswith(prefix) for row in found) for prefix in prefixes]

    threads = [threading.Thread(target=slow, args=(prefix,)) for prefix in prefixes]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    while not all(running()) and time.monotonic() < until:
        time.sleep(0.02)
    run, refused = Statements.run, []

    def refusing(self: Statements, sql: str, **settings: object) -> None:
        if "ATTACH PARTITION" in sql and not refused:
            refused.append(sql)
            raise DponeError("DPONE_ENGINE_UNAVAILABLE", "lost")
        run(self, sql, **settings)

    monkeypatch.setattr(Statements, "run", refusing)
    case.build(design)
    assert refused
    assert running() == [False, True]
    neighbour.quiesce(neighbour.query_prefix)
    for thread in threads:
        thread.join(20)
    assert running() == [False, False]
    others.close()


def test_a_replaced_target_is_refused_before_anything_is_built(clickhouse: ClickHouseClient, ch_database: str) -> None:
    case = _case(clickhouse, ch_database)
    design = case.create(OLD)
    case.staged(AFTER)
    case.sql("CREATE TABLE $s AS $t")
    case.sql("EXCHANGE TABLES $t AND $s")
    with pytest.raises(DponeError) as refused:
        case.build(design)
    assert refused.value.code == "DPONE_TARGET_REPLACED"
    assert case.publisher.uuid(case.shadow) == design.uuid  # the live generation was not dropped as a leftover


def test_merges_stay_stopped_on_the_shadow_until_started(clickhouse: ClickHouseClient, ch_database: str) -> None:
    case = _case(clickhouse, ch_database)
    two_parts: list[list[Row]] = [[r for r in OLD if r[1] < 10], [r for r in OLD if r[1] >= 10]]
    case.create(two_parts[0])
    case.insert(two_parts[1])
    design = case.design()
    case.staged(AFTER)
    case.build(design)
    case.prove(design, AFTER)
    with pytest.raises(DponeError):
        case.sql("OPTIMIZE TABLE $s FINAL")
    case.publisher.exchange(case.mart.target, case.shadow)
    with pytest.raises(DponeError):
        case.sql("OPTIMIZE TABLE $t FINAL")  # the stop follows the UUID
    case.publisher.start_merges(case.mart.target)
    case.sql("OPTIMIZE TABLE $t FINAL")
    assert case.rows() == merged(OLD, AFTER)
    assert case.publisher.count(case.mart.target, case.mart, SCOPE) == 30
