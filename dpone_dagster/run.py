"""One run, from its launch to its end: hold the locks, settle what an earlier run left, admit, walk the lifecycle.

This is the front door of marts and loads alike, and the one place that knows both the path (``publication``) and what
is done when it broke (``recovery``).
"""

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime

from dpone_dagster.cancellation import Cancellation
from dpone_dagster.contracts.mart import Scope
from dpone_dagster.contracts.policy import Policy
from dpone_dagster.errors import DponeError, unexpected
from dpone_dagster.faults import reach
from dpone_dagster.journal.facts import Facts
from dpone_dagster.journal.port import JournalPort, Lease, LoadJournalPort, OperationRecord, RunIdentity
from dpone_dagster.planning.load_plan import LoadPlan
from dpone_dagster.planning.plans import Workflow, bind_attempt, plan_workflow
from dpone_dagster.ports import MutationOutcome, ProgressPort
from dpone_dagster.publication import load_route, path
from dpone_dagster.publication.attempt import Attempt, MartResult, Ports
from dpone_dagster.publication.commit import summarize
from dpone_dagster.publication.lifecycle import run
from dpone_dagster.publication.load import LoadPorts, LoadReport
from dpone_dagster.publication.preflight import check_generation, check_pair
from dpone_dagster.recovery.loads import settle_load
from dpone_dagster.recovery.reconcile import reconcile

# --------------------------------------------------------------------------------------------------- every run


@contextmanager
def _holding(
    resources: Iterable[str],
    *,
    journal: JournalPort | LoadJournalPort,
    policy: Policy,
    progress: ProgressPort,
    identity: RunIdentity,
    scope: Scope,
) -> Iterator[tuple[Lease, Cancellation]]:
    """Hold the locks of a run; nothing leaves here but refusals of ours and interrupts.

    An exception's own text may carry row values, so it is shown as the cause only to who asks by ``DPONE_DEBUG``.
    """
    try:
        with Cancellation() as cancel:

            def waiting(sentence: str) -> None:
                cancel.check()
                progress.note(sentence)

            with journal.hold(
                resources,
                identity=identity,
                scope=scope,
                deadline_seconds=policy.lock_wait_seconds,
                on_wait=waiting,
            ) as lease:
                yield lease, cancel
    except DponeError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        raise unexpected(error) from (error if os.environ.get("DPONE_DEBUG") else None)


def refuse_day(scope: Scope, *, name: str, start: date | None, now: datetime) -> None:
    """Refuse a day that has not ended, or that lies before a publication's start.

    Raises:
        DponeError: DPONE_SCOPE_IN_FUTURE, DPONE_SCOPE_BEFORE_START.
    """
    if scope.end > now:
        raise DponeError("DPONE_SCOPE_IN_FUTURE", f"The day {scope.key} has not ended in UTC.")
    if start is not None and scope.start.date() < start:
        raise DponeError("DPONE_SCOPE_BEFORE_START", f"The day {scope.key} is before {name}'s start {start}.")


# ------------------------------------------------------------------------------------------------------- marts


def publish_day(
    ports: Ports,
    workflow: Workflow,
    scope: Scope,
    identity: RunIdentity,
    *,
    replay: bool,
    now: datetime | None = None,
) -> dict[str, MartResult]:
    """Publish one UTC day of every mart of a workflow, or say why not.

    Args:
        ports: the engines, the journal, dbt, the artifact store.
        workflow: the marts published together.
        scope: the day.
        identity: who is working.
        replay: publish again where every mart of the day is COMPLETE; otherwise such a day is skipped, unless a
            later replay of it failed with the SQL day committed: that one is restored and rebuilt.
        now: the clock, for tests.

    Returns:
        Mart name -> result, in plan order.

    Raises:
        PublicationFailed: a gate, a dbt test, a key or a proof said no; nothing a reader sees has changed.
        DponeError: any other refusal; `dpone explain` says where the operation stands. Nothing else leaves here
            but interrupts.
    """
    for mart in workflow.marts:
        refuse_day(scope, name=mart.name, start=mart.start_date, now=now or datetime.now(UTC))
    with _holding(
        workflow.resources,
        journal=ports.journal,
        policy=ports.policy,
        progress=ports.progress,
        identity=identity,
        scope=scope,
    ) as (lease, cancel):
        attempt = Attempt(ports=ports, workflow=workflow, scope=scope, identity=identity, lease=lease, cancel=cancel)
        if finished := reconcile(attempt):
            return finished
        if not replay and (skipped := _complete(attempt)):
            return skipped
        return run(path.SemanticRefresh(attempt, _admit(attempt)))


def _complete(attempt: Attempt) -> dict[str, MartResult] | None:
    """The day's publications, if every mart has one and the SQL day is still what was published."""
    journal, results = attempt.ports.journal, {}
    for mart in attempt.workflow.marts:
        head = journal.scope_head(mart.name, attempt.scope)
        operation = journal.operation(head.operation_id) if head else None
        if operation is None:
            return None
        day = journal.history(mart.name, attempt.scope)
        later = day[[o.operation_id for o in day].index(operation.operation_id) + 1 :]
        if any(Facts.of(o).outcome == MutationOutcome.COMMITTED_WITH_IMAGES for o in later):
            return None
        results[mart.name] = MartResult(action="skipped", operation=operation)
    for mart in attempt.workflow.marts:
        # What says "published already" must not say it of a table that is gone.
        uuid = attempt.ports.analytics(f"dpone-check-{attempt.identity.worker_id[:8]}-").uuid(mart.target)
        check_generation(attempt, mart, uuid)
    operations = [r.operation for r in results.values()]
    together = len({o.workflow_execution_id for o in operations}) == 1
    if together and Facts.of(operations[0]).durable_summary_sha256 is None:
        # The run died between its last publication and this.
        summarize(attempt, operations)
    return results


def _admit(attempt: Attempt) -> list[OperationRecord]:
    workflow, journal = attempt.workflow, attempt.ports.journal
    # Refusals that need no admission come before it, so that they leave nothing behind.
    for mart in workflow.marts:
        check_pair(attempt, mart)
    attempt.boundary()
    reach("admit.before")
    operations = journal.admit(
        attempt.lease,
        workflow=workflow.name,
        marts=[m.name for m in workflow.marts],
        targets=[m.target.dotted for m in workflow.marts],
        scope=attempt.scope,
        build=lambda found: plan_workflow(
            workflow, attempt.scope, found, policy=attempt.ports.policy, identity=attempt.identity
        ),
        bind=lambda bundle, operation_id, epoch: bind_attempt(
            bundle, operation_id, epoch=epoch, identity=attempt.identity
        ),
    )
    reach("admit.after")
    return operations


# ------------------------------------------------------------------------------------------------------- loads


def run_load(
    ports: LoadPorts,
    plan: LoadPlan,
    *,
    scope: Scope | None,
    identity: RunIdentity,
    replay: bool = True,
    elsewhere: frozenset[str] = frozenset(),
    now: datetime | None = None,
) -> LoadReport:
    """Run one load, or say why not.

    Args:
        ports: the engines, the journal, the providers.
        plan: what to load.
        scope: the UTC day of a daily load; None for every other.
        identity: who is working.
        replay: load a day again that this very plan has loaded; otherwise it is skipped.
        elsewhere: hooks (``pre_hook.<id>``, ``post_hook.<id>``) that the orchestrator runs as steps of its own.
        now: the clock, for tests.

    Raises:
        LoadFailed: the load stopped; its report says where, and what a reader of the target sees.
        DponeError: a refusal before anything was admitted.
    """
    started = now or datetime.now(UTC)
    _refuse_scope(plan, scope, started)
    with _holding(
        _resources(ports, plan),
        journal=ports.journal,
        policy=ports.policy,
        progress=ports.progress,
        identity=identity,
        # A load without a day is known to those who wait for it by the day it runs on.
        scope=scope or Scope.day(started.date()),
    ) as (lease, cancel):
        attempt = load_route.Attempt(ports, plan, identity, lease, cancel, elsewhere, started)
        if (settled := settle_load(attempt, scope)) is not None:
            return settled
        if not replay and (skipped := _skipped(attempt, scope)) is not None:
            return skipped
        return run(_admit_load(attempt, scope))


def _refuse_scope(plan: LoadPlan, scope: Scope | None, now: datetime) -> None:
    """Refuse a day where none is loaded, none where one is, and one that cannot be loaded yet or at all."""
    read = plan.process.source.read
    if (read.mode == "daily") != (scope is not None):
        raise DponeError(
            "DPONE_SCOPE_NOT_A_DAY",
            f"{plan.process.name} reads {read.mode}: give {'a UTC day' if read.mode == 'daily' else 'no day'}.",
        )
    if scope is not None:
        refuse_day(scope, name=plan.process.name, start=read.start_date, now=now)


def _resources(ports: LoadPorts, plan: LoadPlan) -> tuple[str, ...]:
    """The locks of the plan, and of the target of what is left open: the manifest may have named another then."""
    left = ports.journal.open_load(plan.process.name)
    return (*plan.resources, f"target:{left.target}") if left else plan.resources


def _skipped(attempt: load_route.Attempt, scope: Scope | None) -> LoadReport | None:
    """The report of a day that this very plan has loaded."""
    day = attempt.ports.journal.loaded_day(attempt.process.name, scope) if scope else None
    if day is None or day.plan_sha256 != attempt.plan.sha256:
        return None
    load = attempt.ports.journal.load(day.load_id)
    return replace(attempt.report(load=load, scope=scope, action="skipped"), staged_rows=day.rows)


def _admit_load(attempt: load_route.Attempt, scope: Scope | None) -> load_route.LoadRoute:
    load = attempt.ports.journal.begin(
        attempt.lease,
        load_id=str(uuid.uuid4()),
        process=attempt.process.name,
        target=attempt.plan.target,
        strategy=attempt.process.sink.strategy,
        plan_sha256=attempt.plan.sha256,
        scope=scope,
    )
    reach("load.admitted")
    return load_route.route(attempt, load, action="loaded", staged=not attempt.process.legacy)
