"""PostgreSQL, ClickHouse and Arrow give one set of rows one digest: the one that the reference gives."""

import hashlib
import json
import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpone_dagster.contracts.arrow_digest import digest_batches, row_texts
from dpone_dagster.contracts.mart import Column, Scope
from dpone_dagster.contracts.set_digest import SetDigest
from resources.clickhouse import dialect as clickhouse
from resources.clickhouse.client import ClickHouseClient, connect
from resources.embedded.engines import Engines
from resources.postgres import dialect as postgres

Row = tuple[Any, ...]

# ------------------------------------------------------------------------ the reference, slow and obvious


def reference_field(type_name: str, value: Any) -> str:
    if value is None:
        return "~"
    if isinstance(value, bool):
        text = "1" if value else "0"
    elif isinstance(value, datetime):
        text = (
            f"{value.year:04}-{value.month:02}-{value.day:02}"
            f"T{value.hour:02}:{value.minute:02}:{value.second:02}.{value.microsecond:06}"
        )
    elif isinstance(value, date):
        text = f"{value.year:04}-{value.month:02}-{value.day:02}"
    elif isinstance(value, Decimal):
        text = f"{value:f}"
    elif type_name.startswith("nchar"):
        text = value.rstrip(" ")
    else:
        text = str(value)
    return f"{len(text.encode())}:{text}"


def reference_text(columns: Sequence[Column], row: Row) -> str:
    return "".join(reference_field(c.type, v) for c, v in zip(columns, row, strict=True))


def reference_digest(columns: Sequence[Column], rows: Sequence[Row]) -> SetDigest:
    lanes = [0, 0, 0, 0]
    for row in rows:
        hashed = hashlib.sha256(reference_text(columns, row).encode()).hexdigest()
        for i in range(4):
            lanes[i] = (lanes[i] + int(hashed[16 * i : 16 * i + 16], 16)) % 2**64
    return SetDigest(len(rows), (lanes[0], lanes[1], lanes[2], lanes[3]))


# ------------------------------------------------------------------------------------------------ the rows


def exact(unscaled: int, scale: int) -> Decimal:
    return Decimal((int(unscaled < 0), tuple(int(d) for d in str(abs(unscaled))), -scale))


FIRST, LAST = datetime(1900, 1, 1), datetime(2299, 12, 31, 23, 59, 59, 999999)
TEXTS = [
    "",
    " ",
    "a",
    "a ",
    "  a",
    "~",
    ":",
    "1:a",
    "12:~0",
    "3",
    "é",
    "e\u0301",
    "\U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "日本語",
    "line\nbreak\r\n\ttab",
    "back\\slash \\n \\N",
    "quote'\"`",
    "\ufeffbom",
    "\uffff\ufffd",
    "\u00a0",
    "x" * 5000,
]
# Type -> edge values. datetime2 values are naive UTC.
EDGES: dict[str, list[Any]] = {
    "bigint": [0, 1, -1, 2**63 - 1, -(2**63)],
    "int": [0, -7, 2**31 - 1, -(2**31)],
    "smallint": [0, 9, 2**15 - 1, -(2**15)],
    "bit": [True, False],
    "uniqueidentifier": [UUID(int=0), UUID(int=2**128 - 1), UUID("A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11")],
    "date": [date(1970, 1, 1), date(2149, 6, 6), date(2000, 2, 29), date(2038, 1, 20)],
    "datetime2(6)": [
        FIRST,
        FIRST + timedelta(microseconds=1),
        LAST,
        datetime(1969, 12, 31, 23, 59, 59, 999999),
        datetime(1969, 12, 31, 23, 59, 59),
        datetime(1970, 1, 1),
        datetime(1970, 1, 1, 0, 0, 0, 1),
        datetime(2024, 2, 29, 12, 30, 0, 120000),
    ],
    "decimal(38,0)": [exact(n, 0) for n in (0, -1, 10**38 - 1, -(10**38) + 1)],
    "decimal(38,38)": [exact(n, 38) for n in (0, 1, -1, 10**38 - 1, -(10**38) + 1, 5 * 10**37)],
    "decimal(18,4)": [exact(n, 4) for n in (0, 1, -1, -5000, 15000, 10**18 - 1, -(10**18) + 1)],
    "decimal(4,2)": [exact(n, 2) for n in (0, -1, 50, -50, 9999, 1000)],
    "nvarchar(max)": TEXTS,
    "nvarchar(20)": [t for t in TEXTS if len(t) <= 20],
    "nchar(6)": ["", "a", "a  ", "  a", "\t  ", "é \u00a0", "\U0001f600 ", "abcdef", "abcde ", "a\n"],
}
COLUMNS = (
    Column(name="id", type="bigint", nullable=False),
    *(
        Column(name=f"c{i}_{'n' if nullable else 'v'}", type=type_name, nullable=nullable)
        for i, type_name in enumerate(EDGES)
        for nullable in (True, False)
    ),
)


def edge_rows() -> list[Row]:
    """Each edge value at least once, in the nullable and in the other column; one row all NULL."""
    count = max(len(values) for values in EDGES.values())
    rows = [
        tuple(i if c.name == "id" else EDGES[c.type][(i + 3 * n) % len(EDGES[c.type])] for n, c in enumerate(COLUMNS))
        for i in range(count)
    ]
    nulls = tuple(None if c.nullable else v for c, v in zip(COLUMNS, rows[0], strict=True))
    return [*rows, (count, *nulls[1:])]


# PostgreSQL has no U+0000 in text, and no text has surrogates; NUL has a test of its own.
CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters="\0")


def values(column: Column) -> st.SearchStrategy[Any]:
    spec = column.spec
    bounds = {"bigint": 63, "int": 31, "smallint": 15}
    if column.type in bounds:
        plain: st.SearchStrategy[Any] = st.integers(-(2 ** bounds[column.type]), 2 ** bounds[column.type] - 1)
    elif column.type == "bit":
        plain = st.booleans()
    elif column.type == "uniqueidentifier":
        plain = st.uuids()
    elif column.type == "date":
        plain = st.dates(date(1970, 1, 1), date(2149, 6, 6))
    elif column.type == "datetime2(6)":
        plain = st.datetimes(FIRST, LAST)
    elif spec.precision:
        top = 10**spec.precision - 1
        plain = st.integers(-top, top).map(lambda n: exact(n, spec.scale))
    else:
        plain = st.text(CHARACTERS, max_size=spec.max_length or 40)
    if column.name != "id":
        plain = st.one_of(plain, st.sampled_from(EDGES[column.type]))
    return st.one_of(st.none(), plain) if column.nullable else plain


ROWS = st.lists(st.tuples(*(values(c) for c in COLUMNS)), max_size=12)


# --------------------------------------------------------------------------------------------- the engines


@dataclass
class Trio:
    """The three implementations over one list of rows; each loads it in its own way."""

    pg: psycopg.Connection[Any]
    ch: ClickHouseClient
    columns: Sequence[Column] = COLUMNS
    table: str = field(default_factory=lambda: f"rows_{uuid4().hex[:12]}")

    def create(self) -> None:
        definitions = ", ".join(
            f"{postgres.quote(c.name)} {postgres.physical_type(c.type)}{'' if c.nullable else ' NOT NULL'}"
            for c in self.columns
        )
        self.pg.execute(f"CREATE TEMPORARY TABLE {self.table} ({definitions})")
        self.create_clickhouse()

    def create_clickhouse(self) -> None:
        definitions = ", ".join(
            f"{clickhouse.quote(c.name)} {c.spec.clickhouse_column(c.nullable)}" for c in self.columns
        )
        self.ch.command(f"CREATE TABLE {self.table} ({definitions}) ENGINE = MergeTree ORDER BY tuple()")

    def load(self, rows: Sequence[Row]) -> None:
        self.pg.execute(f"TRUNCATE {self.table}")
        with self.pg.cursor() as cursor, cursor.copy(f"COPY {self.table} FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
        self.load_clickhouse(rows)

    def load_clickhouse(self, rows: Sequence[Row]) -> None:
        self.ch.command(f"TRUNCATE TABLE {self.table}")
        lines = (
            json.dumps(dict(zip((c.name for c in self.columns), row, strict=True)), default=str, ensure_ascii=False)
            for row in rows
        )
        if rows:
            self.ch.raw_insert(self.table, insert_block="\n".join(lines).encode(), fmt="JSONEachRow")

    def arrow(self, rows: Sequence[Row]) -> pa.RecordBatch:
        def arrow_value(value: Any) -> Any:
            return str(value) if isinstance(value, UUID) else value

        return pa.record_batch(
            [
                pa.array(
                    [
                        v.replace(tzinfo=UTC) if isinstance(v, datetime) else arrow_value(v)
                        for v in (row[i] for row in rows)
                    ],
                    c.spec.arrow,
                )
                for i, c in enumerate(self.columns)
            ],
            names=[c.name for c in self.columns],
        )

    def postgres_digest(self, where: str = "true") -> SetDigest:
        row = self.pg.execute(postgres.set_digest_sql(self.columns, self.table, where)).fetchone()
        assert row is not None
        return postgres.parse(row)

    def clickhouse_digest(self, where: str = "1", settings: dict[str, Any] | None = None) -> SetDigest:
        query = clickhouse.set_digest_sql(self.columns, self.table, where)
        return clickhouse.parse(self.ch.query(query, settings=settings).result_rows[0])

    def digests(self, rows: Sequence[Row]) -> dict[str, SetDigest]:
        self.load(rows)
        return {
            "postgres": self.postgres_digest(),
            "clickhouse": self.clickhouse_digest(),
            "arrow": digest_batches(self.columns, [self.arrow(rows)]),
        }


def all_are(digest: SetDigest) -> dict[str, SetDigest]:
    return {"postgres": digest, "clickhouse": digest, "arrow": digest}


@pytest.fixture(scope="module")
def digest_pg(engines: Engines) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(engines.pg.conninfo, autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="module")
def digest_ch(engines: Engines) -> Iterator[ClickHouseClient]:
    client = connect(engines.clickhouse)
    database = f"t_{uuid4().hex[:12]}"
    client.command(f"CREATE DATABASE {database} ENGINE = Atomic")
    inside = connect(replace(engines.clickhouse, database=database))
    yield inside
    inside.close()
    client.command(f"DROP DATABASE {database} SYNC")
    client.close()


@pytest.fixture(scope="module")
def trio(digest_pg: psycopg.Connection[Any], digest_ch: ClickHouseClient) -> Trio:
    trio = Trio(digest_pg, digest_ch)
    trio.create()
    return trio


# ----------------------------------------------------------------------------------------------- the tests


def test_reference_agrees_with_sha256sum() -> None:
    # printf '1:12:ab~' | sha256sum
    columns = [Column(name=n, type=t, nullable=True) for n, t in (("a", "int"), ("b", "nvarchar(9)"), ("c", "date"))]
    assert reference_text(columns, (1, "ab", None)) == "1:12:ab~"
    assert reference_digest(columns, [(1, "ab", None)]) == SetDigest(
        1, (0x9A1C5931761F2942, 0xDC1F3D523725AB4B, 0xBD71C55424C62473, 0xBF36A130B7A3EF3F)
    )


def test_edge_rows_encode_alike_in_every_engine(trio: Trio) -> None:
    rows = edge_rows()
    expected = [reference_text(COLUMNS, row) for row in rows]
    trio.load(rows)

    in_postgres = trio.pg.execute(f"SELECT {postgres.row_text_sql(COLUMNS)} FROM {trio.table} ORDER BY id").fetchall()
    assert [text for (text,) in in_postgres] == expected
    in_clickhouse = trio.ch.query(
        f"SELECT {clickhouse.row_text_sql(COLUMNS)} FROM {trio.table} ORDER BY id"
    ).result_rows
    assert [text for (text,) in in_clickhouse] == expected
    assert row_texts(COLUMNS, trio.arrow(rows)).to_pylist() == expected


def test_edge_rows_have_one_digest(trio: Trio) -> None:
    rows = edge_rows()
    assert trio.digests(rows) == all_are(reference_digest(COLUMNS, rows))


def test_no_rows_have_the_empty_digest(trio: Trio) -> None:
    assert trio.digests([]) == all_are(SetDigest(0, (0, 0, 0, 0)))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=ROWS)
def test_generated_rows_have_one_digest(trio: Trio, rows: list[Row]) -> None:
    assert trio.digests(rows) == all_are(reference_digest(COLUMNS, rows))


def test_many_rows_have_one_digest(trio: Trio) -> None:
    # Lane sums pass 2**64 many times, and Arrow's rows span several slices.
    rng = random.Random(20240229)

    def value(column: Column, i: int) -> Any:
        if column.name == "id":
            return i
        if column.nullable and rng.random() < 0.1:
            return None
        if column.type == "nvarchar(max)":
            return "".join(rng.choices(string.printable + "äß😀 ", k=rng.randrange(12)))
        if column.type == "datetime2(6)":
            return FIRST + timedelta(microseconds=rng.randrange((LAST - FIRST) // timedelta(microseconds=1)))
        if column.type == "bigint":
            return rng.randrange(-(2**63), 2**63)
        if column.spec.precision:
            return exact(rng.randrange(-(10**column.spec.precision) + 1, 10**column.spec.precision), column.spec.scale)
        return rng.choice(EDGES[column.type])

    rows = [tuple(value(c, i) for c in COLUMNS) for i in range(10_000)]
    expected = reference_digest(COLUMNS, rows)
    assert trio.digests(rows) == all_are(expected)
    half = len(rows) // 3
    assert trio.postgres_digest(f"id < {half}") + trio.postgres_digest(f"id >= {half}") == expected
    assert trio.clickhouse_digest(f"id < {half}") + trio.clickhouse_digest(f"id >= {half}") == expected
    assert digest_batches(COLUMNS, [trio.arrow(rows[:half]), trio.arrow(rows[half:])]) == expected


def test_order_is_nothing_and_multiplicity_is_everything(trio: Trio) -> None:
    rows = edge_rows()
    shuffled = random.Random(7).sample(rows, len(rows))
    assert shuffled != rows
    once = trio.digests(rows)
    assert trio.digests(shuffled) == once
    twice = trio.digests([*rows, rows[4]])
    assert twice == all_are(reference_digest(COLUMNS, [*rows, rows[4]]))
    other_twice = trio.digests([*rows, rows[5]])
    for name in once:
        assert len({once[name], twice[name], other_twice[name]}) == 3


def small(*types: str) -> tuple[Column, ...]:
    return tuple(Column(name=f"c{i}", type=t, nullable=True) for i, t in enumerate(types))


@pytest.mark.parametrize(
    ("types", "left", "right"),
    [
        (("nvarchar(max)", "nvarchar(max)"), ("ab", "c"), ("a", "bc")),
        (("nvarchar(max)", "nvarchar(max)"), ("a1:b", ""), ("a", "1:b")),
        (("nvarchar(max)", "nvarchar(max)"), ("~", None), (None, "~")),
        (("nvarchar(max)", "nvarchar(max)"), ("", None), (None, "")),
        (("nvarchar(max)",), ("",), (None,)),
        (("nvarchar(max)",), ("a ",), ("a",)),
        (("nvarchar(max)",), ("e\u0301",), ("é",)),
        (("nvarchar(max)",), ("A",), ("a",)),
        (("bit",), (False,), (None,)),
        (("int", "int"), (1, 12), (11, 2)),
        (("decimal(4,2)",), (exact(1, 2),), (exact(-1, 2),)),
    ],
)
def test_near_rows_differ(digest_pg: Any, digest_ch: Any, types: tuple[str, ...], left: Row, right: Row) -> None:
    columns = small(*types)
    other = Trio(digest_pg, digest_ch, columns)
    other.create()
    one, two = other.digests([left]), other.digests([right])
    assert one == all_are(reference_digest(columns, [left]))
    assert two == all_are(reference_digest(columns, [right]))
    assert one["arrow"].lanes != two["arrow"].lanes


def test_nul_characters_and_tinyint_in_clickhouse_and_arrow(digest_pg: Any, digest_ch: Any) -> None:
    # PostgreSQL has neither.
    columns = small("nvarchar(max)", "nchar(4)", "tinyint")
    rows: list[Row] = [("\0", "a\0", 0), ("a\0b", "\0  ", 255), (None, None, None)]
    other = Trio(digest_pg, digest_ch, columns)
    other.create_clickhouse()
    other.load_clickhouse(rows)
    in_clickhouse = other.clickhouse_digest()
    expected = reference_digest(columns, rows)
    assert in_clickhouse == expected
    assert digest_batches(columns, [other.arrow(rows)]) == expected


@pytest.mark.parametrize(
    "setting",
    [
        "datestyle = 'German, DMY'",
        "datestyle = 'SQL, MDY'",
        "timezone = 'Asia/Kathmandu'",
        "extra_float_digits = -10",
        "bytea_output = 'escape'",
        "lc_numeric = 'C'",
        "standard_conforming_strings = off",
        "client_encoding = 'LATIN1'",
        "max_parallel_workers_per_gather = 0",
    ],
)
def test_postgres_settings_change_nothing(trio: Trio, setting: str) -> None:
    rows = edge_rows()
    trio.load(rows)
    trio.pg.execute(f"SET {setting}")
    try:
        digest = trio.postgres_digest()
        violations = trio.pg.execute(
            f"SELECT count(*) FROM {trio.table} WHERE {postgres.domain_violation_sql(COLUMNS)}"
        ).fetchone()
    finally:
        trio.pg.execute("RESET ALL")
    assert digest == reference_digest(COLUMNS, rows)
    assert violations == (0,)


@pytest.mark.parametrize(
    "setting",
    [
        {"session_timezone": "Asia/Kathmandu"},
        {"date_time_output_format": "iso"},
        {"date_time_64_output_format_cut_trailing_zeros_align_to_groups_of_thousands": 1},
        {"formatdatetime_f_prints_single_zero": 0, "formatdatetime_f_prints_scale_number_of_digits": 1},
        {"output_format_decimal_trailing_zeros": 0},
        {"bool_true_representation": "yes", "bool_false_representation": "no"},
        {"max_threads": 1, "max_block_size": 3},
    ],
)
def test_clickhouse_settings_change_nothing(trio: Trio, setting: dict[str, Any]) -> None:
    rows = edge_rows()
    trio.load(rows)
    assert trio.clickhouse_digest(settings=setting) == reference_digest(COLUMNS, rows)


# Domains: PostgreSQL holds more than ClickHouse.

OUTSIDE = [
    ("date", "1969-12-31"),
    ("date", "2149-06-07"),
    ("date", "infinity"),
    ("date", "-infinity"),
    ("date", "1970-01-01 BC"),
    ("datetime2(6)", "1899-12-31 23:59:59.999999"),
    ("datetime2(6)", "2300-01-01 00:00:00"),
    ("datetime2(6)", "infinity"),
    ("datetime2(6)", "-infinity"),
    ("datetime2(6)", "1970-01-01 00:00:00 BC"),
    ("decimal(18,4)", "NaN"),
]
INSIDE = [
    ("date", "1970-01-01"),
    ("date", "2149-06-06"),
    ("date", None),
    ("datetime2(6)", "1900-01-01 00:00:00"),
    ("datetime2(6)", "2299-12-31 23:59:59.999999"),
    ("datetime2(6)", None),
    ("decimal(18,4)", "99999999999999.9999"),
    ("decimal(18,4)", "-99999999999999.9999"),
    ("decimal(18,4)", None),
    ("decimal(38,38)", "0.99999999999999999999999999999999999999"),
    ("decimal(38,0)", "-99999999999999999999999999999999999999"),
    ("nvarchar(max)", "any"),
]


def violates(pg: Any, columns: Sequence[Column], row: Sequence[str | None], types: Sequence[str]) -> bool:
    cells = ", ".join(
        f"CAST(%s AS {type_}) AS {postgres.quote(c.name)}" for c, type_ in zip(columns, types, strict=True)
    )
    (answer,) = pg.execute(
        f"SELECT {postgres.domain_violation_sql(columns)} FROM (SELECT {cells}) AS r".encode(), row
    ).fetchone()
    assert isinstance(answer, bool)
    return answer


@pytest.mark.parametrize(("type_name", "value"), OUTSIDE)
def test_values_outside_the_domain_are_found(digest_pg: Any, type_name: str, value: str) -> None:
    columns = small(type_name, type_name, "nvarchar(max)")
    types = [postgres.physical_type(c.type) for c in columns]
    assert violates(digest_pg, columns, (value, None, "x"), types)
    assert violates(digest_pg, columns, (None, value, None), types)


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "100000000000000", "-100000000000000"])
def test_numerics_that_no_decimal_holds_are_found(digest_pg: Any, value: str) -> None:
    # numeric without precision: what a relation of another declaration may hold
    assert violates(digest_pg, small("decimal(18,4)"), (value,), ["numeric"])


@pytest.mark.parametrize(("type_name", "value"), INSIDE)
def test_values_inside_the_domain_are_not(digest_pg: Any, type_name: str, value: str | None) -> None:
    assert not violates(digest_pg, small(type_name), (value,), [postgres.physical_type(type_name)])


def test_values_outside_the_domain_never_pass_for_others(digest_pg: Any) -> None:
    # to_char() alone would give infinity the digest of NULL, and 1970 BC that of 1970.
    for type_name, inside in (("date", "1970-01-01"), ("datetime2(6)", "1970-01-01 00:00:00")):
        columns = small(type_name)
        seen = set()
        cells = [None, inside, *(value for t, value in OUTSIDE if t == type_name)]
        for cell in cells:
            relation = f"(SELECT CAST(%s AS {postgres.physical_type(type_name)}) AS c0) AS r"
            row = digest_pg.execute(postgres.set_digest_sql(columns, relation).encode(), (cell,)).fetchone()
            seen.add(postgres.parse(row))
        assert len(seen) == len(cells)


# Scopes


@pytest.mark.parametrize("day", [date(1900, 1, 1), date(1969, 12, 31), date(2024, 3, 31), date(2299, 12, 31)])
def test_scope_is_half_open_in_both_engines(digest_pg: Any, digest_ch: Any, day: date) -> None:
    columns = (
        Column(name="id", type="int", nullable=False),
        Column(name="at", type="datetime2(6)", nullable=False),
    )
    start = datetime(day.year, day.month, day.day)
    inside = [start, start + timedelta(microseconds=1), start + timedelta(days=1, microseconds=-1)]
    outside = [
        moment for moment in (start - timedelta(microseconds=1), start + timedelta(days=1)) if FIRST <= moment <= LAST
    ]
    scoped = Trio(digest_pg, digest_ch, columns)
    scoped.create()
    rows = list(enumerate([*inside, *outside]))
    expected = reference_digest(columns, rows[: len(inside)])
    try:
        scoped.load(rows)
        digest_pg.execute("SET timezone = 'America/New_York'; SET datestyle = 'SQL, DMY'")
        in_postgres = scoped.postgres_digest(postgres.scope_predicate("at", Scope.day(day)))
        in_clickhouse = scoped.clickhouse_digest(
            clickhouse.scope_predicate("at", Scope.day(day)), {"session_timezone": "America/New_York"}
        )
    finally:
        digest_pg.execute("RESET ALL")
    assert in_postgres == expected
    assert in_clickhouse == expected


# Types as PostgreSQL itself spells them


def test_declared_types_come_back_from_the_catalog(trio: Trio) -> None:
    found = trio.pg.execute(
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
        f" WHERE attrelid = '{trio.table}'::regclass AND attnum > 0 ORDER BY attnum"
    ).fetchall()
    assert [(name, postgres.canonical_type(spelled)) for name, spelled in found] == [(c.name, c.type) for c in COLUMNS]
