"""The ``dpone`` command: run a range of days, and read what the journal knows. A composition root."""

import sys
import time
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.table import Table

from dpone_dagster import cli_loads, report
from dpone_dagster.cancellation import Cancellation
from dpone_dagster.contracts.mart import Scope
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.facts import Facts
from dpone_dagster.publication.attempt import MartResult, PublicationFailed
from dpone_dagster.terminal import (
    CANCELLED,
    Bar,
    Format,
    FormatOption,
    err,
    exit_code,
    identity,
    number,
    out,
    pairs,
    plain,
    print_json,
    progress_bar,
    refusals,
    told,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Publish data marts from SQL Server to ClickHouse, one UTC day at a time, and read what the journal knows.",
)
baseline = typer.Typer(no_args_is_help=True, help="Adopt or create the pair of tables that a mart publishes between.")
app.add_typer(baseline, name="baseline")
app.add_typer(cli_loads.hooks, name="hooks")
app.add_typer(cli_loads.guard, name="guard")
app.command()(cli_loads.plan)

MartArgument = Annotated[str, typer.Argument(help="Name of the mart; `dpone status` lists them.")]
DayArgument = Annotated[str, typer.Argument(help="UTC day, YYYY-MM-DD.")]


def main() -> None:
    """Run the command; whatever happens, ``--format json`` puts one JSON object on stdout."""
    wanted = ("json" in sys.argv and "--format" in sys.argv) or "--format=json" in sys.argv
    try:
        code = app(standalone_mode=False)
    except typer.Exit as done:
        code = done.exit_code
    except (typer.Abort, KeyboardInterrupt):
        code = _refuse(DponeError("DPONE_CANCELLED", "The command was interrupted."), wanted, CANCELLED)
    except click.ClickException as error:
        if not wanted:
            error.show()
            sys.exit(error.exit_code)
        code = _refuse(DponeError("DPONE_USAGE", error.format_message()), wanted, error.exit_code)
    sys.exit(code)


def _refuse(error: DponeError, as_json: bool, code: int) -> int:
    if as_json:
        print_json({"passed": False, "result": {"status": "error", **error.as_json()}})
    else:
        err.print(f"[bold red]{error.code}[/]  {error.sentence}", highlight=False)
    return code


def _refusals(format_: Format) -> AbstractContextManager[None]:
    def as_json(error: DponeError) -> dict[str, Any]:
        return {"passed": False, "result": {"status": "error", **error.as_json(), **_gates(error)}}

    return refusals(format_, as_json=as_json)


def _gates(error: DponeError) -> dict[str, Any]:
    if not isinstance(error, PublicationFailed):
        return {}
    return {"quality_gates": {mart: gates.as_json() for mart, gates in error.gates.items()}}


# --------------------------------------------------------------------------------------------- engines


@app.command()
def up(format_: FormatOption = Format.text) -> None:
    """Start the embedded engines (PostgreSQL standing in for SQL Server, and ClickHouse) and migrate the journal."""
    from resources.runtime import Runtime

    with _refusals(format_):
        runtime = Runtime.open()
        facts = runtime.describe()
        print_json(facts) if format_ is Format.json else pairs("Embedded engines are up", facts)


@app.command()
def down(format_: FormatOption = Format.text) -> None:
    """Stop the embedded engines of this DPONE_HOME; their data stay."""
    from resources.embedded.engines import down as stop
    from resources.embedded.home import resolve

    with _refusals(format_):
        stopped = stop(resolve())
        if format_ is Format.json:
            print_json({"stopped": stopped})
        else:
            out.print(f"Stopped {' and '.join(stopped)}." if stopped else "Nothing was running.")


# ------------------------------------------------------------------------------------------- baselines


@baseline.command("create")
def baseline_create(mart: MartArgument, format_: FormatOption = Format.text) -> None:
    """Create the pair of tables empty, from the dbt contract and the type mapping, and adopt it."""
    from resources.runtime import Runtime

    with _refusals(format_):
        runtime = Runtime.open()
        facts = runtime.create_baseline(mart, identity=identity())
        print_json(facts) if format_ is Format.json else pairs(f"Baseline of {mart} created", facts)


@baseline.command("adopt")
def baseline_adopt(mart: MartArgument, format_: FormatOption = Format.text) -> None:
    """Prove that an existing pair of tables agrees, value by value, and record it."""
    from resources.runtime import Runtime

    with _refusals(format_):
        runtime = Runtime.open()
        facts = runtime.adopt_baseline(mart, identity=identity())
        print_json(facts) if format_ is Format.json else pairs(f"Baseline of {mart} adopted", facts)


# ------------------------------------------------------------------------------------------------- run


@app.command()
def run(
    manifest: Annotated[Path | None, typer.Argument(help="A load manifest; or give --mart.")] = None,
    mart: Annotated[str | None, typer.Option("--mart", help="The mart; its whole workflow is published.")] = None,
    selector: cli_loads.SelectorOption = None,
    from_: Annotated[str | None, typer.Option("--from", help="First UTC day, YYYY-MM-DD.")] = None,
    to: Annotated[str | None, typer.Option("--to", help="Last UTC day, inclusive; default the first.")] = None,
    replay: Annotated[bool, typer.Option("--replay", help="Publish or load days again that are done.")] = False,
    format_: FormatOption = Format.text,
) -> None:
    """Publish a mart's days, or run a manifest's load, in order and in one process; done days are skipped.

    The range stops at the first day that does not publish; running the same command again goes on from there.
    """
    if manifest is not None and mart is None:
        cli_loads.run_manifest(manifest, selector=selector, from_=from_, to=to, replay=replay, format_=format_)
        return
    if mart is None or manifest is not None or selector is not None:
        raise typer.BadParameter("give either a manifest, or --mart with --from")
    if from_ is None:
        raise typer.BadParameter("--mart needs --from")
    _run_mart(mart, from_, to or from_, replay=replay, format_=format_)


def _run_mart(mart: str, from_: str, to: str, *, replay: bool, format_: Format) -> None:
    from resources.runtime import Runtime

    with _refusals(format_):
        days = cli_loads.days(from_, to)
        runtime = Runtime.open()
        runtime.mart(mart)
        rows: list[dict[str, Any]] = []
        failure: DponeError | None = None
        quiet = format_ is Format.json
        with (
            # A day whose commit had begun is finished; the interrupt then ends the range before the next one.
            Cancellation() as cancel,
            progress_bar(quiet=quiet) as progress,
        ):
            task = progress.add_task(mart, total=len(days), now="starting", moved="")
            runtime.progress = Bar(progress, task)
            for scope in days:
                progress.update(task, description=f"{mart} {scope.key}", moved="")
                started = time.monotonic()
                try:
                    cancel.check()
                    results = runtime.publish(mart, scope, identity=identity(), replay=replay)
                except Exception as error:  # noqa: BLE001 - the days before it are told all the same
                    failure = told(error)
                    break
                rows += [_row(r, time.monotonic() - started) for r in results.values()]
                progress.advance(task)
        _print_run(rows, failure, mart=mart, days=days, format_=format_)
    if failure:
        raise typer.Exit(exit_code(failure))


def _row(result: MartResult, seconds: float) -> dict[str, Any]:
    operation = result.operation
    facts = Facts.of(operation)
    return {
        "mart": operation.mart,
        "day": operation.scope.key,
        "action": result.action,
        "state": str(operation.state),
        "mode": operation.mode,
        "revision": operation.revision,
        "rows": facts.after.rows if facts.after else None,
        "inserted_rows": facts.inserted_rows,
        "updated_rows": facts.updated_rows,
        "kept_rows": _kept(facts),
        "gates": None if result.gates is None else {g.gate_id: g.status for g in result.gates.results},
        "dbt_tests": {t.name: t.status for t in result.tests},
        "after_image_sha256": facts.after.digest.sha256 if facts.after else None,
        "operation_id": operation.operation_id,
        "seconds": round(seconds, 3),
    }


def _kept(facts: Facts) -> int | None:
    """Rows of the day that the model no longer yields; a mart keeps them (``ignore_missing``)."""
    if facts.after is None or facts.source_rows is None:
        return None
    return facts.after.rows - facts.source_rows


def _print_run(
    rows: list[dict[str, Any]], failure: DponeError | None, *, mart: str, days: list[Scope], format_: Format
) -> None:
    done = {r["day"] for r in rows}
    not_done = [s.key for s in days if s.key not in done]
    if format_ is Format.json:
        result: dict[str, Any] = {
            "status": "error" if failure else "success",
            "days": rows,
            "not_published": not_done,
        }
        if failure:
            result |= {**failure.as_json(), **_gates(failure)}
        print_json({"mart": mart, "passed": failure is None, "result": result})
        return
    several = len({r["mart"] for r in rows}) > 1
    table = Table(title=f"{mart}: {days[0].key} to {days[-1].key}", title_justify="left", box=None, pad_edge=False)
    kept = any(r["kept_rows"] for r in rows if r["action"] != "skipped")
    names = ["day", *(["mart"] if several else []), "result", "rows", "inserted", "updated"]
    names += [*(["kept"] if kept else []), "gates", "tests", "seconds"]
    # The digest is a nicety for wide terminals; `dpone explain` has it in full.
    names += ["digest of the day"] if out.width >= 100 else []
    for name in names:
        numeric = name in ("rows", "inserted", "updated", "kept", "seconds")
        table.add_column(name, justify="right" if numeric else "left", header_style="bold dim", no_wrap=True)
    colours = {"published": "green", "finished": "yellow", "skipped": "dim"}
    for row in rows:
        moved = row["action"] != "skipped"
        cells = {
            "day": row["day"],
            "mart": row["mart"],
            "result": f"[{colours[row['action']]}]{row['action']}[/]",
            "rows": number(row["rows"]),
            "inserted": number(row["inserted_rows"]) if moved else "",
            "updated": number(row["updated_rows"]) if moved else "",
            "kept": number(row["kept_rows"]) if moved else "",
            "gates": _tally(row["gates"], "passed"),
            "tests": _tally(row["dbt_tests"], "pass"),
            "seconds": f"{row['seconds']:.2f}",
            "digest of the day": f"[dim]{(row['after_image_sha256'] or '')[7:19]}[/]",
        }
        table.add_row(*(cells[name] for name in names))
    if rows:
        out.print(table)
    total = sum(r["rows"] or 0 for r in rows if r["action"] != "skipped")
    published = sum(r["action"] != "skipped" for r in rows)
    seconds = sum(r["seconds"] for r in rows)
    if rows or not failure:
        out.print(
            f"[bold]{published}[/] published, [bold]{len(rows) - published}[/] already complete, "
            f"{total:,} rows in {seconds:.1f} s.",
            highlight=False,
        )
    if failure:
        out.print(f"[bold red]Stopped at {not_done[0]}:[/] {failure.code}  {failure.sentence}", highlight=False)
        _print_gates(failure)
        out.print(f"[dim]Next:[/] {failure.next_step}", highlight=False)


def _print_gates(failure: DponeError) -> None:
    if not isinstance(failure, PublicationFailed):
        return
    for mart, gates in failure.gates.items():
        for gate in gates.results:
            mark = "[green]✓[/]" if gate.status == "passed" else "[red]✗[/]" if gate.blocks else "[yellow]![/]"
            numbers = ", ".join(f"{k} {v}" for k, v in gate.metrics.items() if isinstance(v, int))
            out.print(f"  {mark} {mart}.{gate.gate_id}  [dim]{gate.message or numbers}[/]", highlight=False)


def _tally(results: dict[str, str] | None, good: str) -> str:
    if not results:
        return ""
    passed = sum(status == good for status in results.values())
    return f"[{'green' if passed == len(results) else 'yellow'}]{passed}/{len(results)}[/]"


# ------------------------------------------------------------------------------------- reading the journal


@app.command()
def status(format_: FormatOption = Format.text) -> None:
    """What each mart has published and each manifest has loaded, and what is open, failed or guarded."""
    from resources.runtime import Runtime

    with _refusals(format_):
        runtime = Runtime.open()
        marts = report.status(runtime.journal, runtime.marts.values())
        loads = report.loads(runtime.journal.loads)
        if format_ is Format.json:
            print_json({"marts": marts, "loads": loads})
            return
        table = Table(box=None, pad_edge=False)
        for name in ("mart", "days", "first", "last", "rows", "generation", "needs attention"):
            table.add_column(
                name,
                justify="right" if name in ("days", "rows", "generation") else "left",
                header_style="bold dim",
                no_wrap=name != "needs attention",
                overflow="fold",
            )
        for mart in marts:
            trouble = [f"[yellow]{o['day']} {o['state']}[/]" for o in mart["open"]]
            trouble += [f"[red]{o['day']} {o['failure_code']}[/]" for o in mart["failed"]]
            if not mart["baseline"]:
                trouble.append(f"[yellow]no baseline: dpone baseline create {mart['mart']}[/]")
            more = f"\n… {len(trouble) - 5} more" if len(trouble) > 5 else ""
            table.add_row(
                f"[bold]{mart['mart']}[/]", str(mart["days_complete"]), mart["first_day"] or "-",
                mart["last_day"] or "-", f"{mart['rows']:,}", number(mart["generation"]) or "-",
                "\n".join(trouble[:5]) + more or "[green]nothing[/]",
            )  # fmt: skip
        out.print(table)
        if loads:
            out.print()
            cli_loads.print_status(loads)


@app.command()
def explain(
    mart: Annotated[str, typer.Argument(help="A mart, or the process of a manifest; `dpone status` lists both.")],
    day: Annotated[str | None, typer.Argument(help="UTC day, YYYY-MM-DD; a load may be asked for without.")] = None,
    format_: FormatOption = Format.text,
) -> None:
    """The story of a mart's day or of a load: states, rows, digests, gates, times per phase, and what to do next."""
    from resources.runtime import Runtime

    with _refusals(format_):
        runtime = Runtime.open()
        loads = runtime.journal.loads
        if mart not in runtime.marts and mart in loads.processes():
            told = report.explain_load(loads, mart, Scope.day(day) if day else None)
            print_json(told) if format_ is Format.json else cli_loads.print_story(told)
            return
        if day is None:
            raise DponeError("DPONE_SCOPE_NOT_A_DAY", f"{runtime.mart(mart).name} is published by day: give one.")
        story = report.explain(runtime.journal, runtime.mart(mart), Scope.day(day))
        if format_ is Format.json:
            print_json(story)
            return
        head = "[green]published[/]" if story["published"] else "[yellow]not published[/]"
        out.print(f"[bold]{mart} {day}[/]  {head}", highlight=False)
        if story["published"]:
            pairs(None, {
                "rows": f"{story['rows']:,}", "revision": story["revision"], "digest": story["after_image_sha256"],
                "artifact": story["artifact_manifest_sha256"], "published": plain(story["published_at"]),
            })  # fmt: skip
        for operation in story["operations"]:
            _print_operation(operation)
        out.print(f"\n[dim]Next:[/] {story['next_step']}", highlight=False)


def _print_operation(operation: dict[str, Any]) -> None:
    facts = operation["facts"]
    out.print(
        f"\n[bold]{operation['operation_id'][7:23]}[/]  {operation['mode']}, revision {operation['revision']}"
        f"{'.' + str(operation['replacement_ordinal']) if operation['replacement_ordinal'] else ''}, "
        f"epoch {operation['fencing_epoch']}  [bold]{operation['state']}[/]",
        highlight=False,
    )
    if facts.get("failure_code"):
        out.print(f"  [red]{facts['failure_code']}[/]  {facts.get('failure_sentence', '')}", highlight=False)
    if facts.get("after"):
        out.print(
            f"  {facts['after']['rows']:,} rows after, {facts['before']['rows']:,} before; "
            f"{facts['inserted_rows']:,} inserted, {facts['updated_rows']:,} updated, "
            f"{facts['after']['rows'] - facts['source_rows']:,} kept that the model no longer yields",
            highlight=False,
        )
    for gate in operation["gates"]:
        mark = {"passed": "[green]✓[/]", "warned": "[yellow]![/]"}.get(gate["status"], "[red]✗[/]")
        out.print(f"  {mark} {gate['gate_id']}  [dim]{gate['message']}[/]", highlight=False)
    states = " → ".join(state for state, _ in groupby(t["to_state"] for t in operation["transitions"]))
    out.print(f"  [dim]{states}[/]", highlight=False)
    longest = max((p["seconds"] for p in operation["phases"]), default=0.0)
    for phase in operation["phases"]:
        bar = "█" * max(1, round(24 * phase["seconds"] / longest)) if longest else ""
        moved = f"{phase['rows']:,} rows" if phase["rows"] is not None else ""
        out.print(
            f"  {phase['name']:<9} {phase['seconds']:>8.3f} s  [cyan]{bar:<24}[/] [dim]{moved}[/]",
            highlight=False,
        )


@app.command()
def verify(mart: MartArgument, day: DayArgument, format_: FormatOption = Format.text) -> None:
    """Compare a published day's head with its sealed artifact and with both live tables. Exit 1 if they differ."""
    from resources.runtime import Runtime

    with _refusals(format_):
        runtime = Runtime.open()
        found = runtime.verify(mart, Scope.day(day))
        if format_ is Format.json:
            print_json(found)
        else:
            out.print(
                f"[bold]{mart} {day}[/]  journal: {found['rows']:,} rows, {found['sha256'][7:19]}",
                highlight=False,
            )
            for side in found["sides"]:
                mark = "[green]✓[/]" if side["agrees"] else "[red]✗[/]"
                what = (
                    f"{side['rows']:,} rows, {side['sha256'][7:19]}"
                    if side["sha256"]
                    else f"[red]{side['error_code']}[/]"
                )
                out.print(f"  {mark} {side['side']:<18} {what}", highlight=False)
        if not found["agrees"]:
            raise typer.Exit(1)


@app.command()
def takeover(
    mart: MartArgument,
    day: DayArgument,
    reason: Annotated[str, typer.Option("--reason", help="Why; it is kept in the journal.")],
    format_: FormatOption = Format.text,
) -> None:
    """End the sessions of a run that hangs on a mart's day, or on a load; the next run then settles what it left.

    A load that has no day is named by the UTC day on which it runs. Needs membership in the database role for
    takeovers. It is logged. It changes no data by itself.
    """
    from resources.runtime import Runtime

    with _refusals(format_):
        runtime = Runtime.open()
        ended = runtime.takeover(mart, Scope.day(day), reason=reason)
        print_json(ended) if format_ is Format.json else pairs("The holder's sessions are ended", ended)


if __name__ == "__main__":
    main()
