"""The authority as the core sees it: one Protocol over operations of marts and loads, and the records that cross it.

Every method raises ``DponeError("DPONE_ENGINE_UNAVAILABLE", ..)`` when the engine cannot be reached, and never a
driver's own exception for that: an unreachable engine means an unknown outcome to the caller.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from dpone_dagster.contracts.mart import Scope
from dpone_dagster.contracts.model import Document
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.graph import State


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

    def refusal(self, command: Callable[[str], str] | None = None) -> DponeError:
        """Return the refusal to load the route, DPONE_LOAD_GUARDED.

        Args:
            command: gives the command line of a verb for the process's manifest; None where the manifest is not known.
        """
        if command is None:
            next_step = (
                f"Run `dpone guard show` with the manifest of {self.process}, compare, then `dpone guard clear`."
            )
        else:
            next_step = f"Run `{command('guard show')}`, compare, then `{command('guard clear')} --reason ..`."
        return DponeError(
            "DPONE_LOAD_GUARDED",
            f"{self.process} into {self.target} is guarded ({self.status}): manual reconciliation is required.",
            next_step=next_step,
            load_id=self.load_id,
            guard=str(self.status),
            reason="native_transfer_manual_reconciliation_required",
        )


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
