"""Planning reads dbt's manifest: what is admitted, and that every other construct refuses by name."""

import copy
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from dpone_dagster.contracts.mart import MartSpec, Relation
from dpone_dagster.errors import DponeError
from dpone_dagster.planning.dbt_manifest import compile_workflows, read_marts, select
from dpone_dagster.ports import CatalogObservation, ObservedRelation
from resources.dbt_builder import DbtBuilder
from resources.embedded.home import Home
from resources.postgres.dialect import canonical_type

MODEL = "model.dpone_marts.flights"


@pytest.fixture(scope="session")
def shipped(home: Home) -> dict[str, Any]:
    """The shipped project's manifest, as planning gets it."""
    return DbtBuilder(conninfo="", home=home.root / "dbt").manifest()


@pytest.fixture
def manifest(shipped: dict[str, Any]) -> dict[str, Any]:
    """A copy to spoil."""
    return copy.deepcopy(shipped)


def refusal(act: Callable[[], Any]) -> DponeError:
    with pytest.raises(DponeError) as caught:
        act()
    return caught.value


def observed(*relations: tuple[str, str, str]) -> Callable[[MartSpec, str], CatalogObservation]:
    return lambda mart, sql: CatalogObservation(
        database="dpone",
        reader_id=900,
        relations=tuple(
            ObservedRelation(
                relation=Relation(schema_name=schema, name=name),
                object_id=100 + number,
                kind=kind,
                definition_sha256="sha256:" + "0" * 64,
            )
            for number, (schema, name, kind) in enumerate(relations)
        ),
    )


SOURCES = [("source_data", name, "BASE_TABLE") for name in ("flights", "carriers", "airports")]


def test_the_shipped_mart(manifest: dict[str, Any]) -> None:
    (mart,) = read_marts(manifest, canonical_type)
    assert (mart.name, mart.workflow, mart.model_unique_id) == ("flights", "flights_daily", MODEL)
    assert (mart.source.dotted, mart.target.dotted) == ("marts.flights", "marts.flights")
    assert (mart.event_time, mart.key) == ("time_hour", ("time_hour", "carrier_id", "flight", "origin_id"))
    # In the contract's order, which is no alphabet.
    assert [(c.name, c.type, c.nullable) for c in mart.columns] == [
        ("time_hour", "datetime2(6)", False),
        ("carrier_id", "smallint", False),
        ("flight", "int", False),
        ("origin_id", "smallint", False),
        ("dest_id", "smallint", False),
        ("tailnum", "nvarchar(8)", True),
        ("sched_dep_time", "smallint", False),
        ("dep_delay", "smallint", True),
        ("arr_delay", "smallint", True),
        ("air_time", "smallint", True),
        ("distance", "int", False),
        ("cancelled", "bit", False),
        ("speed_mph", "decimal(9,3)", True),
    ]
    assert (mart.partition_by, mart.start_date) == ("month", date(2013, 1, 1))
    assert [(g.id, g.type, g.severity, g.threshold) for g in mart.gates] == [
        ("row_count", "row_count_reconciliation", "error", None),
        ("min_rows", "min_rows", "error", 1),
        ("typed_hash", "typed_hash_reconciliation", "error", None),
    ]


def test_a_selection_is_exact(manifest: dict[str, Any]) -> None:
    selection = select(manifest, [MODEL])
    assert selection.models == (MODEL,)
    assert len(selection.tests) == 4
    assert selection.selectors[0] == "fqn:dpone_marts.flights_daily.flights"
    assert len(selection.selectors) == 5
    assert not any("+" in selector or "*" in selector for selector in selection.selectors)
    assert selection.bounded == {MODEL}
    # dbt would select a node below the model's path along with it.
    manifest["nodes"]["model.dpone_marts.other"] = {
        **manifest["nodes"][MODEL],
        "fqn": ["dpone_marts", "flights_daily", "flights", "other"],
    }
    assert refusal(lambda: select(manifest, [MODEL])).code == "DPONE_CLOSURE_UNPROVEN"


def test_a_test_of_another_model_is_not_selected(manifest: dict[str, Any]) -> None:
    test = next(n for n in manifest["nodes"].values() if n["name"] == "not_null_flights_flight")
    test["depends_on"]["nodes"].append("model.dpone_marts.other")
    assert test["unique_id"] not in select(manifest, [MODEL]).tests


def test_without_an_engine_a_plan_is_unverified_and_does_not_execute(manifest: dict[str, Any]) -> None:
    workflow = compile_workflows(manifest, canonical_type=canonical_type, observe=None)["flights_daily"]
    (plan,) = workflow.plans
    assert (plan.definition.status, plan.reads.status) == ("UNVERIFIED", "UNVERIFIED")
    assert refusal(lambda: plan.documents).code == "DPONE_CLOSURE_UNPROVEN"


def test_with_what_the_engine_saw_it_is_proven(manifest: dict[str, Any]) -> None:
    def compiled() -> Any:
        return compile_workflows(manifest, canonical_type=canonical_type, observe=observed(*SOURCES))["flights_daily"]

    workflow, again = compiled(), compiled()
    (plan,) = workflow.plans
    assert [d.recompute() for d in plan.documents] == [d.sha256 for d in plan.documents]
    assert plan.reads.base_relation_object_ids == (100, 101, 102)
    assert (workflow.closure.selected_mutating_node_ids, workflow.closure.status) == ((MODEL,), "PROVEN")
    assert len(workflow.closure.selected_read_only_node_ids) == 4
    assert again == workflow
    # No day in what was compiled, or every day would be another definition.
    assert "__dpone_scope_start__" in manifest["nodes"][MODEL]["compiled_code"]
    manifest["macros"]["macro.dpone_platform.dpone_scope_bound"]["macro_sql"] += " "
    assert compiled().plans[0].definition.sha256 != plan.definition.sha256


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        ([*SOURCES, ("marts", "flights", "BASE_TABLE")], "its own target"),
        ([*SOURCES, ("source_data", "planes", "BASE_TABLE")], "source_data.planes without ref() or source()"),
        ([("source_data", "flights", "a view")], "which is a view"),
    ],
)
def test_reads_refuse(manifest: dict[str, Any], seen: list[tuple[str, str, str]], why: str) -> None:
    error = refusal(lambda: compile_workflows(manifest, canonical_type=canonical_type, observe=observed(*seen)))
    assert error.code == "DPONE_CLOSURE_UNPROVEN"
    assert why in error.sentence


CONFIGS = [
    ("materialized", "table"),
    ("materialized", "ephemeral"),
    ("incremental_strategy", "append"),
    ("on_schema_change", "append_new_columns"),
    ("full_refresh", None),
    ("full_refresh", True),
    ("pre-hook", [{"sql": "select 1"}]),
    ("post-hook", [{"sql": "select 1"}]),
    ("grants", {"select": ["someone"]}),
    ("persist_docs", {"relation": True}),
    ("contract", {"enforced": False}),
    ("sql_header", "set x = 1"),
    ("indexes", [{"columns": ["flight"]}]),
    ("incremental_predicates", ["true"]),
    ("unlogged", True),
]


@pytest.mark.parametrize(("key", "value"), CONFIGS, ids=[f"{k}={v}" for k, v in CONFIGS])
def test_configs_refuse(manifest: dict[str, Any], key: str, value: Any) -> None:
    manifest["nodes"][MODEL]["config"][key] = value
    error = refusal(lambda: read_marts(manifest, canonical_type))
    assert error.code == "DPONE_CLOSURE_UNPROVEN"
    assert "flights" in error.sentence


TEMPLATES = [
    "select * from {{ this }}",
    "{% if is_incremental() %}select 1{% endif %}",
    "select {{ is_incremental() }}",
    "{{ adapter.dispatch('x')() }}",
    "{{ run_query('select 1') }}",
    "{% do run_query('select 1') %}",
    "{{ graph.nodes }}",
    "{{ env_var('HOME') }}",
    "{{ var('dpone') }}",
    "{% call statement('x') %}select 1{% endcall %}",
    "{% set x = 1 %}",
    "{% for x in [1] %}1{% endfor %}",
    "{{ source('a', 'b').identifier }}",
    "{{ ref(model) }}",
    "{{ 'a' | upper }}",
    "{{ config(alias=target.name) }}",
    "{{ my_macro() }}",
    "{% import 'x' as y %}",
    "{{ broken",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_refuse(manifest: dict[str, Any], template: str) -> None:
    manifest["nodes"][MODEL]["raw_code"] = template
    assert refusal(lambda: read_marts(manifest, canonical_type)).code == "DPONE_CLOSURE_UNPROVEN"


def test_an_admitted_template(manifest: dict[str, Any]) -> None:
    manifest["nodes"][MODEL]["raw_code"] = (
        "{{ config(tags=['a'], meta={'b': 1}) }} {# aside #} select '{' from {{ source('a', 'b') }}"
        " where x >= {{ dpone_scope_start() }} and x < {{ dpone_scope_end() }}"
    )
    assert len(read_marts(manifest, canonical_type)) == 1


def test_what_stands_beside_the_models_refuses(shipped: dict[str, Any]) -> None:
    def spoiled(kind: str, unique_id: str, entry: dict[str, Any]) -> str:
        manifest = {**shipped, kind: {**shipped[kind], unique_id: entry}}
        return refusal(lambda: read_marts(manifest, canonical_type)).sentence

    hook = spoiled("nodes", "operation.dpone_marts.on-run-end-0", {"resource_type": "operation"})
    assert "is a operation" in hook
    seed = spoiled("nodes", "seed.dpone_marts.x", {"resource_type": "seed"})
    assert "is a seed" in seed
    macro = {"package_name": "dpone_marts", "name": "postgres__create_table_as", "macro_sql": ""}
    assert "macro of the project" in spoiled("macros", "macro.dpone_marts.postgres__create_table_as", macro)
    macro = {"package_name": "dbt_utils", "name": "star", "macro_sql": ""}
    assert "not admitted" in spoiled("macros", "macro.dbt_utils.star", macro)


def test_ephemeral_reads_refuse(manifest: dict[str, Any]) -> None:
    unique_id = "model.dpone_marts.helper"
    manifest["nodes"][unique_id] = {
        "resource_type": "model", "name": "helper", "config": {"materialized": "ephemeral"},
    }  # fmt: skip
    manifest["nodes"][MODEL]["depends_on"]["nodes"].append(unique_id)
    assert "ephemeral" in refusal(lambda: read_marts(manifest, canonical_type)).sentence


@pytest.mark.parametrize(
    ("config", "raw_code"),
    [({"store_failures": True}, None), ({"store_failures_as": "table"}, None), ({}, "{{ run_query('select 1') }}")],
)
def test_tests_that_do_more_than_read_refuse(
    manifest: dict[str, Any], config: dict[str, Any], raw_code: str | None
) -> None:
    test = manifest["nodes"]["test.dpone_marts.cancelled_flights_have_no_delay"]
    test["config"] |= config
    test["raw_code"] = raw_code or test["raw_code"]
    assert refusal(lambda: select(manifest, [MODEL])).code == "DPONE_CLOSURE_UNPROVEN"


METAS: list[tuple[Any, str]] = [
    (lambda meta: meta["publish"].pop("workflow"), "publish.workflow"),
    (lambda meta: meta["publish"].update(profile="other"), "publish.profile"),
    (lambda meta: meta["publish"].update(enabeld=True), "publish.enabeld"),
    (lambda meta: meta["target"].update(partition_by="week"), "target.partition_by"),
    (lambda meta: meta.update(start_date="2013-02-30"), "start_date"),
    (lambda meta: meta.update(gates=[{"id": "x", "type": "min_rows"}]), "gates.0"),
    (lambda meta: meta.update(owner="me"), "owner"),
]


@pytest.mark.parametrize(("spoil", "field"), METAS, ids=[field for _, field in METAS])
def test_declarations_refuse_naming_model_and_field(manifest: dict[str, Any], spoil: Any, field: str) -> None:
    spoil(manifest["nodes"][MODEL]["config"]["meta"]["dpone"])
    error = refusal(lambda: read_marts(manifest, canonical_type))
    assert error.code == "DPONE_CONTRACT_INVALID"
    assert "Model flights" in error.sentence
    assert field in error.sentence


COLUMNS = [
    ("flight", {"data_type": "double precision"}, "DPONE_TYPE_UNSUPPORTED"),
    ("flight", {"data_type": "varchar(8)"}, "DPONE_KEY_TYPE"),
    ("flight", {"constraints": []}, "DPONE_KEY_NULLABLE"),
    ("flight", {"data_type": None}, "DPONE_CONTRACT_INVALID"),
    ("distance", {"name": "dpone_rows"}, "DPONE_CONTRACT_INVALID"),
    ("distance", {"constraints": [{"type": "check"}]}, "DPONE_CONTRACT_INVALID"),
    ("time_hour", {"data_type": "timestamptz"}, "DPONE_TYPE_UNSUPPORTED"),
    ("time_hour", {"data_type": "date"}, "DPONE_EVENT_TIME_TYPE"),
]


@pytest.mark.parametrize(("column", "change", "code"), COLUMNS, ids=[f"{c}-{code}" for c, _, code in COLUMNS])
def test_columns_refuse(manifest: dict[str, Any], column: str, change: dict[str, Any], code: str) -> None:
    manifest["nodes"][MODEL]["columns"][column] |= change
    assert refusal(lambda: read_marts(manifest, canonical_type)).code == code


def test_event_time_must_be_vouched_for(manifest: dict[str, Any]) -> None:
    manifest["nodes"][MODEL]["config"]["meta"]["dpone"]["utc_assured"] = []
    assert refusal(lambda: read_marts(manifest, canonical_type)).code == "DPONE_UTC_NOT_ASSURED"


def test_event_time_must_be_in_the_key(manifest: dict[str, Any]) -> None:
    manifest["nodes"][MODEL]["config"]["unique_key"] = ["carrier_id", "flight"]
    assert refusal(lambda: read_marts(manifest, canonical_type)).code == "DPONE_CONTRACT_INVALID"


def test_two_marts_with_one_target_refuse(manifest: dict[str, Any]) -> None:
    other = copy.deepcopy(manifest["nodes"][MODEL])
    other |= {"name": "other", "unique_id": "model.dpone_marts.other"}
    manifest["nodes"]["model.dpone_marts.other"] = other
    assert "target marts.flights" in refusal(lambda: read_marts(manifest, canonical_type)).sentence


def test_unpublished_models_are_no_marts(manifest: dict[str, Any]) -> None:
    manifest["nodes"][MODEL]["config"]["meta"]["dpone"]["publish"]["enabled"] = False
    assert read_marts(manifest, canonical_type) == ()


def test_planning_imports_no_dbt() -> None:
    text = (Path(__file__).parents[2] / "dpone_dagster" / "planning" / "dbt_manifest.py").read_text()
    assert "import dbt" not in text
    assert "from dbt" not in text
