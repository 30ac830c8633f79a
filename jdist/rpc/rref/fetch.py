"""Fetching the value of a reference, or its type."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from msgspec.structs import replace

from jdist.rpc.base.current import DEFAULT, Meta, Operation
from jdist.rpc.base.errors import ProtocolError, RpcError, RpcTimeout
from jdist.rpc.base.future import Future, await_done, error_of
from jdist.rpc.base.ids import GloballyUniqueId
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.agent import Agent, Invocation
from jdist.rpc.calls.callee import Reply
from jdist.rpc.calls.function_calls import intercepted
from jdist.rpc.calls.outstanding_calls import Outgoing, Submitted
from jdist.rpc.codec.functions import own_name
from jdist.rpc.rref.creation import failure_of
from jdist.rpc.rref.messages import pack, unpack
from jdist.rpc.rref.owner_value import OwnerValue, read
from jdist.rpc.rref.references import Handle, References

FETCH = "rref.fetch"
TYPE = "rref.type"
_TO_HERE = Operation("to_here")

_ARRAYS: dict[str, type] = {"jax:Array": jax.Array, "numpy:ndarray": np.ndarray}
_PLAIN: dict[str, type] = {
    f"builtins:{kind.__name__}": kind
    for kind in (type(None), bytes, bytearray, str, int, float, complex, bool)
}
"""Types that are known by name although no `FunctionTable` has them."""


def install(
    agent: Agent, references: References, call_of: Callable[[Handle], Invocation]
) -> None:
    """Registers the handlers that answer fetches on the owner.

    Args:
      agent: The owner.
      references: Its references.
      call_of: The call that interceptors see for a fetch of this reference.
    """
    table = agent.codec.functions

    def value(caller: WorkerInfo, body: Any, meta: Meta) -> Any:
        rref = unpack(GloballyUniqueId, body)
        found = references.find(rref)

        def answer() -> Any:
            if agent.interceptor is None:
                return Reply(read(found, table), {})
            call = call_of(Handle(references, rref, owner_value=found))
            return Reply(
                *agent.interceptor.execute(
                    caller, call, meta, lambda call: read(found, table)
                )
            )

        # A value that has not been created yet occupies no thread.
        return answer() if found.done() else found.then(lambda done: answer())

    def kind(caller: WorkerInfo, body: Any, meta: Meta) -> Any:
        found = references.find(unpack(GloballyUniqueId, body))
        return found.then(lambda done: _name(read(found, table)))

    agent.register(FETCH, value)
    agent.register(TYPE, kind)


def fetch(
    handle: Handle, call: Invocation, timeout: float, asked: Submitted | None
) -> Any:
    """Fetches a copy of another worker's value.

    Args:
      handle: Handle of the reference.
      call: The call that interceptors see.
      timeout: Seconds; -1 for the default, 0 for no limit.
      asked: The request to create the value, if that was sent.
    """
    agent, creation, until = handle.agent, handle.creation, handle.until
    outgoing = agent.outgoing(
        handle.owner(), FETCH, pack(handle.rref), timeout, None, _TO_HERE
    )
    # An interceptor sees the call, and what is asked stays the value of this reference.
    outgoing = replace(intercepted(agent, outgoing, call), body=outgoing.body)
    if creation is None or creation.done():
        return agent.exchange(outgoing)
    limit = outgoing.deadline
    shorter = until.at is not None and (limit.at is None or until.at < limit.at)
    if shorter:  # a value that has not been created by then will not be
        limit = until
    outgoing = replace(outgoing, deadline=limit, after=asked)
    try:
        return _fetch_created(agent, outgoing, creation)
    except RpcError as error:
        # The owner may know of the failure, and say so, a moment before it is due here.
        failed = error_of(creation) if creation.done() else None
        if failed is None and not (shorter and isinstance(error, RpcTimeout)):
            raise
        raise failure_of(failed or error, agent.codec.functions) from error


def _fetch_created(agent: Agent, outgoing: Outgoing, creation: Future[None]) -> Any:
    """Fetches a value whose creation has not been answered yet."""
    # On the connection of the creation, behind it: the owner's thread that creates the
    # value then answers both, and no other thread is woken for the fetch. It may still
    # overtake the creation; the owner then answers once that has come.
    call = agent.submit(outgoing)
    try:
        await_done(call.future, None)  # the call's own deadline completes it
        # A fetch that failed, or was given up, has no use for the creation's answer.
        if error_of(call.future) is None:
            await_done(creation, outgoing.deadline.at)
    except BaseException:
        call.give_up("the call was interrupted")
        raise
    return call.future.value()


def local(owner_value: OwnerValue, agent: Agent, timeout: float) -> Any:
    """Returns a value that this worker owns, once it has been created."""
    if not owner_value.done():
        arrival = owner_value.then(lambda done: None)
        # A derived future: the value's own error is not raised here, but as a copy by
        # `read`.
        arrival.wait(agent.default_timeout if timeout == DEFAULT else timeout)
    return read(owner_value, agent.codec.functions)


def value_type(handle: Handle, timeout: float) -> Future[type]:
    """Returns a future of the value's type, asking the owner if it is another."""
    agent, here = handle.agent, handle.owner_value
    if here is not None:
        return here.then(lambda done: type(read(here, agent.codec.functions)))
    asked = agent.call_async(handle.owner(), TYPE, pack(handle.rref), timeout)
    return asked.then(lambda done: _named(agent, done.value()))


def _name(value: Any) -> str:
    for name, kind in _ARRAYS.items():
        if isinstance(value, kind):
            return name
    return own_name(type(value)) or repr(type(value))


def _named(agent: Agent, name: Any) -> type:
    known = _ARRAYS.get(name) or _PLAIN.get(name)
    found = known or agent.codec.functions.resolve(str(name))
    if not isinstance(found, type):
        raise ProtocolError(f"{name!r} is no type.")
    return found
