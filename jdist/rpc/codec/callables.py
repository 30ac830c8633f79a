"""Functions, classes and methods: by name, never by their code."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jdist._errors import requirement
from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.codec import codes
from jdist.rpc.codec.tree import Decoder, Decoding, Encoder, Encoding, parts

__all__ = ["DECODERS", "ENCODERS", "KINDS"]


def _reference(encoding: Encoding, value: Any) -> Any:
    return [codes.REFERENCE, encoding.functions.reference(value)]


def _method(encoding: Encoding, value: types.MethodType) -> Any:
    owner, name = value.__self__, value.__name__
    if encoding.functions.method(owner, name) != value:
        rule = "must be what its name means in the class of its object"
        raise ValueError(requirement("rpc(method)", rule, value))
    return [codes.METHOD, *encoding.trees((owner, name))]


def _partial(encoding: Encoding, value: functools.partial) -> Any:
    inner = (value.func, value.args, value.keywords)
    return [codes.PARTIAL, *encoding.trees(inner)]


ENCODERS: dict[type, Encoder] = {
    types.FunctionType: _reference,
    types.BuiltinFunctionType: _reference,
    type(jnp.sin): _reference,  # What jax.jit returns.
    type(jnp.add): _reference,
    types.MethodType: _method,
    functools.partial: _partial,
}

KINDS: list[tuple[Callable[[Any], bool], Encoder]] = [(callable, _reference)]


def _decoded_method(decoding: Decoding, node: list[Any]) -> Any:
    owner, name = parts(node, object, str)
    return decoding.functions.method(decoding.value(owner), name)


def _decoded_partial(decoding: Decoding, node: list[Any]) -> Any:
    trees = parts(node, object, object, object)
    function, args, keywords = map(decoding.value, trees)
    if not callable(function) or type(args) is not tuple or type(keywords) is not dict:
        raise ProtocolError("A partial is malformed.")
    if not all(type(name) is str for name in keywords):
        raise ProtocolError("A partial's keyword is no text.")
    return functools.partial(function, *args, **keywords)


DECODERS: dict[int, Decoder] = {
    codes.REFERENCE: lambda d, n: d.functions.named(*parts(n, str)),
    codes.METHOD: _decoded_method,
    codes.PARTIAL: _decoded_partial,
}
