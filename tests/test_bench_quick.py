"""The benchmark itself still works: every figure over toy sizes. What the numbers say is not looked at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import NAMES

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(300)
def test_every_figure_is_measured_and_written(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--quick", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(out.read_text())
    assert set(NAMES) == {
        "publish_cost_growth_50x",
        "untouched_part_ms",
        "mutate_cost_growth_50x",
        "worker_memory_growth_10x",
        "guarded_vs_raw",
        "seconds_per_day_year",
        "late_vs_early_days",
        "governed_vs_plain",
        "manifests_parse_seconds",
        "manifests_definitions_seconds",
    }
    for name in NAMES:
        assert isinstance(measured[name], float)
        assert measured["details"][name]["spread"][0] <= measured["details"][name]["spread"][1]
        assert name in done.stdout


def test_an_unknown_figure_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "no_such_figure"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "no_such_figure" in done.stderr
