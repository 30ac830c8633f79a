"""What is no loss, candidate, flag or name is refused in words, with its value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify
from tests.wrong_types import refused

BATCH = np.arange(1.0, 5.0, dtype=np.float32)
WEIGHT = jnp.float32(0.5)
FUNCTIONS = [None, 3, "mse", [abs]]


def loss(w, x):
    return (w * x) ** 2


def tapped(w, x):
    return verify.tap(w * x, "product") ** 2


def right(w, x):
    return jax.value_and_grad(lambda w: loss(w, x).mean())(w)


def gradients(**change):
    given = {"loss_fn": loss, "params": WEIGHT, "batch": BATCH}
    return verify.gradients(**given | {"candidates": {"right": right}} | change)


def judge(loss_fn=loss, candidates=None, **options):
    return verify.gradients_judge(loss_fn)(
        WEIGHT, BATCH, candidates or {"r": right}, **options
    )


def compare(**change):
    tree = {"w": np.ones(3, np.float32)}
    return verify.compare(**{"reference": tree, "candidate": tree} | change)


WRONG = {
    "gradients(loss_fn": (lambda v: gradients(loss_fn=v), FUNCTIONS),
    "gradients(candidates=...)` must be a mapping": (
        lambda v: gradients(candidates=v),
        [None, 3, right, [right], "right"],
    ),
    "gradients(candidates={'own': ...})` must be a function": (
        lambda v: gradients(candidates={"own": v}),
        FUNCTIONS,
    ),
    "gradients(finite_differences": (
        lambda v: gradients(finite_differences=v),
        [None, 0, 1.0, "no", [True], np.zeros(2)],
    ),
    "timeout": (lambda v: compare(timeout=v), [None, "300", [300]]),
    "trace(candidate": (
        lambda v: verify.trace_judge(tapped, WEIGHT, BATCH, finite_differences=False)(
            v
        ),
        FUNCTIONS,
    ),
    "gradients_judge(loss_fn": (lambda v: judge(loss_fn=v), FUNCTIONS),
    "gradients_judge(...)(finite_differences": (
        lambda v: judge(finite_differences=v),
        [None, "0"],
    ),
    "compare(names": (lambda v: compare(names=v), [3, "w", ["w"], [("w", "w")]]),
    "replay(records": (verify.replay, [None, 3, "ab", [1]]),
}
"""What the message names, the call, and values of wrong types."""


@pytest.mark.parametrize("named", WRONG)
def test_a_wrong_type(named):
    refused(*WRONG[named], named)


OUT_OF_RANGE = {
    r"gradients\(reduction=...\)` must be one of .* Got \[\]": (
        lambda: gradients(reduction=[])
    ),
    r"gradients\(accumulation=...\)` must be a floating dtype": (
        lambda: gradients(accumulation={"w": "f4"})
    ),
    r"`timeout` must be a positive number of seconds. Got 0": (
        lambda: verify.gradients_judge(loss, timeout=0)(WEIGHT, BATCH, {"r": right})
    ),
    r"compare\(terms=...\)` must be a whole number": lambda: compare(terms="8"),
    r"compare\(scale=...\)` must be finite": lambda: compare(scale="1.0"),
}


@pytest.mark.parametrize("match", OUT_OF_RANGE)
def test_a_value_out_of_range(match):
    with pytest.raises(ValueError, match=match):
        OUT_OF_RANGE[match]()
