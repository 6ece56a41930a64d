"""Boundaries are listed once and reached, and a fault happens only in a process that was started for it."""

import ast
import os
import signal
import subprocess
import sys
import time

import product_source as product
import pytest

from dpone_dagster.faults import BOUNDARIES, reach

CODE = """
import sys
from dpone_dagster.faults import reach
reach("gate.after")
print("passed one", flush=True)
reach(sys.argv[1])
print("passed both", flush=True)
"""


def start(fault: str | None, boundary: str = "stage.before") -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "DPONE_FAULT"}
    if fault is not None:
        environment["DPONE_FAULT"] = fault
    return subprocess.Popen(
        [sys.executable, "-c", CODE, boundary],
        env=environment,
        cwd=product.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(fault: str | None, boundary: str = "stage.before") -> tuple[int, str, str]:
    process = start(fault, boundary)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def reached() -> dict[str, list[str]]:
    """Boundary -> places that reach it."""
    found: dict[str, list[str]] = {}
    for path, tree in product.modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "reach":
                argument = node.args[0]
                assert isinstance(argument, ast.Constant), f"{path}:{node.lineno} computes a boundary"
                found.setdefault(argument.value, []).append(f"{path}:{node.lineno}")
    return found


def test_every_boundary_reached_is_listed() -> None:
    found = reached()
    assert {name: places for name, places in found.items() if name not in BOUNDARIES} == {}


def test_every_boundary_listed_is_reached() -> None:
    if not product.is_whole():
        pytest.skip("the tree is not whole: a composition root is missing")
    assert BOUNDARIES.keys() - reached().keys() == set()


def test_boundaries_have_a_place_and_a_meaning() -> None:
    for name, meaning in BOUNDARIES.items():
        assert name.count(".") == 1
        assert meaning


def test_nothing_happens_unarmed() -> None:
    assert finish(None) == (0, "passed one\npassed both\n", "")
    assert finish("") == (0, "passed one\npassed both\n", "")


def test_kill() -> None:
    assert finish("stage.before:kill")[:2] == (-signal.SIGKILL, "passed one\n")


def test_another_boundary_is_passed() -> None:
    assert finish("stage.after:kill") == (0, "passed one\npassed both\n", "")


def test_fail() -> None:
    code, out, err = finish("stage.before:fail")
    assert (code, out) == (1, "passed one\n")
    assert "InjectedFault: stage.before" in err


def test_stop_and_continue() -> None:
    process = start("stage.before:stop")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "passed one\npassed both\n")


def test_hang() -> None:
    process = start("stage.before:hang")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "passed one\n"
        time.sleep(0.3)
        assert process.poll() is None
    finally:
        process.kill()
        rest, _ = process.communicate(timeout=60)
    assert rest == ""


@pytest.mark.parametrize("fault", ["nowhere:kill", "stage.before", "stage.before:", "stage.before:explode", "kill"])
def test_a_fault_that_means_nothing_stops_the_process(fault: str) -> None:
    code, out, err = finish(fault)
    assert (code, out) == (1, "")
    assert "DPONE_FAULT" in err


def test_an_unlisted_boundary_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        reach("nowhere")


def test_the_variable_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPONE_FAULT", "stage.before:kill")
    reach("stage.before")  # still alive: nothing that sets the variable later can arm a fault
