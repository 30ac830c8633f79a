"""Recorded values: arrays with their history, their operators and methods."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jdist._compat import is_traced, placed, refuse_as_argument
from jdist._errors import check_function, quoted, requirement, type_error
from jdist._tree import PyTree, abbreviated, is_inexact
from jdist.autograd.recording import pure
from jdist.autograd.recording.errors import AutogradError
from jdist.autograd.recording.node import Edge, Numbers
from jdist.autograd.recording.pure import ONE, Recordable, refuse_in_pure

Operand = Any
"""A recorded value, an array or a number, as JAX's operators and methods take them."""

Computed = Any
"""A recorded value, or a plain array where the result has no derivative."""

Index = Any
"""An index expression, as in the brackets of an array."""

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


def apply(fn: Callable[..., Any], /, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Runs `fn(*args, **kwargs)` and records it for `backward`.

    The function receives arrays where the arguments have recorded values, and the
    whole tree where they have a variable. It is compiled once, with its backward half;
    a lambda written in a loop too. Where nothing among the arguments is recorded the
    function simply runs.

    Args:
      fn: A pure function of its arguments.
      *args: Pytrees of recorded values, variables, arrays, and Python values. Arrays
        and floating numbers are inputs; integers, booleans, strings and functions are
        part of the compiled function, so that shapes and axes can be given.
      **kwargs: As `args`.

    Returns:
      What the function returns, with recorded values in place of floating arrays that
      depend on recorded ones.

    Raises:
      TypeError: An argument can be neither an input nor a constant; the function refers
        to recorded values that are no arguments, or makes calls to other workers; or
        there are traced arrays beside recorded ones.
      Exception: Whatever the function raises.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import autograd
      >>> w = autograd.variable(jnp.array([1.0, 2.0, 4.0]))
      >>> total, half = autograd.apply(lambda w, n: (w[:n].sum(), n / 2), w, 2)
      >>> total.value.item(), half.item()
      (3.0, 1.0)
    """
    check_function("apply(fn)", fn)
    return record(fn, args, kwargs)


def record(
    fn: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    numbers: tuple[type, ...] = pure.NUMBERS,
) -> Computed:
    """Runs `fn(*args, **kwargs)`; compiles and records it if an argument is recorded.

    Python's numbers of the types `numbers` are inputs of the compiled function, not
    parts of it.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, Recordable):
            break
    else:  # nothing to record, and nothing to compile for
        return fn(*args, **kwargs)
    return pure.call(fn, leaves, structure, numbers, Recorded)


def detach(tree: PyTree) -> PyTree:
    """Returns the arrays of recorded values and variables, without their history.

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


Method = Callable[..., Any]


def _unary(fn: Callable[..., PyTree]) -> Method:
    return lambda self: record(fn, (self,), {})


def _binary(fn: Callable[..., PyTree]) -> tuple[Method, Method]:
    """Makes an operator and its reflection."""
    # Another integer needs no other compilation: here it is no shape and no index.
    numbers = (int, float, complex)
    return (
        lambda self, other: record(fn, (self, other), {}, numbers),
        lambda self, other: record(fn, (other, self), {}, numbers),
    )


def _comparison(fn: Callable[..., PyTree]) -> Method:
    def compare(self: "Operators", other: Operand) -> Computed:
        # Nothing else can be equal to an array.
        if not isinstance(other, _COMPARABLE):
            return NotImplemented
        for side in (self, other):
            tree = (
                isinstance(side, Recordable)
                and side.flat()[0].structure != ONE.structure
            )
            if tree or isinstance(side, list | tuple | dict):
                rule = "must compare one array with an array or a number"
                remedy = "Trees are compared leaf by leaf: `autograd.apply(fn, x, y)`."
                raise type_error(f"{fn.__name__}(x, y)", rule, side, remedy)
        return record(fn, (self, other), {}, numbers=(int, float, complex))

    return compare


def _refused(name: str) -> Method:
    """Makes a method that raises because it would drop the history."""

    def refuse(self: "Operators", *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(_loss_of_history(name, self))

    return refuse


def _method(fn: Callable[..., PyTree]) -> Method:
    def method(self: "Operators", *args: Operand, **kwargs: Operand) -> Computed:
        # A tree has no such method, and which leaf is meant is not guessed.
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

    # NumPy's operators then return NotImplemented, and Python calls the ones here.
    __array_ufunc__ = None

    __pos__ = _unary(operator.pos)
    __neg__ = _unary(operator.neg)
    __abs__ = _unary(operator.abs)
    __add__, __radd__ = _binary(operator.add)
    __sub__, __rsub__ = _binary(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod)
    __divmod__, __rdivmod__ = _binary(divmod)
    __matmul__, __rmatmul__ = _binary(operator.matmul)
    __rpow__ = _binary(operator.pow)[1]

    def __pow__(self, other: Operand) -> Computed:
        # An integer exponent is part of the compiled function: its derivative differs.
        return record(operator.pow, (self, other), {})

    # Comparisons have no derivative: what they return is a plain array of booleans.
    __eq__ = _comparison(jnp.equal)
    __ne__ = _comparison(jnp.not_equal)
    __lt__ = _comparison(jnp.less)
    __le__ = _comparison(jnp.less_equal)
    __gt__ = _comparison(jnp.greater)
    __ge__ = _comparison(jnp.greater_equal)

    # By identity, so that recorded values and variables can be keys.
    __hash__ = object.__hash__

    def __getitem__(self, index: Index) -> Computed:
        return record(_item, (self, index), {})

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

    real = property(_method(jnp.real))
    imag = property(_method(jnp.imag))

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
            remedy = f"Name the leaf: `autograd.apply(lambda x: x[...].{name}, x)`."
            raise type_error(f"x.{name}", "must be of one array", quoted(self), remedy)

    # --- what would drop the history, and says so ---

    __array__ = _refused("numpy.asarray")

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Computed:
        name = getattr(function, "__name__", "function")
        # NumPy asks for a shape by these, which has no history to lose.
        if function in _METADATA and len(args) == 1:
            return getattr(self, name)
        # Some, such as array_equal, would take an error of `__array__` for an answer.
        raise TypeError(_loss_of_history(f"numpy.{name}", self))

    __iter__ = _refused("iter")
    __contains__ = _refused("contains")
    __reduce_ex__ = _refused("pickle.dumps")
    __bool__ = _refused("bool")
    __float__ = _refused("float")
    __int__ = _refused("int")
    __index__ = _refused("index")
    __complex__ = _refused("complex")

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
    # JAX would drop the message of a TypeError.
    raise AutogradError(_loss_of_history("jnp.f", value))


class _NoArray:
    """The object returned to JAX in place of an array; every use of it raises."""

    __slots__ = ("_of",)

    def __init__(self, of: Operators) -> None:
        self._of = of

    def __getattribute__(self, name: str) -> Computed:
        if name == "__class__":  # for `isinstance`
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
      value: The array. A NumPy array must not be written to afterwards.
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

    def __init__(self, value: Numbers, edge: Edge) -> None:
        self._value = value
        self._edge = edge

    @property
    def value(self) -> Computed:
        """The array, without its history."""
        refuse_in_pure("the array of a recorded value that is no argument")
        if type(self._value) is np.ndarray:
            # Only here, for users' code: compiled functions take it as it came.
            self._value = placed(self._value, None)
        return self._value

    @property
    def edge(self) -> Edge:
        """The node that made it and the index of its output."""
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
