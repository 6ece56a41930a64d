"""Every sealed document by its schema name; the one place to import them from."""

from typing import Any

from dpone_dagster.contracts.model import Document
from dpone_dagster.contracts.plans import (
    AttemptBinding,
    EffectiveKeyColumn,
    OperationPlan,
    OperationPlanRef,
    ReplacementAction,
    WorkflowExecutionBinding,
    WorkflowPlan,
    WorkflowReplacementPlan,
    effective_key_column,
)
from dpone_dagster.contracts.proofs import (
    AssuranceSubject,
    BaselineAdoptionReceipt,
    DependencyEdge,
    ModelDefinitionProof,
    MutationClosure,
    ReadDependencyProof,
    RuntimeAssuranceReceipt,
    SqlServerLifecyclePolicy,
    StandInLifecyclePolicy,
)
from dpone_dagster.contracts.receipts import (
    AttemptContinuationReceipt,
    ClickHouseTerminalReceipt,
    DurableWorkflowSummary,
    FailedModel,
    FailedWorkflowSummary,
    GateReport,
    GateResult,
    ModelBuildReceipt,
    PublicationTerminalReceipt,
    SealAuthorizationReceipt,
    SealedArtifactManifest,
    SealedChunkEntry,
    WorkflowPublication,
)
from dpone_dagster.errors import DponeError

__all__ = [
    "DOCUMENTS",
    "AssuranceSubject",
    "AttemptBinding",
    "AttemptContinuationReceipt",
    "BaselineAdoptionReceipt",
    "ClickHouseTerminalReceipt",
    "DependencyEdge",
    "DurableWorkflowSummary",
    "EffectiveKeyColumn",
    "FailedModel",
    "FailedWorkflowSummary",
    "GateReport",
    "GateResult",
    "ModelBuildReceipt",
    "ModelDefinitionProof",
    "MutationClosure",
    "OperationPlan",
    "OperationPlanRef",
    "PublicationTerminalReceipt",
    "ReadDependencyProof",
    "ReplacementAction",
    "RuntimeAssuranceReceipt",
    "SealAuthorizationReceipt",
    "SealedArtifactManifest",
    "SealedChunkEntry",
    "SqlServerLifecyclePolicy",
    "StandInLifecyclePolicy",
    "WorkflowExecutionBinding",
    "WorkflowPlan",
    "WorkflowPublication",
    "WorkflowReplacementPlan",
    "effective_key_column",
    "parse_document",
]

DOCUMENTS: dict[str, type[Document]] = {
    model.SCHEMA: model
    for model in (
        AttemptBinding,
        AttemptContinuationReceipt,
        BaselineAdoptionReceipt,
        ClickHouseTerminalReceipt,
        DurableWorkflowSummary,
        FailedWorkflowSummary,
        GateReport,
        ModelBuildReceipt,
        ModelDefinitionProof,
        MutationClosure,
        OperationPlan,
        PublicationTerminalReceipt,
        ReadDependencyProof,
        RuntimeAssuranceReceipt,
        SealAuthorizationReceipt,
        SealedArtifactManifest,
        SqlServerLifecyclePolicy,
        StandInLifecyclePolicy,
        WorkflowExecutionBinding,
        WorkflowPlan,
        WorkflowReplacementPlan,
    )
}


def parse_document(data: dict[str, Any]) -> Document:
    """Parse a document of any known schema, as read back from the journal or an artifact store.

    Raises:
        DponeError: DPONE_CONTRACT_INVALID for an unknown schema, and everything ``Document.parse`` raises.
    """
    schema = data.get("schema")
    if not isinstance(schema, str) or schema not in DOCUMENTS:
        raise DponeError("DPONE_CONTRACT_INVALID", "schema: The document has no known schema.", field="schema")
    return DOCUMENTS[schema].parse(data)
