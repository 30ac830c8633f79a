"""Who belongs to the group, by name and by rank, and who has gone."""

import threading
import time
from collections.abc import Iterable
from typing import Any

from jdist._errors import requirement
from jdist.rpc.errors import RpcError
from jdist.rpc.peer import Peer
from jdist.rpc.worker_info import WorkerInfo


class Directory:
    """The other workers that one worker knows, itself included.

    Args:
      info: The worker itself, for messages.
    """

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self._lock = threading.Lock()
        self._complete = threading.Event()
        self._peers: dict[str, Peer] = {}
        self._ranks: dict[int, Peer] = {}

    def add(self, peers: Iterable[Peer]) -> None:
        """The group is complete with these; calls from them are served from now on."""
        with self._lock:
            for peer in peers:
                self._peers[peer.info.name] = peer
                self._ranks[peer.info.id] = peer
        self._complete.set()

    def peers(self) -> list[Peer]:
        """All that ever belonged, in the order of their ranks."""
        with self._lock:
            return [self._ranks[rank] for rank in sorted(self._ranks)]

    def find(self, to: Any) -> Peer:
        """The worker that a user means by a name, a rank or a WorkerInfo.

        Raises:
          RpcError: There is none of that name or rank.
          ValueError: `to` is none of the three.
        """
        if type(to) is str:
            peer = self._peers.get(to)
        elif type(to) is WorkerInfo:
            peer = self._peers.get(to.name)
            if peer is not None and peer.info != to:
                peer = None
        elif isinstance(to, int) and not isinstance(to, bool):
            peer = self._ranks.get(to)
        elif isinstance(to, str):
            peer = self._peers.get(str(to))
        else:
            rule = "must be a name, a rank or a WorkerInfo"
            rule += " (Cannot get WorkerInfo from name)"
            raise ValueError(requirement("rpc(to=...)", rule, to))
        if peer is None:
            known = ", ".join(
                f"{one.info.name} ({one.info.id})" for one in self.peers()
            )
            raise RpcError(
                f"name:{self._info.name},rank:{self._info.id} could not find "
                f"destination {to!r}. The group has {known}."
            )
        return peer

    def caller(self, name: str, until: float | None) -> WorkerInfo | None:
        """The worker of this proved name; waits until the group is complete.

        A peer may be told of the complete group a little earlier than this worker.
        None when the name does not belong to the group.
        """
        if name not in self._peers:
            self._complete.wait(None if until is None else until - time.monotonic())
        peer = self._peers.get(name)
        return None if peer is None else peer.info

    def departed(self, name: str) -> str | None:
        """Why that worker is gone, if it is."""
        peer = self._peers.get(name)
        return None if peer is None else peer.departed

    def __contains__(self, name: str) -> bool:
        return name in self._peers
