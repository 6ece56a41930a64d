"""From dbt's manifest to marts and static proofs. Pure: the manifest comes in as JSON data, dbt is never imported.

What is admitted is a closed list, and everything else refuses by name: incremental SQL models with the platform's
strategy, an enforced contract and ``on_schema_change: fail``; a template language of ``ref``, ``source``,
``config`` and the two scope macros; the platform's macros and dbt's own; tests that only read. What cannot be
proven without the SQL engine (which relations a query really reads) arrives as a ``CatalogObservation``; without
one the proofs say UNVERIFIED, and an UNVERIFIED plan gives no documents to execute by.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from jinja2 import Environment, TemplateSyntaxError, nodes

from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.contracts.documents import (
    ModelDefinitionProof,
    MutationClosure,
    ReadDependencyProof,
    StandInLifecyclePolicy,
)
from dpone_dagster.contracts.mart import Column, GateSpec, Identifier, MartSpec, RelationName, admit_key
from dpone_dagster.contracts.model import ClosedModel, Document
from dpone_dagster.errors import DponeError
from dpone_dagster.ports import CatalogObservation

Manifest = Mapping[str, Any]

STRATEGY = "dpone_scope_merge"
PLATFORM_PACKAGE = "dpone_platform"
SCOPE_MACROS = ("dpone_scope_start", "dpone_scope_end")
# The project's own macros: the platform's names in its namespace. Any other could replace a macro of dbt's.
PROJECT_MACROS = frozenset(
    {*SCOPE_MACROS, f"get_incremental_{STRATEGY}_sql", "get_create_table_as_sql", "get_where_subquery"}
    | {"generate_schema_name"}
)
_TEMPLATE_CALLS = frozenset({"ref", "source", "config", *SCOPE_MACROS})
_ADAPTER_PACKAGES = frozenset({"dbt", "dbt_postgres", "dbt_sqlserver"})
# What a model's resolved dbt config may hold, beside what only names or describes it.
_CONFIG = {
    "materialized": "incremental",
    "incremental_strategy": STRATEGY,
    "on_schema_change": "fail",
    "full_refresh": False,
    "enabled": True,
    "pre-hook": [],
    "post-hook": [],
    "grants": {},
    "persist_docs": {},
    "quoting": {},
    "column_types": {},
    "packages": [],
    "on_configuration_change": "apply",
}
_CONFIG_FREE = frozenset(
    {"access", "alias", "contract", "database", "docs", "event_time", "group", "lookback", "meta", "schema"}
    | {"tags", "unique_key", "freshness"}
)
_FQN_PART = re.compile(r"[A-Za-z0-9_]+")
_RESERVED = ("dpone_", "__dpone")  # variables of the strategy, and the artifact's transport columns

# Limits of the read dependency proof; platform policy, so they are part of its digest.
_READ_LIMITS = {"max_depth": 8, "max_nodes": 64, "max_edges": 256, "max_definition_bytes": 1_048_576}
_TARGET_INDEPENDENCE = sha256_of(
    {"schema": "dpone.target-independence-policy.v1", "template_calls": sorted(_TEMPLATE_CALLS)}
)
_PARSER = sha256_of({"schema": "dpone.parser-runtime-policy.v1", "parser": "engine", "statement": "one view query"})
_READS = sha256_of(
    {"schema": "dpone.read-dependency-policy.v1", "admitted": ["BASE_TABLE"], "functions": "builtin", **_READ_LIMITS}
)


# ------------------------------------------------------------------------------------- what authors declare


class Publish(ClosedModel):
    """``meta.dpone.publish``; the author surface of spec R."""

    enabled: bool
    profile: Literal["mssql_to_clickhouse_mart"]
    workflow: Identifier


class Target(ClosedModel):
    """``meta.dpone.target``: the ClickHouse table."""

    database: Identifier
    table: RelationName
    partition_by: Literal["day", "month", "none"] = "day"


class DponeMeta(ClosedModel):
    """``meta.dpone`` of a published model."""

    publish: Publish
    target: Target
    start_date: date
    utc_assured: tuple[Identifier, ...] = ()
    gates: tuple[GateSpec, ...] = ()


# ----------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True, kw_only=True)
class Selection:
    """One dbt invocation: exact selectors, and the nodes that they select.

    Attributes:
        selectors: ``fqn:..`` of each node; none of them is a prefix of another node's.
        models: unique ids of the mutating models.
        tests: unique ids of the tests that read these models (and sources) only.
        bounded: the models whose template bounds its reading with both scope macros.
    """

    selectors: tuple[str, ...]
    models: tuple[str, ...]
    tests: tuple[str, ...]
    bounded: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class StaticPlan:
    """One mart and what is proven of it before any run."""

    mart: MartSpec
    definition: ModelDefinitionProof
    reads: ReadDependencyProof
    lifecycle: StandInLifecyclePolicy

    @property
    def documents(self) -> tuple[Document, ...]:
        """The proofs that an admission writes.

        Raises:
            DponeError: DPONE_CLOSURE_UNPROVEN unless every one of them is PROVEN.
        """
        for proof in (self.definition, self.reads):
            if proof.status != "PROVEN":
                raise DponeError(
                    "DPONE_CLOSURE_UNPROVEN", f"{type(proof).__name__} of {self.mart.name} is {proof.status}."
                )
        return (self.definition, self.reads, self.lifecycle)


@dataclass(frozen=True, kw_only=True)
class CompiledWorkflow:
    """The marts of one workflow in plan order (by name), and the closure of the dbt build they share."""

    name: str
    plans: tuple[StaticPlan, ...]
    closure: MutationClosure


def read_marts(manifest: Manifest, canonical_type: Callable[[str], str]) -> tuple[MartSpec, ...]:
    """Return every published mart, sorted by name; needs no engine.

    Args:
        manifest: dbt's manifest as JSON data.
        canonical_type: maps the adapter's type names to the canonical ones.

    Raises:
        DponeError: DPONE_CONTRACT_INVALID naming model and field, DPONE_CLOSURE_UNPROVEN, DPONE_KEY_*,
            DPONE_TYPE_UNSUPPORTED.
    """
    _refuse_project(manifest)
    marts = []
    for node in manifest["nodes"].values():
        declared = node["config"].get("meta", {}).get("dpone")
        if node["resource_type"] == "model" and declared is not None:
            meta = _meta(node, declared)
            if meta.publish.enabled:
                _refuse_model(manifest, node)
                marts.append(_mart(node, meta, canonical_type))
    for field in ("name", "target"):
        seen: set[str] = set()
        for mart in marts:
            value = mart.name if field == "name" else mart.target.dotted
            if value in seen:
                raise DponeError("DPONE_CONTRACT_INVALID", f"Two marts have the {field} {value}.", field=field)
            seen.add(value)
    return tuple(sorted(marts, key=lambda mart: mart.name))


def compile_workflows(
    manifest: Manifest,
    *,
    canonical_type: Callable[[str], str],
    observe: Callable[[MartSpec, str], CatalogObservation] | None,
    postgresql_major: int = 18,
    only: str | None = None,
) -> dict[str, CompiledWorkflow]:
    """Return every workflow with its static proofs.

    Args:
        manifest: dbt's manifest as JSON data, models compiled without a scope.
        canonical_type: maps the adapter's type names to the canonical ones.
        observe: asks the SQL engine what a mart's compiled query reads; None where no engine is at hand, and
            the plans then are UNVERIFIED: good to look at, not to execute.
        postgresql_major: of the stand-in.
        only: compile this workflow and leave the others out.

    Raises:
        DponeError: as ``read_marts``.
    """
    by_workflow: dict[str, list[MartSpec]] = {}
    for mart in read_marts(manifest, canonical_type):
        if only in (None, mart.workflow):
            by_workflow.setdefault(mart.workflow, []).append(mart)
    lifecycle = _lifecycle(manifest, postgresql_major)
    workflows = {}
    for name, marts in sorted(by_workflow.items()):
        plans = []
        for mart in marts:
            compiled = manifest["nodes"][mart.model_unique_id].get("compiled_code") or ""
            observation = observe(mart, compiled) if observe and compiled else None
            definition, reads = _proofs(manifest, mart, compiled, observation)
            plans.append(StaticPlan(mart=mart, definition=definition, reads=reads, lifecycle=lifecycle))
        selection = select(manifest, [mart.model_unique_id for mart in marts])
        workflows[name] = CompiledWorkflow(name=name, plans=tuple(plans), closure=_closure(selection))
    return workflows


def select(manifest: Manifest, models: Sequence[str]) -> Selection:
    """Return the exact selection of models and their own tests: no ancestors, nothing by chance.

    Raises:
        DponeError: DPONE_CLOSURE_UNPROVEN when a selector would select more than its node.
    """
    chosen = set(models)
    tests = []
    for unique_id, node in manifest["nodes"].items():
        if node["resource_type"] != "test":
            continue
        read = {n for n in node["depends_on"]["nodes"] if not n.startswith("source.")}
        if read and read <= chosen:
            _refuse_test(manifest, node)
            tests.append(unique_id)
    selected = [*models, *sorted(tests)]
    everything = {
        unique_id: tuple(node["fqn"])
        for kind in ("nodes", "sources", "exposures", "metrics", "semantic_models")
        for unique_id, node in manifest.get(kind, {}).items()
    }
    for unique_id in selected:
        fqn = everything[unique_id]
        if not all(_FQN_PART.fullmatch(part) for part in fqn):
            raise DponeError("DPONE_CLOSURE_UNPROVEN", f"The path of {unique_id} has a name with other signs.")
        # dbt selects every node whose path starts with the selector's.
        for other, path in everything.items():
            if other != unique_id and path[: len(fqn)] == fqn:
                raise DponeError("DPONE_CLOSURE_UNPROVEN", f"The selector of {unique_id} also selects {other}.")
    bounded = {
        unique_id
        for unique_id in models
        if {macro.rsplit(".", 1)[-1] for macro in manifest["nodes"][unique_id]["depends_on"]["macros"]}
        >= set(SCOPE_MACROS)
    }
    return Selection(
        selectors=tuple("fqn:" + ".".join(everything[unique_id]) for unique_id in selected),
        models=tuple(models),
        tests=tuple(sorted(tests)),
        bounded=frozenset(bounded),
    )


# -------------------------------------------------------------------------------------------- refusals


def _refuse_project(manifest: Manifest) -> None:
    """Refuse what acts beside the models: hooks of the project, and macros that could replace dbt's own."""
    project = manifest["metadata"]["project_name"]
    for unique_id, node in manifest["nodes"].items():
        if node["resource_type"] not in ("model", "test"):
            _unproven(unique_id, f"is a {node['resource_type']}, which is not admitted")
    for unique_id, macro in manifest["macros"].items():
        package = macro["package_name"]
        if package == project:
            if macro["name"] not in PROJECT_MACROS:
                _unproven(unique_id, "is a macro of the project; only the platform's are admitted")
        elif package != PLATFORM_PACKAGE and package not in _ADAPTER_PACKAGES:
            _unproven(unique_id, "is a macro of a package that is not admitted")


def _refuse_model(manifest: Manifest, node: Mapping[str, Any]) -> None:
    name, config = node["name"], node["config"]
    if node.get("language") != "sql" or node.get("version") is not None:
        _unproven(name, "is not a plain SQL model without versions")
    if not (config.get("contract") or {}).get("enforced"):
        _unproven(name, "has no enforced contract")
    for key, required in _CONFIG.items():
        if (key in config and config[key] != required) or (key not in config and required not in ({}, [], "apply")):
            _unproven(name, f"has the config {key} in another form than the admitted one")
    for key, value in config.items():
        if key not in _CONFIG and key not in _CONFIG_FREE and value not in (None, {}, [], False):
            _unproven(name, f"has the config {key}, which is not admitted")
    _refuse_template(name, node["raw_code"])
    for unique_id in node["depends_on"]["nodes"]:
        read = manifest["nodes"].get(unique_id)
        if read is not None and (read["resource_type"] != "model" or read["config"]["materialized"] == "ephemeral"):
            _unproven(name, f"reads {unique_id}, which is ephemeral or no model")
    if node.get("extra_ctes"):
        _unproven(name, "has ephemeral models compiled into it")
    for macro in node["depends_on"]["macros"]:
        if macro.rsplit(".", 1)[-1] not in SCOPE_MACROS:
            _unproven(name, f"uses {macro}")


def _refuse_test(manifest: Manifest, node: Mapping[str, Any]) -> None:
    name, config = node["name"], node["config"]
    if config.get("store_failures") or (config.get("store_failures_as") not in (None, "ephemeral")):
        _unproven(name, "stores its failures; tests only read")
    if config.get("sql_header"):
        _unproven(name, "has a sql_header")
    if node.get("test_metadata") is None:
        _refuse_template(name, node["raw_code"])
    for macro in node["depends_on"]["macros"]:
        package, short = macro.split(".")[1], macro.rsplit(".", 1)[-1]
        if package not in _ADAPTER_PACKAGES and short not in PROJECT_MACROS:
            _unproven(name, f"uses {macro}")


def _refuse_template(name: str, raw_code: str) -> None:
    """Admit text and calls of the five known names with constants; refuse every other construct by name.

    So neither ``this`` nor ``is_incremental``, ``adapter``, ``run_query``, ``graph``, ``env_var``, ``var``,
    ``statement`` nor any branch can be in it: what is compiled once is what runs every day.
    """
    try:
        template = Environment(autoescape=True).parse(raw_code)
    except TemplateSyntaxError:
        _unproven(name, "has a template that does not parse")
    admitted = (nodes.Output, nodes.TemplateData, nodes.Const, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword)
    names = set()
    for node in template.find_all(nodes.Node):
        if isinstance(node, nodes.Call):
            if not isinstance(node.node, nodes.Name) or node.node.name not in _TEMPLATE_CALLS:
                called = node.node.name if isinstance(node.node, nodes.Name) else type(node.node).__name__
                _unproven(name, f"calls {called} in its template")
            names.add(id(node.node))
        elif isinstance(node, nodes.Name):
            if id(node) not in names:
                _unproven(name, f"uses {node.name} in its template")
        elif not isinstance(node, admitted):
            _unproven(name, f"has a template with {type(node).__name__}")


def _unproven(name: str, why: str) -> None:
    raise DponeError("DPONE_CLOSURE_UNPROVEN", f"{name} {why}.", node=name)


# ----------------------------------------------------------------------------------------------- marts


@contextmanager
def _of_model(name: str, where: str) -> Iterator[None]:
    """Put the model's name before every refusal of its declaration."""
    try:
        yield
    except DponeError as error:
        details = {**error.details, "model": name}
        raise DponeError(error.code, f"Model {name}, {where}: {error.sentence}", **details) from None


def _meta(node: Mapping[str, Any], declared: Any) -> DponeMeta:
    with _of_model(node["name"], "meta.dpone"):
        return DponeMeta.parse(declared)


def _mart(node: Mapping[str, Any], meta: DponeMeta, canonical_type: Callable[[str], str]) -> MartSpec:
    name, config = node["name"], node["config"]
    columns = []
    for column in node["columns"].values():
        if column["name"].lower().startswith(_RESERVED):
            raise DponeError(
                "DPONE_CONTRACT_INVALID", f"Model {name}, column {column['name']}: the prefix is reserved."
            )
        if not column.get("data_type"):
            raise DponeError("DPONE_CONTRACT_INVALID", f"Model {name}, column {column['name']}: no data_type.")
        constraints = {constraint["type"] for constraint in column.get("constraints", [])}
        if constraints - {"not_null"}:
            raise DponeError(
                "DPONE_CONTRACT_INVALID", f"Model {name}, column {column['name']}: only not_null is admitted."
            )
        with _of_model(name, f"column {column['name']}"):
            columns.append(
                Column.parse(
                    {
                        "name": column["name"],
                        "type": canonical_type(column["data_type"]),
                        "nullable": "not_null" not in constraints,
                    }
                )
            )
    key = config.get("unique_key")
    declared = {
        "name": name,
        "model_unique_id": node["unique_id"],
        "workflow": meta.publish.workflow,
        "source": {"schema_name": node["schema"], "name": node["alias"]},
        "target": {"schema_name": meta.target.database, "name": meta.target.table},
        "event_time": config.get("event_time") or "",
        "utc_assured": list(meta.utc_assured),
        "key": [key] if isinstance(key, str) else key or [],
        "columns": [column.as_json() for column in columns],
        "partition_by": meta.target.partition_by,
        "start_date": meta.start_date.isoformat(),
        # As declared: a default that is spelled out is another declaration.
        "gates": [gate.model_dump(mode="json", exclude_unset=True) for gate in meta.gates],
    }
    with _of_model(name, "the declaration"):
        mart = MartSpec.parse(declared)
        admit_key(mart)
    if mart.event_time not in mart.utc_assured:
        raise DponeError(
            "DPONE_UTC_NOT_ASSURED", f"Nobody vouches that {name}.{mart.event_time} is UTC.", field=mart.event_time
        )
    return mart


# ---------------------------------------------------------------------------------------------- proofs


def _proofs(
    manifest: Manifest, mart: MartSpec, compiled: str, observation: CatalogObservation | None
) -> tuple[ModelDefinitionProof, ReadDependencyProof]:
    node = manifest["nodes"][mart.model_unique_id]
    declared = {
        f"{read['schema']}.{read.get('identifier') or read.get('alias')}": unique_id
        for unique_id in node["depends_on"]["nodes"]
        if (read := manifest["sources"].get(unique_id) or manifest["nodes"].get(unique_id))
    }
    status: Literal["PROVEN", "UNVERIFIED"] = "UNVERIFIED" if observation is None else "PROVEN"
    seen = observation or CatalogObservation(database=manifest["metadata"]["adapter_type"], reader_id=1, relations=())
    for relation in seen.relations:
        dotted = relation.relation.dotted
        if relation.relation == mart.source:
            _unproven(mart.name, "reads its own target")
        if dotted not in declared:
            _unproven(mart.name, f"reads {dotted} without ref() or source()")
        if relation.kind != "BASE_TABLE":
            _unproven(mart.name, f"reads {dotted}, which is {relation.kind}; only plain base tables are admitted")
    if len(seen.relations) > _READ_LIMITS["max_nodes"]:
        _unproven(mart.name, "reads more relations than the policy allows")
    compiled_sha256 = sha256_of({"compiled_sql": compiled})
    relations = [
        {"relation": r.relation.dotted, "kind": r.kind, "definition": r.definition_sha256} for r in seen.relations
    ]
    observed = sha256_of({"schema": "dpone.catalog-observation.v1", "database": seen.database, "relations": relations})
    definition = ModelDefinitionProof.seal(
        model_unique_id=mart.model_unique_id,
        manifest_sha256=manifest["metadata"]["project_sha256"],
        raw_code_sha256=sha256_of({"raw_code": node["raw_code"]}),
        compiled_sql_sha256=compiled_sha256,
        macro_closure_sha256=_macro_closure(manifest),
        toolchain_sha256=sha256_of({"schema": "dpone.toolchain.v1", **_tools(manifest)}),
        catalog_observation_digest=observed,
        parser_runtime_policy_digest=_PARSER,
        resolved_module_dependency_digest=sha256_of({"schema": "dpone.module-dependencies.v1", "modules": []}),
        resolved_relation_dependency_digest=sha256_of(
            {"schema": "dpone.relation-dependencies.v1", "declared": sorted(declared), "observed": relations}
        ),
        target_independence_policy_digest=_TARGET_INDEPENDENCE,
        status=status,
    )
    reads = ReadDependencyProof.seal(
        model_unique_id=mart.model_unique_id,
        database_name=seen.database,
        compiled_sql_sha256=compiled_sha256,
        catalog_snapshot_sha256=observed,
        normalized_definitions_sha256=sha256_of(
            {"schema": "dpone.normalized-definitions.v1", "definitions": relations}
        ),
        policy_sha256=_READS,
        base_relation_object_ids=sorted(r.object_id for r in seen.relations),
        dependency_edges=[
            {"from_object_id": seen.reader_id, "to_object_id": r.object_id, "dependency_kind": "BASE_TABLE"}
            for r in sorted(seen.relations, key=lambda r: r.object_id)
        ],
        **_READ_LIMITS,
        status=status,
    )
    return definition, reads


def _closure(selection: Selection) -> MutationClosure:
    return MutationClosure.seal(
        selectors=sorted(selection.selectors),
        indirect_selection="empty",
        selected_node_ids=sorted([*selection.models, *selection.tests]),
        selected_mutating_node_ids=sorted(selection.models),
        selected_read_only_node_ids=sorted(selection.tests),
        unclassified_mutating_node_ids=[],
        status="PROVEN",
    )


def _lifecycle(manifest: Manifest, postgresql_major: int) -> StandInLifecyclePolicy:
    tools = _tools(manifest)
    return StandInLifecyclePolicy.seal(
        dbt_core_version=tools["dbt-core"],
        dbt_postgres_version=tools["dbt-postgres"],
        psycopg_version=tools["psycopg2-binary"],
        postgresql_major=postgresql_major,
        incremental_strategy=STRATEGY,
        materialization="incremental",
        on_schema_change="fail",
        contract_enforced=True,
        existing_table_required=True,
        full_refresh_allowed=False,
        hooks_allowed=False,
        schema_mutation_allowed=False,
        macro_closure_sha256=_macro_closure(manifest),
    )


def _tools(manifest: Manifest) -> dict[str, str]:
    return {name: str(value) for name, value in manifest["metadata"].items() if name.startswith(("dbt-", "psycopg"))}


def _macro_closure(manifest: Manifest) -> str:
    """Digest every macro that the project can see: more than the closure, so nothing of it is missed."""
    return sha256_of(
        {
            "schema": "dpone.macro-closure.v1",
            "macros": {unique_id: macro["macro_sql"] for unique_id, macro in manifest["macros"].items()},
        }
    )
