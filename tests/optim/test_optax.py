"""At home in optax: both bridges, schedules, and where optax equals torch."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax import contrib

from jdist import optim
from jdist._errors import Unavailable
from tests.optim.cases import ALGORITHMS, BY_NAME, MATRICES, SHAPES, problem
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


def run(opt, shapes=SHAPES):
    """20 steps in float64, without None."""
    data = problem(31, steps=20, with_none=False, shapes=shapes)
    params = [jnp.asarray(p) for p in data.params]
    state = opt.init(params)
    for row in data.grads:
        params, state = opt.step(params, [jnp.asarray(g) for g in row], state)
    return params


def difference(ours, tx):
    """The largest difference of a parameter after 20 steps, relative to its size."""
    shapes = MATRICES if ours.name == "muon" else SHAPES
    pairs = zip(run(ours, shapes), run(optim.from_optax(tx), shapes), strict=True)
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
    "Adafactor": (optim.adafactor(lr=LR), optax.adafactor(LR), 1e-3),
    "Muon": (optim.muon(lr=LR), contrib.muon(LR, weight_decay=0.1), 1e-3),
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
    """Bit for bit, but for decoupled decay, which is rounded by itself: one a step."""
    options = list(algorithm.golden.values())[-1]
    opt = algorithm(**options)
    data = algorithm.problem(8, steps=3, with_none=False)
    params = ours = [jnp.asarray(p) for p in data.params]
    tx = optim.as_optax(opt)
    state, our_state = tx.init(params), opt.init(params)
    for row in data.grads:
        grads = [jnp.asarray(g) for g in row]
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        ours, our_state = opt.step(ours, grads, our_state)
    decays = options.get("decoupled_weight_decay") or algorithm.name in (
        "adamw", "asgd", "adafactor", "muon",
    )  # fmt: skip
    for found, expected in zip(params, ours, strict=True):
        if not decays:
            np.testing.assert_array_equal(found, expected)
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
    # Dampened SGD has a count, which tells the leaf that was skipped.
    dampened = optim.as_optax(optim.sgd(momentum=0.5, dampening=0.1))
    _, kept = dampened.update(grads, dampened.init(params), params)
    counts = [int(x) for x in kept if x.dtype == jnp.int32]
    assert counts == [0, 1], "one per floating leaf: b, w"
    assert state == (), "plain SGD keeps nothing"
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


# The length of a step of Adafactor depends on where the parameter is.
@pytest.mark.parametrize("name", sorted({*BY_NAME} - {"adafactor"}))
def test_an_update_is_not_rounded_to_the_spacing_of_its_parameter(name, rng):
    """Small beside the parameter, and then multiplied: the difference was quantised."""
    algorithm = BY_NAME[name]
    options = {
        name: value
        for name, value in list(algorithm.golden.values())[-1].items()
        if name not in ("weight_decay", "decoupled_weight_decay")
    } | {"lr": 1e-7}  # fmt: skip
    if algorithm.name == "rprop":
        options["step_sizes"] = (1e-9, 1e-6)
    if algorithm.name == "asgd":
        options["lambd"] = 0.0
    if algorithm.name in ("adamw", "muon"):
        options["weight_decay"] = 0.0
    opt = algorithm(**options)
    drawn = rng.standard_normal((2, 7, 2) if algorithm.shapes == MATRICES else (2, 7))
    near, grads = jnp.asarray(drawn, jnp.float32)
    far = near + 1000
    tx = optax.chain(optim.as_optax(opt), optax.scale(1000.0))
    found, _ = tx.update(grads, tx.init(far), far)
    # Without decay an update does not depend on where the parameter is.
    expected, _ = opt.updates(near, grads, opt.init(near))
    assert float(jnp.max(jnp.abs(expected))) > 0
    np.testing.assert_array_equal(found, expected * jnp.float32(1000))
    moved, _ = opt.step(far, grads, opt.init(far))
    assert not np.allclose((moved - far) * 1000, found, rtol=1e-3)


def test_decoupled_decay_is_part_of_the_update(rng):
    """-lr wd p beside the rest, to the rounding of the update and not of p."""
    param, grad = (jnp.asarray(x) for x in rng.standard_normal((2, 5)))
    for make in (optim.adamw, optim.nadam, optim.radam):
        kind = {} if make is optim.adamw else {"decoupled_weight_decay": True}
        with_decay, without = (
            make(lr=1e-3, weight_decay=wd, **kind) for wd in (0.25, 0.0)
        )
        found, plain = (
            opt.updates(param, grad, opt.init(param))[0]
            for opt in (with_decay, without)
        )
        np.testing.assert_allclose(found - plain, -1e-3 * 0.25 * param, rtol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.adam(lr=0.05),
        lambda: optim.sgd(lr=0.05),
        lambda: optim.by_label(
            {"a": optim.adamw(lr=0.05), "b": optim.sgd(lr=0.05, momentum=0.5)},
            lambda p: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", p),
        ),
        lambda: optim.from_optax(optax.adam(0.05)),
    ],
    ids=["adam", "sgd", "by_label", "from_optax"],
)
def test_as_optax_is_at_home_in_nnx(make, compiled):
    """Three updates of a module; its parameters are those of the native steps."""
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    x = jnp.asarray(np.random.default_rng(4).standard_normal((5, 3)))

    def loss(model):
        return jnp.sum(model(x) ** 2)

    def move(model, optimizer):
        optimizer.update(model, nnx.grad(loss)(model))

    opt = make()
    graph, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    state = opt.init(params)
    optimizer = nnx.Optimizer(model, optim.as_optax(opt), wrt=nnx.Param)
    move = nnx.jit(move) if compiled else move
    for _ in range(3):
        grads = jax.grad(lambda p: loss(nnx.merge(graph, _as_state(graph, p))))(params)
        params, state = opt.step(params, grads, state)
        move(model, optimizer)
    found = nnx.to_pure_dict(nnx.state(model))
    for a, b in zip(*map(jax.tree.leaves, (found, params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13)


def _as_state(graph, params):
    state = nnx.state(nnx.merge(graph, nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(1)))))
    nnx.replace_by_pure_dict(state, params)
    return state


@pytest.mark.parametrize("masters", [False, True])
def test_updates_of_sixteen_bits(masters):
    """Added as optax adds them they give the step; with masters they lead to those."""
    opt = optim.adam(lr=0.03)
    opt = optim.with_master_weights(opt) if masters else opt
    full = jnp.array([1.003, -2.0, 0.25], jnp.float32)
    params = ours = full.astype(jnp.bfloat16)
    state = opt.init(full if masters else params)
    tx = optim.as_optax(opt)
    tx_state = tx.init(full if masters else params)
    for _ in range(4):
        grads = jnp.array([0.5, 1.0, -3.0], jnp.bfloat16)
        updates, tx_state = tx.update(grads, tx_state, params)
        params = optax.apply_updates(params, updates)
        ours, state = opt.step(ours, grads, state)
        assert params.dtype == ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            params.astype(jnp.float32), ours.astype(jnp.float32), rtol=2.0**-8
        )
    if masters:
        np.testing.assert_array_equal(params, ours)


def test_counts_lie_where_the_parameters_do():
    """optax's and the loss scale's: a restored one is tied to the devices it was on."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    values = {"w": jnp.ones(3), "b": jnp.ones(())}
    params = jax.device_put(values, everywhere)
    alone = jax.device_put(values, jax.devices()[1])
    options = (
        optim.from_optax(optax.adam(0.1)),
        optim.with_master_weights(optim.adam(), loss_scale=optim.DynamicLossScale()),
        optim.by_label({"x": optim.from_optax(optax.adam(0.1))}, {"w": "x", "b": "x"}),
    )
    for opt in options:
        for given in (params, alone):
            leaves = jax.tree.leaves(opt.init(given))
            assert {frozenset(x.devices()) for x in leaves} == {
                frozenset(given["w"].devices())
            }
            assert all(x.committed for x in leaves)
        free = jax.tree.leaves(opt.init(values))
        assert not any(x.committed for x in free)


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
    with pytest.raises(
        TypeError, match=r"as_optax\(optimizer=...\)` must be an optimizer of"
    ):
        optim.as_optax(optax.adam(0.1))


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


@pytest.mark.parametrize("names", [None, 3, "value", [1]])
def test_extra_arguments_are_names(names):
    with pytest.raises(TypeError, match=r"extra_args=...\)` must be a sequence of nam"):
        optim.from_optax(optax.sgd(0.1), extra_args=names)


@pytest.mark.parametrize("state", [None, 3, (), [1.0, 2.0]])
def test_the_state_of_another_transformation(state):
    tx, params = optim.as_optax(optim.adam()), jnp.ones(3)
    with pytest.raises(
        ValueError, match=r"as_optax\(adam\).update\(state=.* the 3 arr"
    ):
        tx.update(params, state, params)
