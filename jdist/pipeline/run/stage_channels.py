"""A call of a pipeline's workers: how values get from stage to stage, and how it ends.

Within a process values are there at once, between processes they are messages. See
`jdist.pipeline.run.worker_channels` for the protocol.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jdist._errors import requirement
from jdist.pipeline.run.micro_batch import MicroBatch


class MessageTag(NamedTuple):
    """What tells a value under way from all others of its step.

    Attributes:
      kind: "F" for a value, "B" for a cotangent ("f" and "b" for their shapes, before
        the first step), "G" for a replica's gradient, "S" for
        shapes, "T" for a gradient of what stages share, "N" for the norm of a stage's
        gradient, "E" for the number of micro-batches at which a worker's batches ended;
        "V" for the vote of a worker that has done its part, "D" for the decision that
        all have.
      micro_batch: Number of the micro-batch; -1 for what belongs to none.
        For "G" of the bucket; in an epoch, for "G", "T" and "N", of the update.
      name: Of the value, or of what is shared; for "G" "state" or nothing.
      stage: For which stage; the number of stages for the loss.
      sender: Rank of the worker that sent it.
    """

    kind: str
    micro_batch: int
    name: str
    stage: int
    sender: int


class ValueChannels(Protocol):
    """Bring values to the workers that take them.

    Attributes:
      number: Of the call that they belong to, counted alike by all workers.
    """

    number: int

    def put(self, tag: MessageTag, worker: int, value: Any) -> None:
        """Sends a value to a worker; does not wait until it is there."""

    def has(self, tag: MessageTag, worker: int) -> bool:
        """Whether it has arrived at that worker, which is one of this process."""

    def take(self, tag: MessageTag, worker: int) -> Any:
        """The value, which is not kept."""

    def wait(self, waiting: Mapping[MessageTag, str]) -> None:
        """Returns once something has arrived that was not there before.

        Args:
          waiting: What is missing, and the action that waits for it.

        Raises:
          Exception: Nothing will arrive any more, or not in time.
        """


class StageChannels(ValueChannels, Protocol):
    """One call that all workers make: its values, and whether it succeeds.

    Attributes:
      failed: Whether it has ended with an error.
    """

    failed: bool

    def identify(
        self,
        step: int | None = None,
        settings: Mapping[str, Any] | None = None,
        batches: Iterable[Mapping[str, Any]] = (),
        parts: Sequence[MicroBatch] = (),
        key: Any = None,
    ) -> None:
        """Says what the call is given, once that is checked and before values are sent.

        Args:
          step: Of the training state.
          settings: Numbers and texts that concern all workers, by name.
          batches: See `sized`, as for the other arguments.
          parts: The micro-batches.
          key: The PRNG key.

        Raises:
          Exception: Another worker has refused the call, or was given something else.
        """

    def agree(self, value: Any, computed: Any = None) -> list[Any]:
        """Ends the call on all workers, or on none.

        Args:
          value: What this process has to tell all others.
          computed: Arrays that must be there first: what fails in them fails the call.

        Returns:
          What every process told, once all have done their part.

        Raises:
          Exception: One of them has not; then this raises on all of them.
        """

    def end(self, error: BaseException | None) -> None:
        """The call is over here; if it failed before `agree`, the others are told."""


Opened = Callable[[str], contextlib.AbstractContextManager[StageChannels]]
"""Begins a call of that kind. What is raised inside is raised on all workers, until
they have agreed."""


def receive(channels: ValueChannels, tag: MessageTag, worker: int, purpose: str) -> Any:
    """Waits for a value and takes it.

    Raises: what `ValueChannels.wait` raises.
    """
    while not channels.has(tag, worker):
        channels.wait({tag: purpose})
    return channels.take(tag, worker)


class InProcessChannels:
    """All workers are in this process: a value is there as soon as it is sent.

    Args:
      devices: Of each worker; None for wherever values are.
      number: See `StageChannels`.
    """

    def __init__(
        self, devices: Sequence[jax.Device | None] = (), number: int = 0
    ) -> None:
        self.number = number
        self.failed = False
        self._devices = devices
        self._arrived: dict[tuple[MessageTag, int], Any] = {}

    def identify(
        self,
        step: int | None = None,
        settings: Mapping[str, Any] | None = None,
        batches: Iterable[Mapping[str, Any]] = (),
        parts: Sequence[MicroBatch] = (),
        key: Any = None,
    ) -> None:
        """See `StageChannels`: there is no other process to compare with."""

    def put(self, tag: MessageTag, worker: int, value: Any) -> None:
        """See `StageChannels`."""
        self._arrived[tag, worker] = moved(value, self._devices[worker])

    def has(self, tag: MessageTag, worker: int) -> bool:
        """See `StageChannels`."""
        return (tag, worker) in self._arrived

    def take(self, tag: MessageTag, worker: int) -> Any:
        """See `StageChannels`."""
        return self._arrived.pop((tag, worker))

    def wait(self, waiting: Mapping[MessageTag, str]) -> None:
        """No other process is there to send anything.

        Raises:
          ValueError: Always.
        """
        rule = "must let every action have its inputs"
        got = f"workers that wait for each other at {', '.join(waiting.values())}"
        raise ValueError(requirement("Pipeline(schedule)", rule, got))

    def agree(self, value: Any, computed: Any = None) -> list[Any]:
        """See `StageChannels`; does not wait for arrays, which one process need not."""
        return [value]

    def end(self, error: BaseException | None) -> None:
        """See `StageChannels`."""
        self.failed = error is not None
        self._arrived.clear()


@contextlib.contextmanager
def ending(channels: StageChannels) -> Iterator[StageChannels]:
    """Ends a call with the error that the block raises, or without."""
    try:
        yield channels
    except BaseException as error:
        channels.end(error)
        raise
    channels.end(None)


def alone(kind: str) -> contextlib.AbstractContextManager[StageChannels]:
    """An `Opened` for a process that shares its calls with no other."""
    return ending(InProcessChannels())


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
        # Not committed, it would become so in the first step, and compile the second.
        return device is not None and not (leaf.committed and leaf.device == device)
    return isinstance(leaf, np.ndarray)
