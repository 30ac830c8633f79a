"""Bar charts of reports: memory of each device, its limit, and estimated time."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from jdist._errors import Unavailable, extra
from jdist.targets.report import CompiledProgram, seconds_text, size_text

COLORS = {
    "arguments": "#4c78a8",
    "outputs": "#72b7b2",
    "temporaries": "#54a24b",
    "code": "#b279a2",
    "wanted": "#e45756",
    "kernels": "#9d755d",
    "collectives, not hidden": "#f58518",
}


def write_picture(programs: Sequence[tuple[str, CompiledProgram]], path: Path) -> Path:
    """Draws memory and estimated time of programs as bars into a file.

    Args:
      programs: Labels and reports, from top to bottom.
      path: The file; PNG unless its name says otherwise.

    Raises:
      Unavailable: matplotlib is not installed.
    """
    try:
        # A figure of its own: pyplot would keep state and open a display.
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        what = f"a picture of reports needs matplotlib: {extra('experiments')}"
        raise Unavailable(what) from error
    height = min(2.2 + 0.5 * len(programs), 12)
    figure = Figure(figsize=(12, height), layout="constrained")
    memory, seconds = figure.subplots(1, 2, sharey=True)
    for row, (_, program) in enumerate(programs):
        wanted, time = program.wanted_bytes, program.seconds
        for axes, parts, told in (
            (memory, _memory(program), "" if wanted is None else size_text(wanted)),
            (seconds, _seconds(program), "" if time is None else seconds_text(time)),
        ):
            start = 0.0
            for name, length in parts.items():
                axes.barh(row, length, left=start, color=COLORS[name])
                start += length
            # A program may be so small that its bar cannot be seen.
            axes.annotate(
                told,
                (start, row),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                size="small",
            )
        limit = program.memory / 2**30
        memory.plot([limit, limit], [row - 0.45, row + 0.45], color="black")
    for axes in (memory, seconds):
        axes.margins(x=0.15)  # For the text behind the longest bar.
    memory.set_yticks(range(len(programs)), [label for label, _ in programs])
    # Reversed, so that the first program is at the top.
    memory.set_ylim(len(programs) - 0.5, -0.5)
    memory.set_xlabel("GiB of each device; the line is its memory")
    seconds.set_xlabel("milliseconds of a step, estimated by roofline")
    patches = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(COLORS))
    figure.savefig(path, dpi=150, format=path.suffix[1:] or "png")
    return path


def _memory(program: CompiledProgram) -> dict[str, float]:
    used = program.bytes_per_device
    if used is None:
        # A refusal without a number is drawn up to the limit.
        wanted = program.wanted_bytes or program.memory
        return {"wanted": wanted / 2**30}
    kinds = {kind: count for kind, count in asdict(used).items() if kind != "aliased"}
    # Results in the memory of donated arguments need none of their own.
    kinds["outputs"] -= used.aliased
    return {kind: count / 2**30 for kind, count in kinds.items()}


def _seconds(program: CompiledProgram) -> dict[str, float]:
    estimate = program.estimate
    if estimate is None:
        return {}
    busy = estimate.seconds - estimate.exposed
    return {"kernels": busy * 1e3, "collectives, not hidden": estimate.exposed * 1e3}
