"""The page on higher derivatives: at every scale the values of a float64 run, and no hidden overflow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpscale
from jmpscale import testing

import pages

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]

PAGE = "guides/higher_order"
PENALTY, CURVATURE, OWN = "Gradient penalty", "Hessian-vector products", "A backward pass with numbers of its own"
ITERATION, ROOT = "An equilibrium by iteration", "An equilibrium with custom_root"


@functools.cache
def _names(title):
    return pages.run(PAGE, title)


def _in_float64(fn, *args):
    """Returns what `fn` gives for the arguments in float64, as numpy arrays."""
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), args)
    jax.config.update("jax_enable_x64", True)
    try:
        return jax.tree.map(np.asarray, jax.jit(fn)(*jax.tree.map(jnp.asarray, wide)))
    finally:
        jax.config.update("jax_enable_x64", False)


def _assert_close(got, expected, rtol):
    """Compares leaf by leaf, relative to the largest value of each."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=rtol * np.abs(y).max()), got, expected)


def _far_off(got, expected, rtol):
    distances = jax.tree.map(lambda x, y: np.abs(x - y).max() / np.abs(y).max(), got, expected)
    return max(jax.tree.leaves(distances)) > rtol


# Gradient penalty


def _penalised_loss(params, real, fake, weight=10.0, plain_weight=1.0):
    def critic(x):
        return jnp.tanh(x @ params["in"]) @ params["out"]

    slopes = jax.grad(lambda x: jnp.sum(critic(x)))(real)
    penalty = jnp.mean((jnp.sqrt(jnp.sum(slopes**2, axis=1) + 1e-12) - 1) ** 2)
    return plain_weight * (jnp.mean(critic(fake)) - jnp.mean(critic(real))) + weight * penalty


def _penalty_batch():
    names = _names(PENALTY)
    return names["real"], names["fake"]


def _fresh_critic():
    keys = jax.random.split(jax.random.key(1))
    return {"in": 0.5 * jax.random.normal(keys[0], (4, 32)), "out": 0.5 * jax.random.normal(keys[1], (32, 1))}


@functools.cache
def _penalty_value_and_grad():
    return jax.jit(jmpscale.value_and_grad(_names(PENALTY)["loss_fn"], has_aux=True))


@pytest.mark.full
@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_the_penalised_gradient_is_that_of_a_float64_run(scale):
    params, scaler = _fresh_critic(), jmpscale.dynamic(scale)
    (loss, _), grads = _penalty_value_and_grad()(scaler, params, scaler, *_penalty_batch())
    expected_loss, expected = _in_float64(jax.value_and_grad(_penalised_loss), params, *_penalty_batch())
    assert jmpscale.all_finite(grads)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-2)
    _assert_close(grads, expected, 1e-2)


@pytest.mark.full
def test_the_critic_trains():
    names = _names(PENALTY)
    before, after = (_penalised_loss(params, *_penalty_batch()) for params in (_fresh_critic(), names["params"]))
    assert after < min(0.0, before - 1.0)
    assert names["scaler"].consecutive_skips == 0


def test_an_inner_gradient_that_overflows_is_skipped_and_the_scale_backs_off():
    names, scaler = _names(PENALTY), jmpscale.dynamic(2.0**32)
    before = names["params"], names["opt_state"]
    for _ in range(32):
        *after, scaler, _ = names["train_step"](*before, scaler, *_penalty_batch())
        if not scaler.consecutive_skips:
            break
        testing.assert_step_is_noop(before, tuple(after))
    assert scaler.skipped > 10
    assert (scaler.loss_scale, scaler.last_skip) == (2.0 ** (32 - int(scaler.skipped)), 1)
    assert (after[0]["out"] != before[0]["out"]).any()


@pytest.mark.full
def test_given_the_loss_with_the_penalty_the_scale_would_never_back_off():
    params, scaler = _fresh_critic(), jmpscale.dynamic(2.0**32)
    for _ in range(3):
        (loss, plain), grads = _penalty_value_and_grad()(scaler, params, scaler, *_penalty_batch())
        finite = jmpscale.all_finite(grads)
        assert not finite
        assert jnp.isfinite(plain)
        scaler = jmpscale.update(scaler, finite, loss=loss)
    assert (scaler.loss_scale, scaler.last_skip) == (2.0**32, 2)


@pytest.mark.full
def test_a_penalty_with_a_very_small_weight_needs_its_own_inner_scale():
    weight, outer, params = 1e-7, jmpscale.dynamic(2.0**14), _fresh_critic()

    @jax.jit
    def gradient_of_penalty(inner):
        def loss_fn(params):
            loss, plain = _names(PENALTY)["loss_fn"](params, inner, *_penalty_batch())
            return weight * (loss - plain)

        return jax.tree.map(lambda g: g / weight, jmpscale.value_and_grad(loss_fn)(outer, params)[1])

    penalty = functools.partial(_penalised_loss, plain_weight=0.0)
    expected = _in_float64(jax.grad(penalty), params, *_penalty_batch())
    assert _far_off(gradient_of_penalty(outer), expected, 0.1)
    _assert_close(gradient_of_penalty(jmpscale.dynamic(1.0)), expected, 1e-2)


@pytest.mark.full
def test_a_penalty_that_hides_an_infinity_needs_the_check_of_the_inner_gradient():
    @jax.jit
    def gradient(scaler, w):
        def loss_fn(w):
            half = w.astype(jnp.float16)
            slope = jax.grad(lambda x: jmpscale.scale(scaler, (half * x).astype(jnp.float32)))(jnp.float16(1))
            slope = jmpscale.unscale(scaler, slope)
            return w + jnp.minimum(slope, 2.0), jmpscale.all_finite(slope)

        return jmpscale.value_and_grad(loss_fn, has_aux=True)(scaler, w)

    (_, inner_finite), grad = gradient(jmpscale.dynamic(2.0**14), jnp.float32(8))
    assert grad == 1.0
    assert not inner_finite, "2^14 times 8 is too much for float16"


# Hessian-vector products


def _mean_squared_error(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


def _curvature_arguments():
    names = _names(CURVATURE)
    return names["params"], names["x"], names["y"]


@functools.cache
def _product():
    return jax.jit(_names(CURVATURE)["hessian_vector_product"])


@pytest.mark.full
@pytest.mark.parametrize("scale", [2.0**4, 2.0**14])
def test_the_product_is_that_of_a_float64_run(scale):
    params, x, y = _curvature_arguments()
    vector = jax.tree.map(lambda p: jnp.sin(jnp.arange(p.size, dtype=jnp.float32)).reshape(p.shape), params)
    product, finite = _product()(jmpscale.dynamic(scale), params, vector, x, y)
    gradient = jax.grad(_mean_squared_error)
    expected = _in_float64(
        lambda params, vector, x, y: jax.jvp(lambda p: gradient(p, x, y), (params,), (vector,))[1], params, vector, x, y
    )
    assert finite
    _assert_close(product, expected, 1e-2)


@pytest.mark.full
def test_the_largest_curvature_is_the_largest_eigenvalue_also_from_a_scale_that_is_far_too_large():
    params, x, y = _curvature_arguments()
    leaves, treedef = jax.tree.flatten(params)
    sizes = np.cumsum([leaf.size for leaf in leaves])[:-1]

    def hessian(flat, x, y):
        def loss(flat):
            parts = jnp.split(flat, sizes)
            return _mean_squared_error(
                jax.tree.unflatten(treedef, [p.reshape(a.shape) for p, a in zip(parts, leaves, strict=True)]), x, y
            )

        return jax.hessian(loss)(flat)

    flat = jnp.concatenate([leaf.ravel() for leaf in leaves])
    expected = np.linalg.eigvalsh(_in_float64(hessian, flat, x, y))
    expected = expected[np.argmax(np.abs(expected))]
    names = _names(CURVATURE)
    np.testing.assert_allclose(names["curvature"], expected, rtol=1e-2)
    scaler, _, curvature = names["largest_curvature"](jmpscale.dynamic(2.0**32), params, x, y)
    np.testing.assert_allclose(curvature, expected, rtol=1e-2)
    assert 10 < scaler.skipped < 30


@pytest.mark.full
def test_a_small_vector_underflows_in_float16_at_every_scale():
    params, x, y = _curvature_arguments()
    tiny = jax.tree.map(lambda p: jnp.full_like(p, 1e-8), params)
    product, finite = _product()(jmpscale.dynamic(2.0**14), params, tiny, x, y)
    assert finite
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(product))


# A backward pass with numbers of its own


def _own_gradients(params, x, y):
    """Returns the loss and its gradients, with the clip and the added loss written out, and the largest clipped one."""
    hidden, pull_back = jax.vjp(lambda w: jnp.tanh(x @ w), params["in"])
    loss, grads = jax.value_and_grad(lambda h, out: jnp.mean((h @ out - y) ** 2), argnums=(0, 1))(hidden, params["out"])
    added = jax.grad(lambda h: 0.1 * jnp.mean(h**2))(hidden)
    return loss, {"in": pull_back(jnp.clip(grads[0], -1e-3, 1e-3) + added)[0], "out": grads[1]}, jnp.abs(grads[0]).max()


@pytest.mark.parametrize("scale", [2.0**6, 2.0**14])
def test_a_clip_and_an_added_loss_mean_the_same_at_every_scale(scale):
    names, scaler = _names(OWN), jmpscale.dynamic(scale)
    batch = names["x"], names["y"]
    _, expected, largest = _in_float64(_own_gradients, names["params"], *batch)
    assert largest > 1e-3, "the clip has something to do"
    value_and_grad = jax.jit(jmpscale.value_and_grad(names["loss_fn"]))
    _, grads = value_and_grad(scaler, names["params"], scaler.loss_scale, *batch)
    assert jmpscale.all_finite(grads)
    _assert_close(grads, expected, 1e-2)
    _, unaware = value_and_grad(scaler, names["params"], jnp.float32(1), *batch)
    assert _far_off(unaware, expected, 0.1), "without the scale it is another gradient"


def test_the_clip_keeps_an_overflow_and_a_plain_clip_would_hide_it():
    names, scaler = _names(OWN), jmpscale.dynamic(2.0**20)

    def grads(clip):
        def loss_fn(x):
            return jnp.sum(clip(x.astype(jnp.float16)).astype(jnp.float32) * jnp.array([1.0, 1e-3]))

        return jmpscale.value_and_grad(loss_fn)(scaler, jnp.ones(2))

    @jax.custom_vjp
    def plain_clip(x):
        return x

    limit = 1e-2 * scaler.loss_scale
    plain_clip.defvjp(
        lambda x: (x, None), lambda _, g: (jnp.clip(g.astype(jnp.float32), -limit, limit).astype(g.dtype),)
    )
    _, got = grads(lambda x: names["clip_gradient"](x, 1e-2, scaler.loss_scale))
    assert not jmpscale.all_finite(got)
    np.testing.assert_allclose(got, [np.inf, 1e-3], rtol=1e-3)
    _, got = grads(plain_clip)
    assert jmpscale.all_finite(got), "an infinity became the limit"


# Equilibria


def _equilibrium_loss(params, x, y):
    def cell(z, _):
        return jnp.tanh(z @ params["z"] + x @ params["x"]), None

    z, _ = jax.lax.scan(cell, jnp.zeros_like(y), length=80)
    return jnp.mean((z - y) ** 2)


@pytest.mark.full
@pytest.mark.parametrize("scale", [2.0**-5, 1.0, 2.0**16])
@pytest.mark.parametrize("title", [ITERATION, ROOT])
def test_the_gradient_at_an_equilibrium_is_that_of_an_unrolled_float64_run(title, scale):
    names = _names(title)
    arguments = names["params"], names["x"], names["y"]
    expected_loss, expected = _expected_at_equilibrium(title)
    loss, grads = _value_and_grad(title)(jmpscale.static(scale), *arguments)
    assert jmpscale.all_finite(grads)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-2)
    _assert_close(grads, expected, 1e-2)


@functools.cache
def _expected_at_equilibrium(title):
    names = _names(title)
    return _in_float64(jax.value_and_grad(_equilibrium_loss), names["params"], names["x"], names["y"])


@functools.cache
def _value_and_grad(title):
    return jax.jit(jmpscale.value_and_grad(_names(title)["loss_fn"]))


@pytest.mark.full
@pytest.mark.parametrize("title", [ITERATION, ROOT])
def test_an_overflow_at_an_equilibrium_is_detected(title):
    names = _names(title)
    _, grads = _value_and_grad(title)(jmpscale.static(2.0**40), names["params"], names["x"], names["y"])
    assert not jmpscale.all_finite(grads)


@functools.cache
def _iterations():
    """Makes a function that returns how often the page's backward pass iterates, and what it finds."""
    names, counts = _names(ITERATION), []
    params, x, y = names["params"], names["x"], names["y"]
    z = names["equilibrium"](params, x)

    @jax.jit
    def run(scale, relative, absolute):
        grad = scale * 2 * (z - y) / z.size
        _, pull_back = jax.vjp(names["cell"], params, z, x)

        def fn(u):
            jax.debug.callback(lambda: counts.append(1))
            return grad + pull_back(u)[1]

        return names["iterate"](fn, grad, relative * jnp.max(jnp.abs(grad)) + absolute)

    def count(scale, relative=0.0, absolute=0.0):
        counts.clear()
        solution = np.asarray(run(jnp.float32(scale), jnp.float32(relative), jnp.float32(absolute)))
        jax.effects_barrier()
        return len(counts), solution

    return count


@pytest.mark.full
def test_a_relative_tolerance_takes_as_many_iterations_at_every_scale_and_an_absolute_one_does_not():
    (few, small), (many, large) = (_iterations()(scale, relative=1e-3) for scale in (2.0**-8, 2.0**12))
    assert 5 < few < 50
    assert abs(few - many) <= 1
    _assert_close(small * 2.0**20, large, 1e-2)
    (few, small), (many, large) = (_iterations()(scale, absolute=1e-3) for scale in (2.0**-8, 2.0**12))
    assert (few, many) == (1, 100)
    assert _far_off(small * 2.0**20, large, 0.05)


@pytest.mark.full
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_an_iteration_on_a_gradient_that_is_not_finite_ends_at_once(bad):
    count, solution = _iterations()(bad, relative=1e-3)
    assert count == 0
    assert not np.isfinite(solution).all()
