"""The face of segments for other parts of jdist, beside the public one.

No user's names: they may change between any two versions. Distributed autograd compiles
the functions that it records, and pipelines their losses, through the same two caches
as `segment` itself, so that what counts as the same function is decided in one place.
"""

from collections.abc import Callable, Hashable
from typing import Any

from jdist.segment._lookup.cache import PATIENCE_WITH_MODELS, VERSIONS, FunctionCache
from jdist.segment._lookup.contents import Contents, contents_of, is_fixed, value_of
from jdist.segment._lookup.program_key import identity_of
from jdist.segment._lookup.traced import (
    Changed,
    Traced,
    TracedProgram,
    refuse_hidden,
    signature_of,
)
from jdist.segment._programs.plan import ForwardPlan
from jdist.segment._programs.recompute import POLICIES
from jdist.segment._residuals import Deferred, passed_on
from jdist.segment._segment import (
    Fold,
    Halves,
    Invoke,
    Segment,
    backward_arrays,
    backward_deferring,
    forward_arrays,
    join_deferred,
)

__all__ = [
    "PATIENCE_WITH_MODELS",
    "POLICIES",
    "VERSIONS",
    "Changed",
    "Contents",
    "Deferred",
    "Fold",
    "ForwardPlan",
    "FunctionCache",
    "Invoke",
    "Traced",
    "TracedProgram",
    "backward_arrays",
    "backward_deferring",
    "contents_of",
    "forward_arrays",
    "identity_of",
    "is_fixed",
    "join_deferred",
    "passed_on",
    "pure_segment",
    "refuse_hidden",
    "signature_of",
    "value_of",
]


def pure_segment(
    fn: Callable[..., Any],
    user: str,
    contents: Contents,
    label: Hashable = None,
    *,
    alone: bool = False,
) -> Segment:
    """A segment of a function that the caller has already found by its contents.

    Args:
      fn: As for `segment`.
      user: Name of the public function that compiles, for errors.
      contents: What `fn` is made of.
      label: What else tells it from others.
      alone: Whether only `fn` uses it, and no function of equal contents.
    """
    halves = Halves(fn, False, user, contents, label, alone=alone)
    # Not its own: where it has changed, the caller's cache is asked again.
    return Segment(fn, halves, (), own=False)
