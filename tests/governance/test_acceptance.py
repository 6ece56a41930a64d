"""Acceptance: which sides exist, what a snapshot holds, and when sides disagree."""

import json
from typing import Any

import pytest
from governance.scripted import Scripted, column

from dpone_dagster.contracts.loads import AcceptanceSnapshot
from dpone_dagster.declarations.manifest import Acceptance
from dpone_dagster.errors import DponeError
from dpone_dagster.governance.acceptance import (
    LoadPath,
    capture,
    compare,
    physical_sides,
    requested_sides,
    select,
    validate,
)
from dpone_dagster.governance.gate_runner import NEVER_A_VERDICT
from dpone_dagster.ports import MetricSnapshot

# Names that differ only in punctuation or case, and one of the framework's.
NAMES = ("a-b", "a.b", "A.B", 'a"b', "ключ")
COLUMNS = (*(column(name) for name in NAMES), column("__dpone__load_id", "nvarchar(20)"))
STAGED, LEGACY, RESUMED = LoadPath.STAGED, LoadPath.LEGACY, LoadPath.RESUME_ONLY


def policy(mode: str = "required", **fields: Any) -> Acceptance:
    checks = fields.pop("checks", {"row_count": True, "null_counts": True, "distinct_counts": ["a-b", "a.b"]})
    return Acceptance.parse({"enabled": True, "mode": mode, "checks": checks, **fields})


def measured(side: str = "source", rows: Any = 5, *, nulls: Any = None, distinct: Any = None) -> MetricSnapshot:
    return MetricSnapshot(
        side=side,
        dataset=f"{side} rows",
        columns=NAMES,
        row_count=rows,
        null_counts=dict(zip(NAMES, (0, 1, 2, 3, 4), strict=True)) if nulls is None else nulls,
        distinct_counts={"a-b": 5, "a.b": 4} if distinct is None else distinct,
    )


def captured(side: Any, metrics: Any, wanted: Acceptance | None = None, path: LoadPath = STAGED) -> AcceptanceSnapshot:
    return capture(side, Scripted(side, metrics=metrics), wanted or policy(), path=path, columns=COLUMNS)


def refusal(call: Any) -> DponeError:
    with pytest.raises(DponeError) as raised:
        call()
    return raised.value


# ------------------------------------------------------------------------------------------------------ sides


def test_the_sides_of_each_path() -> None:
    assert physical_sides(STAGED) == ("source", "staged", "target")
    assert physical_sides(LEGACY) == physical_sides(RESUMED) == ("source", "target")
    assert requested_sides(policy()) == ("source", "staged", "target")
    assert requested_sides(policy(capture={"staged": False})) == ("source", "target")
    assert requested_sides(Acceptance.parse({"enabled": False})) == ()


@pytest.mark.parametrize(("path", "boundary"), [(LEGACY, "pre_commit"), (RESUMED, "resume_validation")])
def test_a_side_that_the_path_lacks_is_refused_before_the_target_changes(path: LoadPath, boundary: str) -> None:
    refused = refusal(lambda: validate(policy(), path=path, columns=COLUMNS))
    assert (refused.code, refused.details) == (
        "DPONE_ACCEPTANCE_UNAVAILABLE",
        {"side": "staged", "boundary": boundary},
    )
    (warning,) = validate(policy("warn_only"), path=path, columns=COLUMNS)
    assert (warning.side, warning.status, warning.row_count) == ("staged", "warning", None)
    assert warning.error_code == "DPONE_ACCEPTANCE_UNAVAILABLE"
    assert validate(policy(capture={"staged": False}), path=path, columns=COLUMNS) == ()


@pytest.mark.parametrize("side", ["source", "staged", "target"])
def test_a_side_without_a_probe_is_refused_before_the_target_changes(side: str) -> None:
    probed = {"source", "staged", "target"} - {side}
    refused = refusal(lambda: validate(policy(), path=STAGED, columns=COLUMNS, probed=probed))
    assert (refused.code, refused.details["side"]) == ("DPONE_ACCEPTANCE_UNAVAILABLE", side)
    (warning,) = validate(policy("warn_only"), path=STAGED, columns=COLUMNS, probed=probed)
    assert (warning.side, warning.status) == (side, "warning")
    assert warning.boundary == ("post_commit" if side == "target" else "pre_commit")
    assert validate(policy(), path=STAGED, columns=COLUMNS) == ()


def test_a_listed_column_that_is_not_there_is_refused_before_the_target_changes() -> None:
    for field in ("null_counts", "distinct_counts"):
        for name in ("a_b", "__dpone__load_id"):
            asked = policy(checks={field: [name]})
            refused = refusal(lambda asked=asked: validate(asked, path=STAGED, columns=COLUMNS))
            assert (refused.code, refused.details["field"]) == ("DPONE_ACCEPTANCE_UNAVAILABLE", name)


def test_what_selectors_mean() -> None:
    for nothing in (False, "off", "none"):
        assert select(nothing, COLUMNS) == ()  # type: ignore[arg-type]
    for everything in (True, "all_columns", "business_columns", "strict", "source_and_binary_semantics"):
        assert select(everything, COLUMNS) == NAMES  # type: ignore[arg-type]
    assert select(("ключ", "a.b"), COLUMNS) == ("ключ", "a.b")


# -------------------------------------------------------------------------------------------------- snapshots


def test_a_snapshot_names_counts_by_exact_column_names() -> None:
    snapshot = captured("source", measured())
    assert json.loads(json.dumps(snapshot.as_json())) == {
        "schema": "dpone.acceptance.metric_snapshot.v1",
        "side": "source",
        "dataset": "source rows",
        "boundary": "pre_commit",
        "status": "succeeded",
        "columns": ["a-b", "a.b", "A.B", 'a"b', "ключ"],
        "row_count": 5,
        "null_counts": {"a-b": 0, "a.b": 1, "A.B": 2, 'a"b': 3, "ключ": 4},
        "distinct_counts": {"a-b": 5, "a.b": 4},
    }
    assert AcceptanceSnapshot.parse(snapshot.as_json()) == snapshot
    assert captured("staged", measured()).boundary == "pre_commit"
    assert captured("target", measured()).boundary == "post_commit"
    assert captured("target", measured(), path=LEGACY).boundary == "post_commit"
    assert captured("source", measured(), path=RESUMED).boundary == "resume_validation"
    assert refusal(lambda: captured("staged", measured(), path=LEGACY)).code == "DPONE_ACCEPTANCE_UNAVAILABLE"


@pytest.mark.parametrize(
    "answer",
    [
        measured(rows=None),
        measured(rows=-1),
        measured(rows=True),
        measured(rows=5.0),
        measured(nulls={}),
        measured(nulls=dict.fromkeys(NAMES, -1)),
        measured(distinct={"a-b": 5}),
        measured(distinct={"a-b": 5, "a_b": 4}),
        DponeError("DPONE_ENGINE_REFUSED", "ClickHouse refused a statement with its error number 47."),
    ],
)
@pytest.mark.parametrize("side", ["source", "target"])
def test_what_cannot_be_measured_fails_or_is_a_warning_without_numbers(answer: Any, side: Any) -> None:
    refused = refusal(lambda: captured(side, answer))
    boundary = "post_commit" if side == "target" else "pre_commit"
    assert refused.code == "DPONE_ACCEPTANCE_UNAVAILABLE"
    assert (refused.details["side"], refused.details["boundary"]) == (side, boundary)
    warning = captured(side, answer, policy("warn_only"))
    assert (warning.status, warning.row_count, warning.null_counts, warning.distinct_counts) == (
        "warning",
        None,
        {},
        {},
    )
    cause = "DPONE_ENGINE_REFUSED" if isinstance(answer, DponeError) else "DPONE_ACCEPTANCE_UNAVAILABLE"
    assert (warning.error_code, warning.boundary) == (cause, boundary)


@pytest.mark.parametrize("code", NEVER_A_VERDICT)
@pytest.mark.parametrize("mode", ["warn_only", "required"])
def test_what_stops_the_load_is_no_warning(code: str, mode: str) -> None:
    assert refusal(lambda: captured("source", DponeError(code, "x"), policy(mode))).code == code


def test_a_snapshot_that_pretends_is_refused() -> None:
    good = captured("source", measured()).as_json()
    for change in (
        {"status": "warning"},
        {"status": "warning", "error_code": "DPONE_ENGINE_REFUSED"},
        {"error_code": "DPONE_ENGINE_REFUSED"},
        {"null_counts": {"other": 1}},
        {"row_count": -1},
        {"values": ["x"]},
        {"boundary": "later"},
    ):
        assert refusal(lambda change=change: AcceptanceSnapshot.parse({**good, **change})).code == (
            "DPONE_CONTRACT_INVALID"
        )


# ------------------------------------------------------------------------------------------------ comparison


def sides(**changed: Any) -> list[AcceptanceSnapshot]:
    return [captured(side, changed.get(side, measured(side))) for side in ("source", "staged", "target")]


def test_sides_that_agree_have_no_difference() -> None:
    assert compare(sides(), policy(), same_rows_in_target=True) == ()
    assert compare(sides()[:1], policy(), same_rows_in_target=True) == ()
    assert compare([], policy(), same_rows_in_target=True) == ()


def test_a_disagreement_names_the_count_the_column_and_the_sides() -> None:
    nulls = dict(zip(NAMES, (0, 1, 2, 3, 5), strict=True))
    found = sides(staged=measured("staged", nulls=nulls, distinct={"a-b": 5, "a.b": 0}))
    differences = compare(found, policy("warn_only"), same_rows_in_target=True)
    assert [d.sentence() for d in differences] == [
        "null_count of column ключ is 4 in source and 5 in staged",
        "distinct_count of column a.b is 4 in source and 0 in staged",
    ]
    refused = refusal(lambda: compare(found[:2], policy(), same_rows_in_target=True))
    assert refused.code == "DPONE_ACCEPTANCE_FAILED"
    assert "null_count of column ключ is 4 in source and 5 in staged" in refused.sentence
    assert refused.details["boundary"] == "pre_commit"
    assert refused.details["differences"][1] == {
        "metric": "distinct_count", "column": "a.b", "side": "source", "count": 4,
        "other_side": "staged", "other_count": 0,
    }  # fmt: skip


def test_a_target_counts_only_where_it_was_measured_over_the_same_rows() -> None:
    found = sides(target=measured("target", 6))
    assert compare(found, policy(), same_rows_in_target=False) == ()
    refused = refusal(lambda: compare(found, policy(), same_rows_in_target=True))
    assert refused.details["boundary"] == "post_commit"
    assert "row_count is 5 in source and 6 in target" in refused.sentence
    resumed = [captured(side, measured(side, rows), path=RESUMED) for side, rows in (("source", 5), ("target", 4))]
    refused = refusal(lambda: compare(resumed, policy(capture={"staged": False}), same_rows_in_target=True))
    assert refused.details["boundary"] == "resume_validation"


def test_a_warning_compares_with_nothing() -> None:
    refused = DponeError("DPONE_ENGINE_REFUSED", "no")
    found = [captured("source", refused, policy("warn_only")), *sides()[1:]]
    assert compare(found, policy("warn_only"), same_rows_in_target=True) == ()
    found[2] = captured("target", measured("target", 6))
    (difference,) = compare(found, policy("warn_only"), same_rows_in_target=True)
    assert difference.sentence() == "row_count is 5 in staged and 6 in target"
