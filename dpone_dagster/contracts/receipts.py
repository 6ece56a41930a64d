"""What has happened: one receipt a boundary, and the summaries of a workflow's end."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.contracts.fields import (
    Count,
    Digest,
    Instant,
    InstantMicros,
    MssqlOutcome,
    Positive,
    Slug,
    Text,
    Uuid,
    require_exactly_when,
    require_unique,
)
from dpone_dagster.contracts.model import ClosedModel, Document

# ------------------------------------------------------------------------------------------- the SQL day


class ModelBuildReceipt(Document):
    """The scope mutation as it committed: images, their digests, and how many rows it touched."""

    SCHEMA: ClassVar[str] = "dpone.model-build-receipt.v1"
    DIGEST: ClassVar[str] = "model_build_receipt_sha256"

    operation_id: Digest
    operation_plan_sha256: Digest
    workflow_execution_id: Text
    fencing_epoch: Positive
    worker_id: Uuid
    before_image_relation_id: Text
    before_image_row_count: Count
    before_image_sha256: Digest
    after_image_relation_id: Text
    after_image_row_count: Count
    after_image_sha256: Digest
    source_rows: Count
    updated_rows: Count
    inserted_rows: Count
    model_build_receipt_sha256: Digest

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        # Nothing is deleted, and a row of the source is updated, inserted or already there.
        if self.after_image_row_count != self.before_image_row_count + self.inserted_rows:
            raise ValueError("after_image_row_count should be before_image_row_count plus inserted_rows")
        if self.updated_rows + self.inserted_rows > self.source_rows:
            raise ValueError("source_rows should cover updated_rows and inserted_rows")
        return self


class SealAuthorizationReceipt(Document):
    """Leave to export one committed after image, and the exact form to export it in."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-seal-authorization-receipt.v1"
    DIGEST: ClassVar[str] = "seal_authorization_receipt_sha256"

    operation_id: Digest
    operation_plan_sha256: Digest
    workflow_id: Text
    workflow_plan_sha256: Digest
    workflow_execution_id: Text
    workflow_execution_binding_sha256: Digest
    attempt_binding_sha256: Digest
    fencing_epoch: Positive
    model_unique_id: Text
    journal_state: Literal["PREPARING"]
    journal_version: Positive
    mssql_outcome: Literal["COMMITTED_WITH_IMAGES"]
    model_build_receipt_sha256: Digest
    before_image_relation_id: Text
    before_image_row_count: Count
    before_image_sha256: Digest
    after_image_relation_id: Text
    after_image_row_count: Count
    after_image_sha256: Digest
    event_time_source_type: Literal["datetime2(6)"]
    effective_key_mapping_sha256: Digest
    effective_key_template_sha256: Digest
    ordered_writable_schema_sha256: Digest
    parquet_schema_mapping_sha256: Digest
    clickhouse_input_mapping_sha256: Digest
    codec_mapping_certification_sha256: Digest
    serializer_sha256: Digest
    seal_policy_sha256: Digest
    artifact_authority_sha256: Digest
    baseline_adoption_receipt_sha256: Digest
    route_certification_receipt_sha256: Digest
    ddl_freeze_assurance_receipt_sha256: Digest
    utc_semantics_assurance_receipt_sha256: Digest
    writer_exclusivity_assurance_receipt_sha256: Digest
    issuer_authority: Text
    issuer_attestation_sha256: Digest
    issuer_signature_sha256: Digest
    created_at: Instant
    seal_authorization_receipt_sha256: Digest

    @model_validator(mode="after")
    def _deletes_nothing(self) -> Self:
        if self.after_image_row_count < self.before_image_row_count:
            raise ValueError("after_image_row_count should not be less than before_image_row_count")
        return self


# ------------------------------------------------------------------------------------------ the artifact


def _stays_below(key: str) -> str:
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise ValueError("an object key should be a plain relative path")
    return key


# The reader opens objects by these, so none may lead out of the store.
ObjectKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9._=/-]{1,512}$"), AfterValidator(_stays_below)]


class SealedChunkEntry(ClosedModel):
    """One Parquet object of the artifact."""

    ordinal: Positive
    object_key: ObjectKey
    provider_version: Text
    chunk_sha256: Digest
    byte_count: Positive
    row_count: Positive


class SealedArtifactManifest(Document):
    """The after image as objects, written last; no chunks means that the scope is empty."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-sealed-artifact-manifest.v1"
    DIGEST: ClassVar[str] = "artifact_manifest_sha256"

    artifact_format: Literal["dpone_parquet_v1"]
    publication_order: Literal["MANIFEST_LAST"]
    provider: Text
    artifact_prefix: ObjectKey
    operation_id: Digest
    operation_plan_sha256: Digest
    workflow_execution_binding_sha256: Digest
    attempt_binding_sha256: Digest
    model_unique_id: Text
    model_build_receipt_sha256: Digest
    seal_authorization_receipt_sha256: Digest
    route_certification_receipt_sha256: Digest
    effective_key_mapping_sha256: Digest
    effective_key_template_sha256: Digest
    ordered_writable_schema_sha256: Digest
    parquet_schema_mapping_sha256: Digest
    clickhouse_input_mapping_sha256: Digest
    codec_mapping_certification_sha256: Digest
    serializer_sha256: Digest
    encryption_policy_sha256: Digest
    retention_policy_sha256: Digest
    chunks: tuple[SealedChunkEntry, ...]
    chunk_count: Count
    total_bytes: Count
    total_rows: Count
    artifact_manifest_sha256: Digest

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if [c.ordinal for c in self.chunks] != list(range(1, len(self.chunks) + 1)):
            raise ValueError("chunks should have the ordinals 1 to n in order")
        require_unique("chunks", [c.object_key for c in self.chunks])
        for field, total in (
            ("chunk_count", len(self.chunks)),
            ("total_bytes", sum(c.byte_count for c in self.chunks)),
            ("total_rows", sum(c.row_count for c in self.chunks)),
        ):
            if getattr(self, field) != total:
                raise ValueError(f"{field} should be that of the chunks")
        return self


# ----------------------------------------------------------------------------------- gates and publication


class GateResult(ClosedModel):
    """One gate's verdict and the numbers behind it; a number that could not be had is null, never zero."""

    gate_id: Slug
    type: Slug
    severity: Literal["error", "warning"]
    status: Literal["passed", "failed", "skipped", "warned"]
    metrics: dict[str, int | str | None]
    message: str

    @property
    def blocks(self) -> bool:
        """Whether it keeps the day from being published; an error gate that was skipped proves nothing."""
        return self.severity == "error" and self.status != "passed"


def require_verdict(passed: bool, results: Sequence[GateResult]) -> None:
    """Raise ValueError unless ``passed`` follows from the results."""
    require_unique("results", [r.gate_id for r in results])
    if any(r.status == "warned" and r.severity == "error" for r in results):
        raise ValueError("results should not warn where severity is error")
    # An error gate that was skipped proves nothing.
    if passed != all(r.status == "passed" for r in results if r.severity == "error"):
        raise ValueError("passed should be true exactly when every gate of severity error passed")


class GateReport(Document):
    """Every declared gate of one operation, in declared order."""

    SCHEMA: ClassVar[str] = "dpone.gate-report.v1"
    DIGEST: ClassVar[str] = "gate_report_sha256"

    operation_id: Digest
    passed: bool
    results: tuple[GateResult, ...]
    gate_report_sha256: Digest

    @model_validator(mode="after")
    def _verdict_follows(self) -> Self:
        require_verdict(self.passed, self.results)
        return self


class ClickHouseTerminalReceipt(Document):
    """The UUID map proved that the successor has the target's name."""

    SCHEMA: ClassVar[str] = "dpone.clickhouse-terminal-receipt.v1"
    DIGEST: ClassVar[str] = "clickhouse_terminal_receipt_sha256"

    operation_id: Digest
    fencing_epoch: Positive
    target: Text
    predecessor_uuid: Uuid
    successor_uuid: Uuid
    physical_design_sha256: Digest
    proof_sha256: Digest
    after_image_sha256: Digest
    clickhouse_terminal_receipt_sha256: Digest

    @model_validator(mode="after")
    def _swaps_two_tables(self) -> Self:
        if self.predecessor_uuid == self.successor_uuid:
            raise ValueError("successor_uuid should not be predecessor_uuid")
        return self


class PublicationTerminalReceipt(Document):
    """One operation is COMPLETE: heads, checkpoint and journal advanced together."""

    SCHEMA: ClassVar[str] = "dpone.publication-terminal-receipt.v1"
    DIGEST: ClassVar[str] = "terminal_receipt_sha256"

    operation_id: Digest
    state: Literal["COMPLETE"]
    scope_revision: Positive
    target_generation: Positive
    rows: Count
    after_image_sha256: Digest
    artifact_manifest_sha256: Digest
    target_mutation_outcome: Literal["EXCHANGED", "NOT_REQUIRED_EMPTY_SCOPE"]
    clickhouse_terminal_receipt_sha256: Digest | None = None
    terminal_receipt_sha256: Digest

    @model_validator(mode="after")
    def _outcome_has_its_evidence(self) -> Self:
        require_exactly_when(
            self.target_mutation_outcome == "EXCHANGED",
            "EXCHANGED",
            clickhouse_terminal_receipt_sha256=self.clickhouse_terminal_receipt_sha256,
        )
        if self.target_mutation_outcome == "NOT_REQUIRED_EMPTY_SCOPE" and self.rows:
            raise ValueError("rows should be 0 for NOT_REQUIRED_EMPTY_SCOPE")
        return self


# ----------------------------------------------------------------------------------------- the workflow


class WorkflowPublication(ClosedModel):
    """One COMPLETE operation inside a durable summary; no ClickHouse receipt where the scope was empty."""

    operation_id: Digest
    operation_plan_sha256: Digest
    workflow_execution_binding_sha256: Digest
    attempt_binding_sha256: Digest
    scope_revision: Positive
    target_generation: Positive
    artifact_manifest_sha256: Digest
    clickhouse_terminal_receipt_sha256: Digest | None = None
    terminal_receipt_sha256: Digest
    status: Literal["COMPLETE"]


class DurableWorkflowSummary(Document):
    """Every operation of the workflow is COMPLETE; only this lets the assets succeed."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-durable-workflow-summary.v1"
    DIGEST: ClassVar[str] = "terminal_summary_sha256"

    workflow_execution_id: Text
    workflow_execution_binding_sha256: Digest
    workflow_plan_sha256: Digest
    expected_operation_ids: tuple[Digest, ...]
    publications: tuple[WorkflowPublication, ...]
    status: Literal["FULLY_COMPLETE"]
    terminal_summary_sha256: Digest

    @model_validator(mode="after")
    def _covers_the_workflow(self) -> Self:
        _covers("publications", self.expected_operation_ids, [p.operation_id for p in self.publications])
        binding = self.workflow_execution_binding_sha256
        if any(p.workflow_execution_binding_sha256 != binding for p in self.publications):
            raise ValueError("publications should have the summary's workflow_execution_binding_sha256")
        return self


class FailedModel(ClosedModel):
    """How a failed workflow left one model in SQL Server."""

    operation_id: Digest
    attempt_binding_sha256: Digest
    mssql_outcome: MssqlOutcome
    mssql_evidence_sha256: Digest


class FailedWorkflowSummary(Document):
    """The workflow ended before any ClickHouse commit; a replacement starts from this."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-failed-workflow-summary.v1"
    DIGEST: ClassVar[str] = "terminal_summary_sha256"

    workflow_id: Text
    workflow_plan_sha256: Digest
    workflow_execution_binding_sha256: Digest
    expected_operation_ids: tuple[Digest, ...]
    models: tuple[FailedModel, ...]
    status: Literal["FAILED_PRE_COMMIT"]
    terminal_summary_sha256: Digest

    @model_validator(mode="after")
    def _covers_the_workflow(self) -> Self:
        _covers("models", self.expected_operation_ids, [m.operation_id for m in self.models])
        return self


def _covers(field: str, expected: tuple[str, ...], found: list[str]) -> None:
    if not expected or list(expected) != found:
        raise ValueError(f"{field} should name expected_operation_ids in order")
    require_unique("expected_operation_ids", expected)


class AttemptContinuationReceipt(Document):
    """The next try of the same logical run may go on: the first attempt is gone and its day is unchanged."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-attempt-continuation-receipt.v1"
    DIGEST: ClassVar[str] = "continuation_receipt_sha256"
    DERIVED: ClassVar[tuple[str, ...]] = (
        "clickhouse_quiescence_observation_sha256",
        "engine_quiescence_receipt_sha256",
    )

    operation_id: Digest
    operation_plan_sha256: Digest
    workflow_execution_binding_sha256: Digest
    original_attempt_binding_sha256: Digest
    original_attempt_termination_receipt_sha256: Digest
    fencing_epoch: Positive
    guard_resource_id: Text
    task_id: Text
    try_number: Annotated[int, Field(ge=2)]
    pod_uid: Uuid
    build_receipt_sha256: Digest
    after_image_sha256: Digest
    mssql_active_session_count: Literal[0]
    mssql_guard_lock_status: Literal["EXCLUSIVE_ACQUIRED"]
    clickhouse_cluster_authority_id: Text
    clickhouse_query_id_prefix: Text
    clickhouse_quiescence_observation_sha256: Digest
    engine_quiescence_receipt_sha256: Digest
    status: Literal["VERIFIED"]
    verified_at: InstantMicros
    continuation_receipt_sha256: Digest

    @classmethod
    def derive(cls, body: dict[str, Any]) -> dict[str, str]:
        """Digest the two observations of quiet that the receipt's own fields spell out."""
        observed = {
            "observed_at": body["verified_at"],
            **{
                field: body[field]
                for field in (
                    "operation_id",
                    "original_attempt_binding_sha256",
                    "status",
                    "workflow_execution_binding_sha256",
                )
            },
        }
        clickhouse = sha256_of(
            {
                "schema": "dpone.semantic-refresh-clickhouse-attempt-quiescence.v1",
                **observed,
                "clickhouse_cluster_authority_id": body["clickhouse_cluster_authority_id"],
                "query_id_prefix": body["clickhouse_query_id_prefix"],
                "active_query_ids": [],
            }
        )
        engines = sha256_of(
            {
                "schema": "dpone.semantic-refresh-attempt-engine-quiescence.v1",
                **observed,
                "clickhouse_quiescence_observation_sha256": clickhouse,
                **{
                    field: body[field]
                    for field in (
                        "mssql_active_session_count",
                        "mssql_guard_lock_status",
                        "original_attempt_termination_receipt_sha256",
                    )
                },
            }
        )
        return {
            "clickhouse_quiescence_observation_sha256": clickhouse,
            "engine_quiescence_receipt_sha256": engines,
        }
