"""Timelines: the start and the end of every action of a simulation or a run."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jdist._errors import listed, value_error
from jdist.pipeline.schedule import memory
from jdist.pipeline.schedule.actions import Action, ActionKind, B, Columns, F
from jdist.pipeline.schedule.update_policy import UpdatePolicy
from jdist.pipeline.schedule.versions import live_versions
from jdist.pipeline.simulation import pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class StageBytes(NamedTuple):
    """Bytes that a run's stages kept of a micro-batch, float64, `(stages,)` each.

    If micro-batches differ in size, those of the largest.

    Attributes:
      activation: Between F and B.
      pending: Between B and W; 0 where no W follows.
    """

    activation: np.ndarray
    pending: np.ndarray


class Record(NamedTuple):
    """One action of a run, with its worker and the seconds of its start and end."""

    worker: int
    kind: ActionKind
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """The start and end of every action of all workers.

    Attributes:
      columns: The actions.
      start: Seconds at which each began, float64, from 0.
      end: Seconds at which each ended.
      update_policy: See `Schedule`.
      name: Title of pictures.
      activation_bytes: Per worker, the most bytes held between two actions:
        activations of micro-batches in flight, and values for pending weight gradients.
        None: not known.
      weight_bytes: Per worker, the most bytes of weight versions kept at a time; None:
        not known.
      stage_bytes: Bytes that each stage kept, in a run by `timed`; None: not known.

    Example:
      >>> from jdist.pipeline import one_f_one_b, simulate
      >>> t = simulate(one_f_one_b(4, 8))
      >>> t.makespan, t.bubble, t.peak_activations
      (33.0, 0.2727272727272727, (4, 3, 2, 1))
    """

    columns: Columns
    start: np.ndarray
    end: np.ndarray
    update_policy: UpdatePolicy | None = None
    name: str = ""
    activation_bytes: tuple[float, ...] | None = None
    weight_bytes: tuple[float, ...] | None = None
    stage_bytes: StageBytes | None = None

    @classmethod
    def from_records(
        cls,
        records: Iterable[Record],
        *,
        name: str = "measured",
        update_policy: UpdatePolicy | None = None,
    ) -> "Timeline":
        """Build the timeline of a run from records in any order.

        Args:
          records: The actions of all workers, on one clock.
          name: Title of pictures.
          update_policy: See `Schedule`.

        Raises:
          TypeError: Something is no record.
          ValueError: There are none, one has a worker below 0 or ends before it starts,
            or two of one worker overlap.
        """
        argument = "Timeline.from_records(records=...)"
        given = listed(argument, records, Record, "must be an iterable of Record")
        if not given:
            raise value_error(argument, "must not be empty", "none")
        for record in given:
            if record.worker < 0:
                raise value_error(argument, "must have workers of at least 0", record)
            # Negated, so that a NaN is refused too.
            if not record.start <= record.end:
                raise value_error(argument, "must not end before they start", record)
        # By worker and time, so that neighbours in the list are neighbours in time.
        ordered = sorted(given, key=lambda r: (r.worker, r.start, r.end))
        for before, after in pairwise(ordered):
            if before.worker == after.worker and after.start < before.end:
                rule = "of one worker must not overlap"
                raise value_error(argument, rule, f"{before} and {after}")
        workers = ordered[-1].worker + 1
        programs: list[list[Action]] = [[] for _ in range(workers)]
        for record in ordered:
            action = Action(record.kind, record.stage, record.micro_batch)
            programs[record.worker].append(action)
        # A clock's zero is arbitrary; a timeline starts at 0.
        begin = min(record.start for record in ordered)
        return cls(
            Columns.of(programs),
            np.array([record.start - begin for record in ordered]),
            np.array([record.end - begin for record in ordered]),
            update_policy,
            name,
        )

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.columns.workers

    @cached_property
    def makespan(self) -> float:
        """Seconds from the start of the first action to the end of the last."""
        return float(self.end.max(initial=0.0))

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each worker was busy."""
        # Differences of one running sum, without a loop over workers.
        done = np.concatenate([[0.0], np.cumsum(self.end - self.start)])
        return tuple(np.diff(done[self.columns.first]).tolist())

    @property
    def bubble(self) -> float:
        """The fraction of all workers' time in which they were idle."""
        # The makespan is 0 if all actions cost nothing.
        if not self.makespan:
            return 0.0
        return 1 - sum(self.busy) / (self.workers * self.makespan)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Per worker, the most activations held between two actions; see `Schedule`."""
        return memory.peak_activations(self.columns)

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per worker, the most (stage, micro-batch) pairs between F and B."""
        return memory.peak_in_flight(self.columns)

    @cached_property
    def weight_versions(self) -> tuple[int, ...]:
        """Per worker, the most versions of one stage's weights kept at a time.

        1 for a synchronous schedule.
        """
        # The maximum over the worker's stages.
        kept = live_versions(self.columns, self.update_policy)
        return tuple(int(count) for count in kept.max(axis=0))

    @property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """Per worker, the most bytes of weights and activations; None: not known."""
        if self.activation_bytes is None or self.weight_bytes is None:
            return None
        pairs = zip(self.activation_bytes, self.weight_bytes, strict=True)
        return tuple(a + w for a, w in pairs)

    @cached_property
    def latencies(self) -> np.ndarray:
        """Median seconds from a result to the action that was waiting for it.

        Per pair of neighbouring stages, `(stages - 1,)`, both directions together. Only
        actions whose worker was free before the result existed are counted, since
        nothing else can have delayed these. 0 where there are none.
        """
        columns = self.columns
        shape = (int(columns.stage.max()) + 1, int(columns.micro_batch.max()) + 1)
        worker = columns.worker_of_each()
        first = np.concatenate([[True], worker[1:] != worker[:-1]])
        # An action's worker became free at the end of its previous action.
        free = np.where(first, -np.inf, np.roll(self.end, 1))
        samples: list[list[float]] = [[] for _ in range(shape[0] - 1)]
        for kind, there, back in ((F, 0, 1), (B, 1, 0)):
            at = columns.index_of(kind, *shape)
            for pair, found in enumerate(samples):
                before, after = at[pair + there], at[pair + back]
                both = (before >= 0) & (after >= 0)
                before, after = before[both], after[both]
                # Otherwise the action was waiting for its worker.
                waited = free[after] < self.end[before]
                # Neighbours on one worker exchange no message.
                away = worker[before] != worker[after]
                gaps = self.start[after] - self.end[before]
                found += gaps[waited & away].tolist()
        # Clocks of two processes differ by microseconds: a gap may come out negative.
        return np.array([max(0.0, np.median(s)) if s else 0.0 for s in samples])

    def records(self) -> Iterator[Record]:
        """The actions in order, one worker after the other."""
        columns = self.columns
        workers = columns.worker_of_each()
        for index, worker in enumerate(workers):
            start, end = float(self.start[index]), float(self.end[index])
            yield Record(int(worker), *columns.action(index), start, end)

    @property
    def title(self) -> str:
        """Title of pictures: the name, the makespan and the bubble."""
        return f"{self.name}: {self.makespan:.6g} s, bubble {self.bubble:.1%}"

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Write a Gantt chart to a file; its suffix is the format, by default PNG.

        Raises:
          Unavailable: matplotlib is not installed.
        """
        shown = self.columns, self.start, self.end, self.title
        return pictures.write_gantt(*shown, Path(path))

    def draw(self, axes: "Axes") -> None:
        """Draw a Gantt chart on matplotlib's axes, without a legend."""
        pictures.draw_gantt(self.columns, self.start, self.end, self.title, axes)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON for chrome://tracing and ui.perfetto.dev."""
        return pictures.write_chrome_trace(
            self.columns, self.start, self.end, Path(path)
        )

    def __repr__(self) -> str:
        return (
            f"<Timeline {self.name}: {self.workers} workers, {len(self.columns)} "
            f"actions, {self.makespan:.6g} s, bubble {self.bubble:.1%}>"
        )
