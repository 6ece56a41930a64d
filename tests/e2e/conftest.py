"""The flights mart in the session's home, and a look at the engines that uses none of the product's readers."""

import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clickhouse_connect
import psycopg
import pytest

from assets.sources.flights import load_flights
from dpone_dagster.journal.port import RunIdentity
from resources.embedded.engines import Engines
from resources.embedded.home import Home
from resources.runtime import Runtime

ROOT = Path(__file__).parents[2]


def identity(owner: str = "dpone-cli") -> RunIdentity:
    """A worker of its own."""
    worker = str(uuid.uuid4())
    return RunIdentity(
        logical_run_id=worker, run_id=worker, try_number=1, task_id="test", worker_id=worker, owner=owner
    )


@pytest.fixture(scope="session")
def runtime(home: Home, engines: Engines) -> Runtime:
    """The flights loaded and their baseline created in the session's home."""
    runtime = Runtime.open(home)
    with home.lock("test-flights"):
        load_flights(engines.pg.conninfo)
        if runtime.journal.baseline("flights") is None:
            runtime.create_baseline("flights", identity=identity())
    return runtime


@dataclass
class Truth:
    """Plain SQL on both engines; shares no code with the product."""

    engines: Engines

    def sql(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.engines.pg.conninfo) as connection:
            return connection.execute(query, parameters).fetchall()

    def clickhouse(self, query: str) -> list[tuple[Any, ...]]:
        end = self.engines.clickhouse
        client = clickhouse_connect.get_client(
            host=end.host, port=end.port, username=end.user, password=end.password, autogenerate_session_id=False
        )
        try:
            return [tuple(row) for row in client.query(query).result_rows]
        finally:
            client.close()

    def source_rows(self, day: str) -> set[tuple[Any, ...]]:
        """What a day of the mart should hold: key and two values, from the source tables."""
        rows = self.sql(
            """select to_char(f.time_hour, 'YYYY-MM-DD HH24:MI:SS'), c.carrier_id, f.flight, o.airport_id,
                      f.arr_delay, f.tailnum
               from source_data.flights f, source_data.carriers c, source_data.airports o
               where c.carrier = f.carrier and o.airport = f.origin
                 and f.time_hour::date = %s::date""",
            day,
        )
        assert len(rows) == len(set(rows))
        return set(rows)

    def mart_rows(self, day: str) -> list[tuple[Any, ...]]:
        return self.sql(
            """select to_char(time_hour, 'YYYY-MM-DD HH24:MI:SS'), carrier_id, flight, origin_id, arr_delay, tailnum
               from marts.flights where time_hour::date = %s::date""",
            day,
        )

    def target_rows(self, day: str) -> list[tuple[Any, ...]]:
        return self.clickhouse(
            f"""select formatDateTime(time_hour, '%Y-%m-%d %H:%i:%S'), carrier_id, flight, origin_id, arr_delay, tailnum
                from marts.flights where toDate(time_hour) = '{day}'"""
        )

    def scratch(self) -> list[str]:
        names = "select name from system.tables where database = 'marts' and name like 'flights__dpone_s%'"
        return [name for (name,) in self.clickhouse(names)]

    def states(self, day: str) -> list[str]:
        return [
            state
            for (state,) in self.sql(
                "select state from dpone_control.operation where mart = 'flights' and scope_start = %s::timestamp"
                " order by admitted_at",
                day,
            )
        ]

    def assert_published(self, day: str) -> None:
        """Both engines hold exactly the source's day, once, and the journal says COMPLETE."""
        expected = self.source_rows(day)
        for rows in (self.mart_rows(day), self.target_rows(day)):
            assert len(rows) == len(expected)
            assert set(rows) == expected
        assert self.states(day)[-1] == "COMPLETE"
        assert set(self.states(day)) <= {"COMPLETE", "FAILED_PRE_COMMIT"}

    def generations(self) -> list[tuple[Any, ...]]:
        """(target UUID in ClickHouse, head UUID in the journal)."""
        ((live,),) = self.clickhouse(
            "select toString(uuid) from system.tables where database='marts' and name='flights'"
        )
        ((head,),) = self.sql("select uuid from dpone_control.generation_head where target = 'marts.flights'")
        return [(live, head)]


@pytest.fixture(scope="session")
def truth(runtime: Runtime) -> Truth:
    return Truth(runtime.engines)


def dpone(*arguments: str, fault: str = "", wait: bool = True) -> Any:
    """Run the command in a process of its own, broken at a boundary if ``fault`` says so."""
    environment = {**os.environ, "DPONE_FAULT": fault} if fault else dict(os.environ)
    process = subprocess.Popen(
        [sys.executable, "-m", "dpone_dagster.cli", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if not wait:
        return process
    out, err = process.communicate(timeout=180)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)
