"""The audit tables on the engine, read with the query that the documentation gives."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from load_case import LoadCase

from dpone_dagster.declarations.manifest import Process
from dpone_dagster.errors import DponeError
from dpone_dagster.ports import AuditStep
from resources.clickhouse.audit import ClickHouseAudit
from resources.clickhouse.client import ClickHouseClient

START = datetime(2024, 3, 11, 4, 5, 6, 789012, tzinfo=UTC)
LOAD = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
def case(clickhouse: ClickHouseClient, ch_database: str) -> Iterator[LoadCase]:
    yield LoadCase(client=clickhouse, database=ch_database, strategy="append")
    clickhouse.command(f"DROP DATABASE IF EXISTS {ch_database}_state SYNC")


@pytest.fixture
def audit(clickhouse: ClickHouseClient) -> ClickHouseAudit:
    return ClickHouseAudit(clickhouse, "dpone-audit-test-")


def step(
    id_: str, seconds: float, *, offset: int = 0, kind: str = "step", status: str = "completed", **details: Any
) -> AuditStep:
    return AuditStep(
        step_id=id_,
        kind=kind,
        phase=id_[3:],
        status=status,
        started_at=START + timedelta(seconds=offset),
        seconds=seconds,
        details=details,
    )


def documented(case: LoadCase) -> list[tuple[Any, ...]]:
    found = case.client.query(
        f"""
        SELECT
            step_id,
            phase,
            status,
            JSONExtractFloat(JSONExtractRaw(details_json, 'throughput'), 'duration_seconds') AS seconds,
            JSONExtractFloat(JSONExtractRaw(details_json, 'throughput'), 'rows_per_second') AS rows_per_second,
            JSONExtractFloat(JSONExtractRaw(details_json, 'throughput'), 'mib_per_second') AS mib_per_second
        FROM {case.database}.__dpone__load_steps FINAL
        WHERE load_id = '{LOAD}'
          AND JSONHas(details_json, 'throughput')
        ORDER BY started_at
        """
    )
    return [tuple(row) for row in found.result_rows]


def test_the_documented_query(case: LoadCase, audit: ClickHouseAudit) -> None:
    audit.begin(case.process, load_id=LOAD, run_id="run-1", started_at=START, plan_sha256="sha256:" + "a" * 64)
    audit.steps(
        case.process,
        LOAD,
        [
            step("01_extract", 1.0, schema_width=3),
            step("02_stage", 4.0, offset=1, staged_rows=1000, staged_bytes=8 << 20),
            step("03_gates", 0.5, offset=5, status="failed", staged_rows=1000),
        ],
    )
    audit.steps(case.process, LOAD, [step("04_finalize", 0.25, offset=6, final_rows=1000)])
    audit.steps(case.process, "another", [step("02_stage", 1.0, staged_rows=1)])
    assert documented(case) == [
        ("02_stage", "stage", "completed", 4.0, 250.0, 2.0),
        ("04_finalize", "finalize", "completed", 0.25, 4000.0, 0.0),
    ]


def test_a_step_written_again_replaces_its_row(case: LoadCase, audit: ClickHouseAudit) -> None:
    audit.steps(case.process, LOAD, [step("02_stage", 4.0, staged_rows=1000)])
    audit.steps(case.process, LOAD, [step("02_stage", 2.0, staged_rows=1000)])
    assert documented(case) == [("02_stage", "stage", "completed", 2.0, 500.0, 0.0)]
    audit.steps(case.process, LOAD, [])


def test_a_load_from_begin_to_end(case: LoadCase, audit: ClickHouseAudit, clickhouse: ClickHouseClient) -> None:
    def rows() -> list[tuple[Any, ...]]:
        found = clickhouse.query(
            "SELECT load_id, process, target, strategy, run_id, plan_sha256, status, started_at, finished_at,"
            " details_json"
            f" FROM {case.database}.__dpone__loads FINAL",
            tz_mode="aware",
        )
        return [tuple(row) for row in found.result_rows]

    plan = "sha256:" + "a" * 64
    audit.begin(case.process, load_id=LOAD, run_id="run-1", started_at=START, plan_sha256=plan)
    head = (LOAD, "orders", f"{case.database}.orders", "append", "run-1", plan)
    assert rows() == [(*head, "running", START, None, "{}")]
    end = START + timedelta(seconds=9)
    # Whoever finishes a load need not be who began it.
    heir = ClickHouseAudit(clickhouse, "dpone-audit-heir-")
    heir.end(case.process, load_id=LOAD, status="completed", finished_at=end, details={"rows": 5, "password": "x"})
    assert rows() == [(*head, "completed", START, end, '{"password":"[redacted]","rows":5}')]


def test_an_end_without_a_beginning_is_told(
    case: LoadCase, audit: ClickHouseAudit, clickhouse: ClickHouseClient
) -> None:
    audit.end(case.process, load_id=LOAD, status="failed", finished_at=START, details={})
    found = clickhouse.query(f"SELECT status, run_id FROM {case.database}.__dpone__loads FINAL").result_rows
    assert found == [("failed", "")]


def test_decisions_are_rows(case: LoadCase, audit: ClickHouseAudit, clickhouse: ClickHouseClient) -> None:
    decision = {"decision": "row_identity", "chosen": "none", "reason": "no unique_key"}
    audit.steps(case.process, LOAD, [step("02_row_identity", 0.0, kind="runtime_decision", **decision)])
    found = clickhouse.query(f"SELECT kind, details_json FROM {case.database}.__dpone__load_steps FINAL").result_rows
    assert [(kind, json.loads(details)) for kind, details in found] == [("runtime_decision", decision)]


def test_values_are_data(case: LoadCase, audit: ClickHouseAudit, clickhouse: ClickHouseClient) -> None:
    hostile = "'); DROP TABLE x; -- \\ ` ü {load_id:String}"
    audit.begin(case.process, load_id=hostile, run_id=hostile, started_at=START, plan_sha256=hostile)
    audit.end(case.process, load_id=hostile, status=hostile, finished_at=START, details={"name": hostile})
    found = clickhouse.query(
        f"SELECT load_id, run_id, status, details_json FROM {case.database}.__dpone__loads FINAL"
    ).result_rows
    assert [(*row[:3], json.loads(row[3])) for row in found] == [(hostile, hostile, hostile, {"name": hostile})]


def test_a_state_schema_of_its_own_is_created(
    case: LoadCase, audit: ClickHouseAudit, clickhouse: ClickHouseClient
) -> None:
    document = case.process.as_json()
    document["sink"]["options"]["load_governance"] = {"audit": {"state_schema": f"{case.database}_state"}}
    audit.begin(Process.parse(document), load_id=LOAD, run_id="r", started_at=START, plan_sha256="p")
    found = clickhouse.query(
        f"SELECT name, engine_full FROM system.tables WHERE database = '{case.database}_state' ORDER BY name"
    ).result_rows
    assert [name for name, _ in found] == ["__dpone__load_steps", "__dpone__loads"]
    assert found[0][1].startswith("ReplacingMergeTree(version) ORDER BY (load_id, step_id)")
    assert found[1][1].startswith("ReplacingMergeTree(version) ORDER BY")
    assert case.scratch() == []


def test_a_cluster_is_refused(clickhouse: ClickHouseClient, ch_database: str, audit: ClickHouseAudit) -> None:
    case = LoadCase(client=clickhouse, database=ch_database, strategy="append", cluster="main")
    with pytest.raises(DponeError) as refused:
        audit.begin(case.process, load_id=LOAD, run_id="r", started_at=START, plan_sha256="p")
    assert refused.value.code == "DPONE_CLUSTER_UNAVAILABLE"
