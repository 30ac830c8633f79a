"""A channel over a stream of bytes.

One system call sends a small frame and one receives it, often together with the next
ones: what arrives goes into a buffer, and frames are parsed out of that. A large body
bypasses the buffer and is received into its final memory.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax

from jdist._compat import let_go
from jdist._errors import value_error
from jdist.rpc.base.dedup_window import DedupWindow
from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.interrupt_safe_lock import InterruptSafeLock
from jdist.rpc.wire import memory
from jdist.rpc.wire.channel import ChannelClosed, NotSent, Reader
from jdist.rpc.wire.frame import (
    ANSWERS,
    PREFIX_BYTES,
    Frame,
    Header,
    Limits,
    Packed,
    allocate,
    assemble,
    is_duplicate,
    pack,
    parse_header,
    parse_prefix,
)
from jdist.rpc.wire.memory import MemoryPool
from jdist.rpc.wire.silent_connections import PATIENCE, SilentConnections
from jdist.rpc.wire.stream import MOST_DESCRIPTORS, CutOff
from jdist.rpc.wire.tls import ByteStream

_BUFFER = 96 << 10  # so that 64 KiB and a header come in one call
# Smaller bodies are copied out of the buffer: another system call costs more.
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
      stream: Connected, and the peer's identity proved.
      peer: The name that it proved.
      terms: See there.
      pool: Memory for large arrays, when both sides can use it on this stream.
      on_close: Called once, when the connection has given back its socket.
      silent: Where `read` leaves it while it is silent; without, a thread stays.
    """

    def __init__(
        self,
        stream: ByteStream,
        peer: str,
        terms: Terms,
        pool: MemoryPool | None = None,
        on_close: Callable[["Connection"], None] | None = None,
        silent: SilentConnections | None = None,
    ) -> None:
        self.peer = peer
        self._stream = stream
        self._terms = terms
        self._pool = pool
        self._on_close = on_close
        self._silent = silent
        self._reader: Reader | None = None
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
        packed, descriptors = self._pack(frame)
        try:
            self._sending.releasing(lambda: self._send(packed, deadline, descriptors))
        finally:
            if descriptors:
                memory.close_all(descriptors)
            if self._reason is not None:
                self._release()

    def _send(
        self, packed: Packed, deadline: float | None, descriptors: list[int]
    ) -> None:
        self._sending.acquire(deadline, "another thread was still sending")
        try:
            if self._reason is not None:
                raise NotSent(self._reason)
            self._stream.send([packed.head, *packed.body], deadline, descriptors)
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

    def _pack(self, frame: Frame) -> tuple[Packed, list[int]]:
        apart = None if self._pool is None else memory.THRESHOLD
        packed = pack(frame, apart)
        descriptors: list[int] = []
        if packed.apart:
            assert self._pool is not None
            descriptors = self._lend(self._pool, packed.apart)
            if not descriptors:
                packed = pack(frame)
        header, body = len(packed.head) - PREFIX_BYTES, packed.size
        if packed.apart:
            body += sum(map(len, packed.apart))
        leaves, most = len(frame.leaves), self._terms.limits
        if header > most.header_bytes or body > most.body_bytes or leaves > most.leaves:
            memory.close_all(descriptors)
            self._refuse_size(header, body, leaves)
        return packed, descriptors

    def _refuse_size(self, header: int, body: int, leaves: int) -> None:
        most = self._terms.limits
        raised = ", or raise RpcOptions(max_array_bytes=...) on every worker"
        for what, size, limit, other in (
            ("a header of", header, most.header_bytes, ""),
            ("arrays of together", body, most.body_bytes, raised),
            ("a number of arrays of", leaves, most.leaves, ""),
        ):
            if size > limit:
                rule = f"must have {what} at most {limit}"
                raise value_error("rpc(value)", rule, size, f"Send it in parts{other}.")

    @staticmethod
    def _lend(pool: MemoryPool, leaves: list[memoryview]) -> list[int]:
        """Lends a descriptor for each leaf, or none at all."""
        if len(leaves) > MOST_DESCRIPTORS:
            return []
        descriptors: list[int] = []
        for leaf in leaves:
            descriptor = pool.lend(leaf)
            if descriptor is None:
                memory.close_all(descriptors)
                return []
            descriptors.append(descriptor)
        return descriptors

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
        self._reader = reader
        if self._silent is None:
            self._read()
        else:
            self._silent.run(self._read)

    def _read(self) -> None:
        reader = self._reader
        assert reader is not None
        reader.read(self._receive_or_leave)
        if self._released:
            self._reader = None  # it refers to what has this connection

    def _receive_or_leave(self) -> Frame | None:
        """Receives a frame; None if nothing comes, and another thread reads the next.

        That one may be reading already when this returns.
        """
        self._is_silent = False
        silent, reader = self._silent, self._reader
        assert reader is not None
        # While few threads read, this one stays.
        if silent is None or (reader.patient and silent.reading <= silent.most):
            return self.receive()
        try:
            return self.receive(None, time.monotonic() + PATIENCE)
        except TimeoutError:
            pass
        with self._ending:
            # `receive` raises the reason for a closed one.
            self._is_silent = self._reason is None
        if self._is_silent:
            descriptor = self._stream.fileno()
            if silent.add(descriptor, self._read, self._has_ended, reader.pool):
                return None
        self._is_silent = False
        return self.receive()

    def _has_ended(self) -> bool:
        """Whether a receive would find it closed."""
        return self._reason is not None or self._stream.ended()

    def _next(self, deadline: float | None, begin: float | None) -> Frame:
        if self._reason is not None:
            raise ChannelClosed(self._reason)
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > _BUFFER:
                self._buffer = memoryview(bytearray(_BUFFER))  # One header was larger.
            first = deadline if begin is None else begin
            self._end = self._stream.receive_into(self._buffer, first)
        limits = self._terms.limits
        try:
            sizes = parse_prefix(self._parse(PREFIX_BYTES, deadline), limits)
            # A small body comes out of the buffer with its header.
            small = sizes.body if sizes.body <= _COPIED else 0
            parsed = self._parse(sizes.header + small, deadline)
            header = parse_header(parsed[: sizes.header], sizes, limits)
            if not header.leaves:
                return assemble(header, (), None)
            buffers = allocate(header)
            if small:
                rest = parsed[sizes.header :]
                for buffer in buffers:
                    buffer[:] = rest[: len(buffer)]
                    rest = rest[len(buffer) :]
            else:
                self._receive_body(buffers, deadline)
            apart = self._claim(header) if sizes.apart else ()
            return assemble(header, buffers, self._terms.device, apart)
        except TimeoutError as error:
            if deadline is not None and time.monotonic() >= deadline:
                self._cut("the deadline passed in the middle of a frame")
                raise
            what = f"nothing came for {self._terms.stall:g} s in the middle of a frame"
            raise ChannelClosed(what) from error

    def _parse(self, size: int, deadline: float | None) -> memoryview:
        """The next `size` bytes, valid until more is received."""
        if size > self._end - self._start:
            self._make_room(size)
            while size > self._end - self._start:
                free = self._buffer[self._end :]
                self._end += self._stream.receive_into(free, self._patience(deadline))
        start = self._start
        self._start = end = start + size
        return self._buffer[start:end]

    def _make_room(self, size: int) -> None:
        kept = self._buffer[self._start : self._end]
        if size > len(self._buffer):
            # At most a header within the limits, which were checked before.
            self._buffer = memoryview(bytearray(size))
        elif self._start == 0 or self._start + size <= len(self._buffer):
            return
        self._buffer[: len(kept)] = bytes(kept)
        self._start, self._end = 0, len(kept)

    def _receive_body(self, buffers: list[memoryview], deadline: float | None) -> None:
        for buffer in buffers:
            there = min(len(buffer), self._end - self._start)
            buffer[:there] = self._buffer[self._start : self._start + there]
            self._start += there
            rest = buffer[there:]
            while rest:
                until = self._patience(deadline)
                rest = rest[self._stream.receive_into(rest, until, whole=True) :]

    def _claim(self, header: Header) -> list[memoryview]:
        """The memory behind the descriptors that came with this frame."""
        if self._pool is None or len(self._stream.descriptors) < len(header.apart):
            raise ProtocolError("A frame came without its memory descriptors.")
        taken = [self._stream.descriptors.popleft() for _ in header.apart]
        try:
            return [memory.receive(taken.pop(0), size) for size in header.apart]
        finally:
            memory.close_all(taken)

    def _patience(self, deadline: float | None) -> float:
        stalled = time.monotonic() + self._terms.stall
        return stalled if deadline is None else min(deadline, stalled)

    # --- ending ---

    def usable(self) -> bool:
        """Whether it is open; see `Channel.usable`."""
        return self._reason is None and self._stream.silent()

    def close(self, reason: str = "closed on this side") -> None:
        """Closes both directions; see `Channel.close`."""
        self._cut(reason)
        self._release()

    def _cut(self, reason: str) -> None:
        """Wakes all threads that use the stream; the last one of them releases it."""
        with self._ending:
            if self._reason is None:
                self._reason = reason
                self._stream.shut()

    def _ended(self, error: ChannelClosed) -> ChannelClosed:
        self._cut(str(error))
        return type(error)(self._reason)

    def _release(self) -> None:
        """Closes the socket, unless a thread is still inside the stream."""
        # A descriptor must not be closed under a system call, because its number may
        # belong to another file when the call looks it up. `_cut` wakes the thread that
        # is inside, and that thread comes here after it has released its lock.
        with self._ending:
            if self._sending.held or self._receiving.held:
                return  # this very thread is inside, and was interrupted there
            if self._released or self._is_silent:
                return
            if not self._sending.releasing(self._close_stream):
                return
        if self._on_close is not None:
            self._on_close(self)

    def _close_stream(self) -> bool:
        def close() -> bool:
            if not self._receiving.try_acquire():
                return False
            self._stream.close()
            self._released = True
            return True

        return self._sending.try_acquire() and self._receiving.releasing(close)
