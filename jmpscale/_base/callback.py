"""Warnings from inside a compiled program."""

import logging
import warnings


def warn_from_program(message: str) -> None:
    """Warns from a callback of a compiled program, and never raises.

    If the program runs on several devices, an error on one of them leaves the others waiting for it in a collective. So
    a warning that a filter turns into an error is logged instead.
    """
    try:
        warnings.warn(message, stacklevel=2)
    except Exception:
        logging.getLogger("jmpscale").warning(message)
