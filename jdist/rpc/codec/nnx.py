"""Support for Flax NNX modules, without importing Flax.

Flax is no dependency of rpc. A process that has a module has imported it already, so
its classes are looked up in `sys.modules`.
"""

import sys
from collections.abc import Callable
from typing import Any

from jdist._errors import requirement
from jdist._nnx import is_module
from jdist._tree import type_name
from jdist.rpc.codec.functions import own_name

__all__ = ["StandIn", "method", "refusal", "variables"]


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
    nnx = sys.modules.get("flax.nnx")
    names = ("GraphDef", "Pytree", "State", "Variable")
    kinds = tuple([getattr(nnx, name) for name in names if hasattr(nnx, name)])
    if not isinstance(value, kinds):
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
    # Of the class, not of the object, which could have an attribute of this name.
    found = getattr(type(value), name, None)
    if found is None or not (own_name(found) or "").startswith("flax.nnx."):
        return None
    return found.__get__(value)


def variables(module: Any) -> dict[str, Any]:
    """Return a module's `nnx.Param`s by path, `"layers.0.kernel"`, shared ones once.

    The order is that of the paths, and does not change from run to run.
    """
    nnx = sys.modules["flax.nnx"]
    return {
        ".".join(map(str, path)): found
        for path, found in nnx.iter_graph(module)
        if isinstance(found, nnx.Param)
    }
