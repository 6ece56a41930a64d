"""The sealed artifact ``dpone_parquet_v1``: the after image as Parquet chunks and a manifest, create-only.

A chunk becomes visible whole or not at all, the manifest after the last chunk, and nothing is ever replaced.
Journal, manifest and chunk digests separately authorize state, inventory and bytes: the reader hands out no
row of a chunk before that chunk's bytes have been proven against the manifest.

The same rows in the same order give the same bytes with the same pyarrow: row groups and chunks end where the
rows say, never where the reader's batches happen to end.
"""

import hashlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from dpone_dagster.contracts.arrow_digest import digest_batches
from dpone_dagster.contracts.canonical import canonical_json, sha256_bytes, sha256_of
from dpone_dagster.contracts.documents import SealAuthorizationReceipt, SealedArtifactManifest
from dpone_dagster.contracts.mart import MartSpec, arrow_schema
from dpone_dagster.contracts.model import Document
from dpone_dagster.contracts.names import short_id
from dpone_dagster.contracts.set_digest import EMPTY, SetDigest
from dpone_dagster.errors import DponeError
from dpone_dagster.faults import reach
from dpone_dagster.journal.port import OperationRecord
from dpone_dagster.ports import ArtifactStorePort, BuildReceipt, MutationOutcome, SealedChunk

FORMAT: Final = "dpone_parquet_v1"
RESERVED_PREFIX: Final = "__dpone_seal_"  # columns of the transport; never business columns

# A chunk is verified in memory before its rows are used, so its size is bounded in bytes as well as in rows.
_CHUNK_BYTES: Final = 64 * 1024 * 1024
_GROUP_ROWS: Final = 50_000
_GROUP_BYTES: Final = 32 * 1024 * 1024
_UNBOUNDED_STRING_BYTES: Final = 2_000  # what nvarchar(max) counts as when a row group is sized
_DOCUMENT_BYTES: Final = 64 * 1024 * 1024
_AUTHORIZATION: Final = "authorization.json"
_MANIFEST: Final = "manifest.json"
_WRITER: Final[dict[str, Any]] = {
    "version": "2.6",
    "data_page_version": "1.0",
    "compression": "zstd",
    "compression_level": 3,
    "use_dictionary": False,  # twice the time, and zstd finds what repeats as well
    "write_statistics": True,
    "store_schema": False,
}
# What the manifest repeats from the authorization that it rests on.
_CITED: Final = (
    "attempt_binding_sha256",
    "clickhouse_input_mapping_sha256",
    "codec_mapping_certification_sha256",
    "effective_key_mapping_sha256",
    "effective_key_template_sha256",
    "model_build_receipt_sha256",
    "model_unique_id",
    "operation_id",
    "operation_plan_sha256",
    "ordered_writable_schema_sha256",
    "parquet_schema_mapping_sha256",
    "route_certification_receipt_sha256",
    "serializer_sha256",
    "workflow_execution_binding_sha256",
)


@dataclass(frozen=True, kw_only=True)
class SealAuthority:
    """What authorizes a seal and is known to the planner and the journal only; digests unless said otherwise.

    Attributes:
        issuer_authority: name of the journal that vouches, e.g. ``journal/embedded``.

    Every optional field says in the document that nothing of that kind has been issued (``not_issued``).
    """

    workflow_execution_binding_sha256: str
    baseline_adoption_receipt_sha256: str
    effective_key_mapping_sha256: str
    effective_key_template_sha256: str
    issuer_authority: str
    issuer_attestation_sha256: str | None = None
    issuer_signature_sha256: str | None = None
    codec_mapping_certification_sha256: str | None = None
    route_certification_receipt_sha256: str | None = None
    ddl_freeze_assurance_receipt_sha256: str | None = None
    utc_semantics_assurance_receipt_sha256: str | None = None
    writer_exclusivity_assurance_receipt_sha256: str | None = None
    encryption_policy_sha256: str | None = None
    retention_policy_sha256: str | None = None

    def fields(self, *names: str) -> dict[str, str]:
        """Return the named fields as a document takes them."""
        return {name: getattr(self, name) or not_issued(name) for name in names}


@dataclass(frozen=True, kw_only=True)
class SealedArtifact:
    """What ``seal`` published: the documents, and the set digest of the rows."""

    authorization: SealAuthorizationReceipt
    manifest: SealedArtifactManifest
    digest: SetDigest


def artifact_prefix(operation_id: str, attempt_binding_sha256: str) -> str:
    """Return the folder of one attempt's artifact; two attempts never share an object."""
    return f"semantic-refresh/operation-{short_id(operation_id)}/attempt-{short_id(attempt_binding_sha256)}"


def not_issued(kind: str) -> str:
    """Return what stands in a digest field when no such certificate, policy or assurance has been issued.

    Args:
        kind: the field's name. The digest is that of a document that says so; nobody can take it for one.
    """
    return sha256_of({"schema": "dpone.not-issued.v1", "kind": kind})


def artifact_schema(mart: MartSpec) -> pa.Schema:
    """Return the Arrow schema of the mart's artifact: contract order, ``ColumnType.arrow``, nullability.

    Raises:
        DponeError: DPONE_ARTIFACT_SCHEMA when a column's name is of the transport's namespace.
    """
    for column in mart.columns:
        if column.name.lower().startswith(RESERVED_PREFIX):
            raise _schema_error(column.name, "its name belongs to the transport")
    return arrow_schema(mart.columns)


def group_rows(mart: MartSpec) -> int:
    """Return the rows of one Parquet row group: fewer for wide rows, so that memory stays bounded."""
    width = sum(
        (c.spec.max_length or _UNBOUNDED_STRING_BYTES) if c.spec.mapping == "string_utf8" else 16 for c in mart.columns
    )
    return max(1_000, min(_GROUP_ROWS, _GROUP_BYTES // width))


def mapping_digests(mart: MartSpec) -> dict[str, str]:
    """Return the digests of the artifact's schemas and serializer, by their field names in the documents."""
    subjects: dict[str, list[dict[str, Any]]] = {
        "ordered_writable_schema": [{"name": c.name, "type": c.type, "nullable": c.nullable} for c in mart.columns],
        "parquet_schema_mapping": [{"name": c.name, "arrow": str(c.spec.arrow)} for c in mart.columns],
        "clickhouse_input_mapping": [
            {"name": c.name, "clickhouse": c.spec.clickhouse_column(c.nullable)} for c in mart.columns
        ],
    }
    serializer = {
        "schema": "dpone.semantic-refresh-serializer.v1",
        "format": FORMAT,
        "library": f"pyarrow {pa.__version__}",
        "chunk_bytes": _CHUNK_BYTES,
        "group_rows": group_rows(mart),
        "writer": _WRITER,
    }
    return {
        "serializer_sha256": sha256_of(serializer),
        **{
            f"{name}_sha256": sha256_of(
                {"schema": f"dpone.semantic-refresh-{name.replace('_', '-')}.v1", "columns": columns}
            )
            for name, columns in subjects.items()
        },
    }


# ------------------------------------------------------------------------------------------------- writing


def seal(
    mart: MartSpec,
    operation: OperationRecord,
    receipt: BuildReceipt,
    reader: pa.RecordBatchReader,
    store: ArtifactStorePort,
    *,
    authority: SealAuthority,
    chunk_rows: int,
    on_rows: Callable[[int], None] = lambda rows: None,
    check: Callable[[], None] = lambda: None,
) -> SealedArtifact:
    """Write the after image as an artifact: the authorization first, then the chunks, the manifest last.

    Args:
        receipt: the build receipt as read back from the engine; names the image and its digest.
        reader: the after image in key order, with the types of ``ColumnType.arrow``.
        chunk_rows: the most rows a chunk may have.
        on_rows: told the rows of every row group as it is written.
        check: called before every object becomes visible; raises when the worker was interrupted or fenced.

    Returns:
        The documents as published. Sealing the same image again in the same attempt is a replay.

    Raises:
        DponeError: DPONE_ARTIFACT_UNAUTHORIZED, DPONE_ARTIFACT_SCHEMA, DPONE_ARTIFACT_DIGEST_MISMATCH,
            DPONE_ARTIFACT_CONFLICT, DPONE_ARTIFACT_NO_SPACE, DPONE_ARTIFACT_CORRUPT; none of them leaves a
            manifest.
    """
    schema = artifact_schema(mart)
    _require_columns(reader.schema, schema)
    prefix = artifact_prefix(operation.operation_id, operation.attempt_binding_sha256)
    with store.workspace() as folder:
        authorization = _authorize(mart, operation, receipt, store, prefix, authority, chunk_rows, folder)
        chunks, digest = _write_chunks(
            mart, schema, reader, store, prefix, folder, chunk_rows=chunk_rows, on_rows=on_rows, check=check
        )
        if digest != receipt.after:
            raise DponeError(
                "DPONE_ARTIFACT_DIGEST_MISMATCH",
                f"The {digest.rows} rows read are not the {receipt.after.rows} rows of the after image.",
                rows=digest.rows,
                digest=digest.sha256,
                expected_rows=receipt.after.rows,
                expected_digest=receipt.after.sha256,
            )
        manifest = _manifest(store, prefix, authorization, authority, chunks)
        reach("seal.before_manifest")
        check()
        _put_document(store, f"{prefix}/{_MANIFEST}", manifest, folder)
    if read_manifest(store, prefix) != manifest:
        raise _corrupt(f"{prefix}/{_MANIFEST}", "it reads back differently")
    return SealedArtifact(authorization=authorization, manifest=manifest, digest=digest)


def _authorize(
    mart: MartSpec,
    operation: OperationRecord,
    receipt: BuildReceipt,
    store: ArtifactStorePort,
    prefix: str,
    authority: SealAuthority,
    chunk_rows: int,
    folder: Path,
) -> SealAuthorizationReceipt:
    """Publish the authorization, or take up the one that an earlier try of this attempt published."""
    authorization = authorize(mart, operation, receipt, authority, provider=store.provider, chunk_rows=chunk_rows)
    key = f"{prefix}/{_AUTHORIZATION}"
    if key not in store.list(prefix):
        _put_document(store, key, authorization, folder)
        return authorization
    with store.open(key) as file:
        found = SealAuthorizationReceipt.parse(file.read(_DOCUMENT_BYTES))
    if _without_moment(found) != _without_moment(authorization):
        raise DponeError("DPONE_ARTIFACT_UNAUTHORIZED", "This attempt holds an authorization to seal something else.")
    return found


def authorize(
    mart: MartSpec,
    operation: OperationRecord,
    receipt: BuildReceipt,
    authority: SealAuthority,
    *,
    provider: str,
    chunk_rows: int,
    now: datetime | None = None,
) -> SealAuthorizationReceipt:
    """Build the receipt that must exist before the first chunk: which image, by which attempt, under what.

    Raises:
        DponeError: DPONE_ARTIFACT_UNAUTHORIZED when operation, mart and build receipt do not belong together.
    """
    # Not the epoch: whoever takes an operation over seals what the receipt of an earlier epoch proves.
    ours = (operation.mart, operation.operation_id, operation.operation_plan_sha256)
    if ours != (mart.name, receipt.operation_id, receipt.operation_plan_sha256):
        raise DponeError("DPONE_ARTIFACT_UNAUTHORIZED", "The build receipt is not of this operation.")
    prefix = artifact_prefix(operation.operation_id, operation.attempt_binding_sha256)
    event_time = next(c for c in mart.columns if c.name == mart.event_time)
    return SealAuthorizationReceipt.seal(
        operation_id=operation.operation_id,
        operation_plan_sha256=operation.operation_plan_sha256,
        workflow_id=operation.workflow,
        workflow_plan_sha256=operation.workflow_plan_sha256,
        workflow_execution_id=operation.workflow_execution_id,
        model_unique_id=mart.model_unique_id,
        attempt_binding_sha256=operation.attempt_binding_sha256,
        fencing_epoch=operation.fencing_epoch,
        journal_state=str(operation.state),
        journal_version=operation.version,
        mssql_outcome=str(MutationOutcome.COMMITTED_WITH_IMAGES),
        model_build_receipt_sha256=receipt.sha256,
        before_image_relation_id=receipt.before_image.dotted,
        before_image_row_count=receipt.before.rows,
        before_image_sha256=receipt.before.sha256,
        after_image_relation_id=receipt.after_image.dotted,
        after_image_row_count=receipt.after.rows,
        after_image_sha256=receipt.after.sha256,
        event_time_source_type=event_time.type,
        artifact_authority_sha256=sha256_of(
            {
                "schema": "dpone.semantic-refresh-artifact-authority.v1",
                "provider": provider,
                "artifact_prefix": prefix,
                "artifact_format": FORMAT,
            }
        ),
        seal_policy_sha256=sha256_of({"schema": "dpone.semantic-refresh-seal-policy.v1", "chunk_rows": chunk_rows}),
        created_at=(now or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ"),
        issuer_authority=authority.issuer_authority,
        **mapping_digests(mart),
        **authority.fields(
            "workflow_execution_binding_sha256",
            "baseline_adoption_receipt_sha256",
            "effective_key_mapping_sha256",
            "effective_key_template_sha256",
            "issuer_attestation_sha256",
            "issuer_signature_sha256",
            "codec_mapping_certification_sha256",
            "route_certification_receipt_sha256",
            "ddl_freeze_assurance_receipt_sha256",
            "utc_semantics_assurance_receipt_sha256",
            "writer_exclusivity_assurance_receipt_sha256",
        ),
    )


def _write_chunks(
    mart: MartSpec,
    schema: pa.Schema,
    reader: pa.RecordBatchReader,
    store: ArtifactStorePort,
    prefix: str,
    folder: Path,
    *,
    chunk_rows: int,
    on_rows: Callable[[int], None],
    check: Callable[[], None],
) -> tuple[list[SealedChunk], SetDigest]:
    chunks: list[SealedChunk] = []
    digest = EMPTY
    size = min(group_rows(mart), chunk_rows)
    with closing(_read_ahead(iter(reader))) as batches:
        rows = _Rows(batches, schema)
        group = rows.take(size)
        while group is not None:
            path = folder / f"part-{len(chunks) + 1:04d}.parquet"
            written, full = 0, False
            with pa.OSFile(str(path), "wb") as sink, pq.ParquetWriter(sink, schema, **_WRITER) as writer:
                while group is not None and not full:
                    digest += digest_batches(mart.columns, group.to_batches())
                    writer.write_table(group, row_group_size=size)
                    written += group.num_rows
                    on_rows(group.num_rows)
                    full = written == chunk_rows or sink.tell() >= _CHUNK_BYTES
                    group = rows.take(size if full else min(size, chunk_rows - written))
            reach("seal.before_chunk")
            check()
            chunks.append(_publish_chunk(store, prefix, path, ordinal=len(chunks) + 1, rows=written))
    return chunks, digest


def _publish_chunk(store: ArtifactStorePort, prefix: str, path: Path, *, ordinal: int, rows: int) -> SealedChunk:
    # Digests come from the bytes on disk and from the bytes in the store, never from the writer's own count.
    with path.open("rb") as file:
        written, byte_count = _stream_sha256(file), file.tell()
    key = f"{prefix}/{path.name}"
    version = store.put_new(key, path)
    with store.open(key) as file:
        if _stream_sha256(file) != written:
            raise _corrupt(key, "it reads back differently")
    return SealedChunk(
        ordinal=ordinal,
        object_key=path.name,
        provider_version=version,
        chunk_sha256=written,
        byte_count=byte_count,
        row_count=rows,
    )


def _stream_sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(1024 * 1024):
        digest.update(block)
    return "sha256:" + digest.hexdigest()


def _read_ahead(batches: Iterator[pa.RecordBatch]) -> Generator[pa.RecordBatch, None, None]:
    """Let the engine send the next batch while the last one is digested and written; one batch ahead, no more."""
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        coming = thread.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = thread.submit(next, batches, None)
            yield batch


class _Rows:
    """A reader's rows, taken in the numbers that the artifact wants and not in those of the reader's batches."""

    def __init__(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> None:
        self._batches = batches
        self._schema = schema
        self._rest: pa.RecordBatch | None = None

    def take(self, count: int) -> pa.Table | None:
        """Return the next ``count`` rows, fewer at the end, None after it."""
        taken: list[pa.RecordBatch] = []
        while count:
            if self._rest is None or not self._rest.num_rows:
                batch = next(self._batches, None)
                if batch is None:
                    break
                self._rest = _checked(batch, self._schema)
            head = self._rest.slice(0, count)
            self._rest = self._rest.slice(head.num_rows)
            count -= head.num_rows
            taken.append(head)
        if not taken:
            return None
        # One Arrow chunk to a column: the writer's pages would otherwise end where the batches did.
        return pa.Table.from_batches(taken, self._schema).combine_chunks()


def _checked(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    _require_columns(batch.schema, schema)
    for field, column in zip(schema, batch.columns, strict=True):
        # The digest refuses every other value that is not of its type; a decimal's digits only this does.
        if pa.types.is_decimal(field.type):
            try:
                column.validate(full=True)
            except pa.ArrowInvalid:
                raise _schema_error(field.name, "a value has more digits than its type") from None
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def _require_columns(found: pa.Schema, wanted: pa.Schema) -> None:
    """Compare names, order and types; whether a reader calls a column nullable is the driver's habit."""
    for field in found:
        if field.name.lower().startswith(RESERVED_PREFIX):
            raise _schema_error(field.name, "its name belongs to the transport")
    for field, expected in zip(found, wanted, strict=False):
        if field.name != expected.name:
            raise _schema_error(expected.name, "another column is in its place")
        if field.type != expected.type:
            raise _schema_error(expected.name, f"it is {field.type} and should be {expected.type}")
    if len(found) != len(wanted):
        raise DponeError("DPONE_ARTIFACT_SCHEMA", f"There are {len(found)} columns; the contract has {len(wanted)}.")


def _manifest(
    store: ArtifactStorePort,
    prefix: str,
    authorization: SealAuthorizationReceipt,
    authority: SealAuthority,
    chunks: list[SealedChunk],
) -> SealedArtifactManifest:
    cited = authorization.as_json()
    return SealedArtifactManifest.seal(
        artifact_format=FORMAT,
        artifact_prefix=prefix,
        provider=store.provider,
        publication_order="MANIFEST_LAST",
        chunks=[asdict(chunk) for chunk in chunks],
        chunk_count=len(chunks),
        total_rows=sum(chunk.row_count for chunk in chunks),
        total_bytes=sum(chunk.byte_count for chunk in chunks),
        seal_authorization_receipt_sha256=authorization.sha256,
        **{name: cited[name] for name in _CITED},
        **authority.fields("encryption_policy_sha256", "retention_policy_sha256"),
    )


def _put_document(store: ArtifactStorePort, key: str, document: Document, folder: Path) -> None:
    path = folder / key.rpartition("/")[2]
    path.write_bytes(canonical_json(document.as_json()))
    store.put_new(key, path)


def _without_moment(authorization: SealAuthorizationReceipt) -> dict[str, Any]:
    moment = {"created_at", "journal_version", SealAuthorizationReceipt.DIGEST}
    return {k: v for k, v in authorization.as_json().items() if k not in moment}


# ------------------------------------------------------------------------------------------------- reading


def read_manifest(store: ArtifactStorePort, prefix: str) -> SealedArtifactManifest:
    """Read an attempt's manifest and prove that it is what was sealed.

    Raises:
        DponeError: DPONE_ARTIFACT_MISSING when the artifact was never finished; DPONE_ARTIFACT_CORRUPT.
    """
    key = f"{prefix}/{_MANIFEST}"
    with store.open(key) as file:
        data = file.read(_DOCUMENT_BYTES)
    manifest = _parsed(key, data)
    if canonical_json(manifest.as_json()) != data:
        raise _corrupt(key, "it is not canonical JSON")
    if manifest.artifact_prefix != prefix:
        raise _corrupt(key, "it describes another artifact")
    return manifest


def open_artifact(
    store: ArtifactStorePort, manifest: SealedArtifactManifest, mart: MartSpec
) -> Iterator[pa.RecordBatch]:
    """Stream an artifact's rows in the order in which they were sealed.

    Each chunk is read into memory (its size is bounded) and its byte count, digest, schema and row count are
    proven over those very bytes before any of its rows is handed out.

    Raises:
        DponeError: DPONE_ARTIFACT_CORRUPT, DPONE_ARTIFACT_MISSING; DPONE_ARTIFACT_SCHEMA when the mart's
            contract is not the one that the artifact was sealed under.
    """
    _parsed(f"{manifest.artifact_prefix}/{_MANIFEST}", canonical_json(manifest.as_json()))
    schema = artifact_schema(mart)
    if manifest.ordered_writable_schema_sha256 != mapping_digests(mart)["ordered_writable_schema_sha256"]:
        raise DponeError("DPONE_ARTIFACT_SCHEMA", "The artifact was sealed under another contract.")

    def batches() -> Iterator[pa.RecordBatch]:
        for chunk in manifest.chunks:
            key = f"{manifest.artifact_prefix}/{chunk.object_key}"
            data = _proven_bytes(store, key, chunk.byte_count, chunk.chunk_sha256)
            try:
                file = pq.ParquetFile(pa.BufferReader(data))
            except (pa.ArrowException, OSError):
                raise _corrupt(key, "it is not Parquet") from None
            if not file.schema_arrow.equals(schema, check_metadata=True):
                raise _corrupt(key, "its columns are not those of the contract")
            if file.metadata.num_rows != chunk.row_count:
                raise _corrupt(key, "its row count is not the manifest's")
            for group in range(file.num_row_groups):
                yield from file.read_row_group(group).to_batches()

    return batches()


def _proven_bytes(store: ArtifactStorePort, key: str, byte_count: int, digest: str) -> bytes:
    with store.open(key) as file:
        data = file.read(byte_count + 1)
    if len(data) != byte_count:
        raise _corrupt(key, "its byte count is not the manifest's")
    if sha256_bytes(data) != digest:
        raise _corrupt(key, "its digest is not the manifest's")
    return data


def _parsed(key: str, data: bytes) -> SealedArtifactManifest:
    """Validate fields, own digest and inventory (ordinals, counts and totals)."""
    try:
        return SealedArtifactManifest.parse(data)
    except DponeError as error:
        raise _corrupt(key, f"it is not a sound manifest ({error.code})") from None


def _corrupt(key: str, fault: str) -> DponeError:
    return DponeError("DPONE_ARTIFACT_CORRUPT", f"Object {key}: {fault}.", key=key)


def _schema_error(column: str, fault: str) -> DponeError:
    return DponeError("DPONE_ARTIFACT_SCHEMA", f"Column {column}: {fault}.", field=column)
