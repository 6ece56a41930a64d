"""What is proven of a model before any run: definition, reads, mutations, tools; and what is vouched for."""

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from dpone_dagster.contracts.fields import (
    Digest,
    Instant,
    Midnight,
    Positive,
    ProofStatus,
    Text,
    Uuid,
    require_exactly_when,
    require_sorted_set,
)
from dpone_dagster.contracts.model import ClosedModel, Document


class ModelDefinitionProof(Document):
    """A model's SQL, macros and resolved dependencies, as digests; it reads nothing of its own target."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-model-definition-proof.v1"
    DIGEST: ClassVar[str] = "model_definition_proof_sha256"

    model_unique_id: Text
    manifest_sha256: Digest
    raw_code_sha256: Digest
    compiled_sql_sha256: Digest
    macro_closure_sha256: Digest
    toolchain_sha256: Digest
    catalog_observation_digest: Digest
    parser_runtime_policy_digest: Digest
    resolved_module_dependency_digest: Digest
    resolved_relation_dependency_digest: Digest
    target_independence_policy_digest: Digest
    status: ProofStatus
    model_definition_proof_sha256: Digest


class MutationClosure(Document):
    """Everything that one dbt invocation selects, and which part of it may mutate."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-mutation-closure.v1"
    DIGEST: ClassVar[str] = "mutation_closure_sha256"

    selectors: tuple[Text, ...]
    indirect_selection: Literal["empty"]
    selected_node_ids: tuple[Text, ...]
    selected_mutating_node_ids: tuple[Text, ...]
    selected_read_only_node_ids: tuple[Text, ...]
    unclassified_mutating_node_ids: tuple[Text, ...]
    status: ProofStatus
    mutation_closure_sha256: Digest

    @model_validator(mode="after")
    def _is_closed(self) -> Self:
        parts = (
            self.selected_mutating_node_ids,
            self.selected_read_only_node_ids,
            self.unclassified_mutating_node_ids,
        )
        for field in (
            "selectors",
            "selected_node_ids",
            "selected_mutating_node_ids",
            "selected_read_only_node_ids",
            "unclassified_mutating_node_ids",
        ):
            require_sorted_set(field, getattr(self, field))
        if sorted(node for part in parts for node in part) != list(self.selected_node_ids):
            raise ValueError("selected_node_ids should hold each classified node exactly once")
        if any("+" in selector for selector in self.selectors):
            raise ValueError("selectors should be exact, without graph operators")
        if self.status == "PROVEN" and (self.unclassified_mutating_node_ids or not self.selected_mutating_node_ids):
            raise ValueError("status PROVEN needs a mutating node and no unclassified one")
        return self


class DependencyEdge(ClosedModel):
    """One resolved read: object ids of the reading and of the read relation."""

    from_object_id: Positive
    to_object_id: Positive
    dependency_kind: Literal["BASE_TABLE", "SCHEMABOUND_VIEW", "INLINE_TVF"]


class ReadDependencyProof(Document):
    """What a model reads, resolved by object identity down to base tables, within platform limits."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-read-dependency-proof.v1"
    DIGEST: ClassVar[str] = "read_dependency_proof_sha256"

    model_unique_id: Text
    database_name: Text
    compiled_sql_sha256: Digest
    catalog_snapshot_sha256: Digest
    normalized_definitions_sha256: Digest
    policy_sha256: Digest
    base_relation_object_ids: tuple[Positive, ...]
    dependency_edges: tuple[DependencyEdge, ...]
    max_depth: Positive
    max_nodes: Positive
    max_edges: Positive
    max_definition_bytes: Positive
    status: ProofStatus
    read_dependency_proof_sha256: Digest

    @model_validator(mode="after")
    def _stays_in_its_budget(self) -> Self:
        require_sorted_set("base_relation_object_ids", self.base_relation_object_ids)
        base = {e.to_object_id for e in self.dependency_edges if e.dependency_kind == "BASE_TABLE"}
        if base != set(self.base_relation_object_ids):
            raise ValueError("base_relation_object_ids should be the base tables of dependency_edges")
        nodes = {n for e in self.dependency_edges for n in (e.from_object_id, e.to_object_id)}
        if len(self.dependency_edges) > self.max_edges or len(nodes) > self.max_nodes:
            raise ValueError("dependency_edges pass max_edges or max_nodes")
        return self


class SqlServerLifecyclePolicy(Document):
    """The frozen tuple of tools and the one branch of the adapter's lifecycle that may run on SQL Server."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-sqlserver-lifecycle-policy.v1"
    DIGEST: ClassVar[str] = "sqlserver_lifecycle_policy_sha256"

    dbt_core_version: Text
    dbt_sqlserver_version: Text
    python_version: Text
    pyodbc_version: Text
    odbc_driver: Text
    sqlserver_version: Text
    compatibility_level: Positive
    incremental_strategy: Literal["dpone_scope_merge"]
    materialization: Literal["incremental"]
    on_schema_change: Literal["fail"]
    contract_enforced: Literal[True]
    existing_table_required: Literal[True]
    full_refresh_allowed: Literal[False]
    hooks_allowed: Literal[False]
    schema_mutation_allowed: Literal[False]
    adapter_policy_digest: Digest
    dispatch_closure_digest: Digest
    driver_digest: Digest
    invocation_policy_digest: Digest
    macro_closure_sha256: Digest
    materialization_closure_digest: Digest
    package_artifacts_digest: Digest
    profile_policy_digest: Digest
    project_policy_digest: Digest
    runtime_image_digest: Digest
    sqlserver_lifecycle_policy_sha256: Digest


class StandInLifecyclePolicy(Document):
    """The same for PostgreSQL standing in for SQL Server; it certifies nothing about SQL Server."""

    SCHEMA: ClassVar[str] = "dpone.postgres-stand-in-lifecycle-policy.v1"
    DIGEST: ClassVar[str] = "stand_in_lifecycle_policy_sha256"

    dbt_core_version: Text
    dbt_postgres_version: Text
    psycopg_version: Text
    postgresql_major: Positive
    incremental_strategy: Literal["dpone_scope_merge"]
    materialization: Literal["incremental"]
    on_schema_change: Literal["fail"]
    contract_enforced: Literal[True]
    existing_table_required: Literal[True]
    full_refresh_allowed: Literal[False]
    hooks_allowed: Literal[False]
    schema_mutation_allowed: Literal[False]
    macro_closure_sha256: Digest
    stand_in_lifecycle_policy_sha256: Digest


class BaselineAdoptionReceipt(Document):
    """The pair of tables that a mart starts from, observed on both engines."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-baseline-adoption-receipt.v1"
    DIGEST: ClassVar[str] = "baseline_adoption_receipt_sha256"

    model_unique_id: Text
    release_id: Digest
    deployment_id: Digest
    adopted_at: Instant
    baseline_kind: Literal["adopted_complete_relation_conformant"]
    coverage_start: Midnight
    coverage_end: Midnight
    certified_codec_mapping_sha256: Digest
    source_relation_id: Text
    source_generation: Positive
    source_assurance_sha256: Digest
    source_coverage_sha256: Digest
    source_key_sha256: Digest
    source_physical_sha256: Digest
    source_schema_sha256: Digest
    source_snapshot_sha256: Digest
    mssql_relation_id: Text
    mssql_connection_authority_id: Text
    mssql_target_authority_id: Text
    mssql_generation: Positive
    mssql_assurance_sha256: Digest
    mssql_coverage_sha256: Digest
    mssql_key_sha256: Digest
    mssql_physical_sha256: Digest
    mssql_schema_sha256: Digest
    clickhouse_relation_id: Text
    clickhouse_cluster_authority_id: Text
    clickhouse_target_authority_id: Text
    clickhouse_target_uuid: Uuid
    clickhouse_generation: Positive
    clickhouse_assurance_sha256: Digest
    clickhouse_coverage_sha256: Digest
    clickhouse_key_sha256: Digest
    clickhouse_physical_sha256: Digest
    clickhouse_schema_sha256: Digest
    ddl_assurance_sha256: Digest
    utc_assurance_sha256: Digest
    writer_assurance_sha256: Digest
    historical_clickhouse_internal_multiset_conformance: Literal["PROVEN"]
    historical_clickhouse_internal_multiset_evidence_sha256: Digest
    historical_cross_engine_payload_value_equivalence: Literal["NOT_CLAIMED"]
    status: Literal["COMPLETE"]
    baseline_adoption_receipt_sha256: Digest

    @model_validator(mode="after")
    def _covers_a_range(self) -> Self:
        # Equal ends are an empty pair, as `dpone baseline create` makes it.
        if self.coverage_start > self.coverage_end:
            raise ValueError("coverage_end should not lie before coverage_start")
        return self


class AssuranceSubject(ClosedModel):
    """What a runtime assurance is about: one target, or one column of it."""

    assurance_kind: Literal["ddl_freeze", "utc_semantics", "writer_exclusivity"]
    subject_type: Literal["target", "column"]
    column_name: Text | None = None
    environment: Text
    release_id: Digest
    deployment_id: Digest
    database: Text
    mssql_control_database: Text
    mssql_control_schema: Text
    mssql_image_schema: Text
    mssql_target_authority_id: Text
    model_unique_id: Text
    model_definition_proof_sha256: Digest
    effective_key_template_sha256: Digest
    writable_schema_sha256: Digest
    scope_image_namespace_policy_sha256: Digest
    sqlserver_lifecycle_policy_sha256: Digest
    route_certification_receipt_sha256: Digest

    @model_validator(mode="after")
    def _kind_fits_the_subject(self) -> Self:
        of_a_column = self.assurance_kind == "utc_semantics"
        if of_a_column != (self.subject_type == "column"):
            raise ValueError("subject_type should be column for utc_semantics and target otherwise")
        require_exactly_when(of_a_column, "utc_semantics", column_name=self.column_name)
        return self


class RuntimeAssuranceReceipt(Document):
    """Somebody with authority vouches, for a while: DDL is frozen, writers are known, a column is in UTC."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-runtime-assurance-receipt.v1"
    DIGEST: ClassVar[str] = "runtime_assurance_receipt_sha256"

    subject: AssuranceSubject
    effective_from: Instant
    expires_at: Instant
    acl_policy_version: Text
    producer_version: Text
    transformation_version: Text
    evidence_sha256: Digest
    runtime_assurance_policy_sha256: Digest
    approver_authority: Text
    approver_attestation_sha256: Digest
    approver_signature_sha256: Digest
    ddl_epoch: Positive | None = None
    engine_acl_proof_sha256: Digest | None = None
    engine_acl_proof_status: Literal["PASS"] | None = None
    external_job_inventory_sha256: Digest | None = None
    external_job_inventory_status: Literal["PASS"] | None = None
    organizational_control_sha256: Digest | None = None
    organizational_control_status: Literal["CERTIFIED"] | None = None
    platform_allowlist_sha256: Digest | None = None
    platform_allowlist_status: Literal["PASS"] | None = None
    status: Literal["CERTIFIED"]
    runtime_assurance_receipt_sha256: Digest

    @model_validator(mode="after")
    def _fields_belong_to_the_kind(self) -> Self:
        kind = self.subject.assurance_kind
        require_exactly_when(kind == "ddl_freeze", "ddl_freeze", ddl_epoch=self.ddl_epoch)
        require_exactly_when(
            kind == "writer_exclusivity",
            "writer_exclusivity",
            engine_acl_proof_sha256=self.engine_acl_proof_sha256,
            engine_acl_proof_status=self.engine_acl_proof_status,
            external_job_inventory_sha256=self.external_job_inventory_sha256,
            external_job_inventory_status=self.external_job_inventory_status,
            organizational_control_sha256=self.organizational_control_sha256,
            organizational_control_status=self.organizational_control_status,
            platform_allowlist_sha256=self.platform_allowlist_sha256,
            platform_allowlist_status=self.platform_allowlist_status,
        )
        if self.effective_from >= self.expires_at:
            raise ValueError("expires_at should lie after effective_from")
        return self
