"""Training states on disk, restorable on another number of devices.

Every leaf of the `TrainState` is saved by its path. Sharded state is described without
padding and written in parts, so that no device ever holds the whole array. A saved
state can be restored if paths, shapes and dtypes are the same, and is laid out like a
state that was created for the present devices.

A process that is killed while it saves leaves the last complete checkpoint to resume
from (`jdist._checkpoint`).
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jdist._checkpoint import (
    Checkpoints,
    StepFolder,
    check_after,
    check_folder,
    check_keep,
    check_same,
    chosen,
    struct_of,
)
from jdist._errors import value_error
from jdist._tree import PyTree, check_state, descriptions, named_leaves, unworded, words
from jdist.data_parallel.step.train_state import TrainState
from jdist.data_parallel.step.zero import Sharded

_HOOK_STATE = "hook_state"
"""Name of the hook's state, as a field of the training state and as an item on disk."""


class TrainCheckpoints(Checkpoints[TrainState]):
    """A folder of training states, one for each step that was saved.

    Use it as a context manager, or `close` it: orbax holds threads.

    Args:
      folder: Created if it does not exist.
      keep: Number of latest checkpoints to keep; None for all.

    Raises:
      Unavailable: orbax-checkpoint is not installed.
      ValueError: `keep` is less than 1; or `folder` is empty, or an address of a store.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from jdist import data_parallel, optim
      >>> opt = optim.sgd(lr=0.1)
      >>> step = data_parallel.train_step(lambda w, x: w * x, opt, replicas=2)
      >>> state, _ = step(step.init(jnp.array(3.0)), jnp.array([1.0, 2.0]))
      >>> with (
      ...     tempfile.TemporaryDirectory() as folder,
      ...     TrainCheckpoints(folder) as saved,
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
        check_folder("TrainCheckpoints(folder)", folder)
        check_keep("TrainCheckpoints", keep)
        self._folder = StepFolder(folder, keep)

    def save(self, state: TrainState) -> None:
        """Writes the state under its step, and returns when it is on disk.

        Raises:
          ValueError: That step, or one after it, was saved before.
          TypeError: It is no training state, but parameters, for example.
        """
        check_state("save(state)", state, TrainState, "step")
        check_after("save(state)", self.steps(), int(state.step))
        leaves = _leaves(state)
        saved = {path: words(_array(leaf)) for path, leaf in leaves.items()}
        # Waits for the disk: the next step donates the buffers that are being read.
        self._folder.write(int(state.step), _by_item(saved), _description(state))

    def steps(self) -> list[int]:
        """The steps that were saved completely, in order."""
        return self._folder.steps()

    def restore(
        self, like: TrainState, step: int | None = None, *, hook_state: bool = True
    ) -> TrainState:
        """Reads a state.

        Args:
          like: A state of the same parameters and optimizer for the devices at hand,
            from `TrainStep.init`; its values do not matter.
          step: The step to restore; None for the latest.
          hook_state: Whether to restore the state of a communication hook. It depends
            on the number of replicas: with another number it has to be left out, and
            the hook starts from its first state.

        Returns:
          The state, bit for bit, laid out as `like` is.

        Raises:
          ValueError: There is none; or it was saved from a state with other paths,
            shapes or dtypes, and the message names the first; or a hook's state was
            saved of another number of replicas.
        """
        check_state("restore(like=...)", like, TrainState, "step")
        step = chosen("restore", self.steps(), step)
        description = self._folder.description(step)
        if not hook_state:
            description = _by_item(description)["arrays"]
            like = like._replace(hook_state=None)
        elif like.hook_state is None:
            kept = _by_item(description).get(_HOOK_STATE)
            like = like._replace(hook_state=kept and _kept(kept, like))
        leaves = _leaves(like)
        # Checked before reading: the errors of orbax do not name a leaf.
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
        """Stops orbax's background threads."""
        self._folder.close()


def _is_sharded(leaf: object) -> bool:
    return isinstance(leaf, Sharded)


def _leaves(state: TrainState) -> dict[str, Any]:
    """Leaves by path; a sharded array has the path that it has when undivided."""
    return named_leaves(state, is_leaf=_is_sharded)


def _by_item(leaves: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Groups leaves by item on disk."""
    # A hook's state is an item of its own, so that it can be left unread.
    items: dict[str, dict[str, Any]] = {"arrays": {}}
    for path, leaf in leaves.items():
        name = _HOOK_STATE if path.startswith(f"{_HOOK_STATE}/") else "arrays"
        items.setdefault(name, {})[path] = leaf
    return items


def _kept(description: dict[str, str], like: TrainState) -> dict[str, Any]:
    """Shapes and shardings of a saved hook state, by path within it."""
    place, found = like.step.sharding, {}
    if isinstance(place, NamedSharding):
        # Hooks are refused on a mesh with axes besides that of the replicas.
        place = NamedSharding(place.mesh, PartitionSpec(*place.mesh.axis_names))
    for path, text in description.items():
        if text.startswith("key<"):
            rule = "must have a hook_state where a hook keeps PRNG keys"
            remedy = "Make it: `like._replace(hook_state=step.start(like, *shards))`."
            got = f"none, for {text} at {path}"
            raise value_error("restore(like=...)", rule, got, remedy)
        leaf = struct_of(text)
        rows = leaf.shape[0]
        if isinstance(place, NamedSharding) and rows != place.mesh.size:
            rule = f"must be for {rows} replicas, for which the hook's state was saved"
            remedy = (
                "To omit it, so that the hook starts again: "
                "`restore(..., hook_state=False)`."
            )
            got = f"one for {place.mesh.size}"
            raise value_error("restore(like=...)", rule, got, remedy)
        name = path.removeprefix(f"{_HOOK_STATE}/")
        found[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    return found


def _array(leaf: Any) -> PyTree:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return leaf.array if _is_sharded(leaf) else jnp.asarray(leaf)


def _placed(array: Any) -> jax.ShapeDtypeStruct:
    saved = words(array)
    return jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=saved.sharding)


def _refilled(array: jax.Array, like: PyTree) -> PyTree:
    if _is_sharded(like):
        return Sharded(array, like.shape)
    found = unworded(array, like)
    # Keys are restored as integers, whose sharding `like` does not determine.
    return found if found is array else jax.device_put(found, like.sharding)


def _description(state: TrainState) -> dict[str, str]:
    return descriptions(
        {
            # `Sharded.shape` is without padding: the same for any number of devices.
            path: jax.ShapeDtypeStruct(leaf.shape, _array(leaf).dtype)
            for path, leaf in _leaves(state).items()
        }
    )
