"""Where a gradient goes wrong first: taps, recordings of them, and their comparison.

- `primitive`: the tap as a primitive of JAX.
- `recording`: what taps see, and how it travels between processes.
- `tap`: marks values; `tapped`: every submodule of a Flax model.
- `layout`: the axis of a value along which its examples stand.
- `reference`: right values and cotangents, and their bounds.
- `alignment`: which rows of a candidate are which examples.
- `search`: the first difference.
- `shares`: how often each example is in a wrong gradient.
- `report`: the finding.
- `trace`: all of it.
"""

from jdist.verify.tracing.recording import TapRecord, TapRecording, replay
from jdist.verify.tracing.report import Difference, Trace
from jdist.verify.tracing.tap import tap
from jdist.verify.tracing.tapped import tapped
from jdist.verify.tracing.trace import trace, tracer

__all__ = [
    "Difference",
    "TapRecord",
    "TapRecording",
    "Trace",
    "replay",
    "tap",
    "tapped",
    "trace",
    "tracer",
]


def __dir__() -> list[str]:
    return __all__
