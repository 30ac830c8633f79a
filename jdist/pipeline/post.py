"""How values get from stage to stage: within a process at once, or by messages."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jdist._errors import requirement


class Parcel(NamedTuple):
    """What tells a value under way from all others of its step.

    Attributes:
      kind: "F" for a value, "B" for a cotangent, "G" for a replica's gradient, "L" for
        the loss, "S" for shapes, "N" for what a stage tells all, "T" for a gradient of
        what stages share.
      micro_batch: Number of the micro-batch; -1 for what belongs to none.
        For "G" of the bucket.
      name: Of the value, or of what is shared; for "G" "state" or nothing.
      stage: For which stage; the number of stages for the loss.
      sender: Rank of the worker that sent it.
    """

    kind: str
    micro_batch: int
    name: str
    stage: int
    sender: int


class Post(Protocol):
    """Brings values to the worker of the stage that takes them."""

    def put(self, parcel: Parcel, worker: int, value: Any) -> None:
        """Sends a value to a worker; does not wait until it is there."""

    def has(self, parcel: Parcel, worker: int) -> bool:
        """Whether it has arrived at that worker, which is one of this process."""

    def take(self, parcel: Parcel, worker: int) -> Any:
        """The value, which is not kept."""

    def wait(self, waiting: Mapping[Parcel, str]) -> None:
        """Returns once something has arrived that was not there before.

        Args:
          waiting: What is missing, and the action that waits for it.

        Raises:
          Exception: Nothing will arrive any more, or not in time.
        """

    def end(self, error: BaseException | None) -> None:
        """The step is over here, with an error or without."""


def receive(post: Post, parcel: Parcel, worker: int, purpose: str) -> Any:
    """Waits for a value and takes it.

    Raises: what `Post.wait` raises.
    """
    while not post.has(parcel, worker):
        post.wait({parcel: purpose})
    return post.take(parcel, worker)


class InProcessPost:
    """All workers are in this process: a value is there as soon as it is sent.

    Args:
      devices: Of each worker; None for wherever values are.
    """

    def __init__(self, devices: Sequence[jax.Device | None]) -> None:
        self._devices = devices
        self._arrived: dict[tuple[Parcel, int], Any] = {}

    def put(self, parcel: Parcel, worker: int, value: Any) -> None:
        """See `Post`."""
        self._arrived[parcel, worker] = moved(value, self._devices[worker])

    def has(self, parcel: Parcel, worker: int) -> bool:
        """See `Post`."""
        return (parcel, worker) in self._arrived

    def take(self, parcel: Parcel, worker: int) -> Any:
        """See `Post`."""
        return self._arrived.pop((parcel, worker))

    def wait(self, waiting: Mapping[Parcel, str]) -> None:
        """Nobody else is there to send anything.

        Raises:
          ValueError: Always.
        """
        rule = "must let every action have its inputs"
        got = f"workers that wait for each other at {', '.join(waiting.values())}"
        raise ValueError(requirement("Pipeline(schedule)", rule, got))

    def end(self, error: BaseException | None) -> None:
        """See `Post`."""
        self._arrived.clear()


def moved(value: Any, device: jax.Device | None) -> Any:
    """The arrays of a value on a device; None for wherever they are.

    `device_put` takes 30 us also where nothing is to be done.
    """
    leaves = jax.tree.leaves(value)
    if not any(_is_elsewhere(leaf, device) for leaf in leaves):
        return value
    return jax.tree.map(
        lambda leaf: (
            jax.device_put(leaf, device) if _is_elsewhere(leaf, device) else leaf
        ),
        value,
    )


def _is_elsewhere(leaf: Any, device: jax.Device | None) -> bool:
    if isinstance(leaf, jax.Array):
        return device is not None and leaf.device != device
    return isinstance(leaf, np.ndarray)
