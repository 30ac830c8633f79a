"""Hostile input: what the judge is given is wrong in kind, size, number or number type.

Nothing of it passes as right, nothing ends in an error that names neither argument nor
leaf, and nothing is quietly converted into something that passes.
"""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify

X = np.linspace(-1, 2, 20, dtype=np.float32).reshape(5, 4)
W = np.linspace(0.2, 0.9, 4, dtype=np.float32)


def losses(w, x):
    """One for each example."""
    return jnp.tanh(x @ w) ** 2


def gradient(w, x):
    """The right answer."""
    return jax.value_and_grad(lambda w: losses(w, x).mean())(w)


def changed(change):
    """A candidate whose gradient is what a function makes of the right one."""

    def candidate(w, x):
        loss, found = gradient(w, x)
        return loss, change(found)

    return candidate


@pytest.fixture(scope="module")
def judged():
    """A judge of that loss, compiled once."""
    judge = verify.gradients_judge(losses)
    return lambda candidate: judge(W, X, {"mine": candidate}, finite_differences=False)


# What a candidate returns in the gradient's place: the words that its row must have.
WRONG = {
    "float64": (lambda g: np.asarray(g, np.float64), "dtype: expected float32, got fl"),
    "float16": (lambda g: g.astype(jnp.float16), "expected float32, got float16"),
    "bfloat16": (lambda g: g.astype(jnp.bfloat16), "expected float32, got bfloat16"),
    "complex": (lambda g: g.astype(jnp.complex64), "expected float32, got complex64"),
    "integers": (lambda g: g.astype(jnp.int32), "expected float32, got int32"),
    "booleans": (lambda g: g > 0, "expected float32, got bool"),
    "a list of numbers": (lambda g: np.asarray(g).tolist(), "missing"),
    "a tuple around it": (lambda g: (g,), "missing from the candidate"),
    "a mapping": (lambda g: {"w": g}, "missing from the candidate"),
    "nothing": (lambda g: None, "expected float32, got None"),
    "another axis": (lambda g: g[None], r"shape: expected \(4,\), got \(1, 4\)"),
    "a column": (lambda g: g[:, None], r"shape: expected \(4,\), got \(4, 1\)"),
    "one entry too few": (lambda g: g[:-1], r"expected \(4,\), got \(3,\)"),
    "one entry too many": (lambda g: jnp.append(g, 0), r"expected \(4,\), got \(5,\)"),
    "no entry": (lambda g: g[:0], r"expected \(4,\), got \(0,\)"),
    "a scalar": (lambda g: g.sum(), r"expected \(4,\), got \(\)"),
    "NaN": (lambda g: g * jnp.nan, "not finite: nan at"),
    "one NaN": (lambda g: g.at[2].set(jnp.nan), r"not finite: nan at \[2\]"),
    "infinity": (lambda g: g.at[1].set(jnp.inf), r"not finite: inf at \[1\]"),
    "minus infinity": (lambda g: g.at[3].set(-jnp.inf), r"not finite: -inf at \[3\]"),
    "zeros": (jnp.zeros_like, "it is 0 times the reference"),
    "one zero": (lambda g: g.at[1].set(0), r"times the bound at \[1\]"),
    "the largest numbers": (
        lambda g: jnp.full_like(g, jnp.finfo(g.dtype).max),
        "times the bound",
    ),
    "the smallest numbers": (
        lambda g: jnp.full_like(g, jnp.finfo(g.dtype).smallest_subnormal),
        "times the bound",
    ),
    "NumPy, in the other order of bytes": (
        lambda g: np.asarray(g).astype(">f4") * np.float32(2),
        "it is 2 times the reference",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradients_of_any_kind_fail(judged, name):
    """By the leaf, in words; no warning of NumPy's stands in for them."""
    change, words = WRONG[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = judged(changed(change))
    assert not report.ok
    problems = {row.path: row.problem for row in report.failures}
    with pytest.raises(verify_error, match=words):
        report.raise_if_failed()
    assert "(loss)" not in problems


verify_error = AssertionError
"""The judge's error is one, so that a test runner counts a failed claim."""


RIGHT = {
    "NumPy": np.asarray,
    "not contiguous": lambda g: np.stack([np.asarray(g)] * 2, axis=1)[:, 0],
    "read-only": lambda g: np.broadcast_to(np.asarray(g), (4,)),
    "on another device": lambda g: jax.device_put(g, jax.devices()[1]),
    "over several devices": lambda g: jax.device_put(
        g, jax.NamedSharding(jax.make_mesh((2,), ("a",)), jax.P("a"))
    ),
    "from the rear": lambda g: np.asarray(g)[::-1][::-1],
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_numbers_pass_wherever_they_lie(judged, name):
    assert judged(changed(RIGHT[name])).ok


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "Got None"),
        (1.0, "Got a float"),
        ((1.0,), "Got a tuple"),
        ((1.0, W, None), "Got a tuple"),
        ([1.0, W], "Got a list"),
        ({"loss": 1.0, "gradient": W}, "Got a dict"),
    ],
)
def test_results_that_are_no_pair_are_refused(judged, result, words):
    """With the candidate's name and what it must return."""
    rule = rf"candidates\['mine'\].* must return \(loss, gradient\). {words}"
    with pytest.raises(TypeError, match=rule):
        judged(lambda w, x: result)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (np.nan, "not finite"),
        (np.inf, "not finite"),
        (np.float32(3), "times the bound"),
        (np.zeros(5, np.float32), r"expected \(\), got \(5,\)"),
        (np.int32(1), "expected float32, got int32"),
        (True, "expected float32, got bool"),
        (None, "None"),
    ],
)
def test_a_wrong_loss_fails_beside_a_right_gradient(judged, loss, words):
    """It has a row of its own."""
    report = judged(lambda w, x: (loss, gradient(w, x)[1]))
    (row,) = report.failures
    assert row.path == "(loss)"
    with pytest.raises(verify_error, match=words):
        report.raise_if_failed()


def test_a_loss_in_a_wider_type_is_judged_in_the_references(judged):
    """Python's float is float64: the same number passes, another does not."""
    right = float(gradient(W, X)[0])
    assert judged(lambda w, x: (right, gradient(w, x)[1])).ok
    assert not judged(lambda w, x: (right * 1.001, gradient(w, x)[1])).ok


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (np.ones(4), r"one per example, shape \(5,\). Got shape \(4,\)"),
        (np.ones((5, 1)), r"shape \(5,\). Got shape \(5, 1\)"),
        (1.0, r"shape \(5,\). Got shape \(\)"),
        ([1, 1, 1, 1, -1e-9], "must be finite, at least 0, and not all 0"),
        ([1, 1, 1, 1, np.nan], "must be finite"),
        ([1, 1, 1, 1, np.inf], "must be finite"),
        (np.zeros(5), "not all 0"),
    ],
)
def test_weights_that_weigh_nothing_are_refused(weights, words):
    with pytest.raises(ValueError, match=words):
        verify.gradients(losses, W, X, {"mine": gradient}, weights=weights)


@pytest.mark.parametrize(
    ("params", "batch", "words"),
    [
        (W.astype(np.int32), X, "must have a floating leaf"),
        ({}, X, "must have a floating leaf"),
        ({"w": None}, X, "must have a floating leaf"),
        (W, {"x": X, "y": X[:3]}, "same first dimension, the examples.*x: 5, y: 3"),
        (W, {"x": X, "y": np.float32(1)}, "x: 5, y: a scalar"),
        (W, X[:0], "at least one example. Got none"),
    ],
)
def test_arguments_that_have_no_gradient_are_refused(params, batch, words):
    """No parameter to differentiate by; leaves of unequal length, or of none."""

    def loss(w, batch):
        rows = batch["x"] if isinstance(batch, dict) else batch
        leaves = jax.tree.leaves(w)
        return losses(leaves[0] if leaves else W, rows)

    with pytest.raises(ValueError, match=words):
        verify.gradients(loss, params, batch, {"mine": gradient})


BATCHES = {
    "generator": (
        (X for _ in range(3)),
        r"Got a generator at b\. Take one batch of",
    ),
    "zip": (
        zip([X], [X], strict=True),
        r"Got a zip at b\. Take one batch of it: `",
    ),
    "set": ({1.5, 2.5}, r"Got a set at b\. Give one of the batches in it\.$"),
    "text": ("x", r"Got a str at b\. Give what is in it, converted by `numpy\."),
    "lists": (X.tolist(), r"Got a list of numbers at b\. `numpy\.asarray` makes an"),
    "tuples": (tuple(map(tuple, X.tolist())), r"Got a list of numbers at b\. `numpy"),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_something_else_than_arrays_is_refused(kind):
    batch, words = BATCHES[kind]
    loss, given = lambda w, batch: losses(w, batch["b"]), (W, {"b": batch})
    calls = {
        "gradients": lambda: verify.gradients(loss, *given, {"mine": gradient}),
        "gradients_judge(...)": lambda: verify.gradients_judge(loss)(
            *given, {"mine": gradient}
        ),
        "trace": lambda: verify.trace(loss, *given, gradient),
        "step": lambda: verify.step(
            loss, lambda w, g, s: (w, s), (W, ()), [given[1]], {"mine": gradient}
        ),
    }
    for call, wrong in calls.items():
        name = "batches" if call == "step" else "batch"
        rule = rf"^`{re.escape(call)}\({name}=...\)` must be a pytree of arrays, one "
        with pytest.raises(TypeError, match=rule + f".*{words}"):
            wrong()


def test_a_loss_may_take_the_numbers_of_a_list():
    """A scalar loss of the whole batch, whose settings are beside the arrays."""
    loss = lambda w, batch: batch[1][0] * losses(w, batch[0]).mean()  # noqa: E731
    batch = (X, [0.5, 2.0])
    right = jax.value_and_grad(loss)
    assert verify.gradients(loss, W, batch, {"mine": right}).ok


# --- trees that are compared without a loss ---


@pytest.mark.parametrize(
    ("reference", "candidate", "words"),
    [
        ({"w": W}, {"w": W.astype(np.float64)}, "dtype: expected float32, got float64"),
        ({"w": W}, {"w": W.view(np.int32)}, "expected float32, got int32"),
        ({"w": np.int8([1, -2])}, {"w": np.uint8([1, 254])}, "got uint8"),
        ({"w": np.array([True])}, {"w": np.array([False])}, "must be equal"),
        ({"w": np.int64([2**62])}, {"w": np.int64([2**62 + 1])}, "must be equal"),
        ({"w": {"a": W}}, {"w": W}, "missing from the candidate"),
        ({"w": [W, W]}, {"w": [W]}, "w/1: missing from the candidate"),
        ({"w": W, "v": None}, {"w": W, "v": W}, "v: wrong dtype: expected None"),
    ],
)
def test_trees_that_differ_in_kind(reference, candidate, words):
    """Equal bits of another type, and large integers that float64 cannot tell apart."""
    with pytest.raises(verify_error, match=words):
        verify.compare(reference, candidate).raise_if_failed()


@pytest.mark.parametrize(
    "leaf",
    [
        np.zeros((0, 3), np.float32),
        np.float32(1.5),
        np.zeros((), np.float64),
        np.ones((1, 1, 1), np.complex64),
        np.float16([65504, 6e-8]),
        np.asarray([1, 2], jnp.bfloat16),
        np.asarray([1, 2], jnp.float8_e4m3fn),
        np.int8([-128, 127]),
        np.zeros((2, 0, 2), bool),
        jax.random.key(3),
        jax.random.split(jax.random.key(3), 2),
        2.5,
        7,
    ],
)
def test_any_leaf_is_equal_to_itself(leaf):
    """Empty, scalar, narrow, wide, a key, Python's numbers."""
    report = verify.compare({"leaf": leaf}, {"leaf": leaf})
    assert report.ok
    assert report.bit_equal
    assert str(report)
    assert report.to_json()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, jnp.bfloat16])
def test_the_sign_of_a_zero_is_seen_and_forgiven(dtype):
    """Bits differ, numbers do not."""
    zeros = np.zeros(3, dtype)
    report = verify.compare({"w": zeros}, {"w": -zeros})
    assert report.ok
    assert not report.bit_equal


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_errors_are_seen_at_any_magnitude(dtype, size, rng):
    """Squares that vanish or overflow hide nothing."""
    w = (rng.normal(size=(6, 4)) * size).astype(dtype)
    wrong = w.copy()
    wrong[3, 1] *= dtype(1.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (row,) = verify.compare({"w": w}, {"w": wrong}).failures
    assert "times the bound at [3, 1]" in row.problem
