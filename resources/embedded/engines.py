"""Start, find and stop the two engines of the embedded profile."""

from dataclasses import dataclass
from pathlib import Path

from resources.clickhouse.client import ClickHouseEndpoint
from resources.embedded import clickhouse_server, postgres
from resources.embedded.home import Home
from resources.embedded.postgres import PostgresEndpoint


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Both engines, running.

    Attributes:
        pg: PostgreSQL, the stand-in for SQL Server.
        clickhouse: the ClickHouse engine behind its loopback HTTP process.
    """

    pg: PostgresEndpoint
    clickhouse: ClickHouseEndpoint


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """One engine: whether it runs, its process id if so, and its data folder."""

    name: str
    running: bool
    pid: int | None
    folder: Path


def up(home: Home) -> Engines:
    """Start what does not run and return both engines; cheap when both run already.

    Any number of processes may call this at once: a file lock makes one of them the starter.

    Raises:
        DponeError: DPONE_HOME_REFUSED, DPONE_ENGINE_UNAVAILABLE.
    """
    if engines := find(home):
        return engines
    home.create()
    with home.lock("engines"):
        pg = postgres.start(home)
        server = clickhouse_server.start(home)
    return Engines(pg=pg, clickhouse=server.endpoint)


def find(home: Home) -> Engines | None:
    """Return both engines if both run; start nothing."""
    pg, server = postgres.find(home), clickhouse_server.find(home)
    return Engines(pg=pg, clickhouse=server.endpoint) if pg and server else None


def down(home: Home) -> list[str]:
    """Stop the engines of this home and return the names of those that ran.

    Only processes that this home's own records name, with a matching start time or working folder, are
    stopped.
    """
    if not home.run.is_dir():
        return []
    with home.lock("engines"):
        stopped = {"clickhouse": clickhouse_server.stop(home), "postgres": postgres.stop(home)}
    return [name for name, ran in stopped.items() if ran]


def status(home: Home) -> list[EngineStatus]:
    """Say of each engine whether it runs; start nothing."""
    pg, server = postgres.find(home), clickhouse_server.find(home)
    return [
        EngineStatus(name="postgres", running=pg is not None, pid=pg.pid if pg else None, folder=home.pg),
        EngineStatus(
            name="clickhouse",
            running=server is not None,
            pid=server.pid if server else None,
            folder=home.clickhouse,
        ),
    ]
