"""Names of `jdist.segment` for the other packages of jdist; not public.

They may change between any two versions. Distributed autograd compiles the functions
that it records, and pipelines their losses, through the same two caches as `segment`
itself, so that one place decides which functions are the same.
"""

from collections.abc import Callable, Hashable
from typing import Any

from jdist.segment._lookup.cache import PATIENCE_WITH_MODELS, VERSIONS, FunctionCache
from jdist.segment._lookup.contents import (
    READS,
    Contents,
    Watched,
    contents_of,
    is_fixed,
)
from jdist.segment._lookup.guarded_jit import GuardedJit
from jdist.segment._lookup.traced import Traced
from jdist.segment._programs.plan import ForwardPlan
from jdist.segment._programs.recompute import POLICIES, is_policy
from jdist.segment._residuals import passed_on
from jdist.segment._segment import (
    Fold,
    Halves,
    Invoke,
    Segment,
    backward_arrays,
    forward_arrays,
    unguarded,
)

__all__ = [
    "PATIENCE_WITH_MODELS",
    "POLICIES",
    "READS",
    "VERSIONS",
    "Contents",
    "Fold",
    "ForwardPlan",
    "FunctionCache",
    "GuardedJit",
    "Invoke",
    "Traced",
    "Watched",
    "backward_arrays",
    "contents_of",
    "forward_arrays",
    "is_fixed",
    "is_policy",
    "passed_on",
    "pure_segment",
    "unguarded",
]


def pure_segment(fn: Callable[..., Any], user: str, label: Hashable = None) -> Segment:
    """Builds a segment of a function whose changes the caller looks for.

    Args:
      fn: As for `segment`.
      user: Name of the public function that compiles, for error messages.
      label: Further part of the cache key; see `segment`.
    """
    return Segment(fn, Halves(fn, False, user, label))
