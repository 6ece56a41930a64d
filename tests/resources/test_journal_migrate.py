"""Migrations: from nothing, again, raced, and equal to the tables that the store uses."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from journal_support import ROOT

from dpone_dagster.errors import DponeError
from resources.embedded.postgres import PostgresEndpoint
from resources.journal.migrate import migrate
from resources.journal.store import SqlJournal
from resources.journal.tables import METADATA

Open = Callable[..., psycopg.Connection[Any]]


def test_from_nothing_and_again(fresh_db: PostgresEndpoint, pg: Open) -> None:
    engine = sa.create_engine(fresh_db.sqlalchemy_url)
    migrate(engine)
    connection = pg()
    connection.execute(
        "insert into dpone_control.resource_guard values ('mart:kept', 7, 'w', null, now() at time zone 'utc')"
    )
    migrate(engine)
    engine.dispose()
    assert connection.execute("select epoch from dpone_control.resource_guard").fetchall() == [(7,)]
    assert connection.execute("select version_num from dpone_control.schema_version").fetchall() == [("v0002",)]
    assert connection.execute("select 1 from pg_namespace where nspname = 'dpone_images'").fetchall() == [(1,)]
    here = "database = (select oid from pg_database where datname = current_database())"
    locks = connection.execute(f"select count(*) from pg_locks where locktype = 'advisory' and {here}")
    assert locks.fetchone() == (0,)


def test_the_migrated_schema_is_the_one_the_tables_say(fresh_db: PostgresEndpoint) -> None:
    engine = sa.create_engine(fresh_db.sqlalchemy_url)
    migrate(engine)

    def ours(name: str | None, kind: str, parents: Any) -> bool:
        return name == "dpone_control" if kind == "schema" else name != "schema_version"

    with engine.connect() as connection:
        options = {"include_schemas": True, "include_name": ours, "compare_type": True}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), METADATA) == []
        connection.execute(sa.text("alter table dpone_control.phase drop column seconds"))
        assert compare_metadata(MigrationContext.configure(connection, opts=options), METADATA) != []
    engine.dispose()


def test_columns_that_the_dbt_strategy_writes(fresh_db: PostgresEndpoint, pg: Open) -> None:
    engine = sa.create_engine(fresh_db.sqlalchemy_url)
    migrate(engine)
    engine.dispose()
    lanes = ", ".join(f"{side}_l{lane}" for side in ("before", "after") for lane in range(4))
    top = 2**64 - 1
    pg().execute(
        "insert into dpone_control.model_receipt (operation_id, operation_plan_sha256, workflow_execution_id,"
        " fencing_epoch, worker_id, before_schema, before_name, after_schema, after_name, before_rows, after_rows,"
        f" updated_rows, inserted_rows, source_rows, created_at, {lanes}) values ('o', 'p', 'e', 1, 'w', 's', 'b',"
        f" 's', 'a', 0, 5, 0, 5, 5, now() at time zone 'utc', {', '.join([str(top)] * 8)})"
    )
    assert pg().execute("select after_l3 from dpone_control.model_receipt").fetchone() == (top,)


def test_raced_by_two_processes(fresh_db: PostgresEndpoint, pg: Open) -> None:
    code = (
        "import sys, sqlalchemy as sa; from resources.journal.migrate import migrate;"
        "engine = sa.create_engine(sys.argv[1]); engine.connect().close(); print('ready', flush=True);"
        "sys.stdin.readline(); migrate(engine)"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, fresh_db.sqlalchemy_url],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == b"ready\n"
    for racer in racers:
        racer.communicate(b"go\n", timeout=60)
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert pg().execute("select count(*) from dpone_control.schema_version").fetchone() == (1,)


def test_an_unmigrated_database_says_so(fresh_db: PostgresEndpoint) -> None:
    journal = SqlJournal(fresh_db.sqlalchemy_url)
    with pytest.raises(DponeError) as refused:
        journal.marts_overview()
    journal.close()
    assert refused.value.code == "DPONE_JOURNAL_MISSING"
    assert refused.value.details == {"error_class": "UndefinedTable", "sqlstate": "42P01"}


def test_sql_server_refuses_to_start() -> None:
    with pytest.raises(DponeError) as refused:
        SqlJournal("mssql+pyodbc://localhost/db")
    assert refused.value.code == "DPONE_PROFILE_UNAVAILABLE"
