"""Saved on some devices, restored on others, and trained on as if nothing happened."""

import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import Unavailable, optim
from jdist._checkpoint import StepFolder
from jdist.data_parallel import Sharded, TrainCheckpoints, shard_batch, train_step, zero
from tests.data_parallel.recording import copies_differ
from tests.replicas import over


def losses_of(params, x, key, states):
    """Uses a key and a state, so that both must come back."""
    noise = jax.random.uniform(key, (), params["w"].dtype)
    hidden = jnp.tanh(x @ params["w"] + params["b"][None] + states["mean"][None])
    return hidden.sum(axis=1) ** 2 * (1 + noise), {"mean": x.mean(axis=0) @ params["w"]}


@pytest.fixture
def start(rng):
    """Nothing divides by 3 but the columns; nothing at all by 4."""
    params = {"w": rng.normal(size=(5, 6)), "b": rng.normal(size=6), "n": np.arange(2)}
    state = {"mean": rng.normal(size=6)}
    return params, {"states": state, "key": jax.random.key(5, impl="rbg")}


def steps(where, sharded=True):
    """A training step whose result depends on all that is in the state."""
    opt = optim.adamw(lr=0.05)
    return train_step(losses_of, zero(opt, where) if sharded else opt, **over(where))


def trained(step, state, batches, where):
    """After all batches; and the losses."""
    losses = []
    for x in batches:
        state, metrics = step(state, *shard_batch(x, **over(where)))
        losses.append(float(metrics.loss))
    return state, losses


def undivided(state):
    """All leaves by path, without padding, as NumPy arrays."""
    pairs = jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, Sharded))
    whole = {jax.tree_util.keystr(k, simple=True): x for k, x in pairs}
    return {
        k: np.asarray(x.whole() if isinstance(x, Sharded) else x)
        for k, x in whole.items()
        if not jnp.issubdtype(getattr(x, "dtype", int), jax.dtypes.prng_key)
    }


def test_a_resumed_run_is_the_same_run(start, mesh, rng, tmp_path):
    """Bit for bit, from a new step and other initial values."""
    params, rest = start
    batches = rng.normal(size=(6, 12, 5))
    step = steps(mesh(3))
    state, _ = trained(step, step.init(params, **rest), batches[:3], mesh(3))
    with TrainCheckpoints(tmp_path) as saved:
        assert saved.latest() is None
        saved.save(state)
        whole, losses = trained(step, state, batches[3:], mesh(3))
        assert saved.latest() == 3
    other = jax.tree.map(jnp.zeros_like, params)
    step = steps(mesh(3))
    with TrainCheckpoints(tmp_path) as saved:
        state = saved.restore(step.init(other, **rest))
    resumed, again = trained(step, state, batches[3:], mesh(3))
    assert again == losses
    assert resumed.key == rest["key"]
    found, expected = undivided(resumed), undivided(whole)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
    assert step.compiled._cache_size() == 1


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_on_another_number_of_devices(start, mesh, rng, tmp_path, replicas):
    """Every leaf the same, divided anew; padding neither lost nor gained."""
    params, rest = start
    step = steps(mesh(3))
    before, _ = trained(
        step, step.init(params, **rest), rng.normal(size=(2, 12, 5)), mesh(3)
    )
    step = steps(mesh(replicas))
    with TrainCheckpoints(tmp_path) as saved:
        saved.save(before)
        after = saved.restore(step.init(params, **rest))
    found, expected = undivided(after), undivided(before)
    for path, leaf in expected.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
    assert after.key.sharding == step.init(params, **rest).key.sharding
    moment = after.opt_state["w"].exp_avg
    share = {1: (5, 6), 2: (5, 3), 4: (5, 2)}[replicas]
    assert moment.array.addressable_shards[0].data.shape == share
    assert copies_differ((after.params, after.states, after.step)) == 0
    after, _ = trained(step, after, rng.normal(size=(1, 12, 5)), mesh(replicas))
    assert int(after.step) == 3


def test_sharded_state_for_an_optimizer_that_is_not(start, mesh, rng, tmp_path):
    """The file does not know; one device can go on alone."""
    params, rest = start
    step = steps(mesh(4))
    before, _ = trained(
        step, step.init(params, **rest), rng.normal(size=(1, 12, 5)), mesh(4)
    )
    with TrainCheckpoints(tmp_path) as saved:
        saved.save(before)
        after = saved.restore(steps(1, sharded=False).init(params, **rest))
    expected = before.opt_state["w"].exp_avg.whole()
    np.testing.assert_array_equal(after.opt_state["w"].exp_avg, expected)


def test_only_the_last_are_kept(tmp_path):
    """As many as asked for; any of them can be restored."""
    step = train_step(lambda w, x: w * x, optim.sgd(lr=0.5), replicas=1)
    state = step.init(np.float64(4))
    with TrainCheckpoints(tmp_path, keep=2) as saved:
        for _ in range(4):
            state, _ = step(state, np.ones(1))
            saved.save(state)
        like = step.init(np.float64(0))
        assert float(saved.restore(like).params) == 2.0
        assert float(saved.restore(like, step=3).params) == 2.5
        with pytest.raises(ValueError, match=r"that was saved, \[3, 4\]. Got 2"):
            saved.restore(like, step=2)


def test_no_thread_stays_behind(tmp_path):
    """What is closed has none; orbax's own pools for the process grow when they like.

    A thread left by each would be left in every round.
    """
    step = train_step(lambda w, x: w * x, optim.sgd(lr=0.5), replicas=1)
    state, _ = step(step.init(np.float64(4)), np.ones(1))
    grown = []
    for turn in range(5):
        before = set(threading.enumerate())
        with TrainCheckpoints(tmp_path / str(turn)) as saved:
            saved.save(state)
            assert float(saved.restore(state).params) == 3.5
        grown.append(len(set(threading.enumerate()) - before))
    assert min(grown) == 0


def test_an_unfinished_checkpoint_is_none(tmp_path):
    """What a killed process leaves behind is not taken for a checkpoint."""
    step = train_step(lambda w, x: w * x, optim.sgd(lr=0.5), replicas=1)
    state, _ = step(step.init(np.float64(4)), np.ones(1))
    with TrainCheckpoints(tmp_path) as saved:
        saved.save(state)
    (tmp_path / "2.orbax-checkpoint-tmp-0" / "arrays").mkdir(parents=True)
    with TrainCheckpoints(tmp_path) as saved:
        assert saved.latest() == 1
        assert float(saved.restore(step.init(np.float64(0))).params) == 3.5


@pytest.mark.parametrize(
    ("params", "opt", "message"),
    [
        (
            {"w": np.ones((2, 4))},
            optim.adam(),
            r"float64 of shape \(2, 3\) at opt_state/w/exp_avg. Got float64 of shape "
            r"\(2, 4\)",
        ),
        (
            {"w": np.ones((2, 3), np.float32)},
            optim.adam(),
            r"at opt_state/w/exp_avg. Got float32",
        ),
        ({"w": np.ones((2, 3))}, optim.sgd(), r"at opt_state/w/exp_avg. Got no leaf"),
        (
            {"w": np.ones((2, 3)), "v": np.ones(1)},
            optim.adam(),
            r"no leaf at opt_state/v/exp_avg. Got float64",
        ),
    ],
)
def test_another_state_is_refused(tmp_path, params, opt, message):
    """By the path of the first leaf that differs; nothing is cut to size."""

    def losses(params, x):
        return params["w"].sum() * x

    step = train_step(losses, optim.adam(), replicas=1)
    with TrainCheckpoints(tmp_path) as saved:
        saved.save(step.init({"w": np.ones((2, 3))}))
        with pytest.raises(ValueError, match=message):
            saved.restore(train_step(losses, opt, replicas=1).init(params))
        with pytest.raises(ValueError, match=r"saved, \[0\]. Got 7"):
            saved.restore(step.init({"w": np.ones((2, 3))}), step=7)
        for other in (True, 0.0, "0"):
            rule = r"`restore\(step=...\)` must be a step .*, \[0\], an integer\. Got"
            with pytest.raises(TypeError, match=rule):
                saved.restore(step.init({"w": np.ones((2, 3))}), step=other)


def test_an_empty_folder(tmp_path):
    """Says that nothing was saved."""
    step = train_step(lambda w, x: w * x, optim.sgd(lr=0.5), replicas=1)
    with (
        TrainCheckpoints(tmp_path) as saved,
        pytest.raises(ValueError, match=r"and the folder has none\. Got None\. Is it"),
    ):
        saved.restore(step.init(np.float64(0)))


def test_a_step_is_saved_once(tmp_path):
    """Then come later ones: one before them may be of another run."""
    step = train_step(lambda w, x: w * x, optim.sgd(lr=0.5), replicas=1)
    state, other = step.init(np.float64(4)), step.init(np.float64(7))
    with TrainCheckpoints(tmp_path) as saved:
        saved.save(state)
        message = r"`save\(state\)` must come after the last .* saved, 0\. Got 0\."
        with pytest.raises(ValueError, match=message):
            saved.save(other)
        assert float(saved.restore(other).params) == 4.0
        saved.save(other._replace(step=jnp.int32(3)))
        with pytest.raises(ValueError, match=r"that was saved, 3\. Got 2\. Continue"):
            saved.save(state._replace(step=jnp.int32(2)))
        assert saved.steps() == [0, 3]


def test_parameters_are_no_state(tmp_path):
    """Neither to be saved nor as an example of what was saved."""
    with TrainCheckpoints(tmp_path) as saved:
        with pytest.raises(
            TypeError, match=r"`save\(state\)` must be a TrainState. Go"
        ):
            saved.save({"w": np.ones(2)})
        with pytest.raises(
            TypeError, match=r"`restore\(like=...\)` must be a TrainSta"
        ):
            saved.restore({"w": np.ones(2)})


def test_without_orbax(tmp_path, monkeypatch):
    """What is missing, and how to get it."""
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(Unavailable, match=r"pip install .*\[checkpoint\]'"):
        TrainCheckpoints(tmp_path)


def test_one_checkpoint_is_kept_at_least(tmp_path):
    """And the steps that are there are listed in order."""
    with pytest.raises(ValueError, match=r"TrainCheckpoints\(keep=...\)` must be at"):
        TrainCheckpoints(tmp_path, keep=0)
    step = train_step(lambda w, x: w * x, optim.sgd(lr=0.1), replicas=1)
    state = step.init(np.float64(2))
    with TrainCheckpoints(tmp_path, keep=2) as saved:
        assert (saved.steps(), saved.latest()) == ([], None)
        for _ in range(3):
            state, _ = step(state, np.ones(2))
            saved.save(state)
        assert (saved.steps(), saved.latest()) == ([2, 3], 3)


@pytest.mark.parametrize(
    ("error", "message", "folder", "keep"),
    [
        (TypeError, r"`TrainCheckpoints\(folder\)` must be a path\. Got None", None, 3),
        (ValueError, r"by a path\. Got ''\. The working dir", "", 3),
        (ValueError, r"by a path\. Got 'gs://a/b'\. Mount", "gs://a/b", 3),
        (ValueError, r"by a path\. Got 's3:/a'\. Mount", Path("s3://a"), 3),
        (TypeError, r"\(keep=...\)` must be at least 1, an integer\. Got T", "a", True),
        (TypeError, r"\(keep=...\)` must be at least 1, an integer\. Got 2", "a", 2.0),
    ],
)
def test_where_and_how_many(tmp_path, monkeypatch, error, message, folder, keep):
    """Nothing is made, neither here nor in a folder of the name of a store."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        TrainCheckpoints(folder, keep=keep)
    assert not list(tmp_path.iterdir())


def test_two_leaves_of_one_path_are_refused(tmp_path):
    """Only the second would be on disk."""
    step = train_step(lambda w, x: w["a"]["b"] * x, optim.sgd(lr=0.5), replicas=1)
    twins = {"a/b": np.float64(1), "a": {"b": np.float64(2)}}
    state = step.init({"a": {"b": np.float64(2)}})._replace(params=twins)
    with TrainCheckpoints(tmp_path) as saved:
        with pytest.raises(ValueError, match=r"Got params/a/b twice\."):
            saved.save(state)
        assert saved.steps() == []


def test_a_folder_that_another_one_writes_to(tmp_path):
    """What is written elsewhere is seen; a step before it, written since, stays."""
    with StepFolder(tmp_path) as first, StepFolder(tmp_path) as second:
        for folder, step in ((second, 5), (first, 3)):
            folder.write(step, {"arrays": {"w": np.full(2, step)}}, {"at": step})
            assert first.steps() == sorted({5, step})
        assert second.steps() == [3, 5]
        assert second.description(3) == {"at": 3}


COME_AND_GO = """
import os, sys, time
while True:
    os.mkdir(sys.argv[1])
    time.sleep(0.003)
    os.rmdir(sys.argv[1])
"""


def test_another_process_may_delete_while_the_folder_is_looked_at(tmp_path):
    """Between the listing and the look at a step, that step goes."""
    command = [sys.executable, "-S", "-c", COME_AND_GO, str(tmp_path / "7")]
    with subprocess.Popen(command) as process:
        try:
            for _ in range(60):
                with TrainCheckpoints(tmp_path) as saved:
                    assert set(saved.steps()) <= {7}
        finally:
            process.kill()
