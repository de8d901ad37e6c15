"""A line on the terminal that shows the progress of a long diagnosis."""

import sys
import time
from types import TracebackType

_SILENT_SECONDS = 3.0
_INTERVAL = 0.2


class Progress:
    """Writes to standard error if it is a terminal, after some seconds; the line disappears at the end."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _SILENT_SECONDS if sys.stderr.isatty() else float("inf")
        self._written = False

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._written:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def __call__(self, text: str) -> None:
        """Shows what has been done so far."""
        now = time.monotonic()
        if now >= self._next:
            sys.stderr.write(f"\r\033[Kdiagnose: {text}")
            sys.stderr.flush()
            self._next, self._written = now + _INTERVAL, True
