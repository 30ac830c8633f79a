"""A worker's membership in its group: joining, meeting the others, losses, leaving."""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jdist._errors import requirement
from jdist.rpc import current
from jdist.rpc.agent import Agent
from jdist.rpc.channel import Channel
from jdist.rpc.deadline import Deadline, resolve
from jdist.rpc.errors import RpcError, RpcTimeout, WorkerLost
from jdist.rpc.frame import REPLY, Frame
from jdist.rpc.future import Future, call_when_done, complete
from jdist.rpc.line import Callbacks, Line
from jdist.rpc.liveness import Pace, silent_for
from jdist.rpc.worker_info import WorkerInfo

Lost = Callable[[str, str], None]
"""Told the name of a lost worker, and how its loss was noticed."""

_GRACE = 5.0
"""Seconds beyond a deadline that the coordinator watches: it knows who is missing, so
its answer is better than our own."""


class Group:
    """The control channel of one worker.

    Args:
      agent: The worker.
      channel: To the coordinator; owned by the group from now on.
      beats: Whether to give signs of life, and to expect them.
    """

    def __init__(self, agent: Agent, channel: Channel, beats: bool = True) -> None:
        self._agent = agent
        self._beats = beats
        self._head = "the coordinator"
        self._ended: str | None = None
        self._left = False
        self._lock = threading.Lock()
        self._rounds: Counter[tuple[str, ...]] = Counter()
        self._listeners: list[Lost] = []
        self._lost: dict[str, str] = {}
        self._gone_orderly: set[str] = set()
        self._heard = time.monotonic()
        self._pace: Pace | None = None
        self._line = Line(channel, agent.crew, self._pushed, self._closed)
        agent.watch(self._line)

    # --- joining and leaving ---

    def join(self, rank: int, world_size: int, timeout: float) -> Future[None]:
        """Asks to belong to the group; done when all its workers have come.

        The future raises RpcTimeout, with who is missing, and RpcError when a name or
        rank is not unique.
        """
        meta = {
            "rank": rank,
            "world_size": world_size,
            "address": self._agent.address,
            "timeout": timeout,
        }
        asked = self._ask("group.join", meta, timeout, "init_rpc")
        return asked.then(self._joined)

    def _joined(self, asked: Future[Frame]) -> None:
        frame = asked.value()
        if frame.kind != REPLY:
            kind = RpcTimeout if frame.meta["timeout"] else RpcError
            raise kind(str(frame.meta["error"]))
        rows = frame.meta["members"]
        self._head = rows[0][0]
        self._agent.meet((WorkerInfo(name, rank), at) for name, rank, at in rows)
        if self._beats:
            self._heard = time.monotonic()
            options = self._agent.options
            name = f"{self._agent.info.name} heartbeat"
            self._pace = Pace(name, options.heartbeat_interval, self._beat)

    def leave(self, seconds: float) -> None:
        """Tells the coordinator that this worker goes, and closes the channel."""
        self._left = True
        if self._pace is not None:
            self._pace.close()
        if self._line.closed is None:
            asked = self._ask("group.leave", {}, seconds, "shutdown")
            done = threading.Event()
            call_when_done(asked, done.set)
            done.wait(seconds)
        self._line.close("this worker was shut down")

    # --- meeting ---

    def all_gather(
        self,
        value: Any,
        names: Iterable[str] | None,
        timeout: float,
        purpose: str = "all_gather",
    ) -> dict[str, Any]:
        """What every one of `names` gave, by name, once all have come."""
        everybody = self.names()
        taking_part = self._check_names(purpose, names, everybody)
        enclosing = current.deadline()
        limit = resolve(timeout, self._agent.default_timeout, enclosing)
        tree, leaves = self._agent.codec.encode(value)
        with self._lock:
            turn = self._rounds[taking_part]
            self._rounds[taking_part] += 1
        meta = {
            "names": list(taking_part),
            "round": turn,
            "purpose": purpose,
            "timeout": limit.remaining() or 0.0,
        }
        frame = self._ask_until(
            limit, "group.gather", meta, (tree, leaves), purpose
        ).wait()
        if frame.kind == REPLY:
            return self._parts(taking_part, frame)
        if "lost" in frame.meta:
            raise WorkerLost(frame.meta["lost"], purpose, frame.meta["reason"])
        raise RpcTimeout(frame.meta["timeout"])

    def names(self) -> list[str]:
        """The names of all workers, by rank, also of those who have gone."""
        return [peer.info.name for peer in self._agent.directory.peers()]

    def lost(self) -> dict[str, str]:
        """The workers that were lost, and how that was noticed."""
        with self._lock:
            return dict(self._lost)

    def left(self) -> set[str]:
        """The workers that went in an orderly way."""
        with self._lock:
            return set(self._gone_orderly)

    def on_lost(self, listener: Lost) -> None:
        """Has `listener(name, reason)` called for every worker that gets lost.

        It runs on a thread of its own, once for each, also for those lost before. Who
        leaves in an orderly way is not lost.
        """
        with self._lock:
            self._listeners.append(listener)
            before = dict(self._lost)
        for name, reason in before.items():
            self._tell([listener], name, reason)

    # --- inside ---

    def _check_names(
        self, purpose: str, names: Iterable[str] | None, everybody: Sequence[str]
    ) -> tuple[str, ...]:
        if names is None:
            return tuple(sorted(everybody))
        chosen = tuple(sorted({names} if isinstance(names, str) else set(names)))
        strangers = [name for name in chosen if name not in everybody]
        if strangers or self._agent.info.name not in chosen:
            rule = f"must be workers of the group, {self._agent.info.name} among them"
            raise ValueError(requirement(f"{purpose}(names=...)", rule, list(chosen)))
        return chosen

    def _parts(self, names: tuple[str, ...], frame: Frame) -> dict[str, Any]:
        gathered, start = {}, 0
        for name, tree, size in zip(
            names, frame.tree, frame.meta["sizes"], strict=True
        ):
            leaves = frame.leaves[start : start + size]
            gathered[name] = self._agent.codec.decode(tree, leaves)
            start += size
        return gathered

    def _ask(
        self, kind: str, meta: dict[str, Any], timeout: float, purpose: str
    ) -> Future[Frame]:
        limit = resolve(timeout, 0.0, current.deadline())
        return self._ask_until(limit, kind, meta, (None, []), purpose)

    def _ask_until(
        self,
        limit: Deadline,
        kind: str,
        meta: dict[str, Any],
        body: tuple[Any, list[Any]],
        purpose: str,
    ) -> Future[Frame]:
        late = limit if limit.at is None else limit._replace(at=limit.at + _GRACE)
        asked = _Asked(self, purpose, late)
        self._line.submit(asked, kind, meta, *body)
        self._agent.alarm.set(late.at)
        return asked.future

    def unreachable(self, purpose: str, reason: str) -> RpcError:
        """Why the coordinator does not answer."""
        if self._left:
            return RpcError(f"RPC was shut down on this worker during {purpose}.")
        return WorkerLost(
            self._head, purpose, f"as coordinator, {self._ended or reason}"
        )

    def _pushed(self, frame: Frame) -> None:
        if frame.kind == "group.end":
            self._ended = str(frame.meta["reason"])
        elif frame.kind in ("group.lost", "group.left"):
            name, reason = str(frame.meta["name"]), str(frame.meta["reason"])
            self._part(frame.kind, name, reason)

    def _closed(self, reason: str) -> None:
        if self._left or self._head not in self._agent.directory:
            return
        ended = self._ended
        kind = "group.lost" if ended is None else "group.left"
        self._part(kind, self._head, ended or f"its control channel closed ({reason})")

    def _part(self, kind: str, name: str, reason: str) -> None:
        with self._lock:
            if name in self._lost or name in self._gone_orderly:
                return
            listeners = []
            if kind == "group.lost":
                self._lost[name] = reason
                listeners = list(self._listeners)
            else:
                self._gone_orderly.add(name)
        self._agent.part(name, reason)
        self._tell(listeners, name, reason)

    def _tell(self, listeners: list[Lost], name: str, reason: str) -> None:
        for listener in listeners:
            self._agent.crew.run(functools.partial(listener, name, reason))

    def _beat(self, held_up: bool) -> None:
        now = time.monotonic()
        silence = now - self._heard
        if held_up:
            self._heard = now
        elif silence > self._agent.options.heartbeat_timeout:
            self._line.close(silent_for(silence))
            return
        timeout = self._agent.options.heartbeat_timeout
        self._ask("group.beat", {}, timeout, "heartbeat")

    def heard(self) -> None:
        """The coordinator gave a sign of life."""
        self._heard = time.monotonic()


class _Asked:
    """A request to the coordinator that waits for its answer; see `Pending`."""

    def __init__(self, group: Group, purpose: str, deadline: Deadline) -> None:
        self.deadline = deadline
        self.future: Future[Frame] = Future()
        self._group = group
        self._purpose = purpose

    def answered(self, frame: Frame) -> Callbacks:
        self._group.heard()
        return complete(self.future, frame, None) or []

    def disconnected(self, reason: str) -> Callbacks:
        error = self._group.unreachable(self._purpose, reason)
        return complete(self.future, None, error) or []

    def expired(self) -> Callbacks:
        text = f"{self._purpose} timed out: the coordinator does not answer."
        return complete(self.future, None, RpcTimeout(text)) or []
