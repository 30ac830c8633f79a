"""Protocols of a channel between two workers and of the transports that make channels.

The socket transport and the in-process one both fulfil them, and no room above this one
knows which of the two it has.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.wire.frame import Frame


class ChannelClosed(ConnectionError):
    """The channel is closed: by the peer, by its death, or by this side.

    The text is the reason as far as this side knows it.
    """


class NotSent(ChannelClosed):
    """The channel was closed before any byte of this frame was sent.

    The frame may be sent on another channel: the other side has not seen it.
    """


class Reader(NamedTuple):
    """The recipient of all frames of a channel.

    Attributes:
      take: Called with each frame, in order.
      end: Called once, with the reason why there are no more.
      patient: Whether a thread stays with a silent channel while few threads read. It
        then needs no other thread to begin to read the next frame.
    """

    take: Callable[[Frame], None]
    end: Callable[[str], None]
    patient: bool = True

    def read(self, receive: Callable[[], Frame | None]) -> None:
        """Takes frames until there is none for now, or the channel has closed."""
        try:
            while (frame := receive()) is not None:
                self.take(frame)
                del frame  # this thread keeps none while it waits
        except (ChannelClosed, ProtocolError) as error:
            self.end(str(error))
        except BaseException as error:
            self.end(f"its reader failed: {error!r}")
            raise


class Channel(Protocol):
    """A two-way channel, ordered, and reliable until it closes.

    `send` may be called by many threads, `receive` by one at a time. All deadlines
    are absolute, in `time.monotonic()` seconds; None waits for ever.
    """

    peer: str
    """Name of the worker on the other side, proved by the handshake."""

    def send(self, frame: Frame, deadline: float | None = None) -> None:
        """Sends one frame.

        Raises ChannelClosed (NotSent if nothing of it was sent), TimeoutError,
        ValueError (limits).
        """

    def receive(self, deadline: float | None = None) -> Frame:
        """Returns the next frame. Raises ChannelClosed, TimeoutError, ProtocolError.

        After a TimeoutError in the middle of a frame the channel is closed.
        """

    def read(self, reader: Reader) -> None:
        """Has `reader` take every frame, by one thread at a time.

        That is this thread at first, until the channel is silent or has closed, and
        one of the transport's once frames come again.
        """

    def exchange(self, frame: Frame, deadline: float | None = None) -> Frame:
        """Sends a request and returns its answer; no other thread uses the channel.

        Same errors as `send` and `receive`. Answers to earlier requests (given up
        before) are dropped.
        """

    def usable(self) -> bool:
        """Whether an idle channel is open; any byte that has come makes it unusable."""

    def close(self, reason: str = "closed on this side") -> None:
        """Closes both directions; any thread, any number of times.

        A thread blocked in `send` or `receive` gets ChannelClosed(reason) at once.
        """


class Transport(Protocol):
    """Listens for one worker and connects it to others."""

    address: Any
    """The argument of others' `connect` that leads to this worker; msgpack-able."""

    on_refused: Callable[[str], None] | None
    """Called with a text for each peer that could not prove the key."""

    def connect(self, peer: str, address: Any, deadline: float | None) -> Channel:
        """Opens a channel to the worker `peer` listening at `address`.

        Raises ChannelClosed (no worker listens), TimeoutError, ProtocolError,
        AuthenticationError (also when the listener proves to be another worker than
        `peer`), and RpcError where one of the two may open no more files.
        """

    def abandon(self, peer: str, reason: str) -> None:
        """Closes with `reason` every channel to and from `peer`.

        Attempts to connect to it end likewise, now and later.
        """

    def serve(self, on_channel: Callable[[Channel], None]) -> None:
        """Begins to accept: `on_channel(channel)` runs on a thread of its own each."""

    def close(self) -> None:
        """Stops accepting, closes every channel, joins its threads."""
