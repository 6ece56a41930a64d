"""From static proofs and the journal's heads to the operation, workflow and replacement plans of one day. Pure.

The mode of a mart's operation follows from the journal alone: ``normal`` for a day that was never published,
``failed_precommit_replacement`` after a failure before the ClickHouse commit, ``complete_scope_replay`` for a
day that is COMPLETE. Users never pick one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.contracts.documents import (
    AttemptBinding,
    EffectiveKeyColumn,
    MutationClosure,
    OperationPlan,
    WorkflowExecutionBinding,
    WorkflowPlan,
    WorkflowReplacementPlan,
    effective_key_column,
)
from dpone_dagster.contracts.mart import MartSpec, Scope
from dpone_dagster.contracts.model import Document
from dpone_dagster.contracts.policy import Policy
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.facts import Facts
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import OperationRecord, PlanBundle, PlannedOperation, Predecessors, RunIdentity
from dpone_dagster.planning.dbt_manifest import StaticPlan

NORMAL = "normal"
REPLAY = "complete_scope_replay"
REPLACEMENT = "failed_precommit_replacement"


@dataclass(frozen=True, kw_only=True)
class Workflow:
    """The marts published together, with their static proofs, in plan order.

    Attributes:
        environment: ``embedded`` for the stand-in.
        release_id, deployment_id: digests of what is installed and of where it is deployed.
    """

    name: str
    plans: tuple[StaticPlan, ...]
    closure: MutationClosure
    environment: str
    release_id: str
    deployment_id: str

    @property
    def marts(self) -> tuple[MartSpec, ...]:
        """The marts in plan order."""
        return tuple(plan.mart for plan in self.plans)

    @property
    def resources(self) -> tuple[str, ...]:
        """What a worker locks, sorted."""
        marts = [f"mart:{m.name}" for m in self.marts]
        targets = [f"target:{m.target.dotted}" for m in self.marts]
        return tuple(sorted([f"workflow:{self.name}", *marts, *targets]))

    def mart(self, name: str) -> MartSpec:
        """Return one mart of the workflow by name."""
        for mart in self.marts:
            if mart.name == name:
                return mart
        raise DponeError("DPONE_MART_UNKNOWN", f"Workflow {self.name} has no mart {name}.")


def generation_id(target: str, uuid: str) -> str:
    """Digest that stands for one ClickHouse generation in plans."""
    return sha256_of({"schema": "dpone.clickhouse-generation.v1", "target": target, "uuid": uuid})


def key_columns(mart: MartSpec) -> tuple[EffectiveKeyColumn, ...]:
    """Return the effective key with the assurance that its datetime2 columns are UTC.

    Raises:
        DponeError: DPONE_KEY_*, DPONE_UTC_NOT_ASSURED.
    """
    columns = []
    for column in mart.key_columns:
        assurance = None
        if column.spec.mapping == "datetime2_utc":
            if column.name not in mart.utc_assured:
                raise DponeError(
                    "DPONE_UTC_NOT_ASSURED",
                    f"Nobody vouches that {mart.name}.{column.name} is UTC.",
                    field=column.name,
                )
            assurance = sha256_of(
                {"schema": "dpone.declared-utc-assurance.v1", "mart": mart.name, "column": column.name}
            )
        columns.append(effective_key_column(column, utc_assurance_sha256=assurance))
    return tuple(columns)


def plan_workflow(
    workflow: Workflow,
    scope: Scope,
    found: Mapping[str, Predecessors],
    *,
    policy: Policy,
    identity: RunIdentity,
) -> PlanBundle:
    """Build every document of one day's workflow from what admission read under its locks.

    Raises:
        DponeError: DPONE_BASELINE_MISSING for a mart without one; DPONE_COMMIT_UNKNOWN for a day whose last
            operation is not settled.
    """
    # Two tries of one logical run may count alike (a step's retry, a run's re-execution); two workers never do.
    execution_id = f"{identity.logical_run_id}:{workflow.name}:{scope.key}:{identity.try_number}:{identity.worker_id}"
    plans = [_operation_plan(workflow, plan, scope, found[plan.mart.name], policy) for plan in workflow.plans]
    kinds = {p.operation_kind for p in plans}
    mode = REPLAY if REPLAY in kinds else REPLACEMENT if REPLACEMENT in kinds else NORMAL
    models = tuple(p.model_unique_id for p in plans)
    closure = {
        "workflow_mode": mode,
        "selected_mutating_node_ids": models,
        "model_operation_plan_ids": models,
        "expected_model_outcome_ids": models,
        "replacement_action_ids": models if mode == REPLACEMENT else (),
    }
    workflow_plan = WorkflowPlan.seal(
        **closure,
        workflow_name=workflow.name,
        scope_start=scope.start_text,
        scope_end=scope.end_text,
        scope_revision=max(p.scope_revision for p in plans),
        mutation_closure_sha256=workflow.closure.sha256,
        operation_plan_refs=[
            {
                "model_unique_id": p.model_unique_id,
                "operation_id": p.operation_id,
                "operation_plan_sha256": p.sha256,
            }
            for p in plans
        ],
    )
    replacement = _replacement_plan(workflow, workflow_plan, found, closure) if mode == REPLACEMENT else None
    binding = WorkflowExecutionBinding.seal(
        **closure,
        workflow_execution_id=execution_id,
        workflow_plan_sha256=workflow_plan.sha256,
        deployment_id=workflow.deployment_id,
        binding_set_ref=f"{workflow.environment}-bindings",
        connection_registry_ref=f"{workflow.environment}-connections",
        credential_runtime_ref=f"{workflow.environment}-credentials",
        recovery_plan_digest=replacement.recovery_plan_digest if replacement else None,
        workflow_replacement_plan_sha256=replacement.sha256 if replacement else None,
    )
    proofs = [d for plan in workflow.plans for d in plan.documents]
    documents: list[Document] = [workflow.closure, *proofs, *plans, workflow_plan, binding]
    if replacement:
        documents.append(replacement)
    return PlanBundle(
        workflow=workflow.name,
        scope=scope,
        workflow_plan_sha256=workflow_plan.sha256,
        workflow_execution_id=execution_id,
        documents=tuple(documents),
        operations=tuple(
            PlannedOperation(
                mart=static.mart.name,
                target=static.mart.target.dotted,
                operation_id=plan.operation_id,
                operation_plan_sha256=plan.sha256,
                revision=plan.scope_revision,
                replacement_ordinal=plan.replacement_ordinal or 0,
                mode=plan.operation_kind,
                facts=_first_facts(binding, found[static.mart.name]),
            )
            for static, plan in zip(workflow.plans, plans, strict=True)
        ),
    )


def _first_facts(binding: WorkflowExecutionBinding, found: Predecessors) -> dict[str, str]:
    facts = {"execution_binding_sha256": binding.sha256}
    committed = found.committed_since_head
    if committed:
        facts["restore_from"] = committed.operation_id
    return facts


def _operation_plan(
    workflow: Workflow, static: StaticPlan, scope: Scope, found: Predecessors, policy: Policy
) -> OperationPlan:
    mart = static.mart
    if found.generation is None or found.baseline_sha256 is None:
        raise DponeError("DPONE_BASELINE_MISSING", f"Mart {mart.name} has no adopted baseline.")
    last, head = found.last_operation, found.scope_head
    fields: dict[str, object] = {}
    kind = REPLAY if head else NORMAL
    if last is not None and last.state is State.FAILED_PRE_COMMIT:
        kind = REPLACEMENT
        fields |= {
            "replaces_failed_operation_id": last.operation_id,
            "replacement_ordinal": last.replacement_ordinal + 1,
            "replacement_reason": "failed_before_commit",
        }
    elif last is not None and last.state is not State.COMPLETE:
        raise DponeError("DPONE_COMMIT_UNKNOWN", f"The last operation of {mart.name} {scope.key} is {last.state}.")
    if head:
        fields["scope_predecessor_operation_id"] = head.operation_id
    return OperationPlan.seal(
        **fields,
        archetype="scope_stable_event_fact",
        operation_kind=kind,
        workflow_id=workflow.name,
        model_unique_id=mart.model_unique_id,
        environment=workflow.environment,
        release_id=workflow.release_id,
        deployment_id=workflow.deployment_id,
        scope_family_id=sha256_of({"schema": "dpone.scope-family.v1", "mart": mart.name, "grain": "utc_day"}),
        scope_start=scope.start_text,
        scope_end=scope.end_text,
        scope_revision=head.revision + 1 if head else 1,
        target_predecessor_generation_id=generation_id(mart.target.dotted, found.generation.uuid),
        owner_generation=found.generation.generation,
        event_time_column=mart.event_time,
        effective_key_columns=key_columns(mart),
        missing_key_policy="ignore_missing",
        mutation_order=["UPDATE", "INSERT"],
        model_definition_proof_sha256=static.definition.sha256,
        mutation_closure_sha256=workflow.closure.sha256,
        read_dependency_proof_sha256=static.reads.sha256,
        sqlserver_lifecycle_policy_sha256=static.lifecycle.sha256,
        platform_policy_digest=policy.sha256,
        resource_policy_digest=policy.sha256,
        writer_assurance_digest=found.baseline_sha256,
    )


def _replacement_plan(
    workflow: Workflow, plan: WorkflowPlan, found: Mapping[str, Predecessors], closure: Mapping[str, object]
) -> WorkflowReplacementPlan:
    actions, summary, binding, execution = [], None, None, None
    for static in workflow.plans:
        predecessors = found[static.mart.name]
        last = predecessors.last_operation
        failed = last if last is not None and last.state is State.FAILED_PRE_COMMIT else None
        if failed:
            facts = Facts.of(failed)
            summary, binding = facts.failed_summary_sha256, facts.execution_binding_sha256
            execution = failed.workflow_execution_id
        # A replacement that rolled back leaves the day of an earlier committed one: that is what is restored.
        outcome = "COMMITTED_WITH_IMAGES" if predecessors.committed_since_head else _outcome(failed)
        restore = outcome == "COMMITTED_WITH_IMAGES"
        actions.append(
            {
                "action_id": static.mart.model_unique_id,
                "outcome": outcome,
                "action": "RESTORE_THEN_REBUILD" if restore else "BUILD_FRESH",
            }
        )
    restored = {
        name: p.committed_since_head.operation_id for name, p in found.items() if p.committed_since_head is not None
    }
    return WorkflowReplacementPlan.seal(
        **closure,
        workflow_plan_sha256=plan.sha256,
        recovery_plan_digest=sha256_of(
            {"schema": "dpone.recovery-plan.v1", "actions": actions, "restore_from": restored}
        ),
        predecessor_workflow_execution_id=execution,
        predecessor_workflow_execution_binding_sha256=binding,
        predecessor_workflow_summary_sha256=summary,
        replacement_actions=actions,
    )


def _outcome(failed: OperationRecord | None) -> str:
    return (Facts.of(failed).outcome if failed else None) or "NOT_INVOKED"


def bind_attempt(bundle: PlanBundle, operation_id: str, *, epoch: int, identity: RunIdentity) -> AttemptBinding:
    """Bind one admitted operation to this worker's attempt under its fencing epoch."""
    planned = next(o for o in bundle.operations if o.operation_id == operation_id)
    return AttemptBinding.seal(
        operation_id=operation_id,
        operation_plan_sha256=planned.operation_plan_sha256,
        workflow_execution_id=bundle.workflow_execution_id,
        workflow_execution_binding_sha256=planned.facts["execution_binding_sha256"],
        dag_run_id=identity.run_id,
        task_id=identity.task_id,
        try_number=identity.try_number,
        pod_uid=identity.worker_id,
        owner_id=identity.owner,
        fencing_epoch=epoch,
    )
