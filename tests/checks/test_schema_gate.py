from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pandera.config import config_context

from checks.schema_gate import PanderaSchemaGate, to_frame
from dpone_dagster.declarations.manifest import SchemaGate
from dpone_dagster.errors import DponeError
from dpone_dagster.governance.gate_runner import run_gates
from dpone_dagster.ports import GateOutcome, LoadColumn
from resources.asset_rows import ArrowProbe

AT = datetime(1900, 1, 1, 0, 0, 0, 1, tzinfo=UTC)
COLUMNS = tuple(
    LoadColumn(name=name, type=type_, nullable=nullable)
    for name, type_, nullable in (
        ("id", "bigint", False),
        ("qty", "int", True),
        ("price", "decimal(9,2)", True),
        ("at", "datetime2(6)", True),
        ("note", "nvarchar(20)", True),
        ("ok", "bit", True),
    )
)
Row = tuple[Any, ...]
ROWS: list[Row] = [
    (1, 5, Decimal("1.50"), AT, "a", True),
    (2, None, Decimal("0.10"), None, None, None),
    (2**53 + 1, None, None, AT, "b", False),
]


def batch(rows: Sequence[Row]) -> pa.RecordBatch:
    arrays = [pa.array([row[i] for row in rows], c.spec.arrow) for i, c in enumerate(COLUMNS)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(c.name, c.spec.arrow) for c in COLUMNS]))


def probe(*blocks: Sequence[Row]) -> ArrowProbe:
    def batches() -> Iterator[pa.RecordBatch]:
        return iter([batch(rows) for rows in blocks])

    return ArrowProbe(columns=COLUMNS, batches=batches, rows=sum(map(len, blocks)), side="staged", dataset="d")


def evaluate(attribute: str, *blocks: Sequence[Row]) -> GateOutcome:
    gate = SchemaGate(id="shape", type="schema", ref=f"checks.schemas_for_tests:{attribute}")
    return PanderaSchemaGate().evaluate(gate, None, probe(*blocks))


@pytest.fixture(autouse=True)
def schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    # ``checks`` is the product's package; the tests' folder of that name has no __init__.
    import importlib.util
    import sys
    from pathlib import Path

    name = "checks.schemas_for_tests"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("schemas_for_tests.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, module)


def test_every_block_is_judged() -> None:
    outcome = evaluate("GOOD", ROWS, ROWS[:2])
    assert (outcome.passed, dict(outcome.metrics)) == (
        True,
        {"rows": 5, "blocks": 2, "failing_rows": 0, "failing_checks": 0},
    )


def test_failures_are_counted_over_all_blocks_and_carry_no_value() -> None:
    bad = (0, 100, Decimal("0.09"), AT, "secret-4711", True)  # breaks id, qty, price and note
    also = (7, 101, None, AT, "ok", True)  # breaks qty
    outcome = evaluate("GOOD", [*ROWS, bad], [also, bad])
    assert outcome.passed is False
    assert dict(outcome.metrics) == {"rows": 6, "blocks": 2, "failing_rows": 3, "failing_checks": 4}
    assert "4711" not in repr(outcome)


def test_a_failure_in_the_last_block_only_is_found() -> None:
    outcome = evaluate("Model", ROWS, ROWS, [(0, 1, None, None, "x", None)])
    assert (outcome.passed, outcome.metrics["failing_rows"], outcome.metrics["rows"]) == (False, 1, 7)


def test_a_model_a_regex_and_a_rule_over_columns_work() -> None:
    assert evaluate("Model", ROWS).passed
    assert evaluate("REGEX", ROWS).passed
    assert evaluate("REGEX", [(1, 500, None, None, None, None)]).metrics["failing_rows"] == 1
    assert evaluate("ROWWISE", ROWS).passed is False  # id 1 has qty 5
    assert evaluate("ROWWISE", ROWS[1:]).passed


def test_without_rows_columns_and_dtypes_are_judged_all_the_same() -> None:
    assert evaluate("GOOD").passed
    assert dict(evaluate("GOOD", []).metrics) == {"rows": 0, "blocks": 1, "failing_rows": 0, "failing_checks": 0}
    assert evaluate("ABSENT").passed is False
    assert evaluate("FLOATS").passed is False


def test_values_and_dtypes_survive_the_way_into_pandas() -> None:
    frame = to_frame(batch(ROWS), COLUMNS)
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == {
        "id": "int64", "qty": "Int32", "price": "object", "at": "datetime64[us, UTC]", "note": "str", "ok": "boolean",
    }  # fmt: skip
    assert frame["id"].tolist() == [1, 2, 2**53 + 1]
    assert frame["qty"].tolist() == [5, pd.NA, pd.NA]
    assert frame["price"].tolist() == [Decimal("1.50"), Decimal("0.10"), None]
    assert frame["at"][0] == pd.Timestamp("1900-01-01T00:00:00.000001Z")
    # A block without a NULL has the same dtypes, and so has one of NULLs and one without a row.
    for rows in (ROWS[:1], [(1, None, None, None, None, None)], []):
        assert to_frame(batch(rows), COLUMNS).dtypes.equals(frame.dtypes)
    strict = tuple(c.model_copy(update={"nullable": False}) for c in COLUMNS)
    for rows in (ROWS[:1], []):
        assert [str(dtype) for dtype in to_frame(batch(rows), strict).dtypes] == [
            "int64", "int32", "object", "datetime64[us, UTC]", "str", "bool",
        ]  # fmt: skip
    assert evaluate("FLOATS", ROWS[:1]).passed is False


@pytest.mark.parametrize(
    "attribute",
    ["UNIQUE", "UNIQUE_COLUMN", "COERCE", "COERCE_COLUMN", "DROP", "FILTER", "ADD", "DEFAULT", "PARSED", "INDEX",
     "GROUPED", "ONLY_WARNS", "AGGREGATE", "AGGREGATE_OF_FRAME", "RAISES", "NOT_A_SCHEMA", "missing"],
)  # fmt: skip
def test_what_blocks_cannot_be_judged_by_is_refused(attribute: str) -> None:
    with pytest.raises(DponeError) as raised:
        evaluate(attribute, ROWS)
    assert raised.value.code == "DPONE_GATE_UNAVAILABLE"
    assert "4711" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_a_module_that_does_not_import_cannot_run() -> None:
    gate = SchemaGate(id="shape", type="schema", ref="no.such.module:THING")
    with pytest.raises(DponeError, match="ModuleNotFoundError"):
        PanderaSchemaGate().evaluate(gate, None, probe(ROWS))


def test_validation_that_is_switched_off_outside_is_done_all_the_same() -> None:
    with config_context(validation_enabled=False):
        assert evaluate("Model", [(0, 1, None, None, "x", None)]).passed is False


@pytest.mark.parametrize(("severity", "status"), [("error", "failed"), ("warning", "skipped")])
def test_a_refused_schema_never_passes_for_a_verdict(severity: Any, status: str) -> None:
    gates = [
        SchemaGate(id="a", type="schema", ref="checks.schemas_for_tests:UNIQUE", severity=severity),
        SchemaGate(id="b", type="schema", ref="checks.schemas_for_tests:GOOD", severity=severity),
    ]
    report = run_gates(
        gates, source=None, staged=probe(ROWS), now=datetime(2024, 1, 1, tzinfo=UTC), schema_gate=PanderaSchemaGate()
    )
    assert [r.status for r in report.results] == [status, "passed"]
    assert report.results[0].metrics["error_code"] == "DPONE_GATE_UNAVAILABLE"
    assert report.passed is (severity == "warning")
