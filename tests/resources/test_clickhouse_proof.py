"""What a proof must not let through: every way in which a shadow can be wrong, done to the real tables."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal

import pytest
from clickhouse_case import DAY, Case, merged, row

from dpone_dagster.errors import DponeError
from resources.clickhouse.client import ClickHouseClient
from resources.clickhouse.statements import Statements

YESTERDAY = DAY - timedelta(days=1)
OLD = [row(day, i) for day in (DAY - timedelta(days=2), YESTERDAY, DAY) for i in range(12)]
AFTER = [row(DAY, i, note="s3cret") for i in range(12)]


@pytest.fixture
def case(clickhouse: ClickHouseClient, ch_database: str) -> Case:
    """A shadow that is right, so that each test breaks one thing."""
    case = Case(client=clickhouse, database=ch_database)
    case.create(OLD)
    case.staged(AFTER)
    case.build(case.design())
    return case


def _refusal(case: Case, after: list[tuple[object, ...]] = AFTER) -> str:
    design = case.design()
    with pytest.raises(DponeError) as refused:
        case.prove(design, after)
    assert "s3cret" not in str(refused.value)  # no row value leaves
    return refused.value.code


def _change(case: Case, day: str, column: str, expression: str, where: str) -> None:
    """Change values in the shadow without a mutation: take the rows out and put them back changed."""
    case.sql("CREATE TABLE $g2 AS $s".replace("$g2", f"{case.database}.scratch"))
    case.sql(f"INSERT INTO {case.database}.scratch SELECT * FROM $s WHERE _partition_id = '{day}'")
    case.sql(f"ALTER TABLE $s DROP PARTITION ID '{day}'")
    case.sql(
        f"INSERT INTO $s SELECT * REPLACE (if({where}, {expression}, {column}) AS {column})"
        f" FROM {case.database}.scratch"
    )


TODAY_ID, YESTERDAY_ID = f"{DAY:%Y%m%d}", f"{YESTERDAY:%Y%m%d}"
STRANGERS = [
    pytest.param("sales__shadow", DAY, id="shadow-touched"),
    pytest.param("sales__shadow", YESTERDAY, id="shadow-untouched"),
    pytest.param("sales__shadow", DAY + timedelta(days=9), id="shadow-new-partition"),
    pytest.param("sales", DAY, id="target-touched"),
    pytest.param("sales", YESTERDAY, id="target-untouched"),
    pytest.param("sales", DAY + timedelta(days=9), id="target-new-partition"),
]


@pytest.mark.parametrize(("table", "day"), STRANGERS)
def test_a_strangers_row(case: Case, table: str, day: object) -> None:
    case.insert([row(day, 500)], table)  # type: ignore[arg-type]
    assert _refusal(case) == "DPONE_PROOF_FAILED"


@pytest.mark.parametrize("partition", [TODAY_ID, YESTERDAY_ID])
def test_a_row_twice(case: Case, partition: str) -> None:
    case.sql(f"INSERT INTO $s SELECT * FROM $s WHERE _partition_id = '{partition}' AND id = 1")
    assert _refusal(case) == "DPONE_PROOF_FAILED"


@pytest.mark.parametrize("partition", [TODAY_ID, YESTERDAY_ID])
def test_a_lost_row(case: Case, partition: str) -> None:
    case.sql("SYSTEM START MERGES $s")
    case.sql(f"DELETE FROM $s WHERE _partition_id = '{partition}' AND id = 1")
    assert _refusal(case) == "DPONE_PROOF_FAILED"


@pytest.mark.parametrize("partition", [TODAY_ID, YESTERDAY_ID])
def test_a_lost_partition(case: Case, partition: str) -> None:
    case.sql(f"ALTER TABLE $s DROP PARTITION ID '{partition}'")
    assert _refusal(case) == "DPONE_PROOF_FAILED"


def test_a_doubled_attach(case: Case) -> None:
    case.sql(f"ALTER TABLE $s ATTACH PARTITION ID '{YESTERDAY_ID}' FROM $t")
    assert _refusal(case) == "DPONE_PROOF_FAILED"


@pytest.mark.parametrize(
    ("column", "expression", "where"),
    [
        pytest.param("amount", "amount + 0.0001", "id = 4", id="last-digit"),
        pytest.param("returned", "0", "returned IS NULL", id="null-became-zero"),
        pytest.param("returned", "NULL", "returned = 0", id="zero-became-null"),
        pytest.param("note", "concat(note, ' ')", "id = 1", id="trailing-blank"),
        pytest.param("note", "''", "note IS NULL", id="null-became-empty"),
        pytest.param("flag", "false", "flag IS NULL", id="null-became-false"),
    ],
)
@pytest.mark.parametrize("partition", [TODAY_ID, YESTERDAY_ID])
def test_a_changed_value(
    clickhouse: ClickHouseClient, ch_database: str, column: str, expression: str, where: str, partition: str
) -> None:
    case = Case(client=clickhouse, database=ch_database)
    # zero-became-null needs a zero, null-became-empty a NULL note: rows 5 and 8 have them in both days.
    after = [row(DAY, i) for i in range(12)]
    case.create([row(YESTERDAY, i) for i in range(12)])
    case.staged(after)
    case.build(case.design())
    before = case.rows("sales__shadow")
    _change(case, partition, column, expression, where)
    assert case.rows("sales__shadow") != before, "the test changed nothing"
    assert _refusal(case, after) == "DPONE_PROOF_FAILED"


@pytest.mark.parametrize("partition", [TODAY_ID, YESTERDAY_ID])
def test_two_columns_of_one_type_swapped(case: Case, partition: str) -> None:
    before = case.rows("sales__shadow")
    case.sql(f"CREATE TABLE {case.database}.scratch AS $s")
    case.sql(f"INSERT INTO {case.database}.scratch SELECT * FROM $s WHERE _partition_id = '{partition}'")
    case.sql(f"ALTER TABLE $s DROP PARTITION ID '{partition}'")
    case.sql(f"INSERT INTO $s SELECT * REPLACE (returned AS qty, qty AS returned) FROM {case.database}.scratch")
    assert case.rows("sales__shadow") != before
    assert _refusal(case) == "DPONE_PROOF_FAILED"


@pytest.fixture
def fresh(clickhouse: ClickHouseClient, ch_database: str) -> Case:
    """A right shadow whose day the target does not have."""
    case = Case(client=clickhouse, database=ch_database)
    case.create([r for r in OLD if r[0].date() != DAY])
    case.staged(AFTER)
    case.build(case.design())
    assert case.prove(case.design(), AFTER).touched_partitions_by_parts == 1
    return case


@pytest.mark.parametrize("table", ["sales", "sales__shadow"])
def test_a_strangers_row_in_a_fresh_day(fresh: Case, table: str) -> None:
    fresh.insert([row(DAY, 500)], table)
    assert _refusal(fresh) == "DPONE_PROOF_FAILED"


def test_a_lost_or_doubled_fresh_day(fresh: Case) -> None:
    fresh.sql(f"ALTER TABLE $s ATTACH PARTITION ID '{TODAY_ID}' FROM $g")
    assert _refusal(fresh) == "DPONE_PROOF_FAILED"
    fresh.sql(f"ALTER TABLE $s DROP PARTITION ID '{TODAY_ID}'")
    assert _refusal(fresh) == "DPONE_PROOF_FAILED"


def test_a_changed_value_in_a_fresh_day(fresh: Case) -> None:
    _change(fresh, TODAY_ID, "amount", "amount + 0.0001", "id = 4")
    assert _refusal(fresh) == "DPONE_PROOF_FAILED"


def test_a_fresh_day_in_other_parts_is_compared_row_by_row(fresh: Case) -> None:
    fresh.sql(f"ALTER TABLE $s DROP PARTITION ID '{TODAY_ID}'")
    for half in (AFTER[:6], AFTER[6:]):
        fresh.insert(half, "sales__shadow")
    proof = fresh.prove(fresh.design(), AFTER)
    assert (proof.touched_partitions_by_parts, proof.touched_multiset_rows) == (0, len(AFTER))


def test_changed_together_the_two_sides_still_differ_from_the_after_image(case: Case) -> None:
    """Staging and shadow agree, and neither is what SQL Server committed."""
    other = [row(DAY, i, note="s3cret", qty=99) for i in range(12)]
    case.staged(other)
    case.build(case.design())
    assert _refusal(case) == "DPONE_STAGE_MISMATCH"


def test_staged_rows_of_another_day(case: Case) -> None:
    case.staged([*AFTER, row(YESTERDAY, 3, note="s3cret")])
    case.build(case.design())
    assert _refusal(case) == "DPONE_STAGE_MISMATCH"


def test_strangers_rows_in_the_day_from_before(clickhouse: ClickHouseClient, ch_database: str) -> None:
    """The target had a row of the day that the mart never published: kept by the anti-join, so refused."""
    case = Case(client=clickhouse, database=ch_database)
    design = case.create([*OLD, row(DAY, 900)])
    case.staged(AFTER)
    case.build(design)
    with pytest.raises(DponeError) as refused:
        case.prove(design, AFTER)
    assert refused.value.code == "DPONE_TARGET_DIVERGED"


def test_a_merge_in_the_target_meanwhile_is_no_difference(clickhouse: ClickHouseClient, ch_database: str) -> None:
    case = Case(client=clickhouse, database=ch_database)
    case.create([r for r in OLD if r[1] < 6])
    case.insert([r for r in OLD if r[1] >= 6])
    case.staged(AFTER)
    design = case.design()
    case.build(design)
    before = case.parts("sales")
    case.sql(f"OPTIMIZE TABLE $t PARTITION ID '{YESTERDAY_ID}' FINAL")
    assert case.parts("sales") != before
    proof = case.prove(design, AFTER)
    assert (proof.untouched_partitions_by_parts, proof.untouched_partitions_by_digest) == (1, 1)
    assert case.rows("sales__shadow") == merged(OLD, AFTER)


def test_a_merge_does_not_hide_a_strangers_row(clickhouse: ClickHouseClient, ch_database: str) -> None:
    case = Case(client=clickhouse, database=ch_database)
    design = case.create(OLD)
    case.staged(AFTER)
    case.build(design)
    case.insert([row(YESTERDAY, 700)])
    case.sql(f"OPTIMIZE TABLE $t PARTITION ID '{YESTERDAY_ID}' FINAL")
    with pytest.raises(DponeError) as refused:
        case.prove(design, AFTER)
    assert refused.value.code == "DPONE_PROOF_FAILED"


def test_an_engine_whose_part_hashes_all_differ_falls_back_to_the_digest(case: Case) -> None:
    for partition in {p for p, _, _ in case.parts("sales")}:
        case.sql(f"ALTER TABLE $t DETACH PARTITION ID '{partition}'")
    case.insert([r for r in OLD if r[1] % 2])  # the same rows again, in other parts
    case.insert([r for r in OLD if not r[1] % 2])
    proof = case.prove(case.design(), AFTER)
    assert (proof.untouched_partitions_by_parts, proof.untouched_partitions_by_digest) == (0, 2)


def _other_table(case: Case) -> None:
    case.sql(f"CREATE TABLE {case.database}.other AS $t")
    case.sql(f"INSERT INTO {case.database}.other SELECT * FROM $t")
    case.sql(f"EXCHANGE TABLES $t AND {case.database}.other")


def _new_setting(case: Case) -> None:
    case.sql("ALTER TABLE $t MODIFY SETTING parts_to_throw_insert = 4000")


def _new_codec_on_the_shadow(case: Case) -> None:
    case.sql("ALTER TABLE $s MODIFY COLUMN qty CODEC(LZ4HC(9))")


def _view_into_the_target(case: Case) -> None:
    case.sql(f"CREATE TABLE {case.database}.feed AS $t")
    case.sql(f"CREATE MATERIALIZED VIEW {case.database}.pump TO $t AS SELECT * FROM {case.database}.feed")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_other_table, "DPONE_TARGET_REPLACED"),
        (_new_setting, "DPONE_TARGET_DESIGN_CHANGED"),
        (_new_codec_on_the_shadow, "DPONE_TARGET_DESIGN_CHANGED"),
        (_view_into_the_target, "DPONE_TARGET_DESIGN_CHANGED"),
    ],
)
def test_the_target_must_still_be_the_one_observed(case: Case, change: Callable[[Case], None], code: str) -> None:
    design = case.design()
    change(case)
    with pytest.raises(DponeError) as refused:
        case.prove(design, AFTER)
    assert refused.value.code == code


def test_rows_hidden_from_our_own_account_are_noticed(
    clickhouse: ClickHouseClient, ch_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded engine has no row policies; its table filters hide rows in the same way."""
    case = Case(client=clickhouse, database=ch_database, partition_by="month")
    hidden = {"additional_table_filters": f"{{'{ch_database}.sales': 'id != 7'}}"}
    settings = Statements._settings
    monkeypatch.setattr(Statements, "_settings", lambda self, given: {**settings(self, given), **hidden})
    design = case.create(OLD)
    case.staged([r for r in AFTER if r[1] != 7])
    case.build(design)
    assert case.rows("sales__shadow") != merged(OLD, AFTER)
    with pytest.raises(DponeError) as refused:
        case.prove(design, [r for r in AFTER if r[1] != 7])
    assert refused.value.code == "DPONE_PROOF_FAILED"


def test_the_reports_digest_covers_its_numbers(case: Case) -> None:
    first, again = case.prove(case.design(), AFTER), case.prove(case.design(), AFTER)
    assert first == again
    case.staged([*AFTER, row(DAY, 40, amount=Decimal("1.5000"))])
    case.build(case.design())
    other = case.prove(case.design(), [*AFTER, row(DAY, 40, amount=Decimal("1.5000"))])
    assert other.sha256 != first.sha256
    assert first.sha256.startswith("sha256:")
