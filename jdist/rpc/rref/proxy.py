"""Calling methods of a value where it is, as if it were here."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jdist.rpc.base import current
from jdist.rpc.rref.method import CALL_ITSELF, Method

if TYPE_CHECKING:
    from jdist.rpc.rref.reference import RRef


class Proxy:
    """Turns `proxy.method(*args)` into a call to the owner of a reference.

    Args:
      rref: The reference.
      call: Makes the call: `rpc_sync`, `rpc_async` or `remote`.
      timeout: Of each call.
    """

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(
        self, rref: "RRef[Any]", call: Callable[..., Any], timeout: float
    ) -> None:
        self._rref = rref
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
        rref = self._rref
        with current.acting_as(rref._references.agent):
            method = Method(rref, name)
            return self._call(rref.owner(), method, args, kwargs, self._timeout)
