"""One home with the flights loaded, and one webserver with its daemon, for all tests of this folder."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest

from assets.sources.flights import load_flights
from resources.embedded.engines import down
from resources.embedded.home import Home
from resources.runtime import Runtime
from tests.dagster.support import ROOT, Server, environment_of, serving
from tests.e2e.conftest import Truth, identity


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker for all of them: they share processes and days."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("dagster"))


@pytest.fixture(scope="session")
def dagster_home() -> Iterator[Home]:
    """A home of its own: these tests stop an engine and fail days on purpose."""
    home = Home(root=Path(tempfile.mkdtemp(prefix="dpone-dagster-")).resolve() / "home")
    home.root.parent.chmod(0o711)
    home.create()
    shutil.copy(ROOT / "dagster.yaml", home.dagster)
    yield home
    down(home)
    shutil.rmtree(home.root.parent)


@pytest.fixture(scope="session")
def runtime(dagster_home: Home) -> Runtime:
    runtime = Runtime.open(dagster_home)
    load_flights(runtime.engines.pg.conninfo)
    runtime.create_baseline("flights", identity=identity())
    return runtime


@pytest.fixture(scope="session")
def truth(runtime: Runtime) -> Truth:
    return Truth(runtime.engines)


@pytest.fixture(scope="session")
def environment(runtime: Runtime) -> dict[str, str]:
    return environment_of(runtime.home.root)


@pytest.fixture(scope="session")
def server(environment: dict[str, str]) -> Iterator[Server]:
    log = ROOT / "build" / "dagster-dev.log"
    log.parent.mkdir(exist_ok=True)
    with serving(("dagster", "dev", "-w", "workspace.yaml"), environment, log) as server:
        yield server


@pytest.fixture(autouse=True)
def as_user(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as a user of that home."""
    for name in ("DPONE_HOME", "DAGSTER_HOME"):
        monkeypatch.setenv(name, environment[name])


@pytest.fixture(scope="session")
def defs(environment: dict[str, str]) -> dg.Definitions:
    """The definitions that a user of that home loads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPONE_HOME", environment["DPONE_HOME"])
        from dpone_dagster.definitions import build
        from resources.dagster_runtime import declared_manifest
        from resources.runtime import declared_workflows

        return build(declared_workflows(), declared_manifest())


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def materialize(defs: dg.Definitions, instance: dg.DagsterInstance) -> Callable[..., dg.ExecuteInProcessResult]:
    """Materialize one partition of the flights, or of another asset, in this process."""

    def run(day: str, asset: str = "flights") -> dg.ExecuteInProcessResult:
        job = defs.resolve_implicit_global_asset_job_def()
        return job.execute_in_process(
            partition_key=day, asset_selection=[dg.AssetKey(asset)], instance=instance, raise_on_error=False
        )

    return run
