"""Every rule between fields of the manifest's models: one document that breaks it, and its neighbour that does not."""

from decimal import Decimal
from typing import Any

import pytest
from declarations.manifests import refusals, whole

from dpone_dagster.declarations.loader import parse_manifest

DAILY = {"mode": "daily", "column": "at", "start_date": "2024-01-01"}
MARK = {"mode": "watermark", "column": "id"}
SQL = {"sql": "select 1"}


def hook(**fields: Any) -> dict[str, Any]:
    return whole(source__options__hooks__pre_hook=[{"id": "a", "kind": "custom", **fields}])


def gate(type_: str, **fields: Any) -> dict[str, Any]:
    return whole(quality__gates=[{"id": "g", "type": type_, **fields}])


def gates(*ids: str) -> dict[str, Any]:
    return whole(quality__gates=[{"id": id_, "type": "min_rows", "threshold": 1} for id_ in ids])


def acceptance(**fields: Any) -> dict[str, Any]:
    return whole(quality__acceptance={"enabled": True, **fields})


def flow(quality: dict[str, Any], **process: Any) -> dict[str, Any]:
    one = whole(kind=None, **process)
    return {"kind": "dpone.flow.v1", "name": "f", "quality": quality, "processes": [one]}


NO_SIDE = {"source": False, "staged": False, "target": False}
SCOPE_END = {
    "gates": [{"id": "g", "type": "freshness", "column": "at", "max_age_seconds": 1, "reference": "scope_end"}]
}
HOOK = "source.options.hooks.pre_hook.0"

# rule: (what breaks it, the field that is named, what does not break it)
RULES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "hook without SQL": (hook(), HOOK, hook(**SQL)),
    "hook with two bodies": (hook(**SQL, sql_file="a.sql"), HOOK + ".sql", hook(sql_file="a.sql")),
    "probe without expect": (
        hook(type="data_quality_probe", **SQL),
        HOOK,
        hook(type="data_quality_probe", expect=0, **SQL),
    ),
    "expect elsewhere": (hook(expect=1, **SQL), HOOK + ".expect", hook(**SQL)),
    "webhook without its variable": (
        hook(type="webhook", kind="notification"),
        HOOK,
        hook(type="webhook", kind="notification", webhook="HOOK_URL"),
    ),
    "webhook of another kind": (
        hook(type="webhook", webhook="HOOK_URL"),
        HOOK + ".kind",
        hook(type="webhook", kind="notification", webhook="HOOK_URL"),
    ),
    "webhook with SQL": (
        hook(type="webhook", kind="notification", webhook="HOOK_URL", **SQL),
        HOOK + ".webhook",
        hook(type="webhook", kind="notification", webhook="HOOK_URL"),
    ),
    "webhook elsewhere": (hook(webhook="HOOK_URL", **SQL), HOOK + ".webhook", hook(**SQL)),
    "options of a shipped provider": (hook(options={}, **SQL), HOOK + ".options", hook(type="other", options={})),
    "depends_on repeats": (hook(depends_on=["b", "b"], **SQL), HOOK + ".depends_on", hook(depends_on=["b"], **SQL)),
    "airflow and orchestrator": (
        hook(execution={"airflow": "inline", "orchestrator": "inline"}, **SQL),
        HOOK + ".execution.airflow",
        hook(execution={"airflow": "inline"}, **SQL),
    ),
    "whole with a column": (
        whole(source__read={"column": "at"}),
        "source.read.column",
        whole(source__read={"mode": "whole"}),
    ),
    "watermark without a column": (
        whole(source__read={"mode": "watermark"}, sink__strategy="append"),
        "source.read",
        whole(source__read=MARK, sink__strategy="append"),
    ),
    "daily without a start": (
        whole(source__read={"mode": "daily", "column": "at"}, sink__strategy="replace"),
        "source.read",
        whole(source__read=DAILY, sink__strategy="replace"),
    ),
    "watermark with a start": (
        whole(source__read={**MARK, "start_date": "2024-01-01"}, sink__strategy="append"),
        "source.read.start_date",
        whole(source__read=MARK, sink__strategy="append"),
    ),
    "no origin": (whole(source__table=None), "source", whole()),
    "two origins": (
        whole(source__options__query=SQL),
        "source.table",
        whole(source__table=None, source__options__query=SQL),
    ),
    "query with two bodies": (
        whole(source__table=None, source__options__query={**SQL, "sql_file": "a.sql"}),
        "source.options.query.sql",
        whole(source__table=None, source__options__query={"sql_file": "a.sql"}),
    ),
    "asset with a table": (
        whole(source__type="asset"),
        "source.table",
        whole(source__type="asset", source__table=None),
    ),
    "asset read by day": (
        whole(source={"type": "asset", "read": DAILY}, sink__strategy="replace"),
        "source.read",
        whole(source={"type": "asset"}, sink__strategy="replace"),
    ),
    "empty unique_key": (whole(sink__unique_key=[]), "sink.unique_key", whole(sink__unique_key=["a"])),
    "unique_key repeats": (whole(sink__unique_key=["a", "a"]), "sink.unique_key", whole(sink__unique_key=["a", "A"])),
    "merge without a key": (
        whole(sink__strategy="merge"),
        "sink.strategy",
        whole(sink__strategy="merge", sink__unique_key=["a"]),
    ),
    "row identity required without a key": (
        whole(sink__options__lineage={"enabled": True, "row_identity": {"mode": "required"}}),
        "sink.options.lineage.row_identity",
        whole(sink__options__lineage={"enabled": True, "row_identity": {"mode": "required"}}, sink__unique_key=["a"]),
    ),
    "row identity auto that may not warn": (
        whole(sink__options__lineage={"enabled": True, "row_identity": {"unsupported_policy": "error"}}),
        "sink.options.lineage.row_identity",
        whole(sink__options__lineage={"enabled": True, "row_identity": {"unsupported_policy": "skip"}}),
    ),
    "legacy that does not append": (
        whole(sink__options__load_governance={"finalization_phase": "legacy_post_finalize"}),
        "sink.options.load_governance.finalization_phase",
        whole(
            sink__options__load_governance={"finalization_phase": "legacy_post_finalize"},
            sink__strategy="append",
        ),
    ),
    "full_refresh of a part": (
        whole(source__read=DAILY),
        "sink.strategy",
        whole(source__read=DAILY, sink__strategy="partition_replace"),
    ),
    "replace above a watermark": (
        whole(source__read=MARK, sink__strategy="replace"),
        "sink.strategy",
        whole(sink__strategy="replace"),
    ),
    "partition_replace above a watermark": (
        whole(source__read=MARK, sink__strategy="partition_replace"),
        "sink.strategy",
        whole(sink__strategy="partition_replace"),
    ),
    "append of a day": (
        whole(source__read=DAILY, sink__strategy="append"),
        "sink.strategy",
        whole(source__read=MARK, sink__strategy="append"),
    ),
    "gates without governance": (
        whole(sink__options__load_governance={"enabled": False}, quality__gates=gates("a")["quality"]["gates"]),
        "quality.gates",
        whole(sink__options__load_governance={"enabled": False}),
    ),
    "acceptance without governance": (
        whole(sink__options__load_governance={"enabled": False}, quality__acceptance={"enabled": True}),
        "sink.options.load_governance.enabled",
        whole(sink__options__load_governance={"enabled": False}, quality__acceptance={"enabled": False}),
    ),
    "scope_end without a day": (
        whole(quality=SCOPE_END),
        "quality.gates.0.reference",
        whole(quality=SCOPE_END, source__read=DAILY, sink__strategy="replace"),
    ),
    "full hash with a modulus": (
        gate("typed_hash_reconciliation", modulus=10),
        "quality.gates.0.modulus",
        gate("typed_hash_reconciliation", modulus=10, mode="sample"),
    ),
    "full hash with a key": (
        gate("typed_hash_reconciliation", key=["a"]),
        "quality.gates.0.key",
        gate("typed_hash_reconciliation", key=["a"], mode="sample"),
    ),
    "hash of no columns": (
        gate("typed_hash_reconciliation", columns=[]),
        "quality.gates.0.columns",
        gate("typed_hash_reconciliation", columns=["a"]),
    ),
    "hash columns repeat": (
        gate("typed_hash_reconciliation", columns=["a", "a"]),
        "quality.gates.0.columns",
        gate("typed_hash_reconciliation", columns=["a", "b"]),
    ),
    "custom_sql without SQL": (gate("custom_sql", min=0), "quality.gates.0", gate("custom_sql", min=0, **SQL)),
    "custom_sql with two bodies": (
        gate("custom_sql", min=0, sql_file="a.sql", **SQL),
        "quality.gates.0.sql",
        gate("custom_sql", min=0, sql_file="a.sql"),
    ),
    "custom_sql without a bound": (gate("custom_sql", **SQL), "quality.gates.0", gate("custom_sql", max=1, **SQL)),
    "custom_sql that nothing passes": (
        gate("custom_sql", min="0.2", max="0.1", **SQL),
        "quality.gates.0.min",
        gate("custom_sql", min="0.1", max="0.1", **SQL),
    ),
    "not_null columns repeat": (
        gate("not_null", columns=["a", "a"]),
        "quality.gates.0.columns",
        gate("not_null", columns=["a"]),
    ),
    "unique columns repeat": (
        gate("unique", columns=["a", "a"]),
        "quality.gates.0.columns",
        gate("unique", columns=["a", "b"]),
    ),
    "gate ids repeat": (gates("a", "a"), "quality.gates", gates("a", "b")),
    "a gate id of the platform's": (gates("dpone_a"), "quality.gates", gates("dp_a")),
    "acceptance of no side": (
        acceptance(capture=NO_SIDE),
        "quality.acceptance.capture",
        acceptance(capture={**NO_SIDE, "target": True}),
    ),
    "acceptance of nothing": (
        acceptance(checks={"row_count": False, "null_counts": "none", "distinct_counts": False}),
        "quality.acceptance.checks",
        acceptance(checks={"row_count": False, "null_counts": True}),
    ),
    "acceptance columns repeat": (
        acceptance(checks={"null_counts": ["a", "a"]}),
        "quality.acceptance.checks.null_counts",
        acceptance(checks={"null_counts": ["a", "b"]}),
    ),
    "process names repeat": (
        {**flow({}), "processes": [whole(kind=None), whole(kind=None)]},
        "processes",
        {**flow({}), "processes": [whole(kind=None), whole(kind=None, name="other")]},
    ),
    "a target of two processes": (
        {**flow({}), "processes": [whole(kind=None), {**whole(kind=None), "name": "other"}]},
        "processes",
        {**flow({}), "processes": [whole(kind=None), whole(kind=None, name="other")]},
    ),
    "a probe that compares nothing": (
        hook(kind="data_quality_probe", **SQL),
        HOOK + ".kind",
        hook(kind="data_quality_probe", type="data_quality_probe", expect=0, **SQL),
    ),
    "gates that cannot tell a legacy load's rows": (
        whole(
            sink__strategy="append",
            sink__options={"load_governance": {"finalization_phase": "legacy_post_finalize"}},
            quality__gates=[{"id": "g", "type": "min_rows", "threshold": 1}],
        ),
        "quality.gates.0",
        whole(
            sink__strategy="append",
            sink__options={"load_governance": {"finalization_phase": "legacy_post_finalize"}},
            quality__gates=[{"id": "g", "type": "min_rows", "threshold": 1, "side": "source"}],
        ),
    ),
    "a flow's quality that does not fit a process": (
        flow(SCOPE_END),
        "quality",
        flow(SCOPE_END, source__read=DAILY, sink__strategy="replace"),
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    broken, field, kept = RULES[rule]
    assert list(refusals(broken)) == [field]
    assert refusals(kept) == {}


def test_a_process_has_the_flows_quality_unless_it_has_its_own() -> None:
    own = {"gates": [{"id": "own", "type": "min_rows", "threshold": 2}]}
    shared = {"gates": [{"id": "shared", "type": "min_rows", "threshold": 1}]}
    document = {
        "kind": "dpone.flow.v1",
        "name": "f",
        "quality": shared,
        "processes": [
            whole(kind=None),
            whole(kind=None, name="b", quality=own),
            whole(kind=None, name="c", quality={}),
            whole(kind=None, name="d", quality={"gates": []}),
        ],
    }
    loaded = parse_manifest(document).processes
    assert [[g.id for g in p.quality.gates] for p in loaded] == [["shared"], ["own"], ["shared"], []]
    # Field by field: gates of one's own do not make a required acceptance vanish.
    document["quality"] = {**shared, "acceptance": {"enabled": True, "mode": "required"}}
    loaded = parse_manifest(document).processes
    assert [p.quality.acceptance and p.quality.acceptance.mode for p in loaded] == ["required"] * 4
    assert [[g.id for g in p.quality.gates] for p in loaded] == [["shared"], ["own"], ["shared"], []]


@pytest.mark.parametrize(
    "value", [True, "1e2", ".5", "5.", "+1", "-1", -1, " 1", "1_0", "١", "Infinity", "NaN", "", [], 0.1, "9" * 21]
)
def test_a_tolerance_is_a_plain_decimal(value: Any) -> None:
    document = gate("row_count_reconciliation", tolerance={"mode": "pct", "value": value})
    assert list(refusals(document)) == ["quality.gates.0.tolerance.value"]


def test_a_tolerance_keeps_every_digit() -> None:
    text = "0.10000000000000000001"
    (process,) = parse_manifest(gate("row_count_reconciliation", tolerance={"mode": "pct", "value": text})).processes
    assert process.quality.gates[0].tolerance.value == Decimal(text)
    assert process.as_json()["quality"]["gates"][0]["tolerance"]["value"] == text


@pytest.mark.parametrize("value", ["1704067200", "2024-1-1", "20240101", "2024-02-30", "2024-01-01T00:00:00", 20240101])
def test_a_start_date_is_a_day(value: Any) -> None:
    document = whole(source__read={**DAILY, "start_date": value}, sink__strategy="replace")
    assert list(refusals(document)) == ["source.read.start_date"]
