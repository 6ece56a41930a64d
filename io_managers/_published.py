"""How both IO managers give a downstream asset the published rows of a mart's partitions, and nothing else."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_origin

import dagster as dg
import pandas as pd
import pyarrow as pa

from dpone_dagster.contracts.mart import MartSpec, Scope
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.port import ScopeHead
from dpone_dagster.publication.seal import artifact_schema
from io_managers._runtime import MartRuntime


class PublishedMartIOManager(dg.IOManager):
    """Loads what the journal says is published; writes nothing.

    What the downstream asset receives follows its type annotation:

    * none, or ``pa.Table``: a table with the exact types of the contract;
    * ``pa.RecordBatchReader``: the same rows as a stream;
    * ``pd.DataFrame``: Arrow-backed columns, so that NULLs, decimals and 64-bit integers stay exact.

    Several partitions arrive as Dagster's file system IO manager gives them, as a dict from partition key to one of
    the above (``dict[str, pd.DataFrame]``, or no annotation); an annotation that is not a dict asks for
    one object with the partitions' rows one after the other, in partition order. Partitions that were never
    published are an error unless the input's metadata has ``allow_missing_partitions``.

    Args:
        runtime: called when the first input is loaded, so that building definitions touches no engine.
    """

    def __init__(self, runtime: Callable[[], MartRuntime]) -> None:
        self._runtime = runtime

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Accept an output without a value; a mart is written by its publication.

        Raises:
            DponeError: DPONE_IO_MANAGER_READS_ONLY.
        """
        if obj is not None:
            raise DponeError(
                "DPONE_IO_MANAGER_READS_ONLY", f"An output of type {type(obj).__name__} has nowhere to go."
            )

    def load_input(self, context: dg.InputContext) -> Any:
        """Load the published rows of the input's partitions.

        Raises:
            DponeError: DPONE_MART_UNKNOWN, DPONE_PARTITION_NOT_PUBLISHED, DPONE_SCOPE_NOT_A_DAY, and whatever
                the reading of one partition refuses.
        """
        runtime = self._runtime()
        mart = runtime.mart(context.asset_key.path[-1])
        if not context.has_asset_partitions:
            raise DponeError("DPONE_SCOPE_NOT_A_DAY", f"An input from {mart.name} needs its partition keys.")
        keys = list(context.asset_partition_keys)
        heads = {}
        allow_missing = bool((context.definition_metadata or {}).get("allow_missing_partitions"))
        for key in keys:
            head = runtime.journal.scope_head(mart.name, Scope.day(key))
            if head is not None:
                heads[key] = head
            elif not allow_missing:
                raise DponeError("DPONE_PARTITION_NOT_PUBLISHED", f"{mart.name} {key} is not published.")

        def rows_of(chosen: list[ScopeHead]) -> pa.RecordBatchReader:
            batches = (batch for head in chosen for batch in self.read(runtime, mart, head))
            return pa.RecordBatchReader.from_batches(artifact_schema(mart), batches)

        wanted = context.dagster_type.typing_type
        if get_origin(wanted) is dict or wanted is dict or (wanted is Any and len(keys) != 1):
            element = get_args(wanted)[1] if get_args(wanted) else Any
            return {key: _as(element, rows_of([head])) for key, head in heads.items()}
        return _as(wanted, rows_of(list(heads.values())))

    @abstractmethod
    def read(self, runtime: MartRuntime, mart: MartSpec, head: ScopeHead) -> Iterator[pa.RecordBatch]:
        """Read the rows of one published day and prove that they are the published ones."""


def _as(wanted: Any, rows: pa.RecordBatchReader) -> Any:
    if wanted is pa.RecordBatchReader:
        return rows
    if wanted is pd.DataFrame:
        return rows.read_all().to_pandas(types_mapper=pd.ArrowDtype)
    if wanted in (Any, pa.Table):
        return rows.read_all()
    raise DponeError(
        "DPONE_CONTRACT_INVALID",
        "A mart's rows are given as pa.Table, pa.RecordBatchReader or pd.DataFrame; the input asks for another type.",
        field="annotation",
    )
