"""Training states on disk: saved as they lie, restored on another number of devices.

What is saved is every leaf of the `TrainState` by its path, sharded state unpadded in
its description and divided in the file, so that no device ever holds the whole of it.
Restored is what has the same paths, shapes and dtypes, laid out like a state that was
made for the devices at hand.

A process that is killed while it saves leaves the last complete checkpoint to resume
from (`jdist._checkpoint`).
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jdist._checkpoint import (
    Closing,
    StepFolder,
    check_same,
    described,
    unworded,
    words,
)
from jdist._tree import path_of
from jdist.data_parallel.train_state import TrainState, check_state
from jdist.data_parallel.zero import Sharded


class Checkpoints(Closing):
    """A folder of training states, one for each step that was saved.

    Use it as a context manager, or `close` it: orbax holds threads.

    Args:
      folder: Made if it is not there.
      keep: How many of the last checkpoints stay; None for all.

    Raises:
      Unavailable: orbax-checkpoint is not installed.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from jdist import data_parallel, optim
      >>> opt = optim.sgd(lr=0.1)
      >>> step = data_parallel.train_step(lambda w, x: w * x, opt, mesh=2)
      >>> state, _ = step(step.init(jnp.array(3.0)), jnp.array([1.0, 2.0]))
      >>> with (
      ...     tempfile.TemporaryDirectory() as folder,
      ...     Checkpoints(folder) as saved,
      ... ):
      ...     saved.save(state)
      ...     again = saved.restore(step.init(jnp.array(0.0)))
      >>> int(again.step), float(again.params) == float(state.params)
      (1, True)

    References:
      `orbax.checkpoint.CheckpointManager`; `ZeroRedundancyOptimizer
      .consolidate_state_dict`, which gathers all of the state on one rank.
    """

    def __init__(self, folder: str | Path, *, keep: int | None = 3) -> None:
        """Opens the folder."""
        self._folder = StepFolder(folder, keep)

    def save(self, state: TrainState) -> None:
        """Writes the state under its step, and returns when it is on disk.

        Not before: the next step donates the buffers that are being read.

        Raises:
          ValueError: That step was saved before.
          TypeError: It is no state, but the parameters, for example.
        """
        check_state("save(state)", state)
        self._folder.check_new("save(state)", int(state.step))
        leaves = _leaves(state)
        saved = {path: words(_array(leaf)) for path, leaf in leaves.items()}
        self._folder.write(int(state.step), _by_item(saved), _description(state))

    def latest(self) -> int | None:
        """The last step that was saved completely, or None."""
        return max(self._folder.steps(), default=None)

    def restore(self, like: TrainState, step: int | None = None) -> TrainState:
        """Reads a state.

        Args:
          like: A state of the same parameters and optimizer for the devices at hand,
            from `TrainStep.init`; its values do not matter. What a communication hook
            keeps belongs to its number of replicas: it is restored only if `like` has
            one, which `TrainStep.start` makes.
          step: Which; None for the latest.

        Returns:
          The state, bit for bit, laid out as `like` is.

        Raises:
          ValueError: There is none; or it was saved from a state with other paths,
            shapes or dtypes, and the message names the first.
        """
        check_state("restore(like=...)", like)
        step = self._folder.chosen("restore", step)
        description = self._folder.description(step)
        if like.hook_state is None:
            description = _by_item(description)["arrays"]
        leaves = _leaves(like)
        check_same("restore", description, _description(like))
        wanted = {path: _placed(_array(leaf)) for path, leaf in leaves.items()}
        # Padding depends on the number of devices: orbax cuts it off or adds zeros.
        read = self._folder.read(step, _by_item(wanted))
        found = {path: x for part in read.values() for path, x in part.items()}
        structure: Any = jax.tree.structure(like, is_leaf=_is_sharded)
        return structure.unflatten(
            _refilled(found[path], leaf) for path, leaf in leaves.items()
        )

    def close(self) -> None:
        """Ends what orbax runs in the background."""
        self._folder.close()


def _is_sharded(leaf: Any) -> bool:
    return isinstance(leaf, Sharded)


def _leaves(state: TrainState) -> dict[str, Any]:
    """By path; sharded arrays under the path that they would have undivided."""
    pairs = jax.tree.leaves_with_path(state, is_leaf=_is_sharded)
    return {path_of(keys): leaf for keys, leaf in pairs}


def _by_item(leaves: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a hook keeps is an item of its own, which can be left unread."""
    items: dict[str, dict[str, Any]] = {"arrays": {}}
    for path, leaf in leaves.items():
        name = "hook_state" if path.startswith("hook_state/") else "arrays"
        items.setdefault(name, {})[path] = leaf
    return items


def _array(leaf: Any) -> jax.Array:
    return leaf.array if _is_sharded(leaf) else jnp.asarray(leaf)


def _placed(array: jax.Array) -> jax.ShapeDtypeStruct:
    saved = words(array)
    return jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=saved.sharding)


def _refilled(array: jax.Array, like: Any) -> Any:
    if _is_sharded(like):
        return Sharded(array, like.shape)
    found = unworded(array, like)
    return found if found is array else jax.device_put(found, like.sharding)


def _description(state: TrainState) -> dict[str, str]:
    return described(
        {
            path: jax.ShapeDtypeStruct(leaf.shape, _array(leaf).dtype)
            for path, leaf in _leaves(state).items()
        }
    )
