"""Every row gives an example its share of the whole batch's cotangent, and no other.

On the judge's loss with rules that see a cotangent's scale; 11 examples with unequal
weights, and a loss of 0 / 0 where the weight is 0.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import Unavailable
from jdist.verify.matrix import strategies
from jdist.verify.problem import with_rules

PROBLEM = with_rules(jnp.float64)
COUNTED = np.flatnonzero(PROBLEM.weights)


def losses_of(params, batch):
    tokens = batch["tokens"]
    return PROBLEM.loss_fn(params, batch) * tokens / tokens


def batch_of(name):
    tokens = np.array(PROBLEM.weights)
    if name.startswith("autograd"):  # There the caller reduces the losses.
        tokens[tokens == 0] = 1
    return {**PROBLEM.batch, "tokens": jnp.asarray(tokens, jnp.float64)}


@cache
def expected():
    batch = jax.tree.map(lambda x: x[COUNTED], batch_of(""))
    weights = jnp.asarray(PROBLEM.weights, jnp.float64)[COUNTED]

    def mean(params):
        return (weights * losses_of(params, batch)).sum() / weights.sum()

    return jax.value_and_grad(mean)(PROBLEM.params)


@pytest.mark.parametrize("name", strategies(combinations=False))
def test_rules_see_the_whole_batchs_cotangent(name):
    try:
        row = strategies()[name](losses_of, "mean")
    except Unavailable as missing:
        pytest.skip(str(missing))
    loss, gradient = row(PROBLEM.params, batch_of(name), PROBLEM.weights)
    value, whole = expected()
    np.testing.assert_allclose(loss, value, rtol=1e-12)
    for key, leaf in whole.items():
        np.testing.assert_allclose(gradient[key], leaf, rtol=1e-11, atol=1e-14)
