"""What a schedule costs before anybody runs it.

The model. A worker does its actions in the schedule's order, each as soon as the worker
is free and what the action needs has arrived. An action takes its cost plus the
overhead. Its result goes to the neighbouring stage while the worker goes on: if that
stage is on another worker, the message takes the link between the two workers (one for
each direction), after the messages before it, for bytes / bandwidth, and arrives
`latency` later. Updates of weights, reductions between replicas and waiting buffers
cost nothing here; add them to `backward` where they matter. Memory is what workers hold
between two actions (`schedule_memory`); what an action needs while it runs, and values
that wait to be sent or taken, come on top.
"""

import math

import numpy as np

from jdist.pipeline.schedule.actions import B, F, W
from jdist.pipeline.schedule.clock import Wires, play, waits_for
from jdist.pipeline.schedule.memory import held, peaks
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedule.versions import live_versions
from jdist.pipeline.simulate.costs import Costs
from jdist.pipeline.simulate.timeline import Timeline


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Plays a schedule through.

    1024 stages and 4096 micro-batches, 8.4 million actions, take seconds.

    Args:
      schedule: Any; it need not have been validated.
      costs: None: the units of `Costs()`.

    Returns:
      Makespan, bubble, peak activations and their bytes, weight versions, and when each
      action happened.

    Raises:
      ScheduleError: The schedule's workers wait for each other in a circle, or an
        action waits for one that is missing.
      ValueError: A cost was given for another number of stages.

    Example:
      >>> from jdist.pipeline import gpipe, zero_bubble
      >>> round(simulate(gpipe(4, 8)).bubble, 3), simulate(gpipe(4, 8)).makespan
      (0.273, 33.0)
      >>> simulate(zero_bubble(4, 8)).makespan
      27.0
    """
    costs = costs or Costs()
    columns = schedule.columns
    shape = (schedule.stages, schedule.micro_batches)
    waits = waits_for(columns, *shape)
    seconds = _seconds(schedule, costs)
    start = play(columns, waits, seconds, _wires(schedule, costs))
    del waits
    end = np.add(start, seconds, out=seconds)
    for array in (start, end):
        array.flags.writeable = False
    return Timeline(
        columns,
        start,
        end,
        schedule.updates,
        f"{schedule.name}, {schedule.workers} workers, {shape[1]} micro-batches",
        _activation_bytes(schedule, costs),
        _weight_bytes(schedule, costs),
        joined=costs.joined(schedule.stages),
    )


def _seconds(schedule: Schedule, costs: Costs) -> np.ndarray:
    columns, shape = schedule.columns, (schedule.stages, schedule.micro_batches)
    backward = np.where(
        schedule.split,
        costs.table("backward_inputs", *shape),
        costs.table("backward", *shape),
    )
    tables = (
        (F, costs.table("forward", *shape)),
        (B, backward),
        (W, costs.table("backward_params", *shape)),
    )
    seconds = np.empty(len(columns))
    for kind, table in tables:
        own = np.flatnonzero(columns.kind == kind)
        seconds[own] = table[columns.stage[own], columns.micro_batch[own]]
    return seconds + costs.overhead


def _wires(schedule: Schedule, costs: Costs) -> Wires | None:
    """Which link each result takes, and for how long; None where messages are free."""
    shape = (schedule.stages, schedule.micro_batches)
    latency = costs.table("latency", *shape)
    sending = costs.table("message_bytes", *shape) / costs.table("bandwidth", *shape)
    if not (latency.any() or sending.any()):
        return None
    columns = schedule.columns
    links = _links(schedule)
    link = np.full(len(columns), -1, np.int32)
    occupied, late = np.zeros(len(columns)), np.zeros(len(columns))
    for kind, step in ((F, 0), (B, -1)):
        # F of stage j uses the pair (j, j + 1), B of stage j the pair (j - 1, j).
        pair = columns.stage + step
        sends = (columns.kind == kind) & (pair >= 0) & (pair < shape[0] - 1)
        at = np.flatnonzero(sends)
        pair, micro_batch = pair[at], columns.micro_batch[at]
        link[at] = links[kind, pair, micro_batch % links.shape[2]]
        away = link[at] >= 0
        occupied[at] = np.where(away, sending[pair, micro_batch], 0.0)
        late[at] = np.where(away, latency[pair, micro_batch], 0.0)
    return Wires(link, occupied, late)


def _links(schedule: Schedule) -> np.ndarray:
    """A number for each link, -1 within a worker: `(F or B, pair of stages, turn)`."""
    turns = math.lcm(*(len(workers) for workers in schedule.placement))
    owner = schedule.owner[:, : min(turns, schedule.micro_batches)].astype(np.int64)
    ahead = owner[:-1] * schedule.workers + owner[1:]
    back = owner[1:] * schedule.workers + owner[:-1]
    _, numbers = np.unique(np.stack([ahead, back]), return_inverse=True)
    numbers = numbers.reshape(2, *ahead.shape)
    return np.where(owner[:-1] == owner[1:], -1, numbers)


def _activation_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    shape = (schedule.stages, schedule.micro_batches)
    columns = schedule.columns
    activation, pending = (
        costs.table(name, *shape)[columns.stage, columns.micro_batch]
        for name in ("activation_bytes", "pending_bytes")
    )
    every = None if schedule.updates is None else schedule.updates.every
    joined = costs.joined(schedule.stages)
    amount = held(columns, activation, pending, joined, every)
    return tuple(peaks(columns, amount).tolist())


def _weight_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    shape = (schedule.stages, schedule.micro_batches)
    each = costs.table("weight_bytes", *shape)[:, 0]
    kept = live_versions(schedule.columns, schedule.updates)
    return tuple((each @ kept).tolist())
