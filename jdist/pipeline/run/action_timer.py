"""Measures the time of a step's actions and the bytes kept between them."""

import math
import time
from collections.abc import Callable, Mapping

import jax

from jdist.pipeline.run.stage_run import StageRun
from jdist.pipeline.schedule.actions import Action
from jdist.pipeline.simulation.timeline import Record

ROUND_TRIPS = 20
"""Number of readings of another clock; that of the shortest round trip counts."""


class ActionTimer:
    """Records the times and bytes of actions on the workers of this process.

    An action ends when its results are computed. Its worker waits for them, so that no
    action is dispatched ahead: on a CPU this costs the microseconds of dispatching the
    next action, on an accelerator all that asynchronous dispatch hides.

    Attributes:
      records: The actions in order, timed by `time.perf_counter`.
      held: By worker, the peak bytes that its stages kept for backward passes between
        two actions: residuals, and operands of pending weight gradients. An array that
        two stages keep counts once.
      kept: By stage, the peak bytes that it kept for one micro-batch after F and after
        B.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.held: dict[int, int] = {}
        self.kept: dict[int, tuple[int, int]] = {}

    def clear(self) -> None:
        """Clears the records of the previous step."""
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
        """Executes an action and records it.

        Args:
          worker: The worker of the action.
          action: The action.
          do: Executes it; its return value is waited for, too.
          runs: The stages of this process, by worker and stage.
        """
        start = time.perf_counter()
        computed = do()
        # The arrays of the stage, too: a backward pass returns nothing, and its result
        # is a sum of gradients that the stage keeps.
        jax.block_until_ready((computed, runs[worker, action.stage].arrays()))
        self.records.append(Record(worker, *action, start, time.perf_counter()))
        own: dict[int, int] = {}
        for (rank, _), run in runs.items():
            # Keyed by identity, so that an array of two stages counts once.
            own |= run.kept() if rank == worker else {}
        self.held[worker] = max(self.held.get(worker, 0), sum(own.values()))
        self._note(action, runs[worker, action.stage])

    def _note(self, action: Action, run: StageRun) -> None:
        forward, backward = self.kept.get(action.stage, (0, 0))
        # Without other micro-batches in flight, whose number is the schedule's.
        size = sum(run.kept(action.micro_batch).values())
        if action.kind == "F":
            forward = max(forward, size)
        elif action.kind == "B":
            backward = max(backward, size)
        self.kept[action.stage] = forward, backward


def clock_offset(ask: Callable[[], float], now: Callable[[], float]) -> float:
    """Estimates the offset of another process's clock from this one's, in seconds.

    The reading is taken as the other clock's time in the middle of the round trip, as
    in Cristian's algorithm. The error is at most half of the shortest round trip.

    Args:
      ask: Reads the other clock.
      now: Reads this one.

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
        # The shortest round trip bounds the error best.
        if after - before < shortest:
            shortest, offset = after - before, theirs - (before + after) / 2
    return offset
