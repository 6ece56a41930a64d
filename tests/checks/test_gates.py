from datetime import date

import dagster as dg
import pytest

from checks.dbt_tests import DbtTest
from checks.gates import check_results, check_specs, evaluation
from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.contracts.documents import GateReport
from dpone_dagster.contracts.mart import Column, GateSpec, MartSpec, Relation, Tolerance
from dpone_dagster.ports import TestResult

KEY = dg.AssetKey(["trips"])
DAYS = dg.DailyPartitionsDefinition(start_date="2024-01-01", timezone="UTC")
MART = MartSpec(
    name="trips",
    model_unique_id="model.p.trips",
    workflow="city",
    source=Relation(schema_name="marts", name="trips"),
    target=Relation(schema_name="marts", name="trips"),
    event_time="at",
    utc_assured=("at",),
    key=("at",),
    columns=(Column(name="at", type="datetime2(6)", nullable=False),),
    start_date=date(2024, 1, 1),
    gates=(
        GateSpec(
            id="counts",
            type="row_count_reconciliation",
            severity="warning",
            tolerance=Tolerance(mode="absolute", value=3),
        ),
        GateSpec(id="enough", type="min_rows", threshold=10),
    ),
)
TESTS = (
    DbtTest(unique_id="test.a", name="not_null_trips_at", description="not_null on at.", blocks=True),
    DbtTest(unique_id="test.b", name="few_late_trips", description="", blocks=False),
)


def report(*, passed: bool, enough: str) -> GateReport:
    def gate(
        gate_id: str, type_: str, severity: str, status: str, message: str, **metrics: int | str
    ) -> dict[str, object]:
        return {
            "gate_id": gate_id, "type": type_, "severity": severity, "status": status,
            "metrics": metrics, "message": message,
        }  # fmt: skip

    rows = 12 if enough == "passed" else 7
    return GateReport.seal(
        operation_id=sha256_of({"operation": 1}),
        passed=passed,
        results=[
            gate("counts", "row_count_reconciliation", "warning", "failed", "row counts differ by 5",
                 source_row_count=17, target_row_count=12, difference=5, allowed_difference=3),
            gate("enough", "min_rows", "error", enough, "" if passed else "7 rows, at least 10 wanted",
                 row_count=rows, threshold=10, side="target"),
            gate("dpone_staging_equals_source", "typed_hash_reconciliation", "error", "passed", "",
                 source_row_count=12, target_row_count=12, source_digest="sha256:aa", target_digest="sha256:aa"),
        ],
    )  # fmt: skip


def results(gates: GateReport | None, *ran: TestResult) -> dict[str, dg.AssetCheckResult]:
    found = list(check_results(MART, TESTS, asset_key=KEY, gates=gates, ran=ran, why_skipped="the run stopped before"))
    by_name = {r.check_name or "": r for r in found}
    assert len(by_name) == len(found)
    return by_name


def ran(unique_id: str, status: str, failures: int | None) -> TestResult:
    return TestResult(unique_id=unique_id, name=unique_id, status=status, failures=failures)


def test_a_spec_for_each_gate_the_staging_proof_and_each_test() -> None:
    specs = check_specs(MART, TESTS, asset_key=KEY, partitions_def=DAYS)
    assert [(s.name, s.blocking) for s in specs] == [
        ("counts", False),
        ("enough", True),
        ("dpone_staging_equals_source", True),
        ("not_null_trips_at", True),
        ("few_late_trips", False),
    ]
    assert all(s.partitions_def == DAYS and s.asset_key == KEY for s in specs)
    assert [s.description for s in specs] == [
        "ClickHouse staging holds as many rows of the day as the SQL mart. A difference of up to 3 rows is tolerated.",
        "Rows of the day in ClickHouse staging: 10 or more.",
        "ClickHouse staging holds the very rows of the SQL mart, value by value.",
        "dbt test, before ClickHouse changes. not_null on at.",
        "dbt test, before ClickHouse changes.",
    ]


def test_a_gates_numbers_are_metadata_and_its_severity_is_kept() -> None:
    found = results(report(passed=False, enough="failed"), ran("test.a", "pass", 0), ran("test.b", "warn", 4))
    enough = found["enough"]
    assert (enough.passed, enough.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert enough.description == "7 rows, at least 10 wanted"
    assert {k: v.value for k, v in enough.metadata.items()} == {
        "status": "failed",
        "row_count": 7,
        "threshold": 10,
        "side": "target",
    }
    assert isinstance(enough.metadata["row_count"], dg.IntMetadataValue)
    counts = found["counts"]
    assert (counts.passed, counts.severity, counts.metadata["difference"].value) == (
        False,
        dg.AssetCheckSeverity.WARN,
        5,
    )
    staged = found["dpone_staging_equals_source"]
    assert (staged.passed, staged.description) == (True, "12 rows on both sides, equal value by value")


def test_a_dbt_tests_status_becomes_a_check() -> None:
    found = results(None, ran("test.a", "fail", 2), ran("test.b", "warn", 4))
    failed, warned = found["not_null_trips_at"], found["few_late_trips"]
    assert (failed.passed, failed.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert failed.description == "2 failing rows (dbt status: fail)"
    assert (warned.passed, warned.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert {k: v.value for k, v in warned.metadata.items()} == {"status": "warn", "failing_rows": 4}
    assert results(None, ran("test.a", "pass", 0))["not_null_trips_at"].passed


@pytest.mark.parametrize("status", ["skipped", None])
def test_what_did_not_run_is_a_warning_that_says_why(status: str | None) -> None:
    found = results(None, *([ran("test.a", status, None)] if status else []))
    assert list(found) == ["counts", "enough", "dpone_staging_equals_source", "not_null_trips_at", "few_late_trips"]
    for result in found.values():
        assert (result.passed, result.severity) == (False, dg.AssetCheckSeverity.WARN)
        assert result.description == "Not evaluated: the run stopped before"
        assert {k: v.value for k, v in result.metadata.items()} == {"status": "skipped"}


def test_a_lost_result_becomes_a_runless_evaluation_of_its_day() -> None:
    event = evaluation(results(report(passed=True, enough="passed"))["enough"], partition="2024-01-05", blocking=True)
    assert (event.asset_key, event.check_name, event.partition) == (KEY, "enough", "2024-01-05")
    assert (event.passed, event.blocking, event.metadata["row_count"].value) == (True, True, 12)
