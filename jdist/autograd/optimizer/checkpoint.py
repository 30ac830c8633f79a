"""The state of a distributed optimizer on disk, by orbax.

It is gathered first, so one process writes one folder: no shared file system is needed,
and a checkpoint is there as a whole or not at all. Arrays are saved under numbers, and
beside them a description says whose each is.
"""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdist._errors import Unavailable, requirement

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
    arrays = {str(i): array for i, (_, _, array) in enumerate(entries)}
    description = [[w, p, x.dtype.name, list(x.shape)] for w, p, x in entries]
    with _manager(folder, keep) as (orbax, manager):
        if step in manager.all_steps():
            rule = f"must be a step that is not among those saved, {_steps(manager)}"
            argument = "DistributedOptimizer.save(step)"
            raise ValueError(requirement(argument, rule, step))
        items = orbax.args.Composite(
            arrays=orbax.args.StandardSave(arrays),
            description=orbax.args.JsonSave({"leaves": description}),
        )
        manager.save(step, args=items)
        manager.wait_until_finished()


def restore(folder: str | Path, step: int | None) -> tuple[int, State]:
    """Reads a state: its step and itself.

    Raises:
      Unavailable: orbax-checkpoint is not installed.
      ValueError: There is none of that step, or none at all.
    """
    with _manager(folder, None) as (orbax, manager):
        step = manager.latest_step() if step is None else step
        if step is None or step not in manager.all_steps():
            rule = f"must be a step that was saved, {_steps(manager)}"
            argument = "DistributedOptimizer.restore(step)"
            raise ValueError(requirement(argument, rule, step))
        items = orbax.args.Composite(description=orbax.args.JsonRestore())
        leaves = manager.restore(step, args=items).description["leaves"]
        wanted = {
            str(i): np.empty(shape, jnp.dtype(dtype))
            for i, (_, _, dtype, shape) in enumerate(leaves)
        }
        items = orbax.args.Composite(arrays=orbax.args.StandardRestore(wanted))
        arrays = manager.restore(step, args=items).arrays
    state: State = {}
    for i, (worker, path, _, _) in enumerate(leaves):
        state.setdefault(worker, {})[path] = arrays[str(i)]
    return int(step), state


def _steps(manager: Any) -> list[int]:
    return sorted(manager.all_steps())


@contextlib.contextmanager
def _manager(folder: str | Path, keep: int | None) -> Iterator[tuple[Any, Any]]:
    try:
        orbax = importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise Unavailable(
            "checkpoints need orbax-checkpoint: pip install 'jdist[checkpoint]'"
        ) from error
    options = orbax.CheckpointManagerOptions(max_to_keep=keep)
    manager = orbax.CheckpointManager(Path(folder).absolute(), options=options)
    try:
        yield orbax, manager
    finally:
        manager.close()
