"""Leaves of a training state that change in every call, whether the step is applied or skipped."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmpscale._base.frameworks import is_optax_state
from jmpscale._base.tree import PyTree, bit_pattern, is_key
from jmpscale._base.types import is_numeric
from jmpscale._state import WithLossScalingState


def kind_of_count(was: Any, now: Any, applied: Any) -> str:
    """Returns what a leaf is that a skipped step changes as an applied step does; an empty string if it is neither."""
    if bit_pattern(now) != bit_pattern(applied):
        return ""
    if is_key(was):
        return "a random key"
    return "a count" if _is_whole_number(was) and _is_whole_number(now) and now > was else ""


def find_optimizer_states(state: PyTree) -> list[str]:
    """Returns the paths of the states of optimizers, whose counts belong to schedules and corrections of averages."""

    def is_optimizer_state(node: object) -> bool:
        return isinstance(node, WithLossScalingState) or is_optax_state(node)

    entries = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_optimizer_state)
    return [jax.tree_util.keystr(path) for path, node in entries if is_optimizer_state(node)]


def _is_whole_number(leaf: Any) -> bool:
    """Tests whether a leaf is a number without a fraction, of any dtype: programs count in floating point, too."""
    number = np.asarray(leaf) if is_numeric(leaf) else np.zeros(2)
    is_real = jnp.issubdtype(number.dtype, np.integer) or jnp.issubdtype(number.dtype, np.floating)
    return number.shape == () and is_real and float(number).is_integer()
