"""What the page on dtypes says about the limits of float16, the settings of frameworks, and matmuls."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jmpscale

import pages

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:jax.interpreters.batching:DeprecationWarning"),  # Equinox, on JAX 0.7
]

HALF = jnp.float16


def test_the_limits_of_float16_are_those_on_the_page():
    assert HALF(1) + HALF(1e-4) == 1
    assert jnp.isinf(jnp.float32(2.0**16).astype(HALF))
    logs = jnp.log(jax.nn.softmax(jnp.array([20, 0], HALF)))
    assert logs[0] == 0
    assert jnp.isneginf(logs[1])
    assert jnp.isinf(jnp.linalg.norm(jnp.full(10, 100, HALF)))
    assert jnp.isinf(jnp.sum(jnp.ones(70_000, HALF)))
    assert HALF(2048) == 2048
    assert HALF(2049) == 2048
    assert HALF(0.999) * HALF(1) + HALF(0.001) * HALF(1.1) == 1


def _linen(x):
    layer = nn.LayerNorm(dtype=HALF)
    return layer.apply(layer.init(jax.random.key(0), x), x)


def _nnx(x):
    return nnx.LayerNorm(4, dtype=HALF, rngs=nnx.Rngs(0))(x)


def _equinox(x):
    eqx = pytest.importorskip("equinox")  # here: what it imports on JAX 0.7 warns
    return jax.vmap(jmpscale.cast(eqx.nn.LayerNorm(4), HALF))(x)


def _haiku(x):
    layer = hk.transform(lambda x: hk.LayerNorm(-1, True, True)(x))
    return layer.apply(jmpscale.cast(layer.init(jax.random.key(0), x), HALF), None, x)


@pytest.mark.parametrize("layer_norm", [_linen, _nnx, _equinox, _haiku])
def test_all_but_haiku_compute_the_statistics_of_layer_norm_in_float32(layer_norm):
    signs = jnp.array([[1, -1, 1, -1]], HALF)
    normalised = layer_norm(300 * signs)
    assert normalised.dtype == HALF
    assert (normalised == (0 * signs if layer_norm is _haiku else signs)).all()


def test_set_attributes_makes_all_layers_of_an_nnx_model_compute_in_float16():
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.LayerNorm(4, rngs=nnx.Rngs(0)))
    assert model(jnp.ones((2, 3))).dtype == jnp.float32
    model.set_attributes(dtype=HALF)
    assert model(jnp.ones((2, 3))).dtype == HALF
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_jax_computes_the_softmax_of_attention_in_float32():
    query = jnp.full((1, 1, 1, 16), 10, HALF)
    key = jnp.stack([query[0, 0], -query[0, 0]])[None] * HALF(0.2)  # scores of 80 and -80
    program = str(jax.make_jaxpr(jax.nn.dot_product_attention)(query, key, key))
    assert "f32" in program.split(" exp ")[0].split("\n")[-1]


def test_counting_matmuls_finds_a_float32_batch():
    page = pages.run("dtypes", "Did it stay in 16 bits?")
    x, w = jnp.ones((8, 3)), jnp.ones((3, 1), HALF)
    assert list(page["matmuls"](jnp.matmul, x, w)) == ["tensor<8x3xf32>, tensor<3x1xf32>"]
    assert list(page["matmuls"](jnp.matmul, x.astype(HALF), w)) == ["tensor<8x3xf16>, tensor<3x1xf16>"]


def test_on_a_cpu_a_float16_matmul_is_executed_in_float32():
    x = jnp.ones((128, 128), HALF)
    text = jax.jit(jnp.matmul).lower(x, x).compile().as_text()
    assert "f32[128,128]{1,0} dot(" in text
    assert "f16[128,128]{1,0} dot(" not in text


@pytest.mark.full
@pytest.mark.parametrize("compute", [jnp.float32, jnp.bfloat16])
def test_the_switch_trains_in_every_dtype(compute):
    program = pages.examples("dtypes")["One switch"]
    assert program.count("COMPUTE = jnp.float16") == 1
    names = {}
    exec(program.replace("COMPUTE = jnp.float16", f"COMPUTE = jnp.{jnp.dtype(compute).name}"), names)
    assert names["loss"] < 0.2
    assert jmpscale.get_scaler(names["opt_state"]).loss_scale == 1
