"""Labels are shifted within each device's part of the sequence.

Next-token labels were made after the sequence had been divided: the last token of each
part lost its target, which is the first token of the next part.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import attention_model as model
from experiments.museum.language_model import cross_entropy, tokens
from experiments.museum.meshes import Judge, Trainer, mesh, spmd, whole
from jdist import verify

Tree = Any

THREAD = "https://github.com/huggingface/transformers/issues/36607"
CLAIM = "The gradient of the mean over all next-token losses."
EXPECTED = ("first difference: forward, token loss", "examples 0-5")
BOTH = ("dp", "sp")


def shifted(ids: Tree) -> Tree:
    """Each token's successor; -100 at the end."""
    return jnp.pad(ids[:, 1:], ((0, 0), (0, 1)), constant_values=-100)


def buggy(ids: Tree, labels: Tree) -> Tree:
    """The labels of this device's part."""
    return shifted(ids)


def fixed(ids: Tree, labels: Tree) -> Tree:
    """The labels of this device's part."""
    return labels


def trainer(part: Trainer) -> Trainer:
    """Two replicas of three parts of each sequence."""

    def local(params: Tree, ids: Tree, labels: Tree) -> Tree:
        labels = part(ids, labels)
        kept = (labels >= 0).astype(jnp.float32)
        count, length = lax.psum(kept.sum(), BOTH), ids.shape[1]
        start = lax.axis_index("sp") * length

        def attend(q: Tree, k: Tree, v: Tree) -> Tree:
            return model.causal(q, whole(k, "sp", 1), whole(v, "sp", 1), start)

        def mean(p: Tree) -> Tree:
            positions = start + jnp.arange(length)
            logits = model.logits(p, ids, attend, positions, SHOW)
            own = cross_entropy(logits, jnp.maximum(labels, 0)) * kept
            return SHOW(own, "token loss").sum() / count

        loss, gradient = jax.value_and_grad(mean)(params)
        return lax.psum(loss, BOTH), lax.psum(gradient, BOTH)

    data = P(*BOTH)
    run = spmd(local, mesh(dp=2, sp=3), (P(), data, data), (P(), P()))
    return lambda params, ids: run(params, ids, shifted(ids))


# --- what the judge needs ---

SHOW = partial(verify.tap, sp=1)


def losses(params: Tree, ids: Tree) -> Tree:
    """The mean over all tokens but the last."""
    targets = jnp.pad(ids[:, 1:], ((0, 0), (0, 1)))
    own = cross_entropy(model.logits(params, ids), targets)
    kept = jnp.arange(ids.shape[1]) < ids.shape[1] - 1
    return verify.tap(own * kept, "token loss").sum(-1) / kept.sum()


def judge() -> Judge:
    """The judge: the model on one device."""
    return verify.trace_judge(losses, model.params(), tokens()["x"])
