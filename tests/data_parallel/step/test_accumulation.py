"""Gradient accumulation: one reduction for all micro-batches, weighted by counts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim
from jdist.data_parallel import shard_batch, train_step
from tests.data_parallel.recording import gradient_of


def losses_of(params, batch):
    """Two layers, so that there is something to fuse and to reorder."""
    return (jnp.tanh(batch @ params["w1"]) @ params["w2"]).sum(axis=1) ** 2


@pytest.fixture
def params(rng):
    """All sizes different."""
    return {"w1": rng.normal(size=(5, 7)), "w2": rng.normal(size=(7, 3))}


def computations(text):
    """Name to lines of each computation of a compiled program."""
    found, name = {}, None
    for line in text.splitlines():
        start = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if start:
            name = start[1]
        found.setdefault(name, []).append(line)
    return found


@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_one_reduction_per_step(params, mesh, rng, accumulate):
    """Counted in the compiled program, and it stands outside of every loop."""
    step = train_step(losses_of, optim.sgd(lr=0.1), mesh(2), accumulate=accumulate)
    x = rng.normal(size=(20, 5))
    text = step.lower(step.init(params), x).compile().as_text()
    parts = computations(text)
    loops = re.findall(r"while\(.*body=%?([\w.-]+)", text)
    assert bool(loops) == (accumulate > 1)
    reductions = {
        name: sum(" all-reduce(" in line for line in lines)
        for name, lines in parts.items()
    }
    assert sum(reductions.values()) == 1
    inside = [name for name, count in reductions.items() if count]
    assert not set(inside) & set(loops)
    entry = re.search(r"ENTRY %?([\w.-]+)", text)[1]
    assert inside == [entry]


def test_micro_batches_count_by_their_examples(params, rng):
    """Counts 4, 4, 1 on one replica and 3 on the other: no mean of means."""
    x = rng.normal(size=(12, 5))
    weights = rng.uniform(0.5, 2, size=12)
    shards = shard_batch(x, replicas=2, sizes=(9, 3), weights=weights, rows=12)
    _, found = gradient_of(losses_of, 2, accumulate=3)(params, *shards)

    def mean(p, rows):
        return jnp.average(losses_of(p, x[rows]), weights=weights[rows])

    wanted = jax.grad(mean)(params, np.arange(12))
    parts = [
        jax.grad(mean)(params, rows)
        for rows in (np.arange(4), np.arange(4, 8), np.arange(8, 9), np.arange(9, 12))
    ]
    mistaken = jax.tree.map(lambda *leaves: sum(leaves) / 4, *parts)
    for name, leaf in wanted.items():
        scale = np.abs(leaf).max()
        np.testing.assert_allclose(found[name], leaf, rtol=0, atol=1e-13 * scale)
        assert np.abs(mistaken[name] - leaf).max() > 0.01 * scale


def test_the_order_of_micro_batches_is_fixed(params, rng):
    """Bit for bit the sum in order, twice, in a precision that would tell."""
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    x = rng.normal(size=(24, 5)).astype(np.float32)
    fn = gradient_of(losses_of, 1, accumulate=8)
    _, first = fn(params, x)
    _, again = fn(params, x)
    backwards = np.flip(x.reshape(8, 3, 5), axis=0).reshape(24, 5)
    _, other = fn(params, backwards)
    for name, leaf in first.items():
        np.testing.assert_array_equal(leaf, again[name])
        assert not np.array_equal(leaf, other[name])


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_an_extreme_is_that_of_all_micro_batches(mesh, reduction):
    """With a tie between micro-batches of different replicas, which share it."""
    x = np.array([1.0, 5.0, 2.0, 9.0, 4.0, 9.0, 1.0, 3.0])
    fn = gradient_of(lambda w, x: w * x, mesh(2), reduction=reduction, accumulate=2)
    loss, gradient = fn(np.float64(2), x)
    extreme = {"max": 9.0, "min": 1.0}[reduction]
    assert (float(loss), float(gradient)) == (2 * extreme, extreme)
    fn = gradient_of(
        lambda w, x: w * x[:, 0] + x[:, 1], mesh(2), reduction=reduction, accumulate=2
    )
    # Equal losses by different ways: 2 * 4 + 1 and 2 * 1 + 7.
    rows = np.array([[4.0, 1.0], [4.0, 1.0], [4.0, 1.0], [1.0, 7.0]])
    _, gradient = fn(np.float64(2), rows)
    assert float(gradient) == 13 / 4
