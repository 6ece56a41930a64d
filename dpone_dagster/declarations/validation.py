"""What a closed model refuses, as faults of the document: its own field, plain words, and the nearest thing meant.

Pydantic's messages and places speak of models and unions; here they become keys of the document. No value that the
author wrote is ever repeated, only keys and the closed literals of the models.
"""

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dpone_dagster.declarations.manifest import BatchManifest
from dpone_dagster.declarations.reading import Fault, Mark, Path

M = TypeVar("M", bound=BaseModel)

# The field has another type than this branch of a union; another branch may know better what is wrong.
_OTHER_TYPE = {
    "bool_type": "true or false",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "string_type": "text",
    "int_type": "a whole number",
}
_TRUE = frozenset({"true", "yes", "y", "on", "1", "exact"})
_FALSE = frozenset({"false", "no", "n", "off", "0", "none"})
_RENAMED = {"source_target_count": "row_count_reconciliation"}
_MISSING = "is missing"
_UNKNOWN = "is no field here"
_PROVIDED_LISTS = frozenset({"gates", "pre_hook", "post_hook"})


def judge(model: type[M], data: Any) -> tuple[M | None, list[Fault]]:
    """Validate JSON-like data; return the instance, or None and every fault that can be told."""
    try:
        # Through JSON: pydantic's strict mode takes lists for tuples and text for dates only there.
        return model.model_validate_json(json.dumps(data)), []
    except ValidationError as error:
        faults = list(_faults(model, data, error))
    # A misspelled key tells more than the missing one that it stands for.
    meant = {(*fault.path[:-1], fault.nearest) for fault in faults if fault.what.startswith(_UNKNOWN)}
    return None, [fault for fault in faults if fault.what != _MISSING or fault.path not in meant]


def nulls(mark: Mark) -> Iterator[Fault]:
    """Refuse keys without a value: an empty ``acceptance:`` would otherwise mean none at all."""
    for path in mark.of_kind("null"):
        if not free(path):
            yield Fault(path=path, what="has no value; leave the key out or give it one")


def free(path: Path) -> bool:
    """Whether a path lies inside what a provider of others defines: options of a gate or a hook."""
    return any(
        path[i + 2] == "options" and path[i] in _PROVIDED_LISTS and isinstance(path[i + 1], int)
        for i in range(len(path) - 2)
    )


def numbers_as_text(instance: BaseModel, mark: Mark) -> Iterator[Fault]:
    """Refuse unquoted decimals that would become text: only fields of exact decimals take them."""
    for path in mark.of_kind("number"):
        if not isinstance(_landed(instance, path), Decimal | dict):
            yield Fault(path=path, what="takes no decimal number; quote it if it is text")


def _landed(value: Any, path: Path) -> Any:
    for part in path:
        if isinstance(value, dict):
            return value  # options: free
        if isinstance(value, BaseModel):
            name = _names(type(value)).get(str(part))
            if name is None:
                return None
            value = getattr(value, name)
        elif isinstance(value, tuple) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value


# ------------------------------------------------------------------------------- pydantic's errors, translated


def _faults(model: type[BaseModel], data: Any, error: ValidationError) -> Iterator[Fault]:
    unions: dict[Path, list[tuple[Any, Path]]] = {}
    for item in error.errors(include_url=False, include_input=False):
        path, union = _strip(item, data)
        if union is None:
            yield _fault(model, data, path, item)
        else:
            unions.setdefault(union, []).append((item, path))
    for union, items in unions.items():
        better = [(i, p) for i, p in items if p != union or i["type"] not in {*_OTHER_TYPE, "literal_error"}]
        if better:
            for item, path in better:
                yield _fault(model, data, path, item)
        else:
            yield _no_branch(union, [item for item, _ in items], _value_at(data, union))


def _strip(item: Any, data: Any) -> tuple[Path, Path | None]:
    """Take the tags of unions out of a place; return the path, and the union without a discriminator if any."""
    path: list[str | int] = []
    union: Path | None = None
    node = data
    loc = item["loc"]
    for index, part in enumerate(loc):
        if index >= 2 and loc[index - 2] == "gates" and isinstance(loc[index - 1], int):
            continue  # the gate's type
        key = part in node if isinstance(node, dict) else isinstance(node, list) and isinstance(part, int)
        if key:
            path.append(part)
            node = node[part]
        elif item["type"] == "missing" and index == len(loc) - 1:
            path.append(part)
        else:
            union = tuple(path)
    return tuple(path), union


def _no_branch(path: Path, items: list[Any], value: Any) -> Fault:
    words = [_OTHER_TYPE.get(i["type"]) or i["ctx"]["expected"] for i in items]
    nearest = _nearest(value, [w for i in items if i["type"] == "literal_error" for w in _literals(i)])
    if nearest is None and any(i["type"] == "bool_type" for i in items):
        nearest = _boolean(value)
    return Fault(path=path, what=f"should be {', or '.join(words)}", nearest=nearest)


def _fault(model: type[BaseModel], data: Any, path: Path, item: Any) -> Fault:
    value = _value_at(data, path)
    match item["type"]:
        case "extra_forbidden":
            return _unknown_key(model, data, path)
        case "missing":
            step = (
                "Say enabled: true (or false) in quality.acceptance."
                if path[-2:] == ("acceptance", "enabled")
                else None
            )
            return Fault(path=path, what=_MISSING, next_step=step)
        case "literal_error":
            return Fault(
                path=path, what=f"should be {item['ctx']['expected']}", nearest=_nearest(value, _literals(item))
            )
        case "bool_type":
            nearest = _boolean(value)
            step = f"Write {path[-1]}: {nearest}, without quotes." if nearest else None
            return Fault(path=path, what="should be the boolean true or false", nearest=nearest, next_step=step)
        case "gate_type":
            return _gate_type(path, value)
        case "value_error":
            what = str(item["ctx"]["error"])
            return Fault(path=_named(path, value, what), what=what)
    what = re.sub(r"^(Input|String|Tuple|Dictionary|List|Decimal input) ", "", item["msg"])
    what = what.split(" after validation")[0].replace("valid array", "list").replace("an object", "a mapping")
    return Fault(path=path, what=what)


def _gate_type(path: Path, value: Any) -> Fault:
    known = [literal for gate in _gate_models() for literal in _type_literals(gate)]
    what = f"should be one of {', '.join(known)}, or a provider's type with a dot in it"
    if not isinstance(value, dict):
        return Fault(path=path, what="should be a mapping with id and type")
    given = value.get("type")
    if "type" not in value:
        return Fault(path=(*path, "type"), what=_MISSING)
    return Fault(path=(*path, "type"), what=what, nearest=_RENAMED.get(str(given)) or _nearest(given, known))


def _named(path: Path, value: Any, what: str) -> Path:
    """Return the first field that the sentence of a cross-field rule names and the author wrote, or the model's."""
    partly: Path = ()
    for word in re.findall(r"[a-z_][a-z_0-9.]*", what):
        found, node = list[str | int](), value
        for part in word.rstrip(".").split("."):
            key: str | int = int(part) if part.isdigit() else part
            inside = key in node if isinstance(node, dict) else isinstance(node, list) and key in range(len(node))
            if not inside:
                break
            found.append(key)
            node = node[key]
        if len(found) == word.count(".") + 1:
            return (*path, *found)
        partly = partly or tuple(found)
    return (*path, *partly)


def _value_at(data: Any, path: Path) -> Any:
    for part in path:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


# --------------------------------------------------------------------------------------------- what was meant


def _literals(item: Any) -> list[str]:
    return re.findall(r"'([^']*)'", item["ctx"]["expected"])


def _nearest(value: Any, known: list[str], cutoff: float = 0.6) -> str | None:
    if not isinstance(value, str):
        return None
    found = get_close_matches(value.lower()[:64], known, n=1, cutoff=cutoff)
    return found[0] if found else None


def _boolean(value: Any) -> str | None:
    text = str(value).lower() if isinstance(value, str | int) else ""
    return "true" if text in _TRUE else "false" if text in _FALSE else None


def _unknown_key(model: type[BaseModel], data: Any, path: Path) -> Fault:
    key = str(path[-1])
    owner = _model_at(model, data, path[:-1])
    allowed = sorted(_names(owner)) if owner else []
    return unknown_key(path, key, allowed)


def unknown_key(path: Path, key: str, allowed: list[str]) -> Fault:
    """Refuse a key of which the model knows only ``allowed``."""
    nearest = _nearest(key, allowed, 0.7)
    places = _places().get(key, frozenset())
    if nearest is None and len(places) == 1:
        (place,) = places
        return Fault(path=path, what=f"{_UNKNOWN}; it belongs to {place}", nearest=place)
    known = f"; known are {', '.join(allowed)}" if allowed and len(allowed) <= 12 else ""
    return Fault(path=path, what=f"{_UNKNOWN}{known}", nearest=nearest or _nearest(key, allowed, 0.5))


@cache
def _names(model: type[BaseModel]) -> Mapping[str, str]:
    """Return what an author may write -> the attribute."""
    names: dict[str, str] = {}
    for name, info in model.model_fields.items():
        if name != "skipped_checks":  # evidence of the compatibility form, never authored
            names |= dict.fromkeys(_written(name, info), name)
    return names


def _written(name: str, info: FieldInfo) -> list[str]:
    if isinstance(info.validation_alias, AliasChoices):
        return [str(choice) for choice in info.validation_alias.choices]
    return [info.alias or name]


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """Return every model inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in models_of(inner)]


def _gate_models() -> list[type[BaseModel]]:
    quality = BatchManifest.model_fields["quality"].annotation
    assert quality is not None
    return models_of(quality.model_fields["gates"].annotation)


def _type_literals(model: type[BaseModel]) -> tuple[str, ...]:
    info = model.model_fields.get("type")
    return get_args(info.annotation) if info and get_origin(info.annotation) is Literal else ()


def _model_at(model: type[BaseModel], data: Any, path: Path) -> type[BaseModel] | None:
    found = [model]
    for index, part in enumerate(path):
        if isinstance(part, int):
            continue
        inner: list[type[BaseModel]] = []
        for candidate in _of_type(found, _value_at(data, path[:index])):
            name = _names(candidate).get(part)
            if name is not None:
                inner += models_of(candidate.model_fields[name].annotation)
        found = inner
    found = _of_type(found, _value_at(data, path))
    return found[0] if len(found) == 1 else None


def _of_type(models: list[type[BaseModel]], value: Any) -> list[type[BaseModel]]:
    """Keep the gates that the value's type names; a provider's where none does."""
    if len(models) < 2 or not isinstance(value, dict):
        return models
    named = [model for model in models if value.get("type") in _type_literals(model)]
    return named or [model for model in models if "type" in model.model_fields and not _type_literals(model)]


@cache
def _places() -> Mapping[str, frozenset[str]]:
    """Return every authored key -> the dotted places where it stands, gates' and hooks' own fields left out."""
    found: dict[str, set[str]] = {}

    def walk(model: type[BaseModel], prefix: str) -> None:
        for written, name in _names(model).items():
            found.setdefault(written, set()).add(prefix + written)
            inner = models_of(model.model_fields[name].annotation)
            if len(inner) == 1 and written not in _PROVIDED_LISTS:
                walk(inner[0], f"{prefix}{written}.")

    walk(BatchManifest, "")
    return {key: frozenset(places) for key, places in found.items()}
