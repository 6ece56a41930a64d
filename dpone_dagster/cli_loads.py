"""Governed loads on the command line: `dpone plan`, `dpone run MANIFEST`, `dpone hooks`, `dpone guard`."""

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dpone_dagster.cancellation import Cancellation
from dpone_dagster.contracts.mart import Scope
from dpone_dagster.diagnostics import envelope, markdown, plan_json
from dpone_dagster.errors import DponeError
from dpone_dagster.governance.hooks import blocking, run_phase
from dpone_dagster.planning.load_plan import LoadPlan
from dpone_dagster.publication.load import LoadFailed, LoadReport, plain
from dpone_dagster.recovery.native_guard import Word
from dpone_dagster.terminal import (
    Bar,
    Format,
    FormatOption,
    exit_code,
    identity,
    number,
    out,
    pairs,
    print_json,
    progress_bar,
    refusals,
    told,
)

if TYPE_CHECKING:
    from resources.load_runtime import Loads

hooks = typer.Typer(no_args_is_help=True, help="Plan or run the hooks of a load manifest by themselves.")
guard = typer.Typer(no_args_is_help=True, help="See, and after looking clear, what stops a load from being retried.")

ManifestArgument = Annotated[Path, typer.Argument(help="The manifest's file.")]
SelectorOption = Annotated[str | None, typer.Option("--selector", help="The process, where there are several.")]


class Phase(StrEnum):
    """The two phases of hooks."""

    pre_hook = "pre_hook"
    post_hook = "post_hook"


def days(first: str, last: str) -> list[Scope]:
    """Return the UTC days of a range, both ends included.

    Raises:
        DponeError: DPONE_SCOPE_NOT_A_DAY, DPONE_RANGE_EMPTY.
    """
    begin, end = Scope.day(first), Scope.day(last)
    if end.start < begin.start:
        raise DponeError("DPONE_RANGE_EMPTY", "--to lies before --from.")
    return [Scope.day((begin.start + timedelta(days=n)).date()) for n in range((end.start - begin.start).days + 1)]


def _loads() -> "Loads":
    from checks.schema_gate import PanderaSchemaGate
    from resources.load_runtime import Loads
    from resources.runtime import Runtime

    return Loads(Runtime.open(), schema_gate=PanderaSchemaGate())


def _plan(manifest: Path, selector: str | None) -> LoadPlan:
    from resources.load_runtime import plan_manifest

    return plan_manifest(manifest, selector=selector)


def _plans(manifest: Path, selector: str | None) -> list[LoadPlan]:
    """One process, or all of them in the order of their dependencies."""
    from resources.load_runtime import plan as plan_process
    from resources.load_runtime import read_manifest

    loaded = read_manifest(manifest)
    chosen = [loaded.process(selector)] if selector else loaded.processes
    return [plan_process(loaded, process) for process in chosen]


# ------------------------------------------------------------------------------------------------------- plan


def plan(manifest: ManifestArgument, selector: SelectorOption = None, format_: FormatOption = Format.text) -> None:
    """Check a load manifest and say what it would do; asks no engine. Without a selector: every process of it."""
    with refusals(format_, as_json=_refused(manifest, selector, "")):
        plans = [plan_json(each) for each in _plans(manifest, selector)]
        if format_ is Format.json:
            print_json(plans[0] if len(plans) == 1 else {"manifest": manifest.name, "processes": plans})
            return
        for planned in plans:
            _print_plan(planned)


def _print_plan(planned: dict[str, Any]) -> None:
    source = planned["source"]
    pairs(
        f"{planned['process']}: {source['type']} {source['reads']} → {planned['target']}",
        {
            "reads": source["mode"] + (f" by {source['column']}" if source.get("column") else ""),
            "strategy": planned["strategy"],
            "finalize": planned["finalization"],
            "gates": ", ".join(f"{g['id']} ({g['severity']})" for g in planned["gates"]) or "none",
            "acceptance": _acceptance(planned["acceptance"]),
            **{
                phase: " → ".join(each["id"] for each in planned["hooks"][phase]) or "none"
                for phase in ("pre_hook", "post_hook")
            },
            "plan": planned["plan_sha256"],
        },
    )


def _acceptance(policy: dict[str, Any] | None) -> str:
    if policy is None or not policy["enabled"]:
        return "none"
    return f"{policy['mode']}: {', '.join(side for side, wanted in policy['capture'].items() if wanted)}"


# -------------------------------------------------------------------------------------------------------- run


@dataclass(kw_only=True)
class _Ran:
    """One process of a manifest, and what its runs came to: one, or one a day."""

    plan: LoadPlan
    run_id: str
    scopes: list[Scope | None]
    done: list[LoadReport] = field(default_factory=list)
    failure: DponeError | None = None


def run_manifest(
    manifest: Path, *, selector: str | None, from_: str | None, to: str | None, replay: bool, format_: Format
) -> None:
    """Run one process of a manifest, or all of them in order; each day of a range where one is loaded by day.

    The first process that fails stops the others.
    """
    with refusals(format_, as_json=_refused(manifest, selector, "")):
        plans = _plans(manifest, selector)
        daily = [each for each in plans if each.process.source.read.mode == "daily"]
        if daily and from_ is None:
            raise DponeError("DPONE_SCOPE_NOT_A_DAY", f"{daily[0].process.name} is loaded by day: give --from.")
        if not daily and (from_ is not None or to is not None):
            raise DponeError(
                "DPONE_SCOPE_NOT_A_DAY", f"{plans[0].process.name} is not loaded by day: leave --from out."
            )
        asked: list[Scope | None] = list(days(from_, to or from_)) if from_ is not None else []
        loads = _loads()
        ran: list[_Ran] = []
        for planned in plans:
            ran.append(_Ran(plan=planned, run_id=str(uuid.uuid4()), scopes=asked if planned in daily else [None]))
            _run_process(loads, ran[-1], replay=replay, quiet=format_ is not Format.text)
            if format_ is Format.text:
                _print_run(ran[-1])
            if ran[-1].failure:
                break
        if format_ is not Format.text:
            answers = [_answer(manifest, selector, each) for each in ran]
            for answer in answers if format_ is Format.markdown else ():
                out.print(markdown(answer), markup=False, highlight=False, soft_wrap=True)
            if format_ is Format.json:
                print_json(answers[0] if len(plans) == 1 else _of_several(manifest, answers, plans))
    if failure := ran[-1].failure:
        raise typer.Exit(exit_code(failure))


def _run_process(loads: "Loads", ran: _Ran, *, replay: bool, quiet: bool) -> None:
    name = ran.plan.process.name
    with Cancellation() as cancel, progress_bar(quiet=quiet) as progress:
        task = progress.add_task(name, total=len(ran.scopes), now="starting", moved="")
        for scope in ran.scopes:
            progress.update(task, description=f"{name} {scope.key if scope else ''}", moved="")
            try:
                cancel.check()
                ran.done.append(
                    loads.run(
                        ran.plan,
                        scope=scope,
                        identity=identity(ran.run_id),
                        replay=replay or scope is None,
                        progress=Bar(progress, task),
                    )
                )
            except Exception as error:  # noqa: BLE001 - the days before it are told all the same
                ran.failure = told(error)
                break
            progress.advance(task)


def _answer(manifest: Path, selector: str | None, ran: _Ran) -> dict[str, Any]:
    """The envelope of one process."""
    last = ran.done[-1] if ran.done and not ran.failure else None
    name = ran.plan.process.name
    answer = envelope(
        manifest=manifest.name, selector=selector or name, run_id=ran.run_id, report=last, error=ran.failure
    )
    answer["process"] = name
    if ran.scopes[0] is not None:
        keys = [report.scope.key for report in ran.done if report.scope]
        answer["days"] = [
            {"day": r.scope.key, "action": r.action, "rows": r.staged_rows, "load_id": r.load_id}
            for r in ran.done
            if r.scope
        ]
        answer["not_loaded"] = [scope.key for scope in ran.scopes if scope and scope.key not in keys]
    return answer


def _of_several(manifest: Path, answers: list[dict[str, Any]], plans: list[LoadPlan]) -> dict[str, Any]:
    """One object for all processes of a manifest; ``result`` is that of the last that ran."""
    ran = [answer["process"] for answer in answers]
    return {
        **answers[-1],
        "process": "",
        "selector": "",
        "processes": answers,
        "not_run": [planned.process.name for planned in plans if planned.process.name not in ran],
    }


def _refused(manifest: Path, selector: str | None, run_id: str) -> Callable[[DponeError], dict[str, Any]]:
    return lambda error: envelope(
        manifest=manifest.name, selector=selector or "", run_id=run_id, report=None, error=error
    )


def _print_run(ran: _Ran) -> None:
    if len(ran.scopes) > 1:
        _print_days(ran.done)
    elif ran.done:
        print_report(ran.done[0])
    failure = ran.failure
    if failure is None:
        return
    where = ran.scopes[len(ran.done)]
    out.print(
        f"[bold red]Stopped{f' at {where.key}' if where else ''}:[/] {failure.code}  {failure.sentence}",
        highlight=False,
    )
    if isinstance(failure, LoadFailed):
        print_report(failure.report)
    out.print(f"[dim]Next:[/] {failure.next_step}", highlight=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        numeric = name in ("rows", "seconds", "rows/s", "replaced", "NULLs", "distinct", "extracted", "in target")
        table.add_column(name, justify="right" if numeric else "left", header_style="bold dim", no_wrap=True)
    return table


def _print_days(done: list[LoadReport]) -> None:
    table = _table("day", "result", "rows", "replaced", "gates", "acceptance", "seconds")
    for report in done:
        table.add_row(
            report.scope.key if report.scope else "",
            f"[{'dim' if report.action == 'skipped' else 'green'}]{report.action}[/]",
            number(report.staged_rows),
            number(report.finalized.rows_replaced) if report.finalized else "",
            _tally(report),
            report.acceptance_status or "",
            f"{report.seconds:.2f}",
        )
    if done:
        out.print(table)


def _tally(report: LoadReport) -> str:
    if report.gates is None or not report.gates.results:
        return ""
    passed = sum(gate.status == "passed" for gate in report.gates.results)
    total = len(report.gates.results)
    return f"[{'green' if passed == total else 'yellow'}]{passed}/{total}[/]"


def print_status(loads: list[dict[str, Any]]) -> None:
    """Print one line a process: its last load, what is accepted, and what needs attention."""
    table = _table("load", "target", "last", "rows", "accepted", "needs attention")
    for load in loads:
        accepted = load["watermark"] or (f"{load['accepted_at']:%Y-%m-%d %H:%M}" if load["accepted_at"] else "-")
        if load["days_loaded"]:
            accepted = f"{load['days_loaded']} days, {load['first_day']} to {load['last_day']}"
        trouble = f"[yellow]guard: {load['guard']}[/]" if load["guard"] else ""
        failed = load["failed_days"]
        troubles = [trouble] if trouble else []
        if load["state"] != "COMPLETE" and not failed:
            troubles.append(f"[red]{load['failure_code'] or load['state']}[/]")
        troubles += [f"[red]{each['day']} {each['failure_code'] or each['state']}[/]" for each in failed[:5]]
        trouble = "\n".join(troubles + ([f"… {len(failed) - 5} more"] if len(failed) > 5 else []))
        table.add_row(
            f"[bold]{load['process']}[/]",
            load["target"],
            load["day"] or f"{load['at']:%Y-%m-%d %H:%M}",
            number(load["rows"]),
            accepted,
            trouble or "[green]nothing[/]",
        )
    out.print(table)


def print_story(told: dict[str, Any]) -> None:
    """Print the loads of a process, newest first."""
    out.print(f"[bold]{told['process']}{' ' + told['day'] if told['day'] else ''}[/]", highlight=False)
    if told["guard"]:
        out.print(
            f"  [yellow]guard: {told['guard']}[/]; `dpone guard show` says what the engine proves.", highlight=False
        )
    if not told["loads"]:
        out.print("  Never loaded.")
    for load in told["loads"]:
        colour = {"COMPLETE": "green", "FAILED_PRE_COMMIT": "red"}.get(load["state"], "yellow")
        out.print(
            f"\n[bold]{load['load_id'][:8]}[/]  {load['day'] or ''} {load['admitted_at']:%Y-%m-%d %H:%M:%S}  "
            f"{load['strategy']} → {load['target']}  [{colour}]{load['state']}[/]",
            highlight=False,
        )
        if load["failure_code"] and load["state"] != "COMPLETE":
            out.print(f"  [red]{load['failure_code']}[/]  {load['failure_sentence']}", highlight=False)
        if load["rows"] is not None:
            out.print(f"  {load['rows']:,} rows staged", highlight=False)
        for gate in load["gates"]:
            mark = {"passed": "[green]✓[/]", "failed": "[red]✗[/]"}.get(gate["status"], "[yellow]![/]")
            out.print(f"  {mark} gate {gate['gate_id']}  [dim]{gate['message']}[/]", highlight=False)
        states = [change["state"] + (f" ({change['guard']})" if change["guard"] else "") for change in load["changes"]]
        out.print(f"  [dim]{' → '.join(state for state, _ in groupby(states))}[/]", highlight=False)
        for step in load["steps"]:
            out.print(f"  {step['phase']:<27} {step['seconds']:>8.3f} s", highlight=False)


_STATES = {"unchanged": "unchanged", "changed": "changed", "unknown": "not known"}


_COUNTERS = ("extracted_rows", "staged_rows", "projected_rows", "final_rows", "inserted_rows")


def print_report(report: LoadReport) -> None:
    """Print what one load came to: steps, hooks, gates, acceptance, and what a reader of the target sees."""
    day = f" {report.scope.key}" if report.scope else ""
    ended = "[red]failed[/]" if report.boundary else f"[green]{report.action}[/]"
    out.print(
        f"[bold]{report.process}{day}[/] → {report.target}  {report.strategy}, {report.finalization}  {ended}",
        highlight=False,
    )
    steps = _table("step", "status", "rows", "rows/s", "seconds")
    for step in (each for each in report.steps if each.kind != "runtime_decision"):
        rows = next((step.details[name] for name in _COUNTERS if isinstance(step.details.get(name), int)), None)
        rate = f"{rows / step.seconds:,.0f}" if rows and step.seconds else ""
        mark = "[green]✓[/]" if step.status == "completed" else "[red]✗[/]"
        steps.add_row(step.phase, mark, number(rows), rate, f"{step.seconds:.3f}")
    if report.steps:
        out.print(steps)
    for hook in report.hooks:
        mark = {"succeeded": "[green]✓[/]", "skipped": "[dim]–[/]"}.get(hook.status, "[red]✗[/]")
        sql = f", SQL {hook.sql_hash[7:19]}" if hook.sql_hash else ""
        out.print(f"  {mark} {hook.phase} {hook.id}  [dim]{hook.kind}{sql}, {hook.seconds:.3f} s[/]", highlight=False)
    for gate in report.gates.results if report.gates else ():
        mark = "[green]✓[/]" if gate.status == "passed" else "[red]✗[/]" if gate.blocks else "[yellow]![/]"
        numbers = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in gate.metrics.items()
                            if isinstance(value, int) and not isinstance(value, bool))  # fmt: skip
        out.print(f"  {mark} gate {gate.gate_id}  [dim]{gate.message or numbers}[/]", highlight=False)
    _print_acceptance(report)
    out.print(f"  Target: {_STATES[report.target_state]}", highlight=False)


def _print_acceptance(report: LoadReport) -> None:
    measured = [snapshot for snapshot in report.acceptance if snapshot.status == "succeeded"]
    if not report.acceptance:
        return
    out.print(f"  acceptance: {report.acceptance_status or 'not compared'}", highlight=False)
    table = _table("  side", "rows", "NULLs", "distinct")
    for snapshot in measured:
        table.add_row(
            f"  {snapshot.side}",
            number(snapshot.row_count),
            number(sum(snapshot.null_counts.values())) if snapshot.null_counts else "",
            number(sum(snapshot.distinct_counts.values())) if snapshot.distinct_counts else "",
        )
    if measured:
        out.print(table)
    for snapshot in report.acceptance:
        if snapshot.status != "succeeded":
            out.print(f"  [yellow]![/] {snapshot.side} not measured ({snapshot.error_code})", highlight=False)
    for difference in report.differences:
        out.print(
            f"  [yellow]![/] {difference['metric']} {difference['column'] or ''}: {difference['side']} "
            f"{difference['count']}, {difference['other_side']} {difference['other_count']}",
            highlight=False,
        )


# ------------------------------------------------------------------------------------------------------ hooks


@hooks.command("execute")
def execute(
    manifest: ManifestArgument,
    phase: Annotated[Phase, typer.Option("--phase", help="Which hooks.")],
    hook_id: Annotated[str | None, typer.Option("--hook-id", help="Only this one, whatever it depends on.")] = None,
    selector: SelectorOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Send nothing; say what would run.")] = False,
    format_: FormatOption = Format.text,
    output: Annotated[Path | None, typer.Option("--output", help="Also write the JSON answer to this file.")] = None,
) -> None:
    """Plan or run one phase of hooks, or one hook. The answer has digests in place of SQL."""
    run_id = str(uuid.uuid4())
    answer: dict[str, Any] = {}
    with refusals(format_, as_json=_refused(manifest, selector, run_id)):
        planned = _plan(manifest, selector)
        if output is not None:
            _writable(output)
        started = time.monotonic()
        if dry_run:
            steps = run_phase(planned.hooks.phase(phase), runners={}, providers={}, only=hook_id, dry_run=True)
        else:
            steps = _loads().run_hooks(planned, phase, hook_id=hook_id, dry_run=False, run_id=run_id)

        failed = blocking(steps)
        answer = {
            "kind": "dpone.hooks.execution.v1",
            "manifest": manifest.name,
            "process": planned.process.name,
            "phase": str(phase),
            "run_id": run_id,
            "dry_run": dry_run,
            "plan_sha256": planned.sha256,
            "passed": failed is None,
            "seconds": round(time.monotonic() - started, 3),
            "hooks": [plain(step.__dict__) for step in steps],
        }
        if output is not None:
            output.write_text(json.dumps(answer, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if format_ is Format.json:
            print_json(answer)
        else:
            table = _table("hook", "kind", "connector", "status", "seconds", "SQL")
            for step in steps:
                table.add_row(
                    step.id, step.kind, step.connector, step.status, f"{step.seconds:.3f}", (step.sql_hash or "")[7:19]
                )
            out.print(table)
    if not answer["passed"]:
        raise typer.Exit(1)


def _writable(output: Path) -> None:
    """Make sure, before anything runs, that the answer can be kept."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise DponeError(
            "DPONE_OUTPUT_UNWRITABLE", f"--output cannot be written ({type(error).__name__}); nothing was run."
        ) from None


# ------------------------------------------------------------------------------------------------------ guard


@guard.command("show")
def guard_show(
    manifest: ManifestArgument, selector: SelectorOption = None, format_: FormatOption = Format.text
) -> None:
    """Say why a load is not retried, and what the engine proves about its target."""
    with refusals(format_):
        view = _loads().guard(_plan(manifest, selector))
        if format_ is Format.json:
            print_json({"guard": view.as_json() if view else None})
        elif view is None:
            out.print("No guard: the load may just be run.")
        else:
            pairs(f"{view.process} → {view.target}", {k: v for k, v in view.as_json().items() if v is not None})


@guard.command("clear")
def guard_clear(
    manifest: ManifestArgument,
    reason: Annotated[str, typer.Option("--reason", help="Why; it is kept in the journal with your login.")],
    selector: SelectorOption = None,
    outcome: Annotated[
        Word | None, typer.Option("--outcome", help="Your word, where the engine proves nothing.")
    ] = None,
    format_: FormatOption = Format.text,
) -> None:
    """Clear a guard after target and checkpoint have been looked at; the next run goes on from there."""
    with refusals(format_):
        view = _loads().clear_guard(_plan(manifest, selector), identity=identity(), reason=reason, word=outcome)
        print_json({"cleared": view.as_json()}) if format_ is Format.json else out.print(
            f"Cleared. The load was {view.proven if view.proven != 'nothing' else outcome}; run it again."
        )
