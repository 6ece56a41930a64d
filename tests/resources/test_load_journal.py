"""Governed loads in the journal: compare-and-set, fences, and what moves together; looked at with plain SQL."""

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from journal_support import DAY, NEXT, LossyProxy, digest, identity

from dpone_dagster.errors import DponeError
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import GuardStatus, Lease, LoadRecord
from resources.embedded.postgres import PostgresEndpoint
from resources.journal.store import SqlJournal
from resources.journal.transactions import JournalPolicy

Open = Callable[..., psycopg.Connection[Any]]
S, G = State, GuardStatus
TARGET = "analytics.orders"


def hold(journal: SqlJournal, *, process: str = "orders", target: str = TARGET) -> AbstractContextManager[Lease]:
    return journal.loads.hold(
        (f"load:{process}", f"target:{target}"),
        identity=identity(str(uuid.uuid4())),
        scope=DAY,
        deadline_seconds=20,
        on_wait=lambda sentence: None,
    )


def begin(journal: SqlJournal, lease: Lease, *, scope: Any = None, process: str = "orders") -> LoadRecord:
    return journal.loads.begin(
        lease,
        load_id=str(uuid.uuid4()),
        process=process,
        target=TARGET,
        strategy="append",
        plan_sha256=digest("plan"),
        scope=scope,
    )


def committed(journal: SqlJournal, load: LoadRecord) -> LoadRecord:
    for state, guard in ((S.PREPARED, None), (S.COMMITTING, G.ARMED), (S.TARGET_COMMITTED, G.CHECKPOINT_INCOMPLETE)):
        load = journal.loads.transition(load, state, guard=guard)
    return load


TABLES = ("load", "load_event", "load_guard", "load_checkpoint", "load_day", "resource_guard")


def world(connection: psycopg.Connection[Any]) -> dict[str, list[Any]]:
    """Every row that a load may write."""
    found = {table: connection.execute(f"select * from dpone_control.{table}").fetchall() for table in TABLES}
    return {table: sorted(rows, key=str) for table, rows in found.items()}


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


# ------------------------------------------------------------------------------------- compare and set


def test_a_record_that_is_not_the_newest_writes_nothing(journal: SqlJournal, pg: Open) -> None:
    with hold(journal) as lease:
        old = begin(journal, lease)
        new = journal.loads.record(old, {"a": 1})
        before = world(pg())
        attempts: list[Callable[[], object]] = [
            lambda: journal.loads.record(old, {"a": 2}),
            lambda: journal.loads.transition(old, S.PREPARED, guard=G.ARMED),
            lambda: journal.loads.persist_state(old, watermark="7", rows=1),
            lambda: journal.loads.clear_guard(old, reason="x"),
            lambda: journal.loads.record(replace(new, state=S.PREPARED), {"a": 3}),
            lambda: journal.loads.record(replace(new, fencing_epoch=7), {"a": 4}),
        ]
        for attempt in attempts:
            with pytest.raises(DponeError) as fenced:
                attempt()
            assert fenced.value.code == "DPONE_FENCED"
        assert world(pg()) == before


def test_a_load_goes_only_where_the_graph_lets_it(journal: SqlJournal, pg: Open) -> None:
    with hold(journal) as lease:
        load = begin(journal, lease)
        before = world(pg())
        for state in (S.COMMITTING, S.TARGET_COMMITTED, S.COMPLETE, S.COMMITTED_INCOMPLETE):
            with pytest.raises(DponeError) as illegal:
                journal.loads.transition(load, state, guard=None)
            assert illegal.value.code == "DPONE_TRANSITION_ILLEGAL"
        assert world(pg()) == before


def test_a_process_has_one_open_load(journal: SqlJournal, pg: Open) -> None:
    with hold(journal) as lease:
        begin(journal, lease)
        before = world(pg())
        with pytest.raises(DponeError) as opened:
            begin(journal, lease)
        assert opened.value.code == "DPONE_LOAD_OPEN"
        assert world(pg()) == before


def test_a_load_is_admitted_under_its_own_locks_only(journal: SqlJournal, pg: Open) -> None:
    with hold(journal, target="analytics.other") as lease, pytest.raises(DponeError) as refused:
        begin(journal, lease)
    assert refused.value.code == "DPONE_LEASE_LOST"
    with pytest.raises(DponeError) as gone:
        begin(journal, lease)
    assert gone.value.code == "DPONE_LEASE_LOST"
    assert world(pg())["load"] == []


# ------------------------------------------------------------------------------------------------ fences


def test_a_takeover_fences_the_former_worker_off(journal: SqlJournal, pg: Open) -> None:
    with hold(journal) as lease:
        former = begin(journal, lease)
    with pytest.raises(DponeError) as without_lease:
        journal.loads.record(former, {"late": True})
    assert without_lease.value.code == "DPONE_FENCED"
    with hold(journal) as lease:
        taken = journal.loads.take_over(lease, former)
        assert (taken.fencing_epoch, taken.worker_id, taken.version) == (2, lease.identity.worker_id, 2)
        before = world(pg())
        # The former worker's name and version under the successor's lease, and the former epoch.
        for late in (former, replace(taken, fencing_epoch=1), replace(taken, worker_id=former.worker_id)):
            with pytest.raises(DponeError) as fenced:
                journal.loads.transition(late, S.FAILED_PRE_COMMIT, guard=None)
            assert fenced.value.code == "DPONE_FENCED"
        with pytest.raises(DponeError) as twice:
            journal.loads.take_over(lease, former)
        assert twice.value.code == "DPONE_FENCED"
        assert world(pg()) == before


def test_a_target_waits_for_what_another_process_left_in_it(journal: SqlJournal) -> None:
    with hold(journal) as lease:
        left = committed(journal, begin(journal, lease))
    with hold(journal, process="returns") as lease:
        with pytest.raises(DponeError) as refused:
            begin(journal, lease, process="returns")
        assert refused.value.code == "DPONE_LOAD_OPEN"
        assert "orders" in refused.value.sentence
    with hold(journal) as lease:
        mine = journal.loads.take_over(lease, left)
        mine = journal.loads.persist_state(mine, watermark="5", rows=1)
        journal.loads.transition(mine, S.COMPLETE, guard=None)
    with hold(journal, process="returns") as lease:
        assert begin(journal, lease, process="returns").state is S.PREPARING
    assert (journal.loads.guard("orders"), journal.loads.guard("returns")) == (None, None)


# ------------------------------------------------------------------------------- what moves together


def test_checkpoint_day_and_guard_move_together_or_not_at_all(journal: SqlJournal, pg: Open) -> None:
    with hold(journal) as lease:
        load = committed(journal, begin(journal, lease, scope=DAY))
        before = world(pg())
        # The last write of the transaction is refused; with it goes everything.
        pg().execute("alter table dpone_control.load_event add constraint no_more check (kind <> 'persist_state')")
        with pytest.raises(DponeError):
            journal.loads.persist_state(load, watermark="7", rows=3)
        assert world(pg()) == before
        pg().execute("alter table dpone_control.load_event drop constraint no_more")
        load = journal.loads.persist_state(load, watermark="7", rows=3)
    assert load.facts["state_persisted"] is True
    assert pg().execute("select watermark, load_id from dpone_control.load_checkpoint").fetchall() == [
        ("7", load.load_id)
    ]
    assert pg().execute("select row_count, load_id from dpone_control.load_day").fetchall() == [(3, load.load_id)]
    assert pg().execute("select count(*) from dpone_control.load_guard").fetchall() == [(0,)]
    assert journal.loads.loaded_day("orders", NEXT) is None


def test_a_guarded_route_admits_nothing_though_its_load_is_settled(journal: SqlJournal, pg: Open) -> None:
    with hold(journal) as lease:
        load = begin(journal, lease)
        load = journal.loads.transition(load, S.FAILED_PRE_COMMIT, guard=G.TARGET_OUTCOME_UNKNOWN)
        before = world(pg())
        with pytest.raises(DponeError) as guarded:
            begin(journal, lease)
        assert guarded.value.code == "DPONE_LOAD_GUARDED"
        assert world(pg()) == before
        journal.loads.clear_guard(load, reason="r" * 1000)
        event = journal.loads.events(load.load_id)[-1]
        ((login,),) = pg().execute("select session_user").fetchall()
        assert (event["kind"], event["guard"], event["facts"]) == (
            "clear_guard",
            None,
            {"guard_cleared_by": login, "guard_cleared_because": "r" * 400},
        )
        assert begin(journal, lease).state is S.PREPARING


def test_facts_are_added_and_events_are_kept(journal: SqlJournal) -> None:
    with hold(journal) as lease:
        load = begin(journal, lease)
        load = journal.loads.record(load, {"a": 1, "b": 1})
        load = journal.loads.record(load, {"b": 2})
    assert journal.loads.load(load.load_id) == load
    assert load.facts == {"a": 1, "b": 2}
    assert [(e["version"], e["kind"], e["facts"]) for e in journal.loads.events(load.load_id)] == [
        (1, "begin", {}),
        (2, "record", {"a": 1, "b": 1}),
        (3, "record", {"b": 2}),
    ]


# ------------------------------------------------------------------------------------- lost answers


@pytest.mark.parametrize("lose", ["request", "answer"])
def test_every_change_survives_a_lost_acknowledgement(
    lossy: tuple[SqlJournal, LossyProxy], lose: str, pg: Open
) -> None:
    journal, proxy = lossy
    with hold(journal) as lease:
        proxy.lose = lose
        load = begin(journal, lease, scope=DAY)
        assert proxy.lose == ""
        changes: list[Callable[[LoadRecord], LoadRecord]] = [
            lambda load: journal.loads.record(load, {"staged_rows": 3}),
            lambda load: journal.loads.transition(load, S.PREPARED, guard=None),
            lambda load: journal.loads.transition(load, S.COMMITTING, guard=G.ARMED),
            lambda load: journal.loads.transition(load, S.TARGET_COMMITTED, guard=G.CHECKPOINT_INCOMPLETE),
            lambda load: journal.loads.persist_state(load, watermark="9", rows=3),
            lambda load: journal.loads.transition(load, S.COMPLETE, guard=None),
        ]
        for change in changes:
            proxy.lose = lose
            load = change(load)
            assert proxy.lose == ""
            assert journal.loads.load(load.load_id) == load
    assert [e["version"] for e in journal.loads.events(load.load_id)] == [1, 2, 3, 4, 5, 6, 7]
    found = world(pg())
    assert [len(found[table]) for table in ("load", "load_guard", "load_checkpoint", "load_day")] == [1, 0, 1, 1]


def test_a_takeover_survives_it_too(lossy: tuple[SqlJournal, LossyProxy]) -> None:
    journal, proxy = lossy
    with hold(journal) as lease:
        load = begin(journal, lease)
    with hold(journal) as lease:
        proxy.lose = "answer"
        taken = journal.loads.take_over(lease, load)
    assert (taken.version, taken.fencing_epoch) == (2, 2)
    assert journal.loads.load(load.load_id) == taken


def test_nothing_is_assumed_when_the_engine_is_gone_too(lossy: tuple[SqlJournal, LossyProxy], pg: Open) -> None:
    journal, proxy = lossy
    with hold(journal) as lease:
        load = committed(journal, begin(journal, lease))
        journal.close()  # so that reading needs a new connection
        proxy.lose = "answer and engine"
        with pytest.raises(DponeError) as unknown:
            journal.loads.persist_state(load, watermark="9", rows=3)
    assert unknown.value.code == "DPONE_COMMIT_UNKNOWN"
    assert pg().execute("select watermark from dpone_control.load_checkpoint").fetchall() == [("9",)]
    assert pg().execute("select count(*) from dpone_control.load_guard").fetchall() == [(0,)]
