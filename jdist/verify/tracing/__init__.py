"""Localization of the first wrong value behind a gradient, by taps.

- `primitive`: the tap as a primitive of JAX.
- `recording`: what taps see, and how it travels between processes.
- `taps`: marks values; `module_taps`: every submodule of a Flax model;
  `torch_taps`: those of a torch model.
- `layout`: the axis of a value along which its examples are laid out.
- `reference`: right values and cotangents, and their bounds.
- `alignment`: which rows of a candidate are which examples.
- `search`: the first difference.
- `shares`: how often each example is in a wrong gradient.
- `report`: the finding.
- `mask_policy`: on which devices random draws are the same.
- `fault_localization`: `trace` and `trace_judge`, which combine them.
"""

from jdist.verify.tracing.fault_localization import trace, trace_judge
from jdist.verify.tracing.mask_policy import masks
from jdist.verify.tracing.module_taps import tapped
from jdist.verify.tracing.recording import TapRecord, TapRecording, replay
from jdist.verify.tracing.report import Difference, Trace
from jdist.verify.tracing.taps import tap
from jdist.verify.tracing.torch_taps import shown

__all__ = [
    "Difference",
    "TapRecord",
    "TapRecording",
    "Trace",
    "masks",
    "replay",
    "shown",
    "tap",
    "tapped",
    "trace",
    "trace_judge",
]


def __dir__() -> list[str]:
    return __all__
