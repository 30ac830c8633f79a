"""What happened when: of a simulation and of a run alike."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jdist._errors import requirement
from jdist.pipeline.schedule import memory
from jdist.pipeline.schedule.actions import Action, B, Columns, F, Kind
from jdist.pipeline.schedule.schedule import Updates
from jdist.pipeline.schedule.versions import live_versions
from jdist.pipeline.simulate import timeline_picture, timeline_trace


class StageBytes(NamedTuple):
    """What a run's stages kept of a micro-batch, in bytes, float64, `(stages,)` each.

    Where micro-batches differ in size, of the largest.

    Attributes:
      activation: Between F and B.
      pending: After B: for W, or for joined weight gradients; 0 where nothing waits.
    """

    activation: np.ndarray
    pending: np.ndarray


class Record(NamedTuple):
    """One action of a run: who did what from when to when, in seconds."""

    worker: int
    kind: Kind
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each worker did what.

    Attributes:
      columns: The actions.
      start: Seconds at which each began, float64, from 0.
      end: And ended.
      updates: When stages updated; None: after all.
      name: For pictures.
      activation_bytes: Per worker, the most bytes held between two actions:
        activations of micro-batches in flight, and what weight gradients wait with.
        None: not known.
      weight_bytes: Per worker, the bytes of all versions that it keeps at most; None:
        not known.
      stage_bytes: Of a run by `timed`: what each stage kept. None: not known.
      joined: Whether each stage joins its weight gradients; empty: none does.

    Example:
      >>> from jdist.pipeline import one_f_one_b, simulate
      >>> t = simulate(one_f_one_b(4, 8))
      >>> t.makespan, t.bubble, t.peak_activations
      (33.0, 0.2727272727272727, (4, 3, 2, 1))
    """

    columns: Columns
    start: np.ndarray
    end: np.ndarray
    updates: Updates | None = None
    name: str = ""
    activation_bytes: tuple[float, ...] | None = None
    weight_bytes: tuple[float, ...] | None = None
    stage_bytes: StageBytes | None = None
    joined: tuple[bool, ...] = ()

    @classmethod
    def from_records(
        cls,
        records: Iterable[Record],
        *,
        name: str = "measured",
        updates: Updates | None = None,
    ) -> "Timeline":
        """The timeline of a run, from records in any order.

        Args:
          records: What each worker did, on one clock.
          name: For pictures.
          updates: See `Schedule`.

        Raises:
          ValueError: There are none, one ends before it starts, or two of one worker
            overlap.
        """
        ordered = sorted(records, key=lambda r: (r.worker, r.start, r.end))
        argument = "Timeline.from_records(records=...)"
        if not ordered:
            raise ValueError(requirement(argument, "must not be empty", "none"))
        for before, after in zip([None, *ordered], ordered, strict=False):
            if not after.start <= after.end:
                rule = "must not end before they start"
                raise ValueError(requirement(argument, rule, repr(after)))
            same = before is not None and before.worker == after.worker
            if before is not None and same and after.start < before.end:
                rule = "of one worker must not overlap"
                got = f"{before} and {after}"
                raise ValueError(requirement(argument, rule, got))
        workers = ordered[-1].worker + 1
        programs: list[list[Action]] = [[] for _ in range(workers)]
        for record in ordered:
            action = Action(record.kind, record.stage, record.micro_batch)
            programs[record.worker].append(action)
        begin = min(record.start for record in ordered)
        return cls(
            Columns.of(programs),
            np.array([record.start - begin for record in ordered]),
            np.array([record.end - begin for record in ordered]),
            updates,
            name,
        )

    @property
    def workers(self) -> int:
        """Their number."""
        return self.columns.workers

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first action's begin to the last one's end."""
        return float(self.end.max(initial=0.0))

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each worker worked."""
        done = np.concatenate([[0.0], np.cumsum(self.end - self.start)])
        return tuple(np.diff(done[self.columns.first]).tolist())

    @property
    def bubble(self) -> float:
        """The share of all workers' time in which they did not work."""
        if not self.makespan:
            return 0.0
        return 1 - sum(self.busy) / (self.workers * self.makespan)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Per worker, the most held between two actions; see `Schedule`.

        With what joined weight gradients keep, which a schedule does not know of.
        """
        every = None if self.updates is None else self.updates.every
        return memory.peak_activations(self.columns, self.joined, every)

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per worker, the most (stage, micro-batch) between F and B."""
        return memory.peak_in_flight(self.columns)

    @cached_property
    def weight_versions(self) -> tuple[int, ...]:
        """Per worker, how many versions of one of its stages' weights it kept at most.

        1 for a schedule with a flush.
        """
        kept = live_versions(self.columns, self.updates)
        return tuple(int(count) for count in kept.max(axis=0))

    @property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """Per worker, bytes of weights and activations at most; None: not known."""
        if self.activation_bytes is None or self.weight_bytes is None:
            return None
        pairs = zip(self.activation_bytes, self.weight_bytes, strict=True)
        return tuple(a + w for a, w in pairs)

    @cached_property
    def latencies(self) -> np.ndarray:
        """Median seconds from a result to the action that had waited for it.

        Per pair of neighbouring stages, `(stages - 1,)`, both ways taken together; only
        where the other worker was free before the result was there, so that nothing
        else can have kept it. 0 where that never happened.
        """
        columns = self.columns
        shape = (int(columns.stage.max()) + 1, int(columns.micro_batch.max()) + 1)
        worker = columns.worker_of_each()
        first = np.concatenate([[True], worker[1:] != worker[:-1]])
        free = np.where(first, -np.inf, np.roll(self.end, 1))
        samples: list[list[float]] = [[] for _ in range(shape[0] - 1)]
        for kind, there, back in ((F, 0, 1), (B, 1, 0)):
            at = columns.index_of(kind, *shape)
            for pair, found in enumerate(samples):
                before, after = at[pair + there], at[pair + back]
                both = (before >= 0) & (after >= 0)
                before, after = before[both], after[both]
                waited = free[after] < self.end[before]
                away = worker[before] != worker[after]
                gaps = self.start[after] - self.end[before]
                found += gaps[waited & away].tolist()
        return np.array([max(0.0, np.median(s)) if s else 0.0 for s in samples])

    def records(self) -> Iterator[Record]:
        """Its actions, one worker's after the other's, in order."""
        columns = self.columns
        workers = columns.worker_of_each()
        for index, worker in enumerate(workers):
            start, end = float(self.start[index]), float(self.end[index])
            yield Record(int(worker), *columns.action(index), start, end)

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draws a Gantt chart into a file, PNG unless its name says otherwise.

        Raises:
          Unavailable: matplotlib is not installed.
        """
        return timeline_picture.draw(self, Path(path))

    def draw(self, axes: Any) -> None:
        """Draws a Gantt chart on matplotlib's axes, without a legend."""
        timeline_picture.draw_on(self, axes)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> Path:
        """Writes JSON that chrome://tracing and ui.perfetto.dev show."""
        return timeline_trace.write(self, Path(path))

    def __repr__(self) -> str:
        return (
            f"<Timeline {self.name}: {self.workers} workers, {len(self.columns)} "
            f"actions, {self.makespan:.6g} s, bubble {self.bubble:.1%}>"
        )
