"""A method of the value of a reference, to be called where that value is.

Which attributes a caller reaches is part of the owner's safety: methods that the class
of the value defines in a module which may be named, the value itself if its class makes
it callable so, those methods of arrays and of Python's own containers that only compute
or change that value, and the call, `train` and `eval` of Flax's own modules. No name
with a leading underscore, no attribute of the object's own, no property.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jdist._errors import requirement
from jdist.rpc.base.errors import ForbiddenFunction, ProtocolError
from jdist.rpc.base.interceptor import UnboundFunction
from jdist.rpc.codec import nnx
from jdist.rpc.codec.functions import FunctionTable

if TYPE_CHECKING:
    from jdist.rpc.rref.reference import RRef

CALL_ITSELF = "__call__"

_ARRAY_METHODS = frozenset((
    "all", "any", "argmax", "argmin", "argsort", "astype", "clip", "conj", "conjugate",
    "copy", "cumprod", "cumsum", "diagonal", "dot", "fill", "flatten", "item", "max",
    "mean", "min", "nonzero", "prod", "ravel", "repeat", "reshape", "round",
    "searchsorted", "sort", "squeeze", "std", "sum", "swapaxes", "take", "tobytes",
    "tolist", "trace", "transpose", "var",
))  # fmt: skip
"""NumPy's would also write files and load pickles, JAX's delete buffers."""

_CONTAINERS = frozenset((
    bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, str,
    tuple,
))  # fmt: skip

_NOT_PLAIN = frozenset(("format", "format_map"))
"""They look attributes of their arguments up by name."""


class Method(UnboundFunction):
    """The method `name` of the value that `rref` refers to.

    Args:
      rref: The reference.
      name: Of the method, or "__call__" for the value itself.
      functions: On the owner: what may be named.
    """

    __slots__ = ("functions", "name", "rref")

    def __init__(
        self, rref: "RRef[Any]", name: str, functions: FunctionTable | None = None
    ) -> None:
        self.rref = rref
        self.name = name
        self.functions = functions

    def bound(self) -> Callable[..., Any]:
        """The method itself, on the owner.

        Raises:
          AttributeError: The value has none of this name.
          ForbiddenFunction: It may not be called by others.
        """
        if self.functions is None:
            raise ProtocolError("A method of a reference is bound on its owner only.")
        return _bound(self.functions, self.rref.local_value(), self.name)

    def __repr__(self) -> str:
        return f"{self.rref}.{self.name}"


def _bound(functions: FunctionTable, value: Any, name: str) -> Callable[..., Any]:
    kind = type(value)
    if name.startswith("_") and name != CALL_ITSELF:
        rule = "must not have a leading underscore"
        raise ForbiddenFunction(requirement("RRef proxy(name)", rule, name))
    found = inspect.getattr_static(
        value if isinstance(value, type) else kind, name, None
    )
    if found is None and isinstance(value, nnx.StandIn):
        _bound(functions, value.original(), name)  # refuses what may not be called
        return value.method(name)
    if found is None:
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
    if _is_plain(value, name):
        return getattr(value, name)
    return nnx.method(value, name) or functions.method(value, name)


def _is_plain(value: Any, name: str) -> bool:
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return name in _ARRAY_METHODS
    if type(value) not in _CONTAINERS or name in _NOT_PLAIN:
        return False
    return callable(getattr(type(value), name)) and name != CALL_ITSELF
