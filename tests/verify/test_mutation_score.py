"""A test is scored by the planted defects that it notices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist import verify
from jdist.verify import defects, score
from jdist.verify.defects import Traits


def loss(w, batch):
    """A weighted mean of squares."""
    errors = (batch["x"] @ w) ** 2
    return jnp.sum(batch["mask"] * errors) / jnp.sum(batch["mask"])


STEP = jax.jit(jax.value_and_grad(loss))
W = jnp.asarray([0.1, 0.25, -0.3], jnp.float32)
KNOWN = Traits(weights="mask")


def batch_of(examples, weights):
    x = np.random.default_rng(2).normal(size=(examples, 3))
    return {
        "x": jnp.asarray(x, jnp.float32),
        "mask": jnp.asarray(weights, jnp.float32),
    }


UNEVEN = batch_of(7, [1, 2, 0.5, 3, 0, 1, 1.5])
EVEN = batch_of(8, np.ones(8))


def named(trials):
    return {trial.defect.name for trial in trials}


def strict(step):
    """Two calls with other parameters, uneven weights, the judge's own bound."""
    for w in (W, 2 * W):
        found = step(w, UNEVEN)
        expected = STEP(w, UNEVEN)
        assert found[1] is not None
        verify.compare(expected, found).raise_if_failed()


def weak(step):
    """One call, even weights, a tolerance of a hundredth."""
    right = STEP(W, EVEN)[1]
    return jnp.allclose(step(W, EVEN)[1], right, rtol=1e-2)


def test_a_strict_test_notices_all_that_apply():
    found = score(strict, STEP, KNOWN)
    assert found.ok
    assert found.raise_if_missed() is found
    missing = {"tied leaf counted twice", "swapped leaves", "transposed leaf"}
    missing |= {"noise in an unused leaf", "other keys", "one key for all"}
    assert named(found.having("not applicable")) == missing
    assert named(found.trials) == {d.name for d in defects.GRADIENT}
    assert len(found.having("noticed")) == len(defects.GRADIENT) - len(missing)


def test_a_weak_test_is_told_what_it_overlooks():
    """Too small to see, and not to be seen on such data."""
    found = score(weak, STEP, KNOWN)
    assert {"factor 1.001", "bfloat16 accumulation"} <= named(found.having("missed"))
    unseen = {t.defect.name: t.reason for t in found.having("cannot show")}
    assert unseen == {
        "mean of means": "the micro-batches all have the same weight",
        "weights ignored": "every weight is the same",
        "stale parameters": "there was no call before this one",
    }
    # `allclose` of None is a TypeError: not what the test wanted to say.
    assert named(found.having("crashed")) == {"missing leaf"}
    assert not found.ok
    shown = str(found)
    assert "factor 1.001" in shown
    assert "1.0e-03" in shown
    assert "cannot show" in shown
    assert shown.splitlines()[-1].endswith("1 crashed, 6 not applicable")
    with pytest.raises(jdist.VerificationError, match="weights ignored: cannot show"):
        found.raise_if_missed()


def only(*names):
    return [defect for defect in defects.ALL if defect.name in names]


def test_a_test_that_fails_on_the_right_step_proves_nothing():
    def wrong(step):
        assert step(W, EVEN)[0] == 17, "seventeen"

    found = score(wrong, STEP)
    assert (found.trials, found.ok) == ((), False)
    assert "on the right step: AssertionError: seventeen" in found.unfit
    with pytest.raises(jdist.VerificationError, match="nothing was planted"):
        found.raise_if_missed()


def test_a_crash_is_no_failed_claim():
    """Neither in the test, nor in the step, whatever it raises."""

    def crashing(step):
        if not np.isfinite(step(W, EVEN)[1]).all():
            raise RuntimeError("what is this?")

    planted = only("NaN", "factor 1.1")
    found = score(crashing, STEP, planted=planted)
    outcomes = {t.defect.name: (t.outcome, t.reason) for t in found.trials}
    assert outcomes["NaN"] == ("crashed", "RuntimeError: what is this?")
    assert outcomes["factor 1.1"] == ("missed", "")

    def choosy(w, batch):
        assert (np.asarray(batch["mask"]) == 1).all(), "all ones, please"
        return STEP(w, batch)

    found = score(weak, choosy, KNOWN, planted=only("lost micro-batch"))
    (trial,) = found.trials
    assert trial.outcome == "crashed"
    assert "all ones, please" in trial.reason


def test_other_exceptions_may_notice():
    """Those of a test runner's own `fail`, which are no Exception."""

    def failing(step):
        if not np.isfinite(step(W, EVEN)[1]).all():
            pytest.fail("not finite")

    notices = (AssertionError, pytest.fail.Exception)
    found = score(failing, STEP, planted=only("NaN"), notices=notices)
    assert found.ok
    with pytest.raises(pytest.fail.Exception, match="not finite"):
        score(failing, STEP, planted=only("NaN"))


def test_a_test_that_cannot_notice_anything():
    """It does not call the step, calls it under jit, or fails at random."""
    planted = only("factor 1.1")
    found = score(lambda step: True, STEP, planted=planted)
    assert found.trials[0].outcome == "cannot show"
    assert "does not call the step" in found.trials[0].reason
    found = score(lambda step: jax.jit(step)(W, EVEN) and None, STEP, planted=planted)
    assert found.trials[0].outcome == "not applicable"
    assert "compile the step, not its twin" in found.trials[0].reason
    calls = iter([True, False])
    found = score(lambda step: next(calls), STEP, planted=planted)
    assert found.trials[0].outcome == "crashed"
    assert "although each result was right" in found.trials[0].reason


def test_wrong_calls():
    with pytest.raises(
        TypeError, match=r"must return True, False or None\. Got a Report"
    ):
        score(lambda step: verify.compare(W, W), STEP)
    with pytest.raises(ValueError, match="at least one defect"):
        score(weak, STEP, planted=[])
    found = score(weak, STEP, planted=only("count off by one"))
    assert "no step of kind 'gradient'" in found.trials[0].reason


def test_a_training_step():
    def train(w, state, batch):
        momentum = 0.9 * state["momentum"] + STEP(w, batch)[1]
        rate = 0.1 / state["count"].astype(jnp.float32)
        return w - rate * momentum, {"momentum": momentum, "count": state["count"] + 1}

    start = {"momentum": jnp.zeros(3, jnp.float32), "count": jnp.asarray(1)}

    def three(step):
        wanted = got = (W, start)
        for _ in range(3):
            wanted, got = train(*wanted, UNEVEN), step(*got, UNEVEN)
        np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5)

    found = score(three, train, Traits(kind="training", weights="mask"))
    assert found.overlooked == ()
    assert named(found.having("not applicable")) == {"other keys", "one key for all"}
    assert len(found.having("noticed")) == len(defects.TRAINING) - 2
