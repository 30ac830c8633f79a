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
    GuardedContents,
    contents_of,
    is_fixed,
    value_of,
)
from jdist.segment._lookup.guarded_jit import GuardedJit
from jdist.segment._lookup.program_key import identity_of
from jdist.segment._lookup.traced import (
    Changed,
    Traced,
    TracedProgram,
    refuse_hidden,
    signature_of,
)
from jdist.segment._programs.plan import ForwardPlan
from jdist.segment._programs.recompute import POLICIES, is_policy
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
    unguarded,
)

__all__ = [
    "PATIENCE_WITH_MODELS",
    "POLICIES",
    "READS",
    "VERSIONS",
    "Changed",
    "Contents",
    "Deferred",
    "Fold",
    "ForwardPlan",
    "FunctionCache",
    "GuardedContents",
    "GuardedJit",
    "Invoke",
    "Traced",
    "TracedProgram",
    "backward_arrays",
    "backward_deferring",
    "contents_of",
    "forward_arrays",
    "identity_of",
    "is_fixed",
    "is_policy",
    "join_deferred",
    "passed_on",
    "pure_segment",
    "refuse_hidden",
    "signature_of",
    "unguarded",
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
    """Builds a segment of a function whose contents the caller has already read.

    Args:
      fn: As for `segment`.
      user: Name of the public function that compiles, for error messages.
      contents: The contents of `fn`, from `contents_of`.
      label: Further part of the cache key; see `segment`.
      alone: Whether only `fn` uses the segment, not all functions of equal contents.
    """
    halves = Halves(fn, False, user, contents, label, alone=alone)
    # `own=False`: if `fn` has changed, the caller looks it up again in its own cache.
    return Segment(fn, halves, (), own=False)
