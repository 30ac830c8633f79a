"""An example's backward pass begins with its share w / S w, however a batch is split.

Rules that are not linear in their cotangent tell: they clip, round or scale it by its
sign, draw noise from it, or add something to it. Each split must give `jax.grad` of the
whole batch's weighted mean.
"""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import data_parallel, optim, rpc
from jdist.data_parallel import Join, LocalSGD, hooks, shard_batch, zero
from tests.cotangents import rule
from tests.data_parallel.recording import gradient_of
from tests.replicas import over


def noisy(g):
    """Noise that is drawn from each example's own cotangent."""
    bits = jnp.abs(g[:, :1] * 1e7).astype(jnp.uint32)[:, 0]
    keys = jax.vmap(jax.random.key)(bits)
    noise = jax.vmap(lambda key: jax.random.normal(key, g.shape[1:], g.dtype))(keys)
    return g + 0.01 * noise


RULES = {
    "clip": rule(lambda g: jnp.clip(g, -0.02, 0.03)),
    "sign": rule(lambda g: 0.1 * jnp.sign(g) + g),
    "round": rule(lambda g: jnp.round(g * 64) / 64),
    "norm": rule(lambda g: g / (0.05 + jnp.linalg.norm(g, axis=1, keepdims=True))),
    "noise": rule(noisy),
    "add": rule(lambda g: g + 0.01),
}
ALL = tuple(RULES)
LINEAR_AT_PADDING = ("clip", "sign", "round", "norm")
"""Those which make 0 of 0, so that a padding row adds nothing."""


@functools.cache
def losses_of(names):
    """The sum of a loss for each rule, which has parameters of its own."""

    def losses(params, batch):
        return sum(loss(RULES[name], params[name], batch) for name in names)

    return losses


def loss(rule, params, batch):
    hidden = jnp.tanh(rule(batch["x"] @ params["w"]))
    again = rule(hidden @ params["w"].T)
    return (again**2).sum(axis=1) + params["b"] * batch["y"] * hidden[:, 0]


def problem(rng, examples, names=ALL):
    """Parameters of each rule, and one unused; a batch; unequal weights."""
    params = {
        name: {
            "w": jnp.asarray(rng.normal(size=(4, 3))),
            "b": jnp.asarray(rng.normal()),
        }
        for name in names
    }
    params["unused"] = jnp.asarray(rng.normal(size=2))
    batch = {"x": rng.normal(size=(examples, 4)), "y": rng.normal(size=examples)}
    return params, batch, rng.uniform(0.5, 3, size=examples)


@functools.cache
def whole_of(names):
    """`jax.value_and_grad` of the weighted mean, on one device."""

    def mean(params, batch, weights):
        return (weights * losses_of(names)(params, batch)).sum() / weights.sum()

    return jax.jit(jax.value_and_grad(mean))


def whole(params, batch, weights, names=ALL):
    return whole_of(names)(params, batch, weights)


def through_a_step(expected):
    """What `recorder` keeps: a step has no gradient of an unused parameter."""
    loss, gradient = expected
    return loss, {**gradient, "unused": np.full(2, np.nan)}


def check(found, expected):
    # Shares differ by a rounding of float64; the noise has its bits from 1e-7 of them.
    jax.tree_util.tree_map_with_path(
        lambda path, one, other: np.testing.assert_allclose(
            one, other, rtol=1e-9, atol=1e-13, err_msg=jax.tree_util.keystr(path)
        ),
        found,
        expected,
    )


@pytest.mark.parametrize("examples", [5, 6, 7, 11])
def test_one_replica(rng, examples):
    """Where there is no padding, what a rule adds counts as well."""
    params, batch, weights = problem(rng, examples)
    fn = data_parallel.value_and_grad(losses_of(ALL), replicas=1)
    check(fn(params, batch, weights), whole(params, batch, weights))
    equal = np.ones(examples)
    check(fn(params, batch), whole(params, batch, equal))


@pytest.mark.parametrize("kind", ["devices", "vmap"])
def test_even_shards(rng, mesh, kind):
    params, batch, weights = problem(rng, 6)
    where = mesh(3) if kind == "devices" else 3
    expected = whole(params, batch, weights)
    for options in (
        {},
        {"method": "all_gather"},
        {"hook": hooks.all_reduce()},
        {"bucket_cap_mb": 0},
    ):
        fn = data_parallel.value_and_grad(losses_of(ALL), **over(where), **options)
        check(
            fn(params, *shard_batch(batch, **over(where), weights=weights))[:2],
            expected,
        )
    for options in ({"accumulate": 2}, {"accumulate": 1}):
        fn = gradient_of(losses_of(ALL), where, **options)
        check(
            fn(params, *shard_batch(batch, **over(where), weights=weights)),
            through_a_step(expected),
        )


def test_uneven_shards(rng):
    """Five examples over two replicas with three micro-batches each, padded; and more
    of them in the same programs."""
    losses = losses_of(LINEAR_AT_PADDING)
    at_once = data_parallel.value_and_grad(losses, replicas=2)
    accumulated = gradient_of(losses, 2, accumulate=3)
    for examples in (5, 7, 11):
        params, batch, weights = problem(rng, examples, LINEAR_AT_PADDING)
        shards = shard_batch(
            batch, replicas=2, sizes=(examples - 2, 2), weights=weights, rows=12
        )
        expected = whole(params, batch, weights, LINEAR_AT_PADDING)
        check(at_once(params, *shards), expected)
        check(accumulated(params, *shards), through_a_step(expected))


def test_join_by_weight(rng):
    """Three replicas, of which one has no batch."""
    params, batch, weights = problem(rng, 7, LINEAR_AT_PADDING)
    parts = (slice(0, 4), slice(4, 7))
    streams = [
        [(jax.tree.map(lambda x, part=part: x[part], batch), weights[part])]
        for part in parts
    ]
    joined = Join([*streams, []], replicas=3, rows=4, weighted=True)
    (shards,) = joined
    fn = gradient_of(losses_of(LINEAR_AT_PADDING), 3, reduction=joined.reduction)
    expected = whole(params, batch, weights, LINEAR_AT_PADDING)
    check(fn(params, *shards), through_a_step(expected))


def test_join_by_replicas(rng):
    """Its divisor is its own: seeds are w / (B_i K) of a replica's own weights."""
    params, batch, weights = problem(rng, 7, LINEAR_AT_PADDING)
    parts = (slice(0, 4), slice(4, 7))
    own = [
        whole(
            params,
            jax.tree.map(lambda x, p=part: x[p], batch),
            weights[part],
            LINEAR_AT_PADDING,
        )
        for part in parts
    ]
    scaled = np.concatenate([weights[p] / weights[p].sum() / 2 for p in parts])
    expected = whole(params, batch, scaled, LINEAR_AT_PADDING)
    streams = [
        [(jax.tree.map(lambda x, p=part: x[p], batch), weights[part])] for part in parts
    ]
    joined = Join(streams, replicas=2, rows=4, weighted=True, divide_by="active")
    (shards,) = joined
    fn = gradient_of(losses_of(LINEAR_AT_PADDING), 2, reduction="mean")
    found = fn(params, *shards)
    check(found, through_a_step(expected))
    # Not the mean of the replicas' gradients, whose seeds were twice as large.
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *[gradient for _, gradient in own])
    assert np.abs(found[1]["clip"]["w"] - mean["clip"]["w"]).max() > 1e-3


def test_zero(rng, mesh):
    """The optimizer's state is divided; the gradient is the same."""
    params, batch, weights = problem(rng, 6)
    opt = optim.sgd(lr=0.5, momentum=0.9)
    step = data_parallel.train_step(losses_of(ALL), zero(opt, mesh(2)), mesh(2))
    state, _ = step(step.init(params), *shard_batch(batch, mesh(2), weights=weights))
    _, gradient = whole(params, batch, weights)
    check(state.params, opt.step(params, gradient, opt.init(params))[0])


def test_local_sgd_before_its_start(rng, mesh):
    params, batch, weights = problem(rng, 6)
    local = LocalSGD(losses_of(ALL), optim.sgd(lr=0.5), mesh(2), period=2, start=4)
    shards = shard_batch(batch, mesh(2), weights=weights)
    state, loss = local.step(local.init(params), *shards)
    value, gradient = whole(params, batch, weights)
    expected = jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient)
    check(loss, value)
    for row in range(2):
        check(jax.tree.map(lambda x, row=row: x[row], state.params), expected)


def test_elastic(rng):
    """Two replicas take shares of 7 examples, padded to powers of two."""
    params, batch, weights = problem(rng, 7, LINEAR_AT_PADDING)
    sampler = data_parallel.Sampler(7, 7, seed=1)
    losses = losses_of(LINEAR_AT_PADDING)
    run = data_parallel.Elastic(losses, optim.sgd(lr=0.5), sampler)
    states = {}

    def replica(worker):
        with rpc.use_worker(worker):
            states[worker], _ = run.run(params, batch, weights, min_replicas=2)

    with rpc.elastic_cluster("w0") as join:
        join("w1")
        threads = [threading.Thread(target=replica, args=(w,)) for w in ("w0", "w1")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    _, gradient = whole(params, batch, weights, LINEAR_AT_PADDING)
    expected = jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient)
    assert sorted(states) == ["w0", "w1"]
    for state in states.values():
        check(state.params, expected)


def test_a_loss_scale_is_one_of_the_mean(rng):
    """`jax.grad` of scale x mean, divided by the scale."""
    names = ("clip", "sign", "add")
    params, batch, weights = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32), problem(rng, 5, names)
    )
    opt = optim.with_master_weights(
        optim.sgd(lr=1.0), compute_dtype=jnp.float32, loss_scale=2.0**7
    )
    step = data_parallel.train_step(losses_of(names), opt, replicas=1)
    state, metrics = step(step.init(params), batch, weights)

    def scaled(params):
        found = losses_of(names)(params, batch)
        return 2**7 * (weights * found).sum() / weights.sum()

    value, gradient = jax.value_and_grad(scaled)(params)
    np.testing.assert_allclose(metrics.loss, value / 2**7, rtol=1e-5)
    for name in names:
        moved = params[name]["w"] - state.params[name]["w"]
        expected = gradient[name]["w"] / 2**7
        np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("extreme", ["max", "min"])
def test_the_extreme_of_one_pass(rng, mesh, extreme):
    """Known before the backward pass, over all replicas; with a tie between two."""
    params, batch, _ = problem(rng, 6)
    batch = jax.tree.map(lambda x: np.concatenate([x, x])[[0, 1, 2, 3, 4, 5]], batch)
    found = losses_of(ALL)(params, batch)
    hit = int(getattr(np, f"arg{extreme}")(found))
    other = (hit + 3) % 6
    batch = jax.tree.map(
        lambda x: np.where(
            (np.arange(6) == other).reshape(-1, *[1] * (x.ndim - 1)), x[hit], x
        ),
        batch,
    )

    @jax.jit
    @jax.value_and_grad
    def reduced(params):
        return getattr(jnp, extreme)(losses_of(ALL)(params, batch))

    expected = reduced(params)
    for where in (1, 2, mesh(2), mesh(3)):
        fn = data_parallel.value_and_grad(
            losses_of(ALL), **over(where), reduction=extreme
        )
        check(fn(params, *shard_batch(batch, **over(where))), expected)
        step = gradient_of(losses_of(ALL), where, reduction=extreme)
        check(
            step(params, *shard_batch(batch, **over(where))), through_a_step(expected)
        )


def test_a_sum_begins_with_the_weights(rng):
    params, batch, weights = problem(rng, 7)
    fn = data_parallel.value_and_grad(losses_of(ALL), replicas=1, reduction="sum")

    @jax.jit
    @jax.value_and_grad
    def total(params):
        return (weights * losses_of(ALL)(params, batch)).sum()

    check(fn(params, batch, weights), total(params))


def test_a_rule_that_adds_counts_padding(rng):
    """Documented: the replicas' rows are equal in number, and padding is a row."""
    params, batch, weights = problem(rng, 5, ("add",))
    shards = shard_batch(batch, replicas=2, sizes=(3, 2), weights=weights)
    _, found = data_parallel.value_and_grad(losses_of(("add",)), replicas=2)(
        params, *shards
    )
    _, expected = whole(params, batch, weights, ("add",))
    # Row 5, of weight 0, has the first example of its shard.
    rows = jax.tree.map(lambda x: x[[0, 1, 2, 3, 4, 3]], batch)
    _, padded = whole(params, rows, np.asarray(shards[1]), ("add",))
    check(found, padded)
    assert np.abs(found["add"]["w"] - expected["add"]["w"]).max() > 1e-4
