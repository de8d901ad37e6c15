"""Warnings at the user's line, and from inside a compiled program."""

import inspect
import logging
import warnings

from jmpscale._base.frameworks import PACKAGES


def warn_user(message: str) -> None:
    """Warns at the innermost line of the stack that belongs to the user."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in PACKAGES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def warn_from_program(message: str) -> None:
    """Warns from a callback of a compiled program, and never raises.

    If the program runs on several devices, an error on one of them leaves the others waiting for it in a collective. So
    a warning that a filter turns into an error is logged instead.
    """
    try:
        warnings.warn(message, stacklevel=2)
    except Exception:
        logging.getLogger("jmpscale").warning(message)
