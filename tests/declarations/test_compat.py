"""``quality.mode`` and ``quality.checks``: the exact mapping of the older form, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
from declarations.manifests import load_text, refusal, refusals, whole

from dpone_dagster.declarations.loader import parse_manifest

MIN = {"id": "a", "type": "min_rows", "side": "target", "threshold": 1}
COUNT = {"id": "b", "type": "source_target_count"}
UNKNOWN = {"id": "c", "type": "profile_drift"}


def older(*checks: Any, **quality: Any) -> dict[str, Any]:
    return whole(quality={"checks": list(checks), **quality})


def quality(document: dict[str, Any]) -> dict[str, Any]:
    (process,) = parse_manifest(document).processes
    return process.as_json()["quality"]


def test_the_two_forms_are_the_same_load() -> None:
    canonical = whole(
        quality={
            "gates": [
                {"id": "a", "type": "min_rows", "side": "source", "threshold": 3, "severity": "error"},
                {
                    "id": "b",
                    "type": "row_count_reconciliation",
                    "tolerance": {"mode": "pct", "value": "0.1"},
                    "severity": "error",
                },
            ]
        }
    )
    checks = [{**MIN, "side": "source", "threshold": 3}, {**COUNT, "tolerance_pct": "0.1"}]
    assert quality(older(*checks, mode="fail")) == quality(canonical)
    assert quality(older(*checks)) == quality(canonical), "a missing mode is fail"


def test_warn_makes_warnings() -> None:
    assert [g["severity"] for g in quality(older(MIN, COUNT, mode="warn"))["gates"]] == ["warning", "warning"]


def test_a_severity_that_is_written_stands() -> None:
    found = quality(older({**MIN, "severity": "error"}, COUNT, mode="warn"))
    assert [g["severity"] for g in found["gates"]] == ["error", "warning"]


def test_mode_is_the_default_severity_of_gates_too() -> None:
    gates = [{"id": "x", "type": "min_rows", "threshold": 1}, {**MIN, "id": "y", "severity": "error"}]
    assert [g["severity"] for g in quality(whole(quality={"mode": "warn", "gates": gates}))["gates"]] == [
        "warning",
        "error",
    ]


def test_a_count_without_tolerance_allows_no_difference() -> None:
    assert quality(older(COUNT))["gates"][0]["tolerance"] == {"mode": "pct", "value": "0"}


def test_a_tolerance_stays_the_decimal_that_was_written(tmp_path: Path) -> None:
    checks = "[{id: b, type: source_target_count, tolerance_pct: 0.1}]"
    (process,) = load_text(yaml_with(f"{{checks: {checks}}}"), tmp_path).processes
    assert process.as_json()["quality"]["gates"][0]["tolerance"] == {"mode": "pct", "value": "0.1"}


@pytest.mark.parametrize(
    ("check", "rows"),
    [
        ({"value": 0}, 0),
        ({"threshold": 0}, 0),
        ({"threshold": 2, "value": 2}, 2),
    ],
)
def test_value_is_another_name_of_threshold(check: dict[str, int], rows: int) -> None:
    assert quality(older({"id": "a", "type": "min_rows", **check}))["gates"][0]["threshold"] == rows


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no threshold": (older({"id": "a", "type": "min_rows"}), ["quality.checks.0"]),
    "a misspelled threshold": (
        older({"id": "a", "type": "min_rows", "treshold": 1}),
        ["quality.checks.0.treshold"],
    ),
    "aliases that contradict": (older({**MIN, "value": 2}), ["quality.checks.0.threshold"]),
    "an empty alias": (older({**MIN, "value": None}), ["quality.checks.0.value"]),
    "text for a number": (older({**MIN, "threshold": "1"}), ["quality.checks.0.threshold"]),
    "a boolean for a number": (older({**MIN, "threshold": True}), ["quality.checks.0.threshold"]),
    "a decimal for a number": (older({**MIN, "threshold": 1.0}), ["quality.checks.0.threshold"]),
    "a negative number": (older({**MIN, "threshold": -1}), ["quality.checks.0.threshold"]),
    "a negative alias": (
        older({"id": "a", "type": "min_rows", "value": -1}),
        ["quality.checks.0.value"],
    ),
    "sied": (older({**MIN, "sied": "source"}), ["quality.checks.0.sied"]),
    "sied under warn": (older({**MIN, "sied": "source"}, mode="warn"), ["quality.checks.0.sied"]),
    "enabled": (older({**COUNT, "enabled": False}, mode="warn"), ["quality.checks.0.enabled"]),
    "a binary float": (older({**COUNT, "tolerance_pct": 0.1}), ["quality.checks.0.tolerance_pct"]),
    "a negative tolerance": (older({**COUNT, "tolerance_pct": -1}), ["quality.checks.0.tolerance_pct"]),
    "a side of a count": (older({**COUNT, "side": "source"}), ["quality.checks.0.side"]),
    "an unknown type": (older(UNKNOWN), ["quality.checks.0.type"]),
    "a gate's type": (older({"id": "a", "type": "not_null", "columns": ["x"]}), ["quality.checks.0.type"]),
    "an unknown type that should block": (
        older({**UNKNOWN, "severity": "error"}, mode="warn"),
        ["quality.checks.0.severity"],
    ),
    "an unknown type without an id": (older({"type": "x"}, mode="warn"), ["quality.checks.0.id"]),
    "no type": (older({"id": "a"}, mode="warn"), ["quality.checks.0.type"]),
    "a check that is text": (older("min_rows", mode="warn"), ["quality.checks.0"]),
    "an unknown mode": (older(MIN, mode="wrn"), ["quality.mode"]),
    "checks that are a mapping": (whole(quality={"checks": {}}), ["quality.checks"]),
    "gates and checks": (older(MIN, gates=[{**MIN, "id": "g"}]), ["quality.checks"]),
    "an id twice": (older(MIN, {**COUNT, "id": "a"}), ["quality.checks"]),
    "an id twice, one of them skipped": (older(MIN, {**UNKNOWN, "id": "a"}, mode="warn"), ["quality.checks"]),
    "an id that no gate can have": (older({**MIN, "id": "a b"}), ["quality.checks.0.id"]),
    "evidence that is authored": (whole(quality={"skipped_checks": [UNKNOWN]}), ["quality.skipped_checks"]),
    "evidence that is authored, empty": (whole(quality={"skipped_checks": []}), ["quality.skipped_checks"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    document, fields = REFUSED[case]
    assert list(refusals(document)) == fields


def test_an_unknown_check_under_warn_is_evidence_and_no_gate() -> None:
    check = {**UNKNOWN, "enabled": False, "threshold": 0.5, "columns": [None]}
    document = older(MIN, check, mode="warn")
    found = quality(document)
    assert [g["id"] for g in found["gates"]] == ["a"]
    assert found["skipped_checks"] == [{"id": "c", "type": "profile_drift"}]


def test_gates_and_checks_stand_together_under_warn() -> None:
    found = quality(older(MIN, UNKNOWN, mode="warn", gates=[{**MIN, "id": "g"}]))
    assert [(g["id"], g["severity"]) for g in found["gates"]] == [("g", "warning"), ("a", "warning")]


def test_a_processes_own_checks_are_taken_too() -> None:
    flow = {"kind": "dpone.flow.v1", "name": "f", "quality": {"checks": [COUNT]}}
    own = whole(kind=None, name="own", quality={"checks": [MIN]})
    loaded = parse_manifest({**flow, "processes": [whole(kind=None), own]}).processes
    assert [[g.type for g in p.quality.gates] for p in loaded] == [["row_count_reconciliation"], ["min_rows"]]
    broken = whole(kind=None, name="own", quality={"checks": [{**MIN, "sied": 1}]})
    assert list(refusals({**flow, "processes": [whole(kind=None), broken]})) == ["processes.1.quality.checks.0.sied"]


def yaml_with(quality_block: str) -> str:
    return f"""kind: dpone.batch.v1
name: orders
source: {{type: mssql, table: {{schema: rep, name: orders}}}}
sink: {{type: clickhouse, table: {{schema: raw, name: orders}}, strategy: full_refresh}}
quality: {quality_block}
"""


def test_a_refusal_keeps_line_and_authored_field(tmp_path: Path) -> None:
    block = """
  mode: fail
  checks:
    - id: a
      type: min_rows
      threshold: 1
      sied: target
    - id: b
      type: profile_drift
"""
    error = refusal(yaml_with(block), tmp_path)
    assert error.sentence.startswith("m.yaml:11 quality.checks.0.sied: is no field here")
    assert error.sentence.endswith("Did you mean side? 1 more in this manifest.")
    assert [(e["line"], e["field"]) for e in error.details["errors"]] == [
        (11, "quality.checks.0.sied"),
        (13, "quality.checks.1.type"),
    ]
    assert "quality.gates" in error.details["errors"][1]["next_step"]


def test_a_gate_knows_the_line_of_its_check(tmp_path: Path) -> None:
    block = """
  mode: warn
  checks:
    - {id: x, type: profile_drift}
    - id: a
      type: min_rows
      value: 1
    - id: b
      type: source_target_count
      tolerance_pct: 0
"""
    loaded = load_text(yaml_with(block), tmp_path)
    lines = [
        loaded.line(f"quality.{field}")
        for field in ("skipped_checks.0.id", "gates.0", "gates.0.threshold", "gates.1.id", "gates.1.tolerance.value")
    ]
    assert lines == [8, 9, 11, 12, 14]


@pytest.mark.parametrize(
    ("block", "field", "words"),
    [
        ("{acceptance: {mode: required}}", "quality.acceptance.enabled", "Say enabled: true"),
        (
            "{acceptance: {enabled: true, checks: {row_count: exact}}}",
            "quality.acceptance.checks.row_count",
            "Write row_count: true",
        ),
        ('{acceptance: {enabled: "true"}}', "quality.acceptance.enabled", "Write enabled: true"),
        ("{acceptance: {enabled: 1}}", "quality.acceptance.enabled", "Write enabled: true"),
        ("{acceptance: {enabled: no}}", "quality.acceptance.enabled", "Write enabled: false"),
    ],
)
def test_an_older_spelling_names_the_new_one(block: str, field: str, words: str, tmp_path: Path) -> None:
    error = refusal(yaml_with(block), tmp_path)
    assert error.details["field"] == field
    assert words in error.next_step


@pytest.mark.parametrize("selector", ["all", "all_column", "everything", "ALL_COLUMNS", ""])
def test_an_unknown_selector_is_refused(selector: str) -> None:
    document = whole(quality={"acceptance": {"enabled": False, "checks": {"null_counts": selector}}})
    assert list(refusals(document)) == ["quality.acceptance.checks.null_counts"]


@pytest.mark.parametrize("place", ["source", "source__options", "sink", "sink__options"])
def test_acceptance_elsewhere_is_sent_where_it_belongs(place: str) -> None:
    found = refusals(whole(**{f"{place}__acceptance": {"enabled": True}}))
    assert list(found) == [place.replace("__", ".") + ".acceptance"]
    assert "quality.acceptance" in next(iter(found.values()))
