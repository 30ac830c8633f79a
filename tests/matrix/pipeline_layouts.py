"""`pipeline.Pipeline` in layouts of schedules, places, ties and micro-batches.

A language model without attention: an embedding, twelve layers, a head. Functions of a
layout for `verify.fuzz`, whose process imports them.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdist import optim, pipeline, rpc
from jdist.matrix.row import precision_of_caller

EXAMPLES, LAYERS, WORDS, WIDTH = 13, 12, 7, 6
KEPT, LIMIT, RATE = 0.75, 0.25, 0.1

SCHEDULES = {
    "GPipe": pipeline.gpipe,
    "1F1B": pipeline.one_f_one_b,
    "ZB-H1": pipeline.zero_bubble,
    "interleaved": lambda n, m: pipeline.interleaved(n, m, 2),
    "looped BFS": lambda n, m: pipeline.looped_bfs(n, m, 2),
    "ZBV": pipeline.zbv,
    "V-Half": pipeline.v_half,
    "V-Min": pipeline.v_min,
    "DualPipeV": pipeline.dualpipe_v,
}
MESHES = {"data": (2, 1), "model": (1, 2), "data and model": (2, 2)}

AXES = {
    "schedule": tuple(SCHEDULES),
    "workers": (1, 2, 3),
    "micro": (1, 2, 3, 4, 6),
    "places": ("one device", "devices", *MESHES, "workers", "one program"),
    "recompute": (False, True, "dots"),
    "tie": (False, True),
    "dropout": (False, True),
    "weights": (False, True),
    "clip": (False, True),
}
MODEL = ("tie", "dropout", "weights", "clip")


def valid(layout):
    """Whether eight devices suffice; a worker of rpc has only its own stage's state."""
    size = np.prod(MESHES.get(layout["places"], (1, 1))) * layout["workers"]
    return size <= 8 and not (layout["places"] == "workers" and layout["clip"])


def problem(layout):
    one, two, three, four = jax.random.split(jax.random.key(5), 4)
    table = jax.random.normal(one, (WORDS, WIDTH), jnp.float32) / 2
    layers = jax.random.normal(two, (LAYERS, WIDTH, WIDTH), jnp.float32) / 2
    params = {"table": table, "layers": layers}
    if not layout["tie"]:
        params["head"] = jax.random.normal(three, (WORDS, WIDTH), jnp.float32) / 2
    words = jax.random.randint(four, (EXAMPLES, 3), 0, WORDS, jnp.int32)
    batch = {
        "x": words[:, :2],
        "y": words[:, 2],
        "key": jax.random.split(jax.random.key(7), EXAMPLES),
    }
    weights = jnp.arange(EXAMPLES, dtype=jnp.float32) if layout["weights"] else None
    return params, batch, weights


def embedded(own, words, keys, dropout):
    values = own["table"][words].sum(1)
    if not dropout:
        return values
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, KEPT, (WIDTH,)))(keys)
    return jnp.where(kept, values / KEPT, 0)


def applied(layers, values):
    for layer in layers:
        values = values + jnp.tanh(values @ layer)
    return values


def scored(own, values):
    return values @ own["table"].T


def losses_of(scores, batch):
    own = jnp.take_along_axis(scores, batch["y"][:, None], 1)[:, 0]
    return jax.nn.logsumexp(scores, 1) - own


def claim(layout):
    def losses(params, batch):
        values = embedded(params, batch["x"], batch["key"], layout["dropout"])
        values = applied(params["layers"], values)
        head = {"table": params.get("head", params["table"])}
        return losses_of(scored(head, values), batch)

    def update(params, gradient, state):
        clipped, _ = optim.clip_by_global_norm(gradient, LIMIT)
        return optim.sgd(lr=RATE).step(params, clipped, state)

    return (losses, update, optim.sgd(lr=RATE).init) if layout["clip"] else losses


def stages_of(layout, count):
    """Equal stages, with the embedding before and the head after them."""
    options = {"recompute": layout["recompute"]}
    between = [
        pipeline.Stage(applied, (f"h{j}",), (f"h{j + 1}",), **options)
        for j in range(count)
    ]
    tied = {"tied": {"table": "table"}} if layout["tie"] else {}

    def first(own, words, keys):
        return embedded(own, words, keys, layout["dropout"])

    return pipeline.with_ends(
        between,
        first=pipeline.Stage(first, ("x", "key"), ("h0",), **tied),
        last=pipeline.Stage(scored, (f"h{count}",), ("scores",), **tied),
    )


def shares(params, count):
    """The parameters of each stage."""
    parts = list(params["layers"].reshape(count, -1, WIDTH, WIDTH))
    table, head = params["table"], params.get("head", params["table"])
    if count == 1:
        return [({"table": table}, parts[0], {"table": head})]
    first, *middle, last = parts
    return [({"table": table}, first), *middle, (last, {"table": head})]


def whole(own, layout):
    """Inverse of `shares`."""
    if len(own) == 1:
        ((table, *layers, head),) = own
    else:
        (table, first), *middle, (last, head) = own
        layers = [first, *middle, last]
    table, head = np.asarray(table["table"]), np.asarray(head["table"])
    found = {"table": table, "layers": np.concatenate(list(map(np.asarray, layers)))}
    if layout["tie"]:
        np.testing.assert_array_equal(table, head, "the copies of a tied parameter")
        return found
    return {**found, "head": head}


def places_of(layout):
    """The places of the workers."""
    count, name, devices = layout["workers"], layout["places"], jax.devices()
    if name in MESHES:
        shape = count, *MESHES[name]
        grid = np.array(devices[: np.prod(shape)]).reshape(shape)
        return [Mesh(own, ("data", "model")) for own in grid]
    if name == "one program":
        return pipeline.OneProgram(Mesh(np.array(devices[:count]), ("stage",)))
    return devices[:1] * count if name == "one device" else devices[:count]


def spec(leaf):
    return P(*[None] * (leaf.ndim - 1), "model")


def trainer(layout, fault=False):
    """A gradient function, or a step where gradients are clipped."""
    schedule = SCHEDULES[layout["schedule"]](layout["workers"], layout["micro"])
    stages = stages_of(layout, schedule.stages)
    weights = problem(layout)[2]
    if fault and layout["micro"] > 1:
        weights = jnp.arange(1.0, 1 + EXAMPLES)
    options = {}
    if layout["clip"]:
        options = {"optimizer": optim.sgd(lr=RATE), "max_norm": LIMIT}
    pipe = partial(pipeline.Pipeline, stages, losses_of, schedule, **options)

    def opened(params):
        """A pipeline, and the parameters at its places."""
        own = shares(params, schedule.stages)
        made = pipe(places_of(layout))
        specs = [jax.tree.map(spec, own)] if layout["places"] in MESHES else []
        return made, made.place(own, *specs)

    def gradient(params, batch):
        made, placed = opened(params)
        loss, grads = made.value_and_grad(placed, batch, weights)
        return loss, whole(grads, layout)

    def step(params, opt_state, batch):
        made, placed = opened(params)
        state, _ = made.train_step(made.init(placed), batch, weights)
        return whole(state.params, layout), opt_state

    def over_workers(params, batch):
        own = shares(params, schedule.stages)
        loss, grads = gradient_over_workers(layout, pipe, own, batch, weights)
        return loss, whole(grads, layout)

    if layout["places"] == "workers":
        return over_workers
    return step if layout["clip"] else gradient


def gradient_over_workers(layout, pipe, params, batch, weights):
    """That of a pipeline over the threads of a local cluster, each with its stages."""
    names = [f"worker{number}" for number in range(layout["workers"])]

    def on_worker(name):
        with rpc.use_worker(name):
            made = pipe(pipeline.Workers(names))
            found = made.value_and_grad(made.place(params), batch, weights)
            return found, made.own

    with (
        precision_of_caller(),
        rpc.local_cluster(names),
        ThreadPoolExecutor(len(names)) as threads,
    ):
        found = list(threads.map(on_worker, names))
    grads = {j: own[j] for (_, own), mine in found for j in mine}
    return found[0][0][0], [grads[j] for j in sorted(grads)]
