"""What the core needs from the outside, as Protocols, and the plain records that cross them.

Adapters in ``resources`` implement these; nothing in here knows a vendor. Every adapter method raises
``DponeError("DPONE_ENGINE_UNAVAILABLE", ..)`` when its engine cannot be reached, and never a driver's own exception
for that: an unreachable engine means an unknown outcome to the caller, and must be told apart from a refusal.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa

from dpone_dagster.contracts.mart import Column, MartSpec, Relation, Scope
from dpone_dagster.contracts.model import Document
from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.journal.graph import State

# ---------------------------------------------------------------------------------------------- who runs


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Who is working; never part of a semantic identity.

    Attributes:
        logical_run_id: Dagster's ``root_run_id or run_id``; a fresh UUID for `dpone run`.
        run_id: the Dagster run of this try.
        try_number: 1 for the first try.
        task_id: step key.
        worker_id: a UUID of this process's attempt; also tags its SQL sessions.
        owner: ``dagster`` or ``dpone-cli``.
    """

    logical_run_id: str
    run_id: str
    try_number: int
    task_id: str
    worker_id: str
    owner: str


# ------------------------------------------------------------------------------------------------ journal


@dataclass(frozen=True, kw_only=True)
class OperationRecord:
    """One operation as the journal has it.

    ``facts`` holds what later boundaries need, written with the transitions: shadow/staging/predecessor
    UUIDs, artifact manifest digest, set digests, row counts, outcome and failure code.
    """

    operation_id: str
    operation_plan_sha256: str
    workflow_plan_sha256: str
    workflow_execution_id: str
    workflow: str
    mart: str
    target: str
    scope: Scope
    revision: int
    replacement_ordinal: int
    mode: str
    attempt_binding_sha256: str
    state: State
    version: int
    unknown_since: State | None
    fencing_epoch: int
    worker_id: str
    facts: dict[str, Any]
    admitted_at: datetime
    updated_at: datetime


@dataclass(frozen=True, kw_only=True)
class ScopeHead:
    """The last COMPLETE publication of one scope of one mart."""

    mart: str
    scope: Scope
    revision: int
    operation_id: str
    rows: int
    after_image_sha256: str
    artifact_manifest_sha256: str
    target_uuid: str
    published_at: datetime


@dataclass(frozen=True, kw_only=True)
class GenerationHead:
    """The ClickHouse table UUID that the journal holds to be the mart's current generation."""

    target: str
    uuid: str
    generation: int
    operation_id: str | None


@dataclass(frozen=True, kw_only=True)
class Predecessors:
    """What admission reads under its locks, for one mart and scope; the planner builds plans from it.

    Attributes:
        generation: the current generation head; None without a baseline.
        baseline_sha256: digest of the baseline adoption receipt; None without one.
        scope_head: last COMPLETE publication of the scope.
        last_operation: the latest operation of the scope, whatever its state.
        committed_since_head: the latest operation of the scope, later than its head, whose SQL mutation is
            committed though it failed before the ClickHouse commit: its before image is the day's clean base.
    """

    mart: str
    generation: GenerationHead | None
    baseline_sha256: str | None
    scope_head: ScopeHead | None
    last_operation: OperationRecord | None
    committed_since_head: OperationRecord | None


@dataclass(frozen=True, kw_only=True)
class PlannedOperation:
    """One mart's plan inside a workflow plan, ready to be admitted."""

    mart: str
    target: str
    operation_id: str
    operation_plan_sha256: str
    revision: int
    replacement_ordinal: int
    mode: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlanBundle:
    """What one admission writes: documents create-only, and one PREPARING operation a mart, in plan order."""

    workflow: str
    scope: Scope
    workflow_plan_sha256: str
    workflow_execution_id: str
    documents: tuple[Document, ...]
    operations: tuple[PlannedOperation, ...]


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A live worker as those who wait for it see it."""

    worker_id: str
    run_id: str
    owner: str
    host: str
    pid: int
    scope: Scope
    started_at: datetime


@dataclass(frozen=True, kw_only=True)
class MartOverview:
    """One mart at a glance; ``complete_days`` and the two days count published scopes."""

    mart: str
    baseline_sha256: str | None
    states: dict[State, int]
    complete_days: int
    first_complete: Scope | None
    last_complete: Scope | None
    open_operations: tuple[OperationRecord, ...]


class Lease(Protocol):
    """The worker's liveness: session-owned locks on a connection of its own."""

    resources: tuple[str, ...]
    identity: RunIdentity

    def check(self) -> None:
        """Raise DPONE_LEASE_LOST unless the locks are still held by a live session (one round trip)."""


class JournalPort(Protocol):
    """The authority. One implementation for both dialects."""

    def hold(
        self,
        resources: Iterable[str],
        *,
        identity: RunIdentity,
        scope: Scope,
        deadline_seconds: float,
        on_wait: Callable[[str], None],
    ) -> AbstractContextManager[Lease]:
        """Take session-owned locks on sorted resources, waiting behind holders of other scopes.

        Raises:
            DponeError: DPONE_OPERATION_HELD when a live holder works on the same scope of one of the resources
                (names it); DPONE_LOCK_DEADLINE when the deadline passes.
        """

    def admit(
        self,
        lease: Lease,
        *,
        workflow: str,
        marts: Sequence[str],
        targets: Sequence[str],
        scope: Scope,
        build: Callable[[dict[str, Predecessors]], PlanBundle],
        bind: Callable[[PlanBundle, str, int], Document],
    ) -> list[OperationRecord]:
        """One SERIALIZABLE transaction: read predecessors, build the plans, take every guard with epoch+1,
        write documents, ``bind(bundle, operation_id, epoch)`` attempt bindings and PREPARING operations.
        All or nothing.
        """

    def take_over(self, lease: Lease, operation_ids: Sequence[str]) -> list[OperationRecord]:
        """Give unfinished operations to this worker: every guard with epoch+1, attempts recorded."""

    def transition(
        self,
        operation: OperationRecord,
        to: State,
        *,
        facts: dict[str, Any] | None = None,
        documents: Sequence[Document] = (),
    ) -> OperationRecord:
        """Compare-and-set on (operation, version, epoch, worker) through the reducer; merges ``facts``.

        Raises:
            DponeError: DPONE_TRANSITION_ILLEGAL, DPONE_FENCED when somebody else holds the operation now.
        """

    def record(
        self, operation: OperationRecord, facts: dict[str, Any], documents: Sequence[Document] = ()
    ) -> OperationRecord:
        """Merge facts without a change of state, under the same compare-and-set."""

    def publish(
        self,
        operation: OperationRecord,
        *,
        target_uuid: str,
        rows: int,
        after_image_sha256: str,
        artifact_manifest_sha256: str,
        facts: dict[str, Any],
        documents: Sequence[Document] = (),
    ) -> OperationRecord:
        """One SERIALIZABLE transaction: generation head, scope head, checkpoint, journal COMPLETE."""

    def adopt_baseline(self, lease: Lease, *, mart: str, target: str, target_uuid: str, receipt: Document) -> None:
        """Record a baseline and the first generation head, create-only."""

    def retired_generations(self, target: str) -> list[str]:
        """UUIDs of replaced generations that still exist, newest first."""

    def generation_dropped(self, target: str, uuid: str) -> None:
        """Record that a retired generation is gone."""

    def uncleaned(self, mart: str) -> list[OperationRecord]:
        """Finished operations whose staging or images may still exist, in order of admission."""

    def operation_cleaned(self, operation_id: str) -> None:
        """Record that a finished operation left nothing behind."""

    def operation(self, operation_id: str) -> OperationRecord | None: ...
    def failed_scopes(self, mart: str) -> list[OperationRecord]:
        """Latest operations of scopes whose latest operation is FAILED_PRE_COMMIT, by day."""

    def open_operations(self, mart: str) -> list[OperationRecord]: ...
    def workflow_operations(self, workflow_execution_id: str) -> list[OperationRecord]: ...
    def history(self, mart: str, scope: Scope) -> list[OperationRecord]: ...
    def transitions(self, operation_id: str) -> list[dict[str, Any]]:
        """Every change of an operation, oldest first, each with the ``fencing_epoch`` that it was made under."""

    def scope_head(self, mart: str, scope: Scope) -> ScopeHead | None: ...
    def scope_heads(self, mart: str) -> list[ScopeHead]: ...
    def generation(self, target: str) -> GenerationHead | None: ...
    def baseline(self, mart: str) -> str | None: ...
    def document(self, sha256: str) -> dict[str, Any] | None: ...
    def holder(self, resource: str) -> Holder | None:
        """The live worker that holds a resource's lock now; None when it is free."""

    def marts_overview(self) -> list[MartOverview]:
        """Every mart that the journal knows, by name."""

    def end_worker(self, worker_id: str, *, reason: str) -> None:
        """End a holder's SQL sessions (a role's privilege) and log it; returns when none is left."""

    def phase(
        self,
        operation_id: str,
        worker_id: str,
        name: str,
        *,
        started: datetime,
        seconds: float,
        rows: int | None = None,
        bytes_: int | None = None,
    ) -> None:
        """Keep one phase's duration, for `dpone explain`. Not evidence."""

    def phases(self, operation_id: str) -> list[dict[str, Any]]: ...


# ------------------------------------------------------------------------------------- source and builder


class MutationOutcome(StrEnum):
    """Per-model outcome of the SQL mutation (spec R)."""

    NOT_INVOKED = "NOT_INVOKED"
    ROLLED_BACK = "ROLLED_BACK"
    COMMITTED_WITH_IMAGES = "COMMITTED_WITH_IMAGES"
    COMMIT_UNKNOWN = "COMMIT_UNKNOWN"


@dataclass(frozen=True, kw_only=True)
class BuildReceipt:
    """The immutable row that the strategy writes inside the mutation's transaction."""

    operation_id: str
    operation_plan_sha256: str
    fencing_epoch: int
    worker_id: str
    before_image: Relation
    after_image: Relation
    before: SetDigest
    after: SetDigest
    updated_rows: int
    inserted_rows: int
    source_rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class TestResult:
    """One dbt test: unique id, short name, ``pass``/``warn``/``fail``/``error``/``skipped``, failing rows."""

    unique_id: str
    name: str
    status: str
    failures: int | None


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """What one `dbt build` said; never evidence of a commit.

    Attributes:
        model_status: model unique id -> dbt's status.
        error_codes: unique id of each failed model -> DPONE code.
        error_sentences: the same models -> a sentence with field, row count and side, where they are known.
    """

    invoked: bool
    model_status: dict[str, str]
    tests: tuple[TestResult, ...]
    error_codes: dict[str, str]
    error_sentences: dict[str, str] = field(default_factory=dict)


class BuilderPort(Protocol):
    """dbt: one build of the workflow's models and their tests."""

    def build(
        self,
        marts: Sequence[MartSpec],
        operations: Sequence[OperationRecord],
        scope: Scope,
        *,
        restore_from: dict[str, OperationRecord],
    ) -> BuildResult:
        """Run one `dbt build` for the given models.

        Args:
            restore_from: mart name -> the failed operation whose before image is restored first
                (RESTORE_THEN_REBUILD), inside the same transaction.

        Raises:
            DponeError: DPONE_CANCELLED after the tagged SQL session is gone, when the run was interrupted.
        """


@dataclass(frozen=True, kw_only=True)
class ObservedRelation:
    """One relation that a query reads, resolved by the engine; ``kind`` is BASE_TABLE or what else it is.

    ``definition_sha256`` covers its columns and their types.
    """

    relation: Relation
    object_id: int
    kind: str
    definition_sha256: str


@dataclass(frozen=True, kw_only=True)
class CatalogObservation:
    """What a model's compiled query reads; ``reader_id`` is the object id of the mart that it is for."""

    database: str
    reader_id: int
    relations: tuple[ObservedRelation, ...]


class SourcePort(Protocol):
    """SQL Server, or PostgreSQL standing in for it: marts, images and receipts."""

    def check_mart(self, mart: MartSpec) -> None:
        """Refuse a mart table that is absent, a view, or whose columns drifted from the contract."""

    def create_mart(self, mart: MartSpec) -> None:
        """Create the mart table empty, from the contract, if it does not exist."""

    def dependencies(self, mart: MartSpec, compiled_sql: str) -> CatalogObservation:
        """Resolve what a model's compiled query reads, without running it.

        Raises:
            DponeError: DPONE_CLOSURE_UNPROVEN when it is not one query, or uses a function of somebody's own.
        """

    def outcome(self, operation: OperationRecord) -> tuple[MutationOutcome, BuildReceipt | None]:
        """Classify from receipt, images and sessions; never from what dbt said."""

    def image_digest(self, mart: MartSpec, image: Relation) -> SetDigest: ...
    def scope_digest(self, mart: MartSpec, scope: Scope) -> SetDigest: ...
    def read_image(self, mart: MartSpec, image: Relation) -> pa.RecordBatchReader:
        """Stream an image in key order with the Arrow types of ``ColumnType.arrow``; constant memory."""

    def drop_images(self, operation: OperationRecord) -> None: ...


# ------------------------------------------------------------------------------------------- the artifact


@dataclass(frozen=True, kw_only=True)
class SealedChunk:
    """One Parquet object of an artifact: fields of spec R's manifest chunk."""

    ordinal: int
    object_key: str
    provider_version: str
    chunk_sha256: str
    byte_count: int
    row_count: int


class ArtifactStorePort(Protocol):
    """Create-only, versioned objects. A local folder here, S3 later."""

    provider: str

    def workspace(self) -> AbstractContextManager[Path]:
        """A private folder for files on their way into the store; removed at the end, and after a death by
        whoever comes next.

        Raises:
            DponeError: DPONE_ARTIFACT_NO_SPACE, also for a disk that fills up while the folder is in use.
        """

    def put_new(self, key: str, source: Path) -> str:
        """Publish a file made in ``workspace()``, atomically and only if absent; return its version.

        Raises:
            DponeError: DPONE_ARTIFACT_CONFLICT when a different object has the key (an identical one is a
                replay and returns its version); DPONE_ARTIFACT_NO_SPACE.
        """

    def open(self, key: str) -> BinaryIO:
        """Open an object for reading.

        Raises:
            DponeError: DPONE_ARTIFACT_MISSING.
        """

    def list(self, prefix: str) -> list[str]:
        """The sorted keys of the objects under the folder ``prefix``."""


# ---------------------------------------------------------------------------------------------- ClickHouse


@dataclass(frozen=True, kw_only=True)
class PhysicalDesign:
    """Observed physical authority of a ClickHouse table; ``sha256`` covers every part of it but the UUID."""

    relation: Relation
    uuid: str
    database_engine: str
    engine: str
    columns: tuple[tuple[str, str], ...]
    partition_key: str
    order_key: str
    sha256: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ShadowReport:
    """What was attached and what was rebuilt; numbers only."""

    uuid: str
    touched_partitions: int
    untouched_partitions: int
    untouched_parts: int


@dataclass(frozen=True, kw_only=True)
class ProofReport:
    """The three proofs (design, step 9): digests and counts, never part names."""

    touched_multiset_rows: int
    touched_partitions_by_parts: int
    untouched_partitions_by_parts: int
    untouched_partitions_by_digest: int
    scope: SetDigest
    total_rows: int
    sha256: str


class AnalyticsPort(Protocol):
    """ClickHouse, spoken to over HTTP. One instance serves one operation's attempt."""

    query_prefix: str
    """What every query id of this instance starts with."""

    def design(self, target: Relation) -> PhysicalDesign | None:
        """Read the table's physical design from ``system.*``; None when there is no such table."""

    def check_design(self, mart: MartSpec, design: PhysicalDesign | None) -> None:
        """Refuse everything that the exchange would lose or that would write behind its back."""

    def create_target(self, mart: MartSpec) -> str:
        """Create an empty target from the type mapping; return its UUID."""

    def create_stage(self, mart: MartSpec, name: str) -> str:
        """Create an empty staging table, replacing a leftover of the same operation; return its UUID."""

    def load(self, stage: Relation, batches: Iterator[pa.RecordBatch], on_rows: Callable[[int], None]) -> int: ...
    def digest(self, mart: MartSpec, table: Relation, scope: Scope | None = None) -> SetDigest: ...
    def count(self, table: Relation, mart: MartSpec, scope: Scope | None = None) -> int: ...
    def build_shadow(
        self, mart: MartSpec, design: PhysicalDesign, stage: Relation, shadow: Relation, scope: Scope
    ) -> ShadowReport: ...
    def prove(
        self,
        mart: MartSpec,
        design: PhysicalDesign,
        stage: Relation,
        shadow: Relation,
        scope: Scope,
        after: SetDigest,
    ) -> ProofReport:
        """Prove the shadow (design, step 9) against the target, which must still be the one of ``design``.

        Raises:
            DponeError: DPONE_TARGET_REPLACED, DPONE_TARGET_DESIGN_CHANGED, DPONE_PROOF_FAILED,
                DPONE_TARGET_DIVERGED.
        """

    def exchange(self, target: Relation, shadow: Relation) -> None:
        """Send EXCHANGE TABLES once. Any exception means unknown; the UUID map decides."""

    def uuid(self, table: Relation) -> str | None: ...
    def rename(self, old: Relation, new: Relation, uuid: str) -> None:
        """Rename the table that has ``uuid``; a no-op when ``new`` has it already."""

    def drop(self, table: Relation, uuid: str) -> None:
        """Drop the table only if it still has ``uuid``; a no-op when absent."""

    def start_merges(self, table: Relation) -> None: ...
    def quiesce(self, query_prefix: str) -> None:
        """Kill queries with the prefix and return once none is left; DPONE_ENGINE_BUSY otherwise."""

    def predecessors(self, target: Relation) -> list[tuple[Relation, str]]:
        """Kept earlier generations, newest first: relation and UUID."""

    def read(self, mart: MartSpec, uuid: str, scope: Scope) -> pa.Table: ...


# --------------------------------------------------------------------------------------------- watching it


class ProgressPort(Protocol):
    """Somebody who watches: a terminal, Dagster's log, or nobody."""

    def phase(self, mart: str, name: str) -> None: ...
    def rows(self, count: int) -> None: ...
    def note(self, sentence: str) -> None: ...


Columns = Sequence[Column]
