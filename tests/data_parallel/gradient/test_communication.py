"""Hooks and buckets inside `value_and_grad`: right, replicated, counted."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jdist import verify
from jdist.data_parallel import hooks, shard_batch, value_and_grad
from tests.replicas import over

SIZES = (4, 0, 3)


def losses_of(params, batch):
    """Two layers of two dtypes, one used twice, and a parameter that is not used."""
    hidden = jnp.tanh(batch @ params["w"] + params["b"][None])
    hidden = hidden @ params["v"].astype(batch.dtype)
    return (jnp.tanh(hidden) @ params["w"]).sum(axis=1) ** 2


@pytest.fixture
def problem(rng):
    """Seven examples with weights, one of them 0."""
    params = {
        "w": jnp.asarray(rng.normal(size=(8, 8))),
        "b": jnp.asarray(rng.normal(size=8)),
        "v": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32),
        "unused": jnp.asarray(rng.normal(size=4)),
        "steps": jnp.arange(2),
    }
    weights = rng.uniform(0.5, 2, size=7)
    weights[2] = 0
    return params, rng.normal(size=(7, 8)), weights


@cache
def judge(reduction):
    """Compiled once for each reduction."""
    return verify.gradients_judge(losses_of, reduction=reduction)


def plain(state, bucket):
    """A hook may be a function."""
    return state, bucket.replaced(jax.lax.psum(bucket.buffer, bucket.axis_name))


EXACT = {
    "all_reduce": hooks.all_reduce(),
    "a function": plain,
    "switch": hooks.switch(hooks.all_reduce(), hooks.fp16(), at=1),
    "before its start": hooks.power_sgd(start=1),
    "feedback": hooks.error_feedback(hooks.all_reduce()),
}


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_lossless_hooks_are_within_the_bound(problem, mesh, reduction):
    """Uneven shards, an empty one among them; each hook with its own bucket limit."""
    params, batch, weights = problem
    candidates = {}
    for limit, (name, hook) in enumerate(EXACT.items()):
        where = mesh(3) if limit % 2 else 3
        fn = value_and_grad(
            losses_of, **over(where), reduction=reduction, hook=hook,
            bucket_cap_mb=limit * 200 / 2**20,
        )  # fmt: skip
        shards = shard_batch(batch, **over(where), sizes=SIZES, weights=weights)
        candidates[name] = lambda p, b, fn=fn, s=shards: fn(p, *s)[:2]
    report = judge(reduction)(
        params, batch, candidates, weights=weights, finite_differences=False
    )
    report.raise_if_failed()


@cache
def compiled():
    """One program for all sizes and weights: three rows of up to nine examples."""
    return value_and_grad(
        losses_of, replicas=3, hook=hooks.all_reduce(), bucket_cap_mb=1e-4
    )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any),
    st.integers(0, 2**31),
)
def test_any_sizes_and_weights(sizes, seed):
    """Weights over six magnitudes, a third of them 0, but not all."""
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    weights = 10.0 ** rng.uniform(-4, 2, size=count)
    weights[rng.uniform(size=count) < 0.3] = 0
    weights[rng.integers(count)] = 1
    params = {
        "w": jnp.asarray(rng.normal(size=(8, 8))),
        "b": jnp.asarray(rng.normal(size=8)),
        "v": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32),
    }
    x = rng.normal(size=(count, 8))
    loss, gradient = compiled()(
        params, *shard_batch(x, replicas=3, sizes=tuple(sizes), weights=weights, rows=9)
    )
    # Rows of weight 0 fill the batch to 27, so that this too is compiled once.
    rows, padded = np.resize(x, (27, 8)), np.zeros(27)
    padded[:count] = weights
    wanted, expected = whole(params, rows, padded)
    np.testing.assert_allclose(loss, wanted, rtol=1e-12)
    for name in ("w", "b"):
        scale = float(jnp.abs(expected[name]).max())
        np.testing.assert_allclose(gradient[name], expected[name], atol=1e-11 * scale)


@jax.jit
def whole(params, rows, weights):
    """One device's weighted mean."""
    return jax.value_and_grad(
        lambda p: jnp.sum(weights * losses_of(p, rows)) / jnp.sum(weights)
    )(params)


LOSSY = {
    "bf16": hooks.bf16(),
    "int8": hooks.error_feedback(hooks.int8_per_channel(16)),
    "power_sgd": hooks.power_sgd(start=1, min_compression_rate=1),
}


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_hooks_leave_replicas_alike(problem, mesh, name):
    """Bit for bit, over three steps, near the gradient and not equal to it."""
    params, batch, weights = problem
    shards = shard_batch(batch, mesh(3), SIZES, weights=weights)
    _, wanted = value_and_grad(losses_of, mesh(3))(params, *shards)
    fn = value_and_grad(losses_of, mesh(3), hook=LOSSY[name])
    state = ()
    for _ in range(3):
        _, gradient, *state = fn(params, *shards, *state)
        for leaf in jax.tree.leaves(gradient):
            copies = {np.asarray(s.data).tobytes() for s in leaf.addressable_shards}
            assert len(copies) == 1
    assert gradient["steps"] is None
    assert gradient["v"].dtype == jnp.float32
    error = np.linalg.norm(gradient["w"] - wanted["w"])
    assert 0 < error < 0.5 * np.linalg.norm(wanted["w"])


def test_a_hooks_state_is_divided_over_the_mesh(problem, mesh):
    """One row per replica; what replicas without examples keep is zero."""
    params, batch, weights = problem
    fn = value_and_grad(
        losses_of, mesh(3), hook=hooks.error_feedback(hooks.int8_per_tensor())
    )
    shards = shard_batch(batch, mesh(3), SIZES, weights=weights)
    _, first, state = fn(params, *shards)
    errors = jax.tree.leaves(state)
    assert [e.shape for e in errors] == [(3, 64), (3, 76)]
    assert {e.sharding.spec for e in errors} == {PartitionSpec("data")}
    for error in errors:
        assert np.any(error[0] != 0)
        assert np.all(error[1] == 0)
    # Together with the next step's, nothing but that step's error is missing.
    _, second, state = fn(params, *shards, hook_state=state)
    _, exact = value_and_grad(losses_of, mesh(3))(params, *shards)
    missing = 2 * exact["v"] - first["v"] - second["v"]
    left = np.asarray(jax.tree.leaves(state)[0]).sum(axis=0).reshape(8, 8)
    np.testing.assert_allclose(missing, left, atol=1e-5)


def test_a_step_that_is_not_finite_is_forgotten(problem):
    """The gradient is NaN; the hook's state stays as it was, its count included."""
    params, batch, weights = problem
    hook = hooks.power_sgd(start=2, min_compression_rate=1)
    fn = value_and_grad(losses_of, replicas=3, hook=hook)
    shards, weights = shard_batch(batch, replicas=3, sizes=SIZES, weights=weights)
    _, _, state = fn(params, shards, weights)
    broken = shards.at[0, 0].set(np.nan)
    loss, gradient, same = fn(params, broken, weights, state)
    assert np.isnan(loss)
    assert np.isnan(gradient["w"]).any()
    assert verify.compare(state, same).bit_equal


def test_nothing_is_compiled_twice(problem):
    """One trace for the step, one for the first state."""
    params, batch, weights = problem
    traces = 0

    def counted(params, batch):
        nonlocal traces
        traces += 1
        return losses_of(params, batch)

    fn = value_and_grad(counted, replicas=3, hook=hooks.power_sgd(start=1))
    shards = shard_batch(batch, replicas=3, sizes=SIZES, weights=weights)
    state = None
    for _ in range(4):
        _, _, state = fn(params, *shards, state)
    assert traces == 2


def test_collectives_of_hooks(problem, mesh):
    """Two buckets: two collectives, of PowerSGD two each; loss and weight in one, which
    XLA joins to that of a bucket where it can.

    And one for the total of the weights before the backward pass.
    """
    params, batch, _ = problem
    shards = shard_batch(batch, mesh(2))
    power = hooks.power_sgd(start=0, min_compression_rate=1)
    for hook, count in ((plain, 3), (hooks.int8_per_channel(), 4), (power, 5)):
        fn = value_and_grad(losses_of, mesh(2), hook=hook)
        lowered = jax.jit(lambda *a, fn=fn: fn(*a)).lower(params, *shards)
        text = lowered.compile().as_text()
        found = re.findall(r" all-(?:reduce|gather)(?:-start)?\(", text)
        assert len(found) == count, hook


def test_one_replica_has_nothing_to_exchange(problem, mesh):
    """No collective and no copy into a bucket in the compiled program."""
    params, batch, weights = problem
    fn = value_and_grad(losses_of, mesh(1))
    text = jax.jit(fn).lower(params, batch, weights).compile().as_text()
    assert "all-reduce" not in text
    assert "concatenate" not in text
    reference = judge("mean")
    reference(params, batch, {"one": lambda p, b: fn(p, b, weights)},
              weights=weights, finite_differences=False).raise_if_failed()  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bucket_cap_mb": -1}, ValueError, r"bucket_cap_mb=...\)` must be at least 0"),
        ({"bucket_cap_mb": "1"}, TypeError, "must be None, or limits in MiB"),
        ({"bucket_cap_mb": []}, ValueError, "must have at least one limit"),
        ({"hook": "bf16"}, TypeError, "must be a hook, such as .* Got 'bf16'"),
        (
            {"hook": plain, "method": "all_gather"},
            ValueError,
            "must be left out where a hook sums the gradients. Got 'all_gather'",
        ),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    """Before anything is compiled."""
    with pytest.raises(error, match=message):
        value_and_grad(losses_of, replicas=2, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hook": lambda s, b: (s, b.buffer)}, r"must return \(state, bucket\)"),
        (
            {"hook": lambda s, b: (s, b.replaced(b.buffer[:-1]))},
            r"Got float32 of shape \(63,\), not float32 of shape \(64,\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(problem, options, message):
    """When it is first called."""
    params, batch, _ = problem
    fn = value_and_grad(losses_of, replicas=1, **options)
    with pytest.raises(ValueError, match=message):
        fn(params, batch)


def test_a_state_for_nobody_is_refused(problem):
    """A hook that keeps nothing is given nothing."""
    params, batch, weights = problem
    fn = value_and_grad(losses_of, replicas=1, hook=plain)
    with pytest.raises(ValueError, match="must be None for a hook that keeps no state"):
        fn(params, batch, weights, hook_state=())
