"""The forward pass goes around DistributedDataParallel.

Trainers called the wrapped module directly. The wrapper arms its hooks in its own
forward pass, so no gradient was averaged: each process trained on its own data, and the
first one's copy was saved.
"""

from functools import partial
from typing import Any

from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from experiments.museum.torch_trainers import _perceptron as model
from jdist import verify

Tree = Any

THREAD = "https://github.com/jingyaogong/minimind/issues/853"
CLAIM = "The gradient of the mean over the counted examples of both processes."
EXPECTED = ("first difference: gradient", "examples 4 count 0 times")


def buggy(replica: DistributedDataParallel) -> Any:
    """What computes the forward pass."""
    return replica.module


def fixed(replica: DistributedDataParallel) -> Any:
    """What computes the forward pass."""
    return replica


def local(rank: int, part: Any, params: Tree, batch: Tree) -> tuple[float, Tree]:
    """One process of DistributedDataParallel."""
    module, each = model.Perceptron(params), model.own(rank, batch)
    forward = part(DistributedDataParallel(module))
    distributed.all_reduce(count := each["counted"].sum())
    with verify.shown(module):
        errors = ((forward(each["x"]) - each["y"]) ** 2).mean(-1)
        loss = (errors * each["counted"]).sum() * 2 / count
        loss.backward()
    distributed.all_reduce(total := loss.detach().clone())
    return total.item() / 2, model.gradient(module)


trainer = partial(model.over_gloo, local)


# --- what the judge needs ---


judge = model.judge
