"""The engine or the process is lost at the worst moment: what the journal says and what it holds afterwards."""

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import journal_support as support
import psycopg
import pytest
import sqlalchemy as sa
from journal_support import NEW_UUID, TARGET, LossyProxy, Worker, everything

from dpone_dagster.contracts.canonical import canonical_json
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import OperationRecord
from resources.embedded.postgres import PostgresEndpoint
from resources.journal.dialect import Fault, PostgresDialect
from resources.journal.store import SqlJournal
from resources.journal.transactions import JournalPolicy

Open = Callable[..., psycopg.Connection[Any]]
S = State


@pytest.fixture
def lossy(journal: SqlJournal, fresh_db: PostgresEndpoint) -> Iterator[tuple[SqlJournal, LossyProxy]]:
    """A journal that reaches its engine through a proxy which can lose things."""
    folder = tempfile.mkdtemp(prefix="dpone-proxy-")
    proxy = LossyProxy(folder, f"{fresh_db.host}/.s.PGSQL.{fresh_db.port}")
    url = sa.make_url(fresh_db.sqlalchemy_url).update_query_dict({"host": folder, "port": "5432"})
    through = SqlJournal(url, policy=JournalPolicy(quiet=5))
    yield through, proxy
    through.close()
    proxy.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("lose", ["request", "answer"])
def test_a_transition_survives_a_lost_acknowledgement(lossy: tuple[SqlJournal, LossyProxy], lose: str) -> None:
    journal, proxy = lossy
    with support.hold(journal, support.identity()) as lease:
        operation = support.admit(journal, lease)
        proxy.lose = lose
        operation = journal.transition(operation, S.PREPARED, facts={"stage_uuid": "a"})
        assert proxy.lose == ""
        lease.check()
    assert journal.operation(operation.operation_id) == operation
    assert [c["version"] for c in journal.transitions(operation.operation_id)] == [1, 2]


@pytest.mark.parametrize("lose", ["request", "answer"])
def test_a_publication_survives_a_lost_acknowledgement(
    lossy: tuple[SqlJournal, LossyProxy], lose: str, pg: Open
) -> None:
    journal, proxy = lossy
    with support.hold(journal, support.identity()) as lease:
        support.adopt(journal, lease)
        operation = support.committed(journal, lease)
        proxy.lose = lose
        complete = support.publish(journal, operation)
        assert proxy.lose == ""
    assert journal.operation(operation.operation_id) == complete
    assert complete.state is S.COMPLETE
    assert pg().execute("select uuid, generation from dpone_control.generation_head").fetchall() == [(NEW_UUID, 2)]
    assert [support.rows(pg(), t) for t in ("scope_head", "checkpoint", "generation")] == [1, 1, 2]


def test_a_takeover_and_a_baseline_survive_it_too(lossy: tuple[SqlJournal, LossyProxy]) -> None:
    journal, proxy = lossy
    with support.hold(journal, support.identity()) as lease:
        proxy.lose = "answer"
        support.adopt(journal, lease)
        operation = support.admit(journal, lease)
    with support.hold(journal, support.identity()) as lease:
        proxy.lose = "answer"
        [taken] = journal.take_over(lease, [operation.operation_id])
        assert journal.operation(operation.operation_id) == taken
        assert (taken.fencing_epoch, taken.version) == (2, 2)


@pytest.mark.parametrize(("lose", "admitted"), [("request", 0), ("answer", 1)])
def test_an_admission_without_an_answer_is_unknown_and_the_next_run_finds_out(
    lossy: tuple[SqlJournal, LossyProxy], lose: str, admitted: int, pg: Open
) -> None:
    journal, proxy = lossy
    with support.hold(journal, support.identity()) as lease:
        proxy.lose = lose
        with pytest.raises(DponeError) as unknown:
            support.admit(journal, lease)
    assert unknown.value.code == "DPONE_COMMIT_UNKNOWN"
    assert "admission" in unknown.value.sentence
    support.wait_until(lambda: support.rows(pg(), "operation") == admitted)
    with support.hold(journal, support.identity()) as lease:
        opened = journal.open_operations("sales")
        assert len(opened) == admitted
        for operation in journal.take_over(lease, [o.operation_id for o in opened]):
            journal.transition(operation, S.FAILED_PRE_COMMIT)
        assert support.admit(journal, lease, salt="again").state is S.PREPARING


def test_nothing_is_assumed_when_the_engine_is_gone_too(lossy: tuple[SqlJournal, LossyProxy], pg: Open) -> None:
    journal, proxy = lossy
    with support.hold(journal, support.identity()) as lease:
        support.adopt(journal, lease)
        operation = support.committed(journal, lease)
        journal.close()  # so that reading needs a new connection
        proxy.lose = "answer and engine"
        with pytest.raises(DponeError) as unknown:
            support.publish(journal, operation)
    assert unknown.value.code == "DPONE_COMMIT_UNKNOWN"
    assert pg().execute("select state from dpone_control.operation").fetchall() == [("COMPLETE",)]


def test_a_mixed_publication_is_corruption(lossy: tuple[SqlJournal, LossyProxy], pg: Open) -> None:
    journal, proxy = lossy
    with support.hold(journal, support.identity()) as lease:
        support.adopt(journal, lease)
        operation = support.committed(journal, lease)
        # Somebody's trigger takes one of the rows back, unseen by the publication itself.
        pg().execute(
            "create function dpone_control.undo() returns trigger language plpgsql as"
            " $$ begin delete from dpone_control.scope_head; return null; end $$;"
            " create constraint trigger undo after insert on dpone_control.scope_head"
            " initially deferred for each row execute function dpone_control.undo()"
        )
        proxy.lose = "answer"
        with pytest.raises(DponeError) as corrupt:
            support.publish(journal, operation)
    assert corrupt.value.code == "DPONE_JOURNAL_CORRUPT"


def test_an_unreachable_engine_has_one_code_and_no_driver_text(lossy: tuple[SqlJournal, LossyProxy]) -> None:
    journal, proxy = lossy
    with support.hold(journal, support.identity()) as lease:
        operation = support.admit(journal, lease)
        journal.close()
        proxy.refusing = True
        attempts: list[Callable[[], object]] = [
            lambda: journal.operation(operation.operation_id),
            lambda: journal.transition(operation, S.PREPARED),
            lambda: support.hold(journal, support.identity()).__enter__(),
            lambda: journal.end_worker(operation.worker_id, reason="x"),
        ]
        for attempt in attempts:
            with pytest.raises(DponeError) as gone:
                attempt()
            assert gone.value.code == "DPONE_ENGINE_UNAVAILABLE"
            assert gone.value.__cause__ is None
            assert gone.value.__suppress_context__
            assert "connection" not in str(gone.value).lower()
            assert gone.value.details == {"error_class": "OperationalError", "sqlstate": None}
        proxy.refusing = False
        journal.transition(operation, S.PREPARED)


def test_a_session_ended_before_commit_wrote_nothing(journal: SqlJournal, pg: Open) -> None:
    with support.hold(journal, support.identity()) as lease:
        before = everything(pg())

        def build(found: Any) -> Any:
            pg().execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name = %s and state = 'idle in transaction'",
                [f"dpone-{lease.identity.worker_id}"],
            )
            return support.bundle(found)

        with pytest.raises(DponeError) as gone:
            journal.admit(
                lease,
                workflow="daily",
                marts=["sales"],
                targets=[TARGET],
                scope=support.DAY,
                build=build,
                bind=support.bind,
            )
        assert gone.value.code == "DPONE_ENGINE_UNAVAILABLE"
        assert gone.value.details == {"error_class": "AdminShutdown", "sqlstate": "57P01"}
        assert everything(pg()) == before
        assert support.admit(journal, lease).version == 1


def test_a_process_killed_before_commit_published_nothing(
    journal: SqlJournal, fresh_db: PostgresEndpoint, pg: Open
) -> None:
    worker = Worker("journal_worker.py", fresh_db.sqlalchemy_url, "publish", "2024-03-01", "doomed")
    try:
        assert worker.hear() == "ready"
        assert worker.hear() == "publishing"
        before = everything(pg())
        worker.say("go")
        assert worker.process.wait(30) == -signal.SIGKILL
    finally:
        worker.end()
    assert everything(pg()) == before
    assert pg().execute("select state from dpone_control.operation").fetchall() == [("TARGET_COMMITTED",)]
    with support.hold(journal, support.identity()) as lease:
        [operation] = journal.take_over(lease, [o.operation_id for o in journal.open_operations("sales")])
        assert support.publish(journal, operation).state is S.COMPLETE


def test_conflicts_are_retried_a_bounded_number_of_times(
    fresh_db: PostgresEndpoint, journal: SqlJournal, pg: Open
) -> None:
    stubborn = SqlJournal(fresh_db.sqlalchemy_url, policy=JournalPolicy(tries=3))
    tries = 0

    def build(found: Any) -> Any:
        nonlocal tries
        tries += 1
        note = support.Note.seal(text=f"plan of try {tries}")
        if tries <= conflicts:
            # The document comes into being after our snapshot, so we do not see it and write it once more.
            insert = "insert into dpone_control.document values (%s, 'test.note.v1', %s, now() at time zone 'utc')"
            pg().execute(insert, [note.sha256, canonical_json(note.as_json()).decode()])
        return replace(support.bundle(found), documents=(note,))

    def admit(lease: Any) -> list[OperationRecord]:
        return stubborn.admit(
            lease,
            workflow="daily",
            marts=["sales"],
            targets=[TARGET],
            scope=support.DAY,
            build=build,
            bind=support.bind,
        )

    with support.hold(stubborn, support.identity()) as lease:
        conflicts = 99
        with pytest.raises(DponeError) as busy:
            admit(lease)
        assert (busy.value.code, tries) == ("DPONE_JOURNAL_BUSY", 3)
        assert [support.rows(pg(), table) for table in ("operation", "resource_guard", "transition")] == [0, 0, 0]
        conflicts = 4
        assert [operation.fencing_epoch for operation in admit(lease)] == [1]
        assert tries == 5
    stubborn.close()


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (psycopg.errors.SerializationFailure, Fault.RETRY),
        (psycopg.errors.DeadlockDetected, Fault.RETRY),
        (psycopg.errors.UniqueViolation, Fault.RETRY),
        (psycopg.errors.LockNotAvailable, Fault.BUSY),
        (psycopg.errors.QueryCanceled, Fault.BUSY),
        (psycopg.errors.AdminShutdown, Fault.UNAVAILABLE),
        (psycopg.errors.CannotConnectNow, Fault.UNAVAILABLE),
        (psycopg.errors.TooManyConnections, Fault.UNAVAILABLE),
        (psycopg.OperationalError, Fault.UNAVAILABLE),
        (psycopg.errors.UndefinedTable, Fault.MISSING),
        (psycopg.errors.InsufficientPrivilege, Fault.REFUSED),
        (psycopg.errors.StringDataRightTruncation, Fault.REFUSED),
    ],
)
def test_what_an_sqlstate_means(error: type[psycopg.Error], fault: Fault) -> None:
    assert PostgresDialect().fault(sa.exc.DBAPIError("", {}, error("secret"))) is fault
