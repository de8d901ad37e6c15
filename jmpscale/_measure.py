"""Measures the results of a program that computes in half precision, for `range_report`.

`Evaluation` walks the equations of a jaxpr and computes all half-precision values in float32, so that nothing
saturates and each overflow and underflow appears where it begins. It records the range of each result, and whether
the result is proportional to the loss scale.
"""

import collections
import contextlib
import functools
import math
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util
from jax.sharding import AxisType

from jmpscale._autocast import MATMULS, is_float32_matmul, keeps_precision
from jmpscale._axes import varying_axes
from jmpscale._jaxpr import called_jaxpr, evaluate_equation, scan_carry_size, split_scan_inputs, type_of
from jmpscale._tree import PyTree, is_traced

Function: TypeAlias = Callable[..., Any]

MAX_UNDERFLOW = 0.01  # of the L1 norm of a result, at the smallest scale that fits
_LONG_SUM = 2048  # terms: as many ones as float16 can count
_ROUNDING = 2.0**-12  # the relative error of a value in float16

# Results of these primitives consist of values that exist already, and are not recorded again.
_MOVES = {"all_gather", "all_to_all", "broadcast_in_dim", "concatenate", "copy", "copy_p", "device_put"}
_MOVES |= {
    "dynamic_slice",
    "dynamic_update_slice",
    "expand_dims",
    "gather",
    "mesh_cast",
    "name",
    "optimization_barrier",
}
_MOVES |= {"pad", "pbroadcast", "pcast", "ppermute", "pvary", "reshape", "reshard", "rev", "scatter", "select_n"}
_MOVES |= {"sharding_constraint", "slice", "split", "squeeze", "stack", "stop_gradient", "tile"}
_MOVES |= {"transpose", "unstack"}
_PRODUCTS = MATMULS | {"mul"}
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


_PVARY = None if hasattr(jax.lax, "pcast") else getattr(jax.lax, "pvary", None)


# --- what is recorded

FINITE, INFINITE, NAN = 0, 1, 2
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


class Smallest(NamedTuple):
    """The execution of an operation that has the smallest magnitudes."""

    exponent: jax.Array  # i32[], such that values with smaller exponents have at most MAX_UNDERFLOW of the L1 norm
    counts: jax.Array
    steps: jax.Array


class Range(NamedTuple):
    """The magnitudes of a result."""

    counts: jax.Array  # f32[256], how many nonzero finite values have each exponent (the bits of float32)
    max_abs: jax.Array  # f32[], of the finite values
    steps: jax.Array  # i32[loops], the iterations with the largest magnitude, of the outermost loop first
    smallest: Smallest | None  # of the iterations of loops that are separate, if there are any


class Statistics(NamedTuple):
    """Statistics of a result over all executions of the operation."""

    kind: jax.Array  # i32[], FINITE, INFINITE or NAN: the worst of its values
    range: Range | None  # None if the program would not hold the result in half precision


def _merge(a: Statistics, b: Statistics) -> Statistics:
    """Combines the statistics of two executions of an operation."""
    merged = None
    if a.range is not None and b.range is not None:
        steps = jnp.where(b.range.max_abs > a.range.max_abs, b.range.steps, a.range.steps)
        counts = a.range.counts + b.range.counts
        smallest = a.range.smallest
        if smallest is not None and b.range.smallest is not None:
            is_smaller = b.range.smallest.exponent < smallest.exponent
            smallest = jax.tree.map(functools.partial(jnp.where, is_smaller), b.range.smallest, smallest)
        merged = Range(counts, jnp.maximum(a.range.max_abs, b.range.max_abs), steps, smallest)
    return Statistics(jnp.maximum(a.kind, b.kind), merged)


def _at_step(statistics: list[Statistics], index: jax.Array, sites: list[Site], place: Place) -> list[Statistics]:
    """Adds the iteration of a loop to the iterations of the loops inside it."""
    loop, step = len(place.separate) - 1, index.astype(np.int32)[None]

    def at_step(statistics: Statistics, site: Site) -> Statistics:
        found = statistics.range
        if found is None:
            return statistics
        smallest = None
        if site.scaled and site.separate[loop]:
            smallest = found.smallest or Smallest(
                _smallest_exponent(found.counts), found.counts, jnp.zeros(0, np.int32)
            )
            smallest = smallest._replace(steps=jnp.concatenate([step, smallest.steps]))
        found = found._replace(steps=jnp.concatenate([step, found.steps]), smallest=smallest)
        return statistics._replace(range=found)

    return list(map(at_step, statistics, sites))


def _nothing_like(statistics: list[Statistics]) -> list[Statistics]:
    """Returns the statistics of operations that were not executed."""

    def empty(statistics: Statistics) -> Statistics:
        found = statistics.range
        if found is not None:
            smallest = found.smallest and jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), found.smallest)
            smallest = smallest and smallest._replace(exponent=jnp.int32(256))
            steps = jnp.zeros(found.steps.shape, np.int32)
            found = Range(jnp.zeros(256, np.float32), jnp.float32(-1), steps, smallest)
        return _varying(Statistics(jnp.int32(FINITE), found), varying_axes(statistics.kind))

    return list(map(empty, statistics))


@jax.jit
def _measure_values(x: jax.Array) -> Statistics:
    x = x.astype(np.float32)
    exponents = jax.lax.shift_right_logical(jax.lax.bitcast_convert_type(x, np.int32), np.int32(23)) & np.int32(255)
    counts = jnp.zeros(257, np.int32).at[exponents.ravel() + jnp.isnan(x).ravel().astype(np.int32)].add(np.int32(1))
    kind = jnp.where(counts[256] > 0, np.int32(NAN), (counts[255] > 0).astype(np.int32))
    counts = counts[:256].at[np.array([0, 255])].set(np.int32(0))  # zeros and infinities
    max_abs = jnp.where(jnp.isfinite(x), jnp.abs(x), np.float32(0)).max(initial=0)
    return Statistics(kind, Range(counts.astype(np.float32), max_abs, jnp.zeros(0, np.int32), None))


def _smallest_exponent(counts: jax.Array) -> jax.Array:
    exponents = np.arange(256, dtype=np.int32)
    largest = jnp.where(counts > 0, exponents, np.int32(-1)).max()
    # Relative to the largest exponent, so that no norm overflows; there are no values above it.
    norms = jnp.cumsum(counts * jnp.exp2(jnp.minimum(exponents - largest, 0).astype(np.float32)))
    exponent = (norms <= np.float32(MAX_UNDERFLOW) * norms[-1]).sum(dtype=np.int32)
    return jnp.where(largest < 0, np.int32(256), exponent)


@jax.jit
def _measure_kind(x: jax.Array) -> Statistics:
    kinds = jnp.isnan(x).astype(np.int32) + (jnp.logical_not(jnp.isfinite(x))).astype(np.int32)
    return Statistics(kinds.max(initial=FINITE), None)


def _measure(x: jax.Array, in_half: bool) -> Statistics:
    """Returns the statistics of a result."""
    measure = _measure_values if in_half else _measure_kind
    mesh = jax.typeof(x).sharding.mesh
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        # With Explicit axes JAX would require the sharding of each intermediate array.
        in_auto_mode: Any = jax.sharding.auto_axes(measure, out_sharding=jax.P())
        return in_auto_mode(x)
    return _varying(measure(x), varying_axes(x))


def _varying(statistics: Statistics, axes: Collection[str]) -> Statistics:
    """Returns statistics of which all vary over the same mesh axes, as the types of loops and branches require."""

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(set(axes) - varying_axes(x)))
        if not missing:
            return x
        # JAX has replaced jax.lax.pvary by pcast.
        return _PVARY(x, missing) if _PVARY else jax.lax.pcast(x, missing, to="varying")

    return jax.tree.map(vary, statistics)


# --- evaluation


def _is_narrow_float(aval: Any) -> bool:
    return _is_floating(aval) and aval.dtype.itemsize < 4


def _is_half(aval: Any) -> bool:
    return _is_narrow_float(aval) and aval.dtype.itemsize == 2


def _is_floating(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, np.floating)


def _widen(x: Any) -> Any:
    return x.astype(np.float32) if _is_narrow_float(x) else x


def _narrow(x: Any, aval: Any) -> Any:
    return x.astype(aval.dtype) if _is_narrow_float(aval) else x


def _largest_degree(degrees: Iterable[int]) -> int:
    """Returns the degree of a sum: linear terms before inverse ones, and constants last."""
    return max(degrees, key=lambda degree: (abs(degree), degree), default=0)


def _degree(eqn: core.JaxprEqn, degrees: Sequence[int]) -> list[int]:
    """Returns the degrees of the results of an equation without inner jaxprs.

    A value of degree 1 is proportional to the loss scale, a value of degree -1 to its inverse, and a value of degree 0
    does not depend on it.
    """
    name = eqn.primitive.name
    if name == "optimization_barrier":
        return list(degrees)
    if name in _PRODUCTS:
        found = min(max(sum(degrees[:2]), -1), 1)
    elif name == "div":
        found = min(max(degrees[0] - degrees[1], -1), 1)
    else:
        found = _largest_degree(degrees)
    return [found if _is_floating(type_of(x)) else 0 for x in eqn.outvars]


def _degrees(jaxpr: core.Jaxpr, inputs: Sequence[int]) -> list[int]:
    """Returns the degrees of the outputs of a jaxpr in the loss scale."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(x: Any) -> int:
        return 0 if isinstance(x, core.Literal) else known.get(x, 0)

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _equation_degrees(eqn, [read(x) for x in eqn.invars]), strict=True))
    return [read(x) for x in jaxpr.outvars]


def _equation_degrees(eqn: core.JaxprEqn, inputs: Sequence[int]) -> list[int]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _scan_degrees(eqn, inputs)[1]
    if name == "while":
        return _while_degrees(params, inputs)
    if name == "cond":
        branches = [_degrees(branch.jaxpr, inputs[1:]) for branch in params["branches"]]
        return [_largest_degree(outs) for outs in zip(*branches, strict=True)]
    inner = called_jaxpr(eqn)
    return _degree(eqn, inputs) if inner is None else _degrees(inner[0], inputs)


def _scan_degrees(eqn: core.JaxprEqn, inputs: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the degrees of the inputs of a scan's body, and of the scan's outputs."""
    consts, carry, xs = split_scan_inputs(eqn, inputs)

    def body(carry: list[int]) -> list[int]:
        return _degrees(eqn.params["jaxpr"].jaxpr, [*consts, *carry, *xs])

    size = len(carry)
    carry = _fixed_point(lambda carry: body(carry)[:size], carry)
    return [*consts, *carry, *xs], [*carry, *body(carry)[size:]]


def _while_degrees(params: dict[str, Any], inputs: Sequence[int]) -> list[int]:
    """Returns the degrees of the carry of a while loop."""
    consts = inputs[params["cond_nconsts"] :][: params["body_nconsts"]]
    carry = list(inputs[params["cond_nconsts"] + params["body_nconsts"] :])
    return _fixed_point(lambda carry: _degrees(params["body_jaxpr"].jaxpr, [*consts, *carry]), carry)


def _fixed_point(step: Callable[[list[int]], list[int]], carry: list[int]) -> list[int]:
    while True:
        new = [_largest_degree(pair) for pair in zip(carry, step(carry), strict=True)]
        if new == carry:
            return carry
        carry = new


def _stage(fun: Function, *args: PyTree) -> Function:
    """Traces a function once; the new function runs its equations."""
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    treedef = jax.tree.structure(shapes)
    return lambda *args: jax.tree.unflatten(treedef, core.jaxpr_as_fun(closed)(*jax.tree.leaves(args)))


def output_variables(jaxpr: core.Jaxpr, are_outputs: Sequence[bool], through_all: bool = False) -> frozenset[Any]:
    """Returns the variables that outputs consist of.

    Args:
      jaxpr: the jaxpr.
      are_outputs: the outputs in question.
      through_all: whether to return all variables that the outputs depend on, and not only those whose values are
        moved, converted or multiplied.
    """
    found = {x for x, is_output in zip(jaxpr.outvars, are_outputs, strict=True) if is_output and _is_variable(x)}
    for eqn in reversed(jaxpr.eqns):
        flags = [x in found for x in eqn.outvars]
        if not any(flags):
            continue
        inner = called_jaxpr(eqn)
        if inner is not None:
            passed = output_variables(inner[0], flags, through_all)
            found |= {x for x, y in zip(eqn.invars, inner[0].invars, strict=True) if y in passed and _is_variable(x)}
        elif through_all or eqn.primitive.name in _MOVES | {"convert_element_type", "mul", "div"}:
            found |= set(filter(_is_variable, eqn.invars))
    return frozenset(found)


def _held_variables(eqn: core.JaxprEqn, place: Place) -> tuple[frozenset[Any], frozenset[Any]]:
    """Returns `Place.outputs` and `Place.needed` for the jaxprs of an equation."""
    outputs, needed = ([x in found for x in eqn.outvars] for found in (place.outputs, place.needed))
    if eqn.primitive.name == "scan":
        return _scan_variables(eqn, outputs)
    inner = called_jaxpr(eqn)
    jaxprs = [branch.jaxpr for branch in eqn.params["branches"]] if eqn.primitive.name == "cond" else []
    jaxprs = [inner[0]] if inner else jaxprs
    nothing: frozenset[Any] = frozenset()
    return (
        nothing.union(*(output_variables(jaxpr, outputs) for jaxpr in jaxprs)),
        nothing.union(*(output_variables(jaxpr, needed, through_all=True) for jaxpr in jaxprs)),
    )


def _scan_variables(eqn: core.JaxprEqn, are_outputs: Sequence[bool]) -> tuple[frozenset[Any], frozenset[Any]]:
    body, size = eqn.params["jaxpr"].jaxpr, scan_carry_size(eqn)
    _, carry, _ = split_scan_inputs(eqn, body.invars)
    flags = [False] * size + list(are_outputs[size:])
    outputs = output_variables(body, flags)
    while True:  # what an iteration needs from the previous one is an output of the previous one
        needed = output_variables(body, flags, through_all=True)
        new = [flag or x in needed for flag, x in zip(flags[:size], carry, strict=True)] + flags[size:]
        if new == flags:
            return outputs, needed
        flags = new


def _is_variable(x: Any) -> bool:
    return not isinstance(x, core.Literal)


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
            known.update(zip(eqn.outvars, _equation_degrees(eqn, degrees), strict=True))
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

    # Loops and branches. A body is traced once, so that its operations are recorded once.

    def _scan(self, eqn: core.JaxprEqn, inputs: list[Any], degrees: list[int], place: Place) -> Outputs:
        params, closed = eqn.params, eqn.params["jaxpr"]
        consts, carry, xs = split_scan_inputs(eqn, inputs)
        inner_degrees, _ = _scan_degrees(eqn, degrees)

        def body(carry: list[Any], index: jax.Array, x: list[Any], consts: list[Any]) -> Any:
            first = len(self.sites)
            outputs, statistics = self.run(closed.jaxpr, closed.consts, [*consts, *carry, *x], inner_degrees, place)
            new_carry = list(map(_with_type_of, outputs, carry))
            return new_carry, outputs[len(carry) :], _at_step(statistics, index, self.sites[first:], place)

        indices = jnp.arange(params["length"], dtype=np.int32)
        if not params["length"]:
            return self._operation(eqn, inputs, degrees, place)
        staged = _stage(body, carry, indices[0], [x[0] for x in xs], consts)
        shapes = jax.eval_shape(staged, carry, indices[0], [x[0] for x in xs], consts)[2]

        def step(state: Any, x: Any) -> Any:
            carry, total = state
            carry, y, statistics = staged(carry, *x, consts)
            return (carry, list(map(_merge, total, statistics))), y

        state = (carry, _nothing_like(shapes))
        (carry, total), ys = jax.lax.scan(step, state, (indices, xs), reverse=params["reverse"])
        return [*carry, *ys], total

    def _while(self, eqn: core.JaxprEqn, inputs: list[Any], degrees: list[int], place: Place) -> Outputs:
        params = eqn.params
        cond, body = params["cond_jaxpr"], params["body_jaxpr"]
        first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry_degrees = _while_degrees(params, degrees)
        body_degrees = [*degrees[first:last], *carry_degrees]

        def run_body(carry: list[Any], index: jax.Array, consts: list[Any]) -> Any:
            first = len(self.sites)
            outputs, statistics = self.run(body.jaxpr, body.consts, [*consts, *carry], body_degrees, place)
            statistics = _at_step(statistics, index, self.sites[first:], place)
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
            return carry, index + jnp.int32(1), list(map(_merge, total, statistics))

        carry, _, total = jax.lax.while_loop(condition, step, (carry, jnp.int32(0), _nothing_like(shapes)))
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
                parts = [statistics if i == taken else _nothing_like(shapes[i]) for i in range(len(shapes))]
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
            return outputs, [_over_devices(s, varying_axes(s.kind) if typed else axes) for s in statistics]

        specs = {"in_specs": tuple(params["in_specs"]), "out_specs": (list(params["out_specs"]), jax.P())}
        run = jax.shard_map(body, mesh=params["mesh"], axis_names=set(axes), check_vma=typed, **specs)
        return run(*inputs)

    # Single operations.

    def _operation(self, eqn: core.JaxprEqn, inputs: list[Any], degrees: list[int], place: Place) -> Outputs:
        outputs = self._compute(eqn, inputs, place)
        if eqn.primitive.name in _MOVES or _are_constants(inputs):
            return outputs, []
        if any(_is_narrow_float(type_of(x)) for x in (*eqn.invars, *eqn.outvars)):
            self._note_sensitive(eqn, degrees, place)
        if eqn.primitive.name in MATMULS:
            self._note_matmul(eqn, place)
        statistics: list[Statistics] = []
        scaled = [degree == 1 for degree in _equation_degrees(eqn, degrees)]
        for i, x in enumerate(eqn.outvars):
            if not _is_floating(type_of(x)):
                continue
            in_half = _is_half(type_of(x))
            counted = outputs[i]
            if in_half and scaled[i]:
                counted = _without_rounding_errors(eqn, inputs, counted)
            elif in_half:
                outputs[i], counted = _with_saturated_masks(eqn, inputs, counted)
                counted = _with_poles(eqn, inputs, counted)
            statistics.append(_measure(counted, in_half))
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
        holds_program = any(isinstance(value, (core.Jaxpr, core.ClosedJaxpr)) for value in eqn.params.values())
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
    return jax.lax.convert_element_type(x, like.dtype) if _is_floating(like) else x


def _strongly_typed(x: Any) -> Any:
    return jax.lax.convert_element_type(x, x.dtype) if _is_floating(x) else x


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


def _over_devices(statistics: Statistics, axes: Collection[str]) -> Statistics:
    """Combines statistics over the devices along manual mesh axes."""
    axes = tuple(sorted(axes))
    if not axes:
        return statistics
    kind, found = jax.lax.pmax(statistics.kind, axes), statistics.range
    if found is None:
        return Statistics(kind, None)
    max_abs = jax.lax.pmax(found.max_abs, axes)
    steps = _steps_of(found.max_abs == max_abs, found.steps, axes)
    smallest = found.smallest
    if smallest is not None:
        exponent = jax.lax.pmin(smallest.exponent, axes)
        smallest_steps = _steps_of(smallest.exponent == exponent, smallest.steps, axes)
        smallest = Smallest(exponent, jax.lax.psum(smallest.counts, axes), smallest_steps)
    return Statistics(kind, Range(jax.lax.psum(found.counts, axes), max_abs, steps, smallest))


def _steps_of(is_chosen: jax.Array, steps: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the iterations of a chosen device; of several ones, the last in lexicographic order."""
    found = []
    for step in steps:
        found.append(jax.lax.pmax(jnp.where(is_chosen, step, np.int32(-1)), axes))
        is_chosen = is_chosen & (step == found[-1])
    return jnp.array(found, np.int32)


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


# --- source lines and names

_PACKAGE = str(pathlib.Path(__file__).parent)
_FRAME = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::\d+)? \((?P<function>.*)\)")
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\](?:jax|flax|optax|equinox|haiku|chex|jmpscale)[/\\]")
_MATHEMATICS = re.compile(
    r"[/\\](?:site|dist)-packages[/\\](?:optax|jax[/\\]_src[/\\](?:image|lax|nn|numpy|ops|random|scipy))\b"
)
_TRANSFORMATION = re.compile(r"\b(?:jvp|transpose|vmap|pmap|shard_map|checkpoint|remat|linearize)\(([^()]*)\)")
_NOT_A_MODULE = re.compile(
    r"|(?:p?jit|core_call|closed_call|custom_[jv]{2,3}p?_call|checkpoint|rematted_computation|remat2?|while|body|cond"
    r"|scan|shard_map|[^/]*->.*|branch_\d+_fun|xla_pmap|jvp|vmap|transpose)(?:\(.*\))?"
)


def _line(eqn: core.JaxprEqn, place: Place) -> str:
    """Returns the user's line of an equation, such as `model.py:41 (mlp)`, or the line of the call around it."""
    if place.in_library:
        return place.line
    return _user_line(source_info_util.summarize(eqn.source_info, num_frames=100)) or place.line


@functools.lru_cache(maxsize=10_000)
def _user_line(summary: str) -> str:
    frames = [match for match in map(_FRAME.fullmatch, summary.splitlines()) if match]  # outermost first
    users = [frame for frame in frames if not _is_library(frame["file"])]
    if not users:
        return ""
    names = users[-1]["function"].split(".<locals>.")
    function = next((name for name in reversed(names) if not name.startswith("<")), names[-1])
    return f"{pathlib.PurePath(users[-1]['file']).name}:{users[-1]['line']} ({function})"


def _is_library(file: str) -> bool:
    if file.startswith(_PACKAGE):
        return not file.endswith("__main__.py")
    return _LIBRARY.search(file) is not None


def _scope(eqn: core.JaxprEqn, place: Place) -> str:
    return "/".join(part for part in (place.scope, str(eqn.source_info.name_stack)) if part)


def _inside(place: Place, eqn: core.JaxprEqn) -> Place:
    """Returns the place of the jaxprs that an equation holds.

    JAX keeps the jaxprs of compiled functions. In a function such as `jax.nn.silu`, the user's line of an equation is
    the line of the first call, whichever call it belongs to.
    """
    called = called_jaxpr(eqn)
    file = getattr(called[0].debug_info, "func_filename", None) if called else None
    in_library = place.in_library if file is None else _calls_no_user_code(file)
    line = _line(eqn, place)
    if line == Place().line and file is not None and file.startswith(_PACKAGE):
        line = "the scaling of the loss"
    separate = place.separate
    if eqn.primitive.name in ("scan", "while"):
        separate = (*separate, any(x in place.needed for x in eqn.outvars))
    return Place(_scope(eqn, place), line, in_library, *_held_variables(eqn, place), separate)


def _calls_no_user_code(file: str) -> bool:
    """Tests whether a file contains mathematical functions; other compiled functions, such as pmap's, call users'."""
    return file.startswith(_PACKAGE) or _MATHEMATICS.search(file) is not None


@functools.lru_cache(maxsize=10_000)
def _module(scope: str) -> str:
    """Returns the path of the module, such as `encoder/dense_1`, without the names of transformations."""
    previous = ""
    while previous != scope:
        previous, scope = scope, _TRANSFORMATION.sub(r"\1", scope)
    return "/".join(part for part in scope.split("/") if not _NOT_A_MODULE.fullmatch(part))


def _site(eqn: core.JaxprEqn, aval: Any, scaled: bool, place: Place) -> Site:
    scope = _scope(eqn, place)
    backward = scaled or "transpose(" in scope
    name = eqn.primitive.name
    separate = (*place.separate, any(x in place.needed for x in eqn.outvars))[1:]
    return Site(_line(eqn, place), _module(scope), name, aval.dtype, backward, scaled, separate, math.prod(aval.shape))
