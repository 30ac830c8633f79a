"""Python's own scalars, texts, bytes, ranges, slices and containers."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.codec import codes
from jdist.rpc.codec.tree import (
    Decoder,
    Decoding,
    Encoder,
    Encoding,
    parts,
    parts_at_least,
)

__all__ = ["DECODERS", "ENCODERS", "decode_bytes", "encode_bytes", "hashing"]


_LONG = 4096
"""Bytes and texts of this length or more travel as leaves: in the body, not copied."""

_INT64 = 1 << 63


def _as_it_is(encoding: Encoding, value: Any) -> Any:
    return value


def _integer(encoding: Encoding, value: int) -> Any:
    if -_INT64 <= value < _INT64:
        return value
    # One more bit for the sign.
    size = value.bit_length() // 8 + 1
    data = value.to_bytes(size, "little", signed=True)
    return [codes.BIG_INT, encode_bytes(encoding, data)]


def encode_bytes(encoding: Encoding, value: bytes) -> Any:
    """Short bytes as they are, long ones as a leaf."""
    return value if len(value) < _LONG else _raw(encoding, codes.BYTES, value)


def _text(encoding: Encoding, value: str) -> Any:
    # Short texts are copied into the header: a leaf of their own costs more.
    if len(value) < _LONG:
        if value.isascii():
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            # Half a surrogate pair, as in odd file names: msgpack does not take it.
            return _raw(encoding, codes.TEXT, value.encode("utf-8", "surrogatepass"))
        return value
    return _raw(encoding, codes.TEXT, value.encode("utf-8", "surrogatepass"))


def _raw(encoding: Encoding, code: int, data: bytes) -> Any:
    _, index = encoding.leaf(np.frombuffer(data, np.uint8))
    return [code, index]


def _three(code: int, encoding: Encoding, value: Any) -> Any:
    return [code, *encoding.trees((value.start, value.stop, value.step))]


def _items(encoding: Encoding, mapping: Mapping[Any, Any]) -> Iterable[Any]:
    encoding.check_keys(mapping)
    return chain.from_iterable(mapping.items())


def _elements(encoding: Encoding, elements: Collection[Any]) -> Iterable[Any]:
    encoding.check_keys(elements)
    return elements


ENCODERS: dict[type, Encoder] = {
    type(None): _as_it_is,
    bool: _as_it_is,
    float: _as_it_is,
    int: _integer,
    str: _text,
    bytes: encode_bytes,
    bytearray: lambda e, v: [codes.BYTE_ARRAY, encode_bytes(e, bytes(v))],
    complex: lambda e, v: [codes.COMPLEX, v.real, v.imag],
    range: partial(_three, codes.RANGE),
    slice: partial(_three, codes.SLICE),
    type(...): lambda e, v: [codes.ELLIPSIS],
    tuple: lambda e, v: [codes.TUPLE, *e.trees(v)],
    list: lambda e, v: [codes.LIST, *e.trees(v)],
    set: lambda e, v: [codes.SET, *e.trees(_elements(e, v))],
    frozenset: lambda e, v: [codes.FROZENSET, *e.trees(_elements(e, v))],
    dict: lambda e, v: [codes.DICT, *e.trees(_items(e, v))],
    MappingProxyType: lambda e, v: [codes.DICT, *e.trees(_items(e, v))],
    OrderedDict: lambda e, v: [codes.ORDERED_DICT, *e.trees(_items(e, v))],
    defaultdict: lambda e, v: [
        codes.DEFAULT_DICT,
        *e.trees(chain((v.default_factory,), _items(e, v))),
    ],
}


def decode_bytes(decoding: Decoding, node: list[Any]) -> bytes:
    """The bytes in a node that holds nothing else."""
    (tree,) = parts(node, object)
    data = decoding.value(tree)
    if type(data) is not bytes:
        raise ProtocolError(f"A node of kind {node[0]} must hold bytes.")
    return data


def _leaf_bytes(decoding: Decoding, node: list[Any]) -> bytes:
    leaf = decoding.leaf(*parts(node, int))
    if type(leaf) is not np.ndarray or leaf.dtype != np.uint8:
        raise ProtocolError("Bytes must travel as bytes.")
    return leaf.tobytes()


def _leaf_text(decoding: Decoding, node: list[Any]) -> str:
    try:
        return _leaf_bytes(decoding, node).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"A text is not UTF-8: {error}") from error


def _made(make: Callable[..., Any], decoding: Decoding, node: list[Any]) -> Any:
    start, stop, step = map(decoding.value, parts(node, object, object, object))
    try:
        return make(start, stop, step)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"No {make.__name__}: {error}") from error


def hashing(make: Callable[[Any], Any], items: Iterable[Any]) -> Any:
    """A set or dictionary of what a peer says are its elements or keys."""
    # Decoded first: an error in there must not pass for one of hashing.
    items = list(items)
    try:
        return make(items)
    except TypeError as error:
        raise ProtocolError(f"A key or element cannot be hashed: {error}") from error


def _default_dict(decoding: Decoding, node: list[Any]) -> Any:
    factory = decoding.value(parts_at_least(node, 1)[0])
    if factory is not None and not callable(factory):
        raise ProtocolError("A defaultdict's factory cannot be called.")
    return hashing(partial(defaultdict, factory), decoding.pairs(node, 2))


DECODERS: dict[int, Decoder] = {
    codes.BIG_INT: lambda d, n: int.from_bytes(
        decode_bytes(d, n), "little", signed=True
    ),
    codes.BYTES: _leaf_bytes,
    codes.TEXT: _leaf_text,
    codes.BYTE_ARRAY: lambda d, n: bytearray(decode_bytes(d, n)),
    codes.COMPLEX: lambda d, n: complex(*parts(n, float, float)),
    codes.RANGE: partial(_made, range),
    codes.SLICE: partial(_made, slice),
    codes.ELLIPSIS: lambda d, n: ...,
    codes.TUPLE: lambda d, n: tuple(d.values(n)),
    codes.LIST: lambda d, n: list(d.values(n)),
    codes.SET: lambda d, n: hashing(set, d.values(n)),
    codes.FROZENSET: lambda d, n: hashing(frozenset, d.values(n)),
    codes.DICT: lambda d, n: hashing(dict, d.pairs(n)) if len(n) > 1 else {},
    codes.ORDERED_DICT: lambda d, n: hashing(OrderedDict, d.pairs(n)),
    codes.DEFAULT_DICT: _default_dict,
}
