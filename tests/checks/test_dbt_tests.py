from types import SimpleNamespace
from typing import Any

import pytest

from checks.dbt_tests import DbtTest, dbt_tests
from dpone_dagster.errors import DponeError


def workflow(*tests: str, gate: str = "counts") -> Any:
    """Two marts, as far as a test's place depends on them."""
    marts = (
        SimpleNamespace(name="trips", model_unique_id="model.p.trips", gates=(SimpleNamespace(id=gate),)),
        SimpleNamespace(name="stops", model_unique_id="model.p.stops", gates=()),
    )
    return SimpleNamespace(marts=marts, closure=SimpleNamespace(selected_read_only_node_ids=tests))


MANIFEST = {
    "nodes": {
        "test.generic": {
            "name": "accepted_values_stops_kind__a.b",
            "attached_node": "model.p.stops",
            "column_name": "kind",
            "test_metadata": {"name": "accepted_values"},
            "config": {"severity": "WARN"},
            "depends_on": {"nodes": ["model.p.stops"]},
        },
        "test.singular": {
            "name": "trips_have_stops",
            "description": " Every trip stops somewhere. ",
            "config": {"severity": "ERROR"},
            "depends_on": {"nodes": ["source.p.raw", "model.p.stops", "model.p.trips"]},
        },
    }
}


def test_a_test_hangs_on_its_model_or_on_the_first_that_it_reads() -> None:
    assert dbt_tests(MANIFEST, workflow("test.generic", "test.singular")) == {
        "trips": (),
        "stops": (
            DbtTest(
                unique_id="test.generic",
                name="accepted_values_stops_kind__a_b",
                description="accepted_values on kind.",
                blocks=False,
            ),
            DbtTest(
                unique_id="test.singular",
                name="trips_have_stops",
                description="Every trip stops somewhere.",
                blocks=True,
            ),
        ),
    }


def test_two_checks_of_one_name_refuse() -> None:
    manifest = {"nodes": {"test.x": {**MANIFEST["nodes"]["test.singular"], "attached_node": "model.p.trips"}}}
    with pytest.raises(DponeError) as refusal:
        dbt_tests(manifest, workflow("test.x", gate="trips_have_stops"))
    assert refusal.value.code == "DPONE_CONTRACT_INVALID"
    assert refusal.value.sentence == "Two checks of trips are named trips_have_stops."
