"""Draws the README's picture: `python docs/picture.py` writes _static/pipelines.png."""

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from jdist import pipeline

SCHEDULES = {
    "GPipe": pipeline.gpipe(4, 8),
    "1F1B": pipeline.one_f_one_b(4, 8),
    "ZB-H1": pipeline.zero_bubble(4, 8),
}
GREY = "#808080"  # readable on white and on black
TEXT = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")


def main() -> None:
    """One row for each schedule, over one axis of time."""
    costs = pipeline.Costs(forward=1.0, backward=2.0)
    with plt.rc_context({**dict.fromkeys(TEXT, GREY), "font.size": 8}):
        figure, rows = plt.subplots(3, figsize=(8, 4.6), layout="constrained")
        lines = [pipeline.simulate(each, costs) for each in SCHEDULES.values()]
        for axes, name, line in zip(rows, SCHEDULES, lines, strict=True):
            line.draw(axes)
            axes.set_title("")
            held = max(line.peak_activations)
            rest = (
                f"bubble {line.bubble:.0%}, at most {held:g} micro-batches' activations"
            )
            axes.set_title(f"{name}: {rest}", loc="left")
            axes.set_xlim(0, max(each.makespan for each in lines))
            axes.set_xlabel("")
            for text in axes.texts:
                text.set_color("white")
        rows[-1].set_xlabel("time, in forward passes of a stage")
        handles, names = rows[-1].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper right", ncols=3, frameon=False)
        path = Path(__file__).parent / "_static" / "pipelines.png"
        figure.savefig(path, transparent=True, dpi=110)


if __name__ == "__main__":
    main()
