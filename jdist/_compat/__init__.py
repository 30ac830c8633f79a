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
    has_references,
    inner_programs,
    loop_counts,
    loop_of,
    no_cotangent,
    part_of,
    picks_by_row,
    reads,
    rewritten,
    trace,
    trace_whole,
    with_equations,
    with_inner_programs,
    without_unread,
)
from jdist._compat.run_ahead import launched, paced, shares_threads
from jdist._compat.runtime import (
    abandon_distributed,
    automatic,
    axes_of_one_device_untyped,
    beside,
    called_outside_mesh,
    default_device,
    distributed_client,
    double_precision,
    is_computed,
    is_traced,
    outside_mesh,
    placed,
    placed_as,
    placed_at,
    require_backend,
    set_cpu_device_count,
    with_automatic_axes,
)
from jdist._compat.shards import (
    KEEPS_EXPLICIT_SHARDS,
    after,
    laid_out,
    map_shards,
    shards_of,
    tracks_varying_axes,
    varying_axes,
    zeros_of,
)
from jdist._compat.staging import (
    device_count_of,
    is_partitioned,
    thread_pool_size,
    unrepeatable_effect,
)
