"""A connection whose large JAX arrays pass it by, from device to device.

    frame     meta["transfer"] = (address, number, (leaf, ...)); these leaves are not
              in it; leaf = (index, dtype, shape, weak, number of the receiver's device
              plus one, or 0)
    "taken"   tree = [number, whether they were pulled]; sent back

The frame keeps its place among the frames: `receive` returns it when its arrays are
there, as with arrays on the wire. When they do not come the connection is as good as
before, and whoever decodes the value in which they are missing gets the error.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from jdist._compat import array_kind
from jdist.rpc.base.deadline import Deadline, exceeded, from_meta
from jdist.rpc.base.device_maps import device_of, number_beside
from jdist.rpc.base.errors import ProtocolError, RpcError, RpcTimeout, TransferFailed
from jdist.rpc.codec.dtypes import dtype_name, dtype_named
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.connection import Connection, Terms
from jdist.rpc.wire.frame import ERROR, REPLY, TAKEN, Frame, Missing
from jdist.rpc.wire.framing import Limits
from jdist.rpc.wire.memory import MemoryPool
from jdist.rpc.wire.stream import ByteStream
from jdist.rpc.wire.transfer_port import Port

_META = "transfer"
_ANSWERS = (REPLY, ERROR)
_ANSWER_SECONDS = 10.0


class TransferConnection(Connection):
    """A `Connection` between two workers that both transfer.

    Args:
      stream, peer, terms, pool, on_close: See `Connection`.
      port: What this worker offers and pulls.
    """

    def __init__(
        self,
        stream: ByteStream,
        peer: str,
        terms: Terms,
        pool: MemoryPool | None,
        on_close: Callable[[Connection], None],
        port: Port,
    ) -> None:
        def ended(connection: Connection) -> None:
            port.drop(self)
            on_close(connection)

        super().__init__(stream, peer, terms, pool, ended)
        self._port = port
        self._offered: dict[int, int] = {}

    def send(self, frame: Frame, deadline: float | None = None) -> None:
        """Sends one frame; see `Channel.send`."""
        apart = [i for i, leaf in enumerate(frame.leaves) if self._port.wants(leaf)]
        arrays = [frame.leaves[index] for index in apart]
        # What is beyond the limits is left to those who refuse it.
        number = None
        if arrays and sum(a.nbytes for a in arrays) <= self._terms.limits.body_bytes:
            number = self._port.offer(arrays, self)
        if number is None:
            super().send(frame, deadline)
            return
        devices = self.devices(frame.kind)
        described = [
            (
                index,
                dtype_name(array.dtype),
                array.shape,
                array.weak_type,
                number_beside(array, devices),
            )
            for index, array in zip(apart, arrays, strict=True)
        ]
        rest = [leaf for i, leaf in enumerate(frame.leaves) if i not in set(apart)]
        meta = frame.meta | {_META: (self._port.address, number, described)}
        if frame.kind not in _ANSWERS:
            self._offered[frame.id] = number
        try:
            super().send(frame._replace(meta=meta, leaves=rest), deadline)
        except BaseException:
            self._port.settle(number, self, taken=False)
            raise

    def receive(self, deadline: float | None = None) -> Frame:
        """The next frame, when its arrays are there; see `Channel.receive`."""
        while True:
            frame = super().receive(deadline)
            if not self._takes(frame):
                return self._completed(frame, deadline)

    def receive_brief(self, deadline: float) -> Frame | Callable[[], Frame]:
        """See `Channel.receive_brief`; it may take long to pull arrays."""
        while True:
            frame = super().receive_brief(deadline)
            if not isinstance(frame, Frame):
                return self.receive
            if self._takes(frame):
                continue
            if _META in frame.meta:
                return functools.partial(self._completed, frame, None)
            return frame

    def _takes(self, frame: Frame) -> bool:
        """Whether a frame was for this connection itself."""
        if frame.kind in _ANSWERS:
            self._answered(frame)
        if frame.kind != TAKEN:
            return False
        self._offered.pop(frame.id, None)
        with self._hostility():
            self._port.settle(*_settled(frame.tree, self))
        return True

    def _completed(self, frame: Frame, deadline: float | None) -> Frame:
        if _META not in frame.meta:
            return frame
        with self._hostility():
            return self._complete(frame, deadline)

    @contextlib.contextmanager
    def _hostility(self) -> Iterator[None]:
        """What is no frame ends the connection."""
        try:
            yield
        except ProtocolError as error:
            self.close(f"it sent what is no frame: {error}")
            raise

    def _answered(self, frame: Frame) -> None:
        """A request was answered, so its arrays are there or will not be.

        The word that they were taken may come later than that, when nobody reads here.
        """
        number = self._offered.pop(frame.id, None)
        if number is not None:
            self._port.settle(number, self, taken=frame.kind == REPLY)

    def _complete(self, frame: Frame, deadline: float | None) -> Frame:
        meta = dict(frame.meta)
        coming = _coming(meta.pop(_META), self._terms.limits)
        call = from_meta(meta)
        limits = (deadline, call.at, time.monotonic() + self._terms.stall)
        until = min(limit for limit in limits if limit is not None)
        kinds = [leaf.kind for leaf in coming.leaves]
        arrays: list[Any]
        try:
            arrays = self._port.pull(coming.address, coming.number, kinds, until)
        except TransferFailed as error:
            self._answer(frame.id, coming.number, taken=False)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(str(error)) from error
            arrays = [Missing(self._why(error, call))] * len(kinds)
        else:
            self._answer(frame.id, coming.number, taken=True)
        leaves = list(frame.leaves)
        for leaf, array in zip(coming.leaves, arrays, strict=True):
            leaves.insert(leaf.place, leaf.placed(array))
        return frame._replace(meta=meta, leaves=leaves)

    def _why(self, error: TransferFailed, call: Deadline) -> RpcError:
        what = f"An array of worker {self.peer!r} did not arrive: {error}."
        if call.at is not None and time.monotonic() >= call.at:
            return RpcTimeout(f"{exceeded(call)}. {what}")
        return TransferFailed(what)

    def _answer(self, frame: int, number: int, taken: bool) -> None:
        answer = Frame(TAKEN, frame, {}, [number, taken], [], shared=True)

        def say() -> None:
            # Without it the other side keeps the memory until the connection closes.
            with contextlib.suppress(ChannelClosed, TimeoutError):
                super(TransferConnection, self).send(
                    answer, time.monotonic() + _ANSWER_SECONDS
                )

        self._port.later(say)


class _Leaf(NamedTuple):
    place: int
    kind: Any
    device: jax.Device | None  # None for the one on which it arrives.

    def placed(self, array: Any) -> Any:
        if self.device is None or isinstance(array, Missing):
            return array
        return jax.device_put(array, self.device)


class _Coming(NamedTuple):
    address: str
    number: int
    leaves: list[_Leaf]


def _settled(tree: Any, owner: object) -> tuple[int, object, bool]:
    match tree:
        case [int() as number, bool() as taken]:
            return number, owner, taken
    raise ProtocolError("What was taken is a number and a truth.")


def _coming(described: Any, limits: Limits) -> _Coming:
    """What a frame says of the arrays that pass it by, checked."""
    match described:
        case [str() as address, int() as number, [*rows]] if 0 <= number < 1 << 64:
            leaves = [_leaf(row) for row in rows]
        case _:
            raise ProtocolError("A frame does not say what arrays pass it by.")
    if len(leaves) > limits.leaves:
        raise ProtocolError(f"More than {limits.leaves} arrays (Limits.leaves).")
    if sum(_bytes_of(leaf) for leaf in leaves) > limits.body_bytes:
        raise ProtocolError(f"More than {limits.body_bytes} bytes (Limits.body_bytes).")
    return _Coming(address, number, leaves)


def _bytes_of(leaf: _Leaf) -> int:
    size: int = leaf.kind.dtype.itemsize
    for extent in leaf.kind.shape:
        size *= extent
    return size


def _leaf(row: Any) -> _Leaf:
    match row:
        case [int() as index, str() as name, [*shape], bool() as weak, int() as number]:
            numbers = [index, *shape, number]
            if all(type(n) is int and n >= 0 for n in numbers) and len(shape) <= 64:
                kind = array_kind(tuple(shape), dtype_named(name), weak)
                return _Leaf(index, kind, device_of(number - 1) if number else None)
    raise ProtocolError("A frame does not say what an array is like.")
