"""A load loss over all replicas' tokens is too small by their number.

The global load loss took the choices of all replicas and only the own probabilities,
and divided by all replicas' tokens. Gradients are averaged over the replicas after
that: the load loss counted once too little for each replica.
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import mixture as model
from experiments.museum.language_model import counts, tokens
from experiments.museum.meshes import Judge, Trainer, mesh, spmd, whole
from jdist import verify

Tree = Any

THREAD = "https://github.com/NVIDIA/Megatron-LM/pull/3769"
CLAIM = "The gradient of the mean loss and a tenth of the load loss of the whole batch."
EXPECTED = ("backward, router", "0.5 times")


def buggy(load: Tree) -> Tree:
    """The load loss of the own probabilities."""
    return load


def fixed(load: Tree) -> Tree:
    """The load loss of the own probabilities."""
    return load * lax.axis_size("dp")


def trainer(part: Trainer) -> Trainer:
    """Two replicas, whose gradients are averaged."""

    def local(params: Tree, batch: Tree) -> Tree:
        count = lax.psum(counts(batch).sum(), "dp") / lax.axis_size("dp")

        def mean(p: Tree) -> Tree:
            h = p["embed"][batch["x"]]
            _, probabilities, chosen = model.routed(p, h)
            everyone = whole(chosen, "dp", 0)
            # Of the own tokens, divided by the number of all.
            load = model.load_loss(probabilities, everyone) / lax.axis_size("dp")
            nll, _ = model.token_losses(p, batch)
            return (nll * batch["mask"]).sum() / count + 0.1 * part(load)

        loss, gradient = jax.value_and_grad(mean)(params)
        return lax.pmean(loss, "dp"), lax.pmean(gradient, "dp")

    return spmd(local, mesh(dp=2), (P(), P("dp")), (P(), P()))


# --- what the judge needs ---


def loss(params: Tree, batch: Tree) -> Tree:
    """The mean over the counted tokens, and a tenth of the batch's load loss."""
    nll, load = model.token_losses(params, batch)
    return (nll * batch["mask"]).sum() / counts(batch).sum() + 0.1 * load


def judge() -> Judge:
    """The judge: the model on one device."""
    return verify.trace_judge(loss, model.params(), tokens())
