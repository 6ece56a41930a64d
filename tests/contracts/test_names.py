"""Derived names: their exact text, their limits, and that different things have different names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpone_dagster.contracts import names
from dpone_dagster.errors import DponeError

OPERATION = "sha256:0123456789abcdef" + "f" * 48
UUID = "0198f11c-6956-74f2-984b-4cfcb1653b87"


def test_exact_texts() -> None:
    assert names.short_id(OPERATION) == "0123456789abcdef"
    assert names.stage_name("events", OPERATION) == "events__dpone_stage__0123456789abcdef"
    assert names.shadow_name("events", OPERATION, 7) == "events__dpone_shadow__0123456789abcdef_7"
    assert names.predecessor_name("events", UUID) == "events__dpone_prev__0198f11c695674f2984b4cfcb1653b87"
    assert names.image_name(OPERATION, "before") == "op_0123456789abcdef_before"
    assert names.query_prefix(OPERATION) == "dpone-0123456789abcdef-"
    assert names.session_tag(UUID) == "dpone-0198f11c-6956-74f2-984b-4cfcb1653b87"


@pytest.mark.parametrize(
    ("make", "longest"),
    [
        # 150 bytes less the fixed parts: 15 + 16, 16 + 16 + 1 + 1, 14 + 32.
        (lambda table: names.stage_name(table, OPERATION), 119),
        (lambda table: names.shadow_name(table, OPERATION, 7), 116),
        (lambda table: names.predecessor_name(table, UUID), 104),
        # 63 bytes less 3 + 16 + 1, and less 6.
        (lambda side: names.image_name(OPERATION, side), 43),
        (lambda worker: names.session_tag(worker), 57),
    ],
)
def test_limits_are_in_bytes(make, longest) -> None:  # type: ignore[no-untyped-def]
    assert len(make("t" * longest)) in (63, 150)
    for too_long in ("t" * (longest + 1), "t" * (longest - 1) + "é"):
        with pytest.raises(DponeError) as caught:
            make(too_long)
        assert caught.value.code == "DPONE_NAME_TOO_LONG"


def test_every_mart_fits() -> None:
    table = "t" * 63  # the longest identifier that a declaration may have
    names.stage_name(table, OPERATION)
    names.shadow_name(table, OPERATION, 2**63 - 1)
    names.predecessor_name(table, UUID)


@given(st.sets(st.integers(min_value=1, max_value=2**63 - 1), min_size=2, max_size=2))
def test_epochs_make_different_shadows(epochs: set[int]) -> None:
    first, second = (names.shadow_name("events", OPERATION, epoch) for epoch in epochs)
    assert first != second


@given(st.text("0123456789abcdef", min_size=64, max_size=64), st.sampled_from(["stage", "shadow", "prev"]))
def test_no_name_of_one_kind_is_of_another(digest: str, kind: str) -> None:
    made = {
        "stage": names.stage_name("events", "sha256:" + digest),
        "shadow": names.shadow_name("events", "sha256:" + digest, 1),
        "prev": names.predecessor_name("events", digest[:32]),
    }
    assert [k for k in made if f"__dpone_{k}__" in made[kind]] == [kind]
