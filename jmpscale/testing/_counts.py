"""Leaves of a training state that change in every call, whether the step is applied or skipped."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.frameworks import is_optax_state
from jmpscale._base.tree import PyTree, bit_pattern, is_array
from jmpscale._state import WithLossScalingState


def kind_of_count(was: Any, now: Any, applied: Any) -> str:
    """Returns what a leaf is that a skipped step changes as an applied step does; an empty string if it is neither."""
    if bit_pattern(now) != bit_pattern(applied):
        return ""
    if _is_key(was):
        return "a random key"
    return "a count" if _is_integer(was) and int(now) > int(was) else ""


def find_optimizer_states(state: PyTree) -> list[str]:
    """Returns the paths of the states of optimizers, whose counts belong to schedules and corrections of averages."""

    def is_optimizer_state(node: object) -> bool:
        return isinstance(node, WithLossScalingState) or is_optax_state(node)

    entries = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_optimizer_state)
    return [jax.tree_util.keystr(path) for path, node in entries if is_optimizer_state(node)]


def _is_key(leaf: Any) -> bool:
    """Tests whether a leaf is a key, or the array of numbers that represents one."""
    if not is_array(leaf):
        return False
    is_typed = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return is_typed or (leaf.dtype == np.uint32 and leaf.shape in {(2,), (4,)})


def _is_integer(leaf: Any) -> bool:
    if is_array(leaf):
        return leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, np.integer)
    return isinstance(leaf, int) and not isinstance(leaf, bool)
