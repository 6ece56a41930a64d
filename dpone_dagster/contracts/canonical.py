"""Canonical JSON and the digest over it; every identity of the product rests on these two functions."""

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Encode a JSON value in the one form that digests are taken over.

    Args:
        value: dicts with string keys, lists, strings, integers, booleans and None.

    Returns:
        UTF-8 bytes: sorted keys, compact separators, ASCII escapes, no NaN.

    Raises:
        ValueError: for NaN and infinities.
        TypeError: for values that JSON does not have, and for keys that are not strings.
    """
    refuse_foreign_keys(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def sha256_of(value: Any) -> str:
    """Return ``sha256:`` and the lower-case hex SHA-256 of the canonical JSON of ``value``."""
    return sha256_bytes(canonical_json(value))


def sha256_bytes(data: bytes) -> str:
    """Return ``sha256:`` and the lower-case hex SHA-256 of ``data``."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def refuse_foreign_keys(value: Any) -> None:
    """Raise TypeError where a dict inside ``value`` has a key that is not a string."""
    # json.dumps turns 1, True and None into the keys "1", "true" and "null": two documents, one digest.
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"canonical JSON keys are strings, not {type(key).__name__}")
            refuse_foreign_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            refuse_foreign_keys(item)
