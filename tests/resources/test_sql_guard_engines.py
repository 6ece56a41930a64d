"""The engines are asked whether a body writes; what they say must not surprise the guard.

Bodies are random runs of what lexers trip over: quotes, escapes, heredocs, comments. An engine in read-only
mode answers a write with an error of its own, so it tells which bodies hold a DROP that it would have run.
"""

import random
from collections.abc import Callable, Iterator

import psycopg

from dpone_dagster.errors import DponeError
from dpone_dagster.governance.sql_guard import analyse, split
from resources.clickhouse.client import ClickHouseClient
from resources.embedded.postgres import PostgresEndpoint

BODIES = 30_000
SPANS = [
    "''",
    '""',
    "``",
    ("/*", "*/"),
    ("--", "\n"),
    ("#", "\n"),
    ("# ", "\n"),
    ("$$", "$$"),
    ("$a$", "$a$"),
    ("E'", "'"),
]
INSIDE = [
    "'",
    "''",
    "\\'",
    "\\",
    '"',
    "`",
    "/*",
    "*/",
    "--",
    "\n",
    "\r",
    "$$",
    "$",
    "; DROP TABLE z; ",
    "; DROP TABLE z; ",
    "x",
]
BETWEEN = ["; SELECT 1 AS ", "; SELECT ", "; DROP TABLE z; SELECT ", ", ", " ", " || ", "", "; "]


def bodies() -> Iterator[str]:
    """Bodies with a DROP somewhere in their text; the same ones in every run."""
    dice = random.Random(20_261_129)
    for _ in range(BODIES):
        parts = ["SELECT 1"]
        for _ in range(dice.randint(1, 3)):
            begin, end = dice.choice(SPANS)
            parts += [dice.choice(BETWEEN), begin, *dice.choices(INSIDE, k=dice.randint(0, 3)), end]
        body = "".join(parts)
        if "DROP" in body:
            yield body


def judge(dialect: str, writes: Callable[[str], bool]) -> tuple[list[str], int]:
    """Return the bodies that the guard lets through and the engine would write for, and how many were asked about."""
    holes, asked = [], 0
    for body in bodies():
        try:
            if analyse(body, dialect=dialect).mutates:
                continue
        except DponeError:
            continue  # nothing but comments
        asked += 1
        if any(writes(text) for text in ([body] if dialect == "postgres" else split(body, dialect))):
            holes.append(body)
    return holes, asked


def test_postgresql_finds_no_write_in_what_the_guard_lets_through(fresh_db: PostgresEndpoint) -> None:
    with psycopg.connect(fresh_db.conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE z (a int)")
        connection.execute("SET default_transaction_read_only = on")

        def writes(body: str) -> bool:
            try:
                connection.execute(body.encode())
            except psycopg.Error as error:
                return error.sqlstate == "25006"
            return False

        assert writes("SELECT 1; DROP TABLE z")
        holes, asked = judge("postgres", writes)
    assert holes == []
    assert asked > 100


def test_clickhouse_finds_no_write_in_what_the_guard_lets_through(clickhouse: ClickHouseClient) -> None:
    clickhouse.command("CREATE TABLE z (a Int8) ENGINE = Memory")

    def writes(text: str) -> bool:
        try:
            clickhouse.command(text, settings={"readonly": 2})
        except DponeError as error:
            return error.details.get("number") == 164
        return False

    assert writes("DROP TABLE z")
    holes, asked = judge("clickhouse", writes)
    assert holes == []
    assert asked > 100
