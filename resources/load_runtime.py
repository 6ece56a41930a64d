"""Governed loads wired together for one runtime: what the command line, Dagster and Python programs all start from."""

import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpone_dagster.contracts.mart import Scope
from dpone_dagster.declarations.loader import LoadedManifest, load_manifest, parse_manifest
from dpone_dagster.declarations.manifest import Process
from dpone_dagster.errors import DponeError
from dpone_dagster.governance.audit import audit_enabled
from dpone_dagster.governance.gate_runner import find_providers
from dpone_dagster.governance.hooks import blocking, providers, run_phase
from dpone_dagster.journal.port import RunIdentity
from dpone_dagster.planning.load_plan import LoadPlan, plan_load
from dpone_dagster.ports import (
    AuditStep,
    HookContext,
    HookProvider,
    HookStep,
    LoadSourcePort,
    ProgressPort,
    SchemaGateHandler,
    SqlRunner,
)
from dpone_dagster.publication.load import LoadPorts, LoadReport, plain
from dpone_dagster.recovery import native_guard
from dpone_dagster.run import run_load
from resources.asset_rows import AssetLoadSource
from resources.clickhouse.audit import ClickHouseAudit
from resources.clickhouse.runner import ClickHouseRunner
from resources.clickhouse.source import ClickHouseLoadSource
from resources.clickhouse.staged_sink import ClickHouseDirectSink, ClickHouseStagedSink
from resources.hook_providers import BUILTINS
from resources.postgres.runner import PostgresRunner
from resources.postgres.source import PostgresLoadSource
from resources.runtime import Runtime

# The dialect of each kind of source in the embedded profile, where PostgreSQL stands in for SQL Server.
_DIALECTS = {"sqlserver": "postgres", "mssql": "postgres", "clickhouse": "clickhouse"}


def project_root(manifest: Path) -> Path:
    """Return the repository that a manifest lies in: the nearest folder above it with a .git or a pyproject.toml."""
    folder = manifest.absolute().parent
    for root in (folder, *folder.parents):
        if (root / ".git").exists() or (root / "pyproject.toml").is_file():
            return root
    return folder


def read_manifest(path: Path) -> LoadedManifest:
    """Read and validate a manifest; touches no engine."""
    return load_manifest(path, root=project_root(path))


def plan(loaded: LoadedManifest, process: Process, *, root: Path | None = None) -> LoadPlan:
    """Plan one process of a manifest for the embedded profile; touches files and no engine.

    Raises:
        DponeError: DPONE_CONNECTION_UNKNOWN, and what ``plan_load`` refuses.
    """
    for side in (process.source, process.sink):
        if side.connection_id is not None:
            raise DponeError(
                "DPONE_CONNECTION_UNKNOWN",
                f"{process.name}: the embedded profile has no connection {side.connection_id}.",
                field="connection_id",
            )
    if process.sink.physical_design.storage.clickhouse.cluster is not None:
        raise DponeError("DPONE_CLUSTER_UNAVAILABLE", f"{process.name}: the embedded ClickHouse is no cluster.")
    dialects = {"sink": "clickhouse"}
    if process.source.type in _DIALECTS:
        dialects["source"] = _DIALECTS[process.source.type]
    if root is None:
        root = project_root(loaded.path) if loaded.path else Path.cwd()
    try:
        planned = plan_load(process, manifest=loaded.path, root=root, dialects=dialects, shown=loaded.shown)
        # An unknown type must not wait until its hook's turn comes.
        hook_providers(planned.hooks.types, HookContext(process=process.name, run_id=""))
    except DponeError as error:
        raise _located(error, loaded, process) from None
    return planned


def _located(error: DponeError, loaded: LoadedManifest, process: Process) -> DponeError:
    """Say in which file and line a plan was refused."""
    field = error.details.get("field")
    hooks = process.source.options.hooks
    for phase in ("pre_hook", "post_hook"):
        for index, hook in enumerate(getattr(hooks, phase)):
            if error.details.get("hook") == f"{phase}.{hook.id}" or error.details.get("type") == hook.type:
                field = field or f"source.options.hooks.{phase}.{index}"
        if error.details.get("phase") == phase:
            field = field or f"source.options.hooks.{phase}"
    line = loaded.line(field, process=process.name) if field else None
    where = f"{loaded.shown}:{line}" if line else loaded.shown
    details = {**error.details, "file": loaded.shown, "line": line, "field": field}
    return DponeError(
        error.code, f"{where} {error.sentence}", next_step=error.next_step, **{k: v for k, v in details.items() if v}
    )


def plan_manifest(path: Path, *, selector: str | None = None) -> LoadPlan:
    """Read a manifest and plan one of its processes; the only one without a selector."""
    loaded = read_manifest(path)
    return plan(loaded, loaded.process(selector))


def plan_data(data: Mapping[str, Any], *, selector: str | None = None, root: Path | None = None) -> LoadPlan:
    """Plan one process of a manifest that is given as Python data."""
    loaded = parse_manifest(data)
    return plan(loaded, loaded.process(selector), root=root)


class Loads:
    """Governed loads of one runtime.

    Args:
        runtime: engines and journal.
        schema_gate: who evaluates ``schema`` gates; this layer knows no pandera.
    """

    def __init__(self, runtime: Runtime, *, schema_gate: SchemaGateHandler) -> None:
        self.runtime = runtime
        self._schema_gate = schema_gate

    def ports(self, loading: LoadPlan, *, rows: object = None, progress: ProgressPort | None = None) -> LoadPorts:
        """What a load needs.

        Args:
            rows: what a Python asset hands over; see ``AssetLoadSource``.
        """
        runtime = self.runtime
        client = runtime.clickhouse

        def source(process: Process) -> LoadSourcePort:
            if process.source.type == "asset":
                if rows is None:
                    raise DponeError(
                        "DPONE_SOURCE_ABSENT", f"{process.name} is loaded by the asset that hands its rows over."
                    )
                return AssetLoadSource(rows)
            if process.source.type == "clickhouse":
                return ClickHouseLoadSource(client, f"dpone-source-{process.name[:40]}-")
            return PostgresLoadSource(conninfo=runtime.engines.pg.conninfo, uri=runtime.engines.pg.uri)

        return LoadPorts(
            journal=runtime.journal.loads,
            source=source,
            sink=lambda prefix: ClickHouseStagedSink(client, query_prefix=prefix),
            legacy=lambda prefix: ClickHouseDirectSink(client, query_prefix=prefix),
            audit=ClickHouseAudit(client, query_prefix="dpone-audit-"),
            runners=self.runners,
            hook_providers=hook_providers,
            gate_providers=find_providers(loading.process.quality.gates),
            schema_gate=self._schema_gate,
            policy=runtime.policy,
            progress=progress or runtime.progress,
        )

    def runners(self, process: Process) -> Mapping[str, SqlRunner]:
        """The engines that run the hooks of a process, by connector."""
        engines = self.runtime.engines
        clickhouse = ClickHouseRunner(engines.clickhouse, prefix="dpone-hook-")
        found: dict[str, SqlRunner] = {"sink": clickhouse}
        if process.source.type == "clickhouse":
            found["source"] = clickhouse
        elif process.source.type != "asset":
            found["source"] = PostgresRunner(engines.pg.conninfo)
        return found

    def run(
        self,
        loading: LoadPlan,
        *,
        scope: Scope | None,
        identity: RunIdentity,
        replay: bool = True,
        rows: object = None,
        elsewhere: frozenset[str] = frozenset(),
        progress: ProgressPort | None = None,
    ) -> LoadReport:
        """Run one load; see ``run_load``."""
        ports = self.ports(loading, rows=rows, progress=progress)
        return run_load(ports, loading, scope=scope, identity=identity, replay=replay, elsewhere=elsewhere)

    def run_hooks(
        self, loading: LoadPlan, phase: str, *, hook_id: str | None, dry_run: bool, run_id: str
    ) -> tuple[HookStep, ...]:
        """Run (or, dry, only name) the hooks of one phase outside a load.

        A post-hook that belongs to the run's own load is written beside that load's steps.
        """
        hooks = loading.hooks.phase(phase)
        context = HookContext(process=loading.process.name, run_id=run_id)
        started, clock = datetime.now(UTC), time.monotonic()
        steps = run_phase(
            hooks,
            runners={} if dry_run else self.runners(loading.process),
            providers={} if dry_run else hook_providers(loading.hooks.types, context),
            only=hook_id,
            dry_run=dry_run,
        )
        last = self.runtime.journal.loads.last_load(loading.process.name)
        if not dry_run and phase == "post_hook" and last and last.run_id == run_id and audit_enabled(loading.process):
            row = AuditStep(
                step_id=f"separate_{phase}_{hook_id or 'all'}",
                kind="step",
                phase=phase,
                status="failed" if blocking(steps) else "completed",
                started_at=started,
                seconds=time.monotonic() - clock,
                details={"hooks": [plain(asdict(step)) for step in steps]},
            )
            try:
                ClickHouseAudit(self.runtime.clickhouse, "dpone-audit-").steps(loading.process, last.load_id, [row])
            except DponeError as error:
                # The hooks have run: losing a row about them must not say that they failed.
                self.runtime.progress.note(f"The row of {phase} was not kept ({error.code}).")
        return steps

    def guard(self, loading: LoadPlan) -> native_guard.GuardView | None:
        """What is known of a process's guard."""
        return native_guard.show(self.ports(loading), loading)

    def clear_guard(
        self, loading: LoadPlan, *, identity: RunIdentity, reason: str, word: native_guard.Word | None
    ) -> native_guard.GuardView:
        """Clear a guard; see ``native_guard.clear``."""
        return native_guard.clear(self.ports(loading), loading, identity=identity, reason=reason, word=word)


def hook_providers(types: Collection[str], context: HookContext) -> Mapping[str, HookProvider]:
    """Make the providers of the given hook types."""
    return providers(types, context=context, builtins=BUILTINS)
