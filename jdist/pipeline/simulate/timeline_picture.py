"""A timeline as a Gantt chart: a row per worker, a colour per kind of action."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jdist._errors import Unavailable, extra
from jdist.pipeline.schedule.actions import KINDS

if TYPE_CHECKING:
    from jdist.pipeline.simulate.timeline import Timeline

COLORS = ("#4c78a8", "#f58518", "#54a24b")
NAMES = ("forward", "backward", "weight gradient")
BARS = 20_000
"""Up to here each action is a bar; beyond, a pixel shows what its middle falls on."""
LABELS = 400
"""Up to here each bar shows its micro-batch."""
WIDTH, HEIGHT = 2400, 800
"""Pixels of the picture at most, beyond `BARS`."""


def draw(timeline: "Timeline", path: Path) -> Path:
    """Draws and writes; nothing of it stays in matplotlib's state.

    Raises:
      Unavailable: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        what = f"a Gantt chart needs matplotlib: {extra('experiments')}"
        raise Unavailable(what) from error
    height = min(2 + 0.35 * timeline.workers, 8)
    figure = Figure(figsize=(12, height), layout="constrained")
    draw_on(timeline, figure.subplots())
    _legend(timeline, figure)
    figure.savefig(path, dpi=150, format=path.suffix[1:] or "png")
    return path


def draw_on(timeline: "Timeline", axes: Any) -> None:
    """Draws the chart without a legend; one bar of each kind has its label."""
    from matplotlib.ticker import MaxNLocator

    (_bars if len(timeline.columns) <= BARS else _image)(timeline, axes)
    axes.set_xlim(0, timeline.makespan or 1)
    axes.set_ylim(timeline.workers - 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("seconds")
    axes.set_ylabel("worker")
    idle = f"{timeline.makespan:.6g} s, bubble {timeline.bubble:.1%}"
    axes.set_title(f"{timeline.name}: {idle}")


def _legend(timeline: "Timeline", figure: Any) -> None:
    from matplotlib.patches import Patch

    present = np.unique(timeline.columns.kind)
    patches = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in present]
    figure.legend(handles=patches, loc="outside lower right", ncols=len(KINDS))


def _bars(timeline: "Timeline", axes: Any) -> None:
    columns = timeline.columns
    unnamed = dict(enumerate(NAMES))
    stages_of = [np.unique(p) for p in np.split(columns.stage, columns.first[1:-1])]
    for worker, stages in enumerate(stages_of):
        span = slice(*columns.first[worker : worker + 2])
        kinds, stage = columns.kind[span], columns.stage[span]
        start, end = timeline.start[span], timeline.end[span]
        for kind, color in enumerate(COLORS):
            for turn, own in enumerate(stages):
                mask = (kinds == kind) & (stage == own)
                if not mask.any():
                    continue
                axes.broken_barh(
                    list(zip(start[mask], (end - start)[mask], strict=True)),
                    (worker - 0.45, 0.9),
                    facecolor=color,
                    edgecolor="white",
                    linewidth=0.5,
                    alpha=1 - 0.5 * turn / len(stages),
                    label=unnamed.pop(kind, None),
                )
    if len(columns) <= LABELS:
        for record in timeline.records():
            middle = (record.start + record.end) / 2
            text = str(record.micro_batch)
            axes.text(middle, record.worker, text, ha="center", va="center", size=7)


def _image(timeline: "Timeline", axes: Any) -> None:
    from matplotlib.colors import ListedColormap

    columns = timeline.columns
    rows = np.linspace(0, timeline.workers - 1, min(timeline.workers, HEIGHT))
    moments = (np.arange(WIDTH) + 0.5) / WIDTH * timeline.makespan
    shown = np.zeros((len(rows), WIDTH), np.uint8)  # 0: idle
    for row, worker in enumerate(np.round(rows).astype(int)):
        span = slice(*columns.first[worker : worker + 2])
        if span.start == span.stop:
            continue
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
        extent=(0, timeline.makespan, timeline.workers - 0.5, -0.5),
    )
