"""What `make demo-governed` runs: a procedure's mart loaded by a manifest, once passing, once stopped by a gate."""

import sys
from pathlib import Path

import psycopg
from rich.console import Console

from assets.sources.flights import load_flights
from dpone_dagster import cli
from dpone_dagster.errors import DponeError
from resources.runtime import Runtime

FOLDER = Path(__file__).parent
MANIFEST = FOLDER / "loads" / "manifests" / "carrier_days.yaml"
PROCEDURE = FOLDER / "sources" / "carrier_days.sql"

out = Console()


def main() -> int:
    """Run the demo; running it again loads the same rows again.

    Returns:
        The exit code: 0 when the first load passes and the second is stopped by its gate.
    """
    try:
        prepare()
    except DponeError as error:
        out.print(f"[bold red]{error.code}[/]  {error.sentence}\n[dim]Next:[/] {error.next_step}", highlight=False)
        return 1
    manifest = str(MANIFEST.relative_to(Path.cwd())) if MANIFEST.is_relative_to(Path.cwd()) else str(MANIFEST)
    for arguments, expected, remark in (
        (["plan", manifest, "--selector", "carrier_days"], 0, "What the manifest would do; no engine is asked."),
        (["run", manifest, "--selector", "carrier_days"], 0, "Procedure, staging, four gates, acceptance, exchange."),
        (["run", manifest, "--selector", "carrier_days_fresh"], 1, "The data of 2013 are not fresh: a gate stops it."),
    ):
        out.print(f"\n[dim]{remark}[/]", highlight=False)
        out.print(f"[bold cyan]$ dpone {' '.join(arguments)}[/]", highlight=False, soft_wrap=True)
        code = cli.app(arguments, standalone_mode=False) or 0
        if code != expected:
            return int(code) or 1
    out.print(
        "\nThe second load failed as it should, and the table that it would have made does not exist. "
        "[bold]--format json[/] prints either report for machines.",
        highlight=False,
    )
    return 0


def prepare() -> Runtime:
    """Start the engines, load the flights and install the procedure, each only if it is not there yet."""
    step = "[bold cyan]·[/] "
    out.print(f"{step}Starting PostgreSQL (standing in for SQL Server) and ClickHouse ...", highlight=False)
    runtime = Runtime.open()
    load_flights(runtime.engines.pg.conninfo, progress=lambda sentence: out.print(f"{step}{sentence}", highlight=False))
    install_procedure(runtime.engines.pg.conninfo)
    return runtime


def install_procedure(conninfo: str) -> None:
    """Create the demo's mart table and the procedure that computes it."""
    with psycopg.connect(conninfo, autocommit=True, application_name="dpone-source") as connection:
        connection.execute(PROCEDURE.read_text("utf-8"))
        connection.execute("CALL dwh.refresh_carrier_days()")


if __name__ == "__main__":
    sys.exit(main())
