"""The analysis of programs by range_report: which values depend on the loss scale, and which ones are outputs."""

import jax
import jax.numpy as jnp
import pytest

from jmpscale._dataflow import equation_degrees, held_variables, output_variables

ZEROS = jnp.zeros(2)


def _delayed(scaled, x):
    """The scaled value reaches the first part of the carry in the second iteration."""
    return jax.lax.scan(lambda carry, _: ((carry[1], scaled), None), (x, x), length=3)[0]


DEGREES = {  # a function of a value of degree 1 and a value of degree 0, and the degrees of its results
    "product": (lambda s, x: s * x, [1]),
    "product of scaled values": (lambda s, x: s * s, [1]),
    "matmul": (lambda s, x: s @ x, [1]),
    "quotient": (lambda s, x: s / x, [1]),
    "inverse": (lambda s, x: x / s, [-1]),
    "ratio": (lambda s, x: s / s, [0]),
    "unscaled": (lambda s, x: s * (x / s), [0]),
    "sum": (lambda s, x: x + s, [1]),
    "sum with an inverse": (lambda s, x: x + x / s, [-1]),
    "sum of a scaled value and an inverse": (lambda s, x: x / s + s, [1]),
    "constant": (lambda s, x: x + 1, [0]),
    "comparison": (lambda s, x: s > x, [0]),
    "barrier": (lambda s, x: jax.lax.optimization_barrier((x, s)), [0, 1]),
    "jit": (lambda s, x: jax.jit(lambda a, b: (b, a))(s, x), [0, 1]),
    "checkpoint": (lambda s, x: jax.checkpoint(lambda a, b: (jnp.sin(b), a * b))(s, x), [0, 1]),
    "scan": (lambda s, x: jax.lax.scan(lambda c, a: (c + a, c * 2), jnp.float32(0), s), [1, 1]),
    "scan over constants": (lambda s, x: jax.lax.scan(lambda c, a: (c + a, c * 2), jnp.float32(0), x), [0, 0]),
    "scan with a delay": (_delayed, [1, 1]),
    "while": (lambda s, x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + s), (0, x))[1], [1]),
    "while over constants": (lambda s, x: jax.lax.fori_loop(0, x.astype(int)[0], lambda i, c: c + x, x), [0]),
    "cond": (lambda s, x: jax.lax.cond(x[0] > 0, lambda: (s, x), lambda: (x, x)), [1, 0]),
}


def _only_equation(fun, *args):
    (eqn,) = jax.make_jaxpr(jax.jit(fun))(*args).eqns
    return eqn


@pytest.mark.parametrize("name", DEGREES)
def test_degrees_follow_the_equations(name):
    fun, expected = DEGREES[name]
    eqn = _only_equation(lambda s, x: fun(s, x), ZEROS, ZEROS)
    assert equation_degrees(eqn, [1, 0]) == expected


OUTPUTS = {  # a function of two arrays, and the arguments that its result consists of, or depends on
    "moved and multiplied": (lambda w, x: (2 * w).reshape(1, 2), "w", "w"),
    "sum of all": (lambda w, x: w.sum(), "", "w"),
    "product": (lambda w, x: w * x, "wx", "wx"),
    "matmul": (lambda w, x: w @ x, "", "wx"),
    "other result": (lambda w, x: (jnp.sin(x), w)[1], "w", "w"),
    "inner function": (lambda w, x: jax.jit(lambda a, b: (a, jnp.cos(b)))(w, x)[1], "", "x"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_variables_are_the_values_of_outputs(name):
    fun, moved, needed = OUTPUTS[name]
    jaxpr = jax.make_jaxpr(fun)(ZEROS, ZEROS).jaxpr
    for expected, through_all in ((moved, False), (needed, True)):
        found = output_variables(jaxpr, [True], through_all)
        assert "".join(n for n, variable in zip("wx", jaxpr.invars, strict=True) if variable in found) == expected
        assert output_variables(jaxpr, [False], through_all) == frozenset()


def test_held_variables_of_a_scan_are_its_stacked_results():
    """In the backward pass of a scan over layers, the stacked results are the gradients of the layers."""

    def layers(w, x):
        return jax.lax.scan(lambda total, w: (total + w.sum(), jnp.sin(2 * w)), x.sum(), w)

    jaxpr = jax.make_jaxpr(layers)(jnp.ones((3, 2)), ZEROS).jaxpr
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    outputs, needed = held_variables(scan, frozenset(jaxpr.outvars), frozenset())
    body = scan.params["jaxpr"].jaxpr
    assert outputs == {body.outvars[1]}
    assert body.invars[1] in needed
    assert body.outvars[0] not in needed


def test_held_variables_of_a_cond_are_those_of_its_branches():
    jaxpr = jax.make_jaxpr(lambda w, x: jax.lax.cond(x[0] > 0, lambda: 2 * w, lambda: jnp.cos(w)))(ZEROS, ZEROS).jaxpr
    (cond,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond")
    outputs, needed = held_variables(cond, frozenset(jaxpr.outvars), frozenset(jaxpr.outvars))
    operands = [branch.jaxpr.invars[-1] for branch in cond.params["branches"]]
    assert [x in needed for x in operands] == [True, True]
    assert sorted(x in outputs for x in operands) == [False, True]
