"""Scopes, gates and mart declarations: what they admit and what they refuse."""

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpone_dagster.contracts.mart import (
    Column,
    GateSpec,
    MartSpec,
    Relation,
    Scope,
    admit_key,
)
from dpone_dagster.errors import DponeError

DECLARED: dict[str, Any] = {
    "name": "departures",
    "model_unique_id": "model.flights.departures",
    "workflow": "flights",
    "source": {"schema_name": "marts", "name": "departures"},
    "target": {"schema_name": "analytics", "name": "departures"},
    "event_time": "time_hour",
    "key": ["time_hour", "carrier_id"],
    "columns": [
        {"name": "carrier_id", "type": "int", "nullable": False},
        {"name": "time_hour", "type": "datetime2(6)", "nullable": False},
        {"name": "tail", "type": "nvarchar(10)", "nullable": True},
        {"name": "delay", "type": "decimal(9,2)", "nullable": True},
    ],
    "start_date": "2013-01-01",
}


def refusal(call: Any, *args: Any) -> DponeError:
    with pytest.raises(DponeError) as caught:
        call(*args)
    return caught.value


# ----------------------------------------------------------------------------------------------------- scope


def test_a_day() -> None:
    leap = Scope.day("2024-02-29")
    assert (leap.start, leap.end) == (datetime(2024, 2, 29, tzinfo=UTC), datetime(2024, 3, 1, tzinfo=UTC))
    assert (leap.key, leap.start_text, leap.end_text) == (
        "2024-02-29",
        "2024-02-29T00:00:00Z",
        "2024-03-01T00:00:00Z",
    )
    assert Scope.day(date(2024, 2, 29)) == leap


@given(st.dates(min_value=date(1, 1, 1), max_value=date(9999, 12, 30)))
def test_a_key_survives(day: date) -> None:
    scope = Scope.day(day)
    assert Scope.day(scope.key) == scope
    assert scope.end - scope.start == timedelta(days=1)
    assert scope.start_text == f"{day.year:04d}-{day.month:02d}-{day.day:02d}T00:00:00Z"


@pytest.mark.parametrize(
    "key",
    [
        "",
        "2024-02-30",
        "2023-02-29",
        "20240229",
        "2024-2-29",
        "2024-W09-4",
        "2024-02-29T00:00:00",
        " 2024-02-29",
        "2024-02-29\n",
        "today",
        datetime(2024, 2, 29, tzinfo=UTC),
        "9999-12-31",
    ],
)
def test_no_day(key: Any) -> None:
    assert refusal(Scope.day, key).code == "DPONE_SCOPE_NOT_A_DAY"


MIDNIGHT = datetime(2024, 2, 29, tzinfo=UTC)


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (MIDNIGHT, MIDNIGHT),
        (MIDNIGHT, MIDNIGHT + timedelta(days=2)),
        (MIDNIGHT, MIDNIGHT - timedelta(days=1)),
        (MIDNIGHT + timedelta(hours=1), MIDNIGHT + timedelta(hours=25)),
        (MIDNIGHT.replace(tzinfo=None), MIDNIGHT.replace(tzinfo=None) + timedelta(days=1)),
        (
            MIDNIGHT.replace(tzinfo=timezone(timedelta(hours=1))),
            MIDNIGHT.replace(tzinfo=timezone(timedelta(hours=1))) + timedelta(days=1),
        ),
    ],
)
def test_no_scope_but_a_utc_day(start: datetime, end: datetime) -> None:
    with pytest.raises(ValueError, match=r"UTC|midnight"):
        Scope(start=start, end=end)


# ----------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize(
    "gate",
    [
        {"id": "g", "type": "min_rows", "threshold": 0},
        {"id": "g", "type": "min_rows", "threshold": 5, "severity": "warning", "side": "source"},
        {"id": "g", "type": "row_count_reconciliation", "tolerance": {"mode": "absolute", "value": 2}},
        {"id": "g", "type": "typed_hash_reconciliation"},
    ],
)
def test_gate_admitted(gate: dict[str, Any]) -> None:
    parsed = GateSpec.parse(gate)
    assert {k: v for k, v in parsed.as_json().items() if k in gate} == gate
    assert parsed.severity == gate.get("severity", "error")


@pytest.mark.parametrize(
    "gate",
    [
        {"id": "g", "type": "min_rows"},
        {"id": "g", "type": "min_rows", "threshold": -1},
        {"id": "g", "type": "min_rows", "threshold": "1"},
        {"id": "g", "type": "min_rows", "treshold": 1},
        {"id": "g", "type": "min_rows", "threshold": 1, "enabled": False},
        {"id": "g", "type": "typed_hash_reconciliation", "threshold": 1},
        {"id": "g", "type": "typed_hash_reconciliation", "side": "source"},
        {"id": "g", "type": "typed_hash_reconciliation", "tolerance": {"mode": "absolute", "value": 1}},
        {"id": "g", "type": "row_count_reconciliation", "tolerance": {"mode": "pct", "value": 1}},
        {"id": "g", "type": "not_null"},
        {"id": "g", "type": "min_rows", "threshold": 1, "severity": "fatal"},
        {"id": "two words", "type": "typed_hash_reconciliation"},
        {"id": "", "type": "typed_hash_reconciliation"},
    ],
)
def test_gate_refused(gate: dict[str, Any]) -> None:
    assert refusal(GateSpec.parse, gate).code == "DPONE_CONTRACT_INVALID"


# ------------------------------------------------------------------------------------------------------ mart


def test_a_mart() -> None:
    mart = MartSpec.parse(DECLARED)
    assert [c.name for c in mart.key_columns] == ["time_hour", "carrier_id"]  # key order
    assert [c.name for c in mart.value_columns] == ["tail", "delay"]  # contract order
    assert mart.source.dotted == "marts.departures"
    assert mart.start_date == date(2013, 1, 1)
    assert mart.partition_by == "day"
    admit_key(mart)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"key": ["time_hour", "missing"]}, "(document)"),
        ({"key": ["time_hour", "time_hour"]}, "(document)"),
        ({"key": ["carrier_id"]}, "(document)"),
        ({"event_time": "missing"}, "(document)"),
        ({"columns": [*DECLARED["columns"], {"name": "tail", "type": "int", "nullable": True}]}, "(document)"),
        ({"columns": [*DECLARED["columns"], {"name": "TAIL", "type": "int", "nullable": True}]}, "(document)"),
        ({"columns": [{"name": "a b", "type": "int", "nullable": True}]}, "columns.0.name"),
        ({"columns": [{"name": "a", "type": "int"}]}, "columns.0.nullable"),
        ({"name": "drop table"}, "name"),
        ({"name": "x" * 64}, "name"),
        ({"target": {"schema_name": "a", "name": "b", "uuid": "c"}}, "target.uuid"),
        ({"partition_by": "week"}, "partition_by"),
        ({"start_date": "soon"}, "start_date"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_mart_refused(change: dict[str, Any], field: str) -> None:
    error = refusal(MartSpec.parse, {**DECLARED, **change})
    assert (error.code, error.details["field"]) == ("DPONE_CONTRACT_INVALID", field)


@pytest.mark.parametrize(
    ("column", "code"),
    [
        ({"name": "carrier_id", "type": "int", "nullable": True}, "DPONE_KEY_NULLABLE"),
        ({"name": "carrier_id", "type": "varchar(2)", "nullable": False}, "DPONE_KEY_TYPE"),
        ({"name": "carrier_id", "type": "float", "nullable": False}, "DPONE_TYPE_UNSUPPORTED"),
        ({"name": "time_hour", "type": "date", "nullable": False}, "DPONE_EVENT_TIME_TYPE"),
        ({"name": "time_hour", "type": "datetime2(6)", "nullable": True}, "DPONE_KEY_NULLABLE"),
    ],
)
def test_a_key_refused(column: dict[str, Any], code: str) -> None:
    others = [c for c in DECLARED["columns"] if c["name"] != column["name"]]
    mart = MartSpec.parse({**DECLARED, "columns": [*others, column]})
    error = refusal(admit_key, mart)
    assert error.code == code
    if code != "DPONE_TYPE_UNSUPPORTED":
        assert error.details["field"] == column["name"]


def test_columns_and_relations_are_frozen() -> None:
    for thing, field in (
        (Column(name="a", type="int", nullable=False), "type"),
        (Relation(schema_name="a", name="b"), "name"),
    ):
        with pytest.raises(ValueError, match="frozen"):
            setattr(thing, field, "c")
