"""Fixtures shared by all tests. The engines are the real embedded ones; nothing is mocked.

How to use them:

* ``home``: the session's ``DPONE_HOME`` (a ``Home``; shared by all xdist workers, never under a private
  folder). ``os.environ["DPONE_HOME"]`` points to it, so a subprocess or CLI call started by a test finds the
  same engines.
* ``engines``: both engines of ``home``, running: ``engines.pg`` (``conninfo``, ``uri``, ``sqlalchemy_url``,
  ``host``/``port``/``user``/``database``, ``with_database(name)``) and ``engines.clickhouse`` (an endpoint
  for ``resources.clickhouse.client.connect``).
* ``fresh_db``: a PostgreSQL database of this test's own, dropped afterwards (the endpoint, as
  ``engines.pg``).
* ``pg``: ``pg()`` opens a psycopg connection (autocommit unless ``pg(autocommit=False)``) to ``fresh_db``;
  closed afterwards. Call it as often as you need sessions.
* ``pg_schema``: the name of a fresh schema inside the shared ``dpone`` database; cheaper than ``fresh_db``.
* ``ch_database``: the name of a ClickHouse database (Atomic) of this test's own, dropped afterwards.
* ``clickhouse``: a client whose default database is ``ch_database``.
* ``own_home``: a home of this test's own with nothing started; its engines are stopped afterwards. Starting
  costs some 2 s: only for tests that kill or stop engines.

To kill an engine, wait for its death before the next ``up``: ``end(psutil.Process(pid), signal.SIGKILL, 10)`` of
``resources.embedded.processes`` does both.

PostgreSQL here is the stand-in for SQL Server; no test on it says anything about SQL Server.
"""

import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from resources.clickhouse.client import ClickHouseClient, connect
from resources.embedded.engines import Engines, down, up
from resources.embedded.home import Home
from resources.embedded.postgres import PostgresEndpoint


@pytest.fixture(scope="session")
def home() -> Iterator[Home]:
    """One home for the whole test run; the last xdist worker that leaves stops the engines."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
    home = Home(root=Path(tempfile.gettempdir()).resolve() / f"dpone-test-{run[:12]}")
    users = _join(home)
    before = os.environ.get("DPONE_HOME")
    os.environ["DPONE_HOME"] = str(home.root)
    try:
        yield home
    finally:
        if before is None:
            os.environ.pop("DPONE_HOME", None)
        else:
            os.environ["DPONE_HOME"] = before
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            down(home)
            shutil.rmtree(home.root)
        os.close(users)


def _join(home: Home) -> int:
    """Hold a shared lock: whoever can take it exclusively at the end is the last user of the home."""
    while True:
        home.create()
        path = home.run / "test-users.lock"
        users = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(users, fcntl.LOCK_SH)
        if path.exists() and path.stat().st_ino == os.fstat(users).st_ino:
            return users
        os.close(users)  # the last user of before removed the home meanwhile


@pytest.fixture(scope="session")
def engines(home: Home) -> Engines:
    """Both engines, running."""
    return up(home)


@pytest.fixture
def fresh_db(engines: Engines) -> Iterator[PostgresEndpoint]:
    """A PostgreSQL database of this test's own."""
    name = f"t_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(engines.pg.conninfo, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield engines.pg.with_database(name)
    with psycopg.connect(engines.pg.conninfo, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def pg(fresh_db: PostgresEndpoint) -> Iterator[Callable[..., psycopg.Connection[Any]]]:
    """Opens psycopg connections to ``fresh_db``."""
    opened: list[psycopg.Connection[Any]] = []

    def open_(*, autocommit: bool = True) -> psycopg.Connection[Any]:
        opened.append(psycopg.connect(fresh_db.conninfo, autocommit=autocommit))
        return opened[-1]

    yield open_
    for connection in opened:
        connection.close()


@pytest.fixture
def pg_schema(engines: Engines) -> Iterator[str]:
    """A fresh schema inside the shared ``dpone`` database."""
    name = f"s_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(engines.pg.conninfo, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    yield name
    with psycopg.connect(engines.pg.conninfo, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA {name} CASCADE")


@pytest.fixture
def ch_database(engines: Engines) -> Iterator[str]:
    """A ClickHouse database (Atomic) of this test's own."""
    name = f"t_{uuid.uuid4().hex[:12]}"
    client = connect(engines.clickhouse)
    client.command(f"CREATE DATABASE {name} ENGINE = Atomic")
    yield name
    client.command(f"DROP DATABASE IF EXISTS {name} SYNC")
    client.close()


@pytest.fixture
def clickhouse(engines: Engines, ch_database: str) -> Iterator[ClickHouseClient]:
    """A client whose default database is ``ch_database``."""
    client = connect(replace(engines.clickhouse, database=ch_database))
    yield client
    client.close()


@pytest.fixture
def own_home() -> Iterator[Home]:
    """A home of this test's own, nothing started."""
    home = Home(root=Path(tempfile.mkdtemp(prefix="dpone-own-")).resolve() / "home")
    home.root.parent.chmod(0o711)
    yield home
    down(home)
    shutil.rmtree(home.root.parent)
