"""One look at a source of a governed load."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from dpone_dagster.ports import Columns, ProbePort, Window


@dataclass(kw_only=True)
class Session:
    """One look at a source; ``SourceSession``.

    Attributes:
        rows: streams the window's rows, anew at each call.
        cancel: ends a question that another thread is asking; None where none can be asked meanwhile.
    """

    columns: Columns
    window: Window
    probe: ProbePort
    snapshot: bool
    rows: Callable[[], Iterator[pa.RecordBatch]] = field(repr=False)
    cancel: Callable[[], None] | None = field(default=None, repr=False)

    def read(self) -> Iterator[pa.RecordBatch]:
        """Stream the window's rows; each call reads them anew."""
        return self.rows()

    def interrupt(self) -> None:
        """Let a question that is being asked on another thread end early."""
        if self.cancel is not None:
            self.cancel()
