"""A diagnosis names the lines of a model in an installed package, and says what its user can do."""

import importlib
import re
import textwrap

import jax
import jax.numpy as jnp
import pytest
from flax import linen

import jmpscale

from arrays import normal
from diagnosis_programs import H

PARAMS = {"a": normal(1, 8, 8), "b": normal(2, 8, 8)}
X = normal(3, 16, 8)
SOURCE = """
import jax.numpy as jnp

def layer(x, w, dtype):
    h = x.astype(dtype) @ w.astype(dtype)
    squares = h * h
    return h.astype(jnp.float32) / jnp.sqrt(1 + jnp.mean(squares.astype(jnp.float32), -1, keepdims=True))

def network(params, x, dtype):
    x = layer(x, params["a"], dtype)
    return layer(x * 100, params["b"], dtype)

def attention(params, x):
    queries = 300 * x @ params["a"]
    weights = jnp.tanh(queries @ queries.T * 1e-5)
    return weights @ (x @ params["b"])
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages" / "package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "model.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(folder.parent)
    for name in ("package", "package.model"):
        monkeypatch.delitem(importlib.sys.modules, name, raising=False)
    return importlib.import_module("package.model")


def place(text):
    """Returns the name of the first line of the package with a text."""
    lines = SOURCE.splitlines()
    number = next(i for i, line in enumerate(lines, 1) if text in line)
    function = next(line for line in reversed(lines[:number]) if line.startswith("def "))
    return f"package/model.py:{number} ({re.match('def ([a-z]+)', function)[1]})"


@pytest.mark.full
def test_diagnose_names_the_lines_of_a_model_in_a_package(package):
    def loss_fn(params, x, dtype=H):
        return jnp.mean((package.network(params, x, dtype) - x) ** 2)

    scaler = jmpscale.dynamic(2.0**10)
    diagnosis = jmpscale.diagnose(loss_fn)(scaler, PARAMS, X)
    called = place("x * 100").partition(" ")[0]
    assert diagnosis.lines[-1] == f"{place('h * h').removesuffix(')')}, called at {called})"
    assert {row.line.partition(":")[0] for row in diagnosis.rows} == {"package/model.py"}
    remedy = " In an installed package: pass the package float32 as its dtype, or copy the function."
    assert remedy in diagnosis.summary
    assert 'precision="highest"' not in diagnosis.summary
    followed = jmpscale.diagnose(lambda params, x: loss_fn(params, x, jnp.float32))(scaler, PARAMS, X)
    assert followed.gradient_error < 1e-4


@pytest.mark.full
def test_diagnose_keeps_the_matmuls_of_a_package_in_float32(package):
    def loss_fn(params, x):
        return jnp.mean((package.attention(params, x) - x) ** 2)

    scaler = jmpscale.dynamic(2.0**4)
    diagnosis = jmpscale.diagnose(jmpscale.autocast(loss_fn))(scaler, PARAMS, X)
    assert diagnosis.lines == (place("queries.T"),)
    line = f"test_diagnose_packages.py:{loss_fn.__code__.co_firstlineno + 1} ({loss_fn.__qualname__.split('.')[-1]})"
    assert (
        " In an installed package: if autocast converts the matmuls, put "
        f'jax.default_matmul_precision("highest") around {line}, which keeps all matmuls of the '
        "call in float32; otherwise pass the package float32 as its dtype, or copy the function."
    ) in diagnosis.summary

    def followed(params, x):
        with jax.default_matmul_precision("highest"):
            return loss_fn(params, x)

    assert jmpscale.diagnose(jmpscale.autocast(followed))(scaler, PARAMS, X).gradient_error < 1e-4


class Attention(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.MultiHeadDotProductAttention(num_heads=1)(x, x)


class Layers(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(3):
            x = linen.Dense(8)(x)
        return x


@pytest.mark.full
@pytest.mark.parametrize(("module", "file"), [(Attention(), "flax/linen/"), (Layers(), "test_diagnose_packages.py")])
def test_diagnose_names_the_lines_of_a_layer_of_flax_only_if_they_are_several(module, file):
    def loss_fn(params, x):
        return jnp.mean(module.apply(params, x) ** 2)

    x = X[None]
    diagnosis = jmpscale.diagnose(jmpscale.autocast(loss_fn))(jmpscale.dynamic(), module.init(jax.random.key(0), x), x)
    assert all(row.line.startswith(file) for row in diagnosis.rows)
