"""What a worker of PipeDream's runtime does in the tests, as a user's program would."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jdist import optim, pipeline, rpc
from tests.pipeline.epochs import asynchronous, paired
from tests.pipeline.pipedream_rules import (
    OPTIMIZERS,
    adam,
    fragile_stages,
    losses,
    momentum,
    planted,
    problem,
    stages,
    wide_losses,
)
from tests.pipeline.places import workers

POLICIES = {"stashing": 1, "vertical_sync": 1, "2bw": 3, "flush": 2}
"""With how many micro-batches per update."""
SCALE = 1024.0
HALF_BOOM = 6e4
"""A float16, and none any more times a cotangent that is scaled."""


def runtime_of(n, policy="stashing", k=1, change=momentum, **options):
    return asynchronous(
        stages(n),
        losses,
        optimizer=OPTIMIZERS[change],
        policy=policy,
        update_every=k,
        **options,
    )


def epoch(n, m, policy, k=1, places=None, replicas=None):
    """One epoch: parameters of this process, losses, what was done, evaluation."""
    runtime = runtime_of(n, policy, k, places=places, replicas=replicas)
    params, batches, weights = problem(n, m, dtype=np.float32)
    state, metrics = runtime.train_epoch(runtime.init(params), paired(batches, weights))
    evaluated = runtime.evaluate(state, batches[0], weights[0])
    found = jax.tree.map(np.asarray, (state.params, state.opt_states))
    return (
        found,
        metrics.losses,
        [tuple(p) for p in runtime.passes],
        np.asarray(evaluated.loss),
    )


def scaled_optimizer(dtype, change=momentum):
    return optim.with_master_weights(
        OPTIMIZERS[change], compute_dtype=dtype, loss_scale=SCALE
    )


def half_problem():
    """Micro-batches of one size, for float16 is slow to compile; weights differ."""
    params, batches, weights = problem(3, 11, dtype=np.float32)
    return params, planted(batches[2:], HALF_BOOM), weights[2:]


def planted_epoch(places=None):
    """Stages in 16 bits, some updates of which overflow; the second has two workers."""
    runtime = asynchronous(
        fragile_stages(3),
        wide_losses,
        places,
        optimizer=scaled_optimizer(jnp.float16),
        replicas=(1, 2, 1),
        update_every=2,
    )
    params, batches, weights = half_problem()
    state, metrics = runtime.train_epoch(runtime.init(params), paired(batches, weights))
    found = jax.tree.map(np.asarray, (state.params, state.opt_states))
    return found, metrics.losses, metrics.skipped


def every_policy(n, m, places=None):
    return {policy: epoch(n, m, policy, k, places) for policy, k in POLICIES.items()}


def other_epochs(rank):
    """Workers that begin epochs of different lengths."""
    runtime = runtime_of(2, places=workers(2))
    params, batches, _ = problem(2, 3)
    try:
        runtime.train_epoch(runtime.init(params), batches[: 3 - rank])
    except ValueError as error:
        return str(error)
    return "no error"


def after_refusals(rank):
    """What worker 0 is refused, and the loss of a pipeline of both after that."""
    alone = [dataclasses.replace(stages(2)[0], tied={"w": "w"}), stages(2)[1]]
    refused = []
    for given in ({"reduction": "max"}, {"max_norm": 1.0}, {"stages": alone}):
        options = {"stages": stages(2), "places": workers(2)} | given
        if rank == 0:
            try:
                asynchronous(losses=losses, **options)
            except ValueError as error:
                refused.append(str(error))
    runtime = runtime_of(2, places=workers(2))
    params, (batch,), (weights,) = problem(2, 1, dtype=np.float32)
    loss, _ = runtime.value_and_grad(runtime.place(params), batch, weights)
    return refused, float(loss)


def streamed(places=None, last=None, folder=None):
    """Epochs of four of eleven batches from a generator, each with a checkpoint.

    Args:
      places: Of the stages.
      last: How many batches there are; None: all.
      folder: Of the checkpoints.
    """
    runtime = runtime_of(3, change=adam, places=places)
    params, batches, weights = problem(3, 11, dtype=np.float32)
    state = runtime.init(params)
    with pipeline.PipelineCheckpoints(folder, runtime) as saved:
        if saved.latest() is not None:
            state = saved.restore(state)

        rest = slice(4 * state.step, last)
        pairs = zip(batches[rest], weights[rest], strict=True)
        found = []
        while part := list(itertools.islice(pairs, 4)):
            state, metrics = runtime.train_epoch(state, part)
            saved.save(state)
            found.append(metrics.losses)
    return jax.tree.map(np.asarray, state.params), np.concatenate(found)


def bad_streams(rank, fault):
    """What a worker raises if data of one of them are at fault; then all go on."""
    runtime = runtime_of(3, places=workers(3))
    params, batches, weights = problem(3, 9, dtype=np.float32)
    state = runtime.init(params)

    def supply():
        order = list(range(9))
        if fault == "order" and rank == 1:
            order[5:7] = [6, 5]
        # Each has what its stages take; weights are compared apart from the entries.
        mine = "x" if rank == 0 else "target"
        for place, i in enumerate(order):
            if i == 6 and (fault, rank) in (("raises", 1), ("short", 2)):
                if fault == "short":
                    return
                raise OSError("the disk is gone")
            yield {mine: batches[i][mine]}, weights[place]

    try:
        runtime.train_epoch(state, supply(), total=9)
    except (ValueError, OSError) as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        text = f"{type(error).__name__}: {error} {notes}"
    else:
        text = "no error"
    after, _ = runtime.train_epoch(state, paired(batches, weights))
    return text, jax.tree.map(np.asarray, after.params)


def some_epochs(count, folder, places=None):
    """Goes on from the last checkpoint; losses by epoch, and the parameters."""
    runtime = runtime_of(3, change=adam, places=places)
    params, batches, weights = problem(3, 6, dtype=np.float32)
    state, curve = runtime.init(params), []
    with pipeline.PipelineCheckpoints(folder, runtime) as saved:
        if saved.latest() is not None:
            state = saved.restore(state)
        for _ in range(count):
            state, metrics = runtime.train_epoch(state, paired(batches, weights))
            saved.save(state)
            curve.append((state.step, metrics.losses))
    return curve, jax.tree.map(np.asarray, state.params)


def until_somebody_dies(places):
    runtime = runtime_of(3, change=adam, places=places)
    params, batches, weights = problem(3, 6, dtype=np.float32)
    state = runtime.init(params)
    while True:
        try:
            state, _ = runtime.train_epoch(state, paired(batches, weights))
        except rpc.WorkerLost as error:
            return error.worker, str(error)
