"""Compiling for hardware that is not here: does it fit, and what would it do?

JAX needs a compiler to compile for an accelerator, not the accelerator. `target` names
hardware, `compile` compiles a function for it from shapes alone and reports: bytes on
each device, collectives, operations, and an estimate of the time. The compilers are
extras: `jdist[tpu]`, `jdist[cuda]`. `python -m jdist.targets` does it for a function of
yours.
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
