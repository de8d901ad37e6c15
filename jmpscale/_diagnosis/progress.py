"""A line on the terminal that shows the progress of a long diagnosis."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator

_SILENT_SECONDS = 3.0
_INTERVAL = 0.2


@contextlib.contextmanager
def showing_progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that writes to a terminal, after some seconds, what has been done; the line then disappears."""
    due = time.monotonic() + _SILENT_SECONDS if sys.stderr.isatty() else math.inf
    written = False

    def show(text: str) -> None:
        nonlocal due, written
        if (now := time.monotonic()) >= due:
            print(f"\r\033[Kdiagnose: {text}", end="", file=sys.stderr, flush=True)
            due, written = now + _INTERVAL, True

    try:
        yield show
    finally:
        if written:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
