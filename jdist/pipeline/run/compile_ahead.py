"""A pipeline's programs from shapes: compiled before its first micro-batch flows.

A stage that compiles when it is first called does so once the first micro-batch gets to
it, so that the stages of several processes would compile one after another. A rehearsal
walks through the first actions of the schedule on shapes alone: stages pass on shapes
in place of values, and when every worker knows what its stages will be given, all of
them compile at the same time. The same rehearsal finds the programs of devices that are
not here.

No function of the user's runs. Made-up values would compile the same programs, but
they could call a user's callbacks, or keep a loop that waits for convergence from ever
ending.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import jax

from jdist._compat import Ahead
from jdist._tree import PyTree
from jdist.pipeline.run.stage_channels import (
    InProcessChannels,
    MessageTag,
    Places,
    ValueChannels,
)
from jdist.pipeline.run.stage_run import StageRun, join
from jdist.pipeline.run.step import ListedActions, Step, StepInputs
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.stages.array_spec import ArraySpec
from jdist.pipeline.stages.place import StageMesh, device_here, place_of, received
from jdist.reduction import Partial
from jdist.segment.internal import Invoke


def compile_ahead(given: StepInputs) -> None:
    """Compiles what the workers of this process will call in a step.

    Every process of the pipeline calls it, because shapes travel between them. A
    program that turns out not to match is compiled when it is called.

    Args:
      given: What the step will work on; nothing of it changes.
    """
    channels = _ShapeChannels(given.channels, given.places)
    ahead = _rehearsed(given._replace(channels=channels), Ahead())
    if ahead.undecided:
        # No worker waits for shapes of this one any more: its meshes may compile now,
        # which shows where their results lie.
        again = given._replace(channels=channels.replayed())
        ahead = _rehearsed(again, Ahead(places=True))
    # Last: no stage waits for shapes while another one compiles.
    ahead.compile()


def _rehearsed(given: StepInputs, ahead: Ahead) -> Ahead:
    rehearse(given, lambda label: ahead)
    return ahead


def rehearse(
    given: StepInputs, named: Callable[[str], Invoke]
) -> dict[tuple[int, int], StageRun]:
    """Traces what the workers of this process will call.

    Args:
      given: What the step will work on, of which any array may be a shape.
      named: By what is called, such as "stage 0" or "loss", how it is called instead.

    Returns:
      The stages as they are left, with shapes for their gradients.
    """
    runs = {
        place: run.through(named(f"stage {place[1]}"))
        for place, run in given.runs.items()
    }
    shown = given._replace(runs=runs, loss=given.loss.through(named("loss")))
    schedule = given.places.schedule
    sizes = [len(given.parts[i].weights) for i in range(schedule.micro_batches)]
    stand_ins = representatives(schedule, sizes)
    _Rehearsal(shown, named("sum"), frozenset(stand_ins)).run()
    # Without a backward pass there is no gradient to finish.
    for (worker, stage), run in () if schedule.forward_only else runs.items():
        # Joined weight gradients are one program for all micro-batches together.
        own = schedule.owner[stage] == worker
        run.finish_like([stand_ins[i] for i in own.nonzero()[0]])
    return runs


@final
class _Rehearsal(Step):
    """A step whose stages and loss are given shapes and return shapes.

    Args:
      given: What it works on.
      invoke: Traces compiled functions.
      chosen: The micro-batches that it goes through.
    """

    def __init__(
        self, given: StepInputs, invoke: Invoke, chosen: frozenset[int]
    ) -> None:
        super().__init__(given, invoke)
        self._chosen = chosen

    def _actions(self, worker: int) -> ListedActions:
        actions = self._places.actions[worker]
        return ListedActions([a for a in actions if a.micro_batch in self._chosen])

    def _passed_back(self, worker: int, stage: int) -> None:
        """No gradient is finished, and none exchanged."""

    def _add_loss(self, worker: int, micro: int, found: Partial, aux: PyTree) -> None:
        self._invoke(join, found, found, self._loss.kind)

    def _note(self, *transfer: object) -> None:
        """No value is transferred."""


def representatives(schedule: Schedule, sizes: Sequence[int]) -> list[int]:
    """For each micro-batch the first one that needs the same programs everywhere.

    Args:
      schedule: Which worker runs which micro-batch, and which passes are split.
      sizes: The number of examples of each micro-batch.

    Example:
      >>> from jdist.pipeline import one_f_one_b
      >>> representatives(one_f_one_b(2, 5), [4, 4, 4, 3, 3])
      [0, 0, 0, 3, 3]
    """
    first: dict[Any, int] = {}
    found = []
    for micro, size in enumerate(sizes):
        # Another size, device or split is another program.
        columns = schedule.owner[:, micro], schedule.split[:, micro]
        case = (size, *(tuple(column.tolist()) for column in columns))
        found.append(first.setdefault(case, micro))
    return found


class _Shape(NamedTuple):
    """The shape of an array in a message to another process."""

    shape: tuple[int, ...]
    weak_type: bool
    empty: jax.Array
    """An array without elements, of the same dtype and place: it arrives as the array
    will, on the same device, committed to it or not."""


class _ShapeChannels:
    """Channels that bring shapes, beside the values of the same call.

    Args:
      channels: Those of the call.
      places: The worker of each stage.
    """

    def __init__(self, channels: ValueChannels, places: Places) -> None:
        self.number = channels.number
        self._channels = channels
        self._places = places
        self._received: list[tuple[MessageTag, int, PyTree]] = []

    def put(self, tag: MessageTag, worker: int, value: PyTree) -> None:
        """See `ValueChannels`."""
        if worker not in self._places.own:  # within a process shapes stay as they are
            place = self._places.devices[self._places.own[0]]
            device = device_here(place) if isinstance(place, StageMesh) else None
            value = jax.tree.map(partial(_packed, device=device), value)
        self._channels.put(_tag_of_shapes(tag), worker, value)

    def has(self, tag: MessageTag, worker: int) -> bool:
        """See `ValueChannels`."""
        return self._channels.has(_tag_of_shapes(tag), worker)

    def take(self, tag: MessageTag, worker: int) -> PyTree:
        """See `ValueChannels`."""
        value = jax.tree.map(
            lambda x: _unpacked(x) if isinstance(x, _Shape) else x,
            self._channels.take(_tag_of_shapes(tag), worker),
            is_leaf=lambda x: isinstance(x, _Shape),
        )
        if tag.sender not in self._places.own:
            value = received(value, self._places.devices[worker])
            self._received.append((tag, worker, value))
        return value

    def wait(self, waiting: Mapping[MessageTag, str]) -> None:
        """See `ValueChannels`."""
        self._channels.wait({_tag_of_shapes(t): why for t, why in waiting.items()})

    def replayed(self) -> ValueChannels:
        """Channels in which all that came from other processes is there already."""
        channels = InProcessChannels(self._places.devices, self.number)
        for message in self._received:
            channels.put(*message)
        return channels


def _tag_of_shapes(tag: MessageTag) -> MessageTag:
    # Values of the same step have tags with capital letters.
    return tag._replace(kind=tag.kind.lower())


def _packed(leaf: PyTree, device: jax.Device | None) -> PyTree:
    """A shape for a message.

    Args:
      leaf: The shape; anything else is passed on.
      device: One of the worker's: a result whose place is not known lies there.
    """
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    # What was sharded arrives on the one device of its worker.
    if leaf.sharding is not None:
        device = device_here(place_of(leaf))
    empty = ArraySpec((0,), str(leaf.dtype)).blank(device)
    return _Shape(leaf.shape, leaf.weak_type, empty)


def _unpacked(told: _Shape) -> jax.ShapeDtypeStruct:
    place = told.empty.sharding if told.empty.committed else None
    return jax.ShapeDtypeStruct(
        tuple(told.shape), told.empty.dtype, sharding=place, weak_type=told.weak_type
    )
