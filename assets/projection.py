"""Evidence that Dagster lost, or never had, told again from the journal: for people only, no truth hangs on it.

A run can die after its publication and before Dagster's event; `dpone run` publishes without Dagster. For every
published day whose latest materialization is not of the published artifact, one runless materialization and its
check evaluations are reported.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
from dagster._core.event_api import PartitionKeyFilter

from assets.factory import asset_key, data_version, materialization
from checks.dbt_tests import DbtTest, dbt_tests
from checks.gates import check_specs, evaluation
from dpone_dagster.contracts.mart import MartSpec
from dpone_dagster.journal.port import JournalPort
from dpone_dagster.planning.plans import Workflow
from dpone_dagster.publication.attempt import MartResult
from resources.dagster_runtime import DponeRuntime

_VERSION_TAG = "dagster/data_version"


def project(
    instance: dg.DagsterInstance,
    journal: JournalPort,
    mart: MartSpec,
    tests: tuple[DbtTest, ...],
    *,
    at_most: int,
    older_than: timedelta = timedelta(0),
) -> list[str]:
    """Report what Dagster lacks of one mart's published days; return the days, oldest first.

    Args:
        instance: Dagster's storage.
        journal: the authority.
        mart: the mart.
        tests: its dbt tests.
        at_most: how many days to report in one go.
        older_than: leave a day alone that was published less long ago: its run may be about to report it.
    """
    key = asset_key(mart.name)
    known = instance.event_log_storage.get_latest_tags_by_partition(
        key, dg.DagsterEventType.ASSET_MATERIALIZATION, [_VERSION_TAG]
    )
    before = datetime.now(UTC) - older_than
    lost = [
        head
        for head in sorted(journal.scope_heads(mart.name), key=lambda h: h.scope.start)
        if head.published_at <= before
        and known.get(head.scope.key, {}).get(_VERSION_TAG) != head.artifact_manifest_sha256
    ]
    for head in lost[:at_most]:
        operation = journal.operation(head.operation_id)
        assert operation is not None
        result = materialization(journal, mart, tests, MartResult(action="skipped", operation=operation))
        instance.report_runless_asset_event(
            dg.AssetMaterialization(
                asset_key=key,
                partition=head.scope.key,
                metadata={**(result.metadata or {}), "projected": "from the journal, without a run"},
                tags={_VERSION_TAG: data_version(operation)},
            )
        )
        for check in result.check_results or ():
            assert check.check_name is not None
            if not _told(instance, dg.AssetCheckKey(key, check.check_name), head.scope.key):
                instance.report_runless_asset_event(
                    evaluation(check, partition=head.scope.key, blocking=_blocking(mart, tests)[check.check_name])
                )
    return [head.scope.key for head in lost[:at_most]]


def _told(instance: dg.DagsterInstance, check: dg.AssetCheckKey, day: str) -> bool:
    """Whether the check of the day has a runless evaluation: Dagster's table holds one, and refuses a second."""
    history = instance.event_log_storage.get_asset_check_execution_history(
        check, limit=1000, partition_filter=PartitionKeyFilter(key=day)
    )
    return any(record.run_id == "" for record in history)


def _blocking(mart: MartSpec, tests: tuple[DbtTest, ...]) -> dict[str, bool]:
    partitions = dg.DailyPartitionsDefinition(start_date=str(mart.start_date), timezone="UTC")
    specs = check_specs(mart, tests, asset_key=asset_key(mart.name), partitions_def=partitions)
    return {spec.name: spec.blocking for spec in specs}


def projection_sensor(workflows: Mapping[str, Workflow], manifest: Mapping[str, Any]) -> dg.SensorDefinition:
    """Build the sensor that keeps Dagster's picture of every mart complete; stopped until somebody starts it."""
    tests = {name: dbt_tests(manifest, workflow) for name, workflow in workflows.items()}

    @dg.sensor(
        name="project_evidence",
        description="Shows days in Dagster that were published without it (`dpone run`) or whose evidence was lost.",
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.STOPPED,
    )
    def project_evidence(context: dg.SensorEvaluationContext, dpone: DponeRuntime) -> dg.SkipReason:
        journal = dpone.open().journal
        told = {
            mart.name: project(
                context.instance, journal, mart, tests[name][mart.name], at_most=50, older_than=timedelta(minutes=2)
            )
            for name, workflow in workflows.items()
            for mart in workflow.marts
        }
        return dg.SkipReason(
            "; ".join(f"{mart}: {len(keys)} days told from the journal" for mart, keys in told.items())
        )

    return project_evidence
