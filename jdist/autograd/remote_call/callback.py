"""The call inside a compiled program: a callback that XLA runs when it comes to it.

Everything in it is NumPy: what it is given are views of XLA's buffers, and results are
written into buffers of XLA's. To put an array on a device there could need the very
thread that it runs on.
"""

import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

from jdist.autograd.remote_call.arguments import Kind
from jdist.autograd.remote_call.caller import Target, calling
from jdist.autograd.remote_call.operations import Operation
from jdist.autograd.remote_call.pool import pool
from jdist.rpc.errors import RemoteError


def staged_on_cpu(
    target: Target,
    operations: tuple[Operation, ...],
    results: Sequence[Kind],
    arrays: Sequence[Any],
) -> list[Any]:
    """The call as part of the program that is being traced."""

    def run(context: Any, buffers: Sequence[Any], *inputs: Any) -> None:
        found = _waited_for(target, operations, results, inputs)
        for buffer, result in zip(buffers, found, strict=True):
            np.asarray(buffer)[...] = result

    # A side effect: XLA neither drops it nor makes it twice.
    staged = buffer_callback(run, _shapes(results), has_side_effect=True)
    return staged(*arrays)


def staged_elsewhere(
    target: Target,
    operations: tuple[Operation, ...],
    results: Sequence[Kind],
    arrays: Sequence[Any],
) -> list[Any]:
    """The same on accelerators, whose buffers NumPy cannot read."""

    def run(*inputs: Any) -> list[Any]:
        return _waited_for(target, operations, results, inputs)

    return io_callback(run, _shapes(results), *arrays)


def _waited_for(
    target: Target,
    operations: tuple[Operation, ...],
    results: Sequence[Kind],
    inputs: Sequence[Any],
) -> list[Any]:
    try:
        arrays = [np.asarray(x) for x in inputs]
        with pool().occupied(str(target)), calling(target) as caller:
            return caller.call(target, operations, arrays, results, host=True)
    except Exception as error:
        # XLA makes one text of type and message, and drops notes, among which is the
        # traceback of the other worker.
        raise RemoteError("".join(traceback.format_exception(error))) from None


def _shapes(results: Sequence[Kind]) -> list[Any]:
    return [kind._replace(weak=False).abstract for kind in results]
