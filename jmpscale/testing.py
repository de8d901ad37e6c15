"""Tools for testing training programs."""

from jmpscale._testing.replicated import assert_replicated
from jmpscale._testing.step import check_step

__all__ = ["assert_replicated", "check_step"]
