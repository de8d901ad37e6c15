"""Guards for values on several devices, which other guards and `grad_report` use."""

from jmpscale._base.axes import AxisName, as_axes, manual_axes
from jmpscale._base.compat import unreduced_axes
from jmpscale._base.tree import PyTree, first_leaf, is_inexact
from jmpscale._base.warn import warn_user


def warn_if_unsynchronized(axis_name: AxisName, other_axes: AxisName = ()) -> None:
    """Warns if devices would decide independently although the user has not requested it."""
    if axis_name is not None:
        return
    if missing := tuple(name for name in manual_axes(typed=False) if name not in as_axes(other_axes)):
        warn_user(
            f"each device decides independently whether its step was finite: along the mapped axes {missing} JAX's "
            "types do not show what differs between devices (jax.pmap, or check_vma=False). Pass "
            f"axis_name={missing!r} to combine the decisions, or axis_name=() if all devices hold the same values."
        )


def check_no_partial_sums(tree: PyTree) -> None:
    """Raises, naming the leaf, if the shards of a leaf have not been summed yet."""
    if found := first_leaf(tree, lambda leaf: is_inexact(leaf) and unreduced_axes(leaf)):
        path, leaf = found
        raise TypeError(
            f"the leaf at tree{path} is a partial sum over the mesh axes {sorted(unreduced_axes(leaf))}. Reduce it "
            "first, with jax.lax.psum under jax.shard_map or jax.sharding.reshard under jax.jit."
        )
