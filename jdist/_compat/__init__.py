"""Versions of JAX, and its interfaces that are not plain public API.

Everything else in jdist uses names that JAX documents. What differs between the
supported releases (0.10.2 and newer), or is reachable but undocumented, is wrapped
here, with a test in `tests/test_compat.py`, or for what `jdist.segment` is made of in
`tests/segment/test_programs.py`, that fails when JAX changes it.
"""

from jdist._compat.ahead import Ahead
from jdist._compat.convolution import fast_in_loops
from jdist._compat.internals import (
    STATIC_ARGUMENT,
    WRAPPED_FUNCTION,
    ArrayImpl,
    let_go,
    refuse_as_argument,
    trace_context,
)
from jdist._compat.layout import alike, gathered
from jdist._compat.programs import (
    Loop,
    byte_count,
    called_program,
    constants_of,
    equations_for,
    equations_in,
    evaluate,
    inner_programs,
    loop_counts,
    loop_of,
    no_cotangent,
    part_of,
    parts_of_wrapped,
    picks_by_row,
    reads,
    rewritten,
    trace,
    trace_whole,
    without_unread,
)
from jdist._compat.run_ahead import launched, paced, shares_threads
from jdist._compat.runtime import (
    abandon_distributed,
    axes_of_one_device_untyped,
    beside,
    default_device,
    distributed_client,
    double_precision,
    is_computed,
    is_traced,
    placed,
    placed_as,
    placed_at,
    require_backend,
    set_cpu_device_count,
)
from jdist._compat.shards import (
    after,
    laid_out,
    map_shards,
    shards_of,
    tracks_varying_axes,
    varying_axes,
)
from jdist._compat.staging import (
    device_count_of,
    is_partitioned,
    thread_pool_size,
    unrepeatable_effect,
)

__all__ = [
    "STATIC_ARGUMENT",
    "WRAPPED_FUNCTION",
    "Ahead",
    "ArrayImpl",
    "Loop",
    "abandon_distributed",
    "after",
    "alike",
    "axes_of_one_device_untyped",
    "beside",
    "byte_count",
    "called_program",
    "constants_of",
    "default_device",
    "device_count_of",
    "distributed_client",
    "double_precision",
    "equations_for",
    "equations_in",
    "evaluate",
    "fast_in_loops",
    "gathered",
    "inner_programs",
    "is_computed",
    "is_partitioned",
    "is_traced",
    "laid_out",
    "launched",
    "let_go",
    "loop_counts",
    "loop_of",
    "map_shards",
    "no_cotangent",
    "paced",
    "part_of",
    "parts_of_wrapped",
    "picks_by_row",
    "placed",
    "placed_as",
    "placed_at",
    "reads",
    "refuse_as_argument",
    "require_backend",
    "rewritten",
    "set_cpu_device_count",
    "shards_of",
    "shares_threads",
    "thread_pool_size",
    "trace",
    "trace_context",
    "trace_whole",
    "tracks_varying_axes",
    "unrepeatable_effect",
    "varying_axes",
    "without_unread",
]
