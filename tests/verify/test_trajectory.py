"""The limit of a leaf after steps, beside the formula of the module's docstring."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdist.verify.bound import EXTRA, confidence
from jdist.verify.measure import ReducedLoss
from jdist.verify.steps.trajectory import FOLLOWED, Training, limits_of, trajectory


@pytest.fixture
def values(rng):
    """A leaf at the start, before the step and after it, exact in float32."""
    return rng.normal(size=(3, 5)).astype(np.float32).astype(np.float64)


def limit(values, own=None, moved=None, size=0.0, steps=1):
    """The limit of the leaf; `moved` are the other trainers, the exact one first."""
    origin, before, after = values
    moved = np.stack([after] * (FOLLOWED + 1)) if moved is None else moved
    own = after if own is None else own
    wanted = {"n": np.int32(1), "none": None, "w": own.astype(np.float32)}
    sizes = [np.full(5, size)]
    limits, moves = limits_of(wanted, [moved], ([origin], [before]), sizes, steps)
    assert (limits["n"], limits["none"], list(moves)) == (None, None, ["w"])
    np.testing.assert_array_equal(moves["w"], moved[0] - before)
    return limits["w"]


def rounding(own, way, steps=1):
    """What roundings of the parameters and of the steps explain."""
    width = confidence(5) * np.sqrt(steps) * 2.0**-24
    return width * (np.abs(own) + np.sqrt(2 * EXTRA) * way) + EXTRA * 2.0**-126


@pytest.mark.parametrize("steps", [1, 9])
def test_parameters_and_steps_round(values, steps):
    """The way is that from the start, or the last step where that is longer."""
    origin, before, after = values
    way = np.maximum(np.abs(after - origin), np.abs(after - before))
    found = limit(values, steps=steps)
    np.testing.assert_allclose(found.bound, rounding(after, way, steps), rtol=1e-12)
    np.testing.assert_array_equal(found.size, np.abs(after))
    larger = limit(values, size=10.0).size
    np.testing.assert_array_equal(larger, 10)


def test_other_right_trainers_and_the_reference_are_apart(values):
    """By the farthest of the others, and by twice what the reference rounded."""
    origin, before, after = values
    moved = np.stack([after] * (FOLLOWED + 1))
    moved[3] += 0.25
    moved[7] -= 0.5
    own = after + 0.125
    way = np.maximum(np.abs(after - origin), np.abs(after - before))
    expected = np.sqrt(2) * 0.5 + 2 * np.abs(own.astype(np.float32) - after)
    found = limit(values, own, moved)
    np.testing.assert_allclose(found.bound, expected + rounding(own, way), rtol=1e-6)


def test_others_move_by_the_bound_of_the_gradient(rng):
    """Which is the measured one, where all start at the same parameters."""
    x, w = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((64, 3), (3,)))

    def losses(w, x):
        return (x @ w) ** 2

    # A rate at which the gradient's error is most of the new parameters'.
    training = Training(losses, lambda w, g, s: (w - 1000 * g, s), False, "mean", None)
    (moment,) = trajectory(training, (w, (), ()), [(x, None)])
    reduced = ReducedLoss(losses, "mean", None)
    measured = reduced.measure(w, *reduced.reference(w, x, None))
    own = measured.limits["(root)"].bound
    np.testing.assert_array_equal(moment.limits["gradient"].bound, own)
    ratio = moment.limits["params"].bound / (np.sqrt(2) * 1000 * own)
    assert ((ratio > 1) & (ratio < 2)).all()
