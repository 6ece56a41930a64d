"""Manifest files: what YAML may say, where refusals point, and that no bytes lead to anything but a refusal."""

import json
import random
import time
from copy import deepcopy
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from declarations.manifests import as_yaml, attempt, load_text, refusal, refusals, whole
from governance.scripted import Scripted
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dpone_dagster.declarations.loader import LoadedManifest, load_manifest, parse_manifest
from dpone_dagster.declarations.schema import json_schema
from dpone_dagster.errors import CODES, DponeError
from dpone_dagster.governance.gate_runner import run_gates
from resources.load_runtime import plan

ROOT = Path(__file__).parents[2]
TYPICAL = (Path(__file__).parent / "typical.yaml").read_text()


def changed(old: str, new: str) -> str:
    assert TYPICAL.count(old) == 1, old
    return TYPICAL.replace(old, new)


def faults(error: DponeError) -> list[tuple[int, str]]:
    return [(entry["line"], entry["field"]) for entry in error.details["errors"]]


def line_of(text: str, needle: str) -> int:
    (found,) = [number for number, line in enumerate(text.splitlines(), 1) if needle in line]
    return found


# ------------------------------------------------------------------------------------------------ what is read


def test_a_typical_manifest(tmp_path: Path) -> None:
    loaded = load_text(TYPICAL, tmp_path)
    (process,) = loaded.processes
    assert (loaded.kind, loaded.name, process.name) == ("dpone.batch.v1", "flights_daily", "flights_daily")
    assert process.source.read.start_date == date(2024, 1, 1)
    assert process.sink.table.dotted == "analytics.flights"
    assert process.quality.gates[0].tolerance.value == Decimal("0.1")
    assert process.source.options.hooks.pre_hook[0].execution.orchestrator == "separate_task"
    assert loaded.line("quality.gates.1.threshold") == line_of(TYPICAL, "threshold: 1")
    assert loaded.line("sink.table.name") == line_of(TYPICAL, "name: flights}")
    assert loaded.line("quality.gates.1.severity") == line_of(TYPICAL, "id: target_min_rows"), "the gate, then"


def test_python_data_means_the_same_without_lines(tmp_path: Path) -> None:
    loaded = load_text(TYPICAL, tmp_path)
    again = parse_manifest(loaded.document.as_json())
    assert again.processes == loaded.processes
    assert again.path is None
    assert again.line("name") is None
    with pytest.raises(DponeError) as caught:
        parse_manifest({**loaded.document.as_json(), "nmae": 1})
    assert caught.value.sentence.startswith("manifest nmae: is no field here")
    assert "line" not in caught.value.details


def test_off_is_a_selector_and_yes_is_no_boolean(tmp_path: Path) -> None:
    (process,) = load_text(changed("null_counts: all_columns", "null_counts: off"), tmp_path).processes
    assert process.quality.acceptance is not None
    assert process.quality.acceptance.checks.null_counts == "off"
    old, line = "enabled: true\n      row_identity", line_of(TYPICAL, "      row_identity:") - 1
    for word in ("yes", "on", "y", "True", "TRUE", '"true"', "1"):
        error = refusal(changed(old, f"enabled: {word}\n      row_identity"), tmp_path)
        assert faults(error) == [(line, "sink.options.lineage.enabled")]
        assert error.sentence.endswith("Did you mean true?"), word


def plain(text: str, folder: Path) -> Any:
    """Read one plain scalar where anything goes: the options of a provider's gate."""
    block = "{gates: [{id: g, type: acme.x, options: {v: " + text + "}}]}"
    (process,) = load_text(as_yaml(whole())[:-2] + f',\n"quality": {block}}}', folder).processes
    return process.quality.gates[0].options["v"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-12", -12),
        ("+7", 7),
        ("010", "010"),
        ("0o17", "0o17"),
        ("0x1F", "0x1F"),
        ("0b11", "0b11"),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("0.10", "0.10"),
        ("1e3", "1e3"),
        ("2024-01-01", "2024-01-01"),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ('"true"', "true"),
        ("'1'", "1"),
        ("null", None),
        ("=", "="),
        ("<<", "<<"),
    ],
)
def test_plain_scalars(text: str, value: Any, tmp_path: Path) -> None:
    found = plain(text, tmp_path)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("text", [".inf", "-.Inf", ".NaN", "True", "FALSE", "!!str 1", "!x 1", "1" * 41])
def test_scalars_that_two_readers_understand_differently_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(DponeError) as caught:
        plain(text, tmp_path)
    assert [field for _, field in faults(caught.value)] == ["quality.gates.0.options.v"]


@pytest.mark.parametrize(("old", "field"), [("carrier, flight_number, departed_at", "sink.unique_key.0")])
def test_an_unquoted_decimal_never_becomes_text(old: str, field: str, tmp_path: Path) -> None:
    assert faults(refusal(changed(old, "1.50, b"), tmp_path)) == [(line_of(TYPICAL, "unique_key"), field)]
    (process,) = load_text(changed(old, '"1.50", b'), tmp_path).processes
    assert process.sink.unique_key == ("1.50", "b")


def test_accepted_values_keep_their_types(tmp_path: Path) -> None:
    gate = "{id: keys_present, type: accepted_values, column: c, values: %s}"
    old = TYPICAL[TYPICAL.index("- id: keys_present") : TYPICAL.index("    - id: hash_sample")]
    text = changed(old, "- " + gate % '[1, "1", true, yes, 007]' + "\n")
    (process,) = load_text(text, tmp_path).processes
    values = process.quality.gates[2].values
    assert [(type(v), v) for v in values] == [(int, 1), (str, "1"), (bool, True), (str, "yes"), (str, "007")]
    for bad in ("0.5", "null", "True", "[a]", ".nan"):
        error = refusal(changed(old, "- " + gate % f"[a, {bad}]" + "\n"), tmp_path)
        assert error.details["field"].startswith("quality.gates.2.values.1"), bad


def test_anchors_are_allowed(tmp_path: Path) -> None:
    text = changed("[carrier, flight_number, departed_at]", "&key [carrier, flight_number]")
    text = text.replace("columns: [carrier, flight_number]", "columns: *key")
    (process,) = load_text(text, tmp_path).processes
    assert process.quality.gates[2].columns == process.sink.unique_key == ("carrier", "flight_number")
    broken = text.replace("flight_number]", "1]")
    line = line_of(broken, "&key")  # the item stands there, whoever uses it
    assert faults(refusal(broken, tmp_path)) == [(line, "sink.unique_key.1"), (line, "quality.gates.2.columns.1")]


# ------------------------------------------------------------------------------------------------- refusals


def test_every_fault_is_told_at_its_line(tmp_path: Path) -> None:
    text = TYPICAL
    for old, new in [
        ("threshold: 1", "treshold: 1"),
        ("    schema: ops\n  physical", "    shema: ops\n  physical"),
        ("mode: warn_only", "mode: warnonly"),
        ("strategy: replace", "strategy: replac"),
        ("type: not_null", "type: not_nul"),
    ]:
        text = text.replace(old, new)
    error = refusal(text, tmp_path)
    told = {e["field"]: (e["line"], e.get("did_you_mean")) for e in error.details["errors"]}
    assert told == {
        "sink.strategy": (line_of(text, "replac"), "replace"),
        "sink.staging.shema": (line_of(text, "shema"), "schema"),
        "quality.gates.1.treshold": (line_of(text, "treshold"), "threshold"),
        "quality.gates.2.type": (line_of(text, "not_nul"), "not_null"),
        "quality.acceptance.mode": (line_of(text, "warnonly"), "warn_only"),
    }
    first = line_of(text, "replac")
    assert error.sentence.startswith(f"m.yaml:{first} sink.strategy: should be 'full_refresh', ")
    assert error.sentence.endswith("Did you mean replace? 4 more in this manifest.")
    assert (error.details["file"], error.details["line"], error.details["field"]) == ("m.yaml", first, "sink.strategy")


@pytest.mark.parametrize(
    ("old", "new", "field", "nearest"),
    [
        ("dpone.batch.v1", "dpone.batch.v2", "kind", "dpone.batch.v1"),
        ("kind: dpone.batch.v1\n", "", "kind", None),
        ("mutates_source: true\n          execution", "mutates: true\n          execution", None, "mutates_source"),
        ("airflow: separate_task", "airflow: seperate_task", None, "separate_task"),
        ("airflow: separate_task", "dagster: separate_task", None, None),
        ("  strategy: replace", "  strategy: replace\n  gates: []", "sink.gates", "quality.gates"),
        ("  read:\n", "  pre_hook: []\n  read:\n", "source.pre_hook", "source.options.hooks.pre_hook"),
        ("type: row_count_reconciliation", "type: source_target_count", None, "row_count_reconciliation"),
        ("null_counts: all_columns", "null_counts: all_column", None, "all_columns"),
        ("kind: source_refresh", "kind: source_refesh", None, "source_refresh"),
    ],
)
def test_what_was_meant(old: str, new: str, field: str | None, nearest: str | None, tmp_path: Path) -> None:
    error = refusal(changed(old, new), tmp_path)
    (entry,) = error.details["errors"]
    assert entry.get("did_you_mean") == nearest
    assert field is None or entry["field"] == field


def test_a_repeated_key_is_refused_at_its_second_line(tmp_path: Path) -> None:
    text = changed("  strategy: replace\n", "  strategy: replace\n  strategy: append\n")
    error = refusal(text, tmp_path)
    assert faults(error) == [(line_of(text, "strategy: append"), "sink.strategy")]
    assert f"line {line_of(text, 'strategy: replace')}" in error.sentence


@pytest.mark.parametrize("key", ["acceptance", "gates"])
def test_a_key_without_a_value_is_refused(key: str, tmp_path: Path) -> None:
    text = TYPICAL[: TYPICAL.index("quality:")] + f"quality:\n  {key}:\n"
    error = refusal(text, tmp_path)
    assert [field for _, field in faults(error)] == [f"quality.{key}"]


SECRETS = ["SELECT 'hunter2' FROM t", "https://user:hunter2@host/x"]


@pytest.mark.parametrize(
    "place", ["sql", "webhook", "sql_file", "kind", "type", "connector", "id", "execution", "retry_policy"]
)
@pytest.mark.parametrize("secret", SECRETS)
def test_no_authored_value_is_repeated(place: str, secret: str) -> None:
    hook = {"id": "a", "kind": "custom", "sql": "select 1", "options": {}, place: secret}
    with pytest.raises(DponeError) as caught:
        parse_manifest(whole(source__options__hooks__pre_hook=[hook]))
    assert "hunter2" not in str(caught.value) + json.dumps(caught.value.as_json())


BAD_BYTES = {
    "empty": b"",
    "blank": b"\n \n",
    "a comment": b"# nothing\n",
    "not UTF-8": b"kind: \xff\xfe\n",
    "UTF-16": "kind: dpone.batch.v1".encode("utf-16"),
    "NUL": b"kind: \0\n",
    "NUL by escape": b'kind: "\\0"\n',
    "binary": bytes(range(256)),
    "a tab": b"kind: x\n\tname: y\n",
    "a list": b"- kind: dpone.batch.v1\n",
    "a scalar": b"dpone.batch.v1\n",
    "two documents": b"kind: a\n---\nkind: b\n",
    "an open bracket": b"kind: [a\n",
    "deep flow": b"a: " + b"[" * 100_000,
    "deep mappings": b"{a: " * 50_000,
    "deep blocks": b"- " * 50_000,
    "too large": b"# " + b"x" * 1_048_576,
    "too many nodes": b"[" + b"1," * 60_000 + b"]",
    "laughs": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(ord("b"), ord("j"))),
    "an alias of itself": b"a: &a [*a]\n",
    "an unknown alias": b"a: *b\n",
    "an anchored key": b"&a kind: x\n",
    "a number for a key": b"1: x\n",
    "a boolean for a key": b"true: x\n",
    "a null for a key": b"~: x\n: y\n",
    "a list for a key": b"? [a]\n: b\n",
    "a python tag": b"!!python/object/apply:os.system ['true']\n",
    "a tag on a mapping": b"kind: !!map {}\n",
    "a huge number": b"kind: " + b"9" * 10_000 + b"\n",
    "a huge key": b"'" + b"k" * 5_000 + b"': 1\n",
    "a surrogate escape": b'kind: "\\ud800"\n',
    "a directive": b"%YAML 9.9\n---\nkind: x\n",
    "an unknown handle": b"kind: !e!x y\n",
}


@pytest.mark.parametrize("case", BAD_BYTES)
def test_any_bytes_are_refused_with_one_short_sentence(case: str, tmp_path: Path) -> None:
    started = time.perf_counter()
    error = refusal(BAD_BYTES[case], tmp_path)
    assert error.sentence.startswith("m.yaml")
    assert len(error.sentence) < 400
    assert time.perf_counter() - started < 5


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    assert load_text(b"\xef\xbb\xbf" + TYPICAL.encode(), tmp_path).name == "flights_daily"


def test_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path, tmp_path / "a\0b"):
        with pytest.raises(DponeError) as caught:
            load_manifest(path, root=tmp_path)
        assert caught.value.code == "DPONE_MANIFEST_ABSENT"


def test_messages_name_the_file_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    file = tmp_path / "assets" / "m.yaml"
    file.write_text("kind: x\n")
    for root, shown in [(tmp_path, "assets/m.yaml:1 "), (tmp_path / "other", "m.yaml:1 ")]:
        with pytest.raises(DponeError) as caught:
            load_manifest(file, root=root)
        assert caught.value.sentence.startswith(shown)
        assert str(tmp_path) not in str(caught.value)


class Odd:
    pass


def cyclic() -> dict[str, Any]:
    document = whole()
    document["source"]["options"] = document
    return document


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "kind",
        {},
        {1: 2},
        whole(description=Odd()),
        whole(description="\ud800"),
        whole(description="a\0"),
        whole(description=float("nan")),
        whole(name=10**5000),
        whole(**{"\ud800": 1}),
        cyclic(),
    ],
    ids=lambda d: type(d).__name__,
)
def test_any_python_data_is_refused(data: Any) -> None:
    assert refusals(data)


def test_python_data_may_hold_tuples_dates_and_decimals() -> None:
    gate = {"id": "g", "type": "row_count_reconciliation", "tolerance": {"mode": "pct", "value": Decimal("0.25")}}
    read = {"mode": "daily", "column": "at", "start_date": date(2024, 1, 1)}
    (process,) = parse_manifest(whole(source__read=read, sink__strategy="replace", quality__gates=(gate,))).processes
    assert process.quality.gates[0].tolerance.value == Decimal("0.25")
    assert list(refusals(whole(name=Decimal("0.25")))) == ["name"]


# ---------------------------------------------------------------------------------------------------- flows


def flow(**depends_on: list[str]) -> dict[str, Any]:
    processes = [whole(kind=None, name=name, depends_on=names) for name, names in depends_on.items()]
    return {"kind": "dpone.flow.v1", "name": "f", "processes": processes}


def test_processes_follow_those_they_depend_on() -> None:
    loaded = parse_manifest(flow(d=["b", "c"], c=["a"], b=["a", "mart/outside"], a=[], e=[]))
    assert [p.name for p in loaded.processes] == ["a", "c", "b", "d", "e"]
    assert loaded.process("b").name == "b"


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (flow(a=["a"]), "processes.0.depends_on"),
        (flow(x=["c"], a=[], b=["c", "a"], c=["b"]), "processes.2.depends_on"),
        (whole(depends_on=["orders"]), "depends_on"),
    ],
)
def test_a_circle_is_refused(document: dict[str, Any], field: str) -> None:
    assert list(refusals(document)) == [field]


@pytest.mark.parametrize("selector", [None, "nobody"])
def test_a_selector_names_one_process(selector: str | None) -> None:
    with pytest.raises(DponeError, match="it has a, b") as caught:
        parse_manifest(flow(a=[], b=[])).process(selector)
    assert caught.value.code == "DPONE_MANIFEST_INVALID"


def test_lines_of_a_process_in_a_flow(tmp_path: Path) -> None:
    text = as_yaml(flow(b=["a"], a=[]))
    loaded = load_text(text, tmp_path)
    lines = [number for number, line in enumerate(text.splitlines(), 1) if '"strategy"' in line]
    assert [loaded.line("sink.strategy", process=name) for name in ("b", "a")] == lines


# ------------------------------------------------------------------------------------------------------ fuzz

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn", "Co")), min_size=1, max_size=6)
SCHEMA = json_schema()
COMPATIBILITY = ("mode", "checks")


def from_schema(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Generate documents of the published schema; rules between fields are mended afterwards."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return st.deferred(lambda: definition(name))
    if branches := node.get("anyOf") or node.get("oneOf"):
        return st.one_of([from_schema(branch) for branch in branches])
    if "const" in node:
        return st.just(node["const"])
    if "enum" in node:
        return st.sampled_from(node["enum"])
    match node.get("type"):
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(node.get("minimum", -3), node.get("maximum", 10**6))
        case "number":
            return st.integers(0, 100)
        case "array":
            low, high = (1, 2) if "$ref" in json.dumps(node["items"]) else (node.get("minItems", 0), 2)
            unique_by = repr if node.get("uniqueItems") else None
            return st.lists(from_schema(node["items"]), min_size=low, max_size=high, unique_by=unique_by)
        case "string":
            if node.get("format") == "date":
                return st.dates(date(2000, 1, 1)).map(date.isoformat)
            return st.from_regex(node["pattern"], fullmatch=True) if "pattern" in node else TEXT
    assert node["type"] == "object", node
    if "properties" not in node:
        return st.dictionaries(TEXT, st.integers() | TEXT, max_size=2)
    fields = {name: from_schema(value) for name, value in node["properties"].items() if name not in COMPATIBILITY}
    if "acceptance" not in fields:  # mode and checks are fields of others, too
        fields |= {name: from_schema(v) for name, v in node["properties"].items() if name in COMPATIBILITY}
    fields.pop("airflow", None)
    # What has fields of its own is always there: the deep levels are what this is about.
    deep = [
        name for name in fields if name in node.get("required", ()) or "$ref" in json.dumps(node["properties"][name])
    ]
    required = {name: fields.pop(name) for name in deep}
    return st.fixed_dictionaries(required, optional=fields)


_definitions: dict[str, st.SearchStrategy[Any]] = {}


def definition(name: str) -> st.SearchStrategy[Any]:
    if name not in _definitions:
        _definitions[name] = from_schema(SCHEMA["$defs"][name])
    return _definitions[name]


def mend(document: dict[str, Any]) -> dict[str, Any]:
    """Make the rules between fields hold (those that the schema does not know)."""
    document = deepcopy(document)
    loads = document.get("processes", [document])
    for number, load in enumerate(loads):
        load["name"] = f"load_{number}"
        load["depends_on"] = []
        load["sink"]["table"]["name"] = f"table_{number}"
        mend_load(load)
    if "processes" in document:
        document.pop("quality", None)
    return document


def mend_load(load: dict[str, Any]) -> None:
    source, sink = load["source"], load["sink"]
    read = source.setdefault("read", {})
    mode = read.get("mode", "whole") if source["type"] != "asset" else "whole"
    source["read"] = {"mode": mode}
    if mode != "whole":
        source["read"]["column"] = read.get("column", "at")
    if mode == "daily":
        source["read"]["start_date"] = read.get("start_date", "2024-01-01")
    query = source.get("options", {}).pop("query", None)
    if source["type"] == "asset":
        source.pop("table", None)
    elif "table" not in source:
        source.setdefault("options", {})["query"] = one_body(query or {})
    sink["strategy"] = {"whole": "full_refresh", "daily": "replace", "watermark": "append"}[mode]
    sink.setdefault("unique_key", ["a"])
    governance = sink.setdefault("options", {}).setdefault("load_governance", {})
    governance["enabled"] = True
    governance.pop("finalization_phase", None)
    for phase in source.get("options", {}).get("hooks", {}).values():
        for number, hook in enumerate(phase):
            phase[number] = {
                **{k: v for k, v in hook.items() if k not in ("expect", "webhook", "options", "depends_on")},
                **one_body({k: hook.pop(k) for k in ("sql", "sql_file") if k in hook}),
                "type": "sql",
                "kind": "custom" if hook["kind"] == "data_quality_probe" else hook["kind"],
                "id": f"hook_{number}",
            }
            if len(one_body(hook)) == 1:
                phase[number].pop("sql_file" if "sql" in phase[number] else "sql", None)
    quality = load.get("quality", {})
    for number, gate in enumerate(quality.get("gates", [])):
        gate["id"] = f"gate_{number}"
        gate.pop("reference", None)
        if gate["type"] == "custom_sql":
            body = one_body(gate)
            for key in ("sql", "sql_file", "max"):
                gate.pop(key, None)
            gate |= body
            gate.setdefault("min", "0.5")
        if gate.get("mode") != "sample":
            gate.pop("modulus", None)
            gate.pop("key", None)
    if acceptance := quality.get("acceptance"):
        acceptance.setdefault("capture", {})["target"] = True
        acceptance.setdefault("checks", {})["row_count"] = True


def one_body(holder: dict[str, Any]) -> dict[str, Any]:
    for key in ("sql", "sql_file"):
        if key in holder:
            return {key: holder[key]}
    return {"sql": "select 1"}


VALID = st.one_of(definition("BatchManifest"), definition("FlowManifest")).map(mend)
FUZZ = settings(
    max_examples=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


def mappings(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all mappings whose fields dpone knows."""
    if isinstance(node, list):
        return [p for i, item in enumerate(node) for p in mappings(item, (*path, i))]
    if not isinstance(node, dict) or (path[-1:] == ("options",) and isinstance(path[-2], int)):
        return []
    return [path] + [p for key, item in node.items() for p in mappings(item, (*path, key))]


def at(node: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        node = node[part]
    return node


@FUZZ
@given(document=VALID)
def test_what_is_valid_is_accepted_and_written_back_the_same(document: dict[str, Any], tmp_path: Path) -> None:
    loaded = load_text(as_yaml(document), tmp_path)
    written = loaded.document.as_json()
    again = load_text(as_yaml(written), tmp_path)
    assert again.document == loaded.document
    assert again.document.as_json() == written
    assert again.processes == loaded.processes == parse_manifest(document).processes


EVERYTHING: dict[str, Any] = {
    "kind": "dpone.flow.v1",
    "name": "f",
    "quality": {"mode": "warn", "checks": [{"id": "a", "type": "min_rows", "value": 1}]},
    "processes": [
        {
            "name": "a",
            "source": {
                "type": "clickhouse",
                "read": {"mode": "daily", "column": "at", "start_date": "2024-01-01"},
                "options": {
                    "query": {"sql": "select 1"},
                    "hooks": {
                        "pre_hook": [
                            {
                                "id": "a",
                                "kind": "custom",
                                "sql_file": "a.sql",
                                "retry_policy": {"attempts": 2},
                                "lineage": {"inputs": ["x"]},
                                "execution": {"airflow": "inline"},
                            }
                        ],
                        "post_hook": [{"id": "b", "kind": "custom", "type": "acme", "options": {"free": {"free": 1}}}],
                    },
                },
            },
            "sink": {
                "type": "clickhouse",
                "table": {"schema": "s", "name": "n"},
                "strategy": "merge",
                "unique_key": ["k"],
                "staging": {"schema": "ops"},
                "physical_design": {"storage": {"clickhouse": {"cluster": "c"}}},
                "options": {
                    "lineage": {"enabled": True, "row_identity": {"mode": "auto"}},
                    "load_governance": {"audit": {"mode": "off"}, "decision_audit": {"persist": False}},
                },
            },
            "quality": {
                "gates": [
                    {"id": "a", "type": "row_count_reconciliation", "tolerance": {"mode": "pct", "value": 1}},
                    {"id": "b", "type": "min_rows", "threshold": 1},
                    {"id": "c", "type": "typed_hash_reconciliation"},
                    {"id": "d", "type": "custom_sql", "sql": "select 1", "min": 0},
                    {"id": "e", "type": "not_null", "columns": ["x"]},
                    {"id": "f", "type": "unique", "columns": ["x"]},
                    {"id": "g", "type": "freshness", "column": "x", "max_age_seconds": 1},
                    {"id": "h", "type": "accepted_values", "column": "x", "values": [1]},
                    {"id": "i", "type": "schema", "ref": "a:b"},
                    {"id": "j", "type": "acme.x", "options": {"free": {"free": 1}}},
                ],
                "acceptance": {"enabled": True, "capture": {"source": True}, "checks": {"row_count": True}},
            },
        },
        {
            "name": "b",
            "source": {"type": "mssql", "table": {"schema": "s", "name": "n"}},
            "sink": {"type": "clickhouse", "table": {"schema": "s", "name": "m"}, "strategy": "full_refresh"},
            "quality": {"checks": [{"id": "b", "type": "source_target_count"}]},
        },
    ],
}


def test_everything_is_everything() -> None:
    assert refusals(EVERYTHING) == {}
    found = {id(known(EVERYTHING, path)) for path in mappings(EVERYTHING)}
    assert {n for n, d in SCHEMA["$defs"].items() if id(d) not in found} == {"BatchManifest"}


@pytest.mark.parametrize("path", mappings(EVERYTHING), ids=lambda path: ".".join(map(str, path)) or "top")
def test_every_level_refuses_what_it_does_not_know(path: tuple[Any, ...]) -> None:
    document = deepcopy(EVERYTHING)
    at(document, path)["zzz"] = None if path else 1
    assert ".".join(map(str, (*path, "zzz"))) in refusals(document)
    for key in at(EVERYTHING, path):
        document = deepcopy(EVERYTHING)
        holder = at(document, path)
        holder[key + "_"] = holder.pop(key)
        # A type that nobody knows makes an older check another thing; everything else is told by its own name.
        assert ".".join(map(str, (*path, key + "_"))) in refusals(document) or key in ("type", "kind", "strategy")
        assert refusals(document)


@FUZZ
@given(
    document=VALID, data=st.data(), key=st.sampled_from(["x", "enabled_", "sied", "Type", "gates", "options", "mode"])
)
def test_an_unknown_key_is_refused_at_every_level(document: dict[str, Any], data: st.DataObject, key: str) -> None:
    places = mappings(document)
    path = data.draw(st.sampled_from(places))
    holder = at(document, path)
    assume(key not in known(document, path)["properties"])
    holder[key] = data.draw(st.sampled_from([False, 1, "x", [], {}]))
    assert ".".join(map(str, (*path, key))) in refusals(document)


def known(document: Any, path: tuple[Any, ...]) -> Any:
    """Look a mapping up in the published schema, independently of the models."""
    kinds = {"dpone.batch.v1": "BatchManifest", "dpone.flow.v1": "FlowManifest"}
    node: Any = SCHEMA["$defs"][kinds[document["kind"]]]
    value = document
    for part in path:
        value = value[part]
        node = node["items"] if isinstance(part, int) else node["properties"][part]
        node = resolve(node, value)
    return node


def resolve(node: Any, value: Any) -> Any:
    if "$ref" in node:
        return resolve(SCHEMA["$defs"][node["$ref"].rpartition("/")[2]], value)
    for branch in node.get("anyOf", node.get("oneOf", ())):
        found = resolve(branch, value)
        if found.get("type") == "object" and isinstance(value, dict):
            type_ = found["properties"].get("type", {})
            if "type" not in value or type_.get("const", value["type"]) == value["type"]:
                return found
    return node


@FUZZ
@given(document=VALID, data=st.data())
def test_mutations_lead_to_refusals_or_to_documents_that_hold(document: dict[str, Any], data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        holder = at(document, data.draw(st.sampled_from(mappings(document))))
        assume(holder)
        key = data.draw(st.sampled_from(sorted(holder)))
        match data.draw(st.sampled_from(["rename", "retype", "drop", "nest"])):
            case "rename":
                holder[key + "x"] = holder.pop(key)
            case "retype":
                other = [None, True, 0, -1, 2**70, 0.5, "", "x", "1.5", [], [[]], [None], {}, {"x": 1}]
                holder[key] = data.draw(st.sampled_from(other))
            case "drop":
                del holder[key]
            case "nest":
                holder[key] = {key: holder[key]}
    result = attempt(lambda: parse_manifest(document))
    if isinstance(result, LoadedManifest):
        assert parse_manifest(result.document.as_json()).document == result.document


NOTHING = Scripted(
    **dict.fromkeys(
        ("row_count", "digest", "rows_with_null", "surplus_rows", "rows_outside", "newest", "scalar", "blocks"),
        DponeError("DPONE_SOURCE_REFUSED", "The engine refused a question."),
    )
)


def none_passes(loaded: LoadedManifest) -> None:
    """Every gate of an accepted manifest is in the report, and none passes where no question is answered."""
    for process in loaded.processes:
        report = run_gates(
            process.quality.gates,
            source=NOTHING,
            staged=NOTHING,
            now=datetime(2024, 3, 2, tzinfo=UTC),
            scope_end=datetime(2024, 3, 2, tzinfo=UTC),
            unique_key=process.sink.unique_key,
            skipped=process.quality.skipped_checks,
        )
        declared = [*process.quality.gates, *process.quality.skipped_checks]
        assert [result.gate_id for result in report.results] == [gate.id for gate in declared]
        assert not any(result.status == "passed" for result in report.results)
        assert report.passed == all(result.severity == "warning" for result in report.results)


@FUZZ
@given(document=VALID, data=st.data())
def test_no_gate_passes_because_its_configuration_was_wrong(document: dict[str, Any], data: st.DataObject) -> None:
    none_passes(parse_manifest(document))
    gates = [path for path in mappings(document) if "gates" in path]
    assume(gates)
    holder = at(document, data.draw(st.sampled_from(gates)))
    assume(holder)
    holder[data.draw(st.sampled_from(sorted(holder)))] = data.draw(
        st.sampled_from([None, True, 0, -1, 0.5, "", "x", "1.5", "warning", "source", [], ["x"], {}, {"x": 1}])
    )
    loaded = attempt(lambda: parse_manifest(document))
    if isinstance(loaded, LoadedManifest):
        none_passes(loaded)


@FUZZ
@given(document=VALID, data=st.data())
def test_a_plan_of_what_is_accepted_is_a_plan_or_a_refusal(document: dict[str, Any], data: st.DataObject) -> None:
    loaded = parse_manifest(document)
    for process in loaded.processes:
        try:
            first = plan(loaded, process, root=ROOT).sha256
        except DponeError as error:
            refused = error.code
        else:
            refused = None
            assert plan(loaded, process, root=ROOT).sha256 == first
        assert refused is None or refused in CODES


@FUZZ
@given(document=VALID, data=st.data())
def test_a_repeated_key_is_always_refused(document: dict[str, Any], data: st.DataObject, tmp_path: Path) -> None:
    path = data.draw(st.sampled_from([p for p in mappings(document) if at(document, p)]))
    key = data.draw(st.sampled_from(sorted(at(document, path))))
    text = as_yaml(doubled(document, path, key)).replace(f'"{MARK}', '"')
    error = refusal(text, tmp_path)
    assert [e for e in error.details["errors"] if "is repeated" in e["message"]]


MARK = "@@twice@@"


def doubled(document: dict[str, Any], path: tuple[Any, ...], key: str) -> dict[str, Any]:
    document = deepcopy(document)
    holder = at(document, path)
    holder[MARK + key] = holder[key]
    return document


def test_random_bytes_are_refused(tmp_path: Path) -> None:
    chance = random.Random(7)
    base = TYPICAL.encode()
    pieces = [
        b"\t",
        b"\0",
        b"&a ",
        b"*a",
        b"!!",
        b"[",
        b"{",
        b"}",
        b"|",
        b">",
        b"%",
        b"---\n",
        b"\xff",
        b"?",
        b": ",
        b'"',
        b"- ",
    ]
    for _ in range(400):
        raw = bytearray(base)
        for _ in range(chance.randint(1, 4)):
            where = chance.randrange(len(raw))
            raw[where : where + chance.randint(0, 3)] = chance.choice(pieces)
        attempt(lambda raw=bytes(raw): load_text(raw, tmp_path))  # type: ignore[misc]


def test_a_thousand_manifests_take_seconds(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(TYPICAL)
    started = time.process_time()
    for _ in range(200):
        load_manifest(file, root=tmp_path)
    assert (time.process_time() - started) * 5 < 3
