"""Partitions materialized in this process with the real engines; the outcome is read by plain SQL as well."""

from collections.abc import Callable
from typing import Any

import dagster as dg
import psycopg
import pytest

from assets.projection import project
from checks.dbt_tests import dbt_tests
from dpone_dagster.contracts.mart import Scope
from resources.dagster_runtime import DponeRuntime, declared_manifest
from resources.runtime import Runtime
from tests.dagster.support import give_back, withdraw
from tests.e2e.conftest import Truth, identity

Materialize = Callable[..., dg.ExecuteInProcessResult]

CHECKS = [
    "row_count",
    "min_rows",
    "typed_hash",
    "dpone_staging_equals_source",
    "cancelled_flights_have_no_delay",
    "not_null_flights_cancelled",
    "not_null_flights_flight",
    "relationships_flights_carrier_id__carrier_id__source_source_data_carriers_",
]


def metadata(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    ((event,)) = result.get_asset_materialization_events()
    return {
        name: value.records if isinstance(value, dg.TableMetadataValue) else value.value
        for name, value in event.materialization.metadata.items()
    }


def checks(result: dg.ExecuteInProcessResult) -> dict[str, dg.AssetCheckEvaluation]:
    found = {e.check_name: e for e in result.get_asset_check_evaluations()}
    assert list(found) == CHECKS
    return found


def failure_of(result: dg.ExecuteInProcessResult) -> Any:
    (event,) = (e for e in result.all_events if e.is_step_failure)
    return event.step_failure_data.user_failure_data


def edit(runtime: Runtime, statement: str, *parameters: Any) -> int:
    with psycopg.connect(runtime.engines.pg.conninfo) as connection:
        return connection.execute(statement, parameters).rowcount


def test_a_published_day_is_materialized_with_evidence_and_checks(
    truth: Truth, materialize: Materialize, instance: dg.DagsterInstance
) -> None:
    day = "2013-05-01"
    rows = len(truth.source_rows(day))
    assert rows > 500

    result = materialize(day)

    assert result.success
    truth.assert_published(day)
    ((operation, revision, artifact, digest),) = truth.sql(
        """select operation_id, revision, artifact_manifest_sha256, after_image_sha256
           from dpone_control.scope_head where mart = 'flights' and scope_start = %s::timestamp""",
        day,
    )
    ((live,),) = truth.clickhouse("select toString(uuid) from system.tables where database='marts' and name='flights'")
    ((total,),) = truth.clickhouse("select count() from marts.flights")
    found = metadata(result)
    assert found["dagster/partition_row_count"] == rows
    assert found["dagster/row_count"] == total
    assert (found["rows_inserted"], found["rows_updated"]) == (rows, 0)
    assert (found["operation_id"], found["revision"], found["mode"]) == (operation, revision, "normal")
    assert (found["artifact_digest"], found["day_digest"]) == (artifact, digest)
    assert found["generation_uuid"] == live
    assert found["summary"] == f"{rows:,} rows of {day} published in marts.flights as generation {found['generation']}."
    timeline = [record.data["phase"] for record in found["phases"]]
    assert timeline == [
        "mutate", "observe", "seal", "stage", "gate", "shadow", "prove", "exchange", "publish", "clean"
    ]  # fmt: skip
    assert sum(found[f"seconds_{phase}"] for phase in timeline) == pytest.approx(found["seconds_total"], abs=0.01)
    assert found["artifact_bytes"] > 1000
    assert found["explain"] == f"dpone explain flights {day}"

    ((event,)) = result.get_asset_materialization_events()
    assert event.materialization.tags is not None
    assert event.materialization.tags["dagster/data_version"] == artifact
    assert event.materialization.partition == day
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    assert run.tags["dpone/operation_id"] == operation

    evaluated = checks(result)
    assert all(e.passed and e.partition == day for e in evaluated.values())
    assert evaluated["row_count"].metadata["source_row_count"].value == rows
    assert evaluated["row_count"].metadata["target_row_count"].value == rows
    assert evaluated["typed_hash"].metadata["target_digest"].value == digest
    target = evaluated["min_rows"].target_materialization_data
    assert target is not None
    assert target.run_id == result.run_id

    again = materialize(day)

    assert again.success
    assert metadata(again)["revision"] == 2
    assert metadata(again)["mode"] == "complete_scope_replay"
    assert metadata(again)["summary"].startswith(f"{rows:,} rows of {day} published again (revision 2) in ")
    truth.assert_published(day)


def test_a_failing_gate_leaves_the_target_and_the_partition_alone(
    runtime: Runtime, truth: Truth, materialize: Materialize, instance: dg.DagsterInstance
) -> None:
    day = "2013-05-02"
    expected = truth.source_rows(day)
    withdraw(runtime.engines.pg.conninfo, day)
    before = (truth.generations(), truth.clickhouse("select count(), max(time_hour) from marts.flights"))

    result = materialize(day)

    assert not result.success
    assert result.get_asset_materialization_events() == []
    assert instance.get_materialized_partitions(dg.AssetKey("flights")) == set()
    evaluated = checks(result)
    assert [name for name, e in evaluated.items() if not e.passed] == ["min_rows"]
    assert evaluated["min_rows"].severity is dg.AssetCheckSeverity.ERROR
    assert (evaluated["min_rows"].metadata["row_count"].value, evaluated["min_rows"].partition) == (0, day)
    failure = failure_of(result)
    assert failure.description == (
        "DPONE_QUALITY_GATES_FAILED: Blocking gates failed: flights.min_rows.\n"
        "Gate flights.min_rows: 0 rows, at least 1 wanted.\n"
        "Target: marts.flights unchanged; readers see what they saw before.\n"
        "Retry: safe. A new run first settles what this one left, and never publishes twice.\n"
        "Next: Correct the source or the gate. Then run the day again: a committed SQL day is restored from its before "
        "image and rebuilt. ClickHouse is unchanged and staging is gone.\n"
        "More: dpone explain flights 2013-05-02"
    )
    assert failure.metadata["code"].value == "DPONE_QUALITY_GATES_FAILED"
    assert (truth.generations(), truth.clickhouse("select count(), max(time_hour) from marts.flights")) == before
    assert truth.scratch() == []
    assert truth.states(day) == ["FAILED_PRE_COMMIT"]

    give_back(runtime.engines.pg.conninfo, day)
    repaired = materialize(day)

    assert repaired.success
    assert metadata(repaired)["mode"] == "failed_precommit_replacement"
    assert metadata(repaired)["dagster/partition_row_count"] == len(expected)
    truth.assert_published(day)


def test_a_failing_dbt_test_skips_the_gates_and_the_next_run_restores_the_day(
    runtime: Runtime, truth: Truth, materialize: Materialize
) -> None:
    day = "2013-05-03"
    # A cancelled flight with a delay: the mart's own test refuses it, after the SQL day is committed.
    cancelled = "time_hour::date = %s and dep_time is null"
    wrong = edit(runtime, f"update source_data.flights set dep_delay = 5 where {cancelled}", day)
    assert wrong > 0

    result = materialize(day)

    assert not result.success
    assert result.get_asset_materialization_events() == []
    evaluated = checks(result)
    red = evaluated["cancelled_flights_have_no_delay"]
    assert (red.passed, red.severity, red.metadata["failing_rows"].value) == (False, dg.AssetCheckSeverity.ERROR, wrong)
    for gate in ("row_count", "min_rows", "typed_hash", "dpone_staging_equals_source"):
        assert (evaluated[gate].passed, evaluated[gate].severity) == (False, dg.AssetCheckSeverity.WARN)
        assert evaluated[gate].metadata["status"].value == "skipped"
    assert evaluated["not_null_flights_flight"].passed
    assert failure_of(result).description.startswith(
        "DPONE_DBT_TEST_FAILED: 1 dbt tests failed, the first is cancelled_flights_have_no_delay.\n"
        "Target: marts.flights unchanged; readers see what they saw before.\n"
    )
    assert truth.states(day) == ["FAILED_PRE_COMMIT"]
    assert truth.target_rows(day) == []
    assert len(truth.mart_rows(day)) == len(truth.source_rows(day))  # committed, and restored by the next run

    edit(runtime, f"update source_data.flights set dep_delay = null where {cancelled}", day)
    assert materialize(day).success
    truth.assert_published(day)
    assert truth.sql(
        "select count(*) from marts.flights where time_hour::date = %s and cancelled and dep_delay is not null", day
    ) == [(0,)]


def test_a_refusal_before_anything_happened_skips_every_check(
    runtime: Runtime, materialize: Materialize, truth: Truth
) -> None:
    day = "2013-05-04"
    with runtime.journal.hold(
        ["mart:flights"], identity=identity(), scope=Scope.day(day), deadline_seconds=5, on_wait=lambda _: None
    ):
        result = materialize(day)
    assert not result.success
    assert all(not e.passed and e.severity is dg.AssetCheckSeverity.WARN for e in checks(result).values())
    description = failure_of(result).description.splitlines()
    assert description[0].startswith("DPONE_OPERATION_HELD: ")
    assert description[1] == "Target: marts.flights unchanged by this run; readers see what they saw before."
    assert truth.states(day) == []


def test_a_fault_of_the_product_is_told_without_its_text(
    materialize: Materialize, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("secret row value")

    monkeypatch.setattr(Runtime, "publish", broken)
    result = materialize("2013-05-04")
    assert not result.success
    assert failure_of(result).description.startswith("DPONE_UNEXPECTED: ValueError at test_materialize.py:")
    assert all("secret" not in str(event) for event in result.all_events)


def test_days_published_without_dagster_are_told_from_the_journal(
    runtime: Runtime, instance: dg.DagsterInstance, truth: Truth
) -> None:
    day = "2013-05-05"
    runtime.publish("flights", Scope.day(day), identity=identity(), replay=False)
    mart = runtime.mart("flights")
    tests = dbt_tests(declared_manifest(runtime.home), runtime.workflow_of("flights"))["flights"]

    told = project(instance, runtime.journal, mart, tests, at_most=1000)

    assert day in told
    assert set(told) == instance.get_materialized_partitions(dg.AssetKey("flights"))
    assert project(instance, runtime.journal, mart, tests, at_most=1000) == []
    (record,) = instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=dg.AssetKey("flights"), asset_partitions=[day]), limit=5
    ).records
    materialization = record.asset_materialization
    assert materialization is not None
    assert materialization.metadata["dagster/partition_row_count"].value == len(truth.source_rows(day))
    assert materialization.metadata["projected"].value == "from the journal, without a run"
    (check,) = (
        e
        for e in instance.event_log_storage.get_asset_check_execution_history(
            dg.AssetCheckKey(dg.AssetKey("flights"), "min_rows"), limit=1000
        )
        if e.partition == day
    )
    assert str(check.status.value) == "SUCCEEDED"

    # The next revision is news again.
    runtime.publish("flights", Scope.day(day), identity=identity(), replay=True)
    assert project(instance, runtime.journal, mart, tests, at_most=1000) == [day]


def test_the_sensor_tells_what_is_lost_and_leaves_young_days_alone(
    defs: dg.Definitions, runtime: Runtime, instance: dg.DagsterInstance
) -> None:
    runtime.publish("flights", Scope.day("2013-05-13"), identity=identity(), replay=False)
    sensor = defs.resolve_sensor_def("project_evidence")
    assert sensor.default_status is dg.DefaultSensorStatus.STOPPED
    context = dg.build_sensor_context(instance=instance, resources={"dpone": DponeRuntime()})
    answer = sensor(context)
    assert isinstance(answer, dg.SkipReason)
    # A run that published a moment ago is about to report by itself.
    assert answer.skip_message == "flights: 0 days told from the journal"


def test_a_downstream_asset_receives_exactly_the_published_rows(
    runtime: Runtime, truth: Truth, materialize: Materialize
) -> None:
    week = [f"2013-05-{day:02d}" for day in range(6, 13)]
    for day in week:
        runtime.publish("flights", Scope.day(day), identity=identity(), replay=False)

    report = materialize(week[0], "daily_carrier_delays").output_for_node("daily_carrier_delays")

    expected = truth.sql(
        """select c.carrier_id::int, count(*)::int, count(*) filter (where f.dep_time is null)::int
           from source_data.flights f join source_data.carriers c using (carrier)
           where f.time_hour::date = %s group by 1 order by 1""",
        week[0],
    )
    assert [tuple(r[n] for n in ("carrier_id", "flights", "cancelled")) for r in report.to_pylist()] == expected

    departures = materialize(week[0], "weekly_departures").output_for_node("weekly_departures")

    assert departures == {
        day: truth.sql(
            "select count(*) from source_data.flights where time_hour::date = %s and dep_time is not null", day
        )[0][0]
        for day in week
    }


def test_a_downstream_asset_of_an_unpublished_day_refuses(materialize: Materialize) -> None:
    result = materialize("2013-12-24", "daily_carrier_delays")
    assert not result.success
    (event,) = (e for e in result.all_events if e.is_step_failure)
    assert "DPONE_PARTITION_NOT_PUBLISHED" in str(event.step_failure_data.error)
