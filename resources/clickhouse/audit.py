"""``__dpone__loads`` and ``__dpone__load_steps``: what a load did, for those who look it up in ClickHouse.

The journal is the authority; these tables are told what it knows. A row is written anew rather than changed, so read
them with FINAL. Every value arrives as inserted data, never as a part of a statement.
"""

# ruff: noqa: S608 - names are quoted; the one value, a load's id, goes through ``literal``.

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from dpone_dagster.declarations.manifest import Process
from dpone_dagster.governance.audit import details_json, redacted, state_schema, step_details
from dpone_dagster.ports import AuditStep
from resources.clickhouse.client import ClickHouseClient
from resources.clickhouse.dialect import relation_sql
from resources.clickhouse.staged_sink import Table, single_node
from resources.clickhouse.statements import Statements, literal

LOADS = "__dpone__loads"
STEPS = "__dpone__load_steps"

_TIME = "DateTime64(6, 'UTC')"
_LOAD_COLUMNS = (
    ("load_id", "String"),
    ("process", "String"),
    ("target", "String"),
    ("strategy", "String"),
    ("run_id", "String"),
    ("plan_sha256", "String"),
    ("status", "String"),
    ("started_at", _TIME),
    ("finished_at", f"Nullable({_TIME})"),
    ("details_json", "String"),
    ("version", "UInt64"),
)
_STEP_COLUMNS = (
    ("load_id", "String"),
    ("step_id", "String"),
    ("kind", "String"),
    ("phase", "String"),
    ("status", "String"),
    ("started_at", _TIME),
    ("finished_at", _TIME),
    ("duration_seconds", "Float64"),
    ("details_json", "String"),
    ("version", "UInt64"),
)
_ARROW: Mapping[str, pa.DataType] = {
    "String": pa.string(),
    _TIME: pa.timestamp("us", tz="UTC"),
    f"Nullable({_TIME})": pa.timestamp("us", tz="UTC"),
    "Float64": pa.float64(),
    "UInt64": pa.uint64(),
}


class ClickHouseAudit:
    """``AuditPort``. Whether a load is audited at all is the caller's question (``governance.audit.audit_enabled``).

    Args:
        client: the HTTP client, of either profile.
        query_prefix: what every query id starts with.
    """

    def __init__(self, client: ClickHouseClient, query_prefix: str) -> None:
        self._statements = Statements(client, query_prefix)
        self._known: set[str] = set()

    def begin(self, process: Process, *, load_id: str, run_id: str, started_at: datetime, plan_sha256: str) -> None:
        """Write a load's row as ``running``; the tables are created where they are missing."""
        self._write_load(
            process,
            load_id=load_id,
            run_id=run_id,
            plan_sha256=plan_sha256,
            status="running",
            started_at=started_at,
            finished_at=None,
            details={},
        )

    def steps(self, process: Process, load_id: str, steps: Sequence[AuditStep]) -> None:
        """Write step rows; a step that is written again replaces its row."""
        if not steps:
            return
        version = time.time_ns()
        rows = [
            (
                load_id,
                step.step_id,
                step.kind,
                step.phase,
                step.status,
                step.started_at,
                step.started_at + timedelta(seconds=step.seconds),
                step.seconds,
                details_json(step_details(step)),
                version + n,
            )
            for n, step in enumerate(steps)
        ]
        self._insert(process, STEPS, _STEP_COLUMNS, rows)

    def end(
        self, process: Process, *, load_id: str, status: str, finished_at: datetime, details: Mapping[str, Any]
    ) -> None:
        """Write a load's row with how it ended; what ``begin`` wrote stays in it."""
        self._create(process)
        begun = self._statements.rows(
            f"SELECT run_id, plan_sha256, started_at FROM {relation_sql(_table(process, LOADS))} FINAL"
            f" WHERE load_id = {literal(load_id)}"
        )
        # A load that was begun while the tables were elsewhere has no row here; its end is told all the same.
        run_id, plan_sha256, started_at = begun[0] if begun else ("", "", finished_at)
        self._write_load(
            process,
            load_id=load_id,
            run_id=run_id,
            plan_sha256=plan_sha256,
            status=status,
            started_at=started_at if started_at.tzinfo else started_at.replace(tzinfo=UTC),
            finished_at=finished_at,
            details=details,
        )

    def _write_load(
        self,
        process: Process,
        *,
        load_id: str,
        run_id: str,
        plan_sha256: str,
        status: str,
        started_at: datetime,
        finished_at: datetime | None,
        details: Mapping[str, Any],
    ) -> None:
        row = (
            load_id,
            process.name,
            process.sink.table.dotted,
            process.sink.strategy,
            run_id,
            plan_sha256,
            status,
            started_at,
            finished_at,
            details_json(redacted(details)),
            time.time_ns(),
        )
        self._insert(process, LOADS, _LOAD_COLUMNS, [row])

    def _insert(
        self, process: Process, name: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Any]]
    ) -> None:
        self._create(process)
        arrays = [pa.array([row[i] for row in rows], _ARROW[type_]) for i, (_, type_) in enumerate(columns)]
        self._statements.insert(_table(process, name), pa.Table.from_arrays(arrays, names=[c for c, _ in columns]))

    def _create(self, process: Process) -> None:
        schema = state_schema(process)
        if schema in self._known:
            return
        ddl = single_node(process)
        there = (
            f"SELECT count() FROM system.tables WHERE database = {literal(schema)}"
            f" AND name IN ({literal(LOADS)}, {literal(STEPS)})"
        )
        if int(self._statements.value(there)) == 2:  # mostly: one question instead of three statements
            self._known.add(schema)
            return
        if not self._statements.value(f"SELECT count() FROM system.databases WHERE name = {literal(schema)}"):
            self._statements.run(ddl.create_database(schema))
        self._statements.run(ddl.create_audit_table(_table(process, LOADS), _LOAD_COLUMNS, ("load_id",)))
        self._statements.run(ddl.create_audit_table(_table(process, STEPS), _STEP_COLUMNS, ("load_id", "step_id")))
        self._known.add(schema)


def _table(process: Process, name: str) -> Table:
    return Table(schema_name=state_schema(process), name=name)
