"""The published JSON Schema of load manifests and the reference in the docs, both derived from the models.

``python -m dpone_dagster.declarations.schema`` writes ``docs/schema/dpone.manifest.schema.json``. The schema is laxer
than validation only where fields depend on each other (``LAXER``).
"""

import inspect
import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from dpone_dagster.declarations.compat import MinRowsCheck, SourceTargetCountCheck
from dpone_dagster.declarations.manifest import Manifest
from dpone_dagster.declarations.validation import models_of

SCHEMA_FILE = Path(__file__).parents[2] / "docs" / "schema" / "dpone.manifest.schema.json"

LAXER = (
    "hook: exactly one of `sql` and `sql_file`; `expect`, `webhook` and `options` belong to one `type`",
    "`source`: exactly one of `table` and `options.query`; an asset has neither; `read.column` and `read.start_date` "
    "belong to a `read.mode`",
    "`sink`: `merge` and a required row identity need `unique_key`; `legacy_post_finalize` can only append",
    "`sink.strategy` against `source.read.mode`; gates and acceptance against `load_governance.enabled`",
    "gates: `modulus` and `key` belong to `mode: sample`; `custom_sql` needs one SQL body, and `min` or `max`, in "
    "order; `reference: scope_end` needs a daily source",
    "`acceptance`: one enabled keeps a side and a check",
    "ids and names that must be unique in their list; ids that begin with `dpone_`; circles of `depends_on`",
    "`quality.checks`: `threshold` or `value`, equal where both stand; gates beside checks under `mode: fail`",
    "JSON Schema takes `1.0` for a whole number, and numbers of any length or with an exponent; validation does not",
)

# Lists whose items stand once; the rest of the rule needs the item's own field.
_SETS = frozenset({"unique_key", "key", "columns", "depends_on", "null_counts", "distinct_counts"})
_NOT_EMPTY = frozenset({"unique_key", "key", "columns"})
_LOOSE_LISTS = frozenset({"Process", "BatchManifest"})  # their depends_on may repeat a name


def json_schema() -> dict[str, Any]:
    """Return one JSON Schema (draft 2020-12) for both kinds."""
    schema = TypeAdapter(Manifest).json_schema(by_alias=True)
    definitions: dict[str, Any] = schema.pop("$defs")
    models = {model.__name__: model for model in _all_models()}
    for model in (MinRowsCheck, SourceTargetCountCheck):
        own = model.model_json_schema()
        definitions |= own.pop("$defs", {}) | {model.__name__: own}
        models[model.__name__] = model
    for name, definition in definitions.items():
        _describe(definition, models[name])
        for field, value in definition["properties"].items():
            _tighten(field, value, unique=name not in _LOOSE_LISTS)
    _take_alias(definitions["HookExecution"])
    _take_compatibility_form(definitions["Quality"])
    cleaned: dict[str, Any] = _clean(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "dpone load manifest",
            "description": "One load (dpone.batch.v1), or several in one file (dpone.flow.v1).",
            "oneOf": schema["oneOf"],
            "$defs": dict(sorted(definitions.items())),
        }
    )
    return cleaned


def _all_models() -> list[type[BaseModel]]:
    found: dict[type[BaseModel], None] = {}

    def walk(annotation: Any) -> None:
        for model in models_of(annotation):
            if model not in found:
                found[model] = None
                for info in model.model_fields.values():
                    walk(info.annotation)

    walk(Manifest)
    return list(found)


def _describe(definition: dict[str, Any], model: type[BaseModel]) -> None:
    """Take the summary of the docstring, and each field's entry of its Attributes section."""
    meanings: dict[str, str] = {}
    for base in reversed([base for base in model.__mro__ if issubclass(base, BaseModel) and base is not BaseModel]):
        text = inspect.cleandoc(base.__doc__ or "")
        _, _, section = text.partition("Attributes:\n")
        for entry in re.finditer(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.M):
            meanings[entry[1]] = " ".join(entry[2].replace("``", "`").split())
    summary = inspect.cleandoc(model.__doc__ or "").partition("\nAttributes:")[0]
    definition["description"] = " ".join(summary.replace("``", "`").split())
    for name, info in model.model_fields.items():
        written = info.alias or name
        if name in meanings and written in definition["properties"]:
            definition["properties"][written]["description"] = meanings[name]


def _tighten(field: str, value: dict[str, Any], *, unique: bool) -> None:
    for branch in (value, *value.get("anyOf", ())):
        if branch.get("type") == "array" and field in _SETS and unique:
            branch["uniqueItems"] = True
            if field in _NOT_EMPTY:
                branch["minItems"] = 1


def _take_alias(execution: dict[str, Any]) -> None:
    properties = execution["properties"]
    properties["airflow"] = {**properties["orchestrator"], "description": "The same as `orchestrator`."}
    del properties["airflow"]["default"]
    execution["not"] = {"required": ["airflow", "orchestrator"]}


def _take_compatibility_form(quality: dict[str, Any]) -> None:
    known = [{"$ref": f"#/$defs/{model.__name__}"} for model in (MinRowsCheck, SourceTargetCountCheck)]
    types = [_const(model) for model in (MinRowsCheck, SourceTargetCountCheck)]
    id_ = {"type": "string", "pattern": r"^[A-Za-z_][A-Za-z0-9_]{0,99}$"}
    unknown = {
        "type": "object",
        "description": "Kept as evidence that it was skipped; only under mode warn.",
        "properties": {
            "id": id_,
            "type": {"type": "string", "pattern": r"^[A-Za-z_][A-Za-z0-9_.-]{0,99}$", "not": {"enum": types}},
            "severity": {"const": "warning"},
        },
        "required": ["id", "type"],
    }
    quality["properties"] |= {
        "mode": {
            "enum": ["fail", "warn"],
            "deprecated": True,
            "description": "Deprecated: the severity of gates that state none; `fail` by default. Use `severity`.",
        },
        "checks": {
            "type": "array",
            "items": {"anyOf": [*known, unknown]},
            "deprecated": True,
            "description": "Deprecated: the older form of `gates`.",
        },
    }
    warns = {"properties": {"mode": {"const": "warn"}}, "required": ["mode"]}
    quality["if"] = warns
    quality["else"] = {"properties": {"checks": {"items": {"anyOf": known}}}}


def _const(model: type[BaseModel]) -> str:
    literal: str = model.model_json_schema()["properties"]["type"]["const"]
    return literal


def _clean(node: Any, *, names: bool = False) -> Any:
    """Drop what editors need not see; ``null`` too, since a key without a value is refused."""
    if isinstance(node, list):
        return [_clean(item) for item in node]
    if not isinstance(node, dict):
        return node
    if names:  # the keys are field names, not keywords
        return {key: _clean(value) for key, value in node.items()}
    kept = {}
    for key, value in node.items():
        if key == "discriminator" or (key == "title" and "$schema" not in node) or (key == "default" and value is None):
            continue
        kept[key] = (
            value if key in ("default", "const", "enum") else _clean(value, names=key in ("properties", "$defs"))
        )
    if isinstance(branches := kept.get("anyOf"), list):
        branches = [branch for branch in branches if branch != {"type": "null"}]
        if len(branches) == 1:
            del kept["anyOf"]
            return {**branches[0], **kept}
        kept["anyOf"] = branches
    return kept


# -------------------------------------------------------------------------------------- the reference in docs


def reference() -> str:
    """Return the reference as Markdown: one table a model, top down."""
    schema = json_schema()
    definitions = schema["$defs"]
    parts: list[str] = []
    seen: list[str] = []

    def visit(name: str) -> None:
        if name in seen:
            return
        seen.append(name)
        definition = definitions[name]
        rows = [
            f"| `{field}` | {_type(value)} | {_default(field, value, definition)} | {_meaning(value, definitions)} |"
            for field, value in sorted(definition["properties"].items(), key=lambda item: item[0] != "kind")
        ]
        parts.append(
            f"### {name}\n\n{definition['description']}\n\n"
            + "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows])
        )
        for value in definition["properties"].values():
            for inner in _refs(value):
                visit(inner)

    for branch in schema["oneOf"]:
        for inner in _refs(branch):
            visit(inner)
    lax = "\n".join(f"- {rule}" for rule in LAXER)
    return "\n\n".join([*parts, f"### What only validation checks\n\n{lax}"]) + "\n"


def _refs(node: Any) -> list[str]:
    if isinstance(node, list):
        return [name for item in node for name in _refs(item)]
    if isinstance(node, dict):
        own = [node["$ref"].rpartition("/")[2]] if isinstance(node.get("$ref"), str) else []
        return own + [name for key, value in node.items() if key != "default" for name in _refs(value)]
    return []


def _type(value: dict[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if branches := value.get("anyOf") or value.get("oneOf"):
        kinds = list(dict.fromkeys(_type(branch) for branch in branches))
        return "decimal" if kinds == ["number", "text"] else " or ".join(kinds)
    if "enum" in value:
        return ", ".join(f"`{item}`" for item in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value.get("type") == "array":
        return f"list of {_type(value['items'])}"
    named = {"string": "text", "integer": "whole number", "boolean": "true or false", "object": "mapping"}
    if value.get("format") == "date":
        return "date"
    return named.get(value.get("type", ""), value.get("type") or "anything")


def _default(field: str, value: dict[str, Any], definition: dict[str, Any]) -> str:
    if field in definition.get("required", ()):
        return "required"
    default = value.get("default")
    if default is None or default in ([], {}) or isinstance(default, dict):
        return ""
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _meaning(value: dict[str, Any], definitions: dict[str, Any]) -> str:
    names = _refs(value)
    inner = definitions[names[0]]["description"] if len(names) == 1 else ""
    text = str(value.get("description") or inner)
    return (text[:1].upper() + text[1:]).replace("|", "\\|")


def schema_text() -> str:
    """Return the committed form of the schema."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.parent.mkdir(parents=True, exist_ok=True)
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
