"""Canonical JSON against hand-worked literals and an encoder written without the json module."""

import enum
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpone_dagster.contracts.canonical import canonical_json, sha256_bytes, sha256_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


def encode(value: object) -> str:
    """The canonical rule, spelled out."""
    if value is None:
        return "null"
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, int):
        return f"{value:d}"
    if isinstance(value, str):
        return '"' + "".join(encode_char(c) for c in value) + '"'
    if isinstance(value, list):
        return "[" + ",".join(encode(item) for item in value) + "]"
    assert isinstance(value, dict)
    return "{" + ",".join(f"{encode(k)}:{encode(value[k])}" for k in sorted(value)) + "}"


def encode_char(char: str) -> str:
    named = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
    if char in named:
        return named[char]
    point = ord(char)
    if 0x20 <= point <= 0x7E:
        return char
    if point <= 0xFFFF:
        return f"\\u{point:04x}"
    point -= 0x10000
    return f"\\u{0xD800 + (point >> 10):04x}\\u{0xDC00 + (point & 0x3FF):04x}"


@given(VALUES)
def test_equals_an_independent_encoder(value: object) -> None:
    text = encode(value)
    assert canonical_json(value) == text.encode("ascii")
    assert sha256_of(value) == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@given(st.dictionaries(st.text(max_size=4), st.integers(), min_size=2, max_size=6))
def test_order_of_insertion_does_not_matter(value: dict[str, int]) -> None:
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


@given(VALUES, VALUES)
def test_different_values_have_different_bytes(a: object, b: object) -> None:
    # Python holds 1 and True for equal, JSON does not: compare what was spelled out.
    assert (canonical_json(a) == canonical_json(b)) == (encode(a) == encode(b))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, b"{}"),
        ([], b"[]"),
        ((1, 2), b"[1,2]"),
        ({"b": 1, "a": [True, False, None]}, b'{"a":[true,false,null],"b":1}'),
        ({"B": 1, "a": 2, "_": 3, "": 4}, b'{"":4,"B":1,"_":3,"a":2}'),
        ("Zürich", b'"Z\\u00fcrich"'),
        ("\N{SNOWMAN}", b'"\\u2603"'),
        ("\N{PILE OF POO}", b'"\\ud83d\\udca9"'),
        ('"\\/', b'"\\"\\\\/"'),
        ("\x00\x1f\x7f", b'"\\u0000\\u001f\\u007f"'),
        # Sorted by code point, not by UTF-16 unit: U+FF01 before U+1F4A9.
        ({"\U0001f4a9": 1, "\uff01": 2}, b'{"\\uff01":2,"\\ud83d\\udca9":1}'),
        (2**63, b"9223372036854775808"),
        (-1, b"-1"),
        (0.1, b"0.1"),
    ],
)
def test_hand_worked(value: object, expected: bytes) -> None:
    assert canonical_json(value) == expected


def test_digest_of_known_bytes() -> None:
    # SHA-256 of nothing and of "abc": the published test values of FIPS 180.
    empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    abc = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_bytes(b"") == empty
    assert sha256_bytes(b"abc") == abc


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_refuses_what_is_no_number(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": [value]})


@pytest.mark.parametrize("key", [1, 1.5, True, None, (1, 2), b"a"])
@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: [d], lambda d: {"a": (d,)}])
def test_refuses_keys_that_are_not_text(key: object, wrap: object) -> None:
    with pytest.raises(TypeError, match="keys are strings"):
        canonical_json(wrap({key: 1}))  # type: ignore[operator]


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, object(), 1j])
def test_refuses_foreign_values(value: object) -> None:
    with pytest.raises(TypeError):
        canonical_json(value)


def test_an_enum_of_text_is_its_text() -> None:
    class Colour(enum.StrEnum):
        RED = "red"

    assert canonical_json([Colour.RED]) == b'["red"]'
