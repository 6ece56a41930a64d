"""How documents write moments, and the set rules that several of them share."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from dpone_dagster.contracts.fields import (
    instant_micros_text,
    instant_text,
    require_exactly_when,
    require_one_day,
    require_sorted_set,
    require_unique,
)

MOMENT = datetime(2026, 8, 7, 14, 34, 56, 120, tzinfo=timezone(timedelta(hours=2)))


def test_moments_are_written_in_utc() -> None:
    assert instant_text(MOMENT) == "2026-08-07T12:34:56Z"
    assert instant_micros_text(MOMENT) == "2026-08-07T12:34:56.000120Z"
    assert instant_micros_text(datetime(2026, 8, 7, tzinfo=UTC)) == "2026-08-07T00:00:00.000000Z"
    assert instant_text(datetime(999, 1, 1, tzinfo=UTC)) == "0999-01-01T00:00:00Z"


@pytest.mark.parametrize("write", [instant_text, instant_micros_text])
def test_a_moment_without_a_zone_is_refused(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="zone"):
        write(datetime(2026, 8, 7))


def test_rules() -> None:
    require_one_day("2024-02-29T00:00:00Z", "2024-03-01T00:00:00Z")
    require_unique("f", [1, 2])
    require_sorted_set("f", ["a", "b"])
    require_exactly_when(True, "x", f=0, g="")  # present, though falsy
    require_exactly_when(False, "x", f=None)
    for broken in (
        lambda: require_one_day("2023-02-28T00:00:00Z", "2023-03-02T00:00:00Z"),
        lambda: require_unique("f", ["a", "a"]),
        lambda: require_sorted_set("f", ["b", "a"]),
        lambda: require_sorted_set("f", [1, 1]),
        lambda: require_exactly_when(True, "x", f=None),
        lambda: require_exactly_when(False, "x", f=0),
    ):
        with pytest.raises(ValueError, match=r"f|scope_end"):
            broken()
