"""Costly questions to the source, asked while its rows are still being staged.

A source that gives one snapshot answers the same whenever it is asked, and its engine has nothing to do but to stream
meanwhile. So a digest and the acceptance counts, which read every row, are asked on a thread of their own; the gates
then find the answers. Whatever else is asked waits until that thread is done, since both share one session.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Any

import pyarrow as pa

from dpone_dagster.contracts.set_digest import SetDigest
from dpone_dagster.declarations.manifest import AcceptanceChecks, Process, TypedHashGate
from dpone_dagster.governance.gate_runner import sampling
from dpone_dagster.ports import Columns, MetricSnapshot, ProbePort

Question = tuple[Any, ...]


class AheadProbe:
    """``ProbePort`` over another one, some of whose answers are on their way."""

    def __init__(self, probe: ProbePort, process: Process, *, check: Callable[[], None]) -> None:
        self.side, self.dataset, self.columns = probe.side, probe.dataset, probe.columns
        self._probe = probe
        self._check = check
        self._asks = dict(_costly(probe, process))
        self._answers: dict[Question, Future[Any]] = {question: Future() for question in self._asks}
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="dpone-ahead", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        for question, answer in self._answers.items():
            try:
                if self._stopped:
                    raise InterruptedError
                answer.set_result(self._asks[question]())
            except BaseException as error:  # noqa: BLE001 - told to whoever asks
                answer.set_exception(error)

    def stop(self, interrupt: Callable[[], None]) -> None:
        """Ask nothing more, and return once nothing is being asked.

        Args:
            interrupt: lets the question that is being asked end early.
        """
        self._stopped = True
        while self._thread.is_alive():
            interrupt()
            self._thread.join(0.2)

    def _finished(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _asked(self, question: Question, ask: Callable[[], Any]) -> Any:
        answer = self._answers.get(question)
        done = self._finished if answer is None else lambda seconds: _done(answer, seconds)
        while not done(0.05):
            self._check()
        return ask() if answer is None else answer.result()

    # --------------------------------------------------------------------------------------- the questions

    def row_count(self) -> int:
        """See ``ProbePort``."""
        count: int = self._asked(("row_count",), self._probe.row_count)
        return count

    def digest(self, columns: Columns, *, key: Columns = (), modulus: int = 1) -> SetDigest:
        """See ``ProbePort``."""
        question = _digest_question(columns, key, modulus)
        found: SetDigest = self._asked(question, lambda: self._probe.digest(columns, key=key, modulus=modulus))
        return found

    def metrics(self, checks: AcceptanceChecks) -> MetricSnapshot:
        """See ``ProbePort``."""
        found: MetricSnapshot = self._asked(("metrics", checks), lambda: self._probe.metrics(checks))
        return found

    def rows_with_null(self, columns: Sequence[str]) -> int:
        """See ``ProbePort``."""
        count: int = self._asked(("",), lambda: self._probe.rows_with_null(columns))
        return count

    def surplus_rows(self, columns: Sequence[str]) -> int:
        """See ``ProbePort``."""
        count: int = self._asked(("",), lambda: self._probe.surplus_rows(columns))
        return count

    def rows_outside(self, column: str, values: Sequence[str | int | bool], *, allow_null: bool) -> int:
        """See ``ProbePort``."""
        count: int = self._asked(("",), lambda: self._probe.rows_outside(column, values, allow_null=allow_null))
        return count

    def newest(self, column: str) -> datetime | None:
        """See ``ProbePort``."""
        found: datetime | None = self._asked(("",), lambda: self._probe.newest(column))
        return found

    def scalar(self, sql: str) -> Any:
        """See ``ProbePort``."""
        return self._asked(("",), lambda: self._probe.scalar(sql))

    def blocks(self) -> Iterator[pa.RecordBatch]:
        """See ``ProbePort``."""
        found: Iterator[pa.RecordBatch] = self._asked(("",), self._probe.blocks)
        return found


def _costly(probe: ProbePort, process: Process) -> Iterator[tuple[Question, Callable[[], Any]]]:
    """The questions that read every row, each once."""
    by_name = {column.name: column for column in probe.columns}
    acceptance = process.quality.acceptance
    if acceptance is not None and acceptance.enabled and acceptance.capture.source:
        checks = acceptance.checks
        yield ("metrics", checks), lambda: probe.metrics(checks)
    for gate in process.quality.gates:
        if not isinstance(gate, TypedHashGate):
            continue
        names = gate.columns or tuple(by_name)
        key, modulus = sampling(gate, probe.columns, process.sink.unique_key) if gate.mode == "sample" else ((), 1)
        if all(name in by_name for name in (*names, *key)):  # the gate itself refuses the others
            columns, keys = tuple(by_name[n] for n in names), tuple(by_name[n] for n in key)
            yield _digest_question(columns, keys, modulus), _ask_digest(probe, columns, keys, modulus)


def _ask_digest(probe: ProbePort, columns: Columns, key: Columns, modulus: int) -> Callable[[], SetDigest]:
    return lambda: probe.digest(columns, key=key, modulus=modulus)


def _digest_question(columns: Columns, key: Columns, modulus: int) -> Question:
    return ("digest", tuple(c.name for c in columns), tuple(c.name for c in key), modulus)


def _done(answer: "Future[Any]", seconds: float) -> bool:
    try:
        answer.exception(seconds)
    except TimeoutError:
        return False
    return True
