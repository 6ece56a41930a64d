"""The set digest against values worked out with hashlib alone."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from dpone_dagster.contracts.set_digest import EMPTY, SetDigest

LANE = st.integers(min_value=0, max_value=2**64 - 1)
DIGESTS = st.builds(SetDigest, st.integers(min_value=0, max_value=2**40), st.tuples(LANE, LANE, LANE, LANE))


def row(text: str) -> SetDigest:
    """One row by the definition: SHA-256 cut into four big-endian unsigned 64-bit lanes."""
    hex_digits = hashlib.sha256(text.encode()).hexdigest()
    a, b, c, d = (int(hex_digits[i : i + 16], 16) for i in range(0, 64, 16))
    return SetDigest(1, (a, b, c, d))


def test_sum_wraps_in_each_lane_alone() -> None:
    total = SetDigest(2, (2**64 - 1, 5, 0, 2**63)) + SetDigest(3, (1, 6, 0, 2**63))
    assert total == SetDigest(5, (0, 11, 0, 0))


def test_digest_text() -> None:
    text = (
        '{"lanes":["18446744073709551615","0","1","2"],"row_encoding":"dpone_row_v1",'
        '"rows":3,"schema":"dpone.scope-set-digest.v1"}'
    )
    expected = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    assert SetDigest(3, (2**64 - 1, 0, 1, 2)).sha256 == expected


def test_empty() -> None:
    text = '{"lanes":["0","0","0","0"],"row_encoding":"dpone_row_v1","rows":0,"schema":"dpone.scope-set-digest.v1"}'
    assert EMPTY.sha256 == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@given(DIGESTS, DIGESTS, DIGESTS)
def test_order_and_grouping_do_not_matter(a: SetDigest, b: SetDigest, c: SetDigest) -> None:
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + EMPTY == a
    assert all(0 <= lane < 2**64 for lane in (a + b).lanes)


@given(st.lists(st.text(max_size=5), max_size=6), st.lists(st.text(max_size=5), max_size=6))
def test_equal_exactly_for_equal_multisets(first: list[str], second: list[str]) -> None:
    digests = [sum((row(text) for text in rows), start=EMPTY) for rows in (first, second)]
    assert (digests[0] == digests[1]) == (sorted(first) == sorted(second))
    assert (digests[0].sha256 == digests[1].sha256) == (sorted(first) == sorted(second))


def test_a_row_twice_is_not_a_row_once() -> None:
    assert row("1:7") + row("1:7") != row("1:7")
    # Two rows whose lanes cancel out still count.
    assert SetDigest(1, (1, 0, 0, 0)) + SetDigest(1, (2**64 - 1, 0, 0, 0)) != EMPTY
