"""The sealed artifact: what goes in comes out, in order, or nothing does."""

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpone_dagster.contracts.arrow_digest import digest_batches
from dpone_dagster.contracts.documents import SealAuthorizationReceipt, SealedArtifactManifest
from dpone_dagster.contracts.mart import Column, MartSpec, Relation, Scope
from dpone_dagster.contracts.set_digest import EMPTY, SetDigest
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import OperationRecord
from dpone_dagster.ports import BuildReceipt
from dpone_dagster.publication.seal import (
    SealAuthority,
    SealedArtifact,
    artifact_prefix,
    artifact_schema,
    authorize,
    not_issued,
    open_artifact,
    read_manifest,
    seal,
)
from resources.artifacts import LocalArtifactStore

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("tiny", pa.uint8()),
        pa.field("small", pa.int16()),
        pa.field("four", pa.int32()),
        pa.field("flag", pa.bool_()),
        pa.field("day", pa.date32()),
        pa.field("guid", pa.string()),
        pa.field("amount", pa.decimal128(18, 4)),
        pa.field("big", pa.decimal128(38, 0)),
        pa.field("name", pa.string()),
        pa.field("code", pa.string()),
    ]
)
TYPES = {
    "id": "bigint",
    "at": "datetime2(6)",
    "tiny": "tinyint",
    "small": "smallint",
    "four": "int",
    "flag": "bit",
    "day": "date",
    "guid": "uniqueidentifier",
    "amount": "decimal(18,4)",
    "big": "decimal(38,0)",
    "name": "nvarchar(max)",
    "code": "nchar(4)",
}
DAY = datetime(2026, 8, 7, tzinfo=UTC)
A, B, C, D = ("sha256:" + digit * 64 for digit in "abcd")


def mart_of(*names: str) -> MartSpec:
    return MartSpec(
        name="events",
        model_unique_id="model.analytics.events",
        workflow="daily_events",
        source=Relation(schema_name="analytics", name="events"),
        target=Relation(schema_name="analytics", name="events"),
        event_time="at",
        key=("id", "at"),
        columns=tuple(Column(name=n, type=TYPES[n], nullable=SCHEMA.field(n).nullable) for n in names or TYPES),
        start_date=date(2026, 1, 1),
    )


MART = mart_of()
NARROW = mart_of("id", "at", "name")
OPERATION = OperationRecord(
    operation_id=A,
    operation_plan_sha256=B,
    workflow_plan_sha256=C,
    workflow_execution_id="run-1",
    workflow="daily_events",
    mart="events",
    target="analytics.events",
    scope=Scope.day("2026-08-07"),
    revision=1,
    replacement_ordinal=0,
    mode="normal",
    attempt_binding_sha256=D,
    state=State.PREPARING,
    version=3,
    unknown_since=None,
    fencing_epoch=7,
    worker_id=str(uuid.UUID(int=1)),
    facts={},
    admitted_at=DAY,
    updated_at=DAY,
)
AUTHORITY = SealAuthority(
    workflow_execution_binding_sha256=C,
    baseline_adoption_receipt_sha256=B,
    effective_key_mapping_sha256=A,
    effective_key_template_sha256=B,
    issuer_authority="test",
)
PREFIX = "semantic-refresh/operation-aaaaaaaaaaaaaaaa/attempt-dddddddddddddddd"


def receipt_of(after: SetDigest) -> BuildReceipt:
    return BuildReceipt(
        operation_id=A,
        operation_plan_sha256=B,
        fencing_epoch=7,
        worker_id=str(uuid.UUID(int=1)),
        before_image=Relation(schema_name="dpone_images", name="before"),
        after_image=Relation(schema_name="dpone_images", name="after"),
        before=EMPTY,
        after=after,
        updated_rows=0,
        inserted_rows=after.rows,
        source_rows=after.rows,
        sha256=C,
    )


def table_of(rows: int, mart: MartSpec = MART) -> pa.Table:
    """Rows in key order, not in value order, with NULLs, repeated and unique values."""
    columns: dict[str, list[Any]] = {
        "id": [7 * i for i in range(rows)],
        "at": [DAY + timedelta(microseconds=i) for i in range(rows)],
        "tiny": [None if i % 5 == 0 else i % 256 for i in range(rows)],
        "small": [-(i % 30_000) for i in range(rows)],
        "four": [i * 1_000 for i in range(rows)],
        "flag": [(None, True, False)[i % 3] for i in range(rows)],
        "day": [date(2026, 8, 7) for _ in range(rows)],
        "guid": [str(uuid.UUID(int=i * 2**64 + 17)) for i in range(rows)],
        "amount": [Decimal(-i).scaleb(-4) for i in range(rows)],
        "big": [Decimal(10) ** 37 + i for i in range(rows)],
        "name": [None if i % 11 == 0 else f"имя {i * 7919 % 100_003}" for i in range(rows)],
        "code": [f"{i % 97:04d}" for i in range(rows)],
    }
    names = [c.name for c in mart.columns]
    return pa.table({n: columns[n] for n in names}, schema=pa.schema([SCHEMA.field(n) for n in names]))


def sealed(
    store: LocalArtifactStore,
    table: pa.Table,
    mart: MartSpec = MART,
    *,
    batch_rows: int = 1_000,
    chunk_rows: int = 10_000,
    operation: OperationRecord = OPERATION,
    after: SetDigest | None = None,
    **more: Any,
) -> SealedArtifact:
    after = digest_batches(mart.columns, table.to_batches()) if after is None else after
    reader = pa.RecordBatchReader.from_batches(table.schema, table.to_batches(max_chunksize=batch_rows))
    return seal(mart, operation, receipt_of(after), reader, store, authority=AUTHORITY, chunk_rows=chunk_rows, **more)


def reopened(store: LocalArtifactStore, mart: MartSpec = MART) -> pa.Table:
    batches = open_artifact(store, read_manifest(store, PREFIX), mart)
    return pa.Table.from_batches(batches, artifact_schema(mart))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "artifacts"


@pytest.fixture
def store(root: Path) -> LocalArtifactStore:
    return LocalArtifactStore(root, free_bytes=0)


def overwrite(root: Path, key: str, data: bytes) -> None:
    path = root / key
    path.chmod(0o600)
    path.write_bytes(data)


# ------------------------------------------------------------------------------------------------- writing


def test_rows_come_back_equal_and_in_order_and_the_manifest_counts_what_is_on_disk(
    store: LocalArtifactStore, root: Path
) -> None:
    table = table_of(45_300)
    told: list[int] = []
    result = sealed(store, table, chunk_rows=20_000, on_rows=told.append)
    assert reopened(store) == table
    assert sum(told) == 45_300
    assert result.digest.rows == 45_300

    on_disk = json.loads((root / PREFIX / "manifest.json").read_bytes())
    parts = sorted((root / PREFIX).glob("*.parquet"))
    assert [p.name for p in parts] == ["part-0001.parquet", "part-0002.parquet", "part-0003.parquet"]
    assert [(c["ordinal"], c["object_key"], c["chunk_sha256"], c["byte_count"]) for c in on_disk["chunks"]] == [
        (n, p.name, "sha256:" + hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_size)
        for n, p in enumerate(parts, 1)
    ]
    counts = [pq.ParquetFile(p).metadata.num_rows for p in parts]
    assert [c["row_count"] for c in on_disk["chunks"]] == counts == [20_000, 20_000, 5_300]
    # A row counts as 10 x 16 bytes, 2,000 for nvarchar(max) and 4 for nchar(4): 32 MiB hold 15,505 of them.
    groups = pq.ParquetFile(parts[0]).metadata
    assert [groups.row_group(n).num_rows for n in range(groups.num_row_groups)] == [15_505, 4_495]
    assert (on_disk["chunk_count"], on_disk["total_rows"]) == (3, 45_300)
    assert on_disk["total_bytes"] == sum(p.stat().st_size for p in parts)


def test_the_manifest_cites_the_authorization_and_both_are_self_proving(store: LocalArtifactStore, root: Path) -> None:
    result = sealed(store, table_of(10))
    authorization = json.loads((root / PREFIX / "authorization.json").read_bytes())
    manifest = json.loads((root / PREFIX / "manifest.json").read_bytes())
    for document, own in (
        (authorization, "seal_authorization_receipt_sha256"),
        (manifest, "artifact_manifest_sha256"),
    ):
        body = {k: v for k, v in document.items() if k != own}
        text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        assert document[own] == "sha256:" + hashlib.sha256(text).hexdigest()
    assert manifest["seal_authorization_receipt_sha256"] == result.authorization.sha256
    assert authorization["after_image_row_count"] == 10
    assert authorization["after_image_sha256"] == result.digest.sha256
    assert authorization["journal_version"] == 3
    assert authorization["route_certification_receipt_sha256"] == not_issued("route_certification_receipt_sha256")
    assert manifest["attempt_binding_sha256"] == authorization["attempt_binding_sha256"] == D


def test_an_empty_image_has_a_manifest_without_chunks(store: LocalArtifactStore) -> None:
    result = sealed(store, table_of(0))
    assert (result.manifest.chunks, result.manifest.total_rows) == ((), 0)
    assert store.list(PREFIX) == [f"{PREFIX}/authorization.json", f"{PREFIX}/manifest.json"]
    assert reopened(store) == table_of(0)


def test_the_same_rows_give_the_same_bytes_whatever_the_batches(tmp_path: Path) -> None:
    digests = []
    for n, batch_rows in enumerate((1, 333, 1_000, 10_000)):
        store = LocalArtifactStore(tmp_path / str(n), free_bytes=0)
        result = sealed(store, table_of(4_321), batch_rows=batch_rows, chunk_rows=2_000)
        digests.append([c.chunk_sha256 for c in result.manifest.chunks])
    assert digests == [digests[0]] * 4
    assert len(set(digests[0])) == 3


def test_sealing_again_in_the_same_attempt_is_a_replay(store: LocalArtifactStore, root: Path) -> None:
    first = sealed(store, table_of(100))
    stamps = {p: p.stat().st_mtime_ns for p in (root / PREFIX).iterdir()}
    again = seal(
        MART,
        replace(OPERATION, version=9),
        receipt_of(first.digest),
        pa.RecordBatchReader.from_batches(SCHEMA, table_of(100).to_batches()),
        store,
        authority=AUTHORITY,
        chunk_rows=10_000,
    )
    assert (again.authorization, again.manifest) == (first.authorization, first.manifest)
    assert {p: p.stat().st_mtime_ns for p in (root / PREFIX).iterdir()} == stamps


def test_another_image_in_the_same_attempt_is_refused(store: LocalArtifactStore) -> None:
    first = sealed(store, table_of(100))
    with pytest.raises(DponeError) as refused:
        sealed(store, table_of(101))
    assert refused.value.code == "DPONE_ARTIFACT_UNAUTHORIZED"
    assert read_manifest(store, PREFIX) == first.manifest


def test_a_foreign_object_under_a_chunks_key_is_a_conflict(store: LocalArtifactStore) -> None:
    with store.workspace() as folder:
        (folder / "x").write_bytes(b"not ours")
        store.put_new(f"{PREFIX}/part-0001.parquet", folder / "x")
    with pytest.raises(DponeError) as refused:
        sealed(store, table_of(10))
    assert refused.value.code == "DPONE_ARTIFACT_CONFLICT"
    assert f"{PREFIX}/manifest.json" not in store.list(PREFIX)


def test_another_attempt_writes_beside_the_first(store: LocalArtifactStore) -> None:
    sealed(store, table_of(10))
    sealed(store, table_of(10), operation=replace(OPERATION, attempt_binding_sha256=A))
    other = artifact_prefix(A, A)
    assert other != PREFIX
    assert [k.removeprefix(other) for k in store.list(other)] == [
        "/authorization.json",
        "/manifest.json",
        "/part-0001.parquet",
    ]


@pytest.mark.parametrize("change", ["one row less", "one row more", "one row twice", "one value"])
def test_rows_that_are_not_the_after_image_leave_no_manifest(store: LocalArtifactStore, change: str) -> None:
    table = table_of(1_000)
    after = digest_batches(MART.columns, table.to_batches())
    changed = {
        "one row less": table.slice(1),
        "one row more": pa.concat_tables([table, table_of(1_001).slice(1_000)]),
        "one row twice": pa.concat_tables([table.slice(0, 999), table.slice(0, 1)]),
        "one value": table_of(1_000).set_column(
            4, SCHEMA.field("four"), pa.array([1, *table["four"].to_pylist()[1:]], pa.int32())
        ),
    }[change]
    with pytest.raises(DponeError) as refused:
        sealed(store, changed, after=after)
    assert refused.value.code == "DPONE_ARTIFACT_DIGEST_MISMATCH"
    with pytest.raises(DponeError) as missing:
        read_manifest(store, PREFIX)
    assert missing.value.code == "DPONE_ARTIFACT_MISSING"


def test_columns_other_than_the_contracts_are_refused(store: LocalArtifactStore) -> None:
    table = table_of(5, NARROW)
    wrong = {
        "name": table.rename_columns(["id", "at", "nome"]),
        "at": table.select([0, 2, 1]),
        "id": table.set_column(0, "id", table["id"].cast(pa.int32())),
        "4 columns": table.append_column("extra", table["id"]),
        "__dpone_seal_ordinal": table.append_column("__dpone_seal_ordinal", table["id"]),
        "2 columns": table.select([0, 1]),
    }
    for named, rows in wrong.items():
        with pytest.raises(DponeError) as refused:
            sealed(store, rows, NARROW, after=digest_batches(NARROW.columns, table.to_batches()))
        assert refused.value.code == "DPONE_ARTIFACT_SCHEMA"
        assert named in refused.value.sentence
    assert store.list(PREFIX) == []


def test_a_business_column_in_the_transports_namespace_is_refused(store: LocalArtifactStore) -> None:
    columns = (*NARROW.columns, Column(name="__DPONE_SEAL_x", type="int", nullable=True))
    mart = NARROW.model_copy(update={"columns": columns})
    with pytest.raises(DponeError) as refused:
        artifact_schema(mart)
    assert refused.value.code == "DPONE_ARTIFACT_SCHEMA"


def test_a_batch_that_lies_about_its_schema_is_refused(store: LocalArtifactStore) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from table_of(3, NARROW).to_batches()
        yield table_of(3, NARROW).select([0, 1]).to_batches()[0]

    class Reader:
        schema = table_of(0, NARROW).schema

        def __iter__(self) -> Iterator[pa.RecordBatch]:
            return batches()

    with pytest.raises(DponeError) as refused:
        seal(
            NARROW,
            OPERATION,
            receipt_of(EMPTY),
            Reader(),
            store,
            authority=AUTHORITY,
            chunk_rows=10,  # type: ignore[arg-type]
        )
    assert refused.value.code == "DPONE_ARTIFACT_SCHEMA"


def test_a_decimal_with_more_digits_than_its_type_is_refused(store: LocalArtifactStore) -> None:
    wide = pa.array([Decimal("123456789012345678.9012")], pa.decimal128(38, 4))
    lying = pa.Array.from_buffers(pa.decimal128(18, 4), 1, wide.buffers())
    table = table_of(1)
    table = table.set_column(8, SCHEMA.field("amount"), lying)
    with pytest.raises(DponeError) as refused:
        sealed(store, table, after=EMPTY)
    assert refused.value.code == "DPONE_ARTIFACT_SCHEMA"
    assert "amount" in refused.value.sentence
    assert "1234" not in str(refused.value)


def test_a_receipt_of_another_operation_authorizes_nothing() -> None:
    for wrong in (
        replace(receipt_of(EMPTY), operation_id=D),
        replace(receipt_of(EMPTY), operation_plan_sha256=D),
    ):
        with pytest.raises(DponeError) as refused:
            authorize(MART, OPERATION, wrong, AUTHORITY, provider="local", chunk_rows=1)
        assert refused.value.code == "DPONE_ARTIFACT_UNAUTHORIZED"
    # A receipt written under an earlier epoch stays proof for whoever took the operation over.
    taken_over = replace(OPERATION, fencing_epoch=8)
    made = authorize(MART, taken_over, receipt_of(EMPTY), AUTHORITY, provider="local", chunk_rows=1)
    assert made.fencing_epoch == 8


def test_an_interruption_before_an_object_leaves_no_later_one(store: LocalArtifactStore, root: Path) -> None:
    calls: list[int] = []

    def check() -> None:
        calls.append(len(store.list(PREFIX)))
        if len(calls) == 2:
            raise DponeError("DPONE_LEASE_LOST", "Test.")

    with pytest.raises(DponeError) as lost:
        sealed(store, table_of(2_500, NARROW), NARROW, chunk_rows=1_000, check=check)
    assert lost.value.code == "DPONE_LEASE_LOST"
    assert [k.rpartition("/")[2] for k in store.list(PREFIX)] == ["authorization.json", "part-0001.parquet"]
    assert list((root / ".work").iterdir()) == []


# ------------------------------------------------------------------------------------------------- reading


def test_a_changed_byte_in_any_region_of_a_chunk_is_refused_before_its_rows(
    store: LocalArtifactStore, root: Path
) -> None:
    table = table_of(3_000, NARROW)
    sealed(store, table, NARROW, chunk_rows=1_000)
    key = f"{PREFIX}/part-0002.parquet"
    good = (root / key).read_bytes()
    regions = [0, 3, 4, 40, *range(97, len(good), len(good) // 40), len(good) - 5, len(good) - 1]
    for position in regions:
        overwrite(root, key, good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        batches = open_artifact(store, read_manifest(store, PREFIX), NARROW)
        seen = [next(batches)]
        with pytest.raises(DponeError) as refused:
            seen.extend(batches)
        assert refused.value.code == "DPONE_ARTIFACT_CORRUPT"
        assert pa.Table.from_batches(seen) == table.slice(0, 1_000)
    for longer_or_shorter in (good + b"\0", good[:-1], b""):
        overwrite(root, key, longer_or_shorter)
        with pytest.raises(DponeError) as refused:
            reopened(store, NARROW)
        assert refused.value.code == "DPONE_ARTIFACT_CORRUPT"
    overwrite(root, key, good)
    assert reopened(store, NARROW) == table


def test_a_missing_chunk_is_refused(store: LocalArtifactStore, root: Path) -> None:
    sealed(store, table_of(3_000, NARROW), NARROW, chunk_rows=1_000)
    (root / PREFIX / "part-0003.parquet").unlink()
    with pytest.raises(DponeError) as refused:
        reopened(store, NARROW)
    assert refused.value.code == "DPONE_ARTIFACT_MISSING"


def test_an_added_object_is_not_part_of_the_artifact(store: LocalArtifactStore, root: Path) -> None:
    table = table_of(2_000, NARROW)
    sealed(store, table, NARROW, chunk_rows=1_000)
    data = (root / PREFIX / "part-0001.parquet").read_bytes()
    (root / PREFIX / "part-0003.parquet").write_bytes(data)
    assert reopened(store, NARROW) == table


def test_a_chunk_of_other_rows_with_a_matching_manifest_entry_is_still_refused_by_its_row_count(
    store: LocalArtifactStore, root: Path
) -> None:
    result = sealed(store, table_of(1_000, NARROW), NARROW)
    path = root / "extra.parquet"
    pq.write_table(table_of(1_001, NARROW), path, store_schema=False)
    data = path.read_bytes()
    overwrite(root, f"{PREFIX}/part-0001.parquet", data)
    entry = {
        **result.manifest.as_json()["chunks"][0],
        "chunk_sha256": "sha256:" + hashlib.sha256(data).hexdigest(),
        "byte_count": len(data),
    }
    fields = {
        k: v
        for k, v in result.manifest.as_json().items()
        if k not in ("schema", "artifact_manifest_sha256", "chunks", "total_bytes")
    }
    forged = SealedArtifactManifest.seal(**fields, chunks=[entry], total_bytes=len(data))
    with pytest.raises(DponeError) as refused:
        list(open_artifact(store, forged, NARROW))
    assert refused.value.code == "DPONE_ARTIFACT_CORRUPT"
    assert "row count" in refused.value.sentence


def test_every_change_to_the_manifest_is_refused(store: LocalArtifactStore, root: Path) -> None:
    sealed(store, table_of(2_000, NARROW), NARROW, chunk_rows=1_000)
    key = f"{PREFIX}/manifest.json"
    good = (root / key).read_bytes()
    document = json.loads(good)
    changed = [
        good[:-1],
        good + b"\n",
        good.replace(b'"chunk_count":2', b'"chunk_count":3'),
        good.replace(b'"total_rows":2000', b'"total_rows":2001'),
        good.replace(b"part-0002", b"part-0009"),
        good.replace(b'"provider":"local"', b'"provider":"other"'),
        json.dumps(document).encode(),
        json.dumps({**document, "extra": 1}, sort_keys=True, separators=(",", ":")).encode(),
        b"[]",
        b"\xff",
        b"",
    ]
    for data in changed:
        assert data != good
        overwrite(root, key, data)
        with pytest.raises(DponeError) as refused:
            read_manifest(store, PREFIX)
        assert refused.value.code == "DPONE_ARTIFACT_CORRUPT"


def test_a_manifest_in_the_wrong_place_is_refused(store: LocalArtifactStore, root: Path) -> None:
    sealed(store, table_of(10))
    data = (root / PREFIX / "manifest.json").read_bytes()
    other = artifact_prefix(A, B)
    (root / other).mkdir()
    (root / other / "manifest.json").write_bytes(data)
    with pytest.raises(DponeError) as refused:
        read_manifest(store, other)
    assert refused.value.code == "DPONE_ARTIFACT_CORRUPT"


def test_a_manifest_changed_in_memory_is_refused(store: LocalArtifactStore) -> None:
    manifest = sealed(store, table_of(2_000, NARROW), NARROW, chunk_rows=1_000).manifest
    with pytest.raises(DponeError) as refused:
        open_artifact(store, manifest.model_copy(update={"chunks": manifest.chunks[:1]}), NARROW)
    assert refused.value.code == "DPONE_ARTIFACT_CORRUPT"


def test_another_contract_does_not_read_the_artifact(store: LocalArtifactStore) -> None:
    manifest = sealed(store, table_of(10)).manifest
    with pytest.raises(DponeError) as refused:
        open_artifact(store, manifest, NARROW)
    assert refused.value.code == "DPONE_ARTIFACT_SCHEMA"


# ------------------------------------------------------------------------------- all values, memory, deaths


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ROW = st.tuples(
    st.integers(-(2**63), 2**63 - 1),
    st.datetimes(datetime(1900, 1, 1), datetime(2299, 12, 31, 23, 59, 59, 999999)).map(
        lambda at: at.replace(tzinfo=UTC)
    ),
    st.none() | st.integers(0, 255),
    st.none() | st.integers(-(2**15), 2**15 - 1),
    st.none() | st.integers(-(2**31), 2**31 - 1),
    st.none() | st.booleans(),
    st.none() | st.dates(date(1970, 1, 1), date(2149, 6, 6)),
    st.none() | st.uuids().map(str),
    st.none() | st.integers(-(10**18) + 1, 10**18 - 1).map(lambda n: Decimal(n).scaleb(-4)),
    st.none() | st.integers(-(10**38) + 1, 10**38 - 1).map(Decimal),
    st.none() | TEXT,
    st.none() | TEXT.map(lambda text: text[:4].rstrip(" ")),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROW, max_size=30), batch_rows=st.integers(1, 40), chunk_rows=st.integers(1, 40))
def test_every_admitted_value_survives(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[Any, ...]],
    batch_rows: int,
    chunk_rows: int,
) -> None:
    store = LocalArtifactStore(tmp_path_factory.mktemp("store"), free_bytes=0)
    columns = [pa.array([row[n] for row in rows], field.type) for n, field in enumerate(SCHEMA)]
    table = pa.Table.from_arrays(columns, schema=SCHEMA)
    sealed(store, table, batch_rows=batch_rows, chunk_rows=chunk_rows)
    back = reopened(store)
    assert back.schema == SCHEMA
    assert [tuple(row.values()) for row in back.to_pylist()] == rows


def peak_bytes(tmp_path: Path, rows: int) -> int:
    """Arrow's own peak while ``rows`` rows are made on the fly, sealed and read back, in a fresh process."""
    code = f"""
        import pyarrow as pa
        from tests.publication.test_seal import *

        def batches():
            for start in range(0, {rows}, 10_000):
                yield pa.record_batch(
                    [
                        pa.array(range(start, start + 10_000), pa.int64()),
                        pa.array([DAY] * 10_000, pa.timestamp("us", tz="UTC")),
                        pa.array([str(hash((n, "x")) % 10**18) for n in range(start, start + 10_000)]),
                    ],
                    schema=table_of(0, NARROW).schema,
                )

        mart = mart_of("id", "at", "name")
        after = digest_batches(mart.columns, batches())
        store = LocalArtifactStore(Path({str(tmp_path / str(rows))!r}), free_bytes=0)
        reader = pa.RecordBatchReader.from_batches(table_of(0, NARROW).schema, batches())
        seal(mart, OPERATION, receipt_of(after), reader, store, authority=AUTHORITY, chunk_rows=20_000)
        assert sum(b.num_rows for b in open_artifact(store, read_manifest(store, PREFIX), mart)) == {rows}
        print(pa.default_memory_pool().max_memory())
    """
    return int(run_python(code))


def run_python(code: str, **more: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **more,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    assert peak_bytes(tmp_path, 300_000) <= 1.2 * peak_bytes(tmp_path, 30_000)


@pytest.mark.parametrize(
    ("boundary", "visible"),
    [
        ("seal.before_chunk", ["authorization.json"]),
        ("seal.before_manifest", ["authorization.json", "part-0001.parquet", "part-0002.parquet"]),
    ],
)
def test_a_kill_at_a_boundary_leaves_no_manifest_and_the_next_try_finishes(
    store: LocalArtifactStore, root: Path, boundary: str, visible: list[str]
) -> None:
    code = f"""
        from tests.publication.test_seal import *
        store = LocalArtifactStore(Path({str(root)!r}), free_bytes=0)
        sealed(store, table_of(2_000, NARROW), NARROW, chunk_rows=1_000)
    """
    died = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "DPONE_FAULT": f"{boundary}:kill"},
        timeout=60,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL
    assert [k.removeprefix(f"{PREFIX}/") for k in store.list(PREFIX)] == visible
    with pytest.raises(DponeError) as missing:
        read_manifest(store, PREFIX)
    assert missing.value.code == "DPONE_ARTIFACT_MISSING"
    sealed(store, table_of(2_000, NARROW), NARROW, chunk_rows=1_000)
    assert reopened(store, NARROW) == table_of(2_000, NARROW)
    assert list((root / ".work").iterdir()) == []


def test_no_room_in_the_middle_of_a_chunk_is_a_code_and_leaves_no_manifest(
    store: LocalArtifactStore, root: Path
) -> None:
    code = f"""
        from tests.publication.test_seal import *
        store = LocalArtifactStore(Path({str(root)!r}), free_bytes=0)
        try:
            sealed(store, table_of(20_000), chunk_rows=20_000)
        except DponeError as error:
            print(error.code)
    """
    out = run_python(code, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)))
    assert out == "DPONE_ARTIFACT_NO_SPACE\n"
    assert [k.removeprefix(f"{PREFIX}/") for k in store.list(PREFIX)] == ["authorization.json"]
    assert list((root / ".work").iterdir()) == []


def test_the_authorization_is_a_whole_document(store: LocalArtifactStore, root: Path) -> None:
    result = sealed(store, table_of(1))
    data = (root / PREFIX / "authorization.json").read_bytes()
    assert SealAuthorizationReceipt.parse(data) == result.authorization
