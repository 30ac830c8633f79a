"""One seed for the whole mesh gives all replicas the same dropout masks.

Devices of tensor parallelism must draw equal masks for what they all hold, replicas
must not. The generator was seeded alike everywhere, so the replicas' masks were equal,
example by example.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import language_model as model
from experiments.museum.meshes import Judge, Trainer, enter, leave, mesh, spmd
from jdist import verify

Tree = Any

THREAD = "https://github.com/tenstorrent/tt-metal/issues/55947"
CLAIM = "Dropout with masks that differ between replicas."
EXPECTED = ("first difference: forward, block0", "examples 3-5")


def buggy(key: Tree) -> Tree:
    """The key of this device."""
    return jax.random.fold_in(key, 0)


def fixed(key: Tree) -> Tree:
    """The key of this device."""
    return jax.random.fold_in(key, lax.axis_index("dp"))


def dropout(h: Tree, key: Tree) -> Tree:
    """Keeps four fifths of the entries."""
    return jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0)


def one_loss(p: Tree, batch: Tree, key: Tree, tp: str = "") -> Tree:
    """The sum over a sequence's counted tokens; `tp` divides the block."""
    h, (weights,) = verify.tap(p["embed"][batch["x"]], "embed"), p["blocks"]
    z = model.rms(h, weights["scale"])
    inner = jax.nn.gelu((enter(z, tp) if tp else z) @ weights["up"]) @ weights["down"]
    h = verify.tap(h + dropout(leave(inner, tp) if tp else inner, key), "block0")
    return (model.cross_entropy(h @ p["head"], batch["y"]) * batch["mask"]).sum()


def trainer(part: Trainer) -> Trainer:
    """Two replicas whose block is divided over two devices."""

    def local(params: Tree, batch: Tree, key: Tree) -> Tree:
        keys = jax.random.split(part(key), len(batch["x"]))
        count = lax.psum(model.counts(batch).sum(), "dp")

        def mean(p: Tree) -> Tree:
            one = lambda each, key: one_loss(p, each, key, "tp")  # noqa: E731
            return jax.vmap(one)(batch, keys).sum() / count

        loss, gradient = jax.value_and_grad(mean)(params)
        return lax.psum(loss, "dp"), lax.psum(gradient, "dp")

    specs = model.specs(1)
    run = spmd(local, mesh(dp=2, tp=2), (specs, P("dp"), P()), (P(), specs))
    return lambda params, batch: run(params, batch[0], SEED)


SEED = jax.random.key(7)


# --- what the judge needs ---


def one(p: Tree, batch: Tree, key: Tree) -> Tree:
    """The mean over a sequence's counted tokens."""
    return one_loss(p, batch, key) / batch["mask"].sum()


def judge() -> Judge:
    """The judge: the model on one device, with the replicas' own keys."""
    batch, seeds = model.tokens(), [jax.random.fold_in(SEED, i) for i in range(2)]
    keys = jnp.concatenate([jax.random.split(seed, 3) for seed in seeds])
    return verify.trace_judge(
        verify.keyed(one), model.params(1), (batch, keys), weights=model.counts(batch)
    )
