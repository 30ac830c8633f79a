"""Weight gradients joined over micro-batches."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import pipeline, rpc
from jdist.pipeline.run.stage_run import StageRun
from jdist.segment._programs.deferred import Term
from tests.pipeline.models import judge, losses, problem, stages

SCHEDULES = {
    "1F1B": pipeline.one_f_one_b(3, 3),
    "zero bubble": pipeline.zero_bubble(3, 3),
    "split drain": pipeline.split_drain(pipeline.one_f_one_b(3, 3)),
}


def made(schedule, places=None, reduction="mean"):
    joining = stages(join_weight_gradients=True)
    return pipeline.Pipeline(joining, losses, schedule, places, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradient_of_the_whole_batch(reduction):
    """Uneven micro-batches, weights, a parameter used twice and one unused."""
    params, batch, weights = problem(7)

    def joining(schedule):
        pipe = made(schedule, None, reduction)
        return lambda params, batch: pipe.value_and_grad(params, batch, weights)

    candidates = {name: joining(schedule) for name, schedule in SCHEDULES.items()}
    judged = judge(reduction)
    judged(
        params, batch, candidates, weights=weights, finite_differences=False
    ).raise_if_failed()


def test_rows_of_a_parameter_join_too():
    """The gradient of a row is padded by a constant, which is a literal."""

    def layers(w, x):
        return jnp.tanh(x @ w[0]) @ w[1]

    stage = pipeline.Stage(layers, ("x",), ("y",), join_weight_gradients=True)

    def loss(y, _):
        return (y**2).sum(1)

    rng = np.random.default_rng(5)
    w, x = rng.normal(size=(2, 4, 4)), rng.normal(size=(7, 4))
    pipe = pipeline.Pipeline([stage], loss, pipeline.one_f_one_b(1, 3))
    _, (found,) = pipe.value_and_grad([w], {"x": x})
    expected = jax.grad(lambda w: loss(layers(w, x), None).mean())(w)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_bits_do_not_depend_on_the_devices():
    params, batch, weights = problem(7)
    found = [
        pipe.value_and_grad(pipe.place(params), batch, weights)
        for schedule in SCHEDULES.values()
        for pipe in (made(schedule), made(schedule, jax.devices()[:3]))
    ]
    for result in found[1:]:
        pairs = zip(jax.tree.leaves(result), jax.tree.leaves(found[0]), strict=True)
        for a, b in pairs:
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_bits_do_not_depend_on_the_executor():
    """Three workers, with what they send each other."""
    params, batch, weights = problem(7)
    names = [f"joins{number}" for number in range(3)]

    def work(name):
        with rpc.use_worker(name):
            pipe = made(SCHEDULES["1F1B"], pipeline.Workers(names))
            return pipe.value_and_grad(pipe.place(params), batch, weights)

    with rpc.local_cluster(names), ThreadPoolExecutor(3) as threads:
        found = list(threads.map(work, names))
    loss, grads = made(SCHEDULES["1F1B"]).value_and_grad(params, batch, weights)
    for j, (own_loss, own) in enumerate(found):
        assert own_loss == loss
        pairs = zip(jax.tree.leaves(own[j]), jax.tree.leaves(grads[j]), strict=True)
        for a, b in pairs:
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_some_stages_may_join_and_others_not():
    params, batch, weights = problem(5)
    plain = pipeline.Pipeline(stages(), losses, SCHEDULES["1F1B"])
    some = [
        dataclasses.replace(stage, join_weight_gradients=number == 1)
        for number, stage in enumerate(stages())
    ]
    mixed = pipeline.Pipeline(some, losses, SCHEDULES["1F1B"])
    expected = plain.value_and_grad(params, batch, weights)
    found = mixed.value_and_grad(params, batch, weights)
    for j in (0, 2):
        pairs = zip(
            jax.tree.leaves(found[1][j]), jax.tree.leaves(expected[1][j]), strict=True
        )
        assert all(np.array_equal(a, b) for a, b in pairs)
    np.testing.assert_allclose(found[1][1]["w"], expected[1][1]["w"], rtol=1e-5)


def test_equal_micro_batches_are_one_product(monkeypatch):
    """Uneven ones are a product for each size."""
    joined = []
    total = Term.total

    def counted(term, calls):
        joined.append(len(calls))
        return total(term, calls)

    monkeypatch.setattr(Term, "total", counted)

    def own(params, x):  # Which nobody else has compiled.
        return jnp.sin(x @ params)

    stage = pipeline.Stage(own, ("x",), ("y",), join_weight_gradients=True)
    pipe = pipeline.Pipeline([stage], losses, pipeline.gpipe(1, 5))
    params, batch, _ = problem(11)  # Micro-batches of 3, 2, 2, 2, 2.
    pipe.value_and_grad([params[0]["w"][:, :2]], batch)
    assert set(joined) == {1, 4}


def test_what_is_kept_until_the_last_backward_pass(monkeypatch):
    """Of all micro-batches, which is the price; and nothing afterwards."""
    kept = []
    finish = StageRun.finish

    def counted(run):
        kept.append(len(run.live))
        finish(run)
        assert not run.live

    monkeypatch.setattr(StageRun, "finish", counted)
    params, batch, weights = problem(7)
    made(SCHEDULES["1F1B"]).value_and_grad(params, batch, weights)
    assert sorted(kept)[-3:] == [3, 3, 3]
    assert set(kept) == {0, 3}


def test_convolutions_in_bfloat16_are_added_in_single(rng):
    """The sum over micro-batches of a gradient that is not put off is not rounded."""

    def stage(params, x):
        h = jax.lax.conv_general_dilated(
            x, params["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (h + params["b"]).mean((1, 2)).astype(jnp.float32)

    params = {
        "k": jnp.asarray(rng.normal(size=(3, 3, 2, 4)), jnp.bfloat16),
        "b": jnp.asarray(rng.normal(size=(1, 1, 1, 4)), jnp.bfloat16),
    }
    x = rng.normal(size=(6, 5, 5, 2)).astype(jnp.bfloat16)
    batch = {"x": x, "target": rng.normal(size=(6, 4)).astype(np.float32)}
    found = [
        pipeline.Pipeline(
            [pipeline.Stage(stage, ("x",), ("y",), join_weight_gradients=joins)],
            losses,
            pipeline.gpipe(1, 3),
        ).value_and_grad([params], batch)[1][0]
        for joins in (True, False)
    ]
    for name, leaf in found[0].items():
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            leaf.astype(jnp.float32),
            found[1][name].astype(jnp.float32),
            rtol=2e-2,
            atol=2e-2,
        )
    assert found[0]["b"].tobytes() == found[1]["b"].tobytes()


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_extremes_are_refused(reduction):
    message = rf"must be 'mean' or 'sum', because stage 0 joins.*Got '{reduction}'"
    with pytest.raises(ValueError, match=message):
        made(SCHEDULES["1F1B"], reduction=reduction)
