"""Breaking a publication inside the test's own process: boundaries that fail, and workers that stand still."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from dpone_dagster import faults


class Nth(str):
    """A boundary that is armed from its nth passing on: the second mart's, say."""

    left: int

    def __new__(cls, boundary: str, nth: int) -> "Nth":
        made = super().__new__(cls, boundary)
        made.left = nth
        return made

    def __ne__(self, other: object) -> bool:
        # ``reach`` asks this of every boundary that is passed.
        if str(self) == other:
            self.left -= 1
        return str(self) != other or self.left > 0

    __hash__ = str.__hash__


@contextmanager
def failing(boundary: str, *, nth: int = 1) -> Iterator[None]:
    """Let the boundary fail: the effect before it is done, its acknowledgement lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "_ARMED_AT", Nth(boundary, nth))
        patch.setattr(faults, "_ACTION", "fail")
        yield


class Standing:
    """A worker in a thread that stands still at a boundary until it is told to go on.

    To every engine it is what a stopped process is: its sessions, locks and queries are there, and it does
    nothing. Unlike one it costs no start of an interpreter.
    """

    def __init__(self, boundary: str, work: Callable[[], Any], *, nth: int = 1) -> None:
        self.error: BaseException | None = None
        self.result: Any = None
        self._boundary, self._work = Nth(boundary, nth), work
        self._reached, self._go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Standing":
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(faults, "_ARMED_AT", self._boundary)
        self._patch.setattr(faults, "_ACTION", "hang")
        self._patch.setattr(faults, "time", SimpleNamespace(sleep=self._stand))
        self._thread.start()
        assert self._reached.wait(60), self.error
        return self

    def __exit__(self, *_: object) -> None:
        self._go.set()
        self._thread.join(60)
        self._patch.undo()
        assert not self._thread.is_alive()

    def go_on(self) -> None:
        """Let it go on and wait for its end."""
        self._go.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error
        finally:
            self._reached.set()

    def _stand(self, seconds: float) -> None:
        # Others pass the same boundary, and so does this one the second time.
        if threading.current_thread() is self._thread and not self._reached.is_set():
            self._reached.set()
            assert self._go.wait(120)
