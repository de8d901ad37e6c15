"""diagnose_step judges each of several scalers by itself, and a loss without a scaler by the factors that fit."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jmpscale

from arrays import normal
from tables import rows

pytestmark = pytest.mark.full

F, H = jnp.float32, jnp.float16
X = normal(0, 64, 16)
Y = jnp.tanh(X @ normal(1, 16, 4))
P = {"a": normal(2, 16, 32, scale=0.25), "b": normal(3, 32, 4, scale=0.15)}
tree_map = jax.tree.map


def network(p, x):
    p = jmpscale.cast(p, H)
    return (jnp.tanh(x.astype(H) @ p["a"]) @ p["b"]).astype(F)


def mean_square(p, factor):
    return factor * jnp.mean((network(p, X) - Y) ** 2)


def descend(p, grads, rate=1e-3):
    return tree_map(lambda p, g: p - rate * g, p, grads)


def kinds(diagnosis):
    return [x.kind.name for x in diagnosis.findings]


# --- Several scalers. ---

LARGE, SMALL = 30.0, 1e-9  # the losses: scales from 2^-15 to 2^12, and from 2^20 to 2^46 fit


def state_of(large, small):
    """Returns the state of two losses whose scalers have these exponents."""
    scalers = jmpscale.dynamic(2.0**large), jmpscale.dynamic(2.0**small, max_scale=2.0**60)
    return {"large": P, "small": P, "sl": scalers[0], "ss": scalers[1]}


def loss_step(state, name, scaler, loss_fn, rate):
    """Returns the new parameters of a loss, and its new scaler."""
    loss, grads = jmpscale.value_and_grad(loss_fn)(state[scaler], state[name])
    finite = jmpscale.all_finite((loss, grads))
    new = jmpscale.select_tree(finite, descend(state[name], grads, rate), state[name])
    return new, jmpscale.update(state[scaler], finite, loss=loss), loss


def functional(state):
    large, sl, loss = loss_step(state, "large", "sl", lambda p: mean_square(p, LARGE), 1e-3)
    small, ss, _ = loss_step(state, "small", "ss", lambda p: mean_square(p, SMALL), 1e6)
    return {"large": large, "small": small, "sl": sl, "ss": ss}, loss


def in_sequence(state):
    """The second loss reads the parameters that the first one has changed."""
    large, sl, loss = loss_step(state, "large", "sl", lambda p: mean_square(p, LARGE), 1e-3)

    def second(p):
        return mean_square(p, SMALL) + SMALL * jnp.mean(network(large, X) * network(p, X))

    small, ss, _ = loss_step(state, "small", "ss", second, 1e6)
    return {"large": large, "small": small, "sl": sl, "ss": ss}, loss


def ungated(state):
    """As `in_sequence`, but no step is skipped, so an infinite gradient of the first loss reaches the second one."""
    loss, grads = jmpscale.value_and_grad(lambda p: mean_square(p, LARGE))(state["sl"], state["large"])
    large = descend(state["large"], grads)
    second = jmpscale.value_and_grad(lambda p: SMALL * jnp.mean((network(p, X) - 0.1 * network(large, X)) ** 2))
    small = descend(state["small"], second(state["ss"], state["small"])[1], 1e6)
    return {**state, "large": large, "small": small}, loss


def by_hand(state):
    """Divides the gradients without a function of jmpscale."""

    def grads_of(name, scaler, factor):
        scale = state[scaler].loss_scale
        grads = jax.grad(lambda p: scale * mean_square(p, factor))(state[name])
        return tree_map(lambda g: g / scale, grads)

    large, small = grads_of("large", "sl", LARGE), grads_of("small", "ss", SMALL)
    new = {"large": descend(state["large"], large), "small": descend(state["small"], small, 1e6)}
    return {**state, **new}, mean_square(state["large"], LARGE)


def in_a_loop(state):
    def body(state, _):
        return functional(state)

    state, losses = jax.lax.scan(body, state, None, length=2)
    return state, losses[0]


OPTIMIZER = jmpscale.with_loss_scaling(optax.sgd(1e-3))


def wrapped(state):
    """Has its scalers in the states of optimizers, which `wrapped_state` creates."""
    new, loss = {}, jnp.float32(0)
    for name, factor in (("l", LARGE), ("s", SMALL)):
        opt_state, params = state[name]
        loss, grads = jmpscale.value_and_grad(lambda p, factor=factor: mean_square(p, factor))(opt_state, params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params, value=loss)
        new[name] = opt_state, optax.apply_updates(params, updates)
    return new, loss


def wrapped_state(large, small):
    plain, opt_state = state_of(large, small), OPTIMIZER.init(P)
    scalers = {"l": plain["sl"], "s": plain["ss"]}
    return {name: (jmpscale.replace_scaler(opt_state, x), P) for name, x in scalers.items()}


def static_state(large, small):
    return state_of(large, small) | {"sl": jmpscale.static(2.0**large), "ss": jmpscale.static(2.0**small)}


def three_state(large, small):
    return state_of(large, small) | {"unused": jmpscale.dynamic()}


def three(state):
    new, loss = functional(state)
    return {**new, "unused": state["unused"]}, loss


def with_copies(state):
    """The scaler of each loss, and another copy of it that unscales."""
    new = {}
    for name, scaler, factor, rate in (("large", "sl", LARGE, 1e-3), ("small", "ss", SMALL, 1e6)):
        grads = jax.grad(lambda p, x=state[scaler], c=factor: jmpscale.scale(x, mean_square(p, c)))(state[name])
        new[name] = descend(state[name], jmpscale.unscale(state["copies"][scaler], grads), rate)
    return {**state, **new}, mean_square(state["large"], LARGE)


def state_with_copies(large, small):
    state = state_of(large, small)
    return state | {"copies": {name: tree_map(jnp.copy, state[name]) for name in ("sl", "ss")}}


def with_two_terms(state):
    """The first loss is a sum of two, which copies of one scaler scale."""
    copy = state["copies"]["sl"]

    def loss_fn(p):
        return jmpscale.scale(state["sl"], mean_square(p, LARGE)) + jmpscale.scale(copy, mean_square(p, LARGE / 3))

    grads = jmpscale.unscale(state["sl"], jax.grad(loss_fn)(state["large"]))
    small, ss, loss = loss_step(state, "small", "ss", lambda p: mean_square(p, SMALL), 1e6)
    return {**state, "large": descend(state["large"], grads), "small": small, "ss": ss}, loss


SEVERAL = {  # a step, the function that creates its state, and the names of the two scalers
    "functional": (functional, state_of, "state['sl']", "state['ss']"),
    "compiled": (jax.jit(functional), state_of, "state['sl']", "state['ss']"),
    "wrapper": (wrapped, wrapped_state, "state['l'][0].scaler", "state['s'][0].scaler"),
    "in sequence": (in_sequence, state_of, "state['sl']", "state['ss']"),
    "without a gate": (ungated, state_of, "state['sl']", "state['ss']"),
    "by hand": (by_hand, state_of, "state['sl']", "state['ss']"),
    "in a loop": (in_a_loop, state_of, "state['sl']", "state['ss']"),
    "static": (functional, static_state, "state['sl']", "state['ss']"),
    "a third one": (three, three_state, "state['sl']", "state['ss']"),
    "copies": (with_copies, state_with_copies, "state['sl']", "state['ss']"),
    "two terms": (with_two_terms, state_with_copies, "state['sl']", "state['ss']"),
}
UNFIT = {  # the exponents of the two scales, and the findings of them, the worst one first
    "too small": (8, 8, [("SMALL_SCALE", 1)]),
    "too large": (20, 36, [("LARGE_SCALE", 0)]),
    "both": (20, 8, [("LARGE_SCALE", 0), ("SMALL_SCALE", 1)]),
}
CASES = {f"{spelling}, {fault}": (spelling, fault) for spelling in SEVERAL for fault in UNFIT}


def without_copies(name):
    """Returns the name of the scaler of which a copy has this name."""
    return name.replace("['copies']", "")


def with_scaler(state, name, scaler):
    """Returns a state with another scaler at a path such as `state['sl']`."""

    def replaced(path, x):
        return scaler if without_copies(f"state{jax.tree_util.keystr(path)}") == without_copies(name) else x

    return jax.tree_util.tree_map_with_path(replaced, state, is_leaf=lambda x: isinstance(x, jmpscale.ScalerState))


@pytest.mark.parametrize("case", rows(CASES))
def test_diagnose_step_names_the_scaler_of_several_that_does_not_fit(case):
    step, create, *paths = SEVERAL[case[0]]
    *exponents, expected = UNFIT[case[1]]
    state = create(*exponents)
    found = jmpscale.diagnose_step(step)(state)
    assert [(x.kind.name, paths.index(without_copies(x.names[0]))) for x in found.findings] == expected
    worst = expected[0][1]
    assert found.loss_scale == 2.0 ** exponents[worst]
    assert not found.fitting_scales[0] <= found.loss_scale <= found.fitting_scales[1]
    assert found.scaler is found.findings[0].scaler
    assert found.lines == ()
    for finding in found.findings:
        assert finding.error > 0.5
        assert finding.error_then < 0.02
        assert all(name.startswith(("state['large']", "state['l']")[:2]) for name in finding.names[1:]) == (
            without_copies(finding.names[0]) == paths[0]
        )
        state = with_scaler(state, finding.names[0], finding.scaler)
    assert jmpscale.diagnose_step(step)(state).findings == ()


@pytest.mark.filterwarnings("ignore:each device decides independently")
def test_diagnose_step_of_several_scalers_on_each_device_names_the_one_that_does_not_fit():
    state = tree_map(lambda x: jnp.stack([x] * jax.local_device_count()), state_of(8, 8))
    found = jmpscale.diagnose_step(jax.pmap(functional))(state)
    assert [(x.kind.name, x.names[0]) for x in found.findings] == [("SMALL_SCALE", "state['ss']")]
    assert found.loss_scale == 2.0**8


def test_diagnose_step_of_losses_in_turn_compares_those_of_this_step():
    def step(state, i):
        def large(state):
            p, scaler, loss = loss_step(state, "large", "sl", lambda p: mean_square(p, LARGE), 1e-3)
            return {**state, "large": p, "sl": scaler}, loss

        def small(state):
            p, scaler, loss = loss_step(state, "small", "ss", lambda p: mean_square(p, SMALL), 1e6)
            return {**state, "small": p, "ss": scaler}, loss

        return jax.lax.cond(i % 2 == 0, large, small, state)

    found = [jmpscale.diagnose_step(step)(state_of(4, 8), jnp.int32(i)) for i in (0, 1)]
    assert [kinds(x) for x in found] == [[], ["SMALL_SCALE"]]
    assert ["state['ss']" in x.summary for x in found] == [False, True]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_diagnose_step_of_scalers_that_scale_nothing_is_one_without_a_scaler(dtype):
    def step(state):
        def loss_fn(p):
            return jnp.mean((X.astype(dtype) @ p["a"].astype(dtype)).astype(F) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["large"])
        return {**state, "large": descend(state["large"], grads)}, loss

    found = jmpscale.diagnose_step(step)(static_state(4, 8))
    assert (found.findings, found.loss_scale, found.fitting_scales) == ((), 1.0, None)
    assert kinds(jmpscale.diagnose_step(step)(state_of(4, 8))) == ["UNUSED_SCALER"]


def test_diagnose_step_of_one_scaler_does_not_name_it():
    def step(state):
        state, loss = functional({**state, "ss": jmpscale.static(2.0**36)})
        return {name: x for name, x in state.items() if name != "ss"}, loss

    state = {name: x for name, x in state_of(4, 36).items() if name != "ss"}
    assert jmpscale.diagnose_step(step)(state).summary.startswith("Loss scales from ")


@pytest.mark.parametrize("both", [True, False])
def test_diagnose_step_names_the_calls_of_a_line_that_must_change(both):
    def overflowing(p, factor):
        h = X.astype(H) @ p["a"].astype(H) * H(3e4)
        return factor * jnp.mean(jnp.tanh(h.astype(F) * 1e-6) @ p["b"])

    def step(state):
        losses, new = [overflowing, overflowing if both else mean_square], dict(state)
        values = []
        for name, scaler, loss_fn in zip(("large", "small"), ("sl", "ss"), losses, strict=True):
            new[name], new[scaler], value = loss_step(state, name, scaler, lambda p, f=loss_fn: f(p, 1.0), 1e-3)
            values.append(value)
        return new, values[0]

    found = jmpscale.diagnose_step(step)(state_of(4, 8))
    assert kinds(found) == ["FORWARD_OVERFLOW"] * (2 if both else 1)
    assert {line.partition(",")[0] for line in found.lines} == {found.lines[0].partition(",")[0]}
    assert found.scaler is None


# --- Which scaler helps. ---


def overflow_in_the_forward_pass(p):
    h = jnp.tanh(X.astype(H) @ p["a"].astype(H))
    large = h * H(1e5**0.5) * H(1e5**0.5)
    return jnp.mean(jnp.tanh(large.astype(F) * 1e-5))


def of_one_scaler(loss_fn):
    def step(params, scaler):
        loss, grads = jmpscale.value_and_grad(loss_fn)(scaler, params)
        finite = jmpscale.all_finite((loss, grads))
        params = jmpscale.select_tree(finite, descend(params, grads), params)
        return params, jmpscale.update(scaler, finite, loss=loss), loss

    return step


def test_diagnose_step_has_no_scaler_if_one_helps_only_after_an_edit():
    found = jmpscale.diagnose_step(of_one_scaler(overflow_in_the_forward_pass))(P, jmpscale.dynamic(2.0**32))
    assert kinds(found) == ["FORWARD_OVERFLOW"]
    assert found.scaler is None
    assert found.findings[0].scaler.loss_scale < 2.0**32


ROOM = {  # a scaler whose scale is too large, and bits below the largest scale of the one that is advised
    "new": (jmpscale.dynamic(2.0**20), 6),
    "it has grown": (jmpscale.dynamic(2.0**20)._replace(finite_steps=jnp.int32(3)), 2),
    "static": (jmpscale.static(2.0**20), 6),
    "near the largest": (jmpscale.dynamic(2.0**12), 6),
}


@pytest.mark.parametrize("row", rows(ROOM))
def test_diagnose_step_advises_room_for_the_first_steps_if_a_scale_is_too_large(row):
    scaler, room = row
    found = jmpscale.diagnose_step(of_one_scaler(lambda p: mean_square(p, LARGE)))(P, scaler)
    assert math.log2(found.fitting_scales[1] / found.scaler.loss_scale) == room
    assert kinds(found) == (["LARGE_SCALE"] if scaler.loss_scale > found.fitting_scales[1] else [])


# --- A loss without a scaler, or scaled by a number or by another library. ---

TINY = 2.0**-18  # so that a number from 2^8 to 2^35 fits


def tiny(p):
    return mean_square(p, TINY)


def not_scaled(number):
    def step(p):
        loss, grads = jax.value_and_grad(lambda p: mean_square(p, TINY * number))(p)
        return descend(p, grads), loss

    return step, (P,)


def multiplied(number):
    def step(p):
        loss, grads = jax.value_and_grad(lambda p: tiny(p) * number)(p)
        return descend(p, tree_map(lambda g: g / number, grads)), loss / number

    return step, (P,)


def by_scaled_backward(number):
    tx = jmpscale.with_loss_scaling(optax.sgd(1e-3), jmpscale.static(1.0))

    def step(p, opt_state):
        loss, grads = jax.value_and_grad(jmpscale.scaled_backward(tiny, number))(p)
        updates, opt_state = tx.update(grads, opt_state, p, value=loss)
        return optax.apply_updates(p, updates), opt_state, loss

    return step, (P, tx.init(P))


def by_flax(number):
    def step(p, dynamic_scale):
        dynamic_scale, finite, loss, grads = dynamic_scale.value_and_grad(tiny)(p)
        new = descend(p, grads)
        return tree_map(lambda x, y: jnp.where(finite, x, y), new, p), dynamic_scale, loss

    return step, (P, DynamicScale(scale=jnp.float32(number)))


def by_jmp(number):
    def step(p, loss_scale):
        loss, grads = jax.value_and_grad(lambda p: loss_scale.scale(tiny(p)))(p)
        grads = loss_scale.unscale(grads)
        finite = jmp.all_finite(grads)
        new = jmp.select_tree(finite, descend(p, grads), p)
        return new, loss_scale.adjust(finite), loss_scale.unscale(loss)

    return step, (P, jmp.DynamicLossScale(jnp.float32(number)))


def beside_a_scaler(number):
    """Two losses have scalers, and the third one has a number."""

    def step(p, state):
        step_of_number, _ = multiplied(number)
        p, loss = step_of_number(p)
        return p, by_hand(state)[0], loss

    return step, (P, state_of(4, 36))


SPELLINGS = {
    "not scaled": not_scaled,
    "multiplied": multiplied,
    "scaled_backward": by_scaled_backward,
    "flax": by_flax,
    "jmp": by_jmp,
    "beside scalers": beside_a_scaler,
}
NUMBERS = {  # the number, the kind of the finding, and the largest and smallest error
    "far too small": (2.0**-4, "UNDERFLOW", 0.5, 1.0),
    "too small": (2.0**2, "UNDERFLOW", 0.05, 0.5),
    "too large": (2.0**45, "LARGE_SCALE", math.inf, math.inf),
}
OF_NUMBERS = {f"{spelling}, {fault}": (spelling, fault) for spelling in SPELLINGS for fault in NUMBERS}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("case", rows(OF_NUMBERS))
def test_diagnose_step_names_a_number_that_is_too_small_or_too_large(case):
    number, kind, smallest, largest = NUMBERS[case[1]]
    step, args = SPELLINGS[case[0]](number)
    found = jmpscale.diagnose_step(step)(*args)
    (finding,) = found.findings
    assert finding.kind.name == kind
    assert {"p['a']", "p['b']"} >= {*finding.names} != set()
    assert smallest <= finding.error <= largest
    assert finding.error_then < 0.01
    assert (finding.lines, found.lines, finding.scaler) == ((), (), None)
    assert "harmless" not in found.summary
    how = "or by a larger number if it is" if kind == "UNDERFLOW" else "Scale the loss by a smaller number, or with"
    assert how in found.summary
    low, high = re.search(r"factors from 2\^(-?\d+) to 2\^(-?\d+) fit", found.summary).groups()
    assert (math.log2(number) + int(low), math.log2(number) + int(high)) == pytest.approx(fitting_exponents(), abs=1)


@functools.cache
def fitting_exponents():
    """Returns the exponents that fit, as measured with a scaler."""
    return tuple(map(math.log2, jmpscale.diagnose(tiny)(jmpscale.static(2.0**12), P).fitting_scales))


def rounded_steps(p):
    """Loses digits, but not by the range of float16."""
    h = (X.astype(H) @ p["a"].astype(H) * H(0.01) + H(4)).astype(F)
    return jnp.mean(jnp.tanh((h - 4) * 100) ** 2) * 8


def inner_underflow(p):
    """Contains a gradient that underflows, whatever the loss is multiplied by; most of the loss is a constant."""
    inner = jax.grad(lambda x: jnp.mean(network(p, x)) * 2.0**-17)(X[:4])
    return 10 + jnp.mean((inner * 2.0**14) ** 2)


def test_diagnose_step_does_not_call_rounding_an_underflow():
    def step(p):
        loss, grads = jax.value_and_grad(rounded_steps)(p)
        return descend(p, grads), loss

    found = jmpscale.diagnose_step(step)({"a": P["a"]})
    assert found.gradient_error > 0.05
    assert "UNDERFLOW" not in kinds(found)


def test_diagnose_step_names_the_line_of_a_gradient_in_the_loss_that_underflows():
    def step(p):
        loss, grads = jax.value_and_grad(inner_underflow)(p)
        return descend(p, grads), loss

    found = jmpscale.diagnose_step(step)(P)
    assert kinds(found) == ["UNDERFLOW"]
    assert found.lines
    assert found.findings[0].error_then < found.findings[0].error / 2
    assert "factors from" not in found.summary


# --- A reference that changes with the scale. ---


def large_exponentials(p):
    """Sums exponentials of 1e26, whose squares exceed the range of float32 in the backward pass."""
    q, k = ((X @ p[name]).astype(H).astype(F) for name in ("q", "k"))
    e = jnp.exp(q @ k.T / 4)
    return jnp.mean((e @ X / e.sum(1, keepdims=True) - jnp.tanh(X)) ** 2)


def test_diagnose_says_that_the_gradients_in_float32_depend_on_the_scale():
    p = {"q": normal(4, 16, 16, scale=0.9), "k": normal(5, 16, 16, scale=0.9)}
    found = jmpscale.diagnose(large_exponentials)(jmpscale.dynamic(), p)
    assert kinds(found) == ["NOT_COMPARED"]
    assert found.findings[0].names
    assert found.findings[0].error > 0.01
    assert (found.scaler, found.fitting_scales) == (None, None)
    assert found.summary.startswith("In float32, too, the gradients depend on the loss scale: ")
    assert not re.search("too (large|small)", found.summary)


def test_diagnose_of_a_backward_pass_that_clips_large_values_compares_with_small_scales():
    @jax.custom_vjp
    def clip(x):
        return x

    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))
    found = jmpscale.diagnose(lambda w: 1e-3 * jnp.mean(clip(w.astype(H)).astype(F) ** 2))(
        jmpscale.dynamic(2.0**14), jnp.float32(np.linspace(0.5, 1, 8))
    )
    assert kinds(found) == ["LARGE_SCALE"]
