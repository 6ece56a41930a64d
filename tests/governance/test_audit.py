"""Throughput and details of audit rows, by hand."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from dpone_dagster.declarations.manifest import Process
from dpone_dagster.governance.audit import audit_enabled, details_json, redacted, state_schema, step_details, throughput
from dpone_dagster.ports import AuditStep


def step(seconds: float = 2.0, status: str = "completed", **details: Any) -> AuditStep:
    return AuditStep(
        step_id="01_stage",
        kind="step",
        phase="stage",
        status=status,
        started_at=datetime(2024, 3, 11, tzinfo=UTC),
        seconds=seconds,
        details=details,
    )


def process(**governance: Any) -> Process:
    return Process.parse(
        {
            "name": "orders",
            "source": {"type": "sqlserver", "table": {"schema": "dbo", "name": "orders"}},
            "sink": {
                "type": "clickhouse",
                "table": {"schema": "raw", "name": "orders"},
                "strategy": "append",
                "options": {"load_governance": governance},
            },
        }
    )


def test_rates_of_rows_and_bytes() -> None:
    assert throughput(step(staged_rows=1000, staged_bytes=4 << 20)) == {
        "schema": "dpone.runtime.throughput.v1",
        "scope": "load_step",
        "duration_seconds": 2.0,
        "row_count": 1000,
        "row_count_source": "staged_rows",
        "byte_count": 4194304,
        "byte_count_source": "staged_bytes",
        "rows_per_second": 500.0,
        "bytes_per_second": 2097152.0,
        "mib_per_second": 2.0,
        "rate_type": "counter_over_wall_clock",
        "confidence": "measured",
    }


def test_a_rate_without_its_counter_is_none_and_not_zero() -> None:
    measured = throughput(step(final_rows=0))
    assert measured is not None
    assert (measured["rows_per_second"], measured["row_count_source"]) == (0.0, "final_rows")
    assert (measured["bytes_per_second"], measured["mib_per_second"], measured["byte_count_source"]) == (None,) * 3


@pytest.mark.parametrize(
    "without",
    [
        step(staged_rows=1, status="failed"),
        step(staged_rows=1, status="skipped"),
        step(staged_rows=1, seconds=0.0),
        step(),
        step(staged_rows=None),
        step(staged_rows=True),
        step(staged_rows=-1),
        step(schema_width=5),
    ],
)
def test_no_throughput(without: AuditStep) -> None:
    assert throughput(without) is None
    assert "throughput" not in step_details(without)


def test_details_keep_numbers_names_and_hashes() -> None:
    kept = {"a": 1, "b": [True, None, 0.5], "sha256": "sha256:" + "0" * 64, "c": {"d": "orders"}}
    assert redacted(kept) == kept
    assert redacted({"password": "hunter2", "c": {"api_key": ["x"]}, "text": "y" * 301, "tokens": 3}) == {
        "password": "[redacted]",
        "c": {"api_key": ["[redacted]"]},
        "text": "[redacted]",
        "tokens": 3,
    }
    with pytest.raises(ValueError, match="not JSON compliant"):
        details_json({"rate": float("nan")})
    assert json.loads(details_json({"ü": 1})) == {"ü": 1}


@pytest.mark.parametrize(
    ("governance", "enabled"),
    [
        ({}, True),
        ({"audit": {}}, True),
        ({"audit": {"mode": "standard"}}, True),
        ({"audit": {"enabled": False}}, False),
        ({"audit": {"mode": "off"}}, False),
        ({"enabled": False}, False),
    ],
)
def test_only_an_explicit_opt_out_switches_the_audit_off(governance: dict[str, Any], enabled: bool) -> None:
    assert audit_enabled(process(**governance)) is enabled


def test_where_the_tables_are() -> None:
    assert state_schema(process()) == "raw"
    assert state_schema(process(audit={"state_schema": "ops"})) == "ops"
