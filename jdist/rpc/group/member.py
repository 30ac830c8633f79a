"""A worker as its coordinator sees it."""

import threading
import time
from collections import deque
from typing import Any

from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.wire.channel import Channel, ChannelClosed
from jdist.rpc.wire.frame import Frame


class Member:
    """A worker that joined, or is about to.

    Frames for it leave in order and on another thread, so that a member which does not
    read holds up nobody else.

    Args:
      info: Its name and rank.
      address: Where other workers reach it.
      channel: Its control channel.
      pool: Lends the thread that sends.

    Attributes:
      number: Of its request to join, until that is answered.
      until: When it wants to wait no longer for the others to join.
      heard: When it last gave a sign of life.
      gone: Why it does not belong to the group any more.
      left: Whether it went in an orderly way.
    """

    def __init__(
        self, info: WorkerInfo, address: Any, channel: Channel, pool: ThreadPool
    ) -> None:
        self.info = info
        self.address = address
        self.channel = channel
        self.number = 0
        self.until: float | None = None
        self.heard = time.monotonic()
        self.gone: str | None = None
        self.left = False
        self._pool = pool
        self._lock = threading.Lock()
        self._outbox: deque[Frame] = deque()
        self._sending = False

    def post(self, frame: Frame) -> None:
        """Sends a frame after those posted before; returns at once."""
        with self._lock:
            self._outbox.append(frame)
            if self._sending:
                return
            self._sending = True
        self._pool.run(self._send)

    def _send(self) -> None:
        while True:
            with self._lock:
                if not self._outbox:
                    self._sending = False
                    return
                frame = self._outbox.popleft()
            try:
                self.channel.send(frame)
            except ChannelClosed:
                return  # the thread that reads from it notices as well
