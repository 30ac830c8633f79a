"""What the processes of a group do when a test tells them: see `tests.rpc.hosts`.

Every process knows the whole problem and takes the rows of its own replicas.
"""

import contextlib
import hashlib
import os
import random
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdist import optim
from jdist.data_parallel import (
    TrainCheckpoints,
    shard_batch,
    train_step,
    value_and_grad,
)
from jdist.data_parallel.data.process_group import process_group
from tests.replicas import over

MOMENTUM = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")

STACK = contextlib.ExitStack()
FEATURES, HIDDEN, OUTPUTS = 5, 7, 3


def join():
    """Enters the group for good; what it consists of."""
    whole = STACK.enter_context(process_group(axis="replicas"))
    devices = [(d.process_index, d.id) for d in whole.devices]
    return whole.axis_names, devices, jax.process_index(), jax.process_count()


def leave():
    STACK.close()


def mesh(each):
    """`each` devices of every process."""
    count = jax.local_device_count()
    rows = np.array(jax.devices()).reshape(-1, count)[:, :each]
    return Mesh(rows.reshape(-1), ("data",))


def losses_of(params, batch):
    """A two-layer regression, one loss per example."""
    x, y = batch
    hidden = jnp.tanh(x @ params["w1"] + params["b1"][None])
    return (((hidden @ params["w2"]) - y) ** 2).sum(axis=1)


def parameters():
    rng = np.random.default_rng(7)
    shapes = {"w1": (FEATURES, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, OUTPUTS)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def examples(count, seed=0):
    """A batch, and weights of which one is 0."""
    rng = np.random.default_rng(seed)
    batch = rng.normal(size=(count, FEATURES)), rng.normal(size=(count, OUTPUTS))
    weights = rng.uniform(0.5, 2.0, size=count)
    weights[1] = 0.0
    return batch, weights


def sharded(where, sizes, batch, weights, rows):
    """The global batch, each process giving the examples of its own replicas."""
    each = len(sizes) // jax.process_count()
    first = each * jax.process_index()
    start = sum(sizes[:first])
    own = slice(start, start + sum(sizes[first : first + each]))
    part = jax.tree.map(lambda x: x[own], batch)
    mine = sizes[first : first + each]
    return shard_batch(part, **over(where), sizes=mine, weights=weights[own], rows=rows)


def gradient(sizes, reduction, method):
    """Loss and gradient of all examples, as this process has them."""
    where = mesh(len(sizes) // jax.process_count())
    fn = value_and_grad(losses_of, **over(where), reduction=reduction, method=method)
    shards = sharded(where, sizes, *examples(sum(sizes)), rows=max(sizes))
    return jax.tree.map(np.asarray, fn(parameters(), *shards))


def float16_mean(method):
    """Of 1500 and 500 examples around 600, whose sum is 18 times float16's largest."""
    rng = np.random.default_rng(3)
    x = rng.uniform(550, 650, size=(2000, 3)).astype(np.float16)
    weights = rng.uniform(0.5, 300, size=2000)
    fn = value_and_grad(lambda w, x: x @ w, mesh(1), method=method)
    shards = sharded(mesh(1), (1500, 500), x, weights, rows=1500)
    _, found = fn(jnp.ones(3, jnp.float16), *shards)
    return np.asarray(found), np.average(x.astype(float), axis=0, weights=weights)


def divided():
    """Three steps on 2 processes x 2 devices: layouts, and values beside one device's.

    The parameters are one array of both processes, divided over each one's devices.
    """
    rows = np.array(jax.devices()).reshape(-1, jax.local_device_count())[:, :2]
    grid = Mesh(rows, ("data", "model"))
    specs = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model")}
    whole = {k: p[..., :6] if k != "w2" else p[:6] for k, p in parameters().items()}
    own = {
        k: jax.device_put(p, NamedSharding(grid, specs[k])) for k, p in whole.items()
    }
    opt = optim.adam(lr=0.05)
    step = train_step(losses_of, opt, grid, max_norm=0.5)
    alone = train_step(losses_of, opt, replicas=1, max_norm=0.5)
    state, expected = step.init(own), alone.init(whole)
    batch, weights = examples(7)
    for _ in range(3):
        state, _ = step(state, *sharded(grid, (5, 2), batch, weights, rows=5))
        expected, _ = alone(expected, batch, weights)
    kept = [
        leaf.sharding.spec == specs[name]
        for name in specs
        for leaf in (state.params[name], state.opt_state[name].exp_avg)
    ]
    found = multihost_utils.process_allgather(state.params, tiled=True)
    return kept, found, jax.tree.map(np.asarray, expected.params)


def collectives(each):
    """How many of each kind are in a compiled step."""
    where = mesh(each)
    step = train_step(losses_of, optim.sgd(lr=0.01), **over(where))
    state = step.init(parameters())
    sizes = (1,) * where.size
    shards = sharded(where, sizes, *examples(where.size), rows=1)
    text = step.lower(state, *shards).compile().as_text()
    return {kind: text.count(f" {kind}(") for kind in KINDS}


def many_swaps(leaves, repeats):
    """Sums of many leaves of one size, each alone; which differ from what they must be.

    Were the swaps of two leaves mixed up, their sums would differ.
    """
    where = mesh(1)
    fn = value_and_grad(
        lambda w, x: sum(x[k] @ w[k] for k in w),
        **over(where),
        reduction="sum",
        bucket_cap_mb=0,
    )
    wrong = 0
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        whole = {f"leaf{i}": rng.normal(size=(2, 3000)) for i in range(leaves)}
        params = {name: np.zeros(3000) for name in whole}
        shards = sharded(where, (1, 1), whole, np.ones(2), rows=1)
        _, found = fn(params, *shards)
        wrong += sum(bool((found[k] != x[0] + x[1]).any()) for k, x in whole.items())
    return wrong


def sizes_at(step, replicas):
    """All different, none of them 0, others at every step."""
    return tuple(int(n) for n in np.roll(np.arange(1, replicas + 1), step))


def train(steps, each, folder=None, every=1, report=None, where=None):
    """Trains, from the last checkpoint if there is one.

    Returns:
      Losses by step as hexadecimal, and for each copy of the parameters here a digest.
    """
    where = mesh(each) if where is None else where
    step = train_step(losses_of, optim.adam(lr=0.01), **over(where))
    state = step.init(parameters())
    losses = {}
    with contextlib.ExitStack() as stack:
        if folder is not None:
            saved = stack.enter_context(TrainCheckpoints(folder))
            if saved.latest() is not None:
                state = saved.restore(state)
        for number in range(int(state.step), steps):
            sizes = sizes_at(number, where.size)
            problem = examples(sum(sizes), seed=number)
            state, metrics = step(
                state, *sharded(where, sizes, *problem, rows=where.size)
            )
            losses[number] = float(metrics.loss).hex()
            if report is not None:
                report(number, losses[number])
            if folder is not None and (number + 1) % every == 0:
                saved.save(state)
    return losses, digests(state)


def digests(tree):
    """One for each device's copy of everything in the tree."""
    shards = [leaf.addressable_shards for leaf in jax.tree.leaves(tree)]
    found = []
    for copies in zip(*shards, strict=True):
        digest = hashlib.sha256()
        for copy in copies:
            digest.update(np.asarray(copy.data).tobytes())
        found.append(digest.hexdigest())
    return found


def resumable(rank, steps, folder, every, fatal):
    """A whole program: joins, trains with checkpoints, writes each step down.

    Rank 1 is killed a random moment after the step `fatal`.
    """
    with open(f"{folder}-{rank}.log", "a", buffering=1) as log:

        def report(number, loss):
            log.write(f"{number} {loss}\n")
            if (number, rank) == (fatal, 1):
                moment = random.uniform(0.0, 0.3)
                threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()

        with process_group(timeout=120):
            return train(steps, 1, folder=folder, every=every, report=report)


def with_momentum(rank, steps):
    """A whole program on equal shards without weights; its losses and parameters."""
    with process_group(timeout=120):
        where = mesh(1)
        step = train_step(losses_of, optim.sgd(**MOMENTUM), **over(where))
        state, losses = step.init(parameters()), []
        for number in range(steps):
            batch, _ = examples(8, seed=number)
            shards = sharded(where, (4, 4), batch, np.ones(8), rows=4)
            state, metrics = step(state, *shards)
            losses.append(float(metrics.loss))
        return losses, jax.tree.map(np.asarray, state.params)
