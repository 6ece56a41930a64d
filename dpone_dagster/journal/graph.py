"""The state graph of an operation: one table of edges that the journal, the docs and the tests all read."""

from enum import StrEnum
from typing import NamedTuple

from dpone_dagster.errors import DponeError


class State(StrEnum):
    """Canonical operation states (spec R, "Normative state graph")."""

    PREPARING = "PREPARING"
    PREPARED = "PREPARED"
    COMMITTING = "COMMITTING"
    TARGET_COMMITTED = "TARGET_COMMITTED"
    COMPLETE = "COMPLETE"
    FAILED_PRE_COMMIT = "FAILED_PRE_COMMIT"
    COMMIT_UNKNOWN = "COMMIT_UNKNOWN"
    COMMITTED_INCOMPLETE = "COMMITTED_INCOMPLETE"


class Edge(NamedTuple):
    """One legal transition.

    Attributes:
        source, target: the states; ``source`` is None for admission.
        why: what must be proven before the edge is taken.
        entered_from: for edges out of COMMIT_UNKNOWN, the state in which the outcome became unknown; None
            where any will do.
    """

    source: State | None
    target: State
    why: str
    entered_from: State | None = None


S = State
EDGES: tuple[Edge, ...] = (
    Edge(None, S.PREPARING, "atomic admission with the complete guard set"),
    Edge(S.PREPARING, S.PREPARED, "every model sealed and prepared"),
    Edge(S.PREPARING, S.FAILED_PRE_COMMIT, "reconciled failure or safe cancellation"),
    Edge(S.PREPARING, S.COMMIT_UNKNOWN, "unresolved SQL Server or artifact outcome"),
    Edge(S.PREPARED, S.COMMITTING, "durable commit intent"),
    Edge(S.PREPARED, S.COMPLETE, "confirmed empty-scope fast path"),
    Edge(S.PREPARED, S.FAILED_PRE_COMMIT, "reconciled failure before the ClickHouse commit"),
    Edge(S.COMMITTING, S.TARGET_COMMITTED, "the UUID map proves the EXCHANGE"),
    Edge(S.COMMITTING, S.COMMIT_UNKNOWN, "EXCHANGE outcome unresolved"),
    Edge(S.TARGET_COMMITTED, S.COMPLETE, "atomic heads, checkpoint and journal publication"),
    Edge(S.TARGET_COMMITTED, S.COMMITTED_INCOMPLETE, "required evidence or publication incomplete"),
    Edge(S.COMMIT_UNKNOWN, S.TARGET_COMMITTED, "UUID reconciliation proves the successor", S.COMMITTING),
    Edge(S.COMMIT_UNKNOWN, S.PREPARED, "UUID reconciliation proves the predecessor", S.COMMITTING),
    # Without these two an unknown SQL outcome would be a dead end.
    Edge(S.COMMIT_UNKNOWN, S.PREPARING, "receipt and images prove the commit", S.PREPARING),
    Edge(S.COMMIT_UNKNOWN, S.FAILED_PRE_COMMIT, "rollback or non-invocation proven", S.PREPARING),
    Edge(S.COMMITTED_INCOMPLETE, S.COMPLETE, "exact publication recovery"),
)

TERMINAL = frozenset({S.COMPLETE, S.FAILED_PRE_COMMIT})
# From here on the target may have changed: an operation is only ever finished forward.
FORWARD_ONLY = frozenset({S.COMMITTING, S.TARGET_COMMITTED, S.COMMITTED_INCOMPLETE})


def step(current: State | None, target: State, *, unknown_since: State | None = None) -> Edge:
    """Return the edge from ``current`` to ``target``.

    Args:
        current: the state now; None before admission.
        target: the wanted state.
        unknown_since: where COMMIT_UNKNOWN was entered from; needed to leave it.

    Raises:
        DponeError: DPONE_TRANSITION_ILLEGAL when the graph has no such edge.
    """
    for edge in EDGES:
        if edge.source is current and edge.target is target and edge.entered_from in (None, unknown_since):
            return edge
    raise DponeError(
        "DPONE_TRANSITION_ILLEGAL",
        f"The state graph has no edge from {current or 'nothing'} to {target}"
        + (f" (unknown since {unknown_since})." if unknown_since else "."),
    )


def mermaid() -> str:
    """Return the graph as a mermaid ``stateDiagram-v2``, for the docs."""
    lines = ["stateDiagram-v2"]
    for edge in EDGES:
        since = f" (unknown since {edge.entered_from})" if edge.entered_from else ""
        lines.append(f"    {edge.source or '[*]'} --> {edge.target}: {edge.why}{since}")
    return "\n".join(lines)
