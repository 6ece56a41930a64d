"""A dbt project of its own for tests, and a journal with just the rows that the strategy looks at.

The project has one workflow ``pair`` with two marts: ``events``, whose model bounds its reading with the scope
macros, and ``totals``, whose model computes the full logical result. Both read tables that take any nonsense, so
that bad input arrives through the data and one parsed project serves every test.
"""

import shutil
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from dpone_dagster.contracts.canonical import sha256_bytes
from dpone_dagster.contracts.mart import MartSpec, Scope
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import OperationRecord
from dpone_dagster.planning.dbt_manifest import read_marts
from resources.dbt_builder import PLATFORM, PROJECT, DbtBuilder
from resources.embedded.home import Home
from resources.embedded.postgres import PostgresEndpoint
from resources.journal.tables import CONTROL_SCHEMA, IMAGE_SCHEMA, METADATA
from resources.postgres.dialect import canonical_type
from resources.postgres.marts import PostgresSource

DAY = Scope.day("2024-03-10")

EVENTS_SQL = """
select event_at, device, site, reading, note, code, seen_on, flag, small, huge, tag
from {{ source('loose', 'events') }}
where reported_at >= {{ dpone_scope_start() }} and reported_at < {{ dpone_scope_end() }}
"""

EVENTS_YML = """
version: 2
models:
  - name: events
    config: {unique_key: [event_at, device], event_time: event_at}
    meta:
      dpone:
        publish: {enabled: true, profile: mssql_to_clickhouse_mart, workflow: pair}
        target: {database: marts, table: events, partition_by: day}
        utc_assured: [event_at]
        start_date: "2024-01-01"
    columns:
      - {name: event_at, data_type: timestamp(6), constraints: [{type: not_null}]}
      - {name: device, data_type: integer, constraints: [{type: not_null}]}
      - name: site
        data_type: smallint
        data_tests: [not_null]
      - {name: reading, data_type: "numeric(12,3)"}
      - {name: note, data_type: varchar(10)}
      - {name: code, data_type: char(4)}
      - {name: seen_on, data_type: date}
      - {name: flag, data_type: boolean, constraints: [{type: not_null}]}
      - {name: small, data_type: smallint}
      - {name: huge, data_type: bigint}
      - {name: tag, data_type: uuid}
  - name: totals
    config: {unique_key: [hour, device], event_time: hour}
    meta:
      dpone:
        publish: {enabled: true, profile: mssql_to_clickhouse_mart, workflow: pair}
        target: {database: marts, table: totals, partition_by: none}
        utc_assured: [hour]
        start_date: "2024-01-01"
    columns:
      - {name: hour, data_type: timestamp(6), constraints: [{type: not_null}]}
      - {name: device, data_type: integer, constraints: [{type: not_null}]}
      - {name: total, data_type: bigint}
sources:
  - name: loose
    tables: [{name: events}, {name: hours}]
"""

TOTALS_SQL = "select hour, device, total from {{ source('loose', 'hours') }}"

LOOSE = """
create schema loose;
create table loose.events (
    reported_at timestamp(6), event_at timestamp(6), device integer, site smallint, reading numeric(12,3),
    note varchar(10), code char(4), seen_on date, flag boolean, small smallint, huge bigint, tag uuid);
create table loose.hours (hour timestamp(6), device integer, total bigint);
"""


def write_project(folder: Path, files: dict[str, str] | None = None) -> Path:
    """Write a dbt project with the shipped wrapper macros and settings; ``files`` add to or replace its own."""
    project = folder / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("models", "tests", "logs", "target"))
    settings = project / "dbt_project.yml"
    settings.write_text(settings.read_text().replace("../dbt_platform", str(PLATFORM)))
    own = {
        "models/pair/events.sql": EVENTS_SQL,
        "models/pair/totals.sql": TOTALS_SQL,
        "models/pair/pair.yml": EVENTS_YML,
        **(files or {}),
    }
    for name, text in own.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    return project


class Sandbox:
    """One database with the journal's tables, loose sources, empty marts and a dbt project that fills them."""

    def __init__(self, database: PostgresEndpoint, home: Path, project: Path) -> None:
        self.database = database
        self.builder = DbtBuilder(conninfo=database.conninfo, home=home, project=project)
        marts = read_marts(self.builder.manifest(), canonical_type)
        self.marts: dict[str, MartSpec] = {mart.name: mart for mart in marts}
        self.source = PostgresSource(conninfo=database.conninfo, uri=database.uri, marts=marts)
        self.sql = psycopg.connect(database.conninfo, autocommit=True)
        engine = sa.create_engine(database.sqlalchemy_url)
        with engine.begin() as connection:
            for schema in (CONTROL_SCHEMA, IMAGE_SCHEMA):
                connection.execute(sa.schema.CreateSchema(schema))
            METADATA.create_all(connection)
        engine.dispose()
        self.worker = str(uuid.uuid4())
        self.epoch = 0

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.sql.execute(sql, values or None).fetchall()

    def one(self, sql: str, *values: Any) -> Any:
        (row,) = self.rows(sql, *values)
        return row[0] if len(row) == 1 else row

    def settle(self, mart: str, state: State = State.COMPLETE) -> None:
        """Close whatever is open, as a publication or a failure would."""
        self.sql.execute(
            "update dpone_control.operation set state = %s where mart = %s and state = 'PREPARING'", [str(state), mart]
        )

    def admit(self, mart: str, scope: Scope = DAY, *, worker: str | None = None) -> OperationRecord:
        """Write the guard and the PREPARING operation that an admission writes."""
        self.epoch += 1
        spec, now = self.marts[mart], datetime.now(UTC)
        operation = OperationRecord(
            operation_id=sha256_bytes(f"{mart} {self.epoch}".encode()),
            operation_plan_sha256=sha256_bytes(f"plan {mart} {self.epoch}".encode()),
            workflow_plan_sha256=sha256_bytes(b"workflow plan"),
            workflow_execution_id="logical-run:pair's:1",
            workflow=spec.workflow,
            mart=mart,
            target=spec.target.dotted,
            scope=scope,
            revision=1,
            replacement_ordinal=0,
            mode="normal",
            state=State.PREPARING,
            version=1,
            unknown_since=None,
            fencing_epoch=self.epoch,
            worker_id=worker or self.worker,
            facts={"mutation_invoked": True},
            admitted_at=now,
            updated_at=now,
            **_later_fields(),
        )
        control = METADATA.tables
        values = {
            column.name: getattr(operation, column.name)
            for column in control[f"{CONTROL_SCHEMA}.operation"].columns
            if hasattr(operation, column.name)
        }
        values |= {
            "state": "PREPARING",
            "facts": "{}",
            "scope_start": scope.start.replace(tzinfo=None),
            "scope_end": scope.end.replace(tzinfo=None),
            "admitted_epoch": self.epoch,
            "admitted_at": now.replace(tzinfo=None),
            "updated_at": now.replace(tzinfo=None),
        }
        names = ", ".join(values)
        self.sql.execute(
            f"insert into dpone_control.operation ({names}) values ({', '.join(['%s'] * len(values))})",
            list(values.values()),
        )
        self.sql.execute(
            """insert into dpone_control.resource_guard (resource_id, epoch, worker_id, operation_id, changed_at)
               values (%s, %s, %s, %s, now() at time zone 'utc')
               on conflict (resource_id) do update
               set epoch = excluded.epoch, worker_id = excluded.worker_id, operation_id = excluded.operation_id""",
            [f"mart:{mart}", self.epoch, operation.worker_id, operation.operation_id],
        )
        return operation

    def build(
        self, *operations: OperationRecord, restore: dict[str, OperationRecord] | None = None, scope: Scope = DAY
    ) -> Any:
        """Build these operations' marts."""
        marts = [self.marts[o.mart] for o in operations]
        return self.builder.build(marts, operations, scope, restore_from=restore or {})

    def events(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows to the loose source; what is not given is plausible."""
        for row in rows:
            full = {
                "reported_at": "2024-03-10 12:00",
                "event_at": "2024-03-10 12:00",
                "device": 1,
                "site": 7,
                "reading": "1.500",
                "note": "ok",
                "code": "ab",
                "seen_on": "2024-03-10",
                "flag": True,
                "small": None,
                "huge": 9_007_199_254_740_993,
                "tag": "00000000-0000-0000-0000-0000000000aa",
                **row,
            }
            self.sql.execute(
                f"insert into loose.events ({', '.join(full)}) values ({', '.join(['%s'] * len(full))})",
                list(full.values()),
            )


def _later_fields() -> dict[str, Any]:
    """Fields that the record has beyond the ones above, with their type's plain value."""
    known = {"attempt_binding_sha256": sha256_bytes(b"attempt")}
    return {name: value for name, value in known.items() if name in OperationRecord.__dataclass_fields__}


@pytest.fixture(scope="session")
def pair_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two-mart test project."""
    return write_project(tmp_path_factory.mktemp("dbt"))


@pytest.fixture
def sandbox(fresh_db: PostgresEndpoint, home: Home, pair_project: Path) -> Iterator[Sandbox]:
    """A database with loose sources, empty marts, the journal's tables, and a builder; nothing admitted."""
    made = Sandbox(fresh_db, home.root / "dbt", pair_project)
    made.sql.execute(LOOSE)
    for mart in made.marts.values():
        made.source.create_mart(mart)
    yield made
    made.sql.close()
