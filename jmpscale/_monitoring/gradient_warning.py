"""A warning from inside a compiled step whose gradients are not finite: an option of `scaled_backward`."""

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np

from jmpscale._base.axes import all_reduce_and
from jmpscale._base.warn import warn_from_program


def warn_unless_finite(
    finite: jax.Array, grads: list[jax.Array | None], checked: list[jax.Array], name: str
) -> list[jax.Array | None]:
    """Returns the gradients of the function `name`; the program warns if `finite`, about those checked, is false.

    The compiler keeps the check because a gradient depends on it: the one with the fewest axes, which is often small.
    """
    smallest = min(checked, key=jnp.ndim)
    returned = _warn_unless(
        finite,
        f"the gradients of {name} are not finite. If the training loop replaces infinity and NaN before the "
        "optimizer checks them, the step is not skipped. Use a scale that jmpscale.diagnose prints.",
        smallest,
    )
    return [returned if g is smallest else g for g in grads]


def _warn_unless(flag: jax.Array, text: str, x: jax.Array) -> jax.Array:
    """Warns if a flag is false, on any device, even from inside a compiled program; under `jax.vmap` once per batch.

    It returns `x`, which in a compiled program depends on the callback, because the compiler would otherwise remove it.
    """

    def warn() -> np.ndarray:
        warn_from_program(text)
        return np.array(True)

    @jax.custom_batching.custom_vmap
    def has_run(flag: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct((), np.bool_)
        return jax.lax.cond(flag, lambda: jnp.array(True), lambda: jax.pure_callback(warn, result))

    @has_run.def_vmap
    def _(axis_size: int, in_batched: list[bool], flags: jax.Array) -> tuple[jax.Array, bool]:
        return has_run(flags.all()), False

    (flag,) = all_reduce_and(jax.lax.stop_gradient(flag))
    return jnp.where(has_run(flag), x, jnp.zeros_like(x))
