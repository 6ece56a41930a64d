"""Random histories: the stored journal and a model of the graph, written down here once more, never disagree."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import journal_support as support
import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from dpone_dagster.errors import DponeError
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import OperationRecord
from resources.journal.store import SqlJournal

# (state, state in which the outcome became unknown or "") -> what transition() may reach. Spec R's graph and the
# design's two edges, without those to COMPLETE.
LEGAL = {
    ("PREPARING", ""): {"PREPARED", "FAILED_PRE_COMMIT", "COMMIT_UNKNOWN"},
    ("PREPARED", ""): {"COMMITTING", "FAILED_PRE_COMMIT"},
    ("COMMITTING", ""): {"TARGET_COMMITTED", "COMMIT_UNKNOWN"},
    ("TARGET_COMMITTED", ""): {"COMMITTED_INCOMPLETE"},
    ("COMMITTED_INCOMPLETE", ""): set(),
    ("COMMIT_UNKNOWN", "PREPARING"): {"PREPARING", "FAILED_PRE_COMMIT"},
    ("COMMIT_UNKNOWN", "COMMITTING"): {"TARGET_COMMITTED", "PREPARED"},
    ("FAILED_PRE_COMMIT", ""): set(),
    ("COMPLETE", ""): set(),
}
PUBLISHABLE = {"TARGET_COMMITTED", "COMMITTED_INCOMPLETE"}


def test_random_histories(journal: SqlJournal, pg: Callable[..., psycopg.Connection[Any]]) -> None:
    connection = pg()
    tables = ", ".join(f"dpone_control.{table}" for table in support.ALL_TABLES)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            connection.execute(f"truncate {tables} cascade")
            self.stack = ExitStack()
            self.admissions = self.generation = 0
            self.epoch = 0

        @initialize()
        def adopt(self) -> None:
            self.lease = self.stack.enter_context(support.hold(journal, support.identity()))
            support.adopt(journal, self.lease)
            self.uuid, self.operation = support.BASE_UUID, None
            self.stale: list[OperationRecord] = []
            self.state, self.since, self.version = "COMPLETE", "", 0

        def expect(self, work: Callable[[], OperationRecord], code: str | None) -> None:
            """Do it, and compare what is stored with the model."""
            if code is not None:
                with pytest.raises(DponeError) as refused:
                    work()
                assert refused.value.code == code
                return
            done = work()
            if self.operation is not None:
                self.stale.append(self.operation)
            self.operation = done
            stored = connection.execute(
                "select state, coalesce(unknown_since, ''), version, fencing_epoch from dpone_control.operation"
                " where operation_id = %s",
                [done.operation_id],
            ).fetchone()
            assert stored == (self.state, self.since, self.version, self.epoch)
            assert journal.operation(done.operation_id) == done

        @rule()
        def admit(self) -> None:
            free = self.state in ("COMPLETE", "FAILED_PRE_COMMIT")
            if free:
                self.admissions += 1
                self.epoch += 1
                self.state, self.since, self.version = "PREPARING", "", 1
            salt = str(self.admissions)
            code = None if free else "DPONE_OPERATION_OPEN"
            self.expect(lambda: support.admit(journal, self.lease, salt=salt), code)

        @precondition(lambda self: self.operation is not None)
        @rule(to=st.sampled_from(list(State)))
        def transition(self, to: State) -> None:
            operation = self.operation
            assert operation is not None
            legal = to.value in LEGAL[self.state, self.since]
            if legal:
                self.since = self.state if to is State.COMMIT_UNKNOWN else ""
                self.state = to.value
                self.version += 1
            self.expect(lambda: journal.transition(operation, to), None if legal else "DPONE_TRANSITION_ILLEGAL")

        @precondition(lambda self: self.operation is not None)
        @rule()
        def publish(self) -> None:
            operation = self.operation
            assert operation is not None
            legal = self.state in PUBLISHABLE
            uuid = f"00000000-0000-0000-0001-{self.generation:012}"
            if legal:
                operation = journal.record(operation, {"predecessor_uuid": self.uuid})
                self.generation += 1
                self.state, self.version, self.uuid = "COMPLETE", self.version + 2, uuid
            elif self.state == "PREPARED":
                return  # the empty day's edge needs the unchanged UUID; it has a test of its own
            self.expect(
                lambda: support.publish(journal, operation, uuid=uuid),
                None if legal else "DPONE_TRANSITION_ILLEGAL",
            )
            head = journal.generation(support.TARGET)
            assert head is not None
            assert (head.uuid, head.generation) == (self.uuid, self.generation + 1)

        @precondition(lambda self: self.operation is not None)
        @rule()
        def somebody_else_takes_over(self) -> None:
            operation = self.operation
            assert operation is not None
            self.stack.close()
            self.lease = self.stack.enter_context(support.hold(journal, support.identity()))
            finished = self.state in ("COMPLETE", "FAILED_PRE_COMMIT")
            if not finished:
                self.epoch += 1
                self.version += 1
            self.expect(
                lambda: journal.take_over(self.lease, [operation.operation_id])[0],
                "DPONE_TRANSITION_ILLEGAL" if finished else None,
            )

        @precondition(lambda self: self.stale)
        @rule(data=st.data(), to=st.sampled_from(list(State)))
        def the_past_writes_nothing(self, data: st.DataObject, to: State) -> None:
            record = data.draw(st.sampled_from(self.stale))
            before = support.everything(connection)
            with pytest.raises(DponeError) as refused:
                journal.transition(record, to)
            assert refused.value.code in ("DPONE_FENCED", "DPONE_TRANSITION_ILLEGAL")
            assert support.everything(connection) == before

        def teardown(self) -> None:
            self.stack.close()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=12,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
