"""Weights of any size: totals beyond single precision, and single weights below it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim, pipeline
from tests.pipeline.epochs import asynchronous, paired

PARTS = 3
STAGES = [
    pipeline.Stage(lambda w, x: jnp.tanh(x @ w), ("x",), ("h",)),
    pipeline.Stage(lambda w, h: jnp.tanh(h @ w), ("h",), ("y",)),
]


def losses(y, batch):
    return ((y - batch["t"]) ** 2).sum(-1)


def problem(rng, examples=7):
    # Small enough that no tanh saturates: 1 - tanh^2 would cancel in single precision.
    params = [0.4 * rng.normal(size=(4, 4)).astype(np.float32) for _ in STAGES]
    names = {"x": 4, "t": 4}
    batch = {
        n: rng.normal(size=(examples, k)).astype(np.float32) for n, k in names.items()
    }
    return params, batch, rng.uniform(0.5, 2, examples)


def in_double(params, batch, weights, kind):
    """Loss and gradients, with weights that are first divided by the largest."""

    def reduced(params):
        h = jnp.tanh(batch["x"].astype(np.float64) @ params[0])
        found = losses(jnp.tanh(h @ params[1]), {"t": batch["t"].astype(np.float64)})
        if kind == "max":
            return jnp.max(jnp.where(weights > 0, found, -jnp.inf))
        own = weights / weights.max()
        return (own * found).sum() / own.sum()

    return jax.value_and_grad(reduced)([p.astype(np.float64) for p in params])


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.all(np.isfinite(a))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


SIZES = {
    "a total beyond float32": (3e38, np.float32),
    "weights beyond float32": (1e300, np.float64),
    "a total beyond float64": (1e308, np.float64),
    "weights that round to 0": (1e-60, np.float64),
    "subnormal weights": (1e-40, np.float32),
}


def executor(where):
    if where == "one program":
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",))
        equal = [replace(stage, fn=STAGES[0].fn) for stage in STAGES]
        return equal, pipeline.OneProgram(mesh)
    return STAGES, None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("where", ["devices", "one program"])
@pytest.mark.parametrize("kind", ["mean", "max"])
def test_means_and_extremes_do_not_depend_on_the_size(kind, where, size, rng):
    """Nor does what the gradient is, to single precision."""
    params, batch, weights = problem(rng)
    factor, dtype = SIZES[size]
    given = (weights / weights.max() * factor).astype(dtype)
    given[2] = 0
    stages, places = executor(where)
    schedule = pipeline.gpipe(2, PARTS)
    pipe = pipeline.Pipeline(stages, losses, schedule, places, reduction=kind)
    found = pipe.value_and_grad(pipe.place(params), batch, given)
    expected = in_double(params, batch, given.astype(np.float64), kind)
    close(found, expected)
    if where == "devices":
        told = pipe.evaluate(params, batch, given)
        close(told.loss, expected[0])
        with np.errstate(over="ignore"):
            assert told.weight == given.sum(dtype=np.float64)


def test_one_large_weight_beside_small_ones(rng):
    """Of a mean the small ones are rounded away; an extreme may be one of theirs."""
    params, batch, weights = problem(rng)
    given = weights * 1e-200
    given[1] = 1.0
    for kind in ("mean", "max"):
        pipe = pipeline.Pipeline(
            STAGES, losses, pipeline.gpipe(2, PARTS), reduction=kind
        )
        close(
            pipe.value_and_grad(params, batch, given),
            in_double(params, batch, given, kind),
        )


def test_a_sum_takes_its_weights_as_they_are(rng):
    params, batch, weights = problem(rng)
    pipe = pipeline.Pipeline(STAGES, losses, pipeline.gpipe(2, PARTS), reduction="sum")
    match = (
        r"value_and_grad\(weights=...\).*within float32.*Got .*e\+300.*or use the mean"
    )
    with pytest.raises(ValueError, match=match):
        pipe.value_and_grad(params, batch, weights * 1e300)
    loss, grads = pipe.value_and_grad(params, batch, weights * 1e-60)
    assert float(loss) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("size", SIZES)
def test_macro_batches_of_pipedream(size, rng):
    """An update for two batches of unequal totals; losses of each."""
    factor, dtype = SIZES[size]
    params, batch, weights = problem(rng, 6)
    runtime = asynchronous(
        STAGES, losses, optimizer=optim.sgd(lr=1.0), policy="flush", update_every=2
    )
    batches = [
        {n: x[rows] for n, x in batch.items()} for rows in (slice(2), slice(2, 6))
    ]

    def trained(own):
        state = runtime.init(params)
        state, metrics = runtime.train_epoch(state, paired(batches, [own[:2], own[2:]]))
        return state.params, metrics.losses, metrics.loss

    plain = weights / weights.max()
    close(trained((plain * factor).astype(dtype)), trained(plain.astype(np.float32)))


def test_totals_that_no_sum_can_hold_together_are_refused(rng):
    params, batch, weights = problem(rng, 3)
    runtime = asynchronous(STAGES, losses, optimizer=optim.sgd(lr=1.0))
    match = r"train_epoch\(weights=...\).*within a factor of 2\^64.*Got totals.*e-30 in"
    with pytest.raises(ValueError, match=match):
        runtime.train_epoch(
            runtime.init(params), paired([batch] * 2, [weights, weights * 1e-30])
        )


def test_weights_of_a_mean_in_float16_do_not_overflow():
    """Cotangents are at most a micro-batch's mean's, as JAX's own are."""
    stage = pipeline.Stage(lambda w, x: x * w, ("x",), ("y",))
    pipe = pipeline.Pipeline([stage], lambda y, batch: y, pipeline.gpipe(1, 2))
    batch = {"x": np.full(64, 2048, np.float16)}
    loss, (grad,) = pipe.value_and_grad([jnp.float16(1)], batch, np.full(64, 2.0**20))
    assert (float(loss), float(grad)) == (2048, 2048)


def test_a_loss_in_16_bits_keeps_the_total_of_its_weights(rng):
    """0.3 is 0.3008 in bfloat16; equal weights must not change a mean's gradient."""
    stage = pipeline.Stage(lambda w, x: x * w, ("x",), ("y",))
    pipe = pipeline.Pipeline(
        [stage],
        lambda y, batch: y.astype(jnp.bfloat16),
        pipeline.one_f_one_b(1, PARTS),
    )
    x = rng.uniform(1, 2, 11).astype(np.float32)
    for weights in (np.full(11, 0.3), np.full(11, 0.7)):
        _, (grad,) = pipe.value_and_grad([jnp.float32(1.5)], {"x": x}, weights)
        assert abs(float(grad) / x.mean() - 1) < 11 * np.finfo(np.float32).eps
