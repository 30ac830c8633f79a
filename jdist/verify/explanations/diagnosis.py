"""Diagnoses of wrong leaves: common mistakes, recognized by their values."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdist.verify.bound import in_double, unit_roundoff

# A suspected explanation must account for all but this share of the leaf.
LIKENESS = 1e-4

# Where rounding allows for more, a factor must account for all but this share of the
# error.
REST = 0.1

# From narrow to wide: numbers of the first are also of those after it.
NARROWER = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32")))
# The number of entries from which it is no accident that all fit into a narrow dtype.
ENTRIES = 4
# How many entries tell most leaves apart.
BEGINNING = 1000
# The largest divisor of sums in a narrow dtype, as of a mean over micro-batches.
DIVISOR = 127
# The largest error of a leaf that was rounded to a narrow dtype, in its roundoffs.
ROUNDINGS = 32


def diagnose(
    path: str,
    wanted: Mapping[str, Any],
    found: np.ndarray,
    ratio: np.ndarray,
    origin: Sequence[int] = (),
) -> str:
    """Describes where a leaf fails and, if it is recognized, the mistake.

    Args:
      path: The leaf that fails.
      wanted: The reference's leaves by path, on the host.
      found: The candidate's leaf.
      ratio: error/bound of each entry, NaN where an entry is not finite.
      origin: The offset of the leaves, if they are slices of larger ones; indices in
        the text are those of the larger ones.
    """
    reference = wanted[path]
    for whose, leaf in (("", found), ("the reference is ", reference)):
        if not np.isfinite(leaf).all():
            where = np.argwhere(~np.isfinite(leaf))[0]
            return f"{whose}not finite: {_at(leaf, where)} at {_index(where, origin)}"
    worst = np.array(np.unravel_index(np.argmax(ratio), ratio.shape))
    text = (
        f"off by {ratio.max():.3g} times the bound at {_index(worst, origin)}: "
        f"expected {_at(reference, worst)}, got {_at(found, worst)}"
    )
    error = np.abs(in_double(found) - in_double(reference))
    bound = np.divide(error, ratio, out=np.zeros_like(error), where=ratio > 0)
    alike = likeness(path, wanted, found, bound)
    return f"{text}; {alike}" if alike else text


def likeness(
    path: str,
    wanted: Mapping[str, Any],
    found: np.ndarray,
    bound: np.ndarray | None = None,
) -> str:
    """The recognized mistake in a leaf, in words; empty if there is none.

    Args:
      path: The leaf.
      wanted: The reference's leaves by path, on the host.
      found: The candidate's leaf.
      bound: What rounding explains of each entry; None if it is not known.
    """
    reference = wanted[path]
    # A single number is always a multiple of another: a factor would say nothing.
    if found.size > 1:
        if told := _multiple(reference, found, bound):
            return told
        if found.ndim == 2 and _alike(reference.T, found):
            return "it is the reference transposed"
    size = float(np.linalg.norm(_flat(found)))
    others = [
        other
        for other, leaf in wanted.items()
        if other != path
        and leaf is not None
        and _begins_alike(leaf, found, size)
        and _alike(leaf, found)
    ]
    if others:
        return f"it is the reference's {others[0]}"
    narrow = _narrow(reference, found)
    return f"all its entries are {narrow}, as of sums in it" if narrow else ""


def _narrow(reference: np.ndarray, found: np.ndarray) -> str:
    """The narrower dtype of which all entries are, in words; empty if there is none."""
    a, b = _flat(reference), _flat(found)
    off, size = np.linalg.norm(b - a), np.linalg.norm(a)
    for dtype in NARROWER:
        if dtype.itemsize >= found.dtype.itemsize // (2 if np.iscomplexobj(b) else 1):
            continue
        # Other numbers, as of signs or counts, have no roundings to blame.
        near = off <= ROUNDINGS * unit_roundoff(dtype) * size
        # A power of two divides exactly.
        for by in range(1, (DIVISOR if near else 0) + 1, 2):
            fits = partial(_fits, by, dtype)
            if fits(b[:BEGINNING]) and fits(b) and not fits(a):
                divided = f", divided by {by}" if by > 1 else ""
                told = f"{dtype.name} numbers{divided}"
                return told if np.unique(b[b != 0]).size >= ENTRIES else ""
    return ""


def _fits(by: int, dtype: np.dtype, values: np.ndarray) -> bool:
    """Whether all values are numbers of a dtype, or such numbers divided by one."""
    real = by * values.view(values.real.dtype)
    # A division in single precision has a rounding of its own.
    rounding = 0 if by == 1 else 2 * unit_roundoff(jnp.dtype("float32"))
    with np.errstate(over="ignore", invalid="ignore"):
        own = real.astype(dtype).astype(real.dtype)
        return bool((np.abs(own - real) <= rounding * np.abs(real)).all())


def _multiple(
    reference: np.ndarray, found: np.ndarray, bound: np.ndarray | None
) -> str:
    """The number by which the whole reference was multiplied, if that is all."""
    a, b = _flat(reference), _flat(found)
    if not a.any():
        return ""
    factor = nearest_factor(a, b)
    rest = np.abs(b - factor * a)
    left = np.linalg.norm(rest)
    # A factor of 1 explains nothing: large entries that are right hide the wrong ones.
    if left <= LIKENESS * np.linalg.norm(b) and abs(factor - 1) > LIKENESS:
        return f"it is {factor:.6g} times the reference"
    # In a program of 16 bits rounding explains far more than in one of 32.
    if (
        bound is not None
        and left <= REST * np.linalg.norm(b - a)
        and (rest <= max(1, abs(factor)) * bound.ravel()).all()
    ):
        return f"it is {factor:.3g} times the reference"
    return ""


def nearest_factor(a: np.ndarray, b: np.ndarray) -> float:
    """The least-squares factor of a in b; the rest decides whether it explains b."""
    power = float(np.vdot(a, a).real)
    return float(np.vdot(a, b).real) / power if power else 0.0


def _begins_alike(first: np.ndarray, second: np.ndarray, size: float) -> bool:
    """Whether the first entries leave it open that two leaves are alike.

    `size` is the 2-norm of the second; a whole model may have leaves of its shape.
    """
    if first.shape != second.shape:
        return False
    a, b = (in_double(x.ravel()[:BEGINNING]) for x in (first, second))
    return bool(np.linalg.norm(a - b) * (1 - LIKENESS) <= LIKENESS * size)


def _alike(first: np.ndarray, second: np.ndarray) -> bool:
    if first.shape != second.shape or not first.any():
        return False
    a, b = _flat(first), _flat(second)
    return bool(np.linalg.norm(a - b) <= LIKENESS * np.linalg.norm(a))


def _flat(array: np.ndarray) -> np.ndarray:
    return in_double(array).ravel()


def _at(array: np.ndarray, index: np.ndarray) -> str:
    return f"{array[tuple(index)]:.6g}"


def _index(index: np.ndarray, origin: Sequence[int]) -> str:
    whole = index + np.asarray(origin, int) if len(origin) else index
    return f"[{', '.join(map(str, whole))}]"
