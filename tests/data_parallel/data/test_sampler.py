"""Shuffled shards: every example once an epoch, the same order everywhere."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist import optim
from jdist.data_parallel import Sampler, shard_batch, train_step


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    examples=st.integers(1, 40),
    batch=st.integers(1, 17),
    replicas=st.integers(1, 6),
    epoch=st.integers(0, 5),
)
def test_every_example_once(examples, batch, replicas, epoch):
    """No tail twice, none dropped; shards differ by one example at most."""
    sampler = Sampler(examples, batch, seed=3)
    steps = list(sampler.shards(replicas, epoch))
    assert len(steps) == sampler.steps
    seen = np.concatenate([s.rows for s in steps])
    assert sorted(seen.tolist()) == list(range(examples))
    for s in steps:
        assert sum(s.sizes) == len(s.rows) == len(s.weights)
        assert len(s.sizes) == replicas
        assert max(s.sizes) - min(s.sizes) <= 1
        assert max(s.sizes) <= -(-batch // replicas)
        assert np.all(s.weights == 1)


def test_the_order_is_frozen():
    """Of seed and epoch alone; these numbers must never change, or runs do."""
    assert Sampler(8, 4, seed=1).order(0).tolist() == ORDER[1, 0]
    assert Sampler(8, 4, seed=1).order(1).tolist() == ORDER[1, 1]
    assert Sampler(8, 4, seed=2).order(0).tolist() == ORDER[2, 0]
    assert Sampler(8, 4, shuffle=False).order(5).tolist() == list(range(8))


ORDER = {
    (1, 0): [1, 6, 0, 3, 7, 4, 2, 5],
    (1, 1): [3, 2, 4, 0, 7, 1, 5, 6],
    (2, 0): [1, 7, 6, 3, 4, 2, 0, 5],
}


def test_processes_share_the_work():
    """Each computes its own replicas' rows; together they are all of the step's."""
    sampler = Sampler(10, 6, seed=4)
    whole = list(sampler.shards(3, epoch=2))
    parts = [list(sampler.shards(3, 2, ranks=ranks)) for ranks in ((0, 1), (2,))]
    for step, together in enumerate(whole):
        own = [part[step] for part in parts]
        assert np.concatenate([s.rows for s in own]).tolist() == together.rows.tolist()
        assert sum((s.sizes for s in own), ()) == together.sizes


def test_a_process_without_examples_fills_its_place():
    """One example of the batch with weight 0: the program needs rows."""
    sampler = Sampler(7, 6, shuffle=False)
    *_, last = sampler.shards(3, ranks=(1, 2))
    assert (last.rows.tolist(), last.sizes, last.weights.tolist()) == ([6], (1, 0), [0])


def test_a_run_resumes_in_mid_epoch():
    """The remaining steps are those of the whole epoch."""
    sampler = Sampler(20, 3, seed=5)
    whole = [s.rows.tolist() for s in sampler.shards(2, 1)]
    rest = [s.rows.tolist() for s in sampler.shards(2, 1, start=4)]
    assert rest == whole[4:]
    assert len(rest) == 3
    assert list(sampler.shards(2, 1, start=7)) == []
    for start in (-1, 8):
        with pytest.raises(ValueError, match=rf"0 to the epoch's 7 steps. Got {start}"):
            next(sampler.shards(2, 1, start=start))


def test_batches_of_one_shape(mesh):
    """On the devices, weighted; their examples are the data's, once each."""
    data = {"x": np.arange(14.0).reshape(7, 2), "y": np.arange(7)}
    sampler = Sampler(7, 4, seed=6)
    total = np.zeros(7)
    for batch, weights in sampler.batches(data, mesh(3), epoch=1):
        assert batch["x"].shape == (6, 2)
        np.testing.assert_array_equal(batch["x"][:, 0], 2 * np.asarray(batch["y"]))
        assert len({s.device for s in weights.addressable_shards}) == 3
        np.add.at(total, np.asarray(batch["y"]), np.asarray(weights))
    assert total.tolist() == [1] * 7
    assert len(list(sampler.batches(data, replicas=3, start=1))) == 1


def test_rows_for_micro_batches(mesh):
    """Each replica's part is padded to them; the step is that of all examples."""
    rng = np.random.default_rng(2)
    data = rng.standard_normal((7, 3)), rng.standard_normal(7)

    def losses(w, batch):
        return (batch[0] @ w - batch[1]) ** 2

    step = train_step(losses, optim.sgd(lr=0.1), mesh(2), accumulate=3)
    state = step.init(np.ones(3))
    expected = np.ones(3)
    sampler = Sampler(7, 5, shuffle=False)
    for number, batch in enumerate(sampler.batches(data, mesh(2), rows=6)):
        assert batch[1].shape == (12,)
        state, _ = step(state, *batch)
        x, y = (part[5 * number : 5 * number + 5] for part in data)
        expected = expected - 0.1 * 2 * (x @ expected - y) @ x / len(y)
    np.testing.assert_allclose(state.params, expected, rtol=1e-10)
    assert len(list(sampler.batches(data, replicas=2, rows=np.int64(3)))) == 2
    for rows in (2, 0):
        expected = rf"batches\(rows=...\)` must be at least 3, .* Got {rows}"
        with pytest.raises(ValueError, match=expected):
            next(sampler.batches(data, replicas=2, rows=rows))
    with pytest.raises(TypeError, match=r"rows=.*must be at least 3.*Got 3\.5"):
        next(sampler.batches(data, replicas=2, rows=3.5))


def test_a_process_without_a_replica_is_refused(monkeypatch, mesh):
    """It has no rows to bring, and no device to compute on."""
    with pytest.raises(ValueError, match=r"ranks=.*some of the 3 replicas. Got \[\]"):
        next(Sampler(7, 6).shards(3, ranks=()))
    with pytest.raises(ValueError, match=r"some of the 3 replicas. Got \[1, 3\]"):
        next(Sampler(7, 6).shards(3, ranks=(1, 3)))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    expected = (
        r"must have devices of every process.*Got none of process 1. Make it over"
    )
    with pytest.raises(ValueError, match=expected):
        next(Sampler(4, 2).batches(np.arange(4), mesh(2)))


def test_an_empty_batch_names_the_way_out():
    with pytest.raises(ValueError, match=r"one example\. Got none.*with weight 0, as"):
        shard_batch(np.zeros((0, 3)), replicas=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"examples": 0}, r"examples=.*at least 1. Got 0"),
        ({"batch": 0}, r"batch=.*at least 1. Got 0"),
        ({"seed": -1}, r"seed=.*at least 0. Got -1"),
    ],
)
def test_what_is_refused(options, message):
    """Numbers, and data of another length."""
    with pytest.raises(ValueError, match=message):
        Sampler(**{"examples": 5, "batch": 2} | options)
    with pytest.raises(ValueError, match=r"the sampler's 5 examples. Got 4"):
        list(Sampler(5, 2).batches(np.arange(4), replicas=2))
