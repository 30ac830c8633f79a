"""Gradients of divided experts are not averaged with the others.

Replicas that share their experts exchange tokens, so an expert's gradient is a sum over
all replicas' tokens. The other parameters' gradients were averaged over the replicas,
those of the experts were not: too large by the number of replicas.
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import mixture as model
from experiments.museum.language_model import tokens
from experiments.museum.meshes import Judge, Trainer, mesh, spmd
from jdist import verify

Tree = Any

THREAD = "https://github.com/pytorch/pytorch/issues/160285"
CLAIM = "The gradient of the mean over the tokens of both replicas."
EXPECTED = ("all examples count 2 times", "2 leaves are wrong")


def buggy(gradient: Tree) -> Tree:
    """The gradient of the experts of this device."""
    return gradient


def fixed(gradient: Tree) -> Tree:
    """The gradient of the experts of this device."""
    return gradient / lax.axis_size("ep")


def trainer(part: Trainer) -> Trainer:
    """Two replicas with two of the four experts each."""

    def local(params: Tree, batch: Tree) -> Tree:
        mean = lambda p: model.divided_token_losses(p, batch).mean()  # noqa: E731
        loss, gradient = jax.value_and_grad(mean)(params)
        gradient = {
            name: part(g) if name in model.DIVIDED else lax.pmean(g, "ep")
            for name, g in gradient.items()
        }
        return lax.pmean(loss, "ep"), gradient

    return spmd(local, mesh(ep=2), (model.SPECS, P("ep")), (P(), model.SPECS))


# --- what the judge needs ---


def losses(params: Tree, batch: Tree) -> Tree:
    """The mean over each sequence's tokens."""
    return model.token_losses(params, batch)[0].mean(-1)


def judge() -> Judge:
    """The judge: the model on one device."""
    return verify.trace_judge(losses, model.params(), tokens())
