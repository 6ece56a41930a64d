"""What manifests become in Dagster; no engine is touched."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from assets.loads import LoadDefinitions, evidence, load_assets
from assets.loads.component import component_definitions
from checks.loads import Judged, load_check_results
from dpone_dagster.declarations.loader import parse_manifest
from dpone_dagster.declarations.manifest import Process
from dpone_dagster.errors import DponeError
from tests.declarations.manifests import whole

ROOT = Path(__file__).parents[2]

# Every gate type, and what its check says.
GATES: list[tuple[dict[str, Any], str]] = [
    ({"type": "row_count_reconciliation"}, "As many rows are staged as were read."),
    (
        {"type": "row_count_reconciliation", "tolerance": {"mode": "pct", "value": "0.5"}},
        "As many rows are staged as were read. A difference of up to 0.5 % is tolerated.",
    ),
    ({"type": "min_rows", "threshold": 5, "side": "source"}, "The rows that were read are 5 or more."),
    ({"type": "typed_hash_reconciliation"}, "The staged rows are the very rows that were read, value by value."),
    (
        {"type": "typed_hash_reconciliation", "mode": "sample", "modulus": 100},
        "The staged rows are the very rows that were read, value by value, one key in 100.",
    ),
    (
        {"type": "custom_sql", "sql": "select count() from {{ relation }}", "min": 1, "max": 3},
        "A query over the staged rows yields at least 1 and at most 3.",
    ),
    ({"type": "not_null", "columns": ["a", "b"]}, "The staged rows have no NULL in a, b."),
    ({"type": "unique", "columns": ["a", "b"]}, "No two of the staged rows agree in a, b."),
    (
        {"type": "freshness", "column": "at", "max_age_seconds": 60},
        "The newest at of the staged rows is at most 60 s before the start of the run.",
    ),
    (
        {"type": "accepted_values", "column": "a", "values": ["x", "y"]},
        "The staged rows have one of 2 accepted values in a.",
    ),
    ({"type": "schema", "ref": "module:Schema"}, "The pandera schema module:Schema holds for the staged rows."),
    ({"type": "acme.gate"}, "The provider acme.gate accepts the staged rows."),
]


def hook(id_: str, *depends_on: str, separate: bool = False, **more: Any) -> dict[str, Any]:
    given = {"id": id_, "kind": "custom", "sql": "SELECT 1", "depends_on": list(depends_on), **more}
    return {**given, "execution": {"orchestrator": "separate_task"}} if separate else given


@pytest.fixture
def built(tmp_path: Path) -> Callable[..., LoadDefinitions]:
    """Write manifests into a folder and build it."""
    (tmp_path / ".git").mkdir()

    def build(*documents: dict[str, Any]) -> LoadDefinitions:
        for n, document in enumerate(documents):
            (tmp_path / f"{n}.yaml").write_text(yaml.safe_dump(document))
        return load_assets(tmp_path)

    return build


def graph_of(found: LoadDefinitions) -> Any:
    defs = dg.Definitions(
        assets=[*found.assets, *found.outputs],
        jobs=found.jobs,
        resources={"dpone": dg.ResourceDefinition.none_resource()},
    )
    dg.Definitions.validate_loadable(defs)
    return defs.resolve_asset_graph()


def keys(found: Any) -> set[str]:
    return {key.to_user_string() for key in found}


# --------------------------------------------------------------------------------------------------- assets


def test_a_process_is_an_asset_with_what_its_manifest_says(built: Callable[..., LoadDefinitions]) -> None:
    found = built(
        whole(
            description="Orders.",
            owners=["team:analytics"],
            group="sales",
            depends_on=["upstream", "some/key"],
            source__options={
                "hooks": {
                    "pre_hook": [hook("r", lineage={"inputs": ["raw.a"], "outputs": ["[rep].[orders]"]})],
                    "post_hook": [
                        hook("p", lineage={"inputs": ["raw.orders"], "outputs": ["mart.sums", "raw.orders"]})
                    ],
                }
            },
            quality={"gates": [{"id": "g", "type": "min_rows", "threshold": 1}]},
        )
    )
    graph = graph_of(found)
    node = graph.get(dg.AssetKey("orders"))
    assert keys(node.parent_keys) == {"upstream", "some/key", "rep/orders", "raw/a"}
    assert keys(node.child_keys) == {"mart/sums"}
    # What the hooks read and write, and the source, are drawn although Dagster makes none of them.
    assert keys(spec.key for spec in found.outputs) == {"rep/orders", "raw/a", "mart/sums"}
    assert keys(graph.get(dg.AssetKey(["rep", "orders"])).parent_keys) == {"raw/a"}
    assert (node.group_name, list(node.owners), node.kinds) == ("sales", ["team:analytics"], {"postgres", "clickhouse"})
    assert node.code_version == found.plans["orders"].sha256
    assert node.partitions_def is None
    assert node.description.startswith("Orders.\n\nReads rep.orders. Once every gate holds, `raw.orders` changes ")
    assert node.metadata["dagster/table_name"] == "raw.orders"
    assert node.metadata["manifest"] == "0.yaml"
    assert node.pools == {"dpone/orders"}
    assert node.backfill_policy is None
    assert [job.name for job in found.jobs] == ["load_orders"]


def test_a_hooks_sql_decides_the_code_version(built: Callable[..., LoadDefinitions]) -> None:
    versions = set()
    for sql in ("SELECT 1", "SELECT 2", "SELECT 2"):
        document = whole(source__options={"hooks": {"pre_hook": [{**hook("h"), "sql": sql}]}})
        (asset,) = built(document).assets
        versions.add(asset.get_asset_spec(dg.AssetKey("orders")).code_version)
    assert len(versions) == 2


def test_a_daily_load_has_days_and_its_checks_too(built: Callable[..., LoadDefinitions]) -> None:
    found = built(
        whole(
            source__read={"mode": "daily", "column": "at", "start_date": "2024-03-01"},
            sink__strategy="replace",
            quality={"gates": [{"id": "g", "type": "min_rows", "threshold": 1}], "acceptance": {"enabled": True}},
        )
    )
    graph = graph_of(found)
    node = graph.get(dg.AssetKey("orders"))
    assert isinstance(node.partitions_def, dg.DailyPartitionsDefinition)
    assert node.partitions_def.get_first_partition_key() == "2024-03-01"
    assert str(node.partitions_def.timezone) == "UTC"
    checks = {key.name: graph.get(key) for key in node.check_keys}
    assert {name: check.blocking for name, check in checks.items()} == {"g": True, "dpone_acceptance": False}
    assert all(check.partitions_def == node.partitions_def for check in checks.values())


def test_each_gate_is_a_check_that_says_what_it_demands(built: Callable[..., LoadDefinitions]) -> None:
    gates = [{"id": f"g{n}", **gate} for n, (gate, _) in enumerate(GATES)]
    gates[-1]["severity"] = "warning"
    document = whole(quality={"gates": gates, "acceptance": {"enabled": True, "mode": "required"}})
    (asset,) = built(document).assets
    specs = {spec.name: spec for spec in asset.check_specs}
    assert [specs[f"g{n}"].description for n in range(len(GATES))] == [said for _, said in GATES]
    assert [specs[f"g{n}"].blocking for n in range(len(GATES))] == [True] * (len(GATES) - 1) + [False]
    assert specs["dpone_acceptance"].blocking
    assert specs["dpone_acceptance"].description == (
        "The counts of source, staged, target agree; a difference fails the load."
    )


def test_hooks_on_the_far_side_of_a_separate_one_are_steps_too(built: Callable[..., LoadDefinitions]) -> None:
    document = whole(
        source__options={
            "hooks": {
                "pre_hook": [hook("c", "b", separate=True), hook("a"), hook("b", "a"), hook("d", "c")],
                "post_hook": [hook("x"), hook("y", "x", separate=True), hook("z", "y"), hook("w", "x")],
            }
        }
    )
    (asset,) = built(document).assets
    graph = asset.node_def
    assert isinstance(graph, dg.GraphDefinition)
    before = {
        node.name: [
            output.node_name for output in (graph.dependency_structure.all_upstream_outputs_from_node(node.name))
        ]
        for node in graph.nodes
    }
    assert before == {
        "pre_hook_a": [],
        "pre_hook_b": ["pre_hook_a"],
        "pre_hook_c": ["pre_hook_b"],
        "load": ["pre_hook_c"],
        "post_hook_y": ["load"],
        "post_hook_z": ["post_hook_y"],
    }
    assert "dpone_post_hooks" in {spec.name for spec in asset.check_specs}
    assert keys(asset.asset_deps[dg.AssetKey("orders")]) == {"rep/orders"}
    assert asset.get_asset_spec(dg.AssetKey("orders")).kinds == {"postgres", "clickhouse"}


def test_an_asset_source_has_no_asset_of_its_own(built: Callable[..., LoadDefinitions]) -> None:
    found = built(whole(source__type="asset", source__table=None))
    assert (found.assets, found.jobs, list(found.plans)) == ([], [], ["orders"])


def test_names_that_dagster_reserves_are_names(built: Callable[..., LoadDefinitions]) -> None:
    names = ["config", "class", "None", "Orders_2", "_"]
    found = built(*[whole(name=name, sink__table={"schema": "raw", "name": name}) for name in names])
    assert keys(graph_of(found).materializable_asset_keys) == set(names)


@pytest.mark.parametrize("separate", [False, True])
def test_tables_of_any_name_are_upstream(built: Callable[..., LoadDefinitions], separate: bool) -> None:
    lineage = {"inputs": ["a-b.c d", "a_b.c d", "[x y].[z]", '"q"."день"', ".."]}
    found = built(
        whole(
            source__table={"schema": "my schema", "name": 'ta"b`l/e.день'},
            source__options={"hooks": {"pre_hook": [hook("h", separate=separate, lineage=lineage)]}},
        )
    )
    assert {tuple(key.path) for key in graph_of(found).get(dg.AssetKey("orders")).parent_keys} == {
        ("my schema", 'ta"b`l/e.день'),
        ("a-b", "c d"),
        ("a_b", "c d"),
        ("x y", "z"),
        ("q", "день"),
        ("..",),
    }


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({}, "1.yaml: .. both have a process orders"),
        ({"name": "other", "owners": ["nobody"]}, "1.yaml: Dagster refuses other"),
        ({"name": "other", "sink__tabel": {}}, "1.yaml"),
    ],
)
def test_what_is_refused_names_the_file(
    built: Callable[..., LoadDefinitions], second: dict[str, Any], said: str
) -> None:
    with pytest.raises(DponeError) as caught:
        built(whole(), whole(**second))
    assert caught.value.code == "DPONE_MANIFEST_INVALID"
    assert said.split(" .. ")[0].removesuffix(":") in caught.value.sentence
    assert said.split(" .. ")[-1].split(": ")[-1] in caught.value.sentence


def test_a_hundred_manifests_take_a_tenth_of_what_a_thousand_may(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for n in range(100):
        document = whole(
            name=f"orders_{n}",
            sink__table={"schema": "raw", "name": f"orders_{n}"},
            source__options={"hooks": {"pre_hook": [{**hook("h"), "sql": f"EXEC p_{n}", "mutates_source": True}]}},
            quality={"gates": [{"id": f"g{i}", **gate} for i, (gate, _) in enumerate(GATES[:4])]},
        )
        (tmp_path / f"{n}.yaml").write_text(yaml.safe_dump(document))
    started = time.process_time()
    found = load_assets(tmp_path)
    graph_of(found)
    # A tenth of the thousand, in a tenth of the 20 s.
    assert time.process_time() - started < 2
    assert len(found.assets) == 100


# ------------------------------------------------------------------------------------------------- evidence


def test_metrics_of_odd_columns_never_share_a_name() -> None:
    names = ["a", "A", "a/b", "a.b", "a-b", "a b", '"a"', "`a`", "день", "null_count/a", "row_count"]
    counts = {name: n for n, name in enumerate(names)}
    snapshot = {
        "side": "source",
        "status": "succeeded",
        "row_count": 99,
        "null_counts": counts,
        "distinct_counts": counts,
    }
    found = evidence.metrics([snapshot, {**snapshot, "side": "target"}])
    assert len(found) == 2 * (1 + 2 * len(names))
    for n, name in enumerate(names):
        assert found[f"acceptance/source/null_count/{name}"] == n
        assert found[f"acceptance/target/distinct_count/{name}"] == n
    assert found["acceptance/source/row_count"] == 99
    assert evidence.metrics([{"side": "source", "status": "warning", "error_code": "DPONE_X"}]) == {}


def declared(**quality: Any) -> Process:
    (process,) = parse_manifest(whole(quality=quality)).processes
    return process


def results(process: Process, judged: Judged) -> dict[str, dg.AssetCheckResult]:
    found = list(load_check_results(process, judged, asset_key=dg.AssetKey("orders")))
    return {str(result.check_name): result for result in found}


def test_a_check_that_was_not_evaluated_warns_and_says_why() -> None:
    process = declared(gates=[{"id": "g", "type": "min_rows", "threshold": 1}], acceptance={"enabled": True})
    found = results(process, Judged(why_skipped="the run stopped before (DPONE_X)"))
    assert list(found) == ["g", "dpone_acceptance"]
    for result in found.values():
        assert (result.passed, result.severity) == (False, dg.AssetCheckSeverity.WARN)
        assert result.description == "Not evaluated: the run stopped before (DPONE_X)"


@pytest.mark.parametrize(
    ("mode", "severity"), [("required", dg.AssetCheckSeverity.ERROR), ("warn_only", dg.AssetCheckSeverity.WARN)]
)
def test_acceptance_that_disagrees_is_a_failed_check(mode: str, severity: dg.AssetCheckSeverity) -> None:
    process = declared(acceptance={"enabled": True, "mode": mode})
    sides = [
        {"side": "source", "status": "succeeded", "row_count": 10, "null_counts": {"a": 1}},
        {"side": "staged", "status": "succeeded", "row_count": 9, "null_counts": {"a": 1}},
        {"side": "target", "status": "warning", "error_code": "DPONE_X"},
    ]
    difference = {"metric": "row_count", "column": None, "side": "source", "count": 10, "other_side": "staged",
                  "other_count": 9}  # fmt: skip
    judged = Judged(snapshots=sides, acceptance_status="failed", differences=[difference])
    result = results(process, judged)["dpone_acceptance"]
    assert (result.passed, result.severity) == (False, severity)
    assert result.description == "1 counts disagree; not measured: target (DPONE_X)"
    assert result.metadata["source_row_count"].value == 10
    assert result.metadata["staged_row_count"].value == 9
    (line,) = result.metadata["differences"].value.records
    assert line.data == {"metric": "row_count", "column": "", "side": "source", "count": "10",
                         "other_side": "staged", "other_count": "9"}  # fmt: skip
    (line,) = result.metadata["counts"].value.records
    assert line.data == {"column": "a", "metric": "null", "source": "1", "staged": "1"}


# ------------------------------------------------------------------------------------------------ components


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of somebody's with one component."""
    (tmp_path / "pyproject.toml").write_text(
        '[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "team"\n'
        'code_location_target_module = "team.definitions"\n'
    )
    mart = tmp_path / "team" / "defs" / "orders"
    mart.mkdir(parents=True)
    for package in (tmp_path / "team", tmp_path / "team" / "defs"):
        (package / "__init__.py").touch()
    (tmp_path / "team" / "definitions.py").write_text(
        "from pathlib import Path\nimport dagster as dg\n"
        "defs = dg.Definitions.merge(\n"
        "    dg.load_from_defs_folder(path_within_project=Path(__file__).parent),\n"
        "    dg.Definitions(resources={'dpone': dg.ResourceDefinition.none_resource()}),\n)\n"
    )
    # What the docs show.
    component, manifest = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "loads-in-dagster.md").read_text(), re.S)
    (mart / "defs.yaml").write_text(component)
    (mart / "orders.yaml").write_text(manifest)
    return tmp_path


def dg_command(project: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(Path(sys.executable).parent / "dg"), *arguments],
        cwd=project,
        env={**os.environ, "PYTHONPATH": f"{project}{os.pathsep}{ROOT}", "DO_NOT_TRACK": "1", "COLUMNS": "500"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_dg_check_defs_takes_a_component_and_says_what_is_wrong_in_its_manifest(project: Path) -> None:
    manifest = project / "team" / "defs" / "orders" / "orders.yaml"
    good = manifest.read_text()
    checked = dg_command(project, "check", "defs")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    manifest.write_text(good.replace("strategy:", "strategie:"))
    checked = dg_command(project, "check", "defs")
    assert checked.returncode == 1
    line = good[: good.index("strategy:")].count("\n") + 1
    told = checked.stdout + checked.stderr
    assert f"DPONE_MANIFEST_INVALID: team/defs/orders/orders.yaml:{line} sink.strategie: " in told


def test_dg_check_yaml_says_what_is_wrong_in_a_component(project: Path) -> None:
    defs = project / "team" / "defs" / "orders" / "defs.yaml"
    defs.write_text(defs.read_text().replace("manifest:", "manifst:"))
    checked = dg_command(project, "check", "yaml")
    assert checked.returncode == 1
    assert "defs.yaml:4 - assets.loads.LoadManifest attributes.manifst" in checked.stdout + checked.stderr


def test_dg_looks_for_the_projects_own_components() -> None:
    # tests/dagster/test_definitions.py runs `dg check defs`, which checks their YAML first.
    assert 'defs_module = "assets.loads.defs"' in (ROOT / "pyproject.toml").read_text()
    assert (ROOT / "assets/loads/defs/airports/defs.yaml").is_file()
    assert keys(a.key for a in component_definitions(ROOT).assets or ()) == {"airports", "source_data/airports"}
