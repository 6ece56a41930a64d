"""What every gate compares, each rule once: pure functions from counted facts to a verdict.

The engines count; nothing here asks them. A number that could not be had is None and never zero; with one of them a
rule has no verdict, and a gate without a verdict proves nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Context, Decimal, Inexact
from typing import Any, Literal

from dpone_dagster.contracts.set_digest import SetDigest

Metric = int | str | None
Metrics = Mapping[str, Metric]

REDACTED = "[redacted]"
TEXT_LIMIT = 100

# Enough for every count times every percentage that a manifest can hold; what does not fit is an error, not a rounding.
_EXACT = Context(prec=200, traps=[Inexact])
_SECRET = re.compile(
    r"pass(word|wd|phrase)|pwd|secret|token|credential|authori[sz]ation|bearer|cookie|dsn|conninfo|connection_string"
    r"|(^|[_\W])key($|[\W=])|(api|access|private)_?key",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a rule came to.

    Attributes:
        ok: whether it holds; None where nobody can tell.
        metrics: the numbers behind it; names of columns and values of rows are none.
        message: what is wrong, without values; empty when it holds.
    """

    ok: bool | None
    metrics: Metrics = field(default_factory=dict)
    message: str = ""


def status(verdict: bool | None, severity: str) -> Literal["passed", "failed", "warned", "skipped"]:
    """Return the status of a gate: what could not be told fails under ``error`` and is skipped under ``warning``."""
    if verdict:
        return "passed"
    if severity == "error":
        return "failed"
    return "skipped" if verdict is None else "warned"


def count(value: Any) -> int | None:
    """Return a count, or None for everything that is none: negative numbers, bools, floats, text."""
    return value if type(value) is int and value >= 0 else None


def redacted(metrics: Metrics) -> dict[str, Metric]:
    """Return the metrics without what may be a secret: values under such names, and long or telling text."""
    return {name: _redacted(name, value) for name, value in metrics.items()}


def _redacted(name: str, value: Metric) -> Metric:
    if _SECRET.search(name):
        return REDACTED
    if isinstance(value, str) and (len(value) > TEXT_LIMIT or _SECRET.search(value)):
        return REDACTED
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return REDACTED if abs(value) >= 10**TEXT_LIMIT else str(value)  # what shows it knows 64 bits
    return value


def number_text(value: Decimal) -> int | str:
    """Return a decimal as an int where it is one, else as plain text, never as a binary float."""
    return int(value) if value == value.to_integral_value() else format(value, "f")


# ------------------------------------------------------------------------------------------------- reconciling


def allowed_difference(source: int | None, *, mode: Literal["absolute", "pct"], value: Decimal) -> Decimal | None:
    """Return the tolerated difference in rows, exactly; None where it hangs on a count that is missing."""
    if mode == "absolute":
        return value
    return None if source is None else _EXACT.multiply(Decimal(source), value).scaleb(-2, _EXACT)


def row_counts(
    source: Any, target: Any, *, mode: Literal["absolute", "pct"] = "absolute", value: Decimal = Decimal(0)
) -> Verdict:
    """Both sides hold as many rows, give or take the tolerance: rows, or percent of the source's.

    0 and 0 agree. Rows out of nothing are never a tolerable difference.
    """
    source, target = count(source), count(target)
    allowed = allowed_difference(source, mode=mode, value=value)
    metrics: dict[str, Metric] = {
        "source_row_count": source,
        "target_row_count": target,
        "allowed_difference": None if allowed is None else number_text(allowed),
    }
    if source is None or target is None or allowed is None:
        return Verdict(ok=None, metrics=metrics, message="a row count is missing")
    difference = metrics["difference"] = abs(source - target)
    ok = difference <= allowed and not (source == 0 and target > 0)
    return Verdict(ok=ok, metrics=metrics, message="" if ok else f"row counts differ by {difference}")


def typed_hash(source: Any, target: Any) -> Verdict:
    """Both sides hold the same rows, value by value; what is no ``SetDigest`` is a missing one."""
    source, target = _digest(source), _digest(target)
    metrics: dict[str, Metric] = {
        "source_digest": source.sha256 if source else None,
        "target_digest": target.sha256 if target else None,
        "source_row_count": source.rows if source else None,
        "target_row_count": target.rows if target else None,
    }
    if source is None or target is None:
        return Verdict(ok=None, metrics=metrics, message="a digest is missing")
    ok = source == target
    return Verdict(ok=ok, metrics=metrics, message="" if ok else "the digests differ")


def _digest(value: Any) -> SetDigest | None:
    return value if isinstance(value, SetDigest) and count(value.rows) is not None else None


# ---------------------------------------------------------------------------------------------------- one side


def min_rows(rows: Any, *, threshold: int, side: str) -> Verdict:
    """One side holds ``threshold`` rows or more."""
    rows = count(rows)
    metrics: dict[str, Metric] = {"row_count": rows, "threshold": threshold, "side": side}
    if rows is None:
        return Verdict(ok=None, metrics=metrics, message="the row count is missing")
    ok = rows >= threshold
    return Verdict(ok=ok, metrics=metrics, message="" if ok else f"{rows} rows, at least {threshold} wanted")


def no_rows(rows: Any, *, metric: str, side: str, fault: str) -> Verdict:
    """No row breaks a rule; ``fault`` says what the counted rows do."""
    rows = count(rows)
    metrics: dict[str, Metric] = {metric: rows, "side": side}
    if rows is None:
        return Verdict(ok=None, metrics=metrics, message="the count of rows is missing")
    return Verdict(ok=rows == 0, metrics=metrics, message="" if rows == 0 else f"{rows} rows {fault}")


def fresh(newest: Any, *, reference: datetime, max_age: timedelta, side: str) -> Verdict:
    """The newest moment is at most ``max_age`` older than the reference; without any moment nothing is fresh."""
    metrics: dict[str, Metric] = {
        "age_seconds": None,
        "max_age_seconds": max_age // timedelta(seconds=1),
        "side": side,
    }
    if newest is None:
        return Verdict(ok=False, metrics=metrics, message="there is no value to be fresh")
    if not isinstance(newest, datetime) or newest.utcoffset() is None:
        return Verdict(ok=None, metrics=metrics, message="the newest value is no moment in UTC")
    age = reference - newest
    metrics["age_seconds"] = age // timedelta(seconds=1)
    ok = age <= max_age
    return Verdict(ok=ok, metrics=metrics, message="" if ok else f"{_age(age)} old, at most {_age(max_age)} wanted")


def _age(age: timedelta) -> str:
    seconds = age // timedelta(seconds=1)
    return f"{seconds // 86_400:,} days" if seconds >= 2 * 86_400 else f"{seconds:,} seconds"


def within(value: Any, *, low: Decimal | None, high: Decimal | None, side: str) -> Verdict:
    """A number lies between two ends, both included; an absent end bounds nothing."""
    metrics: dict[str, Metric] = {
        "value": None,
        "min": None if low is None else number_text(low),
        "max": None if high is None else number_text(high),
        "side": side,
    }
    if type(value) not in (int, Decimal) or not Decimal(value).is_finite():
        return Verdict(ok=None, metrics=metrics, message="the query yields no exact number")
    metrics["value"] = number_text(Decimal(value))
    ok = (low is None or value >= low) and (high is None or value <= high)
    return Verdict(ok=ok, metrics=metrics, message="" if ok else "the number is out of its bounds")
