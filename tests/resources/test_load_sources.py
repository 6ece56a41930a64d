"""Sources of governed loads: columns, windows, one snapshot, exact values, and every refusal, on the real engines."""

import hashlib
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import psycopg
import pyarrow as pa
import pytest

from dpone_dagster.contracts.mart import Scope
from dpone_dagster.declarations.manifest import AcceptanceChecks, Process, TableRef
from dpone_dagster.errors import DponeError
from dpone_dagster.ports import LoadColumn, SourceSession
from resources.asset_rows import ArrowProbe, AssetLoadSource, _Spool
from resources.clickhouse.client import ClickHouseClient
from resources.clickhouse.source import ClickHouseLoadSource, read_clickhouse_table
from resources.embedded.engines import Engines
from resources.postgres.source import PostgresLoadSource

DAY = Scope.day("2024-03-10")
ODD = ('we"ird', "back`tick", "da-sh", "do.t", "Größe", "a b", "a_b", "A B", "c0", "c1", "back\\slash", "per%cent")


def process(source: dict[str, Any], *, key: tuple[str, ...] | None = None) -> Process:
    sink: dict[str, Any] = {"type": "clickhouse", "table": {"schema": "raw", "name": "t"}, "strategy": "merge"}
    if key is None:
        sink["strategy"] = "append" if source.get("read", {}).get("mode") != "daily" else "replace"
    else:
        sink["unique_key"] = list(key)
    return Process.parse({"name": "load", "source": source, "sink": sink})


def refusal(act: Callable[[], Any]) -> DponeError:
    with pytest.raises(DponeError) as caught:
        act()
    return caught.value


def rows_of(session: SourceSession) -> list[tuple[Any, ...]]:
    found = []
    for batch in session.read():
        assert batch.schema.names == [c.name for c in session.columns]
        assert batch.schema.types == [c.spec.arrow for c in session.columns]
        found += [tuple(values) for values in zip(*(column.to_pylist() for column in batch.columns), strict=True)]
    return found


def encoded_digest(rows: list[str]) -> tuple[int, int]:
    """Row count and first lane of the set digest, from row encodings that were written by hand."""
    lane = sum(int.from_bytes(hashlib.sha256(row.encode()).digest()[:8], "big") for row in rows) % 2**64
    return len(rows), lane


def read_spec(mode: str, column: str | None) -> dict[str, Any]:
    if mode == "whole":
        return {}
    spec: dict[str, Any] = {"mode": mode, "column": column}
    return {"read": {**spec, "start_date": "2020-01-01"} if mode == "daily" else spec}


@dataclass
class Postgres:
    """A schema of the test's own, and sources over it."""

    engines: Engines
    schema: str
    sql: psycopg.Connection[Any]

    def process(
        self,
        table: str | None = None,
        *,
        query: str | None = None,
        mode: str = "whole",
        column: str | None = None,
        key: tuple[str, ...] | None = None,
    ) -> Process:
        origin: dict[str, Any] = (
            {"table": {"schema": self.schema, "name": table}}
            if query is None
            else {"options": {"query": {"sql": query.replace("$s", self.schema)}}}
        )
        return process({"type": "sqlserver", **origin, **read_spec(mode, column)}, key=key)

    def source(self, options: str = "") -> PostgresLoadSource:
        conninfo = psycopg.conninfo.make_conninfo(self.engines.pg.conninfo, options=options or None)
        return PostgresLoadSource(conninfo=conninfo, uri=self.engines.pg.uri)

    def open(self, *args: Any, scope: Scope | None = None, above: str | None = None, **kwargs: Any) -> Any:
        return self.source().open(self.process(*args, **kwargs), scope=scope, above=above)

    def read(self, *args: Any, **kwargs: Any) -> list[tuple[Any, ...]]:
        with self.open(*args, **kwargs) as session:
            return rows_of(session)

    def refusal(self, *args: Any, **kwargs: Any) -> DponeError:
        return refusal(lambda: self.read(*args, **kwargs))


@pytest.fixture
def postgres(engines: Engines, pg_schema: str) -> Iterator[Postgres]:
    with psycopg.connect(engines.pg.conninfo, autocommit=True) as connection:
        connection.execute(f"set search_path = {pg_schema}")
        yield Postgres(engines, pg_schema, connection)


# ---------------------------------------------------------------------------------------- PostgreSQL: columns


def test_a_table_arrives_with_its_types_and_values(postgres: Postgres) -> None:
    postgres.sql.execute(
        """create table t (i2 smallint not null, i4 integer, i8 bigint, b boolean, u uuid, d date, at timestamp,
                           n numeric(38,10), v varchar(5), c char(4), x text);
           insert into t values
             (-32768, 2147483647, -9223372036854775808, true, '0A000000-0000-0000-0000-00000000000f', '2149-06-06',
              '2024-03-10 23:59:59.999999', 1234567890123456789012345678.0123456789, 'äöü''\\', 'ab', ''),
             (1, null, null, null, null, null, null, null, null, null, null)"""
    )
    with postgres.open("t") as session:
        assert [(c.name, c.type, c.nullable) for c in session.columns] == [
            ("i2", "smallint", False),
            ("i4", "int", True),
            ("i8", "bigint", True),
            ("b", "bit", True),
            ("u", "uniqueidentifier", True),
            ("d", "date", True),
            ("at", "datetime2(6)", True),
            ("n", "decimal(38,10)", True),
            ("v", "nvarchar(5)", True),
            ("c", "nchar(4)", True),
            ("x", "nvarchar(max)", True),
        ]
        assert session.snapshot
        assert rows_of(session) == [
            (
                -32768,
                2147483647,
                -(2**63),
                True,
                "0a000000-0000-0000-0000-00000000000f",
                date(2149, 6, 6),
                datetime(2024, 3, 10, 23, 59, 59, 999999, tzinfo=UTC),
                Decimal("1234567890123456789012345678.0123456789"),
                "äöü'\\",
                "ab",
                "",
            ),
            (1, *(None,) * 10),
        ]
        assert session.probe.side == "source"
        assert session.probe.dataset == f"{postgres.schema}.t"
        assert session.probe.row_count() == 2


def test_names_of_any_kind_stay_what_they_are(postgres: Postgres) -> None:
    quoted = ['"' + name.replace('"', '""') + '"' for name in ODD]
    postgres.sql.execute(f'create table "o""d.d" ({", ".join(f"{name} integer" for name in quoted)})')
    postgres.sql.execute(f'insert into "o""d.d" values ({", ".join(str(i) for i in range(len(ODD)))})')
    expected = [tuple(range(len(ODD)))]
    with postgres.open('o"d.d') as session:
        assert [c.name for c in session.columns] == list(ODD)
        assert rows_of(session) == expected
        # Each field is `<length>:<digits>`: ten of one digit, two of two.
        text = "".join(f"{len(str(i))}:{i}" for i in range(len(ODD)))
        digest = session.probe.digest(session.columns)
        assert (digest.rows, digest.lanes[0]) == encoded_digest([text])
    for column in ODD:
        with postgres.open('o"d.d', mode="watermark", column=column, key=(column,)) as session:
            assert session.window.up_to == str(ODD.index(column))
            assert rows_of(session) == expected


@pytest.mark.parametrize(
    "type_",
    ["double precision", "real", "numeric", "timestamptz", "timestamp(3)", "time", "interval", "money", "json", "bytea",
     "text[]", "varchar(4001)", "varchar", "oid", "int4range", "numeric(4,-2)"],
)  # fmt: skip
def test_a_type_without_an_exact_counterpart_is_refused_by_name(postgres: Postgres, type_: str) -> None:
    postgres.sql.execute(f'create table t (fine integer, "b ad" {type_})')
    for error in (postgres.refusal("t"), postgres.refusal(query="select * from $s.t")):
        assert (error.code, error.details["field"]) == ("DPONE_TYPE_UNSUPPORTED", "b ad")


def test_an_absent_table_and_one_without_columns_are_refused(postgres: Postgres) -> None:
    assert postgres.refusal("nobody").code == "DPONE_SOURCE_ABSENT"
    postgres.sql.execute("create table bare (); create sequence s; create view v as select 1::int as one")
    assert postgres.refusal("bare").code == "DPONE_SOURCE_COLUMN"
    assert postgres.refusal("s").code == "DPONE_SOURCE_ABSENT"
    assert postgres.read("v") == [(1,)]


def test_a_reserved_name_is_refused(postgres: Postgres) -> None:
    postgres.sql.execute('create table t (a int, "__DPONE__loaded_at" timestamp)')
    error = postgres.refusal("t")
    assert (error.code, error.details["field"]) == ("DPONE_SOURCE_COLUMN", "__DPONE__loaded_at")


def test_an_engine_that_is_away_says_so(postgres: Postgres) -> None:
    source = PostgresLoadSource(conninfo="host=127.0.0.1 port=1 dbname=x", uri="postgresql://127.0.0.1:1/x")
    error = refusal(lambda: source.open(postgres.process("t"), scope=None, above=None).__enter__())
    assert error.code == "DPONE_ENGINE_UNAVAILABLE"


# ---------------------------------------------------------------------------------------- PostgreSQL: queries


def test_a_query_is_described_without_being_run(postgres: Postgres) -> None:
    # Run once, it would divide by zero.
    with postgres.open(query="select n::smallint as n, 1 / (n - n) as bad from generate_series(1, 3) as n") as session:
        assert [(c.name, c.type, c.nullable) for c in session.columns] == [
            ("n", "smallint", True),
            ("bad", "int", True),
        ]
        assert session.probe.dataset.startswith("query sha256:")
        error = refusal(lambda: rows_of(session))
    assert error.code == "DPONE_SOURCE_REFUSED"


def test_a_query_is_read_with_its_key_proven(postgres: Postgres) -> None:
    postgres.sql.execute("create table t (id int, name text); insert into t values (1, 'x'), (2, null)")
    query = "with w as (select * from $s.t) -- ends in a comment\nselect id, name from w order by id; -- like this"
    with postgres.open(query=query, key=("id",)) as session:
        assert [c.nullable for c in session.columns] == [False, True]
        assert rows_of(session) == [(1, "x"), (2, None)]
    error = postgres.refusal(query=query, key=("name",))
    assert (error.code, error.details["rows"]) == ("DPONE_KEY_NULL", 1)
    assert postgres.refusal(query=query, key=("nobody",)).code == "DPONE_SOURCE_COLUMN"


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("select 1 as a, 2 as a", "DPONE_SOURCE_COLUMN"),
        ("select 1 as a, 2 as b, 3 as a from generate_series(1, 2)", "DPONE_SOURCE_COLUMN"),
        ("select 1 as __dpone__row_id", "DPONE_SOURCE_COLUMN"),
        ("select 1 as a; select 2 as a", "DPONE_SQL_NOT_READING"),
        ("delete from $s.t returning a", "DPONE_SQL_NOT_READING"),
        ("with gone as (delete from $s.t returning a) select a from gone", "DPONE_SQL_NOT_READING"),
        ("select a from $s.t for update", "DPONE_SQL_NOT_READING"),
        ("select 1) as x; drop table $s.t; select * from (select 1", "DPONE_SQL_NOT_READING"),
        ("select secret_value_17 from $s.t", "DPONE_SOURCE_REFUSED"),
        ("select null as nothing, null::record as r", "DPONE_TYPE_UNSUPPORTED"),
    ],
)
def test_a_query_that_is_not_one_reading_statement_is_refused(postgres: Postgres, query: str, code: str) -> None:
    postgres.sql.execute("create table t (a int); insert into t values (7)")
    error = postgres.refusal(query=query)
    assert error.code == code
    assert "secret_value_17" not in str(error)
    assert postgres.sql.execute("select a from t").fetchall() == [(7,)]


def test_a_function_that_writes_is_stopped_by_the_read_only_transaction(postgres: Postgres) -> None:
    postgres.sql.execute(
        f"""create table t (a int);
            create function sneaky() returns int language sql as
              'insert into {postgres.schema}.t values (1) returning a';
            create view v as select {postgres.schema}.sneaky() as a"""
    )
    assert postgres.refusal("v").code == "DPONE_SOURCE_REFUSED"
    assert postgres.sql.execute("select count(*) from t").fetchone() == (0,)


def test_a_query_whose_file_was_not_read_is_refused(postgres: Postgres) -> None:
    unread = process({"type": "mssql", "options": {"query": {"sql_file": "q.sql"}}})
    error = refusal(lambda: postgres.source().open(unread, scope=None, above=None).__enter__())
    assert error.code == "DPONE_SOURCE_ABSENT"


# ----------------------------------------------------------------------------------------- PostgreSQL: values


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        ("timestamp", "infinity"),
        ("timestamp", "-infinity"),
        ("timestamp", "1899-12-31 23:59:59.999999"),
        ("timestamp", "2300-01-01"),
        ("timestamp", "2024-03-10 12:00:00 BC"),
        ("date", "infinity"),
        ("date", "1969-12-31"),
        ("date", "2149-06-07"),
        ("numeric(10,2)", "NaN"),
    ],
)
def test_a_value_that_would_become_another_is_refused_before_any_row(
    postgres: Postgres, type_: str, value: str
) -> None:
    postgres.sql.execute(f"create table t (id int, \"v l\" {type_}); insert into t values (1, null), (2, '{value}')")
    error = refusal(lambda: postgres.open("t").__enter__())
    assert (error.code, error.details["columns"]) == ("DPONE_VALUE_OUTSIDE_DOMAIN", ["v l"])
    # Outside the window it is nobody's business.
    with postgres.open("t", mode="watermark", column="id", above="2") as session:
        assert rows_of(session) == []


def test_the_last_instant_of_a_day_written_as_24_00_is_the_next_days_first(postgres: Postgres) -> None:
    postgres.sql.execute("create table t (at timestamp not null); insert into t values ('2024-03-10 24:00')")
    assert postgres.read("t") == [(datetime(2024, 3, 11, tzinfo=UTC),)]
    assert postgres.read("t", mode="daily", column="at", scope=DAY) == []


# --------------------------------------------------------------------------------------- PostgreSQL: snapshot


def test_counts_digests_and_rows_are_of_one_moment_while_others_write(postgres: Postgres) -> None:
    postgres.sql.execute(
        "create table t (id int not null, v text not null);"
        " insert into t select i, 'old' from generate_series(1, 1000) as i"
    )
    expected = encoded_digest([f"{len(str(i))}:{i}3:old" for i in range(1, 1001)])
    with postgres.open("t", mode="watermark", column="id") as session:
        postgres.sql.execute("update t set v = 'new' where id <= 500")
        postgres.sql.execute("insert into t values (1001, 'new'), (0, 'late')")
        postgres.sql.execute("delete from t where id > 900")
        digest = session.probe.digest(session.columns)
        assert (digest.rows, digest.lanes[0]) == expected
        reading = session.read()
        first = next(reading)
        postgres.sql.execute("delete from t")
        rows = [*first.column(1).to_pylist(), *(v for batch in reading for v in batch.column(1).to_pylist())]
        assert rows == ["old"] * 1000
        assert session.probe.row_count() == 1000
        assert sorted(row[0] for row in rows_of(session)) == list(range(1, 1001))  # and once more
        assert session.window.up_to == "1000"
    with postgres.open("t") as session:
        assert session.probe.row_count() == 0


def test_a_session_that_is_ended_midway_is_no_refusal(postgres: Postgres) -> None:
    query = "select n as id, repeat('x', 1000) as s from generate_series(1, 200000) as n"
    with postgres.open(query=query) as session:
        reading = session.read()
        next(reading)
        ended = postgres.sql.execute(
            """select count(pg_terminate_backend(pid)) from pg_stat_activity
               where query like %s and pid <> pg_backend_pid() and application_name <> 'dpone-load-source'""",
            ["%repeat(''x'', 1000)%generate_series(1, 200000)%".replace("''", "'")],
        ).fetchone()
        assert ended == (1,)
        assert refusal(lambda: list(reading)).code == "DPONE_ENGINE_UNAVAILABLE"


def test_the_session_ends_with_the_context(postgres: Postgres) -> None:
    postgres.sql.execute("create table t (id int); insert into t values (1)")
    tag = f"tag-{uuid.uuid4().hex[:8]}"
    source = PostgresLoadSource(
        conninfo=postgres.engines.pg.conninfo, uri=postgres.engines.pg.uri, application_name=tag
    )
    states = "select state from pg_stat_activity where application_name = %s"
    with source.open(postgres.process("t"), scope=None, above=None):
        assert postgres.sql.execute(states, [tag]).fetchall() == [("idle in transaction",)]
    for _ in range(100):
        if not postgres.sql.execute(states, [tag]).fetchall():
            return
        time.sleep(0.05)
    raise AssertionError("the session is still there")


# ---------------------------------------------------------------------------------------- PostgreSQL: windows


def test_a_day_is_half_open(postgres: Postgres) -> None:
    postgres.sql.execute(
        """create table t (id int, at timestamp);
           insert into t values (1, '2024-03-09 23:59:59.999999'), (2, '2024-03-10'), (3, '2024-03-10 23:59:59.999999'),
                                (4, '2024-03-11')"""
    )
    with postgres.open("t", mode="daily", column="at", scope=DAY) as session:
        assert session.window.scope == DAY
        assert session.columns[1].nullable is False
        assert [row[0] for row in rows_of(session)] == [2, 3]
        assert session.probe.row_count() == 2
    postgres.sql.execute("insert into t values (5, null), (6, null)")
    error = postgres.refusal("t", mode="daily", column="at", scope=DAY)
    assert (error.code, error.details["rows"]) == ("DPONE_SOURCE_COLUMN", 2)
    assert postgres.refusal("t", mode="daily", column="id", scope=DAY).code == "DPONE_SOURCE_COLUMN"
    assert postgres.refusal("t", mode="daily", column="nobody", scope=DAY).code == "DPONE_SOURCE_COLUMN"
    assert postgres.refusal("t", mode="daily", column="at").code == "DPONE_SCOPE_NOT_A_DAY"


WATERMARKS = [
    ("smallint", ["-5", "0", "7"], "0", ["7"]),
    ("bigint", ["-9223372036854775808", "9223372036854775806", "9223372036854775807"], "9223372036854775806", None),
    ("date", ["2024-02-29", "2024-03-01", "2149-06-06"], "2024-03-01", None),
    (
        "timestamp",
        ["1900-01-01T00:00:00.000000", "2024-03-10T12:00:00.000001", "2024-03-10T12:00:00.000002"],
        "2024-03-10T12:00:00.000001",
        None,
    ),
    ("numeric(10,4)", ["-0.5000", "999999.9998", "999999.9999"], "999999.9998", None),
    ("numeric(5,0)", ["-7", "10", "11"], "10", None),
    ("numeric(3,3)", ["-0.001", "0.010", "0.011"], "0.010", None),
]


@pytest.mark.parametrize(("type_", "values", "above", "_"), WATERMARKS)
def test_a_watermark_window_is_above_the_checkpoint_up_to_the_highest(
    postgres: Postgres, type_: str, values: list[str], above: str, _: Any
) -> None:
    postgres.sql.execute(f"create table t (id int, w {type_} not null)")
    for i, value in enumerate(values):
        postgres.sql.execute("insert into t values (%s, %s)", [i, value])  # the engine reads the text by itself
    source = postgres.source("-c datestyle=German -c timezone=Asia/Tokyo -c lc_numeric=C -c extra_float_digits=-5")
    declared = postgres.process("t", mode="watermark", column="w")

    def look(above: str | None) -> tuple[Any, Any, list[int]]:
        with source.open(declared, scope=None, above=above) as session:
            return session.window.above, session.window.up_to, sorted(row[0] for row in rows_of(session))

    assert look(None) == (None, values[2], [0, 1, 2])
    assert look(above) == (above, values[2], [2])
    assert look(values[2]) == (values[2], values[2], [])


def test_a_watermark_that_moved_backwards_and_an_empty_table_keep_the_checkpoint(postgres: Postgres) -> None:
    postgres.sql.execute("create table t (w int not null)")

    def look(above: str | None) -> tuple[Any, Any, int]:
        with postgres.open("t", mode="watermark", column="w", above=above) as session:
            assert rows_of(session) == []
            return session.window.above, session.window.up_to, session.probe.row_count()

    assert look(None) == (None, None, 0)
    assert look("10") == ("10", "10", 0)
    postgres.sql.execute("insert into t values (9)")
    assert look("10") == ("10", "10", 0)


def test_a_watermark_that_cannot_be_one_is_refused(postgres: Postgres) -> None:
    postgres.sql.execute(
        """create table t (name text not null, u uuid not null, b boolean not null,
                           i int, at timestamp, n numeric(4,1));
           insert into t values ('a', gen_random_uuid(), true, 1, 'infinity', 'NaN'),
             ('b', gen_random_uuid(), true, null, '2024-01-01', 1),
             ('c', gen_random_uuid(), false, null, '2024-01-01', 1)"""
    )

    def code(column: str, above: str | None = None) -> str:
        return postgres.refusal("t", mode="watermark", column=column, above=above).code

    assert [code(c) for c in ("name", "u", "b")] == ["DPONE_WATERMARK_TYPE"] * 3
    assert code("nobody") == "DPONE_SOURCE_COLUMN"
    error = postgres.refusal("t", mode="watermark", column="i")
    assert (error.code, error.details["rows"]) == ("DPONE_WATERMARK_NULL", 2)
    assert code("at") == "DPONE_VALUE_OUTSIDE_DOMAIN"
    assert code("n") == "DPONE_VALUE_OUTSIDE_DOMAIN"


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        ("int", "1' or true --"), ("int", "1.5"), ("int", " 1"), ("int", "+1"), ("int", "١"), ("int", "9" * 19),
        ("int", ""), ("date", "20240310"), ("date", "2024-03-10T00:00:00.000000"), ("timestamp", "2024-03-10"),
        ("timestamp", "2024-03-10T12:00:00.5"), ("timestamp", "2024-03-10T12:00:00.500000Z"),
        ("numeric(5,2)", "1.5"), ("numeric(5,2)", "1000.00"), ("numeric(5,2)", "NaN"), ("numeric(5,2)", "1.50\n"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_no_value_of_the_column_is_refused(postgres: Postgres, type_: str, text: str) -> None:
    postgres.sql.execute(f"create table t (w {type_} not null)")
    assert postgres.refusal("t", mode="watermark", column="w", above=text).code == "DPONE_WATERMARK_TYPE"


def test_two_million_rows_stream_flat(postgres: Postgres) -> None:
    text = "x" * 100
    query = f"select n as id, n / 4.0::numeric(12,2) as q0, '{text}'::text as s from generate_series(1, 2000000) as n"
    query = query.replace("n / 4.0::numeric(12,2)", "(n / 4.0)::numeric(12,2)")
    with postgres.open(query=query) as session:
        rows, total, grown = flat(session)
    assert (rows, total) == (2_000_000, 2_000_001_000_000)
    assert grown < 120 << 20  # the rows themselves are over 250 MiB


def flat(session: SourceSession) -> tuple[int, int, int]:
    """Return rows, the sum of the first column, and by how many bytes the process grew after the first batch."""
    rows = total = highest = 0
    me = psutil.Process()
    start = 0
    for i, batch in enumerate(session.read()):
        start = start or me.memory_info().rss
        rows += batch.num_rows
        total += pa.compute.sum(batch.column(0)).as_py()
        if i % 8 == 0:
            highest = max(highest, me.memory_info().rss)
    return rows, total, highest - start


# ------------------------------------------------------------------------------------------------- ClickHouse


@dataclass
class House:
    """A database of the test's own, and sources over it."""

    client: ClickHouseClient
    database: str
    prefix: str

    def process(
        self,
        table: str | None = None,
        *,
        query: str | None = None,
        mode: str = "whole",
        column: str | None = None,
        key: tuple[str, ...] | None = None,
    ) -> Process:
        origin: dict[str, Any] = (
            {"table": {"schema": self.database, "name": table}}
            if query is None
            else {"options": {"query": {"sql": query}}}
        )
        return process({"type": "clickhouse", **origin, **read_spec(mode, column)}, key=key)

    def open(self, *args: Any, scope: Scope | None = None, above: str | None = None, **kwargs: Any) -> Any:
        source = ClickHouseLoadSource(self.client, self.prefix)
        return source.open(self.process(*args, **kwargs), scope=scope, above=above)

    def read(self, *args: Any, **kwargs: Any) -> list[tuple[Any, ...]]:
        with self.open(*args, **kwargs) as session:
            return rows_of(session)

    def refusal(self, *args: Any, **kwargs: Any) -> DponeError:
        return refusal(lambda: self.read(*args, **kwargs))


@pytest.fixture
def house(clickhouse: ClickHouseClient, ch_database: str) -> House:
    return House(clickhouse, ch_database, f"dpone-t{uuid.uuid4().hex[:8]}-")


def test_a_clickhouse_table_arrives_with_its_types_and_values(house: House) -> None:
    house.client.command(
        """CREATE TABLE t (u8 UInt8, i2 Nullable(Int16), i4 Int32, i8 Int64, b Nullable(Bool), u Nullable(UUID), d Date,
             at Nullable(DateTime64(6, 'UTC')), n Decimal(38, 10), small Decimal(4, 4), s Nullable(String),
             m Int32 MATERIALIZED 5, al Int32 ALIAS 6) ENGINE = MergeTree ORDER BY i4"""
    )
    house.client.command(
        """INSERT INTO t VALUES (255, -32768, 1, -9223372036854775808, true, '0A000000-0000-0000-0000-00000000000f',
             '2149-06-06', '2024-03-10 23:59:59.999999', '1234567890123456789012345678.0123456789', '-0.9999',
             'ä''\\\\'),
           (0, NULL, 2, 0, NULL, NULL, '1970-01-01', NULL, 0, 0, NULL)"""
    )
    with house.open("t") as session:
        assert [(c.name, c.type, c.nullable) for c in session.columns] == [
            ("u8", "tinyint", False),
            ("i2", "smallint", True),
            ("i4", "int", False),
            ("i8", "bigint", False),
            ("b", "bit", True),
            ("u", "uniqueidentifier", True),
            ("d", "date", False),
            ("at", "datetime2(6)", True),
            ("n", "decimal(38,10)", False),
            ("small", "decimal(4,4)", False),
            ("s", "nvarchar(max)", True),
        ]
        assert not session.snapshot
        assert sorted(rows_of(session), reverse=True) == [
            (
                255,
                -32768,
                1,
                -(2**63),
                True,
                "0a000000-0000-0000-0000-00000000000f",
                date(2149, 6, 6),
                datetime(2024, 3, 10, 23, 59, 59, 999999, tzinfo=UTC),
                Decimal("1234567890123456789012345678.0123456789"),
                Decimal("-0.9999"),
                "ä'\\",
            ),
            (0, None, 2, 0, None, None, date(1970, 1, 1), None, Decimal("0E-10"), Decimal("0E-4"), None),
        ]
        assert session.probe.row_count() == 2
        assert session.probe.dataset == f"{house.database}.t"


def test_clickhouse_names_of_any_kind_stay_what_they_are(house: House) -> None:
    quoted = ["`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`" for name in ODD]
    values = ", ".join(f"{i} AS {name}" for i, name in enumerate(quoted))
    house.client.command(
        f"CREATE TABLE `o``d.d` ({', '.join(f'{n} Int32' for n in quoted)}) ENGINE = MergeTree ORDER BY tuple()"
    )
    house.client.command(f"INSERT INTO `o``d.d` SELECT {values}")
    for column in ODD:
        with house.open("o`d.d", mode="watermark", column=column) as session:
            assert [c.name for c in session.columns] == list(ODD)
            assert session.window.up_to == str(ODD.index(column))
            assert rows_of(session) == [tuple(range(len(ODD)))]


@pytest.mark.parametrize(
    "type_",
    ["Float64", "DateTime", "DateTime64(3, 'UTC')", "DateTime64(6)", "DateTime64(6, 'Asia/Tokyo')", "UInt64", "Int8",
     "LowCardinality(String)", "Array(Int64)", "FixedString(4)", "Decimal(39, 2)", "Date32", "Enum8('a' = 1)",
     "Nullable(Float32)"],
)  # fmt: skip
def test_a_clickhouse_type_without_an_exact_counterpart_is_refused_by_name(house: House, type_: str) -> None:
    house.client.command(f"CREATE TABLE t (fine Int32, `b ad` {type_}) ENGINE = Memory")
    for error in (house.refusal("t"), house.refusal(query=f"SELECT * FROM {house.database}.t")):
        assert (error.code, error.details["field"]) == ("DPONE_TYPE_UNSUPPORTED", "b ad")


def test_a_clickhouse_query_is_described_and_read(house: House) -> None:
    query = "SELECT toInt64(number) AS id, if(number = 2, NULL, 'x') AS name FROM numbers(3) -- in a comment"
    with house.open(query=query, key=("id",)) as session:
        assert [(c.name, c.type, c.nullable) for c in session.columns] == [
            ("id", "bigint", False),
            ("name", "nvarchar(max)", True),
        ]
        assert rows_of(session) == [(0, "x"), (1, "x"), (2, None)]
    error = house.refusal(query=query, key=("name",))
    assert (error.code, error.details["rows"]) == ("DPONE_KEY_NULL", 1)


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("SELECT a, a FROM (SELECT toInt32(1) AS a)", "DPONE_SOURCE_COLUMN"),
        ("SELECT toInt32(1) AS __dpone__row_id", "DPONE_SOURCE_COLUMN"),
        ("SELECT 1 AS a; SELECT 2 AS a", "DPONE_SQL_NOT_READING"),
        ("DROP TABLE t", "DPONE_SQL_NOT_READING"),
        ("SELECT secret_value_17", "DPONE_ENGINE_REFUSED"),
        ("SELECT NULL AS nothing", "DPONE_TYPE_UNSUPPORTED"),
    ],
)
def test_a_clickhouse_query_that_will_not_do_is_refused(house: House, query: str, code: str) -> None:
    error = house.refusal(query=query)
    assert error.code == code
    assert "secret_value_17" not in str(error)


def test_clickhouse_texts_that_are_no_text_and_moments_out_of_range_are_refused(house: House) -> None:
    assert house.refusal(query="SELECT unhex('FF') AS s").code == "DPONE_VALUE_OUTSIDE_DOMAIN"
    out_of_range = "SELECT reinterpret(toInt64(10413792000000000), 'DateTime64(6, \\'UTC\\')') AS at"  # 2300-01-01
    assert house.refusal(query=out_of_range).code == "DPONE_VALUE_OUTSIDE_DOMAIN"


def test_an_absent_clickhouse_table_is_refused(house: House) -> None:
    assert house.refusal("nobody").code == "DPONE_SOURCE_ABSENT"


def test_a_clickhouse_day_is_half_open(house: House) -> None:
    house.client.command(
        "CREATE TABLE t (id Int32, at Nullable(DateTime64(6, 'UTC')), x Date) ENGINE = MergeTree ORDER BY id"
    )
    house.client.command(
        """INSERT INTO t VALUES (1, '2024-03-09 23:59:59.999999', 0), (2, '2024-03-10 00:00:00', 0),
           (3, '2024-03-10 23:59:59.999999', 0), (4, '2024-03-11 00:00:00', 0)"""
    )
    with house.open("t", mode="daily", column="at", scope=DAY) as session:
        assert session.columns[1].nullable is False
        assert sorted(row[0] for row in rows_of(session)) == [2, 3]
        assert session.probe.row_count() == 2
    house.client.command("INSERT INTO t VALUES (5, NULL, 0)")
    error = house.refusal("t", mode="daily", column="at", scope=DAY)
    assert (error.code, error.details["rows"]) == ("DPONE_SOURCE_COLUMN", 1)
    assert house.refusal("t", mode="daily", column="x", scope=DAY).code == "DPONE_SOURCE_COLUMN"


CLICKHOUSE_WATERMARKS = [
    ("UInt8", ["0", "254", "255"], "254"),
    ("Int64", ["-9223372036854775808", "9223372036854775806", "9223372036854775807"], "9223372036854775806"),
    ("Date", ["1970-01-01", "2024-03-01", "2149-06-06"], "2024-03-01"),
    (
        "DateTime64(6, 'UTC')",
        ["1900-01-01T00:00:00.000000", "2024-03-10T12:00:00.100000", "2024-03-10T12:00:00.100001"],
        "2024-03-10T12:00:00.100000",
    ),
    ("Decimal(38, 4)", ["-0.5000", f"{'1' * 34}.5677", f"{'1' * 34}.5678"], f"{'1' * 34}.5677"),
    ("Decimal(3, 3)", ["-0.001", "0.010", "0.011"], "0.010"),
]  # fmt: skip


@pytest.mark.parametrize(("type_", "values", "above"), CLICKHOUSE_WATERMARKS)
@pytest.mark.parametrize("nullable", [False, True])
def test_a_clickhouse_watermark_window(house: House, type_: str, values: list[str], above: str, nullable: bool) -> None:
    column = f"Nullable({type_})" if nullable else type_
    house.client.command(f"CREATE TABLE t (id Int32, w {column}) ENGINE = MergeTree ORDER BY id")

    def look(above: str | None) -> tuple[Any, Any, list[int], int]:
        with house.open("t", mode="watermark", column="w", above=above) as session:
            ids = sorted(row[0] for row in rows_of(session))
            return session.window.above, session.window.up_to, ids, session.probe.row_count()

    assert look(None) == (None, None, [], 0)
    assert look(above) == (above, above, [], 0)
    for i, value in enumerate(values):
        house.client.command(f"INSERT INTO t VALUES ({i}, '{value.replace('T', ' ')}')")
    assert look(None) == (None, values[2], [0, 1, 2], 3)
    assert look(above) == (above, values[2], [2], 1)
    assert look(values[2]) == (values[2], values[2], [], 0)
    if nullable:
        house.client.command("INSERT INTO t VALUES (9, NULL)")
        error = house.refusal("t", mode="watermark", column="w", above=above)
        assert (error.code, error.details["rows"]) == ("DPONE_WATERMARK_NULL", 1)


def test_clickhouse_streams_flat_under_its_prefix_and_stops_when_left(house: House) -> None:
    running = f"SELECT count() FROM system.processes WHERE startsWith(Settings['log_comment'], '{house.prefix}')"
    query = "SELECT toInt64(number + 1) AS id, repeat('x', 100) AS s FROM numbers(2000000)"
    with house.open(query=query) as session:
        rows, total, grown = flat(session)
        assert (rows, total) == (2_000_000, 2_000_001_000_000)
        assert grown < 120 << 20
        with closing(session.read()) as reading:
            next(reading)
            assert int(house.client.command(running)) == 1
        for _ in range(200):
            if int(house.client.command(running)) == 0:
                return
            time.sleep(0.05)
    raise AssertionError("the abandoned query still runs")


def test_a_table_is_read_back_without_its_lineage_columns_and_bounded(house: House) -> None:
    house.client.command(
        "CREATE TABLE t (`o d` Int32, __dpone__loaded_at DateTime64(6, 'UTC')) ENGINE = MergeTree ORDER BY `o d`"
    )
    house.client.command("INSERT INTO t SELECT number, now64(6) FROM numbers(10)")
    table = TableRef.parse({"schema": house.database, "name": "t"})
    rows = read_clickhouse_table(house.client, house.prefix, table, row_limit=10)
    assert rows.to_pydict() == {"o d": list(range(10))}
    error = refusal(lambda: read_clickhouse_table(house.client, house.prefix, table, row_limit=9))
    assert error.code == "DPONE_IO_MANAGER_TOO_MANY_ROWS"


# ------------------------------------------------------------------------------------------------ Python rows


def asset(rows: object, *, key: tuple[str, ...] | None = None) -> Any:
    return AssetLoadSource(rows).open(process({"type": "asset"}, key=key), scope=None, above=None)


def taken(rows: object) -> tuple[list[tuple[str, str]], list[tuple[Any, ...]]]:
    with asset(rows) as session:
        assert session.snapshot
        return [(c.name, c.type) for c in session.columns], rows_of(session)


TABLE = pa.table({"id": pa.array([1, 2], pa.int64()), "name": ["a", None]})


@pytest.mark.parametrize(
    "make",
    [
        lambda: TABLE,
        lambda: pa.concat_tables([TABLE.slice(0, 1), TABLE.slice(1)]),
        lambda: TABLE.to_batches()[0],
        lambda: pa.RecordBatchReader.from_batches(TABLE.schema, iter(TABLE.to_batches(max_chunksize=1))),
        lambda: iter(TABLE.to_batches(max_chunksize=1)),
        lambda: (batch for batch in TABLE.to_batches()),
        lambda: pd.DataFrame({"id": [1, 2], "name": ["a", None]}, index=[7, 8]),
        lambda: pd.DataFrame({"id": pd.array([1, 2], "Int64"), "name": ["a", float("nan")]}),
        lambda: TABLE.to_pandas(types_mapper=pd.ArrowDtype),
    ],
)
def test_rows_are_taken_in_every_form(make: Callable[[], object]) -> None:
    assert taken(make()) == ([("id", "bigint"), ("name", "nvarchar(max)")], [(1, "a"), (2, None)])


def test_polars_frames_are_taken() -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed")
    frame = polars.DataFrame({"id": [1, 2], "name": ["a", None]})
    expected = ([("id", "bigint"), ("name", "nvarchar(max)")], [(1, "a"), (2, None)])
    assert taken(frame) == expected
    assert taken(frame.lazy()) == expected


def test_a_frame_of_another_library_is_taken_by_what_it_offers() -> None:
    """Not polars itself; the two methods that polars' frames have."""

    class Frame:
        def to_arrow(self) -> pa.Table:
            return TABLE.cast(pa.schema([("id", pa.int64()), ("name", pa.large_string())]))

    class Lazy:
        def collect(self) -> Frame:
            return Frame()

    for frame in (Frame(), Lazy()):
        assert taken(frame) == ([("id", "bigint"), ("name", "nvarchar(max)")], [(1, "a"), (2, None)])


ID = uuid.UUID("0a000000-0000-0000-0000-00000000000f")
BERLIN = pa.array([1710111600], pa.timestamp("s", tz="Europe/Berlin"))  # 2024-03-10 23:00 UTC


@pytest.mark.parametrize(
    ("array", "type_", "value"),
    [
        (pa.array([True]), "bit", True),
        (pa.array([255], pa.uint8()), "tinyint", 255),
        (pa.array([-128], pa.int8()), "smallint", -128),
        (pa.array([-32768], pa.int16()), "smallint", -32768),
        (pa.array([65535], pa.uint16()), "int", 65535),
        (pa.array([-(2**31)], pa.int32()), "int", -(2**31)),
        (pa.array([2**32 - 1], pa.uint32()), "bigint", 2**32 - 1),
        (pa.array([2**63 - 1], pa.int64()), "bigint", 2**63 - 1),
        (pa.array([Decimal("-1.50")], pa.decimal128(5, 2)), "decimal(5,2)", Decimal("-1.50")),
        (pa.array([Decimal("1.50")], pa.decimal256(38, 2)), "decimal(38,2)", Decimal("1.50")),
        (pa.array([Decimal("1.50")], pa.decimal64(5, 2)), "decimal(5,2)", Decimal("1.50")),
        (pa.array([date(2024, 3, 10)]), "date", date(2024, 3, 10)),
        (BERLIN, "datetime2(6)", datetime(2024, 3, 10, 23, tzinfo=UTC)),
        (BERLIN.cast(pa.timestamp("ms", tz="UTC")), "datetime2(6)", datetime(2024, 3, 10, 23, tzinfo=UTC)),
        (BERLIN.cast(pa.timestamp("ns", tz="UTC")), "datetime2(6)", datetime(2024, 3, 10, 23, tzinfo=UTC)),
        (pa.array(["ä"], pa.large_string()), "nvarchar(max)", "ä"),
        (pa.array(["ä"], pa.string_view()), "nvarchar(max)", "ä"),
        (pa.array(["ä"]).dictionary_encode(), "nvarchar(max)", "ä"),
        (pa.array([ID.bytes], pa.uuid()), "uniqueidentifier", str(ID)),
    ],
)
def test_arrow_types_that_cross_exactly(array: Any, type_: str, value: Any) -> None:
    both = pa.table({"x": pa.chunked_array([array, pa.nulls(1, array.type)])})
    assert taken(both) == ([("x", type_)], [(value,), (None,)])


@pytest.mark.parametrize(
    ("array", "hint"),
    [
        (pa.array([1.5]), "decimal128"),
        (pa.array([1.5], pa.float32()), "decimal128"),
        (pa.array([1], pa.uint64()), "decimal128(20, 0)"),
        (pa.array([0], pa.timestamp("us")), "tz_localize"),
        (pa.array([Decimal(1)], pa.decimal256(39, 0)), "decimal128"),
        (pa.array([Decimal(100)], pa.decimal128(5, -2)), "decimal128"),
        (pa.nulls(1), "NULL"),
        (pa.array([b"x"]), "string"),
        (pa.array([[1]]), "string"),
        (pa.array([{"a": 1}]), "string"),
        (pa.array([0], pa.time64("us")), "string"),
        (pa.array([0], pa.duration("s")), "string"),
        (pa.array([1]).dictionary_encode(), "dictionary"),
    ],
)
def test_arrow_types_that_do_not_are_refused_with_a_way_out(array: Any, hint: str) -> None:
    error = refusal(lambda: taken(pa.table({"fine": [1], "b ad": array})))
    assert (error.code, error.details["field"]) == ("DPONE_TYPE_UNSUPPORTED", "b ad")
    assert hint in error.next_step


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1], pa.timestamp("ns", tz="UTC")),  # a nanosecond is not a microsecond
        pa.array([2**62], pa.timestamp("s", tz="UTC")),
        pa.array([-(2**62)], pa.timestamp("us", tz="UTC")),
        pa.array([-1], pa.date32()),
        pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]),
    ],
)
def test_values_that_no_engine_holds_are_refused(array: Any) -> None:
    error = refusal(lambda: taken(pa.table({"x": array})))
    assert (error.code, error.details["field"]) == ("DPONE_VALUE_OUTSIDE_DOMAIN", "x")


def test_pandas_values_become_what_they_mean() -> None:
    frame = pd.DataFrame(
        {
            "at": pd.to_datetime(["2024-03-10 12:00:00.123456", None]).tz_localize("UTC"),
            "d": [date(2024, 3, 10), None],
            "b": pd.array([True, None], "boolean"),
            "c": pd.Categorical(["x", None]),
            "n": pd.array([Decimal("1.50"), None], pd.ArrowDtype(pa.decimal128(9, 2))),
            "u": [ID, None],
            "i": pd.Series([2**62 + 1, float("nan")], dtype=object),
        }
    )
    columns, rows = taken(frame)
    assert [type_ for _, type_ in columns] == [
        "datetime2(6)",
        "date",
        "bit",
        "nvarchar(max)",
        "decimal(9,2)",
        "uniqueidentifier",
        "bigint",
    ]
    assert rows == [
        (
            datetime(2024, 3, 10, 12, 0, 0, 123456, tzinfo=UTC),
            date(2024, 3, 10),
            True,
            "x",
            Decimal("1.50"),
            str(ID),
            2**62 + 1,
        ),
        (None,) * 7,
    ]


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (pd.DataFrame({"x": [1, None]}), "DPONE_TYPE_UNSUPPORTED"),  # pandas made it a float
        (pd.DataFrame({"x": [Decimal("1.5"), Decimal("1.25")]}), "DPONE_TYPE_UNSUPPORTED"),
        (pd.DataFrame({"x": [1, "secret_value_17"]}, dtype=object), "DPONE_TYPE_UNSUPPORTED"),
        (pd.DataFrame({"x": [2**63]}, dtype=object), "DPONE_TYPE_UNSUPPORTED"),
        (pd.DataFrame({"x": [date(2024, 3, 10), datetime(2024, 3, 10, 12)]}, dtype=object), "DPONE_TYPE_UNSUPPORTED"),
        (pd.DataFrame({"x": [datetime(2024, 3, 10, 12, tzinfo=UTC), datetime(2024, 3, 10, 12)]}, dtype=object),
         "DPONE_TYPE_UNSUPPORTED"),
        (pd.DataFrame({"x": ["\ud800"]}, dtype=object), "DPONE_VALUE_OUTSIDE_DOMAIN"),
        (pd.DataFrame({"x": pd.to_datetime(["2024-03-10"])}), "DPONE_TYPE_UNSUPPORTED"),
        (pd.DataFrame({"x": [None, None]}), "DPONE_TYPE_UNSUPPORTED"),
        (pd.DataFrame([[1, 2]]), "DPONE_SOURCE_COLUMN"),
        (pd.DataFrame([[1, 2]], columns=["x", "x"]), "DPONE_SOURCE_COLUMN"),
        (pd.DataFrame(), "DPONE_SOURCE_COLUMN"),
    ],
)  # fmt: skip
def test_frames_that_do_not_say_what_they_hold_are_refused(frame: pd.DataFrame, code: str) -> None:
    error = refusal(lambda: taken(frame))
    assert error.code == code
    assert "secret_value_17" not in str(error)


def other_schema() -> Iterator[pa.RecordBatch]:
    yield from TABLE.to_batches()
    yield pa.record_batch({"id": pa.array([1], pa.int32()), "name": ["x"]})


def not_a_batch() -> Iterator[Any]:
    yield from TABLE.to_batches()
    yield {"id": 1, "name": "x"}


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: None, "DPONE_IO_MANAGER_NEEDS_ROWS"),
        (lambda: [{"id": 1}], "DPONE_IO_MANAGER_NEEDS_ROWS"),
        (lambda: "rows", "DPONE_IO_MANAGER_NEEDS_ROWS"),
        (lambda: iter([{"id": 1}]), "DPONE_IO_MANAGER_NEEDS_ROWS"),
        (not_a_batch, "DPONE_IO_MANAGER_NEEDS_ROWS"),
        (lambda: iter(()), "DPONE_SOURCE_COLUMN"),
        (other_schema, "DPONE_SOURCE_COLUMN"),
        (lambda: pa.table({"__dpone__x": [1]}), "DPONE_SOURCE_COLUMN"),
        (lambda: pa.table([pa.array([1]), pa.array([2])], names=["x", "x"]), "DPONE_SOURCE_COLUMN"),
        (lambda: pa.table({"": [1]}), "DPONE_SOURCE_COLUMN"),
        (lambda: pa.table({"x" * 129: [1]}), "DPONE_SOURCE_COLUMN"),
        (lambda: pa.table({"x": pa.array([None], pa.int32())}, schema=pa.schema([pa.field("x", pa.int32(), False)])),
         "DPONE_VALUE_NULL"),
    ],
)  # fmt: skip
def test_what_is_no_rows_is_refused(make: Callable[[], object], code: str) -> None:
    assert refusal(lambda: taken(make())).code == code


def test_a_key_of_python_rows_is_proven() -> None:
    with asset(TABLE, key=("id",)) as session:
        assert [c.nullable for c in session.columns] == [False, True]
        assert session.probe.columns == session.columns
    error = refusal(lambda: asset(TABLE, key=("name",)).__enter__())
    assert (error.code, error.details["rows"]) == ("DPONE_KEY_NULL", 1)
    assert refusal(lambda: asset(TABLE, key=("nobody",)).__enter__()).code == "DPONE_SOURCE_COLUMN"


def test_a_stream_is_read_once_and_asked_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pulled: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for i in range(3):
            pulled.append(i)
            yield pa.record_batch({"id": pa.array([2 * i, 2 * i + 1]), "s": ["x", None]})

    with asset(batches()) as session:
        assert pulled == [0, 1, 2]
        assert session.probe.row_count() == 6
        expected = encoded_digest([f"1:{i}{'1:x' if i % 2 == 0 else '~'}" for i in range(6)])
        for _ in range(2):
            digest = session.probe.digest(session.columns)
            assert (digest.rows, digest.lanes[0]) == expected
            assert [row[0] for row in rows_of(session)] == [0, 1, 2, 3, 4, 5]
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    assert pulled == [0, 1, 2]


def test_a_stream_that_is_spent_does_not_pass_for_one_without_rows() -> None:
    declared = process({"type": "asset"})
    for rows, again in ((TABLE, True), (iter(TABLE.to_batches()), False), (TABLE.to_reader(), False)):
        source = AssetLoadSource(rows)
        with source.open(declared) as session:
            assert session.probe.row_count() == 2
        if again:
            with source.open(declared) as session:
                assert session.probe.row_count() == 2
        else:
            assert refusal(source.open(declared).__enter__).code == "DPONE_IO_MANAGER_NEEDS_ROWS"


def test_python_rows_go_through_no_load_of_another_source() -> None:
    other = process({"type": "clickhouse", "table": {"schema": "d", "name": "t"}})
    assert refusal(lambda: AssetLoadSource(TABLE).open(other).__enter__()).code == "DPONE_IO_MANAGER_MANIFEST"


def test_a_full_disk_is_said_to_be_one() -> None:
    types = {"id": "bigint", "name": "nvarchar(max)"}
    columns = tuple(LoadColumn(name=name, type=type_, nullable=True) for name, type_ in types.items())
    spool = _Spool(Path("/dev/full"), columns, TABLE.schema)
    assert refusal(lambda: spool.write(iter(TABLE.to_batches()))).code == "DPONE_ARTIFACT_NO_SPACE"


def test_a_large_stream_of_rows_stays_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for i in range(200):
            ids = pa.array(range(10_000 * i + 1, 10_000 * i + 10_001), pa.int64())
            seen.append(pa.total_allocated_bytes())
            yield pa.record_batch({"id": ids, "s": pa.array(["x" * 100] * 10_000)})

    with asset(batches()) as session:
        assert max(seen) - seen[0] < 64 << 20
        rows, total, grown = flat(session)
        assert (rows, total) == (2_000_000, 2_000_001_000_000)
        assert grown < 120 << 20
        metrics = session.probe.metrics(AcceptanceChecks(distinct_counts=True))
        assert metrics.distinct_counts == {"id": 2_000_000, "s": 1}


# -------------------------------------------------------------------------------------------- the Arrow probe


def test_the_arrow_probe_answers_every_question() -> None:
    moments = [datetime(2024, 3, 10, 1, tzinfo=UTC), None, datetime(2024, 3, 9, tzinfo=UTC)]
    table = pa.table(
        {
            "k": pa.array([1, 1, None, None, 2, 3], pa.int32()),
            "t": pa.array(["a", "a", None, None, "~", ""], pa.string()),
            "n": pa.array([Decimal("1.50"), None, Decimal("0.00"), Decimal("-1.50"), Decimal("1.50"), None],
                          pa.decimal128(5, 2)),
            "at": pa.array(moments * 2, pa.timestamp("us", tz="UTC")),
            "b": pa.array([True, False, None, True, False, True]),
            "d": pa.array([date(2024, 1, 1)] * 6),
        }
    )  # fmt: skip
    parts = [batch for i in range(6) for batch in table.slice(i, 1).to_batches()]
    with asset(iter(parts)) as session:
        probe = session.probe
        assert isinstance(probe, ArrowProbe)
        assert (probe.side, probe.dataset) == ("source", "asset load")
        assert probe.row_count() == 6
        assert [probe.rows_with_null([c]) for c in ("k", "t", "n", "at", "b", "d")] == [2, 2, 2, 2, 1, 0]
        assert probe.rows_with_null(["k", "n", "at"]) == 5  # all but the first
        # (1, a) twice and (NULL, NULL) twice; "~" is no NULL and "" is no "~".
        assert probe.surplus_rows(["k", "t"]) == 2
        assert probe.surplus_rows(["k", "t", "n"]) == 0
        assert probe.surplus_rows(["d"]) == 5
        assert probe.newest("at") == datetime(2024, 3, 10, 1, tzinfo=UTC)
        metrics = probe.metrics(AcceptanceChecks(null_counts="all_columns", distinct_counts=("k", "n", "d", "t", "b")))
        assert metrics.row_count == 6
        assert metrics.null_counts == {"k": 2, "t": 2, "n": 2, "at": 2, "b": 1, "d": 0}
        assert metrics.distinct_counts == {"k": 3, "n": 3, "d": 1, "t": 3, "b": 2}
        assert probe.metrics(AcceptanceChecks(row_count=False, null_counts=("k",))).row_count is None
        assert probe.rows_outside("k", [1, 3], allow_null=True) == 1
        assert probe.rows_outside("k", [1, 3], allow_null=False) == 3
        assert probe.rows_outside("t", ["a", "~"], allow_null=True) == 1
        assert probe.rows_outside("n", ["1.5", 0], allow_null=True) == 1
        assert probe.rows_outside("b", [True], allow_null=False) == 3
        assert probe.rows_outside("d", ["2024-01-01"], allow_null=False) == 0
        assert probe.rows_outside("at", ["2024-03-09T00:00:00"], allow_null=True) == 2
        assert sum(batch.num_rows for batch in probe.blocks()) == 6
        assert refusal(lambda: probe.scalar("select 1")).code == "DPONE_GATE_UNAVAILABLE"
        for act in (
            lambda: probe.rows_with_null(["nobody"]),
            lambda: probe.surplus_rows(["nobody"]),
            lambda: probe.newest("k"),
            lambda: probe.rows_outside("k", ["x"], allow_null=True),
            lambda: probe.rows_outside("b", [1], allow_null=True),
            lambda: probe.rows_outside("n", ["1.505"], allow_null=True),
        ):
            assert refusal(act).code == "DPONE_GATE_UNAVAILABLE"


def test_the_arrow_probe_of_no_rows() -> None:
    with asset(TABLE.schema.empty_table()) as session:
        probe = session.probe
        assert (probe.row_count(), probe.surplus_rows(["id"]), probe.rows_with_null(["id", "name"])) == (0, 0, 0)
        assert probe.digest(session.columns).rows == 0
        metrics = probe.metrics(AcceptanceChecks(null_counts=True, distinct_counts=True))
        assert (metrics.null_counts, metrics.distinct_counts) == ({"id": 0, "name": 0}, {"id": 0, "name": 0})
        assert rows_of(session) == []


def test_a_sample_is_the_rows_whose_key_digest_divides() -> None:
    ids = list(range(1000))
    chosen = [i for i in ids if encoded_digest([f"{len(str(i))}:{i}"])[1] % 16 == 0]
    assert 20 < len(chosen) < 120  # about one in sixteen
    with asset(pa.table({"id": pa.array(ids, pa.int64()), "s": ["x"] * 1000})) as session:
        digest = session.probe.digest(session.columns, key=session.columns[:1], modulus=16)
        assert (digest.rows, digest.lanes[0]) == encoded_digest([f"{len(str(i))}:{i}1:x" for i in chosen])


def test_the_same_sample_on_all_three_sides(postgres: Postgres, house: House) -> None:
    postgres.sql.execute(
        "create table t (id bigint not null, s text); insert into t select i, 'x' from generate_series(0, 999) i"
    )
    house.client.command("CREATE TABLE t (id Int64, s Nullable(String)) ENGINE = MergeTree ORDER BY id")
    house.client.command("INSERT INTO t SELECT number, 'x' FROM numbers(1000)")
    rows = pa.table({"id": pa.array(range(1000), pa.int64()), "s": ["x"] * 1000})
    with postgres.open("t") as one, house.open("t") as two, asset(rows) as three:
        digests = {s.probe.digest(s.columns, key=s.columns[:1], modulus=16).sha256 for s in (one, two, three)}
        assert len(digests) == 1
        assert one.probe.digest(one.columns).sha256 == three.probe.digest(three.columns).sha256
