"""Every expert-parallel rank clips by its own norm.

The squares of the experts' gradients were not added over the ranks. Ranks with other
norms scaled the same shared gradients differently, and the copies of shared parameters
drifted apart.
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.museum import mixture as model
from experiments.museum.language_model import tokens
from experiments.museum.meshes import Judge, Trainer, mesh, spmd
from experiments.museum.trees import clipped, descended, norm, squares
from jdist import verify

Tree = Any

THREAD = "https://github.com/hpcaitech/ColossalAI/issues/2192"
CLAIM = "Gradient descent, clipped by the norm of all parameters, on every device."
EXPECTED = ("params/router", "replicas differ over ep")


def buggy(shared: Tree, experts: Tree) -> Tree:
    """The norm, of the squares of shared parameters and of this rank's experts."""
    return (shared + experts) ** 0.5


def fixed(shared: Tree, experts: Tree) -> Tree:
    """The norm, of the squares of shared parameters and of this rank's experts."""
    return (shared + lax.psum(experts, "ep")) ** 0.5


def trainer(part: Trainer) -> Trainer:
    """Two replicas with two of the four experts each."""

    def local(params: Tree, batch: Tree) -> Tree:
        mean = lambda p: model.divided_token_losses(p, batch).mean() / 2  # noqa: E731
        gradient = {
            name: g if name in model.DIVIDED else lax.psum(g, "ep")
            for name, g in jax.grad(mean)(params).items()
        }
        experts = squares([gradient[name] for name in model.DIVIDED])
        size = verify.tap(part(squares(gradient) - experts, experts), "norm")
        return descended(params, clipped(gradient, size)), gradient

    run = spmd(local, mesh(ep=2), (model.SPECS, P("ep")), (model.SPECS,) * 2)

    def step(params: Tree, state: Tree, batch: Tree) -> verify.Trained:
        params, gradient = run(params, batch)
        return verify.Trained(params, state, gradient=gradient)

    return step


# --- what the judge needs ---


def losses(params: Tree, batch: Tree) -> Tree:
    """The mean over each sequence's tokens."""
    return model.token_losses(params, batch)[0].mean(-1)


def update(params: Tree, gradient: Tree, state: Tree) -> Tree:
    """Gradient descent, clipped by the norm of all parameters."""
    size = verify.tap(norm(gradient), "norm")
    return descended(params, clipped(gradient, size)), state


def judge() -> Judge:
    """The judge of two steps: the model on one device."""
    start, batches = (model.params(), ()), [tokens(seed=seed) for seed in (1, 2)]
    judge = verify.step_judge(losses, update, start, batches)
    return lambda trainer: judge({"trainer": trainer})
