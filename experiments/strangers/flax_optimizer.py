"""Flax: an NNX module with `nnx.Optimizer`, a Linen one with `TrainState`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

from experiments.strangers.problem import (
    HIDDEN,
    STEPS,
    VOCABULARY,
    WIDTH,
    Batch,
    Step,
)
from experiments.strangers.stranger import Use

# --- the trainer, as its documentation has it ---


class NextToken(nnx.Module):
    """The model; its embeddings are tied, so that a parameter is used twice."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Initializes random weights."""
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns scores, `(sequences, LENGTH, VOCABULARY)`."""
        hidden = jnp.tanh(self.up(self.embedding(inputs)))
        return self.embedding.attend(self.down(hidden))


class LinenNextToken(linen.Module):
    """The same model in Linen."""

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns scores, `(sequences, LENGTH, VOCABULARY)`."""
        embedding = linen.Embed(VOCABULARY, WIDTH, name="embedding")
        hidden = jnp.tanh(linen.Dense(HIDDEN, name="up")(embedding(inputs)))
        down = linen.Dense(WIDTH, use_bias=False, name="down")
        return embedding.attend(down(hidden))


def mean_loss(scores: jax.Array, batch: Batch) -> jax.Array:
    """The weighted mean over the micro-batch's own tokens."""
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    losses = cross_entropy(scores, batch.targets)
    return jnp.sum(batch.weights * losses) / jnp.sum(batch.weights)


def nnx_optimizer(step: Step) -> Any:
    """`nnx.Optimizer` around `optax.MultiSteps`."""
    model = NextToken(nnx.Rngs(0))
    start(model, step)
    wrapped = optax.MultiSteps(optax.sgd(1.0), STEPS)
    optimizer = nnx.Optimizer(model, wrapped, wrt=nnx.Param)
    for batch in step.parts:
        train_step(model, optimizer, batch)
    return shown(model)


@nnx.jit
def train_step(model: NextToken, optimizer: nnx.Optimizer, batch: Batch) -> None:
    """Trains with one micro-batch, in place."""
    gradient = nnx.grad(lambda model: mean_loss(model(batch.inputs), batch))(model)
    optimizer.update(model, gradient)


def train_state(step: Step) -> Any:
    """`TrainState` with `optax.MultiSteps` as its transformation."""
    transformation = optax.MultiSteps(optax.sgd(1.0), STEPS).gradient_transformation()
    state = TrainState.create(
        apply_fn=MODEL.apply, params=linen_params(step), tx=transformation
    )
    for batch in step.parts:
        gradient = linen_gradient(state.params, batch)
        state = state.apply_gradients(grads=gradient)
    return state.params


MODEL = LinenNextToken()


@jax.jit
@jax.grad
def linen_gradient(params: Any, batch: Batch) -> jax.Array:
    """The gradient of one micro-batch."""
    scores: Any = MODEL.apply({"params": params}, batch.inputs)
    return mean_loss(scores, batch)


# --- what the judge needs ---

NAMES = {
    "embedding": "embedding/embedding",
    "up": "up/kernel",
    "bias": "up/bias",
    "down": "down/kernel",
}


def start(model: NextToken, step: Step) -> None:
    """Sets the model's parameters to those of the trial."""
    nnx.update(model, nnx.State(linen_params(step)))


def linen_params(step: Step) -> dict[str, Any]:
    """The parameters of the trial in Flax's structure."""
    own = {name: jnp.asarray(leaf) for name, leaf in step.params.items()}
    return {
        "embedding": {"embedding": own["embedding"]},
        "up": {"kernel": own["up"], "bias": own["bias"]},
        "down": {"kernel": own["down"]},
    }


def shown(model: NextToken) -> Any:
    """The parameters after the step."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


# --- what is on trial ---

CLAIM = "the mean over a large batch's tokens"

USES = (
    Use(
        "flax nnx.Optimizer",
        "around optax.MultiSteps, mean losses",
        CLAIM,
        nnx_optimizer,
        "parameters",
        "No guide to accumulation: the optimizer takes any optax transformation. "
        "Nothing on unequal parts.",
        "https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/training/"
        "optimizer.html",
        names=NAMES,
    ),
    Use(
        "flax TrainState",
        "with optax.MultiSteps, mean losses",
        CLAIM,
        train_state,
        "parameters",
        "As `nnx.Optimizer`.",
        "https://flax.readthedocs.io/en/latest/api_reference/flax.training.html",
        names=NAMES,
    ),
)
