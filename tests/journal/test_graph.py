"""The state graph against spec R's diagram, copied here edge by edge."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpone_dagster.errors import DponeError
from dpone_dagster.journal.graph import EDGES, FORWARD_ONLY, TERMINAL, State, mermaid, step

SPEC = """
[*] --> PREPARING
PREPARING --> PREPARED
PREPARING --> FAILED_PRE_COMMIT
PREPARING --> COMMIT_UNKNOWN
PREPARED --> COMMITTING
PREPARED --> COMPLETE
PREPARED --> FAILED_PRE_COMMIT
COMMITTING --> TARGET_COMMITTED
COMMITTING --> COMMIT_UNKNOWN
TARGET_COMMITTED --> COMPLETE
TARGET_COMMITTED --> COMMITTED_INCOMPLETE
COMMIT_UNKNOWN --> TARGET_COMMITTED
COMMIT_UNKNOWN --> PREPARED
COMMITTED_INCOMPLETE --> COMPLETE
"""
EXTRA = {("COMMIT_UNKNOWN", "PREPARING"), ("COMMIT_UNKNOWN", "FAILED_PRE_COMMIT")}
DIAGRAM = {tuple(line.split(" --> ")) for line in SPEC.strip().splitlines()}

# What an operation is: its state and, while it is unknown, where that began.
Here = tuple[State | None, State | None]


def legal(source: State | None, target: State, unknown_since: State | None) -> bool:
    try:
        return step(source, target, unknown_since=unknown_since).target is target
    except DponeError as error:
        if error.code != "DPONE_TRANSITION_ILLEGAL":
            raise
        return False


def successors(here: Here) -> list[Here]:
    state, since = here
    return [
        (target, state if target is State.COMMIT_UNKNOWN else None) for target in State if legal(state, target, since)
    ]


def reachable(start: Here) -> set[Here]:
    seen, todo = set(), [start]
    while todo:
        here = todo.pop()
        if here not in seen:
            seen.add(here)
            todo += successors(here)
    return seen


def test_the_edges_are_the_spec_s_and_two_more() -> None:
    edges = [(str(e.source or "[*]"), str(e.target)) for e in EDGES]
    assert len(DIAGRAM) == 14
    assert len(edges) == 16
    assert set(edges) == DIAGRAM | EXTRA


def test_every_pair_is_an_edge_or_refused() -> None:
    for source, target, since in product((None, *State), State, (None, *State)):
        name = (str(source or "[*]"), str(target))
        expected = name in DIAGRAM
        if source is State.COMMIT_UNKNOWN:
            out = {
                State.PREPARING: {State.PREPARING, State.FAILED_PRE_COMMIT},
                State.COMMITTING: {State.TARGET_COMMITTED, State.PREPARED},
            }
            expected = since is not None and target in out.get(since, set())
        assert legal(source, target, since) == expected, (source, target, since)


def test_terminal_states_have_no_way_out() -> None:
    assert {State.COMPLETE, State.FAILED_PRE_COMMIT} == TERMINAL
    for state in TERMINAL:
        assert successors((state, None)) == []


def test_every_state_is_reached_and_can_end() -> None:
    everywhere = reachable((None, None))
    assert {state for state, _ in everywhere} == {None, *State}
    assert {since for state, since in everywhere if state is State.COMMIT_UNKNOWN} == {
        State.PREPARING,
        State.COMMITTING,
    }
    for here in everywhere:
        ends = {state for state, _ in reachable(here)} & TERMINAL
        assert ends, here


def test_what_may_have_changed_the_target_never_fails() -> None:
    assert {State.COMMITTING, State.TARGET_COMMITTED, State.COMMITTED_INCOMPLETE} == FORWARD_ONLY
    for state in FORWARD_ONLY:
        assert not legal(state, State.FAILED_PRE_COMMIT, None)
    # Once the map has proved the swap, COMPLETE is the only end.
    for state in (State.TARGET_COMMITTED, State.COMMITTED_INCOMPLETE):
        assert {s for s, _ in reachable((state, None))} & TERMINAL == {State.COMPLETE}
    # Unknown since COMMITTING cannot fail at once: the map must speak first.
    assert not legal(State.COMMIT_UNKNOWN, State.FAILED_PRE_COMMIT, State.COMMITTING)


@given(st.lists(st.integers(min_value=0, max_value=7), max_size=40))
def test_random_walks(choices: list[int]) -> None:
    here: Here = (None, None)
    walk = [here]
    for choice in choices:
        ways = successors(here)
        if not ways:
            break
        here = ways[choice % len(ways)]
        walk.append(here)
    states = [state for state, _ in walk]
    assert states[0] is None
    assert states[1:2] in ([], [State.PREPARING])
    # Nothing follows an end, and COMPLETE is only reached through PREPARED.
    assert not any(state in TERMINAL for state in states[:-1])
    if states[-1] is State.COMPLETE:
        assert State.PREPARED in states
    # After TARGET_COMMITTED there is no way back.
    if State.TARGET_COMMITTED in states:
        later = states[states.index(State.TARGET_COMMITTED) :]
        assert set(later) <= {State.TARGET_COMMITTED, State.COMMITTED_INCOMPLETE, State.COMPLETE}


def test_refusal_names_both_states() -> None:
    with pytest.raises(DponeError, match="from COMPLETE to PREPARING") as caught:
        step(State.COMPLETE, State.PREPARING)
    assert caught.value.code == "DPONE_TRANSITION_ILLEGAL"


def test_the_diagram_for_the_docs_has_every_edge() -> None:
    lines = mermaid().splitlines()
    assert lines[0] == "stateDiagram-v2"
    drawn = {tuple(line.strip().split(":")[0].split(" --> ")) for line in lines[1:]}
    assert drawn == DIAGRAM | EXTRA
    assert len(lines) == 17
