"""The physical design as the engine shows it, and everything that is refused of it."""

import dataclasses
import time

import pytest
from clickhouse_case import COLUMNS, OTHER_DAY, Case, row

from dpone_dagster.contracts.mart import Relation
from dpone_dagster.errors import CODES, DponeError
from resources.clickhouse.client import ClickHouseClient
from resources.clickhouse.design import check_design, unseen_writers
from resources.clickhouse.statements import Statements

COLUMN_SQL = (
    "at DateTime64(6,'UTC'), id Int64, amount Nullable(Decimal(18,4)), qty Nullable(Int32), returned Nullable(Int32),"
    " ref Nullable(UUID), flag Nullable(Bool), due Nullable(Date), note Nullable(String)"
)


@pytest.fixture
def case(clickhouse: ClickHouseClient, ch_database: str) -> Case:
    return Case(client=clickhouse, database=ch_database)


def _refusal(case: Case) -> DponeError:
    with pytest.raises(DponeError) as refused:
        case.publisher.check_design(case.mart, case.publisher.design(case.mart.target))
    return refused.value


def _table(case: Case, columns: str = COLUMN_SQL, tail: str = "PARTITION BY toYYYYMMDD(at) ORDER BY (at, id)") -> None:
    case.sql(f"CREATE TABLE $t ({columns}) ENGINE = MergeTree {tail}")


def test_a_table_made_by_hand_from_the_type_mapping_is_admitted(case: Case) -> None:
    _table(case)
    design = case.design()
    case.publisher.check_design(case.mart, design)
    assert (design.database_engine, design.engine) == ("Atomic", "MergeTree")
    assert (design.partition_key, design.order_key) == ("toYYYYMMDD(at)", "at, id")
    assert design.columns[0] == ("at", "DateTime64(6, 'UTC')")
    assert design.detail["written_by"] == design.detail["read_by"] == []


def test_a_created_target_is_the_table_made_by_hand(case: Case) -> None:
    _table(case)
    by_hand = case.design().sha256
    case.sql("DROP TABLE $t SYNC")
    assert case.publisher.create_target(case.mart) == case.design().uuid
    assert case.design().sha256 == by_hand


def test_an_existing_target_is_not_created_again(case: Case) -> None:
    case.create()
    with pytest.raises(DponeError) as refused:
        case.publisher.create_target(case.mart)
    assert refused.value.code == "DPONE_TARGET_EXISTS"


def test_absent(case: Case) -> None:
    assert case.publisher.design(case.mart.target) is None
    assert _refusal(case).code == "DPONE_TARGET_ABSENT"


@pytest.mark.parametrize(
    "definition",
    [
        "VIEW $t AS SELECT 1 AS at",
        "MATERIALIZED VIEW $t ENGINE = MergeTree ORDER BY number AS SELECT number FROM system.numbers",
        "DICTIONARY $t (id UInt64, v String) PRIMARY KEY id SOURCE(NULL()) LAYOUT(FLAT()) LIFETIME(0)",
    ],
)
def test_not_a_table(case: Case, definition: str) -> None:
    case.sql(f"CREATE {definition}")
    assert _refusal(case).code == "DPONE_TARGET_NOT_A_TABLE"


@pytest.mark.parametrize("engine", ["Memory", "Overlay"])
def test_databases_without_uuids(case: Case, engine: str) -> None:
    """``default`` of the embedded engine is an Overlay; Ordinary can no longer be made."""
    database = "default"
    if engine == "Memory":
        database = f"{case.database}_m"
        case.sql(f"CREATE DATABASE {database} ENGINE = Memory")
    relation = Relation(schema_name=database, name=f"t_{case.database}")
    engine_sql = "ENGINE = MergeTree PARTITION BY toYYYYMMDD(at) ORDER BY (at, id)"
    case.sql(f"CREATE TABLE {relation.dotted} ({COLUMN_SQL}) {engine_sql}")
    try:
        mart = case.mart.model_copy(update={"target": relation})
        design = case.publisher.design(relation)
        assert design is not None
        assert design.database_engine == engine
        with pytest.raises(DponeError) as refused:
            case.publisher.check_design(mart, design)
        assert refused.value.code == "DPONE_TARGET_DATABASE_ENGINE"
    finally:
        case.sql(f"DROP TABLE {relation.dotted} SYNC")
        if engine == "Memory":
            case.sql(f"DROP DATABASE {database} SYNC")


@pytest.mark.parametrize("engine", ["ReplacingMergeTree", "SummingMergeTree", "Log", "Memory"])
def test_other_engines(case: Case, engine: str) -> None:
    order = "ORDER BY (at, id)" if engine.endswith("Tree") else ""
    case.sql(f"CREATE TABLE $t ({COLUMN_SQL}) ENGINE = {engine} {order}")
    assert _refusal(case).code == "DPONE_TARGET_ENGINE"


@pytest.mark.parametrize(
    "change",
    [{"engine": "ReplicatedMergeTree"}, {"engine": "SharedMergeTree"}, {"database_engine": "Replicated"}],
)
def test_replicated(case: Case, change: dict[str, str]) -> None:
    """The embedded engine has no keeper, so the observed design is altered where a cluster would show it."""
    design = dataclasses.replace(case.create(), **change)
    with pytest.raises(DponeError) as refused:
        check_design(case.mart, design)
    assert refused.value.code == "DPONE_TARGET_REPLICATED"


def test_table_ttl(case: Case) -> None:
    _table(case, tail="PARTITION BY toYYYYMMDD(at) ORDER BY (at, id) TTL toDate(at) + INTERVAL 1 YEAR")
    assert _refusal(case).code == "DPONE_TARGET_TTL"


def test_column_ttl(case: Case) -> None:
    _table(case, COLUMN_SQL + " TTL toDate(at) + INTERVAL 1 YEAR")
    assert _refusal(case).code == "DPONE_TARGET_TTL"


def test_the_word_ttl_in_a_comment_is_no_ttl(case: Case) -> None:
    _table(case, COLUMN_SQL + " COMMENT 'no '' TTL here'")
    case.publisher.check_design(case.mart, case.design())


def test_a_pending_mutation(case: Case) -> None:
    case.create([row(OTHER_DAY, 1)])
    case.sql("SYSTEM STOP MERGES $t")
    case.sql("ALTER TABLE $t UPDATE qty = 1 WHERE id = 1 SETTINGS mutations_sync = 0")
    assert _refusal(case).code == "DPONE_TARGET_MUTATION_PENDING"
    case.sql("KILL MUTATION WHERE database = '" + case.database + "'")
    case.publisher.check_design(case.mart, case.design())


def test_a_lightweight_update_that_waits_in_a_patch_part(case: Case) -> None:
    _table(
        case,
        tail="PARTITION BY toYYYYMMDD(at) ORDER BY (at, id)"
        " SETTINGS enable_block_number_column = 1, enable_block_offset_column = 1",
    )
    case.insert([row(OTHER_DAY, i) for i in range(5)])
    case.publisher.check_design(case.mart, case.design())
    case.sql("SYSTEM STOP MERGES $t")
    case.client.command(
        f"UPDATE {case.database}.sales SET qty = 99 WHERE id = 1", settings={"enable_lightweight_update": 1}
    )
    assert _refusal(case).code == "DPONE_TARGET_MUTATION_PENDING"


def test_a_finished_mutation_is_none(case: Case) -> None:
    case.create([row(OTHER_DAY, 1)])
    case.sql("ALTER TABLE $t UPDATE qty = 1 WHERE id = 1 SETTINGS mutations_sync = 1")
    case.sql("DELETE FROM $t WHERE id = 1")
    case.publisher.check_design(case.mart, case.design())


@pytest.mark.parametrize("refresh", ["", "REFRESH EVERY 1 YEAR APPEND", "REFRESH EVERY 1 YEAR"])
def test_a_view_that_writes_into_the_target(case: Case, refresh: str) -> None:
    case.create()
    case.sql(f"CREATE TABLE {case.database}.feed AS $t")
    case.sql(f"CREATE MATERIALIZED VIEW {case.database}.pump {refresh} TO $t AS SELECT * FROM {case.database}.feed")
    refused = _refusal(case)
    assert refused.code == "DPONE_TARGET_WRITTEN_BY_VIEW"
    assert f"{case.database}.pump" in refused.sentence


def test_a_view_that_writes_elsewhere_is_none_of_ours(case: Case) -> None:
    case.create()
    case.sql(f"CREATE TABLE {case.database}.feed AS $t")
    case.sql(f"CREATE TABLE {case.database}.sales2 AS $t")
    case.sql(
        f"CREATE MATERIALIZED VIEW {case.database}.pump TO {case.database}.sales2 AS SELECT * FROM {case.database}.feed"
    )
    case.publisher.check_design(case.mart, case.design())


@pytest.mark.parametrize("to", ["TO {db}.sums", "ENGINE = MergeTree ORDER BY id"])
def test_a_view_that_hangs_on_the_target(case: Case, to: str) -> None:
    case.create()
    case.sql(f"CREATE TABLE {case.database}.sums (id Int64) ENGINE = MergeTree ORDER BY id")
    case.sql(f"CREATE MATERIALIZED VIEW {case.database}.sum {to.format(db=case.database)} AS SELECT id FROM $t")
    assert _refusal(case).code == "DPONE_TARGET_READ_BY_VIEW"


def test_a_dictionary_that_hangs_on_the_target(case: Case) -> None:
    case.create()
    case.sql(
        f"CREATE DICTIONARY {case.database}.d (id Int64, qty Int32) PRIMARY KEY id"
        f" SOURCE(CLICKHOUSE(DB '{case.database}' TABLE 'sales')) LAYOUT(HASHED()) LIFETIME(0)"
    )
    try:
        assert _refusal(case).code == "DPONE_TARGET_READ_BY_VIEW"
    finally:
        case.sql(f"DROP DICTIONARY {case.database}.d")


def test_readers_by_name_are_admitted(case: Case) -> None:
    """A plain view and a scheduled one read the target by its name each time, so they see the exchange."""
    case.create()
    case.sql(f"CREATE VIEW {case.database}.v AS SELECT id FROM $t")
    case.sql(f"CREATE TABLE {case.database}.sums (id Int64) ENGINE = MergeTree ORDER BY id")
    case.sql(
        f"CREATE MATERIALIZED VIEW {case.database}.r REFRESH EVERY 1 YEAR TO {case.database}.sums AS SELECT id FROM $t"
    )
    case.publisher.check_design(case.mart, case.design())


def test_a_server_that_does_not_show_destinations(case: Case) -> None:
    """Older servers lack target_table: a view with a TO clause may then write anywhere, one without may not."""
    design = case.create()
    statements = Statements(case.client, "dpone-test-")
    case.sql(f"CREATE MATERIALIZED VIEW {case.database}.own ENGINE = MergeTree ORDER BY id AS SELECT id FROM $t")
    # Other tests' views may be there at the same time, and go; this one's own view stays and is none of them.
    deadline = time.monotonic() + 120
    while (seen := unseen_writers(statements)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert seen == []
    case.sql(f"CREATE TABLE {case.database}.feed AS $t")
    case.sql(f"CREATE MATERIALIZED VIEW {case.database}.pump TO $t AS SELECT * FROM {case.database}.feed")
    assert unseen_writers(statements) is None
    unobservable = dataclasses.replace(design, detail={**design.detail, "written_by": None})
    with pytest.raises(DponeError) as refused:
        check_design(case.mart, unobservable)
    assert refused.value.code == "DPONE_TARGET_UNOBSERVABLE"


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("id Int64", "id Int32", "id"),
        ("qty Nullable(Int32)", "qty Int32", "qty"),
        ("Nullable(Decimal(18,4))", "Nullable(Decimal(18,2))", "amount"),
        ("DateTime64(6,'UTC')", "DateTime64(6,'Europe/Berlin')", "at"),
        ("DateTime64(6,'UTC')", "DateTime64(6)", "at"),
        ("DateTime64(6,'UTC')", "DateTime64(3,'UTC')", "at"),
        ("Nullable(String)", "LowCardinality(Nullable(String))", "note"),
        ("qty Nullable(Int32), returned Nullable(Int32)", "returned Nullable(Int32), qty Nullable(Int32)", "qty"),
    ],
)
def test_column_drift(case: Case, old: str, new: str, field: str) -> None:
    assert old in COLUMN_SQL
    _table(case, COLUMN_SQL.replace(old, new))
    refused = _refusal(case)
    assert (refused.code, refused.details["field"]) == ("DPONE_TARGET_COLUMNS", field)


def test_a_column_too_many_or_too_few(case: Case) -> None:
    _table(case, COLUMN_SQL + ", extra Int32")
    assert _refusal(case).code == "DPONE_TARGET_COLUMNS"
    case.sql("DROP TABLE $t SYNC")
    _table(case, COLUMN_SQL.rpartition(", note")[0])
    assert _refusal(case).code == "DPONE_TARGET_COLUMNS"


def test_a_computed_column(case: Case) -> None:
    _table(case, COLUMN_SQL.replace("qty Nullable(Int32)", "qty Nullable(Int32) MATERIALIZED 1"))
    assert _refusal(case).code == "DPONE_TARGET_COLUMNS"


@pytest.mark.parametrize(
    ("declared", "expression"),
    [
        ("day", "toYYYYMMDD(at)"),
        ("day", "toYYYYMMDD(at, 'UTC')"),
        ("day", "toDate(at)"),
        ("day", "(toStartOfDay(at))"),
        ("month", "toYYYYMM(at)"),
        ("month", "toStartOfMonth(at)"),
        ("none", "tuple()"),
        ("none", ""),
    ],
)
def test_admitted_partitions(case: Case, declared: str, expression: str) -> None:
    _table(case, tail=(f"PARTITION BY {expression}" if expression else "") + " ORDER BY (at, id)")
    mart = case.mart.model_copy(update={"partition_by": declared})
    case.publisher.check_design(mart, case.design())
    # The same expression on staging: a row is in the same partition on both sides.
    case.insert([row(OTHER_DAY, i) for i in range(30)])
    case.publisher.create_stage(case.mart, case.stage.name)
    case.insert([row(OTHER_DAY, i) for i in range(30)], case.stage.name)
    ids = [case.sql(f"SELECT DISTINCT _partition_id FROM {t}") for t in ("$t", "$g")]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("declared", "expression"),
    [
        ("day", "toYYYYMMDD(at, 'Asia/Tokyo')"),
        ("day", "toDate(at, 'Asia/Tokyo')"),
        ("day", "toYYYYMM(at)"),
        ("day", "tuple()"),
        ("day", "toYYYYMMDD(due)"),
        ("day", "(toYYYYMMDD(at), id % 4)"),
        ("month", "toYYYYMMDD(at)"),
        ("month", "toMonth(at)"),
        ("none", "id % 4"),
        ("day", "toStartOfHour(at)"),
        ("day", "toYYYYMMDD(at) + 1"),
    ],
)
def test_refused_partitions(case: Case, declared: str, expression: str) -> None:
    case.client.command(
        f"CREATE TABLE {case.database}.sales ({COLUMN_SQL}) ENGINE = MergeTree PARTITION BY {expression}"
        " ORDER BY (at, id) SETTINGS allow_nullable_key = 1"
    )
    mart = case.mart.model_copy(update={"partition_by": declared})
    with pytest.raises(DponeError) as refused:
        case.publisher.check_design(mart, case.design())
    assert refused.value.code == "DPONE_TARGET_PARTITION"


@pytest.mark.parametrize("order", ["(id, at)", "(at, id)"])
def test_the_keys_columns_in_any_order(case: Case, order: str) -> None:
    _table(case, tail=f"PARTITION BY toYYYYMMDD(at) ORDER BY {order}")
    case.publisher.check_design(case.mart, case.design())


@pytest.mark.parametrize("order", ["at", "id", "tuple()", "(toDate(at), id)", "(at, id, cityHash64(id))"])
def test_key_drift(case: Case, order: str) -> None:
    _table(case, tail=f"PARTITION BY toYYYYMMDD(at) ORDER BY {order}")
    assert _refusal(case).code == "DPONE_TARGET_KEY"


@pytest.mark.parametrize(
    "change",
    [
        "MODIFY COLUMN note CODEC(ZSTD(5))",
        "MODIFY COLUMN qty DEFAULT 3",
        "ADD INDEX i qty TYPE minmax",
        "ADD PROJECTION p (SELECT id ORDER BY id)",
        "ADD CONSTRAINT c CHECK id > 0",
        "MODIFY SETTING parts_to_throw_insert = 4000",
    ],
)
def test_every_part_of_the_design_is_in_its_digest(case: Case, change: str) -> None:
    before = case.create().sha256
    case.sql(f"ALTER TABLE $t {change}")
    assert case.design().sha256 != before


def test_names_uuid_rows_and_comments_are_not_in_the_digest(case: Case) -> None:
    before = case.create()
    case.insert([row(OTHER_DAY, 1)])
    case.sql("ALTER TABLE $t MODIFY COMMENT 'sales of the day'")
    case.sql("CREATE TABLE $s AS $t")
    shadow = case.publisher.design(case.shadow)
    assert shadow is not None
    assert shadow.uuid != before.uuid
    assert shadow.sha256 == case.design().sha256 == before.sha256


def test_the_document_is_closed(case: Case) -> None:
    assert sorted(case.create().detail) == [
        "columns",
        "constraints",
        "database_engine",
        "engine",
        "engine_full",
        "partition_key",
        "primary_key",
        "projections",
        "read_by",
        "sampling_key",
        "schema",
        "skipping_indices",
        "sorting_key",
        "storage_policy",
        "ttl",
        "unfinished_mutations",
        "written_by",
    ]
    assert len(case.design().columns) == len(COLUMNS)


def test_every_refusal_says_what_to_do() -> None:
    codes = [code for code in CODES if code.startswith("DPONE_TARGET_")]
    assert len(codes) >= 14
    assert all(CODES[code].next_step and CODES[code].meaning for code in codes)


def test_a_key_of_one_column(clickhouse: ClickHouseClient, ch_database: str) -> None:
    case = Case(client=clickhouse, database=ch_database)
    case.mart = case.mart.model_copy(update={"key": ("at",)})
    case.publisher.create_target(case.mart)
    case.publisher.check_design(case.mart, case.design())
    with pytest.raises(DponeError) as refused:
        case.publisher.check_design(case.mart.model_copy(update={"key": ("at", "id")}), case.design())
    assert refused.value.code == "DPONE_TARGET_KEY"
