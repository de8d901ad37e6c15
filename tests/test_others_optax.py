"""with_loss_scaling around everything that optax calls a transformation, with every extra argument that it takes.

The tables below are compared with optax's own modules: what a new version adds shows here as missing.
"""

import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jmpscale

pytestmark = [
    pytest.mark.usefixtures("standard_promotion", "standard_ranks"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),  # what optax is about to drop is listed too
]


@pytest.fixture
def standard_ranks():
    """Allows silent promotion of ranks: optax relies on it."""
    with jax.numpy_rank_promotion("allow"):
        yield


RNG = np.random.default_rng(0)
X, Y = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((8, 4), (8, 2)))
W = jnp.asarray(RNG.standard_normal((4, 2)) * 0.5, jnp.float32)
PARAMS = {"w": W, "b": jnp.array([0.5, -0.25])}


def _loss(params):
    return jnp.mean((jnp.tanh(X @ params["w"]) + params["b"][None] - Y) ** 2)


def _around_adam(wrapper, **kwargs):
    """A wrapper of optax around an inner transformation."""
    return lambda: wrapper(optax.adam(1e-2), **kwargs)


# Called with the learning rate alone.
RATE_ONLY = {
    optax: "adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw "
    "novograd optimistic_adam optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum "
    "sm3 yogi scale_by_rprop scale_by_learning_rate",
    contrib: "acprop ademamix adopt cocob dadapt_adamw dog dowg madgrad momo momo_adam muon prodigy "
    "schedule_free_adamw schedule_free_sgd simplified_ademamix scale_by_madgrad",
}
# Called with nothing.
NO_ARGUMENT = {
    optax: "centralize identity keep_params_nonnegative normalize_by_update_norm scale_by_adadelta scale_by_adam "
    "scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_belief scale_by_distance_over_gradients scale_by_lbfgs "
    "scale_by_lion scale_by_novograd scale_by_optimistic_gradient scale_by_param_block_norm scale_by_param_block_rms "
    "scale_by_polyak scale_by_radam scale_by_rms scale_by_rss scale_by_sign scale_by_sm3 scale_by_stddev "
    "scale_by_trust_ratio scale_by_yogi set_to_zero zero_nans lbfgs polyak_sgd",
    contrib: "normalize scale_by_acprop scale_by_ademamix scale_by_adopt scale_by_cocob scale_by_simplified_ademamix",
}
OTHERS = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.01),
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.1, mask={"w": True, "b": False}),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, key=jax.random.key(0)),
    "apply_every": lambda: optax.apply_every(2),
    "apply_if_finite": _around_adam(optax.apply_if_finite, max_consecutive_errors=2),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.cosine_decay_schedule(1e-2, 3))),
    "clip": lambda: optax.clip(0.01),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.01),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.1),
    "conditionally_mask": _around_adam(optax.conditionally_mask, should_transform_fn=lambda step: step % 2 == 0),
    "conditionally_transform": _around_adam(
        optax.conditionally_transform,
        should_transform_fn=lambda step, value, **_: (step > 0) & (value < 10),
        forward_extra_args=True,
    ),
    "ema": lambda: optax.ema(0.9),
    "flatten": _around_adam(optax.flatten),
    "freeze": lambda: optax.freeze({"w": False, "b": True}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 0.0, 3)),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.sgd)(1e-2, momentum=0.9),
    "lookahead": _around_adam(optax.lookahead, sync_period=2, slow_step_size=0.5),
    "masked": lambda: optax.chain(optax.masked(optax.adam(1e-2), {"w": True, "b": False}), optax.scale(0.5)),
    "measure_with_ema": lambda: optax.measure_with_ema(optax.tree.norm, 0.9),
    "monitor": lambda: optax.monitor({"norm": optax.tree.norm, "mean": optax.measure_with_ema(optax.tree.norm, 0.9)}),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.1)), ("step", optax.adam(1e-2))),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=0),
    "partition": lambda: optax.partition({"a": optax.adam(1e-2), "b": optax.sgd(1e-2)}, {"w": "a", "b": "b"}),
    "scale": lambda: optax.scale(-0.1),
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10, store_grad=True)
    ),
    "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "scale_by_schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, 4)),
    "scale_by_zoom_linesearch": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(10)),
    "selective_transform": _around_adam(optax.selective_transform, freeze_mask={"w": False, "b": True}),
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
    "stateless": lambda: optax.stateless(lambda updates, params: jax.tree.map(lambda u, p: u - p, updates, params)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda update, param: update - param),
    "trace": lambda: optax.trace(0.9, nesterov=True),
    "with_extra_args_support": _around_adam(optax.with_extra_args_support),
    "contrib.differentially_private_aggregate": lambda: contrib.differentially_private_aggregate(
        0.5, 1.0, key=jax.random.key(0)
    ),
    "contrib.dpsgd": lambda: contrib.dpsgd(1e-2, 0.5, 1.0, seed=0, momentum=0.9),
    "contrib.galore": lambda: contrib.galore(1e-2, rank=2, update_proj_gap=2, weight_decay=0.1),
    "contrib.hutchinson_estimator_diag_hessian": lambda: contrib.hutchinson_estimator_diag_hessian(jax.random.key(0)),
    "contrib.mechanize": _around_adam(contrib.mechanize),
    "contrib.reduce_on_plateau": lambda: optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=1)),
    "contrib.sam": lambda: contrib.sam(
        optax.adam(1e-2), optax.chain(contrib.normalize(), optax.sgd(0.1)), opaque_mode=True
    ),
    "contrib.sam, transparent": lambda: contrib.sam(optax.adam(1e-2), optax.sgd(0.1), sync_period=2),
    "contrib.scale_by_galore": lambda: contrib.scale_by_galore(rank=2, update_proj_gap=2),
    "contrib.scale_by_muon": lambda: contrib.scale_by_muon(
        weight_dimension_numbers={"w": contrib.MuonDimensionNumbers()}
    ),
    "contrib.schedule_free": _around_adam(contrib.schedule_free, learning_rate=1e-2),
    "contrib.sophia": lambda: contrib.sophia(1e-2, update_interval=2),
    "contrib.split_real_and_imaginary": _around_adam(contrib.split_real_and_imaginary),
}
# Names that lead nowhere new: one function under two names, what cannot be called, and what only looks like one.
NOT_ONE = {
    "GradientTransformation": "the type of them all",
    "GradientTransformationExtraArgs": "the type of them all",
    "init_empty_state": "a part of one",
    "WrappedSchedule": "a schedule with a state; for inject_stateful_hyperparams",
    "skip_large_updates": "a condition for MultiSteps",
    "skip_not_finite": "a condition for MultiSteps",
    "per_example_global_norm_clip": "clips a tree; differentially_private_aggregate is the transformation",
    "per_example_layer_norm_clip": "clips a tree",
    "unitwise_clip": "clips an array",
    "unitwise_norm": "a norm",
    "value_and_grad_from_state": "gradients from a line search's state: see test_gradients_from_a_line_search",
    "contrib.schedule_free_eval_params": "parameters from a state: see test_parameters_of_schedule_free",
}
# Where optax keeps functions that transform no gradients.
OTHER_MODULES = (
    "optax.losses", "optax.microbatching", "optax.projections", "optax.schedules._join", "optax.schedules._schedule",
    "optax.tree_utils", "optax._src.linear_algebra", "optax._src.numerics", "optax._src.update", "optax._src.utils",
    "collections", "typing",
)  # fmt: skip


def _cases():
    cases = dict(OTHERS)
    for prefix, module in (("", optax), ("contrib.", contrib)):
        for name in RATE_ONLY[module].split():
            cases[prefix + name] = lambda module=module, name=name: getattr(module, name)(1e-2)
        for name in NO_ARGUMENT[module].split():
            cases[prefix + name] = lambda module=module, name=name: getattr(module, name)()
    return dict(sorted(cases.items()))


CASES = _cases()


def _listed():
    """The names of all functions, and of classes that update, in optax, optax.transforms and optax.contrib."""
    names = {}
    for prefix, module in (("contrib.", contrib), ("", optax.transforms), ("", optax)):
        for name in dir(module):
            found = None if name.startswith("_") else getattr(module, name)
            if not callable(found) or (inspect.isclass(found) and not hasattr(found, "update")):
                continue
            if not getattr(found, "__module__", "").startswith(OTHER_MODULES):
                names.setdefault(found, prefix + name)
    return set(names.values())


def test_the_tables_hold_all_that_optax_has():
    assert _listed() == {name.partition(",")[0] for name in CASES} | set(NOT_ONE)


EXTRA_ARGS = {
    "value": lambda value, grads: value,
    "grad": lambda value, grads: grads,
    "value_fn": lambda value, grads: _loss,
    "obj_fn": lambda value, grads: _loss,
    "grad_fn": lambda value, grads: lambda params, i: jax.grad(_loss)(params),
}


def _extra_args(tx):
    """The extra arguments that a transformation, or one inside it, accepts: found in its functions and closures."""
    found, seen, waiting = set(), set(), [tx]
    while waiting:
        at = waiting.pop()
        if id(at) in seen or isinstance(at, (str, bytes, types.ModuleType, type, jax.Array, np.ndarray)):
            continue
        seen.add(id(at))
        if isinstance(at, types.FunctionType):
            names = [n for n, p in inspect.signature(at).parameters.items() if n != "self" and p.kind != p.VAR_KEYWORD]
            if names[1:2] in (["state"], ["opt_state"]) and names[2:3] == ["params"]:
                found |= set(names[3:])
            waiting += [cell.cell_contents for cell in at.__closure__ or ()]
        elif isinstance(at, types.MethodType):
            waiting += [at.__func__, vars(at.__self__)]
        elif isinstance(at, dict):
            waiting += at.values()
        elif isinstance(at, (tuple, list)):
            waiting += at
        elif hasattr(at, "update"):
            waiting.append(at.update)
    return found


def _example_loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - y) ** 2)


def _complex_loss(params):
    return jnp.mean(jnp.abs(params["z"] - (1 + 2j)) ** 2)


class Problem:
    """What a transformation is to minimise: the parameters, the loss, and how the gradients come about."""

    def __init__(self, name):
        self.params, self.loss = PARAMS, _loss
        self.per_example = name in ("contrib.differentially_private_aggregate", "contrib.dpsgd")
        if name in ("contrib.scale_by_muon", "contrib.scale_by_galore"):  # matrices alone
            self.params = {"w": W}
            self.loss = lambda params: _loss({**PARAMS, **params})
        elif name == "contrib.split_real_and_imaginary":
            self.params, self.loss = {"z": jnp.array([0.5 - 1j, 2 + 0.25j])}, _complex_loss

    def value_and_grad(self, params, state=None):
        """The loss and its gradients; from a scaled backward pass if a state that holds a scaler is given."""
        transform, first = (jax.value_and_grad, ()) if state is None else (jmpscale.value_and_grad, (state,))
        if not self.per_example:
            return transform(self.loss)(*first, params)
        axes = (None,) * (1 + len(first)) + (0, 0)
        values, grads = jax.vmap(transform(_example_loss), axes)(*first, params, X, Y)
        return jnp.mean(values), grads


def _program(name, tx, scaled):
    """Some steps of a transformation, jitted: what parameters, state and updates are after each.

    Compiled without LLVM's optimizations: these join a product and a sum into one operation that rounds once, in one
    program here and in another there, and then two programs that do the same arithmetic differ in the last bit.
    """
    accepted = _extra_args(tx) | ({"value"} if name == "conditionally_transform" else set())  # by our own function
    problem, extra = Problem(name), {arg: EXTRA_ARGS[arg] for arg in accepted}

    def step(carry, overflow):
        params, state = carry
        value, grads = problem.value_and_grad(params, state if scaled else None)
        grads = jax.tree.map(lambda g: jnp.where(overflow, jnp.full_like(g, jnp.inf), g), grads)
        extra_args = {arg: make(value, grads) for arg, make in extra.items()}

        def update():
            return tx.update(grads, state, params, **extra_args)

        if scaled:
            updates, state = update()
        else:  # in a branch too: fused with what stands around it, the update may differ in the last bit
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(update)[0])
            updates, state = jax.lax.cond(overflow, lambda before=state: (zeros, before), update)
        params = optax.apply_updates(params, updates)
        # The gradients are returned too, else the compiler computes them otherwise where some of them are not used.
        return (params, state), (params, state, updates, value, grads)

    def steps(params, state, overflows):
        return jax.lax.scan(step, (params, state), overflows)[1]

    return jax.jit(steps, compiler_options={"xla_backend_optimization_level": 0})


def _bits(tree):
    def one(x):
        return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return [(str(x.dtype), x.shape, one(x).tobytes()) for x in jax.tree.leaves(tree)]


def _at(step, tree):
    return jax.tree.map(lambda x: x[step], tree)


def _start(name, inner, params):
    """The state to start from: `monitor` has one of a fixed structure only after an update."""
    state = inner.init(params)
    return inner.update(params, state, params)[1] if name == "monitor" else state


OVERFLOWS = jnp.array([False, False, True, False])
APPLIED = (0, 1, 3)

# These run with the README's command, all in CI: one of each kind, with every extra argument, with states and updates
# of every form.
QUICK = {
    "adafactor", "conditionally_transform", "lbfgs", "MultiSteps", "contrib.sam", "contrib.sophia",
}  # fmt: skip


# Their updates do not have the structure of the gradients: pairs of fast and slow parameters, and a measurement.
REFUSED = ("lookahead", "measure_with_ema")

# In the last bits these may differ. A sum over examples: the compiler orders what comes out of a product otherwise in
# another program. An inverse root: it approximates several at once otherwise than one by one.
ROUNDED = {"contrib.differentially_private_aggregate", "contrib.dpsgd", "adagrad", "scale_by_rss"}


def _assert_same(name, got, expected):
    if name not in ROUNDED:
        assert _bits(got) == _bits(expected)
        return
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
        else:
            assert _bits(x) == _bits(y)


@pytest.mark.parametrize(
    "name",
    [
        n if n in QUICK else pytest.param(n, marks=[pytest.mark.full, pytest.mark.once])
        for n in CASES
        if n not in REFUSED
    ],
)
def test_with_loss_scaling_applies_the_same_steps_and_skips_without_a_change(name):
    inner, params = CASES[name](), Problem(name).params
    plain = _program(name, inner, scaled=False)(params, _start(name, inner, params), jnp.zeros(len(APPLIED), bool))
    tx = jmpscale.with_loss_scaling(inner)
    program = _program(name, tx, scaled=True)
    for scaler in (jmpscale.static(1.0), jmpscale.static(2.0**16)):
        start = tx.init(params)._replace(scaler=scaler, inner_state=_start(name, inner, params))
        after, state, updates, value, grads = program(params, start, OVERFLOWS)
        for step, at in enumerate(APPLIED):
            _assert_same(name, _at(at, (after, state.inner_state, updates, value, grads)), _at(step, plain))
        assert _bits(_at(2, (after, state.inner_state))) == _bits(_at(1, (after, state.inner_state)))
        assert all((x == 0).all() and np.signbit(x.real).all() for x in jax.tree.leaves(_at(2, updates)))
        assert int(state.scaler.skipped[-1]) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_with_loss_scaling_refuses_updates_of_another_structure(name):
    tx = jmpscale.with_loss_scaling(CASES[name]())
    params = optax.LookaheadParams.init_synced(PARAMS) if name == "lookahead" else PARAMS
    with pytest.raises(TypeError, match=r"inner must return updates with the structure of the gradients, .*, got "):
        jax.jit(tx.update)(PARAMS, tx.init(params), params)


def test_with_loss_scaling_refuses_a_state_that_changes_its_structure():
    tx = jmpscale.with_loss_scaling(CASES["monitor"]())
    refused = (
        r"(?s)inner must return its state with the same structure, but .*'(mean|norm)'.*outside: "
        r"optax.chain\(with_loss_scaling"
    )
    with pytest.raises(TypeError, match=refused):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    around = optax.chain(jmpscale.with_loss_scaling(optax.sgd(1.0)), CASES["monitor"]())
    state = around.init(PARAMS)
    for _ in range(2):
        _, state = jax.jit(around.update)(PARAMS, state, PARAMS)


@pytest.mark.full
@pytest.mark.once
def test_with_loss_scaling_takes_gradients_from_the_state_of_a_line_search():
    """Neither those that the search has kept in its state nor new ones are scaled."""
    inner = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10, store_grad=True))

    def program(tx):
        def step(carry, _):
            params, state = carry
            value, grads = optax.value_and_grad_from_state(_loss)(params, state=state)
            updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=_loss)
            params = optax.apply_updates(params, updates)
            return (params, state), (params, value)

        return jax.jit(
            lambda: jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), None, 3)[1],
            compiler_options={"xla_backend_optimization_level": 0},
        )

    assert _bits(program(jmpscale.with_loss_scaling(inner))()) == _bits(program(inner)())
