"""Everything wired together for one DPONE_HOME: what the command line, Dagster and the tests all start from."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from dpone_dagster import __version__
from dpone_dagster.contracts.canonical import sha256_of
from dpone_dagster.contracts.mart import MartSpec, Scope
from dpone_dagster.contracts.policy import Policy
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.port import RunIdentity
from dpone_dagster.planning.dbt_manifest import compile_workflows
from dpone_dagster.planning.plans import Workflow
from dpone_dagster.ports import CatalogObservation, ProgressPort
from dpone_dagster.publication.attempt import MartResult, Ports
from dpone_dagster.publication.baseline import adopt, create
from dpone_dagster.report import verify
from dpone_dagster.run import publish_day
from resources.artifacts import LocalArtifactStore
from resources.clickhouse.client import ClickHouseClient, connect
from resources.clickhouse.publisher import ClickHousePublisher
from resources.dbt_builder import PROJECT, DbtBuilder
from resources.embedded.clickhouse_server import RECORD
from resources.embedded.engines import Engines, up
from resources.embedded.home import Home, resolve
from resources.journal.migrate import migrate
from resources.journal.store import SqlJournal
from resources.postgres import dialect as postgres
from resources.postgres.marts import PostgresSource

ENVIRONMENT = "embedded"


class Quiet:
    """Nobody watches."""

    def phase(self, mart: str, name: str) -> None:
        """Ignore."""

    def rows(self, count: int) -> None:
        """Ignore."""

    def note(self, sentence: str) -> None:
        """Ignore."""


class Runtime:
    """One home's engines, journal, store and declarations; each made when first needed.

    Args:
        home: where the embedded engines live.
        engines: both, running.
        policy: deadlines and budgets.
        project: the dbt project that declares the marts.
    """

    def __init__(self, *, home: Home, engines: Engines, policy: Policy | None = None, project: Path = PROJECT) -> None:
        self.home = home
        self.engines = engines
        self.project = project
        self.policy = policy or Policy()
        self.progress: ProgressPort = Quiet()

    @classmethod
    def open(cls, home: Home | None = None, *, policy: Policy | None = None) -> "Runtime":
        """Start the embedded engines where they do not run, bring the journal up to date, and wire all up.

        Raises:
            DponeError: DPONE_HOME_REFUSED, DPONE_ENGINE_UNAVAILABLE, DPONE_JOURNAL_BUSY.
        """
        home = home or resolve()
        runtime = cls(home=home, engines=up(home), policy=policy)
        runtime.migrate()
        return runtime

    def migrate(self) -> None:
        """Bring the journal's schema up to date."""
        migrate(sa.create_engine(self.engines.pg.sqlalchemy_url, poolclass=sa.NullPool))

    # ------------------------------------------------------------------------------------- the outside

    @cached_property
    def journal(self) -> SqlJournal:
        """The authority."""
        return SqlJournal(self.engines.pg.sqlalchemy_url)

    @cached_property
    def source(self) -> PostgresSource:
        """PostgreSQL standing in for SQL Server."""
        pg = self.engines.pg
        return PostgresSource(conninfo=pg.conninfo, uri=pg.uri, marts=self.marts)

    @cached_property
    def builder(self) -> DbtBuilder:
        """Dbt."""
        return DbtBuilder(
            conninfo=self.engines.pg.conninfo, home=_dbt_home(self.home), project=self.project, policy=self.policy
        )

    @cached_property
    def artifacts(self) -> LocalArtifactStore:
        """The sealed artifacts."""
        return LocalArtifactStore(self.home.artifacts, free_bytes=self.policy.artifact_free_bytes)

    def analytics(self, prefix: str) -> ClickHousePublisher:
        """ClickHouse, with query ids that start with ``prefix``."""
        return ClickHousePublisher(self.clickhouse, prefix)

    @cached_property
    def clickhouse(self) -> ClickHouseClient:
        """The HTTP client of ClickHouse."""
        # Without a session, so one client may run any number of statements at once.
        return connect(self.engines.clickhouse)

    def ports(self, progress: ProgressPort | None = None) -> Ports:
        """What the core needs."""
        return Ports(
            journal=self.journal,
            source=self.source,
            builder=self.builder,
            artifacts=self.artifacts,
            analytics=self.analytics,
            policy=self.policy,
            progress=progress or self.progress,
        )

    # ------------------------------------------------------------------------------------ declarations

    @cached_property
    def workflows(self) -> dict[str, Workflow]:
        """Every declared workflow by name."""
        return declared_workflows(self.home, project=self.project)

    @cached_property
    def marts(self) -> dict[str, MartSpec]:
        """Every declared mart by name."""
        return {m.name: m for w in self.workflows.values() for m in w.marts}

    def mart(self, name: str) -> MartSpec:
        """Return a mart by name.

        Raises:
            DponeError: DPONE_MART_UNKNOWN.
        """
        if name not in self.marts:
            known = ", ".join(sorted(self.marts))
            raise DponeError("DPONE_MART_UNKNOWN", f"No mart is named {name!r}; there is {known}.")
        return self.marts[name]

    def workflow_of(self, mart: str) -> Workflow:
        """Return the workflow that publishes a mart, with what its models read observed now.

        Raises:
            DponeError: DPONE_MART_UNKNOWN; DPONE_CLOSURE_UNPROVEN when a model reads what is not admitted.
        """
        name = self.mart(mart).workflow
        return _workflows(self.builder, observe=self.source.dependencies, only=name)[name]

    # ----------------------------------------------------------------------------------------- actions

    def publish(
        self,
        mart: str,
        scope: Scope,
        *,
        identity: RunIdentity,
        replay: bool,
        progress: ProgressPort | None = None,
    ) -> dict[str, MartResult]:
        """Publish one day of a mart's whole workflow; see ``publish_day``."""
        return publish_day(self.ports(progress), self.workflow_of(mart), scope, identity, replay=replay)

    def create_baseline(self, mart: str, *, identity: RunIdentity) -> dict[str, Any]:
        """Create the pair empty and adopt it; see ``baseline.create``."""
        return self._baseline(mart, identity, create)

    def adopt_baseline(self, mart: str, *, identity: RunIdentity) -> dict[str, Any]:
        """Adopt an existing pair; see ``baseline.adopt``."""
        return self._baseline(mart, identity, adopt)

    def _baseline(self, name: str, identity: RunIdentity, act: Callable[..., Any]) -> dict[str, Any]:
        # As declared: what a model reads can only be observed once its mart exists.
        mart, workflow = self.mart(name), self.workflows[self.mart(name).workflow]
        with self.journal.hold(
            workflow.resources,
            identity=identity,
            scope=Scope.day(mart.start_date),
            deadline_seconds=self.policy.lock_wait_seconds,
            on_wait=self.progress.note,
        ) as lease:
            receipt = act(
                journal=self.journal,
                source=self.source,
                analytics=self.analytics(f"dpone-baseline-{identity.worker_id[:8]}-"),
                workflow=workflow,
                mart=mart,
                lease=lease,
            )
        return {
            "mart": name,
            "source": mart.source.dotted,
            "target": mart.target.dotted,
            "target_uuid": receipt.clickhouse_target_uuid,
            "digest": receipt.source_snapshot_sha256,
            "receipt": receipt.sha256,
        }

    def verify(self, mart: str, scope: Scope) -> dict[str, Any]:
        """Compare head, artifact and both live tables of a published day; see ``report.verify``."""
        return verify(
            journal=self.journal,
            source=self.source,
            analytics=self.analytics("dpone-verify-"),
            artifacts=self.artifacts,
            mart=self.mart(mart),
            scope=scope,
        )

    def takeover(self, mart: str, scope: Scope, *, reason: str) -> dict[str, Any]:
        """End the sessions of the run that holds a mart's day, or a load's.

        Args:
            mart: the mart, or the process of a manifest.
            scope: the day; of a load that has none, the UTC day on which it runs.

        Raises:
            DponeError: DPONE_NOT_HELD when no live run works on that day; DPONE_TAKEOVER_FORBIDDEN.
        """
        if mart not in self.marts and mart in self.journal.loads.processes():
            holder = self.journal.holder(f"load:{mart}")
        else:
            holder = self.journal.holder(f"mart:{self.mart(mart).name}")
        if holder is None or holder.scope != scope:
            raise DponeError("DPONE_NOT_HELD", f"No live run works on {mart} {scope.key}.")
        self.journal.end_worker(holder.worker_id, reason=reason)
        return {"mart": mart, "day": scope.key, "run_id": holder.run_id, "host": holder.host, "pid": holder.pid}

    def describe(self) -> dict[str, Any]:
        """Say where everything is; no secrets."""
        pg, clickhouse = self.engines.pg, self.engines.clickhouse
        return {
            "home": str(self.home.root),
            "postgres": f"{pg.conninfo} (stand-in for SQL Server; the socket asks for no password)",
            "clickhouse": f"http://{clickhouse.host}:{clickhouse.port}, user {clickhouse.user}; the token in"
            f" {self.home.run / RECORD} is its password",
            "marts": ", ".join(sorted(self.marts)),
        }


def _dbt_home(home: Home) -> Path:
    return home.root / "dbt"


def declared_workflows(home: Home | None = None, *, project: Path = PROJECT) -> dict[str, Workflow]:
    """Read the dbt project's declarations; needs no engine, and no dbt where the parsed project is kept.

    Raises:
        DponeError: whatever the planner refuses, naming model and field.
    """
    home = home or resolve()
    return _workflows(DbtBuilder(conninfo="", home=_dbt_home(home), project=project), observe=None)


def _workflows(
    builder: DbtBuilder,
    *,
    observe: Callable[[MartSpec, str], CatalogObservation] | None,
    only: str | None = None,
) -> dict[str, Workflow]:
    release = sha256_of({"schema": "dpone.release.v1", "dpone": __version__})
    deployment = sha256_of({"schema": "dpone.deployment.v1", "release_id": release, "profile": ENVIRONMENT})
    compiled = compile_workflows(builder.manifest(), canonical_type=postgres.canonical_type, observe=observe, only=only)
    return {
        name: Workflow(
            name=name,
            plans=workflow.plans,
            closure=workflow.closure,
            environment=ENVIRONMENT,
            release_id=release,
            deployment_id=deployment,
        )
        for name, workflow in compiled.items()
    }
