"""Hooks and buckets inside a training step, and what they keep from step to step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jdist import optim
from jdist.data_parallel import (
    TrainCheckpoints,
    hooks,
    shard_batch,
    train_step,
    value_and_grad,
)
from tests.data_parallel.recording import copies_differ
from tests.replicas import over


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
    step = train_step(
        losses_of, optim.sgd(lr=0.05), **over(where), hook=hook(), accumulate=2
    )
    state, found = step.init(params), []
    for t in range(50):
        sizes = np.roll((14, 8, 2), t)
        shards = shard_batch(batch, **over(where), sizes=sizes, rows=14)
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
    opt = optim.sgd(lr=lambda count: 0.1, weight_decay=0.5)
    step = train_step(losses_of, opt, mesh(2), hook=hooks.bf16())
    state, _ = step(step.init(params), *shard_batch(batch, mesh(2)))
    np.testing.assert_array_equal(state.params["unused"], params["unused"])
    assert int(state.opt_state["unused"].step) == 0
    assert int(state.opt_state["w"].step) == 1


def test_a_hooks_state_is_saved(problem, mesh, tmp_path):
    """Restored into what `init` makes, and into a state with the hook's structure."""
    params, batch = problem
    shards = shard_batch(batch, mesh(2), (20, 4))

    def new():
        hook = hooks.power_sgd(rank=2, start=1)
        return train_step(losses_of, optim.sgd(lr=0.1), mesh(2), hook=hook)

    step = new()
    state = step.init(params)
    for _ in range(3):
        state, _ = step(state, *shards)
    with TrainCheckpoints(tmp_path) as saved:
        saved.save(state)
        state, metrics = step(state, *shards)
        step = new()
        like = step.init(params)
        made = like._replace(hook_state=step.start(like, *shards))
        left_out = [saved.restore(x, hook_state=False) for x in (like, made)]
        assert [x.hook_state for x in left_out] == [None, None]
        restored = [saved.restore(like), saved.restore(made)]
        saved_again = restored[0]._replace(step=restored[0].step + 1)
        saved.save(saved_again)
        restored.append(saved.restore(made)._replace(step=made.step + 3))
    for again in restored:
        again, repeated = step(again, *shards)
        assert float(repeated.loss) == float(metrics.loss)
        assert jax.tree.structure(again) == jax.tree.structure(state)
        same(again, state)
    assert step.compiled._cache_size() == 1
    # The hook counts: what was left out shows in the next step but one.
    anew, _ = step(left_out[0], *shards)
    assert not np.array_equal(anew.params["w"], state.params["w"])


def test_a_hooks_state_is_restored_on_other_devices(problem, mesh, tmp_path):
    params, batch = problem
    hook = hooks.error_feedback(hooks.bf16())
    others = jax.devices()[2:4]
    elsewhere = Mesh(np.array(others), ("data",))
    steps = [
        train_step(losses_of, optim.sgd(lr=0.1), **over(place), hook=hook)
        for place in (mesh(2), elsewhere)
    ]
    state, _ = steps[0](steps[0].init(params), *shard_batch(batch, mesh(2)))
    with TrainCheckpoints(tmp_path) as saved:
        saved.save(state)
        again = saved.restore(steps[1].init(params))
    found = jax.tree.leaves(again.hook_state)
    assert [[x.data.shape[0] for x in leaf.addressable_shards] for leaf in found] == (
        [[1, 1]] * len(found)
    )
    assert {d for leaf in found for d in leaf.devices()} == set(others)
    same(again.hook_state, state.hook_state)
    steps[1](again, *shard_batch(batch, **over(elsewhere)))


def same(one, other):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_on_one_device_too_a_hooks_state_is_saved(problem, tmp_path):
    """By `vmap`, where it was `error_feedback` around a hook without a state."""
    params, batch = problem
    hook = hooks.error_feedback(hooks.int8_per_tensor())
    step = train_step(losses_of, optim.sgd(lr=0.1), replicas=2, hook=hook)
    state, _ = step(step.init(params), *shard_batch(batch, replicas=2))
    with TrainCheckpoints(tmp_path) as saved:
        saved.save(state)
        again = saved.restore(step.init(params))
    step.lower(again, *shard_batch(batch, replicas=2))
    same(*(step(each, *shard_batch(batch, replicas=2)) for each in (again, state)))


def test_a_hooks_state_of_others_is_refused(problem, mesh, tmp_path):
    """Of other replicas, of another hook, and where there is none; not dropped."""
    params, batch = problem

    def made(where, hook):
        return train_step(losses_of, optim.sgd(lr=0.1), **over(where), hook=hook)

    feedback = hooks.error_feedback(hooks.bf16())
    step, shards = made(4, feedback), shard_batch(batch, replicas=4)
    state, _ = step(step.init(params), *shards)
    fresh = r"the hook begins anew, as in `state\._replace\(hook_state=None\)`"
    with TrainCheckpoints(tmp_path) as saved:
        saved.save(state)
        like = made(mesh(2), feedback).init(params)
        expected = r"must be for 4 replicas, .*Got one for 2\. .*hook_state=False\)`"
        with pytest.raises(ValueError, match=expected):
            saved.restore(like)
        assert saved.restore(like, hook_state=False).hook_state is None
        read = saved.restore(made(2, feedback).init(params))
    for given, other, expected in (
        (state, made(2, feedback), r"kept of 2 replicas\. Got .*\(4, 120\)\."),
        (read, made(2, feedback), r"\(2, 120\) at hook_state/0/1\. Got .*\(4, 120\)"),
        (read, made(4, hooks.power_sgd(start=1)), r"at hook_state/0/0\. Got no leaf"),
    ):
        with pytest.raises(ValueError, match=f"{expected}.*{fresh}"):
            other(given, *shards)
    plain = made(4, hooks.bf16())
    expected = r"must have no hook_state, .*Got 1 arrays\. .*`state\._replace\(hook_s"
    for given in (state, read):
        with pytest.raises(ValueError, match=expected):
            plain(given, *shards)
    fn = value_and_grad(losses_of, replicas=2, hook=feedback)
    with pytest.raises(ValueError, match=r"`fn\(hook_state=...\)` .*of 2 replicas"):
        fn(params, *shards, state.hook_state)
    plain(state._replace(hook_state=None), *shards)


def test_keys_that_a_hook_keeps_need_its_structure(problem, tmp_path):
    """The file has their words only."""
    params, batch = problem

    def reduce(key, bucket):
        total = jax.lax.psum(bucket.buffer, bucket.axis_name)
        return jax.random.split(key)[0], bucket.replaced(total)

    hook = hooks.Hook("noisy", reduce, lambda bucket: jax.random.key(3))
    step, shards = (
        train_step(losses_of, optim.sgd(), replicas=2, hook=hook),
        shard_batch(batch, replicas=2),
    )
    state, _ = step(step.init(params), *shards)
    with TrainCheckpoints(tmp_path) as saved:
        saved.save(state)
        like = step.init(params)
        with pytest.raises(
            ValueError, match=r"keeps PRNG keys\. Got none, .*step\.star"
        ):
            saved.restore(like)
        like = like._replace(hook_state=step.start(like, *shards))
        again = saved.restore(like)
    keys = [jax.random.key_data(x.hook_state[0]) for x in (again, state)]
    np.testing.assert_array_equal(*keys)
