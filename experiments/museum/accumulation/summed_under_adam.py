"""Accumulated gradients are summed and not averaged; Adam hides it.

Each micro-batch's gradient was complete, and their sum went to the optimizer: too large
by the number of micro-batches. Adam divides by the gradient's own size, so losses
looked right; only the logged norm, and clipping by it, did not.
"""

from typing import Any

import jax
import optax

from experiments.museum import language_model as model
from experiments.museum.meshes import Judge, Trainer
from experiments.museum.trees import parts, scaled, summed
from jdist import verify

Tree = Any

THREAD = "https://github.com/NVIDIA-NeMo/RL/issues/84"
CLAIM = "A step of Adam with the mean of the micro-batches' gradients."
EXPECTED = ("gradient/", " 3 times")
ADAM = optax.adam(1e-2)


def buggy(gradients: list[Tree]) -> Tree:
    """The gradient of a step."""
    return summed(gradients)


def fixed(gradients: list[Tree]) -> Tree:
    """The gradient of a step."""
    return scaled(summed(gradients), 1 / len(gradients))


def trainer(part: Trainer) -> Trainer:
    """Three micro-batches; the optimizer's state is not shown."""
    kept: dict[str, Tree] = {}

    @jax.jit
    def run(params: Tree, state: Tree, batch: Tree) -> Tree:
        tokens = model.counts(batch).sum() / 3
        gradients = [
            jax.grad(lambda p, b=each: model.total(p, b) / tokens)(params)
            for each in parts(batch, 3)
        ]
        gradient = verify.tap(part(gradients), "gradient")
        moves, state = ADAM.update(gradient, state)
        return optax.apply_updates(params, moves), state

    def step(params: Tree, _: Tree, batch: Tree) -> Tree:
        state = kept.setdefault("state", ADAM.init(params))
        params, kept["state"] = run(params, state, batch)
        return params, None

    return step


# --- what the judge needs ---


def update(params: Tree, gradient: Tree, state: Tree) -> Tree:
    """Adam's step."""
    moves, state = ADAM.update(verify.tap(gradient, "gradient"), state)
    return optax.apply_updates(params, moves), state


def judge() -> Judge:
    """The judge of three steps: the model on one device."""
    params, batches = model.params(), [model.tokens(seed=seed) for seed in (1, 2, 3)]
    weights = [model.counts(batch) for batch in batches]
    start = params, ADAM.init(params)
    judge = verify.step_judge(model.losses, update, start, batches, weights=weights)
    return lambda trainer: judge({"trainer": trainer})
