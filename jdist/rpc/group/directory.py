"""Who belongs to the group, by name and by rank, and who has gone."""

import threading
import time
from collections.abc import Iterable
from typing import Any

from jdist._errors import requirement
from jdist.rpc.base.errors import RpcError
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.peer import Peer

_COMING_SECONDS = 20.0
"""How long a newcomer may take from the moment when this worker knows of it."""


class Directory:
    """The other workers that one worker knows, itself included.

    Whoever is *known* may call. Only who is *admitted* can be called: by then all
    others know it, so that it may be spoken of with any of them. Who hears of it from
    one of those before it has been admitted here waits until that is done.

    Args:
      info: The worker itself, for messages.
    """

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._coming: list[Peer] = []
        self._complete = threading.Event()
        self._names: dict[str, Peer] = {}
        self._ranks: dict[int, Peer] = {}
        self._numbers: dict[int | None, Peer] = {}
        self._identities: dict[str, Peer] = {}

    def complete(self, peers: Iterable[Peer]) -> None:
        """This worker belongs to the group now, and these do."""
        for peer in peers:
            self.know(peer)
            self.admit(peer)
        self._complete.set()

    def know(self, peer: Peer) -> None:
        """A worker is about to join; calls from it are served from now on."""
        with self._lock:
            self._numbers[peer.info.incarnation] = peer
            self._identities[peer.identity] = peer
            self._coming.append(peer)

    def admit(self, peer: Peer) -> None:
        """A known worker has joined. Whoever had its name or rank before is gone."""
        with self._lock:
            self._names[peer.info.name] = peer
            self._ranks[peer.info.id] = peer
            self._come(peer)

    def expel(self, peer: Peer) -> None:
        """A worker is gone, and another one will get its name: serves it no more."""
        with self._lock:
            self._identities.pop(peer.identity, None)
            self._come(peer)

    def peers(self) -> list[Peer]:
        """All that were admitted, in the order of ranks; of each rank the last one."""
        with self._lock:
            return [self._ranks[rank] for rank in sorted(self._ranks)]

    def find(self, to: Any) -> Peer:
        """The worker that a user means by a name, a rank or a WorkerInfo.

        A WorkerInfo that came from the group means that very worker, also when another
        one has its name and rank by now.

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

    def of_incarnation(self, number: int) -> Peer | None:
        """The worker of this number; None if it was gone before this one came."""
        return self._numbers.get(number)

    def is_admitted(self, peer: Peer) -> bool:
        """Whether it is the last one of its name that was admitted."""
        return self._names.get(peer.info.name) is peer

    def caller(self, identity: str, until: float | None) -> WorkerInfo | None:
        """The worker that proved this; waits until this one belongs to the group.

        Others may be told a little earlier that this one does. None for who does not
        belong to the group, or not any more: who was frozen and taken for lost may
        not know it yet.
        """
        if identity not in self._identities:
            self._complete.wait(None if until is None else until - time.monotonic())
        peer = self._identities.get(identity)
        return None if peer is None or peer.departed is not None else peer.info

    def departed(self, name: str) -> str | None:
        """Why that worker is gone, if it is."""
        peer = self._names.get(name)
        return None if peer is None else peer.departed

    def _look_up(self, to: Any) -> Peer | None:
        if type(to) is str:
            return self._names.get(to)
        if type(to) is WorkerInfo:
            of_name = self._names.get(to.name)
            peer = (
                of_name if to.incarnation is None else self._numbers.get(to.incarnation)
            )
            return peer if peer is not None and peer.info == to else None
        if isinstance(to, int) and not isinstance(to, bool):
            return self._ranks.get(to)
        if isinstance(to, str):
            return self._names.get(str(to))
        rule = "must be a name, a rank or a WorkerInfo"
        rule += " (Cannot get WorkerInfo from name)"
        raise ValueError(requirement("rpc(to=...)", rule, to))

    def _await(self, to: Any) -> None:
        """Waits while somebody who may be meant is about to be admitted."""
        name = to.name if type(to) is WorkerInfo else to

        def came() -> bool:
            return not any(name in (one.info.name, one.info.id) for one in self._coming)

        with self._lock:
            self._changed.wait_for(came, _COMING_SECONDS)

    def _come(self, peer: Peer) -> None:
        if peer in self._coming:
            self._coming.remove(peer)
            self._changed.notify_all()

    def __contains__(self, name: str) -> bool:
        return name in self._names
