"""What is to be done: operation, workflow and replacement plans, and their binding to a run and an attempt.

Identity points one way: proofs -> operation plan -> workflow plan -> replacement plan -> execution binding
-> attempt binding. Nothing of a run (ids, tries, fences, times, counts, outcomes) enters an operation's
identity.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.contracts.fields import (
    Digest,
    Midnight,
    MssqlOutcome,
    Positive,
    Slug,
    Text,
    Uuid,
    WorkflowMode,
    require_exactly_when,
    require_one_day,
    require_unique,
)
from dpone_dagster.contracts.mart import Column, Identifier, admit_key_column
from dpone_dagster.contracts.model import ClosedModel, Document
from dpone_dagster.contracts.types import Mapping, column_type

REPLACEMENT = "failed_precommit_replacement"
REPLAY = "complete_scope_replay"


class EffectiveKeyColumn(ClosedModel):
    """One key column, its exact mapping to ClickHouse and, where that holds less, its inclusive domain."""

    name: Identifier
    source_type: Text
    target_type: Text
    mapping: Mapping
    nullable: Literal[False]
    domain_min: Text | None = None
    domain_max: Text | None = None
    utc_assurance_sha256: Digest | None = None

    @model_validator(mode="after")
    def _maps_injectively(self) -> Self:
        spec = column_type(self.source_type)
        if not spec.may_be_key:
            raise ValueError("source_type cannot be part of a key")
        if (self.mapping, self.target_type) != (spec.mapping, spec.clickhouse):
            raise ValueError("mapping and target_type should be those of source_type")
        if (self.domain_min, self.domain_max) != _domain(self.source_type):
            raise ValueError("domain_min and domain_max should be those of source_type")
        require_exactly_when(
            self.mapping == "datetime2_utc", "datetime2_utc", utc_assurance_sha256=self.utc_assurance_sha256
        )
        return self


def effective_key_column(column: Column, *, utc_assurance_sha256: str | None) -> EffectiveKeyColumn:
    """Describe one column as part of the effective key.

    Args:
        column: the mart's column.
        utc_assurance_sha256: digest of what vouches that datetime2 values are UTC; needed for those columns,
            left out of the others.

    Raises:
        DponeError: DPONE_KEY_NULLABLE, DPONE_KEY_TYPE, DPONE_TYPE_UNSUPPORTED; DPONE_CONTRACT_INVALID when a
            datetime2 column comes without its assurance.
    """
    admit_key_column(column)
    low, high = _domain(column.type)
    of_time = column.spec.mapping == "datetime2_utc"
    optionals = {
        "domain_min": low,
        "domain_max": high,
        "utc_assurance_sha256": utc_assurance_sha256 if of_time else None,
    }
    return EffectiveKeyColumn.parse(
        {
            "name": column.name,
            "source_type": column.type,
            "target_type": column.spec.clickhouse,
            "mapping": column.spec.mapping,
            "nullable": False,
            **{name: value for name, value in optionals.items() if value is not None},
        }
    )


def _domain(source_type: str) -> tuple[str, str] | tuple[None, None]:
    """Return the inclusive ends as documents write them: instants end in Z, dates do not."""
    spec = column_type(source_type)
    if spec.domain is None:
        return None, None
    suffix = "Z" if spec.mapping == "datetime2_utc" else ""
    return spec.domain[0] + suffix, spec.domain[1] + suffix


class OperationPlan(Document):
    """The publication of one scope of one mart at one revision; ``operation_id`` names it for good."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-operation-plan.v1"
    DIGEST: ClassVar[str] = "operation_plan_sha256"
    DERIVED: ClassVar[tuple[str, ...]] = (
        "effective_key_mapping_sha256",
        "effective_key_template_sha256",
        "operation_id",
    )

    archetype: Literal["scope_stable_event_fact"]
    operation_kind: WorkflowMode
    workflow_id: Text
    model_unique_id: Text
    environment: Text
    release_id: Digest
    deployment_id: Digest
    scope_family_id: Digest
    scope_start: Midnight
    scope_end: Midnight
    scope_revision: Positive
    scope_predecessor_operation_id: Digest | None = None
    target_predecessor_generation_id: Digest
    owner_generation: Positive
    replaces_failed_operation_id: Digest | None = None
    replacement_ordinal: Positive | None = None
    replacement_reason: Slug | None = None
    event_time_column: Identifier
    effective_key_columns: tuple[EffectiveKeyColumn, ...]
    effective_key_mapping_sha256: Digest
    effective_key_template_sha256: Digest
    missing_key_policy: Literal["ignore_missing"]
    mutation_order: tuple[Literal["UPDATE"], Literal["INSERT"]]
    model_definition_proof_sha256: Digest
    mutation_closure_sha256: Digest
    read_dependency_proof_sha256: Digest
    sqlserver_lifecycle_policy_sha256: Digest
    platform_policy_digest: Digest
    resource_policy_digest: Digest
    writer_assurance_digest: Digest
    operation_id: Digest
    operation_plan_sha256: Digest

    @classmethod
    def derive(cls, body: dict[str, Any]) -> dict[str, str]:
        """Digest the key (with and without its assurance), then everything but the plan digest itself."""
        columns = body["effective_key_columns"]
        # The template is known before anybody has vouched for a column.
        templates = [
            {
                **{k: v for k, v in c.items() if k != "utc_assurance_sha256"},
                "utc_assurance_required": "utc_assurance_sha256" in c,
            }
            for c in columns
        ]
        prefix = "dpone.semantic-refresh-effective-key"
        keys = {
            "effective_key_mapping_sha256": sha256_of({"schema": f"{prefix}-mapping.v1", "columns": columns}),
            "effective_key_template_sha256": sha256_of({"schema": f"{prefix}-template.v1", "columns": templates}),
        }
        return {**keys, "operation_id": sha256_of({**body, **keys})}

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        require_one_day(self.scope_start, self.scope_end)
        names = [c.name for c in self.effective_key_columns]
        require_unique("effective_key_columns", names)
        if not any(
            c.name == self.event_time_column and c.mapping == "datetime2_utc" for c in self.effective_key_columns
        ):
            raise ValueError("event_time_column should be a datetime2(6) column of the effective key")
        require_exactly_when(
            self.operation_kind == REPLACEMENT,
            REPLACEMENT,
            replaces_failed_operation_id=self.replaces_failed_operation_id,
            replacement_ordinal=self.replacement_ordinal,
            replacement_reason=self.replacement_reason,
        )
        # Revision n + 1 of a scope follows the operation that published revision n.
        require_exactly_when(
            self.scope_revision > 1,
            "scope_revision 2 and later",
            scope_predecessor_operation_id=self.scope_predecessor_operation_id,
        )
        if self.operation_kind == REPLAY and self.scope_revision == 1:
            raise ValueError("scope_revision of a replay should be 2 or more")
        if self.operation_kind == "normal" and self.scope_revision > 1:
            raise ValueError("scope_revision of a normal operation should be 1")
        return self


class _Closure(ClosedModel):
    """The four id lists of spec R, "Workflow modes and closure", in plan order."""

    workflow_mode: WorkflowMode
    selected_mutating_node_ids: tuple[Text, ...]
    model_operation_plan_ids: tuple[Text, ...]
    expected_model_outcome_ids: tuple[Text, ...]
    replacement_action_ids: tuple[Text, ...]

    @model_validator(mode="after")
    def _is_closed(self) -> Self:
        selected = self.selected_mutating_node_ids
        if not selected:
            raise ValueError("selected_mutating_node_ids should not be empty")
        require_unique("selected_mutating_node_ids", selected)
        for field in ("model_operation_plan_ids", "expected_model_outcome_ids"):
            if getattr(self, field) != selected:
                raise ValueError(f"{field} should equal selected_mutating_node_ids")
        if self.replacement_action_ids != (selected if self.workflow_mode == REPLACEMENT else ()):
            raise ValueError(
                "replacement_action_ids should equal selected_mutating_node_ids in a replacement and be empty otherwise"
            )
        return self


class OperationPlanRef(ClosedModel):
    """One model's operation plan inside a workflow plan."""

    model_unique_id: Text
    operation_id: Digest
    operation_plan_sha256: Digest


class WorkflowPlan(Document, _Closure):
    """The marts published together for one scope, in the order in which they are exchanged."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-workflow-plan.v1"
    DIGEST: ClassVar[str] = "workflow_plan_sha256"

    workflow_name: Text
    scope_start: Midnight
    scope_end: Midnight
    scope_revision: Positive
    mutation_closure_sha256: Digest
    operation_plan_refs: tuple[OperationPlanRef, ...]
    workflow_plan_sha256: Digest

    @model_validator(mode="after")
    def _refers_to_its_models(self) -> Self:
        require_one_day(self.scope_start, self.scope_end)
        if _ids(self.operation_plan_refs) != self.model_operation_plan_ids:
            raise ValueError("operation_plan_refs should name the models of model_operation_plan_ids in order")
        require_unique("operation_plan_refs", [ref.operation_id for ref in self.operation_plan_refs])
        if self.workflow_mode == REPLAY and self.scope_revision == 1:
            raise ValueError("scope_revision of a replay should be 2 or more")
        return self


def _ids(refs: Sequence[OperationPlanRef]) -> tuple[str, ...]:
    return tuple(ref.model_unique_id for ref in refs)


_ACTION_OF: dict[MssqlOutcome, str] = {
    "COMMITTED_WITH_IMAGES": "RESTORE_THEN_REBUILD",
    "ROLLED_BACK": "BUILD_FRESH",
    "NOT_INVOKED": "BUILD_FRESH",
    "COMMIT_UNKNOWN": "BLOCK",
}


class ReplacementAction(ClosedModel):
    """What a replacement does with one model, given how the failed workflow left it."""

    action_id: Text
    outcome: MssqlOutcome
    action: Literal["RESTORE_THEN_REBUILD", "BUILD_FRESH", "BLOCK"]

    @model_validator(mode="after")
    def _action_follows_the_outcome(self) -> Self:
        if self.action != _ACTION_OF[self.outcome]:
            raise ValueError(f"action should be {_ACTION_OF[self.outcome]} after {self.outcome}")
        return self


class WorkflowReplacementPlan(Document, _Closure):
    """The one successor of a failed workflow."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-workflow-replacement-plan.v1"
    DIGEST: ClassVar[str] = "workflow_replacement_plan_sha256"

    workflow_mode: Literal["failed_precommit_replacement"]
    workflow_plan_sha256: Digest
    recovery_plan_digest: Digest
    predecessor_workflow_execution_id: Text
    predecessor_workflow_execution_binding_sha256: Digest
    predecessor_workflow_summary_sha256: Digest
    replacement_actions: tuple[ReplacementAction, ...]
    workflow_replacement_plan_sha256: Digest

    @model_validator(mode="after")
    def _acts_on_each_model(self) -> Self:
        if tuple(a.action_id for a in self.replacement_actions) != self.replacement_action_ids:
            raise ValueError("replacement_actions should name replacement_action_ids in order")
        return self


class WorkflowExecutionBinding(Document, _Closure):
    """A workflow plan bound to one logical run."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-workflow-execution-binding.v1"
    DIGEST: ClassVar[str] = "workflow_execution_binding_sha256"

    workflow_execution_id: Text
    workflow_plan_sha256: Digest
    deployment_id: Digest
    binding_set_ref: Text
    connection_registry_ref: Text
    credential_runtime_ref: Text
    recovery_plan_digest: Digest | None = None
    workflow_replacement_plan_sha256: Digest | None = None
    workflow_execution_binding_sha256: Digest

    @model_validator(mode="after")
    def _cites_a_recovery_only_in_a_replacement(self) -> Self:
        require_exactly_when(
            self.workflow_mode == REPLACEMENT,
            REPLACEMENT,
            recovery_plan_digest=self.recovery_plan_digest,
            workflow_replacement_plan_sha256=self.workflow_replacement_plan_sha256,
        )
        return self


class AttemptBinding(Document):
    """One worker's try at an operation, under one fencing epoch."""

    SCHEMA: ClassVar[str] = "dpone.semantic-refresh-attempt-binding.v1"
    DIGEST: ClassVar[str] = "attempt_binding_sha256"

    operation_id: Digest
    operation_plan_sha256: Digest
    workflow_execution_id: Text
    workflow_execution_binding_sha256: Digest
    dag_run_id: Text
    task_id: Text
    try_number: Positive
    pod_uid: Uuid
    owner_id: Text
    fencing_epoch: Positive
    attempt_binding_sha256: Digest
