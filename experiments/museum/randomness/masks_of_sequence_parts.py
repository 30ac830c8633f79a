"""Devices with other tokens of a sequence draw the same dropout masks.

Between divided layers each device of tensor parallelism has its own tokens, and draws
their masks from a generator of its own. Two contexts, that of the generator and that of
8-bit numbers, were joined by `and`, which enters the second alone: for more than a year
all devices drew the masks of a block from the common generator.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import language_model as model
from experiments.museum.meshes import Judge, Trainer, mesh, spmd, whole
from jdist import verify

Tree = Any

THREAD = "https://github.com/NVIDIA/Megatron-LM/issues/1256"
CLAIM = "Dropout with masks of its own for every token, between divided layers."
EXPECTED = ("(block)", "other over dp, tp: must differ", "the same on tp=0 and tp=1")


def buggy(key: Tree) -> Tree:
    """The key for the masks of this device's tokens in a block."""
    return key


def fixed(key: Tree) -> Tree:
    """The key for the masks of this device's tokens in a block."""
    return jax.random.fold_in(key, lax.axis_index("tp"))


def dropout(h: Tree, key: Tree) -> Tree:
    """Keeps four fifths of the entries."""
    return jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0)


def losses(p: Tree, batch: Tree, key: Tree, part: Trainer) -> Tree:
    """The loss of each of this device's tokens."""
    first, second = jax.random.split(jax.random.fold_in(key, lax.axis_index("dp")))
    h = dropout(p["embed"][batch["x"]], fixed(first))
    (weights,) = p["blocks"]
    z = whole(model.rms(h, weights["scale"]), "tp", 1)
    out = jax.nn.gelu(z @ weights["up"]) @ weights["down"]
    own = lax.psum_scatter(out, "tp", scatter_dimension=1, tiled=True)
    with jax.named_scope("block"):
        h = h + dropout(own, part(second))
    return model.cross_entropy(h @ p["head"], batch["y"])


def trainer(part: Trainer) -> Trainer:
    """Two replicas of two devices, each of which has half of every sequence."""

    def local(params: Tree, batch: Tree, key: Tree) -> Tree:
        count = lax.psum(batch["mask"].sum(), ("dp", "tp"))

        def mean(p: Tree) -> Tree:
            return (losses(p, batch, key, part) * batch["mask"]).sum() / count

        loss, gradient = jax.value_and_grad(mean)(params)
        # Of a divided leaf each device has its own part.
        over = jax.tree.map(
            lambda spec: "dp" if "tp" in spec else ("dp", "tp"), model.specs(1)
        )
        return lax.psum(loss, ("dp", "tp")), jax.tree.map(lax.psum, gradient, over)

    specs = model.specs(1)
    tokens = P("dp", "tp")
    return spmd(local, mesh(dp=2, tp=2), (specs, tokens, P()), (P(), specs))


# --- what the judge needs ---


def judge() -> Judge:
    """The judge of the masks: replicas have other sequences, devices other tokens."""
    given = model.params(1), model.tokens(), jax.random.key(7)
    return lambda train: verify.masks(train, *given, differ=("dp", "tp"))
