"""Tuples, lists, sets and dictionaries."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.codec import codes
from jdist.rpc.codec.decoding import Decoder, Decoding, parts_at_least
from jdist.rpc.codec.encoding import Encoder, Encoding

__all__ = ["DECODERS", "ENCODERS", "hashing"]


def _items(encoding: Encoding, mapping: Mapping[Any, Any]) -> Iterable[Any]:
    encoding.check_keys(mapping)
    return chain.from_iterable(mapping.items())


def _elements(encoding: Encoding, elements: Collection[Any]) -> Iterable[Any]:
    encoding.check_keys(elements)
    return elements


ENCODERS: dict[type, Encoder] = {
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
    codes.TUPLE: lambda d, n: tuple(d.values(n)),
    codes.LIST: lambda d, n: list(d.values(n)),
    codes.SET: lambda d, n: hashing(set, d.values(n)),
    codes.FROZENSET: lambda d, n: hashing(frozenset, d.values(n)),
    codes.DICT: lambda d, n: hashing(dict, d.pairs(n)) if len(n) > 1 else {},
    codes.ORDERED_DICT: lambda d, n: hashing(OrderedDict, d.pairs(n)),
    codes.DEFAULT_DICT: _default_dict,
}
