"""A norm that all heads share has the gradient of one rank's heads.

The weights of a norm over each head are the same for all heads. Tensor parallelism
divides the heads, so that the norm's gradient on each rank is a partial sum; it was
added up only if sequence parallelism was on.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import distributed

from experiments.museum.meshes import Judge
from experiments.museum.torch_trainers import _perceptron as model
from jdist import verify

Tree = Any

THREAD = "https://github.com/NVIDIA/Megatron-LM/issues/7452"
CLAIM = "The gradient of one device that has all heads."
EXPECTED = ("first difference: gradient, norm:",)
HEADS, SIZE, DIVIDED = 4, 3, ("heads", "out")


def buggy(gradient: torch.Tensor) -> None:
    """Completes the gradient of the norm's weights, in place."""


def fixed(gradient: torch.Tensor) -> None:
    """Completes the gradient of the norm's weights, in place."""
    distributed.all_reduce(gradient)


class Enter(torch.autograd.Function):
    """The identity into a divided layer; its cotangents are added up."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        """The identity."""
        return x.clone()

    @staticmethod
    def backward(context: Any, cotangent: torch.Tensor) -> torch.Tensor:
        """The sum over both processes."""
        distributed.all_reduce(whole := cotangent.clone())
        return whole


class Leave(torch.autograd.Function):
    """The sum over both processes out of a divided layer."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        """The sum over both processes."""
        distributed.all_reduce(whole := x.clone())
        return whole

    @staticmethod
    def backward(context: Any, cotangent: torch.Tensor) -> torch.Tensor:
        """The identity."""
        return cotangent


def local(rank: int, part: Any, params: Tree, batch: Tree) -> tuple[float, Tree]:
    """One process, with half of the heads."""
    own = {
        k: torch.tensor(np.split(v, 2)[rank] if k in DIVIDED else v)
        for k, v in params.items()
    }
    weights = {k: v.contiguous().requires_grad_() for k, v in own.items()}
    x, y = (torch.tensor(batch[k]) for k in "xy")
    with verify.shown(torch.nn.Identity()) as show:
        h = Enter.apply(show(torch.tanh(x @ weights["inward"]), "hidden"))
        heads = torch.einsum("bi,hij->bhj", h, weights["heads"])
        heads = torch.nn.functional.rms_norm(heads, (SIZE,), weights["norm"], 1e-6)
        out = Leave.apply(torch.einsum("bhj,hjo->bo", heads, weights["out"]))
        loss = ((show(out, "outward") - y) ** 2).mean()
        loss.backward()
    part(weights["norm"].grad)
    found = {}
    for name, weight in weights.items():
        assert weight.grad is not None
        halves = [torch.empty_like(weight) for _ in range(2)]
        distributed.all_gather(halves, weight.grad.contiguous())
        whole = torch.cat(halves) if name in DIVIDED else weight.grad
        found[name] = whole.numpy()
    return loss.item(), found


trainer = partial(model.over_gloo, local)


# --- what the judge needs ---


def losses(params: Tree, batch: Tree) -> Tree:
    """The squared error of each example, in JAX."""
    h = verify.tap(jnp.tanh(batch["x"] @ params["inward"]), "hidden")
    heads = jnp.einsum("bi,hij->bhj", h, params["heads"])
    heads = heads * jax.lax.rsqrt((heads**2).mean(-1, keepdims=True) + 1e-6)
    out = jnp.einsum("bhj,hjo->bo", heads * params["norm"], params["out"])
    return ((verify.tap(out, "outward") - batch["y"]) ** 2).mean(-1)


@cache
def judge() -> Judge:
    """The judge."""
    rng, hidden = np.random.default_rng(2), model.HIDDEN
    shapes = {
        "inward": (model.INPUTS, hidden), "heads": (HEADS, hidden, SIZE),
        "norm": (SIZE,), "out": (HEADS, SIZE, model.OUTPUTS),
    }  # fmt: skip
    params = {k: rng.normal(size=v).astype(np.float32) for k, v in shapes.items()}
    batch = {k: v for k, v in model.problem()[1].items() if k != "counted"}
    return verify.trace_judge(losses, params, batch)
