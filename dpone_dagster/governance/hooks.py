"""The hooks of a load: read, judged and put in order before anything runs; then run, one after the other.

Evidence of a hook has the hash of its SQL, never the SQL.
"""

import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol

from dpone_dagster.contracts.canonical import sha256_bytes, sha256_of
from dpone_dagster.declarations.manifest import Hook, Process
from dpone_dagster.errors import DponeError
from dpone_dagster.governance.sql_guard import SqlAnalysis, analyse, require_reading, split
from dpone_dagster.ports import HookContext, HookDefinition, HookProvider, HookStep, SqlRunner

PHASES = ("pre_hook", "post_hook")
ENTRY_POINTS = "dpone.hook_providers"
MAX_FILE_BYTES = 1024 * 1024
_MAINTENANCE = ("source_maintenance", "target_maintenance")
# What of an error's details may become a metric: numbers and codes of engines.
_DETAILS = ("sqlstate", "number", "statement", "http_status", "expected", "found")

ProviderFactory = Callable[[HookContext], HookProvider]


# -------------------------------------------------------------------------------------------------- SQL bodies


class HasSql(Protocol):
    """A part of the manifest with ``sql`` or ``sql_file``: a hook, ``source.options.query``, a ``custom_sql`` gate."""

    @property
    def sql(self) -> str | None: ...  # noqa: D102
    @property
    def sql_file(self) -> str | None: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class FileDependency:
    """A file that a plan depends on: its path relative to the project's root, and the hash of its bytes."""

    path: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class SqlBody:
    """A SQL body as it was read.

    Attributes:
        sql: kept out of ``repr``.
        sha256: over the exact bytes of the file, or over the text in UTF-8.
        file: None for SQL that stands in the manifest.
    """

    sql: str
    sha256: str
    file: FileDependency | None

    def __repr__(self) -> str:
        return f"SqlBody(sha256={self.sha256!r}, file={self.file!r})"


def sql_dependency(part: HasSql, *, root: Path, manifest_dir: Path, where: str) -> SqlBody:
    """Read a SQL body from the manifest or from the file that it names; the one place that reads a ``sql_file``.

    Args:
        root: the project's folder, which no file may lie outside of.
        manifest_dir: the folder that ``sql_file`` is relative to.
        where: the field, for the sentence of a refusal.

    Raises:
        DponeError: DPONE_SQL_FILE.
    """
    if part.sql_file is None:
        assert part.sql is not None
        return SqlBody(sql=part.sql, sha256=sha256_bytes(part.sql.encode()), file=None)

    def refuse(why: str) -> DponeError:
        return DponeError("DPONE_SQL_FILE", f"{where}.sql_file {why}.", field=f"{where}.sql_file")

    if Path(part.sql_file).is_absolute():
        raise refuse("is an absolute path")
    try:
        base = root.resolve(strict=True)
        path = (manifest_dir / part.sql_file).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        raise refuse("does not exist") from None
    if not path.is_relative_to(base):
        raise refuse("lies outside the project once its links are followed")
    try:
        # The path is resolved: a link that appears at its end meanwhile is not followed, a pipe does not block.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise refuse("is no regular file")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise refuse(f"cannot be read ({type(error).__name__})") from None
    if len(data) > MAX_FILE_BYTES:
        raise refuse("is larger than 1 MiB")
    try:
        text = data.decode("utf-8-sig")  # editors on Windows begin files with a byte order mark
    except UnicodeDecodeError:
        raise refuse("is not UTF-8") from None
    digest = sha256_bytes(data)
    return SqlBody(
        sql=text,
        sha256=digest,
        file=FileDependency(path=path.relative_to(base).as_posix(), sha256=digest),
    )


# ---------------------------------------------------------------------------------------------------- planning


@dataclass(frozen=True, kw_only=True)
class HookPlan:
    """Every hook of a load, each phase in the order in which it runs.

    Attributes:
        dependencies: the SQL files that were read, by path.
    """

    pre: tuple[HookDefinition, ...] = ()
    post: tuple[HookDefinition, ...] = ()
    dependencies: tuple[FileDependency, ...] = ()

    def phase(self, name: str) -> tuple[HookDefinition, ...]:
        """Return the hooks of ``pre_hook`` or ``post_hook``."""
        return {"pre_hook": self.pre, "post_hook": self.post}[name]

    @property
    def types(self) -> frozenset[str]:
        """The types of provider that the hooks need."""
        return frozenset(definition.hook.type for definition in (*self.pre, *self.post))

    def as_json(self) -> dict[str, Any]:
        """Return what the digest covers: the hooks in order, hashes in place of SQL."""
        return {
            phase: [
                {
                    **{k: v for k, v in each.hook.as_json().items() if k not in ("sql", "sql_file")},
                    "sql_hash": each.sql_hash,
                    "statements": each.statements,
                    "mutates": each.mutates,
                }
                for each in self.phase(phase)
            ]
            for phase in PHASES
        }

    def digest(self) -> str:
        """Return the SHA-256 over ``as_json``."""
        return sha256_of(self.as_json())


def build_hooks(process: Process, *, root: Path, manifest_dir: Path, dialects: Mapping[str, str]) -> HookPlan:
    """Read, judge and order the hooks of a load; nothing runs.

    Args:
        dialects: connector (``source``, ``sink``) -> ``tsql``, ``postgres`` or ``clickhouse``, for each side that has
            an engine.

    Raises:
        DponeError: DPONE_HOOK_GRAPH, DPONE_SQL_FILE, DPONE_SQL_EMPTY, DPONE_SQL_UNREADABLE, DPONE_SQL_NOT_READING,
            DPONE_HOOK_MUTATES, DPONE_HOOK_RETRY, DPONE_HOOK_ENGINE_MISSING.
    """
    files: dict[str, FileDependency] = {}
    phases: dict[str, tuple[HookDefinition, ...]] = {}
    for phase in PHASES:
        declared: tuple[Hook, ...] = getattr(process.source.options.hooks, phase)
        ready = []
        for hook in _in_order(phase, declared):
            body = None
            if hook.sql is not None or hook.sql_file is not None:
                body = sql_dependency(hook, root=root, manifest_dir=manifest_dir, where=f"{phase}.{hook.id}")
                if body.file is not None:
                    files[body.file.path] = body.file
            ready.append(_define(phase, hook, body, dialects))
        phases[phase] = tuple(ready)
    return HookPlan(
        pre=phases["pre_hook"],
        post=phases["post_hook"],
        dependencies=tuple(files[path] for path in sorted(files)),
    )


def _in_order(phase: str, hooks: Sequence[Hook]) -> list[Hook]:
    """Order hooks by ``depends_on``; of those that are free, the one that is declared first comes first."""

    def refuse(why: str) -> DponeError:
        stop = "" if why.endswith("?") else "."
        return DponeError("DPONE_HOOK_GRAPH", f"{phase}: {why}{stop}", phase=phase)

    by_id: dict[str, Hook] = {}
    for hook in hooks:
        if hook.id in by_id:
            raise refuse(f"the id {hook.id} is used twice")
        by_id[hook.id] = hook
    for hook in hooks:
        for other in hook.depends_on:
            if other == hook.id:
                raise refuse(f"{hook.id} depends on itself")
            if other not in by_id:
                near = get_close_matches(other, by_id, 1)
                meant = f". Did you mean {near[0]}?" if near else ""
                raise refuse(f"{hook.id} depends on {other}, which is no hook of this phase{meant}".rstrip("."))
    try:
        TopologicalSorter({hook.id: hook.depends_on for hook in hooks}).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        raise refuse(f"a cycle: {' -> '.join(cycle)}") from None
    ordered: list[Hook] = []
    placed: set[str] = set()
    waiting = list(hooks)
    while waiting:
        free = next(hook for hook in waiting if placed.issuperset(hook.depends_on))
        waiting.remove(free)
        ordered.append(free)
        placed.add(free.id)
    return ordered


def _define(phase: str, hook: Hook, body: SqlBody | None, dialects: Mapping[str, str]) -> HookDefinition:
    name = f"{phase}.{hook.id}"
    analysis = None
    dialect = dialects.get(hook.connector)
    if body is not None:
        if dialect is None:
            raise DponeError(
                "DPONE_HOOK_ENGINE_MISSING", f"{name} has SQL for the {hook.connector}, which has no engine.", hook=name
            )
        analysis = _judge(name, hook, body, dialect)
    mutates = hook.mutates_source or (analysis is not None and analysis.mutates)
    retries = hook.retry_policy != "none"
    if retries and mutates and (hook.autocommit or dialect == "clickhouse"):
        why = "ClickHouse has no transactions" if dialect == "clickhouse" else "with autocommit: true it stays"
        raise DponeError("DPONE_HOOK_RETRY", f"{name} mutates, and what a failed try has done stays: {why}.", hook=name)
    if not hook.autocommit and body is not None:
        if dialect == "clickhouse":
            raise DponeError(
                "DPONE_HOOK_RETRY",
                f"{name} has autocommit: false, and ClickHouse has no transactions.",
                next_step="Leave autocommit out: ClickHouse takes every statement for itself.",
                hook=name,
            )
        if analysis is not None and analysis.controls_transaction:
            raise DponeError(
                "DPONE_HOOK_RETRY",
                f"{name} has autocommit: false and begins or ends a transaction by itself.",
                next_step="Remove BEGIN, COMMIT and the like from the SQL, or set autocommit: true.",
                hook=name,
            )
    return HookDefinition(
        hook=hook,
        phase=phase,
        sql=body.sql if body else None,
        sql_hash=body.sha256 if body else None,
        statements=analysis.statements if analysis else 0,
        mutates=mutates,
    )


def _judge(name: str, hook: Hook, body: SqlBody, dialect: str) -> SqlAnalysis:
    try:
        split(body.sql, dialect)
        analysis = analyse(body.sql, dialect=dialect)
        if hook.type == "data_quality_probe":
            require_reading(body.sql, dialect)
    except DponeError as error:
        raise DponeError(error.code, f"{name}: {error.sentence}", hook=name) from None
    if analysis.mutates and not hook.mutates_source and not (hook.kind in _MAINTENANCE and analysis.maintenance):
        # Plain OPTIMIZE and ANALYZE keep the rows, and a maintenance kind says in review what happens.
        raise DponeError("DPONE_HOOK_MUTATES", f"{name}: {'; '.join(analysis.reasons)}.", hook=name)
    return analysis


# --------------------------------------------------------------------------------------------------- providers


def providers(
    types: Iterable[str], *, context: HookContext, builtins: Mapping[str, ProviderFactory]
) -> dict[str, HookProvider]:
    """Make the providers of the given types.

    Args:
        builtins: those that ship, by type; they need no installed metadata, and nobody can replace them.

    Raises:
        DponeError: DPONE_PROVIDER_UNKNOWN, DPONE_PROVIDER_SHADOWED.
    """
    found: dict[str, EntryPoint] = {}
    for entry in _registered():
        ours = builtins.get(entry.name)
        known = found.get(entry.name)
        if ours is not None and entry.value != f"{ours.__module__}:{ours.__qualname__}":
            raise _shadowed(entry, "is the name of a provider that ships with dpone")
        if known is not None and known.value != entry.value:
            raise _shadowed(entry, "is registered twice")
        found[entry.name] = entry
    made: dict[str, HookProvider] = {}
    for type_ in sorted(set(types)):
        if type_ in builtins:
            made[type_] = builtins[type_](context)
        elif type_ in found:
            made[type_] = _load(found[type_], context)
        else:
            known_types = sorted({*builtins, *found})
            near = get_close_matches(type_, known_types, 1)
            meant = f" Did you mean {near[0]}?" if near else ""
            raise DponeError(
                "DPONE_PROVIDER_UNKNOWN",
                f"The hook type {type_} is unknown; known are {', '.join(known_types)}.{meant}",
                type=type_,
            )
    return made


@cache
def _registered() -> tuple[EntryPoint, ...]:
    # Reading the metadata of every installed package takes milliseconds, and a thousand manifests ask.
    return tuple(entry_points(group=ENTRY_POINTS))


def _load(entry: EntryPoint, context: HookContext) -> HookProvider:
    try:
        provider: HookProvider = entry.load()(context)
    except Exception as error:  # noqa: BLE001 - somebody else's code; its text stays out
        raise DponeError(
            "DPONE_PROVIDER_UNKNOWN",
            f"The provider of the hook type {entry.name} does not load ({type(error).__name__}).",
        ) from None
    return provider


def _shadowed(entry: EntryPoint, why: str) -> DponeError:
    package = entry.dist.name if entry.dist else "unknown"
    return DponeError("DPONE_PROVIDER_SHADOWED", f"The hook type {entry.name} of the package {package} {why}.")


# ----------------------------------------------------------------------------------------------------- running


def run_phase(
    hooks: Sequence[HookDefinition],
    *,
    runners: Mapping[str, SqlRunner],
    providers: Mapping[str, HookProvider],
    on_start: Callable[[HookDefinition], None] = lambda definition: None,
    on_step: Callable[[HookStep], None] = lambda step: None,
    only: str | None = None,
    dry_run: bool = False,
    done: Collection[str] = frozenset(),
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[HookStep, ...]:
    """Run the hooks of one phase in order, and stop at the first that fails; those after it are ``skipped``.

    A hook of kind ``notification`` may fail without stopping anything; ``blocking`` leaves it out too.

    Args:
        runners: connector -> engine.
        providers: type -> provider, from ``providers``.
        on_start: called before a hook is sent for the first time: from here on, until ``on_step``, it may have run.
        on_step: called with each step once it is known.
        only: the id of the one hook to run, whatever it depends on.
        dry_run: send nothing; every step is ``planned``.
        done: ids that succeeded in an earlier try of this load; they are ``skipped``.

    Returns:
        One step a hook in order; with ``only``, that hook's. A failed hook is a step, no exception.

    Raises:
        DponeError: DPONE_HOOK_UNKNOWN for an unknown ``only``.
    """
    chosen = [each for each in hooks if only is None or each.hook.id == only]
    if only is not None and not chosen:
        known = ", ".join(each.hook.id for each in hooks) or "none"
        raise DponeError("DPONE_HOOK_UNKNOWN", f"{only} is no hook of this phase; its hooks are: {known}.")
    steps: list[HookStep] = []
    stopped = False
    for definition in chosen:
        if dry_run:
            step = _step(definition, "planned")
        elif definition.hook.id in done:
            step = _step(definition, "skipped", metrics={"skipped_because": "succeeded_earlier"})
        elif stopped:
            step = _step(definition, "skipped", metrics={"skipped_because": "earlier_failure"})
        else:
            on_start(definition)
            step = _run(definition, providers[definition.hook.type], runners.get(definition.hook.connector), sleep)
            stopped = blocking((step,)) is not None
        on_step(step)
        steps.append(step)
    return tuple(steps)


def blocking(steps: Iterable[HookStep]) -> HookStep | None:
    """Return the first step that fails the load: ``failed`` or ``unknown``, and no notification."""
    return next((s for s in steps if s.status in ("failed", "unknown") and s.kind != "notification"), None)


def _run(
    definition: HookDefinition, provider: HookProvider, runner: SqlRunner | None, sleep: Callable[[float], None]
) -> HookStep:
    policy = definition.hook.retry_policy
    attempts, delay = (1, 0) if policy == "none" else (policy.attempts, policy.delay_seconds)
    begun = time.monotonic()
    for attempt in range(1, attempts + 1):
        try:
            metrics = provider.run(definition, runner=runner)
            step = _step(definition, "succeeded", metrics=dict(metrics))
        except DponeError as error:
            known = error.code != "DPONE_ENGINE_UNAVAILABLE"
            step = _step(
                definition,
                "failed" if known else "unknown",
                error_code=error.code,
                metrics={key: error.details[key] for key in _DETAILS if key in error.details},
            )
            if known and error.details.get("repeatable") is True and attempt < attempts:
                sleep(delay)
                continue
        except Exception:  # noqa: BLE001 - somebody else's provider broke; what it had sent by then nobody knows
            step = _step(definition, "unknown", error_code="DPONE_UNEXPECTED")
        return replace(step, attempts=attempt, seconds=round(time.monotonic() - begun, 6))
    raise AssertionError("a hook is tried at least once")


def _step(
    definition: HookDefinition,
    status: str,
    *,
    error_code: str | None = None,
    metrics: Mapping[str, int | str | None] | None = None,
) -> HookStep:
    hook = definition.hook
    return HookStep(
        id=hook.id,
        phase=definition.phase,
        kind=hook.kind,
        type=hook.type,
        connector=hook.connector,
        status=status,
        sql_hash=definition.sql_hash,
        error_code=error_code,
        lineage=hook.lineage.as_json(),
        metrics=metrics or {},
    )
