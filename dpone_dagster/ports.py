"""What the core needs from the outside, as Protocols, and the plain records that cross them.

Adapters in ``resources`` implement these; nothing in here knows a vendor. Every adapter method raises
``DponeError("DPONE_ENGINE_UNAVAILABLE", ..)`` when its engine cannot be reached, and never a driver's own exception
for that: an unreachable engine means an unknown outcome to the caller, and must be told apart from a refusal.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa

from dpone_dagster.contracts.mart import Column, MartSpec, Relation, Scope
from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.declarations.manifest import AcceptanceChecks, Hook, Name, Process, ProviderGate, SchemaGate
from dpone_dagster.journal.port import OperationRecord

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


# ------------------------------------------------------------------------------------ a load's columns and sides


class LoadColumn(Column):
    """A column as an engine names it: any name at all; types are the closed list of ``contracts.types``."""

    name: Name


Columns = tuple[LoadColumn, ...]

# -------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True, kw_only=True)
class MetricSnapshot:
    """Exact counts of one side, from one aggregate query; column name -> count. None where it could not be had."""

    side: str
    dataset: str
    columns: tuple[str, ...]
    row_count: int | None
    null_counts: Mapping[str, int] = field(default_factory=dict)
    distinct_counts: Mapping[str, int] = field(default_factory=dict)


class ProbePort(Protocol):
    """Questions that one side's engine answers with a number; no row leaves the engine.

    The judged rows are those of the load: what is read from the source, or what is staged. Framework columns
    (``__dpone__*``) are no business columns and not in ``columns``.
    """

    side: str
    dataset: str
    """What is judged, for people: ``schema.table`` or ``query sha256:..``."""
    columns: Columns

    def row_count(self) -> int: ...
    def digest(self, columns: Columns, *, key: Columns = (), modulus: int = 1) -> SetDigest:
        """Return the set digest of the given columns in that order.

        Args:
            key, modulus: with a modulus above 1 only rows whose key digest's first lane modulo it is 0 count: the
                same rows on both engines.
        """

    def rows_with_null(self, columns: Sequence[str]) -> int:
        """Return how many rows have a NULL in one of the columns."""

    def surplus_rows(self, columns: Sequence[str]) -> int:
        """Return rows minus distinct combinations of the columns; NULLs are equal to each other."""

    def rows_outside(self, column: str, values: Sequence[str | int | bool], *, allow_null: bool) -> int:
        """Return how many rows have another value than the given ones."""

    def newest(self, column: str) -> datetime | None:
        """Return the greatest value of a datetime2(6) column, aware UTC; None without rows or values."""

    def scalar(self, sql: str) -> Any:
        """Run one reading query with ``{{ relation }}`` replaced; return its one value (int, Decimal or None)."""

    def metrics(self, checks: AcceptanceChecks) -> MetricSnapshot:
        """Measure what acceptance asks for in one aggregate query."""

    def blocks(self) -> Iterator[pa.RecordBatch]:
        """Stream the rows in bounded blocks, for gates that need Python (staged side)."""


# ------------------------------------------------------------------------------------------ gates of others


@dataclass(frozen=True, kw_only=True)
class GateOutcome:
    """What a provider's gate came to.

    Attributes:
        passed: None where it could not tell.
        metrics: names like identifiers -> numbers; everything else is redacted.
        message: for the provider's own logs; never handed on, since it may carry values.
    """

    passed: bool | None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""


class GateProvider(Protocol):
    """Evaluates one gate; registered under the entry points ``dpone.gate_providers`` by the gate's ``type``."""

    def evaluate(self, gate: ProviderGate, source: ProbePort | None, staged: ProbePort) -> GateOutcome:
        """Judge the rows. Any exception means that the gate could not run."""


class SchemaGateHandler(Protocol):
    """Evaluates gates of the type ``schema``; the composition root hands it in, for the core knows no pandera."""

    def evaluate(self, gate: SchemaGate, source: ProbePort | None, staged: ProbePort) -> GateOutcome:
        """Judge the staged rows block by block.

        Raises:
            DponeError: DPONE_GATE_UNAVAILABLE when the schema does not load, is refused or cannot be applied.
        """


# ------------------------------------------------------------------------------------------------- the source


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which rows a run reads, settled before the extraction.

    Attributes:
        scope: the UTC day of a ``daily`` load.
        above, up_to: ends of a ``watermark`` window in canonical text, ``(above, up_to]``; ``above`` is None for the
            first load, ``up_to`` is None where the source has no row at all.
    """

    scope: Scope | None = None
    above: str | None = None
    up_to: str | None = None


class SourceSession(Protocol):
    """One consistent look at the source: what is measured is what is extracted.

    Attributes:
        snapshot: whether the engine gives one snapshot for all questions; where it does not, evidence says so.
    """

    columns: Columns
    window: Window
    probe: ProbePort
    snapshot: bool

    def read(self) -> Iterator[pa.RecordBatch]:
        """Stream the window's rows with the Arrow types of ``ColumnType.arrow``; constant memory."""

    def interrupt(self) -> None:
        """Let a question that is being asked on another thread end early; what it answers then is of no use."""


class LoadSourcePort(Protocol):
    """SQL Server (PostgreSQL standing in), ClickHouse, or a Python asset's rows."""

    def open(
        self, process: Process, *, scope: Scope | None, above: str | None
    ) -> AbstractContextManager[SourceSession]:
        """Settle columns and window, and begin the snapshot.

        Raises:
            DponeError: DPONE_SOURCE_ABSENT, DPONE_TYPE_UNSUPPORTED, DPONE_SOURCE_COLUMN, DPONE_WATERMARK_NULL.
        """


# --------------------------------------------------------------------------------------------------- the sink


class Visibility(StrEnum):
    """What a reader of the target can see while it is finalized."""

    ATOMIC = "atomic"
    """The whole table as before or as after; never between."""
    PER_PARTITION = "per_partition"
    """Each partition as before or as after; some may be new while others are old."""
    PARTIAL = "partial"
    """Rows as they arrive."""


class FinalizeOutcome(StrEnum):
    """What the engine proves about a finalize, whoever sent it."""

    COMMITTED = "COMMITTED"
    NOT_COMMITTED = "NOT_COMMITTED"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, kw_only=True)
class FinalizerTraits:
    """What a strategy promises while it changes the target."""

    visibility: Visibility
    retry_safe: bool


@dataclass(frozen=True, kw_only=True)
class StagedLoad:
    """One load's scratch tables, as the journal keeps them: names and UUIDs, all JSON.

    Attributes:
        load_id: a UUID; names every scratch table.
        epoch: the fence under which a shadow was built.
        tables: role (``stage``, ``projected``, ``shadow``) -> {"schema", "name", "uuid"}.
        target_uuid: the target's UUID when it was staged; None for a target that does not exist yet.
        facts: numbers and names that the finalizer needs again after a crash.
    """

    load_id: str
    epoch: int
    tables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    target_uuid: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FinalizeReport:
    """What a finalize did; numbers only. ``visibility`` and ``retry_safe`` belong to the strategy."""

    strategy: str
    visibility: Visibility
    retry_safe: bool
    rows: int
    rows_replaced: int | None
    target_rows: int | None
    target_uuid: str | None


class StagedLoadPort(Protocol):
    """A sink that stages: nothing that a reader sees changes before ``finalize``.

    The order is: ``stage``, ``project``, probes, ``prepare``, ``recheck``, ``finalize``, ``outcome``, ``cleanup``. Each
    method that makes a table returns a new ``StagedLoad`` to be made durable before the next.

    Attributes:
        visibility, retry_safe: the weakest of its strategies; ``describe`` has each.
    """

    visibility: Visibility
    retry_safe: bool

    def describe(self, strategy: str) -> FinalizerTraits:
        """Say what a reader sees while the strategy finalizes, and whether it may be sent again."""

    def stage(
        self, process: Process, columns: Columns, batches: Iterator[pa.RecordBatch], *, load_id: str, epoch: int
    ) -> tuple[StagedLoad, int]:
        """Create staging and stream the batches into it; return it and the number of rows."""

    def project(self, process: Process, columns: Columns, staged: StagedLoad, *, loaded_at: datetime) -> StagedLoad:
        """Project the lineage columns in the engine's SQL; the same ``staged`` where lineage is off."""

    def staged_probe(self, process: Process, columns: Columns, staged: StagedLoad) -> ProbePort: ...
    def target_probe(self, process: Process, columns: Columns, staged: StagedLoad, window: Window) -> ProbePort:
        """Measure, in the target, the rows that the load is answerable for: its day, its keys, or everything."""

    def prepare(self, process: Process, columns: Columns, staged: StagedLoad, window: Window) -> StagedLoad:
        """Check the target and build everything that ``finalize`` swaps in; the target stays as it is.

        Raises:
            DponeError: DPONE_TARGET_*, DPONE_PARTITION_WIDER_THAN_SCOPE, DPONE_KEY_NOT_UNIQUE.
        """

    def recheck(self, process: Process, staged: StagedLoad) -> None:
        """Refuse a target that changed since ``prepare``. Nothing has been sent: a refusal here is pre-commit.

        Raises:
            DponeError: DPONE_TARGET_REPLACED, DPONE_TARGET_DESIGN_CHANGED, DPONE_TARGET_CHANGED, DPONE_SHADOW_LOST.
        """

    def finalize(self, process: Process, staged: StagedLoad) -> None:
        """Recheck, then send what changes the target, once. Any exception means unknown; ``outcome`` decides."""

    def outcome(self, process: Process, staged: StagedLoad, *, end: bool = True) -> FinalizeOutcome:
        """Read from the engine whether ``finalize`` took effect.

        Args:
            end: end statements of the load that could still take effect; otherwise they make the answer UNKNOWN.
        """

    def report(self, process: Process, columns: Columns, staged: StagedLoad) -> FinalizeReport:
        """Say what a committed finalize did."""

    def cleanup(self, process: Process, staged: StagedLoad) -> None:
        """Drop scratch tables by UUID; never the target. Safe to repeat, before or after a finalize."""

    def quiesce(self, staged: StagedLoad) -> None:
        """End this load's statements and return once none is left (DPONE_ENGINE_BUSY)."""


class LegacySinkPort(Protocol):
    """A sink without staging: ``load`` changes the target at once (``legacy_post_finalize``)."""

    visibility: Visibility
    retry_safe: bool

    def check(self, process: Process, columns: Columns) -> None:
        """Refuse a target that does not fit, before anything is written."""

    def load(
        self,
        process: Process,
        columns: Columns,
        batches: Iterator[pa.RecordBatch],
        *,
        load_id: str,
        loaded_at: datetime,
    ) -> FinalizeReport: ...
    def target_probe(self, process: Process, columns: Columns, window: Window, *, load_id: str) -> ProbePort:
        """Measure the rows that this load added (DPONE_ACCEPTANCE_UNAVAILABLE where lineage does not tell them)."""


# ---------------------------------------------------------------------------------------------------- hooks


@dataclass(frozen=True, kw_only=True)
class HookStep:
    """What one hook came to. ``status`` is ``succeeded``, ``failed``, ``unknown``, ``skipped`` or ``planned``.

    ``unknown``: the engine was lost after the SQL was sent, so it may have run.
    """

    id: str
    phase: str
    kind: str
    type: str
    connector: str
    status: str
    sql_hash: str | None
    seconds: float = 0.0
    attempts: int = 0
    error_code: str | None = None
    lineage: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, int | str | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class HookDefinition:
    """A hook ready to run: its SQL read and hashed, its place in the order settled."""

    hook: Hook
    phase: str
    sql: str | None = field(repr=False)
    sql_hash: str | None
    statements: int
    mutates: bool


class SqlRunner(Protocol):
    """One side's engine, for hooks."""

    dialect: str
    """sqlglot's name: ``tsql``, ``postgres`` or ``clickhouse``."""

    def execute(self, sql: str, *, autocommit: bool, read_only: bool, timeout_seconds: int) -> int | None:
        """Run one hook body; return the affected rows where the engine says. Sent once.

        Args:
            read_only: have the engine refuse every write, where it can.

        Raises:
            DponeError: as ``HookProvider.run``.
        """

    def query_number(self, sql: str, *, timeout_seconds: int) -> int | None:
        """Run one reading query; return its one value."""


@dataclass(frozen=True, kw_only=True)
class HookContext:
    """Whose hooks run; what a provider is made with."""

    process: str
    run_id: str


class HookProvider(Protocol):
    """Runs hooks of one ``type``.

    The entry point of that name in the group ``dpone.hook_providers`` is a callable that takes a ``HookContext``.
    """

    def run(self, definition: HookDefinition, *, runner: SqlRunner | None) -> Mapping[str, int | str | None]:
        """Run it and return numbers for the evidence.

        Args:
            runner: the engine of the hook's connector; None where the load has none there.

        Raises:
            DponeError: DPONE_HOOK_FAILED when it did not do its work; ``details["repeatable"]`` is True only where
                provably nothing of it is left behind. DPONE_ENGINE_UNAVAILABLE when it cannot be known.
        """


# ---------------------------------------------------------------------------------------------------- audit


@dataclass(frozen=True, kw_only=True)
class AuditStep:
    """One step row: ``details`` is JSON; ``counters`` are rows and bytes that the step reported."""

    step_id: str
    kind: str
    phase: str
    status: str
    started_at: datetime
    seconds: float
    details: Mapping[str, Any] = field(default_factory=dict)


class AuditPort(Protocol):
    """``__dpone__loads`` and ``__dpone__load_steps``."""

    def begin(self, process: Process, *, load_id: str, run_id: str, started_at: datetime, plan_sha256: str) -> None: ...
    def steps(self, process: Process, load_id: str, steps: Sequence[AuditStep]) -> None: ...
    def end(
        self, process: Process, *, load_id: str, status: str, finished_at: datetime, details: Mapping[str, Any]
    ) -> None: ...
