"""What does a pipeline cost as one SPMD program, beside a process per stage?

The processes, stages and batch are those of `pipeline`. The process executor sends
values by rpc while it computes; the SPMD program exchanges them at the clock ticks of
its table, by gloo. Both pairs are alive together and take turns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks import _pipeline_jdist
from benchmarks import _pipeline_models as models
from benchmarks._goals import Goal, ratio
from benchmarks._harness import Case
from benchmarks._pair import Job, Pair
from benchmarks.pipeline import SETTINGS, race
from jdist import data_parallel, pipeline

WORKERS, PROGRAM = "process executor", "one program"
KINDS = (models.ONE_F_ONE_B, models.GPIPE, models.ZERO_BUBBLE)
GOAL = 1.15


def measure() -> list[Case]:
    """A case for each number of micro-batches."""
    with (
        Pair(_pipeline_jdist.prepare_one, SETTINGS) as workers,
        Pair(prepare, SETTINGS) as program,
    ):
        found = race({WORKERS: workers, PROGRAM: program})
    cases = []
    for m in models.MICRO_BATCHES:
        shown = [(WORKERS, models.ONE_F_ONE_B), *((PROGRAM, kind) for kind in KINDS)]
        timings = {
            f"{name}, {kind}": found[name, models.piped(kind, m)]
            for name, kind in shown
        }
        executor, *programs = timings.values()
        best = min(programs, key=lambda found: found.median)
        goal = Goal("of the process executor, the best", ratio(best, executor), GOAL)
        cases.append(Case(f"m = {m}", timings, goals=[goal]))
    return cases


@contextmanager
def prepare(rank: int) -> Iterator[dict[str, Job]]:
    """The jobs of a process with one device of the mesh."""
    with data_parallel.process_group(axis="stage") as mesh:
        places = pipeline.OneProgram(mesh)
        yield _pipeline_jdist.piped(models.SMALL, KINDS, places, _barrier(mesh))


def _barrier(mesh: Mesh) -> Callable[[], Any]:
    """A barrier of all processes: a gradient that needs all of them."""
    batch, weights = data_parallel.shard_batch(
        np.ones((1, 1), np.float32), mesh, rows=1, data_axis="stage"
    )
    summed = data_parallel.value_and_grad(lambda w, x: x @ w, mesh, data_axis="stage")
    w = np.ones(1, np.float32)
    return lambda: jax.block_until_ready(summed(w, batch, weights))
