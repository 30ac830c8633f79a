"""A small model in torch and in JAX, and torch trainers over two processes."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from experiments.museum.groups import gloo
from experiments.museum.meshes import Judge, Trainer
from jdist import verify

Tree = Any
Local = Callable[..., tuple[float, Tree]]

INPUTS, HIDDEN, OUTPUTS = 5, 8, 3
WEIGHTS = {"inward": (HIDDEN, INPUTS), "outward": (OUTPUTS, HIDDEN)}


class Perceptron(torch.nn.Module):
    """The model in torch."""

    def __init__(self, params: Tree) -> None:
        """Takes weights as torch has them, `(out, in)`."""
        super().__init__()
        self.inward = torch.nn.Linear(INPUTS, HIDDEN, bias=False)
        self.outward = torch.nn.Linear(HIDDEN, OUTPUTS, bias=False)
        self.load_state_dict(
            {f"{k}.weight": torch.tensor(np.asarray(v)) for k, v in params.items()}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs, `(examples, OUTPUTS)`."""
        return self.outward(torch.tanh(self.inward(x)))


def gradient(model: torch.nn.Module) -> Tree:
    """The gradients by the reference's names."""
    return {
        name.removesuffix(".weight"): p.grad.numpy().copy()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def own(rank: int, batch: Tree, ranks: int = 2) -> Tree:
    """The tensors of this process's part of the batch."""
    return {k: torch.tensor(v).chunk(ranks)[rank] for k, v in batch.items()}


def problem() -> tuple[Tree, Tree]:
    """Random weights, and eight examples, some with a weight of 0."""
    rng = np.random.default_rng(5)
    params = {k: rng.normal(size=v).astype(np.float32) for k, v in WEIGHTS.items()}
    batch = {
        "x": rng.normal(size=(8, INPUTS)).astype(np.float32),
        "y": rng.normal(size=(8, OUTPUTS)).astype(np.float32),
        "counted": np.array([1, 1, 0, 1, 1, 0, 0, 0], np.float32),
    }
    return jax.tree.map(jnp.asarray, params), batch


# --- what the judge needs ---


def recorded(rank: int, local: Local, part: Trainer, params: Tree, batch: Tree) -> Tree:
    """The loss, the gradient and the records of one process."""
    with verify.TapRecording() as recording:
        loss, found = local(rank, part, params, batch)
    return loss, found, [tuple(record) for record in recording.records]


def over_gloo(local: Local, part: Trainer) -> Trainer:
    """A trainer over two processes, which shows what they recorded.

    Args:
      local: `local(rank, part, params, batch) -> (loss, gradient)` of one process.
      part: The part of an exhibit that differs.
    """

    def step(params: Tree, batch: Tree) -> Tree:
        given = jax.tree.map(np.asarray, (params, batch))
        (loss, found, records), *others = gloo().run(recorded, local, part, *given)
        for each in (records, *(other[-1] for other in others)):
            verify.replay(each)
        return jnp.float32(loss), found

    return step


def losses(params: Tree, batch: Tree) -> Tree:
    """The squared error of each example."""
    h = verify.tap(batch["x"] @ params["inward"].T, "inward")
    out = verify.tap(jnp.tanh(h) @ params["outward"].T, "outward")
    return ((out - batch["y"]) ** 2).mean(-1)


@cache
def judge() -> Judge:
    """The judge: the mean over the counted examples, in JAX."""
    params, batch = problem()
    return verify.trace_judge(losses, params, batch, weights=batch["counted"])
