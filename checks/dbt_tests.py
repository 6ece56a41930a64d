"""The dbt tests of a workflow, as the parsed manifest declares them; dbt itself is not imported."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpone_dagster.errors import DponeError
from dpone_dagster.planning.plans import Workflow


@dataclass(frozen=True, kw_only=True)
class DbtTest:
    """One dbt test.

    Attributes:
        unique_id: dbt's.
        name: dbt's short name with every sign that Dagster does not admit as ``_``.
        description: one sentence.
        blocks: whether a failing row stops the publication (dbt severity ``error``).
    """

    unique_id: str
    name: str
    description: str
    blocks: bool


def dbt_tests(manifest: Mapping[str, Any], workflow: Workflow) -> dict[str, tuple[DbtTest, ...]]:
    """Return mart name -> the tests that the workflow's build runs, each under one mart.

    Args:
        manifest: dbt's manifest as JSON data.
        workflow: its closure names the tests.

    Raises:
        DponeError: DPONE_CONTRACT_INVALID when two tests of a mart would be one check.
    """
    marts = {m.model_unique_id: m.name for m in workflow.marts}
    found: dict[str, list[DbtTest]] = {m.name: [] for m in workflow.marts}
    for unique_id in workflow.closure.selected_read_only_node_ids:
        node = manifest["nodes"][unique_id]
        # A generic test hangs on one model; a singular one goes under the first mart that it reads.
        owners = [node.get("attached_node"), *node["depends_on"]["nodes"]]
        mart = next(marts[owner] for owner in owners if owner in marts)
        test = DbtTest(
            unique_id=unique_id,
            name=re.sub(r"[^A-Za-z0-9_]", "_", node["name"]),
            description=_describe(node),
            blocks=str(node["config"].get("severity", "error")).lower() == "error",
        )
        gates = {g.id for m in workflow.marts if m.name == mart for g in m.gates}
        if test.name in gates | {t.name for t in found[mart]}:
            raise DponeError("DPONE_CONTRACT_INVALID", f"Two checks of {mart} are named {test.name}.", field="name")
        found[mart].append(test)
    return {mart: tuple(tests) for mart, tests in found.items()}


def _describe(node: Mapping[str, Any]) -> str:
    generic = node.get("test_metadata")
    if generic is None:
        return str(node.get("description") or "").strip()
    column = node.get("column_name")
    return f"{generic['name']} on {column}." if column else f"{generic['name']}."
