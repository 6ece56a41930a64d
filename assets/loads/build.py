"""From a manifest to Dagster definitions: an asset and a job for each process. Touches files and no engine."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg

from assets.loads import evidence
from assets.loads.step import hook_step, key_of, load_step
from checks.loads import load_check_specs, post_hooks_check
from dpone_dagster.errors import DponeError
from dpone_dagster.planning.load_plan import LoadPlan
from dpone_dagster.ports import HookDefinition
from resources.dagster_runtime import DponeRuntime
from resources.load_runtime import plan, read_manifest

GROUP = "loads"
_KINDS = {"sqlserver": "postgres", "mssql": "postgres", "clickhouse": "clickhouse", "asset": "python"}


@dataclass(frozen=True, kw_only=True)
class LoadDefinitions:
    """What manifests give to a code location.

    Attributes:
        plans: every process by name; those of Python assets, which have no asset here, too.
        assets: one for each process that reads by itself.
        outputs: external assets around the loads, for the lineage: sources, and what hooks read and write.
        jobs: ``load_<process>``.
    """

    plans: dict[str, LoadPlan] = field(default_factory=dict)
    assets: list[dg.AssetsDefinition] = field(default_factory=list)
    outputs: list[dg.AssetSpec] = field(default_factory=list)
    jobs: list[Any] = field(default_factory=list)


def load_assets(folder: Path) -> LoadDefinitions:
    """Build the definitions of every ``*.yaml`` manifest of a folder.

    Raises:
        DponeError: what a manifest is refused for, naming file, line and field.
    """
    return build_loads(sorted(folder.glob("*.yaml")))


def build_loads(manifests: Iterable[Path]) -> LoadDefinitions:
    """Build the definitions of some manifests.

    Raises:
        DponeError: as ``load_assets``; DPONE_MANIFEST_INVALID when two of them have a process of the same name.
    """
    found = LoadDefinitions()
    for manifest in manifests:
        loaded = read_manifest(manifest)
        for process in loaded.processes:
            loading = plan(loaded, process)
            if (other := found.plans.get(process.name)) is not None:
                raise DponeError(
                    "DPONE_MANIFEST_INVALID",
                    f"{loaded.shown} and {other.manifest} both have a process {process.name}.",
                    next_step="Give one of them another name: a process names its asset, its locks and its history.",
                    file=loaded.shown,
                    field="name",
                )
            found.plans[process.name] = loading
            if process.source.type != "asset":
                found.assets.append(load_asset(loading))
                found.jobs.append(load_job(loading))
            found.outputs.extend(_externals(loading, found.outputs))
    return found


def load_job(loading: LoadPlan, key: dg.AssetKey | None = None) -> Any:
    """Build the job that runs one load."""
    return dg.define_asset_job(
        f"load_{loading.process.name}",
        selection=dg.AssetSelection.assets(key or key_of(loading)),
        description=f"Load {loading.target} by {loading.manifest}.",
    )


def load_asset(loading: LoadPlan) -> dg.AssetsDefinition:
    """Build the asset of a process: one step, or several where hooks are steps of their own.

    Raises:
        DponeError: DPONE_MANIFEST_INVALID when Dagster refuses an owner.
    """
    try:
        pre, post = separate_hooks(loading)
        return _asset(loading, pre, post)
    except dg.DagsterInvalidDefinitionError as error:
        raise DponeError(
            "DPONE_MANIFEST_INVALID",
            f"{loading.manifest}: Dagster refuses {loading.process.name}: {error}",
            next_step="Correct the manifest; owners are e-mail addresses or team:name.",
            file=loading.manifest,
        ) from None


def separate_hooks(loading: LoadPlan) -> tuple[tuple[HookDefinition, ...], tuple[HookDefinition, ...]]:
    """Return the pre- and post-hooks that are steps of their own, in the order in which they run.

    ``separate_task`` makes one. So does standing on the far side of one: a pre-hook that a separate one depends on
    would otherwise run after it, inside the load, and a post-hook that depends on a separate one before it.
    """
    pre, post = loading.hooks.pre, loading.hooks.post
    wanted = {d.hook.id for d in pre if d.hook.execution.orchestrator == "separate_task"}
    for definition in reversed(pre):  # dependencies come earlier
        if definition.hook.id in wanted:
            wanted.update(definition.hook.depends_on)
    after = {d.hook.id for d in post if d.hook.execution.orchestrator == "separate_task"}
    for definition in post:
        if after.intersection(definition.hook.depends_on):
            after.add(definition.hook.id)
    return tuple(d for d in pre if d.hook.id in wanted), tuple(d for d in post if d.hook.id in after)


# -------------------------------------------------------------------------------------------------- the asset


def asset_spec(loading: LoadPlan) -> dg.AssetSpec:
    """Say of a load's asset what the manifest says of it."""
    process = loading.process
    return dg.AssetSpec(
        key=key_of(loading),
        description=_description(loading),
        deps=_deps(loading),
        group_name=process.group or GROUP,
        owners=list(process.owners),
        kinds={_KINDS[process.source.type], "clickhouse"},
        code_version=loading.sha256,
        partitions_def=partitions(loading),
        metadata=asset_metadata(loading),
    )


def asset_metadata(loading: LoadPlan) -> dict[str, Any]:
    """Return what is known of a load's target without asking an engine."""
    process = loading.process
    said = {
        "dagster/table_name": loading.target,
        "manifest": loading.manifest,
        "source": _reads(loading),
        "reads": process.source.read.mode + (f" by {process.source.read.column}" if process.source.read.column else ""),
        "strategy": process.sink.strategy,
        "unique_key": ", ".join(process.sink.unique_key or ()),
        "finalization": process.sink.options.load_governance.finalization_phase,
        "readers_see_meanwhile": evidence.visibility(loading),
    }
    return {name: value for name, value in said.items() if value}


def partitions(loading: LoadPlan) -> dg.DailyPartitionsDefinition | None:
    """Return the UTC days of a daily load; None for every other."""
    start = loading.process.source.read.start_date
    return dg.DailyPartitionsDefinition(start_date=str(start), timezone="UTC") if start else None


def _reads(loading: LoadPlan) -> str:
    source = loading.process.source
    if source.table is not None:
        return source.table.dotted
    return "a query" if source.options.query is not None else "the rows of a Python asset"


def _description(loading: LoadPlan) -> str:
    process = loading.process
    daily = process.source.read.mode == "daily"
    what = f"One partition is one UTC day of `{process.source.read.column}`. " if daily else ""
    when = (
        f"The rows are written straight into `{loading.target}`; the gates judge them afterwards."
        if process.legacy
        else f"Once every gate holds, `{loading.target}` changes ({process.sink.strategy}); meanwhile readers see "
        f"{evidence.visibility(loading)}."
    )
    told = f"{what}Reads {_reads(loading)}. {when}\n\n`{loading.command('plan')}` says what a run does."
    return f"{process.description.strip()}\n\n{told}" if process.description else told


def _deps(loading: LoadPlan) -> list[dg.AssetKey]:
    """What the load depends on: as declared, its source table, and what its pre-hooks read and write."""
    process = loading.process
    keys = [dg.AssetKey.from_user_string(name) for name in process.depends_on]
    if process.source.table is not None:
        keys.append(dg.AssetKey([process.source.table.schema_name, process.source.table.name]))
    for definition in loading.hooks.pre:
        keys += [_relation_key(name) for name in (*definition.hook.lineage.inputs, *definition.hook.lineage.outputs)]
    return [key for key in dict.fromkeys(keys) if key != key_of(loading)]


def _externals(loading: LoadPlan, before: Sequence[dg.AssetSpec]) -> Iterator[dg.AssetSpec]:
    """The tables around a load, for the lineage: its source, what hooks read and write. Dagster materializes none."""
    process, own = loading.process, key_of(loading)
    deps: dict[dg.AssetKey, list[dg.AssetKey]] = {}
    if process.source.table is not None:
        deps[dg.AssetKey([process.source.table.schema_name, process.source.table.name])] = []
    for definition in (*loading.hooks.pre, *loading.hooks.post):
        lineage = definition.hook.lineage
        inputs = [_relation_key(name) for name in lineage.inputs]
        for key in inputs:
            deps.setdefault(key, [])
        for name in lineage.outputs:
            key = _relation_key(name)
            after = [own] if definition in loading.hooks.post else []
            deps[key] = [*deps.get(key, []), *(each for each in (*inputs, *after) if each != key)]
    known = {own, _relation_key(loading.target), *(spec.key for spec in before)}
    for key, upstream in deps.items():
        if key not in known:
            group = process.group or GROUP
            yield dg.AssetSpec(key=key, deps=list(dict.fromkeys(upstream)), group_name=group, kinds={"table"})


def _relation_key(dotted: str) -> dg.AssetKey:
    """Read ``schema.table`` as hooks' lineage has it, with or without an engine's quotes."""
    parts = [part.strip().strip('[]"`') for part in dotted.split(".")]
    return dg.AssetKey([part for part in parts if part] or [dotted])


def _pool(loading: LoadPlan) -> str:
    # For politeness only; the journal is what excludes.
    return f"dpone/{loading.process.name}"


# ---------------------------------------------------------------------------------------------------- the steps


def _asset(loading: LoadPlan, pre: Sequence[HookDefinition], post: Sequence[HookDefinition]) -> dg.AssetsDefinition:
    """Build an asset of one step, or of several: pre-hooks, the load, post-hooks.

    Inputs are numbered, for tables may have any name.
    """
    spec = asset_spec(loading)
    declared = load_check_specs(loading.process, asset_key=spec.key, partitions_def=spec.partitions_def)
    checks = {check.get_python_identifier(): check for check in declared}
    deps = {f"dep_{n}": dep.asset_key for n, dep in enumerate(spec.deps)}
    if pre or post:
        last = post_hooks_check(asset_key=spec.key, partitions_def=spec.partitions_def) if post else None
        node: dg.OpDefinition | dg.GraphDefinition = _graph(loading, pre, post, list(deps), list(checks), last)
        checks |= {last.get_python_identifier(): last} if last else {}
    else:
        node = _load_op(loading, f"{loading.process.name}_load", list(deps), list(checks), elsewhere=frozenset())
    return dg.AssetsDefinition(
        node_def=node,
        keys_by_input_name=deps,
        keys_by_output_name={"result": spec.key},
        check_specs_by_output_name=checks,
        specs=[spec],
    )


def _load_op(
    loading: LoadPlan, name: str, ins: Sequence[str], checks: Sequence[str], *, elsewhere: frozenset[str]
) -> dg.OpDefinition:
    @dg.op(
        name=name,
        ins={each: dg.In(dg.Nothing) for each in ins},
        out={each: dg.Out(dg.Nothing, is_required=False) for each in ("result", *checks)},
        pool=_pool(loading),
    )
    def load(context: dg.OpExecutionContext, dpone: DponeRuntime) -> Any:
        yield from load_step(context, dpone, loading, elsewhere=elsewhere)

    return load


def _graph(
    loading: LoadPlan,
    pre: Sequence[HookDefinition],
    post: Sequence[HookDefinition],
    deps: Sequence[str],
    checks: Sequence[str],
    last: dg.AssetCheckSpec | None,
) -> dg.GraphDefinition:
    """Put the steps in a chain, as on the command line: the first that fails stops those after it.

    The load's step gives the asset and its checks; the last post-hook gives the check of the post-hooks, since Dagster
    wants every last step of an asset to give something.
    """
    name = loading.process.name
    elsewhere = frozenset(f"{d.phase}.{d.hook.id}" for d in (*pre, *post))

    def ins(place: int) -> Sequence[str]:
        return ["before"] if place else deps

    steps = [(f"pre_hook_{d.hook.id}", _hook_op(loading, d, ins(n))) for n, d in enumerate(pre)]
    steps.append(("load", _load_op(loading, f"{name}__load", ins(len(pre)), checks, elsewhere=elsewhere)))
    for d in post:
        steps.append((f"post_hook_{d.hook.id}", _hook_op(loading, d, ins(1), last if d is post[-1] else None)))
    chain = [{}, *({"before": dg.DependencyDefinition(alias, "result")} for alias, _ in steps[:-1])]
    outputs = dict.fromkeys(("result", *checks), "load")
    if last is not None:
        outputs[last.get_python_identifier()] = steps[-1][0]
    return dg.GraphDefinition(
        name=f"{name}_load",
        node_defs=[op for _, op in steps],
        dependencies={
            dg.NodeInvocation(op.name, alias=alias): before for (alias, op), before in zip(steps, chain, strict=True)
        },
        input_mappings=[
            dg.InputMapping(graph_input_name=each, mapped_node_name=steps[0][0], mapped_node_input_name=each)
            for each in deps
        ],
        output_mappings=[
            dg.OutputMapping(graph_output_name=each, mapped_node_name=alias, mapped_node_output_name=each)
            for each, alias in outputs.items()
        ],
    )


def _hook_op(
    loading: LoadPlan, definition: HookDefinition, ins: Sequence[str], told: dg.AssetCheckSpec | None = None
) -> dg.OpDefinition:
    """Build the step of one hook; the last post-hook also gives their check."""
    hook = definition.hook
    outs = ["result"] if told is None else [told.get_python_identifier()]

    @dg.op(
        name=f"{loading.process.name}__{definition.phase}__{hook.id}",
        description=f"{definition.phase} {hook.id} ({hook.kind}) on the {hook.connector}. {definition.sql_hash or ''}",
        ins={each: dg.In(dg.Nothing) for each in ins},
        out={name: dg.Out(dg.Nothing, is_required=False) for name in outs},
        tags={"dagster/compute_kind": hook.type},
        pool=_pool(loading),
    )
    def run_hook(context: dg.OpExecutionContext, dpone: DponeRuntime) -> Any:
        yield from hook_step(context, dpone, loading, definition, last=told is not None)

    return run_hook
