"""The two routes of a manifest's load through the lifecycle (``publication.lifecycle``): staged, and straight in.

Before ``finalize`` the route is guarded (``armed``), so that a process that dies there leaves a sign that no automatic
retry passes; the guard goes with the checkpoint, which moves last.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from dpone_dagster.cancellation import Cancellation
from dpone_dagster.contracts.loads import AcceptanceSide, AcceptanceSnapshot, LoadGateReport
from dpone_dagster.contracts.mart import Scope
from dpone_dagster.declarations.manifest import Acceptance, Process
from dpone_dagster.errors import DponeError, unexpected
from dpone_dagster.faults import reach
from dpone_dagster.governance import acceptance
from dpone_dagster.governance.acceptance import LoadPath
from dpone_dagster.governance.audit import audit_enabled
from dpone_dagster.governance.gate_runner import run_gates
from dpone_dagster.governance.hooks import blocking, run_phase
from dpone_dagster.journal.graph import State
from dpone_dagster.journal.port import GuardStatus, Lease, LoadRecord, RunIdentity
from dpone_dagster.planning.load_plan import LoadPlan
from dpone_dagster.ports import AuditStep, FinalizeOutcome, HookContext, HookStep, ProbePort, SourceSession
from dpone_dagster.publication.ahead import AheadProbe
from dpone_dagster.publication.lifecycle import raise_in_place_of
from dpone_dagster.publication.load import (
    Boundary,
    LoadFailed,
    LoadPorts,
    LoadReport,
    as_admitted,
    close,
    columns_of,
    places_of,
    plain,
    query_prefix,
    staged_of,
    summary,
    window_of,
)

# ------------------------------------------------------------------------------------------------ the attempt


class Attempt:
    """One worker's attempt: what every step needs, and what comes before a route exists."""

    def __init__(
        self,
        ports: LoadPorts,
        plan: LoadPlan,
        identity: RunIdentity,
        lease: Lease,
        cancel: Cancellation,
        elsewhere: frozenset[str],
        started: datetime,
    ) -> None:
        self.ports, self.plan, self.identity = ports, plan, identity
        self.lease, self.cancel, self.elsewhere = lease, cancel, elsewhere
        self.started = started

    @property
    def process(self) -> Process:
        """The process, with every SQL file read."""
        return self.plan.resolved

    def prefix(self, load: LoadRecord) -> str:
        """What every ClickHouse query id of a load starts with, and this worker's part of it."""
        return f"{query_prefix(load.load_id)}{self.identity.worker_id[:8]}-"

    def boundary(self) -> None:
        """Pass a safe boundary: stop here if interrupted or no longer the holder."""
        self.cancel.check()
        self.lease.check()

    def report(self, *, load: LoadRecord | None, scope: Scope | None, action: str = "loaded") -> LoadReport:
        """An empty report of this attempt; what an earlier run left has its own target and strategy."""
        governance = self.process.sink.options.load_governance
        return LoadReport(
            process=self.process.name,
            target=load.target if load else self.plan.target,
            strategy=load.strategy if load else self.process.sink.strategy,
            finalization=governance.finalization_phase,
            run_id=self.identity.run_id,
            load_id=load.load_id if load else None,
            scope=scope,
            action=action,
        )


# ------------------------------------------------------------------------------------------------- the routes


_ACCEPTANCE = frozenset({"DPONE_ACCEPTANCE_FAILED", "DPONE_ACCEPTANCE_UNAVAILABLE"})


@dataclass
class _Counters:
    """What a step reports of itself: ``rows``, ``bytes`` and whatever else is a number, a name or a digest."""

    details: dict[str, Any] = field(default_factory=dict)
    status: str = "completed"


class LoadRoute(ABC):
    """What both routes share: hooks, acceptance, evidence, and closing; see ``publication.lifecycle.Route``."""

    staged: bool

    def __init__(self, attempt: Attempt, load: LoadRecord, report: LoadReport) -> None:
        self._attempt, self._load, self.report = attempt, load, report
        self._ports, self._plan, self._process = attempt.ports, attempt.plan, as_admitted(attempt.process, load)
        self._journal = attempt.ports.journal
        self._columns, self._window = columns_of(load), window_of(load)
        self._session: SourceSession | None = None
        self._closing: Any = None
        self._reading: Iterator[pa.RecordBatch] | None = None
        self._source: ProbePort | None = None
        self._boundary: Boundary = "pre_hook"
        self._told = 0
        self._audit = audit_enabled(attempt.process)
        self._clock = time.monotonic()
        if load.facts.get("acceptance"):
            report.acceptance = [AcceptanceSnapshot.parse(each) for each in load.facts["acceptance"]]
        if load.facts.get("gates"):
            report.gates = LoadGateReport.parse(load.facts["gates"])
        report.staged_rows = load.facts.get("staged_rows", 0)
        report.extracted_rows = load.facts.get("extracted_rows", 0)

    # ------------------------------------------------------------------------------------------- evidence

    @contextmanager
    def _step(self, name: str, *, kind: str = "step") -> Iterator[_Counters]:
        """Time one step; it becomes a row of the audit table whether it succeeds or fails."""
        self._ports.progress.phase(self._process.name, name)
        counters, started, clock = _Counters(), datetime.now(UTC), time.monotonic()
        details = counters.details
        try:
            yield counters
        except BaseException as error:
            counters.status = "failed"
            details["error_code"] = error.code if isinstance(error, DponeError) else type(error).__name__
            raise
        finally:
            self.report.steps.append(
                AuditStep(
                    step_id=self._step_id(name),
                    kind=kind,
                    phase=name,
                    status=counters.status,
                    started_at=started,
                    seconds=time.monotonic() - clock,
                    details=details,
                )
            )

    def _step_id(self, name: str) -> str:
        """Name a step in the order of steps; a later run of the same load must not write over the earlier one's."""
        number = f"{len(self.report.steps) + 1:02d}_{name}"
        return number if self.report.action == "loaded" else f"again{self._load.fencing_epoch}_{number}"

    def _decide(self, decision: Mapping[str, Any]) -> None:
        """Keep one automatic decision; published as a row of its own where the manifest lets it."""
        self.report.decisions.append(decision)
        if self._process.sink.options.load_governance.decision_audit.persist:
            with self._step(str(decision["decision"]), kind="runtime_decision") as step:
                step.details.update(decision)

    def _flush(self) -> None:
        """Write the steps that the audit tables do not have yet."""
        if self._audit and self._told < len(self.report.steps):
            new = self.report.steps[self._told :]
            self._ports.audit.steps(self._process, self._load.load_id, new)
            self._told += len(new)

    def _keep(self, **facts: Any) -> None:
        self._load = self._journal.record(self._load, facts)

    # ---------------------------------------------------------------------------------------------- hooks

    def pre_hooks(self) -> None:
        """Step 4; the audit record begins here."""
        self._attempt.boundary()
        if self._audit:
            self._ports.audit.begin(
                self._process,
                load_id=self._load.load_id,
                run_id=self._load.run_id,
                started_at=self._attempt.started,
                plan_sha256=self._plan.sha256,
            )
        self._run_hooks(
            "pre_hook", code="DPONE_PRE_HOOK_FAILED", consequence=", so nothing was extracted.", done=frozenset()
        )
        reach("load.pre_hooks")

    def post_hooks(self) -> None:
        """Step 14. A failure leaves the load COMMITTED_INCOMPLETE: the next run runs only the hooks."""
        self._boundary = "post_commit"
        self._run_hooks(
            "post_hook",
            code="DPONE_POST_HOOK_FAILED",
            consequence=". The load itself is committed and accepted.",
            done=frozenset(self._load.facts.get("post_hooks_done", ())),
        )

    def _run_hooks(self, phase: str, *, code: str, consequence: str, done: frozenset[str]) -> None:
        """Run the hooks of one phase; refuse with the code where one did not succeed."""
        hooks = self._plan.hooks.pre if phase == "pre_hook" else self._plan.hooks.post
        here = tuple(h for h in hooks if f"{phase}.{h.hook.id}" not in self._attempt.elsewhere)
        elsewhere = [h for h in hooks if h not in here]
        if not here and not (elsewhere and phase == "pre_hook"):
            return
        with self._step(phase) as step:
            if elsewhere:
                # Before the load they have run, or it would not be here; after it their own steps tell of them.
                step.details["separate_tasks"] = [{"id": h.hook.id, "sql_hash": h.sql_hash} for h in elsewhere]
            context = HookContext(process=self._process.name, run_id=self._load.run_id)
            steps = run_phase(
                here,
                runners=self._ports.runners(self._process),
                providers=self._ports.hook_providers(frozenset(h.hook.type for h in here), context),
                # Should the process end before the hook does: it may have run.
                on_start=lambda hook: self._keep(hook_sent=f"{phase}.{hook.hook.id}"),
                on_step=self._ended,
                done=done,
            )
            self.report.hooks += steps
            step.details["hooks"] = [plain(asdict(each)) for each in steps]
            if failed := blocking(steps):
                raise DponeError(
                    code,
                    f"The {phase.replace('_', '-')} {failed.id} {_ended(failed)}{consequence}",
                    hook=failed.id,
                    status=failed.status,
                    error_code=failed.error_code,
                )

    def _ended(self, hook: HookStep) -> None:
        self._ports.progress.note(f"{hook.phase} {hook.id}: {hook.status}")
        if hook.phase == "post_hook" and hook.status == "succeeded":
            # At once: whatever stops the load from here on, this hook is not run again for it.
            self._keep(post_hooks_done=sorted({*self._load.facts.get("post_hooks_done", ()), hook.id}))

    # ---------------------------------------------------------------------------------------- the source

    def extract(self) -> None:
        """Step 5: settle columns and window, and begin the snapshot that is read and measured."""
        self._boundary = "pre_finalize"
        self._attempt.boundary()
        with self._step("extract") as step:
            above = self._read_up_to()
            self._closing = self._ports.source(self._process).open(self._process, scope=self._load.scope, above=above)
            session: SourceSession = self._closing.__enter__()
            self._session, self._columns, self._window = session, session.columns, session.window
            self._source = session.probe
            if session.snapshot:
                self._source = AheadProbe(session.probe, self._process, check=self._attempt.cancel.check)
            self.report.window, self.report.source_snapshot = session.window, session.snapshot
            step.details.update(schema_width=len(self._columns), source_snapshot=session.snapshot)
        self._keep(
            columns=[column.as_json() for column in self._columns],
            window={
                "above": self._window.above,
                "up_to": self._window.up_to,
                "column": self._process.source.read.column,
            },
            places=places_of(self._process),
        )
        if not session.snapshot:
            self._decide({"decision": "source_snapshot", "chosen": "none", "reason": "the engine has no snapshot"})
        if self._process.source.read.mode == "watermark":
            chosen = "first_read" if above is None else "empty" if self._window.up_to == above else "above_checkpoint"
            reason = "there is no checkpoint" if above is None else "what the source holds above the checkpoint"
            self._decide({"decision": "source_scan", "chosen": chosen, "reason": reason})

    def _read_up_to(self) -> str | None:
        """The checkpoint; refused where its value is one of another column, or of rows that went elsewhere."""
        checkpoint, read = self._journal.checkpoint(self._process.name), self._process.source.read
        if checkpoint is None or checkpoint.watermark is None or read.mode != "watermark":
            return None
        earlier = self._journal.load(checkpoint.load_id)
        column = earlier.facts.get("window", {}).get("column", read.column) if earlier else read.column
        if column != read.column or (earlier and earlier.target != self._plan.target):
            raise DponeError(
                "DPONE_CHECKPOINT_FOREIGN",
                f"{self._process.name} has a checkpoint of {column}, loaded into"
                f" {earlier.target if earlier else self._plan.target}, and now reads by {read.column} into"
                f" {self._plan.target}.",
            )
        return checkpoint.watermark

    def _close_source(self) -> None:
        """Let all of the source go. Each part is forgotten once it is closed, so a close can be repeated."""
        if (end := getattr(self._reading, "close", None)) is not None:
            with suppress(DponeError):  # a stream that was broken off; its session goes with it
                end()
        self._reading = None
        if isinstance(self._source, AheadProbe) and self._session is not None:
            self._source.stop(self._session.interrupt)
        self._session = None
        if self._closing is not None:
            self._closing.__exit__(None, None, None)
        self._closing = None

    def _batches(self) -> Iterator[pa.RecordBatch]:
        assert self._session is not None
        # Kept, so that a reader that is broken off is closed with the source and not whenever it is collected.
        self._reading = self._session.read()
        for batch in self._timed(self._reading):
            self._attempt.boundary()
            self.report.extracted_rows += batch.num_rows
            self.report.extracted_bytes += batch.nbytes
            self._ports.progress.rows(self.report.extracted_rows)
            yield batch

    def _timed(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Keep the time that is spent waiting for the source, apart from what the sink does with its rows."""
        started, spent = datetime.now(UTC), 0.0
        while True:
            clock = time.monotonic()
            batch = next(batches, None)
            spent += time.monotonic() - clock
            if batch is None:
                break
            yield batch
        details = {"extracted_rows": self.report.extracted_rows, "extracted_bytes": self.report.extracted_bytes}
        self.report.steps.append(
            AuditStep(
                step_id=self._step_id("source_export"),
                kind="substep",  # its time is part of stage's
                phase="source_export",
                status="completed",
                started_at=started,
                seconds=spent,
                details=details,
            )
        )

    # ------------------------------------------------------------------------------------- gates, acceptance

    def _judge(self, staged: Callable[[], ProbePort]) -> None:
        """Evaluate every gate, then refuse if one of them blocks."""
        process = self._process
        with self._step("gates") as step:
            step.details["row_count"] = self.report.staged_rows
            report = run_gates(
                process.quality.gates,
                source=self._source,
                staged=staged(),
                now=self._attempt.started,
                scope_end=self._load.scope.end if self._load.scope else None,
                unique_key=process.sink.unique_key,
                providers=self._ports.gate_providers,
                schema_gate=self._ports.schema_gate,
                skipped=process.quality.skipped_checks,
                check=self._attempt.cancel.check,
            )
            self.report.gates = report
            step.details.update(passed=report.passed, results=[r.as_json() for r in report.results])
            self._keep(gates=report.as_json())
            reach("load.gated")
            if blocked := [r.gate_id for r in report.results if r.blocks]:
                raise DponeError("DPONE_QUALITY_GATES_FAILED", f"Blocking gates failed: {', '.join(blocked)}.")

    @property
    def _policy(self) -> Acceptance | None:
        """The acceptance policy in force; None where nothing is measured."""
        policy = self._process.quality.acceptance
        if policy is None or not policy.enabled:
            return None
        return policy.model_copy(update={"mode": "warn_only"}) if self._seen(_ACCEPTANCE) else policy

    def _seen(self, codes: Collection[str]) -> bool:
        """Whether an operator cleared the guard that a failure of this kind had left: what they saw stops nobody."""
        return "guard_cleared_by" in self._load.facts and self._load.facts.get("failure_code") in codes

    def _validate_acceptance(self, path: acceptance.LoadPath) -> None:
        """Refuse before the target changes what cannot be measured after it."""
        policy, process = self._policy, self._process
        if policy is None:
            return
        # Only the lineage columns tell the rows of one append from another's.
        blind = process.sink.strategy == "append" and not process.sink.options.lineage.enabled
        probed = [side for side in acceptance.SIDES if not (blind and side == "target")]
        self.report.acceptance += acceptance.validate(policy, path=path, columns=self._columns, probed=probed)

    def _measure(
        self, path: acceptance.LoadPath, probes: Mapping[AcceptanceSide, Callable[[], ProbePort]]
    ) -> list[AcceptanceSnapshot]:
        """Measure the requested sides that can be measured, then compare all that is known."""
        policy = self._policy
        if policy is None:
            return []
        told = {snapshot.side for snapshot in self.report.acceptance}
        taken = [
            acceptance.capture(side, probe, policy, path=path, columns=self._columns)
            for side, probe in probes.items()
            if side in acceptance.requested_sides(policy) and side not in told
        ]
        self.report.acceptance += taken
        self._keep(acceptance=[snapshot.as_json() for snapshot in self.report.acceptance])
        differences = acceptance.compare(self.report.acceptance, policy, same_rows_in_target=True)
        warned = bool(differences) or any(s.status == "warning" for s in self.report.acceptance)
        self.report.acceptance_status = "warned" if warned else "passed"
        self.report.differences = [difference.as_json() for difference in differences]
        return taken

    # -------------------------------------------------------------------------------------- the way forward

    def persist(self) -> None:
        """Step 13: the checkpoint moves last, and with it the guard goes."""
        if self._load.facts.get("state_persisted"):
            return
        reach("load.before_checkpoint")
        with self._step("persist_state"):
            # What the load itself has read, whatever the manifest says by now; no other read has a window.
            watermark = self._window.up_to or self._window.above
            self._load = self._journal.persist_state(self._load, watermark=watermark, rows=self.report.staged_rows)
        reach("load.after_checkpoint")

    def complete(self) -> LoadReport:
        """Step 15."""
        self.report.target_state = "changed"
        self.report.seconds = time.monotonic() - self._clock
        self._finish_audit("completed")
        self._load = self._journal.transition(
            self._load, State.COMPLETE, facts={"report": summary(self.report)}, guard=None
        )
        return self.report

    def _arm(self) -> None:
        """Make the intent and the guard durable. Nothing has been sent yet: what fails here fails before finalize."""
        try:
            self._attempt.lease.check()
            self._load = self._journal.transition(self._load, State.COMMITTING, guard=GuardStatus.ARMED)
        except BaseException as error:  # noqa: BLE001 - raised again, or what is to be raised in its place
            raise_in_place_of(error, self.failed_before_finalize(error))
        self._boundary = "finalize"

    def _finish_audit(self, status: str, **details: Any) -> None:
        if not self._audit:
            return
        self._flush()
        self._ports.audit.end(
            self._process,
            load_id=self._load.load_id,
            status=status,
            finished_at=datetime.now(UTC),
            details={**details, **plain(summary(self.report))},
        )

    # ------------------------------------------------------------------------------------------- failures

    def failed_before_finalize(self, error: BaseException) -> BaseException:
        """Abort: staging is gone, target and checkpoint are as they were."""
        refusal = error if isinstance(error, DponeError) else unexpected(error)
        closed = False
        try:
            self._close_source()
            self._attempt.lease.check()  # whoever was overtaken must not clear up after its successor
            self._load = close(
                self._ports,
                self._process,
                self._load,
                boundary=self._boundary,
                code=refusal.code,
                sentence=refusal.sentence,
            )
            closed = True
            self._governance_failed(refusal, self._boundary)
            self._finish_audit("failed", error_code=refusal.code, boundary=self._boundary)
        except Exception as second:  # noqa: BLE001
            # The first reason is the one to tell; the second only says what stayed behind.
            what = "The evidence is incomplete" if closed else "The load stays open for the next run"
            self._ports.progress.note(f"{what} ({_code(second)}).")
        if not isinstance(error, Exception):
            return error
        again = (
            "Target and checkpoint are as they were, staging is gone." if closed else "The next run settles it first."
        )
        return self._failure(
            refusal, boundary=self._boundary, state="unchanged", next_step=f"{refusal.next_step} {again}"
        )

    def _governance_failed(self, refusal: DponeError, boundary: str) -> None:
        with self._step("load_governance_failed") as step:
            step.status = "failed"
            step.details.update(boundary=boundary, error_code=refusal.code)
            if side := refusal.details.get("side"):
                step.details["side"] = side

    def failed_after_finalize(self, error: BaseException) -> BaseException:
        """The target has changed and stays so; what is missing is finished forward."""
        refusal = error if isinstance(error, DponeError) else unexpected(error)
        boundary: Boundary = "legacy_post_finalize" if self._boundary == "legacy_post_finalize" else "post_commit"
        if self.report.action != "loaded" and refusal.code in _ACCEPTANCE:
            boundary = "resume_validation"
        persisted = bool(self._load.facts.get("state_persisted"))
        try:
            self._close_source()
            self._attempt.lease.check()
            guard = None if persisted else GuardStatus.CHECKPOINT_INCOMPLETE
            facts = {"boundary": boundary, "failure_code": refusal.code, "failure_sentence": refusal.sentence}
            if self._load.state is State.TARGET_COMMITTED:
                self._load = self._journal.transition(self._load, State.COMMITTED_INCOMPLETE, facts=facts, guard=guard)
            else:
                # Cleared once, and it failed once more: nobody loads past it before somebody has looked again.
                self._load = self._journal.record(self._load, facts, guard=guard)
            self._governance_failed(refusal, boundary)
            self._finish_audit("post_commit_failed", error_code=refusal.code, boundary=boundary)
        except Exception as second:  # noqa: BLE001 - as above
            self._ports.progress.note(f"The evidence is incomplete ({_code(second)}).")
        if not isinstance(error, Exception):
            return error
        next_step = (
            f"{refusal.next_step} The load is committed and its checkpoint has moved; the next run runs only the hooks "
            "that are left."
            if persisted
            else f"{refusal.next_step} The target has changed and is not rolled back; the checkpoint has not moved. Run"
            f" `{self._plan.command('guard show')}`, compare, then `{self._plan.command('guard clear')} --reason ..`."
        )
        return self._failure(refusal, boundary=boundary, state="changed", next_step=next_step)

    def _unknown(self, error: BaseException) -> BaseException:
        """Finalize ended in an exception: staging stays, and nobody claims success or failure."""
        refusal = error if isinstance(error, DponeError) else unexpected(error)
        try:
            if self._load.state is State.COMMITTING:
                self._load = self._journal.transition(
                    self._load,
                    State.COMMIT_UNKNOWN,
                    facts={"boundary": "finalize", "failure_code": refusal.code, "failure_sentence": refusal.sentence},
                    guard=GuardStatus.TARGET_OUTCOME_UNKNOWN,
                )
            self._finish_audit("unknown", error_code=refusal.code, boundary="finalize")
        except Exception as second:  # noqa: BLE001 - as above
            what = "The evidence is incomplete" if self._load.state is State.COMMIT_UNKNOWN else "The guard stays armed"
            self._ports.progress.note(f"{what} ({_code(second)}).")
        if not isinstance(error, Exception):
            return error
        told = DponeError(
            "DPONE_TARGET_OUTCOME_UNKNOWN",
            f"Finalizing {self._plan.target} was stopped by {refusal.code}; whether the target changed is not proven.",
            cause=refusal.code,
        )
        return self._failure(
            told,
            boundary="finalize",
            state="unknown",
            next_step=f"Run `{self._plan.command('guard show')}`: it reads what the engine proves. Then"
            f" `{self._plan.command('guard clear')} --reason ..`. Do not run the load before.",
        )

    def _failure(self, refusal: DponeError, *, boundary: Boundary, state: str, next_step: str) -> LoadFailed:
        self.report.boundary, self.report.error_code, self.report.target_state = boundary, refusal.code, state
        self.report.seconds = time.monotonic() - self._clock
        failure = LoadFailed(refusal.code, refusal.sentence, next_step=next_step, **refusal.details)
        failure.report = self.report
        return failure

    # Each route has these of its own.
    @abstractmethod
    def stage(self) -> None:
        """See ``lifecycle.Route``."""

    @abstractmethod
    def project(self) -> None:
        """See ``lifecycle.Route``."""

    @abstractmethod
    def gate(self) -> None:
        """See ``lifecycle.Route``."""

    @abstractmethod
    def accept_before(self) -> None:
        """See ``lifecycle.Route``."""

    @abstractmethod
    def prepare(self) -> None:
        """See ``lifecycle.Route``."""

    @abstractmethod
    def finalize(self) -> None:
        """See ``lifecycle.Route``."""

    @abstractmethod
    def accept_after(self) -> None:
        """See ``lifecycle.Route``."""

    @abstractmethod
    def clean(self) -> None:
        """See ``lifecycle.Route``."""


class StagedRoute(LoadRoute):
    """A sink that stages: the target changes only after gates and acceptance (``pre_finalize``)."""

    staged = True

    def __init__(self, attempt: Attempt, load: LoadRecord, report: LoadReport) -> None:
        super().__init__(attempt, load, report)
        self._sink = attempt.ports.sink(attempt.prefix(load))
        self._staged = staged_of(load)

    def stage(self) -> None:
        """Step 6: stream the rows into staging."""
        self._attempt.boundary()
        with self._step("stage") as step:
            self._staged, rows = self._sink.stage(
                self._process,
                self._columns,
                self._batches(),
                load_id=self._load.load_id,
                epoch=self._load.fencing_epoch,
            )
            self.report.staged_rows = rows
            step.details.update(
                staged_rows=rows,
                # Arrow's size of the rows on their way; what the engine keeps is compressed.
                staged_bytes=self.report.extracted_bytes,
            )
        self._keep(staged=plain(asdict(self._staged)), staged_rows=rows, extracted_rows=self.report.extracted_rows)
        reach("load.staged")

    def project(self) -> None:
        """Step 7: lineage columns, in the engine's own SQL."""
        self._attempt.boundary()
        lineage = self._process.sink.options.lineage
        with self._step("project") as step:
            self._staged = self._sink.project(
                self._process, self._columns, self._staged, loaded_at=self._attempt.started
            )
            step.details.update(lineage=lineage.enabled)
            if lineage.enabled:
                step.details.update(projected_rows=self.report.staged_rows)
        self._keep(staged=plain(asdict(self._staged)))
        for decision in self._staged.facts.get("decisions", ()):
            self._decide(decision)

    def gate(self) -> None:
        """Step 8."""
        self._attempt.boundary()
        self._judge(lambda: self._sink.staged_probe(self._process, self._columns, self._staged))

    def accept_before(self) -> None:
        """Step 9: source and staging."""
        self._attempt.boundary()
        if self._policy is not None:
            source = self._source
            assert source is not None
            with self._step("acceptance_before_finalize") as step:
                self._validate_acceptance(LoadPath.STAGED)
                taken = self._measure(
                    LoadPath.STAGED,
                    {
                        "source": lambda: source,
                        "staged": lambda: self._sink.staged_probe(self._process, self._columns, self._staged),
                    },
                )
                step.details["snapshots"] = [snapshot.as_json() for snapshot in taken]
        self._close_source()

    def prepare(self) -> None:
        """Build what is swapped in; PREPARED says that every check passed."""
        self._attempt.boundary()
        with self._step("prepare") as step:
            self._staged = self._sink.prepare(self._process, self._columns, self._staged, self._window)
            self._keep(staged=plain(asdict(self._staged)))
            self._attempt.boundary()
            self._sink.recheck(self._process, self._staged)
            known = {name: value for name, value in self._staged.facts.items() if type(value) is int}
            step.details.update(known, row_count=self.report.staged_rows)
        if chosen := self._staged.facts.get("finalizer"):
            first = "there is no target yet" if chosen == "rename" else f"the strategy is {self._process.sink.strategy}"
            self._decide({"decision": "finalizer", "chosen": chosen, "reason": first})
        self._flush()
        self._load = self._journal.transition(self._load, State.PREPARED, guard=None)
        reach("load.prepared")

    def finalize(self) -> None:
        """Step 10: the intent and the guard are durable first; then the engine says what came of it."""
        self._arm()
        try:
            with self._step("finalize") as step:
                self._attempt.lease.check()
                reach("load.before_finalize")
                self._sink.finalize(self._process, self._staged)
                reach("load.after_finalize")
                if self._sink.outcome(self._process, self._staged) is not FinalizeOutcome.COMMITTED:
                    raise DponeError(
                        "DPONE_TARGET_OUTCOME_UNKNOWN", f"The engine does not prove that {self._plan.target} changed."
                    )
                step.details.update(strategy=self._process.sink.strategy, final_rows=self.report.staged_rows)
            self._load = self._journal.transition(
                self._load, State.TARGET_COMMITTED, guard=GuardStatus.CHECKPOINT_INCOMPLETE
            )
        except BaseException as error:  # noqa: BLE001 - raised again, or what is to be raised in its place
            raise_in_place_of(error, self._unknown(error))
        reach("load.committed")

    def accept_after(self) -> None:
        """Step 11: the target; finalized evidence."""
        self._boundary = "post_commit"
        if self._load.facts.get("state_persisted"):
            return
        with self._step("finalized") as step:
            self.report.finalized = self._sink.report(self._process, self._columns, self._staged)
            step.details.update(plain(asdict(self.report.finalized)))
        if self._policy is not None:
            # Without the source at hand, this is a validation of what an earlier run has committed.
            path = LoadPath.STAGED if self.report.action == "loaded" else LoadPath.RESUME_ONLY
            with self._step("acceptance_after_finalize") as step:
                taken = self._measure(
                    path,
                    {
                        "target": lambda: self._sink.target_probe(
                            self._process, self._columns, self._staged, self._window
                        )
                    },
                )
                step.details["snapshots"] = [snapshot.as_json() for snapshot in taken]
        self._flush()

    def clean(self) -> None:
        """Step 12."""
        if self._load.facts.get("state_persisted"):
            return
        with self._step("clean") as step:
            step.details["row_count"] = self.report.staged_rows
            self._sink.cleanup(self._process, self._staged)
        reach("load.cleaned")


class LegacyRoute(LoadRoute):
    """A sink without staging: ``finalize`` writes into the target, and the gates judge it afterwards."""

    staged = False

    def __init__(self, attempt: Attempt, load: LoadRecord, report: LoadReport) -> None:
        super().__init__(attempt, load, report)
        self._sink = attempt.ports.legacy(attempt.prefix(load))

    def stage(self) -> None:
        """There is no staging."""

    def project(self) -> None:
        """Lineage columns are written with the rows."""

    def gate(self) -> None:
        """Step 8, late: readers have seen the rows already."""
        if self._load.facts.get("state_persisted") or self._seen({"DPONE_QUALITY_GATES_FAILED"}):
            return
        self._boundary = "legacy_post_finalize"
        gates = self._process.quality.gates
        if not gates and not self._process.quality.skipped_checks:
            return
        source = self._source
        if any(getattr(gate, "side", "target") == "target" for gate in gates):
            self._judge(self._target_probe)
        elif source is not None:
            self._judge(lambda: source)  # no gate asks the target
        else:
            raise DponeError(
                "DPONE_QUALITY_GATES_FAILED", "The gates ask the source, whose snapshot went with the run that read it."
            )

    def accept_before(self) -> None:
        """Step 9: what is asked for must be there, and the source is measured."""
        self._attempt.boundary()
        if self._policy is not None:
            source = self._source
            assert source is not None
            with self._step("acceptance_before_finalize") as step:
                self._validate_acceptance(LoadPath.LEGACY)
                taken = self._measure(LoadPath.LEGACY, {"source": lambda: source})
                step.details["snapshots"] = [snapshot.as_json() for snapshot in taken]

    def prepare(self) -> None:
        """Refuse a target that does not fit, before anything is written."""
        with self._step("prepare"):
            self._sink.check(self._process, self._columns)
        self._decide(
            {"decision": "governance_finalization", "chosen": "legacy_post_finalize", "reason": "the manifest says so"}
        )
        self._flush()
        self._load = self._journal.transition(self._load, State.PREPARED, guard=None)

    def finalize(self) -> None:
        """Step 10: the target changes as the rows arrive."""
        self._arm()
        try:
            with self._step("finalize") as step:
                reach("load.before_finalize")
                self.report.finalized = self._sink.load(
                    self._process,
                    self._columns,
                    self._batches(),
                    load_id=self._load.load_id,
                    loaded_at=self._attempt.started,
                )
                reach("load.after_finalize")
                self.report.staged_rows = self.report.finalized.rows
                step.details.update(
                    governance_finalization="legacy_post_finalize",
                    inserted_rows=self.report.finalized.rows,
                    extracted_rows=self.report.extracted_rows,
                    extracted_bytes=self.report.extracted_bytes,
                )
            self._load = self._journal.transition(
                self._load,
                State.TARGET_COMMITTED,
                facts={"staged_rows": self.report.staged_rows, "extracted_rows": self.report.extracted_rows},
                guard=GuardStatus.CHECKPOINT_INCOMPLETE,
            )
        except BaseException as error:  # noqa: BLE001 - as above
            failure = self._unknown(error)
            self._close_source()
            raise_in_place_of(error, failure)

    def accept_after(self) -> None:
        """Step 11: the target."""
        if self._load.facts.get("state_persisted"):
            return
        self._boundary = "post_commit"
        if self._policy is not None:
            path = LoadPath.LEGACY if self.report.action == "loaded" else LoadPath.RESUME_ONLY
            with self._step("acceptance_after_finalize") as step:
                taken = self._measure(path, {"target": self._target_probe})
                step.details["snapshots"] = [snapshot.as_json() for snapshot in taken]
        self._flush()

    def clean(self) -> None:
        """Step 12: only the source is left to let go."""
        self._close_source()

    def _target_probe(self) -> ProbePort:
        return self._sink.target_probe(self._process, self._columns, self._window, load_id=self._load.load_id)


def route(attempt: Attempt, load: LoadRecord, *, action: str, staged: bool) -> LoadRoute:
    """Return the route that a load takes, or has taken."""
    report = attempt.report(load=load, scope=load.scope, action=action)
    report.finalization = "pre_finalize" if staged else "legacy_post_finalize"
    return (StagedRoute if staged else LegacyRoute)(attempt, load, report)


def _code(error: Exception) -> str:
    return error.code if isinstance(error, DponeError) else unexpected(error).sentence


def _ended(step: HookStep) -> str:
    if step.status == "unknown":
        return f"was sent and its engine was lost ({step.error_code}): it may have run"
    # The engine's own text may quote rows; its code, and the SQL run by hand, say the rest.
    names = {"sqlstate": "SQLSTATE", "number": "ClickHouse error", "statement": "statement", "value": "value"}
    told = [f"{name} {step.metrics[key]}" for key, name in names.items() if step.metrics.get(key) is not None]
    return f"failed ({', '.join([str(step.error_code), *told])})"
