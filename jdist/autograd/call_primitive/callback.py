"""Remote calls inside compiled programs: XLA callbacks and the threads they occupy.

Everything in the callback is NumPy: its inputs are views of XLA's buffers, and it
writes results into buffers of XLA's. To put an array on a device there could need the
very thread that it runs on.

A callback runs on the thread that called the jitted function, or, for instance in a
loop with a large body, on one of the threads that XLA's CPU client has for all programs
of the process. While it waits for another worker, that thread is blocked. If all of
them are, no program that needs one continues; and if the awaited answer needs such a
program (a function that calls back, a worker in the same process), that is a deadlock.
The last thread is therefore never given to a waiting call. With one thread left
programs continue, if slowly, and a callback on the last thread that would have to wait
is refused at once: no set of calls, however nested, waits for ever.
"""

import functools
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback
from jax.typing import ArrayLike, DTypeLike

from jdist._compat import thread_pool_size
from jdist._errors import requirement
from jdist.autograd.call_primitive.arguments import abstract_of
from jdist.autograd.call_primitive.caller import Call, calling
from jdist.rpc import RemoteError, RpcError


class CallbackThreads:
    """Counts the calls that wait on XLA's threads.

    Args:
      size: How many threads there are.

    Attributes:
      size: The same.
      waiting: Number of calls that wait on them now.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.waiting = 0
        self._lock = threading.Lock()

    @contextmanager
    def occupied(self, call: str) -> Iterator[None]:
        """Guards a wait in a callback; `call` names it in messages.

        Raises:
          RpcError: It would occupy the last thread.
        """
        # A callback may run on the thread that called the jitted function; waiting
        # there occupies none of XLA's.
        if _of_python():
            yield
            return
        with self._lock:
            # The last thread stays free: what is waited for may need it.
            if self.waiting + 1 >= self.size:
                raise RpcError(self._refusal(call))
            self.waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self.waiting -= 1

    def _refusal(self, call: str) -> str:
        rule = "inside a jitted function must leave one of XLA's threads free"
        got = f"{self.waiting} calls that wait on its {self.size} threads already"
        remedy = (
            "Start the process with more threads: PJRT_NPROC in its environment before "
            "JAX starts, or `ProcessSettings(callback_threads=...)` of rpc.spawn and "
            "jdist.launch. A call that is not jitted needs none."
        )
        return requirement(call, rule, got, remedy)


def _of_python() -> bool:
    """Whether this thread was started by Python, and so is not XLA's."""
    # `threading.current_thread()` would enter a foreign thread among Python's for good.
    own = threading.get_ident()
    found = (t for t in threading.enumerate() if t.ident == own)
    return any(not t.name.startswith("Dummy-") for t in found)


@functools.cache
def callback_threads() -> CallbackThreads:
    """Returns this process's counter of XLA's threads."""
    # Read once: XLA has fixed their number when it runs programs.
    return CallbackThreads(thread_pool_size())


def staged_on_cpu(call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Stages a call into the program that is being traced, on CPU."""

    kinds = [abstract_of(x) for x in arrays]

    def run(context: object, buffers: Sequence[Any], *inputs: ArrayLike) -> None:
        views = zip(map(np.asarray, inputs), kinds, strict=True)
        # Back from the dtype in which the buffer carries them.
        given = [view.astype(kind.dtype, copy=False) for view, kind in views]
        found = _waited_for(call, given)
        for buffer, result in zip(buffers, found, strict=True):
            np.asarray(buffer)[...] = result

    # A side effect: XLA neither drops it nor makes it twice.
    shapes = [jax.ShapeDtypeStruct(k.shape, _carrier(k.dtype)) for k in call.results]
    staged = buffer_callback(run, shapes, has_side_effect=True)
    found = staged(
        *[x.astype(_carrier(k.dtype)) for x, k in zip(arrays, kinds, strict=True)]
    )
    return [x.astype(k.dtype) for x, k in zip(found, call.results, strict=True)]


def staged_elsewhere(call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Stages a call on accelerators, whose buffers NumPy cannot read."""

    def run(*inputs: ArrayLike) -> list[jax.Array]:
        return _waited_for(call, inputs)

    shapes = [jax.ShapeDtypeStruct(k.shape, k.dtype) for k in call.results]
    return io_callback(run, shapes, *arrays)


def _waited_for(call: Call, inputs: Sequence[ArrayLike]) -> list[jax.Array]:
    target = call.target
    try:
        arrays = [np.asarray(x) for x in inputs]
        with callback_threads().occupied(str(target)), calling(target) as caller:
            return caller.make(call, arrays, host=True)
    except Exception as error:  # noqa: BLE001 - XLA hands it to the caller
        # XLA makes one text of type and message, and drops notes, among which is the
        # traceback of the other worker.
        raise RemoteError("".join(traceback.format_exception(error))) from None


def _carrier(dtype: np.dtype) -> DTypeLike:
    """Returns the dtype in which a buffer carries such numbers exactly."""
    # Two numbers of 4 bits share a byte in XLA's memory, but not in NumPy's: a view of
    # theirs would be a copy, and what is written to it would be lost.
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        return jnp.float32
    return dtype
