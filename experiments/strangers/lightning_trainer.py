"""Lightning: `Trainer(accumulate_grad_batches=...)` around a `LightningModule`."""

import logging
import warnings
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

from experiments.strangers import torch_model
from experiments.strangers.problem import MICRO, STEPS, Step
from experiments.strangers.stranger import Use

# --- the trainer, as its documentation has it ---


class Module(lightning.LightningModule):
    """The model, its loss and its optimizer.

    Args:
      step: The data.
      by_tokens: Whether to divide losses by the step's tokens, not the batch's own.
    """

    def __init__(self, step: Step, by_tokens: bool) -> None:
        super().__init__()
        self.model = torch_model.NextToken()
        self.total = float(step.whole.weights.sum()) if by_tokens else None

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """The loss of one micro-batch."""
        if self.total is None:
            return torch_model.weighted_mean(self.model, batch)
        return torch_model.weighted_sum(self.model, batch) * STEPS / self.total

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fitted(step: Step, *, by_tokens: bool) -> Any:
    """The gradient of the last optimizer step of one epoch."""
    module, reader = Module(step, by_tokens), Reader()
    torch_model.start(module.model, step.params)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # About data workers and logging intervals, which do not matter here.
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=STEPS,
            gradient_clip_val=step.clip,
            precision="bf16-mixed" if step.mixed else "32-true",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[reader],
        )
        data: Any = torch_model.rows(step.whole)
        loader: Any = DataLoader(data, batch_size=MICRO)
        trainer.fit(module, loader)
    return reader.shown


# --- what the judge needs ---


class Reader(lightning.Callback):
    """Stores the gradient that the optimizer has used last.

    `on_before_optimizer_step` comes before a gradient is clipped.
    """

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Called by the trainer at last."""
        self.shown = torch_model.gradient(module.model)


# --- what is on trial ---

GUIDE = "https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html"
OFFERS = ("clipped by norm", "mixed precision")

USES = (
    Use(
        "Lightning Trainer",
        "accumulate_grad_batches, mean losses",
        "the mean over the tokens of a batch K times as large",
        lambda step: fitted(step, by_tokens=False),
        "gradient",
        "The effect is that of a batch K times as large; nothing on unequal parts or "
        "an epoch's end (issue 19987 of Lightning-AI/pytorch-lightning).",
        GUIDE,
        names=torch_model.NAMES,
        offers=OFFERS,
    ),
    Use(
        "Lightning Trainer",
        "accumulate_grad_batches, losses over the step's tokens",
        "the mean over all tokens of the step",
        lambda step: fitted(step, by_tokens=True),
        "gradient",
        "The guide does not mention the division by K, which the loss has to undo.",
        GUIDE,
        names=torch_model.NAMES,
        remedy=True,
        offers=OFFERS,
    ),
)
