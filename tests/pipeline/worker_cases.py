"""What a worker of a pipeline does in the tests, as a user's program would."""

import logging
import os
import re
import signal
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np

from jdist import optim, pipeline, rpc
from jdist._checkpoint import StepFolder
from jdist._compat import Ahead
from jdist.pipeline.run import executor
from tests.pipeline import trained
from tests.pipeline.models import losses, middle, problem, stages

NAMES = ["worker0", "worker1", "worker2"]
FAMILIES = {
    "1F1B": pipeline.one_f_one_b,
    "zero bubble": pipeline.zero_bubble,
    "split drain": lambda n, m: pipeline.split_drain(pipeline.one_f_one_b(n, m)),
}


def made(family="1F1B", micro_batches=3, reduction="mean", **options):
    return pipeline.Pipeline(
        stages(),
        losses,
        FAMILIES[family](3, micro_batches),
        pipeline.Workers(NAMES),
        reduction=reduction,
        **options,
    )


def steps(family, reduction, count):
    """Loss and gradients of every step, with other numbers in each."""
    pipe = made(family, reduction=reduction)
    found = []
    for seed in range(count):
        params, batch, weights = problem(7, seed)
        result = pipe.value_and_grad(pipe.place(params), batch, weights)
        found.append(jax.tree.map(np.asarray, result))
    return found


class Compiled(logging.Handler):
    """Names of the stages and losses that are compiled, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def emit(self, record):
        found = re.match(r"Compiling jit\((body_.*?|both)\) with", record.getMessage())
        self.names += [found.group(1)] if found else []


def on_a_mesh(size, ahead):
    """A gradient whose parameters are on a mesh of each worker; what it compiled.

    Args:
      size: Devices of the mesh.
      ahead: Whether anything is compiled before the first micro-batch.
    """
    jax.clear_caches()
    params, batch, weights = problem(7)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:size]), ("rows",))

    def divided(x):
        where = ["rows" if length == 2 else None for length in x.shape]
        spec = jax.sharding.PartitionSpec(*where)
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    params = jax.tree.map(divided, params)
    told, compile_all = Compiled(), Ahead.compile

    def compile_and_say(traced):
        compile_all(traced)
        told.names.append("all")

    read = ("target",)  # by the loss
    patched = mock.patch.object(executor, "compile_ahead", return_value=read)
    if ahead:
        patched = mock.patch.object(Ahead, "compile", compile_and_say)
    logging.getLogger("jax").addHandler(told)
    try:
        with patched, jax.log_compiles():
            found = made().value_and_grad(params, batch, weights)
    finally:
        logging.getLogger("jax").removeHandler(told)
    return told.names, jax.tree.map(np.asarray, found)


def with_replicas(reduction, **options):
    """Two workers for the second stage, which take micro-batches in turn."""
    programs = [
        [f"0F{i}" for i in range(4)] + [f"0B{i}" for i in range(4)],
        ["1F0", "1F2", "1B0", "1B2"],
        ["1F1", "1F3", "1B1", "1B3"],
        [text for i in range(4) for text in (f"2F{i}", f"2B{i}")],
    ]
    schedule = pipeline.Schedule.of(programs, placement=((0,), (1, 2), (3,)))
    places = pipeline.Workers([*NAMES, "worker3"])
    return pipeline.Pipeline(
        stages(), losses, schedule, places, reduction=reduction, **options
    )


def replicated(reduction):
    """A gradient by them."""
    pipe = with_replicas(reduction)
    params, batch, weights = problem(9)
    found = pipe.value_and_grad(pipe.place(params), batch, weights)
    return jax.tree.map(np.asarray, found)


def replicated_state(several):
    """States after two steps of `trained`, whose second stage has two workers."""
    schedule = pipeline.one_f_one_b(2, 4, replicas=(1, 2))
    if several and rpc.get_worker_info().id > 2:
        return [None, None]
    pipe = pipeline.Pipeline(
        trained.made().stages,
        trained.losses,
        schedule,
        pipeline.Workers(NAMES) if several else None,
        optimizer=optim.sgd(lr=0.1),
    )
    state, _ = trained.steps(pipe, trained.start(pipe), 2)
    return jax.tree.map(np.asarray, state.states)


class Drawn(NamedTuple):
    """A value and the key for what follows."""

    h: jax.Array
    key: jax.Array


def hands_on(w, x, key):
    first, second = jax.random.split(key)
    return Drawn(x @ w + jax.random.normal(first, (len(x), 4), x.dtype), second)


def draws(w, drawn):
    return drawn.h * w[None] + jax.random.normal(drawn.key, drawn.h.shape, w.dtype)


def key_between(places=None):
    """Loss and gradients where a stage puts out a named tuple with a key in it."""
    stages = [
        pipeline.Stage(hands_on, ("x",), ("drawn",), keyed=True),
        pipeline.Stage(draws, ("drawn",), ("y",)),
    ]
    schedule = pipeline.one_f_one_b(2, 2)
    pipe = pipeline.Pipeline(stages, lambda y, batch: (y**2).sum(-1), schedule, places)
    rng = np.random.default_rng(2)
    params = [rng.normal(size=s).astype(np.float32) for s in ((3, 4), (4,))]
    batch = {"x": rng.normal(size=(5, 3)).astype(np.float32)}
    found = pipe.value_and_grad(pipe.place(params), batch, key=jax.random.key(4))
    return jax.tree.map(np.asarray, found)


def refused_first_step(change):
    """The error of a pipeline whose second stage does not fit, and of a later one."""
    params, batch, weights = problem(7)
    pipe = made()
    params[1] = {"w": params[1]["w"][:change]}
    try:
        pipe.value_and_grad(pipe.place(params), batch, weights)
    except ValueError as error:
        return f"{type(error).__name__}: {error}", getattr(error, "__notes__", [])
    return "no error", []


def refused_then_right():
    """The error of a call that the second stage refuses; the loss of the next."""
    params, batch, weights = problem(7)
    pipe = made()
    right = pipe.place(params)
    wrong = pipe.place([params[0], {"w": params[1]["w"][:4]}, params[2]])
    try:
        pipe.value_and_grad(wrong, batch, weights)
    except ValueError as error:
        loss, _ = pipe.value_and_grad(right, batch, weights)
        return str(error), np.asarray(loss)
    return "no error", None


def other_schedules(rank):
    micro_batches = 4 if rank == 1 else 3
    try:
        steps_of = made(micro_batches=micro_batches)
        params, batch, weights = problem(7)
        steps_of.value_and_grad(steps_of.place(params), batch, weights)
    except ValueError as error:
        return str(error)
    return "no error"


def abandoned(rank):
    """One worker does not come to the second step."""
    pipe = made()
    params, batch, weights = problem(7)
    pipe.value_and_grad(pipe.place(params), batch, weights)
    if rank == 0:
        return "left"
    before = rpc.set_rpc_timeout(2.0)
    try:
        pipe.value_and_grad(pipe.place(params), batch, weights)
    except rpc.RpcTimeout as error:
        return str(error)
    finally:
        rpc.set_rpc_timeout(before)
    return "no error"


def until_somebody_dies():
    """Steps until one fails; what it failed with."""
    pipe = made()
    params, batch, weights = problem(7)
    placed = pipe.place(params)
    while True:
        try:
            pipe.value_and_grad(placed, batch, weights)
        except rpc.WorkerLost as error:
            return error.worker, str(error)


def dies_in_the_second_step():
    """Killed while its stage computes."""
    steps = iter(range(10))

    def middle_once(params, h):
        def check(x):
            if next(steps) >= 3:  # Three micro-batches are a step.
                os.kill(os.getpid(), signal.SIGKILL)
            return x

        shape = jax.ShapeDtypeStruct(h.shape, h.dtype)
        return middle(params, seen(check, shape, h))

    whole = stages()
    whole[1] = pipeline.Stage(middle_once, ("h",), ("m",))
    places = pipeline.Workers(NAMES)
    pipe = pipeline.Pipeline(whole, losses, FAMILIES["1F1B"](3, 3), places)
    params, batch, weights = problem(7)
    while True:
        pipe.value_and_grad(pipe.place(params), batch, weights)


def seen(check, shape, h):
    """`h`, looked at by the host; its cotangent is passed on."""

    @jax.custom_vjp
    def look(h):
        return jax.pure_callback(check, shape, h)

    look.defvjp(lambda h: (look(h), None), lambda _, d: (d,))
    return look(h)


TWO_BY_TWO = pipeline.Schedule.of(
    [
        ["0F0", "0F2", "0B0", "0B2"],
        ["0F1", "0F3", "0B1", "0B3"],
        ["1F0", "2F0", "2B0", "1B0", "1F2", "2F2", "2B2", "1B2"],
        ["1F1", "2F1", "2B1", "1B1", "1F3", "2F3", "2B3", "1B3"],
    ],
    placement=((0, 1), (2, 3), (2, 3)),
)


def two_by_two(places=None, count=2):
    """Steps of two parts with two workers each; the parameters after them."""
    pipe = pipeline.Pipeline(
        stages(),
        losses,
        TWO_BY_TWO,
        places,
        optimizer=optim.adam(lr=0.05),
        max_norm=0.5,
    )
    params, _, _ = problem(9)
    state = pipe.init(params)
    for seed in range(count):
        _, batch, weights = problem(9, seed)
        state, _ = pipe.train_step(state, batch, weights)
    return jax.tree.map(np.asarray, state.params)


def saves_each_step(folder, dies_at=None):
    """Steps, each of them saved, until somebody dies; the name of who it was."""
    pipe = trained.made(pipeline.Workers(NAMES[:2]))
    state = trained.start(pipe)
    with pipeline.PipelineCheckpoints(folder, pipe, keep=1) as saved:
        while True:
            state, _ = trained.steps(pipe, state, 1)
            if state.step == dies_at:
                StepFolder.write = killed
            try:
                saved.save(state)
            except rpc.WorkerLost as error:
                return error.worker


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(folder):
    """Two more steps from what is on disk, saved again; the losses, and the state."""
    pipe = trained.made(pipeline.Workers(NAMES[:2]))
    with pipeline.PipelineCheckpoints(folder, pipe) as saved:
        state = saved.restore(trained.start(pipe, seed=2))
        state, found = trained.steps(pipe, state, 2)
        saved.save(state)
    return found, trained.numbers(state)


def restored_replicas(folder):
    """A step with two workers for a stage, saved and restored."""
    pipe = with_replicas("mean", optimizer=optim.adam(lr=0.1))
    params, batch, weights = problem(9)
    state, _ = pipe.train_step(pipe.init(params), batch, weights)
    with pipeline.PipelineCheckpoints(folder, pipe) as saved:
        saved.save(state)
        again = saved.restore(pipe.init(params))
    return again.step, trained.numbers(state), trained.numbers(again)


def one_saves(folder):
    """The second worker has left when the first one saves."""
    pipe = trained.made(pipeline.Workers(NAMES[:2]))
    state = trained.start(pipe)
    with pipeline.PipelineCheckpoints(folder, pipe) as saved:
        if rpc.get_worker_info().name == "worker1":
            return "left"
        before = rpc.set_rpc_timeout(2.0)
        try:
            saved.save(state)
        except rpc.RpcTimeout as error:
            return str(error)
        finally:
            rpc.set_rpc_timeout(before)
    return "no error"


ROUND_TRIP = 0.05
"""Seconds; that of a busy machine."""


def timed():
    """The records of a timed step, after one that compiled."""
    pipe = made()
    params, batch, weights = problem(7)
    placed = pipe.place(params)

    def step():
        return pipe.value_and_grad(placed, batch, weights)

    step()
    return [tuple(record) for record in pipeline.timed(pipe, step)[1].records()]


def evaluated():
    """Before the first step of training, and after it."""
    pipe = made(optimizer=optim.sgd(lr=0.0))
    params, batch, weights = problem(7)
    first = pipe.evaluate(pipe.place(params), batch, weights, outputs=True)
    state, _ = pipe.train_step(pipe.init(params), batch, weights)
    again = pipe.evaluate(state, batch, weights)
    return jax.tree.map(np.asarray, (first, again))
