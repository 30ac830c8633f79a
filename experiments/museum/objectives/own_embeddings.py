"""Only a device's own embeddings carry a gradient in the contrastive loss.

Embeddings of all devices were gathered without a gradient, and the own ones put back.
Each device then has the gradient of the whole loss by its own examples; averaged over
devices it is too small by their number.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum.language_model import cross_entropy
from experiments.museum.meshes import Judge, Trainer, mesh, spmd, whole
from jdist import verify

Tree = Any

THREAD = "https://github.com/modelscope/ms-swift/issues/10081"
CLAIM = "The gradient of the contrastive loss of all pairs."
EXPECTED = ("first difference: gradient", "0.25 times")


def buggy(loss: Tree) -> Tree:
    """The loss that is differentiated, before the average over four devices."""
    return loss


def fixed(loss: Tree) -> Tree:
    """The loss that is differentiated, before the average over four devices."""
    return loss * 4


def embedded(p: Tree, x: Tree) -> Tree:
    """Embeddings of length 1."""
    h = verify.tap(jnp.tanh(x @ p["inward"]) @ p["outward"], "embedding")
    return h / jnp.sqrt((h * h).sum(-1, keepdims=True))


def contrastive(a: Tree, b: Tree) -> Tree:
    """The mean over all examples of the loss that names its pair."""
    return cross_entropy(a @ b.T / 0.2, jnp.arange(len(a))).mean()


def trainer(part: Trainer) -> Trainer:
    """Four devices with two pairs each."""

    def gathered(own: Tree) -> Tree:
        others = lax.stop_gradient(whole(own, "dp", 0))
        place = lax.axis_index("dp") * len(own)
        return lax.dynamic_update_slice_in_dim(others, own, place, 0)

    def local(params: Tree, batch: Tree) -> Tree:
        def loss(p: Tree) -> tuple[Tree, Tree]:
            found = contrastive(*(gathered(embedded(p, x)) for x in batch))
            return part(found), found

        gradient, found = jax.grad(loss, has_aux=True)(params)
        return lax.pmean(found, "dp"), lax.pmean(gradient, "dp")

    return spmd(local, mesh(dp=4), (P(), P("dp")), (P(), P()))


# --- what the judge needs ---


def loss(params: Tree, batch: Tree) -> Tree:
    """The loss of all pairs."""
    return contrastive(*(embedded(params, x) for x in batch))


def judge() -> Judge:
    """The judge: all pairs on one device."""
    keys = iter(jax.random.split(jax.random.key(0), 4))
    normal = lambda *s: jax.random.normal(next(keys), s)  # noqa: E731
    params = {"inward": normal(5, 7), "outward": normal(7, 3)}
    return verify.trace_judge(loss, params, (normal(8, 5), normal(8, 5)))
