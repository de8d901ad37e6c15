"""What the package knows of the insides of JAX, XLA, optax and Flax: a change there fails here.

Otherwise an operation, a callback, an average or a scale of an fp8 layer would silently be treated like any other, a
check would have no fault to plant, or a diagnosis nothing to observe.
"""

import functools
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import fp8_ops
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmpscale
from jmpscale._base.frameworks import averages_of_gradients
from jmpscale._diagnosis.run.blocks import Block, BlockProgram
from jmpscale._diagnosis.trace.operations import _MOVES
from jmpscale._diagnosis.trace.repeatable import _CALLBACKS, _NEW_REFS
from jmpscale._diagnosis.trace.trace_observed import trace_observed
from jmpscale._programs.compile import compiled
from jmpscale._programs.jaxpr import equations
from jmpscale.testing._faults import Faults

import meshes

X, ROWS = jnp.arange(12.0).reshape(3, 4), jnp.array([2, 0])

REPLICATED = jax.NamedSharding(meshes.make_mesh(d=1), P())


def _primitives(fun, *args):
    """Returns the names of the primitives in a program, without those that hold other jaxprs."""
    closed = jax.make_jaxpr(fun)(*args)
    return {eqn.primitive.name for eqn, _ in equations(closed.jaxpr) if not any(map(_is_jaxpr, eqn.params.values()))}


def _is_jaxpr(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _under_shard_map(fun):
    mesh = meshes.make_mesh(d=8)
    return lambda: _primitives(jax.shard_map(fun, mesh=mesh, in_specs=P("d"), out_specs=P("d")), jnp.ones((64, 8)))


def _on_explicit_mesh(fun):
    def names():
        with jax.set_mesh(meshes.make_mesh(AxisType.Explicit, d=8)):
            return _primitives(fun, jnp.ones((8, 8)))

    return names


# Programs that only move values. Whatever else they compute is about integers, or adds up nothing.
MOVES = {
    "broadcast": lambda: _primitives(lambda x: jnp.broadcast_to(x, (2, 3, 4)), X),
    "concatenate": lambda: _primitives(lambda x: jnp.concatenate([x, x]), X),
    "copy": lambda: _primitives(jnp.copy, X),
    "device_put": lambda: _primitives(lambda x: jax.device_put(x, jax.devices()[0]), X),
    "dynamic_slice": lambda: _primitives(lambda x: jax.lax.dynamic_slice(x, (1, 1), (2, 2)), X),
    "dynamic_update_slice": lambda: _primitives(lambda x: jax.lax.dynamic_update_slice(x, x[:1, :1], (1, 1)), X),
    "gather": lambda: _primitives(lambda x: jnp.take(x, ROWS, axis=0, mode="clip", unique_indices=True), X),
    "name": lambda: _primitives(lambda x: checkpoint_name(x, "x"), X),
    "optimization_barrier": lambda: _primitives(jax.lax.optimization_barrier, X),
    "pad": lambda: _primitives(lambda x: jnp.pad(x, 1), X),
    "reshape": lambda: _primitives(lambda x: x.reshape(4, 3), X),
    "rev": lambda: _primitives(lambda x: x[::-1], X),
    "scatter": lambda: _primitives(lambda x: x.at[ROWS].set(0.0), X),
    "select": lambda: _primitives(lambda x: jax.lax.select(x == x, x, x), X),
    "slice": lambda: _primitives(lambda x: x[:2], X),
    "sort": lambda: _primitives(jnp.sort, X),
    "split": lambda: _primitives(lambda x: jnp.split(x, 3), X),
    "squeeze": lambda: _primitives(lambda x: x[:1].squeeze(0), X),
    "stop_gradient": lambda: _primitives(jax.lax.stop_gradient, X),
    "tile": lambda: _primitives(lambda x: jnp.tile(x, (2, 2)), X),
    "top_k": lambda: _primitives(lambda x: jax.lax.top_k(x, 2), X),
    "transpose": lambda: _primitives(jnp.transpose, X),
    "unstack": lambda: _primitives(jnp.unstack, X),
    "all_gather": _under_shard_map(lambda x: jax.lax.all_gather(x, "d")),
    "all_to_all": _under_shard_map(lambda x: jax.lax.all_to_all(x, "d", 0, 1)),
    "ppermute": _under_shard_map(lambda x: jax.lax.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)])),
    "replicated value": _under_shard_map(lambda x: jnp.where(x == x, x, jnp.zeros(x.shape))),
    "reshard": _on_explicit_mesh(lambda x: jax.sharding.reshard(x, P("d"))),
    "sharding_constraint": lambda: _primitives(lambda x: jax.lax.with_sharding_constraint(x, REPLICATED), X),
}
ON_INTEGERS = {"add", "and", "clamp", "convert_element_type", "eq", "ge", "iota", "le", "lt", "max", "min", "sub"}


@pytest.mark.parametrize("name", MOVES)
def test_diagnosis_knows_the_primitives_that_move_values(name):
    found = MOVES[name]() - ON_INTEGERS
    assert found
    assert found <= _MOVES


CALLBACKS = {
    "jax.debug.print": lambda x: jax.debug.print("{}", x),
    "jax.debug.callback": lambda x: jax.debug.callback(print, x),
    "io_callback": lambda x: jax.experimental.io_callback(print, None, x),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_diagnosis_knows_the_callbacks_without_results(name):
    """It would run them many times."""
    found = _primitives(CALLBACKS[name], X)
    assert found
    assert found <= _CALLBACKS


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this version of JAX has no public references")
def test_diagnosis_knows_the_primitive_that_creates_a_reference():
    assert _primitives(lambda x: jax.new_ref(x)[...], X) & _NEW_REFS


OPTIMIZERS = {  # and the number of averages that each keeps of a parameter
    "adam": (optax.adam(1e-3), 2),
    "nadamw": (optax.nadamw(1e-3), 2),
    "lion": (optax.lion(1e-3), 1),
    "rmsprop": (optax.rmsprop(1e-3), 1),
    "momentum": (optax.sgd(1e-3, momentum=0.9), 1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_averages_of_gradients_have_the_names_of_optax(name):
    tx, averages = OPTIMIZERS[name]
    state = tx.init(X)
    found = averages_of_gradients(state)
    assert [x.shape for x in found] == [X.shape] * averages
    assert {id(x) for x in found} == {id(x) for x in jax.tree.leaves(state) if jnp.shape(x) == X.shape}


LAYERS = ["Fp8DirectDotGeneralOp", "Fp8DotGeneralOp", "NANOOFp8DotGeneralOp"]


@pytest.mark.full
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("layer", [name for name in LAYERS if hasattr(fp8_ops, name)])
def test_statistics_of_fp8_layers_have_the_names_of_flax(layer):
    """Scales and histories are returned in place of gradients: they must be neither divided nor clipped."""
    model = nn.Dense(16, use_bias=False, dot_general_cls=getattr(fp8_ops, layer))
    inputs = 3 * jnp.ones((16, 16))
    variables = model.init(jax.random.key(0), inputs)
    assert set(variables) == {"params", fp8_ops.OVERWRITE_WITH_GRADIENT}
    unscale = functools.partial(jmpscale.unscale, jmpscale.static(4.0))
    statistics = variables[fp8_ops.OVERWRITE_WITH_GRADIENT]
    for tree, get in (
        (variables, lambda tree: tree[fp8_ops.OVERWRITE_WITH_GRADIENT]),  # in their collection
        (statistics, lambda tree: tree),  # as an argument of their own
    ):
        after = get(unscale(tree))
        assert len(jax.tree.leaves(after)) >= 6  # three pairs of a scale and a history
        jax.tree.map(np.testing.assert_array_equal, after, statistics)
    np.testing.assert_array_equal(unscale(variables)["params"]["kernel"], variables["params"]["kernel"] / 4)


# --- objects and options ---


def test_jaxprs_are_keys_by_identity_and_their_equations_stay_the_same():
    """`autocast` remembers jaxprs in a weak dictionary, and tools know equations by their identity."""
    inner = jax.jit(jnp.sin)
    closed, equal = (jax.make_jaxpr(lambda x: (inner(x), inner(x)))(X) for _ in range(2))
    for one, other in ((closed, equal), (closed.jaxpr, equal.jaxpr)):
        assert one != other
        assert weakref.WeakKeyDictionary({one: 1})[one] == 1
    first, second = closed.jaxpr.eqns
    assert [first, second] == [eqn for eqn, _ in equations(closed.jaxpr, ())]
    assert first.params["jaxpr"] is second.params["jaxpr"], "a compiled function has one jaxpr in all of its calls"
    assert weakref.ref(first.params["jaxpr"])


def test_new_scope_traces_functions_that_jax_has_traced():
    traced = []

    @jax.jit
    def compiled_before(x):
        traced.append(x)
        return x

    jax.make_jaxpr(compiled_before)(X)
    for count in (2, 3):
        trace_observed(lambda axes: jax.make_jaxpr(compiled_before, axis_env=list(axes))(X))
        assert len(traced) == count


@pytest.mark.parametrize("with_small_scales", [False, True])
def test_check_step_finds_the_gradients_that_a_compiled_function_unscales(with_small_scales):
    grads = {"a": X, "b": X[0]}
    program = jax.make_jaxpr(jax.jit(lambda scaler: jmpscale.unscale(scaler, grads)))(jmpscale.dynamic())
    assert Faults(program, with_small_scales=with_small_scales).count == 2


def _key(fun):
    """Returns the key of the only block of a small program."""
    [block] = BlockProgram(jax.make_jaxpr(fun)(X).jaxpr).blocks
    return Block.key(block)


def test_key_of_a_block_depends_on_the_context_of_an_equation():
    def with_metadata(value):
        def fun(x):
            with set_xla_metadata(value=value):
                return jnp.sin(x)

        return fun

    one, equal, other = (_key(with_metadata(value)) for value in (1, 1, 2))
    assert hash(one) == hash(equal)
    assert one == equal != other


@pytest.mark.parametrize("optimize", [False, True])
def test_compiled_program_rounds_each_result(optimize):
    """The options of XLA have the expected names and meaning: by default XLA on CPU keeps excess precision here."""
    x = jnp.array(1 + 2**-7, jnp.bfloat16)
    square = compiled(lambda x: (x * x).astype(jnp.float32), optimize=optimize)
    assert float(square(x)) == 1 + 2**-6  # exactly 1 + 2^-6 + 2^-14


def test_compiled_program_has_run_when_it_returns():
    """On simulated devices, programs that are queued may wait for each other without end."""
    loop = compiled(lambda x: jax.lax.fori_loop(0, 2**19, lambda i, x: jnp.cos(x), x))
    assert loop(jax.device_put(jnp.ones(8), jax.NamedSharding(meshes.make_mesh(d=8), P("d")))).is_ready()


def test_unknown_option_of_xla_raises_the_expected_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(jnp.sin, compiler_options={"xla_option_that_does_not_exist": True})(X)
