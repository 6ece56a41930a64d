"""Governed loads as Dagster materializes them, with the real engines; the outcome is read by plain SQL as well."""

import json
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from assets.loads.flights import punctuality
from assets.loads.staged import StagedLoads, staged_assets
from assets.loads.step import open_loads
from dpone_dagster.errors import DponeError
from dpone_dagster.ports import FinalizeOutcome
from io_managers.clickhouse_staged import METADATA_KEY, ClickHouseStagedIOManager
from resources.clickhouse.client import connect
from resources.clickhouse.staged_sink import ClickHouseStagedSink
from resources.dagster_runtime import DponeRuntime
from resources.load_runtime import Loads
from resources.runtime import Runtime
from tests.dagster import load_job
from tests.dagster.load_job import definitions
from tests.dagster.support import tool
from tests.e2e.conftest import Truth, identity
from tests.e2e.load_case import ORDERS, Case, expected

WARN, ERROR = dg.AssetCheckSeverity.WARN, dg.AssetCheckSeverity.ERROR
ACCEPTANCE = {
    "enabled": True,
    "mode": "required",
    "checks": {"row_count": True, "null_counts": "all_columns", "distinct_counts": ["amount", "note"]},
}
FAILS = {"id": "many", "type": "min_rows", "threshold": 11}
WARNS = {**FAILS, "severity": "warning"}
PASSES = {"id": "same_rows", "type": "row_count_reconciliation"}


@pytest.fixture
def case(runtime: Runtime, tmp_path: Path) -> Iterator[Case]:
    schema = database = f"l_{uuid.uuid4().hex[:12]}"
    truth = Truth(runtime.engines)
    client = connect(runtime.engines.clickhouse)
    client.command(f"CREATE DATABASE {database} ENGINE = Atomic")
    empty = Case(runtime, truth, tmp_path, schema, database, "")
    empty.sql(f"create schema {schema}")
    yield Case.make(runtime, truth, tmp_path, schema, database)
    empty.sql(f"drop schema {schema} cascade")
    client.command(f"DROP DATABASE IF EXISTS {database} SYNC")
    client.close()


def materialize(
    case: Case, instance: dg.DagsterInstance, *, day: str | None = None, **changes: Any
) -> dg.ExecuteInProcessResult:
    """Write the manifest with its changes, load the definitions, and run the process's job."""
    case.plan(**changes)
    job = definitions(case.path.parent).resolve_job_def(f"load_{case.name}")
    return job.execute_in_process(instance=instance, partition_key=day, raise_on_error=False)


def metadata(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    ((event,)) = result.get_asset_materialization_events()
    return plain(event.materialization.metadata)


def plain(values: Any) -> dict[str, Any]:
    return {
        name: [dict(r.data) for r in value.records] if isinstance(value, dg.TableMetadataValue) else value.value
        for name, value in values.items()
    }


def checks(result: dg.ExecuteInProcessResult) -> dict[str, tuple[bool, Any, str]]:
    """Check -> whether it passed, its severity, and the status that its metadata has."""
    found = result.get_asset_check_evaluations()
    assert len({e.check_name for e in found}) == len(found)
    return {e.check_name: (e.passed, e.severity, str(e.metadata["status"].value)) for e in found}


def failures(result: Any) -> dict[str, Any]:
    """Step -> what it failed with."""
    return {
        e.step_key: e.step_failure_data.user_failure_data
        for e in getattr(result, "all_events", None) or result.all_node_events
        if e.is_step_failure
    }


def materialized(case: Case, instance: dg.DagsterInstance) -> bool:
    return instance.get_latest_materialization_event(dg.AssetKey(case.name)) is not None


def hooks(case: Case, **phases: list[dict[str, Any]]) -> None:
    case.manifest["source"]["options"] = {"hooks": phases}


def separate(case: Case, id_: str, sql: str, **more: Any) -> dict[str, Any]:
    return case.hook(id_, sql, execution={"orchestrator": "separate_task"}, **more)


# ------------------------------------------------------------------------------------------- one step


def test_a_load_is_materialized_with_checks_steps_and_numbers(case: Case, instance: dg.DagsterInstance) -> None:
    hooks(case, pre_hook=[case.hook("refresh", case.call("pre"))])
    case.manifest["quality"]["acceptance"] = ACCEPTANCE

    result = materialize(case, instance)

    assert result.success
    assert case.target() == expected()
    ((load_id, plan),) = case.sql(
        "select load_id, plan_sha256 from dpone_control.load where process = %s and state = 'COMPLETE'", case.name
    )
    found = metadata(result)
    assert found["summary"] == f"10 rows loaded in {case.database}.orders."
    assert (found["load_id"], found["plan_digest"]) == (load_id, plan)
    assert (found["rows_extracted"], found["rows_staged"], found["dagster/row_count"]) == (10, 10, 10)
    assert "dagster/partition_row_count" not in found
    assert found["readers_see_meanwhile"] == "the whole table as before or as after"
    # Ten rows; 7.00 occurs twice, the note e twice, and one note is NULL.
    for side in ("source", "staged", "target"):
        assert found[f"acceptance/{side}/row_count"] == 10
        assert [found[f"acceptance/{side}/null_count/{c}"] for c in ("id", "at", "amount", "note")] == [0, 0, 0, 1]
        assert [found[f"acceptance/{side}/distinct_count/{c}"] for c in ("amount", "note")] == [9, 8]
    steps = [step["step"] for step in found["steps"]]
    assert steps == [
        "pre_hook", "extract", "stage", "project", "gates", "acceptance_before_finalize", "prepare", "finalize",
        "finalized", "acceptance_after_finalize", "clean", "persist_state",
    ]  # fmt: skip
    (stage,) = [step for step in found["steps"] if step["step"] == "stage"]
    assert (stage["rows"], stage["status"]) == ("10", "completed")
    assert abs(int(stage["rows/s"].replace(",", "")) - 10 / float(stage["seconds"])) <= 10
    assert sum(found[f"seconds_{step}"] for step in steps) <= found["seconds_total"] + 0.01
    assert [(h["hook"], h["status"]) for h in found["hooks"]] == [("refresh", "succeeded")]

    ((event,)) = result.get_asset_materialization_events()
    assert event.materialization.tags is not None
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    assert run.tags["dpone/load_id"] == load_id
    ok = (True, ERROR, "passed")
    assert checks(result) == {"same_rows": ok, "same_values": ok, "dpone_acceptance": ok}
    (counted,) = (e for e in result.get_asset_check_evaluations() if e.check_name == "dpone_acceptance")
    shown = plain(counted.metadata)
    assert [shown[f"{side}_row_count"] for side in ("source", "staged", "target")] == [10, 10, 10]
    assert {"column": "note", "metric": "distinct", "source": "8", "staged": "8", "target": "8"} in shown["counts"]


def test_a_failing_gate_leaves_target_and_asset_as_they_were(case: Case, instance: dg.DagsterInstance) -> None:
    assert materialize(case, instance).success
    before = (case.target_uuid(), case.target())
    case.sql(f"delete from {case.schema}.orders where id > 3")

    result = materialize(case, instance, quality__gates=[PASSES, FAILS, {**WARNS, "id": "more"}])

    assert not result.success
    assert result.get_asset_materialization_events() == []
    assert (case.target_uuid(), case.target()) == before
    assert case.scratch() == []
    assert checks(result) == {
        "same_rows": (True, ERROR, "passed"),
        "many": (False, ERROR, "failed"),
        "more": (False, WARN, "warned"),
    }
    (failure,) = failures(result).values()
    assert failure.description.splitlines() == [
        "DPONE_QUALITY_GATES_FAILED: Blocking gates failed: many.",
        "Gate many: 3 rows, at least 11 wanted.",
        f"Target: {case.database}.orders unchanged; readers see what they saw before.",
        "Retry: safe. A new run first settles what this one left, and never loads twice.",
        failure.description.splitlines()[4],
        f"More: dpone plan manifests/orders.yaml --selector {case.name}",
    ]
    assert failure.description.splitlines()[4].startswith("Next: Correct the source or the gate.")
    assert failure.metadata["boundary"].value == "pre_finalize"
    assert [dict(r.data)["status"] for r in failure.metadata["steps"].value.records][-1] == "failed"
    assert case.journal() == ["COMPLETE", "FAILED_PRE_COMMIT"]


def test_a_failing_warning_only_warns(case: Case, instance: dg.DagsterInstance) -> None:
    result = materialize(case, instance, quality__gates=[WARNS])
    assert result.success
    assert checks(result) == {"many": (False, WARN, "warned")}
    assert case.target() == expected()
    assert materialized(case, instance)


def test_a_gate_behind_a_legacy_load_says_that_readers_see_the_rows(case: Case, instance: dg.DagsterInstance) -> None:
    lineage = {"lineage": {"enabled": True, "row_identity": {"mode": "off"}}}
    assert materialize(case, instance, sink__strategy="append", sink__options=lineage).success
    legacy: dict[str, Any] = {
        "sink__strategy": "append",
        "sink__options": {**lineage, "load_governance": {"finalization_phase": "legacy_post_finalize"}},
        "quality__gates": [PASSES, FAILS],
    }

    result = materialize(case, instance, **legacy)

    assert not result.success
    assert result.get_asset_materialization_events() == []
    assert len(case.target()) == 20
    assert checks(result) == {"same_rows": (True, ERROR, "passed"), "many": (False, ERROR, "failed")}
    lines = failures(result)[f"{case.name}_load"].description.splitlines()
    assert lines[2] == (
        f"Target: {case.database}.orders has changed, and readers see the rows: this load writes straight into it "
        "(legacy_post_finalize), so its gates only judge what is there already."
    )
    assert lines[3] == "Retry: refused until an operator has looked: the route is guarded (checkpoint_incomplete)."
    assert f"dpone guard show manifests/orders.yaml --selector {case.name}" in lines[4]

    again = materialize(case, instance, **legacy)

    assert checks(again) == {"same_rows": (False, WARN, "skipped"), "many": (False, WARN, "skipped")}
    assert failures(again)[f"{case.name}_load"].metadata["code"].value == "DPONE_LOAD_GUARDED"
    assert len(case.target()) == 20


def test_a_failed_inline_post_hook_is_finished_by_the_next_run(case: Case, instance: dg.DagsterInstance) -> None:
    hooks(case, post_hook=[case.hook("notify", f"INSERT INTO {case.schema}.later VALUES ('post')")])
    result = materialize(case, instance)
    assert not result.success
    assert checks(result) == {"same_rows": (True, ERROR, "passed"), "same_values": (True, ERROR, "passed")}
    lines = failures(result)[f"{case.name}_load"].description.splitlines()
    assert lines[0].startswith("DPONE_POST_HOOK_FAILED: The post-hook notify failed (DPONE_HOOK_FAILED, SQLSTATE 42P01")
    assert (
        lines[1]
        == f"Target: {case.database}.orders has changed and is not rolled back; readers see the rows of this load."
    )
    assert lines[2] == "Retry: safe. A new run finishes this load and loads nothing twice."
    uuid_ = case.target_uuid()

    case.sql(f"create table {case.schema}.later (what text)")
    again = materialize(case, instance)

    assert again.success
    assert metadata(again)["summary"] == (
        f"10 rows loaded by an earlier run, whose hooks were finished now, in {case.database}.orders."
    )
    assert checks(again) == {"same_rows": (True, ERROR, "passed"), "same_values": (True, ERROR, "passed")}
    assert case.target_uuid() == uuid_
    assert case.sql(f"select what from {case.schema}.later") == [("post",)]


def test_a_fault_of_the_product_is_told_without_its_text(
    case: Case, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("secret row value")

    monkeypatch.setattr(Loads, "run", broken)
    result = materialize(case, instance)
    assert failures(result)[f"{case.name}_load"].description.startswith(
        "DPONE_UNEXPECTED: ValueError at test_loads.py:"
    )
    assert all("secret" not in str(event) for event in result.all_events)
    assert {status for _, _, status in checks(result).values()} == {"skipped"}


# ------------------------------------------------------------------------------------------------ days


def test_days_are_partitions_that_fail_and_succeed_by_themselves(case: Case, instance: dg.DagsterInstance) -> None:
    daily: dict[str, Any] = {
        "source__read": {"mode": "daily", "column": "at", "start_date": "2024-03-01"},
        "sink__strategy": "replace",
        # Three, four and three orders a day.
        "quality__gates": [PASSES, {"id": "few", "type": "custom_sql", "max": 3,
                                    "sql": "select count() from {{ relation }}"}],
    }  # fmt: skip
    days = ["2024-03-01", "2024-03-02", "2024-03-03"]

    results = [materialize(case, instance, day=day, **daily) for day in days]

    assert [result.success for result in results] == [True, False, True]
    assert instance.get_materialized_partitions(dg.AssetKey(case.name)) == {days[0], days[2]}
    assert case.target() == expected([order for order in ORDERS if order[0] not in (4, 5, 6, 7)])
    assert [e.partition for result in results for e in result.get_asset_check_evaluations()] == [
        days[0], days[0], days[1], days[1], days[2], days[2]
    ]  # fmt: skip
    assert [checks(result)["few"][0] for result in results] == [True, False, True]
    found = metadata(results[2])
    assert (found["dagster/partition_row_count"], found["dagster/row_count"]) == (3, 6)
    assert found["summary"] == f"3 rows of 2024-03-03 loaded in {case.database}.orders."

    case.sql(f"delete from {case.schema}.orders where id = 7")
    repaired = materialize(case, instance, day=days[1], **daily)
    assert repaired.success
    assert case.target() == expected([order for order in ORDERS if order[0] != 7])
    assert instance.get_materialized_partitions(dg.AssetKey(case.name)) == set(days)


# ------------------------------------------------------------------------------- hooks as steps of their own


def test_hooks_are_steps_in_the_order_of_their_dependencies(case: Case, instance: dg.DagsterInstance) -> None:
    hooks(
        case,
        pre_hook=[
            separate(case, "second", case.call("pre 2"), depends_on=["first"]),
            # Inline, and yet a step: the load's step would come too late for the one that depends on it.
            case.hook("first", case.call("pre 1")),
            case.hook("third", case.call("pre 3")),
        ],
        post_hook=[separate(case, "notify", case.call("post 2")), case.hook("inline", case.call("post 1"))],
    )

    result = materialize(case, instance)

    assert result.success
    assert case.calls() == ["pre 1", "pre 2", "pre 3", "post 1", "post 2"]
    steps = [f"{case.name}_load.{step}" for step in ("pre_hook_first", "pre_hook_second", "load", "post_hook_notify")]
    assert [e.step_key for e in result.all_events if e.is_step_success] == steps
    assert case.target() == expected()
    ok = (True, ERROR, "passed")
    assert checks(result) == {"same_rows": ok, "same_values": ok, "dpone_post_hooks": ok}
    assert [h["hook"] for h in metadata(result)["hooks"]] == ["third", "inline"]
    assert case.journal() == ["COMPLETE"]
    # The audit tables know all of them, whichever step ran them.
    rows = case.truth.clickhouse(
        f"select phase, step_id, JSONExtractRaw(details_json, 'hooks'), JSONExtractRaw(details_json, 'separate_tasks')"
        f" from {case.database}.__dpone__load_steps final where endsWith(phase, '_hook') order by started_at"
    )
    told = [
        (phase, [h["id"] for h in json.loads(ran or "[]")], [h["id"] for h in json.loads(separate_ or "[]")])
        for phase, _, ran, separate_ in rows
    ]
    assert told == [
        ("pre_hook", ["third"], ["first", "second"]),
        ("post_hook", ["inline"], ["notify"]),
        ("post_hook", ["notify"], []),
    ]


def test_a_failed_pre_hook_step_extracts_nothing_and_tells_the_checks(case: Case, instance: dg.DagsterInstance) -> None:
    hooks(
        case,
        pre_hook=[separate(case, "refresh", f"INSERT INTO {case.schema}.absent VALUES (1)")],
        post_hook=[separate(case, "notify", case.call("post"))],
    )

    result = materialize(case, instance)

    assert not result.success
    (failed,) = failures(result).items()
    assert failed[0] == f"{case.name}_load.pre_hook_refresh"
    assert failed[1].description.splitlines()[:2] == [
        "DPONE_PRE_HOOK_FAILED: The pre-hook refresh failed (DPONE_HOOK_FAILED). Nothing was extracted.",
        f"Target: {case.database}.orders unchanged by this run; readers see what they saw before.",
    ]
    skipped = (False, WARN, "skipped")
    assert checks(result) == {"same_rows": skipped, "same_values": skipped, "dpone_post_hooks": skipped}
    assert (case.calls(), case.target(), case.journal()) == ([], [], [])
    assert not materialized(case, instance)


def test_a_failing_gate_skips_the_post_hook_steps(case: Case, instance: dg.DagsterInstance) -> None:
    hooks(case, post_hook=[separate(case, "notify", case.call("post"))])
    result = materialize(case, instance, quality__gates=[FAILS])
    assert checks(result) == {"many": (False, ERROR, "failed"), "dpone_post_hooks": (False, WARN, "skipped")}
    assert list(failures(result)) == [f"{case.name}_load.load"]
    assert (case.calls(), case.target()) == ([], [])


def test_only_the_failed_post_hook_step_is_run_again(
    case: Case, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks(
        case,
        pre_hook=[separate(case, "refresh", case.call("pre"))],
        post_hook=[
            separate(case, "first", case.call("post")),
            separate(case, "second", f"INSERT INTO {case.schema}.later VALUES ('post')", depends_on=["first"]),
        ],
    )
    case.plan()
    monkeypatch.setenv(load_job.FOLDER, str(case.path.parent))
    monkeypatch.setenv(load_job.JOB, f"load_{case.name}")
    job = dg.reconstructable(load_job.job)

    with tempfile.TemporaryDirectory() as storage, dg.DagsterInstance.local_temp(storage) as kept:
        result = dg.execute_job(job, instance=kept)
        assert not result.success
        assert materialized(case, kept)  # the rows are there, and so is the evidence
        assert case.target() == expected()
        (failed,) = failures(result).items()
        assert failed[0] == f"{case.name}_load.post_hook_second"
        assert (
            failed[1]
            .description.splitlines()[1]
            .startswith(f"Target: {case.database}.orders has the rows of this load; readers see them,")
        )
        evaluated = {e.check_name: e.passed for e in result.get_asset_check_evaluations()}
        assert evaluated == {"same_rows": True, "same_values": True, "dpone_post_hooks": False}
        uuid_ = case.target_uuid()

        case.sql(f"create table {case.schema}.later (what text)")
        again = dg.execute_job(
            job, instance=kept, reexecution_options=dg.ReexecutionOptions.from_failure(result.run_id, kept)
        )

        assert again.success
        assert {e.step_key for e in again.all_node_events if e.is_step_success} == {
            f"{case.name}_load.post_hook_second"
        }
        assert {e.check_name: e.passed for e in again.get_asset_check_evaluations()} == {"dpone_post_hooks": True}
    assert case.calls() == ["pre", "post"]
    assert case.sql(f"select what from {case.schema}.later") == [("post",)]
    assert case.target_uuid() == uuid_
    assert case.journal() == ["COMPLETE"]


def test_an_interrupt_is_taken_after_the_hook_that_runs(case: Case, instance: dg.DagsterInstance) -> None:
    hooks(case, pre_hook=[separate(case, "slow", f"SELECT pg_sleep(1.5); {case.call('pre')}")])
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    case.plan()
    job = definitions(case.path.parent).resolve_job_def(f"load_{case.name}")
    timer.start()
    result = job.execute_in_process(instance=instance, raise_on_error=False)
    (ended,) = (e.step_failure_data.error for e in result.all_events if e.is_step_failure)
    assert ended.cls_name == "DagsterExecutionInterruptedError"  # Dagster ends a terminated run as canceled by it
    assert (case.calls(), case.target(), case.journal()) == (["pre"], [], [])
    assert {status for _, _, status in checks(result).values()} == {"skipped"}


def test_acceptance_that_never_saw_the_target_did_not_pass(
    case: Case, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise DponeError("DPONE_TARGET_CHANGED", "Somebody else wrote.")

    monkeypatch.setattr(ClickHouseStagedSink, "recheck", refuse)
    result = materialize(case, instance, quality__acceptance=ACCEPTANCE)
    assert checks(result) == {
        "same_rows": (True, ERROR, "passed"),
        "same_values": (True, ERROR, "passed"),
        "dpone_acceptance": (False, WARN, "skipped"),
    }


def test_acceptance_that_fails_after_the_commit_says_that_readers_see_the_rows(
    case: Case, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    finalize = ClickHouseStagedSink.finalize

    def and_somebody_elses_row(sink: Any, process: Any, staged: Any) -> None:
        finalize(sink, process, staged)
        case.truth.clickhouse(f"INSERT INTO {case.database}.orders SELECT * FROM {case.database}.orders WHERE id = 7")

    monkeypatch.setattr(ClickHouseStagedSink, "finalize", and_somebody_elses_row)
    monkeypatch.setattr(ClickHouseStagedSink, "outcome", lambda *_: FinalizeOutcome.COMMITTED)
    result = materialize(case, instance, quality__acceptance=ACCEPTANCE)
    assert checks(result)["dpone_acceptance"] == (False, ERROR, "failed")
    assert result.get_asset_materialization_events() == []
    (failure,) = failures(result).values()
    lines = failure.description.splitlines()
    assert lines[0].startswith("DPONE_ACCEPTANCE_FAILED: ")
    assert lines[1] == (
        f"Target: {case.database}.orders has changed and is not rolled back; readers see the rows of this load."
    )
    assert lines[2] == "Retry: refused until an operator has looked: the route is guarded (checkpoint_incomplete)."
    assert failure.metadata["acceptance/target/row_count"].value == 11
    (check,) = (e for e in result.get_asset_check_evaluations() if e.check_name == "dpone_acceptance")
    differences = [d.data for d in check.metadata["differences"].value.records]
    assert {"metric": "row_count", "column": "", "side": "source", "count": "10", "other_side": "target",
            "other_count": "11"} in differences  # fmt: skip


def test_a_guarded_route_runs_no_hook_step(case: Case, instance: dg.DagsterInstance) -> None:
    hooks(case, pre_hook=[separate(case, "refresh", case.call("pre"))])
    case.manifest["quality"] = {"acceptance": ACCEPTANCE}
    case.plan()
    materialize(case, instance)
    case.sql("insert into dpone_control.load_guard select process, target, strategy, 'armed', load_id, now()"
             " from dpone_control.load where process = %s", case.name)  # fmt: skip
    result = materialize(case, instance)
    assert failures(result)[f"{case.name}_load.pre_hook_refresh"].metadata["code"].value == "DPONE_LOAD_GUARDED"
    assert case.calls() == ["pre"]
    case.sql("delete from dpone_control.load_guard where process = %s", case.name)


# ---------------------------------------------------------------------------------------- Python assets


@pytest.fixture
def staged(case: Case, instance: dg.DagsterInstance) -> Callable[..., dg.ExecuteInProcessResult]:
    """Return rows from an asset, through the case's manifest."""
    case.manifest["source"] = {"type": "asset"}

    def run(rows: pa.Table, **changes: Any) -> dg.ExecuteInProcessResult:
        case.plan(**changes)

        @dg.asset(
            name="people", io_manager_key="clickhouse_staged", metadata={METADATA_KEY: f"manifests/{case.path.name}"}
        )
        def people() -> pa.Table:
            return rows

        dpone = DponeRuntime()
        manager = ClickHouseStagedIOManager(lambda: StagedLoads(lambda: open_loads(dpone), root=case.folder))
        (found,) = staged_assets([people], root=case.folder)
        assert found.checks is not None
        defs = dg.Definitions(
            assets=[people],
            asset_checks=[found.checks],
            resources={"dpone": dpone, "clickhouse_staged": manager},
            executor=dg.in_process_executor,
        )
        return defs.resolve_implicit_global_asset_job_def().execute_in_process(instance=instance, raise_on_error=False)

    return run


PEOPLE = pa.table({"id": pa.array([1, 2], pa.int64()), "note": ["a", None]})


def test_a_python_assets_rows_are_loaded_and_judged(
    case: Case, staged: Callable[..., dg.ExecuteInProcessResult]
) -> None:
    result = staged(PEOPLE, quality__acceptance={"enabled": True, "mode": "required"})
    assert result.success
    assert case.truth.clickhouse(f"select id, note from {case.database}.orders order by id") == [(1, "a"), (2, None)]
    ok = (True, ERROR, "passed")
    assert checks(result) == {"same_rows": ok, "same_values": ok, "dpone_acceptance": ok}
    found = metadata(result)
    assert found["summary"] == f"2 rows loaded in {case.database}.orders."
    assert found["acceptance/target/row_count"] == 2


def test_a_gate_stops_a_python_assets_rows(
    case: Case, staged: Callable[..., dg.ExecuteInProcessResult], instance: dg.DagsterInstance
) -> None:
    assert staged(PEOPLE).success
    result = staged(PEOPLE.slice(0, 1), quality__gates=[FAILS])
    assert not result.success
    assert result.get_asset_materialization_events() == []
    assert case.truth.clickhouse(f"select id, note from {case.database}.orders order by id") == [(1, "a"), (2, None)]
    (failed,) = (e.step_failure_data for e in result.all_events if e.is_step_failure)
    assert failed.user_failure_data.description.splitlines()[1:3] == [
        "Gate many: 1 rows, at least 11 wanted.",
        f"Target: {case.database}.orders unchanged; readers see what they saw before.",
    ]
    # Dagster runs no check after a step that failed, so the IO manager tells what the gates came to.
    (record,) = instance.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(dg.AssetKey("people"), "many"), limit=1
    )
    assert record.event is not None
    assert record.event.dagster_event is not None
    told = record.event.dagster_event.asset_check_evaluation_data
    assert (told.passed, told.metadata["status"].value, told.metadata["row_count"].value) == (False, "failed", 1)


# ------------------------------------------------------------------------------------------ the project


def test_the_projects_own_marts_load(
    defs: dg.Definitions, runtime: Runtime, truth: Truth, environment: dict[str, str], instance: dg.DagsterInstance
) -> None:
    launched = tool(
        "dagster", "asset", "materialize", "--select", "airports", "-m", "dpone_dagster.definitions",
        environment=environment,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr
    assert truth.clickhouse(
        "select airport_id, airport, name from analytics.airports order by airport_id"
    ) == truth.sql("select airport_id, airport, name from source_data.airports order by airport_id")

    from dpone_dagster.contracts.mart import Scope

    day = "2013-08-01"
    runtime.publish("flights", Scope.day(day), identity=identity(), replay=False)
    for _ in range(2):  # the second time the day replaces itself
        result = defs.resolve_job_def("load_carrier_punctuality").execute_in_process(
            instance=instance, partition_key=day, raise_on_error=False
        )
        assert result.success
        assert {status for _, _, status in checks(result).values()} == {"passed"}
        assert all(e.partition == day for e in result.get_asset_check_evaluations())
    assert truth.clickhouse(
        "select toString(flight_day), carrier_id, flights, cancelled, minutes_late"
        " from analytics.carrier_punctuality order by carrier_id"
    ) == truth.sql(
        """select f.time_hour::date::text, c.carrier_id::int, count(*), count(*) filter (where f.dep_time is null),
                  sum(greatest(f.arr_delay, 0))
           from source_data.flights f join source_data.carriers c using (carrier)
           where f.time_hour::date = %s group by 1, 2 order by 2""",
        day,
    )


def test_minutes_late_count_no_early_arrival() -> None:
    import datetime

    hour = datetime.datetime(2013, 1, 1, 5, tzinfo=datetime.UTC)
    flights = pa.table(
        {
            "time_hour": pa.array([hour] * 4, pa.timestamp("us", "UTC")),
            "carrier_id": pa.array([1, 1, 1, 2], pa.int32()),
            "cancelled": [False, False, True, False],
            "arr_delay": pa.array([-5, 12, None, 3], pa.int32()),
        }
    )
    day = datetime.date(2013, 1, 1)
    assert punctuality(flights).sort_by("carrier_id").to_pylist() == [
        {"flight_day": day, "carrier_id": 1, "flights": 3, "cancelled": 1, "minutes_late": 12},
        {"flight_day": day, "carrier_id": 2, "flights": 1, "cancelled": 0, "minutes_late": 3},
    ]


def test_a_partitioned_assets_days_cannot_replace_each_other(case: Case) -> None:
    case.manifest["source"] = {"type": "asset"}
    days = dg.DailyPartitionsDefinition(start_date="2024-03-01", timezone="UTC")

    @dg.asset(partitions_def=days, metadata={METADATA_KEY: f"manifests/{case.path.name}"})
    def people() -> pa.Table:
        return PEOPLE

    for strategy, admitted in (("full_refresh", False), ("append", False), ("merge", True)):
        case.plan(sink__strategy=strategy)
        if admitted:
            assert len(staged_assets([people], root=case.folder)) == 1
            continue
        with pytest.raises(DponeError) as refused:
            staged_assets([people], root=case.folder)
        assert refused.value.code == "DPONE_IO_MANAGER_MANIFEST"
        assert strategy in refused.value.sentence
