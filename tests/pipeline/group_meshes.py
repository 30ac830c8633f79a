"""What processes of `jax.distributed` do whose devices make up the stages' meshes."""

import contextlib
import dataclasses
import os
import time

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdist import optim, pipeline, rpc
from jdist.data_parallel import process_group
from tests.pipeline import mesh_cases
from tests.pipeline import mesh_models as models
from tests.pipeline.mesh_cases import on_host
from tests.rpc.hosts import become_worker

WIDE = "PP x DP x TP"
STACK = contextlib.ExitStack()


def join(**options):
    """For good: a process joins one group in its life."""
    STACK.enter_context(process_group(heartbeat=600.0))
    become_worker(**options)


def leave():
    rpc.shutdown()
    STACK.close()


def places(kind="data"):
    """The first stage on processes 0 and 1, the second on process 2.

    Args:
      kind: The axis of the first one's mesh along which the processes are.
    """
    count = jax.local_device_count()
    rows = np.array(jax.devices()).reshape(-1, count)
    both, alone = rows[:2, :2], rows[2, :4].reshape(2, 2)
    names = ("data", "model")
    return [Mesh(both if kind == "data" else both.T, names), Mesh(alone, names)]


def made(schedule="1F1B", kind="data", **options):
    chosen = models.SCHEDULES[schedule]
    pipe = pipeline.Pipeline(
        models.stages(chosen.stages), models.losses, chosen, places(kind), **options
    )
    return pipe, lambda own: models.placed(pipe, WIDE, own)


def whole(stages):
    """The gradients of this process's stages, which all processes of a mesh gather."""
    return [None if tree is None else jax.tree.map(gathered, tree) for tree in stages]


def gathered(leaf):
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(leaf)
    place = jax.sharding.NamedSharding(leaf.sharding.mesh, P())
    return np.asarray(jax.device_put(leaf, place).addressable_data(0))


def gradient(schedule, kind, dtype):
    """Loss, and gradients of the stages of this process."""
    pipe, place = made(schedule, kind)
    own, batch, weights = models.problem(dtype=dtype)
    params = place(own)
    loss, grads = pipe.value_and_grad(params, batch, weights)
    models.same_places(grads, params)
    return float(loss), whole(grads)


def in_v_form():
    """DualPipeV: a worker has the first and the last stage, the other those between."""
    loss, grads = mesh_cases.replicas(places())
    return float(loss), whole(grads)


def trained(steps, **options):
    """Losses and norms of steps, parameters, and the loss of an evaluation."""
    pipe, place = made(optimizer=optim.adam(lr=0.05), **options)
    own, batch, weights = models.problem(dtype=np.float64)
    state, told = pipe.init(place(own)), []
    for _ in range(steps):
        state, metrics = pipe.train_step(state, batch, weights)
        told.append((float(metrics.loss), float(metrics.grad_norm)))
    found = pipe.evaluate(state, batch, weights, outputs=True)
    outputs = gathered(found.outputs) if found.outputs is not None else None
    return told, whole(state.params), float(found.loss), outputs


def states_and_keys():
    """With auxiliary outputs, too."""
    params, states, batch, weights = models.stateful_problem()
    pipe = models.stateful(places())
    given = pipe.place(params, [{"w": P(None, "model")}, {"w": P("model")}])
    kept = pipe.place(states, [{"mean": P("model"), "square": None}, None])
    key = jax.random.key(7)
    (loss, aux), grads, left = pipe.value_and_grad(
        given, batch, weights, states=kept, key=key
    )
    return (float(loss), on_host(aux)), whole(grads), whole(left)


def disagreeing():
    """One process has another batch; then all have the same."""
    pipe, place = made()
    own, batch, weights = models.problem()
    found = []
    for step in range(2):
        if step == 0 and jax.process_index() == 1:
            _, given, _ = models.problem(seed=1)
        else:
            given = batch
        try:
            loss, _ = pipe.value_and_grad(place(own), given, weights)
            found.append(float(loss))
        except ValueError as error:
            found.append(str(error))
    return found


def at_begin(pipe, happens, under_way):
    """Something happens in a gradient, before its first program or after.

    Returns:
      What takes it back.
    """
    gradient = pipe.executor.gradient

    def changed(channels, *given):
        begin = channels.begin

        def begun():
            if under_way:
                begin()
            happens()

        channels.begin = begun
        return gradient(channels, *given)

    pipe.executor.gradient = changed
    return lambda: setattr(pipe.executor, "gradient", gradient)


def fail():
    raise KeyError("planted")


def failing(who, under_way):
    """One process raises in the first of two calls."""
    pipe, place = made()
    own, batch, weights = models.problem()
    params, said = place(own), []
    undo = at_begin(pipe, fail, under_way) if jax.process_index() == who else None
    for _ in range(2):
        try:
            loss, _ = pipe.value_and_grad(params, batch, weights)
            said.append(float(loss))
        except (KeyError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
        if undo is not None:
            undo()
    return said


def until_lost():
    """Steps until one fails; what it failed with, and after how long."""
    pipe, place = made()
    own, batch, weights = models.problem()
    params = place(own)
    while True:
        begun = time.monotonic()
        try:
            pipe.value_and_grad(params, batch, weights)
        except rpc.WorkerLost as error:
            return error.worker, str(error), time.monotonic() - begun


def gone_after_steps(number):
    """In the middle of a step of the others."""
    pipe, place = made()
    own, batch, weights = models.problem()
    params = place(own)
    for _ in range(2):
        pipe.value_and_grad(params, batch, weights)
    at_begin(pipe, lambda: os.kill(os.getpid(), number), under_way=True)
    pipe.value_and_grad(params, batch, weights)


def refusals():
    """What is said of meshes that cannot be."""
    count = jax.local_device_count()
    rows = np.array(jax.devices()).reshape(-1, count)
    names, plain = ("data",), models.SCHEDULES["1F1B"]
    cases = {
        "left out": ([Mesh(rows[0, :2], names), Mesh(rows[1, :2], names)], plain),
        "twice": ([Mesh(rows[:2, 0], names), Mesh(rows[1:, 1], names)], plain),
        "devices": ([rows[0, 0], Mesh(rows[1:, 0], names)], plain),
        "updates": (
            [Mesh(rows[:2, 0], names), Mesh(rows[2:, 0], names)],
            pipeline.pipedream(2, 3, policy="flush"),
        ),
    }
    said = {}
    stages = [dataclasses.replace(each, tied={}) for each in models.stages(2)]
    for name, (given, schedule) in cases.items():
        try:
            pipeline.Pipeline(stages, models.losses, schedule, given)
        except ValueError as error:
            said[name] = str(error)
    return said


def saved(folder):
    """Steps on disk, and the loss of a step with and without a restart."""
    pipe, place = made(optimizer=optim.adam(lr=0.05))
    own, batch, weights = models.problem(dtype=np.float64)
    state = pipe.init(place(own))
    with pipeline.PipelineCheckpoints(folder, pipe, keep=1) as checkpoints:
        for _ in range(2):
            state, _ = pipe.train_step(state, batch, weights)
            checkpoints.save(state)
        steps = checkpoints.steps()
        again = checkpoints.restore(pipe.init(place(own)))
    models.same_places(again.params, state.params)
    return steps, [
        float(pipe.train_step(each, batch, weights)[1].loss) for each in (again, state)
    ]


def timed(schedule):
    """What the schedule promises and what was counted."""
    pipe, place = made(schedule)
    own, batch, weights = models.problem(24)
    params = place(own)
    _, timeline = pipeline.timed(
        pipe, lambda: pipe.value_and_grad(params, batch, weights)
    )
    counted = timeline.peak_activations, timeline.activation_bytes
    return pipe.schedule.peak_activations, *counted
