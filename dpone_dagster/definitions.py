"""Composition root for Dagster: ``defs``.

Loading it reads the parsed dbt project and touches no engine; dbt itself is imported only where the project has
to be parsed anew. ``DPONE_HOME`` says where everything is.
"""

from typing import Any

import dagster as dg

from assets.marts import flights_reports, mart_assets
from assets.projection import projection_sensor
from dpone_dagster.planning.plans import Workflow
from io_managers.clickhouse_mart import ClickHouseMartIOManager
from io_managers.sealed_parquet import SealedParquetIOManager
from resources.dagster_runtime import DponeRuntime, declared_manifest
from resources.runtime import declared_workflows


@dg.io_manager(required_resource_keys={"dpone"})
def clickhouse_mart(init: dg.InitResourceContext) -> ClickHouseMartIOManager:
    """Gives a downstream asset the published rows of its partitions from ClickHouse."""
    return ClickHouseMartIOManager(init.resources.dpone.open)


@dg.io_manager(required_resource_keys={"dpone"})
def sealed_parquet(init: dg.InitResourceContext) -> SealedParquetIOManager:
    """Gives a downstream asset the sealed artifacts of its partitions."""
    return SealedParquetIOManager(init.resources.dpone.open)


def build(workflows: dict[str, Workflow], manifest: dict[str, Any]) -> dg.Definitions:
    """Put assets, checks, jobs, resources and the sensor together."""
    marts = mart_assets(workflows, manifest)
    reports = flights_reports(workflows["flights_daily"]) if "flights_daily" in workflows else []
    return dg.Definitions(
        assets=[*marts, *reports],
        jobs=[
            dg.define_asset_job(
                f"publish_{name}",
                selection=dg.AssetSelection.assets(*[m.name for m in workflow.marts]),
                description=f"Publish one UTC day of {', '.join(m.name for m in workflow.marts)}.",
            )
            for name, workflow in workflows.items()
        ],
        sensors=[projection_sensor(workflows, manifest)],
        resources={
            "dpone": DponeRuntime(),
            "clickhouse_mart": clickhouse_mart,
            "sealed_parquet": sealed_parquet,
        },
        # A run is one step; a process of its own would add nothing but a start.
        executor=dg.in_process_executor,
    )


defs = build(declared_workflows(), declared_manifest())
