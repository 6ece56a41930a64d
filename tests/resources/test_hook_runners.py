"""Hooks on the real engines, and a webhook to a server on this machine."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from dpone_dagster.declarations.manifest import Process
from dpone_dagster.errors import DponeError
from dpone_dagster.governance.hooks import build_hooks, run_phase
from dpone_dagster.ports import HookContext, HookDefinition, HookStep, SqlRunner
from resources.clickhouse.client import ClickHouseClient, connect
from resources.clickhouse.runner import ClickHouseRunner
from resources.embedded.engines import Engines, status, up
from resources.embedded.home import Home
from resources.embedded.postgres import PostgresEndpoint
from resources.embedded.processes import end
from resources.hook_providers import BUILTINS
from resources.postgres.runner import PostgresRunner

CONTEXT = HookContext(process="orders", run_id="run-1")
PROVIDERS = {name: factory(CONTEXT) for name, factory in BUILTINS.items()}
Connect = Callable[..., psycopg.Connection[Any]]


def definitions(*hooks: dict[str, Any], phase: str = "pre_hook") -> tuple[HookDefinition, ...]:
    process = Process.parse(
        {
            "name": "orders",
            "source": {
                "type": "mssql",
                "table": {"schema": "dbo", "name": "orders"},
                "options": {"hooks": {phase: [{"kind": "custom", **hook} for hook in hooks]}},
            },
            "sink": {"type": "clickhouse", "table": {"schema": "raw", "name": "orders"}, "strategy": "full_refresh"},
        }
    )
    root = Path("/")
    dialects = {"source": "postgres", "sink": "clickhouse"}
    return build_hooks(process, root=root, manifest_dir=root, dialects=dialects).phase(phase)


def run(runners: dict[str, SqlRunner], *hooks: dict[str, Any], phase: str = "pre_hook") -> list[HookStep]:
    steps = run_phase(definitions(*hooks, phase=phase), runners=runners, providers=PROVIDERS)
    assert "secret" not in repr(steps)
    return list(steps)


def refused(call: Callable[[], Any]) -> DponeError:
    with pytest.raises(DponeError) as error:
        call()
    assert "secret" not in str(error.value)
    assert "secret" not in repr(error.value.details)
    return error.value


# ------------------------------------------------------------------------------------------------- PostgreSQL


@pytest.fixture
def table(pg: Connect) -> Callable[[], list[int]]:
    connection = pg()
    connection.execute("CREATE TABLE t (a int PRIMARY KEY)")
    return lambda: [a for (a,) in connection.execute("SELECT a FROM t ORDER BY a").fetchall()]


@pytest.fixture
def runner(fresh_db: PostgresEndpoint) -> PostgresRunner:
    return PostgresRunner(fresh_db.conninfo, grace_seconds=1)


BROKEN = "INSERT INTO t VALUES (1), (2); INSERT INTO t VALUES (1) /* secret */; INSERT INTO t VALUES (3)"


def test_a_transaction_leaves_nothing_behind(runner: PostgresRunner, table: Callable[[], list[int]]) -> None:
    error = refused(lambda: runner.execute(BROKEN, autocommit=False, read_only=False, timeout_seconds=10))
    assert error.code == "DPONE_HOOK_FAILED"
    assert error.details == {"sqlstate": "23505", "statement": 2, "repeatable": True}
    assert table() == []


def test_without_one_every_statement_stands_for_itself(runner: PostgresRunner, table: Callable[[], list[int]]) -> None:
    error = refused(lambda: runner.execute(BROKEN, autocommit=True, read_only=False, timeout_seconds=10))
    assert error.details == {"sqlstate": "23505", "statement": 2, "repeatable": False}
    assert table() == [1, 2]


def test_affected_rows_are_those_that_were_written(runner: PostgresRunner, table: Callable[[], list[int]]) -> None:
    def rows(sql: str, *, autocommit: bool) -> int | None:
        return runner.execute(sql, autocommit=autocommit, read_only=False, timeout_seconds=10)

    body = "SELECT 1; INSERT INTO t SELECT generate_series(1, 5); UPDATE t SET a = a + 10 WHERE a > 3; DELETE FROM t"
    body += " WHERE false"
    assert rows(body, autocommit=False) == 7
    assert table() == [1, 2, 3, 14, 15]
    assert rows("SELECT * FROM t; CREATE TABLE u (a int)", autocommit=True) is None
    assert rows("VACUUM t", autocommit=True) is None  # which no transaction takes
    assert rows("DELETE FROM t", autocommit=True) == 5


def test_percent_signs_are_text(runner: PostgresRunner) -> None:
    runner.execute("SELECT '%s %(a)s %'", autocommit=True, read_only=True, timeout_seconds=10)
    assert runner.query_number("SELECT 7 % 4", timeout_seconds=10) == 3


def test_a_constraint_that_fails_at_commit_is_a_rollback(runner: PostgresRunner, pg: Connect) -> None:
    connection = pg()
    connection.execute("CREATE TABLE d (a int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    body = "INSERT INTO d VALUES (1); INSERT INTO d VALUES (1)"
    error = refused(lambda: runner.execute(body, autocommit=False, read_only=False, timeout_seconds=10))
    assert (error.code, error.details["sqlstate"]) == ("DPONE_HOOK_FAILED", "23505")
    assert connection.execute("SELECT count(*) FROM d").fetchone() == (0,)


def test_a_body_that_is_said_to_read_cannot_write(runner: PostgresRunner, pg: Connect) -> None:
    # A view hides what no guard can see in the text.
    connection = pg()
    connection.execute("CREATE TABLE t (a int)")
    connection.execute(
        "CREATE FUNCTION f() RETURNS int LANGUAGE sql VOLATILE AS 'INSERT INTO t VALUES (1) RETURNING a'; "
        "CREATE VIEW v AS SELECT f() AS a"
    )
    (step,) = run({"source": runner}, {"id": "look", "sql": "SELECT a FROM v"})
    assert (step.status, step.metrics["sqlstate"]) == ("failed", "25006")
    assert refused(lambda: runner.query_number("SELECT a FROM v", timeout_seconds=9)).details["sqlstate"] == "25006"
    assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)
    (step,) = run({"source": runner}, {"id": "look", "sql": "SELECT a FROM v", "mutates_source": True})
    assert (step.status, step.metrics) == ("succeeded", {"statements": 1, "affected_rows": None})
    assert connection.execute("SELECT count(*) FROM t").fetchone() == (1,)


def test_a_session_is_tagged_and_sets_nothing_for_the_next(runner: PostgresRunner, pg: Connect) -> None:
    connection = pg()
    connection.execute("CREATE TABLE seen (a text, b text)")
    look = "INSERT INTO seen SELECT current_setting('application_name'), current_setting('work_mem')"
    for body in (f"SET work_mem = '123kB'; {look}", look):
        runner.execute(body, autocommit=True, read_only=False, timeout_seconds=10)
    rows = connection.execute("SELECT a, b FROM seen").fetchall()
    assert [a for a, _ in rows] == ["dpone-hook", "dpone-hook"]
    assert rows[0][1] == "123kB"
    assert rows[1][1] != "123kB"


def test_a_body_ends_at_its_deadline(runner: PostgresRunner, table: Callable[[], list[int]]) -> None:
    begun = time.monotonic()
    body = "INSERT INTO t VALUES (1); SELECT pg_sleep(0.6); SELECT pg_sleep(30)"
    error = refused(lambda: runner.execute(body, autocommit=False, read_only=False, timeout_seconds=1))
    assert error.code == "DPONE_HOOK_FAILED"
    assert error.details == {"sqlstate": "57014", "statement": 3, "repeatable": True}
    assert time.monotonic() - begun < 1.9  # the deadline is the body's, not each statement's
    assert table() == []


def backend(connection: psycopg.Connection[Any]) -> psutil.Process:
    """Wait for the hook's statement to run, and return its server process."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        row = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'dpone-hook' AND datname = current_database() "
            "AND state = 'active' AND query LIKE '%pg_sleep%'"
        ).fetchone()
        if row:
            return psutil.Process(row[0])
        time.sleep(0.02)
    raise AssertionError("the hook did not start")


def meanwhile(work: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException | Any]]:
    outcome: list[BaseException | Any] = []

    def body() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            outcome.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, outcome


SLEEPS = {"id": "slow", "sql": "INSERT INTO t VALUES (1); SELECT pg_sleep(30)", "mutates_source": True}


def test_a_session_that_was_ended_leaves_the_outcome_unknown(
    runner: PostgresRunner, pg: Connect, table: Callable[[], list[int]]
) -> None:
    connection = pg()
    thread, outcome = meanwhile(lambda: run({"source": runner}, SLEEPS, {"id": "next", "sql": "SELECT 1"}))
    connection.execute("SELECT pg_terminate_backend(%s)", [backend(connection).pid])
    thread.join(20)
    assert [(s.id, s.status, s.error_code) for s in outcome[0]] == [
        ("slow", "unknown", "DPONE_ENGINE_UNAVAILABLE"),
        ("next", "skipped", None),
    ]
    assert table() == [1]


def test_a_server_that_says_nothing_any_more_is_given_up(
    runner: PostgresRunner, pg: Connect, table: Callable[[], list[int]]
) -> None:
    connection = pg()
    thread, outcome = meanwhile(lambda: run({"source": runner}, {**SLEEPS, "timeout_seconds": 2}))
    process = backend(connection)
    process.send_signal(signal.SIGSTOP)
    try:
        thread.join(20)
        assert not thread.is_alive()
        assert [(s.status, s.error_code) for s in outcome[0]] == [("unknown", "DPONE_ENGINE_UNAVAILABLE")]
        assert 2 < outcome[0][0].seconds < 10
    finally:
        process.send_signal(signal.SIGCONT)


def test_an_engine_that_is_not_there_was_sent_nothing(tmp_path: Path) -> None:
    runner = PostgresRunner(f"host={tmp_path} dbname=secret")
    hook = {"id": "a", "sql": "SELECT 1", "retry_policy": {"attempts": 2, "delay_seconds": 0}}
    (step,) = run({"source": runner}, hook)
    assert (step.status, step.error_code, step.attempts) == ("failed", "DPONE_HOOK_FAILED", 2)


def test_engines_that_die_leave_the_outcome_unknown(own_home: Home) -> None:
    engines = up(own_home)
    with psycopg.connect(engines.pg.conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (a int)")
        thread, outcome = meanwhile(lambda: run({"source": PostgresRunner(engines.pg.conninfo)}, SLEEPS))
        backend(connection)
        end(psutil.Process(engines.pg.pid), signal.SIGQUIT, 10)
        thread.join(20)
        assert [(s.status, s.error_code) for s in outcome[0]] == [("unknown", "DPONE_ENGINE_UNAVAILABLE")]


@pytest.mark.parametrize(
    ("sql", "number"),
    [
        ("SELECT count(*) FROM generate_series(1, 3)", 3),
        ("SELECT sum(n) FROM generate_series(1, 3) AS s(n);", 6),
        ("SELECT 2.00", 2),
        ("SELECT NULL::int", None),
    ],
)
def test_a_query_yields_its_number(runner: PostgresRunner, sql: str, number: int | None) -> None:
    assert runner.query_number(sql, timeout_seconds=10) == number


@pytest.mark.parametrize(
    "sql", ["SELECT 1, 2", "SELECT 1 WHERE false", "VALUES (1), (2)", "SELECT true", "SELECT 'secret'", "SELECT 1.5"]
)
def test_what_is_no_number_fails(runner: PostgresRunner, sql: str) -> None:
    assert refused(lambda: runner.query_number(sql, timeout_seconds=10)).code == "DPONE_HOOK_FAILED"


def test_a_large_answer_is_not_read_to_its_end(runner: PostgresRunner) -> None:
    before = psutil.Process().memory_info().rss
    sql = "SELECT n, repeat('x', 1000) FROM generate_series(1, 3000000) AS s(n)"
    assert refused(lambda: runner.query_number(sql, timeout_seconds=60)).code == "DPONE_HOOK_FAILED"
    assert psutil.Process().memory_info().rss - before < 200 << 20


# ------------------------------------------------------------------------------------------------- ClickHouse


@pytest.fixture
def sink(engines: Engines, clickhouse: ClickHouseClient, ch_database: str) -> ClickHouseRunner:
    clickhouse.command("CREATE TABLE t (a Int32) ENGINE = MergeTree ORDER BY a")
    return ClickHouseRunner(replace(engines.clickhouse, database=ch_database), f"dpone-hook-{ch_database}-")


def values(client: ClickHouseClient) -> list[int]:
    return [row[0] for row in client.query("SELECT a FROM t ORDER BY a").result_rows]


def test_clickhouse_takes_statement_by_statement(sink: ClickHouseRunner, clickhouse: ClickHouseClient) -> None:
    body = "INSERT INTO t SELECT number FROM numbers(5); -- ;\nALTER TABLE t UPDATE b = ';' WHERE 1; DROP TABLE t"
    error = refused(lambda: sink.execute(body, autocommit=True, read_only=False, timeout_seconds=10))
    assert (error.code, error.details["statement"]) == ("DPONE_HOOK_FAILED", 2)
    assert error.details["number"] in (47, 10, 16)  # the column is unknown
    assert error.details["repeatable"] is False
    assert values(clickhouse) == [0, 1, 2, 3, 4]


def test_a_clickhouse_hook_that_succeeded_is_done(sink: ClickHouseRunner, clickhouse: ClickHouseClient) -> None:
    body = "INSERT INTO t VALUES (1), (2), (3); ALTER TABLE t DELETE WHERE a = 2; OPTIMIZE TABLE t FINAL"
    sink.execute(body, autocommit=True, read_only=False, timeout_seconds=30)
    assert values(clickhouse) == [1, 3]  # mutations are waited for
    rows = sink.execute("INSERT INTO t VALUES (4), (5)", autocommit=True, read_only=False, timeout_seconds=30)
    assert rows in (None, 2)  # a server counts them; the embedded engine does not, and 0 would be a lie
    assert values(clickhouse) == [1, 3, 4, 5]


def test_a_clickhouse_body_that_is_said_to_read_cannot_write(
    sink: ClickHouseRunner, clickhouse: ClickHouseClient
) -> None:
    body = "INSERT INTO t VALUES (1)"
    error = refused(lambda: sink.execute(body, autocommit=True, read_only=True, timeout_seconds=10))
    assert (error.code, error.details["number"]) == ("DPONE_HOOK_FAILED", 164)
    assert values(clickhouse) == []
    sink.execute("SELECT a FROM t", autocommit=True, read_only=True, timeout_seconds=10)


def test_a_clickhouse_body_ends_at_its_deadline(sink: ClickHouseRunner) -> None:
    begun = time.monotonic()
    body = "SELECT sum(sipHash64(number)) FROM numbers(1000000000000)"
    error = refused(lambda: sink.execute(body, autocommit=True, read_only=True, timeout_seconds=1))
    assert (error.code, error.details["number"]) == ("DPONE_HOOK_FAILED", 159)
    assert time.monotonic() - begun < 10


def test_clickhouse_statements_can_be_found_by_their_prefix(
    sink: ClickHouseRunner, clickhouse: ClickHouseClient, ch_database: str
) -> None:
    mine = f"startsWith(Settings['log_comment'], 'dpone-hook-{ch_database}-')"
    body = "SELECT sum(sipHash64(number)) FROM numbers(1000000000000)"
    thread, outcome = meanwhile(lambda: sink.execute(body, autocommit=True, read_only=True, timeout_seconds=30))
    until = time.monotonic() + 20
    while not clickhouse.query(f"SELECT count() FROM system.processes WHERE {mine}").result_rows[0][0]:
        assert time.monotonic() < until
        time.sleep(0.05)
    clickhouse.command(f"KILL QUERY WHERE {mine} SYNC")
    thread.join(20)
    assert isinstance(outcome[0], DponeError)
    assert outcome[0].code in ("DPONE_HOOK_FAILED", "DPONE_ENGINE_UNAVAILABLE")


@pytest.mark.parametrize(
    ("sql", "number"),
    [
        ("SELECT count() FROM numbers(3)", 3),
        ("SELECT sum(number) FROM numbers(4) -- six\n;", 6),
        ("SELECT toDecimal64(2, 2)", 2),
        ("SELECT CAST(NULL AS Nullable(Int8))", None),
    ],
)
def test_a_clickhouse_query_yields_its_number(sink: ClickHouseRunner, sql: str, number: int | None) -> None:
    assert sink.query_number(sql, timeout_seconds=10) == number


@pytest.mark.parametrize(
    "sql", ["SELECT 1, 2", "SELECT a FROM t", "SELECT number FROM numbers(2)", "SELECT 'secret'", "SELECT 1.5"]
)
def test_what_is_no_number_fails_in_clickhouse_too(sink: ClickHouseRunner, sql: str) -> None:
    assert refused(lambda: sink.query_number(sql, timeout_seconds=10)).code == "DPONE_HOOK_FAILED"


def test_clickhouse_that_is_not_there_was_sent_nothing(engines: Engines) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        sink = ClickHouseRunner(replace(engines.clickhouse, port=taken.getsockname()[1]), "x")
        error = refused(lambda: sink.execute("DROP TABLE t", autocommit=True, read_only=False, timeout_seconds=5))
    assert (error.code, error.details["repeatable"]) == ("DPONE_HOOK_FAILED", True)


def test_clickhouse_that_dies_leaves_the_outcome_unknown(own_home: Home) -> None:
    engines = up(own_home)
    sink = ClickHouseRunner(engines.clickhouse, "dpone-hook-")
    body = "CREATE TABLE default.x ENGINE = Memory AS SELECT sum(sipHash64(number)) FROM numbers(1000000000000)"
    thread, outcome = meanwhile(lambda: sink.execute(body, autocommit=True, read_only=False, timeout_seconds=60))
    client = connect(engines.clickhouse)
    until = time.monotonic() + 20
    while not client.query(
        "SELECT count() FROM system.processes WHERE startsWith(Settings['log_comment'], 'dpone-hook-')"
    ).result_rows[0][0]:
        assert time.monotonic() < until
        time.sleep(0.05)
    (pid,) = (each.pid for each in status(own_home) if each.name == "clickhouse")
    end(psutil.Process(pid), signal.SIGKILL, 10)
    thread.join(30)
    assert isinstance(outcome[0], DponeError)
    assert outcome[0].code == "DPONE_ENGINE_UNAVAILABLE"


# ------------------------------------------------------------------------------------------------------ probes


def test_a_probe_compares_one_number(runner: PostgresRunner, sink: ClickHouseRunner) -> None:
    def probe(sql: str, expect: int, connector: str) -> HookStep:
        hook = {"id": "p", "type": "data_quality_probe", "sql": sql, "expect": expect, "connector": connector}
        (step,) = run({"source": runner, "sink": sink}, {**hook, "retry_policy": {"attempts": 2, "delay_seconds": 0}})
        return step

    assert probe("SELECT 3", 3, "source").metrics == {"expected": 3, "found": 3}
    assert probe("SELECT count() FROM t", 0, "sink").status == "succeeded"
    wrong = probe("SELECT 4", 3, "source")
    assert (wrong.status, wrong.error_code, wrong.metrics) == (
        "failed",
        "DPONE_HOOK_FAILED",
        {"expected": 3, "found": 4},
    )
    assert wrong.attempts == 1  # asking again does not make it true
    assert probe("SELECT NULL", 0, "source").status == "failed"
    assert probe("SELECT a FROM nowhere", 0, "source").attempts == 2


# ---------------------------------------------------------------------------------------------------- webhooks


class Receiver(HTTPServer):
    """Answers as it is told to and remembers what it got."""

    answer: int | None = 200  # None: hangs up without an answer
    location = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[tuple[str, str, dict[str, Any]]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/secret?token=secret"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.path, self.headers["Content-Type"], body))
        if self.server.answer is None:
            self.close_connection = True
            return
        self.send_response(self.server.answer)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("ORDERS_HOOK", server.address)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


TELL = {"id": "tell", "kind": "notification", "type": "webhook", "webhook": "ORDERS_HOOK", "timeout_seconds": 5}


def test_a_webhook_gets_ids_and_nothing_else(receiver: Receiver) -> None:
    (before,), (after,) = run({}, TELL), run({}, TELL, phase="post_hook")
    assert (before.status, before.metrics, before.sql_hash) == ("succeeded", {"http_status": 200}, None)
    assert after.status == "succeeded"
    body = {"hook": "tell", "process": "orders", "run_id": "run-1"}
    assert receiver.got == [
        ("/secret?token=secret", "application/json", {**body, "status": "started"}),
        ("/secret?token=secret", "application/json", {**body, "status": "loaded"}),
    ]


@pytest.mark.parametrize(("answer", "tries"), [(500, 1), (404, 1), (503, 2), (302, 1)])
def test_a_webhook_that_is_refused_stops_nothing(receiver: Receiver, answer: int, tries: int) -> None:
    receiver.answer = answer
    other = Receiver()
    receiver.location = other.address
    retried = {**TELL, "retry_policy": {"attempts": 2, "delay_seconds": 0}}
    step, following = run({}, retried, {**TELL, "id": "next"})
    assert (step.status, step.error_code, step.metrics) == ("failed", "DPONE_HOOK_FAILED", {"http_status": answer})
    assert step.attempts == tries
    assert len(receiver.got) == tries + 1
    assert following.status == "failed"  # it was sent all the same
    other.server_close()
    assert other.got == []


def test_a_webhook_without_an_answer_may_have_arrived(receiver: Receiver) -> None:
    receiver.answer = None
    (step,) = run({}, {**TELL, "retry_policy": {"attempts": 2, "delay_seconds": 0}})
    assert (step.status, step.error_code, step.attempts) == ("unknown", "DPONE_ENGINE_UNAVAILABLE", 1)
    assert len(receiver.got) == 1


@pytest.mark.parametrize(
    "address",
    [
        None,
        "",
        "secret",
        "ftp://127.0.0.1/secret",
        "file:///etc/secret",
        "http://example.com/secret",
        "http://10.0.0.1/secret",
        "https://user:secret@localhost/",
        "http://127.0.0.1:secret/",
        "http://[secret/",
    ],
)
def test_addresses_that_are_not_posted_to(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    monkeypatch.delenv("ORDERS_HOOK", raising=False)
    if address is not None:
        monkeypatch.setenv("ORDERS_HOOK", address)
    (step,) = run({}, TELL)
    assert (step.status, step.error_code, step.metrics) == ("failed", "DPONE_HOOK_FAILED", {})


def test_a_receiver_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("ORDERS_HOOK", f"http://localhost:{taken.getsockname()[1]}/secret")
        (step,) = run({}, TELL)
    assert (step.status, step.error_code) == ("failed", "DPONE_HOOK_FAILED")


def test_hooks_of_a_load_run_on_both_engines(
    runner: PostgresRunner, sink: ClickHouseRunner, pg: Connect, clickhouse: ClickHouseClient, receiver: Receiver
) -> None:
    connection = pg()
    connection.execute("CREATE TABLE mart (a int)")
    connection.execute("CREATE PROCEDURE p_refresh() LANGUAGE sql AS 'INSERT INTO mart SELECT generate_series(1, 3)'")
    steps = run(
        {"source": runner, "sink": sink},
        {
            "id": "check",
            "type": "data_quality_probe",
            "sql": "SELECT count(*) FROM mart",
            "expect": 3,
            "depends_on": ["refresh"],
        },
        {"id": "refresh", "kind": "source_refresh", "sql": "CALL p_refresh()", "mutates_source": True},
        {"id": "tidy", "kind": "target_maintenance", "connector": "sink", "sql": "OPTIMIZE TABLE t FINAL"},
        TELL,
    )
    assert [(s.id, s.status) for s in steps] == [
        ("refresh", "succeeded"),
        ("check", "succeeded"),
        ("tidy", "succeeded"),
        ("tell", "succeeded"),
    ]
    assert os.environ["ORDERS_HOOK"] not in repr(steps)
