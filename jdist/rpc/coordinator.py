"""The coordinator: where workers meet, wait for each other, and are missed.

It runs beside the worker of rank 0, over a transport of its own. Every worker keeps one
control channel to it as long as it belongs to the group; when that closes without a
word, the worker is lost, and everybody is told.
"""

import threading
import time
from typing import Any

from jdist.rpc.alarm import Alarm
from jdist.rpc.channel import Channel, ChannelClosed, Transport
from jdist.rpc.crew import Crew
from jdist.rpc.errors import ProtocolError
from jdist.rpc.frame import REPLY, Frame
from jdist.rpc.gathering import Gathering, Key, Part, patience
from jdist.rpc.liveness import Pace, silent_for
from jdist.rpc.member import Member
from jdist.rpc.options import RpcOptions
from jdist.rpc.roster import Roster

NAME = ":coordinator:"
"""Of the coordinator's transport; no harm if a worker has the same."""

_MALFORMED = (KeyError, TypeError, ValueError, OverflowError)
"""What comes of a request that is not made as it should be."""


class Coordinator:
    """Serves the control channels of a group.

    Args:
      transport: Where the workers reach it; owned by the coordinator from now on.
      world_size: How many workers make the group.
      options: The pace of the heartbeat.
      beats: Whether to expect signs of life.
    """

    def __init__(
        self,
        transport: Transport,
        world_size: int,
        options: RpcOptions,
        beats: bool = True,
    ) -> None:
        self._transport = transport
        self._options = options
        self._roster = Roster(world_size)
        self._gatherings: dict[Key, Gathering] = {}
        self._lock = threading.Lock()
        self._fewer = threading.Condition(self._lock)
        self._crew = Crew("rpc coordinator", 1024)
        self._alarm = Alarm("rpc coordinator deadlines", self._expire)
        self._pace: Pace | None = None
        transport.serve(self._serve)
        if beats:
            self._pace = Pace(
                "rpc coordinator heartbeat", options.heartbeat_interval, self._listen
            )

    @property
    def address(self) -> Any:
        """Where workers reach it."""
        return self._transport.address

    def wait_until_alone(self, seconds: float) -> None:
        """Waits until all others have gone, at most so long."""
        with self._fewer:
            self._fewer.wait_for(lambda: not self._roster.present(), seconds)

    def wait_until_told(self, seconds: float) -> None:
        """After a failure: waits until everybody came and was told, at most so long."""
        with self._fewer:
            self._fewer.wait_for(self._roster.all_told, seconds)

    def close(self, reason: str) -> None:
        """Ends the group for everybody; to those who are still in it, with `reason`."""
        with self._lock:
            if self._roster.failure is None and not self._roster.complete:
                self._post(self._roster.fail(reason))
            for member in self._roster.present():
                member.post(Frame("group.end", 0, {"reason": reason}, None, []))
        if self._pace is not None:
            self._pace.close()
        self._alarm.close()
        self._crew.close(timeout=1.0)  # once all farewells are sent
        self._transport.close()

    # --- requests ---

    def _serve(self, channel: Channel) -> None:
        member: Member | None = None
        try:
            while True:
                frame = channel.receive()
                if member is not None:
                    member.heard = time.monotonic()
                    self._answer(member, frame)
                elif frame.kind == "group.join":
                    member = self._join(channel, frame)
        except (ChannelClosed, ProtocolError, *_MALFORMED) as error:
            channel.close(str(error))
            if member is not None:
                self._gone(member, f"its connection closed ({error})")

    def _join(self, channel: Channel, frame: Frame) -> Member:
        member = Member(
            Roster.info(channel.peer, frame.meta),
            frame.meta["address"],
            channel,
            self._crew,
        )
        with self._lock:
            if self._roster.is_ending(member.info):
                # It was in this group and left it. The next one will be at this place.
                raise ChannelClosed("this group is ending; try again")
        member.number = frame.id
        member.until = patience(frame.meta["timeout"])
        with self._fewer:
            self._post(self._roster.add(member, frame.meta["world_size"]))
            self._fewer.notify_all()
        self._alarm.set(member.until)
        return member

    def _answer(self, member: Member, frame: Frame) -> None:
        if frame.kind == "group.beat":
            member.post(Frame(REPLY, frame.id, {}, None, []))
        elif frame.kind == "group.gather":
            self._gather(member, frame)
        elif frame.kind == "group.leave":
            member.left = True
            self._gone(member, "it has left the group")
            member.post(Frame(REPLY, frame.id, {}, None, []))

    def _gather(self, member: Member, frame: Frame) -> None:
        names = tuple(frame.meta["names"])
        key = (names, int(frame.meta["round"]))
        timeout = frame.meta["timeout"]
        part = Part(frame.id, frame.tree, frame.leaves, timeout, patience(timeout))
        with self._lock:
            if not self._roster.has(member):
                raise ProtocolError(f"{member.info.name!r} was not let in.")
            gathering = self._gatherings.get(key)
            if gathering is None:
                gathering = Gathering(names, frame.meta["purpose"])
                self._gatherings[key] = gathering
            gathering.add(member.info.name, part)
            for name in gathering.missing():
                gone = self._roster.gone(name)
                if gone is not None:
                    gathering.lose(name, gone)
            self._settle(key, gathering)
        self._alarm.set(part.until)

    def _settle(self, key: Key, gathering: Gathering) -> None:
        """Sends the answers that are due; keeps a decided gathering until all came."""
        for name, answer in gathering.take_answers():
            self._roster.find(name).post(answer)
        if all(self._roster.gone(name) is not None for name in gathering.missing()):
            self._gatherings.pop(key, None)

    # --- losses ---

    def _gone(self, member: Member, reason: str) -> None:
        with self._fewer:
            if member.gone is not None:
                return
            member.gone = reason
            if self._roster.remove(member):
                kind = "group.left" if member.left else "group.lost"
                meta = {"name": member.info.name, "reason": reason}
                for other in self._roster.present():
                    other.post(Frame(kind, 0, meta, None, []))
                for key, gathering in list(self._gatherings.items()):
                    gathering.lose(member.info.name, reason)
                    self._settle(key, gathering)
            self._fewer.notify_all()

    def _listen(self, held_up: bool) -> None:
        now = time.monotonic()
        with self._lock:
            members = self._roster.present()
        for member in members:
            silence = now - member.heard
            if held_up:
                member.heard = now
            elif silence > self._options.heartbeat_timeout:
                reason = silent_for(silence)
                self._gone(member, reason)
                member.channel.close(reason)

    # --- time ---

    def _expire(self, now: float) -> float | None:
        with self._lock:
            self._post(self._roster.expire(now))
            for key, gathering in list(self._gatherings.items()):
                gathering.expire(now)
                self._settle(key, gathering)
            moments = [self._roster.until()]
            moments += [gathering.until() for gathering in self._gatherings.values()]
        return min((at for at in moments if at is not None), default=None)

    def _post(self, answers: list[tuple[Member, Frame]]) -> None:
        for member, frame in answers:
            member.post(frame)
