"""At home in optax: both bridges, schedules, and where optax equals torch."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import optim
from jdist._errors import Unavailable
from tests.optim.cases import ALGORITHMS, problem
from tests.optim.runs import largest


@pytest.fixture(autouse=True)
def _mixed_dtypes():
    """optax itself divides floats by integer counts, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


EACH = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
LR = 0.01
EQUAL = 1e-13
"""Rounding, 20 steps in float64, relative to a parameter's largest magnitude."""


def run(opt):
    """20 steps in float64, without None."""
    data = problem(31, steps=20, with_none=False)
    params = [jnp.asarray(p) for p in data.params]
    state = opt.init(params)
    for row in data.grads:
        params, state = opt.step(params, [jnp.asarray(g) for g in row], state)
    return params


def difference(ours, tx):
    """The largest difference of a parameter after 20 steps, relative to its size."""
    pairs = zip(run(ours), run(optim.from_optax(tx)), strict=True)
    return max(float(np.max(np.abs(a - b))) / largest([a]) for a, b in pairs)


l2 = optax.add_decayed_weights
SAME = {
    "SGD": (optim.sgd(lr=LR), optax.sgd(LR)),
    "SGD momentum": (optim.sgd(lr=LR, momentum=0.9), optax.sgd(LR, 0.9)),
    "SGD nesterov": (
        optim.sgd(lr=LR, momentum=0.9, nesterov=True),
        optax.sgd(LR, 0.9, nesterov=True),
    ),
    "SGD weight decay": (
        optim.sgd(lr=LR, momentum=0.9, weight_decay=0.1),
        optax.chain(l2(0.1), optax.sgd(LR, 0.9)),
    ),
    "Adam": (optim.adam(lr=LR), optax.adam(LR)),
    "Adam weight decay": (
        optim.adam(lr=LR, weight_decay=0.1),
        optax.chain(l2(0.1), optax.adam(LR)),
    ),
    "AdamW, decay given": (optim.adamw(lr=LR), optax.adamw(LR, weight_decay=1e-2)),
    "Adamax": (optim.adamax(lr=LR), optax.adamax(LR)),
    "Adadelta": (optim.adadelta(lr=1.0), optax.adadelta(1.0, rho=0.9, eps=1e-6)),
    "RMSprop, eps outside": (
        optim.rmsprop(lr=LR),
        optax.rmsprop(LR, decay=0.99, eps_in_sqrt=False),
    ),
    "RMSprop centered momentum, eps outside": (
        optim.rmsprop(lr=LR, centered=True, momentum=0.9),
        optax.chain(
            optax.scale_by_stddev(decay=0.99, eps=1e-8, eps_in_sqrt=False),
            optax.trace(0.9),
            optax.scale(-LR),
        ),
    ),
    "maximize": (
        optim.adam(lr=LR, maximize=True),
        optax.chain(optax.scale(-1.0), optax.adam(LR)),
    ),
}
# With the smallest relative difference that must be seen: each is a different formula.
DIFFERENT = {
    "AdamW, both defaults": (optim.adamw(lr=LR), optax.adamw(LR), 1e-6),
    "Adam weight decay as adamw": (
        optim.adam(lr=LR, weight_decay=0.1),
        optax.adamw(LR, weight_decay=0.1),
        1e-3,
    ),
    "AMSGrad": (optim.adam(lr=LR, amsgrad=True), optax.amsgrad(LR), 1e-5),
    "RMSprop, both defaults": (optim.rmsprop(lr=LR), optax.rmsprop(LR), 1e-2),
    "Adagrad": (
        optim.adagrad(lr=LR),
        optax.adagrad(LR, initial_accumulator_value=0.0, eps=1e-10),
        1e-6,
    ),
    "Adagrad, both defaults": (optim.adagrad(lr=LR), optax.adagrad(LR), 1e-3),
    "NAdam": (optim.nadam(lr=LR), optax.nadam(LR), 1e-5),
    "RAdam": (optim.radam(lr=LR), optax.radam(LR), 1e-12),
    "Rprop": (optim.rprop(lr=LR), optax.rprop(LR), 1e-4),
}


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_where_optax_is_torch(pair):
    """Here jdist's exactness to torch is no advantage over optax."""
    assert difference(*pair) < EQUAL


@pytest.mark.parametrize("case", DIFFERENT.values(), ids=DIFFERENT)
def test_where_optax_is_not_torch(case):
    """A difference that disappears is news for docs/optim.md."""
    *pair, least = case
    assert difference(*pair) > least


def test_what_optax_lacks():
    """Dampening and ASGD; named as gone, should optax gain them."""
    assert not hasattr(optax, "asgd")
    with pytest.raises(TypeError, match="dampening"):
        optax.sgd(LR, 0.9, dampening=0.5)


# --- bridges ---


@EACH
def test_as_optax_makes_the_same_steps(algorithm):
    """p + (new - p) misses new by at most one rounding of each: two a step."""
    options = list(algorithm.golden.values())[-1]
    opt = algorithm(**options)
    data = problem(8, steps=3, with_none=False)
    params = ours = [jnp.asarray(p) for p in data.params]
    tx = optim.as_optax(opt)
    state, our_state = tx.init(params), opt.init(params)
    for row in data.grads:
        grads = [jnp.asarray(g) for g in row]
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        ours, our_state = opt.step(ours, grads, our_state)
    for found, expected in zip(params, ours, strict=True):
        size = largest([expected])
        # Moments that see the parameter through weight decay pass the rounding on.
        np.testing.assert_allclose(found, expected, rtol=0, atol=100 * size * 2.0**-53)


def test_as_optax_in_a_chain_with_none_integers_and_overrides():
    tx = optax.chain(
        optax.clip(1.0), optim.as_optax(optim.sgd(lr=0.5)), optax.scale(2.0)
    )
    params = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(3.0), "n": jnp.array(4)}
    grads = {"w": jnp.array([0.5, 7.0]), "b": None, "n": jnp.array(0)}
    tx_only = optim.as_optax(optim.sgd(lr=0.5))
    updates, _ = tx.update(grads, tx.init(params), params, value=1.0)
    np.testing.assert_array_equal(updates["w"], [-0.5, -1.0])
    updates, state = tx_only.update(
        grads, tx_only.init(params), params, lr=1.0, value=3.0
    )
    np.testing.assert_array_equal(updates["w"], [-0.5, -7.0])
    assert (updates["b"], updates["n"]) == (0.0, 0)
    assert updates["n"].dtype == params["n"].dtype
    assert (state["w"].step, state["b"].step) == (1, 0)
    assert optax.apply_updates(params, updates)["n"] == 4


def test_as_optax_under_jit_and_inject_hyperparams():
    """optax's own tools see an ordinary transformation."""
    tx = optax.MultiSteps(optim.as_optax(optim.adam(lr=0.1)), every_k_schedule=2)
    params = jnp.array([1.0, -2.0], jnp.float32)
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    once, state = step(params, state, jnp.array([1.0, 3.0], jnp.float32))
    np.testing.assert_array_equal(once, params)
    twice, _ = step(once, state, jnp.array([3.0, -1.0], jnp.float32))
    # The mean gradient is (2, 1): the first step of Adam is lr times its sign.
    np.testing.assert_allclose(twice, params - 0.1, rtol=1e-6)


def test_as_optax_needs_params_and_optax(monkeypatch):
    tx = optim.as_optax(optim.sgd())
    with pytest.raises(ValueError, match=r"as_optax\(sgd\).update\(params=...\)` must"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(Unavailable, match="needs optax: pip install optax"):
        optim.as_optax(optim.sgd())


def matrices(tree):
    """A mask as optax wants it: by a function, for any tree."""
    return jax.tree.map(lambda p: p.ndim > 1, tree)


FROM = {
    "adam": lambda: optax.adam(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    "scheduled": lambda: optax.sgd(optax.cosine_decay_schedule(0.1, 5)),
    "masked": lambda: optax.masked(optax.adam(0.1), matrices),
    "noisy": lambda: optax.noisy_sgd(1e-2, key=0),
    "muon": lambda: optax.contrib.muon(0.1),
}


@pytest.mark.parametrize("make", FROM.values(), ids=FROM)
def test_from_optax_is_apply_updates(make):
    """Bit for bit what optax's own loop gives, with an integer leaf beside."""
    opt, tx = optim.from_optax(make()), make()
    params = {"w": jnp.ones((3, 2), jnp.float32), "b": jnp.zeros(2, jnp.float32)}
    grads = {"w": params["w"] * 0.3, "b": params["b"] + 7}
    ours, state = params | {"n": jnp.array(5)}, None
    state, tx_state = opt.init(ours), tx.init(params)
    for _ in range(3):
        ours, state = opt.step(ours, grads | {"n": None}, state)
        updates, tx_state = tx.update(grads, tx_state, params)
        params = optax.apply_updates(params, updates)
    assert ours.pop("n") == 5
    for found, expected in zip(*map(jax.tree.leaves, (ours, params)), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_there_and_back_is_the_same_optimizer():
    opt = optim.adam(lr=0.05)
    again = optim.from_optax(optim.as_optax(opt))
    params = jnp.array([1.0, -3.0])
    for _ in range(2):
        new, _ = opt.step(params, params, opt.init(params))
        np.testing.assert_allclose(
            again.step(params, params, again.init(params))[0], new, rtol=2.0**-52
        )


def test_from_optax_passes_named_extra_arguments_on():
    opt = optim.from_optax(
        optax.polyak_sgd(max_learning_rate=10.0), extra_args=("value",)
    )
    params = jnp.array([2.0])
    # Polyak's step is loss / |g|^2: of p^2 / 2 exactly half the way to 0.
    new, _ = opt.step(params, params, opt.init(params), value=jnp.array(2.0))
    np.testing.assert_allclose(new, [1.0], rtol=1e-6)


def test_from_optax_refuses_what_optax_cannot_do():
    opt = optim.from_optax(optax.adam(0.1))
    params = {"w": jnp.ones(2), "b": jnp.ones(3)}
    state = opt.init(params)
    reason = r"every parameter. Got None at b. optax keeps one count .* no leaf can be"
    with pytest.raises(ValueError, match=reason):
        opt.step(params, {"w": jnp.ones(2), "b": None}, state)
    with pytest.raises(TypeError, match=r"named in extra_args. Got lr. optax's hyper"):
        opt.step(params, params, state, lr=0.1)
    with pytest.raises(ValueError, match=r"at w, float64 of shape \(2,\). Got float64"):
        opt.step(params, params | {"w": jnp.ones(5)}, state)
    with pytest.raises(TypeError, match=r"from_optax\(tx=...\)` must be an optax tran"):
        optim.from_optax(0.1)


SCHEDULES = {
    "cosine": optax.cosine_decay_schedule(0.1, 4),
    "warmup": optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5),
    "exponential": optax.exponential_decay(0.1, 2, 0.5, staircase=True),
    "linear": optax.linear_schedule(0.1, 0.01, 3),
    "piecewise": optax.piecewise_constant_schedule(0.1, {2: 0.1}),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_optax_schedules_are_hyperparameters(schedule, compiled):
    """For lr and for any other number; step t sees schedule(t), from 0."""
    opt = optim.adamw(lr=schedule, weight_decay=schedule, betas=(schedule, 0.99))
    plain = optim.adamw(betas=(0.5, 0.99))
    step = jax.jit(opt.step) if compiled else opt.step
    params = expected = jnp.array([1.0, -2.0])
    state, plain_state = opt.init(params), plain.init(params)
    for t in range(6):
        params, state = step(params, params * 0.3, state)
        value = float(schedule(t))
        given = {"lr": value, "weight_decay": value, "betas": (value, 0.99)}
        expected, plain_state = plain.step(
            expected, expected * 0.3, plain_state, **given
        )
    # The schedule itself is computed in float32 by some of optax's.
    np.testing.assert_allclose(params, expected, rtol=1e-6)
