"""Downstream assets read a mart's partition from its sealed artifact, without asking ClickHouse."""

from collections.abc import Iterator

import pyarrow as pa

from dpone_dagster.contracts.documents import SealedArtifactManifest
from dpone_dagster.contracts.mart import MartSpec
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.port import ScopeHead
from dpone_dagster.publication.seal import open_artifact, read_manifest
from io_managers._published import PublishedMartIOManager
from io_managers._runtime import MartRuntime


class SealedParquetIOManager(PublishedMartIOManager):
    """Gives the sealed artifact of the published operation: scope head, manifest, verified chunks."""

    def read(self, runtime: MartRuntime, mart: MartSpec, head: ScopeHead) -> Iterator[pa.RecordBatch]:
        """Read one day's artifact.

        Raises:
            DponeError: DPONE_ARTIFACT_CORRUPT, DPONE_ARTIFACT_MISSING, DPONE_ARTIFACT_SCHEMA;
                DPONE_JOURNAL_CORRUPT when the head names a manifest that the journal does not have.
        """
        recorded = runtime.journal.document(head.artifact_manifest_sha256)
        if recorded is None:
            raise DponeError("DPONE_JOURNAL_CORRUPT", "The scope head names a manifest that is not recorded.")
        authorized = SealedArtifactManifest.parse(recorded)
        stored = read_manifest(runtime.artifacts, authorized.artifact_prefix)
        if stored != authorized:
            raise DponeError("DPONE_ARTIFACT_CORRUPT", "The store's manifest is not the one of the journal.")
        return open_artifact(runtime.artifacts, stored, mart)
