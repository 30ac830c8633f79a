"""The simulator: time and memory of a schedule under given costs.

A worker executes its actions in the schedule's order, each as soon as the worker is
free and the action's input has arrived. Its result is sent to the neighbouring stage
while the worker continues: if that stage is on another worker, the message occupies the
link between the two workers (one for each direction), after earlier messages, for
bytes / bandwidth, and arrives `latency` later.
Updates of weights, reductions between replicas and waiting buffers cost nothing here;
add them to `backward` where they matter. Memory is what workers hold between two
actions (`jdist.pipeline.schedule.memory`), without temporary buffers of an action and
without values that wait to be sent or consumed.
"""

import numpy as np

from jdist._errors import check_type
from jdist.pipeline.schedule.actions import B, F, W
from jdist.pipeline.schedule.clock import Links, play, waits_for
from jdist.pipeline.schedule.memory import held, peaks
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedule.versions import live_versions
from jdist.pipeline.simulation.costs import Costs
from jdist.pipeline.simulation.timeline import Timeline


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate a schedule.

    1024 stages and 4096 micro-batches, 8.4 million actions, take seconds.

    Args:
      schedule: The schedule, which need not have been validated.
      costs: The costs; None: `Costs()`.

    Returns:
      Makespan, bubble, peak activations and their bytes, weight versions, and the start
      and end of each action.

    Raises:
      ScheduleError: The schedule has a deadlock, or an action waits for one that is
        missing.
      TypeError: An argument is of another type.
      ValueError: A cost was given for another number of stages.

    Example:
      >>> from jdist.pipeline import gpipe, zero_bubble
      >>> round(simulate(gpipe(4, 8)).bubble, 3), simulate(gpipe(4, 8)).makespan
      (0.273, 33.0)
      >>> simulate(zero_bubble(4, 8)).makespan
      27.0
    """
    check_type("simulate(schedule)", schedule, Schedule, "must be a Schedule")
    if costs is None:
        costs = Costs()
    check_type("simulate(costs=...)", costs, Costs, "must be Costs")
    columns = schedule.columns
    shape = (schedule.stages, schedule.micro_batches)
    waits = waits_for(columns, *shape)
    seconds = _seconds(schedule, costs)
    start = play(columns, waits, seconds, _links(schedule, costs))
    # With millions of actions arrays are freed, and reused, as early as possible.
    del waits
    end = np.add(start, seconds, out=seconds)
    for array in (start, end):
        array.flags.writeable = False
    return Timeline(
        columns,
        start,
        end,
        schedule.update_policy,
        f"{schedule.name}, {schedule.workers} workers, {shape[1]} micro-batches",
        _activation_bytes(schedule, costs),
        _weight_bytes(schedule, costs),
    )


def _seconds(schedule: Schedule, costs: Costs) -> np.ndarray:
    columns, shape = schedule.columns, (schedule.stages, schedule.micro_batches)
    # A B without a W includes the work of both halves.
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
    # One index array per kind, without a loop over millions of actions.
    seconds = np.empty(len(columns))
    for kind, table in tables:
        own = np.flatnonzero(columns.kind == kind)
        seconds[own] = table[columns.stage[own], columns.micro_batch[own]]
    return seconds


def _links(schedule: Schedule, costs: Costs) -> Links | None:
    """The link of each result and its times; None if messages cost nothing."""
    shape = (schedule.stages, schedule.micro_batches)
    latency = costs.table("latency", *shape)
    sending = costs.table("message_bytes", *shape) / costs.table("bandwidth", *shape)
    if not (latency.any() or sending.any()):
        return None
    columns, one, other = schedule.columns, schedule.owner[:-1], schedule.owner[1:]
    link = np.full(len(columns), -1, np.int32)
    occupied, late = np.zeros(len(columns)), np.zeros(len(columns))
    # F of stage j uses the pair (j, j + 1), B of stage j the pair (j - 1, j).
    for kind, step, sender, taker in ((F, 0, one, other), (B, -1, other, one)):
        # Neighbouring stages on one worker need no link.
        numbers = np.where(one == other, -1, sender * schedule.workers + taker)
        pair = columns.stage + step
        sends = (columns.kind == kind) & (pair >= 0) & (pair < shape[0] - 1)
        at = np.flatnonzero(sends)
        way = pair[at], columns.micro_batch[at]
        link[at] = numbers[way]
        away = link[at] >= 0
        occupied[at] = np.where(away, sending[way], 0.0)
        late[at] = np.where(away, latency[way], 0.0)
    return Links(link, occupied, late)


def _activation_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    shape = (schedule.stages, schedule.micro_batches)
    columns = schedule.columns
    activation, pending = (
        costs.table(name, *shape)[columns.stage, columns.micro_batch]
        for name in ("activation_bytes", "pending_bytes")
    )
    return tuple(peaks(columns, held(columns, activation, pending)).tolist())


def _weight_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    shape = (schedule.stages, schedule.micro_batches)
    # Weights do not depend on the micro-batch.
    each = costs.table("weight_bytes", *shape)[:, 0]
    kept = live_versions(schedule.columns, schedule.update_policy)
    return tuple((each @ kept).tolist())
