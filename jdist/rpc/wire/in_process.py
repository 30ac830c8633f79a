"""Channels between workers of one process.

Nothing is turned into bytes, but everything goes through the codec, so what the wire
refuses is refused here too. NumPy arrays are copied and JAX arrays are put on the
receiver's device, which is free when they are there.

A synchronous call without a limit of its own runs in the caller's thread: a hand-off to
another thread and back costs more than the whole call.
"""

import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import msgspec
import numpy as np
from jax.sharding import SingleDeviceSharding

from jdist.rpc.base import current
from jdist.rpc.base.dedup_window import DedupWindow
from jdist.rpc.base.future import Future, call_when_done
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.wire.channel import Channel, ChannelClosed, NotSent, Reader
from jdist.rpc.wire.frame import Frame, is_duplicate


class DeferredAnswer(Protocol):
    """A request that was run and whose answer comes later."""

    answer: Future[Frame]

    def cancel(self, reason: str) -> None:
        """Cancels the request: the caller no longer needs the answer."""


Answerer = Callable[[str, Frame, int], Frame | DeferredAnswer]
"""Runs a request: `answerer(caller, frame, depth)`."""

# Each call nested in the caller's thread takes a dozen Python frames of the thousand
# that the interpreter allows on one stack, and the functions' own beside.
_DEEPEST = 16


class Hub:
    """The transports of the workers of one cluster in this process, by name."""

    def __init__(self) -> None:
        self.transports: dict[str, InProcessTransport] = {}


class InProcessTransport:
    """A `Transport` for one worker of this process.

    Args:
      name: The worker.
      hub: Shared by those that may connect.
      device: Where JAX arrays arrive; None leaves them where they are.
    """

    def __init__(self, name: str, hub: Hub, device: Any = None) -> None:
        self.name = name
        self.address = name
        self.device = device
        self.on_refused: Callable[[str], None] | None = None  # there are no strangers
        self.answerer: Answerer | None = None
        self._hub = hub
        self._lock = threading.Lock()
        self._on_channel: Callable[[Channel], None] | None = None
        self._channels: set[_End] = set()
        self.threads = ThreadPool(f"{name} reads", 1)
        self._closed = False
        hub.transports[name] = self

    def connect(self, peer: str, address: Any, deadline: float | None) -> Channel:
        """See `Transport.connect`; it never waits."""
        there = self._hub.transports.get(peer)
        if there is None:
            raise ChannelClosed("no worker of this name listens in this process")
        here, across = _End(self, peer, there), _End(there, self.name, self)
        here.other, across.other = across, here
        self._adopt(here)
        there._accept(across)
        return here

    def abandon(self, peer: str, reason: str) -> None:
        """See `Transport.abandon`; connecting never waits."""
        with self._lock:
            channels = [one for one in self._channels if one.peer == peer]
        for channel in channels:
            channel.close(reason)

    def connect_from(self, name: str) -> Channel:
        """A channel from `name`, which has no transport in this hub, to this one."""
        hub = Hub()
        hub.transports[self.name] = self
        caller = InProcessTransport(name, hub)
        caller.threads = self.threads  # nothing closes the caller's transport
        return caller.connect(self.name, None, None)

    def serve(self, on_channel: Callable[[Channel], None]) -> None:
        """See `Transport.serve`."""
        self._on_channel = on_channel

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            self._closed = True
            channels = list(self._channels)
        if self._hub.transports.get(self.name) is self:
            del self._hub.transports[self.name]
        for channel in channels:
            channel.close("the worker has ended")
        # Bounded: a thread may be running a function of the user.
        self.threads.close(timeout=1.0)

    def _adopt(self, channel: "_End") -> None:
        with self._lock:
            if self._closed:
                raise ChannelClosed("the worker has ended")
            self._channels.add(channel)

    def _accept(self, channel: "_End") -> None:
        if self._on_channel is None:
            raise ChannelClosed("the worker does not listen yet")
        channel.unread = functools.partial(self._on_channel, channel)
        self._adopt(channel)

    def forget(self, channel: "_End") -> None:
        """Forgets a closed channel."""
        with self._lock:
            self._channels.discard(channel)


class _End:
    """One end of a channel.

    Attributes:
      unread: Reads this end, on the thread that the next frame starts; None while a
        thread reads it, or nothing has to. At first it serves the channel: most only
        ever carry calls that run in the caller's thread, and need no thread.
    """

    other: "_End"

    def __init__(
        self, here: InProcessTransport, peer: str, there: InProcessTransport
    ) -> None:
        self.peer = peer
        self.unread: Callable[[], None] | None = None
        self._here = here
        self._there = there
        self._arrived: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._closed: str | None = None
        self._lock = threading.Lock()
        self._requests = DedupWindow(first=1)
        self._reader: Reader | None = None

    def send(self, frame: Frame, deadline: float | None = None) -> None:
        """See `Channel.send`."""
        if self._closed is not None:
            raise NotSent(self._closed)
        self.other._put(_moved(frame, self._there))

    def receive(self, deadline: float | None = None) -> Frame:
        """See `Channel.receive`."""
        while True:
            seconds = (
                None if deadline is None else max(0.0, deadline - time.monotonic())
            )
            try:
                frame = self._arrived.get(timeout=seconds)
            except queue.Empty:
                raise TimeoutError("no frame arrived in time") from None
            if frame is None:
                self._arrived.put(None)  # for the next call of `receive`
                raise ChannelClosed(self._closed or "closed")
            if not is_duplicate(frame, self._requests):
                return frame

    def read(self, reader: Reader) -> None:
        """See `Channel.read`; the thread leaves as soon as there is no frame."""
        self._reader = reader
        self._read()

    def _read(self) -> None:
        assert self._reader is not None
        self._reader.read(self._receive_or_leave)

    def _read_unread(self) -> None:
        with self._lock:
            read, self.unread = self.unread, None
        if read is not None:
            read()

    def _receive_or_leave(self) -> Frame | None:
        with self._lock:
            # In this order: a frame that comes meanwhile finds it unread, or is found.
            self.unread = self._read
            if self._arrived.empty():
                return None  # another thread may be reading already
            self.unread = None
        return self.receive()

    def exchange(self, frame: Frame, deadline: float | None = None) -> Frame:
        """See `Channel.exchange`; may run the call in this thread."""
        scope = current.scope.get()
        depth = 1 if scope is None else scope.depth + 1
        answerer = self._there.answerer
        # A call with a timeout of its own ("firm") must be able to return at its
        # deadline, so it cannot run in this thread.
        if answerer is None or depth > _DEEPEST or "firm" in frame.meta:
            self.send(frame, deadline)
            return self._answer_to(frame.id, deadline)
        if self._closed is not None:
            raise NotSent(self._closed)
        moved = _moved(frame, self._there)
        answer = answerer(self._here.name, moved, depth)
        if isinstance(answer, Frame):
            return _moved(answer, self._here)
        return self._deferred(answer, frame.id, deadline)

    def usable(self) -> bool:
        """See `Channel.usable`."""
        return self._closed is None

    def close(self, reason: str = "closed on this side") -> None:
        """See `Channel.close`."""
        # One lock at a time: both sides may close at once, and two would deadlock.
        for end, told in ((self, reason), (self.other, "closed by the other side")):
            with end._lock:
                first, end._closed = end._closed is None, end._closed or told
            if first:
                end._put(None)
                end._here.forget(end)

    def _put(self, frame: Frame | None) -> None:
        self._arrived.put(frame)
        # A channel that closes before its first frame needs no thread.
        needed = frame is not None or self._reader is not None
        if needed and self.unread is not None:
            # The thread that comes notes that it reads. Noted here, an interrupt
            # could leave it noted without a thread on its way.
            self._here.threads.run(self._read_unread)

    def _answer_to(self, number: int, deadline: float | None) -> Frame:
        while True:
            frame = self.receive(deadline)
            if frame.id == number:
                return frame

    def _deferred(
        self, deferred: DeferredAnswer, number: int, deadline: float | None
    ) -> Frame:
        answer = deferred.answer
        # Into the queue in which the end of the channel arrives as well: one wait for
        # both.
        call_when_done(answer, lambda: self._put(answer.value()))
        try:
            frame = self._answer_to(number, deadline)
        except BaseException:
            deferred.cancel(f"{self._here.name} gave up the call")
            raise
        return _moved(frame, self._here)


def _moved(frame: Frame, receiver: InProcessTransport) -> Frame:
    if not frame.leaves:
        return frame
    moved = [adopt(leaf, receiver.device) for leaf in frame.leaves]
    return msgspec.structs.replace(frame, leaves=moved)


def adopt(leaf: Any, device: jax.Device | None) -> Any:
    """Convert a leaf for another worker of the same process.

    A NumPy array is copied, because either side may write to its own. A JAX array
    cannot be written: it is shared, or moved if it is not on `device`.
    """
    if type(leaf) is np.ndarray:
        return leaf.copy()
    if device is None or leaf.devices() == {device}:
        return leaf
    if not leaf.is_fully_addressable:  # but each process has the whole of it
        # `device_put` refuses arrays with shards in other processes.
        leaf = leaf.addressable_data(0)
    # A sharding and not the device: with that, the type of an array from a mesh with
    # explicit axes would still name the mesh (JAX 0.10.2), and `jit` would refuse it.
    return jax.device_put(leaf, SingleDeviceSharding(device))
