"""The jobs of a folder of manifests, for a run that Dagster has to build again: a re-execution."""

import os
from pathlib import Path

import dagster as dg

from assets.loads import load_assets
from resources.dagster_runtime import DponeRuntime

FOLDER, JOB = "DPONE_TEST_MANIFESTS", "DPONE_TEST_JOB"


def definitions(folder: Path) -> dg.Definitions:
    """What a code location of nothing but these manifests has."""
    found = load_assets(folder)
    return dg.Definitions(
        assets=[*found.assets, *found.outputs],
        jobs=found.jobs,
        resources={"dpone": DponeRuntime()},
        executor=dg.in_process_executor,
    )


def job() -> dg.JobDefinition:
    """The job that the environment names."""
    return definitions(Path(os.environ[FOLDER])).resolve_job_def(os.environ[JOB])
