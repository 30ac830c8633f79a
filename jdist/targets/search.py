"""Searches for the largest batch or the smallest slice that fits, by compiling."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from jdist._errors import (
    check_at_least,
    check_choice,
    check_function,
    check_number,
    check_type,
    value_error,
)
from jdist._own_code import OwnCodeRaised
from jdist.targets.chips import CHIPS
from jdist.targets.hardware import Hardware, target
from jdist.targets.job import Job, program_of, takes_batch
from jdist.targets.report import CompiledProgram

SLICES = {
    "v5e": "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    "v5p": "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16",
    "v6e": "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
}
"""Slices that Google's cloud offers, by generation, in ascending number of chips."""

HOSTS = "1x1 1x2 1x4 1x8 2x8 4x8 8x8 16x8 32x8 64x8 128x8"
"""Clusters, as hosts x GPUs of each: parts of one host, then hosts of eight GPUs."""

# A job that fits with this many examples does not depend on their number.
LARGEST_BATCH = 2**40


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration that a search tried: a compiled program, or a refusal.

    Attributes:
      target: Name of the hardware.
      batch: The batch size; None if the job has none.
      program: The report of `compile`; None if the job refused the hardware.
      refusal: Why the job refused the hardware, such as a mesh that does not divide the
        chips; otherwise "".
    """

    target: str
    batch: int | None
    program: CompiledProgram | None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether it was compiled and fits."""
        return self.program is not None and self.program.fits


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search, with all configurations that it tried.

    Attributes:
      best: The candidate of the largest batch or the smallest slice; None if none fits.
      tried: All candidates, in the order in which they were tried.
    """

    best: Candidate | None
    tried: tuple[Candidate, ...]


Told = Callable[[Candidate], object]

_JOB = "must be a function of the hardware, and of the batch size if it has one"


def largest_batch(
    job: Job,
    hardware: Hardware,
    *,
    multiple: int | None = None,
    tolerance: float = 0.05,
    on_candidate: Told = lambda _: None,
) -> SearchResult:
    """The largest batch with which a job fits, by doubling and then by bisection.

    Memory is assumed to grow with the batch. Growth is nearly always linear, so the
    batch at which that line meets the chip's memory is tried first.

    Args:
      job: `job(hardware, batch)`.
      hardware: What to fit.
      multiple: Batches tried are its multiples; None for the number of chips.
      tolerance: How much larger, as a fraction, the largest batch may be than the one
        found. 0 finds it exactly, by more compilations.
      on_candidate: Called with each program as soon as it is compiled.

    Raises:
      ValueError: The job has no parameter `batch`, or fits with any batch; or
        `multiple` or `tolerance` is out of range.
      OwnCodeRaised: The job raised.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jdist import targets
      >>> here = targets.Hardware(
      ...     targets.Chip("here", "cpu", 10_000, 1e10, {"float32": 1e11}), (1,)
      ... )
      >>> def job(hardware, batch=8):
      ...     x = jax.ShapeDtypeStruct((batch, 16), jnp.float32)
      ...     return lambda x: x * 2, x
      >>> best = targets.largest_batch(job, here).best
      >>> 70 < best.batch <= 10_000 // (2 * 16 * 4)
      True
    """
    check_function("largest_batch(job=...)", job, _JOB)
    check_type("largest_batch(hardware=...)", hardware, Hardware, "must be a Hardware")
    if not takes_batch(job):
        rule = "must have a parameter `batch`"
        raise value_error("largest_batch(job=...)", rule, "a job without")
    unit = hardware.chips if multiple is None else multiple
    check_at_least("largest_batch(multiple=...)", unit, 1)
    argument = "largest_batch(tolerance=...)"
    rule = "must be at least 0 and less than 1"
    check_number(argument, tolerance, rule, lambda x: 0 <= x < 1)
    tried: list[Candidate] = []

    def fits(count: int) -> bool:
        batch = count * unit
        candidate = Candidate(hardware.name, batch, program_of(job, hardware, batch))
        tried.append(candidate)
        on_candidate(candidate)
        return candidate.fits

    low, high = 0, 1
    while fits(high):
        # A little below the extrapolated batch, so that it nearly always fits.
        line = _meets(tried, unit, hardware.chip.memory) * 31 // 32
        low, high = high, max(2 * high, line)
        if high * unit > LARGEST_BATCH:
            rule = "must need more memory for a larger batch"
            got = f"a job that fits with {low * unit} examples"
            raise value_error("largest_batch(job=...)", rule, got)
    by_line = True
    # There is no batch between bounds that are one unit apart.
    while high - low > max(1, int(tolerance * low)):
        line = _meets(tried, unit, hardware.chip.memory) * 31 // 32
        middle = line if by_line and low < line < high else (low + high) // 2
        # Invariant: `low` units fit, or are 0, and `high` units do not.
        low, high = (middle, high) if fits(middle) else (low, middle)
        # Where memory is not linear, extrapolation converges slowly: alternate with
        # bisection.
        by_line = not by_line
    best = [each for each in tried if each.fits and each.batch == low * unit]
    return SearchResult(best[0] if best else None, tuple(tried))


def smallest_slice(
    job: Job,
    chip: str,
    *,
    batch: int | None = None,
    on_candidate: Told = lambda _: None,
) -> SearchResult:
    """The smallest slice, or number of hosts, on which a job fits; by bisection.

    A job that fits on a slice is assumed to fit on larger ones. A slice for which the
    job raises a ValueError, such as a mesh that does not divide it, does not fit.

    Args:
      job: `job(hardware)`.
      chip: Its name, such as "v5e" or "h100".
      batch: The batch size on all of them; None for the job's default.
      on_candidate: Called with each program as soon as it is compiled.

    Raises:
      ValueError: There is no such chip, or the job refuses all slices.
      OwnCodeRaised: The job raised something else than a ValueError.
    """
    check_function("smallest_slice(job=...)", job, _JOB)
    check_choice("smallest_slice(chip=...)", chip, CHIPS)
    # GPUs come as hosts, not as slices.
    shapes = SLICES.get(chip, HOSTS).split()
    tried: dict[int, Candidate] = {}

    def fits(index: int) -> bool:
        hardware = target(f"{chip}:{shapes[index]}")
        try:
            program = program_of(job, hardware, batch)
            found = Candidate(hardware.name, batch, program)
        # A ValueError, such as for a mesh that does not divide the chips, rules out
        # this slice only.
        except OwnCodeRaised as error:
            if not isinstance(error.__cause__, ValueError):
                raise
            found = Candidate(hardware.name, batch, None, str(error.__cause__))
        tried[index] = found
        on_candidate(found)
        return found.fits

    smallest = bisect.bisect_left(range(len(shapes)), True, key=fits)
    # If the job refuses every slice, the fault is the job's and not the chip's.
    if all(each.program is None for each in tried.values()):
        refusal = next(iter(tried.values())).refusal
        rule = "must take one of the chip's slices"
        raise value_error("smallest_slice(job=...)", rule, refusal)
    return SearchResult(tried.get(smallest), tuple(tried.values()))


def _meets(tried: list[Candidate], unit: int, memory: int) -> int:
    """The batch, in units, that fills the memory, extrapolated from the last two."""
    points = sorted(
        (each.batch, each.program.bytes_per_device.total)
        for each in tried
        if each.batch and each.program and each.program.bytes_per_device and each.fits
    )[-2:]
    # Without growth there is no crossing: the caller doubles or bisects.
    if len(points) < 2 or points[1][1] <= points[0][1]:
        return 0
    (first, less), (second, more) = points
    batch = second + (memory - more) * (second - first) // (more - less)
    return int(min(batch, LARGEST_BATCH)) // unit
