"""Training over many batches: steps and checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim
from jdist.data_parallel import Metrics
from jdist.pipeline import (
    Pipeline,
    PipelineCheckpoints,
    Stage,
    fit,
    gpipe,
    with_weight_stashing,
)
from tests.pipeline.epochs import asynchronous
from tests.pipeline.trained import EXAMPLES, batch_of, made, numbers, same, start, steps
from tests.refilled import ALIGNED, UNALIGNED, buffer, refilled


def test_it_is_the_steps_one_by_one(tmp_path):
    """Saved after every second step and at the end, and resumed in the middle."""
    pipe = made()
    expected, losses = steps(pipe, start(pipe), 3)
    batches = [batch_of(step) for step in range(3)]
    with PipelineCheckpoints(tmp_path, pipe) as saved:
        state, found = fit(
            pipe,
            start(pipe),
            batches,
            checkpoints=saved,
            save_every=2,
        )
        same(numbers(state), numbers(expected))
        assert [float(m.loss) for m in found] == losses
        assert saved.latest() == 3
        middle = saved.restore(start(pipe), step=2)
        state, _ = fit(pipe, middle, iter(batches[2:]))
        same(numbers(state), numbers(expected))


def test_metrics_of_a_step():
    pipe = made()
    batch, weights = batch_of(0)
    weights = np.array(weights)
    weights[2] = 0  # such an example is not counted
    state, found = pipe.train_step(start(pipe), batch, weights)
    assert found.examples == EXAMPLES - 1
    np.testing.assert_allclose(found.weight, weights.sum(dtype=np.float64))
    _, found = pipe.train_step(state, batch)
    assert (found.examples, found.weight) == (EXAMPLES, EXAMPLES)
    assert float(found.grad_norm) > 0


def test_numbers_of_the_optimizers_for_one_step(caplog):
    """As if they had been made with them; another number compiles nothing."""
    places = jax.devices()[2:4]
    optimizers = [optim.adamw(lr=0.25), optim.sgd(lr=0.25, momentum=0.9)]
    plain, pipe = made(places, optimizer=optimizers), made(places)
    expected, _ = steps(plain, start(plain), 1)
    state, _ = pipe.train_step(start(pipe), *batch_of(0), lr=0.125)
    with jax.log_compiles():
        state, _ = pipe.train_step(start(pipe), *batch_of(0), lr=0.25)
    assert not [r for r in caplog.records if "_update" in r.message]
    same(numbers(state), numbers(expected))
    state, _ = pipe.train_step(start(pipe), *batch_of(0), lr=jnp.float32(0.25))
    same(numbers(state), numbers(expected))
    # Refused before anything is donated: the state can still be used.
    with pytest.raises(TypeError, match=r"`sgd.step` has no .* 'eps' to override"):
        pipe.train_step(state, *batch_of(1), eps=1e-3)
    with pytest.raises(ValueError, match=r"`adamw.step\(lr=...\)` must be at least 0"):
        pipe.train_step(state, *batch_of(1), lr=-1.0)
    state, _ = steps(pipe, state, 1)
    assert state.step == 2


@pytest.mark.parametrize(
    ("reduction", "loss"), [("mean", 3.5), ("sum", 8.0), ("max", 5.0), ("min", 3.0)]
)
def test_an_epoch_is_one_large_batch(reduction, loss):
    parts = [Metrics(3.0, 4, 1.5), Metrics(5.0, 2, 0.5)]
    assert Metrics.combine(parts, reduction) == Metrics(loss, 6, 2.0)


def test_what_cannot_be_joined_or_saved():
    with pytest.raises(ValueError, match=r"one entry at least. Got none"):
        Metrics.combine([])
    with pytest.raises(ValueError, match=r"must be one of 'mean'"):
        Metrics.combine([Metrics(1.0)], "median")
    pipe = made()
    with pytest.raises(ValueError, match=r"save_every=.* at least 1. Got 0"):
        fit(pipe, None, [], save_every=0)


WRONG = {
    "save_every": ([True, 2.5, float("nan"), "2", None], [0, -3]),
    "batches": ([None, 3, "ab", {"x": 1}], []),
    "checkpoints": (["folder", 3], []),
    "state": ([None, {"w": 1}], []),
    "pipe": ([None, "pipe"], []),
}
"""For each argument of `fit` wrong types, and numbers out of range."""


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named_before_the_first_step(name):
    pipe = made()
    given = {"pipe": pipe, "state": start(pipe), "batches": [batch_of(0)]}
    for error, values in zip((TypeError, ValueError), WRONG[name], strict=True):
        for value in values:
            with pytest.raises(error, match=rf"^`fit\({name}(=...)?\)` must .*Got "):
                fit(**{**given, name: value})
    assert given["state"].step == 0
    # Nothing was donated.
    assert not any(x.is_deleted() for x in jax.tree.leaves(given["state"].params))


@pytest.mark.parametrize("offset", [ALIGNED, UNALIGNED])
@pytest.mark.parametrize("places", [None, jax.devices()[2:4]], ids=["one", "two"])
def test_each_batch_is_read_before_the_next_is_asked_for(places, offset, rng):
    """Passes of 4 MiB still run when the loader fills its buffer again."""
    rows = rng.standard_normal((1024, 1024)).astype(np.float32)
    params = [rng.standard_normal((1024, n)).astype(np.float32) for n in (1024, 8)]
    factors = rng.uniform(1, 9, 6).astype(np.float32)
    names = [(("x",), ("h",)), (("h",), ("y",))]
    stages = [Stage(lambda w, x: x @ w, *named) for named in names]

    def loss(y, batch):
        return jnp.abs(y).mean(-1)

    def loader():
        return ({"x": x} for x in refilled(rows, factors, offset))

    expected = np.abs(rows @ params[0] @ params[1]).mean() * factors
    pipe = Pipeline(stages, loss, gpipe(2, 2), places, optimizer=optim.sgd(lr=0.0))
    _, found = fit(pipe, pipe.init(params), loader())
    np.testing.assert_allclose([m.loss for m in found], expected, rtol=1e-4)
    runtime = asynchronous(stages, loss, optimizer=optim.sgd(lr=0.0))
    state, count = runtime.init(params), len(expected)
    _, found = runtime.train_epoch(state, loader(), total=count)
    np.testing.assert_allclose(found.losses, expected, rtol=1e-4)


@pytest.mark.parametrize("offset", [ALIGNED, UNALIGNED])
@pytest.mark.parametrize("place", [None, jax.devices()[2]], ids=["none", "device"])
def test_placing_copies_the_arrays_of_numpy(place, offset, rng):
    """Before it returns, as does `init`: the caller may write to them at once."""
    params = buffer((1 << 20,), offset)
    params[...] = rng.standard_normal(1 << 20)
    expected = params.copy()
    stages = [Stage(lambda w, x: x * w.sum(), ("x",), ("y",))]
    places = None if place is None else [place]
    pipe = Pipeline(stages, lambda y, _: y, gpipe(1, 2), places, optimizer=optim.sgd())
    stash = with_weight_stashing(optim.sgd(), versions=2)
    makers = [
        lambda: pipe.place([params])[0],
        lambda: pipe.init([params]).params[0],
        lambda: stash.init(params).kept[0],
    ]
    for make in makers:
        found = make()
        params[...] = np.nan
        np.testing.assert_array_equal(found, expected)
        params[...] = expected
