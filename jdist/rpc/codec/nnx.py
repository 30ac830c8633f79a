"""Flax NNX modules in messages: what is refused, and what stands in their place."""

from collections.abc import Callable
from typing import Any

from jdist._errors import requirement
from jdist._flax import is_module, loaded
from jdist._tree import type_name
from jdist.rpc.codec.functions import own_name

_METHODS = frozenset(("__call__", "eval", "train"))


class StandIn:
    """An object in the place of a module, which it calls in a way of its own.

    Others may call the same methods of it as of the module.
    """

    def original(self) -> Any:
        """Returns the module, or one of the same class."""
        raise NotImplementedError

    def method(self, name: str) -> Callable[..., Any]:
        """Returns a function in place of the module's method of this name."""
        raise NotImplementedError


def refusal(value: Any) -> str:
    """Return the refusal of a Flax value, with a remedy; "" for any other value."""
    nnx = loaded()
    if nnx is None:
        return ""
    if not isinstance(value, (nnx.GraphDef, nnx.Pytree, nnx.State, nnx.Variable)):
        return ""
    if is_module(value):
        rule = "must not be a Flax NNX module, which belongs to one worker"
        remedy = (
            "Make it there, `rpc.RemoteModule(to, factory, args)`; or send its "
            "arrays, `nnx.to_pure_dict(nnx.state(module))`."
        )
    else:
        rule = "must not be a part of a Flax NNX module"
        remedy = (
            "The arrays of a state travel as `nnx.to_pure_dict(state)`; there "
            "`nnx.replace_by_pure_dict` puts them into a state."
        )
    return requirement("rpc(value)", rule, type_name(value), remedy)


def method(value: Any, name: str) -> Callable[..., Any] | None:
    """Return a module's method if Flax itself defines it and it is harmless, else None.

    These are the calls of Flax's layers, and `train` and `eval`.
    """
    if name not in _METHODS or not is_module(value):
        return None
    # Read from the class: the object could have an attribute of this name.
    found = getattr(type(value), name, None)
    if found is None or not (own_name(found) or "").startswith("flax.nnx."):
        return None
    return found.__get__(value)
