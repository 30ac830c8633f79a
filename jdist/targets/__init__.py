"""Ahead-of-time compilation for accelerators that are not attached.

Compiling for an accelerator requires its compiler, not the accelerator. `target` names
the hardware; `compile` compiles a function for it from shapes alone and reports the
bytes on each device, the collectives, the operations, and an estimate of the time. The
compilers are extras: `jdist[tpu]`, `jdist[cuda]`. `python -m jdist.targets` does the
same from the command line.
"""

from jdist.targets.chips import CHIPS, Chip, Gpu
from jdist.targets.collectives import Collective
from jdist.targets.compilation import compile
from jdist.targets.hardware import Hardware, target
from jdist.targets.report import CompiledProgram, DeviceMemory
from jdist.targets.roofline import Estimate
from jdist.targets.search import (
    Candidate,
    SearchResult,
    largest_batch,
    smallest_slice,
)

__all__ = [
    "CHIPS",
    "Candidate",
    "Chip",
    "Collective",
    "CompiledProgram",
    "DeviceMemory",
    "Estimate",
    "Gpu",
    "Hardware",
    "SearchResult",
    "compile",
    "largest_batch",
    "smallest_slice",
    "target",
]


def __dir__() -> list[str]:
    return __all__
