"""Hooks by themselves: what they add up to, how far off, what they remember."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.data_parallel import hooks
from jdist.data_parallel.hooks import Bucket, Hook
from jdist.data_parallel.step.local_sgd import group_mean
from tests.data_parallel.hook_runs import bucket_of, run_hook

STEPS, REPLICAS, SIZE = 3, 4, 1300
LOSSY = {
    "bf16": hooks.bf16(),
    "fp16": hooks.fp16(),
    "int8_per_tensor": hooks.int8_per_tensor(),
    "int8_per_channel": hooks.int8_per_channel(100),
    "power_sgd": hooks.power_sgd(start=1),
    "fp16(int8)": hooks.fp16(hooks.int8_per_channel(64)),
    "feedback": hooks.error_feedback(hooks.int8_per_tensor()),
}
SHAPES = [(20, 5, 10), (), (7,), (12, 24), (4,)]


@pytest.fixture
def shares(rng):
    """Magnitudes from 1e-5 to 1e2, one replica without examples."""
    scale = 10.0 ** rng.uniform(-5, 2, size=SIZE)
    shares = rng.normal(size=(STEPS, REPLICAS, SIZE)) * scale
    shares[:, 2] = 0
    return shares.astype(np.float32)


def exact(shares):
    """The sum over replicas in float64."""
    return shares.astype(np.float64).sum(axis=1)


def test_all_reduce_is_the_sum(shares, mesh):
    """To the last bit in rank order, on devices and under vmap."""
    in_order = shares[:, 0] + shares[:, 1] + shares[:, 2] + shares[:, 3]
    for where in (None, mesh(REPLICAS)):
        results, sent = run_hook(hooks.all_reduce(), shares, where=where)
        bound = 3 * 2.0**-24 * np.abs(shares).sum(axis=1)
        for replica in range(REPLICAS):
            assert np.all(np.abs(results[:, replica] - exact(shares)) <= bound)
            assert results[:, replica].tobytes() == results[:, 0].tobytes()
        np.testing.assert_array_equal(sent, shares)
    assert in_order.shape == results[:, 0].shape


@pytest.mark.parametrize("name", LOSSY)
def test_replicas_agree_to_the_last_bit(name, shares, mesh):
    """On devices, whatever is lost; and what they sent adds up to what they got."""
    results, sent = run_hook(
        LOSSY[name], shares, shapes=SHAPES, where=mesh(REPLICAS),
        weights=np.array([0.5, 0.25, 0.0, 0.25]),
    )  # fmt: skip
    for replica in range(REPLICAS):
        assert results[:, replica].tobytes() == results[:, 0].tobytes()
    unit = 2.0**-7 if "16" in name else 2.0**-20
    slack = unit * np.abs(sent).sum(axis=1) + 1e-6
    assert np.all(np.abs(sent.astype(np.float64).sum(axis=1) - results[:, 0]) <= slack)
    assert np.any(results[-1, 0] != exact(shares)[-1].astype(np.float32))


@pytest.mark.parametrize(
    ("hook", "unit", "tiny"),
    [(hooks.fp16(), 2.0**-11, 2.0**-25), (hooks.bf16(), 2.0**-8, 2.0**-134)],
)
def test_sixteen_bits_stay_within_their_bound(hook, unit, tiny, shares):
    """|error| <= ((1 + u)^K - 1) S + K tiny; and the bound is not idle."""
    results, sent = run_hook(hook, shares)
    error = np.abs(results[:, 0] - exact(shares))
    size = np.abs(shares).sum(axis=1)
    bound = ((1 + unit) ** REPLICAS - 1) * size + REPLICAS * tiny
    assert np.all(error <= bound)
    assert np.max(error / bound) > 0.1
    kind = "float16" if unit < 2.0**-9 else "bfloat16"
    narrow = shares.astype(jnp.dtype(kind)).astype(np.float32)
    np.testing.assert_array_equal(sent, narrow)


def steps_of(shares, channel):
    """For each number the scale of its channel, by replica: `(steps, replicas, n)`."""
    lead, size = shares.shape[:2], shares.shape[2]
    padded = np.pad(shares, ((0, 0), (0, 0), (0, -size % channel)))
    cut = padded.reshape(*lead, -1, channel)
    spread = np.maximum(cut.max(-1), 0) - np.minimum(cut.min(-1), 0)
    return np.repeat(spread / 255, channel, axis=-1)[..., :size]


@pytest.mark.parametrize(
    ("hook", "channel"),
    [(hooks.int8_per_tensor(), SIZE), (hooks.int8_per_channel(100), 100)],
)
def test_int8_stays_within_half_a_step_per_replica(hook, channel, shares):
    """Channels bound the error by their own range; and the bound is nearly reached."""
    results, sent = run_hook(hook, shares)
    steps = steps_of(shares, channel)
    # Beyond half a step: the roundings of the quotient and of K sums of at most S.
    rounding = 2.0**-22 * (np.abs(shares) + 256 * steps)
    assert np.all(np.abs(sent - shares) <= steps / 2 + rounding)
    bound = (steps / 2 + REPLICAS * rounding).sum(axis=1)
    error = np.abs(results[:, 0] - exact(shares))
    assert np.all(error <= bound)
    assert np.max(error / bound) > 0.5


def test_int8_keeps_zero_and_what_is_on_its_levels(rng):
    """0 is a level whatever the range; so is every multiple of the scale."""
    levels = rng.integers(-100, 156, size=(1, 2, 300)).astype(np.float32)
    levels[:, :, :3] = [-100, 155, 0]
    scale = np.array([2.0**-30, 0.5], np.float32)[None, :, None]
    results, _ = run_hook(hooks.int8_per_tensor(), levels * scale)
    np.testing.assert_array_equal(results[:, 0], (levels * scale).sum(axis=1))


@pytest.mark.parametrize("inner", [hooks.int8_per_tensor(), hooks.int8_per_channel(64)])
def test_int8_of_16_bit_buckets_has_their_range(inner, rng):
    """From -45000 to 45000 is further than float16 reaches; within a step even so."""
    shares = rng.uniform(-1, 1, size=(1, 2, 128)).astype(np.float32) * 20000
    shares[0, 0, ::64], shares[0, 0, 1::64] = 45000, -45000
    results, _ = run_hook(hooks.fp16(inner), shares)
    steps = (np.ptp(shares[0], axis=1) / 255).sum()
    # Half a step each, and the roundings to float16: of shares, and of the result.
    bound = steps / 2 + 3 * 2.0**-11 * 65000
    np.testing.assert_allclose(results[0, 0], shares[0].sum(axis=0), rtol=0, atol=bound)


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_not_finite_is_not_hidden(name, shares):
    """A NaN of one replica is NaN on all."""
    shares[1, 3, 17] = np.nan
    results, _ = run_hook(LOSSY[name], shares, shapes=SHAPES)
    assert np.isnan(results[1, :, 17]).all()


# --- PowerSGD ---


def test_power_sgd_sends_low_rank_exactly(rng):
    """A sum of rank 2 with rank=2, and vectors; where rank=1 does not suffice."""
    factors = rng.normal(size=(3, 12, 2)), rng.normal(size=(3, 2, 20))
    matrices = np.matmul(*factors)
    vectors = rng.normal(size=(3, 5))
    shares = np.concatenate([matrices.reshape(3, -1), vectors], axis=1)[None]
    shares[:, 1:, :240] = shares[:, :1, :240] * np.array([[0.5], [-3.0]])
    shapes = [(12, 4, 5), (5,)]
    found = {
        rank: run_hook(
            hooks.power_sgd(rank=rank, start=0, min_compression_rate=1),
            shares, shapes=shapes,
        )[0][0, 0]
        for rank in (1, 2)
    }  # fmt: skip
    wanted = shares[0].sum(axis=0)
    np.testing.assert_allclose(found[2], wanted, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found[1][240:], wanted[240:], rtol=0, atol=1e-12)
    assert np.abs(found[1] - wanted)[:240].max() > 0.1


def test_power_sgd_turns_to_the_leading_directions(rng):
    """Warm start on one gradient again and again: the best approximation of rank 2."""
    u, _, v = np.linalg.svd(rng.normal(size=(16, 30)), full_matrices=False)
    values = np.array([8, 4, 1.0, 0.5, 0.25, *[0.1] * 11])
    matrix = (u * values) @ v
    parts = rng.dirichlet([1, 1, 1])[:, None] * matrix.reshape(1, -1)
    shares = np.repeat(parts[None], 12, axis=0)
    results, _ = run_hook(
        hooks.power_sgd(rank=2, start=0, error_feedback=False),
        shares,
        shapes=[(16, 30)],
    )
    errors = np.linalg.norm(results[:, 0] - matrix.reshape(-1), axis=1)
    best = np.linalg.norm(values[2:])
    assert errors[0] > 1.1 * best
    np.testing.assert_allclose(errors[-1], best, rtol=1e-4)


@pytest.mark.parametrize(
    "hook",
    [
        hooks.power_sgd(start=0),
        hooks.power_sgd(start=2, rank=2, warm_start=False),
        hooks.error_feedback(hooks.int8_per_tensor()),
        hooks.error_feedback(hooks.int8_per_channel(16)),
    ],
    ids=lambda hook: hook.name,
)
def test_with_error_feedback_nothing_is_lost(hook, rng):
    """Over 40 steps the results add up to the gradients but for the last error.

    Without feedback the error of a constant gradient would grow with the steps.
    """
    steps = 40
    constant = rng.normal(size=(1, 3, 480))
    shares = constant + 0.1 * rng.normal(size=(steps, 3, 480))
    results, sent = run_hook(hook, shares, shapes=[(16, 30)])
    missing = shares.sum(axis=(0, 1)) - results[:, 0].sum(axis=0)
    errors = (np.cumsum(shares, axis=0) - np.cumsum(sent, axis=0)).sum(axis=1)
    np.testing.assert_allclose(missing, errors[-1], atol=1e-3)
    # Rank 1 of 16 sends each direction in turn: its error may hold some steps' worth.
    norms = np.linalg.norm(errors, axis=1)
    assert norms[-1] <= 1.5 * norms[steps // 2] + 1e-9
    assert norms[-1] < 0.6 * np.linalg.norm(shares.sum(axis=(0, 1)))


def test_power_sgd_is_seeded(rng):
    """Another seed, another approximation; the same seed, the same bits."""
    shares = rng.normal(size=(2, 2, 480))
    for warm in (True, False):
        first, again, other = (
            run_hook(
                hooks.power_sgd(start=0, seed=seed, warm_start=warm), shares,
                shapes=[(16, 30)],
            )[0]
            for seed in (3, 3, 4)
        )  # fmt: skip
        assert first.tobytes() == again.tobytes()
        assert np.abs(first - other).max() > 1e-3


def test_before_its_start_power_sgd_is_the_sum(rng):
    """For two steps, then not; the count does not move past the start."""
    shares = rng.normal(size=(4, 2, 480))
    results, _ = run_hook(hooks.power_sgd(start=2), shares, shapes=[(16, 30)])
    right = np.abs(results[:, 0] - shares.sum(axis=1)).max(axis=1) < 1e-12
    assert right.tolist() == [True, True, False, False]


def test_small_matrices_are_not_compressed(rng):
    """(n + m) r rate < n m decides: 16 x 30 at rank 1 is 10.4 times smaller."""
    shares = rng.normal(size=(1, 2, 480))
    wanted = shares.sum(axis=1)
    for rate, is_exact in ((10.4, False), (10.5, True)):
        hook = hooks.power_sgd(start=0, min_compression_rate=rate)
        results, _ = run_hook(hook, shares, shapes=[(16, 30)])
        assert (np.abs(results[0, 0] - wanted).max() < 1e-12) == is_exact


def test_a_gradient_of_zero_stays_zero():
    """No direction to project on, and no NaN."""
    shares = np.zeros((3, 2, 480))
    results, _ = run_hook(hooks.power_sgd(start=0), shares, shapes=[(16, 30)])
    np.testing.assert_array_equal(results, 0)


# --- local SGD, and what is refused ---


@pytest.mark.parametrize("on_devices", [False, True])
def test_groups_of_local_sgd_average(rng, mesh, on_devices):
    """All for one step, then groups of two: each the mean over its own examples."""
    counts = np.array([3.0, 1.0, 0.0, 0.0])
    own = rng.normal(size=(2, 4, 5))
    own[:, 2:] = 0
    weights = counts / counts.sum()
    shares = weights[None, :, None] * own
    results, _ = run_hook(
        hooks.switch(hooks.all_reduce(), group_mean(2), at=1), shares, weights=weights,
        where=mesh(4) if on_devices else None,
    )  # fmt: skip
    mean = (3 * own[:, 0] + own[:, 1]) / 4
    for replica in range(4):
        np.testing.assert_allclose(results[0, replica], mean[0], atol=1e-15)
        wanted = mean[1] if replica < 2 else 0
        np.testing.assert_allclose(results[1, replica], wanted, atol=1e-15)


def test_alone_each_keeps_its_own_gradient(rng):
    """A group of one undoes the weighting."""
    own = rng.normal(size=(1, 3, 5))
    weights = np.array([0.5, 0.2, 0.3])
    shares = weights[None, :, None] * own
    results, _ = run_hook(group_mean(1), shares, weights=weights)
    np.testing.assert_allclose(results, own, atol=1e-15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: hooks.int8_per_channel(0),
            r"channel=...\)` must be at least 1. Got 0",
        ),
        (lambda: hooks.power_sgd(rank=0), r"rank=...\)` must be at least 1. Got 0"),
        (lambda: hooks.power_sgd(start=-1), r"start=...\)` must be at least 0. Got -1"),
        (
            lambda: hooks.power_sgd(min_compression_rate=0),
            "must be above 0. Got 0",
        ),
        (lambda: hooks.switch(hooks.bf16(), hooks.fp16(), -2), "at least 0. Got -2"),
        (lambda: group_mean(0), r"LocalSGD\(group_size=...\)` must be at least 1"),
    ],
)
def test_wrong_options_are_refused(make, message):
    """When the hook is made."""
    with pytest.raises(ValueError, match=message):
        make()


def test_groups_must_divide_the_replicas(rng):
    """Seen when it is used."""
    with pytest.raises(ValueError, match=r"must divide the 4 replicas. Got 3"):
        run_hook(group_mean(3), rng.normal(size=(1, 4, 5)))


@pytest.mark.parametrize("name", LOSSY)
def test_complex_gradients_are_refused(name):
    """By every hook that rounds real numbers."""
    bucket = bucket_of(jnp.zeros(480, complex), [(16, 30)], jnp.float64(1))
    hook = LOSSY[name]

    def run(buffer):
        state = hook.start(bucket)
        return hook.reduce(state, bucket.replaced(buffer))[1].buffer

    with pytest.raises(
        TypeError, match=r"must be used with real gradients. Got complex"
    ):
        jax.vmap(run, axis_name="data")(jnp.zeros((2, 480), complex))


def test_the_bucket_is_what_a_hook_needs():
    """Its gradients in their shapes, and copies with another buffer."""
    buffer = jnp.arange(7.0)
    bucket = bucket_of(buffer, [(2, 3), ()], jnp.float64(0.5), index=4)
    first, second = bucket.gradients()
    np.testing.assert_array_equal(first, [[0, 1, 2], [3, 4, 5]])
    assert second.shape == ()
    assert second == 6
    changed = bucket.replaced(2 * buffer)
    assert (changed.index, changed.paths, changed.sent) == (4, ("g0", "g1"), None)
    assert changed.buffer[6] == 12
    assert isinstance(changed, Bucket)
    assert Hook("plain", lambda s, b: (s, b)).start(bucket) == ()


def test_power_sgd_in_float16_says_that_a_factor_overflowed(rng):
    """128 numbers of about 20000 are a float16 each, their sum is not: never finite."""
    shares = rng.uniform(15000, 25000, size=(1, 2, 128 * 128)).astype(np.float32)
    power = hooks.power_sgd(start=0, rank=1)
    found, _ = run_hook(hooks.fp16(power), shares, shapes=[(128, 128)])
    assert not np.isfinite(found).any()
    plain, _ = run_hook(power, shares, shapes=[(128, 128)])
    assert np.isfinite(plain).all()
