"""What enters a step in half precision: arguments, constants, random numbers, counters, and integers made of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpscale

import meshes
from arrays import normal
from diagnosis_programs import fault_line
from tables import names

pytestmark = pytest.mark.usefixtures("standard_promotion")

B, F, H = jnp.bfloat16, jnp.float32, jnp.float16
Kind = jmpscale.FindingKind
PARAMS = {"a": normal(0, 16, 32, scale=0.25), "b": normal(1, 32, 16, scale=0.2)}
X, NOISE = normal(2, 128, 16), normal(3, 128, 16)


def model(params, x, dtype=F):
    return (jnp.tanh(x.astype(dtype) @ params["a"].astype(dtype)) @ params["b"].astype(dtype)).astype(F)


def sgd(loss_fn):
    """Returns a step of gradient descent."""

    def step(params, *args):
        loss, grads = jax.value_and_grad(loss_fn)(params, *args)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def place(fun):
    return f"test_diagnose_entering.py:{fault_line(fun)} ({fun.__name__})"


# --- Arguments and constants in half precision. ---

SCHEDULE = jnp.cumprod(1 - jnp.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)  # of Stable Diffusion
TIMES = jnp.arange(128) * 8
FREQUENCIES = 1e3 ** -(jnp.arange(8.0) / 8)


def denoising(params, table, times, dtype=F):
    signal = table[times].astype(F)[:, None]  # fault
    noisy = jnp.sqrt(signal) * X + jnp.sqrt(1 - signal) * NOISE
    return jnp.mean((model(params, noisy, dtype) / jnp.sqrt(1 - signal + 1e-5) - NOISE) ** 2)


def time_steps(params, times):
    angles = times.astype(F)[:, None] * FREQUENCIES[None]  # fault
    return jnp.mean((model(params, jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], 1)) - 0.3) ** 2)


def offset(params, batch):
    centered = batch["x"].astype(F) - 100  # fault
    return jnp.mean((model(params, centered) - jnp.sin(X)) ** 2)


def discounted(params, gamma):
    returns = jnp.mean(X**2, 1) / (1 - gamma.astype(F))  # fault
    return jnp.mean((model(params, X)[:, 0] - returns) ** 2)


def with_table(compile_, table):
    return compile_(sgd(lambda params, times: denoising(params, table, times)))


SCHEDULE_IN_HALF, LATE = SCHEDULE.astype(B), TIMES // 20
COARSE = {  # a step, its arguments after the parameters, the function with the line, the names, and the dtype
    "table": (sgd(denoising), (SCHEDULE_IN_HALF, LATE), denoising, ("args[0]",), "bfloat16"),
    "table of a compiled step": (
        jax.jit(sgd(denoising)),
        (SCHEDULE_IN_HALF, LATE),
        denoising,
        ("args[0]",),
        "bfloat16",
    ),
    "table in float16": (sgd(denoising), (SCHEDULE.astype(H), LATE), denoising, ("args[0]",), "float16"),
    "table of a model in bfloat16": (
        sgd(lambda *args: denoising(*args, dtype=B)),
        (SCHEDULE_IN_HALF, LATE),
        denoising,
        ("args[0]",),
        "bfloat16",
    ),
    "constant table": (with_table(lambda f: f, SCHEDULE_IN_HALF), (LATE,), denoising, (), "bfloat16"),
    "constant table of a compiled step": (with_table(jax.jit, SCHEDULE_IN_HALF), (LATE,), denoising, (), "bfloat16"),
    "time steps": (sgd(time_steps), (TIMES.astype(B),), time_steps, ("args[0]",), "bfloat16"),
    "values with an offset": (sgd(offset), ({"x": (X + 100).astype(B)},), offset, ("args[0]['x']",), "bfloat16"),
    "scalar": (sgd(discounted), (B(0.99),), discounted, ("args[0]",), "bfloat16"),
    "one of several": (
        sgd(lambda params, x, times, y: time_steps(params, times) + jnp.mean((model(params, x) - y) ** 2)),
        (X.astype(B), TIMES.astype(B), NOISE.astype(B)),
        time_steps,
        ("args[1]",),
        "bfloat16",
    ),
}


@pytest.mark.parametrize(
    "name", names(COARSE, default={"table", "constant table of a compiled step", "time steps", "one of several"})
)
def test_diagnose_step_names_an_input_whose_lost_digits_change_the_gradients(name):
    step, args, fun, argument, dtype = COARSE[name]
    (finding,) = jmpscale.diagnose_step(step)(PARAMS, *args).findings
    assert (finding.kind, finding.names, finding.lines) == (Kind.ROUNDED_INPUT, argument, (place(fun),))
    assert finding.dtype == dtype
    assert finding.error > 0.05
    assert finding.error_then is None


def test_diagnose_names_an_input_whose_lost_digits_change_the_gradients():
    (finding,) = jmpscale.diagnose(denoising)(PARAMS, SCHEDULE_IN_HALF, LATE).findings
    assert (finding.kind, finding.names) == (Kind.ROUNDED_INPUT, ("table",))


def adapters(params, backbone, x):
    """Has low-rank adapters beside parameters in bfloat16."""

    def layer(h, w):
        w, a, b = w
        return h + jnp.tanh(h @ w + (h @ a.astype(B)) @ b.astype(B)) * B(0.5), None

    h, _ = jax.lax.scan(layer, x, (backbone, params["a"], params["b"]))
    return jnp.mean((h.astype(F) - X) ** 2)


def regression(params, x, y):
    return jnp.mean((model(params, x) - y.astype(F)) ** 2)


def masked(params, x, mask, weights):
    probability = jnp.sqrt(1 - mask.astype(F)) + weights.astype(F)[:, None]
    return jnp.mean(probability * (model(params, x) - jnp.sin(X)) ** 2)


def trained(step, state, steps, *args):
    return jax.jit(lambda s: jax.lax.scan(lambda s, _: (step(s, *args)[0], None), s, None, steps)[0])(state)


HALF_BATCH = X.astype(B), jnp.sin(X).astype(B)
MASK = (jnp.arange(128) % 2).astype(B)[:, None]
BACKBONE = normal(4, 24, 16, 16, scale=0.35).astype(B)
ADAPTERS = {"a": normal(5, 24, 16, 4, scale=0.25), "b": jnp.zeros((24, 4, 16))}
FINE = {  # a step, its state, the number of steps before, and its other arguments
    "images": (sgd(regression), PARAMS, 0, HALF_BATCH),
    "images, later": (sgd(regression), PARAMS, 20000, HALF_BATCH),
    "table of cosines": (
        sgd(regression),
        PARAMS,
        0,
        (jnp.cos(TIMES.astype(F)[:, None] * np.ones((1, 16), np.float32)).astype(B), X),
    ),
    "exact mask": (sgd(masked), PARAMS, 0, (X, MASK, MASK[:, 0] * B(0.5))),
    "small integers": (sgd(time_steps), PARAMS, 0, (jnp.arange(128).astype(B),)),
    "large integers whose digits do not matter": (sgd(time_steps), PARAMS, 0, (TIMES.astype(H),)),
    "backbone": (sgd(adapters), ADAPTERS, 0, (BACKBONE, X.astype(B))),
    "backbone, later": (sgd(adapters), ADAPTERS, 100, (BACKBONE, X.astype(B))),
    "schedule in float32": (sgd(denoising), PARAMS, 0, (SCHEDULE, LATE)),
}


@pytest.mark.parametrize("name", names(FINE, default={"images, later", "exact mask"}))
def test_diagnose_step_finds_nothing_in_inputs_whose_lost_digits_do_not_matter(name):
    step, state, steps, args = FINE[name]
    state = trained(step, state, steps, *args) if steps else state
    assert jmpscale.diagnose_step(step)(state, *args).findings == ()


# --- Random numbers in half precision. ---


def with_weights(weights):
    """Returns a step whose loss has weights that are made of a random key and the data."""

    def step(params, key):
        def loss_fn(params):
            return jnp.mean(weights(key, params) * (model(params, X) - jnp.sin(X)) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def one_hot_of(choices, count):
    return jnp.bincount(choices, length=count)[:128, None] / choices.size


def sampled(key, params):
    return one_hot_of(jax.random.categorical(key, jnp.zeros(4096, B), shape=(512,)), 4096)  # fault


def gumbel_of_a_policy(key, params):
    logits = (model(params, X)[:, :1] @ jnp.ones((1, 1024))).astype(B)
    noise = jax.random.gumbel(key, logits.shape, B)  # fault
    return one_hot_of(jnp.argmax(jax.nn.softmax(logits + noise), 1), 1024)


def without_replacement(key, params):
    return jax.lax.top_k(jax.random.uniform(key, (4096,), B), 128)[1][:, None] / 4096  # fault


def shuffled(key, params):
    return jnp.argsort(jax.random.uniform(key, (4096,), B))[:128, None] / 4096  # fault


def in_float16(key, params):
    return one_hot_of(jax.random.categorical(key, jnp.zeros(4096, H), shape=(512,)), 4096)  # fault


def rarely_masked(key, params):
    return (jax.random.uniform(key, X.shape, B) < B(0.002)).astype(F)  # fault


def rarely_kept(key, params):
    x = jax.random.uniform(key, X.shape, B)  # fault
    return (1 - x.astype(F) <= 0.01).astype(F)


COARSE_DRAWS = {  # weights, and the dtype of the random numbers
    "categorical": (sampled, "bfloat16"),
    "Gumbel noise": (gumbel_of_a_policy, "bfloat16"),
    "top_k": (without_replacement, "bfloat16"),
    "sort": (shuffled, "bfloat16"),
    "float16": (in_float16, "float16"),
    "small probability": (rarely_masked, "bfloat16"),
    "small probability of large numbers": (rarely_kept, "bfloat16"),
}


@pytest.mark.parametrize("name", names(COARSE_DRAWS, default={"categorical"}))
@pytest.mark.parametrize("compile_", [lambda f: f, pytest.param(jax.jit, marks=pytest.mark.full)], ids=["", "compiled"])
def test_diagnose_step_names_random_numbers_that_are_too_coarse(name, compile_):
    weights, dtype = COARSE_DRAWS[name]
    step = compile_(with_weights(weights))
    assert jmpscale.diagnose_step(step)(PARAMS, jax.random.key(0)).findings == (
        jmpscale.DiagnosisFinding(Kind.COARSE_RANDOM, lines=(place(weights),), dtype=dtype),
    )


def test_diagnose_step_names_random_numbers_that_choose_what_only_the_state_holds():
    def step(params, key, actions):
        params, loss = sgd(lambda params: jnp.mean((model(params, X) - jnp.sin(X)) ** 2))(params)
        return params, jax.random.categorical(key, jnp.zeros(4096, B), shape=actions.shape), loss  # fault

    (finding,) = jmpscale.diagnose_step(step)(PARAMS, jax.random.key(0), jnp.zeros(8, int)).findings
    assert (finding.kind, finding.lines) == (Kind.COARSE_RANDOM, (place(step),))


def noisy(key, params):
    hidden = X.astype(B) + B(0.1) * jax.random.normal(key, X.shape, B)
    return jax.nn.relu(hidden - B(2.8)).astype(F)


FINE_DRAWS = {
    "categorical in float32": lambda key, _: one_hot_of(jax.random.categorical(key, jnp.zeros(512), shape=(64,)), 512),
    "few actions": lambda key, params: one_hot_of(jax.random.categorical(key, jnp.zeros(16, B), shape=(512,)), 128),
    "dropout": lambda key, params: (jax.random.uniform(key, X.shape, B) < B(0.9)).astype(F),
    "dropout by bernoulli": lambda key, params: jax.random.bernoulli(key, 0.999, X.shape).astype(F),
    "dropout without dropping": lambda key, params: (jax.random.uniform(key, X.shape, B) < B(1)).astype(F),
    "one rare number of a few": lambda key, params: (jax.random.uniform(key, (128, 1), B) < B(0.02)).astype(F),
    "noise": noisy,
    "noise before a matmul and an argmax": lambda key, params: jnp.argmax(
        jax.random.normal(key, (128, 16), B).astype(F) @ normal(6, 16, 512), 1
    )[:, None].astype(F),
    "permutation": lambda key, params: jax.random.permutation(key, 512)[:128, None] / 512,
}  # fmt: skip


@pytest.mark.parametrize("name", names(FINE_DRAWS, default={"dropout"}))
def test_diagnose_step_finds_nothing_in_random_numbers_that_are_fine_enough(name):
    assert jmpscale.diagnose_step(with_weights(FINE_DRAWS[name]))(PARAMS, jax.random.key(1)).findings == ()


# --- Counters in half precision. ---


def with_counter(count, n, **others):
    """Returns a step that has a counter, or another leaf, in its state, and the state."""

    def step(state, x):
        loss, grads = jax.value_and_grad(lambda params: jnp.mean((model(params, x) - jnp.sin(x)) ** 2))(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return state | {"params": params} | count(state, grads, loss, x), loss

    return step, {"params": PARAMS, "n": n} | others


def plus_one(state, grads, loss, x):
    return {"n": state["n"] + 1}


def gated(state, grads, loss, x):
    finite = jmpscale.all_finite(grads)
    return {"n": jmpscale.apply_if(finite, lambda n: n + 1, state["n"])}


def wide_sum(state, grads, loss, x):
    return {"n": (state["n"].astype(F) + len(x)).astype(state["n"].dtype)}


def kahan(state, grads, loss, x):
    y = 1 - state["c"]
    n = state["n"] + y
    return {"n": n, "c": (n - state["n"]) - y}


COUNTERS = {  # a step and its state, the value at which the counter stops, and the dtype
    "plus one": (*with_counter(plus_one, B(0)), 256, "bfloat16"),
    "later": (*with_counter(plus_one, B(100)), 256, "bfloat16"),
    "float16": (*with_counter(plus_one, H(0)), 2048, "float16"),
    "several": (*with_counter(plus_one, jnp.zeros(3, B)), 256, "bfloat16"),
    "gated": (*with_counter(gated, B(1)), 256, "bfloat16"),
    "by the batch size": (*with_counter(wide_sum, B(0)), 256 * 128, "bfloat16"),
    "by a fraction": (*with_counter(lambda s, *_: {"n": s["n"] + B(0.01)}, B(0)), 4, "bfloat16"),
    "down": (*with_counter(lambda s, *_: {"n": s["n"] - 1}, B(0)), -256, "bfloat16"),
    "that begins again too late": (
        *with_counter(lambda s, *_: {"n": jnp.where(s["n"] < 1000, s["n"] + 1, 0)}, B(0)),
        256,
        "bfloat16",
    ),
}


@pytest.mark.parametrize("name", names(COUNTERS, default={"plus one"}))
def test_diagnose_step_predicts_where_a_counter_stops(name):
    step, state, stop, dtype = COUNTERS[name]
    diagnosis = jmpscale.diagnose_step(step)(state, X)
    assert diagnosis.findings == (jmpscale.DiagnosisFinding(Kind.STALLED, ("state['n']",), dtype=dtype),)
    assert f"state['n'] will stop at {stop}: " in diagnosis.summary


NO_COUNTERS = {
    "float32": with_counter(plus_one, F(0)),
    "integer": with_counter(plus_one, jnp.int32(0)),
    "begins again": with_counter(lambda s, *_: {"n": jnp.where(s["n"] < 10, s["n"] + 1, 0)}, B(0)),
    "saturates": with_counter(lambda s, *_: {"n": jnp.minimum(s["n"] + 1, 100)}, B(0)),
    "counts down": with_counter(lambda s, *_: {"n": jnp.maximum(s["n"] - 1, 0)}, B(100)),
    "counts down below zero": with_counter(lambda s, *_: {"n": s["n"] - 1}, B(100)),
    "Kahan summation": with_counter(kahan, B(0), c=B(0)),
    "sum of losses": with_counter(lambda s, grads, loss, x: {"n": s["n"] + loss.astype(B)}, B(0)),
    "sum of gradients": with_counter(lambda s, grads, *_: {"n": s["n"] + grads["a"].sum().astype(B)}, B(0)),
    "sum of data": with_counter(lambda s, grads, loss, x: {"n": s["n"] + x[0, 0].astype(B)}, B(0)),
    "average of ones": with_counter(lambda s, *_: {"n": B(0.9) * s["n"] + B(0.1)}, B(0)),
}


@pytest.mark.parametrize("name", names(NO_COUNTERS, default={"begins again", "sum of losses", "sum of gradients"}))
def test_diagnose_step_finds_nothing_in_what_does_not_count_or_does_not_stop(name):
    step, state = NO_COUNTERS[name]
    assert jmpscale.diagnose_step(step)(state, X).findings == ()


# --- Integers that are indices. ---

TABLE = jnp.cos(jnp.arange(512.0)[:, None] / 40 + jnp.arange(16.0)[None])
ONES = jnp.ones((512, 1))
LONG = normal(7, 512, 16)


def with_indices(lookup):
    """Returns the loss of a program that reads a table at indices, and has a moderate rounding error elsewhere."""

    def loss_fn(params):
        return regression(params, LONG + lookup(params), jnp.sin(LONG))

    return loss_fn


def positions(params):
    return TABLE[(jnp.cumsum(ONES.astype(B), 0) - 1).astype(int)[:, 0]]  # fault


def positions_through_float32(params):
    counts = jnp.cumsum(ONES.astype(B), 0)  # fault
    return TABLE[jnp.round(counts.astype(F) - 1).astype(jnp.uint32)[:, 0]]


def one_hot(params):
    index = (jnp.cumsum(ONES.astype(B), 0) - 1).astype(int)[:, 0]  # fault
    return jax.nn.one_hot(index, 512) @ TABLE


def gathered(params):
    index = jax.jit(lambda ones: (jnp.cumsum(ones.astype(B), 0) - 1).astype(int))(ONES)  # fault
    return jnp.take_along_axis(TABLE, index, 0, mode="clip")


def scattered(params):
    index = (jnp.cumsum(ONES.astype(B), 0) - 1).astype(int)[:, 0]  # fault
    return jnp.zeros_like(TABLE).at[index].add(TABLE)


def in_a_loop(params):
    def row(_, i):
        index = ((i + jnp.arange(16)).astype(B) * B(1.5)).astype(int)  # fault
        return None, TABLE[jnp.minimum(index, 511), jnp.arange(16)]

    return jax.lax.scan(row, None, jnp.arange(512))[1]


WRONG_INDICES = {"positions": positions, "through float32": positions_through_float32, "one hot": one_hot}
WRONG_INDICES |= {"gathered": gathered, "scattered": scattered, "in a loop": in_a_loop}


@pytest.mark.parametrize("name", names(WRONG_INDICES, default={"positions"}))
def test_diagnose_step_names_lines_that_make_indices_wrong(name):
    diagnosis = jmpscale.diagnose_step(sgd(with_indices(WRONG_INDICES[name])))(PARAMS)
    (finding,) = diagnosis.findings
    line = place(WRONG_INDICES[name]).replace("(in_a_loop)", "(row)")
    assert (finding.kind, finding.lines, finding.dtype) == (Kind.WRONG_INDICES, (line,), "bfloat16")
    assert set(finding.names) <= {"params['a']", "params['b']"}
    assert finding.error == diagnosis.gradient_error
    assert finding.error_then < 0.01
    assert diagnosis.lines == (line,)


ROUTER = normal(8, 16, 1) + normal(9, 16, 4, scale=0.01)  # whose scores are nearly equal


def routed(params, dtype):
    """Returns the tokens of experts that nearly equal scores choose, by the positions of the tokens in an expert."""
    scores = LONG.astype(B) @ ROUTER.astype(B)
    chosen = jax.nn.one_hot(jnp.argmax(scores, 1), 4, dtype=dtype)
    position = jnp.sum((jnp.cumsum(chosen, 0) - 1) * chosen, 1).astype(int)
    return TABLE[position]


def fake_quantized(params):
    hidden = LONG.astype(B) @ params["a"].astype(B)
    scale = jnp.abs(hidden).max() / 127
    rounded = jnp.round(hidden / scale).astype(jnp.int8).astype(B) * scale
    return (hidden + jax.lax.stop_gradient(rounded - hidden)).astype(F)[:, :16]


def interpolated(params):
    position = (jnp.abs(jnp.sin(LONG[:, 0])) * 62).astype(B)
    index = jnp.floor(position).astype(int)
    weight = (position - jnp.floor(position)).astype(F)[:, None]
    return TABLE[index] * (1 - weight) + TABLE[index + 1] * weight


RIGHT_INDICES = {
    "exact positions": lambda params: TABLE[(jnp.cumsum(ONES.astype(B)[:200], 0) - 1).astype(int)[:, 0]].sum(0)[None],
    "positions in float32 of chosen experts": lambda params: routed(params, F),
    "exact positions of chosen experts": lambda params: routed(params, B),
    "fake quantization": fake_quantized,
    "interpolation": interpolated,
    "nearest code": lambda params: TABLE[jnp.argmin(((LONG[:, None] - TABLE[None, :64]) ** 2).astype(B).sum(2), 1)],
    "few bins": lambda params: TABLE[jnp.floor(jax.nn.sigmoid(LONG[:, 0].astype(B)) * 16).astype(int)],
    "one index": lambda params: TABLE[(LONG[0, 0].astype(B) * B(0.4) + B(300)).astype(int)][None],
}  # fmt: skip


@pytest.mark.parametrize(
    "name", names(RIGHT_INDICES, default={"positions in float32 of chosen experts", "fake quantization"})
)
def test_diagnose_step_finds_nothing_in_integers_that_may_differ(name):
    assert jmpscale.diagnose_step(sgd(with_indices(RIGHT_INDICES[name])))(PARAMS).findings == ()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_diagnose_step_finds_what_enters_on_several_devices(kind):
    mesh = meshes.make_mesh(getattr(jax.sharding.AxisType, kind), data=4)
    sharding = jax.NamedSharding(mesh, jax.P("data"))

    def step(state, x, table):
        def loss_fn(params):
            index = (x[:, 0].astype(B) * B(90)).astype(int)
            position = TABLE.at[index].get(out_sharding=jax.P("data")) if kind == "Explicit" else TABLE[index]
            signal = table.astype(F)
            return jnp.mean((model(params, x + position) / jnp.sqrt(1 - signal + 1e-5) - 1) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "n": state["n"] + 1}, loss

    x = jnp.linspace(0, 5, 512 * 16).reshape(512, 16)
    table = SCHEDULE[:512, None].astype(B)
    with jax.set_mesh(mesh):
        state = jax.device_put({"params": PARAMS}, jax.NamedSharding(mesh, jax.P()))
        x, table, n = (jax.device_put(x, sharding) for x in (x, table, jnp.zeros(4, B)))
        findings = jmpscale.diagnose_step(step)(state | {"n": n}, x, table).findings
    assert [x.kind for x in findings] == [Kind.WRONG_INDICES, Kind.STALLED, Kind.ROUNDED_INPUT]
