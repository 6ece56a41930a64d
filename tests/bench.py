"""``make bench``: what a day costs, and what it does not cost. A benchmark, not a test.

Every figure is a ratio or a difference inside one run: compared variants take turns on the same engines, and the
median of their repetitions is taken, so that other work on the machine meets both alike. docs/benchmarks.md says
what each figure means.

    python -m tests.bench                         everything, to build/bench.json
    python -m tests.bench guarded_vs_raw ..       only these figures; the others in the file stay as they are
    python -m tests.bench --quick                 the same code over toy sizes, to build/bench-quick.json
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pyarrow as pa
import yaml
from rich.console import Console
from rich.table import Table

from assets.sources.flights import FIRST_DAY, load_flights
from checks.schema_gate import PanderaSchemaGate
from dpone_dagster.contracts.mart import Relation, Scope
from dpone_dagster.journal.port import OperationRecord, RunIdentity
from resources.clickhouse.client import ClickHouseClient, connect
from resources.embedded.clickhouse_server import find as find_clickhouse
from resources.embedded.engines import down, up
from resources.embedded.home import Home
from resources.load_runtime import Loads, plan_data
from resources.runtime import Runtime
from tests.dbt_support import write_project

ROOT = Path(__file__).parents[1]
START = date(2010, 1, 1)
DAY = START + timedelta(days=50)  # the fixed day, in the midst of the others
INSERT_ROWS = 500_000  # of the bare copy; what the product inserts at a time as well

say = Console(stderr=True, highlight=False)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything; rows unless said otherwise."""

    repetitions: int
    growth_day: int
    growth_days: int
    growth: tuple[int, int]
    parts: tuple[int, ...]
    parts_warm: int
    memory: tuple[int, int]
    memory_rounds: int
    raw: int
    year_days: int
    window_days: int
    load: int
    manifests: int


FULL = Sizes(
    repetitions=5,
    growth_day=100_000,
    growth_days=100,
    growth=(1_000_000, 50_000_000),
    parts=(100, 500, 3_650),
    parts_warm=3,  # from the fourth day on, each also drops a predecessor
    memory=(500_000, 5_000_000),
    memory_rounds=2,
    raw=1_000_000,
    year_days=366,
    window_days=30,
    load=1_000_000,
    manifests=1_000,
)
QUICK = Sizes(
    repetitions=1,
    growth_day=500,
    growth_days=60,
    growth=(5_000, 20_000),
    parts=(60, 120),
    parts_warm=0,
    memory=(2_000, 4_000),
    memory_rounds=1,
    raw=5_000,
    year_days=4,
    window_days=2,
    load=5_000,
    manifests=20,
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number.

    Attributes:
        spread: the least and the greatest of the repetitions' own values.
        detail: medians and whatever else helps to read the number.
    """

    name: str
    value: float
    target: float
    spread: tuple[float, float]
    detail: dict[str, Any] = field(default_factory=dict)
    measured_at: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.value <= self.target


# ----------------------------------------------------------------------------------------- the ground to run on

COLUMNS = "event_at, device, site, reading, status, flag"
TYPES = (
    "event_at timestamp(6) not null, device integer not null, site smallint, reading numeric(12,3),"
    " status varchar(8), flag boolean not null"
)
MODEL_SQL = f"""
select {COLUMNS} from {{{{ source('%(mart)s_source', '%(mart)s') }}}}
where event_at >= {{{{ dpone_scope_start() }}}} and event_at < {{{{ dpone_scope_end() }}}}
"""
MODEL_YML = f"""
version: 2
sources:
  - name: %(mart)s_source
    schema: bench
    tables: [{{name: %(mart)s}}]
models:
  - name: %(mart)s
    config: {{unique_key: [event_at, device], event_time: event_at}}
    meta:
      dpone:
        publish: {{enabled: true, profile: mssql_to_clickhouse_mart, workflow: %(mart)s_daily}}
        target: {{database: marts, table: %(mart)s, partition_by: day}}
        utc_assured: [event_at]
        start_date: "{START}"
        gates:
          - {{id: row_count, type: row_count_reconciliation, severity: error,
              tolerance: {{mode: absolute, value: 0}}}}
          - {{id: typed_hash, type: typed_hash_reconciliation, severity: error}}
    columns:
      - {{name: event_at, data_type: timestamp(6), constraints: [{{type: not_null}}]}}
      - {{name: device, data_type: integer, constraints: [{{type: not_null}}]}}
      - {{name: site, data_type: smallint}}
      - {{name: reading, data_type: "numeric(12,3)"}}
      - {{name: status, data_type: varchar(8)}}
      - {{name: flag, data_type: boolean, constraints: [{{type: not_null}}], data_tests: [not_null]}}
"""
# Row n of a day, once for each engine; n is unique within the day.
PG_ROW = """
    timestamp '{day}' + floor({n} * 86400.0 / {rows}) * interval '1 second', {n}, nullif({n} % 50, 0),
    ({n}::bigint * 7919 % 1000003) / 1000.0, (array['ok', 'late', 'lost', 'void'])[1 + {n} % 4], {n} % 3 = 0
"""
CH_ROW = """
    addSeconds(toDateTime64('{start} 00:00:00.000000', 6, 'UTC'), d * 86400 + intDiv(n * 86400, {rows})),
    toInt32(n), toInt16(nullIf(n % 50, 0)), toDecimal64(n * 7919 % 1000003, 3) / 1000,
    ['ok', 'late', 'lost', 'void'][1 + n % 4], n % 3 = 0
"""


@contextmanager
def child(arguments: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """Run a Python module of the repository; it does not outlive the benchmark, and it must succeed."""
    process = subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, **options)
    try:
        yield process
        assert process.wait() == 0, f"{arguments[0]} failed"
    finally:
        process.kill()
        process.wait()


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say what is going on, and how long it took."""
    started = time.monotonic()
    with say.status(what):
        yield
    say.print(f"[dim]{time.monotonic() - started:7.1f} s[/]  {what}")


class Ground:
    """A home of its own with both engines, and marts of one shape; removed when left.

    Args:
        marts: the marts to create; each is a workflow of its own.
    """

    # The project declares the marts of all figures, so that it is parsed once.
    _parsed = tempfile.TemporaryDirectory(prefix="dpone-bench-parsed-")

    def __init__(self, sizes: Sizes, *marts: str) -> None:
        self.home = Home(root=Path(tempfile.mkdtemp(prefix="dpone-bench-")).resolve() / "home")
        self.home.root.parent.chmod(0o711)  # PostgreSQL's own account has to pass through
        self.marts = marts
        self.declared = ("memory", "raw", "small", "large", *(f"parts_{count}" for count in sizes.parts))

    def __enter__(self) -> "Ground":
        try:
            with step("starting engines"):
                self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        down(self.home)
        shutil.rmtree(self.home.root.parent)

    def _start(self) -> None:
        if not self.marts:
            self.runtime = Runtime.open(self.home)
            return
        models = {}
        for mart in self.declared:
            models[f"models/bench/{mart}.sql"] = MODEL_SQL % {"mart": mart}
            models[f"models/bench/{mart}.yml"] = MODEL_YML % {"mart": mart}
        self.project = write_project(self.home.root.parent, models)
        shutil.rmtree(self.project / "models" / "pair")  # the tests' own marts
        self.attach()
        self.runtime.migrate()
        parsed = Path(self._parsed.name) / "dbt"
        if not parsed.exists():
            self.runtime.builder.manifest()
            shutil.copytree(self.home.root / "dbt", parsed)
        shutil.copytree(parsed, self.home.root / "dbt", dirs_exist_ok=True)
        self.sql("create schema bench")
        for mart in self.marts:
            self.sql(f"create unlogged table bench.{mart} ({TYPES})")
            self.runtime.create_baseline(mart, identity=identity())

    def attach(self) -> None:
        """Start the engines where they do not run, and connect."""
        self.runtime = Runtime(home=self.home, engines=up(self.home), project=self.project)

    def restart(self) -> None:
        """Stop and start both engines, so that what they keep of earlier work is gone."""
        self.runtime.journal.close()
        down(self.home)
        self.attach()

    def sql(self, statement: str) -> None:
        with psycopg.connect(self.runtime.engines.pg.conninfo, autocommit=True) as connection:
            connection.execute(statement)

    @contextmanager
    def clickhouse(self) -> Iterator[ClickHouseClient]:
        client = connect(self.runtime.engines.clickhouse)
        try:
            yield client
        finally:
            client.close()

    def add_source_day(self, mart: str, day: date, rows: int) -> None:
        self.sql(
            f"insert into bench.{mart} select {PG_ROW.format(day=day, n='n', rows=rows)}"
            f" from generate_series(0, {rows - 1}) as n"
        )

    def index_source(self, mart: str) -> None:
        self.sql(f"create index on bench.{mart} (event_at)")
        self.sql(f"vacuum analyze bench.{mart}")

    def fill_target(self, mart: str, *, days: int, rows_a_day: int) -> None:
        """Put other days straight into the ClickHouse table, one part a day."""
        row = CH_ROW.format(start=START, rows=rows_a_day)
        with self.clickhouse() as client:
            client.command(
                f"insert into marts.{mart} ({COLUMNS}) select {row} from"
                f" (select intDiv(number, {rows_a_day}) as d, number % {rows_a_day} as n"
                f"  from numbers({days * rows_a_day})) where d != {(DAY - START).days}",
                settings={"max_threads": 1, "max_partitions_per_insert_block": 0},
            )
            client.command(f"optimize table marts.{mart} final")

    def parts(self, mart: str) -> int:
        with self.clickhouse() as client:
            found = client.query(
                f"select count() from system.parts where database = 'marts' and table = '{mart}' and active"
            )
            return int(found.result_rows[0][0])

    def publish(self, mart: str, day: date = DAY) -> "Day":
        """Publish a day, again if it is there; return what it took."""
        started = time.monotonic()
        result = self.runtime.publish(mart, Scope.day(day), identity=identity(), replay=True)[mart]
        seconds = time.monotonic() - started
        assert result.action == "published", result.action
        return Day.of(self.runtime, result.operation, seconds)


@dataclass(frozen=True, kw_only=True)
class Day:
    """What one publication took, by the journal's phases; all in seconds.

    Attributes:
        total: the wall time of all of it.
        phases: phase -> (when it began since the first one's beginning, duration).
    """

    total: float
    phases: dict[str, tuple[float, float]]

    @classmethod
    def of(cls, runtime: Runtime, operation: OperationRecord, total: float) -> "Day":
        rows = runtime.journal.phases(operation.operation_id)
        first = min(row["started"] for row in rows)
        return cls(
            total=total,
            phases={row["name"]: ((row["started"] - first).total_seconds(), row["seconds"]) for row in rows},
        )

    def span(self, first: str, last: str) -> float:
        """Wall time from the beginning of one phase to the end of another, what lies between included."""
        began, (started, seconds) = self.phases[first][0], self.phases[last]
        return started + seconds - began

    def of_phases(self, *names: str) -> float:
        return sum(self.phases[name][1] for name in names)


def identity() -> RunIdentity:
    worker = str(uuid.uuid4())
    return RunIdentity(
        logical_run_id=worker, run_id=worker, try_number=1, task_id="bench", worker_id=worker, owner="dpone-bench"
    )


def medians(days: Sequence[Day]) -> dict[str, float]:
    """Median seconds of each phase, and of what lies between them."""
    found = {name: statistics.median(day.phases[name][1] for day in days) for name in days[0].phases}
    found["between phases"] = statistics.median(d.total - sum(s for _, s in d.phases.values()) for d in days)
    found["total"] = statistics.median(day.total for day in days)
    return {name: round(seconds, 4) for name, seconds in found.items()}


def ratio(name: str, target: float, large: Sequence[float], small: Sequence[float], **detail: Any) -> Figure:
    """The medians' ratio; the spread is that of the neighbouring pairs."""
    pairs = [one / other for one, other in zip(large, small, strict=True)]
    return Figure(
        name=name,
        value=statistics.median(large) / statistics.median(small),
        target=target,
        spread=(min(pairs), max(pairs)),
        detail=detail,
    )


# ---------------------------------------------------------------------------------------------- the figures


def growth(sizes: Sizes) -> Iterator[Figure]:
    """One fixed day, published again and again: beside little, and beside fifty times as much.

    Source, mart and ClickHouse table all hold the many rows, spread evenly over the other days.
    """
    names = ("small", "large")
    with Ground(sizes, *names) as ground:
        for mart, rows in zip(names, sizes.growth, strict=True):
            others = sizes.growth_days - 1
            rows_a_day = (rows - sizes.growth_day) // others
            with step(f"{mart}: the SQL side, {rows:,} rows over {sizes.growth_days} days"):
                for date_ in (START + timedelta(days=n) for n in range(sizes.growth_days)):
                    ground.add_source_day(mart, date_, sizes.growth_day if date_ == DAY else rows_a_day)
                ground.index_source(mart)
                # The primary key is made anew after the load; column order as the product makes it.
                ground.sql(f"alter table marts.{mart} drop constraint {mart}_pkey")
                ground.sql(
                    f"insert into marts.{mart} select * from bench.{mart}"
                    f" where not (event_at >= '{DAY}' and event_at < '{DAY + timedelta(days=1)}')"
                )
                ground.sql(f"alter table marts.{mart} add primary key (event_at, device)")
                ground.sql(f"vacuum analyze marts.{mart}")
            with step(f"{mart}: the ClickHouse side"):
                ground.fill_target(mart, days=sizes.growth_days, rows_a_day=rows_a_day)
        found: dict[str, list[Day]] = {mart: [] for mart in names}
        for repetition in range(sizes.repetitions + 1):
            for mart in names:
                with step(f"{mart}: a day of {sizes.growth_day:,} rows, {repetition} of {sizes.repetitions}"):
                    day = ground.publish(mart)
                if repetition:  # the first one inserts, warms the caches, and does not count
                    found[mart].append(day)
        small, large = (found[mart] for mart in names)
        detail = {
            "rows": dict(zip(names, sizes.growth, strict=True)),
            "parts": {mart: ground.parts(mart) for mart in names},
            "seconds": {mart: medians(found[mart]) for mart in names},
        }

    def published(days: list[Day]) -> list[float]:
        return [day.span("stage", "publish") for day in days]

    def mutated(days: list[Day]) -> list[float]:
        return [day.of_phases("mutate", "observe") for day in days]

    yield ratio("publish_cost_growth_50x", 1.3, published(large), published(small), **detail)
    yield ratio("mutate_cost_growth_50x", 1.5, mutated(large), mutated(small), **detail)


def parts(sizes: Sizes) -> Iterator[Figure]:
    """The same small day beside more and more untouched partitions of one part each."""
    marts = {f"parts_{count}": count for count in sizes.parts}
    with Ground(sizes, *marts) as ground:
        for mart, count in marts.items():
            with step(f"{mart}: {count:,} partitions"):
                ground.add_source_day(mart, DAY, 1_000)
                ground.index_source(mart)
                ground.fill_target(mart, days=count, rows_a_day=100)
        found: dict[str, list[Day]] = {mart: [] for mart in marts}
        for repetition in range(1 - sizes.parts_warm, 1 + sizes.repetitions):
            with step(f"a day beside each, {repetition} of {sizes.repetitions}"):
                for mart in marts:
                    published = ground.publish(mart)
                    if repetition > 0:
                        found[mart].append(published)
        seconds = {mart: [day.span("stage", "clean") for day in days] for mart, days in found.items()}
        detail = {
            "day_seconds": {str(marts[mart]): round(statistics.median(s), 4) for mart, s in seconds.items()},
            "phases": {str(marts[mart]): medians(days) for mart, days in found.items()},
            "parts": {str(marts[mart]): ground.parts(mart) for mart in marts},
        }
    names = list(marts)
    least, most = names[0], names[-1]
    further = marts[most] - marts[least]
    added = [1000 * (b - a) / further for a, b in zip(seconds[least], seconds[most], strict=True)]
    detail["steps_ms"] = {
        f"{marts[a]} to {marts[b]}": round(
            1000 * (statistics.median(seconds[b]) - statistics.median(seconds[a])) / (marts[b] - marts[a]), 4
        )
        for a, b in itertools.pairwise(names)
    }
    yield Figure(
        name="untouched_part_ms",
        value=1000 * (statistics.median(seconds[most]) - statistics.median(seconds[least])) / further,
        target=2,
        spread=(min(added), max(added)),
        detail=detail,
    )


def memory(sizes: Sizes) -> Iterator[Figure]:
    """The peak of a worker process over a day, less what it takes when idle, for a small day and a large one.

    Idle means: everything imported, one tiny day published, waiting. Engines are started anew for each worker.
    Each day is published twice, by two workers: into the empty partition, and over itself.
    """
    days = {"small": (DAY, sizes.memory[0]), "large": (DAY + timedelta(days=1), sizes.memory[1])}
    tiny = DAY + timedelta(days=2)
    grown: dict[str, list[dict[str, float]]] = {"small": [], "large": []}
    with Ground(sizes, "memory") as ground:
        with step("loading the days"):
            ground.add_source_day("memory", tiny, 1_000)
            for day, rows in days.values():
                ground.add_source_day("memory", day, rows)
            ground.index_source("memory")
        for kind in ("into an empty day", "over itself")[: sizes.memory_rounds]:
            for size, (day, rows) in days.items():
                with step(f"a worker publishes {rows:,} rows {kind}"):
                    ground.restart()
                    grown[size].append(_watch_worker(ground, tiny, day))
    worker, clickhouse = (
        {size: [run[process] for run in runs] for size, runs in grown.items()} for process in ("worker", "clickhouse")
    )
    both = [a / b for a, b in zip(clickhouse["large"], clickhouse["small"], strict=True)]
    yield ratio(
        "worker_memory_growth_10x",
        1.5,
        worker["large"],
        worker["small"],
        rows=dict(zip(("small", "large"), sizes.memory, strict=True)),
        mib={size: [{k: round(v / 2**20, 1) for k, v in run.items()} for run in runs] for size, runs in grown.items()},
        clickhouse_memory_growth_10x=[round(each, 3) for each in both],
    )


def _watch_worker(ground: Ground, tiny: date, day: date) -> dict[str, float]:
    """Run a worker; return in bytes what it and ClickHouse took when idle, and by how much their peaks were above."""
    record = find_clickhouse(ground.home)
    assert record is not None
    arguments = ["tests.bench", "--worker", str(ground.home.root), str(ground.project), str(tiny), str(day)]
    with child(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        processes = {"worker": psutil.Process(worker.pid), "clickhouse": psutil.Process(record.pid)}
        assert worker.stdout.readline() == "idle\n", "the worker did not get ready"
        idle = {name: process.memory_info().rss for name, process in processes.items()}
        peak = dict(idle)
        worker.stdin.write("go\n")
        worker.stdin.flush()
        while worker.poll() is None:
            for name, process in processes.items():
                try:
                    peak[name] = max(peak[name], process.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue
            time.sleep(0.005)
    return {name: float(peak[name] - idle[name]) for name in idle} | {
        f"{name}_idle": float(rss) for name, rss in idle.items()
    }


def work(home: str, project: str, tiny: str, day: str) -> None:
    """The worker that ``memory`` watches."""
    where = Home(root=Path(home))
    runtime = Runtime(home=where, engines=up(where), project=Path(project))
    runtime.publish("memory", Scope.day(tiny), identity=identity(), replay=True)
    sys.stdout.write("idle\n")
    sys.stdout.flush()
    sys.stdin.readline()
    runtime.publish("memory", Scope.day(day), identity=identity(), replay=True)


def raw(sizes: Sizes) -> Iterator[Figure]:
    """Seal to publish, against a copy of the same rows by the same reader and the same insert, unguarded."""
    with Ground(sizes, "raw") as ground:
        days = [DAY + timedelta(days=n) for n in range(1 + sizes.repetitions)]
        with step(f"loading {len(days)} days of {sizes.raw:,} rows"):
            for day in days:
                ground.add_source_day("raw", day, sizes.raw)
            ground.index_source("raw")
        guarded, bare = [], []
        for number, day in enumerate(days):
            with step(f"guarded and bare, {number} of {sizes.repetitions}"):
                published = ground.publish("raw", day)
                seconds = _copy_bare(ground, day)
            if number:  # the first pair is for warming up
                guarded.append(published)
                bare.append(seconds)
        detail = {
            "rows": sizes.raw,
            "guarded_seconds": round(statistics.median(day.span("seal", "publish") for day in guarded), 3),
            "bare_seconds": round(statistics.median(bare), 3),
            "phases": medians(guarded),
        }
    yield ratio("guarded_vs_raw", 3, [day.span("seal", "publish") for day in guarded], bare, **detail)


def _copy_bare(ground: Ground, day: date) -> float:
    """Copy a day of the mart to ClickHouse as a plain script would; return the seconds of read and insert."""
    mart = ground.runtime.mart("raw")
    image = Relation(schema_name="bench", name="image")
    ground.sql(
        f"create table bench.image as select * from marts.raw"
        f" where event_at >= '{day}' and event_at < '{day + timedelta(days=1)}'"
    )
    with ground.clickhouse() as client:
        client.command("create table marts.bare as marts.raw")
        started = time.monotonic()
        held: list[pa.RecordBatch] = []
        for batch in ground.runtime.source.read_image(mart, image):
            held.append(batch)
            if sum(b.num_rows for b in held) >= INSERT_ROWS:
                client.insert_arrow("bare", pa.Table.from_batches(held), database="marts")
                held = []
        if held:
            client.insert_arrow("bare", pa.Table.from_batches(held), database="marts")
        seconds = time.monotonic() - started
        client.command("drop table marts.bare sync")
    ground.sql("drop table bench.image")
    return seconds


def year(sizes: Sizes) -> Iterator[Figure]:
    """The flights of 2013, every day of them, by one `dpone run` in a process of its own."""
    first, last = FIRST_DAY, FIRST_DAY + timedelta(days=sizes.year_days - 1)
    with Ground(sizes) as ground:
        runtime = ground.runtime
        with step("loading the flights"):
            load_flights(runtime.engines.pg.conninfo)
            runtime.create_baseline("flights", identity=identity())
        with step(f"dpone run --mart flights --from {first} --to {last}"):
            answer = ground.home.root.parent / "year.json"
            command = ["dpone_dagster.cli", "run", "--mart", "flights", "--format", "json"]
            command += ["--from", str(first), "--to", str(last)]
            environment = {**os.environ, "DPONE_HOME": str(ground.home.root)}
            started = time.monotonic()
            with answer.open("w") as out, child(command, env=environment, stdout=out) as run:
                loads = _follow(run, runtime, sizes.year_days)
            wall = time.monotonic() - started
        result = json.loads(answer.read_text())
        assert result["passed"], result
        rows = result["result"]["days"]
        assert [row["action"] for row in rows] == ["published"] * sizes.year_days
        heads = runtime.journal.scope_heads("flights")
        days = []
        for head, row in zip(heads, rows, strict=True):
            operation = runtime.journal.operation(head.operation_id)
            assert operation is not None
            days.append(Day.of(runtime, operation, row["seconds"]))
    totals = [row["seconds"] for row in rows]
    early, late = totals[: sizes.window_days], totals[-sizes.window_days :]
    detail = {
        "days": len(rows),
        "rows": sum(row["rows"] for row in rows),
        "wall_seconds": round(wall, 1),
        "first_day_seconds": totals[0],
        "phases": medians(days),
        "phases_early": medians(days[: sizes.window_days]),
        "phases_late": medians(days[-sizes.window_days :]),
    }
    yield Figure(
        name="seconds_per_day_year",
        value=wall / len(rows),
        target=2,
        spread=(min(totals), max(totals)),
        detail=detail,
    )
    yield Figure(
        name="late_vs_early_days",
        value=statistics.median(late) / statistics.median(early),
        target=1.2,
        spread=(min(late) / statistics.median(early), max(late) / statistics.median(early)),
        detail={
            "early_seconds": statistics.median(early),
            "late_seconds": statistics.median(late),
            # How busy the machine was with this and with other work, during early days and late ones.
            "load_average_early": _mean(load for at, load in loads if at < wall - sum(totals) + sum(early)),
            "load_average_late": _mean(load for at, load in loads if at > wall - sum(late)),
        },
    )


def _follow(run: "subprocess.Popen[Any]", runtime: Runtime, days: int) -> list[tuple[float, float]]:
    """Say how far the run is, by the journal, until it ends; return the load averages seen: (when, load)."""
    told, started = 0, time.monotonic()
    loads = []
    while run.poll() is None:
        time.sleep(0.5)
        loads.append((time.monotonic() - started, os.getloadavg()[0]))
        done = len(runtime.journal.scope_heads("flights"))
        if done // 50 > told // 50:
            say.print(f"[dim]           {done} of {days} days[/]")
            told = done
    return loads


def governed(sizes: Sizes) -> Iterator[Figure]:
    """The same manifest load of a table of twenty columns: with four gates, acceptance on ten columns (NULLs and exact
    distinct counts of each, on all three sides) and audit, and without any of it."""
    with Ground(sizes) as ground:
        with step(f"a source table of {sizes.load:,} rows"):
            ground.sql("create schema bench")
            ground.sql(f"create unlogged table bench.wide ({WIDE_TYPES})")
            ground.sql(f"insert into bench.wide select {WIDE_ROW} from generate_series(1, {sizes.load}) as n")
            ground.sql("vacuum analyze bench.wide")
        loads = Loads(ground.runtime, schema_gate=PanderaSchemaGate())
        plans = {kind: plan_data(_wide(kind)) for kind in ("plain", "governed")}
        seconds: dict[str, list[float]] = {kind: [] for kind in plans}
        steps: dict[str, list[dict[str, float]]] = {kind: [] for kind in plans}
        for repetition in range(sizes.repetitions + 1):
            for kind, plan in plans.items():
                with step(f"{kind} load, {repetition} of {sizes.repetitions}"):
                    started = time.monotonic()
                    report = loads.run(plan, scope=None, identity=identity())
                    took = time.monotonic() - started
                assert report.staged_rows == sizes.load
                if repetition:  # the first pair is for warming up
                    seconds[kind].append(took)
                    steps[kind].append({each.phase: each.seconds for each in report.steps})
        assert report.gates is not None
        assert report.gates.passed
        assert report.acceptance_status == "passed"
    detail = {
        "rows": sizes.load,
        "seconds": {kind: round(statistics.median(taken), 3) for kind, taken in seconds.items()},
        "steps": {
            kind: {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}
            for kind, runs in steps.items()
        },
    }
    yield ratio("governed_vs_plain", 1.4, seconds["governed"], seconds["plain"], **detail)


WIDE_TYPES = (
    "id integer primary key, at timestamp(6) not null, device integer not null, site smallint, reading numeric(12,3),"
    " status varchar(8), flag boolean not null, day date not null, total bigint not null, batch smallint not null,"
    " customer uuid not null, city varchar(40), street varchar(60), note varchar(80), price numeric(18,4) not null,"
    " discount numeric(9,2), tax numeric(12,4) not null, changed_at timestamp(6) not null, quantity integer not null,"
    " currency varchar(3) not null"
)
WIDE_ROW = """
    n, timestamp '2024-01-01' + n * interval '1 second', n % 20000, nullif(n % 50, 0),
    (n::bigint * 7919 % 1000003) / 1000.0, (array['ok', 'late', 'lost', 'void'])[1 + n % 4], n % 3 = 0,
    date '2024-01-01' + n / 86400, n::bigint * 1000, n % 100,
    md5(n::text)::uuid, 'City of ' || n % 997, 'Long street number ' || n % 9973, nullif('note ' || n % 7, 'note 3'),
    n / 7.0, nullif(n % 90, 0) / 10.0, n / 77.0, timestamp '2024-02-01' + n * interval '1 second', n % 12,
    (array['EUR', 'USD', 'GBP'])[1 + n % 3]
"""
# Ten of its twenty columns, one of each kind and size of domain.
WIDE_COLUMNS = ["id", "at", "device", "site", "reading", "status", "flag", "day", "total", "batch"]


def _wide(kind: str) -> dict[str, Any]:
    """The manifest of ``governed``."""
    sink: dict[str, Any] = {
        "type": "clickhouse",
        "table": {"schema": "bench", "name": f"wide_{kind}"},
        "strategy": "full_refresh",
        "unique_key": ["id"],
    }
    manifest: dict[str, Any] = {
        "kind": "dpone.batch.v1",
        "name": f"wide_{kind}",
        "source": {"type": "sqlserver", "table": {"schema": "bench", "name": "wide"}},
        "sink": sink,
    }
    if kind == "plain":
        sink["options"] = {"load_governance": {"enabled": False}}
        return manifest
    manifest["quality"] = {
        "gates": [
            {"id": "rows", "type": "row_count_reconciliation"},
            {"id": "enough", "type": "min_rows", "threshold": 1},
            {"id": "sample", "type": "typed_hash_reconciliation", "mode": "sample", "modulus": 64},
            {"id": "whole", "type": "not_null", "columns": ["id", "at", "total"]},
        ],
        "acceptance": {
            "enabled": True,
            "mode": "required",
            "checks": {"row_count": True, "null_counts": WIDE_COLUMNS, "distinct_counts": WIDE_COLUMNS},
        },
    }
    return manifest


def manifests(sizes: Sizes) -> Iterator[Figure]:
    """Reading and validating many manifests, and building their Dagster definitions, each in a process of its own."""
    folder = Path(tempfile.mkdtemp(prefix="dpone-bench-manifests-"))
    try:
        (folder / ".git").mkdir()
        for number in range(sizes.manifests):
            manifest = {**_wide("governed"), "name": f"wide_{number}"}
            (folder / f"wide_{number}.yaml").write_text(yaml.safe_dump(manifest, sort_keys=False))
        taken: dict[str, list[float]] = {"parse": [], "definitions": []}
        for repetition in range(sizes.repetitions):
            for what, found in taken.items():
                with (
                    step(f"{what} of {sizes.manifests:,} manifests, {repetition + 1} of {sizes.repetitions}"),
                    child(["tests.bench", "--manifests", what, str(folder)], stdout=subprocess.PIPE) as run,
                ):
                    assert run.stdout is not None
                    found.append(float(run.stdout.read()))
    finally:
        shutil.rmtree(folder)
    for what, target in (("parse", 3), ("definitions", 20)):
        yield Figure(
            name=f"manifests_{what}_seconds",
            value=statistics.median(taken[what]),
            target=target,
            spread=(min(taken[what]), max(taken[what])),
            detail={"manifests": sizes.manifests},
        )


def read_manifests(what: str, folder: str) -> None:
    """The process that ``manifests`` times; imports are not counted."""
    from assets.loads import load_assets
    from resources.load_runtime import read_manifest

    paths = sorted(Path(folder).glob("*.yaml"))
    started = time.monotonic()
    if what == "parse":
        assert all(read_manifest(path).processes for path in paths)
    else:
        assert load_assets(Path(folder))
    sys.stdout.write(str(time.monotonic() - started))


def _mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 2)


GROUPS: dict[Callable[[Sizes], Iterator[Figure]], tuple[str, ...]] = {
    memory: ("worker_memory_growth_10x",),
    raw: ("guarded_vs_raw",),
    parts: ("untouched_part_ms",),
    growth: ("publish_cost_growth_50x", "mutate_cost_growth_50x"),
    year: ("seconds_per_day_year", "late_vs_early_days"),
    governed: ("governed_vs_plain",),
    manifests: ("manifests_parse_seconds", "manifests_definitions_seconds"),
}
NAMES = [name for names in GROUPS.values() for name in names]


# ------------------------------------------------------------------------------------------------- the report


def write(path: Path, figures: Sequence[Figure], sizes: Sizes) -> None:
    """Put the figures into the file; those that were not measured now stay as they are."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    details = known.get("details", {})
    for figure in figures:
        known[figure.name] = round(figure.value, 4)
        details[figure.name] = {
            "target": figure.target,
            "met": figure.met,
            "spread": [round(end, 4) for end in figure.spread],
            "measured_at": figure.measured_at,
            **figure.detail,
        }
    known["details"] = details
    known["sizes"] = asdict(sizes)
    known["machine"] = {
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": [round(each, 2) for each in os.getloadavg()],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(known, indent=2) + "\n")


def report(figures: Sequence[Figure]) -> None:
    """Print the table."""
    table = Table(title="Benchmarks", title_justify="left", box=None, pad_edge=False)
    for name in ("figure", "value", "target", "", "spread"):
        table.add_column(name, justify="left" if name in ("figure", "") else "right", header_style="bold dim")
    for figure in figures:
        low, high = figure.spread
        mark = "[green]met[/]" if figure.met else "[bold red]missed[/]"
        table.add_row(
            figure.name, f"[bold]{figure.value:.2f}[/]", f"{figure.target:g}", mark, f"{low:.2f} to {high:.2f}"
        )
    Console().print(table)


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for."""
    if arguments[:1] == ["--worker"]:
        work(*arguments[1:])
        return 0
    if arguments[:1] == ["--manifests"]:
        read_manifests(*arguments[1:])
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure; see docs/benchmarks.md.")
    parser.add_argument("names", nargs="*", metavar="FIGURE", help=f"of {', '.join(NAMES)}; default all")
    parser.add_argument("--quick", action="store_true", help="toy sizes: shows that the benchmark works, and no more")
    parser.add_argument("--out", type=Path, help="default build/bench.json, with --quick build/bench-quick.json")
    asked = parser.parse_args(arguments)
    if unknown := sorted(set(asked.names) - set(NAMES)):
        parser.error(f"no figure is named {unknown[0]}")
    sizes = QUICK if asked.quick else FULL
    path = asked.out or ROOT / "build" / ("bench-quick.json" if asked.quick else "bench.json")
    figures: list[Figure] = []
    started = time.monotonic()
    for group, names in GROUPS.items():
        if not asked.names or set(names) & set(asked.names):
            say.print(f"[bold]{', '.join(names)}[/]")
            figures += group(sizes)
            write(path, figures, sizes)
    report(figures)
    say.print(f"[dim]{(time.monotonic() - started) / 60:.1f} minutes; written to {path}[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
