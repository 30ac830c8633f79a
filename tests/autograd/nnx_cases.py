"""Flax NNX modules for tests of training.

All compute in float64. Two workers have one each, so that what flows between them
depends on both.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdist import autograd, optim, rpc

STEPS = 3
RATES = {"lr": 0.05, "momentum": 0.9}
WIDE = jnp.float64


def drawn(key, shape, dtype, **_):
    """Weights from a key, on the host: JAX compiles a program for each shape."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), dtype)


def linear(rows, columns, rngs):
    return nnx.Linear(rows, columns, param_dtype=WIDE, kernel_init=drawn, rngs=rngs)


class Norm(nnx.Module):
    """Batch normalisation in float64, whose statistics do not stop gradients."""

    def __init__(self, size):
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, size))
        self.bias = nnx.Param(jnp.linspace(-1.0, 1.0, size))
        self.mean = nnx.BatchStat(jnp.zeros(size))
        self.var = nnx.BatchStat(jnp.ones(size))
        self.use_running_average = False

    def __call__(self, x):
        if self.use_running_average:
            mean, var = self.mean[...], self.var[...]
        else:
            mean, var = x.mean(0), x.var(0)
            self.mean[...] = 0.8 * self.mean[...] + 0.2 * mean
            self.var[...] = 0.8 * self.var[...] + 0.2 * var
        y = (x - mean[None]) / jnp.sqrt(var + 1e-5)[None]
        return y * self.scale[...][None] + self.bias[...][None]


class Body(nnx.Module):
    """Statistics, noise, a layer that is used twice and one that is not used."""

    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.first = linear(5, 7, rngs)
        self.norm = Norm(7)
        self.drop = nnx.Dropout(0.4, rngs=rngs)
        self.twice = linear(7, 7, rngs)
        self.again = self.twice
        self.idle = linear(2, 3, rngs)

    def __call__(self, x):
        h = self.drop(self.norm(jnp.tanh(self.first(x))))
        return self.again(jnp.tanh(self.twice(h)))

    def encode(self, x, scale):
        return {"h": self.first(x) * scale, "rows": jnp.int32(x.shape[0])}


class Head(nnx.Module):
    """Noise of its own, and a constant beside its parameters."""

    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.out = linear(7, 2, rngs)
        self.scale = nnx.data(jnp.asarray([0.5, 2.0]))

    def __call__(self, x):
        return self.out(self.drop(x)) * self.scale[None]


def batches():
    """For each step five rows, their targets and weights."""
    rng = np.random.default_rng(11)
    shapes = [(5, 5), (5, 2)]
    return [
        (*map(rng.normal, (0.0, 0.0), (1.0, 1.0), shapes), rng.uniform(0.5, 2, size=5))
        for _ in range(STEPS)
    ]


def loss_of(outputs, targets, weights):
    losses = ((outputs - targets) ** 2).sum(1)
    return (weights * losses).sum() / weights.sum()


def trained(body, head, references):
    """Losses, gradients here, and values of all parameters after some steps.

    Args:
      body: Called with the rows.
      head: Called with what that returns.
      references: To all variables.
    """
    opt = autograd.DistributedOptimizer(optim.sgd, references, **RATES)
    found = []
    for rows, targets, weights in batches():
        with autograd.context() as context_id:
            outputs = head(body(rows))
            loss = autograd.apply(loss_of, outputs, targets, weights)
            autograd.backward(context_id, [loss])
            gradients = [
                rpc.rpc_sync(rref.owner(), gradient_of, args=(rref, context_id))
                for rref in references
            ]
            opt.step(context_id)
        values = [np.asarray(rref.to_here()) for rref in references]
        found.append((np.asarray(loss.value), gradients, values))
    return found


def gradient_of(rref, context_id):
    """On the owner."""
    gradient = autograd.get_gradients(context_id).get(rref.local_value())
    return None if gradient is None else np.asarray(gradient)


def on_one_device(body, head):
    """The same by `jax.value_and_grad` of the whole, as Flax documents it."""
    modules = nnx.List([body, head])
    graph, params, rest = nnx.split(modules, nnx.Param, ...)

    def run(params, rest, rows, targets, weights):
        body, head = model = nnx.merge(graph, params, rest, copy=True)
        loss = loss_of(head(body(rows)), targets, weights)
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    run = jax.jit(jax.value_and_grad(run, has_aux=True))
    opt = optim.sgd(**RATES)
    step = jax.jit(opt.step)
    leaves, structure = jax.tree.flatten(params)
    idle = ["idle" in str(keys) for keys, _ in jax.tree.leaves_with_path(params)]
    kept, found = opt.init(leaves), []
    for batch in batches():
        (loss, rest), gradients = run(structure.unflatten(leaves), rest, *batch)
        # What nothing reaches is not stepped.
        pairs = zip(idle, jax.tree.leaves(gradients), strict=True)
        gradients = [None if is_idle else x for is_idle, x in pairs]
        leaves, kept = step(leaves, gradients, kept)
        found.append((np.asarray(loss), gradients, list(map(np.asarray, leaves))))
    return found, nnx.merge(graph, structure.unflatten(leaves), rest)
