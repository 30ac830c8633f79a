"""A schedule as integer tables: the action of each device of an SPMD program per clock.

All devices step through the same clocks, and each looks up its own action. The slot in
which a value waits between the clock that makes it and the clock that uses it is
assigned here, ahead of time. Slots are reused as soon as they are free, so a worker has
as many as its schedule keeps values alive at most.

A message travels a fixed distance, `(receiver - sender) mod workers`: 1 from stage to
stage in a row, workers - 1 on the way back, and both in a V. One permutation of the
devices carries all messages of a distance. `Clock.travels` marks the clocks that have
one: at the others no device waits for another.

A message is sent at the end of the clock that makes it and can be used at the next one.
With `overlap` it is in flight for a whole clock, during the actions of that clock: it
costs the devices no time, and can be used one clock later.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jdist.pipeline.schedule.actions import KINDS, B, F, W
from jdist.pipeline.schedule.clock import Links, play, waits_for
from jdist.pipeline.schedule.schedule import Schedule

INPUTS = len(KINDS)
"""Kind of a backward pass that a W follows: the cotangents of the inputs alone."""

NOTHING = -1


class Row(NamedTuple):
    """All workers' actions at each clock: int32, `(clocks, workers)`, -1 for nothing.

    In a program one worker's numbers at one clock, as JAX's arrays.
    """

    kind: Any
    """F, B (without a W), `INPUTS` or W."""
    chunk: Any
    """Index among the worker's own stages."""
    micro_batch: Any
    mail: Any
    """Slot of the value or cotangent that is needed; -1: it comes from the batch."""
    activation: Any
    """Slot of what the backward pass needs."""
    rest: Any
    """Slot of what a split backward pass leaves for W."""
    result: Any
    """Slot for what the action makes: where the worker itself needs it (after a forward
    pass of the last stage the loss puts its cotangent there), or the last slot of all,
    from which it is sent."""
    receive: Any
    """`(clocks, workers, distances)`: slot for what arrives at the end of the clock."""


class Slots(NamedTuple):
    """How many slots every worker has."""

    mail: int
    """Values and cotangents that wait for their action, and one to be sent."""
    activations: int
    """Number of slots for micro-batches between F and the last of B and W."""
    rests: int
    """Number of slots for micro-batches between B and W."""


class Clock(NamedTuple):
    """What any worker does at each clock; in a program, at one clock."""

    travels: Any
    """Whether a message of each distance arrives, int32, `(clocks, distances)`."""
    acts: Any
    """Whether a worker does an action of each kind, with each of its stages, int32,
    `(clocks, kinds, chunks)`; of all kinds, `INPUTS` among them."""
    begins: Any
    """Whether the first stage has a forward pass, int32, `(clocks,)`."""
    returns: Any
    """Whether it has a backward pass, likewise."""
    ends: Any
    """Whether the last stage has a forward pass, and the loss follows, likewise."""


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """The tables of a schedule for one program.

    Attributes:
      row: The action of every worker at every clock.
      clock: The kinds of actions and messages at every clock.
      distances: The distances over which messages travel.
      stages: The stages of each worker in ascending order, `(workers, chunks)`.
      kinds: Kinds of actions that occur.
      slots: Numbers of slots.
      overlap: Whether messages are in flight for a whole clock.
    """

    row: Row
    clock: Clock
    distances: tuple[int, ...]
    stages: np.ndarray
    kinds: tuple[int, ...]
    slots: Slots
    overlap: bool


class _Messages(NamedTuple):
    """Messages between stages: the worker and the clock of each end."""

    sender: np.ndarray
    made: np.ndarray
    receiver: np.ndarray
    arrived: np.ndarray
    """At whose end it is there."""
    used: np.ndarray


def tabulate(schedule: Schedule, overlap: bool = False) -> Table:
    """Convert a schedule into tables.

    Args:
      schedule: Each stage has one worker, and all workers have equally many stages.
      overlap: Whether messages are in flight for a whole clock.

    Example:
      >>> from jdist.pipeline import one_f_one_b
      >>> table = tabulate(one_f_one_b(3, 8))
      >>> table.distances, table.slots
      ((1, 2), Slots(mail=3, activations=3, rests=0))
      >>> table.row.kind[:7, 1].tolist()  # waits, 1F0, 1F1, waits, 1B0, 1F2, 1B1
      [-1, 0, 0, -1, 1, 0, 1]
    """
    workers = np.array([ranks[0] for ranks in schedule.placement])
    clock = _spaced(schedule, workers) if overlap else schedule.clock
    count = int(clock.max()) + 1
    # A stable sort keeps a worker's stages, its chunks, in ascending order.
    stages = np.argsort(workers, kind="stable").reshape(schedule.workers, -1)
    clocks = [_clocks_of(schedule, clock, kind) for kind in range(len(KINDS))]
    sent = _messages(workers, clocks, overlap)
    far = (sent.receiver - sent.sender) % schedule.workers
    distances = tuple(np.unique(far[far > 0]).tolist())
    row = _actions(schedule, clock, stages, len(distances))
    travels = np.zeros((count, len(distances)), np.int32)
    slot, waiting = assign_slots(sent.receiver, sent.arrived, sent.used)
    row.mail[sent.used, sent.receiver] = slot
    # Neighbouring stages on one worker, as at the turn of a V: nothing travels.
    here = far == 0
    # Outgoing messages have the last slot, after those in which values wait.
    row.result[row.kind != NOTHING] = waiting
    row.result[sent.made[here], sent.receiver[here]] = slot[here]
    for number, distance in enumerate(distances):
        there = far == distance
        row.receive[sent.arrived[there], sent.receiver[there], number] = slot[there]
        travels[sent.arrived[there], number] = 1
    activations, rests = _kept(schedule, row, workers, clocks)
    kinds = tuple(np.unique(row.kind[row.kind != NOTHING]).tolist())
    slots = Slots(waiting + 1, activations, rests)
    at = np.arange(count)
    each = clocks[F][0], clocks[B][0], clocks[F][-1]
    ends = [np.isin(at, own).astype(np.int32) for own in each]
    done = Clock(travels, _acts(row, stages.shape[1]), *ends)
    return Table(row, done, distances, stages, kinds, slots, overlap)


def assign_slots(
    worker: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, int]:
    """Assign values to slots of their workers, so that no two share a slot at a time.

    Args:
      worker: The worker that holds each value.
      begin: The clock at which each is made.
      end: The clock at which it is used last; its slot is free from there on.

    Returns:
      The slots, int32; and their number, the largest number of values that a worker
      holds at a time.

    Example:
      >>> begin, end = np.array([0, 1, 3]), np.array([3, 2, 4])
      >>> slots, count = assign_slots(np.zeros(3, int), begin, end)
      >>> slots.tolist(), count
      ([0, 1, 0], 2)
    """
    slots = np.zeros(len(begin), np.int32)
    # By worker and slot, the clock at which it is free: at first from the beginning.
    most = np.bincount(worker, minlength=1)
    free = np.full((len(most), most.max()), begin.min(initial=0))
    # Values by their beginning, each in the lowest free slot: for an interval graph
    # greedy colouring in this order is optimal.
    for index in np.lexsort((end, begin)):
        own = free[worker[index]]
        # Also at an equal clock: a worker uses its inputs before it stores its result.
        slots[index] = slot = np.argmax(own <= begin[index])
        own[slot] = end[index]
    return slots, int(slots.max(initial=-1)) + 1


def _clocks_of(schedule: Schedule, clock: np.ndarray, kind: int) -> np.ndarray:
    """The clock of an action by stage and micro-batch; -1 where there is none."""
    shape = (schedule.stages, schedule.micro_batches)
    index = schedule.columns.index_of(kind, *shape)
    return np.where(index < 0, NOTHING, clock[index])


def _spaced(schedule: Schedule, workers: np.ndarray) -> np.ndarray:
    """The earliest clocks if each message between two workers takes one clock."""
    columns = schedule.columns
    step = np.where(columns.kind == F, 1, -1)  # Nothing waits for a W.
    # Clipped: the loss runs on the last stage's worker, and the first stage's cotangent
    # is not sent.
    taker = np.clip(columns.stage + step, 0, schedule.stages - 1)
    leaves = workers[taker] != workers[columns.stage]
    nothing = np.zeros(len(columns))
    # A worker makes one result per clock, so that messages never queue for a link.
    links = Links(np.full(len(columns), NOTHING), nothing, leaves.astype(float))
    waits = waits_for(columns, schedule.stages, schedule.micro_batches)
    return play(columns, waits, nothing + 1, links).astype(np.int64)


def _messages(
    workers: np.ndarray, clocks: list[np.ndarray], overlap: bool
) -> _Messages:
    """Values for the next stage and cotangents for the one before."""
    forward, backward, _ = clocks
    # The last entry of each list: the loss follows the last stage's forward pass at the
    # same clock, and its cotangent waits there for the backward pass.
    own = np.broadcast_to(workers[:, None], forward.shape)
    made = [forward[:-1], backward[1:], forward[-1:]]
    used = [forward[1:], backward[:-1], backward[-1:]]
    sender = [own[:-1], own[1:], own[-1:]]
    receiver = [own[1:], own[:-1], own[-1:]]
    begin, end = _flat(sender), _flat(receiver)
    arrived = _flat(made) + (overlap & (begin != end))
    return _Messages(begin, _flat(made), end, arrived, _flat(used))


def _flat(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([part.ravel() for part in parts])


def _actions(
    schedule: Schedule, clock: np.ndarray, stages: np.ndarray, distances: int
) -> Row:
    """The rows with their actions, before slots are assigned."""
    shape = (int(clock.max()) + 1, schedule.workers)
    tables = [np.full(shape, NOTHING, np.int32) for _ in Row._fields[:-1]]
    tables.append(np.full((*shape, distances), NOTHING, np.int32))
    row = Row._make(tables)
    columns = schedule.columns
    place = clock, columns.worker_of_each()
    split = schedule.split[columns.stage, columns.micro_batch]
    row.kind[place] = np.where((columns.kind == B) & split, INPUTS, columns.kind)
    chunk = np.empty(stages.size, np.int32)
    chunk[stages] = np.arange(stages.shape[1])
    row.chunk[place] = chunk[columns.stage]
    row.micro_batch[place] = columns.micro_batch
    return row


def _acts(row: Row, chunks: int) -> np.ndarray:
    """The field `acts` of `Clock`."""
    found = np.zeros((len(row.kind), INPUTS + 1, chunks), np.int32)
    clock, worker = np.nonzero(row.kind != NOTHING)
    found[clock, row.kind[clock, worker], row.chunk[clock, worker]] = 1
    return found


def _kept(
    schedule: Schedule, row: Row, workers: np.ndarray, clocks: list[np.ndarray]
) -> tuple[int, int]:
    """Assign the slots of activations and rests; returns their numbers."""
    counts = []
    for kind, table in ((F, row.activation), (B, row.rest)):
        chosen = np.ones_like(schedule.split) if kind == F else schedule.split
        own = np.broadcast_to(workers[:, None], chosen.shape)[chosen]
        begin = clocks[kind][chosen]
        # The clock of a W that does not exist is -1, which the maximum ignores.
        end = np.maximum(clocks[B], clocks[W])[chosen]
        slot, count = assign_slots(own, begin, end)
        for clock in clocks[kind:]:
            there = clock[chosen] != NOTHING
            table[clock[chosen][there], own[there]] = slot[there]
        counts.append(count)
    return counts[0], counts[1]
