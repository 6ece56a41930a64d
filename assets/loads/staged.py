"""Governed loads of the rows that Python assets return: what the staged IO manager runs, and their checks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from assets.loads import evidence
from assets.loads.step import kept, open_loads
from checks.loads import load_check_results, load_check_specs
from dpone_dagster.declarations.manifest import TableRef
from dpone_dagster.errors import DponeError, unexpected
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import LoadRecord, RunIdentity
from dpone_dagster.planning.load_plan import LoadPlan
from io_managers.clickhouse_staged import METADATA_KEY, ProcessRef
from resources.clickhouse.client import ClickHouseClient
from resources.dagster_runtime import DponeRuntime
from resources.load_runtime import Loads, plan_manifest

_LOOKED_AT = 20  # loads of a process between a run's load and its checks


class StagedLoads:
    """Runs the loads of Python assets; implements ``io_managers.clickhouse_staged.GovernedLoads``.

    Args:
        loads: called when rows come, so that building definitions touches no engine.
        root: the project's folder, which manifests are named from.
    """

    def __init__(self, loads: Callable[[], Loads], *, root: Path) -> None:
        self._loads = loads
        self._root = root

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
        """Run the load; return its evidence.

        Raises:
            DponeError: DPONE_IO_MANAGER_MANIFEST when the process has another source than an asset, or the asset
                has partitions that the strategy would mix up.
            Failure: the load stopped; the step is not retried by itself.
        """
        loading = plan_ref(process, root=self._root)
        if partition_key is not None:
            _admit_partitions(loading)
        loads: Loads | None = None
        try:
            loads = self._loads()
            report = loads.run(loading, scope=None, identity=run, rows=rows)
            return evidence.loaded(loading, kept(loads, report.load_id))
        except Exception as error:  # noqa: BLE001 - its text may carry row values, so only its kind and place are told
            refusal = error if isinstance(error, DponeError) else unexpected(error)
            journal = loads.runtime.journal.loads if loads else None
            judged(load_check_results(loading.process, evidence.judged_failure(refusal, loading), asset_key=asset_key))
            raise evidence.failure(refusal, loading=loading, scope=None, journal=journal) from None

    def target(self, process: ProcessRef, *, prefix: str) -> tuple[ClickHouseClient, TableRef]:
        """Return the target's table and a client for it."""
        return self._loads().runtime.clickhouse, plan_ref(process, root=self._root).process.sink.table


def plan_ref(process: ProcessRef, *, root: Path) -> LoadPlan:
    """Plan the process that an asset's metadata names.

    Raises:
        DponeError: DPONE_IO_MANAGER_MANIFEST; what the manifest is refused for.
    """
    loading = plan_manifest(root / process.path, selector=process.process)
    if loading.process.source.type != "asset":
        raise DponeError(
            "DPONE_IO_MANAGER_MANIFEST",
            f"{loading.manifest}: {loading.process.name} reads {loading.process.source.type}, and no asset.",
            next_step="Give the process source: {type: asset}.",
            field=METADATA_KEY,
        )
    return loading


def _admit_partitions(loading: LoadPlan) -> None:
    """Refuse partitions where each would replace the others, or come twice when it is materialized again."""
    strategy = loading.process.sink.strategy
    if strategy not in ("merge", "partition_replace"):
        raise DponeError(
            "DPONE_IO_MANAGER_MANIFEST",
            f"{loading.process.name} would take the rows of one partition for all there are under {strategy}.",
            next_step="Use the strategy merge or partition_replace, or take the partitions from the asset.",
            field=METADATA_KEY,
        )


@dataclass(frozen=True, kw_only=True)
class StagedAsset:
    """A Python asset whose rows are loaded.

    Attributes:
        loading: its load.
        asset_key: the asset.
        checks: what its load is judged by; none without gates and acceptance.
    """

    loading: LoadPlan
    asset_key: dg.AssetKey
    checks: dg.AssetChecksDefinition | None


def staged_assets(assets: Iterable[Any], *, root: Path) -> list[StagedAsset]:
    """Find the Python assets whose metadata names a manifest, and build their checks, which read the journal.

    Raises:
        DponeError: as ``plan_ref``.
    """
    found: list[StagedAsset] = []
    for asset in assets:
        for spec in asset.specs if isinstance(asset, dg.AssetsDefinition) else ():
            if METADATA_KEY in spec.metadata:
                loading = plan_ref(ProcessRef.parse(spec.metadata[METADATA_KEY]), root=root)
                if spec.partitions_def is not None:
                    _admit_partitions(loading)
                specs = load_check_specs(loading.process, asset_key=spec.key, partitions_def=spec.partitions_def)
                checks = _checks(loading, spec.key, specs) if specs else None
                found.append(StagedAsset(loading=loading, asset_key=spec.key, checks=checks))
    return found


def _checks(loading: LoadPlan, asset_key: dg.AssetKey, specs: list[dg.AssetCheckSpec]) -> dg.AssetChecksDefinition:
    @dg.multi_asset_check(name=f"{loading.process.name}_load_checks", specs=specs)
    def judged(context: dg.AssetCheckExecutionContext, dpone: DponeRuntime) -> Any:
        load = _last(open_loads(dpone), loading, run_id=context.op_execution_context.run_id)
        yield from load_check_results(loading.process, evidence.judged(load.facts["report"]), asset_key=asset_key)

    return judged


def _last(loads: Loads, loading: LoadPlan, *, run_id: str) -> LoadRecord:
    """Return the load of this run, or the last one that is complete."""
    history = loads.runtime.journal.loads.loads(loading.process.name, limit=_LOOKED_AT)
    complete = [load for load in history if load.state is State.COMPLETE]
    if not complete:
        raise DponeError("DPONE_SOURCE_ABSENT", f"{loading.process.name} was never loaded: materialize its asset.")
    return next((load for load in complete if load.run_id == run_id), complete[0])
