"""Runs the matmuls and convolutions of a float32 function in half precision: `autocast`."""

from jmpscale._autocast.api import autocast

__all__ = ["autocast"]
