"""From a process of a manifest to a plan: every SQL file read and judged, hooks in order, one digest over it all."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpone_dagster import __version__
from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.declarations.manifest import CustomSqlGate, Gate, Process, SqlText
from dpone_dagster.errors import DponeError
from dpone_dagster.governance.hooks import HookPlan, build_hooks, sql_dependency
from dpone_dagster.governance.sql_guard import require_reading

SCHEMA = "dpone.load-plan.v1"


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """One process ready to run: what it says, with every SQL file read, and its digest.

    Attributes:
        manifest: the manifest's path from the repository root; empty for one that was handed over as data.
        process: as declared; ``resolved`` has SQL text in place of files.
        sha256: over everything that decides what the load does; SQL enters by its digest.
        document: what the digest is taken over; free of SQL.
    """

    manifest: str
    process: Process
    resolved: Process = field(repr=False)
    hooks: HookPlan = field(repr=False)
    sha256: str
    document: Mapping[str, Any] = field(repr=False)

    @property
    def target(self) -> str:
        """``database.table``."""
        return self.process.sink.table.dotted

    def command(self, verb: str) -> str:
        """Return the command line that does something with this process, for people."""
        manifest = self.manifest or "MANIFEST"
        return f"dpone {verb} {manifest} --selector {self.process.name}"

    @property
    def resources(self) -> tuple[str, ...]:
        """The locks that a load takes: its own and its target's, as a mart's publication does."""
        return (f"load:{self.process.name}", f"target:{self.target}")


def plan_load(
    process: Process, *, manifest: Path | None, root: Path, dialects: Mapping[str, str], shown: str = ""
) -> LoadPlan:
    """Plan one load; touches files and no engine.

    Args:
        process: the validated process.
        manifest: the manifest's file, beside which SQL files lie; None for Python data, beside ``root`` then.
        root: the project's folder, which no file may lie outside of.
        dialects: ``source`` and ``sink`` -> the dialect of that side's SQL; a Python asset has no source.
        shown: what messages call the manifest.

    Raises:
        DponeError: DPONE_SQL_FILE, DPONE_SQL_NOT_READING, DPONE_HOOK_*.
    """
    folder = manifest.parent if manifest else root
    hooks = build_hooks(process, root=root, manifest_dir=folder, dialects=dialects)
    hashes: dict[str, str] = {}
    files = {file.path: file.sha256 for file in hooks.dependencies}

    def read(part: SqlText | CustomSqlGate, *, where: str, side: str) -> str:
        try:
            body = sql_dependency(part, root=root, manifest_dir=folder, where=where)
            if side not in dialects:
                raise DponeError("DPONE_SQL_NOT_READING", "A Python asset has no engine that could run SQL.")
            require_reading(body.sql, dialects[side], relation=isinstance(part, CustomSqlGate))
        except DponeError as error:
            raise DponeError(error.code, f"{where}: {error.sentence}", **{**error.details, "field": where}) from None
        hashes[where] = body.sha256
        if body.file:
            files[body.file.path] = body.file.sha256
        return body.sql

    def gate_of(index: int, gate: Gate) -> Gate:
        if not isinstance(gate, CustomSqlGate):
            return gate
        # What is judged on the target's side are the staged rows, in the sink's engine.
        side = "source" if gate.side == "source" else "sink"
        sql = read(gate, where=f"quality.gates.{index}", side=side)
        return gate.model_copy(update={"sql": sql, "sql_file": None})

    source, quality = process.source, process.quality
    query = source.options.query
    if query is not None:
        text = SqlText(sql=read(query, where="source.options.query", side="source"))
        source = source.model_copy(update={"options": source.options.model_copy(update={"query": text})})
    quality = quality.model_copy(update={"gates": tuple(gate_of(i, gate) for i, gate in enumerate(quality.gates))})
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "dpone": __version__,
        "process": _without_sql(process.as_json()),
        "hooks": hooks.as_json(),
        "sql": hashes,
        "files": files,
        "dialects": dict(dialects),
    }
    return LoadPlan(
        manifest=shown,
        process=process,
        resolved=process.model_copy(update={"source": source, "quality": quality}),
        hooks=hooks,
        sha256=sha256_of(document),
        document=document,
    )


def _without_sql(value: Any) -> Any:
    """Leave SQL out of what is shown; the digests stand for it."""
    if isinstance(value, dict):
        return {name: _without_sql(each) for name, each in value.items() if name not in ("sql", "sql_file", "hooks")}
    return [_without_sql(each) for each in value] if isinstance(value, list) else value
