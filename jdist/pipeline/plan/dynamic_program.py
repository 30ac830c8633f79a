"""The dynamic program of one level of the machine; see `jdist.pipeline.partition`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from jdist.pipeline.plan.cuts import Cuts

BLOCK = 2**16
"""Numbers per NumPy step, few enough to stay in the cache."""

ANY = Fraction(0)
"""The one case without a memory limit; see `Machine`."""

SpanSeconds = Callable[[int], np.ndarray]
"""From an end to the seconds of all spans that end there, `(cases, begin)`."""

Machine = Callable[[Sequence[Fraction]], SpanSeconds]
"""The seconds of spans on one worker of a level, with all levels inside it. A case is
the number of workers after a stage's own, divided by its own: it determines how many
micro-batches are in flight on the stage, and so whether they fit into memory."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the machine, and the rules for plans on it.

    Attributes:
      workers: Number of workers at this level.
      inside: Workers of the level inside that each of them has; 1 at the innermost.
      bandwidth: Bytes per second between them.
      transfers: Whether transfers across a cut take time.
      replicate: Whether a stage may have several workers.
      limited: Whether memory is limited, so that the workers after a stage matter.
    """

    workers: int
    inside: int
    bandwidth: float
    transfers: bool
    replicate: bool
    limited: bool


class PlacedStage(NamedTuple):
    """One stage of a level's pipeline.

    Attributes:
      begin: The cut at which it begins.
      end: The cut at which it ends.
      workers: Number of its workers.
      after: Number of workers after its own, divided by its own.
    """

    begin: int
    end: int
    workers: int
    after: Fraction


class DynamicProgram:
    """The fastest pipelines of one level, for all spans and numbers of workers.

    Attributes:
      best: Seconds per micro-batch of the slowest stage, `(begin, workers - 1, end)`,
        infinite where there is no plan.
    """

    def __init__(
        self,
        cuts: Cuts,
        level: Level,
        machine: Machine,
        after: Fraction = ANY,
        *,
        whole: bool,
    ) -> None:
        """Solves the program.

        Args:
          cuts: Where stages may begin and end.
          level: Workers, bandwidth, rules.
          machine: The seconds of a span on one of the level's workers.
          after: Number of workers of this level after all those planned here, divided
            by the number of replicas of the pipeline planned here.
          whole: Whether plans must begin at the first cut.
        """
        self.level, self.after = level, after
        self.parameters = _between(cuts.parameter_bytes)
        # Twice: the activation forward and its cotangent back.
        self.crossing = 2 * cuts.output_bytes / level.bandwidth
        self.crossing[-1] = 0.0  # because the loss is not sent
        counts = range(1, level.workers + 1)
        self._first = machine(self._cases((0, own) for own in counts))
        self._others = {
            own: machine(self._cases((q, own) for q in counts[: level.workers - own]))
            for own in self._choices(level.workers - 1)
        }
        # The outermost level is asked for whole models only, a factor of `cuts` less
        # work.
        rows = 1 if whole else len(cuts)
        self.best = np.full((rows, level.workers, len(cuts)), np.inf)
        for end in range(1, len(cuts)):
            self._solve(end)

    def stages(self, begin: int, end: int) -> list[PlacedStage]:
        """The stages of the best pipeline for a span on all workers, first to last."""
        found: list[PlacedStage] = []
        left = self.level.workers
        # From the last stage to the first, as the recurrence was built.
        while self.best[begin, left - 1, end] != self._alone(end)[begin, left - 1]:
            cut, own = self._last(begin, left, end)
            found.insert(0, PlacedStage(cut, end, own, self._case(left - own, own)))
            end, left = cut, left - own
        return [PlacedStage(begin, end, left, self._case(0, left)), *found]

    def _case(self, before: int, own: int) -> Fraction:
        return (self.level.workers - before - own + self.after) / own

    def _cases(self, pairs: Iterable[tuple[int, int]]) -> list[Fraction]:
        """Each case; a single one without a limit, where all are alike."""
        return [self._case(*pair) for pair in pairs] if self.level.limited else [ANY]

    def _solve(self, end: int) -> None:
        rows, workers, _ = self.best.shape
        self.best[:, :, end] = self._alone(end)[:rows]
        step = max(1, BLOCK // (workers * end))
        # The temporary arrays have workers x cuts numbers for each beginning.
        for low in range(0, min(rows, end), step):
            begin = slice(low, min(low + step, rows))
            for own in self._choices(workers - 1):
                before = self.best[begin, : workers - own, low:end]
                slowest = np.maximum(before, self._final(own, end)[:, low:])
                target = self.best[begin, own:, end]
                # In place: `best` is the largest array of the planner.
                np.minimum(target, slowest.min(axis=-1), out=target)

    def _choices(self, most: int) -> range:
        return range(1, (most if self.level.replicate else min(most, 1)) + 1)

    def _alone(self, end: int) -> np.ndarray:
        """Seconds of spans up to `end` as one stage on r workers, `(begin, r - 1)`."""
        r = np.arange(1, self.level.workers + 1)
        parameters = self.parameters[:, end, None]
        synchronise = 4 * (r - 1) * parameters / (self.level.bandwidth * r)
        # The workers inside a machine share the reduction between machines.
        time = (self._first(end).T + synchronise / self.level.inside) / r
        if not self.level.replicate:
            # Plans without replicas have one worker per stage.
            time[:, 1:] = np.inf
        return time

    def _final(self, own: int, end: int) -> np.ndarray:
        """Seconds of the last stage of a pipeline, on `own` workers, `(cases, cut)`.

        The cases are the numbers of workers before it, from 1 on.
        """
        bandwidth = self.level.bandwidth * own
        synchronise = 4 * (own - 1) * self.parameters[:end, end] / bandwidth
        time = (self._others[own](end)[:, :end] + synchronise) / own
        if self.level.transfers:
            time = np.maximum(time, self.crossing[:end] / own)
            time = np.maximum(time, self.crossing[end] / own)
        return time

    def _last(self, begin: int, workers: int, end: int) -> tuple[int, int]:
        """The cut before the last stage of the best pipeline, and its workers."""
        best = self.best[begin, workers - 1, end]
        for own in self._choices(workers - 1):
            final = self._final(own, end)
            # Without a limit `final` has one case, which serves all.
            row = final[min(workers - own, len(final)) - 1]
            slowest = np.maximum(self.best[begin, workers - own - 1, :end], row)
            # Exact comparison: the same operations produced both numbers.
            found = np.flatnonzero(slowest == best)
            if found.size:
                return int(found[-1]), own
        raise AssertionError("the program's best is one of its candidates")


def spans(cuts: Cuts, totals: np.ndarray) -> np.ndarray:
    """Totals between two cuts, infinite where one is not within the other."""
    return np.where(cuts.within, _between(totals), np.inf)


def _between(totals: np.ndarray) -> np.ndarray:
    return totals - totals[:, None]
