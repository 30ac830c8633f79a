"""Splitting a batch: sizes, padding by real examples, weights, refusals."""

import gc

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from jdist import optim
from jdist.data_parallel import (
    LocalSGD,
    shard_batch,
    train_step,
    value_and_grad,
)
from jdist.data_parallel.replicas import shards
from jdist.data_parallel.replicas.placement import Placement
from tests.replicas import over


def rows(array, replicas):
    """One row of examples per replica."""
    array = np.asarray(array)
    return array.reshape(replicas, -1, *array.shape[1:]).tolist()


@pytest.mark.parametrize(
    ("sizes", "examples", "weights"),
    [
        ((5, 3), [[0, 1, 2, 3, 4], [5, 6, 7, 7, 7]], [[1] * 5, [1, 1, 1, 0, 0]]),
        (
            (7, 0, 1),
            [[0, 1, 2, 3, 4, 5, 6], [0] * 7, [7] * 7],
            [[1] * 7, [0] * 7, [1] + [0] * 6],
        ),
        ((4, 4), [[0, 1, 2, 3], [4, 5, 6, 7]], [[1] * 4] * 2),
    ],
)
def test_uneven_shards_repeat_a_real_example(sizes, examples, weights):
    """Drawn out: padding repeats the shard's last example, or the batch's first."""
    batch, w = shard_batch(np.arange(8), replicas=len(sizes), sizes=sizes)
    assert rows(batch, len(sizes)) == examples
    assert rows(w, len(sizes)) == weights


@pytest.mark.parametrize(
    ("count", "replicas", "sizes"),
    [(8, 3, [3, 3, 2]), (2, 4, [1, 1, 0, 0]), (6, 3, [2, 2, 2])],
)
def test_sizes_default_to_as_equal_as_possible(count, replicas, sizes):
    """The first shards take what is left over."""
    _, weights = shard_batch(np.arange(count), replicas=replicas)
    assert np.sum(rows(weights, replicas), axis=1).tolist() == sizes


def test_rows_keep_one_shape_for_all_sizes():
    """So that one compiled program serves them, and micro-batches divide them."""
    for sizes in ((5, 3), (1, 0), (0, 6)):
        count = sum(sizes)
        batch, weights = shard_batch(
            np.arange(count) + 1, replicas=2, sizes=sizes, rows=6
        )
        assert batch.shape == weights.shape == (12,)
        assert np.sum(rows(weights, 2), axis=1).tolist() == list(sizes)
        assert np.all(np.asarray(batch) > 0)
    with pytest.raises(
        ValueError, match=r"rows=.*largest of the sizes, .5, 3.\. Got 4"
    ):
        shard_batch(np.arange(8), replicas=2, sizes=(5, 3), rows=4)
    with pytest.raises(TypeError, match=r"rows=.*, an integer\. Got 5\.0"):
        shard_batch(np.arange(8), replicas=2, sizes=(5, 3), rows=5.0)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    seed=st.integers(0, 2**16),
)
def test_every_example_counts_once_whatever_the_sizes(sizes, seed):
    """The weights of an example's copies add up to its own weight, in every split."""
    count = sum(sizes)
    own = np.random.default_rng(seed).uniform(0.1, 3, size=count).astype(np.float32)
    batch, weights = shard_batch(
        np.arange(count), replicas=len(sizes), sizes=sizes, weights=own
    )
    total = np.bincount(np.asarray(batch), np.asarray(weights), minlength=count)
    np.testing.assert_array_equal(total.astype(np.float32), own)
    assert len(batch) == len(sizes) * max(sizes)


def test_shards_lie_on_their_devices(mesh):
    """Replica i's examples are on device i and nowhere else."""
    batch = {"x": np.arange(10.0).reshape(5, 2), "y": np.arange(5)}
    shards, weights = shard_batch(batch, mesh(2), sizes=(2, 3))
    for leaf in (*shards.values(), weights):
        assert [s.device.id for s in leaf.addressable_shards] == [0, 1]
    assert [s.data.tolist() for s in shards["y"].addressable_shards] == [
        [0, 1, 1],
        [2, 3, 4],
    ]


def test_keys_and_integers_may_stand_in_a_batch():
    """A key per example is sharded like any other leaf; dtypes stay."""
    batch = {
        "key": jax.random.split(jax.random.key(1), 3),
        "y": np.arange(3, dtype="i2"),
    }
    shards, weights = shard_batch(
        batch, replicas=2, sizes=(1, 2), weights=np.array([1, 2, 0])
    )
    data = jax.random.key_data(shards["key"])
    np.testing.assert_array_equal(data[0], jax.random.key_data(batch["key"])[0])
    np.testing.assert_array_equal(data[0], data[1])
    assert shards["y"].dtype == np.int16
    assert weights.tolist() == [1, 0, 2, 0]
    assert weights.dtype == np.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": (5, 2)}, r"add up to the batch's 8 examples. Got \(5, 2\)"),
        ({"sizes": (9, -1)}, r"must be integers of at least 0, .* Got \(9, -1\)"),
        ({"sizes": (8,)}, r"one for each of the 2 replicas, .* Got \(8,\)"),
        (
            {"weights": np.full(8, -0.5)},
            "finite and at least 0. Got -0.5 for example 0",
        ),
        ({"weights": np.r_[np.ones(7), np.nan]}, "Got nan for example 7"),
        ({"weights": np.r_[np.ones(7), np.inf]}, "Got inf for example 7"),
        ({"weights": np.zeros(8)}, "must not all be 0.*Got 8 zeros"),
        ({"weights": np.ones(7)}, r"one per row, shape \(8,\). Got shape \(7,\)"),
        ({"replicas": 0}, "at least 1. Got 0"),
        ({"batch": np.zeros((0, 3))}, "at least one example. Got none"),
        ({"batch": (np.zeros(3), np.zeros(2))}, "Got 0: 3, 1: 2"),
    ],
)
def test_refusals(arguments, message):
    """Each names the argument, the rule and what was given."""
    batch = arguments.pop("batch", np.arange(8.0))
    with pytest.raises(ValueError, match=message):
        shard_batch(batch, **{"replicas": 2} | arguments)


def test_meshes_are_checked(mesh):
    """A mesh without the axis, and something that is no mesh."""
    with pytest.raises(ValueError, match=r"must have the axis 'batch'.*\('data',\)"):
        shard_batch(np.arange(4), mesh(2), data_axis="batch")
    with pytest.raises(TypeError, match=r"must be a .*Mesh, or left out.*Got 'cpu'"):
        shard_batch(np.arange(4), "cpu")
    with pytest.raises(TypeError, match="Got True"):
        shard_batch(np.arange(4), replicas=True)


def test_sizes_must_be_whole_numbers():
    expected = r"sizes=.*must be integers .* the 2 replicas.* Got \(1\.5, 2\.5\)"
    with pytest.raises(TypeError, match=expected):
        shard_batch(np.arange(4), replicas=2, sizes=(1.5, 2.5))


def test_several_processes_have_to_agree_on_rows(mesh, monkeypatch):
    """As if the other replica were another process's."""
    monkeypatch.setattr(Placement, "own", lambda placement: [0])
    expected = r"rows=\.\.\.\)` must be given where a mesh spans several processes\. "
    with pytest.raises(ValueError, match=expected + r".* Here it would be 3\."):
        shard_batch(np.arange(3.0), mesh(2))


def square(w, batch):
    return (batch["x"] @ w) ** 2


@pytest.mark.parametrize(
    "given",
    [
        {"sizes": (5, 3)},
        {"sizes": (4, 4), "weights": np.linspace(0.5, 2, 8)},
        {"rows": 7},
    ],
    ids=["uneven", "weighted", "padded"],
)
@pytest.mark.parametrize("mesh", [2, Mesh(jax.devices()[:2], ("data",))], ids=repr)
def test_forgotten_weights_are_refused(mesh, given, rng):
    """By each call: padding would count, and weights would not."""
    x = {"x": rng.standard_normal((8, 3)).astype(np.float32)}
    w = rng.standard_normal(3).astype(np.float32)
    batch, weights = shard_batch(x, **over(mesh), **given)
    step = train_step(square, optim.sgd(), **over(mesh))
    local = LocalSGD(square, optim.sgd(), **over(mesh), period=2)
    fn, state = value_and_grad(square, **over(mesh)), step.init(w)
    calls = [
        lambda b: fn(w, b),
        lambda b: step(state, b),
        lambda b: step.evaluate(state, b),
        lambda b: step.lower(state, b),
        lambda b: local.step(local.init(w), b),
    ]
    told = r"weights=.*` must be given with a batch whose rows `shard_batch` has weight"
    for call in calls:
        with pytest.raises(ValueError, match=told + r".*Got None\. Pass both, as "):
            call(batch)
    # The loss function may use them itself; copies are not known, and ones are meant.
    copy = jax.tree.map(np.asarray, batch)
    expected = fn(w, batch, np.ones(len(weights)))[0]
    assert expected != fn(w, batch, weights)[0]
    assert fn(w, batch | {"w": weights})[0] == fn(w, copy)[0] == expected


def test_a_batch_without_padding_needs_no_weights_and_none_is_kept(rng):
    """Tables of batches that are gone would grow with the run."""
    x = rng.standard_normal((8, 3)).astype(np.float32)
    fn = value_and_grad(lambda w, x: x @ w, replicas=2)
    w = np.ones(3, np.float32)
    batch, weights = shard_batch(x, replicas=2)
    np.testing.assert_array_equal(fn(w, batch)[1], fn(w, batch, weights)[1])
    gc.collect()
    before = len(shards._needed), len(shards._issued)
    others = [shard_batch(x, replicas=2, sizes=(5, 3)) for _ in range(7)]
    assert len(shards._needed) == before[0] + 7
    del others
    gc.collect()
    assert (len(shards._needed), len(shards._issued)) == before
