"""The marts as assets: one line a workflow, and two assets downstream that read what was published."""

from collections.abc import Mapping
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc

from assets.factory import asset_key, daily_mart_assets, days, source_assets
from assets.sources.flights import LAST_DAY
from dpone_dagster.planning.plans import Workflow

# What dbt does not say of a workflow: who looks after it, where it is shown, where its data end for good.
DECLARED: dict[str, dict[str, Any]] = {
    "flights_daily": {"group": "flights", "owners": ("team:analytics",), "last_day": LAST_DAY},
}


def mart_assets(
    workflows: Mapping[str, Workflow], manifest: Mapping[str, Any]
) -> list[dg.AssetsDefinition | dg.AssetSpec]:
    """Build the assets of every workflow that the dbt project declares, and the sources that they read."""
    marts: list[dg.AssetsDefinition] = []
    sources: dict[dg.AssetKey, dg.AssetSpec] = {}
    for name, workflow in workflows.items():
        declared = DECLARED.get(name, {})
        marts.append(daily_mart_assets(workflow, manifest, **declared))
        for spec in source_assets(workflow, manifest, group=declared.get("group", "marts")):
            sources.setdefault(spec.key, spec)
    return [*sources.values(), *marts]


def flights_reports(workflow: Workflow) -> list[dg.AssetsDefinition]:
    """Build the two examples of reading a mart: one of a day, one of a week."""
    daily = days(workflow, last_day=LAST_DAY)
    flights = dg.AssetIn(key=asset_key("flights"), input_manager_key="clickhouse_mart")

    @dg.asset(
        ins={"flights": flights},
        partitions_def=daily,
        group_name="flights",
        kinds={"clickhouse", "arrow"},
        description="Flights, cancellations and the mean arrival delay of each carrier, from one published day.",
    )
    def daily_carrier_delays(flights: pa.Table) -> dg.Output[pa.Table]:
        report = flights.group_by("carrier_id").aggregate(
            [("flight", "count"), ("cancelled", "sum"), ("arr_delay", "mean")]
        )
        report = report.rename_columns(
            {"flight_count": "flights", "cancelled_sum": "cancelled", "arr_delay_mean": "mean_arr_delay"}
        ).sort_by("carrier_id")
        return dg.Output(
            report,
            metadata={
                "dagster/partition_row_count": report.num_rows,
                "flights": flights.num_rows,
                "cancelled": pc.sum(report["cancelled"]).as_py() or 0,
                "carriers": dg.MetadataValue.table(records=[dg.TableRecord(_plain(row)) for row in report.to_pylist()]),
            },
        )

    @dg.asset(
        ins={"flights": flights},
        partitions_def=dg.WeeklyPartitionsDefinition(
            start_date=daily.start, end_date=daily.end, timezone="UTC", day_offset=1
        ),
        group_name="flights",
        kinds={"clickhouse", "arrow"},
        description="Departures of each day of a week, Monday to Sunday, from seven published days.",
    )
    def weekly_departures(flights: dict[str, pa.Table]) -> dg.Output[dict[str, int]]:
        departures = {day: rows.num_rows - (pc.sum(rows["cancelled"]).as_py() or 0) for day, rows in flights.items()}
        return dg.Output(departures, metadata={"departures": sum(departures.values()), **departures})

    return [daily_carrier_delays, weekly_departures]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()}
