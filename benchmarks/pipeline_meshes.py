"""What does a step of a small Llama take whose stages are divided over meshes?

It is compared with the same meshes in two processes, the same stages on single devices,
the blocks as equal stages of one program, and the whole model in one `jax.jit`, divided
over as many devices by data and model, and on one. CPU devices of one process share its
cores: eight of them compute no faster than one, and the comparison shows what the
division costs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks._harness import Case, timing
from benchmarks._pair import Job, Pair, timed
from examples import language_model as llama
from experiments import language_model as trained
from jdist import pipeline, rpc

ROUNDS = 15
WARMUP = 2
CALLS = 3
SIZES = llama.Sizes(width=128, blocks=4, inner=256)
MESHES = "pipeline, 2 stages x 2 data x 2 model"
WORKERS = MESHES + ", 2 processes"


def measure() -> list[Case]:
    """Times the steps in turn, in one process of eight devices and two of four."""
    with (
        Pair(prepare, None, processes=1, pin=0) as alone,
        Pair(prepare_worker, None, pin=0) as workers,
    ):
        jobs = [(pair, job) for pair in (alone, workers) for job in pair.jobs]
        spent: dict[str, list[float]] = {job: [] for _, job in jobs}
        for turn in range(WARMUP + ROUNDS):
            for pair, job in jobs:
                found = pair.run(job, CALLS)
                if turn >= WARMUP:
                    spent[job].append(found.elapsed)
    timings = {job: timing(seconds) for job, seconds in spent.items()}
    name = f"width {SIZES.width}, {SIZES.blocks} blocks, {llama.SEQUENCES} sequences"
    note = f"{llama.MICRO_BATCHES} micro-batches in pipelines, 1F1B; Adam"
    return [Case(f"step, {name}", timings, note=note)]


@contextmanager
def prepare(rank: int) -> Iterator[dict[str, Job]]:
    """Jobs with each form of the step."""
    jax.config.update("jax_num_cpu_devices", 8)
    devices = jax.devices()
    (batch,) = llama.batches(1)
    steps = {
        MESHES: pipelined(llama.meshes(devices, (2, 2, 2)), batch),
        "one program, 2 stages x 2 data x 2 model, GPipe": in_one(devices, batch),
        "pipeline, 2 devices": pipelined(devices[:2], batch),
        "jit, 4 data x 2 model": whole(llama.meshes(devices, (1, 4, 2))[0], batch),
        "jit, one device": whole(llama.meshes(devices, (1, 1, 1))[0], batch),
    }
    finish = jax.block_until_ready
    yield {name: partial(timed, step, finish) for name, step in steps.items()}


@contextmanager
def prepare_worker(rank: int) -> Iterator[dict[str, Job]]:
    """The job of one of two workers, with a mesh of its own process's devices."""
    jax.config.update("jax_num_cpu_devices", 4)
    names = ["worker0", "worker1"]
    # The processes are stopped during the turns of others and send no heartbeats.
    options = rpc.RpcOptions(heartbeat_timeout=3600)
    rpc.init_rpc(names[rank], options=options)
    (batch,) = llama.batches(1)
    (own,) = llama.meshes(jax.devices(), (1, 2, 2))
    step = pipelined(pipeline.Workers(names, mesh=own), batch)
    yield {WORKERS: partial(timed, step, jax.block_until_ready)}
    rpc.shutdown()


def pipelined(places: Any, batch: Any) -> Callable[[], Any]:
    """The step of a pipeline with the layers in two stages."""
    schedule = trained.SCHEDULES["1F1B"]
    pipe, made = llama.pipelined(
        llama.layers(SIZES), schedule, places, optimizer=trained.OPTIMIZER
    )
    specs: Any = None
    if isinstance(places, pipeline.Workers) or isinstance(places[0], Mesh):
        specs = jax.tree_util.tree_map_with_path(llama.spec, made.params)
    params = pipe.place(made.params, specs)
    state = pipe.init(params, made.states, jax.random.key(0))
    weights = batch["mask"].sum(1)

    def step() -> Any:
        nonlocal state
        state, metrics = pipe.train_step(state, batch, weights)
        return state.params, metrics.loss

    return step


def in_one(devices: Sequence[jax.Device], batch: Any) -> Callable[[], Any]:
    """The blocks as equal stages of one program, between embedding and head."""
    modules, half = llama.layers(SIZES), 1 + SIZES.blocks // 2
    groups = [modules[:1], modules[1:half], modules[half:-1], modules[-1:]]
    names = ["tokens", "x", "h", "y", "scores"]
    made = pipeline.stages_from_nnx(groups, names)
    first, *stages, last = made.stages
    mesh = Mesh(np.array(devices).reshape(2, 2, 2), ("stage", "data", "model"))
    pipe = pipeline.Pipeline(
        pipeline.with_ends(stages, first=first, last=last),
        llama.losses_of,
        pipeline.gpipe(2, llama.MICRO_BATCHES),
        pipeline.OneProgram(mesh),
        optimizer=trained.OPTIMIZER,
    )

    def by_stage(trees: Sequence[Any]) -> list[Any]:
        return [(trees[0], trees[1]), (trees[2], trees[3])]

    specs = jax.tree_util.tree_map_with_path(llama.spec, made.params)
    state = pipe.init(pipe.place(by_stage(made.params), by_stage(specs)))
    weights = batch["mask"].sum(1)

    def step() -> Any:
        nonlocal state
        state, metrics = pipe.train_step(state, batch, weights)
        return state.params, metrics.loss

    return step


def whole(mesh: Mesh, batch: Any) -> Callable[[], Any]:
    """The step of all layers as one function, partitioned by the compiler."""
    model = trained.model_of(SIZES, 0)
    run = trained.plain_step(model)

    def place(name: str, leaf: np.ndarray) -> jax.Array:
        named = (llama.SHARDED[x] for x in name.split("/") if x in llama.SHARDED)
        return jax.device_put(leaf, NamedSharding(mesh, next(named, PartitionSpec())))

    own = model.own(model.made.params)
    params: Any = {name: place(name, leaf) for name, leaf in own.items()}
    state = trained.OPTIMIZER.init(params)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    given = {name: jax.device_put(x, rows) for name, x in batch.items()}

    def step() -> Any:
        nonlocal params, state
        params, state, loss = run(params, state, given)
        return params, loss

    return step
