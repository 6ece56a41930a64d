"""dbt in process: the project parsed once, one `dbt build` for a workflow's day, and nothing that dbt said leaks.

dbt's traps, and what is done about each:

- Parsing costs seconds: the parsed manifest is kept as msgpack under ``DPONE_HOME``, in a folder named by the
  digest of the project's files and of dbt's versions. No day parses, and no importer of the planning form
  imports dbt at all.
- dbt logs row values (a unique violation's DETAIL has the key): every log is off, results become codes, and
  ``result.message`` goes nowhere else. The strategy's own refusals are one line of code, names and counts.
- dbt swallows interrupts and lets the SQL run on: it works in a thread of its own while this one waits, so that an
  interrupt arrives here, cancels the tagged SQL session and is told as DPONE_CANCELLED.
- ``dbtRunner`` is not thread-safe: one call at a time in a process.
- Every call leaves the adapter's flags once more in a list of dbt's; after a year of days that was half of a build.
"""

import hashlib
import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from dpone_dagster.contracts.mart import Column, MartSpec, Relation, Scope
from dpone_dagster.contracts.names import image_name, session_tag
from dpone_dagster.contracts.policy import Policy
from dpone_dagster.errors import CODES, DponeError
from dpone_dagster.faults import reach
from dpone_dagster.journal.port import OperationRecord
from dpone_dagster.planning.dbt_manifest import Selection, select
from dpone_dagster.ports import BuildResult, TestResult
from resources.journal.tables import IMAGE_SCHEMA
from resources.postgres import dialect

PARSED_DATABASE = "dpone"  # what a parsed project calls its database, wherever it then runs
PROJECT = Path(__file__).parent.parent / "assets" / "dbt"
PLATFORM = Path(__file__).parent.parent / "assets" / "dbt_platform"
_VERSIONED = ("dbt-core", "dbt-adapters", "dbt-common", "dbt-postgres")

# One line after dbt's own headline, written by the strategy: a code, then names and counts.
_REFUSAL = re.compile(r"(DPONE_[A-Z_]+)((?: (?:field|rows|side)=\w+)*)")
# Sentences that engine and dbt always word alike; nothing of them is passed on.
_KNOWN = (
    ("canceling statement due to statement timeout", "DPONE_STATEMENT_DEADLINE"),
    ("canceling statement due to user request", "DPONE_CANCELLED"),
    ("canceling statement due to lock timeout", "DPONE_MART_LOCKED"),
    ("deadlock detected", "DPONE_MART_LOCKED"),
    ("source and target schemas on this incremental model are out of sync", "DPONE_CONTRACT_DRIFT"),
    ("This model has an enforced contract that failed", "DPONE_CONTRACT_DRIFT"),
    ("server closed the connection unexpectedly", "DPONE_ENGINE_UNAVAILABLE"),
    ("terminating connection due to administrator command", "DPONE_ENGINE_UNAVAILABLE"),
    ("could not connect to server", "DPONE_ENGINE_UNAVAILABLE"),
    ("connection to server", "DPONE_ENGINE_UNAVAILABLE"),
)

_ONE_CALL = threading.Lock()


class DbtBuilder:
    """dbt for the embedded profile; implements ``BuilderPort``.

    Args:
        conninfo: libpq connection string of the SQL engine.
        home: the folder under ``DPONE_HOME`` that keeps parsed projects.
        project: the dbt project; its platform package is found where dbt_project.yml says.
        policy: deadlines.
    """

    def __init__(self, *, conninfo: str, home: Path, project: Path = PROJECT, policy: Policy | None = None) -> None:
        self._conninfo = conninfo
        self._home = home
        self._project = project
        self._policy = policy or Policy()
        self._packed: bytes | None = None

    # ------------------------------------------------------------------------------- the parsed project

    def manifest(self) -> dict[str, Any]:
        """Return dbt's manifest as JSON data, with the models compiled without a scope, for planning.

        Parses the project the first time (seconds); afterwards reads a file, without importing dbt.

        Raises:
            DponeError: DPONE_DBT_FAILED when the project does not parse or compile.
        """
        planning = self._folder() / "manifest.json"
        if not planning.is_file():
            self._prepare()
        loaded: dict[str, Any] = json.loads(planning.read_bytes())
        return loaded

    def _folder(self) -> Path:
        return self._home / project_digest(self._project)[:16]

    def _prepare(self) -> None:
        from dbt.cli.main import dbtRunner

        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        with (
            _ONE_CALL,
            self._environment("dpone-parse", database=PARSED_DATABASE),
            tempfile.TemporaryDirectory() as scratch,
        ):
            common = [*self._flags(Path(scratch))]
            parsed = dbtRunner().invoke(["parse", *common, "--no-partial-parse"])
            if not parsed.success:
                raise DponeError("DPONE_DBT_FAILED", f"The dbt project does not parse ({_kind(parsed.exception)}).")
            manifest: Any = parsed.result
            packed = manifest.to_msgpack()
            compiled: Any = dbtRunner(manifest=manifest).invoke(
                ["compile", *common, "--no-introspect", "--no-populate-cache"]
            )
            if not compiled.success:
                raise DponeError("DPONE_DBT_FAILED", f"The dbt project does not compile ({_kind(compiled.exception)}).")
            planning = manifest.writable_manifest().to_dict(omit_none=True)
            for result in compiled.result.results:
                planning["nodes"][result.node.unique_id]["compiled_code"] = result.node.compiled_code
            planning["metadata"] = {
                "adapter_type": planning["metadata"]["adapter_type"],
                "project_name": planning["metadata"]["project_name"],
                "project_sha256": "sha256:" + project_digest(self._project),
                **{name: version(name) for name in (*_VERSIONED, "psycopg2-binary")},
            }
            kept = ("metadata", "nodes", "sources", "macros", "unit_tests", "exposures", "metrics", "semantic_models")
            slim = {name: planning.get(name, {}) for name in kept}
        _write(folder / "manifest.msgpack", packed)
        # Keys unsorted: the columns of a contract are a list. Last, because its presence says that both are there.
        _write(folder / "manifest.json", json.dumps(slim, default=str).encode())

    # ---------------------------------------------------------------------------------------- one build

    def build(
        self,
        marts: Sequence[MartSpec],
        operations: Sequence[OperationRecord],
        scope: Scope,
        *,
        restore_from: dict[str, OperationRecord],
    ) -> BuildResult:
        """Run one `dbt build` of the marts' models and their own tests; see ``BuilderPort``.

        Raises:
            DponeError: DPONE_CANCELLED once the tagged SQL session is quiet; DPONE_COMMIT_UNKNOWN when it
                would not become quiet; DPONE_DBT_FAILED or DPONE_ENGINE_UNAVAILABLE when dbt told of no model.
        """
        planned = self.manifest()
        selection = select(planned, [mart.model_unique_id for mart in marts])
        worker_ids = {operation.worker_id for operation in operations}
        if len(worker_ids) != 1:
            raise DponeError("DPONE_FENCED", "The operations of one build belong to several workers.")
        tag = session_tag(worker_ids.pop())
        run = {
            "scope_start": f"{scope.start:%Y-%m-%d %H:%M:%S}",
            "scope_end": f"{scope.end:%Y-%m-%d %H:%M:%S}",
            "lock_seconds": min(self._policy.lock_wait_seconds, self._policy.statement_seconds),
            "statement_seconds": self._policy.statement_seconds,
            "models": {
                mart.model_unique_id: _model_vars(
                    mart,
                    operation,
                    scope,
                    restore_from.get(mart.name),
                    bounded=mart.model_unique_id in selection.bounded,
                )
                for mart, operation in zip(marts, _in_order(marts, operations), strict=True)
            },
        }
        with _ONE_CALL, self._environment(tag), tempfile.TemporaryDirectory() as scratch:
            return self._invoke(selection, run, tag, Path(scratch))

    def _invoke(self, selection: Selection, run: dict[str, Any], tag: str, scratch: Path) -> BuildResult:
        from dbt.cli.main import dbtRunner
        from dbt.contracts.graph.manifest import Manifest

        if self._packed is None:
            self._packed = (self._folder() / "manifest.msgpack").read_bytes()
        # A fresh one each time: dbt writes compiled code into it.
        manifest: Any = Manifest.from_msgpack(self._packed)
        database = str(conninfo_to_dict(self._conninfo).get("dbname") or "postgres")
        for node in (*manifest.nodes.values(), *manifest.sources.values()):
            node.database = database
            if node.relation_name:
                node.relation_name = node.relation_name.replace(f'"{PARSED_DATABASE}".', f'"{database}".', 1)
        manifest.build_flat_graph()
        watch = _Watch(models=frozenset(selection.models))
        arguments = ["build", *self._flags(scratch), "--select", *selection.selectors, "--indirect-selection", "empty"]
        outcome: list[Any] = []

        def work() -> None:
            runner = dbtRunner(manifest=manifest, callbacks=[watch.on_event])
            with _no_growth():
                outcome.append(runner.invoke(arguments, vars={"dpone": run}))

        thread = threading.Thread(target=work, name="dbt", daemon=True)
        with _interrupts(watch.cancelled):
            thread.start()
            self._await(thread, watch, tag)
        if watch.cancelled.is_set():
            raise DponeError("DPONE_CANCELLED", "The run was interrupted during dbt; its SQL session is quiet.")
        return _result(outcome[0], selection)

    def _await(self, thread: threading.Thread, watch: "_Watch", tag: str) -> None:
        """Wait for dbt; on an interrupt cancel its SQL until it has ended, whatever else is raised meanwhile."""
        while thread.is_alive() and not watch.cancelled.is_set():
            try:
                thread.join(0.05)
            except BaseException:  # noqa: BLE001 - Dagster's interrupt is one; told as DPONE_CANCELLED below
                watch.cancelled.set()
        if not watch.cancelled.is_set():
            return
        deadline = time.monotonic() + self._policy.quiet_seconds
        while True:
            try:
                busy = self._cancel_sessions(tag)
                thread.join(0.05)
            except psycopg.Error:
                # Without an answer nothing is known of the session; the thread may still end by itself.
                busy = 1
                thread.join(0.2)
            except BaseException:  # noqa: BLE001 - a second interrupt changes nothing: we are stopping already
                busy = 1
            if not thread.is_alive() and not busy:
                return
            if time.monotonic() > deadline:
                raise DponeError("DPONE_COMMIT_UNKNOWN", "The cancelled SQL session did not become quiet in time.")

    def _cancel_sessions(self, tag: str) -> int:
        """Cancel what sessions of this tag are doing; return how many are doing something."""
        with psycopg.connect(self._conninfo, autocommit=True, application_name="dpone-cancel") as connection:
            rows = connection.execute(
                """select pg_cancel_backend(pid) from pg_stat_activity
                   where application_name = %s and pid <> pg_backend_pid() and state <> 'idle'""",
                [tag],
            ).fetchall()
        return len(rows)

    # ------------------------------------------------------------------------------------------- plumbing

    def _flags(self, scratch: Path) -> Iterator[str]:
        for name, value in {
            "--project-dir": self._project,
            "--profiles-dir": self._project,
            "--target-path": scratch / "target",
            "--log-path": scratch / "logs",
            "--log-level": "none",
            "--log-level-file": "none",
            "--threads": 1,
        }.items():
            yield from (name, str(value))
        yield from (
            "--quiet",
            "--no-print",
            "--no-write-json",
            "--no-use-colors",
            "--no-version-check",
            "--no-send-anonymous-usage-stats",
        )

    @contextmanager
    def _environment(self, tag: str, *, database: str | None = None) -> Iterator[None]:
        """What profiles.yml reads, for one call; libpq's own variables stay as they are."""
        parts = conninfo_to_dict(self._conninfo)
        ours = {
            "DPONE_SQL_HOST": str(parts.get("host") or "localhost"),
            "DPONE_SQL_PORT": str(parts.get("port") or 5432),
            "DPONE_SQL_USER": str(parts.get("user") or "postgres"),
            "DPONE_SQL_DATABASE": database or str(parts.get("dbname") or "postgres"),
            "DBT_ENV_SECRET_DPONE_SQL_PASSWORD": str(parts.get("password") or ""),
            "DPONE_SQL_SESSION_TAG": tag,
        }
        earlier = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name, value in earlier.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def project_digest(project: Path) -> str:
    """Return the hex SHA-256 over the project's and the platform package's files and dbt's versions."""
    digest = hashlib.sha256("".join(f"{name}={version(name)}\n" for name in _VERSIONED).encode())
    for root in (project, PLATFORM):
        for path in sorted(root.rglob("*")):
            if path.is_file() and path.suffix in (".sql", ".yml", ".yaml", ".csv", ".md"):
                digest.update(f"{path.relative_to(root)}\n".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _model_vars(
    mart: MartSpec, operation: OperationRecord, scope: Scope, restore: OperationRecord | None, *, bounded: bool
) -> dict[str, Any]:
    """What the strategy needs of one model: names, the fence, and SQL that has its one definition in Python."""
    before, after = (image_name(operation.operation_id, side) for side in ("before", "after"))
    within = dialect.scope_predicate(mart.event_time, scope)
    event = next(column for column in mart.columns if column.name == mart.event_time)

    def digest_of(relation: Relation, where: str = "true") -> str:
        return dialect.set_digest_sql(mart.columns, dialect.relation_sql(relation), where)

    def image(name: str) -> Relation:
        return Relation(schema_name=IMAGE_SCHEMA, name=name)

    return {
        "operation_id": operation.operation_id,
        "operation_plan_sha256": operation.operation_plan_sha256,
        "workflow_execution_id": operation.workflow_execution_id,
        "epoch": operation.fencing_epoch,
        "worker_id": operation.worker_id,
        "guard": f"mart:{mart.name}",
        "lock_key": mutation_lock_key(mart.name),
        "bounded": bounded,
        "event_time": mart.event_time,
        "event_time_violation_sql": dialect.domain_violation_sql([event]),
        "key": list(mart.key),
        "columns": [column.name for column in mart.columns],
        "gates": list(_gates(mart)),
        "image_schema": IMAGE_SCHEMA,
        "before_name": before,
        "after_name": after,
        "before_image": dialect.relation_sql(image(before)),
        "after_image": dialect.relation_sql(image(after)),
        "scope_digest_sql": digest_of(mart.source, within),
        "before_digest_sql": digest_of(image(before)),
        "after_digest_sql": digest_of(image(after)),
        "restore": restore
        and {
            "operation_id": restore.operation_id,
            "before_image": dialect.relation_sql(image(image_name(restore.operation_id, "before"))),
        },
    }


def mutation_lock_key(mart: str) -> int:
    """The advisory lock that a mutation's transaction owns; another than the worker's own liveness lock."""
    return int.from_bytes(hashlib.sha256(f"mutation:{mart}".encode()).digest()[:8], signed=True)


def _gates(mart: MartSpec) -> Iterator[dict[str, str]]:
    # Lengths, precisions and integer widths need no gate: on_schema_change has compared the types by then.
    def gate(code: str, column: Column, violation: str) -> dict[str, str]:
        return {"code": code, "field": column.name, "violation": violation}

    for column in mart.columns:
        name = dialect.quote(column.name)
        if not column.nullable:
            code = "DPONE_KEY_NULL" if column.name in mart.key else "DPONE_VALUE_NULL"
            yield gate(code, column, f"{name} is null")
        violation = dialect.domain_violation_sql([column])
        if violation != "false":
            yield gate("DPONE_VALUE_OUTSIDE_DOMAIN", column, violation)


def _in_order(marts: Sequence[MartSpec], operations: Sequence[OperationRecord]) -> list[OperationRecord]:
    by_mart = {operation.mart: operation for operation in operations}
    return [by_mart[mart.name] for mart in marts]


# ------------------------------------------------------------------------------------ what dbt answered


def _result(answer: Any, selection: Selection) -> BuildResult:
    results = getattr(answer.result, "results", None)
    if results is None:
        code = next((code for known, code in _KNOWN if known in str(answer.exception)), "DPONE_DBT_FAILED")
        raise DponeError(code, f"dbt ended before it told of any model ({_kind(answer.exception)}).")
    statuses, codes, sentences, tests = {}, {}, {}, []
    for result in results:
        unique_id, status = result.node.unique_id, str(result.status)
        if unique_id in selection.models:
            statuses[unique_id] = status
            if status not in ("success", "skipped"):
                codes[unique_id], sentences[unique_id] = classify(result.message or "", result.node.name)
        else:
            tests.append(
                TestResult(unique_id=unique_id, name=result.node.name, status=status, failures=result.failures)
            )
    for unique_id in selection.models:
        statuses.setdefault(unique_id, "skipped")
    for unique_id in sorted(set(selection.tests) - {test.unique_id for test in tests}):
        name = unique_id.split(".")[2]
        tests.append(TestResult(unique_id=unique_id, name=name, status="skipped", failures=None))
    return BuildResult(
        invoked=True, model_status=statuses, tests=tuple(tests), error_codes=codes, error_sentences=sentences
    )


def classify(message: str, model: str) -> tuple[str, str]:
    """Turn dbt's message of a failed model into a code and a sentence; nothing else of it survives.

    Args:
        message: dbt's message. Its first line is dbt's headline; a refusal of the strategy is the second.
        model: the model's name.
    """
    lines = message.split("\n")
    for line in lines[:2]:
        if (match := _REFUSAL.fullmatch(line.strip())) and match[1] in CODES:
            facts = match[2].strip().replace(" ", ", ")
            return match[1], f"{CODES[match[1]].meaning} Model {model}{': ' + facts if facts else ''}."
    for known, code in _KNOWN:
        if known in message:
            return code, f"{CODES[code].meaning} Model {model}."
    return "DPONE_DBT_FAILED", f"dbt could not build model {model}."


def _kind(error: BaseException | None) -> str:
    return type(error).__name__ if error else "no reason given"


class _Watch:
    """Sees dbt's events on their way to nowhere: the commit's boundaries, and whether to go on at all."""

    def __init__(self, *, models: frozenset[str]) -> None:
        self.cancelled = threading.Event()
        self._models = models
        self._committing: set[str] = set()

    def on_event(self, event: Any) -> None:
        name = event.info.name
        if name not in ("SQLCommit", "SQLQueryStatus"):
            return
        node = event.data.node_info.unique_id
        if node not in self._models:
            return
        if name == "SQLCommit":
            if self.cancelled.is_set():
                # Raised in dbt's thread before it sends COMMIT: the adapter rolls back.
                raise DponeError("DPONE_CANCELLED", "The run was interrupted before the commit.")
            reach("mutate.before_commit")
            self._committing.add(node)
        elif node in self._committing:
            self._committing.discard(node)
            reach("mutate.after_commit")


@contextmanager
def _no_growth() -> Iterator[None]:
    """Take back what dbt's adapter adds to a list of its module at every call and walks at the next one."""
    from dbt.adapters.base import impl

    flags: list[Any] = getattr(impl, "DEFAULT_BASE_BEHAVIOR_FLAGS", [])
    known = len(flags)
    try:
        yield
    finally:
        del flags[known:]


@contextmanager
def _interrupts(cancelled: threading.Event) -> Iterator[None]:
    """While entered, SIGINT and SIGTERM set the event and then do what they did before; handlers come back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        cancelled.set()
        handler = earlier[number]
        if callable(handler):
            # An earlier handler may keep a flag, or raise: what it raises is told as DPONE_CANCELLED later on.
            with suppress(BaseException):
                handler(number, frame)

    for number in earlier:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _write(path: Path, data: bytes) -> None:
    handle, scratch = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(scratch, path)
