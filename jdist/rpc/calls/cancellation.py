"""Tickets: how a synchronous call is taken back, for which its channel does not serve.

Nobody reads on that channel while the callee runs the call. So the request carries a
number, and another request with that number cancels it.
"""

import contextlib
import contextvars
import itertools
from typing import TYPE_CHECKING, Any

from jdist.rpc.base.errors import RpcError
from jdist.rpc.calls.callee import TAKE_BACK
from jdist.rpc.calls.peer import Peer
from jdist.rpc.calls.request import SyncCall

if TYPE_CHECKING:
    from jdist.rpc.calls.agent import Agent


class Tickets:
    """The tickets that one worker gives to its calls.

    Args:
      agent: The worker.
    """

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self._numbers = itertools.count(1)

    def give(self, waiting: SyncCall, peer: Peer) -> dict[str, Any]:
        """Lets a call be taken back; the metadata that its request needs for that."""
        ticket = next(self._numbers)
        waiting.take_back = lambda: self._take_back(peer, ticket)
        return {"ticket": ticket}

    def _take_back(self, peer: Peer, ticket: int) -> None:
        # Not under the deadline of whoever gave up, which has passed.
        context = contextvars.Context()
        with contextlib.suppress(RpcError):  # This worker was shut down meanwhile.
            context.run(self._agent.call_async, peer.info, TAKE_BACK, ticket)
