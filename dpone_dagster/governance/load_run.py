"""Run a manifest's load: hold its locks, settle what an earlier run left, admit it, walk the lifecycle."""

import uuid
from dataclasses import replace
from datetime import UTC, datetime

from dpone_dagster.cancellation import Cancellation
from dpone_dagster.contracts.mart import Scope
from dpone_dagster.errors import DponeError, unexpected
from dpone_dagster.faults import reach
from dpone_dagster.governance.lifecycle import finish, run
from dpone_dagster.governance.load import LoadPlan, LoadPorts, LoadReport, close, take_over, was_staged
from dpone_dagster.governance.load_ports import LoadRecord
from dpone_dagster.governance.load_route import Attempt, LegacyRoute, LoadRoute, StagedRoute
from dpone_dagster.journal.graph import State
from dpone_dagster.ports import RunIdentity


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
    refuse_scope(plan, scope, started)
    try:
        with Cancellation() as cancel:

            def waiting(sentence: str) -> None:
                cancel.check()
                ports.progress.note(sentence)

            with ports.journal.hold(
                _resources(ports, plan),
                identity=identity,
                # A load without a day is known to those who wait for it by the day it runs on.
                scope=scope or Scope.day(started.date()),
                deadline_seconds=ports.policy.lock_wait_seconds,
                on_wait=waiting,
            ) as lease:
                attempt = Attempt(ports, plan, identity, lease, cancel, elsewhere, started)
                if (settled := _settle(attempt, scope)) is not None:
                    return settled
                if not replay and (skipped := _skipped(attempt, scope)) is not None:
                    return skipped
                return run(_admit(attempt, scope))
    except DponeError:
        raise
    except Exception as error:  # noqa: BLE001 - its text may carry row values, so it is not even shown as the cause
        raise unexpected(error) from None


def refuse_scope(plan: LoadPlan, scope: Scope | None, now: datetime) -> None:
    """Refuse a day where none is loaded, none where one is, and one that has not ended or lies before the start."""
    read = plan.process.source.read
    if (read.mode == "daily") != (scope is not None):
        raise DponeError(
            "DPONE_SCOPE_NOT_A_DAY",
            f"{plan.process.name} reads {read.mode}: give {'a UTC day' if read.mode == 'daily' else 'no day'}.",
        )
    if scope is None:
        return
    if scope.end > now:
        raise DponeError("DPONE_SCOPE_IN_FUTURE", f"The day {scope.key} has not ended in UTC.")
    if read.start_date is not None and scope.start.date() < read.start_date:
        raise DponeError(
            "DPONE_SCOPE_BEFORE_START",
            f"The day {scope.key} is before {plan.process.name}'s start {read.start_date}.",
        )


def _resources(ports: LoadPorts, plan: LoadPlan) -> tuple[str, ...]:
    """The locks of the plan, and of the target of what is left open: the manifest may have named another then."""
    left = ports.journal.open_load(plan.process.name)
    return (*plan.resources, f"target:{left.target}") if left else plan.resources


def _settle(attempt: Attempt, scope: Scope | None) -> LoadReport | None:
    """Settle what an earlier run left: close what changed nothing, finish what did, refuse what is guarded.

    Returns:
        The report of this very scope when its load was finished forward; else None.
    """
    ports, name = attempt.ports, attempt.process.name
    guard, load = ports.journal.guard(name), ports.journal.open_load(name)
    if guard is not None:
        raise DponeError(
            "DPONE_LOAD_GUARDED",
            f"{name} into {guard.target} is guarded ({guard.status}): manual reconciliation is required.",
            next_step=f"Run `{attempt.plan.command('guard show')}`, compare, then"
            f" `{attempt.plan.command('guard clear')} --reason ..`.",
            load_id=guard.load_id,
            guard=str(guard.status),
            reason="native_transfer_manual_reconciliation_required",
        )
    if load is None:
        return None
    ports.progress.note(f"Settling what an earlier run of {name} left behind.")
    load = take_over(ports, attempt.lease, load)
    if load.state in (State.PREPARING, State.PREPARED):
        close(ports, attempt.process, load, boundary="pre_finalize", code="DPONE_RUN_LOST")
        return None
    if load.state not in (State.TARGET_COMMITTED, State.COMMITTED_INCOMPLETE):
        raise DponeError("DPONE_JOURNAL_CORRUPT", f"A load of {name} is {load.state} without a guard.")
    action = "hooks_finished" if load.facts.get("state_persisted") else "finished"
    finished = finish(_route(attempt, load, action=action, staged=was_staged(load)))
    # A load without a day is what was asked for; another day, or another target, still has to be loaded.
    return finished if load.scope == scope and load.target == attempt.plan.target else None


def _skipped(attempt: Attempt, scope: Scope | None) -> LoadReport | None:
    """The report of a day that this very plan has loaded."""
    day = attempt.ports.journal.loaded_day(attempt.process.name, scope) if scope else None
    if day is None or day.plan_sha256 != attempt.plan.sha256:
        return None
    load = attempt.ports.journal.load(day.load_id)
    return replace(attempt.report(load=load, scope=scope, action="skipped"), staged_rows=day.rows)


def _admit(attempt: Attempt, scope: Scope | None) -> LoadRoute:
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
    return _route(attempt, load, action="loaded", staged=not attempt.process.legacy)


def _route(attempt: Attempt, load: LoadRecord, *, action: str, staged: bool) -> LoadRoute:
    report = attempt.report(load=load, scope=load.scope, action=action)
    report.finalization = "pre_finalize" if staged else "legacy_post_finalize"
    return (StagedRoute if staged else LegacyRoute)(attempt, load, report)
