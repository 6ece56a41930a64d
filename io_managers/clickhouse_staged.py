"""The rows that a Python asset returns, put through a governed load into ClickHouse, and read back."""

import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol

import dagster as dg
import pyarrow as pa
from dagster._core.events import DagsterEvent

from dpone_dagster.declarations.manifest import TableRef
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.port import RunIdentity
from io_managers._published import _as
from resources.clickhouse.client import ClickHouseClient
from resources.clickhouse.source import read_clickhouse_table
from resources.dagster_runtime import identity_of

METADATA_KEY = "dpone/manifest"
DEFAULT_ROW_LIMIT = 5_000_000


@dataclass(frozen=True, kw_only=True)
class ProcessRef:
    """Which load: a manifest's path inside the project, and the process where a flow holds several."""

    path: str
    process: str | None = None

    @classmethod
    def parse(cls, text: object) -> "ProcessRef":
        """Read ``path`` or ``path#process``.

        Raises:
            DponeError: DPONE_IO_MANAGER_MANIFEST.
        """
        path, mark, process = text.partition("#") if isinstance(text, str) else ("", "", "")
        inside = path and not PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts
        if not inside or (mark and not process):
            raise DponeError(
                "DPONE_IO_MANAGER_MANIFEST",
                f"The asset's metadata {METADATA_KEY!r} names no manifest inside the project.",
                field=METADATA_KEY,
            )
        return cls(path=path, process=process or None)


class GovernedLoads(Protocol):
    """Runs a governed load for rows that are there already, and says where they went."""

    def run_load(
        self,
        process: ProcessRef,
        rows: object,
        *,
        partition_key: str | None,
        run: RunIdentity,
        asset_key: dg.AssetKey,
        judged: Callable[[Iterable[dg.AssetCheckResult]], None],
    ) -> Mapping[str, Any]:
        """Run the load of a process with ``source.type: asset``; return its evidence as Dagster metadata.

        Args:
            asset_key: the asset whose rows these are.
            judged: given what the asset's checks came to when the load stops, before that is raised.

        Raises:
            DponeError: DPONE_IO_MANAGER_MANIFEST when the process has another source; whatever stops the load.
        """

    def target(self, process: ProcessRef, *, prefix: str) -> tuple[ClickHouseClient, TableRef]:
        """Return the target's table and a client for it; its queries have ids that start with ``prefix``."""


class ClickHouseStagedIOManager(dg.IOManager):
    """Writes an asset's rows through the load that its metadata names, gates and all; reads the target back.

    The asset says ``metadata={"dpone/manifest": "loads/orders.yml"}``, or ``"loads/flow.yml#orders"`` for one process
    of a flow. The value of its output is what ``AssetLoadSource`` takes; a stream best is a ``pa.RecordBatchReader``,
    since Dagster takes a bare generator for its own events. A gate that blocks fails the step: the target then is as it
    was.

    A downstream asset receives the whole target without its ``__dpone__`` columns, as ``pa.Table``, or as its
    annotation says ``pa.RecordBatchReader`` or ``pd.DataFrame``; partitions do not narrow it.

    Args:
        loads: called when the first output or input comes, so that building definitions touches no engine.
        row_limit: how many rows an input may hold; they are all in memory.
    """

    def __init__(self, loads: Callable[[], GovernedLoads], *, row_limit: int = DEFAULT_ROW_LIMIT) -> None:
        self._loads = loads
        self._row_limit = row_limit

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Run the load and attach its evidence to the materialization.

        Raises:
            DponeError: DPONE_IO_MANAGER_NEEDS_ROWS for None, which would publish nothing and look like success;
                DPONE_IO_MANAGER_MANIFEST; whatever the load refuses.
        """
        process = ProcessRef.parse((context.definition_metadata or {}).get(METADATA_KEY))
        if obj is None:
            raise DponeError(
                "DPONE_IO_MANAGER_NEEDS_ROWS",
                "The asset returned None.",
                next_step="Return the rows; for a day without any, return a table without rows.",
            )
        step = context.step_context
        partition = context.partition_key if context.has_partition_key else None
        evidence = self._loads().run_load(
            process,
            obj,
            partition_key=partition,
            asset_key=context.asset_key,
            judged=lambda results: _tell(step, results, partition),
            run=identity_of(
                step.dagster_run,
                step.instance,
                retry_number=step.previous_attempt_count,
                task_id=step.op.name,
                worker_id=str(uuid.uuid4()),
            ),
        )
        context.add_output_metadata(dict(evidence))

    def load_input(self, context: dg.InputContext) -> Any:
        """Read the whole target.

        Raises:
            DponeError: DPONE_IO_MANAGER_MANIFEST, DPONE_SOURCE_ABSENT, DPONE_IO_MANAGER_TOO_MANY_ROWS,
                DPONE_TYPE_UNSUPPORTED.
        """
        upstream = context.upstream_output
        metadata = upstream.definition_metadata if upstream is not None else None
        process = ProcessRef.parse((metadata or {}).get(METADATA_KEY))
        prefix = "dpone-read-"
        client, table = self._loads().target(process, prefix=prefix)
        rows = read_clickhouse_table(client, prefix, table, row_limit=self._row_limit)
        return _as(context.dagster_type.typing_type, pa.RecordBatchReader.from_batches(rows.schema, rows.to_batches()))


def _tell(step: Any, results: Iterable[dg.AssetCheckResult], partition: str | None) -> None:
    """Tell what checks came to although the step fails: Dagster runs no check after a step that failed."""
    for result in results:
        assert result.asset_key is not None
        assert result.check_name is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dg.PreviewWarning)
            evaluation = dg.AssetCheckEvaluation(
                asset_key=result.asset_key,
                check_name=result.check_name,
                passed=result.passed,
                metadata=result.metadata,
                severity=result.severity,
                description=result.description,
                blocking=result.severity is dg.AssetCheckSeverity.ERROR,
                partition=partition,
            )
        DagsterEvent.asset_check_evaluation(step, evaluation)
