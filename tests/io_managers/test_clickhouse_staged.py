"""The staged IO manager: which load an asset's rows go through, what is refused, and what a reader receives.

Dagster, ClickHouse and the taking over of rows are real; only the load itself is the shortest that writes a table.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pyarrow as pa
import pytest

from dpone_dagster.contracts.mart import Relation
from dpone_dagster.declarations.manifest import Process, TableRef
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.port import RunIdentity
from io_managers.clickhouse_staged import METADATA_KEY, ClickHouseStagedIOManager, ProcessRef
from resources.asset_rows import AssetLoadSource
from resources.clickhouse.client import ClickHouseClient
from resources.clickhouse.statements import Statements

DAYS = dg.DailyPartitionsDefinition(start_date="2026-08-01", end_date="2026-08-04")
ROWS = pa.table({"id": pa.array([1, 2], pa.int64()), "na me": ["a", None]})
TO = {METADATA_KEY: "loads/people.yml#people"}


@dataclass
class Loads:
    """Appends the rows to one table; remembers what it was called with."""

    client: ClickHouseClient
    database: str
    calls: list[tuple[ProcessRef, str | None, RunIdentity]] = field(default_factory=list)

    def run_load(
        self, process: ProcessRef, rows: object, *, partition_key: str | None, run: RunIdentity, **_: Any
    ) -> Mapping[str, Any]:
        self.calls.append((process, partition_key, run))
        declared = Process.parse(
            {
                "name": "people",
                "source": {"type": "asset"},
                "sink": {
                    "type": "clickhouse",
                    "table": {"schema": self.database, "name": "people"},
                    "strategy": "append",
                },
            }
        )
        with AssetLoadSource(rows).open(declared) as session:
            for batch in session.read():
                if batch.num_rows:
                    table = Relation(schema_name=self.database, name="people")
                    Statements(self.client, "test-").insert(table, pa.Table.from_batches([batch]))
            return {"staged_rows": session.probe.row_count()}

    def target(self, process: ProcessRef, *, prefix: str) -> tuple[ClickHouseClient, TableRef]:
        return self.client, TableRef.parse({"schema": self.database, "name": process.process})

    def stored(self) -> list[tuple[Any, ...]]:
        return list(self.client.query("SELECT id, `na me` FROM people ORDER BY id").result_rows)


@pytest.fixture
def loads(clickhouse: ClickHouseClient, ch_database: str) -> Loads:
    clickhouse.command(
        "CREATE TABLE people"
        " (id Int64, `na me` Nullable(String), __dpone__loaded_at DateTime64(6, 'UTC') DEFAULT now64(6))"
        " ENGINE = MergeTree ORDER BY id"
    )
    return Loads(clickhouse, ch_database)


def run(loads: Loads, *assets: dg.AssetsDefinition, row_limit: int = 100, **options: Any) -> dg.ExecuteInProcessResult:
    manager = ClickHouseStagedIOManager(lambda: loads, row_limit=row_limit)
    return dg.materialize(
        assets, resources={"staged": manager, "io_manager": dg.mem_io_manager}, raise_on_error=False, **options
    )


def refused(result: dg.ExecuteInProcessResult) -> str:
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    error = failure.step_failure_data.error
    while error is not None:
        if error.cls_name == "DponeError":
            return error.message.split(":")[1].strip()
        error = error.cause
    raise AssertionError("it failed of something else")


def people(value: Any, metadata: dict[str, Any] | None = TO, **options: Any) -> dg.AssetsDefinition:
    @dg.asset(name="people", io_manager_key="staged", metadata=metadata, **options)
    def asset():  # Dagster takes an Output only where nothing or Output is annotated
        return value() if callable(value) else value

    return asset


def batches() -> Iterator[pa.RecordBatch]:
    yield from ROWS.to_batches(max_chunksize=1)


def stream() -> dg.Output[Any]:
    return dg.Output(batches())  # Dagster takes a bare generator for its own events


def reader_of_batches() -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(ROWS.schema, batches())


@pytest.mark.parametrize("value", [ROWS, stream, reader_of_batches, ROWS.to_pandas(types_mapper=pd.ArrowDtype)])
def test_an_assets_rows_go_through_the_load_that_its_metadata_names(loads: Loads, value: Any) -> None:
    result = run(loads, people(value))
    assert result.success
    assert loads.stored() == [(1, "a"), (2, None)]
    ((process, partition_key, identity),) = loads.calls
    assert process == ProcessRef(path="loads/people.yml", process="people")
    assert partition_key is None
    assert (identity.run_id, identity.logical_run_id) == (result.run_id, result.run_id)
    assert (identity.try_number, identity.task_id, identity.owner) == (1, "people", "dagster")
    (event,) = result.get_asset_materialization_events()
    assert event.materialization.metadata["staged_rows"].value == 2


def test_a_partition_hands_its_key_over(loads: Loads) -> None:
    assert run(loads, people(ROWS, partitions_def=DAYS), partition_key="2026-08-02").success
    assert [call[1] for call in loads.calls] == ["2026-08-02"]


def test_a_table_without_rows_is_rows_and_none_is_not(loads: Loads) -> None:
    assert run(loads, people(ROWS.schema.empty_table())).success
    assert loads.stored() == []
    result = run(loads, people(None))
    assert (result.success, refused(result)) == (False, "DPONE_IO_MANAGER_NEEDS_ROWS")
    assert len(loads.calls) == 1


@pytest.mark.parametrize(
    "metadata",
    [None, {}, {METADATA_KEY: ""}, {METADATA_KEY: "#people"}, {METADATA_KEY: "loads/people.yml#"}, {METADATA_KEY: 5},
     {METADATA_KEY: "/etc/people.yml"}, {METADATA_KEY: "loads/../../people.yml"}],
)  # fmt: skip
def test_an_asset_that_names_no_manifest_is_refused(loads: Loads, metadata: Any) -> None:
    assert refused(run(loads, people(ROWS, metadata))) == "DPONE_IO_MANAGER_MANIFEST"
    assert loads.calls == []


def test_what_the_load_refuses_fails_the_step_and_materializes_nothing(loads: Loads) -> None:
    result = run(loads, people(pa.table({"id": [1.5]})))
    assert refused(result) == "DPONE_TYPE_UNSUPPORTED"
    assert result.get_asset_materialization_events() == []
    assert loads.stored() == []


def test_a_path_without_a_process() -> None:
    assert ProcessRef.parse("loads/people.yml") == ProcessRef(path="loads/people.yml", process=None)
    with pytest.raises(DponeError, match="DPONE_IO_MANAGER_MANIFEST"):
        ProcessRef.parse(None)


@pytest.mark.parametrize("annotation", [pa.Table, pd.DataFrame, pa.RecordBatchReader, Any])
def test_a_reader_receives_the_whole_target_without_lineage(loads: Loads, annotation: Any) -> None:
    received: list[Any] = []

    def read(people: Any) -> None:
        received.append(people.read_all() if isinstance(people, pa.RecordBatchReader) else people)

    read.__annotations__["people"] = annotation
    reader = dg.asset(name="reader")(read)
    assert run(loads, people(ROWS), reader).success
    assert run(loads, people(ROWS), reader, selection=[reader]).success  # and in a run of its own
    for value in received:
        table = value if isinstance(value, pa.Table) else pa.Table.from_pandas(value)
        assert table.sort_by("id").to_pydict() == {"id": [1, 2], "na me": ["a", None]}
    assert len(received) == 2
    assert isinstance(received[0], pd.DataFrame) == (annotation is pd.DataFrame)


def test_a_target_that_is_too_large_or_gone_is_refused(loads: Loads) -> None:
    @dg.asset
    def reader(people: pa.Table) -> None: ...

    assert run(loads, people(ROWS), reader, row_limit=2).success
    result = run(loads, people(ROWS), reader, row_limit=1, selection=[reader])
    assert refused(result) == "DPONE_IO_MANAGER_TOO_MANY_ROWS"
    loads.client.command("DROP TABLE people SYNC")
    assert refused(run(loads, people(ROWS), reader, selection=[reader])) == "DPONE_SOURCE_ABSENT"


def test_the_documented_asset_is_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sources.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    made: dict[str, Any] = {}
    exec(block, made)
    people = made["people"]
    assert ProcessRef.parse(people.metadata_by_key[people.key][METADATA_KEY]) == ProcessRef(path="loads/people.yml")
    declared = Process.parse(
        {
            "name": "people",
            "source": {"type": "asset"},
            "sink": {"type": "clickhouse", "table": {"schema": "d", "name": "people"}, "strategy": "full_refresh"},
        }
    )
    with AssetLoadSource(people()).open(declared) as session:
        assert session.probe.row_count() == 2
