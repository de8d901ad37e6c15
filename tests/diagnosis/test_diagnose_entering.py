"""What enters a step in half precision: arguments, constants, random numbers, counters, and integers made of them."""

import jax
import jax.numpy as jnp
import pytest

import jmpscale

import meshes
from arrays import normal
from diagnosis_programs import fault_line
from tables import names

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("standard_promotion")]

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


@pytest.mark.parametrize("name", names(COARSE))
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


@pytest.mark.parametrize("name", names(COARSE_DRAWS))
@pytest.mark.parametrize("compile_", [lambda f: f, jax.jit], ids=["", "compiled"])
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


@pytest.mark.parametrize("name", names(COUNTERS))
def test_diagnose_step_predicts_where_a_counter_stops(name):
    step, state, stop, dtype = COUNTERS[name]
    diagnosis = jmpscale.diagnose_step(step)(state, X)
    assert diagnosis.findings == (jmpscale.DiagnosisFinding(Kind.STALLED, ("state['n']",), dtype=dtype),)
    assert f"state['n'] will stop at {stop}: " in diagnosis.summary


# --- Integers that are indices. ---

TABLE = jnp.cos(jnp.arange(512.0)[:, None] / 40 + jnp.arange(16.0)[None])
ONES = jnp.ones((512, 1))
LONG = normal(7, 512, 16)


def regression(params, x, y):
    return jnp.mean((model(params, x) - y.astype(F)) ** 2)


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


@pytest.mark.parametrize("name", names(WRONG_INDICES))
def test_diagnose_step_names_lines_that_make_indices_wrong(name):
    diagnosis = jmpscale.diagnose_step(sgd(with_indices(WRONG_INDICES[name])))(PARAMS)
    (finding,) = diagnosis.findings
    line = place(WRONG_INDICES[name]).replace("(in_a_loop)", "(row)")
    assert (finding.kind, finding.lines, finding.dtype) == (Kind.WRONG_INDICES, (line,), "bfloat16")
    assert set(finding.names) <= {"params['a']", "params['b']"}
    assert finding.error == diagnosis.gradient_error
    assert finding.error_then < 0.01
    assert diagnosis.lines == (line,)


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
