"""PipeDream's update rules as serial programs, written from their formulas.

The model is a chain of stages h -> tanh(h @ w + b), of sizes that all differ. Stages
are numbered from 0: stage j here is number j + 1 of the formulas.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from jdist import optim, pipeline

SIZES = (3, 7, 5, 11, 2)


def layer(params, h):
    return jnp.tanh(h @ params["w"] + params["b"][None])


def losses(y, batch):
    return ((y - batch["target"]) ** 2).sum(-1)


def sizes_of(n):
    return (*SIZES[:n], SIZES[-1])


def stages(n):
    names = ["x", *(f"h{j}" for j in range(1, n)), "y"]
    return [pipeline.Stage(layer, (a,), (b,)) for a, b in pairwise(names)]


def problem(n, m, seed=0, dtype=np.float64):
    """Parameters, m batches of unequal sizes, and unequal weights."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    params = [
        {"w": jnp.asarray(normal(a, b)), "b": jnp.asarray(normal(b))}
        for a, b in pairwise(sizes_of(n))
    ]
    batches, weights = [], []
    for i in range(m):
        rows = 3 - (i == 1)
        batches.append({"x": normal(rows, SIZES[0]), "target": normal(rows, SIZES[-1])})
        weights.append(rng.uniform(0.1, 2, rows).astype(dtype))
        weights[-1][i % rows] = 0
    return params, batches, weights


VERSIONS = {
    # The version that micro-batch i meets at stage j of n, with an update every k.
    "stashing": lambda n, k, j, i: (i - (n - 1 - j)) // k,
    "vertical_sync": lambda n, k, j, i: (i - (n - 1)) // k,
    "2bw": lambda n, k, j, i: i // k - 1,
    "flush": lambda n, k, j, i: i // k,
}


def backward(old, new, batch, weights):
    """The gradient of the weighted sum of the losses, by hand and in NumPy.

    Args:
      old: Parameters of all stages in the forward pass.
      new: In the backward pass; the same ones, or it is no gradient.
    """
    inputs = [batch["x"]]
    for each in old:
        inputs.append(np.tanh(inputs[-1] @ each["w"] + each["b"]))
    d_h = 2 * (inputs[-1] - batch["target"]) * weights[:, None]
    found = []
    for j in reversed(range(len(old))):
        d_z = d_h * (1 - inputs[j + 1] ** 2)
        found.insert(0, {"w": inputs[j].T @ d_z, "b": d_z.sum(0)})
        d_h = d_z @ new[j]["w"].T
    return found


def momentum(t, grad, moments):
    """SGD whose learning rate warms up over four updates; and what it keeps."""
    velocity = grad + 0.9 * moments[0] if t else grad
    return -0.125 * min(1.0, (t + 1) / 4) * velocity, (velocity, None)


def adam(t, grad, moments):
    first = 0.9 * moments[0] + 0.1 * grad
    second = 0.999 * moments[1] + 0.001 * grad**2
    scale = np.sqrt(second / (1 - 0.999 ** (t + 1))) + 1e-8
    return -0.02 * first / (1 - 0.9 ** (t + 1)) / scale, (first, second)


OPTIMIZERS = {
    momentum: optim.sgd(
        lr=lambda t: 0.125 * jnp.minimum(1.0, (t + 1) / 4), momentum=0.9
    ),
    adam: optim.adam(lr=0.02),
}
"""By the change that each makes, in NumPy: `(t, grad, moments) -> change, moments`."""


def serial(policy, params, batches, weights, change=momentum, k=1):
    """w(t+1) = w(t) + change(grad f(w_1(v_1), .., w_n(v_n))): all versions by stage.

    The gradient of an update is the mean over the examples of its k micro-batches.
    """
    n, m = len(params), len(batches)
    history = [[jax.tree.map(np.asarray, p)] for p in params]
    moments = [dict.fromkeys(p, (0.0, 0.0)) for p in params]

    def met(policy, i):
        return [history[j][max(0, VERSIONS[policy](n, k, j, i))] for j in range(n)]

    for t, start in enumerate(range(0, m, k)):
        group = range(start, min(start + k, m))
        total = sum(weights[i].sum() for i in group)
        found = []
        for i in group:
            old = met("stashing" if policy == "none" else policy, i)
            new = met("flush", i) if policy == "none" else old
            found.append(backward(old, new, batches[i], weights[i] / total))
        for j, newest in enumerate([versions[-1] for versions in history]):
            after = {}
            for name in newest:
                grad = sum(each[j][name] for each in found)
                step, moments[j][name] = change(t, grad, moments[j][name])
                after[name] = newest[name] + step
            history[j].append(after)
    return history
