"""A bar that shows the progress of a long run."""

import importlib
import sys
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")
_DELAY = 10.0  # seconds before the bar appears


def with_progress_bar(batches: Iterable[T]) -> Iterable[T]:
    """Shows a bar on a terminal if tqdm is installed and the run is long."""
    if not sys.stderr.isatty():
        return batches
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return batches
    return tqdm(batches, desc="diagnose_run", unit="step", leave=False, delay=_DELAY)
