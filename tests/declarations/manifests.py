"""Manifests for the tests of declarations: a whole valid one, and ways to write one."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpone_dagster.declarations.loader import LoadedManifest, load_manifest, parse_manifest
from dpone_dagster.errors import DponeError

WHOLE: dict[str, Any] = {
    "kind": "dpone.batch.v1",
    "name": "orders",
    "source": {"type": "sqlserver", "table": {"schema": "rep", "name": "orders"}},
    "sink": {
        "type": "clickhouse",
        "table": {"schema": "raw", "name": "orders"},
        "strategy": "full_refresh",
    },
}


def whole(**changes: Any) -> dict[str, Any]:
    """Return the valid manifest with dotted fields (``__`` for a dot) set; None takes one out.

    Another name means another target.
    """
    document = copy.deepcopy(WHOLE)
    document["sink"]["table"]["name"] = changes.get("name") or document["name"]
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        node = document
        for part in parents:
            node = node.setdefault(part, {})
        if value is None:
            del node[last]
        else:
            node[last] = value
    return document


def attempt(load: Callable[[], LoadedManifest]) -> LoadedManifest | DponeError:
    """Return what loading comes to; any other exception than the one refusal fails the test."""
    try:
        return load()
    except DponeError as error:
        refused = error
    assert refused.code == "DPONE_MANIFEST_INVALID"
    assert all(entry["field"] and entry["message"] for entry in refused.details["errors"])
    return refused


def refusals(document: Any) -> dict[str, str]:
    """Return field -> message of everything that is refused in a document; {} for one that holds."""
    result = attempt(lambda: parse_manifest(document))
    if isinstance(result, LoadedManifest):
        return {}
    return {entry["field"]: entry["message"] for entry in result.details["errors"]}


def load_text(text: str | bytes, folder: Path) -> LoadedManifest:
    """Write a manifest into a folder and load it."""
    file = folder / "m.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_manifest(file, root=folder)


def refusal(text: str | bytes, folder: Path) -> DponeError:
    """Return what loading a text is refused with."""
    result = attempt(lambda: load_text(text, folder))
    assert isinstance(result, DponeError), "the manifest was accepted"
    return result


def as_yaml(document: Any) -> str:
    """Write a document as YAML: JSON is YAML."""
    return json.dumps(document, indent=1, ensure_ascii=False)
