"""Checkpoints: their abstract interface, and an orbax folder that holds the arrays.

orbax writes to a temporary folder and renames it once all data is there, so a process
that is killed while it writes leaves the last complete checkpoint.
"""

import ast
import contextlib
import importlib
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import jax
import jax.numpy as jnp

from jdist._errors import (
    Unavailable,
    check_at_least,
    check_number,
    check_type,
    extra,
    quoted,
    requirement,
)
from jdist._tree import first_difference

Arrays = Mapping[str, Mapping[str, Any]]
"""Arrays by name of their group, which can be left unread, and by name within it."""


State = TypeVar("State")
Found = TypeVar("Found")

_LOOKS = 9  # At a folder from which another process deletes.
_ONE_AT_A_TIME = threading.Lock()
"""orbax counts saves per process: two threads that save would wait for each other."""


class Closing(ABC):
    """A context manager that stops orbax's threads at the end of its block."""

    @abstractmethod
    def close(self) -> None:
        """Stops orbax's background threads."""

    def __enter__(self) -> Self:
        """Returns the object itself."""
        return self

    def __exit__(self, *details: object) -> None:
        """Closes the object."""
        self.close()


class Checkpoints(Closing, Generic[State]):
    """A folder of training states, one for each step that was saved.

    Use it as a context manager, or `close` it: orbax holds threads.
    """

    @abstractmethod
    def save(self, state: State) -> None:
        """Writes the state under its step, and returns when it is on disk.

        Raises:
          ValueError: That step, or one after it, was saved before.
          TypeError: It is no state, but the parameters, for example.
        """

    @abstractmethod
    def steps(self) -> list[int]:
        """The steps that were saved completely, in order."""

    def latest(self) -> int | None:
        """The last step that was saved completely, or None."""
        return max(self.steps(), default=None)

    @abstractmethod
    def restore(self, like: State, step: int | None = None) -> State:
        """Reads a state.

        Args:
          like: A state of the same structure for the devices at hand, from `init`; its
            values do not matter.
          step: Which; None for the latest.

        Returns:
          The state, bit for bit, laid out as `like` is.

        Raises:
          ValueError: There is none; or it was saved from another structure, and the
            message names the first path that differs.
        """


class StepFolder(Closing):
    """A folder with arrays and a description for each step that was saved.

    Use it as a context manager, or `close` it: orbax holds threads.

    Args:
      folder: Created if it does not exist.
      keep: Number of latest steps to keep; None for all.
      alone: Whether this process uses the folder without the other processes of
        `jax.distributed`; its one group of arrays must then be named "arrays".

    Raises:
      Unavailable: orbax-checkpoint is not installed.

    Example:
      >>> import tempfile, numpy as np
      >>> with tempfile.TemporaryDirectory() as folder, StepFolder(folder) as saved:
      ...     saved.write(3, {"all": {"w": np.ones(2)}}, {"made by": "me"})
      ...     print(saved.steps(), saved.read(3, {"all": {"w": np.empty(2)}}))
      [3] {'all': {'w': array([1., 1.])}}
    """

    def __init__(
        self, folder: str | Path, keep: int | None = None, *, alone: bool = False
    ) -> None:
        """Opens the folder."""
        self._orbax = _orbax()
        path = Path(folder).absolute()
        options, handlers = self._orbax.CheckpointManagerOptions(max_to_keep=keep), None
        if alone and jax.process_count() > 1:
            options, handlers = _alone(self._orbax, keep)
            path.mkdir(parents=True, exist_ok=True)
        self._manager = _undisturbed(
            lambda: self._orbax.CheckpointManager(
                path, options=options, item_handlers=handlers
            )
        )

    def steps(self) -> list[int]:
        """The steps that are complete on disk, in order."""
        _undisturbed(self._manager.reload)  # Another process may have written.
        return sorted(int(step) for step in self._manager.all_steps())

    def write(self, step: int, arrays: Arrays, description: Any) -> None:
        """Writes arrays and description; returns when both are on disk."""
        saved = self._orbax.args
        # Not those without arrays, which orbax refuses: a stage may have none.
        items = {
            n: saved.StandardSave(dict(part)) for n, part in arrays.items() if part
        }
        items["description"] = saved.JsonSave(description)
        # By force, or a step before the last one would be passed over in silence.
        with _ONE_AT_A_TIME:
            self._manager.save(step, args=saved.Composite(**items), force=True)
            self._manager.wait_until_finished()

    def description(self, step: int) -> Any:
        """Reads the description that was written beside the arrays."""
        items = {"description": self._orbax.args.JsonRestore()}
        composite = self._orbax.args.Composite(**items)
        return self._manager.restore(step, args=composite).description

    def read(self, step: int, like: Arrays) -> dict[str, dict[str, Any]]:
        """Reads the arrays that `like` names.

        Args:
          step: One of `steps`.
          like: Their shapes and dtypes, with the sharding that they get; NumPy arrays
            are read as NumPy arrays. Other shapes are cut off or filled with zeros.
        """
        # Not strict: the padding of sharded arrays depends on the number of devices.
        items = {
            name: self._orbax.args.StandardRestore(dict(part), strict=False)
            for name, part in like.items()
            if part
        }
        found: Mapping[str, dict[str, Any]] = {}
        if items:
            composite = self._orbax.args.Composite(**items)
            found = self._manager.restore(step, args=composite)
        return {name: found[name] if name in items else {} for name in like}

    def delete(self, step: int) -> None:
        """Deletes a step from disk."""
        self._manager.delete(step)

    def close(self) -> None:
        """Stops orbax's background threads."""
        self._manager.close()


def _alone(orbax: Any, keep: int | None) -> tuple[Any, dict[str, Any]]:
    """Options and handlers with which orbax does not wait for other processes."""
    # By default orbax waits for all processes at a save, and process 0 makes folders.
    here = jax.process_index()
    own = orbax.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"{here}"
    )
    # With such options it does not make the folder of all steps.
    options = orbax.CheckpointManagerOptions(
        max_to_keep=keep, multiprocessing_options=own, create=False
    )
    handlers = {
        "arrays": orbax.StandardCheckpointHandler(multiprocessing_options=own),
        "description": orbax.JsonCheckpointHandler(multiprocessing_options=own),
    }
    return options, handlers


def _undisturbed(look: Callable[[], Found]) -> Found:
    """Retries a read of the folder during which another process deleted a step."""
    for _ in range(_LOOKS):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return look()
    # Outside the loop, so that the last attempt raises its error.
    return look()


def _orbax() -> Any:
    # Imported on use: orbax is an optional dependency.
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise Unavailable(
            f"checkpoints need orbax-checkpoint: {extra('checkpoint')}"
        ) from error


def check_folder(argument: str, folder: Any) -> None:
    """Checks that a folder of checkpoints is a path, and no address of a store.

    Raises:
      TypeError: It is no path.
      ValueError: It is empty, or begins like `gs://bucket`.
    """
    check_type(argument, folder, (str, os.PathLike), "must be a path")
    path = os.fspath(folder)
    # `Path` would make of these the working directory, and a folder `gs:` in it.
    if not path or re.match(r"\w\w+:/", path):
        rule = "must be a folder that this machine can reach by a path"
        remedy = "The working directory is '.'."
        if path:
            remedy = "Mount the bucket, or copy a local folder to it."
        raise ValueError(requirement(argument, rule, quoted(path), remedy))


def check_keep(call: str, keep: int | None) -> None:
    """Checks that at least one checkpoint is kept; None keeps all.

    Raises:
      TypeError: `keep` is no integer.
      ValueError: `keep` is less than 1.
    """
    if keep is not None:
        check_at_least(f"{call}(keep=...)", keep, 1)


def check_after(call: str, steps: Sequence[int], step: int) -> None:
    """Checks that a step comes after those that were saved.

    Raises:
      TypeError: It is no integer.
      ValueError: It is below 0, or not above the last one that was saved.
    """
    check_at_least(call, step, 0)
    # The last step is the one to go on from, and must not be another run's.
    if steps and step <= steps[-1]:
        rule = f"must come after the last step that was saved, {steps[-1]}"
        remedy = "Continue from there, or use another folder."
        raise ValueError(requirement(call, rule, step, remedy))


def chosen(call: str, steps: list[int], step: int | None) -> int:
    """Returns the step, which must be one of those saved; the last one for None.

    Raises:
      TypeError: It is no integer.
      ValueError: It is none of them.
    """
    if step is None and steps:
        return steps[-1]
    argument = f"{call}(step=...)"
    if step is None or not steps:
        rule = "must find a step that was saved, and the folder has none"
        remedy = "Is it the right one? At the first start there is nothing to restore."
        raise ValueError(requirement(argument, rule, step, remedy))
    rule = f"must be a step that was saved, {steps}"
    check_number(argument, step, rule, lambda n: n in steps, whole=True)
    return int(step)


# --- descriptions of leaves on disk ---


def struct_of(description: str) -> jax.ShapeDtypeStruct:
    """Parses the dtype and shape of a leaf from its entry in `descriptions`.

    Example:
      >>> struct_of("bfloat16 of shape (3, 5)")
      ShapeDtypeStruct(shape=(3, 5), dtype=bfloat16)
    """
    dtype, _, shape = description.partition(" of shape ")
    # Not `eval`: the text is read from a file, which must not be able to run code.
    return jax.ShapeDtypeStruct(ast.literal_eval(shape), jnp.dtype(dtype))


def check_same(
    call: str, saved: Mapping[str, str], wanted: Mapping[str, str], where: str = ""
) -> None:
    """Checks that a tree has the paths, dtypes and shapes of the saved one.

    Raises:
      ValueError: With the first path that differs.
    """
    if found := first_difference(saved, wanted):
        path, there, here = found
        rule = f"must be like the state that was saved, {there} at {where}{path}"
        raise ValueError(requirement(f"{call}(like=...)", rule, here))
