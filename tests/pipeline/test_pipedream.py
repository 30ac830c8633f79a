"""PipeDream's runtime beside serial programs written from the update rules."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist import pipeline
from tests.pipeline.pipedream_rules import (
    OPTIMIZERS,
    losses,
    momentum,
    problem,
    serial,
    stages,
)

POLICIES = ["stashing", "vertical_sync", "2bw", "flush", "none"]


def close(found, expected, rtol):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def newest(history):
    return [versions[-1] for versions in history]


def made(n, policy, k=1, change=momentum, **options):
    optimizer = OPTIMIZERS[change]
    return pipeline.PipeDream(
        stages(n),
        losses,
        optimizer=optimizer,
        policy=policy,
        update_every=k,
        **options,
    )


@settings(max_examples=20, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    n=st.integers(1, 4),
    m=st.integers(1, 9),
    k=st.integers(1, 4),
    change=st.sampled_from(list(OPTIMIZERS)),
    seed=st.integers(0, 1000),
)
def test_rules_in_float64(policy, n, m, k, change, seed):
    k = max(k, n) if policy == "2bw" else k
    params, batches, weights = problem(n, m, seed)
    runtime = made(n, policy, k, change)
    state, _ = runtime.train_epoch(runtime.init(params), batches, weights)
    expected = serial(policy, params, batches, weights, change, k)
    close(state.params, newest(expected), 1e-11)
