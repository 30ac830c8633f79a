"""The coordinator of a group: joins, collectives, liveness and departures.

It runs beside the worker of rank 0, over a transport of its own. Every worker keeps one
control channel to it for as long as it belongs to the group. When that closes without a
`group.leave`, the worker is lost, and all others are told.

A worker that comes to a collective joins the first round of the same names that still
expects it. So workers that meet several times meet in the order of their calls.
"""

import threading
import time
from collections import Counter
from typing import Any

from jdist.rpc.base.current import Deadline, Meta
from jdist.rpc.base.errors import ProtocolError, RpcTimeout
from jdist.rpc.base.options import RpcOptions
from jdist.rpc.base.thread_pool import ThreadPool
from jdist.rpc.base.timer import Timer
from jdist.rpc.base.worker_info import MOST_WORKERS, WorkerInfo
from jdist.rpc.group.barrier_round import (
    SHUTDOWN,
    BarrierRound,
    RoundKey,
    contribution_of,
    end_of_wait,
)
from jdist.rpc.group.liveness import Pace, held_up_for, silent_for
from jdist.rpc.group.membership import Answers, Member, Membership, Refusal
from jdist.rpc.wire.channel import Channel, ChannelClosed, Reader, Transport
from jdist.rpc.wire.frame import REPLY, Frame

NAME = ":coordinator:"
"""Name of the coordinator's transport; a worker may have it, but no other transport."""

_ENDING = "this group is ending; try again"
# What reading a malformed request can raise: a peer's mistake closes its channel and is
# no failure of the thread that reads it.
_MALFORMED = (KeyError, TypeError, ValueError, OverflowError)


class Coordinator:
    """Serves the control channels of a group.

    Args:
      transport: Where the workers reach it; owned by the coordinator.
      world_size: Number of workers of the group; 0 for an elastic one.
      options: For the heartbeat.
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
        self._membership = Membership(world_size)
        self._rounds: list[BarrierRound] = []
        self._opened: Counter[RoundKey] = Counter()  # rounds so far
        self._leaving: str | None = None
        self._ended = False
        self._lock = threading.Lock()
        self._fewer = threading.Condition(self._lock)
        self._pool = ThreadPool("rpc coordinator", MOST_WORKERS)
        self._timer = Timer("rpc coordinator timer", self._pool)
        self._alarm = self._timer.alarm(self._expire)
        self._pace: Pace | None = None
        transport.on_refused = self._refused
        transport.serve(self._serve)
        if beats:
            self._pace = Pace(
                self._timer,
                options.heartbeat_interval,
                self._listen,
                options.heartbeat_timeout,  # the consequences of a stop show within it
            )

    @property
    def address(self) -> Any:
        """The address at which workers reach the coordinator."""
        return self._transport.address

    def wait_until_alone(self, seconds: float) -> None:
        """Waits until all workers have gone, at most `seconds`."""
        with self._lock:
            self._fewer.wait_for(lambda: not self._membership.present(), seconds)

    def wait_for_leavers(self, deadline: Deadline) -> None:
        """Waits until all members but rank 0 of an elastic group have left.

        Raises:
          RpcTimeout: Some have not left; the message names them.
        """
        with self._lock:
            # No worker is admitted from here on: a newcomer means the next group at
            # this address, and tries again until that listens.
            for member in self._membership.close():
                member.channel.close(_ENDING)
            self._leaving = self._membership.present()[0].info.name

            def others() -> list[str]:
                return [one.info.name for one in self._membership.present()][1:]

            if self._fewer.wait_for(lambda: not others(), deadline.remaining()):
                return
            names = others()
        raise RpcTimeout(
            f"shutdown timed out after {deadline.timeout:.2f} seconds: rank 0 of an "
            f"elastic group leaves last. Still there: {', '.join(names)}."
        )

    def wait_until_told(self, seconds: float) -> None:
        """After a failure, waits until all workers were refused, at most `seconds`."""
        # Workers that start later must meet this refusal and its reason, and not a port
        # at which nothing listens.
        with self._lock:
            self._fewer.wait_for(self._membership.all_told, seconds)

    def close(self, reason: str) -> None:
        """Ends the group and sends the remaining members the reason."""
        with self._lock:
            self._ended = True
            self._post(self._membership.fail(Refusal(reason)))
            for member in self._membership.present():
                member.post(Frame("group.end", 0, {"reason": reason}, None, []))
        if self._pace is not None:
            self._pace.close()
        self._timer.close()
        self._pool.close(timeout=1.0)  # once all farewells are sent
        self._transport.close()

    # --- requests ---

    def _serve(self, channel: Channel) -> None:
        member: Member | None = None

        def take(frame: Frame) -> None:
            nonlocal member
            try:
                if member is not None:
                    member.heard = time.monotonic()
                    self._answer(member, frame)
                elif frame.kind == "group.join":
                    member = self._join(channel, frame)
            except _MALFORMED as error:
                raise ProtocolError(str(error)) from error

        def end(reason: str) -> None:
            channel.close(reason)
            if member is not None:
                self._gone(member, f"its connection closed ({reason})")

        channel.read(Reader(take, end, patient=False))

    def _join(self, channel: Channel, frame: Frame) -> Member:
        info = WorkerInfo(frame.meta["name"], int(frame.meta["rank"]))
        member = Member(info, frame.meta["address"], channel, self._pool)
        with self._lock:
            if self._membership.is_ending(member.info):
                # It was in this group and left it. The next one will be at this place.
                raise ChannelClosed(_ENDING)
        member.request = frame.id
        member.until = end_of_wait(frame.meta["timeout"])
        with self._lock:
            self._post(self._membership.add(member, frame.meta["world_size"]))
            self._fewer.notify_all()
        self._alarm.set(member.until)
        return member

    def _refused(self, text: str) -> None:
        """Reports a peer with another key to the waiting workers."""
        # It may be the worker that they miss, started with a wrong key.
        with self._lock:
            self._post(self._membership.refused(text))

    def _answer(self, member: Member, frame: Frame) -> None:
        if member.gone is not None:
            if member.left:
                # It waits until the others have noted that it leaves. Its other
                # messages no longer count; to close its channel would end that wait.
                return
            # A frozen worker was declared lost and resumes before its channel closes.
            raise ChannelClosed(member.gone)
        if frame.kind == "group.beat":
            member.post(Frame(REPLY, frame.id, {}, None, []))
        elif frame.kind == "group.confirm":
            member.post(Frame(REPLY, frame.id, {}, None, []))
            with self._lock:
                number = int(frame.meta["number"])
                self._post(self._membership.confirmed(member, number))
        elif frame.kind == "group.gather":
            self._gather(member, frame)
        elif frame.kind == "group.leave":
            self._gone(member, "it has left the group", frame)

    def _gather(self, member: Member, frame: Frame) -> None:
        contribution = contribution_of(member, frame)
        with self._lock:
            if not self._membership.has(member):
                raise ProtocolError(f"{member.info.name!r} was not let in.")
            this = self._round_for(contribution.asked.key, member.info.name)
            this.add(member.info.name, contribution)
            # A worker may have been lost before this round was opened.
            for missing in this.missing():
                gone = self._membership.gone(missing)
                if gone is not None:
                    this.lose(missing, gone)
            this.expire(time.monotonic(), self._whereabouts)
            self._settle(this)
        self._alarm.set(contribution.until)

    def _round_for(self, key: RoundKey, name: str) -> BarrierRound:
        """Finds or opens the round that this worker's contribution belongs to."""
        for one in self._rounds:
            # The oldest first: a worker that comes late must meet the round that the
            # others opened for it, even if that has failed, to stay in step with them.
            if one.key == key and one.expects(name):
                return one
        names = key.names
        if names is None:
            names = tuple(sorted(one.info.name for one in self._membership.present()))
        self._opened[key] += 1
        opened = BarrierRound(key, names, self._opened[key])
        self._rounds.append(opened)
        return opened

    def _settle(self, this: BarrierRound) -> None:
        """Sends the answers that are due; keeps a decided round for late workers."""
        self._post(this.take_answers())
        if not this.decided:
            return
        # A worker that comes late to an elastic group's round opens the next one.
        gone = all(one.member.gone is not None for one in this.contributions)
        over = self._membership.elastic and (this.lost or gone)
        present = {one.info.name for one in self._membership.present()}
        for name in this.missing():
            if over or name not in present:
                this.excuse(name)
        if not this.missing():
            self._rounds.remove(this)

    def _whereabouts(self) -> dict[str, str]:
        """The operation in which each worker waits, by name."""
        found = {} if self._leaving is None else {self._leaving: SHUTDOWN}
        # A program's collective hides the shutdown in which another thread waits.
        under_way = [one for one in self._rounds if not one.decided]
        for this in sorted(under_way, key=lambda one: not one.key.ends):
            for one in this.contributions:
                found[one.member.info.name] = this.named(one.asked)
        return found

    # --- leaving, and losses ---

    def _gone(self, member: Member, reason: str, leaving: Frame | None = None) -> None:
        """Removes a worker that is lost, or is `leaving` by this request."""
        with self._lock:
            # The channels are closed one by one at the end, and those still open must
            # not bring the news that a worker is lost whose channel has just closed.
            if member.gone is not None or (self._ended and leaving is None):
                return
            member.gone, member.left = reason, leaving is not None
            belonged = self._membership.has(member)
            # Before the loss is announced: it may be a consequence of a stop of this
            # process, and then rank 0's worker must be told that reason first.
            if leaving is None:
                self._blame_itself()
            known = self._membership.remove(member)
            self._announce(member, leaving, known)
            if belonged:
                self._miss(member, reason)
            self._post(self._membership.advance(member))
            self._fewer.notify_all()

    def _announce(self, member: Member, leaving: Frame | None, known: bool) -> None:
        """Tells the others that a member is gone, and answers it if it is leaving."""
        wishes: Meta = {} if leaving is None else leaving.meta
        answer: Answers = []
        if leaving is not None:
            answer = [(member, Frame(REPLY, leaving.id, {}, None, []))]
        # Where all n leave together, each would get n messages about the others.
        announced = known and wishes.get("together") is not True
        others = self._membership.present() if announced else []
        kind = "group.lost" if leaving is None else "group.left"
        meta = {"incarnation": member.info.incarnation, "reason": member.gone}
        if wishes.get("noted"):
            # It waits until the others have noted that it leaves.
            self._post(self._membership.ask(others, kind, meta, lambda: answer))
        else:
            told = Frame(kind, 0, meta, None, [])
            self._post([*((other, told) for other in others), *answer])

    def _blame_itself(self) -> None:
        """Tells rank 0's worker, if this process was stopped, why others leave it.

        The others have closed their connections because they took it for lost.
        """
        held_up = None if self._pace is None else held_up_for(self._pace, self._options)
        if held_up is None:
            return
        told = Frame("group.expelled", 0, {"reason": held_up}, None, [])
        present = self._membership.present()
        self._post([(one, told) for one in present if not one.info.id])

    def _miss(self, member: Member, reason: str) -> None:
        """Completes or fails the rounds that wait for a worker that has gone."""
        name = member.info.name
        for this in list(self._rounds):
            if this.key.names is not None or not member.left:
                this.lose(name, reason)
            this.excuse(name)
            self._settle(this)

    def _listen(self, now: float, held_up: bool) -> None:
        with self._lock:
            members = self._membership.present()
        for member in members:
            silence = now - member.heard
            if held_up:
                # Its signs of life may have come while this process was stopped.
                member.heard = now
            elif silence > self._options.heartbeat_timeout:
                reason = silent_for(silence)
                self._gone(member, reason)
                member.channel.close(reason)

    # --- time ---

    def _expire(self, now: float) -> float | None:
        # Returns the moment of the next look, to which the timer sets its alarm again.
        with self._lock:
            self._post(self._membership.expire(now))
            moments = [self._membership.until()]
            for this in list(self._rounds):
                this.expire(now, self._whereabouts)
                self._settle(this)
                moments.append(this.until())
        return min((at for at in moments if at is not None), default=None)

    def _post(self, answers: Answers) -> None:
        for member, frame in answers:
            member.post(frame)
