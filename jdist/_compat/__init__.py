"""Versions of JAX, and its interfaces that are not plain public API.

Everything else in jdist uses names that JAX documents. What differs between the
supported releases (0.10.2 and newer), or is reachable but undocumented, is wrapped
here, with a test in `tests/test_compat.py`, or for what `jdist.segment` is made of in
`tests/segment/test_programs.py`, that fails when JAX changes it.
"""

from jdist._compat.ahead import Ahead
from jdist._compat.layout import alike
from jdist._compat.programs import (
    WRAPPED_FUNCTION,
    Loop,
    byte_count,
    called_program,
    constants_of,
    equations_for,
    evaluate,
    inner_programs,
    loop_counts,
    loop_of,
    no_cotangent,
    part_of,
    parts_of_wrapped,
    picks_by_row,
    reads,
    refuse_as_argument,
    rewritten,
    trace,
    trace_context,
    trace_whole,
    without_unread,
)
from jdist._compat.runtime import (
    abandon_distributed,
    beside,
    default_device,
    distributed_client,
    double_precision,
    is_computed,
    is_traced,
    let_go,
    placed,
    placed_as,
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
    "WRAPPED_FUNCTION",
    "Ahead",
    "Loop",
    "abandon_distributed",
    "after",
    "alike",
    "beside",
    "byte_count",
    "called_program",
    "constants_of",
    "default_device",
    "device_count_of",
    "distributed_client",
    "double_precision",
    "equations_for",
    "evaluate",
    "inner_programs",
    "is_computed",
    "is_partitioned",
    "is_traced",
    "laid_out",
    "let_go",
    "loop_counts",
    "loop_of",
    "map_shards",
    "no_cotangent",
    "part_of",
    "parts_of_wrapped",
    "picks_by_row",
    "placed",
    "placed_as",
    "reads",
    "refuse_as_argument",
    "require_backend",
    "rewritten",
    "set_cpu_device_count",
    "shards_of",
    "thread_pool_size",
    "trace",
    "trace_context",
    "trace_whole",
    "tracks_varying_axes",
    "unrepeatable_effect",
    "varying_axes",
    "without_unread",
]
