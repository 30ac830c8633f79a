"""The tensor that carries the load loss's gradient is thrown away.

A function attached the load-balancing loss to the gates, and its result was discarded.
The loss was logged, and its gradient never reached the router.
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import mixture as model
from experiments.museum.language_model import counts, tokens
from experiments.museum.meshes import Judge, Trainer, mesh, spmd
from jdist import verify

Tree = Any

THREAD = "https://github.com/NVIDIA-NeMo/Automodel/issues/1408"
CLAIM = "The gradient of the mean loss and a tenth of the replicas' mean load loss."
EXPECTED = ("first difference: backward, load loss", "no cotangent arrives")
PARTS = 2


@jax.custom_vjp
def carried(gates: Tree, load: Tree) -> Tree:
    """The gates; the load loss gets the cotangent 1."""
    return gates


carried.defvjp(lambda gates, load: (gates, None), lambda _, g: (g, g.dtype.type(1)))


def buggy(gates: Tree, load: Tree) -> Tree:
    """The gates that the mixture uses."""
    carried(gates, load)
    return gates


def fixed(gates: Tree, load: Tree) -> Tree:
    """The gates that the mixture uses."""
    return carried(gates, load)


def trainer(part: Trainer) -> Trainer:
    """Two replicas, whose gradients are added."""

    def local(params: Tree, batch: Tree) -> Tree:
        count = lax.psum(counts(batch).sum(), "dp")

        def mean(p: Tree) -> Tree:
            attach = lambda gates, load: part(gates, 0.1 * load / PARTS)  # noqa: E731
            nll, load = model.token_losses(p, batch, attach)
            return (nll * batch["mask"]).sum() / count, load

        (loss, load), gradient = jax.value_and_grad(mean, has_aux=True)(params)
        loss = lax.psum(loss + 0.1 * load / PARTS, "dp")
        return loss, lax.psum(gradient, "dp")

    return spmd(local, mesh(dp=PARTS), (P(), P("dp")), (P(), P()))


# --- what the judge needs ---


def loss(params: Tree, batch: Tree) -> Tree:
    """The mean over the counted tokens, and a tenth of the mean of the load losses."""
    nll, loads = verify.in_parts(model.token_losses, PARTS)(params, batch)
    return (nll * batch["mask"]).sum() / counts(batch).sum() + 0.1 * loads.mean()


def judge() -> Judge:
    """The judge: the model on one device."""
    return verify.trace_judge(loss, model.params(), tokens())
