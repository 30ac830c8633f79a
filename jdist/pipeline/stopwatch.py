"""When the actions of a step began and ended, and what was kept meanwhile."""

import math
import time
from collections.abc import Callable, Mapping

import jax

from jdist.pipeline.schedule_actions import Action
from jdist.pipeline.stage_run import StageRun
from jdist.pipeline.timeline import Record

ROUND_TRIPS = 20
"""Questions to another clock; the answer that came soonest counts."""


class Stopwatch:
    """What a timed step notes of the workers of this process.

    An action ends when all that it computes is there. To see that, its worker waits for
    it, so that nothing is started ahead: on a core that computes itself this costs the
    microseconds of starting the next action, on an accelerator it takes away what
    asynchronous dispatch hides.

    Attributes:
      records: Of each action, in order, by `time.perf_counter`.
      held: By worker, the most bytes that its stages kept for backward passes between
        two actions: residuals, and what is left for weight gradients.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.held: dict[int, int] = {}

    def clear(self) -> None:
        """A step begins: nothing of the one before is kept."""
        self.records.clear()
        self.held.clear()

    def time(
        self,
        worker: int,
        action: Action,
        do: Callable[[], object],
        runs: Mapping[tuple[int, int], StageRun],
    ) -> None:
        """Does an action and notes it.

        Args:
          worker: Who does it.
          action: Which.
          do: Does it; what it returns belongs to the action as well.
          runs: The stages of this process, by worker and stage.
        """
        start = time.perf_counter()
        computed = do()
        jax.block_until_ready((computed, runs[worker, action.stage].arrays()))
        self.records.append(Record(worker, *action, start, time.perf_counter()))
        own = [run.nbytes() for (rank, _), run in runs.items() if rank == worker]
        self.held[worker] = max(self.held.get(worker, 0), sum(own))


def clock_offset(ask: Callable[[], float], now: Callable[[], float]) -> float:
    """What to add to this process's clock to get another one's.

    The other's answer is taken for what its clock showed in the middle of the round
    trip, which is wrong by at most half of the shortest of them.

    Args:
      ask: The other's clock, in seconds.
      now: This one's.

    Example:
      >>> ticks = iter(range(100))
      >>> clock_offset(lambda: next(ticks) + 50, lambda: next(ticks))
      50.0
    """
    shortest, offset = math.inf, 0.0
    for _ in range(ROUND_TRIPS):
        before = now()
        theirs = ask()
        after = now()
        if after - before < shortest:
            shortest, offset = after - before, theirs - (before + after) / 2
    return offset
