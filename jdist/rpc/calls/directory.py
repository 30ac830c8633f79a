"""The workers that one worker knows, by name, rank, incarnation and transport name."""

import threading
import time
from collections.abc import Iterable
from typing import Any

from jdist._errors import requirement
from jdist.rpc.base.errors import RpcError
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.peer import Peer

__all__ = ["Directory"]

_COMING_SECONDS = 20.0
"""How long a newcomer may take from the moment when this worker knows of it."""


class Directory:
    """The workers that one worker knows, itself included.

    A worker that is *known* may call. Only one that is *admitted* can be called: all
    others know it then, so that it may be spoken of with any of them. A lookup of one
    that is known and not yet admitted here waits.

    Args:
      info: The worker itself, for messages.
    """

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._coming: list[Peer] = []
        self._complete = threading.Event()
        self._by_name: dict[str, Peer] = {}
        self._by_rank: dict[int, Peer] = {}
        self._by_incarnation: dict[int | None, Peer] = {}
        self._by_transport: dict[str, Peer] = {}

    def complete(self, peers: Iterable[Peer]) -> None:
        """Enter the first members; this worker belongs to the group from now on."""
        for peer in peers:
            self.know(peer)
            self.admit(peer)
        self._complete.set()

    def know(self, peer: Peer) -> None:
        """Enter a worker that is about to join: its calls are served from now on."""
        with self._lock:
            self._by_incarnation[peer.info.incarnation] = peer
            self._by_transport[peer.transport_name] = peer
            self._coming.append(peer)

    def admit(self, peer: Peer) -> None:
        """Let a known worker be called, in place of an earlier one of its name."""
        with self._lock:
            self._by_name[peer.info.name] = peer
            self._by_rank[peer.info.id] = peer
            self._arrive(peer)

    def expel(self, peer: Peer) -> None:
        """Serve a worker no more that is gone and whose name will be given again."""
        with self._lock:
            self._by_transport.pop(peer.transport_name, None)
            self._arrive(peer)

    def peers(self) -> list[Peer]:
        """The admitted workers, by rank; of each rank the last one."""
        with self._lock:
            return [self._by_rank[rank] for rank in sorted(self._by_rank)]

    def find(self, to: Any) -> Peer:
        """The worker that a user means by a name, a rank or a WorkerInfo.

        A WorkerInfo that came from the group means that very worker, also when another
        one has its name and rank meanwhile.

        Raises:
          RpcError: There is none of that name or rank.
          ValueError: `to` is none of the three.
        """
        peer = self._look_up(to)
        if self._coming and (peer is None or peer.departed is not None):
            self._await(to)
            peer = self._look_up(to)
        if peer is None:
            known = ", ".join(
                f"{one.info.name} ({one.info.id})" for one in self.peers()
            )
            raise RpcError(
                f"name:{self._info.name},rank:{self._info.id} could not find "
                f"destination {to!r}. The group has {known}."
            )
        return peer

    def of_incarnation(self, incarnation: int) -> Peer | None:
        """That worker; None if it was gone before this one came."""
        return self._by_incarnation.get(incarnation)

    def is_admitted(self, peer: Peer) -> bool:
        """Whether it is the last one of its name that was admitted."""
        return self._by_name.get(peer.info.name) is peer

    def caller(self, transport_name: str, until: float | None) -> WorkerInfo | None:
        """The worker that proved this name; waits until this one belongs to the group.

        Other workers may learn a little earlier that this one belongs to it. None for a
        worker that does not belong to the group, or no longer: one that was frozen and
        taken for lost may not know it yet.
        """
        if transport_name not in self._by_transport:
            self._complete.wait(None if until is None else until - time.monotonic())
        peer = self._by_transport.get(transport_name)
        return None if peer is None or peer.departed is not None else peer.info

    def departed(self, name: str) -> str | None:
        """Why that worker is gone, if it is."""
        peer = self._by_name.get(name)
        return None if peer is None else peer.departed

    def _look_up(self, to: Any) -> Peer | None:
        if type(to) is str:
            return self._by_name.get(to)
        if type(to) is WorkerInfo:
            of_name = self._by_name.get(to.name)
            incarnation = to.incarnation
            peer = of_name if incarnation is None else self.of_incarnation(incarnation)
            return peer if peer is not None and peer.info == to else None
        if isinstance(to, int) and not isinstance(to, bool):
            return self._by_rank.get(to)
        if isinstance(to, str):
            return self._by_name.get(str(to))
        rule = "must be a name, a rank or a WorkerInfo"
        rule += " (Cannot get WorkerInfo from name)"
        raise ValueError(requirement("rpc(to=...)", rule, to))

    def _await(self, to: Any) -> None:
        """Waits while a worker that may be meant is about to be admitted."""
        name = to.name if type(to) is WorkerInfo else to

        def came() -> bool:
            return not any(name in (one.info.name, one.info.id) for one in self._coming)

        with self._lock:
            self._changed.wait_for(came, _COMING_SECONDS)

    def _arrive(self, peer: Peer) -> None:
        if peer in self._coming:
            self._coming.remove(peer)
            self._changed.notify_all()

    def __contains__(self, name: str) -> bool:
        return name in self._by_name
