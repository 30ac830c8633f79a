"""Parameters that stages share: one gradient, and copies that stay equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim, pipeline
from tests.pipeline import shared
from tests.pipeline.places import workers
from tests.pipeline.shared import losses, made, own_of, params_of, problem, whole


def tables(params):
    return params[0]["embed"]["table"], params[2]["w"]["table"]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_gradient_is_that_of_one_shared_parameter(reduction):
    params, (batch, weights) = params_of(), problem()
    pipe = made(jax.devices()[:3], reduction=reduction)
    loss, grads = pipe.value_and_grad(pipe.place(params), batch, weights)
    total = weights.sum() if reduction == "sum" else 1.0
    expected, wanted = jax.value_and_grad(whole)(own_of(params), batch, weights)
    np.testing.assert_allclose(loss, expected * total, rtol=1e-13)
    for found in tables(grads):
        np.testing.assert_allclose(found, wanted[0] * total, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(grads[0]["scale"], wanted[1] * total, rtol=1e-11)
    np.testing.assert_array_equal(*tables(grads))
    assert grads[0]["embed"]["rows"] is None
    where = [{leaf.device for leaf in jax.tree.leaves(g)} for g in grads]
    assert where == [{device} for device in jax.devices()[:3]]


def test_training_keeps_the_copies_equal_and_is_that_of_the_whole():
    """The norm counts a shared gradient once."""
    params, optimizer = params_of(), optim.adam(lr=0.05)
    pipe = made(optimizer=optimizer)
    state, own = pipe.init(params), own_of(params)
    kept = optimizer.init(own)
    for step in range(3):
        batch, weights = problem(step)
        state, metrics = pipe.train_step(state, batch, weights)
        grads = jax.grad(whole)(own, batch, weights)
        clipped, norm = optim.clip_by_global_norm(grads, 0.25)
        own, kept = optimizer.step(own, clipped, kept)
        assert norm > 0.25
        np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-11)
        np.testing.assert_array_equal(*tables(state.params))
    for a, b in zip(
        jax.tree.leaves(own_of(state.params)), jax.tree.leaves(own), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("replicas", [False, True])
def test_workers_keep_them_equal_too(cluster, replicas):
    """To the bit as one process does, where a stage has two workers as well."""
    expected, params = shared.trained(None, replicas)
    count = 4 if replicas else 3
    tasks = [
        cluster.start(rank, shared.trained, workers(count), replicas)
        for rank in range(count)
    ]
    found = [task.result() for task in tasks]
    placement = shared.schedule(replicas).placement
    for stage, ranks in enumerate(placement):
        for rank in ranks:
            assert found[rank][0] == expected
            own, wanted = found[rank][1][stage], params[stage]
            for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(*tables([found[0][1][0], None, found[-1][1][2]]))


def test_copies_that_differ_are_refused_on_all_workers(cluster):
    tasks = [cluster.start(r, shared.refused, workers(3), r) for r in range(3)]
    texts = {task.result() for task in tasks}
    assert len(texts) == 1
    where = "embed/table and w/table. Copy one."
    assert min(texts).endswith(f"the stages 0 and 2. Got different ones at {where}")


def narrow(params):
    params[2]["w"]["table"] = params[2]["w"]["table"][:, :3]


def single(params):
    params[2]["w"]["table"] = params[2]["w"]["table"].astype(jnp.float32)


def without(params):
    del params[2]["w"]["rows"]


def other(params):
    params[2]["w"]["table"] = params[2]["w"]["table"].at[3, 1].add(1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (narrow, r"stage 0 has .*float64\[7,4\].* Got .*float64\[7,3\].* at stage 2"),
        (single, r"float64\[7,4\].* Got .*float32\[7,4\].* at stage 2"),
        (without, r"copies of one shape and dtype"),
        (other, r"the stages 0 and 2\. Got different ones at embed/table and w/table"),
    ],
)
def test_copies_that_cannot_be_shared(change, message):
    params = params_of()
    change(params)
    with pytest.raises(ValueError, match=message):
        made().init(params)


def pipe_of(first, last, **options):
    return pipeline.Pipeline(
        shared.stages(first, last), losses, shared.schedule(False), **options
    )


def test_names_and_paths_that_do_not_fit():
    sgd = optim.sgd(lr=0.1)
    with pytest.raises(
        ValueError, match=r"of stage 2, which has \['w/rows', 'w/table'\]. Got 'out'"
    ):
        pipe_of({"embed": "a"}, {"out": "a"}, optimizer=sgd).init(params_of())
    with pytest.raises(ValueError, match=r"'a' at two stages or more. Got stage 0 al"):
        pipe_of({"embed": "a"}, {"w": "b"})
    with pytest.raises(ValueError, match=r"copies of one shape and dtype: stage 0 h"):
        pipe_of({"embed": "a", "scale": "a"}, {"w": "a"}, optimizer=sgd).init(
            params_of()
        )
    with pytest.raises(ValueError, match=r"Got embed/table in embed"):
        pipe_of({"embed": "a", "embed/table": "b"}, {"w": "a"})
    with pytest.raises(TypeError, match="must be a dict from paths to names"):
        pipe_of({"embed": 3}, {"w": "a"})
    with pytest.raises(TypeError, match="must be a dict from paths to names"):
        pipe_of(["embed"], {"w": "a"})
    each = [optim.sgd(lr=0.1) for _ in range(3)]
    with pytest.raises(ValueError, match=r"one and the same object for .* \[0, 2\]"):
        pipe_of({"embed": "a"}, {"w": "a"}, optimizer=each).init(params_of())
    pipe_of({"embed": "a"}, {"w": "a"}, optimizer=[sgd, *each[:1], sgd]).init(
        params_of()
    )
