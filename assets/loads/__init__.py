"""Governed loads in Dagster: every manifest of ``manifests/``, and every component under ``defs/``."""

from assets.loads.build import LoadDefinitions, build_loads, load_assets
from assets.loads.component import LoadManifest

__all__ = ["LoadDefinitions", "LoadManifest", "build_loads", "load_assets"]
