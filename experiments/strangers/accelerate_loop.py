"""accelerate: the user's loop, with `Accelerator.accumulate`."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader

from experiments.strangers import torch_model
from experiments.strangers.problem import MICRO, STEPS, Step
from experiments.strangers.stranger import Use

# --- the trainer, as its documentation has it ---


def accumulated(step: Step) -> Any:
    """Mean losses of micro-batches, averaged by the accelerator."""
    accelerator, model, optimizer, loader = prepared(step)
    shown: list[Any] = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch_model.weighted_mean(model, batch))
            clip(accelerator, model, step)
            read(accelerator, model, shown)
            optimizer.step()
            optimizer.zero_grad()
    return shown[-1]


def by_tokens(step: Step) -> Any:
    """Sums over the whole step's weights, as advised for samples of variable size."""
    accelerator, model, optimizer, loader = prepared(step)
    total = step.whole.weights.sum()
    shown: list[Any] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = torch_model.weighted_sum(model, batch)
            accelerator.backward(loss * STEPS / total)
            clip(accelerator, model, step)
            read(accelerator, model, shown)
            optimizer.step()
            optimizer.zero_grad()
    return shown[-1]


def prepared(step: Step) -> Any:
    """The accelerator, and the model, optimizer and loader that it has prepared."""
    # One process has one precision, unless this state is forgotten.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=STEPS,
        mixed_precision="bf16" if step.mixed else "no",
    )
    model = torch_model.NextToken()
    torch_model.start(model, step.params)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data: Any = torch_model.rows(step.whole)
    loader: Any = DataLoader(data, batch_size=MICRO)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def clip(accelerator: Accelerator, model: Any, step: Step) -> None:
    """Clips the gradient where the optimizer steps, as in the guide."""
    if step.clip is not None and accelerator.sync_gradients:
        accelerator.clip_grad_norm_(model.parameters(), step.clip)


# --- what the judge needs ---


def read(accelerator: Accelerator, model: Any, shown: list[Any]) -> None:
    """Stores the gradient just before the optimizer uses it."""
    if accelerator.sync_gradients:
        shown.append(torch_model.gradient(model))


# --- what is on trial ---

GUIDE = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"
OFFERS = ("clipped by norm", "mixed precision")

USES = (
    Use(
        "accelerate",
        "accumulate(), mean losses",
        "the mean over a large batch's tokens",
        accumulated,
        "gradient",
        "Samples of variable size need a sum over the step's tokens, not the average "
        "of averages. The end of the data makes a step; not that its loss is divided "
        "as in a full one.",
        GUIDE,
        names=torch_model.NAMES,
        offers=OFFERS,
    ),
    Use(
        "accelerate",
        "accumulate(), losses over the step's tokens",
        "the mean over all tokens of the step",
        by_tokens,
        "gradient",
        "The guide's own recipe: the sum, times the number of micro-batches, divided "
        "by the number of tokens.",
        GUIDE,
        names=torch_model.NAMES,
        remedy=True,
        offers=OFFERS,
    ),
)
