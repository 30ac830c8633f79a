"""Pictures of a timeline: a Gantt chart with matplotlib, and Chrome's trace format."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jdist._errors import Unavailable, extra
from jdist.pipeline.schedule.actions import KINDS, Columns

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


def write_gantt(
    columns: Columns, start: np.ndarray, end: np.ndarray, title: str, path: Path
) -> Path:
    """Write a Gantt chart with a legend to a file.

    Args:
      columns: The actions.
      start: Seconds at which each begins.
      end: Seconds at which it ends.
      title: Title of the chart.
      path: The file; its suffix is the format, by default PNG.

    Raises:
      Unavailable: matplotlib is not installed.
    """
    try:
        # A `Figure` without pyplot, which would keep it alive and may open a display.
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        what = f"a Gantt chart needs matplotlib: {extra('experiments')}"
        raise Unavailable(what) from error
    # Limited to a screen's height: with more workers rows get thinner.
    height = min(2 + 0.35 * columns.workers, 8)
    figure = Figure(figsize=(12, height), layout="constrained")
    draw_gantt(columns, start, end, title, figure.subplots())
    present = np.unique(columns.kind)
    patches = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in present]
    figure.legend(handles=patches, loc="outside lower right", ncols=len(KINDS))
    figure.savefig(path, dpi=150, format=path.suffix[1:] or "png")
    return path


def draw_gantt(
    columns: Columns, start: np.ndarray, end: np.ndarray, title: str, axes: "Axes"
) -> None:
    """Draw a Gantt chart without a legend; one bar of each kind has a label."""
    from matplotlib.ticker import MaxNLocator

    if len(columns) <= BARS:
        _draw_bars(columns, start, end, axes)
    else:
        _draw_image(columns, start, end, axes)
    # `or 1`, because matplotlib warns about an axis of zero length.
    axes.set_xlim(0, float(end.max(initial=0)) or 1)
    axes.set_ylim(columns.workers - 0.5, -0.5)
    # Ranks are integers.
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("seconds")
    axes.set_ylabel("worker")
    axes.set_title(title)


def _draw_bars(
    columns: Columns, start: np.ndarray, end: np.ndarray, axes: "Axes"
) -> None:
    # Each kind is labelled once, so that a legend of the axes has no repeats.
    unnamed = dict(enumerate(NAMES))
    for worker in range(columns.workers):
        span = slice(*columns.first[worker : worker + 2])
        kinds, stages = columns.kind[span], columns.stage[span]
        begin, seconds = start[span], (end - start)[span]
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
        middle, workers = (start + end) / 2, columns.worker_of_each()
        for at, worker, number in zip(
            middle, workers, columns.micro_batch, strict=True
        ):
            axes.text(at, worker, str(number), ha="center", va="center", size=7)


def _draw_image(
    columns: Columns, start: np.ndarray, end: np.ndarray, axes: "Axes"
) -> None:
    """Draw an image in which each pixel shows the action at its middle."""
    from matplotlib.colors import ListedColormap

    makespan = float(end.max())
    rows = np.linspace(0, columns.workers - 1, min(columns.workers, HEIGHT))
    moments = (np.arange(WIDTH) + 0.5) / WIDTH * makespan
    shown = np.zeros((len(rows), WIDTH), np.uint8)  # 0: idle
    for row, worker in enumerate(np.round(rows).astype(int)):
        span = slice(*columns.first[worker : worker + 2])
        if span.start == span.stop:
            continue
        # The last action that began before each moment; it may have ended before, too.
        at = np.searchsorted(start[span], moments, side="right") - 1
        working = (at >= 0) & (moments < end[span][at])
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


def write_chrome_trace(
    columns: Columns, start: np.ndarray, end: np.ndarray, path: Path
) -> Path:
    """Write Chrome's trace format: a line per action, a track per worker."""
    # Line by line, so that memory does not grow with the number of actions.
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for worker in range(columns.workers):
            named = {"name": f"worker {worker}"}
            entry = {"ph": "M", "name": "thread_name", "pid": 0, "tid": worker}
            file.write(json.dumps({**entry, "args": named}) + ",\n")
        between = ""
        for index, worker in enumerate(columns.worker_of_each()):
            action = columns.action(index)
            entry = {
                "ph": "X",
                "name": str(action),
                "cat": action.kind,
                "cname": TRACE_COLORS[columns.kind[index]],
                "pid": 0,
                "tid": int(worker),
                "ts": float(start[index]) * 1e6,
                "dur": float(end[index] - start[index]) * 1e6,
                "args": {"stage": action.stage, "micro_batch": action.micro_batch},
            }
            file.write(between + json.dumps(entry))
            between = ",\n"
        file.write("\n]}\n")
    return path
