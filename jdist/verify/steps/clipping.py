"""Recognition of a gradient that was clipped in parts, not as a whole.

Clipping to a norm c multiplies a gradient v by min(1, c / |v|), and does not commute
with a sum. Clipped in parts v_i, the sum of which should have been clipped, a gradient
is sum min(1, c / |v_i|) v_i. Between two neighbouring norms |v_i| that is linear in c,
so that the best c is found by least squares.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jdist.verify.bound import in_double
from jdist.verify.steps.trajectory import Moment

# What a clip may leave of the gradient, and of the error, that it explains.
REST = 1e-2


class ClippedPart(NamedTuple):
    """A part of a gradient.

    Attributes:
      norm: The norm by which it is clipped.
      addend: What it adds to the whole if it is not; float64, all leaves in a row.
    """

    norm: float
    addend: np.ndarray


def clipped_in_parts(
    found: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray], moment: Moment
) -> str:
    """The clip that explains a wrong gradient, in words; empty if none does.

    Args:
      found: The wrong gradient by path.
      right: What it should have been; the whole gradient, clipped if the update clips.
      moment: The reference's step.
    """
    got, wanted = _row(found), _row(right)
    power = float(wanted @ wanted)
    # A gradient that was clipped may be far smaller than its error.
    left = REST * min(np.linalg.norm(got), np.linalg.norm(got - wanted))
    # Another factor needs no clip to explain it.
    if not power or np.linalg.norm(got - (got @ wanted) / power * wanted) <= left:
        return ""
    for words, parts in _divisions(found, moment):
        norm, rest = norm_of_clip(got, parts)
        # One clipped part alone is that part by another factor, and no sign of a clip.
        several = sum(part.norm > (1 + REST) * norm for part in parts) > 1
        if norm and several and rest <= left:
            return words.format(f"{norm:.4g}")
    return ""


def _divisions(
    found: Mapping[str, np.ndarray], moment: Moment
) -> Iterator[tuple[str, list[ClippedPart]]]:
    """Words for the parts that a gradient may be clipped in, and these."""
    leaves = {path: in_double(moment.wanted[path]) for path in found}
    zeros = {path: np.zeros_like(leaf) for path, leaf in leaves.items()}
    if len(leaves) > 1:
        yield (
            "as if each leaf were clipped to norm {} by its own norm. Clip by the norm "
            "of all leaves together",
            [_part(1.0, zeros | {path: leaf}) for path, leaf in leaves.items()],
        )
    for count, shares, gradients in moment.in_parts():
        yield (
            f"as if the gradient of each of {count} equal parts of the batch were "
            "clipped to norm {} before their sum, as on each device or in each "
            "micro-batch. Clip the gradient of the whole batch",
            [
                _part(share, {path: own[path] for path in found})
                for share, own in zip(shares, gradients, strict=True)
            ],
        )


def norm_of_clip(
    found: np.ndarray, parts: Sequence[ClippedPart]
) -> tuple[float, float]:
    """The norm to which parts were clipped, and what that leaves; 0 if to none.

    Example:
      >>> short = ClippedPart(1.0, np.array([1.0, 0.0]))
      >>> long = ClippedPart(4.0, np.array([0.0, 4.0]))
      >>> norm, rest = norm_of_clip(np.array([1.0, 2.0]), [short, long])
      >>> round(norm, 9), round(rest, 9)
      (2.0, 0.0)
    """
    best = 0.0, float("inf")
    order = sorted((part for part in parts if part.norm > 0), key=lambda x: x.norm)
    for first in range(len(order)):
        # Those from `first` on are clipped, and the norm is not above theirs.
        kept = sum((part.addend for part in order[:first]), np.zeros_like(found))
        slope = sum(
            (part.addend / part.norm for part in order[first:]), np.zeros_like(found)
        )
        power = float(slope @ slope)
        if not power:
            continue
        low = order[first - 1].norm if first else 0.0
        norm = float(slope @ (found - kept)) / power
        norm = min(max(norm, low), order[first].norm)
        rest = float(np.linalg.norm(found - kept - norm * slope))
        if rest < best[1]:
            best = norm, rest
    return best


def _part(weight: float, leaves: Mapping[str, np.ndarray]) -> ClippedPart:
    row = _row(leaves)
    return ClippedPart(float(np.linalg.norm(row)), weight * row)


def _row(leaves: Mapping[str, np.ndarray]) -> np.ndarray:
    """All leaves in one row, the parts of complex numbers side by side."""
    rows = [np.ascontiguousarray(in_double(leaf)).ravel() for leaf in leaves.values()]
    return np.concatenate([row.view(np.float64) for row in rows])
