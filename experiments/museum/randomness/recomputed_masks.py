"""A recomputed block draws new dropout masks.

Activations were thrown away and recomputed in the backward pass without the generator's
state of the forward pass. Gradients belonged to other masks than the loss.
"""

from typing import Any

import jax
import jax.numpy as jnp

from experiments.museum import language_model as model
from experiments.museum.meshes import Judge, Trainer
from experiments.museum.trees import parts, summed
from jdist import verify

Tree = Any

THREAD = "https://github.com/allenai/OLMo-core/pull/828"
CLAIM = "The gradient of the loss whose masks were drawn in the forward pass."
EXPECTED = ("first difference: backward, inner", "the backward pass has other values")


def buggy(key: Tree) -> Tree:
    """The key with which a recomputation draws."""
    return jax.random.fold_in(key, 1)


def fixed(key: Tree) -> Tree:
    """The key with which a recomputation draws."""
    return key


def block(weights: Tree, h: Tree, key: Tree) -> Tree:
    """A block with dropout of its hidden units."""
    inner = jax.nn.gelu(model.rms(h, weights["scale"]) @ weights["up"])
    kept = jax.random.bernoulli(key, 0.8, inner.shape)
    inner = verify.tap(jnp.where(kept, inner / 0.8, 0), "inner")
    return h + inner @ weights["down"]


def recomputed(part: Trainer) -> Trainer:
    """A block that keeps its inputs alone."""

    @jax.custom_vjp
    def run(weights: Tree, h: Tree, key: Tree) -> Tree:
        return block(weights, h, key)

    def backward(saved: Tree, g: Tree) -> Tree:
        weights, h, key = saved
        again = lambda w, h: block(w, h, part(key))  # noqa: E731
        return (*jax.vjp(again, weights, h)[1](g), None)

    run.defvjp(lambda *inputs: (block(*inputs), inputs), backward)
    return run


def one(p: Tree, batch: Tree, key: Tree, layer: Trainer = block) -> Tree:
    """The sum over a sequence's counted tokens."""
    h = verify.tap(p["embed"][batch["x"]], "embed")
    h = verify.tap(layer(p["blocks"][0], h, key), "block")
    return (model.cross_entropy(h @ p["head"], batch["y"]) * batch["mask"]).sum()


def trainer(part: Trainer) -> Trainer:
    """Two micro-batches."""

    @jax.jit
    def step(params: Tree, both: Tree) -> Tree:
        count, found = model.counts(both[0]).sum(), []
        for batch, keys in parts(both, 2):

            def mean(p: Tree, batch: Tree = batch, keys: Tree = keys) -> Tree:
                layer = recomputed(part)
                losses = jax.vmap(lambda b, k: one(p, b, k, layer))(batch, keys)
                return losses.sum() / count

            found.append(jax.value_and_grad(mean)(params))
        return summed(found)

    return step


# --- what the judge needs ---


def mean_of_one(p: Tree, batch: Tree, key: Tree) -> Tree:
    """The mean over a sequence's counted tokens."""
    return one(p, batch, key) / batch["mask"].sum()


def judge() -> Judge:
    """The judge: the model on one device."""
    batch, weights = model.tokens(), model.counts(model.tokens())
    both = batch, jax.random.split(jax.random.key(3), len(batch["x"]))
    losses = verify.keyed(mean_of_one)
    return verify.trace_judge(losses, model.params(1), both, weights=weights)
