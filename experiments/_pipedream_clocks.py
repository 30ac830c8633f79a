"""Seconds of an epoch, by method: simulated, or measured in a pinned process per stage.

Stages of one process share its cores, so that their timing shows nothing. If there is a
core for each stage, every stage gets its own process on it, and epochs are timed;
otherwise passes are timed one by one, and the simulator composes an epoch of them.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments._pair import can_pin
from experiments._pipedream_runs import (
    BATCH,
    CONTROL,
    METHODS,
    Network,
    batches_of,
)
from jdist import pipeline, rpc

LIMIT = 900.0
"""Seconds that the processes may take, including compilation."""
PATIENCE = 300.0
"""Seconds for which a process waits while another one compiles."""


def why_not(stages: int) -> str:
    """The reason why epochs cannot be measured here; empty if they can."""
    if jax.default_backend() != "cpu":
        return "processes are pinned to cores only where stages compute on CPU"
    return can_pin(stages)


# --- measured ---

TIMED = tuple(name for name in METHODS if name != CONTROL)
"""All methods but the control, which runs in one process only."""


def measured(
    network: Network, seed: int, names: Sequence[str] = TIMED, rounds: int = 5
) -> dict[str, list[float]]:
    """Seconds of the slowest stage in each timed epoch; the methods take turns."""
    given = network, seed, names, rounds
    found = rpc.spawn(_work, given, nprocs=network.stages, pin=1, timeout=LIMIT)
    return {name: np.max([own[name] for own in found], 0).tolist() for name in names}


def _work(
    rank: int, network: Network, seed: int, names: Sequence[str], rounds: int
) -> dict[str, list[float]]:
    """The process of one stage; returns seconds of each epoch by method."""
    rpc.init_rpc(f"stage{rank}", allow=("experiments",))
    rpc.set_rpc_timeout(PATIENCE)
    where = pipeline.Workers([f"stage{j}" for j in range(network.stages)])
    made = network.made()
    params = network.parameters(made, seed)
    (batches,), _ = batches_of(seed, 1)
    pipes = {
        name: METHODS[name].pipe(made.stages, network.rate, where) for name in names
    }
    states = {name: pipe.init(params) for name, pipe in pipes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(1 + rounds):
        for name, pipe in pipes.items():
            rpc.barrier(timeout=PATIENCE)
            start = time.perf_counter()
            states[name] = METHODS[name].epoch(pipe, states[name], batches)
            jax.block_until_ready(states[name].params)
            if turn:  # the first one compiles
                seconds[name].append(time.perf_counter() - start)
    rpc.shutdown()
    return seconds


# --- simulated ---


def simulated(network: Network) -> dict[str, float]:
    """Seconds of an epoch, from passes that are timed here, with free messages."""
    made = network.made()
    params = network.parameters(made, 0)
    costs: dict[int, pipeline.Costs] = {}
    found = {}
    for name, method in METHODS.items():
        rows = BATCH // method.parts(network.stages)
        if rows not in costs:
            costs[rows] = _costs(made, params, rows)
        found[name] = method.simulated(network.stages, costs[rows])
    return found


def _costs(made: Any, params: Any, rows: int) -> pipeline.Costs:
    """The measured times of each stage's passes for `rows` images."""
    modules = [
        pipeline.Module(f"stage{j}", stage.fn, own)
        for j, (stage, own) in enumerate(zip(made.stages, params, strict=True))
    ]
    images = jnp.asarray(batches_of(0, 1)[0][0][0]["x"][:rows])
    profile = pipeline.profile(modules, {"x": images}, repeats=20)
    layers = [profile[module.name] for module in modules]
    return pipeline.Costs(
        forward=[layer.forward for layer in layers],
        backward=[layer.backward for layer in layers],
    )
