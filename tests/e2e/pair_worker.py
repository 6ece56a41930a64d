"""Publishes one day of the two-mart test workflow in a process of its own, which a test may break or kill."""

import json
import sys
import uuid
from dataclasses import replace
from pathlib import Path

from dpone_dagster.contracts.mart import Scope
from dpone_dagster.errors import DponeError
from dpone_dagster.journal.port import RunIdentity
from resources.embedded.engines import up
from resources.embedded.home import resolve
from resources.runtime import Runtime

if __name__ == "__main__":
    database, project, day = sys.argv[1:]
    home = resolve()
    found = up(home)
    engines = replace(found, pg=found.pg.with_database(database))
    worker = str(uuid.uuid4())
    identity = RunIdentity(
        logical_run_id=worker, run_id=worker, try_number=1, task_id="test", worker_id=worker, owner="dpone-cli"
    )
    runtime = Runtime(home=home, engines=engines, project=Path(project))
    try:
        runtime.publish("events", Scope.day(day), identity=identity, replay=False)
    except DponeError as error:
        sys.stdout.write(json.dumps(error.as_json(), default=str))
        sys.exit(1)
