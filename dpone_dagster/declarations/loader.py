"""Load manifests: from a file or from Python data to validated processes in the order of their dependencies."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dpone_dagster.declarations.compat import canonical_quality
from dpone_dagster.declarations.manifest import BatchManifest, FlowManifest, Process
from dpone_dagster.declarations.reading import MAX_BYTES, Fault, Mark, Reading, Unreadable, read_data, read_yaml
from dpone_dagster.declarations.reading import Path as Field
from dpone_dagster.declarations.validation import free, judge, nulls, numbers_as_text
from dpone_dagster.errors import DponeError

_KINDS: Mapping[str, type[BatchManifest] | type[FlowManifest]] = {
    "dpone.batch.v1": BatchManifest,
    "dpone.flow.v1": FlowManifest,
}
_SHOWN_KEY = 64


@dataclass(frozen=True, kw_only=True)
class LoadedManifest:
    """A manifest that holds.

    Attributes:
        path: the file as it was given; None for Python data.
        shown: the path below the root, for messages.
        processes: every load, in the order of dependencies; the authored order where none decides.
        document: what was declared, defaults filled in; ``document.as_json()`` is the canonical form.
    """

    path: Path | None
    shown: str
    kind: str
    name: str
    processes: tuple[Process, ...]
    document: BatchManifest | FlowManifest
    _mark: Mark = field(repr=False, compare=False)
    _authored: Mapping[Field, Field] = field(repr=False, compare=False)

    def process(self, selector: str | None = None) -> Process:
        """Return the process of a name; without a name the only one.

        Raises:
            DponeError: DPONE_MANIFEST_INVALID when there is none, or several and no name.
        """
        found = [p for p in self.processes if selector in (None, "", p.name)]
        if len(found) != 1:
            names = ", ".join(p.name for p in self.processes)
            what = f"no process of the name {selector[:_SHOWN_KEY]}" if selector else "several processes"
            raise DponeError(
                "DPONE_MANIFEST_INVALID",
                f"{self.shown}: the manifest has {what}; it has {names}.",
                next_step="Name one of them with --selector.",
                file=self.shown,
            )
        return found[0]

    def line(self, path: str, *, process: str | None = None) -> int | None:
        """Return the line of a dotted field, or of the nearest field above it that was written.

        Args:
            path: from the top of the document, such as ``sink.table.name`` or ``quality.gates.0.id``.
            process: start at this process instead, wherever it stands.
        """
        parts: Field = tuple(int(part) if part.isdigit() else part for part in path.split("."))
        if process is not None and isinstance(self.document, FlowManifest):
            index = next(i for i, p in enumerate(self.document.loads) if p.name == process)
            parts = ("processes", index, *parts)
        return self._mark.at(_authored(self._authored, parts)).line


def load_manifest(path: Path, *, root: Path) -> LoadedManifest:
    """Read and validate one manifest file.

    Args:
        path: the file.
        root: the folder below which messages name it.

    Raises:
        DponeError: DPONE_MANIFEST_ABSENT; DPONE_MANIFEST_INVALID with ``file``, ``line``, ``field`` of the first
            fault and all of them in ``errors``.
    """
    whole, top = path.absolute(), root.absolute()
    shown = whole.relative_to(top).as_posix() if whole.is_relative_to(top) else path.name
    try:
        if not path.is_file():  # opening a pipe would wait for ever
            raise FileNotFoundError
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise DponeError(
            "DPONE_MANIFEST_ABSENT", f"{shown!r} cannot be read ({type(error).__name__}).", file=shown
        ) from None
    try:
        reading = read_yaml(raw)
    except Unreadable as error:
        raise _refusal(shown, [error.fault]) from None
    return _load(reading, path=path, shown=shown)


def parse_manifest(data: Mapping[str, Any]) -> LoadedManifest:
    """Validate a manifest given as Python data; the same rules, no lines.

    Raises:
        DponeError: DPONE_MANIFEST_INVALID.
    """
    try:
        reading = read_data(data)
    except Unreadable as error:
        raise _refusal("manifest", [error.fault]) from None
    return _load(reading, path=None, shown="manifest")


def _load(reading: Reading, *, path: Path | None, shown: str) -> LoadedManifest:
    faults = list(reading.faults)
    if not isinstance(reading.data, dict):
        raise _refusal(shown, [*faults, Fault(path=(), what="the manifest should be a mapping that begins with kind")])
    if reading.special:
        faults += [fault for fault in nulls(reading.mark) if not _legacy(fault.path)]
    data, authored, found = _canonical(reading.data)
    faults += found
    model = _KINDS.get(kind) if isinstance(kind := data.get("kind"), str) else None
    if model is None:
        near = get_close_matches(str(kind)[:_SHOWN_KEY], _KINDS, n=1) if isinstance(kind, str) else []
        what = f"should be {' or '.join(_KINDS)}" if "kind" in data else f"is missing; it is {' or '.join(_KINDS)}"
        faults.append(Fault(path=("kind",), what=what, nearest=near[0] if near else None))
        # The rest is judged all the same, as what it looks like.
        model = FlowManifest if "processes" in data else BatchManifest
        data = {**data, "kind": next(k for k, m in _KINDS.items() if m is model)}
    document, found = judge(model, data)
    faults += found
    processes: tuple[Process, ...] = ()
    if document is not None:
        if reading.special:
            numbers = numbers_as_text(document, reading.mark)
            faults += [fault for fault in numbers if not _legacy(fault.path) and not free(fault.path)]
        try:
            processes = _in_order(document)
        except _Cycle as cycle:
            faults.append(cycle.fault)
    if faults or document is None:
        placed = [_placed(fault, reading.mark, authored) for fault in faults]
        raise _refusal(shown, placed)
    return LoadedManifest(
        path=path,
        shown=shown,
        kind=document.kind,
        name=document.name,
        processes=processes,
        document=document,
        _mark=reading.mark,
        _authored=authored,
    )


# ----------------------------------------------------------------------------------------- compatibility form


def _legacy(path: Field) -> bool:
    # Judged by compat; its unknown checks may hold anything.
    return path[:2] == ("quality", "checks") or (path[:1] == ("processes",) and path[2:4] == ("quality", "checks"))


def _canonical(data: dict[str, Any]) -> tuple[dict[str, Any], dict[Field, Field], list[Fault]]:
    """Return the document with every quality block in the canonical form, canonical -> authored paths, faults."""
    authored: dict[Field, Field] = {}
    faults: list[Fault] = []

    def translated(owner: Any, prefix: Field) -> Any:
        if not isinstance(owner, dict) or "quality" not in owner:
            return owner
        here = (*prefix, "quality")
        result = canonical_quality(owner["quality"])
        authored.update({(*here, *new): (*here, *old) for new, old in result.authored.items()})
        faults.extend(replace(fault, path=(*here, *fault.path)) for fault in result.faults)
        return {**owner, "quality": result.quality}

    data = translated(data, ())
    if isinstance(processes := data.get("processes"), list):
        data = {**data, "processes": [translated(p, ("processes", i)) for i, p in enumerate(processes)]}
    return data, authored, faults


def _authored(mapping: Mapping[Field, Field], path: Field) -> Field:
    """Return the path as the author wrote it."""
    for length in range(len(path), 0, -1):
        if (written := mapping.get(path[:length])) is not None:
            # A renamed field swallows what lies below it: tolerance.value is tolerance_pct.
            return written if isinstance(path[length - 1], str) else (*written, *path[length:])
    return path


# ------------------------------------------------------------------------------------------------------ order


class _Cycle(Exception):
    def __init__(self, path: Field) -> None:
        self.fault = Fault(path=path, what="the processes depend on each other in a circle")
        super().__init__()


def _in_order(document: BatchManifest | FlowManifest) -> tuple[Process, ...]:
    """Sort processes so that each follows those it depends on; names outside the manifest are asset keys."""
    waiting = {process.name: process for process in document.processes}
    place = {name: index for index, name in enumerate(waiting)}
    done: list[Process] = []
    while waiting:
        ready = next((p for p in waiting.values() if not any(name in waiting for name in p.depends_on)), None)
        if ready is None:
            circular = min(_circle(waiting), key=lambda name: place[name])
            top: Field = ("processes", place[circular]) if isinstance(document, FlowManifest) else ()
            raise _Cycle((*top, "depends_on"))
        done.append(waiting.pop(ready.name))
    return tuple(done)


def _circle(waiting: Mapping[str, Process]) -> set[str]:
    """Return one circle among processes that all wait for each other."""
    trail: list[str] = [next(iter(waiting))]
    while True:
        following = next(name for name in waiting[trail[-1]].depends_on if name in waiting)
        if following in trail:
            return set(trail[trail.index(following) :])
        trail.append(following)


# --------------------------------------------------------------------------------------------------- refusals


def _placed(fault: Fault, mark: Mark, authored: Mapping[Field, Field]) -> Fault:
    path = _authored(authored, fault.path)
    at = mark.at(path)
    return replace(fault, path=path, line=fault.line or at.line, column=fault.column or at.column)


def _refusal(shown: str, faults: list[Fault]) -> DponeError:
    told = list(_once(sorted(faults, key=lambda f: (f.line or 0, f.column or 0))))
    first = told[0]
    more = f" {len(told) - 1} more in this manifest." if len(told) > 1 else ""
    place = {"line": first.line} if first.line else {}
    return DponeError(
        "DPONE_MANIFEST_INVALID",
        f"{shown}{f':{first.line}' if first.line else ''} {_dotted(first.path)}: {first.what}."
        + (f" Did you mean {first.nearest}?" if first.nearest else "")
        + more,
        next_step=first.next_step,
        file=shown,
        **place,
        field=_dotted(first.path),
        errors=[_as_json(fault) for fault in told],
    )


def _once(faults: list[Fault]) -> Iterator[Fault]:
    # What the reader refuses already (a NaN, a bad boolean) is refused by the model again.
    seen: set[tuple[Field, int | None]] = set()
    for fault in faults:
        if (fault.path, fault.line) not in seen:
            seen.add((fault.path, fault.line))
            yield fault


def _as_json(fault: Fault) -> dict[str, Any]:
    entry = {
        "line": fault.line,
        "column": fault.column,
        "field": _dotted(fault.path),
        "message": fault.what,
        "did_you_mean": fault.nearest,
        "next_step": fault.next_step,
    }
    return {key: value for key, value in entry.items() if value is not None}


def _dotted(path: Field) -> str:
    return ".".join(_shown(part) for part in path) or "(document)"


def _shown(part: str | int) -> str:
    text = str(part)
    text = text if len(text) <= _SHOWN_KEY else text[:_SHOWN_KEY] + "..."
    return text if text.isprintable() else ascii(text)
