"""A small language model's trainer over dp, tp and cp, and wrong in one interaction.

`trainer(layout, fault)` has the fault in the layouts where all axes of `FAULTS[fault]`
are away from their first values, and is right in all others.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdist.verify import tap

EXAMPLES, LENGTH, WORDS, WIDTH, INNER = 12, 4, 7, 4, 6
KEPT, LIMIT, RATE = 0.75, 0.1, 0.5

AXES = {
    "dp": (1, 2, 3), "tp": (1, 2), "cp": (1, 2), "micro": (1, 2, 4),
    "mask": (False, True), "tied": (False, True), "dropout": (False, True),
    "remat": (False, True), "clip": (False, True),
}  # fmt: skip
MODEL = ("mask", "tied", "dropout", "clip")
FAULTS = {
    "mean of means": {"micro", "mask"},
    "scaled by the devices": {"tp"},
    "head of one shard": {"cp", "tied"},
    "token at the border": {"cp", "mask"},
    "one mask for all shards": {"cp", "dropout"},
    "copies in the norm": {"tp", "clip"},
    "drawn anew": {"remat", "dropout"},
    "cotangents of one device": {"tp", "tied"},
}


def valid(layout):
    devices = layout["dp"] * layout["tp"] * layout["cp"]
    return devices <= 8 and EXAMPLES // layout["dp"] % layout["micro"] == 0


def problem(layout):
    own = iter(jax.random.split(jax.random.key(3), 8))

    def normal(*shape):
        return jax.random.normal(next(own), shape, jnp.float32)

    params = {
        "embed": normal(WORDS, WIDTH),
        "up": normal(WIDTH, INNER) / 2,
        "down": normal(INNER, WIDTH) / 2,
        "head": normal(WIDTH, WORDS),
    }
    if layout["tied"]:
        del params["head"]
    tokens = jax.random.randint(next(own), (EXAMPLES, LENGTH + 1), 0, WORDS)
    lengths = jax.random.randint(next(own), (EXAMPLES, 1), 1, LENGTH + 1)
    if not layout["mask"]:
        lengths = jnp.full((EXAMPLES, 1), LENGTH)
    counted = (jnp.arange(LENGTH)[None] < lengths).astype(jnp.float32)
    batch = {
        "x": tokens[:, :-1],
        "y": tokens[:, 1:],
        "counted": counted,
        "key": jax.random.split(next(own), EXAMPLES),
    }
    return params, batch, counted.sum(1)


def dropped(values, keys, start=0):
    """Positions from `start` on, each example with the mask of its key."""
    length = values.shape[1]

    def kept(key):
        whole = jax.random.bernoulli(key, KEPT, (LENGTH, WIDTH))
        return lax.dynamic_slice_in_dim(whole, start, length, 0)

    return jnp.where(jax.vmap(kept)(keys), values / KEPT, 0)


def layer(params, values, keys, layout, over=None, start=0, faults=()):
    """A mean over earlier positions, dropout, and a network of one hidden layer."""
    length = values.shape[1]
    whole, (enters, leaves) = values, over or (lambda x: x, lambda x: x)
    if over and layout["cp"] > 1:
        whole = lax.all_gather(values, "cp", axis=1, tiled=True)
    count = jnp.arange(1, whole.shape[1] + 1, dtype=values.dtype)
    earlier = jnp.cumsum(whole, 1) / count[None, :, None]
    z = values + lax.dynamic_slice_in_dim(earlier, start, length, 1)
    if layout["dropout"]:
        place = 0 if "one mask for all shards" in faults else start
        z = dropped(z, keys, place)
    inner = z if "cotangents of one device" in faults else enters(z)
    return z + leaves(jax.nn.gelu(inner @ params["up"]) @ params["down"])


def token_losses(scores, labels):
    own = jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(scores, -1) - own


def claim(layout):
    def losses(params, batch):
        values = tap(params["embed"][batch["x"]], "embed")
        values = tap(layer(params, values, batch["key"], layout), "layer")
        head = params["embed"].T if layout["tied"] else params["head"]
        each = token_losses(tap(values @ head, "scores"), batch["y"])
        return (each * batch["counted"]).sum(1) / batch["counted"].sum(1)

    def update(params, gradient, state):
        squares = sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient))
        return moved(params, gradient, jnp.sqrt(squares)), state

    return (losses, update) if layout["clip"] else losses


def moved(params, gradient, norm):
    rate = RATE * jnp.minimum(1, LIMIT / norm)
    return jax.tree.map(lambda p, g: p - rate * g, params, gradient)


@jax.custom_vjp
def enters(values):
    """An identity, whose cotangents are summed over "tp"."""
    return values


@jax.custom_vjp
def leaves(values):
    """A sum over "tp", whose cotangent is that of each term."""
    return lax.psum(values, "tp")


enters.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "tp"),))
leaves.defvjp(lambda x: (lax.psum(x, "tp"), None), lambda _, g: (g,))


def recomputed(fn, anew):
    """`jax.checkpoint`, or one whose backward pass draws with other keys."""
    if not anew:
        return jax.checkpoint(fn)
    wrong = jax.custom_vjp(fn)

    def backward(saved, cotangent):
        params, values, keys = saved
        others = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
        _, transposed = jax.vjp(lambda p, v: fn(p, v, others), params, values)
        return *transposed(cotangent), np.zeros(keys.shape, jax.dtypes.float0)

    wrong.defvjp(lambda *given: (fn(*given), given), backward)
    return wrong


def trainer(layout, fault=None):
    """The candidate of a layout: a gradient function, or a step where it clips."""
    faulty = fault and all(layout[a] != AXES[a][0] for a in FAULTS[fault])
    faults = {fault} if faulty else set()
    sizes = [layout[name] for name in ("dp", "tp", "cp")]
    devices = np.array(jax.devices("cpu")[: np.prod(sizes)]).reshape(sizes)
    specs = {"embed": P(), "up": P(None, "tp"), "down": P("tp")}
    specs |= {} if layout["tied"] else {"head": P()}
    tokens = P("dp", "cp")
    of_batch = {"x": tokens, "y": tokens, "counted": tokens, "key": P("dp")}
    local = partial(local_gradient, layout=layout, faults=faults)
    clips = layout["clip"]

    def local_step(params, batch):
        _, gradient = local(params, batch)
        copies = 1 if "copies in the norm" in faults else layout["tp"]
        squares = sum(
            jnp.sum(g * g) / (1 if "tp" in tuple(specs[name]) else copies)
            for name, g in gradient.items()
        )
        return moved(params, gradient, jnp.sqrt(lax.psum(squares, "tp")))

    whole = jax.jit(
        jax.shard_map(
            local_step if clips else local,
            mesh=Mesh(devices, ("dp", "tp", "cp")),
            in_specs=(specs, of_batch),
            out_specs=specs if clips else (P(), specs),
            check_vma=False,
        )
    )
    if clips:
        return lambda params, state, batch: (whole(params, batch), state)
    return whole


def local_gradient(params, batch, layout, faults):
    """The whole batch's loss and gradient, on a device that has a part of it."""
    shard, length = lax.axis_index("cp"), batch["x"].shape[1]
    counted = batch["counted"]
    if "token at the border" in faults:
        last = jnp.where(shard == 0, 0, counted[:, -1])
        counted = counted.at[:, -1].set(last)
    total = lax.psum(counted.sum(), ("dp", "cp"))
    apply = partial(
        layer, layout=layout, over=(enters, leaves), start=shard * length, faults=faults
    )
    if layout["remat"]:
        apply = recomputed(apply, "drawn anew" in faults)

    def loss(params, part, share):
        values = apply(params, params["embed"][part["x"]], part["key"])
        head = params["embed"].T if layout["tied"] else params["head"]
        if "head of one shard" in faults:
            head = jnp.where(shard == 0, head, lax.stop_gradient(head))
        each = token_losses(values @ head, part["y"])
        return (each * part["counted"]).sum() * share

    found = []
    for number in range(layout["micro"]):
        size = len(counted) // layout["micro"]
        own = slice(number * size, (number + 1) * size)
        part = jax.tree.map(lambda x, own=own: x[own], {**batch, "counted": counted})
        share = 1 / total
        if "mean of means" in faults:
            own_total = lax.psum(part["counted"].sum(), ("dp", "cp"))
            share = 1 / (layout["micro"] * own_total)
        if "scaled by the devices" in faults:
            share = share * layout["tp"]
        found.append(jax.value_and_grad(loss)(params, part, share))
    return lax.psum(jax.tree.map(lambda *x: sum(x), *found), ("dp", "cp"))
