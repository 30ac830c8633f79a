"""Training states on disk: saved as they lie, restored on another number of devices.

What is saved is every leaf of the `TrainState` by its path, sharded state unpadded in
its description and divided in the file, so that no device ever holds the whole of it.
Restored is what has the same paths, shapes and dtypes, laid out like a state that was
made for the devices at hand.

orbax writes into a folder of another name and renames it when all is there: a process
that is killed while it saves leaves the last complete checkpoint to resume from.
"""

import importlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp

from jdist._errors import Unavailable, requirement
from jdist._tree import path_of
from jdist.data_parallel.train_state import TrainState
from jdist.data_parallel.zero import Sharded


class Checkpoints:
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
        self._orbax = _orbax()
        options = self._orbax.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = self._orbax.CheckpointManager(
            Path(folder).absolute(), options=options
        )

    def save(self, state: TrainState) -> None:
        """Writes the state under its step, and returns when it is on disk.

        Not before: the next step donates the buffers that are being read.
        """
        arguments = self._orbax.args
        leaves = {path: _words(_array(x)) for path, x in _leaves(state).items()}
        items = {
            name: arguments.StandardSave(part)
            for name, part in _by_item(leaves).items()
        }
        items["description"] = arguments.JsonSave(_description(state))
        self._manager.save(int(state.step), args=arguments.Composite(**items))
        self._manager.wait_until_finished()

    def latest(self) -> int | None:
        """The last step that was saved completely, or None."""
        found = self._manager.latest_step()
        return None if found is None else int(found)

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
        step = self.latest() if step is None else step
        if step is None or step not in self._manager.all_steps():
            rule = f"must be a step that was saved, {self._manager.all_steps()}"
            raise ValueError(requirement("restore(step=...)", rule, step))
        arguments = self._orbax.args
        items = {"description": arguments.JsonRestore()}
        saved = self._manager.restore(step, args=arguments.Composite(**items))
        description = saved.description
        if like.hook_state is None:
            description = _by_item(description)["arrays"]
        _check_same(description, _description(like))
        wanted = {path: _placed(_array(leaf)) for path, leaf in _leaves(like).items()}
        # Padding depends on the number of devices: orbax cuts it off or adds zeros.
        items = {
            name: arguments.StandardRestore(part, strict=False)
            for name, part in _by_item(wanted).items()
        }
        read = self._manager.restore(step, args=arguments.Composite(**items))
        found = {path: x for name in items for path, x in read[name].items()}
        structure: Any = jax.tree.structure(like, is_leaf=_is_sharded)
        return structure.unflatten(
            _refilled(found[path], leaf) for path, leaf in _leaves(like).items()
        )

    def close(self) -> None:
        """Ends what orbax runs in the background."""
        self._manager.close()

    def __enter__(self) -> Self:
        """The object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()


def _orbax() -> Any:
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise Unavailable(
            "checkpoints need orbax-checkpoint: pip install 'jdist[checkpoint]'"
        ) from error


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


def _is_key(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def _words(array: jax.Array) -> jax.Array:
    """Keys are saved as their words."""
    return jax.random.key_data(array) if _is_key(array) else array


def _placed(array: jax.Array) -> jax.ShapeDtypeStruct:
    words = _words(array)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=words.sharding)


def _refilled(array: jax.Array, like: Any) -> Any:
    if _is_sharded(like):
        return Sharded(array, like.shape)
    if _is_key(like):
        key = jax.random.wrap_key_data(array, impl=jax.random.key_impl(like))
        return jax.device_put(key, like.sharding)
    return array


def _description(state: TrainState) -> dict[str, str]:
    return {
        path: f"{_array(leaf).dtype} of shape {tuple(leaf.shape)}"
        for path, leaf in _leaves(state).items()
    }


def _check_same(saved: dict[str, str], wanted: dict[str, str]) -> None:
    for path in sorted(saved.keys() | wanted.keys()):
        there, here = (d.get(path, "no leaf") for d in (saved, wanted))
        if there != here:
            rule = f"must be like the state that was saved, {there} at {path}"
            raise ValueError(requirement("restore(like=...)", rule, here))
