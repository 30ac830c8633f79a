"""A channel over a stream of bytes.

One system call sends a small frame and one receives it, often together with the next
ones: what arrives goes into a buffer, and frames are copied out of that. A large array
bypasses the buffer and is received into its final memory.
"""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax

from jdist._compat import let_go
from jdist.rpc.base.dedup_window import DedupWindow
from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.interrupt_safe_lock import InterruptSafeLock
from jdist.rpc.wire import memory
from jdist.rpc.wire.channel import ChannelClosed, NotSent, Reader
from jdist.rpc.wire.frame import (
    ANSWERS,
    PREFIX_BYTES,
    Frame,
    Limits,
    allocate,
    assemble,
    is_duplicate,
    pack,
    parse_header,
    parse_prefix,
)
from jdist.rpc.wire.memory import MemoryPool
from jdist.rpc.wire.silent_connections import PATIENCE, SilentConnections
from jdist.rpc.wire.stream import MOST_DESCRIPTORS, CutOff, Pieces, Stream
from jdist.rpc.wire.tls import ByteStream, TlsStream

_BUFFER = 96 << 10  # so that 64 KiB and a header come in one call
# What is smaller is copied out of the buffer: another system call costs more.
_COPIED = _BUFFER // 2
T = TypeVar("T")


class Terms(NamedTuple):
    """The settings of every connection of one worker.

    Attributes:
      limits: Limits on the frames that the peer may announce.
      device: Device on which received JAX arrays are placed; None for JAX's default.
      stall: Seconds without a byte in the middle of a frame, after which the peer is
        taken for frozen and the channel closed.
    """

    limits: Limits = Limits()
    device: jax.Device | None = None
    stall: float = 60.0


class Connection:
    """A `jdist.rpc.wire.channel.Channel` over a byte stream.

    Args:
      socket: Connected, and the peer's identity proved.
      peer: The name that it proved.
      terms: See there.
      silent: Where `read` leaves it while it is silent.
      pool: Memory for large arrays, when both sides can use it on this stream.
      on_close: Called once, when the connection has given back its socket.
      tls: What sends and receives in place of the socket.
    """

    def __init__(
        self,
        socket: Stream,
        peer: str,
        terms: Terms,
        silent: SilentConnections,
        pool: MemoryPool | None = None,
        on_close: Callable[["Connection"], None] | None = None,
        tls: TlsStream | None = None,
    ) -> None:
        self.peer = peer
        self._socket = socket
        self._stream: ByteStream = tls or socket
        self._terms = terms
        self._pool = pool
        self._on_close = on_close
        self._silent = silent
        self._is_silent = False  # and will be read, by a thread that closes it too
        self._reason: str | None = None
        self._released = False
        self._sending = InterruptSafeLock()
        self._receiving = InterruptSafeLock()
        self._ending = threading.Lock()
        self._requests = DedupWindow(first=1)
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0  # The part received and not yet parsed.

    def __repr__(self) -> str:
        state = "open" if self._reason is None else f"closed: {self._reason}"
        return f"<Connection to {self.peer!r}, {state}>"

    # --- sending ---

    def send(self, frame: Frame, deadline: float | None = None) -> None:
        """Sends one frame; see `Channel.send`."""
        # Releases received arrays that are no longer used, so that the answer may come
        # in the memory of an earlier one.
        let_go()
        descriptors: list[int] = []
        try:
            lend = functools.partial(self._lend, descriptors)
            pieces = pack(frame, self._terms.limits, lend)
            self._sending.releasing(lambda: self._send(pieces, deadline, descriptors))
        finally:
            memory.close_all(descriptors)
            if self._reason is not None:
                self._release()

    def _send(
        self, pieces: Pieces, deadline: float | None, descriptors: list[int]
    ) -> None:
        self._sending.acquire(deadline, "another thread was still sending")
        try:
            if self._reason is not None:
                raise NotSent(self._reason)
            self._stream.send(pieces, deadline, descriptors)
        except (TimeoutError, NotSent) as error:
            # Without a byte sent the channel is as good as before. If the peer has
            # gone, an answer of it may be there to be read, and the end behind it.
            if isinstance(error, CutOff):
                self._cut(f"a frame was cut off: {error}")
            raise
        except ChannelClosed as error:
            raise self._ended(error) from error
        except BaseException:
            self._cut("sending was interrupted")
            raise

    def _lend(self, descriptors: list[int], leaf: memoryview) -> bool:
        """Copies a large leaf into memory with a descriptor, if there is some."""
        if self._pool is None or len(leaf) < memory.THRESHOLD:
            return False
        full = len(descriptors) == MOST_DESCRIPTORS
        descriptor = None if full else self._pool.lend(leaf)
        if descriptor is None:
            return False
        descriptors.append(descriptor)
        return True

    # --- receiving ---

    def receive(
        self, deadline: float | None = None, begin: float | None = None
    ) -> Frame:
        """Receives the next frame; see `Channel.receive`.

        Args:
          deadline: See there.
          begin: The moment until which to wait for the first byte; by default as long
            as for the others.
        """
        let_go()  # the other side may use the memory while this one waits
        try:
            return self._receiving.releasing(lambda: self._receive(deadline, begin))
        finally:
            if self._reason is not None:
                self._release()

    def _receive(self, deadline: float | None, begin: float | None) -> Frame:
        self._receiving.acquire(deadline, "another thread was still receiving")
        try:
            while True:
                frame = self._next(deadline, begin)
                # A request that was received before is dropped: executing it twice
                # would be worse than its caller's timeout.
                if not is_duplicate(frame, self._requests):
                    return frame
        except ChannelClosed as error:
            raise self._ended(error) from error
        except ProtocolError as error:
            self._cut(f"it sent what is no frame: {error}")
            raise
        except TimeoutError:
            raise
        except BaseException:
            # Bytes may have been received and not counted, so the beginning of the next
            # frame is unknown.
            self._cut("receiving was interrupted")
            raise

    def exchange(self, frame: Frame, deadline: float | None = None) -> Frame:
        """Sends a request and returns its answer; see `Channel.exchange`."""
        self.send(frame, deadline)
        while True:
            answer = self.receive(deadline)
            if answer.kind in ANSWERS and answer.id <= frame.id:
                if answer.id == frame.id:
                    return answer
                continue  # The answer to a request that was given up.
            reason = f"it sent {answer.kind!r} {answer.id} for an answer to {frame.id}"
            self.close(reason)
            raise ProtocolError(f"Worker {self.peer!r}: {reason}.")

    def read(self, reader: Reader) -> None:
        """Reads it as long as it is open; see `Channel.read`."""
        self._silent.run(functools.partial(self._read, reader))

    def _read(self, reader: Reader) -> None:
        reader.read(functools.partial(self._receive_or_leave, reader))

    def _receive_or_leave(self, reader: Reader) -> Frame | None:
        """Receives a frame; None if nothing comes, and another thread reads the next.

        That one may be reading already when this returns.
        """
        self._is_silent = False
        # While few threads read, this one stays.
        if reader.patient and self._silent.few_read:
            return self.receive()
        try:
            return self.receive(None, time.monotonic() + PATIENCE)
        except TimeoutError:
            pass
        with self._ending:
            # `receive` raises the reason for a closed one.
            self._is_silent = self._reason is None
        if self._is_silent:
            read = functools.partial(self._read, reader)
            if self._silent.add(self._socket.fileno(), read, self._has_ended):
                return None
        self._is_silent = False
        return self.receive()

    def _has_ended(self) -> bool:
        """Whether a receive would find it closed."""
        return self._reason is not None or self._socket.ended()

    def _next(self, deadline: float | None, begin: float | None) -> Frame:
        if self._reason is not None:
            raise ChannelClosed(self._reason)
        if self._start == self._end:
            self._refill(deadline if begin is None else begin)
        try:
            limits = self._terms.limits
            size = parse_prefix(self._take(PREFIX_BYTES, deadline), limits)
            header = parse_header(self._take(size, deadline), limits)
            layout, buffers = allocate(header, limits)
            for buffer in buffers:
                self._fill(buffer, deadline)
            apart = self._claim(layout.apart) if layout.apart else ()
            return assemble(header, layout, buffers, self._terms.device, apart)
        except TimeoutError as error:
            if deadline is not None and time.monotonic() >= deadline:
                self._cut("the deadline passed in the middle of a frame")
                raise
            what = f"nothing came for {self._terms.stall:g} s in the middle of a frame"
            raise ChannelClosed(what) from error

    def _take(self, size: int, deadline: float | None) -> memoryview:
        """The next bytes, valid until more is received."""
        start = self._start
        if size > self._end - start:
            data = memoryview(bytearray(size))
            self._fill(data, deadline)
            return data
        self._start = end = start + size
        return self._buffer[start:end]

    def _fill(self, view: memoryview, deadline: float | None) -> None:
        """Receives all of a view: first what the buffer has."""
        while True:
            there = min(len(view), self._end - self._start)
            view[:there] = self._buffer[self._start : self._start + there]
            self._start += there
            view = view[there:]
            if not view:
                return
            until = self._patience(deadline)
            if len(view) < _COPIED:
                self._refill(until)
            else:
                view = view[self._stream.receive_into(view, until, whole=True) :]

    def _refill(self, until: float | None) -> None:
        self._start = self._end = 0
        self._end = self._stream.receive_into(self._buffer, until)

    def _claim(self, sizes: Sequence[int]) -> list[memoryview]:
        """The memory behind the descriptors that came with this frame."""
        if self._pool is None or len(self._socket.descriptors) < len(sizes):
            raise ProtocolError("A frame came without its memory descriptors.")
        taken = [self._socket.descriptors.popleft() for _ in sizes]
        try:
            return [memory.receive(taken.pop(0), size) for size in sizes]
        finally:
            memory.close_all(taken)

    def _patience(self, deadline: float | None) -> float:
        stalled = time.monotonic() + self._terms.stall
        return stalled if deadline is None else min(deadline, stalled)

    # --- ending ---

    def usable(self) -> bool:
        """Whether it is open; see `Channel.usable`."""
        return self._reason is None and self._socket.silent()

    def close(self, reason: str = "closed on this side") -> None:
        """Closes both directions; see `Channel.close`."""
        self._cut(reason)
        self._release()

    def _cut(self, reason: str) -> None:
        """Wakes all threads that use the stream; the last one of them releases it."""
        with self._ending:
            if self._reason is None:
                self._reason = reason
                self._socket.shut()

    def _ended(self, error: ChannelClosed) -> ChannelClosed:
        self._cut(str(error))
        return type(error)(self._reason)

    def _release(self) -> None:
        """Closes the socket, unless a thread is still inside the stream."""

        # A descriptor must not be closed under a system call, because its number may
        # belong to another file when the call looks it up. `_cut` wakes the thread that
        # is inside, and that thread comes here after it has released its lock.
        def close() -> bool:
            if not (self._sending.try_acquire() and self._receiving.try_acquire()):
                return False  # perhaps this very thread was interrupted there
            self._socket.close()
            self._released = True
            return True

        with self._ending:
            if self._released or self._is_silent:
                return
            locks = (self._sending, self._receiving)
            if not InterruptSafeLock.releasing_all(locks, close):
                return
        if self._on_close is not None:
            self._on_close(self)
