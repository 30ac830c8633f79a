"""The backward pass of a gather keeps a slice and adds nothing.

A layer gathered the embeddings of all processes for a contrastive loss. Its backward
pass returned the process's own slice of its own gradient, and not the sum of what all
processes have for it.
"""

from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import torch
from torch import distributed

from experiments.museum.meshes import Judge
from experiments.museum.torch_trainers import _perceptron as model
from jdist import verify

Tree = Any

THREAD = "https://github.com/lightly-ai/lightly/pull/1531"
CLAIM = "The gradient of the mean of all pairs' products, which both processes compute."
EXPECTED = ("first difference: backward, outward",)


def buggy(cotangent: torch.Tensor) -> torch.Tensor:
    """The cotangent of all processes' embeddings, before a process takes its slice."""
    return cotangent


def fixed(cotangent: torch.Tensor) -> torch.Tensor:
    """The cotangent of all processes' embeddings, before a process takes its slice."""
    distributed.all_reduce(whole := cotangent.clone())
    return whole


class Gather(torch.autograd.Function):
    """The embeddings of all processes."""

    @staticmethod
    def forward(context: Any, own: torch.Tensor, part: Any) -> torch.Tensor:
        """Gathers."""
        context.part = part
        found = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(found, own.contiguous())
        return torch.cat(found)

    @staticmethod
    def backward(context: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Takes the own slice."""
        return context.part(cotangent).chunk(2)[distributed.get_rank()], None


def local(rank: int, part: Any, params: Tree, batch: Tree) -> tuple[float, Tree]:
    """One process, with the rows of the products that are its own examples'."""
    module, each = model.Perceptron(params), model.own(rank, batch)
    with verify.shown(module):
        own = module(each["x"])
        loss = torch.tanh(own @ Gather.apply(own, part).T).mean(-1).sum() / 8
        loss.backward()
    for weight in module.parameters():
        distributed.all_reduce(weight.grad)
    distributed.all_reduce(total := loss.detach().clone())
    return total.item(), model.gradient(module)


trainer = partial(model.over_gloo, local)


# --- what the judge needs ---


def loss(params: Tree, batch: Tree) -> Tree:
    """The loss of all pairs, in JAX."""
    h = verify.tap(batch["x"] @ params["inward"].T, "inward")
    out = verify.tap(jnp.tanh(h) @ params["outward"].T, "outward")
    return jnp.tanh(out @ out.T).mean()


@cache
def judge() -> Judge:
    """The judge."""
    return verify.trace_judge(loss, *model.problem())
