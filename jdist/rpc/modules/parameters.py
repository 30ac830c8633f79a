"""Parameters of a remote module: mutable cells, and the owner's listing of them."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist._errors import type_error, value_error
from jdist._flax import is_module, parameters
from jdist._tree import described, type_name
from jdist.rpc.calls.agent import current_agent
from jdist.rpc.rref import RRef


class Parameter:
    """A parameter of a Flax NNX module: a cell whose `value` can be replaced.

    The array is immutable, the cell is what module and optimizer share: the module
    computes with a new value from its next call on. An `RRef` to a parameter refers to
    the cell. A copy that came by `to_here` is a cell of its own.

    Two parameters are equal if they are the same variable of the same module.

    Args:
      name: Its path in the module, such as `"layers.0.kernel"`.
      variable: The `nnx.Param`, or what has `get_value` and `set_value` as that does.

    Attributes:
      name: The argument of the same name.

    Source: what `RemoteModule.remote_parameters` refers to, `torch.nn.Parameter`.
    """

    __slots__ = ("_variable", "name")

    def __init__(self, name: str, variable: Any) -> None:
        self.name = name
        self._variable = variable

    @property
    def value(self) -> Any:
        """The array at this moment. A new one must have its shape and dtype.

        It is placed as the old one was.
        """
        return self._variable.get_value()

    @value.setter
    def value(self, new: Any) -> None:
        old = self.value
        # Checked before it is set: a value of another shape would compile the module
        # again, or fail in a later call.
        if isinstance(old, jax.Array):
            _check_same_kind(self.name, old, new)
            # An uncommitted array follows the module's computations to any device. To
            # commit the new one would make JAX compile those computations again.
            placed = old.committed
            new = jax.device_put(new, old.sharding) if placed else jnp.asarray(new)
        self._variable.set_value(new)

    def get(self) -> Any:
        """The value, for calls: `rref.rpc_sync().get()`."""
        return self.value

    def set(self, new: Any) -> None:
        """Replaces the value, for calls: `rref.rpc_sync().set(array)`."""
        self.value = new

    def tree_flatten(self) -> tuple[tuple[Any, ...], str]:
        """The value and the name, which travel."""
        return (self.value,), self.name

    @classmethod
    def tree_unflatten(cls, name: str, values: Sequence[Any]) -> "Parameter":
        """A copy that belongs to no module."""
        (value,) = values
        return cls(name, _Apart(value))

    def __eq__(self, other: object) -> bool:
        # By identity of the variable: each listing makes new cells of the same
        # variables.
        return isinstance(other, Parameter) and other._variable is self._variable

    def __hash__(self) -> int:
        return id(self._variable)

    def __repr__(self) -> str:
        return f"Parameter({self.name!r})"


class _Apart:
    """The storage of a copied parameter, in the place of an `nnx.Param`."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get_value(self) -> Any:
        return self._value

    def set_value(self, value: Any) -> None:
        self._value = value


def make_module(
    factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RRef[Any]:
    """Create the module on the owner's device and return a reference to it."""
    device = current_agent().options.device
    # `default_device(None)` would switch off what the user has chosen.
    with contextlib.nullcontext() if device is None else jax.default_device(device):
        return RRef(factory(*args, **kwargs))


def listed(module: RRef[Any], recurse: bool) -> dict[str, RRef[Any]]:
    """Return the owner's references to the parameters of a module, by name.

    Raises:
      TypeError: The object has no parameters that could be listed.
      ForbiddenFunction: Its method `parameters` may not be called by others.
    """
    cells = _cells(module.local_value())
    return {
        name: RRef(cell) for name, cell in cells.items() if recurse or "." not in name
    }


def _cells(value: Any) -> Mapping[str, Any]:
    call = "RemoteModule.parameters()"
    if is_module(value):
        found = parameters(value).items()
        return {name: Parameter(name, variable) for name, variable in found}
    if not hasattr(type(value), "parameters"):
        rule = "needs a Flax NNX module, or an object with a method `parameters`"
        raise type_error(call, rule, type_name(value))
    # Through the function table: a peer names this method, so `allow` must cover it.
    cells = current_agent().codec.functions.method(value, "parameters")()
    if not isinstance(cells, Mapping) or not all(type(name) is str for name in cells):
        kind = type(value).__name__
        rule = f"needs the method `parameters` of {kind} to return cells by their names"
        raise type_error(call, rule, type_name(cells))
    return cells


def _check_same_kind(name: str, old: jax.Array, new: Any) -> None:
    is_array = hasattr(new, "shape") and hasattr(new, "dtype")
    if not is_array or described(new) != described(old):
        got = described(new) if is_array else type_name(new)
        raise value_error(f"{name}.value", f"must be {described(old)}, as before", got)
