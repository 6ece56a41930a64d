"""What `make demo` runs: a week of real flights, published day by day, and what the journal then knows."""

import sys
import uuid

from rich.console import Console

from assets.sources.flights import load_flights
from dpone_dagster import cli
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.port import RunIdentity
from resources.runtime import Runtime

MART, FIRST, LAST = "flights", "2013-01-01", "2013-01-07"

out = Console()


def main() -> int:
    """Run the demo; running it again publishes nothing twice.

    Returns:
        The exit code: 1 when a day did not publish.
    """
    try:
        prepare()
    except DponeError as error:
        out.print(f"[bold red]{error.code}[/]  {error.sentence}\n[dim]Next:[/] {error.next_step}", highlight=False)
        return 1
    for arguments in (
        ["run", "--mart", MART, "--from", FIRST, "--to", LAST],
        ["status"],
        ["verify", MART, LAST],
    ):
        out.print(f"\n[bold cyan]$ dpone {' '.join(arguments)}[/]", highlight=False)
        code = cli.app(arguments, standalone_mode=False)
        if code:
            return int(code)
    out.print(
        f"\nNext: [bold].venv/bin/dpone explain {MART} {LAST}[/] tells one day's story, "
        "[bold]make ui[/] opens Dagster, [bold]make down[/] stops the engines.",
        highlight=False,
    )
    return 0


def prepare() -> Runtime:
    """Start the engines, load the flights and create the mart's baseline, each only if it is not there yet."""
    step = "[bold cyan]·[/] "
    out.print(f"{step}Starting PostgreSQL (standing in for SQL Server) and ClickHouse ...", highlight=False)
    runtime = Runtime.open()
    load_flights(runtime.engines.pg.conninfo, progress=lambda sentence: out.print(f"{step}{sentence}", highlight=False))
    out.print(f"{step}Reading the dbt project (the first time takes some seconds) ...", highlight=False)
    if runtime.journal.baseline(MART) is None:
        worker = str(uuid.uuid4())
        runtime.create_baseline(
            MART,
            identity=RunIdentity(
                logical_run_id=worker, run_id=worker, try_number=1, task_id="demo", worker_id=worker, owner="dpone-cli"
            ),
        )
        out.print(f"{step}Created the pair of tables of {MART}, empty, and adopted it as its baseline.")
    return runtime


if __name__ == "__main__":
    sys.exit(main())
