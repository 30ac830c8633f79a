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


def fragile(params, h, boom, spike):
    """The same layer, whose gradient or whose cotangent can be made to overflow alone.

    What is added is zero; its gradient is `boom` times as large, by `b`, and `spike`
    times, by `h`.
    """
    dtype = params["b"].dtype
    h, boom, spike = (x.astype(dtype) for x in (h, boom, spike))
    nothing = params["b"] - jax.lax.stop_gradient(params["b"])
    back = (h - jax.lax.stop_gradient(h)).sum(-1) * spike
    return layer(params, h) + boom[:, None] * nothing[None] + back[:, None]


def losses(y, batch):
    return ((y - batch["target"]) ** 2).sum(-1)


def wide_losses(y, batch):
    return losses(y.astype(batch["target"].dtype), batch)


def sizes_of(n):
    return (*SIZES[:n], SIZES[-1])


def stages(n):
    return [pipeline.Stage(layer, (a,), (b,)) for a, b in pairwise(values_of(n))]


def fragile_stages(n):
    return [
        pipeline.Stage(fragile, (a, f"boom{j}", f"spike{j}"), (b,))
        for j, (a, b) in enumerate(pairwise(values_of(n)))
    ]


def values_of(n):
    return ["x", *(f"h{j}" for j in range(1, n)), "y"]


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
        rows = 6 if i == 1 else 4  # no stage has weights of such a shape
        batches.append({"x": normal(rows, SIZES[0]), "target": normal(rows, SIZES[-1])})
        weights.append(rng.uniform(0.1, 2, rows).astype(dtype))
        weights[-1][i % rows] = 0
    return params, batches, weights


PLANTED = {(2, "spike2"), (5, "boom1")}
"""Where it overflows: micro-batch 2 in the cotangent that stage 2 passes back, hence
in stages 1 and 0; micro-batch 5 in the gradient of stage 1 alone."""
SKIPPED = [1, 2, 0]
"""By stage, as long as no update has both micro-batches."""


def planted(batches, size):
    """The batches for three fragile stages, overflowing where `PLANTED` says."""
    found = []
    for i, batch in enumerate(batches):
        rows, dtype = len(batch["x"]), batch["x"].dtype
        extra = {
            name: np.full(rows, size if (i, name) in PLANTED else 0.0, dtype)
            for name in (f"{kind}{j}" for kind in ("boom", "spike") for j in range(3))
        }
        found.append(batch | extra)
    return found


VERSIONS = {
    # What a worker's i-th micro-batch meets: `ahead` forward passes before the first
    # backward pass, n stages, an update every k.
    "stashing": lambda ahead, n, k, i: (i - ahead) // k,
    "vertical_sync": lambda ahead, n, k, i: (i - (n - 1)) // k,
    "2bw": lambda ahead, n, k, i: i // k - 1,
    "flush": lambda ahead, n, k, i: i // k,
}


def version(policy, n, k, j, i):
    """What micro-batch i meets at stage j, without replicas."""
    return max(0, VERSIONS[policy](n - 1 - j, n, k, i))


def backward(used, batch, weights):
    """The gradient of the weighted sum of the losses, by hand and in NumPy.

    Args:
      used: Parameters of all stages.
    """
    inputs = [batch["x"]]
    for each in used:
        inputs.append(np.tanh(inputs[-1] @ each["w"] + each["b"]))
    d_h = 2 * (inputs[-1] - batch["target"]) * weights[:, None]
    zeros, found = np.zeros(len(d_h)), []
    for j in reversed(range(len(used))):
        d_z = d_h * (1 - inputs[j + 1] ** 2)
        boom, spike = (batch.get(f"{kind}{j}", zeros) for kind in ("boom", "spike"))
        found.insert(0, {"w": inputs[j].T @ d_z, "b": d_z.sum(0) + boom @ d_h})
        d_h = d_z @ used[j]["w"].T + (spike * d_h.sum(-1))[:, None]
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


@np.errstate(over="ignore", invalid="ignore")
def serial(
    policy,
    params,
    batches,
    weights,
    change=momentum,
    k=1,
    replicas=None,
    scale=None,
    kind="mean",
):
    """w(t+1) = w(t) + change(grad f(w_1(v_1), .., w_n(v_n))): all versions by stage.

    The gradient of an update is the mean (or sum) over the examples of its
    micro-batches: k from each worker of the stage, fewer in the last update. With a
    scale the gradient of each micro-batch's mean is that many times as large until it
    is weighted, and an update whose gradient is not finite is none: the next version is
    the one before, and the optimizer has not seen it.
    """
    n = len(params)
    workers = replicas or (1,) * n
    history = [[jax.tree.map(np.asarray, p)] for p in params]
    moments = [dict.fromkeys(p, (0.0, 0.0)) for p in params]
    due, made = [[] for _ in params], [0] * n

    def met(policy, i):
        """A worker runs micro-batches ahead, and counts its own."""
        found = []
        for j, own in enumerate(workers):
            ahead = (sum(workers[j:]) - 1) // own
            version = VERSIONS[policy](ahead, n, k, i // own)
            found.append(history[j][max(0, version)])
        return found

    def update(j):
        total = sum(weight for _, weight in due[j]) if kind == "mean" else 1.0
        newest, after = history[j][-1], {}
        grads = {name: sum(g[name] for g, _ in due[j]) / total for name in newest}
        due[j].clear()
        if scale and not all(np.isfinite(grad).all() for grad in grads.values()):
            history[j].append(newest)
            return
        for name, grad in grads.items():
            step, moments[j][name] = change(made[j], grad, moments[j][name])
            after[name] = newest[name] + step
        made[j] += 1
        history[j].append(after)

    for i, (batch, own) in enumerate(zip(batches, weights, strict=True)):
        used = met(policy, i)
        factor = scale / own.sum() if scale and own.any() else 1.0
        for j, found in enumerate(backward(used, batch, own * factor)):
            due[j].append(({x: g / factor for x, g in found.items()}, own.sum()))
        for j in range(n):
            if len(due[j]) == k * workers[j] or i == len(batches) - 1:
                update(j)
    return history
