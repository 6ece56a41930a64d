"""The field types that documents share: digests, instants, ids and counts, each in one exact form."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Uuid = Annotated[str, Field(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
Text = Annotated[str, Field(min_length=1, max_length=512)]
Slug = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
WorkflowMode = Literal["normal", "complete_scope_replay", "failed_precommit_replacement"]
MssqlOutcome = Literal["NOT_INVOKED", "ROLLED_BACK", "COMMITTED_WITH_IMAGES", "COMMIT_UNKNOWN"]
ProofStatus = Literal["PROVEN", "NONCONFORMANT", "UNVERIFIED"]  # only PROVEN executes

_SECOND = "%Y-%m-%dT%H:%M:%SZ"
_MICROSECOND = "%Y-%m-%dT%H:%M:%S.%fZ"


def instant_text(moment: datetime) -> str:
    """Write a UTC moment as documents do: ``2026-08-07T12:34:56Z``, fractions of a second cut off."""
    return _utc_text(moment, "seconds")


def instant_micros_text(moment: datetime) -> str:
    """Write a UTC moment to the microsecond: ``2026-08-07T12:34:56.000000Z``."""
    return _utc_text(moment, "microseconds")


def _utc_text(moment: datetime, timespec: str) -> str:
    if moment.tzinfo is None:
        raise ValueError("a moment without a zone is not UTC")
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec=timespec) + "Z"


def _exists(text: str) -> str:
    form = _MICROSECOND if "." in text else _SECOND
    datetime.strptime(text, form)  # noqa: DTZ007 - the Z is part of the form; ValueError for February 30
    return text


# Text, not datetime: two texts of one moment would be two digests.
Instant = Annotated[
    str,
    Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$"),
    AfterValidator(_exists),
]
InstantMicros = Annotated[
    str,
    Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z$"),
    AfterValidator(_exists),
]
Midnight = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T00:00:00Z$"), AfterValidator(_exists)]


def require_one_day(scope_start: str, scope_end: str) -> None:
    """Raise ValueError unless ``scope_end`` is the UTC midnight after ``scope_start``."""
    start, end = (datetime.strptime(text, _SECOND) for text in (scope_start, scope_end))  # noqa: DTZ007
    if end - start != timedelta(days=1):
        raise ValueError("scope_end should be the midnight after scope_start")


def require_unique(field: str, values: Sequence[str | int]) -> None:
    """Raise ValueError when ``values`` repeats an item."""
    if len(set(values)) != len(values):
        raise ValueError(f"{field} repeats an item")


def require_sorted_set(field: str, values: Sequence[str] | Sequence[int]) -> None:
    """Raise ValueError unless ``values`` ascends: a set has one text, so it has one digest."""
    if any(a >= b for a, b in pairwise(values)):  # type: ignore[operator]
        raise ValueError(f"{field} should be sorted, each item once")


def require_exactly_when(condition: bool, why: str, **optionals: object) -> None:
    """Raise ValueError unless every optional is present exactly when ``condition`` holds."""
    for field, value in optionals.items():
        if (value is not None) != condition:
            raise ValueError(f"{field} belongs to {why} and nowhere else, and is required there")
