"""The state of a distributed optimizer on disk, by orbax.

It is gathered first, so one process writes one folder: no shared file system is needed,
and a checkpoint is there as a whole or not at all. Arrays are saved under numbers, and
beside them a description says whose each is.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jdist._checkpoint import StepFolder

State = dict[str, dict[str, np.ndarray]]
"""Worker's name to path to numbers."""


def save(folder: str | Path, step: int, state: State, keep: int | None) -> None:
    """Writes a state under the number of its step; returns when it is on disk.

    Raises:
      Unavailable: orbax-checkpoint is not installed.
      ValueError: That step was saved before.
    """
    entries = [
        (worker, path, array)
        for worker, numbers in state.items()
        for path, array in numbers.items()
    ]
    # Numbered: names of workers and paths may hold what a file name must not.
    arrays = {str(i): array for i, (_, _, array) in enumerate(entries)}
    description = [[w, p, x.dtype.name, list(x.shape)] for w, p, x in entries]
    with StepFolder(folder, keep) as saved:
        saved.check_new("DistributedOptimizer.save(step)", step)
        saved.write(step, {"arrays": arrays}, {"leaves": description})


def restore(folder: str | Path, step: int | None) -> tuple[int, State]:
    """Reads a state: its step and itself.

    Raises:
      Unavailable: orbax-checkpoint is not installed.
      ValueError: There is none of that step, or none at all.
    """
    with StepFolder(folder) as saved:
        step = saved.chosen("DistributedOptimizer.restore", step)
        leaves = saved.description(step)["leaves"]
        wanted = {
            str(i): np.empty(shape, jnp.dtype(dtype))
            for i, (_, _, dtype, shape) in enumerate(leaves)
        }
        arrays = saved.read(step, {"arrays": wanted})["arrays"]
    state: State = {}
    for i, (worker, path, _, _) in enumerate(leaves):
        state.setdefault(worker, {})[path] = arrays[str(i)]
    return step, state
