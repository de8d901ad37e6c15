"""Operations that keep their dtype when a tool runs a program in float32."""

import contextlib
from collections.abc import Iterator

import jax

SCOPE = "jmpscale_as_written"


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Creates the scope of operations that `diagnose_step` and `check_step` run as they are written.

    A comparison with a rounded number would have another result if nothing were rounded.
    """
    with jax.named_scope(SCOPE):
        yield
