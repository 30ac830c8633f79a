"""Recorded values: arrays with their history, their operators and methods."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jdist._compat import is_traced, refuse_as_argument
from jdist._errors import requirement
from jdist._tree import PyTree, abbreviated, is_inexact
from jdist.autograd.graph import pure
from jdist.autograd.graph.errors import AutogradError
from jdist.autograd.graph.node import Edge
from jdist.autograd.graph.pure import ONE, Recordable
from jdist.autograd.graph.purity import refuse_in_pure

Operand = Any
"""A recorded value, an array or a number, as JAX's operators and methods take them."""

Computed = Any
"""A recorded value, or a plain array where the result has no derivative."""

Index = Any
"""What stands between the brackets of an array."""

_COMPARABLE = (
    Recordable, jax.Array, np.ndarray, np.generic, int, float, complex,
    list, tuple, dict,
)  # fmt: skip
_METADATA = (np.shape, np.ndim, np.size)
_INSTEAD = {
    "backward": "Use `autograd.backward(context_id, [x])`.",
    "detach": "Use `autograd.detach(x)`.",
    "grad": "Use `autograd.get_gradients(context_id)[variable]`.",
    "item": "Use `x.value.item()`, which has no history.",
    "numpy": "Use `numpy.asarray(x.value)`, which has no history.",
    "tolist": "Use `x.value.tolist()`, which has no history.",
}
"""Remedies for attributes that users of torch and JAX look for."""


def record(
    fn: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    numbers: tuple[type, ...] = pure.NUMBERS,
) -> Computed:
    """Runs `fn(*args, **kwargs)`, compiled and recorded if an argument is recorded.

    Python's numbers of the types `numbers` are inputs of the compiled function, not
    parts of it.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    if not pure.have_history(leaves):
        return fn(*args, **kwargs)
    called = pure.call(fn, leaves, structure, numbers)
    outputs: list[Computed] = list(called.outputs)
    if called.node is not None:
        node = called.node
        outputs = [
            Recorded(array, Edge(node, index)) if is_live else array
            for index, (array, is_live) in enumerate(
                zip(outputs, called.live, strict=True)
            )
        ]
    return called.structure.unflatten(outputs)


def detach(tree: PyTree) -> PyTree:
    """The arrays of recorded values and variables, without their history.

    Args:
      tree: Any pytree. Recorded values in it become their arrays, and variables their
        trees of arrays; what has no history stays what it is. In a function that is
        being traced, arrays pass through `jax.lax.stop_gradient`.

    Returns:
      A tree through which no gradient flows.

    Source: `torch.Tensor.detach`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import autograd
      >>> w = autograd.variable(jnp.array([1.0, 2.0]))
      >>> autograd.detach({"n": 1, "y": w * 3})
      {'n': 1, 'y': Array([3., 6.], dtype=float32)}
    """
    return jax.tree.map(_detached, tree)


def _method(fn: Callable[..., PyTree]) -> Callable[..., Any]:
    def method(self: "Operators", *args: Operand, **kwargs: Operand) -> Computed:
        self._check_one_array(method.__name__)
        return record(fn, (self, *args), kwargs)

    method.__name__ = fn.__name__
    method.__doc__ = f"As `jnp.{fn.__name__}`."
    return method


class Operators(Recordable):
    """Operators and methods of JAX's arrays; each makes a recorded value.

    A result without a derivative (of comparisons, `argmax`, `round`, a cast to
    integers) is a plain array. For anything else there is `autograd.apply`; what would
    drop the history is refused.
    """

    __slots__ = ()

    # An operator of a NumPy array leaves it to the one here.
    __array_ufunc__ = None

    def __pos__(self) -> Computed:
        return record(operator.pos, (self,), {})

    def __neg__(self) -> Computed:
        return record(operator.neg, (self,), {})

    def __abs__(self) -> Computed:
        return record(operator.abs, (self,), {})

    def __add__(self, other: Operand) -> Computed:
        return _binary(operator.add, self, other)

    def __radd__(self, other: Operand) -> Computed:
        return _binary(operator.add, other, self)

    def __sub__(self, other: Operand) -> Computed:
        return _binary(operator.sub, self, other)

    def __rsub__(self, other: Operand) -> Computed:
        return _binary(operator.sub, other, self)

    def __mul__(self, other: Operand) -> Computed:
        return _binary(operator.mul, self, other)

    def __rmul__(self, other: Operand) -> Computed:
        return _binary(operator.mul, other, self)

    def __truediv__(self, other: Operand) -> Computed:
        return _binary(operator.truediv, self, other)

    def __rtruediv__(self, other: Operand) -> Computed:
        return _binary(operator.truediv, other, self)

    def __floordiv__(self, other: Operand) -> Computed:
        return _binary(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Operand) -> Computed:
        return _binary(operator.floordiv, other, self)

    def __mod__(self, other: Operand) -> Computed:
        return _binary(operator.mod, self, other)

    def __rmod__(self, other: Operand) -> Computed:
        return _binary(operator.mod, other, self)

    def __divmod__(self, other: Operand) -> Computed:
        return _binary(divmod, self, other)

    def __rdivmod__(self, other: Operand) -> Computed:
        return _binary(divmod, other, self)

    def __matmul__(self, other: Operand) -> Computed:
        return _binary(operator.matmul, self, other)

    def __rmatmul__(self, other: Operand) -> Computed:
        return _binary(operator.matmul, other, self)

    def __pow__(self, other: Operand) -> Computed:
        return record(operator.pow, (self, other), {})

    def __rpow__(self, other: Operand) -> Computed:
        return _binary(operator.pow, other, self)

    # Comparisons have no derivative: what they return is a plain array of booleans.

    def __eq__(self, other: object) -> Computed:
        return _compared(jnp.equal, self, other)

    def __ne__(self, other: object) -> Computed:
        return _compared(jnp.not_equal, self, other)

    def __lt__(self, other: Operand) -> Computed:
        return _compared(jnp.less, self, other)

    def __le__(self, other: Operand) -> Computed:
        return _compared(jnp.less_equal, self, other)

    def __gt__(self, other: Operand) -> Computed:
        return _compared(jnp.greater, self, other)

    def __ge__(self, other: Operand) -> Computed:
        return _compared(jnp.greater_equal, self, other)

    # By identity, so that recorded values and variables can be keys.
    __hash__ = object.__hash__

    def __getitem__(self, index: Index) -> Computed:
        return record(_item, (self, index), {})

    def __iter__(self) -> NoReturn:
        self._refuse("iter")

    def __round__(self, ndigits: int | None = None) -> Computed:
        return record(jnp.round, (self, 0 if ndigits is None else ndigits), {})

    all = _method(jnp.all)
    any = _method(jnp.any)
    argmax = _method(jnp.argmax)
    argmin = _method(jnp.argmin)
    argsort = _method(jnp.argsort)
    astype = _method(jnp.astype)
    clip = _method(jnp.clip)
    conj = _method(jnp.conj)
    conjugate = _method(jnp.conj)
    copy = _method(jnp.copy)
    cumprod = _method(jnp.cumprod)
    cumsum = _method(jnp.cumsum)
    diagonal = _method(jnp.diagonal)
    dot = _method(jnp.dot)
    flatten = _method(jnp.ravel)
    max = _method(jnp.max)
    mean = _method(jnp.mean)
    min = _method(jnp.min)
    prod = _method(jnp.prod)
    ptp = _method(jnp.ptp)
    ravel = _method(jnp.ravel)
    repeat = _method(jnp.repeat)
    round = _method(jnp.round)
    searchsorted = _method(jnp.searchsorted)
    sort = _method(jnp.sort)
    squeeze = _method(jnp.squeeze)
    std = _method(jnp.std)
    sum = _method(jnp.sum)
    swapaxes = _method(jnp.swapaxes)
    take = _method(jnp.take)
    trace = _method(jnp.trace)
    var = _method(jnp.var)

    def reshape(self, *shape: int | tuple[int, ...]) -> Computed:
        """As `jnp.reshape`; the shape as one tuple, or as several numbers."""
        self._check_one_array("reshape")
        new = shape[0] if len(shape) == 1 else shape
        return record(jnp.reshape, (self, new), {})

    def transpose(self, *axes: int | tuple[int, ...]) -> Computed:
        """As `jnp.transpose`; the axes as one tuple, or as several numbers."""
        self._check_one_array("transpose")
        new = axes[0] if len(axes) == 1 and isinstance(axes[0], tuple) else axes
        return record(jnp.transpose, (self, new or None), {})

    @property
    def T(self) -> Computed:
        """As `jnp.transpose`."""
        return self.transpose()

    @property
    def mT(self) -> Computed:
        """As `jnp.matrix_transpose`."""
        self._check_one_array("mT")
        return record(jnp.matrix_transpose, (self,), {})

    @property
    def real(self) -> Computed:
        """As `jnp.real`."""
        self._check_one_array("real")
        return record(jnp.real, (self,), {})

    @property
    def imag(self) -> Computed:
        """As `jnp.imag`."""
        self._check_one_array("imag")
        return record(jnp.imag, (self,), {})

    # --- what is no part of the history ---

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(self._array().shape)

    @property
    def dtype(self) -> Computed:
        """The array's dtype."""
        return self._array().dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions of the array."""
        return len(self._array().shape)

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return int(self._array().size)

    def __len__(self) -> int:
        self._check_one_array("len")
        return len(self._array())

    def __format__(self, spec: str) -> str:
        if not spec:
            return repr(self)
        self._check_one_array("format")
        return format(self._array(), spec)

    def _array(self) -> Computed:
        kind, (array, *_), _ = self.flat()
        if kind.structure != ONE.structure:
            raise AttributeError("A tree has no shape; `__getattr__` says so.")
        return array

    def _check_one_array(self, name: str) -> None:
        if self.flat()[0].structure != ONE.structure:
            rule = "must be of one array"
            remedy = f"Name the leaf: `autograd.apply(lambda x: x[...].{name}, x)`."
            raise TypeError(requirement(f"x.{name}", rule, repr(self), remedy))

    # --- what would drop the history, and says so ---

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse("numpy.asarray")

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Computed:
        name = getattr(function, "__name__", "function")
        if function in _METADATA and len(args) == 1:
            return getattr(self, name)
        # Some, such as array_equal, would take an error of `__array__` for an answer.
        self._refuse(f"numpy.{name}")

    def __contains__(self, value: object) -> NoReturn:
        self._refuse("contains")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse("pickle.dumps")

    def __bool__(self) -> NoReturn:
        self._refuse("bool")

    def __float__(self) -> NoReturn:
        self._refuse("float")

    def __int__(self) -> NoReturn:
        self._refuse("int")

    def __index__(self) -> NoReturn:
        self._refuse("index")

    def __complex__(self) -> NoReturn:
        self._refuse("complex")

    def __jax_array__(self) -> Computed:
        # To raise here would end `array + x`, which asks for this first and leaves the
        # sum to `__radd__` if it gets no array.
        return _NoArray(self)

    def __getattr__(self, name: str) -> NoReturn:
        instead = _INSTEAD.get(name, "")
        if not instead and hasattr(jax.Array, name):
            instead = (
                "What JAX's arrays have is recorded by `autograd.apply(lambda x: "
                f"x.{name}..., x)`; the array itself, without its history, is "
                "`x.value`."
            )
        kind = type(self).__name__
        message = f"{kind!r} object has no attribute {name!r}. {instead}"
        raise AttributeError(message.rstrip())

    def _refuse(self, name: str) -> NoReturn:
        raise TypeError(_loss_of_history(name, self))


def _loss_of_history(name: str, value: Operators) -> str:
    return requirement(
        f"{name}(x)",
        "must not be given a recorded value, whose history would be lost",
        repr(value),
        "Record what is to be differentiated: `autograd.apply(fn, x)`, such as "
        "`autograd.apply(jnp.sin, x)`. The array itself, without its history, is "
        "`x.value`.",
    )


def _refuse_as_argument(value: Operators) -> NoReturn:
    # Of a TypeError JAX would drop the message.
    raise AutogradError(_loss_of_history("jnp.f", value))


class _NoArray:
    """The stand-in that JAX gets for a recorded value's array; every use is refused."""

    __slots__ = ("_of",)

    def __init__(self, of: Operators) -> None:
        self._of = of

    def __getattribute__(self, name: str) -> Computed:
        if name == "__class__":  # For `isinstance`.
            return _NoArray
        _refuse_as_argument(object.__getattribute__(self, "_of"))

    def __format__(self, spec: str) -> NoReturn:
        _refuse_as_argument(object.__getattribute__(self, "_of"))

    __repr__ = __str__ = lambda self: format(self)


refuse_as_argument(Operators, _refuse_as_argument)


class Recorded(Operators):
    """An array with its history, which a backward pass follows.

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

    def __init__(self, value: jax.Array, edge: Edge) -> None:
        self._value = value
        self._edge = edge

    @property
    def value(self) -> Computed:
        """The array, without its history."""
        refuse_in_pure("the array of a recorded value that is no argument")
        return self._value

    @property
    def edge(self) -> Edge:
        """The node that made it, and as which of its outputs."""
        return self._edge

    def __copy__(self) -> "Recorded":
        return self

    def __deepcopy__(self, known: dict[int, object]) -> "Recorded":
        # It cannot be changed, and a copy of its history would lead to no variable.
        return self

    def flat(self) -> Computed:
        """See `Recordable`."""
        return ONE, (self._value,), (self._edge,)

    def __repr__(self) -> str:
        return f"Recorded({abbreviated(self._value)} of {self._edge.node.name})"


def _detached(leaf: PyTree) -> PyTree:
    if isinstance(leaf, Operators):
        return leaf.value
    return jax.lax.stop_gradient(leaf) if is_traced(leaf) and is_inexact(leaf) else leaf


def _item(array: jax.Array, index: Index) -> Computed:
    return array[index]


def _compared(fn: Callable[..., PyTree], left: Operand, right: Operand) -> Computed:
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


def _binary(fn: Callable[..., PyTree], left: Operand, right: Operand) -> Computed:
    # Another integer needs no other compilation: here it is no shape and no index.
    return record(fn, (left, right), {}, numbers=(int, float, complex))
