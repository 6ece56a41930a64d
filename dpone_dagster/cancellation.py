"""Interrupts become a flag that is read at safe boundaries, so that none lands in the middle of an effect."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from dpone_dagster.errors import DponeError


class Cancellation:
    """While entered, SIGINT and SIGTERM only set ``requested``; the earlier handlers come back afterwards.

    Outside the main thread, where Python delivers no signals, nothing is installed and nothing is lost: a
    second thread cannot be interrupted anyway. One inside another knows of an interrupt that the outer one has seen,
    and tells the outer one of its own: whoever goes on after a commit that was not interrupted stops next.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
                if (outer := _outer(self._previous[number])) and outer.requested:
                    self.requested = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def check(self) -> None:
        """Raise DPONE_CANCELLED when an interrupt has arrived."""
        if self.requested:
            raise DponeError("DPONE_CANCELLED", "The run was interrupted; it stopped at a safe boundary.")

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if outer := _outer(self._previous.get(number)):
            outer._note(number, frame)


def _outer(handler: Any) -> Cancellation | None:
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, Cancellation) else None
