"""Pickle as a fallback, with `allow_pickle=True` only.

A pickle can make its reader run any code. Without the option none is read.
"""

import pickle
from typing import Any

from jdist._errors import requirement
from jdist.rpc.base.errors import ForbiddenFunction, ProtocolError
from jdist.rpc.codec import codes
from jdist.rpc.codec.plain import decode_bytes, encode_bytes
from jdist.rpc.codec.tree import Decoding, Encoder, Encoding

__all__ = ["forbidden", "or_pickled", "unpickled"]


def or_pickled(encoder: Encoder) -> Encoder:
    """`encoder`, with a pickle for what it refuses."""

    def encode(encoding: Encoding, value: Any) -> Any:
        leaves, depth = len(encoding.leaves), encoding.depth
        try:
            return encoder(encoding, value)
        except (TypeError, ValueError, ForbiddenFunction) as refusal:
            encoding.undo(leaves, depth)
            return [codes.PICKLE, encode_bytes(encoding, _pickle(value, refusal))]

    return encode


def _pickle(value: Any, refusal: Exception) -> bytes:
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        rule = "must at least be something that pickle takes"
        shown = f"{type(value).__module__}.{type(value).__qualname__}"
        message = requirement("rpc(value)", rule, shown, f"{refusal} {error}")
        raise TypeError(message) from error


def unpickled(decoding: Decoding, node: list[Any]) -> Any:
    """The object of a pickle; for a codec with allow_pickle=True only."""
    data = decode_bytes(decoding, node)
    try:
        return pickle.loads(data)
    except Exception as error:
        raise ProtocolError(f"A pickle cannot be read: {error}") from error


def forbidden(decoding: Decoding, node: list[Any]) -> Any:
    """Refuses a pickle."""
    raise ForbiddenFunction(
        "`rpc(value)` must not be a pickle: this worker runs with allow_pickle=False, "
        "the peer does not."
    )
