"""Trainers with one planted defect each: all are found, and where they are.

The trainer splits a batch of uneven size into micro-batches, weights its examples, and
runs a model with a shared matrix, a parameter that nothing reads and a logarithm of the
input. A defect is what people really write; its right twin passes. Those of the public
list, `verify.defects`, are in `test_defects_planted.py`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify
from jdist.verify.problem import standard

SIZE = 4
LEAVES = {"(loss)", "bias", "readout", "shared"}
GRADIENTS = LEAVES - {"(loss)"}


@dataclass(frozen=True)
class Trainer:
    """Micro-batches of `SIZE` examples, the last one shorter.

    Attributes:
      loss_fn: The losses that it differentiates; None: the problem's.
      weight: What a micro-batch's weights are turned into, given its first example.
      divide: By what a micro-batch's sum is divided, given its and all weights.
      keep: Which micro-batches are added up.
      rows: Which examples a micro-batch has, from its first one on.
      finish: What becomes of the summed gradient.
      own_loss: What becomes of the summed loss.
    """

    loss_fn: Callable | None = None
    weight: Callable = lambda own, start: own
    divide: Callable = lambda own, everything: everything.sum()
    keep: Callable = lambda parts: parts
    rows: Callable = lambda start, count: slice(start, start + SIZE)
    finish: Callable = lambda gradient: gradient
    own_loss: Callable = lambda loss: loss

    def run(self, problem):
        """A candidate for the judge."""
        loss_fn = self.loss_fn or problem.loss_fn

        def candidate(params, batch):
            weights = jnp.asarray(problem.weights, batch["x"].dtype)
            parts = []
            for start in range(0, len(weights), SIZE):
                rows = self.rows(start, len(weights))
                part = jax.tree.map(lambda x, rows=rows: x[rows], batch)
                own = self.weight(weights[rows], start)
                divisor = jnp.asarray(self.divide(own, weights), weights.dtype)
                parts.append(part_gradient(loss_fn, params, part, own / divisor))
            loss, gradient = jax.tree.map(lambda *x: sum(x), *self.keep(parts))
            return self.own_loss(loss), self.finish(gradient)

        return candidate


@functools.partial(jax.jit, static_argnums=0)
def part_gradient(loss_fn, params, rows, shares):
    """A micro-batch's loss and gradient, compiled once for all trainers."""
    return jax.value_and_grad(lambda p: jnp.sum(shares * loss_fn(p, rows)))(params)


def changed(**leaves):
    """A gradient in which some leaves are what a function makes of the whole."""
    return lambda g: {**g, **{name: make(g) for name, make in leaves.items()}}


def detached_use(params, rows):
    """The second use of the shared matrix is behind `stop_gradient`."""
    held = jax.lax.stop_gradient(params["shared"])
    hidden = jnp.tanh(jnp.log(rows["x"]) @ params["shared"] + params["bias"][None, :])
    scores = jax.nn.log_softmax((hidden @ held.T) @ params["readout"])
    own = jnp.take_along_axis(scores, rows["label"][:, None], axis=1)[:, 0]
    return rows["difficulty"] * (1 - own)


@dataclass(frozen=True)
class Defect:
    """One wrong trainer, and the leaves that show it.

    Attributes:
      trainer: The trainer.
      failing: Paths of the leaves that must fail, and no others.
      words: What one of the failures says.
    """

    trainer: Trainer
    failing: set = field(default_factory=lambda: set(LEAVES))
    words: str = "off by"


DEFECTS = {
    "a mean of the micro-batches' means": Defect(
        Trainer(divide=lambda own, everything: own.sum() * 3)
    ),
    "divided by the number of examples": Defect(
        Trainer(divide=lambda own, everything: len(everything)),
        words="times the reference",
    ),
    "weights of the first micro-batch for all": Defect(
        Trainer(weight=lambda own, start: own[::-1] if start else own)
    ),
    "a dropped last micro-batch": Defect(Trainer(keep=lambda parts: parts[:-1])),
    "micro-batches that overlap by one example": Defect(
        Trainer(rows=lambda start, count: slice(max(start - 1, 0), start + SIZE))
    ),
    "the first example never seen": Defect(
        Trainer(rows=lambda start, count: slice(start or 1, start + SIZE))
    ),
    "a detached use of a shared matrix": Defect(
        Trainer(loss_fn=detached_use), {"shared"}
    ),
    "a gradient where nothing flows": Defect(
        Trainer(finish=changed(unused=lambda g: g["unused"] + 1e-6)), {"unused"}
    ),
    "None where nothing flows": Defect(
        Trainer(finish=changed(unused=lambda g: None)), {"unused"}, "got None"
    ),
    "columns in another order": Defect(
        Trainer(finish=changed(readout=lambda g: g["readout"][:, ::-1])), {"readout"}
    ),
    "a transposed gradient": Defect(
        Trainer(finish=changed(readout=lambda g: g["readout"].T)),
        {"readout"},
        "wrong shape: expected (5, 3), got (3, 5)",
    ),
    "a gradient clipped in silence": Defect(
        Trainer(finish=lambda g: jax.tree.map(lambda x: jnp.clip(x, -0.05, 0.05), g)),
        GRADIENTS,
    ),
    "rounded to sixteen bits on the way": Defect(
        Trainer(
            finish=lambda g: jax.tree.map(
                lambda x: x.astype(jnp.bfloat16).astype(x.dtype), g
            )
        ),
        GRADIENTS,
    ),
    "one entry of one leaf": Defect(
        Trainer(finish=changed(shared=lambda g: g["shared"].at[2, 4].multiply(1.01))),
        {"shared"},
        "at [2, 4]",
    ),
    "the loss of another reduction": Defect(
        Trainer(own_loss=lambda loss: 3 * loss), {"(loss)"}
    ),
}


@pytest.fixture(scope="module")
def judged():
    """One judgement of the right trainer and of all wrong ones."""
    problem = standard(jnp.float32)
    candidates = {"right": Trainer().run(problem)}
    candidates |= {name: d.trainer.run(problem) for name, d in DEFECTS.items()}
    return verify.gradients(
        problem.loss_fn,
        problem.params,
        problem.batch,
        candidates,
        weights=problem.weights,
        finite_differences=False,
    )


def test_the_right_trainer_passes(judged):
    """In another order of sums than the reference's, and so not bit for bit."""
    right = judged.of("right")
    assert right.ok, str(right)
    assert not right.bit_equal
    assert {leaf.path for leaf in right.leaves} == LEAVES | {"unused"}


@pytest.mark.parametrize("name", DEFECTS)
def test_each_defect_is_found_where_it_is(judged, name):
    """In the leaves that it touches, in words that say what they look like."""
    defect, report = DEFECTS[name], judged.of(name)
    assert {leaf.path for leaf in report.failures} == defect.failing
    assert any(defect.words in leaf.problem for leaf in report.failures)
    assert not report.unjudged


def test_padding_with_zeros_is_found():
    """A row of zeros has the weight 0 and a gradient of NaN, by the logarithm."""
    problem = standard(jnp.float32)
    padded = len(problem.weights) + 1

    def candidate(pad):
        def fn(params, batch):
            rows = jax.tree.map(lambda x: jnp.concatenate([x, pad(x)]), batch)
            weights = jnp.zeros(padded, jnp.float32).at[:-1].set(problem.weights)
            return jax.value_and_grad(
                lambda p: jnp.sum(weights * problem.loss_fn(p, rows)) / jnp.sum(weights)
            )(params)

        return fn

    report = verify.gradients(
        problem.loss_fn,
        problem.params,
        problem.batch,
        {
            "zeros": candidate(lambda x: jnp.zeros_like(x[:1])),
            "repeated": candidate(lambda x: x[:1]),
        },
        weights=problem.weights,
        finite_differences=False,
    )
    assert report.of("repeated").ok, str(report.of("repeated"))
    failing = {leaf.path: leaf.problem for leaf in report.of("zeros").failures}
    assert "not finite" in failing["shared"]


def test_gradients_of_another_version_of_the_parameters():
    """Stale ones are found while they are stale: at the first step they are not."""
    problem = standard(jnp.float32)
    right = Trainer().run(problem)
    judged = verify.gradients_judge(problem.loss_fn)
    versions = [problem.params]

    def stale(params, batch):
        loss, _ = right(params, batch)
        return loss, right(versions[0], batch)[1]

    verdicts = []
    for _ in range(3):
        report = judged(
            versions[-1],
            problem.batch,
            {"right": right, "stale": stale},
            weights=problem.weights,
            finite_differences=False,
        )
        verdicts.append((report.of("right").ok, report.of("stale").ok))
        gradient = right(versions[-1], problem.batch)[1]
        versions.append(jax.tree.map(lambda p, g: p - 1e-3 * g, versions[-1], gradient))
    assert verdicts == [(True, True), (True, False), (True, False)]


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_extremes_over_parts(reduction):
    """An extreme is of all examples: the parts' extremes are not to be added up."""
    problem = standard(jnp.float32)
    counted = jnp.asarray(problem.weights) > 0
    half = np.arange(len(counted)) < 5
    pick = {"max": jnp.max, "min": jnp.min}[reduction]
    worst = {"max": -jnp.inf, "min": jnp.inf}[reduction]

    def extreme(params, batch, chosen):
        return pick(problem.loss_fn(params, batch), where=chosen, initial=worst)

    def by(*parts):
        def scalar(params, batch):
            return sum(extreme(params, batch, chosen) for chosen in parts)

        return jax.value_and_grad(scalar)

    report = verify.gradients(
        problem.loss_fn,
        problem.params,
        problem.batch,
        {
            "right": by(counted),
            "added up": by(counted & half, counted & ~half),
            "of one part": by(counted & half),
        },
        weights=problem.weights,
        reduction=reduction,
        finite_differences=False,
    )
    assert report.of("right").ok, str(report)
    failing = {leaf.path for leaf in report.of("added up").failures}
    assert failing == LEAVES
    # The part that has the extreme is right; the other one would not be.
    losses = np.where(counted, problem.loss_fn(problem.params, problem.batch), worst)
    at = losses.argmin() if reduction == "min" else losses.argmax()
    assert report.of("of one part").ok == bool(half[at])
