"""Activity of workers: calls that they execute and calls that they wait for."""

import contextvars
from typing import Any

from jdist.rpc.base.current import Meta
from jdist.rpc.base.errors import RpcError
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.agent import Agent
from jdist.rpc.calls.outstanding_calls import describe
from jdist.rpc.calls.peers import Peer

_KIND = "debug.activity"
_PATIENCE = 0.2
_MOST = 5


def install(agent: Agent) -> None:
    """Registers the activity handler, and the hint for messages of timeouts."""

    def answer(caller: WorkerInfo, body: Any, meta: Meta) -> str:
        return "; ".join(activity(agent)[:_MOST])

    agent.register(_KIND, answer)
    agent.hint = lambda peer: _hint(agent, peer)


def activity(agent: Agent) -> list[str]:
    """Lists the calls that a worker executes and waits for, one line each."""
    outstanding = agent.outstanding
    ways = ("executes", outstanding.served()), ("waits for", outstanding.sent())
    return [
        f"{way} {describe(entry)}"
        for way, entries in ways
        for entry in entries
        if entry.operation.verb != _KIND
    ]


def information(agent: Agent) -> dict[str, Any]:
    """Collects the counts of `rpc.debug_info`."""
    outstanding, pool = agent.outstanding, agent.pool
    served = outstanding.served()
    return {
        "agent.thread_pool_size": pool.places,
        "agent.num_free_places": pool.free,
        "agent.client_active_calls": len(outstanding.sent()),
        "agent.server_active_calls": len(served),
        "agent.server_active_async_calls": sum(entry.deferred for entry in served),
        "agent.activity": activity(agent),
        "group.workers": [worker.name for worker in agent.group.workers()],
        "group.lost": agent.group.lost(),
        **agent.references.counts(),
        **agent.extension_state.counts(),
    }


def _hint(agent: Agent, peer: Peer) -> str:
    """Asks `peer` for its activity, for the message of a timeout."""
    # One question at a time: when many calls time out together, the peer would be asked
    # as often.
    if agent.closed or peer.departed or peer.asking:
        return ""
    try:
        peer.asking = True
        # Not under the deadline that has just passed.
        context = contextvars.Context()
        told = context.run(agent.call, peer.info, _KIND, None, timeout=_PATIENCE)
    except (RpcError, ValueError):
        return f" Asked what it is doing, {peer.info.name!r} did not answer."
    finally:
        peer.asking = False
    return f" It {told}." if told else f" By then {peer.info.name!r} was idle."
