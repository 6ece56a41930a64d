"""Gates of a governed load: what passes, what fails, what cannot run, and what never leaves."""

import json
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import yaml
from governance.scripted import COLUMNS, Scripted, column
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.contracts.loads import LoadGateReport, LoadGateResult
from dpone_dagster.contracts.mart import GateSpec, Tolerance
from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.declarations.manifest import Gate, Quality, SkippedCheck
from dpone_dagster.errors import DponeError
from dpone_dagster.governance import gate_runner, gates, rules
from dpone_dagster.governance.gate_runner import find_providers, run_gates
from dpone_dagster.ports import GateOutcome

NOW = datetime(2024, 3, 10, 12, tzinfo=UTC)
GATES: TypeAdapter[Gate] = TypeAdapter(Gate)


def gate(**fields: Any) -> Gate:
    return GATES.validate_json(json.dumps({"id": "g", **fields}))


def run(*declared: Gate, source: Any = None, staged: Any = None, **more: Any) -> LoadGateReport:
    return run_gates(declared, source=source, staged=staged or Scripted(), **{"now": NOW, **more})


def one(declared: Gate, **more: Any) -> LoadGateResult:
    report = run(declared, **more)
    (result,) = report.results
    assert report.passed is (result.status == "passed" or result.severity == "warning")
    return result


def counts(source: Any, target: Any, **fields: Any) -> LoadGateResult:
    return one(
        gate(type="row_count_reconciliation", **fields),
        source=Scripted("source", row_count=source),
        staged=Scripted(row_count=target),
    )


# ------------------------------------------------------------------------------------------------- row counts


def test_the_report_is_that_of_the_requirements() -> None:
    report = run(
        gate(id="source_target_rows", type="row_count_reconciliation", tolerance={"mode": "pct", "value": "0"}),
        source=Scripted("source", row_count=10),
        staged=Scripted(row_count=9),
    )
    assert report.as_json() == {
        "kind": "dpone.data_quality.gates.v1",
        "passed": False,
        "results": [
            {
                "gate_id": "source_target_rows",
                "type": "row_count_reconciliation",
                "status": "failed",
                "severity": "error",
                "metrics": {"source_row_count": 10, "target_row_count": 9, "difference": 1, "allowed_difference": 0},
                "message": "row counts differ by 1",
            }
        ],
    }


@pytest.mark.parametrize(
    ("source", "target", "mode", "value", "status"),
    [
        (0, 0, "absolute", "0", "passed"),
        (0, 0, "pct", "0", "passed"),
        (0, 1, "pct", "100", "failed"),  # rows out of nothing
        (0, 1, "absolute", "100", "failed"),
        (1, 0, "pct", "100", "passed"),
        (1, 0, "pct", "99.999", "failed"),
        (1000, 999, "pct", "0.1", "passed"),
        (1000, 1001, "pct", "0.1", "passed"),
        (1000, 998, "pct", "0.1", "failed"),
        (999, 998, "pct", "0.1", "failed"),  # 0.999 rows are tolerated: less than one
        (3, 2, "pct", "33.33333333333333333333", "failed"),
        (3, 2, "pct", "33.33333333333333333334", "passed"),
        (10, 12, "absolute", "2", "passed"),
        (10, 13, "absolute", "2.999", "failed"),
    ],
)
def test_row_counts_and_their_tolerance(source: int, target: int, mode: str, value: str, status: str) -> None:
    assert counts(source, target, tolerance={"mode": mode, "value": value}).status == status


@given(
    source=st.integers(0, 10**15),
    shift=st.integers(-(10**6), 10**6),
    digits=st.tuples(st.integers(0, 10**6), st.integers(0, 20)),
)
@example(source=1000, shift=-1, digits=(1, 1))
@example(source=7 * 10**14, shift=1, digits=(1, 15))
def test_a_percentage_is_exact(source: int, shift: int, digits: tuple[int, int]) -> None:
    target = max(source + shift, 0)
    value = Decimal(digits[0]).scaleb(-digits[1])
    verdict = rules.row_counts(source, target, mode="pct", value=value)
    tolerated = Fraction(source) * Fraction(digits[0], 10 ** digits[1]) / 100
    assert verdict.ok is (abs(source - target) <= tolerated and not (source == 0 and target > 0))
    shown = verdict.metrics["allowed_difference"]
    assert shown is not None
    assert Fraction(shown) == tolerated


@pytest.mark.parametrize("impossible", [None, -1, True, False, 0.0, 3.0, "3", Decimal(3)])
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_missing_or_impossible_count_is_never_zero(impossible: Any, side: str) -> None:
    pair = {"source": 0, "target": 0, side: impossible}
    for tolerance in ({"mode": "absolute", "value": "100"}, {"mode": "pct", "value": "100"}):
        failed = counts(**pair, tolerance=tolerance)
        assert (failed.status, failed.metrics[f"{side}_row_count"]) == ("failed", None)
        skipped = counts(**pair, tolerance=tolerance, severity="warning")
        assert (skipped.status, skipped.metrics["error_code"]) == ("skipped", "DPONE_GATE_UNAVAILABLE")


@pytest.mark.parametrize("impossible", [None, -1, True, 0.0])
def test_min_rows_has_no_number_where_there_is_none(impossible: Any) -> None:
    for threshold in (0, 1):
        result = one(gate(type="min_rows", threshold=threshold), staged=Scripted(row_count=impossible))
        assert (result.status, result.metrics["row_count"]) == ("failed", None)


@pytest.mark.parametrize(("rows", "threshold", "status"), [(0, 0, "passed"), (0, 1, "failed"), (7, 7, "passed")])
@pytest.mark.parametrize("side", ["source", "target"])
def test_min_rows(rows: int, threshold: int, status: str, side: str) -> None:
    probes = {"source": Scripted("source", row_count=10**6), "staged": Scripted(row_count=10**6)}
    probes["source" if side == "source" else "staged"].answers["row_count"] = rows
    assert one(gate(type="min_rows", threshold=threshold, side=side), **probes).status == status


# ------------------------------------------------------------------------------------------------ typed hashes

SAME, OTHER = SetDigest(3, (1, 2, 3, 4)), SetDigest(3, (1, 2, 3, 5))


@pytest.mark.parametrize(
    ("theirs", "status"), [(SAME, "passed"), (OTHER, "failed"), (None, "failed"), ("sha256:aa", "failed")]
)
def test_typed_hash_compares_every_column_by_default(theirs: Any, status: str) -> None:
    source, staged = Scripted("source", digest=SAME), Scripted(digest=theirs)
    assert one(gate(type="typed_hash_reconciliation"), source=source, staged=staged).status == status
    assert source.asked == staged.asked == [("digest", COLUMNS, (), 1)]


def test_a_sample_is_by_the_unique_key_and_one_in_sixteen_by_default() -> None:
    sample = {"type": "typed_hash_reconciliation", "mode": "sample"}
    for fields, key, modulus in (
        ({}, COLUMNS[:1], 16),
        ({"modulus": 5, "key": ["at", "id"]}, (COLUMNS[2], COLUMNS[0]), 5),
    ):
        source, staged = Scripted("source", digest=SAME), Scripted(digest=SAME)
        result = one(gate(**sample, **fields), source=source, staged=staged, unique_key=("id",))
        assert (result.status, result.metrics["modulus"]) == ("passed", modulus)
        assert source.asked == staged.asked == [("digest", COLUMNS, key, modulus)]
    source, staged = Scripted("source", digest=SAME), Scripted(digest=SAME)
    one(gate(**sample, columns=["note"]), source=source, staged=staged)
    assert source.asked == [("digest", (COLUMNS[1],), COLUMNS, 16)]


@pytest.mark.parametrize(
    ("theirs", "fields"),
    [
        (COLUMNS[:2], {}),
        ((*COLUMNS, column("more")), {}),
        ((COLUMNS[0], column("note", "nvarchar(30)"), COLUMNS[2]), {}),
        (COLUMNS, {"columns": ["Note"]}),
        (COLUMNS, {"mode": "sample", "key": ["ID"]}),
    ],
)
def test_columns_that_do_not_match_cannot_be_compared(theirs: Any, fields: Any) -> None:
    source, staged = Scripted("source", digest=SAME), Scripted(columns=theirs, digest=SAME)
    result = one(gate(type="typed_hash_reconciliation", **fields), source=source, staged=staged)
    assert (result.status, result.metrics["error_code"]) == ("failed", "DPONE_GATE_UNAVAILABLE")
    assert source.asked == staged.asked == []


# -------------------------------------------------------------------------------------------------- one side


@pytest.mark.parametrize(
    ("fields", "answer", "question"),
    [
        ({"type": "not_null", "columns": ["id", "note"]}, "rows_with_null", (("id", "note"),)),
        ({"type": "unique", "columns": ["id"]}, "surplus_rows", (("id",),)),
        (
            {"type": "accepted_values", "column": "note", "values": ["a", "b"], "allow_null": True},
            "rows_outside",
            ("note", ("a", "b"), True),
        ),
    ],
)
def test_rows_that_break_a_rule_fail_it(fields: Any, answer: str, question: tuple[Any, ...]) -> None:
    for rows, status in ((0, "passed"), (1, "failed"), (None, "failed"), (-1, "failed"), (False, "failed")):
        staged = Scripted(**{answer: rows})
        result = one(gate(**fields), staged=staged)
        assert result.status == status
        assert staged.asked == [(answer, *question)]
    unknown = Scripted(columns=(column("ID"),), **{answer: 0})
    result = one(gate(**fields), staged=unknown)
    assert (result.status, unknown.asked) == ("failed", [])
    source = Scripted("source", **{answer: 2})
    assert one(gate(**fields, side="source"), source=source).metrics[answer] == 2


@pytest.mark.parametrize(
    ("newest", "status"),
    [
        (NOW - timedelta(seconds=60), "passed"),
        (NOW - timedelta(seconds=60, microseconds=1), "failed"),
        (NOW + timedelta(days=1), "passed"),
        (None, "failed"),
        (datetime(2024, 3, 10, 12), "failed"),
        ("2024-03-10", "failed"),
    ],
)
def test_freshness_is_exact_to_the_microsecond(newest: Any, status: str) -> None:
    result = one(gate(type="freshness", column="at", max_age_seconds=60), staged=Scripted(newest=newest))
    assert result.status == status


def test_freshness_may_count_from_the_end_of_the_day() -> None:
    fresh = gate(type="freshness", column="at", max_age_seconds=0, reference="scope_end")
    staged = Scripted(newest=datetime(2024, 3, 2, tzinfo=UTC))
    assert one(fresh, staged=staged, scope_end=datetime(2024, 3, 2, tzinfo=UTC)).status == "passed"
    assert one(fresh, staged=staged, scope_end=datetime(2024, 3, 3, tzinfo=UTC)).metrics["age_seconds"] == 86400
    assert one(fresh, staged=staged).metrics["error_code"] == "DPONE_GATE_UNAVAILABLE"
    assert (
        one(gate(type="freshness", column="note", max_age_seconds=1)).metrics["error_code"] == "DPONE_GATE_UNAVAILABLE"
    )


@pytest.mark.parametrize(
    ("value", "bounds", "status"),
    [
        (0, {"max": "0"}, "passed"),
        (Decimal("0.1"), {"min": "0.1", "max": "0.1"}, "passed"),
        (Decimal("0.1000000000000000000001"), {"max": "0.1"}, "failed"),
        (-1, {"min": "0"}, "failed"),
        (None, {"max": "0"}, "failed"),
        (True, {"max": "1"}, "failed"),
        (0.5, {"max": "1"}, "failed"),
        (Decimal("NaN"), {"max": "1"}, "failed"),
    ],
)
def test_custom_sql_compares_an_exact_number(value: Any, bounds: Any, status: str) -> None:
    staged = Scripted(scalar=value)
    assert one(gate(type="custom_sql", sql="SELECT 1", **bounds), staged=staged).status == status
    assert staged.asked == [("scalar", "SELECT 1")]


def test_custom_sql_whose_file_was_not_read_cannot_run() -> None:
    staged = Scripted(scalar=0)
    result = one(gate(type="custom_sql", sql_file="q.sql", max="1"), staged=staged)
    assert (result.status, result.metrics["error_code"], staged.asked) == ("failed", "DPONE_GATE_UNAVAILABLE", [])


# ------------------------------------------------------------------------------------------------- cannot run


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "row_count_reconciliation"},
        {"type": "min_rows", "threshold": 0},
        {"type": "typed_hash_reconciliation"},
        {"type": "custom_sql", "sql": "SELECT 1", "max": "1"},
        {"type": "not_null", "columns": ["id"]},
        {"type": "unique", "columns": ["id"]},
        {"type": "freshness", "column": "at", "max_age_seconds": 1},
        {"type": "accepted_values", "column": "id", "values": [1]},
        {"type": "schema", "ref": "m:S"},
        {"type": "acme.check"},
    ],
    ids=lambda fields: fields["type"],
)
def test_a_gate_that_cannot_run_fails_or_is_visibly_skipped(fields: Any) -> None:
    refused = DponeError("DPONE_ENGINE_REFUSED", "ClickHouse refused a statement with its error number 47.")
    answers = dict.fromkeys(
        ("row_count", "digest", "scalar", "rows_with_null", "surplus_rows", "newest", "rows_outside"), refused
    )
    sides = {"source": Scripted("source", **answers), "staged": Scripted(**answers)}
    for severity, status in (("error", "failed"), ("warning", "skipped")):
        result = one(gate(**fields, severity=severity), **sides)
        code = "DPONE_GATE_UNAVAILABLE" if fields["type"] in ("schema", "acme.check") else "DPONE_ENGINE_REFUSED"
        assert (result.status, result.metrics["error_code"]) == (status, code)
        assert result.message
    if fields["type"] not in ("row_count_reconciliation", "typed_hash_reconciliation", "schema"):
        assert one(gate(**fields, side="source"), source=None).status == "failed"


@pytest.mark.parametrize("code", gate_runner.NEVER_A_VERDICT)
def test_what_stops_the_load_is_no_verdict(code: str) -> None:
    for severity in ("error", "warning"):
        with pytest.raises(DponeError) as raised:
            run(gate(type="min_rows", threshold=0, severity=severity), staged=Scripted(row_count=DponeError(code, "x")))
        assert raised.value.code == code


def test_an_interrupt_is_never_swallowed() -> None:
    class Provider:
        def evaluate(self, *_: Any) -> GateOutcome:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(gate(type="acme.check", severity="warning"), providers={"acme.check": Provider()})
    with pytest.raises(KeyboardInterrupt):
        run(gate(type="min_rows", threshold=0), staged=Scripted(row_count=KeyboardInterrupt()))


def test_cancellation_is_looked_for_before_each_gate() -> None:
    staged = Scripted(row_count=1)
    seen: list[int] = []

    def check() -> None:
        seen.append(len(staged.asked))
        if len(seen) == 3:
            raise DponeError("DPONE_CANCELLED", "The run was interrupted.")

    with pytest.raises(DponeError, match="DPONE_CANCELLED"):
        run(*(gate(id=f"g{i}", type="min_rows", threshold=0) for i in range(4)), staged=staged, check=check)
    assert seen == [0, 1, 2]


def test_every_gate_is_judged_whatever_the_others_came_to() -> None:
    report = run(
        gate(id="a", type="min_rows", threshold=2),
        gate(id="b", type="not_null", columns=["nope"], severity="warning"),
        gate(id="c", type="unique", columns=["id"], severity="warning"),
        gate(id="d", type="min_rows", threshold=1),
        staged=Scripted(row_count=1, surplus_rows=3),
        skipped=[SkippedCheck(id="old", type="acme-freshness")],
    )
    assert [(r.gate_id, r.status) for r in report.results] == [
        ("a", "failed"), ("b", "skipped"), ("c", "warned"), ("d", "passed"), ("old", "skipped"),
    ]  # fmt: skip
    assert report.passed is False
    assert run(skipped=[SkippedCheck(id="old", type="x")]).passed is True


# -------------------------------------------------------------------------------------------------- providers


class Provided:
    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    def evaluate(self, gate: Any, source: Any, staged: Any) -> Any:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def provided(outcome: Any, severity: str = "error") -> LoadGateResult:
    return one(gate(type="acme.check", severity=severity), providers={"acme.check": Provided(outcome)})


def test_a_provider_judges_but_its_words_and_values_stay_inside() -> None:
    outcome = GateOutcome(
        passed=False,
        metrics={
            "rows": 3, "share": Decimal("0.25"), "ratio": 0.5, "none": None,
            "customer": "jane@example.com", "flag": True, "nested": {"a": 1}, "big": 10**400, "nan": float("nan"),
            "password": 4711, "api_token": 4711, "db_secret": 4711, "key": 4711, "private_key": 4711,
            "credentials": 4711, "dsn": 4711, "Authorization": 4711,
        },
        message="row of jane@example.com, password=hunter2",
    )  # fmt: skip
    result = provided(outcome)
    assert result.status == "failed"
    assert result.metrics == {
        "rows": 3, "share": "0.25", "ratio": "0.5", "none": None,
        **dict.fromkeys(("customer", "flag", "nested", "big", "nan", "password", "api_token", "db_secret", "key",
                         "private_key", "credentials", "dsn", "Authorization"), "[redacted]"),
    }  # fmt: skip
    for secret in ("jane", "hunter2", "4711"):
        assert secret not in json.dumps(result.as_json())
    assert provided(GateOutcome(passed=True)).status == "passed"
    assert provided(GateOutcome(passed=None)).status == "failed"
    assert provided(GateOutcome(passed=None), "warning").status == "skipped"
    assert provided(GateOutcome(passed=False), "warning").status == "warned"


@pytest.mark.parametrize(
    "garbage",
    [
        None, True, "passed", {"passed": True}, GateOutcome(passed=1), GateOutcome(passed="yes"),  # type: ignore[arg-type]
        GateOutcome(passed=True, metrics=[("rows", 1)]),  # type: ignore[arg-type]
        GateOutcome(passed=True, metrics={1: 1}),  # type: ignore[dict-item]
        GateOutcome(passed=True, metrics={"jane@example.com": 1}),
        GateOutcome(passed=True, metrics={f"m{i}": i for i in range(51)}),
        LoadGateReport(passed=True, results=()),
        ValueError("password=hunter2"),
        DponeError("DPONE_SOURCE_REFUSED", "password=hunter2"),
    ],
)  # fmt: skip
def test_what_is_no_outcome_proves_nothing(garbage: Any) -> None:
    for severity, status in (("error", "failed"), ("warning", "skipped")):
        result = provided(garbage, severity)
        assert result.status == status
        assert str(result.metrics["error_code"]).startswith("DPONE_")
        for secret in ("hunter2", "jane"):
            assert secret not in json.dumps(result.as_json())


class Loadable:
    def evaluate(self, gate: Any, source: Any, staged: Any) -> GateOutcome:
        return GateOutcome(passed=True)


def test_providers_are_found_by_their_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    here = f"{__name__}:Loadable"
    registered = EntryPoints(
        EntryPoint(name=name, value=value, group="dpone.gate_providers")
        for name, value in (
            ("acme.good", here), ("acme.gone", "no.such.module:X"), ("acme.twice", here), ("acme.twice", here),
            ("acme.other", here),
        )
    )  # fmt: skip
    monkeypatch.setattr(gate_runner, "entry_points", lambda **of: registered.select(**of))
    declared = [gate(id=f"g{i}", type=t) for i, t in enumerate(("acme.good", "acme.gone", "acme.twice", "acme.none"))]
    found = find_providers([*declared, gate(id="m", type="min_rows", threshold=0)])
    assert set(found) == {"acme.good"}
    report = run(*declared, providers=found)
    assert [r.status for r in report.results] == ["passed", "failed", "failed", "failed"]


# ------------------------------------------------------------------------------------------------ the report


def test_a_report_that_looks_passed_is_refused() -> None:
    failed = LoadGateResult(gate_id="g", type="min_rows", severity="error", status="failed", metrics={}, message="")
    for passed, results in ((True, [failed]), (True, [failed.model_copy(update={"status": "skipped"})]), (False, [])):
        with pytest.raises(DponeError):
            LoadGateReport.parse({"kind": "dpone.data_quality.gates.v1", "passed": passed, "results": results})


def test_secrets_are_redacted_by_name_and_by_look() -> None:
    assert rules.redacted(
        {"password": 1, "row_key": "x", "rows": 1, "text": "token=abc", "long": "x" * 101, "side": "target",
         "keys": 3, "turnkey_rows": 4, "digest": "sha256:" + "a" * 64}
    ) == {
        "password": "[redacted]", "row_key": "[redacted]", "rows": 1, "text": "[redacted]", "long": "[redacted]",
        "side": "target", "keys": 3, "turnkey_rows": 4, "digest": "sha256:" + "a" * 64,
    }  # fmt: skip
    assert rules.redacted({"wide": 2**63, "small": -(2**63)}) == {"wide": str(2**63), "small": -(2**63)}


def test_marts_gates_follow_the_same_rules() -> None:
    declared = (
        GateSpec(id="n", type="row_count_reconciliation", tolerance=Tolerance(mode="absolute", value=1)),
        GateSpec(id="m", type="min_rows", threshold=3, severity="warning"),
    )

    def report(source: int | None, staged: int | None) -> list[str]:
        sides = [gates.Side(rows=n, digest=None if n is None else SetDigest(n, (n, 0, 0, 0))) for n in (source, staged)]
        found = gates.evaluate(
            operation_id=sha256_of({"operation": 1}), gates=declared, source=sides[0], staged=sides[1]
        )
        assert found.passed is not any(r.blocks for r in found.results)
        return [r.status for r in found.results]

    assert report(3, 3) == ["passed", "passed", "passed"]
    assert report(3, 2) == ["passed", "warned", "failed"]
    assert report(0, 1) == ["failed", "warned", "failed"]
    assert report(0, 0) == ["passed", "warned", "passed"]
    assert report(3, None) == ["failed", "skipped", "failed"]


def test_the_documented_gates_are_accepted() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gates.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    declared = Quality.parse(yaml.safe_load(block)).gates
    table = page.split("## The types")[1].split("```yaml")[0]
    assert {g.type for g in declared} == set(re.findall(r"^\| `([a-z_]+)` \| ", table, re.M)) - {"type"}
    assert len(declared) == 9
