"""The runtime as a Dagster resource: engines and journal are touched when a step asks, never at import."""

from typing import Any

import dagster as dg
from pydantic import PrivateAttr

from dpone_dagster.journal.port import RunIdentity
from resources.dbt_builder import DbtBuilder
from resources.embedded.home import Home, resolve
from resources.runtime import Runtime


class DponeRuntime(dg.ConfigurableResource[Runtime]):
    """Opens the runtime of one DPONE_HOME on first use and keeps it for the run.

    Attributes:
        home: the folder of the embedded profile; by default what the environment variable DPONE_HOME says.
    """

    home: str | None = None
    _opened: Runtime | None = PrivateAttr(default=None)

    def open(self) -> Runtime:
        """Start the embedded engines where they do not run, bring the journal up to date, and wire all up.

        Raises:
            DponeError: DPONE_HOME_REFUSED, DPONE_ENGINE_UNAVAILABLE, DPONE_JOURNAL_BUSY.
        """
        if self._opened is None:
            self._opened = Runtime.open(Home(root=resolve({"DPONE_HOME": self.home}).root) if self.home else None)
        return self._opened


def declared_manifest(home: Home | None = None) -> dict[str, Any]:
    """Read the dbt project's manifest; needs no engine, and no dbt where the parsed project is kept."""
    return DbtBuilder(conninfo="", home=(home or resolve()).root / "dbt").manifest()


class LogProgress:
    """Progress in the log of a Dagster run: one line a phase; implements ``ProgressPort``."""

    def __init__(self, log: dg.DagsterLogManager) -> None:
        self._log = log

    def phase(self, mart: str, name: str) -> None:
        """Say which phase begins."""
        self._log.info(f"{mart}: {name}")

    def rows(self, count: int) -> None:
        """Rows are in the phase timeline; a line a batch would drown the log."""

    def note(self, sentence: str) -> None:
        """Say what is being waited for or settled."""
        self._log.info(sentence)


def run_identity(context: dg.AssetExecutionContext, *, worker_id: str) -> RunIdentity:
    """Say who is working, from Dagster's run.

    The logical run is the root of a re-execution; its retry is the next try. Dagster's retry tag counts automatic
    retries only, so the try is the run's place among the runs of its root.
    """
    return identity_of(
        context.run,
        context.instance,
        retry_number=context.retry_number,
        task_id=context.op_execution_context.op.name,
        worker_id=worker_id,
    )


def identity_of(
    run: dg.DagsterRun, instance: dg.DagsterInstance, *, retry_number: int, task_id: str, worker_id: str
) -> RunIdentity:
    """Say who is working, where there is no asset's context: in an IO manager."""
    root = run.root_run_id or run.run_id
    retries = [
        record.dagster_run.run_id
        for record in instance.get_run_records(dg.RunsFilter(tags={"dagster/root_run_id": root}), ascending=True)
        if record.dagster_run.run_id != root
    ]
    place = retries.index(run.run_id) + 1 if run.run_id in retries else 0
    return RunIdentity(
        logical_run_id=root,
        run_id=run.run_id,
        try_number=place + retry_number + 1,
        task_id=task_id,
        worker_id=worker_id,
        owner="dagster",
    )
