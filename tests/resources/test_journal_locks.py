"""Locks, leases and takeover, with real processes that are killed, stopped and overtaken."""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import journal_support as support
import psycopg
import pytest
from journal_support import DAY, NEXT, RESOURCES, Worker

from dpone_dagster.errors import DponeError
from dpone_dagster.journal.graph import State
from resources.embedded.postgres import PostgresEndpoint
from resources.journal.store import SqlJournal
from resources.journal.transactions import JournalPolicy

Open = Callable[..., psycopg.Connection[Any]]
Start = Callable[..., Worker]
# pg_locks shows every database of the server, and other tests run beside this one.
HERE = "database = (select oid from pg_database where datname = current_database())"


@pytest.fixture
def start(journal: SqlJournal, fresh_db: PostgresEndpoint) -> Iterator[Start]:
    """Starts worker processes on the test's journal, and ends them afterwards."""
    started: list[Worker] = []

    def start_(action: str = "hold", *, day: str = "2024-03-01", run_id: str = "other-run") -> Worker:
        started.append(Worker("journal_worker.py", fresh_db.sqlalchemy_url, action, day, run_id))
        return started[-1]

    yield start_
    for worker in started:
        worker.end()


def admitted(worker: Worker) -> tuple[str, str]:
    """Wait for a worker's admission; return its worker and operation ids."""
    assert worker.hear() == "ready"
    word, worker_id, operation_id = worker.hear().split()
    assert word == "admitted"
    return worker_id, operation_id


def test_of_twenty_racers_one_wins_and_nineteen_are_told_who(start: Start, pg: Open) -> None:
    racers = {f"run-{n}": start("race", run_id=f"run-{n}") for n in range(20)}
    for racer in racers.values():
        assert racer.hear() == "ready"
    for racer in racers.values():
        racer.say("go")
    answers = {run: racer.hear().split() for run, racer in racers.items()}
    [winner] = [run for run, words in answers.items() if words[0] == "admitted"]
    pid, host = str(racers[winner].process.pid), socket.gethostname()
    losers = [words for run, words in answers.items() if run != winner]
    assert losers == [["DPONE_OPERATION_HELD", winner, pid, host]] * 19
    connection = pg()
    assert [support.rows(connection, table) for table in ("operation", "transition", "attempt")] == [1, 1, 1]
    epochs = connection.execute("select resource_id, epoch from dpone_control.resource_guard order by 1").fetchall()
    assert epochs == [(resource, 1) for resource in sorted(RESOURCES)]


def test_another_day_waits_with_a_message_and_then_goes_on(journal: SqlJournal, pg: Open) -> None:
    first, second = support.identity("first"), support.identity("second")
    said: list[str] = []
    got: list[float] = []

    def wait_for_it() -> None:
        with support.hold(journal, second, scope=NEXT, on_wait=said.append):
            got.append(time.monotonic())

    with support.hold(journal, first):
        waiter = threading.Thread(target=wait_for_it)
        waiter.start()
        support.wait_until(lambda: said)
        time.sleep(0.3)
        assert not got
        released = time.monotonic()
    waiter.join(20)
    assert got
    assert 0 <= got[0] - released < 3
    assert len(said) == 1
    assert all(part in said[0] for part in ("run first", "2024-03-01", socket.gethostname()))
    ended = pg().execute("select run_id, ended_reason from dpone_control.attempt order by started_at").fetchall()
    assert ended == [("first", "released"), ("second", "released")]


def test_the_message_comes_again(journal: SqlJournal, fresh_db: PostgresEndpoint) -> None:
    patient = SqlJournal(fresh_db.sqlalchemy_url, policy=JournalPolicy(say_every=0.2))
    said: list[str] = []
    with (
        support.hold(journal, support.identity("first")),
        pytest.raises(DponeError) as refused,
        support.hold(patient, support.identity(), scope=NEXT, deadline=1, on_wait=said.append),
    ):
        pass
    patient.close()
    assert refused.value.code == "DPONE_LOCK_DEADLINE"
    assert refused.value.details["run_id"] == "first"
    assert 3 <= len(said) <= 6


def test_the_deadline_releases_what_was_taken(journal: SqlJournal, pg: Open) -> None:
    with journal.hold(["workflow:daily"], identity=support.identity(), scope=NEXT, deadline_seconds=5, on_wait=print):
        began = time.monotonic()
        # mart:sales and target:.. sort before workflow:daily, so they were free and the last one was not.
        with pytest.raises(DponeError) as refused, support.hold(journal, support.identity(), deadline=0.5):
            pass
        assert 0.5 <= time.monotonic() - began < 3
        assert refused.value.code == "DPONE_LOCK_DEADLINE"
        held = pg().execute(f"select count(*) from pg_locks where locktype = 'advisory' and {HERE}").fetchone()
        assert held == (1,)


def test_a_wait_can_be_interrupted(journal: SqlJournal, pg: Open) -> None:
    def interrupt(sentence: str) -> None:
        raise KeyboardInterrupt

    with support.hold(journal, support.identity()):
        with pytest.raises(KeyboardInterrupt), support.hold(journal, support.identity(), scope=NEXT, on_wait=interrupt):
            pass
        assert support.rows(pg(), "attempt") == 1
    assert pg().execute(f"select count(*) from pg_locks where locktype = 'advisory' and {HERE}").fetchone() == (0,)


def test_a_killed_holder_frees_its_locks_and_the_next_must_reconcile(
    journal: SqlJournal, start: Start, pg: Open
) -> None:
    other = start()
    dead, operation_id = admitted(other)
    other.process.send_signal(signal.SIGKILL)
    other.process.wait()
    me = support.identity("me")
    with support.hold(journal, me) as lease:
        with pytest.raises(DponeError) as refused:
            support.admit(journal, lease, salt="me")
        assert refused.value.code == "DPONE_OPERATION_OPEN"
        assert refused.value.details["operation_id"] == operation_id
        assert refused.value.details["state"] == "PREPARING"
        [taken] = journal.take_over(lease, [operation_id])
        assert (taken.worker_id, taken.fencing_epoch, taken.version) == (me.worker_id, 2, 2)
        journal.transition(taken, State.FAILED_PRE_COMMIT, facts={"failure_code": "DPONE_RUN_LOST"})
        again = support.admit(journal, lease, salt="me")
        assert (again.fencing_epoch, again.version) == (3, 1)
    ended = pg().execute("select ended_reason from dpone_control.attempt where worker_id = %s", [dead]).fetchone()
    assert ended == ("its lock session was gone",)


def test_a_stopped_holder_is_held_until_its_sessions_are_ended(journal: SqlJournal, start: Start, pg: Open) -> None:
    other = start(run_id="stuck")
    stuck, operation_id = admitted(other)
    other.process.send_signal(signal.SIGSTOP)
    me = support.identity("me")
    with pytest.raises(DponeError) as refused, support.hold(journal, me):
        pass
    assert refused.value.code == "DPONE_OPERATION_HELD"
    held_by = {name: refused.value.details[name] for name in ("worker_id", "run_id", "pid")}
    assert held_by == {"worker_id": stuck, "run_id": "stuck", "pid": other.process.pid}
    holder = journal.holder("mart:sales")
    assert holder is not None
    assert (holder.worker_id, holder.scope) == (stuck, DAY)

    journal.end_worker(stuck, reason="operator said so")
    tag = f"dpone-{stuck}"
    assert pg().execute("select count(*) from pg_stat_activity where application_name = %s", [tag]).fetchone() == (0,)
    log = (
        pg()
        .execute(
            "select worker_id, reason, sessions_ended >= 1, finished_at >= logged_at from dpone_control.takeover_log"
        )
        .fetchall()
    )
    assert log == [(stuck, "operator said so", True, True)]

    with support.hold(journal, me) as lease:
        [mine] = journal.take_over(lease, [operation_id])
        before = pg().execute("select * from dpone_control.operation").fetchall()
        other.process.send_signal(signal.SIGCONT)
        other.say("check")
        assert other.hear() == "DPONE_LEASE_LOST"
        other.say("PREPARED")
        assert other.hear() == "DPONE_FENCED"
        other.say("check")
        assert other.hear() == "DPONE_LEASE_LOST"
        assert pg().execute("select * from dpone_control.operation").fetchall() == before
        assert [change["kind"] for change in journal.transitions(operation_id)] == ["admit", "take_over"]
        journal.transition(mine, State.PREPARED)
        other.say("end")
        other.process.wait(10)
        lease.check()


def test_a_lease_notices_that_its_session_was_ended(journal: SqlJournal, pg: Open) -> None:
    me = support.identity()
    with support.hold(journal, me) as lease:
        lease.check()
        pg().execute(f"select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and {HERE} limit 1")
        for _ in range(2):
            with pytest.raises(DponeError) as lost:
                lease.check()
            assert lost.value.code == "DPONE_LEASE_LOST"
        with pytest.raises(DponeError) as refused:
            support.admit(journal, lease)
        assert refused.value.code == "DPONE_LEASE_LOST"
    assert support.rows(pg(), "operation") == 0


def test_a_lease_of_other_resources_admits_nothing(journal: SqlJournal, pg: Open) -> None:
    with journal.hold(
        ["workflow:daily", "mart:sales"], identity=support.identity(), scope=DAY, deadline_seconds=5, on_wait=print
    ) as lease:
        with pytest.raises(DponeError) as refused:
            support.admit(journal, lease)
        assert refused.value.code == "DPONE_LEASE_LOST"
        assert "target:analytics.sales" in refused.value.sentence
    with pytest.raises(DponeError) as late:
        support.admit(journal, lease)
    assert late.value.code == "DPONE_LEASE_LOST"


def test_leaving_the_lease_leaves_no_session(journal: SqlJournal, pg: Open) -> None:
    me = support.identity()
    with contextlib.suppress(ZeroDivisionError), support.hold(journal, me) as lease:
        support.admit(journal, lease)
        raise ZeroDivisionError
    tag = f"dpone-{me.worker_id}"
    support.wait_until(
        lambda: pg().execute("select 1 from pg_stat_activity where application_name = %s", [tag]).fetchone() is None
    )
    assert pg().execute("select ended_reason from dpone_control.attempt").fetchone() == ("ZeroDivisionError",)
    assert journal.holder("mart:sales") is None


def test_takeover_waits_for_the_dead_workers_other_sessions(
    journal: SqlJournal, fresh_db: PostgresEndpoint, pg: Open
) -> None:
    with support.hold(journal, support.identity("first")) as lease:
        operation = support.admit(journal, lease)
    # As a dbt session of the dead worker that is still busy.
    busy = psycopg.connect(fresh_db.conninfo, application_name=f"dpone-{operation.worker_id}")
    impatient = SqlJournal(fresh_db.sqlalchemy_url, policy=JournalPolicy(quiet=0.3))
    with support.hold(impatient, support.identity("second")) as lease:
        with pytest.raises(DponeError) as refused:
            impatient.take_over(lease, [operation.operation_id])
        assert refused.value.code == "DPONE_OPERATION_HELD"
        assert refused.value.details["worker_id"] == operation.worker_id
        busy.close()
        [taken] = impatient.take_over(lease, [operation.operation_id])
        assert taken.fencing_epoch == 2
    impatient.close()


def test_ending_a_worker_needs_the_role(journal: SqlJournal, fresh_db: PostgresEndpoint, pg: Open) -> None:
    login = f"plain_{fresh_db.database}"
    connection = pg()
    connection.execute(f"create role {login} login")
    connection.execute(f"grant usage on schema dpone_control to {login}")
    connection.execute(f"grant select, insert, update on all tables in schema dpone_control to {login}")
    url = fresh_db.sqlalchemy_url.replace(f"{fresh_db.user}@", f"{login}@")
    plain = SqlJournal(url)
    try:
        with support.hold(journal, support.identity("victim")) as lease:
            victim = lease.identity.worker_id
            with pytest.raises(DponeError) as refused:
                plain.end_worker(victim, reason="curious")
            assert refused.value.code == "DPONE_TAKEOVER_FORBIDDEN"
            assert support.rows(connection, "takeover_log") == 0
            lease.check()
            # The role alone does not beat the engine: a superuser's session stays.
            if connection.execute("select 1 from pg_roles where rolname = 'dpone_takeover'").fetchone() is None:
                connection.execute("create role dpone_takeover")
            connection.execute(f"grant dpone_takeover to {login}")
            with pytest.raises(DponeError) as engine:
                plain.end_worker(victim, reason="curious")
            assert engine.value.code == "DPONE_TAKEOVER_FORBIDDEN"
            assert support.rows(connection, "takeover_log") == 1
            lease.check()
        with support.hold(plain, support.identity("own")) as lease:
            plain.end_worker(lease.identity.worker_id, reason="granted")
            with pytest.raises(DponeError) as lost:
                lease.check()
            assert lost.value.code == "DPONE_LEASE_LOST"
    finally:
        plain.close()
        connection.execute(f"drop owned by {login}")
        connection.execute(f"drop role {login}")
