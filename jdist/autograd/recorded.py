"""Values with a history, and what can be done with them directly."""

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jdist._errors import requirement
from jdist.autograd import pure
from jdist.autograd.node import Edge
from jdist.autograd.pure import ONE, Recordable
from jdist.autograd.recording import refuse_in_pure

Axis = int | tuple[int, ...] | None
_COMPARABLE = (
    Recordable, jax.Array, np.ndarray, np.generic, int, float, complex,
    list, tuple, dict,
)  # fmt: skip
_METADATA = (np.shape, np.ndim, np.size)


def record(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    numbers: tuple[type, ...] = pure.NUMBERS,
) -> Any:
    """`fn(*args, **kwargs)`, compiled and recorded if there is a history among them.

    Without one the function simply runs. Python's numbers of the types `numbers` are
    inputs of the compiled function, not parts of it.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    if not pure.have_history(leaves):
        return fn(*args, **kwargs)
    called = pure.call(fn, leaves, structure, numbers)
    outputs = called.outputs
    if called.node is not None:
        node = called.node
        outputs = [
            Recorded(array, Edge(node, index)) if is_live else array
            for index, (array, is_live) in enumerate(
                zip(outputs, called.live, strict=True)
            )
        ]
    return called.structure.unflatten(outputs)


class Operators(Recordable):
    """Arithmetic and a few methods; each makes a recorded value.

    They work as those of JAX's arrays. For anything else there is `autograd.apply`;
    what would drop the history is refused.
    """

    __slots__ = ()

    # An operator of a NumPy array leaves it to the one here.
    __array_ufunc__ = None

    def __neg__(self) -> Any:
        return record(operator.neg, (self,), {})

    def __abs__(self) -> Any:
        return record(operator.abs, (self,), {})

    def __add__(self, other: Any) -> Any:
        return _binary(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return _binary(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return _binary(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _binary(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return _binary(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _binary(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return _binary(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _binary(operator.truediv, other, self)

    def __matmul__(self, other: Any) -> Any:
        return _binary(operator.matmul, self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _binary(operator.matmul, other, self)

    def __pow__(self, other: Any) -> Any:
        return record(operator.pow, (self, other), {})

    def __rpow__(self, other: Any) -> Any:
        return _binary(operator.pow, other, self)

    # Comparisons have no derivative: what they return is a plain array of booleans.

    def __eq__(self, other: object) -> Any:
        return _compared(jnp.equal, self, other)

    def __ne__(self, other: object) -> Any:
        return _compared(jnp.not_equal, self, other)

    def __lt__(self, other: Any) -> Any:
        return _compared(jnp.less, self, other)

    def __le__(self, other: Any) -> Any:
        return _compared(jnp.less_equal, self, other)

    def __gt__(self, other: Any) -> Any:
        return _compared(jnp.greater, self, other)

    def __ge__(self, other: Any) -> Any:
        return _compared(jnp.greater_equal, self, other)

    # By identity, so that recorded values and variables can be keys.
    __hash__ = object.__hash__

    def __getitem__(self, index: Any) -> Any:
        return record(_item, (self, index), {})

    def __iter__(self) -> NoReturn:
        self._refuse("iter")

    def sum(self, axis: Axis = None, keepdims: bool = False) -> Any:
        """As `jnp.sum`."""
        return record(jnp.sum, (self,), {"axis": axis, "keepdims": keepdims})

    def mean(self, axis: Axis = None, keepdims: bool = False) -> Any:
        """As `jnp.mean`."""
        return record(jnp.mean, (self,), {"axis": axis, "keepdims": keepdims})

    def reshape(self, *shape: Any) -> Any:
        """As `jnp.reshape`; the shape as one tuple, or as several numbers."""
        new = shape[0] if len(shape) == 1 else shape
        return record(jnp.reshape, (self, new), {})

    @property
    def T(self) -> Any:
        """As `jnp.transpose`."""
        return record(jnp.transpose, (self,), {})

    # --- what would drop the history, and says so ---

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("numpy.asarray")

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Any:
        name = getattr(function, "__name__", "function")
        if function in _METADATA and len(args) == 1:
            return getattr(self, name)
        # Some, such as array_equal, would take an error of `__array__` for an answer.
        self._refuse(f"numpy.{name}")

    def __contains__(self, value: object) -> NoReturn:
        self._refuse("contains")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickle.dumps")

    def __bool__(self) -> NoReturn:
        self._refuse("bool")

    def __float__(self) -> NoReturn:
        self._refuse("float")

    def __int__(self) -> NoReturn:
        self._refuse("int")

    def __index__(self) -> NoReturn:
        self._refuse("index")

    def __getattr__(self, name: str) -> NoReturn:
        kind = type(self).__name__
        raise AttributeError(
            f"{kind!r} object has no attribute {name!r}. Methods of its array are "
            f"recorded by `autograd.apply(lambda x: x.{name}(...), value)`; the array "
            "itself, without its history, is `value.value`."
        )

    def _refuse(self, name: str) -> NoReturn:
        raise TypeError(
            requirement(
                f"{name}(x)",
                "must not be given a recorded value, whose history would be lost",
                repr(self),
                "Record what is to be differentiated: `autograd.apply(fn, x)`. The "
                "array itself, without its history, is `x.value`.",
            )
        )


class Recorded(Operators):
    """An array, and how it was computed: what a backward pass follows.

    Made by `apply`, by operators, and by calls of other workers. It cannot be changed.

    Args:
      value: The array.
      edge: The node that made it, and as which of its outputs.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import autograd
      >>> w = autograd.variable(jnp.array([1.0, 2.0]))
      >>> y = (3.0 * w).sum()
      >>> y, y.value.item()
      (Recorded(float32[] of sum), 9.0)
    """

    __slots__ = ("__weakref__", "_edge", "_value")

    def __init__(self, value: Any, edge: Edge) -> None:
        self._value = value
        self._edge = edge

    @property
    def value(self) -> Any:
        """The array, without its history."""
        refuse_in_pure("the array of a recorded value that is no argument")
        return self._value

    @property
    def edge(self) -> Edge:
        """The node that made it, and as which of its outputs."""
        return self._edge

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        return tuple(self._value.shape)

    @property
    def dtype(self) -> Any:
        """That of the array."""
        return self._value.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions of the array."""
        return len(self._value.shape)

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return int(self._value.size)

    def __len__(self) -> int:
        return len(self._value)

    def __copy__(self) -> "Recorded":
        return self

    def __deepcopy__(self, known: Any) -> "Recorded":
        # It cannot be changed, and a copy of its history would lead to no variable.
        return self

    def flat(self) -> Any:
        """See `Recordable`."""
        return ONE, (self._value,), (self._edge,)

    def __repr__(self) -> str:
        return f"Recorded({described(self._value)} of {self._edge.node.name})"


def described(array: Any) -> str:
    """dtype and shape of an array, for people."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _item(array: Any, index: Any) -> Any:
    return array[index]


def _compared(fn: Callable[..., Any], left: Any, right: Any) -> Any:
    # Nothing else can be equal to an array.
    if not isinstance(right, _COMPARABLE):
        return NotImplemented
    for side in (left, right):
        tree = (
            isinstance(side, Recordable) and side.flat()[0].structure != ONE.structure
        )
        if tree or isinstance(side, list | tuple | dict):
            rule = "must compare one array with an array or a number"
            remedy = "Trees are compared leaf by leaf: `autograd.apply(fn, x, y)`."
            raise TypeError(requirement(f"{fn.__name__}(x, y)", rule, side, remedy))
    return record(fn, (left, right), {}, numbers=(int, float, complex))


def _binary(fn: Callable[..., Any], left: Any, right: Any) -> Any:
    # Another integer needs no other compilation: here it is no shape and no index.
    return record(fn, (left, right), {}, numbers=(int, float, complex))
