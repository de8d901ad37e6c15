"""Tools for testing training programs."""

import bisect
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import ArrayLike

from jmpscale._base.axes import map_like
from jmpscale._base.check import check_flag
from jmpscale._base.compat import varying_axes
from jmpscale._base.text import describe, format_number, truncate, type_name
from jmpscale._base.tree import (
    PyTree,
    Tree,
    check_no_nnx_objects,
    find_instances,
    is_array,
    is_inexact,
    named_leaves,
    structure,
)
from jmpscale._scaler_of_tree import find_scaler, get_scaler, is_scaler, replace_scaler
from jmpscale._state import LARGEST_SCALE, SMALLEST_SCALE, WithLossScalingState

_RETURNED = (
    "it returned the scaler that it received. Return the scaler of update, or the optimizer state of tx.update; carry "
    "it through jax.lax.scan; do not put back the old state."
)
_UNSCALED = (
    "the gradients do not depend on the scaler of the state. Take them with jmpscale.value_and_grad(loss_fn)(scaler, "
    "params, batch)."
)
_HIDDEN = (
    "its result is wrong. Something replaces infinity and NaN before the check, such as a clip, jnp.nan_to_num or a "
    "choice of micro-batches; or the flag is not about all gradients. Check the gradients of the loss first."
)
_SKIPPED = (
    "the step was skipped at every loss scale. jmpscale.diagnose names the line, unless the flag for update is "
    "inverted: it must be true if the gradients are finite."
)


def check_step(step: Callable[[Tree], Tree], state: Tree, *, ignore: Sequence[str] = ()) -> None:
    """Runs a training step at several loss scales, and raises if it treats an overflow or the scale wrongly.

    At a loss scale of 2^126, gradients overflow in float16. The step must be skipped, and change nothing but its
    scaler. If nothing overflows, as in float32, this must hold at an infinite scale. Below the scale at which the step
    is skipped, no change may be much larger than at smaller scales; and none may be proportional to the scale, its
    inverse or their squares.

    Args:
      step: function of the training state that returns the new state, such as
        `lambda state: train_step(*state, batch)[:2]`. It runs about fifteen times.
      state: pytree of all that a step changes: parameters, optimizer state, batch statistics, and exactly one scaler.
        It is copied, so the step may donate its argument.
      ignore: the leaves that a skipped step may change, such as `(".step", ".rng")`, as the beginnings of their paths
        in the notation of `jax.tree_util.keystr`. The scaler and the `grad_norm` of `with_loss_scaling` are ignored.

    Raises:
      AssertionError: the step is not skipped, or changes the state although it is skipped, or depends on the scale.
        The message names the likely mistakes.
      TypeError: `step` returns another structure, or the state contains a Flax NNX object.
      ValueError: the state does not contain exactly one scaler; the scaler is disabled; or `ignore` names no leaf.

    >>> import jax.numpy as jnp
    >>> import jmpscale
    >>> import optax
    >>> from jmpscale import testing
    >>> tx = jmpscale.with_loss_scaling(optax.sgd(0.1))
    >>> def step(state):
    ...     w, opt_state = state
    ...     loss, grads = jmpscale.value_and_grad(lambda w: jnp.sum(w**2))(opt_state, w)
    ...     updates, opt_state = tx.update(grads, opt_state, w, value=loss)
    ...     return optax.apply_updates(w, updates), opt_state
    >>> testing.check_step(step, (jnp.ones(3), tx.init(jnp.ones(3))))
    """
    remedy = "Pass (nnx.state(model), optimizer.opt_state); step puts them into the objects, and returns them again."
    check_no_nnx_objects(state, "state", remedy)
    state = jax.tree.map(_copy, state)  # a step can change variables of Flax NNX in place
    scaler = find_scaler(state, "state")
    if scaler.config.mode == "disabled":
        raise ValueError("state must contain a scaler that checks gradients, got a disabled one. Use another one.")
    paths = [path for path, _ in named_leaves(state)]
    if unknown := [start for start in ignore if not any(path.startswith(start) for path in paths)]:
        raise ValueError(f"ignore must name leaves of the state, got {unknown}. The paths are {paths[:20]}.")

    def run(scale: float) -> _Run:
        new = scaler._replace(loss_scale=jnp.full_like(scaler.loss_scale, scale))
        return _run(step, replace_scaler(state, new), ignore)

    usual = run(float(scaler.loss_scale))
    while usual.is_skipped:
        if usual.scale < SMALLEST_SCALE * 2**8:
            raise AssertionError(_SKIPPED)
        usual = run(usual.scale / 2**8)
    # At 2^-60, half-precision gradients are zero, and do not hide a term of the loss that is not scaled.
    for one in (usual, run(2.0**-60)):
        _check_units(one, run(one.scale / 4))
    largest = run(LARGEST_SCALE)
    if not largest.is_skipped and largest.has_changes_of(usual):
        largest = run(np.inf)
    if not largest.is_skipped:
        why = _RETURNED if largest.returns_scaler else _UNSCALED if largest.has_changes_of(usual) else _HIDDEN
        raise AssertionError(f"the step was not skipped at a loss scale of {format_number(largest.scale)}: {why}")
    _check_unchanged(largest)
    if largest.scale == LARGEST_SCALE:
        # Before a gradient is NaN, which a clip does not replace, it is infinite.
        exponents = range(round(math.log2(usual.scale)), 126)
        last = exponents[bisect.bisect_left(exponents, True, 1, key=lambda k: run(2.0**k).is_skipped) - 1]
        _check_no_larger(run(2.0**last), run(2.0 ** (last - 8)))


class _Run(NamedTuple):
    """A run of a training step."""

    scale: float
    is_skipped: bool
    returns_scaler: bool  # that it received
    leaves: list[tuple[str, Any, Any]]  # of the state, without the scaler: the path, before and after the step

    def changes(self) -> dict[str, float]:
        """Returns the largest change of each leaf of floating-point or complex numbers."""
        return {path: float(jnp.abs(now - was).max(initial=0)) for path, was, now in self.leaves if is_inexact(was)}

    def has_changes_of(self, other: "_Run") -> bool:
        pairs = zip(self.changes().values(), other.changes().values(), strict=True)
        return all(math.isclose(ours, theirs, rel_tol=0.01) for ours, theirs in pairs)


def _run(step: Callable[[Any], Any], state: PyTree, ignore: Sequence[str]) -> _Run:
    after = step(jax.tree.map(_copy, state))
    if structure(after) != structure(state):
        raise TypeError(
            f"step must return a state with the structure of its argument, {truncate(structure(state), 200)}, got "
            f"{truncate(structure(after), 200)}. Return the new state alone, as in "
            "lambda state: train_step(*state, batch)[:2]."
        )
    old, new = get_scaler(state), get_scaler(after)
    returns_scaler = [*map(_bits, old[:-1])] == [*map(_bits, new[:-1])]
    pairs = zip(_gated_leaves(state, ignore), _gated_leaves(after, ignore), strict=True)
    leaves = [(path, was, now) for (path, was), (_, now) in pairs]
    return _Run(float(old.loss_scale), bool(new.total_skips > old.total_skips), returns_scaler, leaves)


def _copy(leaf: Any) -> Any:
    """Returns a new array, if a leaf is an array, or a number, which a compiled step returns as an array."""
    return jnp.array(leaf) if is_array(leaf) or isinstance(leaf, (int, float, complex)) else leaf


def _gated_leaves(state: PyTree, ignore: Sequence[str]) -> list[tuple[str, Any]]:
    """Returns the leaves that a skipped step must not change, with their paths."""
    entries = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_scaler)
    norms = {
        id(x) for wrapped in find_instances(state, WithLossScalingState) for x in jax.tree.leaves(wrapped.grad_norm)
    }
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in entries if not is_scaler(leaf)]
    return [(path, leaf) for path, leaf in leaves if id(leaf) not in norms and not path.startswith(tuple(ignore))]


def _check_units(one: _Run, other: _Run) -> None:
    """Raises if a change is proportional to the scale, its inverse or, as Adam's averages of squares, their squares."""
    pairs = zip(one.changes().items(), other.changes().values(), strict=True)
    for (path, ours), theirs in pairs:
        powers = [(one.scale / other.scale) ** n for n in (-2, -1, 1, 2)]
        if theirs and any(math.isclose(ours / theirs, power, rel_tol=0.01) for power in powers):
            raise AssertionError(
                f"the change of state{path} depends on the loss scale: it is {ours:.3g} at {format_number(one.scale)}, "
                f"and {theirs:.3g} at {format_number(other.scale)}. Scale every term of the loss, unscale the "
                "gradients once, as jmpscale.value_and_grad does, and clip them only then."
            )


def _check_unchanged(run: _Run) -> None:
    """Raises if a skipped step has changed any bit."""
    for path, was, now in run.leaves:
        if _bits(was) != _bits(now):
            raise AssertionError(
                f"the skipped step changed state{path}: {truncate(was)} before, {truncate(now)} after. Gate it with "
                f"apply_if. If it counts calls, or is a random key, pass ignore=({path!r},)."
            )


def _check_no_larger(one: _Run, other: _Run) -> None:
    """Raises if a change is larger than at a smaller scale, by more than the rounding of subnormal numbers."""
    pairs = zip(one.changes().items(), other.changes().values(), strict=True)
    for (path, ours), theirs in pairs:
        if theirs and ours > 2.5 * theirs:
            raise AssertionError(
                f"the step was not skipped at a loss scale of {format_number(one.scale)}, where it changes state{path} "
                f"by {ours:.3g}, and by {theirs:.3g} at {format_number(other.scale)}: {_HIDDEN}"
            )


def inject_backward(tree: Tree, value: ArrayLike, *, path: str = "", when: ArrayLike = True) -> Tree:
    """Returns a tree unchanged, and in the backward pass sets the first element of one leaf's cotangent to a value.

    Call it in the loss function, on parameters or activations. The fault then passes through the rest of the backward
    pass, the unscaling and the check, as a real overflow does. A ReLU or a maximum before this point may remove the
    fault: where it is not active, its derivative sets the cotangent to zero.

    Args:
      tree: pytree of parameters or activations that the loss depends on.
      value: a scalar such as `jnp.inf` or `jnp.nan`, converted to the leaf's dtype.
      path: the leaf, in the notation of `jax.tree_util.keystr`: `"['dense']['kernel']"` in dictionaries,
        `".layers[0].weight"` in an Equinox model, and `""` if the tree is a single array.
      when: bool[], whether to inject the fault. For a fault in one step, compare a count that advances on skipped
        steps as well, such as the index of the loop: with a gated count every later step would be skipped, too. For a
        fault on one device, compare `jax.lax.axis_index`; devices that hold the same leaf all receive the fault,
        because the cotangent is a sum over them.

    Returns:
      The tree, bit for bit. In reverse mode, the first element of the leaf's cotangent is `value` if `when` is true.

    Raises:
      TypeError: `when` is not a boolean, or the tree contains a Flax NNX object.
      ValueError: there is no floating-point or complex leaf at `path`, or `value` or `when` is not a scalar.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jmpscale import testing
    >>> jax.grad(lambda w: jnp.sum(testing.inject_backward(w, jnp.inf) ** 2))(jnp.ones(3))
    Array([inf,  2.,  2.], dtype=float32)
    """
    check_no_nnx_objects(
        tree, "tree", "Inject into the result of the model: inject_backward(model(x), jnp.inf, when=...)."
    )
    paths = [name for name, leaf in named_leaves(tree) if is_inexact(leaf) and jnp.size(leaf)]
    if not (isinstance(path, str) and path in paths):
        raise ValueError(
            f"path must lead to a floating-point leaf with elements, got {describe(path)}. The paths of this tree "
            f"are {paths[:20]}."
        )
    if getattr(value, "shape", ()) or not jnp.issubdtype(getattr(value, "dtype", type(value)), np.number):
        raise ValueError(f"value must be a scalar such as jnp.inf, got {describe(value)}. Inject one value at a time.")
    flag = check_flag(when, "when")

    changed = [_fault_in_cotangent(leaf, value, flag) if name == path else leaf for name, leaf in named_leaves(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), changed)


def _set_first(leaf: jax.Array, value: ArrayLike, flag: jax.Array) -> jax.Array:
    first = (jnp.arange(jnp.size(leaf)) == 0).reshape(jnp.shape(leaf))
    return jnp.where(first & flag, jnp.asarray(value, jnp.result_type(leaf)), leaf)


def _fault_in_cotangent(leaf: jax.Array, value: ArrayLike, flag: jax.Array) -> jax.Array:
    # The cotangent of a value that devices share is a sum over them: a fault on one device is a fault on all.
    if axes := varying_axes(flag) - varying_axes(leaf):
        flag = jax.lax.pmax(flag.astype(np.int32), tuple(sorted(axes))).astype(bool)
    identity: Any = jax.custom_vjp(lambda leaf, value, flag: map_like(leaf, flag))
    identity.defvjp(
        lambda leaf, value, flag: (map_like(leaf, flag), (value, flag)),
        lambda fault, cotangent: (_set_first(cotangent, *fault), None, None),
    )
    return identity(leaf, value, flag)


def _bits(leaf: object) -> object:
    """Returns a value that is equal for two leaves only if they are equal bit for bit."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.shape, leaf.dtype, np.asarray(jax.random.key_data(leaf)).tobytes()
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf.shape, leaf.dtype, np.asarray(leaf).tobytes()
    return leaf


def assert_replicated(tree: PyTree) -> None:
    """Raises unless devices that hold the same part of an array hold the same bits.

    A missing `axis_name` under `jax.pmap` or `check_vma=False` gives only a warning, and the array is then marked as
    replicated although devices have diverged. Call this function after a step that overflowed on one device. On
    multiple hosts, every process must call it.

    Args:
      tree: a scaler, or any pytree of arrays. The copies of each shard are compared; or the rows, if every array has
        one row for each device, as `jax.pmap` returns them.

    Raises:
      AssertionError: two devices differ; the message names the leaf, and within a process the devices and the values.
      TypeError: a leaf is not an array.

    >>> import jmpscale
    >>> from jmpscale import testing
    >>> testing.assert_replicated(jmpscale.dynamic())
    """
    leaves = named_leaves(tree)
    for path, leaf in leaves:
        if not is_array(leaf):
            raise TypeError(f"tree{path} must be an array, got {type_name(leaf)}. Pass the result of a step.")
    on_devices = [(path, leaf) for path, leaf in leaves if isinstance(leaf, jax.Array)]  # NumPy arrays have no copies
    by_rows = all(_has_one_row_per_device(leaf) for _, leaf in on_devices)
    for path, leaf in on_devices:
        shards: dict[str, tuple[Any, object]] = {}  # the first shard of each part, and its bits
        for shard in leaf.addressable_shards:
            bits = _bits(shard.data)
            other, expected = shards.setdefault("" if by_rows else str(shard.index), (shard, bits))
            if bits != expected:
                raise AssertionError(
                    f"tree{path} differs between devices: {truncate(other.data, 200)} on {other.device}, "
                    f"{truncate(shard.data, 200)} on {shard.device}. Each device has decided independently: pass "
                    "axis_name to all_finite, unscale_and_check, update or with_loss_scaling."
                )
        if jax.process_count() > 1:
            _assert_equal_on_processes(path, {part: bits for part, (_, bits) in shards.items()})


def _assert_equal_on_processes(path: str, bits: dict[str, Any]) -> None:
    sums = [[zlib.crc32(part.encode()), zlib.crc32(value[-1])] for part, value in bits.items()]
    gathered = np.reshape(multihost_utils.process_allgather(np.array(sums, np.uint32)), (-1, 2))
    if len(np.unique(gathered, axis=0)) > len(np.unique(gathered[:, 0])):
        raise AssertionError(f"tree{path} differs between processes.")


def _has_one_row_per_device(x: jax.Array) -> bool:
    return x.shape[:1] == (len(x.global_shards),) and x.sharding.shard_shape(x.shape)[0] == 1
