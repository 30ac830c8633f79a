"""Giving every worker its references."""

from collections.abc import Callable
from typing import Any

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.message_context import MessageContext
from jdist.rpc.calls.agent import Agent
from jdist.rpc.calls.extensions import extend
from jdist.rpc.rref import creation, fetch
from jdist.rpc.rref.messages import REFERENCE, pack_ref, unpack_ref
from jdist.rpc.rref.proxy import Method
from jdist.rpc.rref.reference import RRef, fetch_call
from jdist.rpc.rref.references import References, refuse_anywhere_else

__all__ = ["install"]


_METHOD = "rref.method"


def install(agent: Agent) -> None:
    """Lets `agent` have references, send and receive them."""
    references = References(agent)
    agent.references = references

    def give(rref: RRef[Any], message: MessageContext | None) -> Any:
        if message is None:
            raise refuse_anywhere_else("all_gather(obj)")
        return pack_ref(rref._give(references, message))

    def take(row: Any, message: MessageContext | None) -> RRef[Any]:
        if message is None:
            raise ProtocolError("A reference came in something that is no call.")
        return RRef._of(references.take(unpack_ref(row), message))

    agent.codec.register(RRef, REFERENCE, give, take)
    agent.codec.register(Method, _METHOD, _give_method, _taking_methods(agent))
    fetch.install(agent, references, lambda handle: fetch_call(RRef._of(handle)))
    creation.install(agent, references)


def _give_method(method: Method, message: MessageContext | None) -> Any:
    return (method.rref, method.name)


def _taking_methods(agent: Agent) -> Callable[[Any, MessageContext | None], Method]:
    def take(pair: Any, message: MessageContext | None) -> Method:
        if type(pair) is not tuple or len(pair) != 2 or type(pair[0]) is not RRef:
            raise ProtocolError("A method has a reference and a name.")
        rref, name = pair
        place = rref._handle.owner_value
        if type(name) is not str or place is None:
            raise ProtocolError("A method goes to the owner, by its name.")
        if message is not None and not place.done():
            message.unsettled = [*message.unsettled, place]
        return Method(rref, name, agent.codec.functions)

    return take


extend("jdist.rpc.rref", install)
