"""The three figures of the source, each beside the source's own numbers."""

import statistics
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments._resnet_runs import ONE, PARALLEL
from experiments._result import Picture

Seconds = Mapping[str, Sequence[float]]
SOURCE = {ONE: 3.75, PARALLEL: 4.02, "split 20": 2.51, "split 12": 2.43}
"""Seconds that the source reports for 3 batches of 120: ResNet-50 on two GPUs."""
GPUS = "ResNet-50, two GPUs"
COLORS = {ONE: "tab:gray", PARALLEL: "tab:orange"}
PIPED = "tab:blue"


def pictures(seconds: Seconds, setup: str, batch: int) -> list[Picture]:
    """The figures, under the source's names.

    Args:
      seconds: Seconds of each run, by arrangement.
      setup: The network, and on a second line the hardware.
      batch: Examples in a batch.
    """
    sizes = sorted(int(name.split()[1]) for name in seconds if name.startswith("split"))
    shown = f"split {20 if 20 in sizes else sizes[0]}"
    return [
        Picture(
            "mp_vs_rn",
            "One device against the network cut in two, where one half waits for the "
            "other. Whiskers are standard deviations over runs of 3 batches.",
            bars(seconds, [ONE, PARALLEL], setup),
        ),
        Picture(
            "mp_vs_rn_vs_pp",
            "The same, and the two halves at work on different parts of the batch.",
            bars(seconds, [ONE, PARALLEL, shown], setup),
        ),
        Picture(
            "split_size_tradeoff",
            "Seconds over the size of a part. The dashed line is what the bubble alone "
            "would leave of two equal halves.",
            tradeoff(seconds, sizes, setup, batch),
        ),
    ]


def bars(seconds: Seconds, names: Sequence[str], setup: str) -> Figure:
    """Bars of the measured times on the left and the source's on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4))
    means = {name: statistics.mean(seconds[name]) for name in names}
    spread = [statistics.stdev(seconds[name]) for name in names]
    _bars(left, means, spread, setup)
    theirs = [ONE, PARALLEL, "split 20"][: len(names)]
    _bars(right, {name: SOURCE[name] for name in theirs}, None, f"the source\n{GPUS}")
    figure.tight_layout()
    return figure


def _bars(
    axes: Axes, means: Mapping[str, float], spread: list[float] | None, title: str
) -> None:
    colors = [COLORS.get(name, PIPED) for name in means]
    heights = list(means.values())
    drawn = axes.bar(list(means), heights, 0.6, yerr=spread, color=colors, capsize=3)
    one = means[ONE]
    labels = [f"{mean:.3g} s\n{one / mean:.2f}x" for mean in means.values()]
    axes.bar_label(drawn, labels, padding=4)
    tops = np.add(heights, spread if spread is not None else 0)
    axes.set_ylim(0, 1.25 * tops.max())  # room for the labels
    axes.set_ylabel("seconds for 3 batches")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def tradeoff(seconds: Seconds, sizes: Sequence[int], setup: str, batch: int) -> Figure:
    """The time relative to one device over the size of the parts."""
    one = statistics.mean(seconds[ONE])
    runs = [seconds[f"split {size}"] for size in sizes]
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    axes.errorbar(
        sizes,
        [statistics.mean(taken) / one for taken in runs],
        [statistics.stdev(taken) / one for taken in runs],
        fmt="o-" if len(sizes) > 1 else "o",
        capsize=3,
        color=PIPED,
        label=setup.partition("\n")[0],
    )
    theirs = [size for size in (12, 20) if batch == 120]
    if theirs:
        heights = [SOURCE[f"split {size}"] / SOURCE[ONE] for size in theirs]
        label = f"the source: {GPUS}"
        axes.plot(theirs, heights, "D", color="tab:red", label=label)
    bubble = [(1 + size / batch) / 2 for size in sizes]
    # A line through a single point is invisible; a marker is not.
    style = "--" if len(sizes) > 1 else "_"
    label = "bubble alone, equal halves"
    axes.plot(sizes, bubble, style, color="tab:green", markersize=20, label=label)
    for name in (ONE, PARALLEL):
        height = statistics.mean(seconds[name]) / one
        axes.axhline(height, color=COLORS[name], label=name, zorder=0)
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(0)
    axes.set_xlabel("examples in a part")
    axes.set_ylabel("time, one device = 1")
    right = axes.twinx()
    right.set_ylim(0, axes.get_ylim()[1] * one)
    right.set_ylabel("seconds for 3 batches")
    axes.set_title(setup, fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure
