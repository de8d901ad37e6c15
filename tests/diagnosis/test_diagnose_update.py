"""diagnose_step compares all that a step makes of its gradients with float32, and says what is wrong as findings.

A fault has several spellings, in one table for each kind; test_healthy_steps.py has right steps.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jmpscale

from arrays import normal
from meshes import make_mesh
from tables import names

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("standard_promotion_and_ranks")]

B, F = jnp.bfloat16, jnp.float32
Kind = jmpscale.FindingKind
tree_map = jax.tree.map
X = normal(1, 64, 16)
Y = jnp.tanh(X @ normal(2, 16, 4))
PARAMS = {"a": normal(3, 16, 32) / 4, "b": normal(4, 32, 4) / 6}
NARROW = jmpscale.cast(PARAMS, B)


def model(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


def loss_fn(params, x, y):
    return jnp.mean((model(params, x).astype(F) - y) ** 2)


def sgd(params, grads, rate=1e-4):
    return tree_map(lambda p, g: (p - rate * g).astype(p.dtype), params, grads)


def found(diagnosis, kind):
    return [x for x in diagnosis.findings if x.kind is kind]


# --- The update begins from the half-precision copy of float32 parameters. ---


def half_copy(params, x, y, dtype=B, rate=1e-3):
    half = jmpscale.cast(params, dtype)
    loss, grads = jax.value_and_grad(loss_fn)(half, x.astype(dtype), y)
    return tree_map(lambda p, g: p.astype(F) - rate * g.astype(F), half, grads), loss


def half_copy_in_a_scan(params, x, y):
    def body(params, batch):
        return half_copy(params, *batch)

    params, losses = jax.lax.scan(body, params, (x.reshape(2, 32, 16), y.reshape(2, 32, 4)))
    return params, losses.mean()


def half_copy_on_devices(params, x, y):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(params, x, y):
        params, loss = half_copy(params, x, y)
        return params, jax.lax.pmean(loss, "data")

    specs = jax.P(), jax.P("data"), jax.P("data")
    return jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(jax.P(), jax.P()))(params, x, y)


def half_copy_of_local_steps(params, x, y):
    """Local SGD whose inner steps run on a copy."""

    def body(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        return sgd(params, grads), loss

    batches = x.reshape(4, 16, 16).astype(B), y.reshape(4, 16, 4)
    after, losses = jax.lax.scan(body, jmpscale.cast(params, B), batches)
    return tree_map(lambda p, q: p + 0.7 * (q.astype(F) - p), params, after), losses.mean()


def equinox_step(model, opt_state, x, y):
    def cast(tree, dtype):
        return tree_map(lambda v: v.astype(dtype) if eqx.is_inexact_array(v) else v, tree)

    half = cast(model, B)
    loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x.astype(B)) - y).astype(F) ** 2))(half)
    updates, opt_state = optax.adamw(1e-4).update(cast(grads, F), opt_state, eqx.filter(half, eqx.is_inexact_array))
    return eqx.apply_updates(cast(half, F), updates), opt_state, loss


def nnx_step(model, x, y):
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    half = jmpscale.cast(params, B)

    def loss(params):
        return jnp.mean((nnx.merge(graph, params, rest)(x.astype(B)) - y).astype(F) ** 2)

    value, grads = jax.value_and_grad(loss)(half)
    nnx.update(model, tree_map(lambda p, g: p.astype(F) - 1e-3 * g.astype(F), half, grads))
    return value


class Linear(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(normal(5, 16, 4))

    def __call__(self, x):
        return x @ self.w[...]


MLP = eqx.nn.MLP(16, 4, 32, 1, key=jax.random.key(0))
HALF_COPIES = {
    "bfloat16": (half_copy, (PARAMS, X, Y)),
    "float16": (functools.partial(half_copy, dtype=jnp.float16, rate=1e-5), (PARAMS, X, Y)),
    "float8": (functools.partial(half_copy, dtype=jnp.float8_e4m3fn), (PARAMS, X, Y)),
    "in a scan": (half_copy_in_a_scan, (PARAMS, X, Y)),
    "in shard_map": (half_copy_on_devices, (PARAMS, X, Y)),
    "local steps": (half_copy_of_local_steps, (PARAMS, X, Y)),
    "Equinox": (eqx.filter_jit(equinox_step), (MLP, optax.adamw(1e-4).init(eqx.filter(MLP, eqx.is_array)), X, Y)),
    "Flax NNX": (nnx_step, (Linear(), X, Y)),
}


@pytest.mark.parametrize("name", names(HALF_COPIES))
def test_diagnose_step_names_parameters_that_are_rounded_because_the_update_begins_from_their_copy(name):
    step, args = HALF_COPIES[name]
    diagnosis = jmpscale.diagnose_step(step)(*args)
    assert diagnosis.gradient_error < 0.3  # 0.2 in float8
    [finding, *_] = diagnosis.findings
    assert finding.kind in (Kind.LOST_CHANGE, Kind.WRONG_CHANGE)
    assert finding.error > 0.2 > finding.error_then
    assert finding.lines == diagnosis.lines != ()
    assert all("test_diagnose_update.py" in line for line in finding.lines)


# --- State that rounding keeps from changing. ---


def gated(state, x, y):
    mean = (0.999 * state["m"] + 0.001 * x.mean(0).astype(B)).astype(B)  # read by the loss, and gated
    loss, grads = jax.value_and_grad(lambda params: loss_fn(params, x - mean.astype(F), y))(state["p"])
    new = {"p": sgd(state["p"], grads, 0.1), "m": mean}
    return jmpscale.select_tree(jmpscale.all_finite(grads), new, state), loss


def critic_and_actor(state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(state["c"], x, y)
    critic = sgd(state["c"], grads)

    def actor_loss(actor):  # reads the new critic
        return -jnp.mean(model(critic, jnp.tanh(model(actor, x)).repeat(4, -1)).astype(F))

    return {"c": critic, "a": sgd(state["a"], jax.grad(actor_loss)(state["a"]), 0.1)}, loss


def unrolled(params, x, y):
    for i in range(4):
        loss, grads = jax.value_and_grad(loss_fn)(params, x[i::4], y[i::4])
        params = sgd(params, grads)
    return params, loss


def kahan(sign, step_size=1e-4):
    def step(state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(state["p"], x.astype(B), y)
        change = tree_map(lambda g, c: (-step_size * g.astype(F)).astype(B) + sign * c, grads, state["c"])
        params = tree_map(jnp.add, state["p"], change)
        lost = tree_map(lambda new, old, c: (new - old) - c, params, state["p"], change)
        return {"p": params, "c": lost, "m": tree_map(lambda m, g: B(0.9) * m + g, state["m"], grads)}, loss

    return step


def one_key(params, x, y):
    """Stochastic rounding that forgets to split its key."""
    key = jax.random.key(5)

    def rounded(p):
        last_place = jnp.abs(p) * 2.0**-7
        return (p + (jax.random.uniform(key, p.shape) - 0.5) * last_place).astype(B)

    loss, grads = jax.value_and_grad(loss_fn)(params, x.astype(B), y)
    return tree_map(lambda p, g: rounded(p.astype(F) - 1e-4 * g.astype(F)), params, grads), loss


def noise(state, x, y):
    """Noise that is larger than the gradient, as for differential privacy."""
    key, draw = jax.random.split(state["k"])
    loss, grads = jax.value_and_grad(loss_fn)(state["p"], x.astype(B), y)
    draws = dict(zip("ab", jax.random.split(draw), strict=True))
    noisy = {n: grads[n].astype(F) + 0.3 * jax.random.normal(draws[n], grads[n].shape) for n in grads}
    return {"p": sgd(state["p"], noisy), "k": key}, loss


def reduced(params, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    return tree_map(lambda p, g: jax.lax.reduce_precision(p - 1e-4 * g, 8, 7), params, grads), loss


def searched(state, x, y):
    """Finds a step size by doubling, while the loss, which is compared in bfloat16, falls."""
    loss, grads = jax.value_and_grad(loss_fn)(state["p"], x, y)

    def step_of(size):
        return tree_map(lambda p, g: p - size * g, state["p"], grads)

    def falls(size):
        before, after = (loss_fn(step_of(s), x, y).astype(B) for s in (size, 2 * size))
        return after < before

    size = jax.lax.while_loop(falls, lambda size: 2 * size, jnp.float32(2.0**-12))
    return {"p": step_of(size), "size": size}, loss


ZEROS = tree_map(jnp.zeros_like, NARROW)
KAHAN = {"p": NARROW, "c": ZEROS, "m": ZEROS}
ROUNDED = jmpscale.cast(NARROW, F)
LOST = {  # a step, its arguments, and the part of the state whose change is lost or wrong
    "gated state that the loss reads": (gated, ({"p": PARAMS, "m": jnp.ones(16, B) * 3}, X + 2, Y), "state['m']"),
    "an update before another gradient": (critic_and_actor, ({"c": NARROW, "a": PARAMS}, X, Y), "state['c']"),
    "updates unrolled in Python": (unrolled, (NARROW, X, Y), "params"),
    "Kahan sums with the wrong sign": (kahan(1), (KAHAN, X, Y), "state['p']"),
    "stochastic rounding with one key": (one_key, (NARROW, X, Y), "params"),
    "noise larger than the gradient": (noise, ({"p": NARROW, "k": jax.random.key(1)}, X, Y), "state['p']"),
    "rounding by reduce_precision": (reduced, (ROUNDED, X, Y), "params"),
    "condition of a while loop": (searched, ({"p": PARAMS, "size": jnp.float32(1)}, X, Y), "state"),
}


@pytest.mark.parametrize("name", names(LOST))
def test_diagnose_step_names_state_whose_change_is_lost(name):
    step, args, part = LOST[name]
    diagnosis = jmpscale.diagnose_step(jax.jit(step))(*args)
    findings = [*found(diagnosis, Kind.LOST_CHANGE), *found(diagnosis, Kind.WRONG_CHANGE)]
    assert any(leaf.startswith(part) for finding in findings for leaf in finding.names)
    assert all(finding.error > 0.2 > finding.error_then for finding in findings)
    assert any("test_diagnose_update.py" in line for line in diagnosis.lines)


# --- Near a minimum, gradients depend on the data much more than the update does on them. ---


def update(params, x, y):
    loss, grads = jax.value_and_grad(lambda p: loss_fn(jmpscale.cast(p, F), x, y))(params)
    return sgd(params, grads, 0.05), loss


def in_shard_map(step):
    def on_device(state, x, y):
        state, loss = step(state, x, y)
        return state, jax.lax.pmean(loss, "data")

    specs = jax.P(), jax.P("data"), jax.P("data")
    return jax.shard_map(on_device, mesh=make_mesh(data=1), in_specs=specs, out_specs=jax.P())


def update_in_shard_map(params, x, y):
    return in_shard_map(update)(params, x, y)


def update_in_a_scan(params, x, y):
    params, losses = jax.lax.scan(lambda params, batch: update(params, *batch), params, (x[None], y[None]))
    return params, losses[0]


def update_in_a_while_loop(params, x, y):
    def step(state):
        return *update(state[0], x, y), state[2] + 1

    params, loss, _ = jax.lax.while_loop(lambda state: state[2] < 1, step, (params, jnp.zeros(()), 0))
    return params, loss


def update_in_a_branch(params, x, y):
    return jax.lax.cond(x[0, 0] < 100, update, lambda params, x, y: (params, jnp.zeros(())), params, x, y)


def with_average(step):
    """Adds an average of the parameters, which hardly changes near a minimum, in float32 too."""

    def with_average_of_step(state, x, y):
        params, loss = step(state["p"], x, y)
        return {"p": params, "m": tree_map(lambda m, p: (0.9 * m + 0.1 * p).astype(m.dtype), state["m"], params)}, loss

    return with_average_of_step


@functools.cache
def near_a_minimum():
    params = PARAMS
    for _ in range(300):
        params, _ = jax.jit(update)(params, X, Y)
    return params


UPDATES = [update, update_in_shard_map, update_in_a_scan, update_in_a_while_loop, update_in_a_branch]


@pytest.mark.parametrize("step", UPDATES, ids=lambda step: step.__name__)
def test_diagnose_step_names_parameters_whose_changes_are_lost_near_a_minimum(step):
    params = jmpscale.cast(near_a_minimum(), B)
    (finding,) = jmpscale.diagnose_step(step)(params, X, Y).findings
    assert (finding.kind, finding.names) == (Kind.LOST_CHANGE, ("params['a']", "params['b']"))


@pytest.mark.parametrize("step", UPDATES, ids=lambda step: step.__name__)
def test_diagnose_step_accepts_an_average_that_has_reached_the_parameters(step):
    params = near_a_minimum()
    diagnosis = jmpscale.diagnose_step(with_average(step))({"p": params, "m": jmpscale.cast(params, B)}, X, Y)
    assert max(change.error for change in diagnosis.changes if "'m'" in change.name) > 0.5
    assert diagnosis.findings == ()


# --- Averages that rounding keeps away from what they average. ---


def average_of(decay, form="sum", dtype=B):
    def averaged(m, p):
        if form == "difference":
            return m + dtype(1 - decay) * (p - m).astype(dtype)
        m = m.astype(F)
        new = optax.incremental_update(p, m, 1 - decay) if form == "optax" else decay * m + (1 - decay) * p
        return new.astype(dtype)

    def step(state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(state["p"], x, y)
        params = sgd(state["p"], grads, 1e-2)
        return {"p": params, "m": tree_map(averaged, state["m"], params)}, loss

    return step


def statistics_of(decay):
    """A running mean of activations, as in batch normalization."""

    def step(state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(state["p"], x, y)
        mean = (x @ state["p"]["a"]).mean(0)
        return {"p": sgd(state["p"], grads), "m": (decay * state["m"].astype(F) + (1 - decay) * mean).astype(B)}, loss

    return step


FIRST = {"p": PARAMS, "m": NARROW}
DISTANT = {
    "sum": (average_of(0.99), FIRST),
    "difference": (average_of(0.99, "difference"), FIRST),
    "optax": (average_of(0.995, "optax"), FIRST),
    "shard_map": (lambda state, x, y: in_shard_map(average_of(0.99))(state, x, y), FIRST),
    "running mean": (statistics_of(0.99), {"p": PARAMS, "m": jnp.zeros(32, B)}),
}


@pytest.mark.parametrize("name", names(DISTANT))
def test_diagnose_step_names_an_average_that_stays_far_from_what_it_averages_at_the_first_step(name):
    step, state = DISTANT[name]
    diagnosis = jmpscale.diagnose_step(step)(state, X, Y)
    leaves = ("state['m']",) if name == "running mean" else ("state['m']['a']", "state['m']['b']")
    assert diagnosis.findings == (jmpscale.DiagnosisFinding(Kind.STALLED, leaves, dtype="bfloat16"),)
    assert " will stay 20% from what " in diagnosis.summary
    after = jax.jit(lambda state: jax.lax.scan(lambda s, _: (step(s, X, Y)[0], None), state, None, 1000)[0])(state)
    averaged = after["p"] if name != "running mean" else {"m": (X @ after["p"]["a"]).mean(0)}
    averages = after["m"] if name != "running mean" else {"m": after["m"]}
    error = max(
        float(jnp.linalg.norm((m - p).astype(F)) / jnp.linalg.norm(p))
        for m, p in zip(jax.tree.leaves(averages), jax.tree.leaves(averaged), strict=True)
    )
    assert error > 0.05


@pytest.mark.parametrize(
    ("decay", "dtype"),
    [(0.9, B), (0.95, B), (0.99, jnp.float16), (0.999, F)],
    ids=["0.9", "0.95", "float16", "float32"],
)
def test_diagnose_step_accepts_an_average_that_comes_near_to_what_it_averages(decay, dtype):
    state = {"p": PARAMS, "m": jmpscale.cast(PARAMS, dtype)}
    assert jmpscale.diagnose_step(average_of(decay, dtype=dtype))(state, X, Y).findings == ()


# --- Slices of stacked leaves. ---


def of_members(params, x, y, rates):
    def one(params, rate):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        return sgd(params, grads, rate), loss

    params, losses = jax.vmap(one)(params, rates)
    return params, losses.mean()


def test_diagnose_step_names_a_slice_of_a_stacked_leaf():
    """Of eight members, the last ones have rates at which rounding removes their changes; the others hide them."""
    stacked = tree_map(lambda p: jnp.stack([p] * 8), NARROW)
    rates = jnp.array([1, 1, 0.1, 0.1, 1e-5, 1e-5, 1e-5, 1e-5], B)
    diagnosis = jmpscale.diagnose_step(of_members)(stacked, X, Y, rates)
    [finding] = found(diagnosis, Kind.LOST_CHANGE)
    assert {name[:-3] for name in finding.names} == {"params['a']", "params['b']"}
    assert all(int(name[-2]) > 3 for name in finding.names)


def test_diagnose_finds_the_same_scales_for_stacked_layers_as_for_a_list():
    half = X.astype(jnp.float16)

    def loss(ws):
        return sum(10.0**-i * jnp.mean((half @ ws[i].astype(jnp.float16)).astype(F) ** 2) for i in range(6))

    ws = [normal(i, 16, 4) for i in range(6)]
    listed, stacked = (jmpscale.diagnose(loss)(jmpscale.dynamic(1.0), x) for x in (ws, jnp.stack(ws)))
    assert stacked.fitting_scales == listed.fitting_scales
    assert [(x.kind, x.names) for x in stacked.findings] == [(x.kind, x.names) for x in listed.findings]
    [finding] = stacked.findings
    assert finding.kind is Kind.SMALL_SCALE
    assert "ws[5]" in finding.names


# --- What a comparison does not show is said. ---


def by_bits(params, x, y):
    def rounded(p):
        bits = jax.lax.bitcast_convert_type(p, jnp.uint32) + jnp.uint32(0x8000)
        return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), F).astype(B)

    loss, grads = jax.value_and_grad(loss_fn)(params, x.astype(B), y)
    return tree_map(lambda p, g: rounded(p.astype(F) - 1e-4 * g.astype(F)), params, grads), loss


def test_diagnose_step_says_that_rounding_by_bits_was_not_compared():
    diagnosis = jmpscale.diagnose_step(by_bits)(NARROW, X, Y)
    [finding] = diagnosis.findings
    assert (finding.kind, finding.names) == (Kind.NOT_COMPARED, ("params['a']", "params['b']"))
    assert all("(rounded)" in line for line in finding.lines)


def lone_average(params, mean, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x - mean.astype(F), y)
    return sgd(params, grads), (0.999 * mean + 0.001 * x.mean(0).astype(B)).astype(B), loss


def test_diagnose_step_says_that_an_array_may_be_state():
    diagnosis = jmpscale.diagnose_step(lone_average)(PARAMS, jnp.ones(16, B) * 3, X, Y)
    assert "mean comes back changed, and was compared by value, as data. If it is state, pass " in diagnosis.summary
    assert diagnosis.state == ("params",)


def test_update_that_divides_by_zero_in_float32_too_is_named():
    """Root mean squares without `eps`, of a row of which a batch has no gradient."""
    tx = optax.rmsprop(1e-2, eps=0.0)

    def step(params, opt_state, x, y):
        half = jmpscale.autocast(loss_fn, dtype=B)
        loss, grads = jax.value_and_grad(half)(params, x.at[:, 3].set(0), y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    diagnosis = jmpscale.diagnose_step(step)(PARAMS, tx.init(PARAMS), X, Y)
    [finding] = diagnosis.findings
    assert (finding.kind, finding.names) == (Kind.NOT_FINITE, ("params['a']",))
    assert diagnosis.summary.startswith("params['a'] becomes infinite or NaN, in float32 too: correct this update.")
