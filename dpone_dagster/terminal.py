"""What every command shares: how it answers people and machines, and how a refusal is told."""

import json
import os
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dpone_dagster.errors import DponeError, unexpected
from dpone_dagster.journal.port import RunIdentity

CANCELLED = 130  # as a shell says of a command that an interrupt ended

# Into a pipe or a file nothing is cut at 80 columns.
_WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
out = Console(width=_WIDTH)
err = Console(stderr=True)


class Format(StrEnum):
    """How a command answers; markdown differs from text for loads only."""

    text = "text"
    json = "json"
    markdown = "markdown"


FormatOption = Annotated[
    Format, typer.Option("--format", help="text for people, json for machines; markdown for a load's report.")
]


def print_json(value: Any) -> None:
    """Print one JSON object, and nothing else, on stdout."""
    print(json.dumps(value, default=plain, indent=2, sort_keys=True))  # noqa: T201 - the answer itself


def plain(value: Any) -> str:
    """Return the text of a value that JSON does not have."""
    return value.isoformat() if isinstance(value, date | datetime) else str(value)


def told(error: Exception) -> DponeError:
    """Return the refusal that an error is told as; DPONE_DEBUG=1 prints the traceback beside it."""
    if os.environ.get("DPONE_DEBUG"):
        traceback.print_exception(error)
    return error if isinstance(error, DponeError) else unexpected(error)


def exit_code(error: DponeError) -> int:
    """Return the exit code of a refusal."""
    return CANCELLED if error.code == "DPONE_CANCELLED" else 1


@contextmanager
def refusals(format_: Format, *, as_json: Callable[[DponeError], dict[str, Any]] | None = None) -> Iterator[None]:
    """Turn a refusal into an exit code and, for machines, exactly one JSON object on stdout.

    Whatever else goes wrong becomes DPONE_UNEXPECTED without its text, which may carry row values.

    Args:
        format_: how to answer.
        as_json: what to print for machines; by default an object with ``passed`` and ``result``.
    """
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception as caught:  # noqa: BLE001 - told by class and place, see above
        error = told(caught)
        if format_ is Format.json:
            print_json(
                as_json(error) if as_json else {"passed": False, "result": {"status": "error", **error.as_json()}}
            )
        else:
            # The answer, whatever it is, goes to stdout; stderr is for what happens on the way.
            out.print(f"[bold red]{error.code}[/]  {error.sentence}", highlight=False)
            for other in error.details.get("errors", ())[1:]:
                line = f":{other['line']}" if other.get("line") else ""
                out.print(f"  also{line} {other['field']}: {other['message']}", highlight=False)
            out.print(f"[dim]Next:[/] {error.next_step}", highlight=False)
        raise typer.Exit(exit_code(error)) from None


def pairs(title: str | None, facts: dict[str, Any]) -> None:
    """Print names and values below each other."""
    if title:
        out.print(f"[bold]{title}[/]", highlight=False)
    for name, value in facts.items():
        out.print(f"  [dim]{name:<12}[/] {value}", highlight=False, soft_wrap=True)


def number(value: int | None) -> str:
    """Return a number with thousands separated; nothing for None."""
    return "" if value is None else f"{value:,}"


def identity(run_id: str | None = None) -> RunIdentity:
    """Return the identity of a run of the command line, by default a fresh one."""
    run_id = run_id or str(uuid.uuid4())
    return RunIdentity(
        logical_run_id=run_id,
        run_id=run_id,
        try_number=1,
        task_id="dpone_run",
        worker_id=str(uuid.uuid4()),
        owner="dpone-cli",
    )


def progress_bar(*, quiet: bool) -> Progress:
    """Return the live display of a range on stderr, for ``Bar``; its tasks have the fields ``now`` and ``moved``."""
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[now]} {task.fields[moved]}"),
        console=err,
        disable=quiet,
        transient=True,
    )


class Bar:
    """Progress of a range on a terminal: one bar for days, one line for what is going on; ``ProgressPort``."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def phase(self, mart: str, name: str) -> None:
        """Show which phase begins."""
        self._progress.update(self._task, now=f"{mart}: {name}")

    def rows(self, count: int) -> None:
        """Show how many rows have moved."""
        self._progress.update(self._task, moved=f"{count:,} rows")

    def note(self, sentence: str) -> None:
        """Print a sentence above the bar."""
        self._progress.console.print(f"[dim]{sentence}[/]", highlight=False)
