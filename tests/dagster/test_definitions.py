import json
import shutil
import subprocess
import sys
from pathlib import Path

import dagster as dg

from assets.factory import code_version
from resources.embedded.home import Home
from resources.runtime import Runtime
from tests.dagster.support import LOCATION, ROOT, environment_of, tool
from tests.dagster.test_materialize import CHECKS

LOAD = """
import json, sys, time
started = time.monotonic()
import dagster as dg
dagster = time.monotonic()
from dpone_dagster.definitions import defs
dg.Definitions.validate_loadable(defs)
print(json.dumps({
    "dbt": "dbt" in sys.modules,
    "dagster_seconds": dagster - started,
    "own_seconds": time.monotonic() - dagster,
}))
"""


def test_definitions_load_without_engines_and_without_dbt(runtime: Runtime, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(runtime.home.root / "dbt", home / "dbt")  # the project was parsed once; nothing else is there
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD],
        cwd=ROOT,
        env=environment_of(home),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answer = json.loads(loaded.stdout)
    assert answer["dbt"] is False
    assert answer["own_seconds"] < 15  # about 1 s alone; two busy cores take their time
    assert [path.name for path in home.iterdir()] == ["dbt"]  # no engine was started, no journal opened


def test_a_mart_is_a_daily_asset_with_its_gates_and_tests(defs: dg.Definitions) -> None:
    graph = defs.resolve_asset_graph()
    node = graph.get(dg.AssetKey("flights"))
    assert isinstance(node.partitions_def, dg.DailyPartitionsDefinition)
    days = node.partitions_def.get_partition_keys()
    assert (days[0], days[-1], len(days)) == ("2013-01-01", "2014-01-01", 366)
    assert str(node.partitions_def.timezone) == "UTC"
    assert node.pools == {"dpone/flights_daily"}
    assert node.group_name == "flights"
    assert node.kinds == {"dbt", "postgres", "clickhouse"}
    assert {key.to_user_string() for key in node.parent_keys} == {
        "source_data/flights",
        "source_data/carriers",
        "source_data/airports",
    }
    assert {key.to_user_string() for key in node.child_keys} == {
        "daily_carrier_delays",
        "weekly_departures",
        "carrier_punctuality",
    }
    checks = [graph.get(key) for key in sorted(node.check_keys, key=lambda k: CHECKS.index(k.name))]
    assert [check.key.name for check in checks] == CHECKS
    assert all(check.blocking and check.partitions_def == node.partitions_def for check in checks)
    # multi_run(1) would launch runs that carry a range, and their checks would lose their day.
    assert node.backfill_policy is None


def test_the_schema_names_both_type_systems(defs: dg.Definitions) -> None:
    schema = defs.resolve_asset_graph().get(dg.AssetKey("flights")).metadata["dagster/column_schema"]
    columns = {column.name: column for column in schema.columns}
    assert columns["time_hour"].type == "datetime2(6) → DateTime64(6,'UTC')"
    assert columns["time_hour"].constraints == dg.TableColumnConstraints(nullable=False, other=["key"])
    assert columns["speed_mph"].type == "decimal(9,3) → Nullable(Decimal(9,3))"
    assert columns["speed_mph"].constraints.nullable is True
    assert columns["origin_id"].description == "Airport of departure, by source_data.airports."


def test_the_code_version_follows_the_declaration(runtime: Runtime) -> None:
    workflow = runtime.workflow_of("flights")
    mart = workflow.mart("flights")
    other = mart.model_copy(update={"gates": mart.gates[:1]})
    assert code_version(workflow, mart).startswith("sha256:")
    assert code_version(workflow, mart) == code_version(workflow, mart)
    assert code_version(workflow, other) != code_version(workflow, mart)


def test_dg_check_defs_accepts_the_project(dagster_home: Home, environment: dict[str, str]) -> None:
    checked = tool("dg", "check", "defs", environment=environment)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    listed = tool("dg", "list", "defs", "--json", environment=environment)
    assert listed.returncode == 0, listed.stderr
    assert '"flights"' in listed.stdout
    assert '"daily_carrier_delays"' in listed.stdout


def test_one_name_for_the_code_location() -> None:
    assert f"location_name: {LOCATION}" in (ROOT / "workspace.yaml").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    assert project.count(f'code_location_name = "{LOCATION}"') == 2
