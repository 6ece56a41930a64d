"""Builds one operation in a process of its own, which a test may kill: pickled arguments on stdin."""

import pickle
import sys
from pathlib import Path

from dpone_dagster.planning.dbt_manifest import read_marts
from resources.dbt_builder import DbtBuilder
from resources.postgres.dialect import canonical_type

if __name__ == "__main__":
    given = pickle.load(sys.stdin.buffer)
    builder = DbtBuilder(conninfo=given["conninfo"], home=Path(given["home"]), project=Path(given["project"]))
    marts = {mart.name: mart for mart in read_marts(builder.manifest(), canonical_type)}
    operation = given["operation"]
    builder.build([marts[operation.mart]], [operation], operation.scope, restore_from={})
