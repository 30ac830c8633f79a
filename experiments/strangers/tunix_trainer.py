"""Tunix: `PeftTrainer` with its own loss and accumulation."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.sft import peft_trainer

from experiments.strangers import flax_optimizer
from experiments.strangers.problem import STEPS, Step
from experiments.strangers.stranger import Use

# --- the trainer, as its documentation has it ---


class Model(nnx.Module):
    """The model with the arguments that the trainer's loss passes."""

    def __init__(self) -> None:
        """Initializes random weights."""
        self.model = flax_optimizer.NextToken(nnx.Rngs(0))

    def __call__(
        self, tokens: jax.Array, positions: Any, cache: Any, attention_mask: Any
    ) -> tuple[jax.Array, None]:
        """Returns scores of the next tokens, and no cache."""
        return self.model(tokens), None


def trained(step: Step) -> Any:
    """The parameters after one pass over the micro-batches."""
    model = Model()
    flax_optimizer.start(model.model, step)
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=10**6, gradient_accumulation_steps=STEPS
    )
    optimizer = optax.sgd(1.0)
    if step.clip is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(step.clip), optimizer)
    trainer = peft_trainer.PeftTrainer(model, optimizer, config)
    trainer.with_gen_model_input_fn(model_input).train(inputs(step))
    return flax_optimizer.shown(model.model)


def inputs(step: Step) -> list[Any]:
    """The trainer's inputs: sequences, and which of their tokens count."""
    return [
        peft_trainer.TrainingInput(
            # Unshifted, with weight 0 for the first token, which is not a target.
            input_tokens=part.tokens,
            input_mask=jnp.pad(part.weights, ((0, 0), (1, 0))),
        )
        for part in step.parts
    ]


def model_input(given: Any) -> dict[str, Any]:
    """The arguments of the loss; the model uses neither positions nor attention."""
    return {
        "input_tokens": given.input_tokens,
        "input_mask": given.input_mask,
        "positions": None,
        "attention_mask": None,
    }


# --- what the judge needs ---

NAMES = flax_optimizer.NAMES

# --- what is on trial ---

USES = (
    Use(
        "tunix PeftTrainer",
        "gradient_accumulation_steps, its own loss",
        "the mean over the counted tokens of the step",
        trained,
        "parameters",
        "Nothing on parts with different counts. Pull request 1744 of google/tunix, "
        "open in July 2026, describes this finding.",
        "https://github.com/google/tunix/pull/1744",
        names=NAMES,
        lacks={"weighted": "a mask has no weights"},
        offers=("clipped by norm",),
    ),
)
