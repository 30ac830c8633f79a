"""The backward ring of attention uses its own keys and values at every step.

Ring attention passes keys and values around. Its backward pass took those of the
forward pass's first step at each step, which are the device's own: gradients of
queries, keys and values were wrong, and outputs right.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import attention_model as model
from experiments.museum.language_model import counts, tokens
from experiments.museum.meshes import Judge, Trainer, mesh, spmd
from jdist import verify

Tree = Any

THREAD = "https://github.com/huggingface/diffusers/issues/14265"
CLAIM = "The gradient of attention to all tokens, with sequences in parts."
EXPECTED = ("first difference: backward, v", "of 3 parts")
BOTH = ("dp", "cp")


def buggy(around: tuple[Tree, Tree], own: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """The keys and values of a step of the backward ring."""
    return own


def fixed(around: tuple[Tree, Tree], own: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """The keys and values of a step of the backward ring."""
    return around


def turned(*arrays: Tree) -> list[Tree]:
    """What the neighbour has."""
    size = lax.axis_size("cp")
    ring = [(i, (i + 1) % size) for i in range(size)]
    return [lax.ppermute(x, "cp", ring) for x in arrays]


def forward(q: Tree, k: Tree, v: Tree) -> tuple[Tree, Tree]:
    """Attention by an online softmax, and its logarithmic normalizers."""
    top = jnp.full((q.shape[0], model.HEADS, q.shape[1]), -jnp.inf)
    mass, out = jnp.zeros_like(top), jnp.zeros_like(q.swapaxes(1, 2))
    for _ in range(lax.axis_size("cp")):
        s = model.scores(q, k)
        new = jnp.maximum(top, s.max(-1))
        weights, fade = jnp.exp(s - new[..., None]), jnp.exp(top - new)
        mass = mass * fade + weights.sum(-1)
        out = out * fade[..., None] + jnp.einsum("bhts,bshd->bhtd", weights, v)
        top, (k, v) = new, turned(k, v)
    return (out / mass[..., None]).swapaxes(1, 2), top + jnp.log(mass)


def ring(part: Trainer) -> Trainer:
    """Ring attention with a backward ring."""

    @jax.custom_vjp
    def attend(q: Tree, k: Tree, v: Tree) -> Tree:
        return forward(q, k, v)[0]

    def kept(q: Tree, k: Tree, v: Tree) -> tuple[Tree, Tree]:
        out, normalizers = forward(q, k, v)
        return out, (q, k, v, out, normalizers)

    def backward(saved: Tree, d_out: Tree) -> tuple[Tree, ...]:
        q, k, v, out, normalizers = saved
        own, scale = (k, v), 1 / np.sqrt(model.SIZE)
        dq, dk, dv = (jnp.zeros_like(x) for x in (q, k, v))
        delta = (d_out * out).sum(-1).swapaxes(1, 2)[..., None]
        for _ in range(lax.axis_size("cp")):
            keys, values = part((k, v), own)
            weights = jnp.exp(model.scores(q, keys) - normalizers[..., None])
            d_weights = jnp.einsum("bthd,bshd->bhts", d_out, values)
            ds = weights * (d_weights - delta) * scale
            dq += jnp.einsum("bhts,bshd->bthd", ds, keys)
            dk += jnp.einsum("bhts,bthd->bshd", ds, q)
            dv += jnp.einsum("bhts,bthd->bshd", weights, d_out)
            k, v, dk, dv = turned(k, v, dk, dv)
        return dq, dk, dv

    attend.defvjp(kept, backward)
    return attend


def trainer(part: Trainer) -> Trainer:
    """Two replicas of three parts of each sequence."""

    def local(params: Tree, batch: Tree) -> Tree:
        count, length = lax.psum(batch["mask"].sum(), BOTH), batch["x"].shape[1]
        positions = lax.axis_index("cp") * length + jnp.arange(length)
        how = {"attend": ring(part), "positions": positions, "show": SHOW}

        def mean(p: Tree) -> Tree:
            return (model.token_losses(p, batch, **how) * batch["mask"]).sum() / count

        loss, gradient = jax.value_and_grad(mean)(params)
        return lax.psum(loss, BOTH), lax.psum(gradient, BOTH)

    return spmd(local, mesh(dp=2, cp=3), (P(), P(*BOTH)), (P(), P()))


# --- what the judge needs ---

SHOW = partial(verify.tap, cp=1)


def losses(params: Tree, batch: Tree) -> Tree:
    """The mean over the counted tokens of each sequence."""
    own = model.token_losses(params, batch, attend=model.full)
    return (own * batch["mask"]).sum(-1) / counts(batch)


def judge() -> Judge:
    """The judge: the model on one device."""
    params, batch = model.params(), tokens()
    return verify.trace_judge(losses, params, batch, weights=counts(batch))
