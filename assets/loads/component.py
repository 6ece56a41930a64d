"""A load manifest as a Dagster component: a small YAML file under ``assets/loads/defs/``."""

import warnings
from pathlib import Path

import dagster as dg
from dagster.components.core.component_tree import ComponentTree
from pydantic import Field

from assets.loads.build import build_loads


class LoadManifest(dg.Component, dg.Model, dg.Resolvable):
    """A load manifest: an asset, its checks and a job for each of its processes.

    Attributes:
        manifest: the manifest's path, relative to the folder of this defs.yaml.
    """

    manifest: str = Field(description="The load manifest, relative to the folder of this defs.yaml.")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Read the manifest; touches no engine.

        Raises:
            DponeError: what the manifest is refused for, naming file, line and field.
        """
        found = build_loads([context.path / self.manifest])
        return dg.Definitions(assets=[*found.assets, *found.outputs], jobs=found.jobs)


def component_definitions(project: Path) -> dg.Definitions:
    """Build the definitions of every ``defs.yaml`` under ``assets/loads/defs``."""
    import assets.loads.defs

    with warnings.catch_warnings():
        for own_use in (dg.BetaWarning, dg.PreviewWarning):  # Dagster's, of its own functions
            warnings.simplefilter("ignore", own_use)
        tree = ComponentTree.from_module(defs_module=assets.loads.defs, project_root=project)
        # By its path: the whole tree would import every installed component library, dbt's too.
        return tree.build_defs(tree.defs_module_path)
