"""PipeDream's epochs against their serial program: which versions a gradient is of.

The parameters are those of all stages, now and before the last update. With two updates
a stage has met no others. Functions of a layout for `verify.fuzz`, whose process
imports them.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from jdist import optim
from tests.pipeline.epochs import asynchronous
from tests.pipeline.pipedream_rules import layer, losses, sizes_of, stages

AXES = {
    "policy": ("flush", "stashing", "vertical_sync", "2bw"),
    "stages": (1, 2, 3, 4),
    "every": (1, 2, 3, 4),
    "replicas": (1, 2),
    "places": ("one device", "devices"),
    "weights": (False, True),
    "momentum": (False, True),
    "sum": (False, True),
}
MODEL = tuple(axis for axis in AXES if axis != "places")


def valid(layout):
    """Whether eight devices suffice, and the policy has these replicas and updates."""
    replicas, policy = layout["replicas"], layout["policy"]
    return (
        layout["stages"] * replicas <= 8
        and (policy == "stashing" or replicas == 1)
        and (policy != "2bw" or layout["every"] >= layout["stages"])
    )


def micro_batches(layout):
    """Sizes of the micro-batches of an update."""
    return [3 + i % 2 for i in range(layout["every"] * layout["replicas"])]


def problem(layout):
    n, parts = layout["stages"], micro_batches(layout)
    sizes, rows = sizes_of(n), sum(parts)
    keys = iter(jax.random.split(jax.random.key(11), 2 * n + 2))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32) / 2

    now = [{"w": normal(a, b), "b": normal(b)} for a, b in pairwise(sizes)]
    batch = {
        "x": normal(rows, sizes[0]),
        "target": normal(rows, sizes[-1]),
        "micro": jnp.repeat(jnp.arange(len(parts)), jnp.array(parts)),
    }
    params = {"now": now, "before": now}
    return params, batch, weights_of(layout) if layout["weights"] else None


def weights_of(layout):
    rows = np.arange(sum(micro_batches(layout)), dtype=np.float32)
    return rows % 3 if layout["weights"] else np.ones_like(rows)


def optimizer(layout):
    return optim.sgd(lr=0.125, momentum=0.5 if layout["momentum"] else 0.0)


def claim(layout):
    n, policy = layout["stages"], layout["policy"]

    def uses_now(stage, micro):
        """Whether the version is that after the last update, else the one before."""
        if policy in ("flush", "2bw"):
            return jnp.full(micro.shape, policy == "flush")
        # So many micro-batches of its worker are forward before the first backward.
        ahead = n - 1 if policy == "vertical_sync" else n - 1 - stage
        return micro // layout["replicas"] >= ahead

    def loss(params, batch):
        h = batch["x"]
        for j in range(n):
            now, before = (layer(params[each][j], h) for each in ("now", "before"))
            h = jnp.where(uses_now(j, batch["micro"])[:, None], now, before)
        return losses(h, batch)

    def update(params, gradient, state):
        both = jax.tree.map(jnp.add, gradient["now"], gradient["before"])
        if layout["sum"]:
            both = jax.tree.map(lambda g: g * total, both)
        after, state = optimizer(layout).step(params["now"], both, state)
        return {"now": after, "before": params["now"]}, state

    total = weights_of(layout).sum()
    return loss, update, lambda params: optimizer(layout).init(params["now"])


def trainer(layout, fault=False):
    """Epochs of one update more each time, from the beginning."""
    workers, devices = layout["stages"] * layout["replicas"], jax.devices()
    one = layout["places"] == "one device"
    runtime = asynchronous(
        stages(layout["stages"]),
        losses,
        devices[:1] * workers if one else devices[:workers],
        policy=layout["policy"],
        update_every=layout["every"],
        replicas=(layout["replicas"],) * layout["stages"],
        optimizer=optimizer(layout),
        reduction="sum" if layout["sum"] else "mean",
    )
    first, _, weights = problem(layout)
    if fault and layout["every"] > 1:
        weights = np.arange(1.0, 1 + sum(micro_batches(layout)), dtype=np.float32)
    edges = np.cumsum((0, *micro_batches(layout)))

    def step(params, state, batch):
        # The first update is the one that begins with the first parameters.
        bias, old = params["now"][0]["b"], first["now"][0]["b"]
        updates = 1 if np.array_equal(bias, old) else 2
        given = {name: np.asarray(batch[name]) for name in ("x", "target")}
        own = np.ones(edges[-1], np.float32) if weights is None else weights
        parts = [
            (jax.tree.map(lambda x, i=i: x[slice(*i)], given), own[slice(*i)])
            for i in pairwise(edges)
        ]
        begin = runtime.init(jax.tree.map(jnp.array, first["now"]))
        found, _ = runtime.train_epoch(begin, parts * updates)
        now = jax.tree.map(jnp.asarray, list(found.params))
        return {"now": now, "before": params["now"]}, None

    return step
