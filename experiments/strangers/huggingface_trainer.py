"""Hugging Face's `Trainer`, with accumulation."""

import tempfile
from dataclasses import replace
from typing import Any

import torch
import transformers

from experiments.strangers import torch_model
from experiments.strangers.problem import MICRO, OPTIONS, STEPS, Step
from experiments.strangers.stranger import Use

SMOOTHING = 0.1

# --- the trainer, as its documentation has it ---


class Config(transformers.PretrainedConfig):
    """The model's configuration."""

    model_type = "next_token"
    router_aux_loss_coef = 0.0


class Model(transformers.PreTrainedModel):
    """The model with the library's own loss, which takes `num_items_in_batch`."""

    config_class = Config

    def __init__(self, config: Config) -> None:
        """Initializes random weights."""
        super().__init__(config)
        self.model = torch_model.NextToken()
        # Targets are already shifted; unlike the default, this loss does not shift
        # them.
        self.loss_type = "ForMaskedLM"
        self.post_init()

    def forward(self, inputs: Any, labels: Any = None, **options: Any) -> Any:
        """Returns scores, and the loss if there are labels."""
        scores = self.model(inputs)
        if labels is None:
            return {"logits": scores}
        size = scores.shape[-1]
        loss = self.loss_function(scores, labels, vocab_size=size, **options)
        # As the library's mixtures of experts add theirs.
        sizes = scores.logsumexp(-1).square()
        loss += self.config.router_aux_loss_coef * sizes[labels != -100].mean()
        return {"loss": loss, "logits": scores}


class OlderModel(Model):
    """The model with a loss that does not take `num_items_in_batch`."""

    accepts_loss_kwargs = False


def trained(step: Step, kind: type[Model] = Model, smoothing: float = 0.0) -> Any:
    """The gradient of the last optimizer step of one epoch."""
    config = Config(router_aux_loss_coef=step.auxiliary)
    model, reader = kind(config), Reader()
    torch_model.start(model.model, step.params)
    labels = torch.as_tensor(step.whole.labels)
    data: Any = [
        {"inputs": row["inputs"], "labels": own}
        for row, own in zip(torch_model.rows(step.whole), labels, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=STEPS,
            num_train_epochs=1,
            train_sampling_strategy="sequential",
            label_smoothing_factor=smoothing,
            optim="sgd",
            learning_rate=1.0,
            max_grad_norm=step.clip or 0.0,
            bf16=step.mixed,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = transformers.Trainer(
            model, arguments, train_dataset=data, callbacks=[reader]
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return reader.shown


# --- what the judge needs ---


class Reader(transformers.TrainerCallback):
    """Stores the gradient just before the optimizer uses it."""

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Called by the trainer before each optimizer step."""
        self.shown = torch_model.gradient(kwargs["model"].model)


# --- what is on trial ---

GUIDE = "https://huggingface.co/docs/transformers/en/grad_accumulation"

DEFAULT = Use(
    "transformers Trainer",
    "model takes num_items_in_batch",
    "the mean over all tokens of the step",
    trained,
    "gradient",
    "The loss is divided by the targets of all micro-batches.",
    GUIDE,
    names=torch_model.NAMES,
    lacks={"weighted": "labels have no weights"},
    offers=tuple(OPTIONS),
)

USES = (
    DEFAULT,
    replace(
        DEFAULT,
        way="model with accepts_loss_kwargs=False",
        show=lambda step: trained(step, OlderModel),
        documented="A loss that ignores the count is slightly inaccurate.",
        link="https://huggingface.co/docs/transformers/main_classes/trainer"
        "#transformers.Trainer.compute_loss",
    ),
    replace(
        DEFAULT,
        way=f"label_smoothing_factor={SMOOTHING}",
        show=lambda step: trained(step, smoothing=SMOOTHING),
        documented="Nothing; issue 46731, fixed by pull request 47261 after version "
        "5.12.1.",
        link="https://github.com/huggingface/transformers/issues/46731",
        smoothing=SMOOTHING,
    ),
)
