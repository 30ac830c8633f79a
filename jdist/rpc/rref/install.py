"""Giving a worker its references."""

from typing import Any

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.calls.agent import Agent
from jdist.rpc.codec.message_context import Parcel
from jdist.rpc.codec.method import Method
from jdist.rpc.rref import creation, fetch
from jdist.rpc.rref.reference import RRef
from jdist.rpc.rref.references import References, refuse_anywhere_else
from jdist.rpc.rref.wire import REFERENCE, pack_ref, unpack_ref

_METHOD = "rref.method"


def install(agent: Agent) -> None:
    """Lets `agent` have references, send and receive them."""
    references = References(agent, RRef._make)
    agent.references = references

    def give(rref: RRef[Any], parcel: Parcel | None) -> Any:
        if parcel is None:
            raise refuse_anywhere_else("all_gather(obj)")
        return pack_ref(rref._give(references, parcel))

    def take(row: Any, parcel: Parcel | None) -> RRef[Any]:
        if parcel is None:
            raise ProtocolError("A reference came in something that is no call.")
        return references.take(unpack_ref(row), parcel)

    agent.codec.register(RRef, REFERENCE, give, take)
    agent.codec.register(Method, _METHOD, _give_method, _taking_methods(agent))
    fetch.install(agent, references)
    creation.install(agent, references)


def _give_method(method: Method, parcel: Parcel | None) -> Any:
    return (method.rref, method.name)


def _taking_methods(agent: Agent) -> Any:
    def take(pair: Any, parcel: Parcel | None) -> Method:
        if type(pair) is not tuple or len(pair) != 2 or type(pair[0]) is not RRef:
            raise ProtocolError("A method has a reference and a name.")
        rref, name = pair
        if type(name) is not str or rref._cell is None:
            raise ProtocolError("A method goes to the owner, by its name.")
        if parcel is not None and not rref._cell.done():
            parcel.unsettled = [*parcel.unsettled, rref._cell]
        return Method(rref, name, agent.codec.functions)

    return take
