"""Proxies that call methods of a referenced value on its owner.

Which attributes a caller reaches is part of the owner's safety: methods that the class
of the value defines in a module which may be named, the value itself if its class makes
it callable so, those methods of arrays and of Python's own containers that only compute
or change that value, and the call, `train` and `eval` of Flax's own modules. No name
with a leading underscore, no attribute of the object's own, no property.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from jdist._errors import requirement
from jdist.rpc.base import current
from jdist.rpc.base.current import Worker
from jdist.rpc.base.errors import ForbiddenFunction, ProtocolError
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.calls.function_calls import UnboundFunction
from jdist.rpc.codec import nnx
from jdist.rpc.codec.functions import FunctionTable

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


class Referrer(Protocol):
    """The part of a reference that a method needs."""

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""

    def local_value(self) -> Any:
        """The value; on its owner only."""


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Method(UnboundFunction):
    """The method `name` of the value that `rref` refers to.

    Attributes:
      rref: The reference.
      name: Name of the method, or "__call__" for the value itself.
      functions: On the owner: what may be named.
    """

    rref: Referrer
    name: str
    functions: FunctionTable | None = None

    def bound(self) -> Callable[..., Any]:
        """Returns the bound method, on the owner.

        Raises:
          AttributeError: The value has none of this name.
          ForbiddenFunction: It may not be called by others.
        """
        if self.functions is None:
            raise ProtocolError("A method of a reference is bound on its owner only.")
        return _bound(self.functions, self.rref.local_value(), self.name)

    def __repr__(self) -> str:
        return f"{self.rref}.{self.name}"


class Proxy:
    """Turns `proxy.method(*args)` into a call to the owner of a reference.

    Args:
      rref: The reference.
      worker: As which the call is made.
      call: Makes it: `rpc_sync`, `rpc_async` or `remote`.
      timeout: Timeout of each call, in seconds.
    """

    __slots__ = ("_call", "_rref", "_timeout", "_worker")

    def __init__(
        self, rref: Referrer, worker: Worker, call: Callable[..., Any], timeout: float
    ) -> None:
        self._rref = rref
        self._worker = worker
        self._call = call
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(f"a proxy calls public methods only, not {name!r}")
        return functools.partial(self._invoke, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the value itself."""
        return self._invoke(CALL_ITSELF, *args, **kwargs)

    def _invoke(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        # The reference belongs to this worker, whichever one the thread acts as.
        with current.acting_as(self._worker):
            method = Method(self._rref, name)
            return self._call(self._rref.owner(), method, args, kwargs, self._timeout)


def _bound(functions: FunctionTable, value: Any, name: str) -> Callable[..., Any]:
    kind = type(value)
    if name.startswith("_") and name != CALL_ITSELF:
        rule = "must not have a leading underscore"
        raise ForbiddenFunction(requirement("RRef proxy(name)", rule, name))
    # Static: neither properties nor `__getattr__` of the value may run.
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
