"""What the engines of a load share when they run hooks.

What an engine answers becomes a code and a number; its text stays out.
"""

import math
from decimal import Decimal
from typing import Any

from dpone_dagster.errors import DponeError

CONNECT_SECONDS = 10
GRACE_SECONDS = 30.0  # how much longer than its own deadline an engine may keep silent


def not_sent(engine: str, error: Exception) -> DponeError:
    """Say that an engine could not be reached, so that the hook may be run again."""
    return DponeError(
        "DPONE_HOOK_FAILED",
        f"{engine} could not be reached ({type(error).__name__}); nothing was sent.",
        next_step="Start the engine, then run the same command again.",
        statement=0,
        repeatable=True,
    )


def one_number(rows: list[Any]) -> int | None:
    """Return the one whole number, or None for NULL, that a query yields in its one row.

    Raises:
        DponeError: DPONE_HOOK_FAILED for anything else.
    """
    if len(rows) == 1 and len(rows[0]) == 1:
        value = rows[0][0]
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        if isinstance(value, Decimal | float) and math.isfinite(value) and value == int(value):
            return int(value)
    raise DponeError(
        "DPONE_HOOK_FAILED", "The query should yield one row with one whole number or NULL.", repeatable=False
    )
