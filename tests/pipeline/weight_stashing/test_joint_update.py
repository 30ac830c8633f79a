"""Clipped updates and tied parameters in PipeDream, beside serial programs.

Under these policies a micro-batch meets one version at all stages, so that the program
is plain: the gradient of the whole model at an older version, and a step of the newest.
"""

import functools

import jax
import numpy as np
import pytest

from jdist import pipeline
from tests.pipeline import joint_cases as cases
from tests.pipeline.epochs import asynchronous, paired
from tests.pipeline.joint_cases import ADAM, made, problem
from tests.pipeline.pipedream_rules import VERSIONS, adam, layer, losses
from tests.pipeline.places import workers

SAME = [("flush", 1), ("flush", 3), ("2bw", 3), ("vertical_sync", 1)]
SAME += [("vertical_sync", 2)]


def close(found, expected, rtol=1e-11):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def total_of(params, batch, weights):
    y = functools.reduce(lambda h, p: layer(p, h), params, batch["x"])
    return (losses(y, batch) * weights).sum()


def serial(policy, params, batches, weights, k, max_norm=None, tied=()):
    """w(t+1) = w(t) + adam(grad f(w(v))), with one version v for all stages.

    Args:
      max_norm: Of the gradient of all stages.
      tied: The stages that share `b`, of which the gradient is the sum.

    Returns:
      The last version, and the norms of all updates.
    """
    n, history = len(params), [jax.tree.map(np.asarray, params)]
    moments = [dict.fromkeys(p, (0.0, 0.0)) for p in params]
    due, norms = [], []
    for i, (batch, own) in enumerate(zip(batches, weights, strict=True)):
        version = max(0, VERSIONS[policy](n - 1, n, k, i))
        due.append((jax.grad(total_of)(history[version], batch, own), own.sum()))
        if len(due) < k and i < len(batches) - 1:
            continue
        count = sum(weight for _, weight in due)
        grads = [
            {name: sum(np.asarray(g[j][name]) for g, _ in due) / count for name in p}
            for j, p in enumerate(params)
        ]
        shared = sum(grads[j]["b"] for j in tied)
        for j in tied:
            grads[j]["b"] = shared
        norms.append(np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(grads))))
        factor = 1.0 if max_norm is None else min(1.0, max_norm / (norms[-1] + 1e-6))
        after = [{} for _ in params]
        for j, own_grads in enumerate(grads):
            for name, grad in own_grads.items():
                step, moments[j][name] = adam(
                    len(history) - 1, grad * factor, moments[j][name]
                )
                after[j][name] = history[-1][j][name] + step
        history.append(after)
        due = []
    return history[-1], norms


@pytest.mark.parametrize(("policy", "k"), SAME)
def test_the_norm_is_that_of_all_stages(policy, k):
    """Some updates are clipped and some are not; one stage's norm would clip others."""
    params, batches, weights = problem(11)
    _, norms = serial(policy, params, batches, weights, k)
    max_norm = float(np.median(norms))
    expected, norms = serial(policy, params, batches, weights, k, max_norm)
    assert min(norms) < max_norm < max(norms)
    runtime = made(policy, k, max_norm=max_norm)
    state, _ = runtime.train_epoch(runtime.init(params), paired(batches, weights))
    close(state.params, expected)


@pytest.mark.parametrize(("policy", "k"), SAME)
def test_tied_parameters_have_one_gradient(policy, k):
    params, batches, weights = problem(11, tied=True)
    expected, _ = serial(policy, params, batches, weights, k, tied=(0, 2))
    runtime = made(policy, k, tied=True)
    state, _ = runtime.train_epoch(runtime.init(params), paired(batches, weights))
    close(state.params, expected)
    first, last = (np.asarray(state.params[j]["b"]) for j in (0, 2))
    assert first.tobytes() == last.tobytes()
    assert not np.array_equal(first, state.params[1]["b"])


def test_a_clipped_stage_with_replicas_alone():
    """With one stage the norm is its own, under any policy and with several workers."""
    params, batches, weights = problem(7)
    own = [{"w": params[0]["w"][:, :2], "b": params[0]["b"][:2]}]
    stage = pipeline.Stage(layer, ("x",), ("y",))
    options = {"optimizer": ADAM, "max_norm": 0.3, "replicas": (2,)}
    runtime = asynchronous([stage], losses, **options)
    state, _ = runtime.train_epoch(runtime.init(own), paired(batches, weights))
    expected, norms = serial("flush", own, batches, weights, 2, 0.3)
    assert max(norms) > 0.3
    close(state.params, expected)


def test_workers_have_the_bits_of_one_process(cluster):
    """Clipped, tied, or summed, from a generator each."""
    tasks = [cluster.start(rank, cases.epochs, workers(3)) for rank in range(3)]
    alone = cases.epochs()
    for rank, own in enumerate(task.result() for task in tasks):
        for mine, whole in zip(own, alone, strict=True):
            assert [x is None for x in mine] == [j != rank for j in range(3)]
            for name, array in whole[rank].items():
                assert np.array_equal(mine[rank][name], array)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"policy": "stashing", "max_norm": 1.0},
            "None with the policy 'stashing': an.*Use 'flush', '2bw' or",
        ),
        (
            {"policy": "stashing", "tied": True},
            "must not be tied with the policy .*stage 0 with",
        ),
        ({"policy": "flush", "tied": True, "max_norm": 1.0}, "None with tied param"),
        ({"policy": "flush", "reduction": "max"}, "must be 'mean' or 'sum' .*Got max"),
        (
            {"policy": "flush", "max_norm": 1.0, "optimizer": cases.SCALED},
            r"max_norm=...\)` must be None with a loss scale",
        ),
        (
            {"policy": "flush", "tied": True, "optimizer": cases.SCALED},
            r"\(stages\)` must not be tied with a loss scale",
        ),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)
