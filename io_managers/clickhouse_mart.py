"""Downstream assets read a mart's partition from ClickHouse, exactly as it was published."""

from collections.abc import Iterator

import pyarrow as pa

from dpone_dagster.contracts.arrow_digest import digest_batches
from dpone_dagster.contracts.mart import MartSpec
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.port import ScopeHead
from io_managers._published import PublishedMartIOManager
from io_managers._runtime import MartRuntime

_GENERATIONS = 5  # how many other days may be published between finding the table and reading it


class ClickHouseMartIOManager(PublishedMartIOManager):
    """Gives the rows of the mart's current generation, proven against the day's scope head.

    Every publication of any day makes a new generation, so the table is the journal's current one and not the
    one that the day itself was published into; that it still holds the day's very rows is what the digest says.
    """

    def read(self, runtime: MartRuntime, mart: MartSpec, head: ScopeHead) -> Iterator[pa.RecordBatch]:
        """Read one day from the current generation.

        Raises:
            DponeError: DPONE_PUBLISHED_ROWS_DIFFER when the rows are not those of the scope head.
        """
        table = self._current(runtime, mart, head)
        found = digest_batches(mart.columns, table.to_batches())
        if (found.rows, found.sha256) != (head.rows, head.after_image_sha256):
            raise DponeError(
                "DPONE_PUBLISHED_ROWS_DIFFER",
                f"{mart.name} {head.scope.key} has {found.rows} rows that are not the {head.rows} published ones.",
                mart=mart.name,
                day=head.scope.key,
                digest=found.sha256,
                published_digest=head.after_image_sha256,
            )
        return iter(table.to_batches())

    @staticmethod
    def _current(runtime: MartRuntime, mart: MartSpec, head: ScopeHead) -> pa.Table:
        gone: DponeError | None = None
        for _ in range(_GENERATIONS):
            generation = runtime.journal.generation(mart.target.dotted)
            if generation is None:
                raise DponeError("DPONE_JOURNAL_CORRUPT", f"{mart.name} has a scope head and no generation.")
            try:
                return runtime.analytics("dpone-read-").read(mart, generation.uuid, head.scope)
            except DponeError as error:
                if error.code != "DPONE_GENERATION_GONE":
                    raise
                gone = error  # another day was published and cleaned meanwhile: there is a newer generation
        assert gone is not None
        raise gone
