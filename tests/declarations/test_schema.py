"""The published JSON Schema: current, a schema, and of one mind with validation except for the rules it lists."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from declarations.manifests import refusals, whole
from declarations.test_compat import COUNT, MIN, REFUSED, UNKNOWN
from declarations.test_load_manifest import RULES
from declarations.test_loader import FUZZ, TYPICAL, VALID
from hypothesis import given
from jsonschema import Draft202012Validator, FormatChecker

from dpone_dagster.declarations.schema import LAXER, SCHEMA_FILE, json_schema, reference, schema_text

VALIDATOR = Draft202012Validator(json_schema(), format_checker=FormatChecker())


def accepts(document: Any) -> bool:
    return VALIDATOR.is_valid(json.loads(json.dumps(document)))


def test_the_committed_schema_is_current() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), "run python -m dpone_dagster.declarations.schema"


def test_the_module_writes_what_is_committed() -> None:
    before = SCHEMA_FILE.stat().st_mtime_ns
    subprocess.run([sys.executable, "-m", "dpone_dagster.declarations.schema"], check=True)
    assert SCHEMA_FILE.stat().st_mtime_ns > before
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text()


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(json_schema())


def test_every_object_is_closed_but_what_providers_define() -> None:
    closed = {name for name, d in json_schema()["$defs"].items() if d.get("additionalProperties") is False}
    assert closed == set(json_schema()["$defs"])


def test_every_field_has_a_meaning() -> None:
    for name, definition in json_schema()["$defs"].items():
        assert definition["description"], name
        for field, value in definition["properties"].items():
            assert "description" in value or "$ref" in json.dumps(value), f"{name}.{field}"


def test_null_is_nowhere() -> None:
    assert '"null"' not in schema_text()


def hook(**fields: Any) -> dict[str, Any]:
    return whole(source__options__hooks__pre_hook=[{"id": "a", "kind": "custom", "sql": "select 1", **fields}])


def gate(**fields: Any) -> dict[str, Any]:
    return whole(quality__gates=[{"id": "g", **fields}])


def acceptance(**fields: Any) -> dict[str, Any]:
    return whole(quality__acceptance={"enabled": True, **fields})


GOOD: dict[str, dict[str, Any]] = {
    "the smallest": whole(),
    "the typical": yaml.load(TYPICAL, Loader=yaml.BaseLoader)
    | {"sink": whole()["sink"], "source": whole()["source"], "quality": {}},
    "airflow": hook(execution={"airflow": "separate_task"}),
    "orchestrator": hook(execution={"orchestrator": "separate_task"}),
    "retries": hook(retry_policy={"attempts": 2}),
    "no retries": hook(retry_policy="none"),
    "a decimal as text": gate(type="row_count_reconciliation", tolerance={"mode": "pct", "value": "0.1"}),
    "a whole decimal": gate(type="row_count_reconciliation", tolerance={"mode": "pct", "value": 1}),
    "a provider's gate": gate(type="acme.drift", options={"anything": [1, None, {"x": 0.5}]}),
    "values": gate(type="accepted_values", column="c", values=["a", 1, True]),
    "pandera": gate(type="schema", ref="checks.flights:Flights"),
    "columns": acceptance(checks={"null_counts": ["a", "b"], "distinct_counts": "off"}),
    "columns by a boolean": acceptance(checks={"null_counts": True}),
    "disabled": whole(quality__acceptance={"enabled": False}),
    "a flow": {"kind": "dpone.flow.v1", "name": "f", "processes": [whole(kind=None)]},
    "checks": whole(quality={"mode": "fail", "checks": [MIN, COUNT]}),
    "checks without mode": whole(quality={"checks": [COUNT]}),
    "checks under warn": whole(quality={"mode": "warn", "checks": [MIN, {**UNKNOWN, "enabled": False}]}),
    "names of any kind": whole(sink__unique_key=['quo"te', "back`tick", "точка.", "A", "a"]),
}
BAD: dict[str, Any] = {
    "no kind": whole(kind=None),
    "another kind": whole(kind="dpone.batch.v2"),
    "a list": [whole()],
    "an unknown key": whole(nmae=1),
    "an unknown key below": whole(sink__staging={"shema": "x"}),
    "no sink": whole(sink=None),
    "an unknown strategy": whole(sink__strategy="upsert"),
    "a null": whole() | {"description": None},
    "text for a boolean": whole(sink__options__lineage={"enabled": "yes"}),
    "a number for a boolean": whole(sink__options__lineage={"enabled": 1}),
    "text for a number": hook(timeout_seconds="5"),
    "a number for text": whole(name=5),
    "a boolean for a number": hook(timeout_seconds=True),
    "out of bounds": hook(timeout_seconds=0),
    "one try": hook(retry_policy={"attempts": 1}),
    "an unknown policy": hook(retry_policy="some"),
    "no id": whole(quality__gates=[{"type": "min_rows", "threshold": 1}]),
    "no threshold": gate(type="min_rows"),
    "the older name of threshold": gate(type="min_rows", value=1),
    "sied": gate(type="min_rows", threshold=1, sied="source"),
    "enabled": gate(type="min_rows", threshold=1, enabled=False),
    "an unknown gate": gate(type="min_row", threshold=1),
    "no gate type": gate(threshold=1),
    "a negative tolerance": gate(type="row_count_reconciliation", tolerance={"mode": "pct", "value": -1}),
    "an exponent": gate(type="row_count_reconciliation", tolerance={"mode": "pct", "value": "1e2"}),
    "a decimal value": gate(type="accepted_values", column="c", values=["a", 0.5]),
    "no values": gate(type="accepted_values", column="c", values=[]),
    "no columns": gate(type="not_null", columns=[]),
    "a nameless column": gate(type="not_null", columns=[""]),
    "a bad ref": gate(type="schema", ref="checks.flights"),
    "acceptance without enabled": whole(quality__acceptance={"mode": "required"}),
    "row_count exact": acceptance(checks={"row_count": "exact"}),
    "an unknown selector": acceptance(checks={"null_counts": "all"}),
    "an empty selection": acceptance(checks={"null_counts": []}),
    "acceptance of a sink": whole(sink__options__acceptance={"enabled": True}),
    "a flow of nothing": {"kind": "dpone.flow.v1", "name": "f", "processes": []},
    "a batch with processes": whole(processes=[]),
    "a day that is none": whole(
        source__read={"mode": "daily", "column": "at", "start_date": "2024-02-30"}, sink__strategy="replace"
    ),
    "a day with a time": whole(
        source__read={"mode": "daily", "column": "at", "start_date": "2024-01-01T00:00:00"}, sink__strategy="replace"
    ),
}
# Rules between fields: the schema lets these pass (LAXER), everything else in the other tests' tables it refuses too.
LAX_CHECKS = {
    "no threshold",
    "aliases that contradict",
    "gates and checks",
    "an id twice",
    "an id twice, one of them skipped",
    "a decimal for a number",
    "a binary float",
}
STRICT_RULES = {
    "depends_on repeats",
    "airflow and orchestrator",
    "empty unique_key",
    "unique_key repeats",
    "hash of no columns",
    "hash columns repeat",
    "not_null columns repeat",
    "unique columns repeat",
    "acceptance columns repeat",
}


@pytest.mark.parametrize("case", GOOD)
def test_both_accept(case: str) -> None:
    assert refusals(GOOD[case]) == {}
    assert accepts(GOOD[case])


@pytest.mark.parametrize("case", BAD)
def test_both_refuse(case: str) -> None:
    assert refusals(BAD[case])
    assert not accepts(BAD[case])


@pytest.mark.parametrize("case", REFUSED)
def test_the_older_form_is_refused_by_the_schema_too(case: str) -> None:
    assert accepts(REFUSED[case][0]) == (case in LAX_CHECKS)


@pytest.mark.parametrize("rule", RULES)
def test_where_the_schema_is_laxer(rule: str) -> None:
    broken, _, kept = RULES[rule]
    assert accepts(kept)
    assert accepts(broken) == (rule not in STRICT_RULES)


def test_a_whole_float_is_the_other_laxity() -> None:
    document = hook(timeout_seconds=5.0)
    assert accepts(document)
    assert refusals(document)
    assert any("1.0" in rule for rule in LAXER)


@FUZZ
@given(document=VALID)
def test_what_validation_accepts_the_schema_accepts(document: dict[str, Any]) -> None:
    assert refusals(document) == {}
    assert accepts(document)


def test_the_reference_has_every_model_and_field() -> None:
    text = reference()
    for name, definition in json_schema()["$defs"].items():
        section = text.split(f"### {name}\n")[1].split("\n### ")[0]
        assert all(f"| `{field}` |" in section for field in definition["properties"])


def test_the_documented_first_line_leads_to_the_schema() -> None:
    docs = Path(__file__).parents[2] / "docs" / "manifest.md"
    line = next(line for line in docs.read_text().splitlines() if "yaml-language-server" in line)
    assert line.endswith("docs/schema/dpone.manifest.schema.json")
    assert docs.parent / "schema" / "dpone.manifest.schema.json" == SCHEMA_FILE
