"""Measures the results of a program that computes in half precision, for `range_report`.

`Evaluation` walks the equations of a jaxpr and computes all half-precision values in float32, so that nothing
saturates and each overflow and underflow appears where it begins. It records the range of each result, and whether
the result is proportional to the loss scale.
"""

import collections
import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jmpscale._autocast import MATMULS, is_float32_matmul, keeps_precision
from jmpscale._base.compat import varying_axes
from jmpscale._base.jaxpr import called_jaxpr, evaluate_equation, is_floating, is_jaxpr, split_scan_inputs, type_of
from jmpscale._base.tree import PyTree, is_traced
from jmpscale._dataflow import MOVES, equation_degrees, held_variables, scan_degrees, while_degrees
from jmpscale._source import is_library_function, is_own, module_path, user_line
from jmpscale._statistics import Statistics, at_step, measure, merge, nothing_like, over_devices

Function: TypeAlias = Callable[..., Any]

_LONG_SUM = 2048  # terms: as many ones as float16 can count
_ROUNDING = 2.0**-12  # the relative error of a value in float16

_ADDITIONS = {"add", "add_any", "sub"}
_SENSITIVE = {"div", "exp", "exp2", "expm1", "log", "log1p", "pow", "rsqrt"}

# Primitives of JAX that compute in the dtype of their operands, so that they can compute in float32 instead. Other
# primitives (kernels, callbacks) have operands and results of fixed dtypes.
_KNOWN = {
    primitive.name
    for module in (core.primitives, jax.lax)
    for primitive in vars(module).values()
    if isinstance(primitive, core.Primitive)
}
_KNOWN |= {"mesh_cast", "pbroadcast", "pcast", "psum2", "psum_invariant", "pvary", "ragged_dot_general", "reshard"}
_KNOWN -= {"bitcast_convert_type", "nextafter", "reduce_precision", "custom_linear_solve", "custom_lin"}
_KNOWN -= {"rng_bit_generator", "rng_uniform", "random_bits", "pmap", "xla_pmap"}
_DTYPE_PARAMETERS = ("new_dtype", "dtype", "preferred_element_type", "accum_dtype", "out_dtype")

POLE = float(np.finfo(np.float32).max)  # the magnitude of a quotient or logarithm whose operand rounds to zero


class Site(NamedTuple):
    """An operation of the program."""

    line: str
    module: str
    operation: str
    dtype: np.dtype
    backward: bool
    scaled: bool
    separate: tuple[bool, ...]  # for each loop, outermost first: whether its iterations are like different operations
    size: int


class Place(NamedTuple):
    """What surrounds a jaxpr: the name stack and the source line of the call, and the use of its variables."""

    scope: str = ""
    line: str = "an unknown line"
    in_library: bool = False  # whether the jaxpr belongs to a function of a library, such as jax.nn.silu
    outputs: frozenset[Any] = frozenset()  # the variables of the jaxpr that are outputs of the program
    # The variables that the outputs of each iteration of the innermost loop depend on, if these are outputs of the
    # program. In a scan over layers, the gradients of a layer depend on them, and in other loops only sums do.
    needed: frozenset[Any] = frozenset()
    separate: tuple[bool, ...] = ()  # whether this jaxpr is needed in the program, and in each loop but the innermost


def _is_narrow_float(aval: Any) -> bool:
    return is_floating(aval) and aval.dtype.itemsize < 4


def _is_half(aval: Any) -> bool:
    return _is_narrow_float(aval) and aval.dtype.itemsize == 2


def _widen(x: Any) -> Any:
    return x.astype(np.float32) if _is_narrow_float(x) else x


def _narrow(x: Any, aval: Any) -> Any:
    return x.astype(aval.dtype) if _is_narrow_float(aval) else x


def _stage(fun: Function, *args: PyTree) -> Function:
    """Traces a function once; the new function runs its equations."""
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    treedef = jax.tree.structure(shapes)
    return lambda *args: jax.tree.unflatten(treedef, core.jaxpr_as_fun(closed)(*jax.tree.leaves(args)))


Outputs: TypeAlias = tuple[list[Any], list[Statistics]]


class Evaluation:
    """Evaluates jaxprs with all half-precision values in float32, and records where and how large they are.

    `sites` has an entry for each recorded operation, in program order; the evaluation returns the statistics in the
    same order.
    """

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.sensitive: dict[str, dict[str, None]] = collections.defaultdict(dict)  # an ordered set for each line
        self.wide_matmuls: dict[str, None] = {}
        self.opaque: dict[str, None] = {}
        self.has_half_matmul = False

    def run(
        self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], degrees: Sequence[int], place: Place
    ) -> Outputs:
        """Returns the outputs, half-precision ones in float32, and the statistics of all recorded operations."""
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, map(_widen, consts), strict=True))
        values.update(zip(jaxpr.invars, map(_widen, args), strict=True))
        known = dict(zip(jaxpr.invars, degrees, strict=True))
        statistics: list[Statistics] = []

        def read(x: Any) -> Any:
            return _widen(x.val) if isinstance(x, core.Literal) else values[x]

        for eqn in jaxpr.eqns:
            inputs = [read(x) for x in eqn.invars]
            degrees = [0 if isinstance(x, core.Literal) else known.get(x, 0) for x in eqn.invars]
            outputs, new = self._equation(eqn, inputs, degrees, place)
            values.update(zip(eqn.outvars, outputs, strict=True))
            known.update(zip(eqn.outvars, equation_degrees(eqn, degrees), strict=True))
            statistics += new
        return [read(x) for x in jaxpr.outvars], statistics

    def _equation(self, eqn: core.JaxprEqn, inputs: list[Any], degrees: list[int], place: Place) -> Outputs:
        inner = called_jaxpr(eqn)
        if inner is not None and eqn.primitive.name != "shard_map":
            return self.run(*inner, inputs, degrees, _inside(place, eqn))
        structured = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shard_map}
        if eqn.primitive.name in structured:
            return structured[eqn.primitive.name](eqn, inputs, degrees, _inside(place, eqn))
        return self._operation(eqn, inputs, degrees, place)

    def _separate(self, first: int, place: Place) -> list[bool]:
        """Returns whether the iterations of a loop are like different operations, for the sites from `first` on."""
        loop = len(place.separate) - 1
        return [site.scaled and site.separate[loop] for site in self.sites[first:]]

    # Loops and branches. A body is traced once, so that its operations are recorded once.

    def _scan(self, eqn: core.JaxprEqn, inputs: list[Any], degrees: list[int], place: Place) -> Outputs:
        params, closed = eqn.params, eqn.params["jaxpr"]
        consts, carry, xs = split_scan_inputs(eqn, inputs)
        inner_degrees, _ = scan_degrees(eqn, degrees)

        def body(carry: list[Any], index: jax.Array, x: list[Any], consts: list[Any]) -> Any:
            first = len(self.sites)
            outputs, statistics = self.run(closed.jaxpr, closed.consts, [*consts, *carry, *x], inner_degrees, place)
            new_carry = list(map(_with_type_of, outputs, carry))
            return new_carry, outputs[len(carry) :], at_step(statistics, index, self._separate(first, place))

        indices = jnp.arange(params["length"], dtype=np.int32)
        if not params["length"]:
            return self._operation(eqn, inputs, degrees, place)
        staged = _stage(body, carry, indices[0], [x[0] for x in xs], consts)
        shapes = jax.eval_shape(staged, carry, indices[0], [x[0] for x in xs], consts)[2]

        def step(state: Any, x: Any) -> Any:
            carry, total = state
            carry, y, statistics = staged(carry, *x, consts)
            return (carry, list(map(merge, total, statistics))), y

        state = (carry, nothing_like(shapes))
        (carry, total), ys = jax.lax.scan(step, state, (indices, xs), reverse=params["reverse"])
        return [*carry, *ys], total

    def _while(self, eqn: core.JaxprEqn, inputs: list[Any], degrees: list[int], place: Place) -> Outputs:
        params = eqn.params
        cond, body = params["cond_jaxpr"], params["body_jaxpr"]
        first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry_degrees = while_degrees(params, degrees)
        body_degrees = [*degrees[first:last], *carry_degrees]

        def run_body(carry: list[Any], index: jax.Array, consts: list[Any]) -> Any:
            first = len(self.sites)
            outputs, statistics = self.run(body.jaxpr, body.consts, [*consts, *carry], body_degrees, place)
            statistics = at_step(statistics, index, self._separate(first, place))
            return list(map(_with_type_of, outputs, carry)), statistics

        def condition(state: Any) -> Any:
            recorder = Evaluation()  # the condition is not part of the computation of the loss
            args, degrees = [*inputs[:first], *state[0]], [0] * (first + len(state[0]))
            return recorder.run(cond.jaxpr, cond.consts, args, degrees, place)[0][0]

        carry, consts = inputs[last:], inputs[first:last]
        staged = _stage(run_body, carry, jnp.int32(0), consts)
        shapes = jax.eval_shape(staged, carry, jnp.int32(0), consts)[1]

        def step(state: Any) -> Any:
            carry, index, total = state
            carry, statistics = staged(carry, index, consts)
            return carry, index + jnp.int32(1), list(map(merge, total, statistics))

        carry, _, total = jax.lax.while_loop(condition, step, (carry, jnp.int32(0), nothing_like(shapes)))
        return carry, total

    def _cond(self, eqn: core.JaxprEqn, inputs: list[Any], degrees: list[int], place: Place) -> Outputs:
        index, *operands = inputs
        branches = []
        for closed in eqn.params["branches"]:
            run = functools.partial(self.run, closed.jaxpr, closed.consts, degrees=degrees[1:], place=place)
            branches.append(_stage(run, operands))
        shapes = [jax.eval_shape(branch, operands)[1] for branch in branches]

        def with_all_statistics(taken: int) -> Function:
            def run(operands: list[Any]) -> Outputs:
                outputs, statistics = branches[taken](operands)
                parts = [statistics if i == taken else nothing_like(shapes[i]) for i in range(len(shapes))]
                outputs = [_strongly_typed(x) for x in outputs]
                return outputs, [s for part in parts for s in part]

            return run

        return jax.lax.switch(index, [with_all_statistics(i) for i in range(len(branches))], operands)

    def _shard_map(self, eqn: core.JaxprEqn, inputs: list[Any], degrees: list[int], place: Place) -> Outputs:
        params = eqn.params
        # JAX has renamed the parameter.
        found = [params[name] for name in ("newly_manual_axes", "manual_axes") if name in params]
        if not found:
            return self._operation(eqn, inputs, degrees, place)
        axes, typed = tuple(found[0]), params["check_vma"]

        def body(*args: Any) -> Outputs:
            outputs, statistics = self.run(params["jaxpr"], (), args, degrees, place)
            return outputs, [over_devices(s, varying_axes(s.kind) if typed else axes) for s in statistics]

        specs = {"in_specs": tuple(params["in_specs"]), "out_specs": (list(params["out_specs"]), jax.P())}
        run = jax.shard_map(body, mesh=params["mesh"], axis_names=set(axes), check_vma=typed, **specs)
        return run(*inputs)

    # Single operations.

    def _operation(self, eqn: core.JaxprEqn, inputs: list[Any], degrees: list[int], place: Place) -> Outputs:
        outputs = self._compute(eqn, inputs, place)
        if eqn.primitive.name in MOVES or _are_constants(inputs):
            return outputs, []
        if any(_is_narrow_float(type_of(x)) for x in (*eqn.invars, *eqn.outvars)):
            self._note_sensitive(eqn, degrees, place)
        if eqn.primitive.name in MATMULS:
            self._note_matmul(eqn, place)
        statistics: list[Statistics] = []
        scaled = [degree == 1 for degree in equation_degrees(eqn, degrees)]
        for i, x in enumerate(eqn.outvars):
            if not is_floating(type_of(x)):
                continue
            in_half = _is_half(type_of(x))
            counted = outputs[i]
            if in_half and scaled[i]:
                counted = _without_rounding_errors(eqn, inputs, counted)
            elif in_half:
                outputs[i], counted = _with_saturated_masks(eqn, inputs, counted)
                counted = _with_poles(eqn, inputs, counted)
            statistics.append(measure(counted, in_half))
            self.sites.append(_site(eqn, type_of(x), scaled[i], place))
        return outputs, statistics

    def _compute(self, eqn: core.JaxprEqn, inputs: list[Any], place: Place) -> list[Any]:
        """Returns the results of an equation, computed in float32 where the program computes in less."""
        params = eqn.params
        has_narrow = any(_is_narrow_float(type_of(x)) for x in (*eqn.invars, *eqn.outvars))
        # Constants are as the program holds them: -1e9 is -inf in float16, and 1e-8 is 0.
        is_constant = _are_constants(inputs)
        if has_narrow and not is_constant and eqn.primitive.name in _KNOWN:
            with contextlib.suppress(Exception):  # whatever a primitive raises for operands of another dtype
                return [_widen(x) for x in evaluate_equation(eqn, _widen_params(params), inputs)]
        if not is_constant and (has_narrow or eqn.primitive.name not in _KNOWN):
            self._note_opaque(eqn, has_narrow, place)
        with np.errstate(over="ignore"):  # of constants, which NumPy converts
            narrow = [_narrow(x, type_of(variable)) for x, variable in zip(inputs, eqn.invars, strict=True)]
            return [_widen(x) for x in evaluate_equation(eqn, params, narrow)]

    def _note_opaque(self, eqn: core.JaxprEqn, has_narrow: bool, place: Place) -> None:
        holds_program = any(map(is_jaxpr, eqn.params.values()))
        from_bits = eqn.primitive.name == "bitcast_convert_type" and not _is_narrow_float(type_of(eqn.invars[0]))
        if (has_narrow and not from_bits) or holds_program or "call" in eqn.primitive.name:
            self.opaque[f"{_line(eqn, place)}: {eqn.primitive.name}"] = None

    def _note_sensitive(self, eqn: core.JaxprEqn, degrees: list[int], place: Place) -> None:
        if any(degrees) or not any(_is_half(type_of(x)) for x in eqn.outvars):
            return
        name, (x, *others) = eqn.primitive.name, eqn.invars
        is_long_sum = name in ("reduce_sum", "cumsum") and type_of(x).size >= _LONG_SUM * type_of(eqn.outvars[0]).size
        is_long_sum |= name == "cumsum" and type_of(x).shape[eqn.params["axis"]] >= _LONG_SUM
        divides_by_constant = name == "div" and isinstance(others[0], core.Literal)
        if is_long_sum or (name in _SENSITIVE and not divides_by_constant):
            self.sensitive[_line(eqn, place)][name] = None

    def _note_matmul(self, eqn: core.JaxprEqn, place: Place) -> None:
        if _is_half(type_of(eqn.invars[0])) and _is_half(type_of(eqn.invars[1])):
            self.has_half_matmul = True
        elif is_float32_matmul(eqn) and not keeps_precision(eqn.params["precision"]):
            self.wide_matmuls[_line(eqn, place)] = None


def _are_constants(inputs: list[Any]) -> bool:
    """Tests whether all inputs are literals of the program; all other values are traced."""
    return not any(map(is_traced, inputs))


def _with_type_of(x: Any, like: Any) -> Any:
    """Returns a loop's new carry with the dtype of the old one, and without a weak type."""
    return jax.lax.convert_element_type(x, like.dtype) if is_floating(like) else x


def _strongly_typed(x: Any) -> Any:
    return jax.lax.convert_element_type(x, x.dtype) if is_floating(x) else x


def _widen_params(params: dict[str, Any]) -> dict[str, Any]:
    """Returns parameters of an equation that computes in float32."""
    new = dict(params)
    if isinstance(params.get("precision"), (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)):
        new["precision"] = None  # an algorithm has the dtypes of its operands
    for name in _DTYPE_PARAMETERS:
        dtype = params.get(name)
        if dtype is not None and jnp.issubdtype(dtype, np.floating) and np.dtype(dtype).itemsize < 4:
            new[name] = np.dtype(np.float32)
    for name, value in params.items():  # the functions of reductions and scatters
        if isinstance(value, core.ClosedJaxpr):
            new[name] = _widen_reducer(value.jaxpr, value.consts)
        elif isinstance(value, core.Jaxpr):
            new[name] = _widen_reducer(value, ()).jaxpr
    return new


def _widen_reducer(jaxpr: core.Jaxpr, consts: Sequence[Any]) -> core.ClosedJaxpr:
    args = [
        jax.ShapeDtypeStruct(type_of(x).shape, np.float32 if _is_narrow_float(type_of(x)) else type_of(x).dtype)
        for x in jaxpr.invars
    ]
    return jax.make_jaxpr(lambda *args: Evaluation().run(jaxpr, consts, args, [0] * len(args), Place())[0])(*args)


def _without_rounding_errors(eqn: core.JaxprEqn, inputs: list[Any], x: jax.Array) -> jax.Array:
    """Sets results to zero that consist of the rounding errors of a sum.

    The derivatives of some parameters are zero, such as the bias of a layer before a normalization. In a computed
    derivative only rounding errors remain, and to lose them harms nothing.
    """
    if eqn.primitive.name == "reduce_sum":
        largest = jnp.abs(inputs[0]).max(axis=eqn.params["axes"], initial=0)
    elif eqn.primitive.name in _ADDITIONS:
        largest = jnp.maximum(jnp.abs(inputs[0]), jnp.abs(inputs[1]))
    else:
        return x
    return jnp.where(jnp.abs(x) < np.float32(_ROUNDING) * largest, np.float32(0), x)


def _with_saturated_masks(eqn: core.JaxprEqn, inputs: list[Any], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a result of the forward pass with masks as half precision holds them, and its values outside of masks.

    A mask is a value of -inf or about the dtype's lowest number, to which scores may be added; or a lower number, such
    as -1e9, that is the same in all masked positions.
    """
    limit = np.float32(jnp.finfo(type_of(eqn.outvars[0]).dtype).max)
    # Scores may have been added to the lowest number, or a maximum subtracted.
    lowest = -limit * np.float32(15 / 16) if eqn.primitive.name in _ADDITIONS else -limit
    masked = jnp.zeros((), bool)
    for variable, operand in zip(eqn.invars, inputs, strict=True):
        if _is_half(type_of(variable)) and jnp.shape(operand) in ((), x.shape) and eqn.primitive.name not in MATMULS:
            masked = masked | (operand <= lowest)
    if eqn.primitive.name in ("convert_element_type", "mul"):
        overflows = x < -limit
        fill = x.min(initial=0)
        is_mask = (overflows == (x == fill)).all() & (overflows.sum() > 1) & (x.max(initial=0) <= limit)
        masked = masked | (overflows & is_mask)
    saturated = jnp.where(masked & (x < -limit), -np.float32(np.inf), x)
    return saturated, jnp.where(masked & jnp.logical_not(jnp.isnan(x)), np.float32(0), x)


def _with_poles(eqn: core.JaxprEqn, inputs: list[Any], x: jax.Array) -> jax.Array:
    """Returns a result of the forward pass that is `POLE` where half precision rounds an operand to zero at a pole."""
    name = eqn.primitive.name
    if name not in ("div", "log", "rsqrt") or not _is_half(type_of(eqn.invars[-1])):
        return x
    operand = inputs[-1]  # of a quotient, the divisor
    smallest = float(jnp.finfo(type_of(eqn.invars[-1]).dtype).smallest_subnormal)
    rounds_to_zero = (operand != 0) & (jnp.abs(operand) < np.float32(smallest / 2))
    return jnp.where(rounds_to_zero, np.float32(POLE), x)


def _line(eqn: core.JaxprEqn, place: Place) -> str:
    """Returns the user's line of an equation, such as `model.py:41 (mlp)`, or the line of the call around it."""
    if place.in_library:
        return place.line
    return user_line(eqn) or place.line


def _scope(eqn: core.JaxprEqn, place: Place) -> str:
    return "/".join(part for part in (place.scope, str(eqn.source_info.name_stack)) if part)


def _inside(place: Place, eqn: core.JaxprEqn) -> Place:
    """Returns the place of the jaxprs that an equation holds.

    JAX keeps the jaxprs of compiled functions. In a function such as `jax.nn.silu`, the user's line of an equation is
    the line of the first call, whichever call it belongs to.
    """
    called = called_jaxpr(eqn)
    file = getattr(called[0].debug_info, "func_filename", None) if called else None
    in_library = place.in_library if file is None else is_library_function(file)
    line = _line(eqn, place)
    if line == Place().line and file is not None and is_own(file):
        line = "the scaling of the loss"
    separate = place.separate
    if eqn.primitive.name in ("scan", "while"):
        separate = (*separate, any(x in place.needed for x in eqn.outvars))
    return Place(_scope(eqn, place), line, in_library, *held_variables(eqn, place.outputs, place.needed), separate)


def _site(eqn: core.JaxprEqn, aval: Any, scaled: bool, place: Place) -> Site:
    scope = _scope(eqn, place)
    backward = scaled or "transpose(" in scope
    name = eqn.primitive.name
    separate = (*place.separate, any(x in place.needed for x in eqn.outvars))[1:]
    return Site(
        _line(eqn, place), module_path(scope), name, aval.dtype, backward, scaled, separate, math.prod(aval.shape)
    )
