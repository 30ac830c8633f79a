"""Hooks and buckets inside a training step, and what they keep from step to step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim
from jdist.data_parallel import Checkpoints, hooks, shard_batch, train_step
from tests.data_parallel.recording import copies_differ


def losses_of(params, batch):
    """A regression with a matrix large enough to compress."""
    x, y = batch
    return ((jnp.tanh(x @ params["w"]) - y) ** 2).sum(axis=1)


@pytest.fixture
def problem(rng):
    """float32, as hooks are used."""
    params = {"w": rng.normal(size=(12, 10)).astype(np.float32) / 4}
    target = rng.normal(size=(12, 10)).astype(np.float32) / 4
    x = rng.normal(size=(24, 12)).astype(np.float32)
    return params, (x, np.tanh(x @ target))


@pytest.mark.parametrize(
    ("hook", "stateful"),
    [
        (lambda: hooks.bf16(), False),
        (lambda: hooks.error_feedback(hooks.int8_per_tensor()), True),
        (lambda: hooks.power_sgd(rank=2, start=1), True),
    ],
)
@pytest.mark.parametrize("kind", ["devices", "vmap"])
def test_fifty_steps(problem, mesh, hook, stateful, kind):
    """It learns, replicas stay the same, and nothing is compiled again."""
    params, batch = problem
    where = mesh(3) if kind == "devices" else 3
    step = train_step(losses_of, optim.sgd(lr=0.05), where, hook=hook(), accumulate=2)
    state, found = step.init(params), []
    for t in range(50):
        sizes = np.roll((14, 8, 2), t)
        shards = shard_batch(batch, where, sizes, rows=14)
        state, metrics = step(state, *shards)
        found.append(float(metrics.loss))
        assert copies_differ((state.params, state.opt_state)) == 0
    assert found[-1] < found[0] / 10
    assert step.compiled._cache_size() == 1
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(state.hook_state)}
    assert rows == ({3} if stateful else set())


def test_a_lossless_hook_is_no_hook(problem, mesh):
    """To rounding, with buckets and without."""
    params, batch = problem
    found = []
    for options in ({}, {"hook": hooks.all_reduce()}, {"bucket_cap_mb": 0.0001}):
        step = train_step(losses_of, optim.sgd(lr=0.1), mesh(2), **options)
        state, _ = step(step.init(params), *shard_batch(batch, mesh(2), (20, 4)))
        found.append(np.asarray(state.params["w"]))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=0, atol=2e-7)


def test_unused_parameters_and_hooks(problem, mesh):
    """None passes a hook by."""
    params, batch = problem
    params = params | {"unused": np.ones(3, np.float32)}
    opt = optim.sgd(lr=0.1, weight_decay=0.5)
    step = train_step(losses_of, opt, mesh(2), hook=hooks.bf16())
    state, _ = step(step.init(params), *shard_batch(batch, mesh(2)))
    np.testing.assert_array_equal(state.params["unused"], params["unused"])
    assert int(state.opt_state["unused"].step) == 0
    assert int(state.opt_state["w"].step) == 1


def test_a_hooks_state_is_saved(problem, mesh, tmp_path):
    """Restored for as many replicas; left out where the new state has none."""
    params, batch = problem
    shards = shard_batch(batch, mesh(2), (20, 4))

    def new():
        hook = hooks.power_sgd(rank=2, start=1)
        return train_step(losses_of, optim.sgd(lr=0.1), mesh(2), hook=hook)

    step = new()
    state = step.init(params)
    for _ in range(3):
        state, _ = step(state, *shards)
    with Checkpoints(tmp_path) as saved:
        saved.save(state)
        state, metrics = step(state, *shards)
        step = new()
        like = step.init(params)
        assert saved.restore(like).hook_state is None
        like = like._replace(hook_state=step.start(like, *shards))
        again = saved.restore(like)
    again, repeated = step(again, *shards)
    assert float(repeated.loss) == float(metrics.loss)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, other)
