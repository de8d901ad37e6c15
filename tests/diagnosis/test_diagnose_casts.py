"""A diagnosis names the arguments that a line casts if some of them are wrong, such as one leaf of a tree."""

import re

import jax
import jax.numpy as jnp
import pytest

import jmpscale

from arrays import normal
from diagnosis_programs import H, fault_line
from messages import OVERFLOW
from tables import names

pytestmark = pytest.mark.full

X = normal(0, 16, 8)
LAYERS = [normal(i, 8, 8, scale=0.5) for i in range(1, 6)]
LARGE = normal(1, 8, 8, scale=1e6)


def cast_tree(layers, x):
    half, x = jmpscale.cast((layers, x), H)  # fault
    return jnp.mean(sum(x @ w for w in half).astype(jnp.float32))


def cast_leaves(layers, x):
    half = jax.tree.map(lambda w: w.astype(H), layers)  # fault
    return jnp.mean(sum(x.astype(H) @ w for w in half).astype(jnp.float32))


@pytest.mark.parametrize("fun", [cast_tree, cast_leaves])
def test_diagnose_names_the_argument_that_a_cast_of_a_tree_makes_infinite(fun):
    layers = [*LAYERS[:2], LARGE, *LAYERS[2:]]
    diagnosis = jmpscale.diagnose(fun)(jmpscale.dynamic(), layers, X)
    begin = f"{OVERFLOW}convert_element_type at test_diagnose_casts.py:{fault_line(fun)} "
    assert diagnosis.summary.startswith(begin)
    assert ", in the cast of layers[2], reaches " in diagnosis.summary
    assert {row.casts for row in diagnosis.rows} == {("layers[2]",), ()}
    assert "casts" in diagnosis.describe().split()


def test_diagnose_names_no_argument_if_what_is_cast_is_computed():
    summary = jmpscale.diagnose(lambda layers, x: cast_tree([2 * w for w in layers], x))(
        jmpscale.dynamic(), [LARGE, *LAYERS], X
    ).summary
    assert re.match(rf"{OVERFLOW}convert_element_type at [^,]* reaches ", summary)


WRONG = {  # which of the layers are large, and the words about them
    "two layers": ([0, 3], ", in the cast of layers[0] and layers[3], reaches "),
    "most layers": ([0, 1, 2, 3], " reaches "),
    "all layers": ([0, 1, 2, 3, 4], " reaches "),
}


@pytest.mark.parametrize("name", names(WRONG))
def test_diagnose_names_a_few_arguments_that_are_wrong_alone(name):
    large, words = WRONG[name]
    layers = [2e6 * w if i in large else w for i, w in enumerate(LAYERS)]
    diagnosis = jmpscale.diagnose(cast_tree)(jmpscale.dynamic(), layers, X)
    place = f"convert_element_type at test_diagnose_casts.py:{fault_line(cast_tree)} (cast_tree)"
    assert diagnosis.summary.startswith(f"{OVERFLOW}{place}{words}")
