"""Governed loads from a manifest's file to both engines; outcomes are read by plain SQL and worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpone_dagster.declarations.manifest import Process
from dpone_dagster.diagnostics import envelope
from dpone_dagster.errors import DponeError
from dpone_dagster.ports import StagedLoad
from dpone_dagster.publication.load import LoadFailed
from resources.clickhouse.staged_sink import ClickHouseDirectSink, ClickHouseStagedSink
from resources.embedded.engines import Engines
from resources.embedded.home import Home
from resources.runtime import Runtime
from tests.e2e.conftest import Truth
from tests.e2e.load_case import ORDERS, Case, expected


@pytest.fixture
def case(home: Home, engines: Engines, tmp_path: Path, pg_schema: str, ch_database: str) -> Case:
    runtime = Runtime.open(home)
    return Case.make(runtime, Truth(engines), tmp_path, pg_schema, ch_database)


def hooks(case: Case, **phases: Any) -> None:
    case.manifest["source"]["options"] = {"hooks": phases}


def test_a_load_from_the_procedure_to_the_checkpoint(case: Case) -> None:
    hooks(
        case,
        pre_hook=[case.hook("refresh", case.call("pre"))],
        post_hook=[
            case.hook("notify", case.call("post")),
            {
                "id": "optimize",
                "kind": "target_maintenance",
                "connector": "sink",
                "sql": f"OPTIMIZE TABLE {case.database}.orders FINAL",
                "depends_on": ["notify"],
            },
        ],
    )
    case.manifest["quality"]["acceptance"] = {
        "enabled": True,
        "mode": "required",
        "checks": {"row_count": True, "null_counts": "all_columns", "distinct_counts": ["amount", "note"]},
    }
    report = case.run()
    assert case.target() == expected()
    assert case.calls() == ["pre", "post"]
    assert [(h.phase, h.id, h.status) for h in report.hooks] == [
        ("pre_hook", "refresh", "succeeded"),
        ("post_hook", "notify", "succeeded"),
        ("post_hook", "optimize", "succeeded"),
    ]
    assert report.gates is not None
    assert [(g.gate_id, g.status) for g in report.gates.results] == [("same_rows", "passed"), ("same_values", "passed")]
    # Nine different amounts (7.00 twice), eight different notes (e twice, one NULL).
    for snapshot in report.acceptance:
        assert (snapshot.row_count, snapshot.null_counts, snapshot.distinct_counts) == (
            10,
            {"id": 0, "at": 0, "amount": 0, "note": 1},
            {"amount": 9, "note": 8},
        )
    assert [s.side for s in report.acceptance] == ["source", "staged", "target"]
    assert (report.acceptance_status, report.target_state, report.boundary) == ("passed", "changed", None)
    assert case.journal() == ["COMPLETE"]
    assert case.guard() is None
    assert case.has_checkpoint()
    assert case.scratch() == []
    # The steps of spec G in its order.
    phases = [phase for phase, status in case.audit(report.load_id) if status == "completed"]
    order = "pre_hook extract stage project gates acceptance_before_finalize prepare finalize finalized"
    order += " acceptance_after_finalize clean persist_state post_hook"
    assert phases == order.split()
    assert case.truth.clickhouse(
        f"select process, status from {case.database}.__dpone__loads final where load_id = '{report.load_id}'"
    ) == [(case.name, "completed")]
    events = case.runtime.journal.loads.events(report.load_id or "")
    states: list[str] = []
    for event in events:
        if not states or states[-1] != event["to_state"]:
            states.append(event["to_state"])
    assert states == ["PREPARING", "PREPARED", "COMMITTING", "TARGET_COMMITTED", "COMPLETE"]
    # The checkpoint, and with it the guard, is the last thing before the post-hooks.
    guards = [(e["kind"], e["guard"]) for e in events if e["kind"] in ("transition", "persist_state")]
    assert guards == [
        ("transition", None),
        ("transition", "armed"),
        ("transition", "checkpoint_incomplete"),
        ("persist_state", None),
        ("transition", None),
    ]


def test_throughput_can_be_asked_for_as_the_spec_says(case: Case) -> None:
    report = case.run()
    rows = case.truth.clickhouse(
        f"""SELECT phase, status,
                JSONExtractFloat(JSONExtractRaw(details_json, 'throughput'), 'duration_seconds') AS seconds,
                JSONExtractFloat(JSONExtractRaw(details_json, 'throughput'), 'rows_per_second') AS rows_per_second
            FROM {case.database}.__dpone__load_steps FINAL
            WHERE load_id = '{report.load_id}' AND JSONHas(details_json, 'throughput') ORDER BY started_at"""
    )
    phases = [row[0] for row in rows]
    assert {"source_export", "stage", "project", "gates", "finalize", "clean"} <= set(phases)
    for _, status, seconds, rate in rows:
        assert status == "completed"
        assert seconds > 0
        assert rate == pytest.approx(10 / seconds, rel=0.01)


def test_the_second_load_replaces_the_first(case: Case) -> None:
    case.run()
    before = case.target_uuid()
    case.sql(f"delete from {case.schema}.orders where id > 3")
    case.sql(f"update {case.schema}.orders set note = 'new' where id = 1")
    case.run()
    assert case.target() == expected([(1, ORDERS[0][1], "10.50", "new"), *ORDERS[1:3]])
    assert case.target_uuid() != before
    assert case.scratch() == []


def test_no_rows_into_no_rows_passes(case: Case) -> None:
    case.sql(f"delete from {case.schema}.orders")
    report = case.run()
    assert report.gates is not None
    assert report.gates.passed
    assert case.target() == []
    assert case.journal() == ["COMPLETE"]


def test_a_blocking_gate_leaves_target_and_checkpoint_as_they_were(case: Case) -> None:
    case.run()
    before, uuid = case.target(), case.target_uuid()
    checkpoint = case.sql("select load_id from dpone_control.load_checkpoint where process = %s", case.name)
    case.sql(f"insert into {case.schema}.orders values (11, '2024-03-04', 1, 'x')")
    plan = case.plan(quality__gates=[{"id": "enough", "type": "min_rows", "threshold": 12},
                                     {"id": "rows", "type": "row_count_reconciliation"}])  # fmt: skip
    with pytest.raises(LoadFailed) as failed:
        case.run(plan)
    error, report = failed.value, failed.value.report
    assert (error.code, report.boundary, report.target_state) == (
        "DPONE_QUALITY_GATES_FAILED",
        "pre_finalize",
        "unchanged",
    )
    assert (case.target(), case.target_uuid()) == (before, uuid)
    assert case.sql("select load_id from dpone_control.load_checkpoint where process = %s", case.name) == checkpoint
    assert case.journal() == ["COMPLETE", "FAILED_PRE_COMMIT"]
    assert (case.guard(), case.scratch()) == (None, [])
    told = envelope(manifest="orders.yaml", selector=case.name, run_id="r", report=None, error=error)
    assert told["passed"] is False
    assert told["result"]["status"] == "error"
    assert told["result"]["errors"] == ["DPONE_QUALITY_GATES_FAILED: Blocking gates failed: enough."]
    assert (told["result"]["inserted_rows"], told["result"]["final_rows"]) == (0, 0)
    assert told["result"]["quality_gates"]["kind"] == "dpone.data_quality.gates.v1"
    first, second = told["result"]["quality_gates"]["results"]
    assert (first["gate_id"], first["status"], first["metrics"]["row_count"]) == ("enough", "failed", 11)
    assert (second["gate_id"], second["status"], second["metrics"]["difference"]) == ("rows", "passed", 0)
    # Corrected, the same interval loads.
    case.run()
    assert len(case.target()) == 11


def test_a_warning_gate_is_told_and_blocks_nothing(case: Case) -> None:
    report = case.run(
        case.plan(quality__gates=[{"id": "many", "type": "min_rows", "threshold": 11, "severity": "warning"}])
    )
    assert report.gates is not None
    assert [(g.gate_id, g.status) for g in report.gates.results] == [("many", "warned")]
    assert case.target() == expected()


def test_a_failing_pre_hook_starts_no_extraction(case: Case) -> None:
    hooks(
        case,
        pre_hook=[
            case.hook("first", case.call("first")),
            case.hook("second", "CALL no_such_procedure()"),
            case.hook("third", case.call("third")),
        ],
    )
    with pytest.raises(LoadFailed) as failed:
        case.run()
    report = failed.value.report
    assert (failed.value.code, report.boundary) == ("DPONE_PRE_HOOK_FAILED", "pre_hook")
    assert [(h.id, h.status) for h in report.hooks] == [
        ("first", "succeeded"),
        ("second", "failed"),
        ("third", "skipped"),
    ]
    assert [(s.phase, s.status) for s in report.steps] == [("pre_hook", "failed"), ("load_governance_failed", "failed")]
    assert "SQLSTATE 42883" in failed.value.sentence  # undefined function: the engine's code, never its text
    assert case.calls() == ["first"]
    assert case.target() == []
    assert case.journal() == ["FAILED_PRE_COMMIT"]
    assert not case.has_checkpoint()
    said = json.dumps(envelope(manifest="m", selector="s", run_id="r", report=None, error=failed.value))
    assert "no_such_procedure" not in said
    assert "INSERT" not in said


def test_a_failing_post_hook_is_post_commit_and_its_retry_runs_only_the_hook(case: Case) -> None:
    hooks(
        case,
        pre_hook=[case.hook("refresh", case.call("pre"))],
        post_hook=[
            case.hook("first", case.call("post 1")),
            case.hook("second", f"INSERT INTO {case.schema}.later VALUES (1)"),
        ],
    )
    with pytest.raises(LoadFailed) as failed:
        case.run()
    report = failed.value.report
    assert (failed.value.code, report.boundary, report.target_state) == (
        "DPONE_POST_HOOK_FAILED",
        "post_commit",
        "changed",
    )
    assert case.target() == expected()
    assert case.journal() == ["COMMITTED_INCOMPLETE"]
    assert case.guard() is None  # the checkpoint has moved
    assert case.has_checkpoint()
    assert case.calls() == ["pre", "post 1"]
    uuid = case.target_uuid()

    case.sql(f"create table {case.schema}.later (n integer)")
    case.sql(f"insert into {case.schema}.orders values (11, '2024-03-04', 1, 'x')")  # not loaded by a retry of a hook
    again = case.run()
    assert again.action == "hooks_finished"
    assert case.calls() == ["pre", "post 1"]
    assert case.sql(f"select n from {case.schema}.later") == [(1,)]
    assert case.target_uuid() == uuid
    assert case.target() == expected()
    assert case.journal() == ["COMPLETE"]
    assert case.run().action == "loaded"
    assert len(case.target()) == 11


def test_an_exception_during_finalize_is_an_unknown_outcome(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.run()
    before = case.target()
    case.sql(f"delete from {case.schema}.orders where id = 10")

    def lost(self: ClickHouseStagedSink, process: Process, staged: StagedLoad) -> None:
        raise DponeError("DPONE_ENGINE_UNAVAILABLE", "ClickHouse did not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(ClickHouseStagedSink, "finalize", lost)
        with pytest.raises(LoadFailed) as failed:
            case.run()
    report = failed.value.report
    assert (failed.value.code, report.boundary, report.target_state) == (
        "DPONE_TARGET_OUTCOME_UNKNOWN",
        "finalize",
        "unknown",
    )
    assert case.journal() == ["COMPLETE", "COMMIT_UNKNOWN"]
    assert case.guard() == "target_outcome_unknown"
    assert case.scratch() != []  # staging stays
    # No automatic retry passes, and the refusal changes nothing.
    for _ in range(2):
        with pytest.raises(DponeError) as refused:
            case.run()
        assert refused.value.code == "DPONE_LOAD_GUARDED"
        assert refused.value.details["reason"] == "native_transfer_manual_reconciliation_required"
    assert case.target() == before

    view = case.loads.guard(case.plan())
    assert view is not None
    assert (view.status, view.proven) == ("target_outcome_unknown", "not-committed")
    from tests.e2e.conftest import identity

    with pytest.raises(DponeError) as contradicted:
        case.loads.clear_guard(case.plan(), identity=identity(), reason="test", word="committed")
    assert contradicted.value.code == "DPONE_GUARD_CONTRADICTED"
    case.loads.clear_guard(case.plan(), identity=identity(), reason="looked at it", word=None)
    assert case.journal() == ["COMPLETE", "FAILED_PRE_COMMIT"]
    assert (case.guard(), case.scratch(), case.target()) == (None, [], before)
    case.run()
    assert case.target() == expected(ORDERS[:9])


def test_a_lost_acknowledgement_of_finalize_is_proven_committed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.e2e.conftest import identity

    case.run()
    case.sql(f"delete from {case.schema}.orders where id = 10")
    finalize = ClickHouseStagedSink.finalize

    def lost(self: ClickHouseStagedSink, process: Process, staged: StagedLoad) -> None:
        finalize(self, process, staged)
        raise DponeError("DPONE_ENGINE_UNAVAILABLE", "ClickHouse did not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(ClickHouseStagedSink, "finalize", lost)
        with pytest.raises(LoadFailed):
            case.run()
    assert case.guard() == "target_outcome_unknown"
    view = case.loads.clear_guard(case.plan(), identity=identity(), reason="looked at it", word=None)
    assert view.proven == "committed"
    assert case.journal() == ["COMPLETE", "TARGET_COMMITTED"]
    extracted = case.target_uuid()
    report = case.run()
    assert report.action == "finished"
    assert (case.target(), case.target_uuid()) == (expected(ORDERS[:9]), extracted)
    assert case.journal() == ["COMPLETE", "COMPLETE"]
    assert case.scratch() == []


def test_a_watermark_moves_last_and_only_new_rows_are_read(case: Case) -> None:
    case.manifest["source"]["read"] = {"mode": "watermark", "column": "id"}
    case.manifest["sink"]["strategy"] = "append"
    case.sql(f"delete from {case.schema}.orders where id > 6")
    assert case.run().staged_rows == 6
    assert case.checkpoint() == "6"
    for order in ORDERS[6:8]:
        case.sql(f"insert into {case.schema}.orders values (%s, %s, %s, %s)", *order)
    with pytest.raises(LoadFailed):
        case.run(case.plan(quality__gates=[{"id": "enough", "type": "min_rows", "threshold": 3}]))
    assert case.checkpoint() == "6"
    assert case.target() == expected(ORDERS[:6])
    assert case.run().staged_rows == 2
    assert case.checkpoint() == "8"
    assert case.target() == expected(ORDERS[:8])
    report = case.run()  # nothing new
    assert report.staged_rows == 0
    assert case.checkpoint() == "8"
    assert case.target() == expected(ORDERS[:8])


def test_a_day_is_replaced_alone_and_skipped_once_it_is_loaded(case: Case) -> None:
    case.manifest["source"]["read"] = {"mode": "daily", "column": "at", "start_date": "2024-03-01"}
    case.manifest["sink"]["strategy"] = "replace"
    case.manifest["sink"]["physical_design"] = {"storage": {"clickhouse": {"partition_by": "toYYYYMM(at)"}}}
    assert case.run(day="2024-03-02").staged_rows == 4
    assert case.run(day="2024-03-01").staged_rows == 3
    assert case.target() == expected(ORDERS[:7])
    case.sql(f"delete from {case.schema}.orders where id = 5")
    case.sql(f"update {case.schema}.orders set note = 'changed' where id in (1, 6)")
    assert case.run(day="2024-03-02", replay=False).action == "skipped"
    report = case.run(day="2024-03-02")
    assert (report.staged_rows, report.finalized and report.finalized.rows_replaced) == (3, 4)
    # Day 2 is as the source has it now; day 1 is untouched, the change of order 1 is not loaded.
    changed = (6, ORDERS[5][1], ORDERS[5][2], "changed")
    assert case.target() == expected([*ORDERS[:4], changed, ORDERS[6]])
    for day, code in (
        ("2024-02-29", "DPONE_SCOPE_BEFORE_START"),
        ("2999-01-01", "DPONE_SCOPE_IN_FUTURE"),
        (None, "DPONE_SCOPE_NOT_A_DAY"),
    ):
        with pytest.raises(DponeError) as refused:
            case.run(day=day)
        assert refused.value.code == code


def test_merge_replaces_rows_of_the_same_key(case: Case) -> None:
    case.run()
    case.sql(f"delete from {case.schema}.orders where id > 2")
    case.sql(f"update {case.schema}.orders set at = '2024-05-05', note = 'moved' where id = 2")
    report = case.run(case.plan(sink__strategy="merge"))
    assert case.target() == expected([ORDERS[0], (2, "2024-05-05 00:00:00", "20.00", "moved"), *ORDERS[2:]])
    assert report.finalized is not None
    assert (report.finalized.rows, report.finalized.rows_replaced, report.finalized.target_rows) == (2, 2, 10)


def test_required_acceptance_refuses_a_side_that_cannot_be_measured_before_anything_changes(case: Case) -> None:
    # Without lineage columns nothing tells the rows of one append from another's.
    plan = case.plan(
        sink__strategy="append",
        sink__options={},
        quality__acceptance={"enabled": True, "mode": "required"},
    )
    with pytest.raises(LoadFailed) as failed:
        case.run(plan)
    assert (failed.value.code, failed.value.report.boundary) == ("DPONE_ACCEPTANCE_UNAVAILABLE", "pre_finalize")
    assert case.target() == []
    warned = case.run(case.plan(sink__strategy="append", sink__options={}, quality__acceptance={"enabled": True}))
    assert warned.acceptance_status == "warned"
    assert [(s.side, s.status) for s in sorted(warned.acceptance, key=lambda s: s.side)] == [
        ("source", "succeeded"),
        ("staged", "succeeded"),
        ("target", "warning"),
    ]


# A row id needs staging.
LINEAGE = {"enabled": True, "row_identity": {"mode": "off"}}
LEGACY = {"load_governance": {"finalization_phase": "legacy_post_finalize"}, "lineage": LINEAGE}


def test_the_legacy_route_says_that_readers_see_the_rows(case: Case) -> None:
    from tests.e2e.conftest import identity

    case.run(case.plan(sink__options={"lineage": LINEAGE}))  # makes the target
    case.sql(f"delete from {case.schema}.orders where id < 9")
    case.manifest["sink"] |= {"strategy": "append", "options": LEGACY}
    case.manifest["quality"]["gates"] = [{"id": "enough", "type": "min_rows", "threshold": 3}]
    first = case.sql("select load_id from dpone_control.load_checkpoint where process = %s", case.name)
    with pytest.raises(LoadFailed) as failed:
        case.run()
    report = failed.value.report
    assert (failed.value.code, report.boundary, report.target_state) == (
        "DPONE_QUALITY_GATES_FAILED",
        "legacy_post_finalize",
        "changed",
    )
    assert report.finalization == "legacy_post_finalize"
    assert "not rolled back" in failed.value.next_step
    assert len(case.target()) == 12  # ten, and two more that nobody takes back
    assert case.sql("select load_id from dpone_control.load_checkpoint where process = %s", case.name) == first
    assert case.guard() == "checkpoint_incomplete"
    with pytest.raises(DponeError) as refused:
        case.run()
    assert refused.value.code == "DPONE_LOAD_GUARDED"
    case.loads.clear_guard(case.plan(), identity=identity(), reason="the two rows are right", word=None)
    assert case.run().action == "finished"
    assert len(case.target()) == 12
    assert case.journal() == ["COMPLETE", "COMPLETE"]


def test_a_legacy_load_that_is_lost_needs_the_operators_word(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.e2e.conftest import identity

    case.run(case.plan(sink__options={"lineage": LINEAGE}))
    case.manifest["sink"] |= {"strategy": "append", "options": LEGACY}

    def lost(self: ClickHouseDirectSink, *arguments: Any, **options: Any) -> None:
        raise DponeError("DPONE_ENGINE_UNAVAILABLE", "ClickHouse did not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(ClickHouseDirectSink, "load", lost)
        with pytest.raises(LoadFailed) as failed:
            case.run()
    assert (failed.value.report.boundary, case.guard()) == ("finalize", "target_outcome_unknown")
    with pytest.raises(DponeError) as needed:
        case.loads.clear_guard(case.plan(), identity=identity(), reason="test", word=None)
    assert needed.value.code == "DPONE_GUARD_WORD_NEEDED"
    case.loads.clear_guard(case.plan(), identity=identity(), reason="counted them", word="not-committed")
    assert case.journal() == ["COMPLETE", "FAILED_PRE_COMMIT"]
    assert case.run().staged_rows == 10
    assert len(case.target()) == 20


def test_acceptance_of_the_target_fails_after_the_commit_and_rolls_nothing_back(case: Case) -> None:
    # A Null table takes every row and keeps none: what a reader sees is not what was loaded.
    case.run(case.plan(sink__options={"lineage": LINEAGE}))
    client = case.runtime.clickhouse
    client.command(f"CREATE TABLE {case.database}.sieve AS {case.database}.orders ENGINE = Null")
    case.manifest["sink"] |= {
        "strategy": "append",
        "options": LEGACY,
        "table": {"schema": case.database, "name": "sieve"},
    }
    case.manifest["quality"] = {"acceptance": {"enabled": True, "mode": "required", "capture": {"staged": False}}}
    checkpoint = case.sql("select load_id from dpone_control.load_checkpoint where process = %s", case.name)
    with pytest.raises(LoadFailed) as failed:
        case.run()
    assert (failed.value.code, failed.value.report.boundary, failed.value.report.target_state) == (
        "DPONE_ACCEPTANCE_FAILED",
        "post_commit",
        "changed",
    )
    assert case.sql("select load_id from dpone_control.load_checkpoint where process = %s", case.name) == checkpoint
    assert case.guard() == "checkpoint_incomplete"


def test_audit_is_off_only_where_it_is_said(case: Case) -> None:
    case.manifest["sink"]["options"] = {}
    case.run(case.plan(sink__options={"load_governance": {"audit": {"mode": "off"}}}))
    tables = f"select count() from system.tables where database = '{case.database}' and name like '__dpone__load%'"
    assert case.truth.clickhouse(tables) == [(0,)]
    case.run()
    assert case.truth.clickhouse(tables) == [(2,)]


def test_lineage_columns_are_projected_in_the_engine(case: Case) -> None:
    report = case.run()
    rows = case.truth.clickhouse(
        f"select id, __dpone__load_id, __dpone__row_id from {case.database}.orders order by id limit 2"
    )
    import hashlib

    # dpone_row_v1 of the key alone: the length of its text, a colon, its text.
    assert rows == [
        (1, report.load_id, hashlib.sha256(b"1:1").hexdigest()),
        (2, report.load_id, hashlib.sha256(b"1:2").hexdigest()),
    ]


def test_a_load_may_not_take_the_table_of_a_mart(case: Case) -> None:
    case.sql(
        "insert into dpone_control.baseline values (%s, %s, %s, %s, 'w', now() at time zone 'utc')",
        f"mart_{case.name}",
        f"{case.database}.orders",
        "00000000-0000-0000-0000-000000000000",
        "sha256:" + "0" * 64,
    )
    with pytest.raises(DponeError) as refused:
        case.run()
    assert refused.value.code == "DPONE_TARGET_OF_A_MART"
    case.sql("delete from dpone_control.baseline where mart = %s", f"mart_{case.name}")


def test_the_python_example_of_the_docs_runs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    from tests.e2e.conftest import ROOT

    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "loads.md").read_text(), re.S)
    case.plan()
    names: dict[str, Any] = {"path": case.path}
    exec(example, names)
    assert names["report"].staged_rows == 10
    assert case.target() == expected()


def test_a_renamed_process_does_not_pass_the_guard_of_its_target(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.run()

    def lost(self: ClickHouseStagedSink, process: Process, staged: StagedLoad) -> None:
        raise DponeError("DPONE_ENGINE_UNAVAILABLE", "ClickHouse did not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(ClickHouseStagedSink, "finalize", lost)
        with pytest.raises(LoadFailed):
            case.run()
    with pytest.raises(DponeError) as refused:
        case.run(case.plan(name=f"{case.name}_renamed"))
    assert refused.value.code in ("DPONE_LOAD_OPEN", "DPONE_LOAD_GUARDED")
    # Nor does a mart take the table over before somebody has looked.
    from resources.journal.loads import open_load_of

    with case.runtime.journal._sessions._engine("test").connect() as connection:
        assert open_load_of(connection, f"{case.database}.orders") == case.name
    assert case.target() == expected()


def test_a_required_acceptance_is_asked_for_again_by_the_run_that_finishes(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.e2e.conftest import identity

    case.manifest["quality"]["acceptance"] = {"enabled": True, "mode": "required"}
    finalize = ClickHouseStagedSink.finalize

    def lost(self: ClickHouseStagedSink, process: Process, staged: StagedLoad) -> None:
        finalize(self, process, staged)
        raise DponeError("DPONE_ENGINE_UNAVAILABLE", "ClickHouse did not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(ClickHouseStagedSink, "finalize", lost)
        with pytest.raises(LoadFailed):
            case.run()
    case.loads.clear_guard(case.plan(), identity=identity(), reason="proven", word=None)
    case.runtime.clickhouse.command(f"INSERT INTO {case.database}.orders SELECT * FROM {case.database}.orders LIMIT 1")
    # The target holds a row more than the source had: nobody has looked at that yet.
    with pytest.raises(LoadFailed) as failed:
        case.run()
    assert (failed.value.code, failed.value.report.boundary) == ("DPONE_ACCEPTANCE_FAILED", "resume_validation")
    assert (case.has_checkpoint(), case.guard()) == (False, "checkpoint_incomplete")
    steps = case.truth.clickhouse(
        f"select step_id, status from {case.database}.__dpone__load_steps final where phase = 'load_governance_failed'"
    )
    assert [status for _, status in steps] == ["failed"]
    case.loads.clear_guard(case.plan(), identity=identity(), reason="the row more is known", word=None)
    report = case.run()
    assert (report.action, report.acceptance_status) == ("finished", "warned")
    assert (case.has_checkpoint(), case.guard(), case.journal()) == (True, None, ["COMPLETE"])


def test_a_legacy_load_without_lineage_has_nothing_to_judge_in_the_target(case: Case) -> None:
    case.run(case.plan(sink__options={}))
    legacy = {"load_governance": {"finalization_phase": "legacy_post_finalize"}}
    gates = [{"id": "enough", "type": "min_rows", "threshold": 1, "side": "source"}]
    report = case.run(case.plan(sink__strategy="append", sink__options=legacy, quality={"gates": gates}))
    assert report.gates is not None
    assert [(g.gate_id, g.status) for g in report.gates.results] == [("enough", "passed")]
    assert len(case.target()) == 20
    assert case.run(case.plan(sink__strategy="append", sink__options=legacy, quality={})).gates is None


def test_decisions_and_tries_of_hooks_are_rows_of_their_own(case: Case) -> None:
    hooks(case, post_hook=[case.hook("later", f"INSERT INTO {case.schema}.later VALUES (1)")])
    case.manifest["source"]["read"] = {"mode": "watermark", "column": "id"}
    case.manifest["sink"]["strategy"] = "append"
    for _ in range(2):
        with pytest.raises(LoadFailed) as failed:
            case.run()
        assert failed.value.code == "DPONE_POST_HOOK_FAILED"
    load_id = failed.value.report.load_id
    rows = case.truth.clickhouse(
        "select kind, phase, status, JSONExtractString(details_json, 'chosen')"
        f" from {case.database}.__dpone__load_steps final where load_id = '{load_id}'"
        " and (kind = 'runtime_decision' or phase = 'post_hook') order by started_at"
    )
    assert rows == [
        ("runtime_decision", "source_scan", "completed", "first_read"),
        ("runtime_decision", "finalizer", "completed", "rename"),
        ("step", "post_hook", "failed", ""),
        ("step", "post_hook", "failed", ""),
    ]


def test_a_passed_looking_report_that_a_sink_hands_in_changes_nothing(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = ClickHouseStagedSink.stage
    forged = {
        "kind": "dpone.data_quality.gates.v1",
        "passed": True,
        "results": [
            {
                "gate_id": "enough",
                "type": "min_rows",
                "status": "passed",
                "severity": "error",
                "metrics": {},
                "message": "",
            }
        ],
    }

    def flattering(self: ClickHouseStagedSink, *arguments: Any, **options: Any) -> tuple[StagedLoad, int]:
        staged, rows = stage(self, *arguments, **options)
        facts = {**staged.facts, "gates": forged, "passed": True, "acceptance": [], "state_persisted": True}
        return replace(staged, facts=facts), rows

    monkeypatch.setattr(ClickHouseStagedSink, "stage", flattering)
    with pytest.raises(LoadFailed) as failed:
        case.run(case.plan(quality__gates=[{"id": "enough", "type": "min_rows", "threshold": 11}]))
    assert failed.value.code == "DPONE_QUALITY_GATES_FAILED"
    assert failed.value.report.gates is not None
    assert [(g.gate_id, g.status) for g in failed.value.report.gates.results] == [("enough", "failed")]
    assert (case.target(), case.has_checkpoint()) == ([], False)


def test_source_state_waits_for_the_cleanup(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.e2e.conftest import identity

    def stuck(self: ClickHouseStagedSink, process: Process, staged: StagedLoad) -> None:
        raise DponeError("DPONE_ENGINE_REFUSED", "ClickHouse refused a statement.")

    with monkeypatch.context() as patch:
        patch.setattr(ClickHouseStagedSink, "cleanup", stuck)
        with pytest.raises(LoadFailed) as failed:
            case.run()
    assert (failed.value.report.boundary, failed.value.report.target_state) == ("post_commit", "changed")
    assert case.target() == expected()  # finalized, and never aborted
    assert (case.has_checkpoint(), case.guard(), case.journal()) == (
        False,
        "checkpoint_incomplete",
        ["COMMITTED_INCOMPLETE"],
    )
    case.loads.clear_guard(case.plan(), identity=identity(), reason="the target is right", word=None)
    assert case.run().action == "finished"
    assert (case.has_checkpoint(), case.guard(), case.scratch()) == (True, None, [])
