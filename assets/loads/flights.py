"""A Python asset whose rows go through a governed load: what a published day of flights says of each carrier."""

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc

from assets.factory import asset_key, days
from assets.sources.flights import LAST_DAY
from dpone_dagster.planning.plans import Workflow
from io_managers.clickhouse_staged import METADATA_KEY

MANIFEST = "assets/loads/manifests/carrier_punctuality.yaml"


def carrier_punctuality_asset(workflow: Workflow) -> dg.AssetsDefinition:
    """Build the example; its partitions are the mart's days."""

    @dg.asset(
        ins={"flights": dg.AssetIn(key=asset_key("flights"), input_manager_key="clickhouse_mart")},
        io_manager_key="clickhouse_staged",
        metadata={METADATA_KEY: MANIFEST},
        partitions_def=days(workflow, last_day=LAST_DAY),
        group_name="flights",
        owners=["team:analytics"],
        kinds={"python", "clickhouse"},
        pool="dpone/carrier_punctuality",
        description="Flights, cancellations and minutes of delay of each carrier, from one published day of flights.",
    )
    def carrier_punctuality(flights: pa.Table) -> pa.Table:
        return punctuality(flights)

    return carrier_punctuality


def punctuality(flights: pa.Table) -> pa.Table:
    """Aggregate published flights by UTC day and carrier; whole minutes, so that nothing is rounded."""
    late = pc.max_element_wise(flights["arr_delay"].cast(pa.int64()), pa.scalar(0, pa.int64()))
    late = pc.if_else(pc.is_null(flights["arr_delay"]), pa.scalar(None, pa.int64()), late)
    day = pc.cast(pc.floor_temporal(flights["time_hour"], unit="day"), pa.date32())
    rows = pa.table(
        {
            "flight_day": day,
            "carrier_id": flights["carrier_id"],
            "cancelled": flights["cancelled"].cast(pa.int64()),
            "late": late,
        }
    )
    grouped = rows.group_by(["flight_day", "carrier_id"]).aggregate(
        [("cancelled", "count"), ("cancelled", "sum"), ("late", "sum")]
    )
    return grouped.select(["flight_day", "carrier_id", "cancelled_count", "cancelled_sum", "late_sum"]).rename_columns(
        ["flight_day", "carrier_id", "flights", "cancelled", "minutes_late"]
    )
