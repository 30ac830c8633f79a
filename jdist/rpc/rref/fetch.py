"""Bringing a value here, or its type."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jdist.rpc.base.deadline import DEFAULT
from jdist.rpc.base.errors import ProtocolError, RpcError, RpcTimeout
from jdist.rpc.base.future import Future, await_done, error_of
from jdist.rpc.base.interceptor import Invocation, Operation
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.callee import Reply
from jdist.rpc.calls.request import Outgoing
from jdist.rpc.codec.functions import own_name
from jdist.rpc.rref.creation import failure_of
from jdist.rpc.rref.owner_value import OwnerValue, read
from jdist.rpc.rref.wire import unpack_id

if TYPE_CHECKING:
    from jdist.rpc.calls.agent import Agent
    from jdist.rpc.rref.reference import RRef
    from jdist.rpc.rref.references import References

FETCH = "rref.fetch"
TYPE = "rref.type"

_ARRAYS: dict[str, type] = {"jax:Array": jax.Array, "numpy:ndarray": np.ndarray}
_PLAIN: dict[str, type] = {
    f"builtins:{kind.__name__}": kind
    for kind in (type(None), bytes, bytearray, str, int, float, complex, bool)
}
"""Types that are known by name although `FunctionTable` lets nobody name them."""


def install(agent: "Agent", references: "References") -> None:
    """Lets `agent` answer who wants a value or its type."""

    table = agent.codec.functions

    def value(caller: WorkerInfo, body: Any, meta: dict[str, Any]) -> Any:
        rref = unpack_id(body)
        owner_value = references.find(rref)

        def look(call: Invocation) -> Any:
            return read(owner_value, table)

        def answer() -> Any:
            if agent.interceptor is None:
                return Reply(read(owner_value, table), {})
            handle = references.handle(rref, owner_value=owner_value)
            call = Invocation(FETCH, type(handle).to_here, (handle,), {})
            return Reply(*agent.interceptor.execute(caller, call, meta, look))

        return (
            answer() if owner_value.done() else owner_value.then(lambda done: answer())
        )

    def kind(caller: WorkerInfo, body: Any, meta: dict[str, Any]) -> Any:
        owner_value = references.find(unpack_id(body))
        return owner_value.then(lambda done: _name(read(owner_value, table)))

    agent.register(FETCH, value)
    agent.register(TYPE, kind)


def fetch(rref: "RRef[Any]", timeout: float) -> Any:
    """A copy of the value of another worker."""
    agent = rref._references.agent
    outgoing = agent.outgoing(rref.owner(), FETCH, rref._rref.packed(), timeout)
    outgoing = outgoing._replace(operation=Operation("to_here"))
    creation, until = rref._creation, rref._until
    if creation is None or creation.done():
        return _exchange(rref, agent, outgoing)
    limit = outgoing.deadline
    shorter = until.at is not None and (limit.at is None or until.at < limit.at)
    if shorter:  # What has not been created by then will not be.
        outgoing = outgoing._replace(deadline=until)
    try:
        # It may overtake the creation: the owner then answers once that has come.
        value = _exchange(rref, agent, outgoing)
        # Its own answer is on the way, on another connection.
        await_done(creation, outgoing.deadline.at)
        return value
    except RpcError as error:
        # The owner may know of the failure, and say so, a moment before it is due here.
        failed = error_of(creation) if creation.done() else None
        if failed is None and not (shorter and isinstance(error, RpcTimeout)):
            raise
        raise failure_of(failed or error, agent.codec.functions) from error


def _exchange(rref: "RRef[Any]", agent: "Agent", outgoing: Outgoing) -> Any:
    interceptor = agent.interceptor
    if interceptor is None:
        return agent.exchange(outgoing)
    info = outgoing.peer.info
    call = Invocation(FETCH, type(rref).to_here, (rref,), {})
    _, meta = interceptor.request(info, call)
    return agent.exchange(
        outgoing._replace(
            meta=meta,
            receive=lambda value, meta: interceptor.reply(info, value, meta),
        )
    )


def here(owner_value: OwnerValue, agent: "Agent", timeout: float) -> Any:
    """The value of this worker itself."""
    if not owner_value.done():
        arrival = owner_value.then(lambda done: None)
        arrival.wait(agent.default_timeout if timeout == DEFAULT else timeout)
    return read(owner_value, agent.codec.functions)


def value_type(rref: "RRef[Any]", timeout: float) -> Future[type]:
    """A future of the type of the value, wherever that is."""
    agent, owner_value = rref._references.agent, rref._owner_value
    if owner_value is not None:
        return owner_value.then(
            lambda done: type(read(owner_value, agent.codec.functions))
        )
    name = agent.call_async(rref.owner(), TYPE, rref._rref.packed(), timeout)
    return name.then(lambda done: _named(agent, done.value()))


def _name(value: Any) -> str:
    for name, kind in _ARRAYS.items():
        if isinstance(value, kind):
            return name
    return own_name(type(value)) or repr(type(value))


def _named(agent: "Agent", name: Any) -> type:
    known = _ARRAYS.get(name) or _PLAIN.get(name)
    found = known or agent.codec.functions.resolve(str(name))
    if not isinstance(found, type):
        raise ProtocolError(f"{name!r} is no type.")
    return found
