"""One load as a step of a Dagster run: run it, tell its checks, then its evidence or its failure."""

import uuid
from collections.abc import Iterator
from typing import Any

import dagster as dg

from assets.loads import evidence
from checks.loads import POST_HOOKS, load_check_results, skipped
from checks.schema_gate import PanderaSchemaGate
from dpone_dagster.cancellation import Cancellation
from dpone_dagster.contracts.mart import Scope
from dpone_dagster.errors import DponeError, unexpected
from dpone_dagster.governance.hooks import blocking
from dpone_dagster.journal.port import LoadRecord
from dpone_dagster.planning.load_plan import LoadPlan
from dpone_dagster.ports import HookDefinition, HookStep
from resources.dagster_runtime import DponeRuntime, LogProgress, identity_of
from resources.load_runtime import Loads

Events = Iterator[Any]


def open_loads(dpone: DponeRuntime) -> Loads:
    """Governed loads of the runtime; starts the embedded engines where they do not run."""
    return Loads(dpone.open(), schema_gate=PanderaSchemaGate())


def scope_of(loading: LoadPlan, partition_key: str | None) -> Scope | None:
    """Return the UTC day of a daily load's partition; None for every other load."""
    daily = loading.process.source.read.mode == "daily"
    return Scope.day(partition_key) if daily and partition_key is not None else None


def key_of(loading: LoadPlan) -> dg.AssetKey:
    """Return the key of a load's asset: the process's name."""
    return dg.AssetKey([loading.process.name])


def load_step(
    context: dg.OpExecutionContext,
    dpone: DponeRuntime,
    loading: LoadPlan,
    *,
    elsewhere: frozenset[str] = frozenset(),
) -> Events:
    """Run a load; yield its materialization with its checks, or its checks before failing.

    Args:
        context: of the asset's step.
        dpone: the runtime.
        loading: what to load.
        elsewhere: hooks that are steps of their own.
    """
    asset_key, loads = key_of(loading), None
    scope = scope_of(loading, context.partition_key if context.has_partition_key else None)
    try:
        loads = open_loads(dpone)
        report = loads.run(
            loading,
            scope=scope,
            identity=identity_of(
                context.run,
                context.instance,
                retry_number=context.retry_number,
                task_id=context.op.name,
                worker_id=str(uuid.uuid4()),
            ),
            # Whoever materializes a partition wants it loaded, whether it was before or not.
            replay=True,
            elsewhere=elsewhere,
            progress=LogProgress(context.log),
        )
        load = kept(loads, report.load_id)
    except DponeError as error:
        refusal = error
    except Exception as error:  # noqa: BLE001 - its text may carry row values, so only its kind and place are told
        refusal = unexpected(error)
    else:
        _tag(context, load.load_id)
        judged = evidence.judged(load.facts["report"])
        yield dg.MaterializeResult(
            asset_key=asset_key,
            metadata=evidence.loaded(loading, load),
            check_results=list(load_check_results(loading.process, judged, asset_key=asset_key)),
        )
        return

    # Checks first: a materialization beside a failing check would mark the partition as materialized.
    yield from load_check_results(loading.process, evidence.judged_failure(refusal, loading), asset_key=asset_key)
    yield from _unevaluated(context, loading, why=f"the load stopped before ({refusal.code})", only=POST_HOOKS)
    report_of = getattr(refusal, "report", None)
    if report_of is not None and report_of.load_id:
        _tag(context, report_of.load_id)
    if refusal.code == "DPONE_CANCELLED" and (report_of is None or report_of.target_state == "unchanged"):
        context.log.info(f"{refusal.sentence} {refusal.next_step}")
        # Dagster's own interrupt, taken at a safe boundary: the run ends as canceled.
        raise dg.DagsterExecutionInterruptedError() from None
    journal = loads.runtime.journal.loads if loads else None
    raise evidence.failure(refusal, loading=loading, scope=scope, journal=journal) from None


def kept(loads: Loads, load_id: str | None) -> LoadRecord:
    """Return a COMPLETE load as the journal has it.

    Raises:
        DponeError: DPONE_JOURNAL_CORRUPT when the journal lacks it or its report.
    """
    load = loads.runtime.journal.loads.load(load_id) if load_id else None
    if load is None or "report" not in load.facts:
        raise DponeError("DPONE_JOURNAL_CORRUPT", "A load ended, and the journal has no report of it.")
    return load


def hook_step(
    context: dg.OpExecutionContext,
    dpone: DponeRuntime,
    loading: LoadPlan,
    definition: HookDefinition,
    *,
    last: bool,
) -> Events:
    """Run one hook as a step of its own.

    A failed pre-hook tells the load's checks that nothing was extracted, for the load's own step does not run then.

    Args:
        context: of the hook's step.
        dpone: the runtime.
        loading: whose hook it is.
        definition: the hook.
        last: whether it is the last post-hook, which tells that all of them ran.
    """
    hook, pre = definition.hook, definition.phase == "pre_hook"
    try:
        # A hook that was sent runs to its end; an interrupt is taken before or after it.
        with Cancellation() as cancel:
            loads = open_loads(dpone)
            if pre and (guard := loads.runtime.journal.loads.guard(loading.process.name)) is not None:
                raise guard.refusal(loading.command)
            cancel.check()
            (step,) = loads.run_hooks(loading, definition.phase, hook_id=hook.id, dry_run=False, run_id=context.run_id)
            if blocking((step,)) is not None:
                raise _failed(loading, definition, step)
            if not last:
                cancel.check()
    except DponeError as error:
        refusal = error
    except Exception as error:  # noqa: BLE001 - see load_step
        refusal = unexpected(error)
    else:
        told = _hook_metadata(step)
        if step.status != "succeeded":
            context.log.warning(f"{definition.phase} {hook.id}: {step.status} ({step.error_code})")
        if last:
            yield dg.AssetCheckResult(
                asset_key=key_of(loading),
                check_name=POST_HOOKS,
                passed=True,
                description="all of them ran",
                metadata={**told, "status": "passed"},
            )
        else:
            yield dg.Output(None, metadata=told)
        return
    if pre:
        yield from _unevaluated(context, loading, why=f"the pre-hook {hook.id} stopped the run ({refusal.code})")
    else:
        failed = dg.AssetCheckResult(
            asset_key=key_of(loading),
            check_name=POST_HOOKS,
            passed=False,
            description=refusal.sentence,
            severity=dg.AssetCheckSeverity.ERROR,
            metadata={"status": "failed", "code": refusal.code},
        )
        yield _evaluation(context, failed)
    if refusal.code == "DPONE_CANCELLED":
        raise dg.DagsterExecutionInterruptedError() from None
    raise _hook_failure(refusal, loading, pre=pre) from None


def _failed(loading: LoadPlan, definition: HookDefinition, step: HookStep) -> DponeError:
    pre = definition.phase == "pre_hook"
    ended = "was sent and its engine was lost, so it may have run," if step.status == "unknown" else "failed"
    return DponeError(
        "DPONE_PRE_HOOK_FAILED" if pre else "DPONE_POST_HOOK_FAILED",
        f"The {'pre' if pre else 'post'}-hook {step.id} {ended} ({step.error_code}). "
        + ("Nothing was extracted." if pre else "The load itself is complete."),
        next_step="Correct its cause. Then re-execute the run from failure, which runs this step and what follows it; "
        f"or run the hook alone: `{loading.command('hooks execute')} --phase {definition.phase} --hook-id {step.id}`.",
        hook=step.id,
        status=step.status,
        error_code=step.error_code,
    )


def _hook_failure(refusal: DponeError, loading: LoadPlan, *, pre: bool) -> dg.Failure:
    target = (
        f"{loading.target} unchanged by this run; readers see what they saw before."
        if pre
        else f"{loading.target} has the rows of this load; readers see them, and the asset is materialized."
    )
    return dg.Failure(
        description="\n".join(
            [f"{refusal.code}: {refusal.sentence}", f"Target: {target}", f"Next: {refusal.next_step}"]
        ),
        metadata={"code": refusal.code, "target": target, "next": refusal.next_step},
        allow_retries=False,
    )


def _unevaluated(context: dg.OpExecutionContext, loading: LoadPlan, *, why: str, only: str | None = None) -> Events:
    """Tell the checks of steps that are not going to run."""
    for spec in context.assets_def.check_specs:
        if only in (None, spec.name):
            yield _evaluation(context, skipped(key_of(loading), spec.name, why))


def _evaluation(context: dg.OpExecutionContext, result: dg.AssetCheckResult) -> dg.AssetCheckEvaluation:
    """Turn the result of a check that another step would give into an event of this one."""
    (spec,) = (spec for spec in context.assets_def.check_specs if spec.name == result.check_name)
    return dg.AssetCheckEvaluation(
        asset_key=spec.asset_key,
        check_name=spec.name,
        passed=result.passed,
        metadata=result.metadata,
        severity=result.severity,
        description=result.description,
        blocking=spec.blocking,
        partition=context.partition_key if context.has_partition_key and spec.partitions_def else None,
    )


def _hook_metadata(step: HookStep) -> dict[str, Any]:
    numbers = {name: value for name, value in step.metrics.items() if value is not None}
    told = {
        "kind": step.kind,
        "connector": step.connector,
        "status": step.status,
        "seconds": step.seconds,
        "attempts": step.attempts,
        "sql_hash": step.sql_hash,
    }
    return {**numbers, **{name: value for name, value in told.items() if value is not None}}


def _tag(context: dg.OpExecutionContext, load_id: str) -> None:
    context.instance.add_run_tags(context.run_id, {"dpone/load_id": load_id})
