"""What each engine's SQL must say so that one set of rows has one digest everywhere (``dpone_row_v1``)."""

from collections.abc import Sequence
from typing import Any

from dpone_dagster.contracts.set_digest import LANE_MODULUS, SetDigest


def parse(row: Sequence[Any]) -> SetDigest:
    """Turn the one row that a dialect's ``set_digest_sql`` yields into a digest.

    Args:
        row: count and four lane sums, as ints or integral decimals.

    Raises:
        ValueError: when the row is not of that form: the SQL or the driver did something else.
    """
    if len(row) != 5 or any(value is None or value != int(value) for value in row):
        raise ValueError("a set digest is five whole numbers")
    rows, l0, l1, l2, l3 = (int(value) for value in row)
    if rows < 0 or not all(0 <= lane < LANE_MODULUS for lane in (l0, l1, l2, l3)):
        raise ValueError("a set digest has a count and four lanes in [0, 2**64)")
    return SetDigest(rows, (l0, l1, l2, l3))
