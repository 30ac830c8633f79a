"""`data_parallel.LocalSGD` against a serial program of all replicas' parameters.

Its parameters have a row for each replica, and the loss of an example is that under the
row of the replica that has it. Functions of a layout for `verify.fuzz`, whose process
imports them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdist import data_parallel, optim

EXAMPLES, WIDTH = 11, 3
SIZES = {1: (11,), 2: (4, 7), 3: (5, 1, 5), 4: (3, 1, 5, 2)}

AXES = {
    "replicas": tuple(SIZES),
    "period": (1, 2, 3),
    "start": (0, 1, 2),
    "taken": (0, 1, 2, 3),
    "group": (1, 2),
    "empty": (False, True),
    "weights": (False, True),
    "momentum": (False, True),
    "place": ("one device", "mesh"),
}
MODEL = tuple(axis for axis in AXES if axis != "place")


def valid(layout):
    """Whether groups divide the replicas, and one of two shards at most is empty."""
    alone = layout["replicas"] == 1
    return layout["replicas"] % layout["group"] == 0 and not (layout["empty"] and alone)


def sizes(layout):
    parts = SIZES[layout["replicas"]]
    return (*parts[:-2], parts[-2] + parts[-1], 0) if layout["empty"] else parts


def problem(layout):
    one, two, three = jax.random.split(jax.random.key(3), 3)
    rows = jax.random.normal(one, (layout["replicas"], WIDTH), jnp.float32)
    # Before the first own step, and within a group, all have the same parameters.
    apart = layout["taken"] > layout["start"]
    size = layout["group"] if apart else layout["replicas"]
    rows = jnp.repeat(rows[::size], size, axis=0)
    batch = {
        "x": jax.random.normal(two, (EXAMPLES, WIDTH), jnp.float32),
        "y": jax.random.normal(three, (EXAMPLES,), jnp.float32),
        "replica": jnp.repeat(jnp.arange(layout["replicas"]), jnp.array(sizes(layout))),
    }
    return rows, batch, weights_of(layout) if layout["weights"] else None


def weights_of(layout):
    own = np.arange(EXAMPLES) % 4 if layout["weights"] else np.ones(EXAMPLES)
    return own.astype(np.float32)


def optimizer(layout):
    return optim.sgd(lr=0.25, momentum=0.5 if layout["momentum"] else 0.0)


def loss(w, batch):
    w = jnp.broadcast_to(w, batch["x"].shape)
    return (jnp.tanh((batch["x"] * w).sum(1)) - batch["y"]) ** 2


def seen_before(layout):
    """The weights that each replica has seen since the last average."""
    return np.arange(1, layout["replicas"] + 1, dtype=np.float32)


def claim(layout):
    def losses(rows, batch):
        return loss(rows[batch["replica"]], batch)

    replica = np.repeat(np.arange(layout["replicas"]), sizes(layout))
    own = np.bincount(replica, weights_of(layout), layout["replicas"])
    group = np.arange(len(own)) // layout["group"]
    mates = (group[:, None] == group).astype(np.float32)
    share = own.sum() / np.maximum(mates @ own, 1)
    own, share = (x.astype(np.float32) for x in (own, share))

    def update(rows, gradient, state):
        t, opt_state, seen = state
        alone = t >= layout["start"]
        among = share[:, None] * (mates @ gradient)
        whole = gradient.sum(0, keepdims=True)
        gradient = jnp.where(alone, among, whole)
        rows, opt_state = optimizer(layout).step(rows, gradient, opt_state)
        seen = seen + own
        mean = (seen[:, None] * rows).sum(0, keepdims=True) / seen.sum()
        due = alone & ((t - layout["start"]) % layout["period"] == 0)
        rows = jnp.where(due, mean, rows)
        return rows, (t + 1, opt_state, jnp.where(due, 0, seen))

    def init(rows):
        step = jnp.int32(layout["taken"])
        return step, optimizer(layout).init(rows), jnp.asarray(seen_before(layout))

    return losses, update, init


def trainer(layout, fault=False):
    """A step of `LocalSGD` from any state: its own, with a row for each replica."""
    count = layout["replicas"]
    where = {"replicas": count}
    if layout["place"] == "mesh":
        where = {"mesh": Mesh(np.array(jax.devices()[:count]), ("data",))}
    local = data_parallel.LocalSGD(
        loss,
        optimizer(layout),
        period=layout["period"],
        start=layout["start"],
        group_size=layout["group"],
        **where,
    )

    def step(rows, state, batch):
        given = {"x": batch["x"], "y": batch["y"]}
        options = {"sizes": sizes(layout), "weights": problem(layout)[2]}
        shards = data_parallel.shard_batch(given, **options, **where)
        first = local.init(rows[0])
        taken, opt_state, seen = state
        if fault and layout["empty"]:
            seen = seen + 1
        now = jax.tree.map(
            lambda new, like: jax.device_put(
                jnp.broadcast_to(new, like.shape).astype(like.dtype), like.sharding
            ),
            (rows, opt_state, seen),
            first[1:],
        )
        # Not committed to a device, as that of `init`.
        now = data_parallel.LocalState(jnp.int32(int(taken)), *now)
        found, _ = local.step(now, *shards)
        kept = jax.tree.map(
            lambda own, like: own.astype(like.dtype)[
                () if own.shape == like.shape else 0
            ],
            (found.step, found.opt_state, found.seen),
            state,
        )
        return found.params, kept

    return step
