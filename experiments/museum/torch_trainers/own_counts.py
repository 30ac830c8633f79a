"""Losses are divided by each process's own number of targets.

The original criterion took the average number of target masks over all processes. The
port took each process's own: where targets are few, they count for more.
"""

from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from experiments.museum.torch_trainers import _perceptron as model
from jdist import verify

Tree = Any

THREAD = "https://github.com/huggingface/transformers/issues/26844"
CLAIM = "The gradient of the mean over the counted examples of both processes."
EXPECTED = (
    "first difference: gradient",
    "count 0.6667 times",
    "examples 4 count 2 times",
)


def buggy(count: torch.Tensor) -> torch.Tensor:
    """The divisor of a process's sum of losses."""
    return count


def fixed(count: torch.Tensor) -> torch.Tensor:
    """The divisor of a process's sum of losses."""
    distributed.all_reduce(whole := count.clone())
    return whole / distributed.get_world_size()


def local(rank: int, part: Any, params: Tree, batch: Tree) -> tuple[float, Tree]:
    """One process of DistributedDataParallel."""
    module, each = model.Perceptron(params), model.own(rank, batch)
    replica = DistributedDataParallel(module)
    with verify.shown(module):
        errors = ((replica(each["x"]) - each["y"]) ** 2).mean(-1)
        loss = (errors * each["counted"]).sum() / part(each["counted"].sum())
        loss.backward()
    distributed.all_reduce(total := loss.detach().clone())
    return total.item() / distributed.get_world_size(), model.gradient(module)


trainer = partial(model.over_gloo, local)


# --- what the judge needs ---


judge = model.judge
