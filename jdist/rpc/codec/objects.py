"""Objects of classes that both sides can import: by the class's name and the contents.

No `__init__`, `__new__` or `__post_init__` runs on arrival: an object is put together
again from its fields, as `copy.copy` does, so that it is what was sent.
"""

import concurrent.futures
import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from jdist._errors import requirement
from jdist.rpc.base.errors import ProtocolError
from jdist.rpc.base.future import Future
from jdist.rpc.codec import codes
from jdist.rpc.codec.plain import hashing
from jdist.rpc.codec.remote_exception import describe, rebuild
from jdist.rpc.codec.tree import (
    Decoder,
    Decoding,
    Encoder,
    Encoding,
    parts,
    parts_at_least,
)

__all__ = ["DECODERS", "KINDS"]


def _name_of(encoding: Encoding, value: Any) -> str:
    return encoding.functions.reference(type(value))


def _dataclass(encoding: Encoding, value: Any) -> Any:
    name = _name_of(encoding, value)
    try:
        # It raises for a class with C state, which the fields would not carry.
        object.__new__(type(value))
    except TypeError as error:
        rule = "must not be a dataclass with contents beside its fields"
        raise TypeError(requirement("rpc(value)", rule, name, f"{error}.")) from error
    fields = [field.name for field in dataclasses.fields(value)]
    trees = encoding.trees(getattr(value, field) for field in fields)
    pairs = zip(fields, trees, strict=True)
    return [codes.DATACLASS, name, *(part for pair in pairs for part in pair)]


def _namedtuple(encoding: Encoding, value: Any) -> Any:
    return [codes.NAMEDTUPLE, _name_of(encoding, value), *encoding.trees(value)]


def _enum(encoding: Encoding, value: enum.Enum) -> Any:
    name = _name_of(encoding, value)
    # A combination of flags has no name among the members.
    if value.name in type(value).__members__:
        return [codes.ENUM, name, value.name]
    return [codes.FLAG, name, *encoding.trees((value.value,))]


def _pytree(encoding: Encoding, value: Any) -> Any:
    name = _name_of(encoding, value)
    children, static = value.tree_flatten()
    return [codes.PYTREE, name, *encoding.trees((static, *children))]


def _exception(encoding: Encoding, value: BaseException) -> Any:
    return [codes.EXCEPTION, *encoding.trees((describe(value, ""),))]


def _future(encoding: Encoding, value: Any) -> Any:
    # What torch says, because its users search for it.
    rule = 'must not be a future: "Can not pickle torch.futures.Future"'
    remedy = (
        "Send what it waits for, `future.wait()`, or return it from a function "
        "decorated with `@rpc.async_execution`."
    )
    raise TypeError(requirement("rpc(value)", rule, value, remedy))


KINDS: list[tuple[Callable[[Any], bool], Encoder]] = [
    (lambda v: isinstance(v, Future | concurrent.futures.Future), _future),
    (lambda v: isinstance(v, enum.Enum), _enum),
    (lambda v: isinstance(v, tuple) and hasattr(v, "_fields"), _namedtuple),
    (lambda v: isinstance(v, BaseException), _exception),
    (lambda v: dataclasses.is_dataclass(v) and not isinstance(v, type), _dataclass),
    (lambda v: hasattr(type(v), "tree_unflatten"), _pytree),
]


def _decoded_dataclass(decoding: Decoding, node: list[Any]) -> Any:
    kind = decoding.type_named(parts_at_least(node, 1)[0])
    if not dataclasses.is_dataclass(kind) or issubclass(kind, BaseException):
        raise ProtocolError(f"{kind.__name__} is no dataclass that can travel.")
    fields = [field.name for field in dataclasses.fields(kind)]
    values = hashing(dict, decoding.pairs(node, 2))
    if list(values) != fields:
        raise ProtocolError(f"The fields of {kind.__name__} are others here: {fields}.")
    try:
        # Neither constructor runs: it could do anything, and need other arguments.
        made = object.__new__(kind)
        for name, value in values.items():
            object.__setattr__(made, name, value)
    except (AttributeError, TypeError) as error:
        raise ProtocolError(f"A {kind.__name__} cannot be made: {error}") from error
    return made


def _decoded_namedtuple(decoding: Decoding, node: list[Any]) -> Any:
    kind = decoding.type_named(parts_at_least(node, 1)[0])
    fields = getattr(kind, "_fields", None)
    if not issubclass(kind, tuple) or type(fields) is not tuple:
        raise ProtocolError(f"{kind.__name__} is no named tuple.")
    if len(fields) != len(node) - 2:
        raise ProtocolError(f"The fields of {kind.__name__} are others here: {fields}.")
    # Past the class's own `__new__`, for the same reason.
    return tuple.__new__(kind, decoding.values(node, 2))


def _member(decoding: Decoding, node: list[Any]) -> enum.Enum:
    type_name, name = parts(node, str, str)
    kind = decoding.type_named(type_name)
    if not issubclass(kind, enum.Enum) or name not in kind.__members__:
        raise ProtocolError(f"{kind.__name__} has no member {name[:40]!r} here.")
    return kind.__members__[name]


def _flag(decoding: Decoding, node: list[Any]) -> enum.Flag:
    name, tree = parts(node, str, object)
    kind, number = decoding.type_named(name), decoding.value(tree)
    try:
        if issubclass(kind, enum.Flag) and type(number) is int:
            return kind(number)
    except ValueError as error:
        raise ProtocolError(f"No {kind.__name__}: {error}") from error
    raise ProtocolError(f"{kind.__name__} has no such combination of members.")


def _decoded_pytree(decoding: Decoding, node: list[Any]) -> Any:
    kind = decoding.type_named(parts_at_least(node, 2)[0])
    if not hasattr(kind, "tree_unflatten"):
        raise ProtocolError(f"{kind.__name__} is no pytree.")
    static, *children = decoding.values(node, 2)
    try:
        return kind.tree_unflatten(static, tuple(children))
    except Exception as error:
        raise ProtocolError(f"A {kind.__name__} cannot be made: {error}") from error


def _decoded_exception(decoding: Decoding, node: list[Any]) -> Exception:
    (tree,) = parts(node, object)
    return rebuild(decoding.value(tree), decoding.functions)


DECODERS: dict[int, Decoder] = {
    codes.DATACLASS: _decoded_dataclass,
    codes.NAMEDTUPLE: _decoded_namedtuple,
    codes.ENUM: _member,
    codes.FLAG: _flag,
    codes.PYTREE: _decoded_pytree,
    codes.EXCEPTION: _decoded_exception,
}
