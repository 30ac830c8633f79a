"""The backward pass of an example begins with its share of the whole batch.

A rule that is not linear in its cotangent gives the gradient of `jax.grad` of the
weighted mean, in every split and by every executor; and an example of weight 0 reaches
no gradient, even if its loss is 0 / 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jdist import optim, pipeline
from tests.pipeline.cotangents import (
    close,
    losses,
    made,
    on_workers,
    problem,
    stages,
    whole_gradient,
)
from tests.pipeline.epochs import asynchronous, paired
from tests.pipeline.places import workers

# Batches of many sizes are the point.
pytestmark = pytest.mark.filterwarnings("ignore::jdist.segment.RecompilationWarning")
SIZES = [5, 6, 7, 11]
RATE = 1 / 16


def gradient(pipe, params, batch, weights):
    return pipe.value_and_grad(pipe.place(params), batch, weights)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_every_split_is_jax_grad_of_the_mean(m):
    pipe = made(pipeline.one_f_one_b(2, m))
    for examples in SIZES:
        params, batch, weights = problem(examples, seed=m)
        for own in (weights, None):
            found = pipe.value_and_grad(params, batch, own)
            whole = np.ones(examples) if own is None else own
            close(found, whole_gradient(params, batch, whole))


def test_another_scale_of_the_seeds_would_be_seen():
    """In every column: each rule can tell."""
    params, batch, weights = problem(7)
    _, one = whole_gradient(params, batch, weights, injects=False)
    _, two = whole_gradient(params, batch, weights, injects=False, scale=2.0)
    gaps = np.abs(one[0]["w"] - two[0]["w"] / 2).max(0)
    assert (gaps > 1e-3).all()
    _, with_extra = whole_gradient(params, batch, weights)
    assert np.abs(with_extra[0]["w"] - one[0]["w"]).min() > 1e-6


def places(kind):
    """Devices, meshes of each stage, or one mesh for one program."""
    devices = np.array(jax.devices())
    return {
        "devices": list(devices[:2]),
        "data": [Mesh(devices[j : j + 2], ("data",)) for j in (0, 2)],
        "one program": pipeline.OneProgram(Mesh(devices[:2], ("stage",))),
        "one program, data": pipeline.OneProgram(
            Mesh(devices[:4].reshape(2, 2), ("stage", "data"))
        ),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "own", "m"),
    [
        ("devices", (), 3),
        ("devices", ("recompute",), 2),
        ("data", (), 2),
        ("one program", (), 3),
        ("one program, data", (), 2),
    ],
    ids=str,
)
def test_every_executor_is_jax_grad_of_the_mean(kind, own, m):
    """One program pads unequal micro-batches, and what a rule adds for each row it adds
    for padding: there nothing is added, except where rows divide."""
    sizes = (
        [(5, False), (11, False), (12, True)] if "one" in kind else [(7, 1), (11, 1)]
    )
    for examples, injects in sizes:
        pipe = made(pipeline.zero_bubble(2, m), places(kind), bool(injects), own)
        params, batch, weights = problem(examples)
        found = gradient(pipe, params, batch, weights)
        close(found, whole_gradient(params, batch, weights, bool(injects)))


def test_executors_of_one_split_agree_to_the_bit():
    """In float32, where shares round."""
    params, batch, weights = problem(12, dtype=np.float32)
    schedule = pipeline.one_f_one_b(2, 3)
    first, *others = [
        gradient(made(schedule, where), params, batch, weights)
        for where in (None, places("devices"), places("one program"))
    ]
    for other in others:
        pairs = zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)


def test_workers_agree_with_one_process_to_the_bit(cluster):
    tasks = [cluster.start(rank, on_workers, workers(2)) for rank in range(2)]
    found, alone = [task.result() for task in tasks], on_workers()
    for n, (loss, grads) in enumerate(alone):
        params, batch, weights = problem((11, 7)[n], empty=n == 0)
        close((loss, grads), whole_gradient(params, batch, weights, injects=n > 0))
        for rank, each in enumerate(found):
            own_loss, own = each[n]
            assert own_loss == loss
            pairs = zip(
                jax.tree.leaves(own[rank]), jax.tree.leaves(grads[rank]), strict=True
            )
            assert all(np.array_equal(a, b) for a, b in pairs)


# --- training ---


def masters(scale, compute_dtype=jnp.float64):
    return optim.with_master_weights(
        optim.sgd(lr=RATE), compute_dtype=compute_dtype, loss_scale=scale
    )


def stepped(params, grads, factor=1.0):
    return [
        jax.tree.map(lambda x, g: x - RATE * g / factor, *both)
        for both in zip(params, grads, strict=True)
    ]


@pytest.mark.parametrize("scale", [None, 300.0])
def test_a_step_follows_jax_grad_of_the_scaled_mean(scale):
    """With a loss scale the contract is that of scale x mean, divided afterwards."""
    optimizer = optim.sgd(lr=RATE) if scale is None else masters(scale)
    pipe = made(pipeline.gpipe(2, 3), places("devices"), optimizer=optimizer)
    params, batch, weights = problem(7)
    after, metrics = pipe.train_step(pipe.init(params), batch, weights)
    factor = scale or 1.0
    loss, grads = whole_gradient(params, batch, weights, scale=factor)
    np.testing.assert_allclose(metrics.loss, loss / factor, rtol=1e-12)
    close(after.params, stepped(params, grads, factor))


# --- weight 0 ---


@pytest.mark.parametrize("kind", ["devices", "data", "one program"])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_loss_of_0_over_0_with_weight_0_reaches_no_gradient(kind, make):
    """Also where a whole micro-batch is excluded."""
    pipe = made(pipeline.one_f_one_b(2, 3), places(kind), injects=False)
    for examples in (6, 11):
        params, batch, weights = problem(examples, empty=True)
        given = jax.tree.map(make, batch)
        found = gradient(pipe, params, given, weights)
        close(found, whole_gradient(params, batch, weights, injects=False))
        loss = pipe.evaluate(pipe.place(params), given, weights).loss
        np.testing.assert_allclose(loss, found[0], rtol=1e-12)


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
def test_0_over_0_in_other_reductions(reduction):
    params, batch, weights = problem(7, empty=True)
    pipe = made(pipeline.gpipe(2, 3), injects=False, reduction=reduction)
    found = pipe.value_and_grad(params, batch, weights)
    kept = jax.tree.map(lambda x: x[weights > 0], batch)
    one = made(pipeline.gpipe(2, 1), injects=False, reduction=reduction)
    expected = one.value_and_grad(params, kept, weights[weights > 0])
    assert np.isfinite(expected[0])
    close(found, expected)


def test_what_excluded_rows_contain():
    """In a backward pass the numbers of one that counts; in an evaluation their own."""
    params, batch, weights = problem(6, empty=True)
    pipe = pipeline.Pipeline(
        stages(injects=False),
        lambda y, b: (losses(y, b), y["number"]),
        pipeline.gpipe(2, 2),
        has_aux=True,
    )
    (loss, aux), _ = pipe.value_and_grad(params, batch, weights)
    # Rows 0, 1 and 4 are excluded; 2 is the first that counts.
    assert aux.tolist() == [[2, 2, 2], [3, 2, 5]]
    metrics = pipe.evaluate(params, batch, weights, outputs=True)
    assert metrics.outputs["number"].tolist() == [0, 1, 2, 3, 4, 5]
    assert metrics.aux.tolist() == [[0, 1, 2], [3, 4, 5]]
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-12)
    assert batch["x"]["number"].tolist() == [0, 1, 2, 3, 4, 5]


# --- epochs ---


def epoch(sizes, policy, every, *, known=False):
    """An epoch of batches, of which some have excluded examples.

    Args:
      sizes: Numbers of examples.
      policy: The policy.
      every: Number of batches for each update.
      known: Whether the sum of the first update's weights is given by dividing them.
    """
    pipe = asynchronous(
        stages(injects=False),
        losses,
        policy=policy,
        update_every=every,
        optimizer=optim.sgd(lr=RATE),
        reduction="sum" if known else "mean",
    )
    given = [problem(n, seed, empty=n > 5) for seed, n in enumerate(sizes)]
    batches, weights = [g[1] for g in given], [g[2] for g in given]
    total = sum(own.sum() for own in weights) if known else 1.0
    params, shares = given[0][0], [own / total for own in weights]
    state, metrics = pipe.train_epoch(pipe.init(params), paired(batches, shares))
    return params, list(zip(batches, weights, strict=True)), state, metrics


def test_a_batch_of_an_epoch_begins_with_its_own_mean():
    """With a flush after each batch an epoch is a step for each."""
    params, given, state, metrics = epoch([5, 7, 11], "flush", 1)
    for n, (batch, own) in enumerate(given):
        loss, grads = whole_gradient(params, batch, own, injects=False)
        np.testing.assert_allclose(metrics.losses[n], loss, rtol=1e-12)
        params = stepped(params, grads)
    close(state.params, params)


@pytest.mark.parametrize("policy", ["flush", "2bw"])
def test_an_update_of_several_batches_weights_their_means(policy):
    """By the totals of their weights: the later ones are not read yet."""
    params, given, state, metrics = epoch([5, 7, 11], policy, 3)
    totals = np.array([own.sum() for _, own in given])
    each = [whole_gradient(params, *batch, injects=False) for batch in given]
    mean = [
        jax.tree.map(lambda *g: np.average(np.stack(g), 0, totals), *own)
        for own in zip(*(grads for _, grads in each), strict=True)
    ]
    close(state.params, stepped(params, mean))
    expected = np.average([loss for loss, _ in each], weights=totals)
    np.testing.assert_allclose(metrics.loss, expected, rtol=1e-12)


def test_a_total_that_is_known_gives_exact_shares():
    params, given, state, metrics = epoch([5, 7, 11], "2bw", 3, known=True)
    batch = jax.tree.map(lambda *x: np.concatenate(x), *[batch for batch, _ in given])
    weights = np.concatenate([own for _, own in given])
    loss, grads = whole_gradient(params, batch, weights, injects=False)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-12)
    close(state.params, stepped(params, grads))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_that_counts_for_nothing_adds_nothing(reduction):
    """Though its losses are 0 / 0, and no example can stand in their place."""
    params, batch, weights = problem(6, seed=1)
    empty = {**batch, "mask": np.zeros_like(batch["mask"])}
    pipe = asynchronous(
        stages(injects=False),
        losses,
        policy="2bw",
        update_every=2,
        optimizer=optim.sgd(lr=RATE),
        reduction=reduction,
    )
    found = [
        pipe.train_epoch(pipe.init(params), paired(*given))
        for given in (
            ([batch, empty], [weights, np.zeros(6)]),
            ([batch], [weights]),
        )
    ]
    close(*[(state.params, metrics.loss) for state, metrics in found])


# --- precision ---


def in_half(examples, count, size, scale=None):
    """The gradient of the mean of `size` w x, with cotangents in float16."""
    optimizer = masters(scale, jnp.float16) if scale else optim.sgd(lr=RATE)
    pipe = pipeline.Pipeline(
        [pipeline.Stage(lambda w, x: x * w, ("x",), ("y",))],
        lambda y, b: y * b["size"],
        pipeline.gpipe(1, count),
        optimizer=optimizer,
    )
    w = np.float32(0) if scale else np.float16(0)
    batch = {
        "x": np.ones(examples, np.float16),
        "size": np.full(examples, size, np.float16),
    }
    state, _ = pipe.train_step(pipe.init([w]), batch)
    kept = state.opt_states[0].masters if scale else state.params[0]
    return -float(kept) / RATE


def test_cotangents_in_float16_shrink_with_the_batch():
    """A share of 1 / n times a small derivative is below float16's smallest number, in
    one pass as in several; a loss scale brings it back."""
    smallest = float(jnp.finfo(jnp.float16).smallest_subnormal)
    size = 2e-5
    assert size / 1024 < smallest / 2 < size
    for count in (1, 4):
        assert in_half(1024, count, size) == 0
        found = in_half(1024, count, size, scale=1024.0)
        np.testing.assert_allclose(found, np.float16(size), rtol=2e-3)
