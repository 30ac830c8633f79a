"""optax.MultiSteps, around plain gradient descent."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.strangers.problem import STEPS, Batch, Step, token_losses
from experiments.strangers.stranger import Use

# --- the trainer, as its documentation has it ---


def averaged(step: Step) -> Any:
    """Mean losses of micro-batches, averaged by the optimizer."""
    optimizer = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=STEPS)
    return _trained(step, optimizer, None)


def summed(step: Step) -> Any:
    """Losses over the whole step's weights, summed by the optimizer."""
    count, total = len(step.sizes), step.whole.weights.sum()
    optimizer = optax.MultiSteps(optax.sgd(1.0), count, use_grad_mean=False)
    return _trained(step, optimizer, total)


def _trained(step: Step, optimizer: optax.MultiSteps, total: Any) -> Any:
    """The parameters after a loop over the micro-batches.

    Args:
      step: The data.
      optimizer: Accumulates gradients and steps on its own.
      total: The divisor of the losses' sum; None for the micro-batch's own weights.
    """
    params = jax.tree.map(jnp.asarray, dict(step.params))
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for batch in step.parts:
        gradient = gradient_of(params, batch, total)
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


@jax.jit
@jax.grad
def gradient_of(params: Any, batch: Batch, total: Any) -> jax.Array:
    """The gradient of the losses' weighted sum, divided by a total.

    The total is that of the batch's own weights if `total` is None.
    """
    losses = token_losses(params, batch.inputs, batch.targets)
    by = jnp.sum(batch.weights) if total is None else total
    return jnp.sum(batch.weights * losses) / by


# --- what the judge needs ---

SHOWS = "parameters"

# --- what is on trial ---

GUIDE = (
    "https://optax.readthedocs.io/en/latest/_collections/examples/"
    "gradient_accumulation.html"
)

USES = (
    Use(
        "optax.MultiSteps",
        "mean losses, gradients averaged",
        "the mean over a large batch's tokens",
        averaged,
        SHOWS,
        "A simulation of a large batch, by an example with equal batches; nothing on "
        "unequal ones.",
        GUIDE,
    ),
    Use(
        "optax.MultiSteps",
        "losses over the step's tokens, gradients summed",
        "the mean over a large batch's tokens",
        summed,
        SHOWS,
        "`use_grad_mean=False` for sums; not when to use it.",
        "https://optax.readthedocs.io/en/latest/api/transformations.html"
        "#optax.MultiSteps",
        remedy=True,
    ),
)
