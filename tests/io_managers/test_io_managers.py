"""What a downstream asset receives from a mart: exactly the published rows of its partitions, or a refusal.

The journal, the store and ClickHouse are the real ones; only the publication itself is done by hand.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pyarrow as pa
import pytest
import sqlalchemy as sa

from dpone_dagster.contracts.arrow_digest import digest_batches
from dpone_dagster.contracts.canonical import canonical_json
from dpone_dagster.contracts.documents import SealedArtifactManifest
from dpone_dagster.contracts.mart import Column, MartSpec, Relation, Scope
from dpone_dagster.contracts.set_digest import EMPTY
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import OperationRecord
from dpone_dagster.ports import BuildReceipt
from dpone_dagster.publication.seal import SealAuthority, artifact_prefix, seal
from io_managers._published import PublishedMartIOManager
from io_managers.clickhouse_mart import ClickHouseMartIOManager
from io_managers.sealed_parquet import SealedParquetIOManager
from resources.artifacts import LocalArtifactStore
from resources.clickhouse.client import ClickHouseClient
from resources.clickhouse.publisher import ClickHousePublisher
from resources.embedded.postgres import PostgresEndpoint
from resources.journal import tables as t
from resources.journal.migrate import migrate
from resources.journal.store import SqlJournal

DAYS = dg.DailyPartitionsDefinition(start_date="2026-08-01", end_date="2026-08-04")
D = "sha256:" + "d" * 64
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("amount", pa.decimal128(18, 4)),
        pa.field("name", pa.string()),
        pa.field("seats", pa.int32()),
    ]
)


def digest_of(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def rows_of(day: str, count: int) -> pa.Table:
    start = datetime.fromisoformat(day).replace(tzinfo=UTC)
    columns = [
        list(range(count)),
        [start + timedelta(seconds=i) for i in range(count)],
        [None if i % 3 == 0 else Decimal(i * 10_001).scaleb(-4) for i in range(count)],
        [None if i % 4 == 0 else f"{day} № {i}" for i in range(count)],
        [None if i % 5 == 0 else 2**31 - 1 - i for i in range(count)],
    ]
    return pa.Table.from_arrays([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


@dataclass
class Published:
    """The runtime that the IO managers see, and the test's way to publish."""

    journal: SqlJournal
    artifacts: LocalArtifactStore
    declared: MartSpec
    publisher: ClickHousePublisher
    clickhouse: ClickHouseClient
    engine: sa.Engine
    root: Path

    def mart(self, name: str) -> MartSpec:
        if name != self.declared.name:
            raise DponeError("DPONE_MART_UNKNOWN", f"No mart is named {name!r}.")
        return self.declared

    def analytics(self, prefix: str) -> ClickHousePublisher:
        return self.publisher

    def publish(self, day: str, rows: pa.Table) -> str:
        """Put one day into store, target and journal as a publication leaves it; return the artifact's folder."""
        mart, scope, operation_id = self.declared, Scope.day(day), digest_of(day)
        after = digest_batches(mart.columns, rows.to_batches())
        operation = OperationRecord(
            operation_id=operation_id,
            operation_plan_sha256=D,
            workflow_plan_sha256=D,
            workflow_execution_id=D,
            workflow=mart.workflow,
            mart=mart.name,
            target=mart.target.dotted,
            scope=scope,
            revision=1,
            replacement_ordinal=0,
            mode="normal",
            attempt_binding_sha256=D,
            state=State.PREPARING,
            version=1,
            unknown_since=None,
            fencing_epoch=1,
            worker_id="w",
            facts={},
            admitted_at=scope.end,
            updated_at=scope.end,
        )
        image = Relation(schema_name="dpone_images", name="image")
        receipt = BuildReceipt(
            operation_id=operation_id,
            operation_plan_sha256=D,
            fencing_epoch=1,
            worker_id="w",
            before_image=image,
            after_image=image,
            before=EMPTY,
            after=after,
            updated_rows=0,
            inserted_rows=after.rows,
            source_rows=after.rows,
            sha256=D,
        )
        authority = SealAuthority(
            workflow_execution_binding_sha256=D,
            baseline_adoption_receipt_sha256=D,
            effective_key_mapping_sha256=D,
            effective_key_template_sha256=D,
            issuer_authority="test",
        )
        reader = pa.RecordBatchReader.from_batches(rows.schema, rows.to_batches())
        manifest = seal(mart, operation, receipt, reader, self.artifacts, authority=authority, chunk_rows=4).manifest
        if rows.num_rows:
            self.publisher.load(mart.target, iter(rows.to_batches()), lambda n: None)
        uuid = self.publisher.uuid(mart.target)
        assert uuid is not None
        with self.engine.begin() as connection:
            connection.execute(
                t.document.insert().values(
                    sha256=manifest.sha256,
                    schema_name=manifest.SCHEMA,
                    body=canonical_json(manifest.as_json()).decode(),
                    created_at=scope.end,
                )
            )
            connection.execute(
                t.scope_head.insert().values(
                    mart=mart.name,
                    scope_start=scope.start,
                    scope_end=scope.end,
                    revision=1,
                    operation_id=operation_id,
                    row_count=after.rows,
                    after_image_sha256=after.sha256,
                    artifact_manifest_sha256=manifest.sha256,
                    target_uuid=uuid,
                    published_at=scope.end,
                )
            )
        self.point_generation_at(uuid)
        return artifact_prefix(operation_id, D)

    def point_generation_at(self, uuid: str) -> None:
        """Write the generation head."""
        target = self.declared.target.dotted
        with self.engine.begin() as connection:
            connection.execute(t.generation_head.delete().where(t.generation_head.c.target == target))
            connection.execute(
                t.generation_head.insert().values(
                    target=target, uuid=uuid, generation=1, operation_id=D, changed_at=datetime.now(UTC)
                )
            )

    def load(self, manager: dg.IOManager, annotation: Any, *, partition: str | None, **ins: Any) -> Any:
        """Materialize a downstream asset through Dagster and return what it received."""
        received: list[Any] = []

        def downstream(events: Any) -> None:
            received.append(events)

        if annotation is None:
            del downstream.__annotations__["events"]
        else:
            downstream.__annotations__["events"] = annotation
        events = dg.AssetSpec("events", partitions_def=DAYS).with_io_manager_key("mart")
        asset = dg.asset(
            downstream,  # type: ignore[arg-type]
            ins={"events": dg.AssetIn(**ins)},
            partitions_def=DAYS if partition else None,
        )
        done = dg.materialize(
            [events, asset],
            selection=[asset],
            partition_key=partition,
            resources={"mart": manager},
            raise_on_error=True,
        )
        assert done.success
        return received[0]


@pytest.fixture
def published(
    fresh_db: PostgresEndpoint, clickhouse: ClickHouseClient, ch_database: str, tmp_path: Path
) -> Iterator[Published]:
    engine = sa.create_engine(fresh_db.sqlalchemy_url)
    migrate(engine)
    journal = SqlJournal(fresh_db.sqlalchemy_url)
    declared = MartSpec(
        name="events",
        model_unique_id="model.analytics.events",
        workflow="daily",
        source=Relation(schema_name="analytics", name="events"),
        target=Relation(schema_name=ch_database, name="events"),
        event_time="at",
        key=("id", "at"),
        columns=(
            Column(name="id", type="bigint", nullable=False),
            Column(name="at", type="datetime2(6)", nullable=False),
            Column(name="amount", type="decimal(18,4)", nullable=True),
            Column(name="name", type="nvarchar(40)", nullable=True),
            Column(name="seats", type="int", nullable=True),
        ),
        start_date=date(2026, 8, 1),
    )
    publisher = ClickHousePublisher(clickhouse, "dpone-test-")
    publisher.create_target(declared)
    root = tmp_path / "artifacts"
    yield Published(
        journal=journal,
        artifacts=LocalArtifactStore(root, free_bytes=0),
        declared=declared,
        publisher=publisher,
        clickhouse=clickhouse,
        engine=engine,
        root=root,
    )
    engine.dispose()
    journal.close()


BOTH = pytest.mark.parametrize("kind", [SealedParquetIOManager, ClickHouseMartIOManager])
Kind = type[PublishedMartIOManager]


@pytest.fixture
def days(published: Published) -> dict[str, pa.Table]:
    """Two days with rows and one without, published."""
    days = {"2026-08-01": rows_of("2026-08-01", 10), "2026-08-02": rows_of("2026-08-02", 7)}
    days["2026-08-03"] = rows_of("2026-08-03", 0)
    for day, rows in days.items():
        published.publish(day, rows)
    return days


def code_of(published: Published, manager: dg.IOManager, **how: Any) -> str:
    with pytest.raises(DponeError) as refused:
        published.load(manager, how.pop("annotation", None), **how)
    return refused.value.code


@BOTH
def test_one_partition_arrives_as_a_table_with_exact_types(
    published: Published, days: dict[str, pa.Table], kind: Kind
) -> None:
    manager = kind(lambda: published)
    for day, rows in days.items():
        assert published.load(manager, None, partition=day) == rows
    assert published.load(manager, pa.Table, partition="2026-08-01") == days["2026-08-01"]


@BOTH
def test_a_stream_and_a_frame_hold_the_same_rows(published: Published, days: dict[str, pa.Table], kind: Kind) -> None:
    manager = kind(lambda: published)
    stream = published.load(manager, pa.RecordBatchReader, partition="2026-08-02")
    assert isinstance(stream, pa.RecordBatchReader)
    assert stream.read_all() == days["2026-08-02"]
    frame = published.load(manager, pd.DataFrame, partition="2026-08-02")
    assert frame["id"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    # NULL stays NULL and does not turn integers into floats.
    assert [None if pd.isna(n) else n for n in frame["seats"]] == [
        None, 2147483646, 2147483645, 2147483644, 2147483643, None, 2147483641
    ]  # fmt: skip
    assert str(frame["amount"][1]) == "1.0001"


@BOTH
def test_several_partitions_arrive_as_a_dict_or_as_one_object_in_partition_order(
    published: Published, days: dict[str, pa.Table], kind: Kind
) -> None:
    manager = kind(lambda: published)
    assert published.load(manager, None, partition=None) == days
    assert published.load(manager, dict[str, pa.Table], partition=None) == days
    assert published.load(manager, pa.Table, partition=None) == pa.concat_tables(days.values())
    frames = published.load(manager, dict[str, pd.DataFrame], partition=None)
    assert {day: len(frame) for day, frame in frames.items()} == {
        "2026-08-01": 10,
        "2026-08-02": 7,
        "2026-08-03": 0,
    }
    assert published.load(manager, dict[str, pa.Table], partition="2026-08-02") == {"2026-08-02": days["2026-08-02"]}


@BOTH
def test_an_unpublished_partition_is_refused_unless_the_input_allows_it(published: Published, kind: Kind) -> None:
    rows = rows_of("2026-08-02", 3)
    published.publish("2026-08-02", rows)
    manager = kind(lambda: published)
    assert code_of(published, manager, partition="2026-08-01") == "DPONE_PARTITION_NOT_PUBLISHED"
    assert code_of(published, manager, partition=None) == "DPONE_PARTITION_NOT_PUBLISHED"
    allowed = published.load(manager, None, partition=None, metadata={"allow_missing_partitions": True})
    assert allowed == {"2026-08-02": rows}


@BOTH
def test_an_annotation_that_rows_cannot_have_is_refused(
    published: Published, days: dict[str, pa.Table], kind: Kind
) -> None:
    manager = kind(lambda: published)
    assert code_of(published, manager, annotation=int, partition="2026-08-01") == "DPONE_CONTRACT_INVALID"


@BOTH
def test_an_output_with_a_value_is_refused_and_one_without_is_not(published: Published, kind: Kind) -> None:
    manager = kind(lambda: published)

    @dg.asset
    def silent() -> None:
        return None

    @dg.asset
    def result() -> dg.MaterializeResult:
        return dg.MaterializeResult(metadata={"rows": 1})

    @dg.asset(io_manager_key="io_manager")
    def loud() -> int:
        return 1

    resources = {"io_manager": manager}
    assert dg.materialize([silent, result], resources=resources).success
    with pytest.raises(DponeError) as refused:
        dg.materialize([loud], resources=resources)
    assert refused.value.code == "DPONE_IO_MANAGER_READS_ONLY"


def test_building_definitions_does_not_open_the_runtime() -> None:
    def never() -> Any:
        raise AssertionError("opened")

    defs = dg.Definitions(resources={"a": SealedParquetIOManager(never), "b": ClickHouseMartIOManager(never)})
    assert defs.resolve_all_job_defs() is not None


# --------------------------------------------------------------------------------------- the sealed artifact


def test_changed_artifact_bytes_are_refused(published: Published, days: dict[str, pa.Table]) -> None:
    manager = SealedParquetIOManager(lambda: published)
    chunk = published.root / artifact_prefix(digest_of("2026-08-01"), D) / "part-0001.parquet"
    good = chunk.read_bytes()
    chunk.chmod(0o600)
    chunk.write_bytes(good[:50] + bytes([good[50] ^ 255]) + good[51:])
    assert code_of(published, manager, partition="2026-08-01") == "DPONE_ARTIFACT_CORRUPT"
    assert published.load(manager, None, partition="2026-08-02") == days["2026-08-02"]


def test_a_manifest_that_is_sound_but_not_the_journals_is_refused(
    published: Published, days: dict[str, pa.Table]
) -> None:
    head = published.journal.scope_head("events", Scope.day("2026-08-01"))
    assert head is not None
    recorded = published.journal.document(head.artifact_manifest_sha256)
    assert recorded is not None
    own = {"schema", "artifact_manifest_sha256"}
    other = SealedArtifactManifest.seal(
        **{k: v for k, v in recorded.items() if k not in own} | {"retention_policy_sha256": "sha256:" + "1" * 64}
    )
    path = published.root / recorded["artifact_prefix"] / "manifest.json"
    path.chmod(0o600)
    path.write_text(json.dumps(other.as_json(), sort_keys=True, separators=(",", ":")))
    manager = SealedParquetIOManager(lambda: published)
    assert code_of(published, manager, partition="2026-08-01") == "DPONE_ARTIFACT_CORRUPT"


def test_a_head_without_its_manifest_in_the_journal_is_corruption(
    published: Published, days: dict[str, pa.Table]
) -> None:
    with published.engine.begin() as connection:
        connection.execute(t.document.delete())
    manager = SealedParquetIOManager(lambda: published)
    assert code_of(published, manager, partition="2026-08-01") == "DPONE_JOURNAL_CORRUPT"


# ------------------------------------------------------------------------------------------------ ClickHouse


def test_rows_that_somebody_else_wrote_are_refused(published: Published, days: dict[str, pa.Table]) -> None:
    table = f"`{published.declared.target.schema_name}`.`events`"
    published.clickhouse.command(
        f"INSERT INTO {table} SELECT id + 1000, at, amount, name, seats FROM {table} WHERE id = 3"
    )
    manager = ClickHouseMartIOManager(lambda: published)
    for day in ("2026-08-01", "2026-08-02"):
        assert code_of(published, manager, partition=day) == "DPONE_PUBLISHED_ROWS_DIFFER"
    assert published.load(manager, None, partition="2026-08-03").num_rows == 0


def test_the_rows_come_from_the_journals_generation_and_not_from_the_name(
    published: Published, days: dict[str, pa.Table]
) -> None:
    database = published.declared.target.schema_name
    published.clickhouse.command(f"CREATE TABLE `{database}`.`other` AS `{database}`.`events`")
    published.clickhouse.command(f"EXCHANGE TABLES `{database}`.`events` AND `{database}`.`other`")
    manager = ClickHouseMartIOManager(lambda: published)
    # The name has an empty table now; the journal still holds the earlier UUID to be the generation.
    assert published.load(manager, None, partition="2026-08-01") == days["2026-08-01"]
    new = str(
        published.clickhouse.query(
            f"SELECT toString(uuid) FROM system.tables WHERE database = '{database}' AND name = 'events'"
        ).result_rows[0][0]
    )
    published.point_generation_at(new)
    assert code_of(published, manager, partition="2026-08-01") == "DPONE_PUBLISHED_ROWS_DIFFER"


def test_a_generation_that_is_gone_is_refused(published: Published, days: dict[str, pa.Table]) -> None:
    published.clickhouse.command(f"DROP TABLE `{published.declared.target.schema_name}`.`events` SYNC")
    manager = ClickHouseMartIOManager(lambda: published)
    assert code_of(published, manager, partition="2026-08-01") == "DPONE_GENERATION_GONE"
