"""Where a small gradient's time goes: example (iv) of two processes, drawn over time.

A few functions of both processes are wrapped, each a *station*, and write down when
they begin and end. A bar is the innermost station that runs; where none does, Python of
calls, hooks and the engine. The pass that is drawn is the one of median duration.
"""

import functools
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from benchmarks import _autograd_models as models
from jdist import autograd, rpc
from jdist.autograd.recording import node, pure
from jdist.rpc.codec import Codec
from jdist.rpc.wire.connection import Connection

PYTHON, CODEC, WIRE, XLA, WAITING = (
    "Python: calls, hooks, engine",
    "codec: values and trees of bytes",
    "wire: frames sent, read, a thread woken",
    "XLA: compiled halves",
    "waiting",
)
COLOURS = {
    PYTHON: "#3b6fb6", CODEC: "#8fbce6", WIRE: "#e08e2b", XLA: "#3f9b56",
    WAITING: "#d9d9d9",
}  # fmt: skip
LANES = ("worker0: calls", "worker1: is called")
WARMUP, PASSES = 200, 400
GREY = "#808080"  # readable on white and on black
TEXT = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")


class Bar(NamedTuple):
    """A stretch of one lane, in seconds of the machine's one monotonic clock."""

    begin: float
    end: float
    station: str


class Stamps:
    """The stations of this process, as they are passed.

    Attributes:
      rows: Begin, end, station and thread of each; of nested ones the inner one first.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, str, int]] = []

    def wrap(self, owner: Any, name: str, station: str) -> None:
        """Puts a function in the place of `owner.name` that notes when it runs."""
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def stamped(*args: Any, **kwargs: Any) -> Any:
            begin = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                row = (begin, time.monotonic(), station, threading.get_ident())
                self.rows.append(row)

        setattr(owner, name, stamped)


STAMPS = Stamps()


def wrap_stations() -> None:
    """Wraps the stations of this process."""
    for name in ("encode", "decode"):
        STAMPS.wrap(Codec, name, CODEC)
    STAMPS.wrap(Connection, "send", WIRE)
    for name in ("receive", "exchange"):
        STAMPS.wrap(Connection, name, WAITING)
    STAMPS.wrap(pure, "forward_arrays", XLA)
    STAMPS.wrap(node, "backward_arrays", XLA)


def forget() -> None:
    """Drops what was noted so far."""
    STAMPS.rows.clear()


def _worker(rank: int, folder: str) -> None:
    wrap_stations()
    rpc.init_rpc(f"worker{rank}", allow=("benchmarks",))
    if rank == 0:
        t1, t2, t4 = (autograd.variable(models.small(i)) for i in (1, 2, 4))
        for _ in range(WARMUP):
            _example(t1, t2, t4)
        rpc.rpc_sync("worker1", forget)
        forget()
        moments = [_timed(t1, t2, t4) for _ in range(PASSES)]
        Path(folder, "passes.json").write_text(json.dumps(moments))
    rpc.shutdown()
    Path(folder, f"{rank}.json").write_text(json.dumps(STAMPS.rows))


def _timed(*variables: Any) -> tuple[float, float]:
    begin = time.monotonic()
    _example(*variables)
    return begin, time.monotonic()


def _example(t1: Any, t2: Any, t4: Any) -> None:
    with autograd.context() as context_id:
        t3 = rpc.rpc_sync("worker1", jnp.add, args=(t1, t2))
        autograd.backward(context_id, [(t3 * t4).sum()])
        for each in (t1, t2, t4):
            autograd.get_gradients(context_id)[each]


def measured() -> tuple[list[list[Bar]], float]:
    """The bars of both lanes in the pass of median duration, and that duration."""
    with tempfile.TemporaryDirectory() as folder:
        rpc.spawn(_worker, args=(folder,), nprocs=2, pin=1)
        rows = [json.loads(Path(folder, f"{k}.json").read_text()) for k in (0, 1)]
        passes = json.loads(Path(folder, "passes.json").read_text())
    median = statistics.median_low(end - begin for begin, end in passes)
    begin, end = next(one for one in passes if one[1] - one[0] == median)
    inside = [_of_the_pass(each, begin, end) for each in rows]
    sent = [[b for _, b, station in each if station == WIRE] for each in inside]
    lanes = [
        _bars(own, other, begin, end)
        for own, other in zip(inside, reversed(sent), strict=True)
    ]
    return [[_shifted(bar, begin) for bar in lane] for lane in lanes], median


def _of_the_pass(
    rows: Sequence[tuple[float, float, str, int]], begin: float, end: float
) -> list[tuple[float, float, str]]:
    """The stations of the thread that calls, or serves calls, during a pass."""
    found = [row for row in rows if row[1] > begin and row[0] < end]
    # Other threads wait all the time, for heartbeats.
    thread = statistics.mode(row[3] for row in found if row[2] == WIRE)
    return [row[:3] for row in found if row[3] == thread]


def _bars(
    rows: Sequence[tuple[float, float, str]],
    sent: Sequence[float],
    begin: float,
    end: float,
) -> list[Bar]:
    """One lane, cut at every beginning and end of a station.

    Args:
      rows: Its stations; a wait lasts until its message has been read.
      sent: When the other lane's messages were sent: what follows in a wait is wire.
      begin: Of the pass.
      end: Of the pass.
    """
    edges = {begin, end, *(x for a, b, _ in rows for x in (a, b)), *sent}
    moments = sorted(x for x in edges if begin <= x <= end)
    bars: list[Bar] = []
    for one, two in itertools.pairwise(moments):
        over = [row for row in rows if row[0] <= one and two <= row[1]]
        # The innermost is the one that began last, and of two ends first.
        station, since = PYTHON, begin
        if over:
            since, _, station = max(over, key=lambda row: (row[0], -row[1]))
        if station == WAITING and any(since < x <= one for x in sent):
            station = WIRE
        if bars and bars[-1].station == station:
            bars[-1] = bars[-1]._replace(end=two)
        else:
            bars.append(Bar(one, two, station))
    return bars


def _shifted(bar: Bar, begin: float) -> Bar:
    return Bar(bar.begin - begin, bar.end - begin, bar.station)


def draw(path: Path) -> None:
    """Runs the example and draws the pass of median duration."""
    lanes, duration = measured()
    style: dict[Any, Any] = {**dict.fromkeys(TEXT, GREY), "font.size": 8}
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(8, 2.3), layout="constrained")
        for row, bars in enumerate(lanes):
            spans = [(1e6 * x.begin, 1e6 * (x.end - x.begin)) for x in bars]
            colours = [COLOURS[x.station] for x in bars]
            axes.broken_barh(spans, (-row - 0.36, 0.72), facecolors=colours)
        axes.set_yticks([0, -1], LANES)
        axes.set_xlim(0, 1e6 * duration)
        axes.set_xlabel("time, us")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
        handles = [
            Patch(color=colour, label=f"{name}, {_shares(lanes, name)}")
            for name, colour in COLOURS.items()
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False)
        figure.savefig(path, transparent=True, dpi=130)
        plt.close(figure)


def _shares(lanes: Sequence[Sequence[Bar]], station: str) -> str:
    """Microseconds of a station in each lane."""
    spent = [
        sum(x.end - x.begin for x in bars if x.station == station) for bars in lanes
    ]
    return f"{1e6 * spent[0]:.0f} + {1e6 * spent[1]:.0f} us"
