"""How far the host may run ahead of programs over several CPU devices of one process.

XLA runs the programs of all CPU devices on one pool of threads: as many as the process
has cores, and at least as many as it has devices. A program over n devices takes n of
them, and each waits in a collective until the other n - 1 are there. To *launch* such a
program takes n threads of the same pool: each prepares the program of one device, and
waits if 32 programs of that device are in flight. If these take the threads that the
running program lacks, neither goes on: XLA ends the process after a minute in which a
collective was incomplete (jaxlib 0.10.2, `PjRtCpuExecutable::Execute` and
`CpuClientOptions::max_inflight_computations_per_device`). A loop that reads no result
gets there after 32 steps.

So whatever launches such programs calls `paced`, which waits for an earlier one: few
are in flight, no launch waits, and the threads of a launch are soon free again.
"""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jdist._compat.internals import ArrayImpl

IN_FLIGHT = 8
"""Launches of a thread that may be unfinished. Of the 32 the others are left to what a
step launches beside its main program, to the user's operations, and to more threads."""


class _Launches(threading.local):
    """The unfinished launches of a thread: some of the arrays of each, oldest first."""

    # For each thread its own: one that waited for another's launch could keep it from
    # what a callback in that launch waits for.
    def __init__(self) -> None:
        self.arrays: deque[tuple[jax.Array, ...]] = deque()


_launches = _Launches()


@functools.lru_cache(maxsize=64)
def shares_threads(place: object) -> bool:
    """Whether it is a mesh with several CPU devices of this process."""
    if not isinstance(place, Mesh):
        return False
    return place.devices.flat[0].platform == "cpu" and len(place.local_devices) > 1


def paced(
    place: object, *results: Any, wait: Callable[[Any], Any] = jax.block_until_ready
) -> None:
    """Waits until less than `IN_FLIGHT` launches of this thread are unfinished.

    Args:
      place: The mesh of the program that was launched last; does nothing for a single
        device, or devices that are no CPUs or belong to different processes.
      *results: Trees of its results, one for each program if each device has its own.
        One array of each is kept for a while.
      wait: How to wait for arrays.
    """
    if not shares_threads(place):
        return
    kept = tuple([array for tree in results for array in _smallest(tree)])
    if not kept:
        return
    unfinished = _launches.arrays
    unfinished.append(kept)
    if len(unfinished) < IN_FLIGHT:
        return
    # Half of them at once: a wait takes as long as a small step is launched in.
    for _ in range(IN_FLIGHT // 2):
        earlier = unfinished.popleft()
    # Donated to a later one, whose results take its place: XLA runs them in order. The
    # last one's have not been given to any yet.
    while any(array.is_deleted() for array in earlier) and unfinished:
        earlier = unfinished.popleft()
    # An error is raised again where the result is read.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        wait(earlier)


def launched(
    place: object,
    wait: Callable[[Any], Any],
    function: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """Launches a program, and calls `paced` with its results."""
    results = function(*arguments)
    paced(place, results, wait=wait)
    return results


def _smallest(tree: Any) -> tuple[jax.Array, ...]:
    """The array of the fewest elements; none inside a transformation."""
    if type(tree) is ArrayImpl:
        return (tree,)
    arrays = [x for x in jax.tree.leaves(tree) if type(x) is ArrayImpl]
    return (min(arrays, key=lambda x: x.size),) if arrays else ()
