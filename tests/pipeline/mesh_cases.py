"""What two workers with meshes of their own do in the tests."""

import contextlib
import logging
import os
import signal
import time
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdist import optim, pipeline, rpc
from jdist._compat import Ahead
from tests.pipeline import mesh_models as models
from tests.pipeline.epochs import asynchronous
from tests.pipeline.worker_cases import Compiled
from tests.rpc.hosts import become_worker

NAMES = ["worker0", "worker1"]
MANY = 25  # Examples enough for data axes of 2 and 3 together.


def rank():
    return NAMES.index(rpc.get_worker_info().name)


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def made(layout, schedule="1F1B", **options):
    """This worker's pipeline, and a function that places its parameters."""
    chosen = models.SCHEDULES[schedule]
    own = models.meshes(layout)[rank()]
    places = pipeline.Workers(NAMES, mesh=own)
    pipe = pipeline.Pipeline(
        models.stages(chosen.stages), models.losses, chosen, places, **options
    )
    return pipe, lambda own: models.placed(pipe, layout, own)


def gradient(layout, schedule, dtype):
    """The loss, and the gradients of this worker's stages."""
    pipe, place = made(layout, schedule)
    own, batch, weights = models.problem(dtype=dtype)
    params = place(own)
    loss, grads = pipe.value_and_grad(params, batch, weights)
    models.same_places(grads, params)
    return on_host((loss, grads))


def gradient_in_a_group(*args):
    """`gradient`, and what is said of a mesh over the devices of both processes."""
    become_worker()
    try:
        found = gradient(*args)
        both = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "model"))
        try:
            pipeline.Workers(NAMES, mesh=both)
        except ValueError as error:
            return *found, str(error)
    finally:
        rpc.shutdown()


def unequal(shapes):
    """A gradient by workers whose meshes have so many devices by data and by model."""
    devices = jax.devices()
    own, batch, weights = models.problem(MANY)
    size, shape = int(np.prod(shapes[0])), shapes[rank()]
    here = devices[size:] if rank() else devices
    mesh = None
    if shape is not None:
        grid = np.array(here[: int(np.prod(shape))]).reshape(shape)
        mesh = Mesh(grid, ("data", "model"))
    places = pipeline.Workers(NAMES, mesh=mesh)
    pipe = pipeline.Pipeline(
        models.stages(2), models.losses, models.SCHEDULES["1F1B"], places
    )
    params = models.cut(own, 2)
    placed = pipe.place(params)
    if mesh is not None:
        placed = models.placed(pipe, "PP x DP x TP", own)
    return on_host(pipe.value_and_grad(placed, batch, weights))


def trained(layout, steps, folder=None, after=None, **options):
    """Steps, and an evaluation; from a checkpoint if `after` names the step of one."""
    pipe, place = made(layout, optimizer=optim.adam(lr=0.05), **options)
    own, batch, weights = models.problem()
    state, losses = pipe.init(place(own)), []
    with contextlib.ExitStack() as stack:
        if folder is not None:
            made_of = pipeline.PipelineCheckpoints(folder, pipe)
            saved = stack.enter_context(made_of)
            if after is not None:
                state = saved.restore(state, after)
        for _ in range(steps):
            state, metrics = pipe.train_step(state, batch, weights)
            losses.append(float(metrics.loss))
            if folder is not None and after is None:
                saved.save(state)
    found = pipe.evaluate(state, batch, weights)
    return losses, on_host((state.params, found.loss))


def compiled_programs(layout):
    """Programs that are compiled before and in a first step, and in a second one."""
    jax.clear_caches()
    told, compile_all = Compiled(), Ahead.compile

    def compile_and_say(traced):
        compile_all(traced)
        told.names.append("all")

    pipe, place = made(layout)
    own, batch, weights = models.problem()
    params = place(own)
    logging.getLogger("jax").addHandler(told)
    try:
        with mock.patch.object(Ahead, "compile", compile_and_say), jax.log_compiles():
            pipe.value_and_grad(params, batch, weights)
            told.names.append("first")
            pipe.value_and_grad(params, batch, weights)
    finally:
        logging.getLogger("jax").removeHandler(told)
    return told.names


def replicas(places, **options):
    """DualPipeV: both workers run both stages, each with half of the micro-batches."""
    own, batch, weights = models.problem()
    schedule = pipeline.dualpipe_v(2, 4)
    pipe = pipeline.Pipeline(
        models.stages(4), models.losses, schedule, places, **options
    )
    params = models.placed(pipe, "PP x DP x TP", own)
    return pipe.value_and_grad(params, batch, weights)


def states_and_keys(places, **options):
    """With auxiliary outputs, too."""
    params, states, batch, weights = models.stateful_problem()
    pipe = models.stateful(places, **options)
    given = pipe.place(params, [{"w": P(None, "model")}, {"w": P("model")}])
    kept = pipe.place(states, [{"mean": P("model"), "square": None}, None])
    key = jax.random.key(7)
    return pipe.value_and_grad(given, batch, weights, states=kept, key=key)


def weight_stashing(places, **options):
    """An epoch of updates while micro-batches are under way; of odd sizes, too."""
    options |= {"optimizer": optim.adam(lr=0.05), "policy": "stashing"}
    made_of = [pipeline.Stage(s.fn, s.inputs, s.outputs) for s in models.stages(2)]
    pipe = asynchronous(made_of, models.losses, places, **options)
    params = models.placed(pipe, "PP x DP x TP", models.problem()[0])
    batches = [models.problem(n, seed=n)[1:] for n in (4, 3, 4, 6)]
    state, metrics = pipe.train_epoch(pipe.init(params), batches)
    return metrics.losses, state.params


FEATURES = {
    each.__name__: each for each in (replicas, states_and_keys, weight_stashing)
}


def feature(name):
    """What this worker gets of it."""
    own = models.meshes("PP x DP x TP")[rank()]
    return on_host(FEATURES[name](pipeline.Workers(NAMES, mesh=own)))


def feature_by_places(name):
    """The same in a group of `jax.distributed`, given the meshes of both processes."""
    become_worker()
    try:
        count = jax.local_device_count()
        rows = np.array(jax.devices()).reshape(-1, count)[:, :4]
        places = [Mesh(row.reshape(2, 2), ("data", "model")) for row in rows]
        return on_host(FEATURES[name](places))
    finally:
        rpc.shutdown()


def until_the_other_dies(layout):
    """Steps until one fails; what it failed with."""
    pipe, place = made(layout)
    own, batch, weights = models.problem()
    params = place(own)
    while True:
        try:
            pipe.value_and_grad(params, batch, weights)
        except rpc.WorkerLost as error:
            return error.worker, str(error)


def dies_after_a_step(layout):
    """While the other is in the next one."""
    pipe, place = made(layout)
    own, batch, weights = models.problem()
    pipe.value_and_grad(place(own), batch, weights)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def refusal(data_axis, with_mesh):
    """What a pipeline with such a data axis says at its first call."""
    mesh = models.meshes("PP x DP")[rank()] if with_mesh else None
    pipe = pipeline.Pipeline(
        models.stages(2),
        models.losses,
        models.SCHEDULES["1F1B"],
        pipeline.Workers(NAMES, mesh=mesh, data_axis=data_axis),
    )
    own, batch, weights = models.problem()
    try:
        pipe.value_and_grad(models.cut(own, 2), batch, weights)
    except ValueError as error:
        return str(error)
    return None


def wrong_meshes():
    """What is said of meshes that cannot be."""
    kinds = (jax.sharding.AxisType.Manual,)
    manual = jax.sharding.Mesh(jax.devices()[:2], ("data",), axis_types=kinds)
    said = []
    for mesh in (manual, "mesh"):
        try:
            pipeline.Workers(NAMES, mesh=mesh)
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said
