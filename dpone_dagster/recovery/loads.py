"""What every run of a load does first: close what changed nothing, finish what did, refuse what is guarded."""

from dpone_dagster.contracts.mart import Scope
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.graph import State
from dpone_dagster.publication.lifecycle import finish
from dpone_dagster.publication.load import LoadReport, close, take_over, was_staged
from dpone_dagster.publication.load_route import Attempt, route


def settle_load(attempt: Attempt, scope: Scope | None) -> LoadReport | None:
    """Settle what an earlier run left: close what changed nothing, finish what did, refuse what is guarded.

    Returns:
        The report of this very scope when its load was finished forward; else None.
    """
    ports, name = attempt.ports, attempt.process.name
    guard, load = ports.journal.guard(name), ports.journal.open_load(name)
    if guard is not None:
        raise guard.refusal(attempt.plan.command)
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
    finished = finish(route(attempt, load, action=action, staged=was_staged(load)))
    # A load without a day is what was asked for; another day, or another target, still has to be loaded.
    return finished if load.scope == scope and load.target == attempt.plan.target else None
