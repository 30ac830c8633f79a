"""Start times: every worker executes its actions in order, each as early as possible.

An action starts when its worker is free and its input has arrived. All workers whose
next input time is known advance together in one NumPy step, so that the cost follows
the longest chain of dependencies and not the number of actions. The result does not
depend on the order of events, because a time is computed from known times only.
"""

from typing import NamedTuple

import numpy as np

from jdist.pipeline.schedule.actions import B, Columns, F, ScheduleError

NOTHING = -1
"""The index that says that an action needs no result of another stage."""


class Links(NamedTuple):
    """The paths of the actions' results to the stages that need them.

    Attributes:
      number: Number of the link that the result takes, int32; -1: it stays on its
        worker. A link carries one result at a time, in the order in which its worker
        produces them.
      occupied: Seconds for which it occupies the link: bytes / bandwidth.
      latency: Seconds from leaving the link to arriving.
    """

    number: np.ndarray
    occupied: np.ndarray
    latency: np.ndarray


def waits_for(columns: Columns, stages: int, micro_batches: int) -> np.ndarray:
    """For each action, the index of the one on a neighbouring stage that it waits for.

    F waits for F of the stage before, B for B of the stage after, and B of the last
    stage for its own F. Its other dependencies are on its own stage and stand earlier
    among the actions of its own worker, which `Schedule.validate` checks.

    Raises:
      ScheduleError: An action that one waits for is missing ("complete").
    """
    forward = columns.index_of(F, stages, micro_batches)
    backward = columns.index_of(B, stages, micro_batches)
    # F of stage 0 waits for nothing; B of the last stage waits for its own F.
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
    links: Links | None = None,
) -> np.ndarray:
    """The start of each action, with no unnecessary waiting.

    Args:
      columns: The actions.
      waits: See `waits_for`.
      seconds: Duration of each action, float64.
      links: How results travel; None: they arrive at once.

    Returns:
      Seconds from the beginning, float64, one per action.

    Raises:
      ScheduleError: Workers wait for each other in a circle ("dependencies").
    """
    start = np.empty(len(columns))
    arrived = np.full(len(columns) + 1, np.inf)
    # The last entry, index NOTHING, is for actions without an input.
    arrived[NOTHING] = 0.0
    free = np.zeros(columns.workers)
    # Per worker, the index of its next action.
    turn, stop = columns.first[:-1].copy(), columns.first[1:]
    count = 0 if links is None else int(links.number.max(initial=-1)) + 1
    # The last entry, index -1, stands for results that stay on their worker.
    link_free = np.zeros(count + 1)
    working = np.flatnonzero(turn < stop)
    while working.size:
        at = turn[working]
        needed = arrived[waits[at]]
        able = needed < np.inf
        # Workers whose input has no time yet stay for a later step. If all of them do,
        # they wait in a circle.
        if not able.all():
            at, needed = at[able], needed[able]
            if not at.size:
                _refuse_circle(columns, turn, working)
        workers = working[able]
        begin = np.maximum(free[workers], needed)
        end = begin + seconds[at]
        start[at], free[workers] = begin, end
        if links is None:
            arrived[at] = end
        else:
            # A link belongs to one sender, so that no index occurs twice here, except
            # -1, which is reset.
            link = links.number[at]
            left = np.maximum(end, link_free[link]) + links.occupied[at]
            link_free[link] = left
            link_free[-1] = 0.0
            arrived[at] = left + links.latency[at]
        turn[workers] += 1
        # Rebuilt only when a worker has finished, which most steps do not bring about.
        if (turn[workers] == stop[workers]).any():
            working = working[turn[working] < stop[working]]
    return start


def _refuse_circle(columns: Columns, turn: np.ndarray, working: np.ndarray) -> None:
    worker = int(working[0])
    what = "waits for a worker that waits for it, directly or in a circle"
    raise ScheduleError("dependencies", what, worker, columns.action(int(turn[worker])))
