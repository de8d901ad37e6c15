"""diagnose evaluates each operation from its own operands, and knows where its result comes from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmpscale._diagnosis import evaluate as module
from jmpscale._diagnosis.evaluate import evaluate
from jmpscale._diagnosis.findings import Findings, loss_error_of, origins_of
from jmpscale._diagnosis.measure import Measured
from jmpscale._diagnosis.scales import Reference, Scales

from tables import names

H = jnp.float16
X = H([[1.25, -0.5, 0.75]])


def run(fun, *args):
    closed = jax.make_jaxpr(fun)(*args)
    return evaluate(closed.jaxpr, closed.consts, args, lambda text: None)


def values(evaluation):
    """Returns the outputs in float32, and as written."""
    return [x.float32 for x in evaluation.outputs], [x.written for x in evaluation.outputs]


def scan(x):
    def body(carry, xs):
        row, _ = xs
        carry = carry * row + jnp.where(row > 0, row, H(0.125))
        return carry, (carry * H(3), None)

    return jax.lax.scan(body, jnp.sin(x[0]), (jnp.concatenate([x, x * H(2)]), None), reverse=True)


def empty_scan(x):
    return jax.lax.scan(lambda h, row: (h * row, h), x[0], x[:0])


def while_loop(x):
    limit = x.max() * H(9)
    return jax.lax.while_loop(lambda h: h.max() < limit, lambda h: h * (limit / H(4)), x)


def cond(x):
    return jax.lax.cond(x[0, 0] > 1, lambda x: (x * H(3), H(1)), lambda x: (x, H(2)), x)


def gradient(x):
    return jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(x) * x)(x).astype(jnp.float32).sum())(x)


PROGRAMS = {
    "scan": scan,
    "scan without iterations": empty_scan,
    "while": while_loop,
    "cond": cond,
    "gradient": gradient,
    "literal output": lambda x: [x, 1.5],
    "captured array": lambda x: jax.jit(lambda x: x * np.float16([[2, 3, 4]]))(x).T[::-1],
}


@pytest.mark.parametrize("name", names(PROGRAMS, default={"scan", "gradient"}))
def test_evaluation_has_the_outputs_of_the_program(name):
    fun = PROGRAMS[name]
    float32, written = values(run(fun, X))
    expected = jax.tree.leaves(fun(X))
    assert len(written) == len(expected)
    for wide, narrow, x in zip(float32, written, expected, strict=True):
        assert narrow.dtype == jnp.asarray(x).dtype
        np.testing.assert_allclose(narrow, x, rtol=2e-3)
        assert wide.dtype == (jnp.float32 if narrow.dtype == H else narrow.dtype)
        np.testing.assert_allclose(wide, x, rtol=4e-3)


def test_results_have_their_operands_and_the_iterations_of_loops():
    def fun(x):
        y = jnp.sin(x)
        return jax.lax.scan(lambda h, row: (h + row * x[0], None), y[0], jnp.stack([y[0], y[0]]))[0]

    results = run(fun, X).results
    assert [x.number for x in results] == list(range(len(results)))
    (sine,) = [x for x in results if x.site.operation == "sin"]
    assert sine.operands == ()
    products = [x for x in results if x.site.operation == "mul"]
    assert [x.steps for x in products] == [(0,), (1,)]
    assert products[0].site is products[1].site
    rows = [[x for x in product.operands if x.site.operation == "scan"] for product in products]
    assert [(row.steps, row.site.moves) for (row,) in rows] == [((0,), True), ((1,), True)]
    sums = [x for x in results if x.site.operation == "add"]
    assert products[0] in sums[0].operands
    assert {products[1], sums[0]} <= set(sums[1].operands)


def test_rearranged_values_are_the_same_result():
    evaluation = run(lambda x: jnp.sin(x).T.reshape(3)[:, None], X)
    assert [x.site.operation for x in evaluation.results] == ["sin"]
    assert evaluation.outputs[0].result is evaluation.results[0]


def test_moved_values_are_marked():
    results = run(lambda x: jnp.concatenate([jnp.sin(x), jnp.sin(x)])[:1] * H(2), X).results
    moves = {x.site.operation: x.site.moves for x in results}
    assert moves == {"sin": False, "concatenate": True, "slice": True, "mul": False}


AMPLIFIED = {  # a program, and whether its last operation has its error in float32 too, if its operands are rounded
    "an angle of 5% error": (lambda x: jnp.sin(x * H(301.3)), True),
    "an accurate angle": (lambda x: jnp.sin(x * H(3)), False),
    "a sum that loses a part": (lambda x: (x + H(2000)).astype(jnp.float32) - 2000, True),
    "its own rounding": (lambda x: x * H(2.0**-24), False),
    "an overflow": (lambda x: jnp.exp(x * H(10)), False),
    "one inaccurate operand": (lambda x: jnp.tanh(x) * jnp.sin(x * H(301.3)), False),
    "an amplified error that grows": (lambda x: jnp.sin(x * H(301.3)) * H(1.5), False),
}


@pytest.mark.parametrize("name", AMPLIFIED)
def test_operation_amplifies_the_rounding_of_its_operands(name):
    fun, amplifies = AMPLIFIED[name]
    last = run(fun, X).results[-1]
    assert last.amplifies == amplifies, last.measured


def test_second_evaluation_compiles_nothing():
    def program():
        return run(lambda x: jax.lax.scan(lambda h, _: (jnp.sin(h) * H(2), h), x, None, length=2), X)

    first = program()
    misses = [module.compiled.cache_info().misses, module.compiled_move.cache_info().misses]
    second = program()
    assert [module.compiled.cache_info().misses, module.compiled_move.cache_info().misses] == misses
    assert [x.measured for x in second.results] == [x.measured for x in first.results]


@jax.jit
def shared(x):
    return jnp.sin(x)


def test_one_function_has_a_row_for_each_call():
    def fun(x):
        return shared(shared(x)), jax.lax.scan(lambda h, _: (shared(h), None), x, None, length=2)[0]

    sines = [x for x in run(fun, X).results if x.site.operation == "sin"]
    assert len(sines) == 4
    assert len({x.site for x in sines}) == 3
    assert {x.site.line.partition(" ")[2] for x in sines} == {"(shared)"}


def five_rows(x, reverse=False):
    def body(carry, row):
        carry = carry * row + row
        return carry, carry

    return jax.lax.scan(body, jnp.sin(x), H([1, 2, 3, 4, 5]), reverse=reverse)


def nine_times(x):
    return jax.lax.while_loop(lambda c: c[1] < 9, lambda c: (c[0] * H(1.5), c[1] + 1), (jnp.sin(x), 0))


LOOPS = {  # a loop after a sine, with two operations in each iteration; the iterations that are not entered
    "scan": (five_rows, 6, "scan, iterations 3 to 4"),
    "scan at the limit": (five_rows, 7, "scan, iterations 3 to 4"),
    "scan above the limit": (five_rows, 8, "scan, iterations 4 to 4"),
    "reversed scan": (lambda x: five_rows(x, reverse=True), 7, "scan, iterations 0 to 1"),
    "while": (nine_times, 7, "while, from iteration 3 on"),
}


@pytest.mark.parametrize("name", names(LOOPS, default={"scan at the limit"}))
def test_long_loop_continues_as_one_operation(name, monkeypatch):
    fun, limit, iterations = LOOPS[name]
    monkeypatch.setattr(module, "LIMIT", limit)
    cut = run(fun, H(0.5))
    function = "five_rows" if "scan" in name else "nine_times"
    (entry,) = cut.not_entered
    assert entry.endswith(f" ({function}): {iterations}")
    monkeypatch.setattr(module, "LIMIT", 1000)
    whole = run(fun, H(0.5))
    assert whole.not_entered == []
    for found, expected in zip(values(cut), values(whole), strict=True):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, y)
    operations = [x for x in whole.results if not x.site.moves]
    assert len([x for x in cut.results if not x.site.moves]) < len(operations)


def test_function_of_a_library_has_the_line_of_each_call():
    def fun(x):
        first = jax.nn.silu(x)
        return first, jax.nn.silu(x)

    first = fun.__code__.co_firstlineno + 1
    results = [x for x in run(fun, X).results if x.site.operation == "logistic"]
    assert [x.site.line for x in results] == [f"test_diagnose_operations.py:{first + i} (fun)" for i in range(2)]


def test_kernels_are_listed():
    def fun(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    line = f"test_diagnose_operations.py:{fun.__code__.co_firstlineno + 1} (fun)"
    assert run(fun, X).not_entered == [f"{line}: pure_callback"]
    assert run(fun, jnp.ones(2)).not_entered == []


def test_values_are_freed_after_their_last_use():
    jaxpr = jax.make_jaxpr(lambda x: (jnp.sin(jnp.sin(x) * x), x * 3))(jnp.ones(2)).jaxpr
    sine, product, outer, triple = jaxpr.eqns
    (x,) = jaxpr.invars
    assert module.last_uses(jaxpr) == [[], [sine.outvars[0]], [product.outvars[0]], [x]]
    assert outer.outvars + triple.outvars == jaxpr.outvars


# --- The outputs that count. ---


def scales(errors, fitting, best, loss=1.0, error=0.0):
    return Scales(jnp.float32(loss), error, errors, fitting, best)


def reference(**fields):
    default = Reference(jnp.float32(1.0), [], finite=True, decisive=[True], loss_rounding=0.0)
    return default._replace(**fields)


LOSSES = {  # the loss as written, the error that rounding of the arguments explains, and the error that counts
    "small": (1.029, 0.0, 0.0),
    "large": (1.031, 0.0, 0.031),
    "explained": (1.2, 0.21, 0.0),
    "larger than explained": (1.2, 0.19, 0.2),
    "not finite": (np.nan, 0.5, np.inf),
}


@pytest.mark.parametrize(("loss", "rounding", "expected"), LOSSES.values(), ids=LOSSES)
def test_error_of_the_loss(loss, rounding, expected):
    found = loss_error_of(reference(loss_rounding=rounding), scales({}, None, None, loss=loss))
    assert found == pytest.approx(expected, rel=1e-4)


def output(number, error=0.0, **fields):
    site = module.Site(f"model.py:{number} (f)", "", "mul", np.dtype(H), backward=True, moves=False)
    result = module.Result(number, site, (), Measured(error=error, **fields), (), amplifies=False)
    return module.Value(None, None, result)


NOT_FINITE = {"finite": 0.0}
FITS = scales({0: 0.001, 4: 1.0, 5: np.inf}, (-3, 3), 0, error=1.0)
NONE_FITS = scales({0: 0.6}, None, 0)
OUTPUTS = {  # the errors of the loss and the gradients, the gradients that count, and the outputs that are explained
    "worst gradient": ([0.1, 0.6, 0.4, 0.2], [True] * 3, NONE_FITS, 0.0, 0, [1, 2]),
    "rounding noise": ([0.1, 9.0, 0.6], [False, True], NONE_FITS, 0.0, 0, [2]),
    "loss": ([0.1, 9.0, 0.6], [True, True], NONE_FITS, 0.1, 0, [0]),
    "present scale fits": ([0.0, 0.9], [True], FITS, 0.0, 3, []),
    "smallest scale fits": ([0.0, 0.9], [True], FITS, 0.0, -3, []),
    "present scale is too large": ([0.0, 0.9], [True], FITS, 0.0, 4, [1]),
    "present scale is too small": ([0.0, 0.9], [True], FITS, 0.0, -4, [1]),
    "float32 depends on the scale": ([0.0, 0.4], [True], FITS, 0.0, 4, []),
    "at half of the error": ([0.0, 0.51], [True], FITS, 0.0, 4, [1]),
}


@pytest.mark.parametrize(
    ("errors", "decisive", "found", "loss_error", "exponent", "expected"), OUTPUTS.values(), ids=OUTPUTS
)
def test_outputs_whose_errors_are_explained(errors, decisive, found, loss_error, exponent, expected):
    evaluation = module.Evaluation([output(i, error) for i, error in enumerate(errors)], [], [])
    origins = origins_of(evaluation, reference(decisive=decisive), found, loss_error, 2.0**exponent)
    assert [x.number for x in origins] == expected


def test_gradient_that_is_not_finite_counts_even_if_it_is_rounding_noise():
    outputs = [output(0), output(1, np.inf, **NOT_FINITE), output(2, 0.1)]
    evaluation = module.Evaluation(outputs, [], [])
    (found,) = origins_of(evaluation, reference(decisive=[False, True]), scales({0: np.inf}, None, None), 0.0, 1.0)
    assert found.number == 1


def test_step_that_is_not_finite_in_float32_has_no_scales():
    outputs = [module.Value(None, None, None), output(1, **NOT_FINITE, float32_finite=0.0, float32_nan=1.0), output(2)]
    evaluation = module.Evaluation(outputs, [], [])
    assert [x.number for x in origins_of(evaluation, reference(), None, 0.0, 1.0)] == [1]
    assert loss_error_of(reference(), None) == 0


HEALTHY = {  # the scales, the error of the loss, and whether the step is healthy
    "fits": (FITS, 0.0, True),
    "wrong loss": (FITS, 0.1, False),
    "no scale fits": (NONE_FITS, 0.0, False),
    "not finite": (None, 0.0, False),
}


@pytest.mark.parametrize(("found", "loss_error", "healthy"), HEALTHY.values(), ids=HEALTHY)
def test_step_is_healthy_if_a_scale_fits_and_the_loss_is_right(found, loss_error, healthy):
    evaluation = module.Evaluation([], [], [])
    assert Findings(reference(), found, evaluation, 1.0, loss_error, [], []).healthy == healthy
