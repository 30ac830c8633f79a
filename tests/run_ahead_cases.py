"""Loops over steps on several devices that read no result."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdist import data_parallel, optim, pipeline

WIDE = 200
SGD = optim.sgd(lr=1e-3)


def _inputs(rows, rng):
    sizes = (WIDE, WIDE), (WIDE, WIDE)
    params = [rng.normal(scale=0.1, size=size).astype(np.float32) for size in sizes]
    x, y = (rng.normal(size=(rows, WIDE)).astype(np.float32) for _ in range(2))
    return [jnp.asarray(w) for w in params], x, y


def _layer(w, hidden):
    # Some milliseconds: much longer than a launch takes.
    for _ in range(8):
        hidden = jnp.tanh(hidden @ w)
    return hidden


def _loss(params, batch):
    x, y = batch
    return ((_layer(params[1], _layer(params[0], x)) - y) ** 2).sum(1)


def _stepped(start, advance):
    """The losses of a loop over `advance(state) -> (state, loss)`."""
    state = start
    while True:
        state, loss = advance(state)
        yield loss


def train_step(mesh, params, batch):
    step = data_parallel.train_step(_loss, SGD, mesh)
    given = data_parallel.shard_batch(batch, mesh)

    def advance(state):
        state, metrics = step(state, *given)
        return state, metrics.loss

    return _stepped(step.init(params), advance)


def evaluate(mesh, params, batch):
    step = data_parallel.train_step(_loss, SGD, mesh)
    state, given = step.init(params), data_parallel.shard_batch(batch, mesh)
    return _stepped(0, lambda n: (n, step.evaluate(state, *given).loss))


def value_and_grad(mesh, params, batch):
    fn = data_parallel.value_and_grad(_loss, mesh)
    given = data_parallel.shard_batch(batch, mesh)
    return _stepped(0, lambda n: (n, fn(params, *given)[0]))


def local_sgd(mesh, params, batch):
    local = data_parallel.LocalSGD(_loss, SGD, mesh, period=3)
    given = data_parallel.shard_batch(batch, mesh)
    return _stepped(local.init(params), lambda state: local.step(state, *given))


def _pipe(places, **options):
    return pipeline.Pipeline(
        [
            pipeline.Stage(_layer, ("x",), ("h",)),
            pipeline.Stage(_layer, ("h",), ("out",)),
        ],
        lambda out, batch: ((out - batch["y"]) ** 2).sum(1),
        pipeline.gpipe(2, 4),
        places,
        optimizer=SGD,
        **options,
    )


def _piped(pipe, params, batch):
    given = dict(zip("xy", batch, strict=True))

    def advance(state):
        state, metrics = pipe.train_step(state, given)
        return state, metrics.loss

    return _stepped(pipe.init(params), advance)


def stages_on_one_mesh(mesh, params, batch):
    return _piped(_pipe([mesh, mesh]), params, batch)


def one_program(mesh, params, batch):
    devices = mesh.devices[:2]
    return _piped(_pipe(pipeline.OneProgram(Mesh(devices, ("stage",)))), params, batch)


CASES = [
    train_step, evaluate, value_and_grad, local_sgd, stages_on_one_mesh,
    one_program,
]  # fmt: skip


def losses(case, devices, seed=0):
    """The losses of a loop over one kind of step, of which none is waited for."""
    mesh = Mesh(np.array(devices), ("data",))
    params, *batch = _inputs(12 * len(devices), np.random.default_rng(seed))
    return case(mesh, params, tuple(batch))


def finite(rank, name, steps):
    """How many losses of a loop over all devices are finite."""
    case = next(case for case in CASES if case.__name__ == name)
    found = list(itertools.islice(losses(case, jax.devices()), steps))
    return int(np.isfinite(jax.device_get(found)).sum())
