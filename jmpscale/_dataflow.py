"""The data flow of a program: how values depend on the loss scale, and which values its outputs consist of.

A value of degree 1 is proportional to the loss scale, a value of degree -1 to its inverse, and a value of degree 0 does
not depend on it. The degree follows from the equations, not from names: a checkpointed function computes forward values
again inside the backward pass, and they have degree 0.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend import core

from jmpscale._autocast import MATMULS
from jmpscale._base.jaxpr import called_jaxpr, is_floating, scan_carry_size, split_scan_inputs, type_of

# Results of these primitives consist of values that exist already.
MOVES = {"all_gather", "all_to_all", "broadcast_in_dim", "concatenate", "copy", "copy_p", "device_put", "dynamic_slice"}
MOVES |= {"dynamic_update_slice", "expand_dims", "gather", "mesh_cast", "name", "optimization_barrier", "pad"}
MOVES |= {"pbroadcast", "pcast", "ppermute", "pvary", "reshape", "reshard", "rev", "scatter", "select_n"}
MOVES |= {"sharding_constraint", "slice", "split", "squeeze", "stack", "stop_gradient", "tile", "transpose", "unstack"}
_PRODUCTS = MATMULS | {"mul"}


def _degrees(jaxpr: core.Jaxpr, inputs: Sequence[int]) -> list[int]:
    """Returns the degrees of the outputs of a jaxpr in the loss scale."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(x: Any) -> int:
        return 0 if isinstance(x, core.Literal) else known.get(x, 0)

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, equation_degrees(eqn, [read(x) for x in eqn.invars]), strict=True))
    return [read(x) for x in jaxpr.outvars]


def equation_degrees(eqn: core.JaxprEqn, inputs: Sequence[int]) -> list[int]:
    """Returns the degrees of the results of an equation."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return scan_degrees(eqn, inputs)[1]
    if name == "while":
        return while_degrees(params, inputs)
    if name == "cond":
        branches = [_degrees(branch.jaxpr, inputs[1:]) for branch in params["branches"]]
        return [_largest_degree(outs) for outs in zip(*branches, strict=True)]
    inner = called_jaxpr(eqn)
    return _degree(eqn, inputs) if inner is None else _degrees(inner[0], inputs)


def _degree(eqn: core.JaxprEqn, degrees: Sequence[int]) -> list[int]:
    """Returns the degrees of the results of an equation without inner jaxprs."""
    name = eqn.primitive.name
    if name == "optimization_barrier":
        return list(degrees)
    if name in _PRODUCTS:
        found = min(max(sum(degrees[:2]), -1), 1)
    elif name == "div":
        found = min(max(degrees[0] - degrees[1], -1), 1)
    else:
        found = _largest_degree(degrees)
    return [found if is_floating(type_of(x)) else 0 for x in eqn.outvars]


def _largest_degree(degrees: Iterable[int]) -> int:
    """Returns the degree of a sum: linear terms before inverse ones, and constants last."""
    return max(degrees, key=lambda degree: (abs(degree), degree), default=0)


def scan_degrees(eqn: core.JaxprEqn, inputs: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the degrees of the inputs of a scan's body, and of the scan's outputs."""
    consts, carry, xs = split_scan_inputs(eqn, inputs)

    def body(carry: list[int]) -> list[int]:
        return _degrees(eqn.params["jaxpr"].jaxpr, [*consts, *carry, *xs])

    size = len(carry)
    carry = _fixed_point(lambda carry: body(carry)[:size], carry)
    return [*consts, *carry, *xs], [*carry, *body(carry)[size:]]


def while_degrees(params: dict[str, Any], inputs: Sequence[int]) -> list[int]:
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
        elif through_all or eqn.primitive.name in MOVES | {"convert_element_type", "mul", "div"}:
            found |= set(filter(_is_variable, eqn.invars))
    return frozenset(found)


def held_variables(
    eqn: core.JaxprEqn, outputs: frozenset[Any], needed: frozenset[Any]
) -> tuple[frozenset[Any], frozenset[Any]]:
    """Returns the variables inside the jaxprs of an equation that belong to two sets of variables around it.

    Args:
      eqn: the equation.
      outputs: variables that the outputs of the program consist of.
      needed: variables that the outputs of each iteration of the innermost loop depend on.
    """
    are_outputs, are_needed = ([x in found for x in eqn.outvars] for found in (outputs, needed))
    if eqn.primitive.name == "scan":
        return _scan_variables(eqn, are_outputs)
    inner = called_jaxpr(eqn)
    jaxprs = [branch.jaxpr for branch in eqn.params["branches"]] if eqn.primitive.name == "cond" else []
    jaxprs = [inner[0]] if inner else jaxprs
    nothing: frozenset[Any] = frozenset()
    return (
        nothing.union(*(output_variables(jaxpr, are_outputs) for jaxpr in jaxprs)),
        nothing.union(*(output_variables(jaxpr, are_needed, through_all=True) for jaxpr in jaxprs)),
    )


def _scan_variables(eqn: core.JaxprEqn, are_outputs: Sequence[bool]) -> tuple[frozenset[Any], frozenset[Any]]:
    """Returns the result of `held_variables` for a scan, of which only the stacked results are like outputs."""
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
