"""A pipeline refuses to go on with a function that now computes something else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jdist import optim
from jdist.pipeline import (
    OneProgram,
    Pipeline,
    Stage,
    gpipe,
    one_f_one_b,
    pipedream,
)
from tests.pipeline.epochs import asynchronous

TOLD = r"must stay what it was when it was first compiled\. Got another program of .*"


@pytest.fixture
def x(rng):
    return rng.standard_normal((6, 3)).astype(np.float32)


def numbers(k):
    """A value that is read in a stage, in one for evaluation and in a loss."""
    return {"stage": k, "evaluation": k, "loss": k}


def made(read, where):
    def stage(w, x):
        return read["stage"] * x * w

    def evaluated(w, x):
        return read["evaluation"] * x * w

    def loss(y, batch):
        return read["loss"] * jnp.sum(y**2, axis=1)

    own = {} if isinstance(where, Mesh) else {"in_evaluation": evaluated}
    if where == "epochs":
        return asynchronous(
            [Stage(stage, ("x",), ("h",)), Stage(stage, ("h",), ("y",))],
            loss,
            optimizer=optim.sgd(lr=0.0),
        )
    names = [(("x",), ("h",)), (("h",), ("y",))]
    stages = [Stage(stage, *each, **own) for each in names]
    return Pipeline(stages, loss, gpipe(2, 2), where, optimizer=optim.sgd(lr=0.0))


@pytest.mark.parametrize("name", ["stage", "evaluation", "loss"])
def test_each_call_refuses_a_change(name, x):
    """For shapes that were compiled too; and goes on where the value is back."""
    read = numbers(2.0)
    pipe = made(read, None)
    params = [jnp.float32(0.5), jnp.float32(-2.0)]
    state = pipe.init(params)
    calls = {
        "value_and_grad": lambda: pipe.value_and_grad(params, {"x": x})[0],
        "train_step": lambda: pipe.train_step(pipe.init(params), {"x": x})[1].loss,
        "evaluate": lambda: pipe.evaluate(state, {"x": x}).loss,
    }
    before = {kind: float(call()) for kind, call in calls.items()}
    read[name] = 3.0
    for call in calls.values():
        with pytest.raises(ValueError, match=TOLD + r"`read` from .*2\.0.* to .*3\.0"):
            call()
    with pytest.raises(ValueError, match=TOLD):
        pipe.lower(params, {"x": x})
    read[name] = float("2")
    assert {kind: float(call()) for kind, call in calls.items()} == before
    # A new pipeline has the new value.
    read[name] = 3.0
    found = made(read, None).evaluate(state, {"x": x}).loss
    factor = {"stage": 1, "evaluation": 1.5**4, "loss": 1.5}[name]
    np.testing.assert_allclose(found, before["evaluate"] * factor, rtol=1e-5)


def test_one_program_and_epochs_refuse_a_change(x):
    """Before a batch of the epoch is read."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",))
    read = numbers(2.0)
    params = [jnp.full((1, 3), k, jnp.float32) for k in (0.5, -2.0)]
    pipe = made(read, OneProgram(mesh))
    state, _ = pipe.train_step(pipe.init(params), {"x": x})
    epochs = made(read, "epochs")
    after, _ = epochs.train_epoch(epochs.init(params), [{"x": x}] * 3)
    read["loss"] = 3.0
    with pytest.raises(ValueError, match=TOLD):
        pipe.train_step(state, {"x": x})
    batches = iter([{"x": x}])
    with pytest.raises(ValueError, match=TOLD):
        epochs.train_epoch(after, batches)
    assert len(list(batches)) == 1


def test_changes_that_change_no_program_are_let_pass(x):
    """Counters and histories, by the functions themselves too."""
    seen, config = [], {"k": 2.0, "step": 0}

    def stage(w, x):
        seen.append(config["step"])
        return config["k"] * x * w

    pipe = Pipeline(
        [Stage(stage, ("x",), ("y",))],
        lambda y, batch: jnp.sum(y, axis=1) * config["k"],
        one_f_one_b(1, 2),
    )
    losses = []
    for step in range(4):
        config["step"] = step
        loss, _ = pipe.value_and_grad([jnp.float32(1)], {"x": x})
        losses.append(float(loss))
    np.testing.assert_allclose(losses, 4 * x.sum(1).mean(), rtol=1e-5)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(
    "schedule", [gpipe(2, 2), pipedream(2, 2)], ids=["step", "epoch"]
)
def test_an_optimizer_that_reads_something_else_is_refused(schedule, each, x):
    """Its update was compiled with the old value; back at that it goes on."""
    rate = {"lr": 0.5}
    opt = optim.sgd(lr=lambda t: rate["lr"])
    optimizer = [opt, optim.sgd(lr=0.1)] if each else opt
    stages = [
        Stage(lambda w, x: x * w, ("x",), ("h",)),
        Stage(lambda w, h: h * w, ("h",), ("y",)),
    ]
    pipe = Pipeline(
        stages, lambda y, batch: (y**2).sum(axis=1), schedule, optimizer=optimizer
    )
    run = pipe.train_step if schedule.update_policy is None else pipe.train_epoch
    batch = {"x": x} if schedule.update_policy is None else [{"x": x}, {"x": x}]

    def trained():
        state, _ = run(pipe.init([jnp.float32(0.5), jnp.float32(-2.0)]), batch)
        return [float(w) for w in state.params]

    before = trained()
    for rate["lr"] in (0.25, 0.75):
        with pytest.raises(
            ValueError, match=r"`Pipeline\(optimizer=...\)` must read what"
        ):
            trained()
    rate["lr"] = 0.5
    assert trained() == before
