"""Tables by UUID, rows in and out, and the queries of the dead."""

import threading
import time
import uuid
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest
from clickhouse_case import COLUMNS, DAY, SCOPE, Case, batches, digest_by_hand, merged, row

from dpone_dagster.contracts.mart import Scope
from dpone_dagster.contracts.names import predecessor_name
from dpone_dagster.errors import DponeError
from resources.clickhouse import loading, quiescence
from resources.clickhouse.client import ClickHouseClient, connect
from resources.clickhouse.publisher import ClickHousePublisher
from resources.clickhouse.statements import Statements
from resources.embedded.engines import Engines, down, up
from resources.embedded.home import Home

OLD = [row(DAY + timedelta(days=n), i) for n in (-1, 0) for i in range(10)]
AFTER = [row(DAY, i, qty=77) for i in range(12)]


@pytest.fixture
def case(clickhouse: ClickHouseClient, ch_database: str) -> Case:
    return Case(client=clickhouse, database=ch_database)


def _code(refused: pytest.ExceptionInfo[DponeError]) -> str:
    return refused.value.code


# ------------------------------------------------------------------------------------------- tables by UUID


def test_the_uuid_map_tells_what_an_exchange_did(case: Case) -> None:
    design = case.create(OLD)
    case.staged(AFTER)
    shadow_uuid = case.build(design).uuid
    case.publisher.exchange(case.mart.target, case.shadow)
    assert (case.publisher.uuid(case.mart.target), case.publisher.uuid(case.shadow)) == (shadow_uuid, design.uuid)
    assert case.rows() == merged(OLD, AFTER)
    observed = case.publisher.design(case.mart.target)
    assert observed is not None
    assert observed.sha256 == design.sha256


def test_a_late_exchange_finds_no_table_once_the_shadow_is_renamed(case: Case) -> None:
    design = case.create(OLD)
    case.staged(AFTER)
    shadow_uuid = case.build(design).uuid
    mine = case.table("sales__shadow_2")
    case.publisher.rename(case.shadow, mine, shadow_uuid)
    with pytest.raises(DponeError) as refused:
        case.publisher.exchange(case.mart.target, case.shadow)  # sent by the dead
    assert (_code(refused), refused.value.details["number"]) == ("DPONE_ENGINE_REFUSED", 60)
    assert case.publisher.uuid(case.mart.target) == design.uuid
    case.publisher.exchange(case.mart.target, mine)
    assert case.publisher.uuid(case.mart.target) == shadow_uuid
    case.publisher.rename(mine, case.table(predecessor_name("sales", design.uuid)), design.uuid)
    with pytest.raises(DponeError):
        case.publisher.exchange(case.mart.target, mine)  # a second one cannot swap back
    assert case.publisher.uuid(case.mart.target) == shadow_uuid


def test_rename_moves_only_the_table_with_the_uuid(case: Case) -> None:
    uuid_ = case.create().uuid
    new = case.table("kept")
    with pytest.raises(DponeError) as refused:
        case.publisher.rename(case.mart.target, new, str(uuid.uuid4()))
    assert _code(refused) == "DPONE_TABLE_REPLACED"
    case.publisher.rename(case.mart.target, new, uuid_)
    case.publisher.rename(case.mart.target, new, uuid_)  # done already
    assert (case.publisher.uuid(new), case.publisher.uuid(case.mart.target)) == (uuid_, None)
    other = case.create().uuid
    with pytest.raises(DponeError) as refused:
        case.publisher.rename(case.mart.target, new, other)
    assert _code(refused) == "DPONE_TABLE_REPLACED"
    assert (case.publisher.uuid(new), case.publisher.uuid(case.mart.target)) == (uuid_, other)


def test_drop_takes_only_the_table_with_the_uuid(case: Case) -> None:
    uuid_ = case.create(OLD).uuid
    with pytest.raises(DponeError) as refused:
        case.publisher.drop(case.mart.target, str(uuid.uuid4()))
    assert _code(refused) == "DPONE_TABLE_REPLACED"
    assert case.rows() == merged(OLD, [])
    case.publisher.drop(case.mart.target, uuid_)
    assert case.publisher.uuid(case.mart.target) is None
    case.publisher.drop(case.mart.target, uuid_)  # absent already


def test_predecessors_newest_first(case: Case) -> None:
    case.create(OLD)
    uuids = []
    for n in range(3):
        time.sleep(1.1)  # the engine keeps the time of a table's metadata in whole seconds
        design = case.design()
        case.staged([row(DAY, i, qty=n) for i in range(12)])
        case.build(design)
        case.publisher.exchange(case.mart.target, case.shadow)
        case.publisher.rename(case.shadow, case.table(predecessor_name("sales", design.uuid)), design.uuid)
        uuids.append(design.uuid)
    case.sql(f"CREATE TABLE {case.database}.sales2__dpone_prev__0 AS $t")  # another mart's
    assert case.publisher.predecessors(case.mart.target) == [
        (case.table(predecessor_name("sales", u)), u) for u in reversed(uuids)
    ]


def test_a_stage_left_over_is_replaced(case: Case) -> None:
    case.create()
    first = case.publisher.create_stage(case.mart, case.stage.name)
    case.insert(OLD, case.stage.name)
    second = case.publisher.create_stage(case.mart, case.stage.name)
    assert first != second
    assert case.publisher.uuid(case.stage) == second
    assert case.publisher.count(case.stage, case.mart) == 0


def test_a_stage_needs_a_target(case: Case) -> None:
    with pytest.raises(DponeError) as refused:
        case.publisher.create_stage(case.mart, case.stage.name)
    assert _code(refused) == "DPONE_TARGET_ABSENT"


def test_create_target_makes_its_database(clickhouse: ClickHouseClient, ch_database: str) -> None:
    case = Case(client=clickhouse, database=f"{ch_database}_new")
    try:
        case.publisher.check_design(case.mart, case.create())
    finally:
        case.sql(f"DROP DATABASE {case.database} SYNC")


# ------------------------------------------------------------------------------------------ rows in and out

EDGES = [
    row(
        DAY,
        2**63 - 1,
        amount=Decimal("99999999999999.9999"),
        qty=-(2**31),
        returned=0,
        flag=True,
        ref=uuid.UUID(int=2**128 - 1),
        due=date(1970, 1, 1),
        note="",
    ),
    row(
        DAY,
        -(2**63),
        at=datetime(2024, 3, 10, 23, 59, 59, 999999, tzinfo=UTC),
        amount=Decimal("-0.0001"),
        flag=False,
        ref=uuid.UUID("00112233-4455-6677-8899-aabbccddeeff"),
        due=date(2149, 6, 6),
        note="tab\tnew\nline \\N 'quoted' \x00 🚚  ",
    ),
    row(DAY, 0, amount=None, qty=None, returned=None, ref=None, flag=None, due=None, note=None),
    row(DAY, 1, at=datetime(1900, 1, 1, 0, 0, 0, 1, tzinfo=UTC)),
    row(DAY, 2, at=datetime(2299, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)),
]


def test_values_arrive_exactly(case: Case) -> None:
    case.create()
    case.staged(EDGES)
    # As text, past the driver's own conversions.
    found = case.client.query(
        "SELECT toString(id), toDecimalString(amount, 4), toString(ref), toString(due),"
        f" formatDateTime(at, '%Y-%m-%d %H:%i:%S.%f'), hex(note), toUInt8(flag) FROM {case.database}.sales__stage"
    ).result_rows
    expected = []
    for at, id_, amount, _, _, ref, flag, due, note in EDGES:
        expected.append(
            (
                str(id_),
                None if amount is None else f"{amount:.4f}",
                None if ref is None else str(ref),
                None if due is None else due.isoformat(),
                at.strftime("%Y-%m-%d %H:%M:%S.%f"),
                None if note is None else note.encode().hex().upper(),
                None if flag is None else int(flag),
            )
        )
    assert sorted(map(str, found)) == sorted(map(str, expected))
    assert case.publisher.digest(case.mart, case.stage) == digest_by_hand(EDGES)
    in_scope = [r for r in EDGES if r[0].date() == DAY]
    assert case.publisher.digest(case.mart, case.stage, SCOPE) == digest_by_hand(in_scope)
    assert case.publisher.count(case.stage, case.mart, SCOPE) == len(in_scope) == 3
    assert case.publisher.count(case.stage, case.mart) == 5


def test_loading_streams_in_inserts_of_bounded_size(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "INSERT_ROWS", 250)
    case.create()
    case.publisher.create_stage(case.mart, case.stage.name)
    case.sql("SYSTEM STOP MERGES $g")
    rows = [row(DAY, i) for i in range(1000)]
    told: list[int] = []
    pulled: list[int] = []

    def watched() -> object:
        for batch in batches(rows, 100):
            pulled.append(sum(told))  # how far the inserts are when the next batch is asked for
            yield batch

    assert case.publisher.load(case.stage, watched(), told.append) == 1000
    assert told == [300, 300, 300, 100]
    assert pulled == [0, 0, 0, 300, 300, 300, 600, 600, 600, 900]
    assert len(case.parts(case.stage.name)) == 4
    assert case.rows(case.stage.name) == merged([], rows)


def test_loading_nothing(case: Case) -> None:
    case.create()
    case.publisher.create_stage(case.mart, case.stage.name)
    assert case.publisher.load(case.stage, iter(batches([])), lambda _: None) == 0


@pytest.mark.parametrize(
    ("column", "values", "code"),
    [
        ("ref", pa.array(["00112233445566778899AABBCCDDEEFF"]), "DPONE_VALUE_OUTSIDE_DOMAIN"),
        ("ref", pa.array(["00112233-4455-6677-8899-AABBCCDDEEFF"]), "DPONE_VALUE_OUTSIDE_DOMAIN"),
        ("ref", pa.array(["zzzzzzzz-zzzz-zzzz-zzzz-zzzzzzzzzzzz"]), "DPONE_VALUE_OUTSIDE_DOMAIN"),
        ("amount", pa.array(["1.23456789"]), "DPONE_ARTIFACT_SCHEMA"),
        ("amount", pa.array([Decimal("1.234567")], pa.decimal128(18, 6)), "DPONE_ARTIFACT_SCHEMA"),
        ("qty", pa.array([2**40], pa.int64()), "DPONE_ARTIFACT_SCHEMA"),
        ("at", pa.array([0], pa.timestamp("ns", tz="UTC")), "DPONE_ARTIFACT_SCHEMA"),
        ("at", pa.array([0], pa.timestamp("us")), "DPONE_ARTIFACT_SCHEMA"),
        ("id", pa.array([None], pa.int64()), "DPONE_VALUE_NULL"),
    ],
)
def test_what_could_not_arrive_exactly_is_not_sent(case: Case, column: str, values: pa.Array, code: str) -> None:
    case.create()
    case.publisher.create_stage(case.mart, case.stage.name)
    batch = next(iter(batches([row(DAY, 1)])))
    batch = batch.set_column(batch.schema.get_field_index(column), column, values)
    with pytest.raises(DponeError) as refused:
        case.publisher.load(case.stage, iter([batch]), lambda _: None)
    assert (_code(refused), refused.value.details["field"]) == (code, column)
    assert case.publisher.count(case.stage, case.mart) == 0


def test_columns_in_another_order_are_not_sent(case: Case) -> None:
    case.create()
    case.publisher.create_stage(case.mart, case.stage.name)
    batch = next(iter(batches([row(DAY, 1)])))
    with pytest.raises(DponeError) as refused:
        case.publisher.load(case.stage, iter([batch.select(batch.schema.names[::-1])]), lambda _: None)
    assert _code(refused) == "DPONE_ARTIFACT_SCHEMA"


def test_a_date_outside_the_domain_does_not_wrap(case: Case) -> None:
    case.create()
    case.publisher.create_stage(case.mart, case.stage.name)
    rows = batches([row(DAY, 1, due=date(2200, 1, 1))])
    with pytest.raises(DponeError) as refused:
        case.publisher.load(case.stage, iter(rows), lambda _: None)
    assert _code(refused) == "DPONE_ENGINE_REFUSED"


def test_read_gives_the_contracts_types_and_the_days_rows_in_key_order(case: Case) -> None:
    uuid_ = case.create([*EDGES, *OLD]).uuid
    table = case.publisher.read(case.mart, uuid_, SCOPE)
    assert table.schema.names == [c.name for c in COLUMNS]
    assert table.schema.types == [c.spec.arrow for c in COLUMNS]
    assert [f.nullable for f in table.schema] == [c.nullable for c in COLUMNS]
    rows = [
        tuple(uuid.UUID(v) if c.name == "ref" and v else v for c, v in zip(COLUMNS, r.values(), strict=True))
        for r in table.to_pylist()
    ]
    assert rows == sorted((r for r in [*EDGES, *OLD] if r[0].date() == DAY), key=lambda r: r[:2])


def test_read_of_an_empty_day(case: Case) -> None:
    uuid_ = case.create(OLD).uuid
    table = case.publisher.read(case.mart, uuid_, Scope.day("2024-01-01"))
    assert table.num_rows == 0
    assert table.schema.types == [c.spec.arrow for c in COLUMNS]


def test_read_follows_the_generation_not_the_name(case: Case) -> None:
    design = case.create(OLD)
    case.staged(AFTER)
    new = case.build(design).uuid
    case.publisher.exchange(case.mart.target, case.shadow)
    case.publisher.rename(case.shadow, case.table(predecessor_name("sales", design.uuid)), design.uuid)
    assert set(case.publisher.read(case.mart, new, SCOPE)["qty"].to_pylist()) == {77}
    assert set(case.publisher.read(case.mart, design.uuid, SCOPE)["qty"].to_pylist()) == set(range(7))
    case.publisher.drop(case.table(predecessor_name("sales", design.uuid)), design.uuid)
    with pytest.raises(DponeError) as refused:
        case.publisher.read(case.mart, design.uuid, SCOPE)
    assert _code(refused) == "DPONE_GENERATION_GONE"


def test_an_exchange_while_reading_never_gives_the_other_generation(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    design = case.create(OLD)
    case.staged(AFTER)
    case.build(design)
    arrow, calls = Statements.arrow, []

    def exchanged_meanwhile(self: Statements, sql: str, **settings: object) -> pa.Table:
        if not calls:
            case.sql("EXCHANGE TABLES $t AND $s")
        calls.append(sql)
        return arrow(self, sql, **settings)

    monkeypatch.setattr(Statements, "arrow", exchanged_meanwhile)
    table = case.publisher.read(case.mart, design.uuid, SCOPE)
    assert len(calls) == 2
    assert set(table["qty"].to_pylist()) == set(range(7))


# ----------------------------------------------------------------------------------- queries of the dead


def _slow(engines: Engines, prefix: str) -> tuple[threading.Thread, list[str]]:
    ended: list[str] = []

    def run() -> None:
        statements = Statements(connect(engines.clickhouse), prefix)
        try:
            statements.rows("SELECT sum(sleepEachRow(0.1)) FROM numbers(300) SETTINGS max_block_size = 1")
            ended.append("finished")
        except DponeError as error:
            ended.append(error.code)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def _running(client: ClickHouseClient, prefix: str) -> int:
    return client.query(
        f"SELECT count() FROM system.processes WHERE startsWith(Settings['log_comment'], '{prefix}')"
    ).result_rows[0][0]


def test_quiesce_ends_the_prefixs_queries_and_no_others(case: Case, engines: Engines) -> None:
    mine, others = f"dpone-{uuid.uuid4().hex[:16]}-", f"dpone-{uuid.uuid4().hex[:16]}-"
    (dead, ended), (alive, alive_ended) = _slow(engines, mine), _slow(engines, others)
    until = time.monotonic() + 10
    while not (_running(case.client, mine) and _running(case.client, others)) and time.monotonic() < until:
        time.sleep(0.02)
    publisher = ClickHousePublisher(case.client, mine)  # who takes over has the same prefix
    publisher.quiesce(mine)
    assert _running(case.client, mine) == 0
    assert _running(case.client, others) == 1
    dead.join(10)
    assert ended in (["DPONE_ENGINE_REFUSED"], ["DPONE_ENGINE_UNAVAILABLE"])
    publisher.quiesce(others)
    alive.join(10)
    assert len(alive_ended) == 1


def test_quiesce_says_busy_when_a_query_stays(case: Case, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = f"dpone-{uuid.uuid4().hex[:16]}-"
    thread, _ = _slow(engines, prefix)
    until = time.monotonic() + 10
    while not _running(case.client, prefix) and time.monotonic() < until:
        time.sleep(0.02)
    statements = Statements(case.client, prefix)
    run = Statements.run
    monkeypatch.setattr(Statements, "run", lambda self, sql, **s: None)  # a KILL that does not work
    with pytest.raises(DponeError) as refused:
        quiescence.quiesce(statements, prefix, deadline_seconds=0.3)
    assert (_code(refused), refused.value.details["queries"]) == ("DPONE_ENGINE_BUSY", 1)
    monkeypatch.setattr(Statements, "run", run)
    quiescence.quiesce(statements, prefix)
    thread.join(10)


def test_quiesce_with_nothing_running(case: Case) -> None:
    case.publisher.quiesce("dpone-nobody-")


# ---------------------------------------------------------------------------------------------- errors


def test_an_engine_that_is_gone_is_unavailable(own_home: Home) -> None:
    engines = up(own_home)
    client = connect(replace(engines.clickhouse))
    case = Case(client=client, database="marts")
    case.create(OLD)
    down(own_home)
    for call in (
        lambda: case.publisher.uuid(case.mart.target),
        lambda: case.publisher.exchange(case.mart.target, case.shadow),
        lambda: case.publisher.design(case.mart.target),
        lambda: case.publisher.load(case.stage, iter(batches(OLD)), lambda _: None),
        lambda: case.publisher.read(case.mart, "x", SCOPE),
        lambda: case.publisher.quiesce("dpone-x-"),
    ):
        with pytest.raises(DponeError) as refused:
            call()
        assert _code(refused) == "DPONE_ENGINE_UNAVAILABLE"


def test_a_refusal_keeps_the_number_and_no_text(case: Case) -> None:
    case.create([row(DAY, 1, note="s3cret")])
    with pytest.raises(DponeError) as refused:
        Statements(case.client, "dpone-test-").rows(f"SELECT toUInt64(assumeNotNull(note)) FROM {case.database}.sales")
    assert (_code(refused), refused.value.details["number"]) == ("DPONE_ENGINE_REFUSED", 6)
    assert "s3cret" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_every_statement_carries_the_prefix(case: Case) -> None:
    statements = Statements(case.client, "dpone-abc-")
    own = statements.value("SELECT getSetting('log_comment')")
    again = statements.value("SELECT getSetting('log_comment')")
    assert own.startswith("dpone-abc-")
    assert again.startswith("dpone-abc-")
    assert own != again
    assert statements.value("SELECT getSetting('insert_null_as_default')") in (False, 0)
