"""Tools for testing training programs."""

from jmpscale.testing._replicated import assert_replicated
from jmpscale.testing._step import check_step

__all__ = ["assert_replicated", "check_step"]
