"""Values on several devices are reduced, and devices decide together; a reference is not a value."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmpscale

import meshes
from calls import (
    GRADS,
    OPT_STATE,
    SCALE,
    STATE,
    TRUE,
    TX,
    Mistake,
    check_message,
    loss_of,
    per_device,
    raises,
    same,
    traced,
)
from messages import NO_AXIS
from tables import rows

pytestmark = pytest.mark.guards


TAKE_NO_PARTIAL_SUM = {  # the call, and the path of the partial sum
    "all_finite": (jmpscale.all_finite, "tree['w']"),
    "unscale": (lambda tree: jmpscale.unscale(STATE, tree), "tree['w']"),
    "update-loss": (lambda tree: jmpscale.update(STATE, True, loss=tree["w"].sum()), "loss"),
    "grad_report": (jmpscale.grad_report, "grads['w']"),
    "tx.update": (lambda tree: TX.update(tree, OPT_STATE), "updates['w']"),
    "tx.update-value": (lambda tree: TX.update(GRADS, OPT_STATE, value=tree["w"].sum()), "value"),
}


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="this version of JAX has no type for partial sums under jit")
@pytest.mark.parametrize("name", TAKE_NO_PARTIAL_SUM)
def test_partial_sum_raises(name):
    call, path = TAKE_NO_PARTIAL_SUM[name]

    def fn(x):
        total = jnp.einsum("ij,kj->ik", x, x, out_sharding=P(None, None, unreduced={"d"}))
        return call({"a": 1, "b": x, "w": total})

    with jax.set_mesh(meshes.make_mesh(AxisType.Explicit, d=8)):
        x = jax.sharding.reshard(jnp.ones((4, 8)), P(None, "d"))
        words = f"the leaf at {path} is a partial sum over the mesh axes ['d'] ... psum ... reshard"
        with raises(TypeError, words):
            traced(fn, x)


TAKE_NO_REF = {  # the call, and the path of the reference
    "all_finite": (jmpscale.all_finite, "tree['w']"),
    "scale": (lambda tree: jmpscale.scale(STATE, tree), "tree['w']"),
    "scale-disabled": (lambda tree: jmpscale.scale(jmpscale.disabled(), tree), "tree['w']"),
    "unscale": (lambda tree: jmpscale.unscale(STATE, tree), "tree['w']"),
    "unscale-disabled": (lambda tree: jmpscale.unscale(jmpscale.disabled(), tree), "tree['w']"),
    "cast": (lambda tree: jmpscale.cast(tree, jnp.float16), "tree['w']"),
    "apply_if": (lambda tree: jmpscale.apply_if(True, same, tree), "carry[0]['w']"),
    "grad_report": (jmpscale.grad_report, "grads['w']"),
    "tx.update": (lambda tree: TX.update(tree, OPT_STATE), "updates['w']"),
    "autocast-args": (lambda tree: jmpscale.autocast(loss_of)(GRADS, tree), "args[1]['w']"),
    "autocast-kwargs": (lambda tree: jmpscale.autocast(loss_of)(tree=tree), "kwargs['tree']['w']"),
    "scaled_backward-args": (lambda tree: jmpscale.scaled_backward(loss_of, 8.0)(GRADS, tree), "args[1]['w']"),
    "scaled_backward-kwargs": (lambda tree: jmpscale.scaled_backward(loss_of, 8.0)(tree=tree), "kwargs['tree']['w']"),
}


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this version of JAX has no public references")
@pytest.mark.parametrize("name", TAKE_NO_REF)
def test_ref_raises(name):
    call, path = TAKE_NO_REF[name]
    with raises(TypeError, f"must hold values, got a jax.Ref at {path}. Pass its value, ref[...]."):
        call({"b": jnp.ones(1), "w": jax.new_ref(jnp.ones(2))})


WRONG_AXES = {
    "axis": Mistake(
        lambda: jmpscale.update(STATE, TRUE, axis_name="x"),
        f"'x' {NO_AXIS} a ... omit axis_name",
        raises=ValueError,
    ),
    "axis set": Mistake(
        lambda: jmpscale.all_finite(GRADS, axis_name={"x"}),
        f"axis_name 'x' {NO_AXIS} a mapped",
        raises=ValueError,
    ),
    "nested axis": Mistake(
        lambda: jmpscale.all_finite(GRADS, axis_name=[["x"]]), f"list of 1 {NO_AXIS}", raises=ValueError
    ),
    "missing axis": Mistake(
        lambda: per_device(jmpscale.all_finite), "axes ('d',) ... axis_name=('d',) ... axis_name=()", raises=UserWarning
    ),
}


@pytest.mark.parametrize("mistake", rows(WRONG_AXES))
def test_axis_name_names_the_mapped_axes(mistake):
    check_message(mistake)


# --- warnings name the line of the caller ---


CHAIN = optax.chain(SCALE, optax.scale(1.0))


def _without_axis_name(grads):
    flags = [
        jmpscale.all_finite(grads),
        jmpscale.unscale_and_check(STATE, grads)[1],
        jmpscale.update(STATE, True, loss=grads.sum()).step_applied,
        jmpscale.grad_report(grads).finite,
        SCALE.update(grads, SCALE.init(grads))[1].scaler.step_applied,
        CHAIN.update(grads, CHAIN.init(grads))[1][0].scaler.step_applied,
        jax.tree.map(jmpscale.all_finite, [grads])[0],
    ]
    return jnp.stack(flags)[None]


@pytest.mark.parametrize("map_", ["shard_map", pytest.param("pmap", marks=pytest.mark.full)])
def test_warnings_name_the_line_of_the_caller(map_):
    if map_ == "pmap" and jax.__version_info__ < (0, 10):
        pytest.skip("in this version of JAX pmap does not show that there is a mesh")
    meshes.require_devices(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", "each device decides independently", UserWarning)
        if map_ == "pmap":
            jax.pmap(_without_axis_name, axis_name="d")(jnp.ones((8, 3)))
        else:
            per_device(_without_axis_name)
    first = _without_axis_name.__code__.co_firstlineno + 2
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, first + i) for i in range(7)]
