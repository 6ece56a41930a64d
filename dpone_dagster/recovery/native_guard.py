"""The operator's procedure for a guarded route: see what the engine proves, then clear it (spec G, "native guard").

A guard is no lock and no fence: it only stops automatic retries. Clearing never guesses either. Where the engine proves
what became of the target, the proof is believed and the operator's word may not contradict it; where it proves
nothing, the operator's word is needed, and is kept with their login and reason.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from dpone_dagster.contracts.mart import Scope
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import GuardStatus, LoadRecord, RunIdentity
from dpone_dagster.planning.load_plan import LoadPlan
from dpone_dagster.ports import FinalizeOutcome, Visibility
from dpone_dagster.publication.load import LoadPorts, as_admitted, close, query_prefix, staged_of, take_over, was_staged

Word = Literal["committed", "not-committed"]


@dataclass(frozen=True, kw_only=True)
class GuardView:
    """A guarded route as an operator sees it.

    Attributes:
        proven: what the engine proves about the target now: ``committed``, ``not-committed`` or ``nothing``.
    """

    process: str
    target: str
    strategy: str
    status: str
    load_id: str
    state: str
    day: str | None
    set_at: datetime
    failure_code: str | None
    proven: str
    next_step: str

    def as_json(self) -> dict[str, Any]:
        """Return the view as JSON data."""
        return {**self.__dict__, "set_at": self.set_at.isoformat()}


def show(ports: LoadPorts, plan: LoadPlan) -> GuardView | None:
    """Return what is known of a process's guard; None where there is none."""
    guard = ports.journal.guard(plan.process.name)
    if guard is None:
        return None
    load = ports.journal.load(guard.load_id)
    if load is None:
        raise DponeError("DPONE_JOURNAL_CORRUPT", f"The guard of {guard.process} names a load that is not there.")
    # Whoever only looks ends nobody's statements: the load may be running.
    proven = _proven(ports, plan, load, end=False)
    word = "" if proven else " --outcome committed|not-committed"
    return GuardView(
        process=guard.process,
        target=guard.target,
        strategy=guard.strategy,
        status=str(guard.status),
        load_id=guard.load_id,
        state=str(load.state),
        day=load.scope.key if load.scope else None,
        set_at=guard.set_at,
        failure_code=load.facts.get("failure_code"),
        proven=proven or "nothing",
        next_step=f"Compare target and checkpoint, then run `{plan.command('guard clear')}{word} --reason ..`.",
    )


def clear(ports: LoadPorts, plan: LoadPlan, *, identity: RunIdentity, reason: str, word: Word | None) -> GuardView:
    """Clear a guard: settle the load by proof or by the operator's word, and let the next run go on from there.

    A load that is settled as committed is finished forward by the next run; one that is not is closed, and its
    staging dropped. One that was stopped between two partitions is sent forward, unless the operator says that it is
    not committed. The guard goes only once the load is settled, so that whoever is stopped in here clears again.

    Raises:
        DponeError: DPONE_LOAD_NOT_GUARDED; DPONE_GUARD_WORD_NEEDED where nothing is proven and no word is given;
            DPONE_GUARD_CONTRADICTED where the word contradicts the proof; DPONE_OPERATION_HELD.
    """
    name = plan.process.name
    guard = ports.journal.guard(name)
    if guard is None:
        raise DponeError("DPONE_LOAD_NOT_GUARDED", f"{name} has no guard.")
    with ports.journal.hold(
        (f"load:{name}", f"target:{guard.target}"),
        identity=identity,
        scope=Scope.day(datetime.now(UTC).date()),
        deadline_seconds=ports.policy.lock_wait_seconds,
        on_wait=ports.progress.note,
    ) as lease:
        view = show(ports, plan)
        # While we waited for the locks, the guard may have gone and another load may have left its own.
        load = ports.journal.load(view.load_id) if view else None
        if view is None or load is None:
            raise DponeError("DPONE_LOAD_NOT_GUARDED", f"{name} has no guard any more.")
        load = take_over(ports, lease, load)
        proven = _proven(ports, plan, load) or (None if word == "not-committed" else _forward(ports, plan, load))
        if proven and word and proven != word:
            raise DponeError("DPONE_GUARD_CONTRADICTED", f"The engine proves that the load of {name} is {proven}.")
        view = replace(view, proven=proven or "nothing")
        outcome = proven or word
        if outcome is None:
            raise DponeError("DPONE_GUARD_WORD_NEEDED", f"The engine does not prove what became of {guard.target}.")
        move, unknown = ports.journal.transition, GuardStatus.TARGET_OUTCOME_UNKNOWN
        if outcome == "committed":
            if load.state in (State.COMMITTING, State.COMMIT_UNKNOWN):
                load = move(load, State.TARGET_COMMITTED, guard=GuardStatus.CHECKPOINT_INCOMPLETE)
            ports.journal.clear_guard(load, reason=reason)
            return view
        if load.state is State.COMMITTING:
            load = move(load, State.COMMIT_UNKNOWN, guard=unknown)
        if load.state is State.COMMIT_UNKNOWN:
            load = move(load, State.PREPARED, guard=unknown)
        load = ports.journal.clear_guard(load, reason=reason)
        close(
            ports,
            plan.resolved,
            load,
            boundary="finalize",
            code=load.facts.get("failure_code", "DPONE_RUN_LOST"),
            sentence="An operator cleared the guard: the target has not changed.",
        )
        return view


def _proven(ports: LoadPorts, plan: LoadPlan, load: LoadRecord, *, end: bool = True) -> Word | None:
    if load.state in (State.TARGET_COMMITTED, State.COMMITTED_INCOMPLETE):
        return "committed"
    if load.state in (State.PREPARING, State.PREPARED):
        return "not-committed"
    if not was_staged(load):
        return None  # rows went in as they came; nothing tells how many
    outcome = ports.sink(query_prefix(load.load_id)).outcome(plan.resolved, staged_of(load), end=end)
    words: dict[FinalizeOutcome, Word | None] = {
        FinalizeOutcome.COMMITTED: "committed",
        FinalizeOutcome.NOT_COMMITTED: "not-committed",
        FinalizeOutcome.UNKNOWN: None,
    }
    return words[outcome]


def _forward(ports: LoadPorts, plan: LoadPlan, load: LoadRecord) -> Word | None:
    """Send what was stopped midway once more. The sink refuses where the target is not this load's own half."""
    sink = ports.sink(query_prefix(load.load_id))
    if not was_staged(load) or sink.describe(load.strategy).visibility is not Visibility.PER_PARTITION:
        return None  # it has no half
    try:
        sink.finalize(as_admitted(plan.resolved, load), staged_of(load))
    except DponeError as error:
        ports.progress.note(f"The load cannot be sent forward ({error.code}).")
    return _proven(ports, plan, load)
