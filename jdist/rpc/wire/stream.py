"""A socket as a stream of bytes with deadlines: the lowest layer of the wire.

The socket blocks, because a Python socket with a timeout of its own asks `poll` before
every call, which is a second system call on the path whose speed counts. Receiving
is limited by the kernel (`SO_RCVTIMEO`) instead, sending by `MSG_DONTWAIT` and a
`poll` only when the peer does not keep up.
"""

import array
import math
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.interrupt_safe_lock import InterruptSafeLock
from jdist.rpc.base.posix import after_fork_in_child
from jdist.rpc.wire.channel import ChannelClosed, NotSent

BUFFER = 1 << 20
"""Asked for as the socket's send buffer: 1 MiB goes out without waiting for a reader.

Measured between two processes, larger ones gain nothing and the usual default of
208 KiB costs a third at 16 MiB. The kernel gives less where `wmem_max` is less.
"""

MOST_DESCRIPTORS = 64
"""Largest number of memory descriptors under way to one receiver and not claimed
yet."""

_KEEPALIVE = (
    ("TCP_KEEPIDLE", 15),  # seconds without a byte; macOS calls it TCP_KEEPALIVE
    ("TCP_KEEPALIVE", 15),
    ("TCP_KEEPINTVL", 5),  # seconds between two questions
    ("TCP_KEEPCNT", 3),  # of them without an answer, and the connection is closed
)
_MOST_PIECES = 1024  # IOV_MAX of Linux and macOS

# As plain numbers: the enumeration's members cost more than the rest of a call. On
# Windows, where no stream is made, the module can be imported without them.
_NOW = int(getattr(socket, "MSG_DONTWAIT", 0))
_WHOLE = int(socket.MSG_WAITALL)
_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_SPACE = (
    socket.CMSG_SPACE(array.array("i").itemsize * MOST_DESCRIPTORS)
    if hasattr(socket, "CMSG_SPACE")
    else 0
)


# --- polling ---

_PROMPT = 2
"""A message for which a thread slept counts as prompt up to this multiple of the limit:
it and its peer would have been faster without sleeping."""

_MOST_DOUBT = 12

_turn = InterruptSafeLock()

_give_way = getattr(os, "sched_yield", lambda: None)  # Windows has none


class Polling:
    """Adaptive polling of one connection: a thread looks for a message, then sleeps.

    To wake a sleeping thread costs more than the rest of a small call: on a virtual
    machine 20 to 40 us until the processor has left its idle state, and all that
    follows runs with cold caches. A thread that waits for a message on a busy
    connection therefore polls for it first. That costs next to nothing where it does
    not pay:

    - An idle or slow connection is not polled. Each time that polling found nothing,
      twice as many prompt messages must come until it is tried again (exponential
      backoff). The same holds where the peer needs this very core, or where processes
      compete for cores: a thread that polls there loses its core, which counts as in
      vain.
    - One thread of a process polls at a time; the others sleep. After each look it
      yields its core: in a process with a single core, another thread may be about to
      do what the message depends on.

    One thread uses it at a time.

    Args:
      seconds: How long to look for a message before sleeping.
    """

    __slots__ = ("_doubt", "_needed", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._doubt = 0
        self._needed = 1  # prompt messages until it is tried

    @property
    def worthwhile(self) -> bool:
        """Whether recent messages came so soon that polling pays."""
        return self._needed == 0

    def slept(self, seconds: float) -> None:
        """Records the time after which a message came without polling."""
        if seconds > _PROMPT * self._seconds:
            self._needed = 1 << self._doubt
        elif self._needed:
            self._needed -= 1

    def poll(self, look: Callable[[], object]) -> object:
        """Calls `look` until it returns a true value; None after the limit.

        None also while another thread of this process is polling.
        """
        return _turn.releasing(
            lambda: self._poll(look) if _turn.try_acquire() else None
        )

    def _poll(self, look: Callable[[], object]) -> object:
        monotonic = time.monotonic
        now = monotonic()
        until = now + self._seconds
        found: object = None
        while not found and now < until:
            found = look()
            if not found:
                _give_way()
            now = monotonic()
        if now < until:
            self._doubt = max(0, self._doubt - 1)
        else:
            self._doubt = min(self._doubt + 1, _MOST_DOUBT)
            self._needed = 1 << self._doubt
        return found or None


# --- streams ---

Pieces = Sequence[bytes | memoryview]
"""Bytes and byte views, which are sent in order."""


class CutOff(TimeoutError):
    """The deadline passed after a part had been sent; the stream is unusable."""


class Stream:
    """A connected socket.

    One thread may send while another receives. Every method but `shut` raises
    ChannelClosed when the peer is gone.

    Args:
      sock: A connected stream socket; owned by the stream.

    Attributes:
      descriptors: Memory descriptors received so far and not taken yet, oldest first.
      passes_descriptors: Set to True after the handshake on a Unix socket: from then
        on reads look for descriptors. Before, the kernel drops what a stranger sends.
      polling: Set after the handshake, if this stream may be polled.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(sock)
        self._socket = sock
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        # `poll` raises no exception where nothing has come; that costs more than the
        # call.
        self._look: Callable[[], list[tuple[int, int]]] = partial(poll.poll, 0)
        self._patience: float | None = None
        self.descriptors: deque[int] = deque()
        self.passes_descriptors = False
        self.polling: Polling | None = None
        leave_to_parent(self)

    def receive_into(
        self, view: memoryview, deadline: float | None, whole: bool = False
    ) -> int:
        """Waits for at least one byte; returns how many were written into `view`.

        Args:
          view: Where to write; not empty.
          deadline: In `time.monotonic()` seconds; None waits for ever.
          whole: Rather wait until `view` is full. Fewer bytes are possible still.

        Raises:
          TimeoutError: The deadline passed; nothing was received.
          ChannelClosed: The peer closed, or `shut` was called.
          ProtocolError: More descriptors than allowed came along.
        """
        if whole:
            return self._receive(view, deadline, _WHOLE)
        polling = self.polling
        if polling is None:
            return self._receive(view, deadline, 0)
        if polling.worthwhile and polling.poll(self._look):
            got = self._receive_once(view, _NOW)
            if got is not None:
                return got
        since = time.monotonic()
        try:
            return self._receive(view, deadline, 0)
        finally:
            polling.slept(time.monotonic() - since)

    def _receive(self, view: memoryview, deadline: float | None, flags: int) -> int:
        if deadline is not None:
            self._limit(deadline)
        while True:
            got = self._receive_once(view, flags)
            if got is not None:
                return got
            self._limit(deadline, again=True)

    def _receive_once(self, view: memoryview, flags: int) -> int | None:
        """Receives once; None if nothing came before the kernel's limit."""
        try:
            if self.passes_descriptors and not flags & ~_NOW:
                got = self._receive_with_descriptors(view, flags)
            else:
                got = self._socket.recv_into(view, 0, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed(f"its connection broke ({error})") from error
        if got == 0:
            raise ChannelClosed("its connection closed")
        return got

    def peek(self, deadline: float | None) -> bytes:
        """Returns the first byte without consuming it.

        Raises:
          TimeoutError, ChannelClosed: As `receive_into`.
        """
        first = memoryview(bytearray(1))
        self._receive(first, deadline, socket.MSG_PEEK)
        return bytes(first)

    def peer_host(self) -> str:
        """The other side's address in numbers; TCP only."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError as error:
            raise ChannelClosed("its connection closed") from error

    def send(
        self, pieces: Pieces, deadline: float | None, descriptors: Sequence[int] = ()
    ) -> None:
        """Sends all pieces in order, in one system call if the peer keeps up.

        Args:
          pieces: See `Pieces`.
          deadline: In `time.monotonic()` seconds; None waits for ever.
          descriptors: Open files that go with the first byte, at most
            MOST_DESCRIPTORS of them. Unix sockets only.

        Raises:
          TimeoutError: The deadline passed; nothing was sent.
          CutOff: The deadline passed in the middle.
          ChannelClosed: The peer closed, or `shut` was called.
          NotSent: Likewise, and nothing was sent.
        """
        rights: Any = ()
        if descriptors:
            passed = array.array("i", descriptors)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)]
        begun = False
        while pieces:
            try:
                if rights or len(pieces) > 1:
                    sent = self._socket.sendmsg(pieces[:_MOST_PIECES], rights, _NOW)
                else:
                    sent = self._socket.send(pieces[0], _NOW)
            except BlockingIOError:
                self._wait_for_room(deadline, begun)
                continue
            except OSError as error:
                kind = ChannelClosed if begun else NotSent
                raise kind(f"its connection broke ({error})") from error
            if len(pieces) == 1 and sent == len(pieces[0]):
                return
            # Descriptors go with the first byte; sent again they would arrive twice.
            begun, rights = True, ()
            pieces = _rest(pieces, sent)

    def silent(self) -> bool:
        """Whether it is open and nothing has come that was not received."""
        return not self._look()

    def ended(self) -> bool:
        """Whether the other side has closed it and all that came was received."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | _NOW)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def shut(self) -> None:
        """Ends both directions; threads blocked in this stream wake up."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was faster, or the socket is closed already

    def close(self) -> None:
        """Gives the socket and the untaken descriptors back; any number of times."""
        self._socket.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def _limit(self, deadline: float | None, again: bool = False) -> None:
        """Sets the kernel's limit for the next receive, or raises TimeoutError."""
        # A power of two not above what remains, so that calls with one usual timeout
        # set it once, and a wait of t seconds wakes about log2(t) times.
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None:
            if remaining <= 0:
                raise TimeoutError("nothing was received in time")
            fits = self._patience is not None and self._patience <= remaining
            if fits and not again:
                return
            # frexp: remaining = m 2^e with 1/2 <= m < 1. A millisecond is harmless.
            remaining = 2.0 ** max(-10, min(20, math.frexp(remaining)[1] - 1))
        if remaining == self._patience:
            return
        whole = math.floor(remaining or 0)
        rest = round(((remaining or 0) - whole) * 1e6)
        limit = struct.pack("ll", whole, rest)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        except OSError as error:
            raise ChannelClosed(f"its connection broke ({error})") from error
        self._patience = remaining

    def _receive_with_descriptors(self, view: memoryview, flags: int) -> int:
        flags |= _ON_EXEC
        got, ancillary, flags, _ = self._socket.recvmsg_into((view,), _SPACE, flags)
        if not ancillary:
            return got
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                self.descriptors.extend(found)
        if flags & socket.MSG_CTRUNC and len(self.descriptors) < MOST_DESCRIPTORS:
            raise ProtocolError(
                "memory descriptors were lost: this process may open no more files, "
                "raise the limit with `ulimit -n`"
            )
        if flags & socket.MSG_CTRUNC or len(self.descriptors) > MOST_DESCRIPTORS:
            raise ProtocolError(f"more than {MOST_DESCRIPTORS} memory descriptors came")
        return got

    def _wait_for_room(self, deadline: float | None, begun: bool) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if deadline is None:
            poll.poll()
            return
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not poll.poll(math.ceil(remaining * 1e3)):
            raise (CutOff if begun else TimeoutError)("the peer did not read in time")


def _keep_alive(sock: socket.socket) -> None:
    """Enable TCP keep-alive."""
    # Middleboxes drop connections that are idle for minutes, and a machine that is gone
    # closes none. The options' names differ by platform, and some have none of them.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _rest(pieces: Pieces, sent: int) -> list[bytes | memoryview]:
    """Drop the first `sent` bytes of the pieces, and empty pieces."""
    rest: list[bytes | memoryview] = []
    for piece in pieces:
        if sent < len(piece):
            rest.append(memoryview(piece)[sent:] if sent else piece)
        sent = max(0, sent - len(piece))
    return rest


class _Closable(Protocol):
    """Something with a descriptor."""

    def close(self) -> None:
        """Closes the descriptor."""


_LIVE: weakref.WeakSet[_Closable] = weakref.WeakSet()


def leave_to_parent(owned: _Closable) -> None:
    """Make forked children close their copy of `owned` at once."""
    # A child that kept it would keep the connection, or the port, alive after the
    # parent's death, and others would wait for a worker that is gone.
    _LIVE.add(owned)


def _close_in_child() -> None:
    for owned in list(_LIVE):
        owned.close()  # the child's descriptor only; nothing is shut down


after_fork_in_child(_close_in_child)
