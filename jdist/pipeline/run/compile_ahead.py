"""Checks and ahead-of-time compilation of a pipeline's programs, from shapes.

Before its first step a pipeline rehearses: it runs the first actions of the schedule on
shapes alone, and stages send shapes in place of values. So an error names the stage and
its values, on all workers.

A stage that compiles at its first call does so when the first micro-batch reaches it,
so that the stages of several processes compile one after another. After the rehearsal
every worker knows the arguments of its stages, and all of them compile at the same
time. The same rehearsal finds the programs for devices that are not attached.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import jax

from jdist._compat import Ahead
from jdist._tree import PyTree, is_shape
from jdist.pipeline.run.shapes import outputs_of
from jdist.pipeline.run.stage_channels import (
    InProcessChannels,
    MessageTag,
    Places,
    ValueChannels,
)
from jdist.pipeline.run.stage_run import StageRun, join
from jdist.pipeline.run.step import Step, StepInputs
from jdist.pipeline.schedule.actions import Action
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.stages.array_spec import blank
from jdist.pipeline.stages.place import StageMesh, device_here, place_of, received
from jdist.reduction import Partial
from jdist.segment.internal import Invoke


def compile_ahead(given: StepInputs, compiled: bool) -> tuple[str, ...]:
    """Checks the values of a step, and compiles the programs that it will call here.

    Every process of the pipeline calls it, because shapes travel between them. A
    program that does not match the later call is compiled at that call.

    Args:
      given: The inputs of the step, which are not changed.
      compiled: Whether programs are compiled now; else each is at its first call.

    Returns:
      The entries of the batch that the loss reads; empty where it does not run.

    Raises:
      ValueError: A value is neither an output of a stage nor in the batch; a stage
        cannot take its inputs, or returns another number of values than it names.
    """
    if not compiled:
        return rehearse(given, lambda label: _shapes_of_results)[1]
    channels = _ShapeChannels(given.channels, given.routes.places)
    ahead = Ahead()
    _, read = rehearse(given._replace(channels=channels), lambda label: ahead)
    if ahead.undecided:
        # On a mesh the compiler chooses the sharding of results, which later programs
        # take. Compiled in a second rehearsal, from the shapes that have arrived: in
        # the first one other workers would wait for this compilation.
        ahead = Ahead(places=True)
        rehearse(given._replace(channels=channels.replayed()), lambda label: ahead)
    # Last, so that no worker waits for shapes while another one compiles.
    ahead.compile()
    return read


def _shapes_of_results(function: Any, *arguments: PyTree) -> PyTree:
    # Arguments may be traced: a pipeline without devices may be inside `jax.jit`.
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type),
        function.trace(*arguments).out_info,
    )


def rehearse(
    given: StepInputs, named: Callable[[str], Invoke]
) -> tuple[dict[tuple[int, int], StageRun], tuple[str, ...]]:
    """Traces the programs that the workers of this process will call.

    Args:
      given: The inputs of the step, of which any array may be a shape.
      named: Returns the function that traces calls under a label, such as "stage 0"
        or "loss".

    Returns:
      The stages after the rehearsal, with shapes for their gradients; and the entries
      of the batch that the loss reads.
    """
    # Traced and not run on made-up values: these could call a user's callbacks, never
    # end a loop that waits for convergence, and would need a micro-batch's memory.
    runs = {
        place: run.through(named(f"stage {place[1]}"))
        for place, run in given.runs.items()
    }
    shown = given._replace(runs=runs, loss=given.loss.through(named("loss")))
    schedule = given.routes.places.schedule
    sizes = [len(given.parts[i].weights) for i in range(schedule.micro_batches)]
    stand_ins = frozenset(representatives(schedule, sizes))
    rehearsal = _Rehearsal(shown, named("sum"), stand_ins)
    rehearsal.run()
    return runs, rehearsal.read


@final
class _Rehearsal(Step):
    """A step whose stages and loss take and return shapes.

    The sum over replicas is rehearsed apart.

    Args:
      given: The inputs of the step.
      invoke: Traces compiled functions.
      chosen: The micro-batches that it rehearses.
    """

    def __init__(
        self, given: StepInputs, invoke: Invoke, chosen: frozenset[int]
    ) -> None:
        super().__init__(given, invoke)
        self._chosen = chosen

    def _actions(self, worker: int) -> Iterable[Action]:
        return (a for a in super()._actions(worker) if a.micro_batch in self._chosen)

    @property
    def read(self) -> tuple[str, ...]:
        """The entries of the batch that the loss reads, as far as it ran here."""
        return self._read

    def _inputs(self, worker: int, stage: int, micro: int) -> dict[str, PyTree]:
        inputs = super()._inputs(worker, stage, micro)
        shapes = jax.tree.map(_without_place, inputs)
        if stage == self._places.loss:
            self._read = self._loss.entries_read(shapes, self._parts[micro].batch)
        else:
            run = self._runs[worker, stage]
            found = outputs_of(stage, run.stage, (run.params, run.state), shapes)
            run.stage.named(found)  # Called for its check of their number.
        return inputs

    def _add_loss(self, worker: int, micro: int, found: Partial, aux: PyTree) -> None:
        # A step joins the losses of its micro-batches, also where one represents all.
        self._invoke(join, found, found, self._loss.kind)


def _without_place(leaf: PyTree) -> PyTree:
    # It does not matter to a function, which is evaluated by itself here.
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_shape(leaf) else leaf


def representatives(schedule: Schedule, sizes: Sequence[int]) -> list[int]:
    """For each micro-batch, the first one that needs the same programs on all workers.

    Args:
      schedule: The worker of each micro-batch, and which passes are split.
      sizes: The number of examples of each micro-batch.

    Example:
      >>> from jdist.pipeline import one_f_one_b
      >>> representatives(one_f_one_b(2, 5), [4, 4, 4, 3, 3])
      [0, 0, 0, 3, 3]
    """
    first: dict[Any, int] = {}
    found = []
    for micro, size in enumerate(sizes):
        # Sizes are shapes of arguments; owners decide devices; a split backward pass
        # is two programs.
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
    """Channels for shapes, which use the channels of a call.

    Args:
      channels: The channels of the call.
      places: The worker of each stage.
    """

    def __init__(self, channels: ValueChannels, places: Places) -> None:
        self._channels = channels
        self._places = places
        self._received: list[tuple[MessageTag, int, PyTree]] = []

    def put(self, tag: MessageTag, worker: int, value: PyTree) -> None:
        """See `ValueChannels`."""
        if worker not in self._places.own:
            # A sharding means nothing in another process; the empty array of a
            # `_Shape` arrives there on the device on which the value will arrive.
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
            # Kept for a second rehearsal, for which no worker sends shapes again.
            value = received(value, self._places.devices[worker])
            self._received.append((tag, worker, value))
        return value

    def wait(self, waiting: Mapping[MessageTag, object]) -> None:
        """See `ValueChannels`."""
        self._channels.wait({_tag_of_shapes(t): why for t, why in waiting.items()})

    def replayed(self) -> ValueChannels:
        """Channels that hold all messages received from other processes."""
        channels = InProcessChannels(self._places.devices)
        for message in self._received:
            channels.put(*message)
        return channels


def _tag_of_shapes(tag: MessageTag) -> MessageTag:
    # In lower case, because the values of the same call have capital letters.
    return tag._replace(kind=tag.kind.lower())


def _packed(leaf: PyTree, device: jax.Device | None) -> PyTree:
    """Converts a shape for a message.

    Args:
      leaf: The shape; anything else is returned unchanged.
      device: One of the worker's devices, for a result whose place is not known.
    """
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    # Values are sent whole (`received`), so that a sharded one is sent from one device.
    if leaf.sharding is not None:
        device = device_here(place_of(leaf))
    empty = blank(jax.ShapeDtypeStruct((0,), leaf.dtype), device)
    return _Shape(leaf.shape, leaf.weak_type, empty)


def _unpacked(told: _Shape) -> jax.ShapeDtypeStruct:
    place = told.empty.sharding if told.empty.committed else None
    return jax.ShapeDtypeStruct(
        tuple(told.shape), told.empty.dtype, sharding=place, weak_type=told.weak_type
    )
