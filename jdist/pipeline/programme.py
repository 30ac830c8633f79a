"""The dynamic programme of one level of the machine; see `jdist.pipeline.partition`."""

from dataclasses import dataclass

import numpy as np

from jdist.pipeline.cuts import Cuts

BLOCK = 2**16
"""Numbers that one NumPy step works on: they stay in the cache."""

Stages = list[tuple[int, int, int]]
"""Where a stage begins and ends, and its workers."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the machine.

    Attributes:
      workers: How many there are at this level.
      inside: Workers of the level inside that each of them has; 1 at the innermost.
      bandwidth: Bytes per second between them.
    """

    workers: int
    inside: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Rules:
    """What a plan may do and what counts; see `partition`.

    `memory` is that of one of the level's workers, with all that is inside it.
    """

    transfers: bool
    memory: float | None
    replicate: bool


class Programme:
    """The best pipelines of one level, for all spans and numbers of workers.

    Attributes:
      best: Seconds per micro-batch of the slowest stage, `(begin, workers - 1, end)`,
        infinite where there is no plan.
    """

    def __init__(
        self, cuts: Cuts, level: Level, rules: Rules, seconds: np.ndarray, whole: bool
    ) -> None:
        """Solves it.

        Args:
          cuts: Where stages may begin and end.
          level: Workers and bandwidth.
          rules: What is allowed and what counts.
          seconds: What a span takes on one of the level's workers, `(begin, end)`.
          whole: Only plans from the first cut on are wanted.
        """
        self.level, self.rules, self.seconds = level, rules, seconds
        self.parameters = _between(cuts.parameter_bytes)
        self.held = self.parameters + _between(cuts.activation_bytes)
        self.crossing = 2 * cuts.output_bytes / level.bandwidth
        self.crossing[-1] = 0.0  # the loss stays where it is
        rows = 1 if whole else len(cuts)
        self.best = np.full((rows, level.workers, len(cuts)), np.inf)
        for end in range(1, len(cuts)):
            self._solve(end)

    def stages(self, begin: int, end: int) -> Stages:
        """The stages of the best pipeline for a span on all workers."""
        found: Stages = []
        left = self.level.workers
        while True:
            best = self.best[begin, left - 1, end]
            if best == self._alone(end)[begin, left - 1]:
                return [(begin, end, left), *found]
            cut, own = self._last(begin, left, end)
            found.insert(0, (cut, end, own))
            end, left = cut, left - own

    def _solve(self, end: int) -> None:
        rows, workers, _ = self.best.shape
        self.best[:, :, end] = self._alone(end)[:rows]
        step = max(1, BLOCK // (workers * end))
        for low in range(0, min(rows, end), step):
            begin = slice(low, min(low + step, rows))
            for own in self._choices(workers - 1):
                before = self.best[begin, : workers - own, low:end]
                slowest = np.maximum(before, self._final(own, end)[:, low:])
                target = self.best[begin, own:, end]
                np.minimum(target, slowest.min(axis=-1), out=target)

    def _choices(self, most: int) -> range:
        return range(1, (most if self.rules.replicate else min(most, 1)) + 1)

    def _alone(self, end: int) -> np.ndarray:
        """A span as one stage on r workers: `(begin, r - 1)`."""
        r = np.arange(1, self.level.workers + 1)
        parameters = self.parameters[:, end, None]
        synchronise = 4 * (r - 1) * parameters / (self.level.bandwidth * r)
        time = (self.seconds[:, end, None] + synchronise / self.level.inside) / r
        if not self.rules.replicate:
            time[:, 1:] = np.inf
        if self.rules.memory is not None:
            in_flight = -(-self.level.workers // r)
            time[self.held[:, end, None] * in_flight > self.rules.memory] = np.inf
        return time

    def _final(self, own: int, end: int) -> np.ndarray:
        """The last stage of a pipeline, on `own` workers: `(workers before - 1, cut)`.

        One row serves all numbers of workers before it, unless memory is limited: the
        more come before, the fewer come after, and the fewer micro-batches in flight.
        """
        bandwidth = self.level.bandwidth * own
        synchronise = 4 * (own - 1) * self.parameters[:end, end] / bandwidth
        time = (self.seconds[:end, end] + synchronise) / own
        if self.rules.transfers:
            time = np.maximum(time, self.crossing[:end] / own)
            time = np.maximum(time, self.crossing[end] / own)
        if self.rules.memory is None:
            return time[None]
        before = np.arange(1, self.level.workers - own + 1)
        in_flight = -(-(self.level.workers - before) // own)
        needed = in_flight[:, None] * self.held[:end, end]
        return np.where(needed > self.rules.memory, np.inf, time)

    def _last(self, begin: int, workers: int, end: int) -> tuple[int, int]:
        """Where the last stage of the best pipeline begins, and its workers."""
        best = self.best[begin, workers - 1, end]
        for own in self._choices(workers - 1):
            final = self._final(own, end)
            row = final[min(workers - own, len(final)) - 1]
            slowest = np.maximum(self.best[begin, workers - own - 1, :end], row)
            found = np.flatnonzero(slowest == best)
            if found.size:
                return int(found[-1]), own
        raise AssertionError("the programme's best is one of its candidates")


def spans(cuts: Cuts, totals: np.ndarray) -> np.ndarray:
    """What lies between two cuts, infinite where one is not within the other."""
    return np.where(cuts.within, _between(totals), np.inf)


def _between(totals: np.ndarray) -> np.ndarray:
    return totals - totals[:, None]
