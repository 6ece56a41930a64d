"""Composition root for Dagster: ``defs``.

Loading it reads the parsed dbt project and the load manifests and touches no engine; dbt itself is imported only where
the project has to be parsed anew. ``DPONE_HOME`` says where everything is.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg

from assets.loads import load_assets
from assets.loads.build import load_job
from assets.loads.component import component_definitions
from assets.loads.flights import carrier_punctuality_asset
from assets.loads.staged import StagedLoads, staged_assets
from assets.loads.step import open_loads
from assets.marts import flights_reports, mart_assets
from assets.projection import projection_sensor
from dpone_dagster.planning.plans import Workflow
from io_managers.clickhouse_mart import ClickHouseMartIOManager
from io_managers.clickhouse_staged import ClickHouseStagedIOManager
from io_managers.sealed_parquet import SealedParquetIOManager
from resources.dagster_runtime import DponeRuntime, declared_manifest
from resources.runtime import declared_workflows

PROJECT = Path(__file__).parents[1]
MANIFESTS = PROJECT / "assets" / "loads" / "manifests"


@dg.io_manager(required_resource_keys={"dpone"})
def clickhouse_mart(init: dg.InitResourceContext) -> ClickHouseMartIOManager:
    """Gives a downstream asset the published rows of its partitions from ClickHouse."""
    return ClickHouseMartIOManager(init.resources.dpone.open)


@dg.io_manager(required_resource_keys={"dpone"})
def sealed_parquet(init: dg.InitResourceContext) -> SealedParquetIOManager:
    """Gives a downstream asset the sealed artifacts of its partitions."""
    return SealedParquetIOManager(init.resources.dpone.open)


@dg.io_manager(required_resource_keys={"dpone"})
def clickhouse_staged(init: dg.InitResourceContext) -> ClickHouseStagedIOManager:
    """Puts an asset's rows through the load that its metadata names."""
    return ClickHouseStagedIOManager(lambda: StagedLoads(lambda: open_loads(init.resources.dpone), root=PROJECT))


def build(workflows: dict[str, Workflow], manifest: dict[str, Any]) -> dg.Definitions:
    """Put assets, checks, jobs, resources and the sensor together."""
    marts = mart_assets(workflows, manifest)
    python: list[dg.AssetsDefinition] = []
    if flights := workflows.get("flights_daily"):
        python = [*flights_reports(flights), carrier_punctuality_asset(flights)]
    loads, components = load_assets(MANIFESTS), component_definitions(PROJECT)
    staged = staged_assets(python, root=PROJECT)
    return dg.Definitions(
        assets=list(_once([*marts, *python, *loads.assets, *(components.assets or ()), *loads.outputs])),
        asset_checks=[asset.checks for asset in staged if asset.checks],
        jobs=[
            *[
                dg.define_asset_job(
                    f"publish_{name}",
                    selection=dg.AssetSelection.assets(*[m.name for m in workflow.marts]),
                    description=f"Publish one UTC day of {', '.join(m.name for m in workflow.marts)}.",
                )
                for name, workflow in workflows.items()
            ],
            *loads.jobs,
            *(components.jobs or ()),
            *[load_job(asset.loading, asset.asset_key) for asset in staged],
        ],
        sensors=[projection_sensor(workflows, manifest)],
        resources={
            "dpone": DponeRuntime(),
            "clickhouse_mart": clickhouse_mart,
            "clickhouse_staged": clickhouse_staged,
            "sealed_parquet": sealed_parquet,
        },
        # One step after the other; a process of its own for each would add nothing but starts.
        executor=dg.in_process_executor,
    )


def _once(assets: Iterable[Any]) -> Iterator[Any]:
    """Leave out external assets that somebody else defines too: hooks may write what a mart or another load reads."""
    assets = list(assets)
    known = {key for asset in assets if isinstance(asset, dg.AssetsDefinition) for key in asset.keys}
    for asset in assets:
        if isinstance(asset, dg.AssetSpec):
            if asset.key in known:
                continue
            known.add(asset.key)
        yield asset


defs = build(declared_workflows(), declared_manifest())
