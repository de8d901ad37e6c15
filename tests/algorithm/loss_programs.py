"""Programs on which `value_and_grad` and `scaled_backward` are compared with `jax.value_and_grad`.

They compute in float32 and their loss scale is a power of two, so that all results are equal bit for bit.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

W, X = jnp.array([1.0, 3.0]), jnp.array([2.0, 5.0])


# Messages of the package that are more specific than JAX's.
MORE_SPECIFIC = "fun must return a|argument .* must have only|argnums must be"


class Program(NamedTuple):
    """A loss function, the arguments of one call, and the options of `jax.value_and_grad`."""

    fun: Any
    args: tuple = (W,)
    kwargs: dict = {}  # noqa: RUF012  (never changed)
    options: dict = {}  # noqa: RUF012


def assert_like_jax(program, transform):
    """Runs a program with `transform` and with `jax.value_and_grad`; their results or exceptions must be equal."""
    found, expected = _outcome(program, transform), _outcome(program, jax.value_and_grad)
    if re.match(MORE_SPECIFIC, str(found[1])):
        assert found[0] is expected[0]
    else:
        assert found == expected


def _outcome(program, transform):
    """Returns the bits of the result of a program, or the type and the message of its exception."""
    fun, args, kwargs, options = program
    try:
        out = transform(fun, **options)(*args, **kwargs)
    except Exception as error:
        return type(error), re.sub(r" at 0x\w+", "", str(error))
    return str(jax.tree.structure(out)), [_comparable(leaf) for leaf in jax.tree.leaves(out)]


def _comparable(leaf):
    if not isinstance(leaf, jax.Array):
        return type(leaf), repr(leaf)
    data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return str(jax.typeof(leaf)), jax.typeof(leaf).weak_type, np.asarray(data).tobytes()


# Results of functions with auxiliary data.


class Pair(NamedTuple):
    loss: Any
    aux: Any


@jax.tree_util.register_pytree_node_class
class RegisteredTuple(tuple):
    __slots__ = ()

    def tree_flatten(self):
        return tuple(self), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children)


PAIRS = {
    "tuple": lambda loss, aux: (loss, aux),
    "list": lambda loss, aux: [loss, aux],
    "named tuple": Pair,
    "registered subclass of tuple": lambda loss, aux: RegisteredTuple((loss, aux)),
}
NOT_PAIRS = {
    "dict": lambda loss, aux: {"loss": loss, "aux": aux},
    "loss alone": lambda loss, aux: loss,
    "three values": lambda loss, aux: (loss, aux, aux),
    "array of two": lambda loss, aux: jnp.stack([loss, loss]),
}
AUX = {
    "dict of arrays": lambda w: {"prediction": w, "n": jnp.arange(3), "half": w.astype(jnp.float16)},
    "NumPy scalar": lambda w: np.float32(3.0),
    "Python number": lambda w: 3,
    "None": lambda w: None,
    "PRNG key": lambda w: jax.random.key(0),
    "string": lambda w: "text",
    "function": lambda w: jnp.tanh,
}
LOSSES = {
    "float16": lambda w: jnp.sum(w).astype(jnp.float16),
    "bfloat16": lambda w: jnp.sum(w).astype(jnp.bfloat16),
    "Python constant": lambda w: 3.0,
    "JAX constant": lambda w: jnp.float32(3.0),
    "vector": lambda w: w,
    "integer": lambda w: jnp.sum(w).astype(int),
    "boolean": lambda w: jnp.sum(w) > 0,
    "complex": lambda w: jnp.sum(w) + 1j,
    "string": lambda w: "3.0",
    "None": lambda w: None,
    "pair": lambda w: (jnp.sum(w), w),
    "function": lambda w: jnp.tanh,
}

# Functions of w and x.


class Model:
    def __init__(self, factor):
        self.factor = factor

    def loss(self, w, x):
        return jnp.sum(w * x) * self.factor

    def __call__(self, w, x):
        return self.loss(w, x)


@jax.custom_vjp
def _with_custom_vjp(w, x):
    return jnp.sum(w * x)


_with_custom_vjp.defvjp(lambda w, x: (jnp.sum(w * x), (w, x)), lambda saved, g: (g * saved[1] * 2, g * saved[0]))

FUNCTIONS = {
    "bound method": Model(3.0).loss,
    "callable object": Model(3.0),
    "partial": functools.partial(lambda n, w, x, *, m: jnp.sum(w * x) * n * m, 3, m=2),
    "pytree partial": jax.tree_util.Partial(lambda n, w, x: jnp.sum(w * x) * n, 3.0),
    "jit": jax.jit(lambda w, x: jnp.sum(w * x)),
    "custom_vjp": _with_custom_vjp,
    "checkpoint": jax.checkpoint(lambda w, x: jnp.sum(jnp.sin(w) * x)),
    "default arguments": lambda w, x=X, n=2: jnp.sum(w * x) * n,
    "*args": lambda *args: jnp.sum(args[0] * args[1]),
    "one parameter": lambda w: jnp.sum(w),
    "three parameters": lambda w, x, n: jnp.sum(w * x) * n,
}


def product(w, x, *, n=1):
    return jnp.sum(w * x) * n


def _with_names_of_the_package(w, state, holder, fun, scale, axis_name, transform):
    return jnp.sum(w * state * holder) + fun * scale


NAMES = {"state": X, "holder": X, "fun": 1.0, "scale": 2.0, "axis_name": "data", "transform": jnp.tanh}
PROGRAMS = {
    **{
        f"returns {name}": Program(lambda w, pair=pair: pair(jnp.sum(w**2), {"w": w * 2}), options={"has_aux": True})
        for name, pair in (PAIRS | NOT_PAIRS).items()
    },
    **{
        f"aux: {name}": Program(lambda w, aux=aux: (jnp.sum(w**2), aux(w)), options={"has_aux": True})
        for name, aux in AUX.items()
    },
    **{f"loss: {name}": Program(loss) for name, loss in LOSSES.items()},
    **{f"fun: {name}": Program(fun, (W, X)) for name, fun in FUNCTIONS.items()},
    "keyword arguments": Program(product, (W,), {"x": X, "n": 3}),
    "parameters with names of the package": Program(_with_names_of_the_package, (W,), NAMES),
    "differentiated argument by keyword": Program(product, (), {"w": W, "x": X}),
    "integer argument": Program(product, (jnp.int32(1), X)),
    "string argument": Program(lambda w: jnp.float32(1.0), ("text",)),
    "has_aux is a number": Program(lambda w: (jnp.sum(w), w), options={"has_aux": 1}),
}
NOT_LOSSES = {"vector", "integer", "boolean", "complex", "string", "None", "pair", "function"}
WRONG = {f"returns {name}" for name in NOT_PAIRS} | {f"loss: {name}" for name in NOT_LOSSES}  # JAX raises

# Random programs, whose arguments are trees of any form.


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    left: Any
    right: Any


FLOATS = st.sampled_from([1.5, np.float32(2.0), W, X[0], np.ones((2,), np.float32), None])
ANY = FLOATS | st.sampled_from([3, True, jnp.arange(2), 2j, "text", jnp.tanh])


def _trees(leaves):
    def containers(inner):
        dicts = st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
        return st.lists(inner, max_size=2) | dicts | st.builds(Pair, inner, inner) | st.builds(Node, inner, inner)

    return st.recursive(leaves, containers, max_leaves=4)


@st.composite
def _random_programs(draw):
    args = draw(st.lists(_trees(draw(st.sampled_from([FLOATS, FLOATS, ANY]))), min_size=1, max_size=3))
    position = st.integers(-len(args), len(args) - 1)
    kwargs = draw(st.dictionaries(st.sampled_from("pq"), _trees(ANY), max_size=2))
    argnums = draw(position | st.lists(position, min_size=1, max_size=2).map(tuple))
    pair, aux = draw(st.none() | st.sampled_from(list(PAIRS.values()))), draw(st.sampled_from(list(AUX.values())))

    def fun(*args, **kwargs):
        numbers = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, (jax.Array, np.ndarray, float))]
        loss = sum((jnp.sum(jnp.asarray(x, jnp.float32) ** 2) for x in numbers), jnp.float32(1.0))
        return pair(loss, aux(W)) if pair else loss

    return Program(fun, args, kwargs, {"argnums": argnums, "has_aux": pair is not None})


def assert_like_jax_on_random_programs(transform):
    """Compares `transform` with `jax.value_and_grad` on 100 random programs."""
    settings = hypothesis.settings(max_examples=100)
    settings(hypothesis.given(_random_programs())(lambda program: assert_like_jax(program, transform)))()
