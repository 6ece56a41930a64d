"""YAML text, or plain Python data, to JSON-like data with the place of every node.

The parser's events are taken as they come and no object is ever constructed from a tag. The rules are narrower than
YAML's: only ``true`` and ``false`` are booleans, only decimal digits are integers, a number with a point stays the text
that was written, and whatever two readers could understand differently is refused.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from math import isfinite
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

MAX_BYTES = 1_048_576
MAX_DEPTH = 32
MAX_NODES = 50_000  # aliases count as often as they are used

Path = tuple[str | int, ...]

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_DECIMAL = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_ALMOST_BOOLEANS = frozenset({"True", "TRUE", "False", "FALSE"})
_MAX_DIGITS = 40

# libyaml is part of PyYAML's wheels; the pure parser gives the same events, slower.
_Parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Mark(NamedTuple):
    """Where a node was written (both from 1; None for Python data), and the marks of what it holds.

    ``kind`` is ``null`` or ``number`` (text that was a number with a point), else empty.
    """

    line: int | None
    column: int | None
    children: "dict[str, Mark] | list[Mark] | None" = None
    kind: str = ""

    def at(self, path: Path) -> "Mark":
        """Return the mark of ``path``, or of its nearest ancestor that was written."""
        mark = self
        for part in path:
            inner: Mark | None = None
            if isinstance(mark.children, dict):
                inner = mark.children.get(str(part))
            elif isinstance(mark.children, list) and isinstance(part, int) and part < len(mark.children):
                inner = mark.children[part]
            if inner is None:
                break
            mark = inner
        return mark

    def of_kind(self, kind: str, path: Path = ()) -> Iterator[Path]:
        """Yield the paths of all nodes of a kind."""
        if self.kind == kind:
            yield path
        items = self.children.items() if isinstance(self.children, dict) else enumerate(self.children or ())
        for key, mark in items:
            yield from mark.of_kind(kind, (*path, key))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that is wrong: where, what, and what was probably meant. Never holds an authored value."""

    path: Path
    what: str
    nearest: str | None = None
    next_step: str | None = None
    line: int | None = None
    column: int | None = None


class Unreadable(Exception):
    """The text is no document at all; nothing more can be said about it than ``fault``."""

    def __init__(self, what: str, line: int | None = None, column: int | None = None, path: Path = ()) -> None:
        self.fault = Fault(path=path, what=what, line=line, column=column)
        super().__init__(what)


_NOWHERE = Mark(None, None)


@dataclass(kw_only=True)
class Reading:
    """What was read: JSON-like data, its marks, and what no manifest may say whatever the field."""

    data: Any = None
    mark: Mark = _NOWHERE
    faults: list[Fault] = field(default_factory=list)
    special: bool = False  # some node is null or a number with a point
    _nodes: int = 0

    def _count(self, depth: int, line: int | None, column: int | None, path: Path) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise Unreadable(f"the document has more than {MAX_NODES} nodes, aliases included", line, column)
        if depth > MAX_DEPTH:
            raise Unreadable(f"the document is nested deeper than {MAX_DEPTH} levels", line, column)

    def _fault(self, path: Path, what: str, line: int | None, column: int | None, nearest: str | None = None) -> None:
        self.faults.append(Fault(path=path, what=what, nearest=nearest, line=line, column=column))


def read_yaml(raw: bytes) -> Reading:
    """Read one YAML document.

    Raises:
        Unreadable: for bytes that are no YAML document of sane size.
    """
    if len(raw) > MAX_BYTES:
        raise Unreadable(f"the file is larger than {MAX_BYTES} bytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable("the file is not UTF-8", raw[: error.start].count(b"\n") + 1) from None
    try:
        return _YamlReader(text).read()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # The parser's constant sentences; its messages with snippets would quote the file.
        what = f"the text is not YAML: {error.problem or error.context or 'it cannot be parsed'}"
        raise Unreadable(what, mark and mark.line + 1, mark and mark.column + 1) from None
    except yaml.reader.ReaderError as error:
        line = text.encode()[: error.position].count(b"\n") + 1
        raise Unreadable("the text has a control character that YAML does not allow", line) from None


class _YamlReader(Reading):
    def __init__(self, text: str) -> None:
        super().__init__()
        self._parser = _Parser(text)
        self._anchors: dict[str, tuple[Any, Mark, int]] = {}

    def read(self) -> Reading:
        take = self._parser.get_event
        take()  # start of the stream
        event = take()
        if isinstance(event, yaml.StreamEndEvent):
            raise Unreadable("the file is empty", 1)
        event = take()
        self.data, self.mark = self._node(event, event.start_mark.line + 1, event.start_mark.column + 1, 1, ())
        take()  # end of the document
        event = take()
        if not isinstance(event, yaml.StreamEndEvent):
            raise Unreadable("the file has a second document", event.start_mark.line + 1)
        return self

    def _node(self, event: Any, line: int, column: int, depth: int, path: Path) -> tuple[Any, Mark]:
        self._count(depth, line, column, path)
        if isinstance(event, yaml.AliasEvent):
            known = self._anchors.get(event.anchor)
            if known is None:
                raise Unreadable("an alias names an anchor that is not complete before it", line, column)
            value, mark, nodes = known
            self._nodes += nodes  # refused by the next count, before anybody walks the expansion
            self._count(depth + _depth(mark), line, column, path)
            return value, mark._replace(line=line, column=column)
        before = self._nodes
        if event.tag is not None:
            self._fault(path, "tags (!) are not used in manifests", line, column)
        if isinstance(event, yaml.ScalarEvent):
            value, mark = self._scalar(event, line, column, path)
        elif isinstance(event, yaml.SequenceStartEvent):
            value, mark = self._list(line, column, depth, path)
        else:
            value, mark = self._mapping(line, column, depth, path)
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, mark, self._nodes - before)
        return value, mark

    def _list(self, line: int, column: int, depth: int, path: Path) -> tuple[list[Any], Mark]:
        values: list[Any] = []
        marks: list[Mark] = []
        while not isinstance(event := self._parser.get_event(), yaml.SequenceEndEvent):
            at = event.start_mark
            value, mark = self._node(event, at.line + 1, at.column + 1, depth + 1, (*path, len(values)))
            values.append(value)
            marks.append(mark)
        return values, Mark(line, column, marks)

    def _mapping(self, line: int, column: int, depth: int, path: Path) -> tuple[dict[str, Any], Mark]:
        values: dict[str, Any] = {}
        marks: dict[str, Mark] = {}
        while not isinstance(event := self._parser.get_event(), yaml.MappingEndEvent):
            at = event.start_mark
            key_line, key_column = at.line + 1, at.column + 1
            if not isinstance(event, yaml.ScalarEvent):
                raise Unreadable("a key should be text", key_line, key_column, path)
            key = event.value
            if event.tag is not None or (event.style in (None, "") and not _is_text(key)):
                self._fault(path, "a key should be text: quote it", key_line, key_column)
            if "\0" in key:
                self._fault(path, "a key has a NUL character", key_line, key_column)
            if event.anchor is not None:
                raise Unreadable("an anchor stands on a key", key_line, key_column, path)
            inner = (*path, key)
            value, mark = self._node(self._parser.get_event(), key_line, key_column, depth + 1, inner)
            if key in values:
                # The first one stays, so that the rest of the document can be judged.
                self._fault(
                    inner, f"the key is repeated; it stands in line {marks[key].line} already", key_line, key_column
                )
                continue
            values[key] = value
            marks[key] = mark
        return values, Mark(line, column, marks)

    def _scalar(self, event: Any, line: int, column: int, path: Path) -> tuple[Any, Mark]:
        text: str = event.value
        if "\0" in text:
            self._fault(path, "the text has a NUL character", line, column)
        if event.style not in (None, ""):
            return text, Mark(line, column)
        if text == "true":
            return True, Mark(line, column)
        if text == "false":
            return False, Mark(line, column)
        if text in _NULLS:
            self.special = True
            return None, Mark(line, column, kind="null")
        if text[0] in "0123456789.+-":
            if _INTEGER.fullmatch(text):
                if len(text) > _MAX_DIGITS:
                    self._fault(
                        path, f"a number has at most {_MAX_DIGITS} digits; quote it if it is text", line, column
                    )
                    return 0, Mark(line, column)
                return int(text), Mark(line, column)
            if _DECIMAL.fullmatch(text):
                self.special = True
                return text, Mark(line, column, kind="number")
            if _NOT_FINITE.fullmatch(text):
                self._fault(path, "infinities and NaN are no values; quote it if it is text", line, column)
        elif text in _ALMOST_BOOLEANS:
            what = "should be written true or false; quote it if it is text"
            self._fault(path, what, line, column, text.lower())
        return text, Mark(line, column)


def _is_text(plain: str) -> bool:
    # on, off, yes and no are text here, as everywhere in a manifest.
    return not (
        plain in _NULLS
        or plain in _ALMOST_BOOLEANS
        or plain in ("true", "false")
        or _INTEGER.fullmatch(plain)
        or _DECIMAL.fullmatch(plain)
    )


def _depth(mark: Mark) -> int:
    if not mark.children:
        return 0
    children = mark.children.values() if isinstance(mark.children, dict) else mark.children
    return 1 + max(_depth(child) for child in children)


def read_data(data: Any) -> Reading:
    """Copy JSON-like Python data under the same rules; tuples, dates and Decimals are taken too.

    Raises:
        Unreadable: for data that is too large or too deep, cycles included.
    """
    reading = Reading()
    reading.data, reading.mark = _copy(reading, data, 1, ())
    return reading


def _copy(reading: Reading, value: Any, depth: int, path: Path) -> tuple[Any, Mark]:
    reading._count(depth, None, None, path)
    mark = Mark(None, None)
    if isinstance(value, dict):
        values: dict[str, Any] = {}
        marks: dict[str, Mark] = {}
        for key, item in value.items():
            if not isinstance(key, str) or not _encodable(key):
                reading._fault(path, "a key should be text", None, None)
                continue
            values[key], marks[key] = _copy(reading, item, depth + 1, (*path, key))
        return values, Mark(None, None, marks)
    if isinstance(value, list | tuple):
        pairs = [_copy(reading, item, depth + 1, (*path, index)) for index, item in enumerate(value)]
        return [item for item, _ in pairs], Mark(None, None, [inner for _, inner in pairs])
    if value is None:
        reading.special = True
        return None, Mark(None, None, kind="null")
    if isinstance(value, str):
        if not _encodable(value):
            reading._fault(path, "the text has a NUL character or half a surrogate pair", None, None)
            return "", mark
        return str(value), mark
    if isinstance(value, Decimal) and value.is_finite() and abs(value.adjusted()) <= _MAX_DIGITS:
        reading.special = True
        return format(value, "f"), Mark(None, None, kind="number")
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) < 10**_MAX_DIGITS):
        return value, mark
    if isinstance(value, float) and isfinite(value):
        return value, mark  # a field that takes decimals refuses it; the options of a provider may hold it
    if isinstance(value, date) and not isinstance(value, datetime):
        return value.isoformat(), mark
    reading._fault(path, f"a {type(value).__name__} of this value has no place in a manifest", None, None)
    return "", mark


def _encodable(text: str) -> bool:
    if "\0" in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
