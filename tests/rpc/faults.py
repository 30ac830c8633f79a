"""A transport that loses, delays, repeats and cuts frames, on demand and repeatably.

    plan = Plan(Rule("drop", "reply", first=2), Rule("close", "call", probability=0.1))
    transport = FaultyTransport(SocketTransport("worker0", key), plan)

It wraps any transport and acts on what the wrapped side *sends*. Whether a rule strikes
depends on the seed and on how many frames of its kind came before, not on how threads
happen to interleave.
"""

import contextlib
import random
import threading
from collections import Counter
from typing import NamedTuple

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.connection import Connection
from jdist.rpc.wire.frame import ANSWERS, pack

FAULTS = ("drop", "delay", "duplicate", "truncate", "close")
ANY = "*"


class Rule(NamedTuple):
    """What happens to which frames.

    Attributes:
      fault: "drop": the frame is lost. "delay": it is sent later, and later ones may
        overtake it. "duplicate": it is sent twice. "truncate": half of it is sent,
        then the channel closes. "close": the channel closes instead of sending.
      kind: Of the frames concerned, or ANY.
      first: How many of them; None for all.
      skip: How many go unharmed before.
      probability: That a frame concerned is struck.
      until: For "delay": an Event to wait for, or seconds.
    """

    fault: str
    kind: str = ANY
    first: int | None = None
    skip: int = 0
    probability: float = 1.0
    until: threading.Event | float = 0.0


class Plan:
    """Rules and a seed; remembers what it did.

    Attributes:
      counts: Number of faults by (fault, kind of frame).
    """

    def __init__(self, *rules, seed=0):
        for rule in rules:
            if rule.fault not in FAULTS:
                raise ValueError(f"a fault must be one of {FAULTS}, not {rule.fault!r}")
        self._rules = rules
        self._seed = seed
        self._concerned = Counter()
        self._struck = Counter()
        self._changed = threading.Condition()
        self.counts = Counter()

    def touches(self, *kinds):
        """Whether any rule is about frames of these kinds."""
        return any(rule.kind in (ANY, *kinds) for rule in self._rules)

    def strike(self, kind):
        """The rule that strikes the next frame of this kind, or None."""
        with self._changed:
            for index, rule in enumerate(self._rules):
                if rule.kind in (ANY, kind) and self._strikes(index, rule):
                    self.counts[rule.fault, kind] += 1
                    self._changed.notify_all()
                    return rule
        return None

    def wait_for(self, count, timeout=60.0):
        """Waits until that many faults have happened; whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self.counts.total() >= count, timeout)

    def _strikes(self, index, rule):
        number = self._concerned[index]
        self._concerned[index] += 1
        if number < rule.skip:
            return False
        if rule.first is not None and self._struck[index] >= rule.first:
            return False
        drawn = random.Random(f"{self._seed}/{index}/{number}").random()
        if drawn >= rule.probability:
            return False
        self._struck[index] += 1
        return True


class FaultyTransport:
    """A transport around another one; what it does not know, the other one does."""

    _OWN = ("inner", "plan", "closed", "_delayed")

    def __init__(self, inner, plan):
        self.inner = inner
        self.plan = plan
        self.closed = threading.Event()
        self._delayed = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __setattr__(self, name, value):
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    def connect(self, peer, address, deadline=None):
        return FaultyChannel(self.inner.connect(peer, address, deadline), self)

    def serve(self, on_channel):
        self.inner.serve(lambda channel: on_channel(FaultyChannel(channel, self)))

    def close(self):
        self.closed.set()
        self.inner.close()
        for thread in self._delayed:
            thread.join()

    def later(self, until, action):
        """Runs `action` in a thread when the time has come, unless closed before."""
        thread = threading.Thread(target=self._later, args=(until, action), daemon=True)
        self._delayed.append(thread)
        thread.start()

    def _later(self, until, action):
        if isinstance(until, threading.Event):
            while not until.wait(0.02):
                if self.closed.is_set():
                    return
        elif self.closed.wait(until):
            return
        action()


class FaultyChannel:
    """A channel whose sent frames meet the plan's faults."""

    def __init__(self, inner, transport):
        self.inner = inner
        self._transport = transport

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def send(self, frame, deadline=None):
        rule = self._transport.plan.strike(frame.kind)
        if rule is None:
            self.inner.send(frame, deadline)
        elif rule.fault == "delay":
            self._transport.later(rule.until, lambda: self._send_late(frame))
        elif rule.fault == "duplicate":
            self.inner.send(frame, deadline)
            # A channel that closes in between must not look as if nothing was sent.
            with contextlib.suppress(ChannelClosed):
                self.inner.send(frame, deadline)
        elif rule.fault == "truncate":
            self._send_half(frame, deadline)
        elif rule.fault == "close":
            self.inner.close("closed by a fault")

    def receive(self, deadline=None):
        return self.inner.receive(deadline)

    def exchange(self, frame, deadline=None):
        # A transport may answer `exchange` inline, without sending anything.
        if not self._transport.plan.touches(frame.kind, *ANSWERS):
            return self.inner.exchange(frame, deadline)
        self.send(frame, deadline)
        while True:
            answer = self.receive(deadline)
            if answer.kind not in ANSWERS or answer.id > frame.id:
                raise ProtocolError(f"no answer to {frame.id}: {answer.kind}")
            if answer.id == frame.id:
                return answer

    def close(self, reason="closed on this side"):
        self.inner.close(reason)

    def _send_late(self, frame):
        try:
            self.inner.send(frame)
        except ChannelClosed:
            return  # It came too late for this channel.

    def _send_half(self, frame, deadline):
        if isinstance(self.inner, Connection):
            data = b"".join(pack(frame))
            self.inner._stream.send([data[: len(data) // 2]], deadline)
        self.inner.close("a frame was truncated by a fault")
