"""Timelines: the start and the end of every action of a simulation or a run."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jdist._errors import Unavailable, extra, listed, value_error
from jdist.pipeline.schedule import memory
from jdist.pipeline.schedule.actions import KINDS, Action, ActionKind, B, Columns, F
from jdist.pipeline.schedule.update_policy import UpdatePolicy
from jdist.pipeline.schedule.versions import live_versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLORS = ("#4c78a8", "#f58518", "#54a24b")
NAMES = ("forward", "backward", "weight gradient")
TRACE_COLORS = ("thread_state_running", "rail_response", "rail_animation")
"""Names of colours that Chrome's trace viewer knows."""
BARS = 20_000
"""Largest number of actions drawn as bars; with more, the chart is an image."""
LABELS = 400
"""Largest number of actions whose bars show their micro-batches."""
WIDTH, HEIGHT = 2400, 800
"""Largest size of the image in pixels."""


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
        try:
            # A `Figure` without pyplot, which would keep it alive and may open a
            # display.
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            what = f"a Gantt chart needs matplotlib: {extra('experiments')}"
            raise Unavailable(what) from error
        path = Path(path)
        # Limited to a screen's height: with more workers rows get thinner.
        height = min(2 + 0.35 * self.workers, 8)
        figure = Figure(figsize=(12, height), layout="constrained")
        self.draw(figure.subplots())
        present = np.unique(self.columns.kind)
        patches = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in present]
        figure.legend(handles=patches, loc="outside lower right", ncols=len(NAMES))
        figure.savefig(path, dpi=150, format=path.suffix[1:] or "png")
        return path

    def draw(self, axes: "Axes") -> None:
        """Draw a Gantt chart on matplotlib's axes, without a legend.

        One bar of each kind has a label.
        """
        from matplotlib.ticker import MaxNLocator

        if len(self.columns) <= BARS:
            _draw_bars(self, axes)
        else:
            _draw_image(self, axes)
        # `or 1`, because matplotlib warns about an axis of zero length.
        axes.set_xlim(0, self.makespan or 1)
        axes.set_ylim(self.workers - 0.5, -0.5)
        # Ranks are integers.
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("seconds")
        axes.set_ylabel("worker")
        axes.set_title(self.title)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON for chrome://tracing and ui.perfetto.dev.

        It has a line per action, and a track per worker.
        """
        path = Path(path)
        # Line by line, so that memory does not grow with the number of actions.
        with path.open("w") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            between = "\n"
            for event in _events(self):
                file.write(between + json.dumps(event))
                between = ",\n"
            file.write("\n]}\n")
        return path

    def __repr__(self) -> str:
        return (
            f"<Timeline {self.name}: {self.workers} workers, {len(self.columns)} "
            f"actions, {self.makespan:.6g} s, bubble {self.bubble:.1%}>"
        )


def _draw_bars(timeline: Timeline, axes: "Axes") -> None:
    columns, took = timeline.columns, timeline.end - timeline.start
    # Each kind is labelled once, so that a legend of the axes has no repeats.
    unnamed = dict(enumerate(NAMES))
    for worker in range(columns.workers):
        span = slice(*columns.first[worker : worker + 2])
        kinds, stages = columns.kind[span], columns.stage[span]
        begin, seconds = timeline.start[span], took[span]
        distinct = np.unique(stages)
        for kind, color in enumerate(COLORS):
            for turn, stage in enumerate(distinct):
                mask = (kinds == kind) & (stages == stage)
                if not mask.any():
                    continue
                axes.broken_barh(
                    list(zip(begin[mask], seconds[mask], strict=True)),
                    (worker - 0.45, 0.9),
                    facecolor=color,
                    edgecolor="white",
                    linewidth=0.5,
                    alpha=1 - 0.5 * turn / len(distinct),
                    label=unnamed.pop(kind, None),
                )
    if len(columns) <= LABELS:
        for each in timeline.records():
            middle = (each.start + each.end) / 2, each.worker
            axes.text(*middle, str(each.micro_batch), ha="center", va="center", size=7)


def _draw_image(timeline: Timeline, axes: "Axes") -> None:
    """Draw an image in which each pixel shows the action at its middle."""
    from matplotlib.colors import ListedColormap

    columns, makespan = timeline.columns, timeline.makespan
    rows = np.linspace(0, columns.workers - 1, min(columns.workers, HEIGHT))
    moments = (np.arange(WIDTH) + 0.5) / WIDTH * makespan
    shown = np.zeros((len(rows), WIDTH), np.uint8)  # 0: idle
    for row, worker in enumerate(np.round(rows).astype(int)):
        span = slice(*columns.first[worker : worker + 2])
        if span.start == span.stop:
            continue
        # The last action that began before each moment; it may have ended before, too.
        at = np.searchsorted(timeline.start[span], moments, side="right") - 1
        working = (at >= 0) & (moments < timeline.end[span][at])
        shown[row] = np.where(working, columns.kind[span][at] + 1, 0)
    axes.imshow(
        shown,
        cmap=ListedColormap(["white", *COLORS]),
        vmin=0,
        vmax=len(COLORS),
        aspect="auto",
        interpolation="nearest",
        extent=(0, makespan, columns.workers - 0.5, -0.5),
    )


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The entries of Chrome's trace format."""
    for worker in range(timeline.workers):
        event = {"ph": "M", "name": "thread_name", "pid": 0, "tid": worker}
        yield {**event, "args": {"name": f"worker {worker}"}}
    for worker, kind, stage, micro_batch, start, end in timeline.records():
        yield {
            "ph": "X",
            "name": str(Action(kind, stage, micro_batch)),
            "cat": kind,
            "cname": TRACE_COLORS[KINDS.index(kind)],
            "pid": 0,
            "tid": worker,
            "ts": start * 1e6,
            "dur": (end - start) * 1e6,
            "args": {"stage": stage, "micro_batch": micro_batch},
        }
