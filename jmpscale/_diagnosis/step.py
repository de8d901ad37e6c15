"""Traces a training step: the loss and the gradients as a program of the loss scale. Compiles programs."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from jmpscale._autocast.observation import observe
from jmpscale._autocast.rules import with_conversions
from jmpscale._base.frameworks import imported, is_nnx_object
from jmpscale._base.jaxpr import equations, rewrite
from jmpscale._base.source import SCALING, line_of_error, user_lines
from jmpscale._base.text import describe
from jmpscale._base.tree import (
    PyTree,
    check_no_refs,
    flatten_gradients,
    flatten_matching,
    is_inexact,
    is_traced,
    named_leaves,
)
from jmpscale._state import ScalerState, static

UNREADABLE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
_CALLBACKS = {"debug_callback", "debug_print", "io_callback"}
_NEW_REFS = {"array_ref", "empty_ref", "new_ref"}


class Step(NamedTuple):
    """A training step: a program that computes the loss and the gradients, in true units, from the loss scale."""

    jaxpr: core.Jaxpr
    consts: list[Any]  # the arrays that the step depends on
    measured: int | None = None  # the number of outputs that are the loss and the gradients; None if all are

    def of_gradients(self) -> "Step":
        """Returns a step that computes nothing but the loss and the gradients."""
        if self.measured is None:
            return self
        wanted = [i < self.measured for i in range(len(self.jaxpr.outvars))]
        return Step(partial_eval.dce_jaxpr(self.jaxpr, wanted, instantiate=True)[0], self.consts)


LossAndGrads = Callable[[ScalerState, PyTree, PyTree], PyTree]
Axes = Sequence[tuple[str, int]]  # names and sizes
_scopes = itertools.count()


def new_scope() -> Axes:
    """Returns an axis in whose scope JAX does not read the functions that it has traced already from a cache."""
    return ((f"jmpscale_scope_{next(_scopes)}", 1),)


def trace_step(loss_and_grads: LossAndGrads, args: PyTree, kwargs: PyTree, axes: Axes = ()) -> Step:
    """Traces a training step, once unless Python reads the values of a NumPy array; in the scope of `axes`."""
    try:
        return _trace(loss_and_grads, jax.tree.map(_as_jax_array, (args, kwargs), is_leaf=is_nnx_object), axes)
    except (*UNREADABLE, NameError):  # Python reads the values of a NumPy array, or of a JAX array
        pass
    try:
        return _trace(loss_and_grads, (args, kwargs), axes)
    except NameError as error:
        if "axis name" in str(error):
            error.add_note(
                "diagnose runs the loss function on one device, outside of the function that names the axis. Pass "
                'jax.vmap(loss_fn, in_axes=None, out_axes=None, axis_name="data", axis_size=1) with the name of the '
                "axis, and the arguments of one device."
            )
        raise
    except UNREADABLE as error:
        error.add_note(
            "diagnose traces the loss function, as jax.jit does, so Python cannot read the values of JAX arrays in it. "
            "Arguments that are Python numbers or NumPy arrays remain values."
        )
        raise


def explain_error(error: Exception) -> None:
    """Says what to do about an error of a training step that is traced."""
    if isinstance(error, UNREADABLE):
        error.add_note(
            "diagnose_step traces the step, as jax.jit does, so Python cannot read the values of arrays, as it does at "
            f"{line_of_error(error)}. Pass the part of the step that jax.jit accepts: the function that computes the "
            "gradients and the update."
        )
    elif isinstance(error, TypeError) and "lowered and compiled" in str(error):
        error.add_note("The step was compiled ahead of time. Pass the function that was compiled to diagnose_step.")
    elif isinstance(error, NameError) and "axis name" in str(error):
        error.add_note(
            "The step uses an axis of jax.pmap, jax.shard_map or jax.vmap: pass the function that maps it, with the "
            "arguments of all devices."
        )


def trace_with_float32_results(loss_and_grads: LossAndGrads, args: PyTree, kwargs: PyTree) -> Step | None:
    """Traces a training step in which the results of `autocast` are float32; None if it has no others.

    Returns None if the step cannot be traced again, such as one that reads from an iterator.
    """
    with observe(with_float32_results=True) as observation:
        try:
            step = trace_step(loss_and_grads, args, kwargs, new_scope())
        except Exception:  # whatever Python code raises
            return None
    return step if observation.has_changed_results else None


def find_kept_matmuls(trace_again: Callable[[], object]) -> tuple[str, ...]:
    """Returns the matmuls that `autocast` leaves in float32, with the reason.

    The program is traced again, in a `new_scope`: a program that has been traced does not show which functions had a
    derivative rule of their own.
    """
    with observe() as observation:
        try:
            trace_again()
        except Exception:  # whatever Python code raises
            return ()
    return tuple(dict.fromkeys(observation.kept))


def _as_jax_array(leaf: Any) -> Any:
    """Converts a NumPy array, whose own operations would not be part of the program; NumPy scalars remain values."""
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) and leaf.ndim > 0 and is_inexact(leaf) else leaf


def _trace(loss_and_grads: LossAndGrads, arguments: tuple[PyTree, PyTree], axes: Axes) -> Step:
    def outputs(loss_scale: jax.Array) -> list[Any]:
        loss, grads = loss_and_grads(static(1.0)._replace(loss_scale=loss_scale), *copied(arguments))
        return [loss, *flatten_gradients(grads)[0]]

    closed = jax.make_jaxpr(outputs, axis_env=list(axes))(jnp.float32(1.0))
    check_no_refs(closed.consts, "the values that fun closes over")
    return Step(repeatable(closed.jaxpr), list(closed.consts))


def repeatable(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Returns a program that can be changed and run many times."""
    _check_can_repeat(jaxpr)
    jaxpr = rewrite(jaxpr, with_conversions, {})  # a mode applies to each operation with a half result
    return rewrite(jaxpr, _without_effects, {})


def _check_can_repeat(jaxpr: core.Jaxpr) -> None:
    """Raises if a step cannot be changed and run many times. A kernel may create references: it runs as written."""
    for eqn, caller in equations(jaxpr):
        name = eqn.primitive.name
        if name in _NEW_REFS and not caller.holder:
            raise TypeError(
                f"fun must not create a jax.Ref, got {name} at {caller.line_of(eqn)}. diagnose replaces the operations "
                "of the function, which does not work with references. Compute new values instead, and carry them "
                "through loops."
            )
        if name == "io_callback" and eqn.outvars:
            raise TypeError(
                f"fun must not read values with {name}, as it does at {caller.line_of(eqn)}: diagnose runs fun many "
                "times. Pass the values as arguments, or read them with jax.pure_callback."
            )


def _without_effects(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Removes callbacks without results, such as `jax.debug.print`: a step runs many times.

    The warning of `scaled_backward` is a callback, too, and is silent: scales that overflow are part of the search.
    """
    if eqn.primitive.name == "pure_callback" and not eqn.invars and SCALING in user_lines(eqn):
        return [eqn.replace(params=eqn.params | {"callback": lambda: [np.array(True)]})]
    return [] if eqn.primitive.name in _CALLBACKS and not eqn.outvars else [eqn]


def copied(tree: PyTree) -> PyTree:
    """Copies containers, which the step may change, and Flax NNX objects, whose copies belong to the current trace."""
    objects, unflatten = flatten_matching(tree, is_nnx_object, is_leaf=is_nnx_object)
    return unflatten(imported("flax.nnx", "clone")(objects) if objects else [])


def compiled(fun: Callable[..., Any], *, optimize: bool = False) -> Callable[..., Any]:
    """Compiles a function without changes of precision; on a CPU, optimizing it would take longer than a few runs."""
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if jax.default_backend() == "cpu":
        options |= {"xla_backend_optimization_level": 2} if optimize else _fast_compilation()
    return jax.jit(fun, compiler_options=options)


@functools.cache
def _fast_compilation() -> dict[str, Any]:
    """Returns the options with which this version of XLA compiles fastest for CPUs."""
    # Where XLA has two compilers for element-wise operations, the older one takes a third of the time.
    options = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:  # XLA has removed it
        del options["xla_cpu_use_fusion_emitters"]
    return options


def compile_step(step: Step) -> Callable[[float], list[Any]]:
    """Returns a function of the loss scale that returns the loss and the gradients of a step as it is written."""
    run = compiled(lambda consts, scale: jax.core.eval_jaxpr(step.jaxpr, consts, scale), optimize=True)
    return lambda scale: run(step.consts, np.float32(scale))


def check_concrete(trees: dict[str, PyTree]) -> None:
    """Raises if an argument has no values."""
    for name, tree in trees.items():
        check_no_refs(tree, name)
        for path, leaf in named_leaves(tree):
            if is_traced(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"{name} must hold arrays with values, got {describe(leaf)} without values at {name}{path}. Call "
                    "diagnose outside of jax.jit, with the arrays of a training step."
                )
            mesh: Any = getattr(getattr(leaf, "sharding", None), "mesh", jax.sharding.get_abstract_mesh())
            if jax.sharding.AxisType.Explicit in mesh.axis_types and jax.sharding.get_abstract_mesh().empty:
                raise ValueError(
                    f"{name} must be used in the context of its mesh, got an array on a mesh with Explicit axes at "
                    f"{name}{path}. Call diagnose in the context of jax.set_mesh(mesh)."
                )
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ValueError(
                    f"{name} must hold arrays with values, got a deleted {describe(leaf)} at {name}{path}. It was "
                    "donated to a compiled function: call diagnose before the training step."
                )
