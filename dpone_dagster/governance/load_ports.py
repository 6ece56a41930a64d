"""What a governed load needs from the outside, as Protocols, and the records that cross them.

Adapters raise ``DponeError`` only; an unreachable engine is DPONE_ENGINE_UNAVAILABLE, an unknown outcome to the caller.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

import pyarrow as pa

from dpone_dagster.contracts.mart import Column, Scope
from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.governance.manifest import AcceptanceChecks, Hook, Name, Process, ProviderGate, SchemaGate
from dpone_dagster.journal.graph import State
from dpone_dagster.ports import Lease, RunIdentity


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


# -------------------------------------------------------------------------------------------------- journal


class GuardStatus(StrEnum):
    """Why automatic retries of a route stop until an operator has looked (spec G, "native guard")."""

    ARMED = "armed"
    """The target was about to change, and nobody has said what came of it."""
    CHECKPOINT_INCOMPLETE = "checkpoint_incomplete"
    """The target has changed; the source state has not been persisted."""
    TARGET_OUTCOME_UNKNOWN = "target_outcome_unknown"
    """The change of the target ended in an exception, and its outcome is not proven."""


@dataclass(frozen=True, kw_only=True)
class LoadRecord:
    """One governed load as the journal has it; its states are those of every operation.

    Attributes:
        load_id: a UUID.
        scope: the UTC day of a daily load.
        facts: what later boundaries need: the staged tables, the window, what was counted, where it failed.
    """

    load_id: str
    process: str
    target: str
    strategy: str
    plan_sha256: str
    run_id: str
    scope: Scope | None
    state: State
    version: int
    unknown_since: State | None
    fencing_epoch: int
    worker_id: str
    facts: dict[str, Any]
    admitted_at: datetime
    updated_at: datetime


@dataclass(frozen=True, kw_only=True)
class LoadGuard:
    """The guard of one route; there is none while all is well."""

    process: str
    target: str
    strategy: str
    status: GuardStatus
    load_id: str
    set_at: datetime


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Source state of a process: the watermark that its last accepted load read up to; None for other reads."""

    process: str
    watermark: str | None
    load_id: str
    moved_at: datetime


@dataclass(frozen=True, kw_only=True)
class LoadedDay:
    """The last accepted load of one UTC day."""

    process: str
    scope: Scope
    load_id: str
    plan_sha256: str
    rows: int
    loaded_at: datetime


class LoadJournalPort(Protocol):
    """The authority over governed loads, in the journal of the marts: the same locks, fences and state graph."""

    def hold(
        self,
        resources: Iterable[str],
        *,
        identity: RunIdentity,
        scope: Scope,
        deadline_seconds: float,
        on_wait: Callable[[str], None],
    ) -> AbstractContextManager[Lease]:
        """See ``JournalPort.hold``."""

    def begin(
        self,
        lease: Lease,
        *,
        load_id: str,
        process: str,
        target: str,
        strategy: str,
        plan_sha256: str,
        scope: Scope | None,
    ) -> LoadRecord:
        """Take the guards of process and target with epoch+1 and write a PREPARING load, all or nothing.

        Raises:
            DponeError: DPONE_LOAD_OPEN when an earlier load is not settled; DPONE_LOAD_GUARDED when the route is
                guarded; DPONE_TARGET_OF_A_MART when the target is a published mart's.
        """

    def take_over(self, lease: Lease, load: LoadRecord) -> LoadRecord:
        """Give an unfinished load to this worker, under epoch+1."""

    def transition(
        self, load: LoadRecord, to: State, *, facts: Mapping[str, Any] | None = None, guard: GuardStatus | None
    ) -> LoadRecord:
        """Compare-and-set through the state graph; sets or (None) removes the route's guard in the same transaction."""

    def record(self, load: LoadRecord, facts: Mapping[str, Any], *, guard: GuardStatus | None = None) -> LoadRecord:
        """Merge facts; the state stays, and so does the guard unless one is set."""

    def persist_state(self, load: LoadRecord, *, watermark: str | None, rows: int) -> LoadRecord:
        """One transaction: checkpoint, the day's row, the guard removed, the fact ``state_persisted``."""

    def clear_guard(self, load: LoadRecord, *, reason: str) -> LoadRecord:
        """Remove the route's guard and log who did it and why."""

    def open_load(self, process: str) -> LoadRecord | None:
        """The load of a process that is in no terminal state; at most one."""

    def processes(self) -> list[str]:
        """The names of all processes that were ever loaded."""

    def load(self, load_id: str) -> LoadRecord | None: ...
    def last_load(self, process: str) -> LoadRecord | None: ...
    def loads(self, process: str, *, limit: int = 20) -> list[LoadRecord]:
        """Loads of a process, newest first."""

    def events(self, load_id: str) -> list[dict[str, Any]]:
        """Every change of a load, oldest first."""

    def guard(self, process: str) -> LoadGuard | None: ...
    def checkpoint(self, process: str) -> Checkpoint | None: ...
    def loaded_day(self, process: str, scope: Scope) -> LoadedDay | None: ...
    def loaded_days(self, process: str) -> list[LoadedDay]: ...
