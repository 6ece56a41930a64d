"""One worker's attempt at one day: the ports, the lease, and the watch over phases that every step shares."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from dpone_dagster.cancellation import Cancellation
from dpone_dagster.contracts.documents import GateReport
from dpone_dagster.contracts.mart import MartSpec, Relation, Scope
from dpone_dagster.contracts.names import predecessor_name, query_prefix, shadow_name, stage_name
from dpone_dagster.contracts.policy import Policy
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.port import JournalPort, Lease, OperationRecord, RunIdentity
from dpone_dagster.planning.plans import Workflow
from dpone_dagster.ports import AnalyticsPort, ArtifactStorePort, BuilderPort, ProgressPort, SourcePort, TestResult


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Everything from outside that a publication needs.

    Attributes:
        analytics: gives a ClickHouse port whose query ids start with the given prefix.
    """

    journal: JournalPort
    source: SourcePort
    builder: BuilderPort
    artifacts: ArtifactStorePort
    analytics: Callable[[str], AnalyticsPort]
    policy: Policy
    progress: ProgressPort


@dataclass(frozen=True, kw_only=True)
class MartResult:
    """What one mart's day came to.

    Attributes:
        action: ``published``, ``finished`` (an earlier run's operation was finished forward) or ``skipped``
            (COMPLETE already and no replay asked for).
    """

    action: str
    operation: OperationRecord
    gates: GateReport | None = None
    tests: tuple[TestResult, ...] = ()


class PublicationFailed(DponeError):
    """A day that did not publish, with what was evaluated before it stopped.

    Attributes:
        gates: mart name -> its gate report, where evaluated.
        tests: the dbt tests that ran.
        target_untouched: True where the operations are closed, so ClickHouse provably did not change.
    """

    gates: dict[str, GateReport]
    tests: tuple[TestResult, ...]
    target_untouched: bool


@dataclass(kw_only=True)
class Attempt:
    """The state of one attempt; methods are helpers that every step needs."""

    ports: Ports
    workflow: Workflow
    scope: Scope
    identity: RunIdentity
    lease: Lease
    cancel: Cancellation
    gates: dict[str, GateReport] = field(default_factory=dict)
    tests: tuple[TestResult, ...] = ()

    def analytics(self, operation: OperationRecord) -> AnalyticsPort:
        """ClickHouse under query ids of this operation and this worker."""
        return self.ports.analytics(f"{query_prefix(operation.operation_id)}{self.identity.worker_id[:8]}-")

    def mart(self, operation: OperationRecord) -> MartSpec:
        """The declaration of an operation's mart."""
        return self.workflow.mart(operation.mart)

    def boundary(self) -> None:
        """Pass a safe boundary: stop here if interrupted or no longer the holder."""
        self.cancel.check()
        self.lease.check()

    @contextmanager
    def phase(self, operation: OperationRecord, name: str) -> Iterator["PhaseCount"]:
        """Time one phase of one operation; keeps it in the journal when it succeeds."""
        self.ports.progress.phase(operation.mart, name)
        count = PhaseCount()
        started, clock = datetime.now(UTC), time.monotonic()
        yield count
        try:
            self.ports.journal.phase(
                operation.operation_id,
                self.identity.worker_id,
                name,
                started=started,
                seconds=time.monotonic() - clock,
                rows=count.rows,
                bytes_=count.bytes,
            )
        except DponeError as error:
            # A duration is no evidence: losing it must not turn what was done into a failure.
            self.ports.progress.note(f"The duration of {name} was not kept ({error.code}).")


@dataclass
class PhaseCount:
    """What a phase moved; None where it moves nothing."""

    rows: int | None = None
    bytes: int | None = None


def stage_of(mart: MartSpec, operation: OperationRecord) -> Relation:
    """The operation's staging table."""
    return _beside(mart, stage_name(mart.target.name, operation.operation_id))


def shadow_of(mart: MartSpec, operation: OperationRecord) -> Relation:
    """The operation's shadow under its present epoch."""
    return _beside(mart, shadow_name(mart.target.name, operation.operation_id, operation.fencing_epoch))


def shadows_of(attempt: Attempt, operation: OperationRecord) -> list[Relation]:
    """The operation's shadow under every epoch that the operation ever had, the present one first.

    A worker that takes over renames the shadow; one that dies before it does leaves it under an older epoch.
    """
    mart = attempt.mart(operation)
    epochs = {change["fencing_epoch"] for change in attempt.ports.journal.transitions(operation.operation_id)}
    return [
        shadow_of(mart, operation),
        *(
            _beside(mart, shadow_name(mart.target.name, operation.operation_id, epoch))
            for epoch in sorted(epochs - {operation.fencing_epoch})
        ),
    ]


def predecessor_of(mart: MartSpec, uuid: str) -> Relation:
    """Where a replaced generation is kept."""
    return _beside(mart, predecessor_name(mart.target.name, uuid))


def _beside(mart: MartSpec, name: str) -> Relation:
    return Relation(schema_name=mart.target.schema_name, name=name)
