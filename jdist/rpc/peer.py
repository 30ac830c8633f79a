"""The channels from one worker to one other.

A synchronous call has a channel to itself while it lasts, so that its callee's thread
runs it and answers with no hand-over on either side. Idle channels are kept, the last
used first. All asynchronous calls share one channel.
"""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

from jdist.rpc.channel import Channel, ChannelClosed, Transport
from jdist.rpc.crew import Crew
from jdist.rpc.deadline import Deadline
from jdist.rpc.device_maps import DeviceMaps
from jdist.rpc.line import Line
from jdist.rpc.relief import Relief
from jdist.rpc.worker_info import WorkerInfo

Lane = tuple[Channel, Iterator[int]]
"""A channel for one call at a time, and the numbers of its requests."""


class Peer:
    """What one worker knows of another, and its ways there.

    Args:
      info: The other worker.
      identity: The name that it proves; in an elastic group no other ever has it.
      address: Where it listens, for `transport`.
      transport: Connects to it.
      crew: Lends the thread that reads the shared channel.
      relief: Looks after the reading of that channel.
    """

    def __init__(
        self,
        info: WorkerInfo,
        identity: str,
        address: Any,
        transport: Transport,
        crew: Crew,
        relief: Relief,
    ) -> None:
        self.info = info
        self.identity = identity
        self.asking = threading.Lock()
        self.line: Line | None = None
        self.departed: str | None = None
        self._address = address
        self._transport = transport
        self._crew = crew
        self._relief = relief
        self._idle: list[Lane] = []
        self._busy: set[Channel] = set()
        self._lock = threading.Lock()
        self._opening = threading.Lock()

    @property
    def device_maps(self) -> DeviceMaps:
        """On which devices this worker's arrays arrive, there among others."""
        return self._transport.device_maps

    def take(self, deadline: Deadline) -> Lane:
        """A channel for one synchronous call, to be given back or dropped.

        Raises: what `Transport.connect` raises.
        """
        with self._lock:
            if self._idle:
                lane = self._idle.pop()
                self._busy.add(lane[0])
                return lane
        channel = self._connect(deadline)
        with self._lock:
            if self.departed is None:
                self._busy.add(channel)
        self._check_present(channel)
        return channel, itertools.count(1)

    def give(self, lane: Lane) -> None:
        """The call is over and its answer was received."""
        with self._lock:
            self._busy.discard(lane[0])
            self._idle.append(lane)

    def drop(self, lane: Lane, reason: str) -> None:
        """The call was given up; closing its channel is how the callee learns it."""
        with self._lock:
            self._busy.discard(lane[0])
        lane[0].close(reason)

    def open_line(self, deadline: Deadline) -> Line:
        """The shared channel, connected at the first call.

        Raises: what `Transport.connect` raises.
        """
        remaining = deadline.remaining()
        if not self._opening.acquire(timeout=-1 if remaining is None else remaining):
            raise TimeoutError("another call was still connecting")
        try:
            line = self.line
            if line is None or line.closed is not None:
                channel = self._connect(deadline)
                line = self.line = Line(channel, self._crew, self._relief)
                self._check_present(channel)
            return line
        finally:
            self._opening.release()

    def close(self, reason: str) -> None:
        """The worker is gone: everything under way ends with `reason`."""
        with self._lock:
            self.departed = self.departed or reason
            channels = [*self._busy, *(lane[0] for lane in self._idle)]
            self._idle.clear()
        for channel in channels:
            channel.close(reason)
        line = self.line
        if line is not None:
            line.close(reason)

    def _connect(self, deadline: Deadline) -> Channel:
        if self.departed is not None:
            raise ChannelClosed(self.departed)
        return self._transport.connect(self.identity, self._address, deadline.at)

    def _check_present(self, channel: Channel) -> None:
        """Closes a channel that was being opened while the worker departed."""
        if self.departed is not None:
            channel.close(self.departed)
            raise ChannelClosed(self.departed)
