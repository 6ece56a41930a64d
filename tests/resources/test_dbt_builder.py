"""dbt in process: one parse, exact selection, silence, interrupts, faults at the commit's boundaries."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from dbt_support import DAY, Sandbox, pair_project, sandbox, write_project  # noqa: F401

from dpone_dagster import faults
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.port import OperationRecord
from dpone_dagster.ports import MutationOutcome
from resources.dbt_builder import DbtBuilder, classify, project_digest
from resources.embedded.home import Home

SLOW = """
drop table loose.events;
create view loose.events as
select e.* from (select pg_sleep(60)) as nap cross join lateral (
    select timestamp '2024-03-10 12:00' as reported_at, timestamp '2024-03-10 12:00' as event_at, 1 as device,
           7::smallint as site, 1.5::numeric(12,3) as reading, 'x'::varchar(10) as note, 'ab'::char(4) as code,
           date '2024-03-10' as seen_on, true as flag, 1::smallint as small, 1::bigint as huge,
           gen_random_uuid() as tag) as e
"""


class Interrupted(BaseException):
    """What an orchestrator's handler raises."""


def test_a_parsed_project_is_kept_and_bound_to_its_files(
    sandbox: Sandbox,  # noqa: F811
    home: Home,
    pair_project: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def must_not(self: DbtBuilder) -> None:
        raise AssertionError("parsed again")

    monkeypatch.setattr(DbtBuilder, "_prepare", must_not)
    fresh = DbtBuilder(conninfo="", home=home.root / "dbt", project=pair_project)
    assert set(fresh.manifest()["nodes"]) >= {"model.dpone_marts.events", "model.dpone_marts.totals"}
    copy = tmp_path / "copy"
    shutil.copytree(pair_project, copy)
    assert project_digest(copy) == project_digest(pair_project)
    (copy / "models" / "pair" / "totals.sql").write_text("select 1 as hour")
    assert project_digest(copy) != project_digest(pair_project)
    with pytest.raises(AssertionError, match="parsed again"):
        DbtBuilder(conninfo="", home=home.root / "dbt", project=copy).manifest()


def test_builds_do_not_lengthen_dbts_own_lists(sandbox: Sandbox) -> None:  # noqa: F811
    """dbt extends this list at every call and walks it at the next: the days of a year grew slower by it."""
    from dbt.adapters.base.impl import DEFAULT_BASE_BEHAVIOR_FLAGS as FLAGS

    lengths = []
    for _ in range(3):
        sandbox.events([{}])
        assert sandbox.build(sandbox.admit("events")).model_status["model.dpone_marts.events"] == "success"
        sandbox.settle("events")
        sandbox.sql.execute("delete from loose.events")
        lengths.append(len(FLAGS))
    assert len(set(lengths)) == 1


def test_the_planning_form_needs_no_dbt(sandbox: Sandbox, home: Home, pair_project: Path) -> None:  # noqa: F811
    """A code server that only lists marts must not pay for importing dbt."""
    script = (
        "import sys; from pathlib import Path; from resources.dbt_builder import DbtBuilder;"
        "b = DbtBuilder(conninfo='', home=Path(sys.argv[1]), project=Path(sys.argv[2]));"
        "print(len(b.manifest()['nodes']), 'dbt' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(home.root / "dbt"), str(pair_project)],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.split() == ["3", "False"]


def test_a_project_that_does_not_parse_refuses(tmp_path: Path) -> None:
    project = write_project(tmp_path, {"models/pair/totals.sql": "select {{ ref('nobody') }}"})
    with pytest.raises(DponeError) as caught:
        DbtBuilder(conninfo="", home=tmp_path / "home", project=project).manifest()
    assert caught.value.code == "DPONE_DBT_FAILED"


def test_a_failing_test_leaves_the_model_committed(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.events([{"device": 1, "site": None}, {"device": 2, "site": None}])
    operation = sandbox.admit("events")
    result = sandbox.build(operation)
    assert result.model_status == {"model.dpone_marts.events": "success"}
    assert [(t.name, t.status, t.failures) for t in result.tests] == [("not_null_events_site", "fail", 2)]
    assert sandbox.source.outcome(operation)[0] is MutationOutcome.COMMITTED_WITH_IMAGES


def test_tests_look_at_the_published_day(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.sql.execute("insert into marts.events (event_at, device, flag) values ('2024-03-09 12:00', 1, true)")
    sandbox.events([{"device": 1}])
    operation = sandbox.admit("events")
    assert [t.status for t in sandbox.build(operation).tests] == ["pass"]


def test_nothing_that_dbt_or_the_engine_said_leaks(
    sandbox: Sandbox,  # noqa: F811
    home: Home,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    sandbox.sql.execute("alter table marts.events add constraint low check (device < 5)")
    # The violation's DETAIL has the whole row.
    sandbox.events([{"device": 7, "note": "topsecret"}])
    operation = sandbox.admit("events")
    environment = dict(os.environ)
    result = sandbox.build(operation)
    assert result.error_codes == {"model.dpone_marts.events": "DPONE_DBT_FAILED"}
    assert "topsecret" not in repr(result)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert dict(os.environ) == environment
    assert list(tmp_path.rglob("*")) == []
    for path in (home.root / "dbt").rglob("*"):
        assert path.is_dir() or b"topsecret" not in path.read_bytes()


def test_a_statement_has_a_deadline(sandbox: Sandbox) -> None:  # noqa: F811
    sandbox.sql.execute(SLOW)
    sandbox.builder._policy = sandbox.builder._policy.model_copy(update={"statement_seconds": 1})
    operation = sandbox.admit("events")
    started = time.monotonic()
    result = sandbox.build(operation)
    assert result.error_codes == {"model.dpone_marts.events": "DPONE_STATEMENT_DEADLINE"}
    assert time.monotonic() - started < 20


@contextmanager
def when_the_model_runs(sandbox: Sandbox, act: Any) -> Iterator[None]:  # noqa: F811
    """Call ``act`` from another thread once a session with the worker's tag is inside the slow query."""

    def watch() -> None:
        with psycopg.connect(sandbox.database.conninfo, autocommit=True) as connection:
            for _ in range(2000):
                row = connection.execute(
                    """select count(*) from pg_stat_activity
                       where application_name = %s and state = 'active' and wait_event = 'PgSleep'""",
                    [f"dpone-{sandbox.worker}"],
                ).fetchone()
                if row and row[0]:
                    act()
                    return
                time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_cancels_the_sql_promptly(sandbox: Sandbox, number: int) -> None:  # noqa: F811
    sandbox.sql.execute(SLOW)
    operation = sandbox.admit("events")
    said: list[int] = []

    def orchestrator(number: int, frame: Any) -> None:
        said.append(number)
        raise Interrupted

    earlier = {n: signal.signal(n, orchestrator) for n in (signal.SIGINT, signal.SIGTERM)}
    sent: list[float] = []
    try:
        with when_the_model_runs(sandbox, lambda: (sent.append(time.monotonic()), os.kill(os.getpid(), number))):
            with pytest.raises(DponeError) as caught:
                sandbox.build(operation)
            stopped = time.monotonic()
        assert [signal.getsignal(n) for n in earlier] == [orchestrator, orchestrator]
    finally:
        for n, handler in earlier.items():
            signal.signal(n, handler)
    assert caught.value.code == "DPONE_CANCELLED"
    assert said == [number]
    assert stopped - sent[0] < 5
    tagged = "select count(*) from pg_stat_activity where application_name = %s and state <> 'idle'"
    assert sandbox.one(tagged, f"dpone-{sandbox.worker}") == 0
    assert sandbox.source.outcome(operation) == (MutationOutcome.ROLLED_BACK, None)
    assert not any(thread.name == "dbt" for thread in threading.enumerate())
    # And the same process can build again.
    sandbox.sql.execute("drop view loose.events")
    sandbox.sql.execute("create table loose.events as select null::timestamp as reported_at")
    assert sandbox.build(operation).model_status == {"model.dpone_marts.events": "error"}


@pytest.mark.parametrize(
    ("boundary", "outcome"),
    [
        ("mutate.before_commit", MutationOutcome.ROLLED_BACK),
        ("mutate.after_commit", MutationOutcome.COMMITTED_WITH_IMAGES),
    ],
)
def test_a_lost_acknowledgement_is_told_by_the_receipt(
    sandbox: Sandbox,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    boundary: str,
    outcome: MutationOutcome,
) -> None:
    monkeypatch.setattr(faults, "_ARMED_AT", boundary)
    monkeypatch.setattr(faults, "_ACTION", "fail")
    sandbox.events([{"device": 1}])
    operation = sandbox.admit("events")
    result = sandbox.build(operation)
    # dbt says the same in both cases.
    assert result.model_status == {"model.dpone_marts.events": "error"}
    assert sandbox.source.outcome(operation)[0] is outcome


@pytest.mark.parametrize(
    ("boundary", "outcome", "rows"),
    [
        ("mutate.before_commit", MutationOutcome.ROLLED_BACK, 0),
        ("mutate.after_commit", MutationOutcome.COMMITTED_WITH_IMAGES, 1),
    ],
)
def test_a_killed_process(
    sandbox: Sandbox,  # noqa: F811
    home: Home,
    pair_project: Path,  # noqa: F811
    boundary: str,
    outcome: MutationOutcome,
    rows: int,
) -> None:
    sandbox.events([{"device": 1}])
    operation: OperationRecord = sandbox.admit("events")
    given = {
        "conninfo": sandbox.database.conninfo,
        "home": str(home.root / "dbt"),
        "project": str(pair_project),
        "operation": operation,
    }
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("dbt_worker.py"))],
        input=pickle.dumps(given),
        capture_output=True,
        env={**os.environ, "DPONE_FAULT": f"{boundary}:kill", "PYTHONPATH": str(root)},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    deadline = time.monotonic() + 10
    while sandbox.source._may_still_commit(_session(sandbox), operation) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sandbox.source.outcome(operation)[0] is outcome
    assert sandbox.one("select count(*) from marts.events") == rows


def _session(sandbox: Sandbox) -> Any:  # noqa: F811
    from psycopg.rows import dict_row

    return psycopg.connect(sandbox.database.conninfo, autocommit=True, row_factory=dict_row)


MESSAGES = [
    ("Database Error in model events (x.sql)\n  DPONE_KEY_NULL field=a rows=3 side=source\n  CONTEXT: y",
     "DPONE_KEY_NULL", "field=a, rows=3, side=source"),
    ("Compilation Error in model events (x.sql)\n  DPONE_MART_ABSENT field=events\n\n  > in macro",
     "DPONE_MART_ABSENT", "field=events"),
    # A value that looks like a code is a value: it is not on the second line, or not alone there.
    ("Database Error in model events (x.sql)\n  some error\n  DETAIL: Key (a)=(\n  DPONE_KEY_NULL\n)",
     "DPONE_DBT_FAILED", "events"),
    ("Database Error in model events (x.sql)\n  x DPONE_KEY_NULL field=a rows=3", "DPONE_DBT_FAILED", "events"),
    ("Database Error in model events (x.sql)\n  DPONE_NO_SUCH_CODE", "DPONE_DBT_FAILED", "events"),
    ("Database Error in model events (x.sql)\n  canceling statement due to statement timeout",
     "DPONE_STATEMENT_DEADLINE", "events"),
    ("", "DPONE_DBT_FAILED", "events"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "code", "part"), MESSAGES)
def test_messages_become_codes(message: str, code: str, part: str) -> None:
    found, sentence = classify(message, "events")
    assert found == code
    assert part in sentence
    assert "Key (" not in sentence
    assert DAY.key not in sentence
