"""value_and_grad and loss_scaled accept, return and refuse what jax.value_and_grad does.

Each program runs with and without them, and must return equal results of equal types, or raise errors of the same type.
The scale is a power of two and everything is float32, so the results are equal bit for bit.
"""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import equinox  # noqa: F401  (value_and_grad looks for its models if it is imported)
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpscale

W, X = jnp.array([1.0, 3.0]), jnp.array([2.0, 5.0])
SCALER = jmpscale.static(2.0**8)


def _ours(fun, *options, **more):
    return functools.partial(jmpscale.value_and_grad(fun, *options, **more), SCALER)


def _with_loss_scaled(fun, argnums=0, has_aux=False):
    return jax.value_and_grad(jmpscale.loss_scaled(fun, SCALER, has_aux=has_aux), argnums, has_aux)


def _outcome(call):
    """Returns the result of a call in comparable form, down to the bits, or the type of its exception."""
    try:
        out = call()
    except Exception as error:
        return type(error)
    return str(jax.tree.structure(out)), [_comparable(leaf) for leaf in jax.tree.leaves(out)]


def _comparable(leaf):
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return "key", np.asarray(jax.random.key_data(leaf)).tobytes()
        return "array", leaf.shape, leaf.dtype, np.asarray(leaf).tobytes()
    return type(leaf), repr(leaf)


def _assert_alike(fun, args=(), kwargs=None, **options):
    kwargs = kwargs or {}
    expected = _outcome(lambda: jax.value_and_grad(fun, **options)(*args, **kwargs))
    assert _outcome(lambda: _ours(fun, **options)(*args, **kwargs)) == expected
    assert _outcome(lambda: _with_loss_scaled(fun, **options)(*args, **kwargs)) == expected
    return expected


# --- what a function returns ---


class Pair(NamedTuple):
    loss: Any
    aux: Any


class TupleOfMine(tuple):
    __slots__ = ()


class ListOfMine(list):
    pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
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
    "NamedTuple": Pair,
    "namedtuple": lambda loss, aux: collections.namedtuple("Other", "a b")(loss, aux),
    "subclass of tuple": lambda loss, aux: TupleOfMine((loss, aux)),
    "subclass of list": lambda loss, aux: ListOfMine((loss, aux)),
    "registered subclass of tuple": lambda loss, aux: RegisteredTuple((loss, aux)),
    "registered dataclass": Registered,
    "dict": lambda loss, aux: {"loss": loss, "aux": aux},
    "the loss alone": lambda loss, aux: loss,
    "a list of one": lambda loss, aux: [loss],
    "three": lambda loss, aux: (loss, aux, aux),
    "the wrong way round": lambda loss, aux: ({"aux": aux}, loss),
    "an array of two": lambda loss, aux: jnp.stack([loss, loss]),
    "nothing": lambda loss, aux: None,
    "a generator": lambda loss, aux: (x for x in (loss, aux)),
}
AUX = {
    "an array": lambda w: w * 2,
    "a dict": lambda w: {"pred": w, "n": jnp.arange(3), "half": w.astype(jnp.float16)},
    "a pair": lambda w: (w, (w, [])),
    "a list": lambda w: [w, w],
    "a constant": lambda w: np.float32(3.0),
    "a number": lambda w: 3,
    "a complex number": lambda w: w + 1j,
    "None": lambda w: None,
    "a key": lambda w: jax.random.key(0),
    "text": lambda w: "text",
    "a function": lambda w: jnp.tanh,
    "a dtype": lambda w: np.dtype("f2"),
    "infinity": lambda w: w / 0,
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("has_aux", [True, False])
def test_whatever_holds_a_loss_and_more(pair, has_aux):
    def fun(w):
        return PAIRS[pair](jnp.sum(w**2), {"pred": w * 2})

    result = _assert_alike(fun, (jnp.array([1.0, 3.0]),), has_aux=has_aux)
    accepted = has_aux and pair in list(PAIRS)[:7]
    assert isinstance(result, tuple) == (accepted or (pair == "the loss alone" and not has_aux))


@pytest.mark.parametrize("aux", AUX)
def test_auxiliary_data_of_any_type(aux):
    def fun(w):
        return jnp.sum(w**2), AUX[aux](w)

    _assert_alike(fun, (W,), has_aux=True)
    programs = [jax.jit(make(fun, has_aux=True)) for make in (jax.value_and_grad, _ours, _with_loss_scaled)]
    plain, *own = (_outcome(functools.partial(program, W)) for program in programs)
    assert own == [plain, plain]


LOSSES = {
    "float32": lambda w: jnp.sum(w),
    "float16": lambda w: jnp.sum(w).astype(jnp.float16),
    "bfloat16": lambda w: jnp.sum(w).astype(jnp.bfloat16),
    "a constant": lambda w: 3.0,
    "a constant of NumPy": lambda w: np.float32(3.0),
    "a constant of JAX": lambda w: jnp.float32(3.0),
    "an array of one": lambda w: jnp.sum(w)[None],
    "one for each": lambda w: w,
    "an integer": lambda w: 3,
    "an integer array": lambda w: jnp.sum(w).astype(int),
    "a boolean": lambda w: jnp.sum(w) > 0,
    "complex": lambda w: jnp.sum(w) + 1j,
    "text": lambda w: "3.0",
    "None": lambda w: None,
    "a dict": lambda w: {"loss": jnp.sum(w)},
    "a function": lambda w: jnp.tanh,
    "a dtype": lambda w: jnp.float32,
    "a key": lambda w: jax.random.key(0),
    "infinite": lambda w: jnp.sum(w) / 0,
}


@pytest.mark.filterwarnings("ignore:the loss is float16:UserWarning")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("has_aux", [False, True])
def test_a_loss_of_any_type(loss, has_aux):
    def fun(w):
        return (LOSSES[loss](w), {"pred": w}) if has_aux else LOSSES[loss](w)

    _assert_alike(fun, (jnp.array([1.0, 3.0]),), has_aux=has_aux)


# --- what a function is, and how it names its arguments ---


class Model:
    def __init__(self, factor):
        self.factor = factor

    def loss(self, w, x):
        return jnp.sum(w * x) * self.factor

    def __call__(self, w, x):
        return self.loss(w, x)

    @classmethod
    def of_class(cls, w, x):
        return jnp.sum(w * x)

    @staticmethod
    def of_none(w, x):
        return jnp.sum(w * x)


@jax.custom_vjp
def _custom(w, x):
    return jnp.sum(w * x)


_custom.defvjp(lambda w, x: (jnp.sum(w * x), (w, x)), lambda kept, g: (g * kept[1] * 2, g * kept[0]))

FUNCTIONS = {
    "a lambda": lambda w, x: jnp.sum(w * x),
    "a bound method": Model(3.0).loss,
    "a class method": Model.of_class,
    "a static method": Model.of_none,
    "an object that can be called": Model(3.0),
    "partial, by place": functools.partial(lambda n, w, x: jnp.sum(w * x) * n, 3),
    "partial, by name": functools.partial(lambda w, x, *, n: jnp.sum(w * x) * n, n=3),
    "partial of jax": jax.tree_util.Partial(lambda n, w, x: jnp.sum(w * x) * n, 3.0),
    "jitted": jax.jit(lambda w, x: jnp.sum(w * x)),
    "jitted, with a static argument": functools.partial(
        jax.jit(lambda w, x, n: jnp.sum(w * x) * n, static_argnums=2), n=3
    ),
    "a gradient of its own": jax.custom_vjp(lambda w, x: jnp.sum(w * x)),
    "a gradient of its own, defined": _custom,
    "checkpointed": jax.checkpoint(lambda w, x: jnp.sum(jnp.sin(w) * x)),
    "mapped": lambda w, x: jnp.sum(jax.vmap(lambda a, b: a * b)(w, x)),
    "defaults": lambda w, x=X, n=2: jnp.sum(w * x) * n,
    "of any number": lambda *args: jnp.sum(args[0] * args[1]),
    "by any name": lambda w, x, **more: jnp.sum(w * x) * len(more),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_whatever_can_be_called(name):
    _assert_alike(FUNCTIONS[name], (W, X))


CALLS = {
    "by name": (lambda w, x: jnp.sum(w * x), (W,), {"x": X}, {}),
    "by name only": (lambda w, *, x, n=1: jnp.sum(w * x) * n, (W,), {"x": X, "n": 3}, {}),
    "under our own names": (
        lambda w, state, holder, fun, scaler, axis_name, transform: jnp.sum(w * state * holder) + fun * scaler,
        (W,),
        {"state": X, "holder": X, "fun": 1.0, "scaler": 2.0, "axis_name": "text", "transform": jnp.tanh},
        {},
    ),
    "the differentiated one by name": (lambda w: jnp.sum(w), (), {"w": W}, {}),
    "no argument": (lambda: 1.0, (), {}, {}),
    "one too many": (lambda w: jnp.sum(w), (W, X), {}, {}),
    "one too few": (lambda w, x: jnp.sum(w), (W,), {}, {}),
    "a name too many": (lambda w: jnp.sum(w), (W,), {"x": X}, {}),
    "the second": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": 1}),
    "the last": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": -1}),
    "the last but one": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": -2}),
    "both": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": (0, 1)}),
    "both, the other way round": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": (1, 0)}),
    "both, in a list": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": [0, 1]}),
    "both, in a range": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": range(2)}),
    "from both ends": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": (0, -1)}),
    "one twice": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": (0, 0)}),
    "one, in a tuple": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": (0,)}),
    "none": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": ()}),
    "a number of NumPy": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": np.int64(1)}),
    "numbers of NumPy": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": np.arange(2)}),
    "out of range": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": 2}),
    "out of range from the end": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": -3}),
    "out of range in a tuple": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": (0, 5)}),
    "a fraction": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": 1.0}),
    "a name": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": "x"}),
    "fractions": (lambda w, x: jnp.sum(w * x), (W, X), {}, {"argnums": (0.0, 1)}),
    "not a function": (W, (W, X), {}, {}),
    "has_aux as a number": (lambda w: (jnp.sum(w), w), (W,), {}, {"has_aux": 1}),
}


@pytest.mark.parametrize("name", CALLS)
def test_whatever_way_a_function_is_called(name):
    fun, args, kwargs, options = CALLS[name]
    _assert_alike(fun, args, kwargs, **options)


@pytest.mark.parametrize("option", ["holomorphic", "allow_int", "reduce_axes"])
def test_options_that_have_no_meaning_for_a_loss_are_refused_by_name(option):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        jmpscale.value_and_grad(lambda w: jnp.sum(w), **{option: True})


def test_options_by_place():
    fun = lambda w, x: (jnp.sum(w * x), w)  # noqa: E731
    assert _outcome(lambda: _ours(fun, 1, True)(W, X)) == _outcome(lambda: jax.value_and_grad(fun, 1, True)(W, X))


def test_value_and_grad_refuses_a_bad_function_when_it_is_given_and_not_when_it_is_called():
    for bad in (3.0, W, SCALER):
        with pytest.raises(TypeError, match="fun must be the loss function, got"):
            jmpscale.value_and_grad(bad)


# --- arguments of any form, drawn ---

LEAVES = st.sampled_from(
    [1.5, np.float32(2.0), W, X[0], np.ones((2,), np.float32), 3, True, None, jnp.arange(2), 2j, "text", jnp.tanh]
)
GOOD = st.sampled_from([1.5, np.float32(2.0), W, X[0], np.ones((2,), np.float32), None])


def _trees(leaves):
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.tuples(inner, inner)
            | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
            | st.builds(Pair, inner, inner)
            | st.builds(Registered, inner, inner)
        ),
        max_leaves=4,
    )


@st.composite
def _programs(draw):
    args = draw(st.lists(_trees(draw(st.sampled_from([GOOD, GOOD, LEAVES]))), min_size=1, max_size=3))
    place = st.integers(-len(args), len(args) - 1)
    options = {"argnums": draw(place | st.lists(place, min_size=1, max_size=2).map(tuple))}
    kwargs = draw(st.dictionaries(st.sampled_from(["p", "q"]), _trees(LEAVES), max_size=2))
    if pair := draw(st.none() | st.sampled_from(list(PAIRS)[:7])):
        options["has_aux"] = True
    aux = draw(st.sampled_from(list(AUX)))

    def fun(*args, **kwargs):
        numbers = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, (jax.Array, np.ndarray, float))]
        real = [jnp.sum(jnp.asarray(x, jnp.float32) ** 2) for x in numbers if not jnp.iscomplexobj(x)]
        loss = sum(real, jnp.float32(1.0))
        return PAIRS[pair](loss, AUX[aux](W)) if pair else loss

    return fun, args, kwargs, options


@hypothesis.given(program=_programs())
def test_any_program_at_all(program):
    fun, args, kwargs, options = program
    _assert_alike(fun, args, kwargs, **options)
