"""The model in torch, and the names by which the judge finds its gradients."""

from typing import Any

import torch
from torch import nn

from experiments.strangers.problem import HIDDEN, VOCABULARY, WIDTH, Batch, Params
from jdist.verify.comparison import Named


class NextToken(nn.Module):
    """The model; its embeddings are also the output weights."""

    def __init__(self) -> None:
        """Initializes random weights."""
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns scores, `(sequences, LENGTH, VOCABULARY)`."""
        hidden = self.down(torch.tanh(self.up(self.embedding(inputs))))
        return hidden @ self.embedding.weight.T


def token_losses(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of each token, `(sequences, LENGTH)`."""
    return nn.functional.cross_entropy(scores.movedim(-1, 1), targets, reduction="none")


def weighted_sum(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weighted sum of the tokens' losses."""
    losses = token_losses(model(batch["inputs"]), batch["targets"])
    return (batch["weights"] * losses).sum()


def weighted_mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weighted mean over the batch's own tokens, as in a user's loss."""
    return weighted_sum(model, batch) / batch["weights"].sum()


def rows(batch: Batch) -> list[dict[str, torch.Tensor]]:
    """A dataset with one item for each sequence."""
    tensors = {
        name: torch.as_tensor(leaf).to(
            torch.float32 if name == "weights" else torch.int64
        )
        for name, leaf in batch._asdict().items()
    }
    return [
        {name: leaf[i] for name, leaf in tensors.items()}
        for i in range(len(batch.inputs))
    ]


# --- what the judge needs ---

# torch stores a linear layer's weight as (out, in).
NAMES: dict[str, Named] = {
    "embedding": "embedding.weight",
    "up": ("up.weight", (1, 0)),
    "bias": "up.bias",
    "down": ("down.weight", (1, 0)),
}


def start(model: nn.Module, params: Params) -> None:
    """Sets the model's parameters to those of the trial."""
    own = {name: torch.as_tensor(leaf) for name, leaf in params.items()}
    model.load_state_dict(
        {
            "embedding.weight": own["embedding"],
            "up.weight": own["up"].T,
            "up.bias": own["bias"],
            "down.weight": own["down"].T,
        }
    )


def gradient(model: nn.Module) -> dict[str, Any]:
    """A copy of the gradients by torch's names; None for parameters without one."""
    return {
        name: None if leaf.grad is None else leaf.grad.numpy(force=True).copy()
        for name, leaf in model.named_parameters()
    }
