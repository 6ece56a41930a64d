"""From a workflow's declaration to a Dagster asset: one step that publishes one UTC day of all its marts.

The step is one path through ``publish_day``; phases and their resumption live in the journal, not in Dagster. On
success every mart's materialization carries its checks. On failure every declared check is reported first, then
the step fails without a materialization: one beside a failing check would mark the partition as materialized.
"""

import traceback
import uuid
from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import dagster as dg

from assets import evidence
from checks.dbt_tests import DbtTest, dbt_tests
from checks.gates import check_results, check_specs
from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.contracts.documents import GateReport
from dpone_dagster.contracts.mart import MartSpec, Scope
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.facts import Facts
from dpone_dagster.journal.port import JournalPort, OperationRecord, RunIdentity
from dpone_dagster.planning.plans import Workflow
from dpone_dagster.ports import TestResult
from dpone_dagster.publication.attempt import MartResult, PublicationFailed
from dpone_dagster.publication.commit import judged
from resources.dagster_runtime import DponeRuntime, LogProgress, run_identity
from resources.runtime import Runtime

_SQL = {"postgres": "PostgreSQL, standing in for SQL Server", "sqlserver": "SQL Server"}
Events = Iterator[dg.AssetCheckResult | dg.MaterializeResult[Any]]


def asset_key(mart: str) -> dg.AssetKey:
    """Return the key of a mart's asset: its name."""
    return dg.AssetKey([mart])


def days(workflow: Workflow, *, last_day: date | None = None) -> dg.DailyPartitionsDefinition:
    """Return a workflow's partitions: UTC days from its start to the last one that has ended.

    Args:
        workflow: the declaration.
        last_day: where the data end for good; None where they go on.
    """
    return dg.DailyPartitionsDefinition(
        start_date=str(max(m.start_date for m in workflow.marts)),
        end_date=str(last_day + timedelta(days=1)) if last_day else None,
        timezone="UTC",
    )


def daily_mart_assets(
    workflow: Workflow,
    manifest: Mapping[str, Any],
    *,
    group: str = "marts",
    owners: tuple[str, ...] = (),
    last_day: date | None = None,
) -> dg.AssetsDefinition:
    """Build the asset (several for a workflow of several marts) whose partitions a workflow publishes.

    Args:
        workflow: the declaration.
        manifest: dbt's manifest as JSON data: descriptions, sources and the names of the tests.
        group: Dagster's asset group.
        owners: ``team:..`` or mail addresses.
        last_day: where the data end for good; None where they go on.
    """
    tests = dbt_tests(manifest, workflow)
    partitions = days(workflow, last_day=last_day)
    checks = [
        spec
        for mart in workflow.marts
        for spec in check_specs(mart, tests[mart.name], asset_key=asset_key(mart.name), partitions_def=partitions)
    ]

    @dg.multi_asset(
        name=workflow.name,
        specs=[_spec(workflow, mart, manifest, partitions, group=group, owners=owners) for mart in workflow.marts],
        check_specs=checks,
        # No backfill policy, which means a run of its own for each day. multi_run(1) means that too, but its runs
        # carry a range, and Dagster 1.13.27 then records check evaluations without their partition.
        # For politeness only; the journal is what excludes.
        pool=f"dpone/{workflow.name}",
        can_subset=False,
    )
    def publish(context: dg.AssetExecutionContext, dpone: DponeRuntime) -> Events:
        yield from _publish(context, dpone, workflow, tests)

    return publish


def _spec(
    workflow: Workflow,
    mart: MartSpec,
    manifest: Mapping[str, Any],
    partitions: dg.DailyPartitionsDefinition,
    *,
    group: str,
    owners: tuple[str, ...],
) -> dg.AssetSpec:
    node = manifest["nodes"][mart.model_unique_id]
    return dg.AssetSpec(
        key=asset_key(mart.name),
        description=_description(workflow, mart, node),
        deps=[_source_key(source) for source in _sources(mart, manifest)],
        group_name=group,
        owners=list(owners),
        kinds={"dbt", _sql_kind(workflow), "clickhouse"},
        code_version=code_version(workflow, mart),
        partitions_def=partitions,
        metadata={
            "dagster/column_schema": dg.TableSchema(columns=_columns(mart, node)),
            "dagster/table_name": mart.target.dotted,
            "workflow": workflow.name,
            "source_table": mart.source.dotted,
            "key": ", ".join(mart.key),
            "event_time": f"{mart.event_time} (UTC)",
            "partition_by": mart.partition_by,
        },
    )


def source_assets(workflow: Workflow, manifest: Mapping[str, Any], *, group: str = "marts") -> list[dg.AssetSpec]:
    """Build the external assets that a workflow's models read, for the lineage; Dagster never materializes them."""
    found = {_source_key(s): s for mart in workflow.marts for s in _sources(mart, manifest)}
    return [
        dg.AssetSpec(
            key=key,
            description=source.get("description") or source.get("source_description") or None,
            group_name=group,
            kinds={_sql_kind(workflow), "table"},
        )
        for key, source in found.items()
    ]


def _sources(mart: MartSpec, manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    read = manifest["nodes"][mart.model_unique_id]["depends_on"]["nodes"]
    return [manifest["sources"][unique_id] for unique_id in read if unique_id in manifest["sources"]]


def _source_key(source: Mapping[str, Any]) -> dg.AssetKey:
    return dg.AssetKey([source["source_name"], source["name"]])


def _sql_kind(workflow: Workflow) -> str:
    return "postgres" if workflow.environment == "embedded" else "sqlserver"


def code_version(workflow: Workflow, mart: MartSpec) -> str:
    """Digest what a mart is and what is proven of it without an engine."""
    plan = next(p for p in workflow.plans if p.mart.name == mart.name)
    return sha256_of(
        {
            "schema": "dpone.code-version.v1",
            "mart": mart.as_json(),
            "compiled_sql": plan.definition.compiled_sql_sha256,
            "macros": plan.definition.macro_closure_sha256,
            "closure": workflow.closure.sha256,
        }
    )


def _description(workflow: Workflow, mart: MartSpec, node: Mapping[str, Any]) -> str:
    others = [m.name for m in workflow.marts if m.name != mart.name]
    together = f" Published together with {', '.join(others)}." if others else ""
    return (
        f"{str(node.get('description') or '').strip()}\n\n"
        f"One partition is one UTC day of `{mart.event_time}`. dbt builds the day in `{mart.source.dotted}` "
        f"({_SQL[_sql_kind(workflow)]}); once every check holds, ClickHouse's `{mart.target.dotted}` is exchanged for "
        f"a table with that day, so readers see the whole day or none of it.{together}\n\n"
        f"To publish, repair or replay a day, materialize its partition. "
        f"`dpone explain {mart.name} DAY` tells a day's story."
    ).strip()


def _columns(mart: MartSpec, node: Mapping[str, Any]) -> list[dg.TableColumn]:
    described = {name.lower(): column.get("description") or None for name, column in node["columns"].items()}
    return [
        dg.TableColumn(
            name=column.name,
            type=f"{column.type} → {column.spec.clickhouse_column(column.nullable)}",
            description=described.get(column.name.lower()),
            constraints=dg.TableColumnConstraints(
                nullable=column.nullable, other=["key"] if column.name in mart.key else []
            ),
        )
        for column in mart.columns
    ]


# ------------------------------------------------------------------------------------------------- the step


def _publish(
    context: dg.AssetExecutionContext,
    dpone: DponeRuntime,
    workflow: Workflow,
    tests: Mapping[str, tuple[DbtTest, ...]],
) -> Events:
    runtime: Runtime | None = None
    identity = run_identity(context, worker_id=str(uuid.uuid4()))
    scope = Scope.day(context.partition_key)
    try:
        runtime = dpone.open()
        results = runtime.publish(
            workflow.marts[0].name,
            scope,
            identity=identity,
            # Whoever materializes a partition wants it rebuilt, COMPLETE or not.
            replay=True,
            progress=LogProgress(context.log),
        )
        found = [materialization(runtime.journal, workflow.mart(n), tests[n], r) for n, r in results.items()]
    except DponeError as error:
        refusal = error
    except Exception as error:  # noqa: BLE001 - its text may carry row values, so only its kind and place are told
        refusal = DponeError("DPONE_UNEXPECTED", f"{_place(error)} stopped the run.")
    else:
        _tag(context, [r.operation for r in results.values()])
        yield from found
        return

    yield from _checks_of_failure(refusal, workflow, tests)
    journal = runtime.journal if runtime else None
    if journal:
        _tag(context, _admitted(journal, workflow, scope, identity))
    if refusal.code == "DPONE_CANCELLED":
        context.log.info(f"{refusal.sentence} {refusal.next_step}")
        # Dagster's own interrupt, taken at a safe boundary: the run ends as canceled.
        raise dg.DagsterExecutionInterruptedError() from None
    raise evidence.failure(refusal, workflow=workflow, scope=scope, journal=journal) from None


def materialization(
    journal: JournalPort, mart: MartSpec, tests: tuple[DbtTest, ...], result: MartResult
) -> dg.MaterializeResult[Any]:
    """Return the evidence and the check results of a mart's COMPLETE day."""
    operation = result.operation
    gates, ran = judged(journal, operation)
    return dg.MaterializeResult(
        asset_key=asset_key(mart.name),
        metadata=evidence.published(journal, mart, operation, action=result.action),
        data_version=dg.DataVersion(data_version(operation)),
        check_results=list(
            check_results(
                mart,
                tests,
                asset_key=asset_key(mart.name),
                gates=gates,
                ran=ran,
                why_skipped="the run that prepared the day did not run it",
            )
        ),
    )


def data_version(operation: OperationRecord) -> str:
    """The digest of the sealed artifact that a COMPLETE operation published."""
    digest = Facts.of(operation).artifact_manifest_sha256
    assert digest is not None
    return digest


def _checks_of_failure(
    error: DponeError, workflow: Workflow, tests: Mapping[str, tuple[DbtTest, ...]]
) -> Iterator[dg.AssetCheckResult]:
    gates: dict[str, GateReport] = {}
    ran: tuple[TestResult, ...] = ()
    if isinstance(error, PublicationFailed):
        gates, ran = error.gates, error.tests
    for mart in workflow.marts:
        yield from check_results(
            mart,
            tests[mart.name],
            asset_key=asset_key(mart.name),
            gates=gates.get(mart.name),
            ran=ran,
            why_skipped=f"the run stopped before ({error.code})",
        )


def _tag(context: dg.AssetExecutionContext, operations: list[OperationRecord]) -> None:
    if operations:
        ids = ",".join(o.operation_id for o in operations)
        context.instance.add_run_tags(context.run.run_id, {"dpone/operation_id": ids})


def _admitted(journal: JournalPort, workflow: Workflow, scope: Scope, identity: RunIdentity) -> list[OperationRecord]:
    """The operations that this run admitted, where the journal answers."""
    try:
        of_day = [o for mart in workflow.marts for o in journal.history(mart.name, scope)]
    except DponeError:
        return []
    return [o for o in of_day if o.worker_id == identity.worker_id]


def _place(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at {Path(frames[-1].filename).name}:{frames[-1].lineno}"
