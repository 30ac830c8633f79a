"""When each action happens: every worker works through its program as soon as it can.

An action starts when its worker is free and what it waits for has arrived. Workers are
advanced together, one NumPy step for all whose next action can be timed, so that the
cost is that of the longest chain, not of the number of actions. No order of events is
guessed: a time depends only on times that are known.
"""

from typing import NamedTuple

import numpy as np

from jdist.pipeline.schedule.actions import B, Columns, F, ScheduleError

NOTHING = -1
"""In place of an index: the action waits for no other stage."""


class Wires(NamedTuple):
    """What happens to the result of each action on its way to who waits for it."""

    link: np.ndarray
    """Number of the link it takes, int32; -1: it stays on its worker. A link carries
    one result after the other, in the order in which one worker produces them."""
    occupied: np.ndarray
    """Seconds for which it keeps the link from others: bytes / bandwidth."""
    latency: np.ndarray
    """Seconds from leaving the link to arriving."""


def waits_for(columns: Columns, stages: int, micro_batches: int) -> np.ndarray:
    """For each action, the index of the one on a neighbouring stage that it waits for.

    F waits for F of the stage before, B for B of the stage after, and B of the last
    stage for its own F. What it waits for on its own stage beside that comes earlier in
    its own worker's program; `Schedule.validate` sees to that.

    Raises:
      ScheduleError: What an action waits for is nowhere ("complete").
    """
    forward = columns.index_of(F, stages, micro_batches)
    backward = columns.index_of(B, stages, micro_batches)
    before = np.vstack([np.full((1, micro_batches), NOTHING, np.int32), forward[:-1]])
    after = np.vstack([backward[1:], forward[-1:]])
    found = np.full(len(columns), NOTHING, np.int32)
    for kind, table in ((F, before), (B, after)):
        where = np.flatnonzero(columns.kind == kind)
        found[where] = table[columns.stage[where], columns.micro_batch[where]]
    needs = (columns.kind == B) | ((columns.kind == F) & (columns.stage > 0))
    missing = np.flatnonzero(needs & (found == NOTHING))
    if missing.size:
        index = int(missing[0])
        what = "the neighbouring stage never produces what it waits for"
        raise ScheduleError(
            "complete", what, columns.worker(index), columns.action(index)
        )
    return found


def play(
    columns: Columns,
    waits: np.ndarray,
    seconds: np.ndarray,
    wires: Wires | None = None,
) -> np.ndarray:
    """When each action starts, if none waits without need.

    Args:
      columns: The workers' programs.
      waits: See `waits_for`.
      seconds: How long each action takes, float64.
      wires: How results travel; None: they are there at once.

    Returns:
      Seconds from the beginning, float64, one per action.

    Raises:
      ScheduleError: Workers wait for each other in a circle ("dependencies").
    """
    start = np.empty(len(columns))
    there = np.full(len(columns) + 1, np.inf)  # when each result has arrived
    there[NOTHING] = 0.0
    free = np.zeros(columns.workers)
    turn, stop = columns.first[:-1].copy(), columns.first[1:]
    links = 0 if wires is None else int(wires.link.max(initial=-1)) + 1
    link_free = np.zeros(links + 1)  # the last stands for "stays here"
    working = np.flatnonzero(turn < stop)
    while working.size:
        at = turn[working]
        needed = there[waits[at]]
        able = needed < np.inf
        if not able.all():
            at, needed = at[able], needed[able]
            if not at.size:
                _refuse_circle(columns, turn, working)
        who = working[able]
        begin = np.maximum(free[who], needed)
        end = begin + seconds[at]
        start[at], free[who] = begin, end
        if wires is None:
            there[at] = end
        else:
            link = wires.link[at]
            left = np.maximum(end, link_free[link]) + wires.occupied[at]
            link_free[link] = left
            link_free[-1] = 0.0
            there[at] = left + wires.latency[at]
        turn[who] += 1
        if (turn[who] == stop[who]).any():
            working = working[turn[working] < stop[working]]
    return start


def _refuse_circle(columns: Columns, turn: np.ndarray, working: np.ndarray) -> None:
    worker = int(working[0])
    what = "waits for a worker that waits for it, directly or in a circle"
    raise ScheduleError("dependencies", what, worker, columns.action(int(turn[worker])))
