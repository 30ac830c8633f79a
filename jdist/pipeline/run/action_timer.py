"""When the actions of a step began and ended, and what was kept meanwhile."""

import math
import time
from collections.abc import Callable, Mapping

import jax

from jdist.pipeline.run.stage_run import StageRun
from jdist.pipeline.schedule.actions import Action
from jdist.pipeline.simulate.timeline import Record

ROUND_TRIPS = 20
"""Questions to another clock; the answer that came soonest counts."""


class ActionTimer:
    """Times and memory of the actions of one step, for the workers of this process.

    An action ends when all that it computes is there. To see that, its worker waits for
    it, so that nothing is started ahead: on a core that computes itself this costs the
    microseconds of starting the next action, on an accelerator it takes away what
    asynchronous dispatch hides.

    Attributes:
      records: Of each action, in order, by `time.perf_counter`.
      held: By worker, the most bytes that its stages kept for backward passes between
        two actions: residuals, and what is left for weight gradients. An array that two
        stages keep counts once.
      kept: By stage, the most bytes that it kept of one micro-batch after F and after
        B.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.held: dict[int, int] = {}
        self.kept: dict[int, tuple[int, int]] = {}

    def clear(self) -> None:
        """A step begins: nothing of the one before is kept."""
        self.records.clear()
        self.held.clear()
        self.kept.clear()

    def time(
        self,
        worker: int,
        action: Action,
        do: Callable[[], object],
        runs: Mapping[tuple[int, int], StageRun],
    ) -> None:
        """Does an action and notes it.

        Args:
          worker: The worker of the action.
          action: Which.
          do: Does it; what it returns belongs to the action as well.
          runs: The stages of this process, by worker and stage.
        """
        start = time.perf_counter()
        computed = do()
        jax.block_until_ready((computed, runs[worker, action.stage].arrays()))
        self.records.append(Record(worker, *action, start, time.perf_counter()))
        own: dict[int, int] = {}
        for (rank, _), run in runs.items():
            own |= run.kept() if rank == worker else {}
        self.held[worker] = max(self.held.get(worker, 0), sum(own.values()))
        self._note(action, runs[worker, action.stage])

    def _note(self, action: Action, run: StageRun) -> None:
        forward, backward = self.kept.get(action.stage, (0, 0))
        size = sum(run.kept(action.micro_batch).values())
        if action.kind == "F":
            forward = max(forward, size)
        elif action.kind == "B":
            backward = max(backward, size)
        self.kept[action.stage] = forward, backward


def clock_offset(ask: Callable[[], float], now: Callable[[], float]) -> float:
    """The difference between another process's clock and this one's.

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
