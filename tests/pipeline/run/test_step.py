"""The loop that starts actions: what it does when a value comes at an odd moment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import pipeline
from jdist.pipeline.run.stage_channels import InProcessChannels
from jdist.pipeline.run.worker_channels import PipelineMailbox, WorkerChannels
from tests.pipeline.models import losses, problem, stages
from tests.pipeline.places import workers


def test_a_value_that_comes_between_two_looks(monkeypatch):
    """It is not waited for: nothing else may ever come that would end the wait."""
    schedule = pipeline.one_f_one_b(3, 4)
    pipe = pipeline.Pipeline(stages(), losses, schedule)
    params, batch, weights = problem(7)
    expected = pipe.value_and_grad(params, batch, weights)
    seen, look, wait = set(), InProcessChannels.has, InProcessChannels.wait

    def late(channels, tag, worker):
        """The first look does not find it."""
        there = look(channels, tag, worker)
        if there and tag.kind in "FB" and tag not in seen:
            seen.add(tag)
            return False
        return there

    def come(channels, waiting):
        """A wait ends at once for what is there."""
        if not waiting.keys() & {tag for tag, _ in channels._arrived}:
            wait(channels, waiting)

    monkeypatch.setattr(InProcessChannels, "has", late)
    monkeypatch.setattr(InProcessChannels, "wait", come)
    found = pipe.value_and_grad(params, batch, weights)
    assert len(seen) >= 2 * 2 * 4  # both boundaries, both ways, four micro-batches
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b)


# --- values that go straight to the loss ---


def encoded(params, x):
    """What the next stage takes, and what the loss alone does."""
    h = x @ params
    return h, jnp.tanh(h)


def multiplied(params, h):
    return h @ params


def from_all_over(values, batch):
    """Of values of the first and the last stage, and of an entry of the batch."""
    fit = ((values["y"] - batch["target"]) ** 2).sum(-1)
    return fit + (values["mu"] ** 2).mean(-1) * values["scale"]


STRAIGHT = ("y", "mu", "scale")


def chain():
    return [
        pipeline.Stage(encoded, ("x",), ("h", "mu")),
        pipeline.Stage(multiplied, ("h",), ("m",)),
        pipeline.Stage(multiplied, ("m",), ("y",)),
    ]


def apart():
    """No stage takes what another one puts out; the last is not the slowest."""
    return [
        pipeline.Stage(multiplied, ("x",), ("mu",)),
        pipeline.Stage(multiplied, ("z",), ("other",)),
        pipeline.Stage(multiplied, ("x",), ("y",)),
    ]


def straight_problem():
    rng = np.random.default_rng(4)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float64)

    params = [jnp.asarray(normal(*s)) for s in ((3, 4), (4, 5), (5, 2))]
    batch = {"x": normal(7, 3), "target": normal(7, 2), "scale": normal(7)}
    return params, batch, rng.uniform(0.5, 2, 7)


def weighted(params, batch, weights):
    h, mu = encoded(params[0], batch["x"])
    y = multiplied(params[2], multiplied(params[1], h))
    values = {"y": y, "mu": mu, "scale": batch["scale"]}
    return (from_all_over(values, batch) * weights).sum() / weights.sum()


def same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


SCHEDULES = {
    "GPipe": pipeline.gpipe(3, 5),
    "1F1B": pipeline.one_f_one_b(3, 5),
    "zero bubble": pipeline.zero_bubble(3, 5),
    "one worker": pipeline.looped_bfs(1, 5, 3),
}


@pytest.mark.parametrize("family", SCHEDULES)
def test_the_loss_is_given_values_of_all_stages(family):
    params, batch, weights = straight_problem()
    pipe = pipeline.Pipeline(
        chain(), from_all_over, SCHEDULES[family], loss_inputs=STRAIGHT
    )
    loss, grads = pipe.value_and_grad(params, batch, weights)
    same((loss, grads), jax.value_and_grad(weighted)(params, batch, weights))
    same(pipe.evaluate(params, batch, weights).loss, loss)


@pytest.mark.parametrize("micro_batches", [2, 5])
def test_stages_that_wait_for_each_other_only_at_the_loss(micro_batches):
    params, batch, _ = straight_problem()
    given = [params[0], params[2], params[0][:, :2]]
    batch["z"] = np.random.default_rng(8).normal(size=(7, 5))
    taken = ("y", "mu", "other")

    def total(values, batch):
        return losses(values["y"], batch) * values["mu"].sum(-1) + values["other"][:, 0]

    schedule = pipeline.one_f_one_b(3, micro_batches)
    pipe = pipeline.Pipeline(apart(), total, schedule, loss_inputs=taken)
    found = pipe.value_and_grad(given, batch)

    def mean(params):
        values = {
            "mu": batch["x"] @ params[0],
            "other": batch["z"] @ params[1],
            "y": batch["x"] @ params[2],
        }
        return total(values, batch).mean()

    same(found, jax.value_and_grad(mean)(given))


def test_a_value_for_the_loss_that_comes_last(threads, monkeypatch):
    """Not before the last worker asks for it; without that nothing was waiting."""
    receive, wait, held = PipelineMailbox._receive, WorkerChannels.wait, []

    def holding(mailbox, caller, body, meta):
        kind, _, name, *_ = meta["tag"]
        if (kind, name) == ("F", "mu"):
            held.append((mailbox, caller, body, meta))
        else:
            receive(mailbox, caller, body, meta)

    def releasing(channels, waiting):
        if any(tag.name == "mu" for tag in waiting):
            while held:
                receive(*held.pop())
        wait(channels, waiting)

    params, batch, weights = straight_problem()
    expected = jax.value_and_grad(weighted)(params, batch, weights)
    schedule = pipeline.one_f_one_b(3, 4)

    def body(rank):
        pipe = pipeline.Pipeline(
            chain(), from_all_over, schedule, workers(3), loss_inputs=STRAIGHT
        )
        loss, grads = pipe.value_and_grad(pipe.place(params), batch, weights)
        return np.asarray(loss), np.asarray(grads[rank])

    monkeypatch.setattr(PipelineMailbox, "_receive", holding)
    monkeypatch.setattr(WorkerChannels, "wait", releasing)
    tasks = [threads.start(rank, body, rank) for rank in range(3)]
    for rank, task in enumerate(tasks):
        same(task.result(), (expected[0], expected[1][rank]))
