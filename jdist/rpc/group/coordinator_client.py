"""A worker's control channel to the coordinator of its group.

Through it a worker joins and leaves, takes part in collectives, and learns of workers
that join, leave or are lost.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Any

from msgspec.structs import replace

from jdist._errors import type_error, value_error
from jdist.rpc.base import current
from jdist.rpc.base.current import NEVER, Deadline, Meta, resolve
from jdist.rpc.base.errors import CollectiveMismatch, RpcError, RpcTimeout, WorkerLost
from jdist.rpc.base.future import (
    Future,
    await_done,
    call_when_done,
    complete,
    error_of,
    run_all,
)
from jdist.rpc.base.worker_info import PeerRecord, WorkerInfo
from jdist.rpc.calls.agent import Agent
from jdist.rpc.calls.peers import Peer
from jdist.rpc.group.coordinator import Coordinator
from jdist.rpc.group.liveness import MEMORY, Pace, held_up_for, silent_for
from jdist.rpc.group.membership import LATE
from jdist.rpc.wire.channel import Channel, NotSent
from jdist.rpc.wire.frame import REPLY, Frame
from jdist.rpc.wire.shared_connection import Callbacks, SharedConnection

_Body = tuple[Any, list[Any]]
"""Tree and leaves of a value."""

_ANSWER_SECONDS = 1.0
_LOOK_SECONDS = 0.02
# Timeout of a request whose deadline has passed; 0 would mean no limit.
_INSTANT = 1e-9

_LONGEST_REFUSAL = 1000
_LONGEST_TAG = 200

# Seconds beyond a deadline that the coordinator watches: it knows who is missing, so
# its answer is better than our own.
_GRACE = 5.0


class CoordinatorClient:
    """A worker's side of the control channel.

    Args:
      agent: The worker.
      channel: To the coordinator; owned by the client.
      beats: Whether to give signs of life, and to expect them.

    Attributes:
      elastic: Whether workers come and go one by one.
      coordinator: The other side itself, where it is in this worker's care: on rank 0.
    """

    def __init__(self, agent: Agent, channel: Channel, beats: bool = True) -> None:
        self.elastic = False
        self.coordinator: Coordinator | None = None
        self._agent = agent
        self._beats = beats
        self._head = "the coordinator"
        self._head_incarnation: int | None = None
        self._ended: str | None = None
        self._alone: str | None = None
        self._left = False
        self._expelled: str | None = None
        self._strangers: SimpleQueue[str | None] = SimpleQueue()
        self._heard = time.monotonic()
        self._pace: Pace | None = None
        self._shared = SharedConnection(channel, agent.pool, self._pushed, self._closed)
        self._alarm = agent.timer.alarm(self._shared.expire)

    # --- joining and leaving ---

    def join(self, rank: int, world_size: int, timeout: float) -> Future[None]:
        """Asks to join the group; the future is done once this worker belongs to it.

        That is in a group of fixed size when all have come, and in an elastic one
        (`world_size` 0) when all members know of it. The future raises RpcTimeout,
        which names the missing, and RpcError when a name or rank is not unique.
        """
        self.elastic = not world_size
        meta = {
            "name": self._agent.info.name,
            "rank": rank,
            "world_size": world_size,
            "address": self._agent.address,
            "timeout": timeout,
        }
        asked = self._ask("group.join", meta, timeout, "init_rpc")
        return asked.then(self._joined)

    def strangers(self, joined: Future[None]) -> Iterator[str]:
        """Yields descriptions of peers with another key until `joined` is done."""
        call_when_done(joined, lambda: self._strangers.put(None))
        return iter(self._strangers.get, None)

    def _joined(self, asked: Future[Frame]) -> None:
        frame = asked.value()
        if frame.kind != REPLY:
            kind = RpcTimeout if frame.meta["kind"] == LATE else RpcError
            raise kind(str(frame.meta["error"]))
        members = [PeerRecord.of_row(row) for row in frame.meta["members"]]
        self._head = members[0].info.name
        self._head_incarnation = members[0].info.incarnation
        self._agent.meet(members)
        if self._beats:
            # Joining may have taken longer than the heartbeat's timeout.
            self._heard = time.monotonic()
            options = self._agent.options
            memory = MEMORY * options.heartbeat_timeout
            interval = options.heartbeat_interval
            self._pace = Pace(self._agent.timer, interval, self._beat, memory)

    def leave(
        self, seconds: float, noted: bool = False, together: bool = False
    ) -> None:
        """Tells the coordinator that this worker leaves, and closes the channel.

        Args:
          seconds: To wait at most for the coordinator's answer.
          noted: Whether to wait until all other members know that it left.
          together: Whether all other members leave too, so that none needs to know.
        """
        # First: when the channel closes below, `_closed` must not report a loss.
        self._left = True
        if self._pace is not None:
            self._pace.close()
        if self._shared.closed is None:
            meta = {"noted": noted, "together": together}
            asked = self._ask("group.leave", meta, seconds, "shutdown")
            await_done(asked, time.monotonic() + seconds)
        self._shared.close("this worker was shut down")

    # --- meeting ---

    def all_gather(
        self,
        value: Any,
        names: Iterable[str] | None,
        timeout: float,
        operation: str = "all_gather",
        tag: str = "",
    ) -> dict[str, Any]:
        """Gathers the values of the workers `names`, by name.

        Args:
          value: Anything that can be sent.
          names: Names of the workers that take part; None for all.
          timeout: Seconds; -1 for the default, 0 for no limit.
          operation: The collective that all must call, see `CollectiveRequest`.
          tag: The caller's own, likewise.
        """
        taking_part = self._check_names(operation, names)
        enclosing = current.deadline()
        try:
            limit = resolve(timeout, self._agent.default_timeout, enclosing)
            _check_tag(operation, tag)
            body = self._agent.codec.encode(value)
            asked = self._come(taking_part, operation, tag, body, limit)
        except Exception as error:
            # All are told: if this worker stayed away, its next collective would meet
            # this one of the others.
            self.refuse(taking_part, error, operation, "")
            raise
        frame = asked.wait()
        if frame.kind == REPLY:
            return self._parts(frame)
        if "lost" in frame.meta:
            # If this worker was expelled, its own stop is the cause of that loss.
            if self._expelled is not None:
                raise WorkerLost(self._agent.info.name, operation, self._expelled)
            raise WorkerLost(frame.meta["lost"], operation, frame.meta["reason"])
        if "failed" in frame.meta:
            kind = CollectiveMismatch if frame.meta["mismatch"] else RpcError
            raise kind(frame.meta["failed"])
        raise RpcTimeout(frame.meta["timeout"])

    def refuse(
        self,
        names: Iterable[str] | None,
        error: BaseException,
        operation: str,
        tag: str,
    ) -> None:
        """Makes the next collective of these workers fail on all of them.

        Does not wait for them. A worker that comes late gets the error as well.
        """
        taking_part = self._check_names(operation, names)
        text = f"{type(error).__name__}: {error}"[:_LONGEST_REFUSAL]
        self._come(taking_part, operation, tag, (None, []), NEVER, text)

    def _come(
        self,
        names: list[str] | None,
        operation: str,
        tag: str,
        body: _Body,
        limit: Deadline,
        refused: str | None = None,
    ) -> Future[Frame]:
        """Sends this worker's contribution to the next collective, or its refusal.

        Raises:
          ValueError: The value is beyond the limits.
        """
        left = limit.remaining()
        meta = {
            "names": names,
            "operation": operation,
            "tag": tag,
            "timeout": 0.0 if left is None else max(left, _INSTANT),
            "refused": refused,
        }
        return self._ask_until(limit, "group.gather", meta, body, operation)

    def workers(self) -> list[WorkerInfo]:
        """All workers by rank, without departed ones in an elastic group."""
        peers = self._agent.directory.peers()
        if self.elastic:
            peers = [peer for peer in peers if peer.departed is None]
        return [peer.info for peer in peers]

    def lost(self) -> dict[str, str]:
        """The lost workers, each with the reason; this one if the others lost it."""
        own = {} if self._expelled is None else {self._agent.info.name: self._expelled}
        # Itself first: it finds the connections to all others closed.
        return own | self._agent.directory.lost()

    def check(self, purpose: str) -> None:
        """Raises if a worker was lost; in an elastic group only for the coordinator.

        Raises:
          WorkerLost: One was.
        """
        if self._alone is not None:
            raise self._without_coordinator(purpose, self._alone)
        for name, reason in self.lost().items():
            if not self.elastic:
                raise WorkerLost(name, purpose, reason)

    # --- inside ---

    def _check_names(
        self, purpose: str, names: Iterable[str] | None
    ) -> list[str] | None:
        """The checked names to send; None if the coordinator is to take all members."""
        members = sorted(worker.name for worker in self.workers())
        if names is None:
            return None if self.elastic else members
        chosen = sorted({names} if isinstance(names, str) else set(names))
        # In an elastic group a name may be of a worker that has yet to join.
        known = chosen if self.elastic else members
        if self._agent.info.name not in chosen or not set(known).issuperset(chosen):
            rule = f"must be workers of the group, {self._agent.info.name} among them"
            raise value_error(f"{purpose}(names=...)", rule, chosen)
        return chosen

    def _parts(self, frame: Frame) -> dict[str, Any]:
        gathered, start = {}, 0
        assert isinstance(frame.tree, list)
        names, sizes = frame.meta["names"], frame.meta["sizes"]
        for name, tree, size in zip(names, frame.tree, sizes, strict=True):
            leaves = frame.leaves[start : start + size]
            gathered[name] = self._agent.codec.decode(tree, leaves)
            start += size
        return gathered

    def _ask(
        self, kind: str, meta: Meta, timeout: float, purpose: str
    ) -> Future[Frame]:
        limit = resolve(timeout, 0.0, current.deadline())
        return self._ask_until(limit, kind, meta, (None, []), purpose)

    def _ask_until(
        self, limit: Deadline, kind: str, meta: Meta, body: _Body, purpose: str
    ) -> Future[Frame]:
        late = limit if limit.at is None else replace(limit, at=limit.at + _GRACE)
        asked = _Asked(self, purpose, late)
        try:
            self._shared.submit(asked, kind, meta, *body)
        except NotSent as error:
            run_all(asked.disconnected(str(error)))
        self._alarm.set(late.at)
        return asked.future

    def unreachable(self, purpose: str, reason: str) -> RpcError:
        """Makes the error for a request that the coordinator does not answer."""
        if self._left:
            return RpcError(f"RPC was shut down on this worker during {purpose}.")
        return self._without_coordinator(purpose, reason)

    def expelled(self) -> str | None:
        """The reason why the others consider this worker lost; None if they do not.

        A worker that was frozen and resumes gets no message about it, it only finds
        its connections closed. May wait a second for the coordinator's answer.
        """
        if self._expelled is not None:
            return self._expelled
        held_up = self._held_up()
        if held_up is not None and self._shared.closed is None and self._is_heard():
            # All were held up together, as by a suspended machine; or this is the
            # coordinator's worker, which hears itself and may be told in a moment.
            return self._told_to_be_lost()
        return held_up if self._shared.closed is None else self._blame_itself()

    def _told_to_be_lost(self) -> str | None:
        until, pause = time.monotonic() + _ANSWER_SECONDS, threading.Event()
        if self.coordinator is not None:
            while self._expelled is None and time.monotonic() < until:
                pause.wait(_LOOK_SECONDS)
        return self._expelled

    def _held_up(self) -> str | None:
        if self._pace is None or self._ended is not None:
            return None
        return held_up_for(self._pace, self._agent.options)

    def _blame_itself(self) -> str | None:
        """The reason why the others consider this worker lost, if it was held up."""
        # Kept for good: the pace forgets the stop after a while, and later losses are
        # consequences of it, too.
        self._expelled = self._expelled or self._held_up()
        return self._expelled

    def _is_heard(self) -> bool:
        asked = self._ask("group.beat", {}, _ANSWER_SECONDS, "heartbeat")
        answered = await_done(asked, time.monotonic() + _ANSWER_SECONDS)
        return answered and error_of(asked) is None

    def _without_coordinator(self, purpose: str, reason: str) -> WorkerLost:
        expelled = self._blame_itself()
        if expelled is not None:
            return WorkerLost(self._agent.info.name, purpose, expelled)
        reason = f"as coordinator, {self._ended or reason}"
        return WorkerLost(self._head, purpose, reason)

    def _pushed(self, frame: Frame) -> None:
        directory, meta = self._agent.directory, frame.meta
        if frame.kind == "group.end":
            self._ended = str(meta["reason"])
        elif frame.kind == "group.stranger":
            self._strangers.put(str(meta["text"]))
        elif frame.kind == "group.coming":
            directory.know(self._agent.peer(PeerRecord.of_row(meta["member"])))
        elif frame.kind == "group.expelled":
            self._expelled = self._expelled or str(meta["reason"])
        elif frame.kind in ("group.lost", "group.left"):
            peer_gone = directory.of_incarnation(meta["incarnation"])
            self._part(frame.kind, peer_gone, str(meta["reason"]))
        if "confirm" in meta:
            # Not on the reading thread: sending may wait for the peer to read, and then
            # neither side would read.
            self._agent.pool.run(lambda: self._confirm(meta["confirm"]))

    def _confirm(self, number: int) -> None:
        timeout = self._agent.options.heartbeat_timeout
        self._ask("group.confirm", {"number": number}, timeout, "membership")

    def _closed(self, reason: str) -> None:
        if self._left or self._head_incarnation is None:
            return
        ended = self._ended
        if self.elastic:
            self._alone = reason
        kind = "group.lost" if ended is None else "group.left"
        head = self._agent.directory.of_incarnation(self._head_incarnation)
        self._blame_itself()
        self._part(kind, head, ended or f"its control channel closed ({reason})")

    def _part(self, kind: str, peer: Peer | None, reason: str) -> None:
        if peer is None or peer.departed is not None:
            return  # it was gone before this worker came, or its departure is known
        if kind == "group.lost":
            peer.lost = reason
        if self.elastic:
            self._agent.directory.expel(peer)
        self._agent.drop_peer(peer, reason)

    def _beat(self, now: float, held_up: bool) -> None:
        silence = now - self._heard
        if held_up:
            # The coordinator's answers may have come while this process was stopped.
            self._heard = now
        elif silence > self._agent.options.heartbeat_timeout:
            self._shared.close(silent_for(silence))
            return
        timeout = self._agent.options.heartbeat_timeout
        self._ask("group.beat", {}, timeout, "heartbeat")

    def heard(self) -> None:
        """Notes a sign of life of the coordinator."""
        self._heard = time.monotonic()


def client_of(agent: Agent) -> CoordinatorClient:
    """Return the coordinator client of a worker."""
    found: CoordinatorClient = agent.group  # untyped, as imports run downwards
    return found


def _check_tag(operation: str, tag: object) -> None:
    call = f"{operation}(tag=...)"
    if type(tag) is not str:
        raise type_error(call, "must be a string", tag)
    if len(tag) > _LONGEST_TAG:
        rule = f"must be shorter than {_LONGEST_TAG + 1} characters"
        raise value_error(call, rule, f"{len(tag)} of them")


class _Asked:
    """A pending request to the coordinator; see `Pending`."""

    def __init__(
        self, client: CoordinatorClient, purpose: str, deadline: Deadline
    ) -> None:
        self.deadline = deadline
        self.future: Future[Frame] = Future()
        self._client = client
        self._purpose = purpose

    def answered(self, frame: Frame) -> Callbacks:
        self._client.heard()
        return complete(self.future, frame, None) or []

    def disconnected(self, reason: str) -> Callbacks:
        error = self._client.unreachable(self._purpose, reason)
        return complete(self.future, None, error) or []

    def expired(self) -> Callbacks:
        text = f"{self._purpose} timed out: the coordinator does not answer."
        return complete(self.future, None, RpcTimeout(text)) or []
