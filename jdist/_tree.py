"""Pytrees: paths and descriptions of leaves, splitting by dtype, sums, PRNG keys.

A *path* is the text that names a leaf to a person, such as `encoder/w` or `0/bias`.
Errors, reports and tables all use the same one.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

PyTree = Any
"""A tree of arrays; Python's types cannot say which."""


class Shaped(Protocol):
    """An array of JAX or NumPy, or an abstract value."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""

    @property
    def dtype(self) -> np.dtype:
        """The type of its elements."""


def is_none(x: object) -> bool:
    """Whether `x` is None; for `is_leaf`, where None should count as a leaf."""
    return x is None


def path_of(keys: tuple[Any, ...]) -> str:
    """The name of a leaf, from JAX's key path.

    Example:
      >>> [path_of(keys) for keys, _ in jax.tree.leaves_with_path({"a": [1, 2]})]
      ['a/0', 'a/1']
    """
    # A tree that is a single leaf has an empty path.
    return jax.tree_util.keystr(keys, simple=True, separator="/") or "(root)"


def named_leaves(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = is_none
) -> dict[str, PyTree]:
    """All leaves by path, in JAX's order; a None in the place of a leaf counts as one.

    Args:
      tree: Any pytree.
      is_leaf: As in `jax.tree.leaves`, which drops None unless this keeps it.

    Raises:
      ValueError: Two leaves have one path, as `{"a/b": 1, "a": {"b": 2}}`.

    Example:
      >>> named_leaves({"w": 1.0, "b": None})
      {'b': None, 'w': 1.0}
    """
    pairs = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    named: dict[str, PyTree] = {}
    for keys, leaf in pairs:
        path = path_of(keys)
        # The second would replace the first, which then would be looked at nowhere.
        if path in named:
            raise ValueError(
                "a pytree must have a path of its own for each leaf, its keys joined "
                f"by /. Got {path} twice."
            )
        named[path] = leaf
    return named


def described(leaf: ArrayLike | jax.ShapeDtypeStruct) -> str:
    """Dtype and shape of an array or an abstract value, as error messages give them.

    Example:
      >>> described(np.zeros((3, 5), np.float32))
      'float32 of shape (3, 5)'
    """
    # `result_type` would say float32 of NumPy's float64 where 64-bit types are off.
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return f"{dtype} of shape {tuple(np.shape(leaf))}"


def descriptions(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Dtype and shape of each leaf by path, without leaves that are None."""
    return {path: described(x) for path, x in leaves.items() if x is not None}


def first_difference(
    one: Mapping[str, str], other: Mapping[str, str]
) -> tuple[str, str, str] | None:
    """The first path at which two trees' descriptions differ, and both descriptions.

    Returns:
      None where they are the same. A leaf that one of them lacks is "no leaf".

    Example:
      >>> first_difference({"a": "x", "b": "y"}, {"a": "x", "c": "y"})
      ('b', 'y', 'no leaf')
    """
    # In the order of paths, so that an error names the same leaf in every process. The
    # structure, under the empty path, last: a missing leaf is the better message.
    for path in sorted(one.keys() | other.keys(), key=lambda path: (not path, path)):
        here, there = (each.get(path, "no leaf") for each in (one, other))
        if here != there:
            return path, here, there
    return None


def abbreviated(leaf: Shaped) -> str:
    """Dtype and shape in JAX's own short form, for `repr` and lists of arrays.

    Example:
      >>> abbreviated(np.zeros((3, 5), np.float32))
      'float32[3,5]'
    """
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


class _Unquoted(str):
    __slots__ = ()
    __repr__ = str.__str__


def abbreviated_tree(tree: PyTree) -> PyTree:
    """The dtypes and shapes of a tree's leaves, which are shown without quotes.

    Example:
      >>> import numpy as np
      >>> abbreviated_tree({"h": np.zeros((3, 5), np.float32)})
      {'h': float32[3,5]}
    """
    return jax.tree.map(lambda x: _Unquoted(abbreviated(x)), tree)


def type_name(value: object) -> str:
    """The type of a value with an article, of an array with its module, for messages.

    Example:
      >>> type_name(np.ones(2)), type_name(3), type_name(jnp.ones(2))
      ('a numpy.ndarray', 'an int', 'an array')
    """
    if value is None:
        return "None"
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):  # Private classes.
        return "an array"
    kind = type(value)
    # Classes of arrays have similar names in several frameworks.
    array = hasattr(value, "dtype") and kind.__module__ != "builtins"
    name = f"{kind.__module__}.{kind.__qualname__}" if array else kind.__qualname__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


_PARTITION = (
    "Split functions off, `arrays, rest = equinox.partition(module, "
    "equinox.is_inexact_array)`, and put them together where the module is called: "
    "`equinox.combine(arrays, rest)`."
)


def check_arrays(call: str, tree: PyTree, *, others: bool = False) -> None:
    """Checks that all leaves are arrays, numbers or shapes; None is no leaf.

    Args:
      call: Function and argument, for the error's text.
      tree: What was given.
      others: Whether what is no array may be a leaf too, such as a text.

    Raises:
      TypeError: A leaf is something else, such as an array of another framework; the
        message names it by its path.
    """
    # Without paths first, which take longer than the check.
    if all(_is_readable(leaf, others) for leaf in jax.tree.leaves(tree)):
        return
    for keys, leaf in jax.tree.leaves_with_path(tree):
        if not _is_readable(leaf, others):
            foreign = hasattr(leaf, "dtype") and not isinstance(leaf.dtype, np.dtype)
            remedy = " Convert it, as by `numpy.asarray`." if foreign else ""
            # Modules of Equinox hold their functions as leaves.
            remedy = f" {_PARTITION}" if callable(leaf) else remedy
            raise TypeError(
                f"`{call}` must be a pytree of arrays and numbers. Got "
                f"{type_name(leaf)} at {path_of(keys)}.{remedy}"
            )


def _is_readable(leaf: Any, others: bool) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if isinstance(dtype, np.dtype):  # Not texts, dates and objects of NumPy.
        return others or dtype.kind not in "SUTMmO"
    if dtype is None:
        return others or isinstance(leaf, bool | int | float | complex)
    # Keys have a dtype of JAX's own, and other frameworks' arrays one of theirs.
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def check_state(call: str, state: object, kind: type, maker: str) -> None:
    """Checks that an argument is a training state, and not parameters, for example.

    Args:
      call: Function and argument, for the error's text.
      state: What was given.
      kind: What it must be.
      maker: The object whose `init` makes one, such as `"pipe"`.

    Raises:
      TypeError: It is anything else.
    """
    if not isinstance(state, kind):
        raise TypeError(
            f"`{call}` must be a {kind.__name__}. Got {type_name(state)}. "
            f"`state = {maker}.init(params)` makes one, and each step returns the next."
        )


def is_inexact(leaf: object) -> bool:
    """Whether a leaf is a real or complex floating array, so that it has a gradient."""
    dtype = getattr(leaf, "dtype", None)
    # Python's numbers have no dtype, and NumPy's own scalars have one.
    if dtype is None:
        return isinstance(leaf, float | complex | np.inexact)
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def is_shape(leaf: object) -> TypeGuard[jax.ShapeDtypeStruct]:
    """Whether a leaf is a `jax.ShapeDtypeStruct`, an array without its values."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def shapes_of(tree: PyTree) -> PyTree:
    """The tree with a shape in the place of each array and number.

    An array that is committed to devices keeps its sharding.

    Example:
      >>> shapes_of({"w": np.zeros((3, 5), np.float32)})
      {'w': ShapeDtypeStruct(shape=(3, 5), dtype=float32)}
    """

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        kind: Any = jax.typeof(leaf)
        # JAX moves arrays that are not committed: their device says nothing.
        tied = isinstance(leaf, jax.Array) and leaf.committed
        place = leaf.sharding if tied else None
        # Programs are compiled per weak type too, which decides how numbers promote.
        return jax.ShapeDtypeStruct(
            kind.shape, kind.dtype, sharding=place, weak_type=kind.weak_type
        )

    return jax.tree.map(shape, tree)


def owned(tree: PyTree) -> PyTree:
    """The tree with copies of its NumPy arrays, whose owner may then fill them again.

    JAX may read a NumPy array that it is given after the call has returned, also where
    it copies, as `jnp.array` does. On CPU it uses memory that is aligned to 64 bytes in
    place.

    Example:
      >>> buffer = np.arange(3.0)
      >>> batch = owned({"x": buffer})
      >>> buffer[:] = 7.0
      >>> batch
      {'x': array([0., 1., 2.])}
    """
    # Most trees have none: to find that out takes a third of the time of `map`.
    if not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(
        lambda x: np.array(x, order="C") if isinstance(x, np.ndarray) else x, tree
    )


def is_key(leaf: object) -> bool:
    """Whether a leaf is an array of PRNG keys, whose dtype is JAX's own."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def words(array: jax.Array) -> jax.Array:
    """Returns the array, or the underlying integers of an array of PRNG keys."""
    return jax.random.key_data(array) if is_key(array) else array


def unworded(array: ArrayLike, like: ArrayLike) -> Any:
    """Inverse of `words`: wraps the array as PRNG keys if `like` holds PRNG keys."""
    if not is_key(like):
        return array
    # Collectives and files return NumPy arrays, which hold no keys.
    return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))


def wide_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype of sums: at least float32, since 16-bit sums lose small terms.

    Example:
      >>> import jax.numpy as jnp
      >>> [wide_dtype(jnp.dtype(d)).name for d in ("bfloat16", "float64", "complex64")]
      ['float32', 'float64', 'complex64']
    """
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else jnp.dtype(dtype)


def split_inexact(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Splits a tree into its floating leaves and the rest; each has None elsewhere.

    Together with `merge` it allows integers, booleans and PRNG keys in a tree of
    parameters: they are passed through, and their gradient is None.
    """
    inexact = jax.tree.map(lambda x: x if is_inexact(x) else None, tree)
    rest = jax.tree.map(lambda x: None if is_inexact(x) else x, tree)
    return inexact, rest


def merge(first: PyTree, second: PyTree) -> PyTree:
    """Inverse of `split_inexact`: takes at each leaf the one that is not None."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, first, second, is_leaf=is_none
    )


def map_some(fn: Callable[..., Any], tree: PyTree, *others: PyTree) -> PyTree:
    """`jax.tree.map` over a tree whose None count as leaves, and stay None.

    Example:
      >>> map_some(lambda x, y: x * y, {"w": 3.0, "b": None}, {"w": 2.0, "b": 5.0})
      {'b': None, 'w': 6.0}
    """
    return jax.tree.map(
        lambda x, *rest: None if x is None else fn(x, *rest),
        tree,
        *others,
        is_leaf=is_none,
    )


def add_trees(
    first: PyTree, second: PyTree, add: Callable[[Any, Any], Any] = operator.add
) -> PyTree:
    """Adds two trees leaf by leaf; where one has None, takes the other's leaf.

    Example:
      >>> add_trees({"w": 1.0, "b": None}, {"w": 0.5, "b": 2.0})
      {'b': 2.0, 'w': 1.5}
    """

    def one(a: PyTree, b: PyTree) -> PyTree:
        if a is None or b is None:
            return b if a is None else a
        return add(a, b)

    return jax.tree.map(one, first, second, is_leaf=is_none)


def check_batch(call: str, batch: PyTree) -> None:
    """Checks that a batch has no leaf that is no array or number, such as an iterator.

    Args:
      call: Function and argument, for the error's text.
      batch: What was given.

    Raises:
      TypeError: It has.

    Example:
      >>> check_batch("fn(batch)", (np.ones(5) for _ in range(7)))
      Traceback (most recent call last):
        ...
      TypeError: `fn(batch)` must be a pytree of arrays, one batch. Got a generator at
      (root). Take one batch of it: `next(batches)`.
    """
    for keys, leaf in jax.tree.leaves_with_path(batch, is_leaf=is_iterator):
        if not hasattr(leaf, "shape") and not _is_readable(leaf, others=False):
            remedy = "Give what is in it, converted by `numpy.asarray`."
            if is_dataclass(leaf) and not isinstance(leaf, type):
                name = type(leaf).__name__
                remedy = f"Register it: `jax.tree_util.register_dataclass({name})`."
            elif is_iterator(leaf):
                remedy = "Take one batch of it: `next(batches)`."
            elif hasattr(leaf, "__iter__") and not isinstance(leaf, str | bytes):
                remedy = "Give one of the batches in it."
            got = f"{type_name(leaf)} at {path_of(keys)}"
            raise TypeError(_no_batch(call, got, remedy))


def check_lists(call: str, batch: PyTree) -> None:
    """Checks that a batch has no lists of Python's numbers in place of arrays.

    Args:
      call: Function and argument, for the error's text.
      batch: What was given.

    Raises:
      TypeError: It has.

    Example:
      >>> check_lists("fn(batch)", {"x": [[0.5, 1.0], [2.0, 3.0]], "y": np.ones(2)})
      Traceback (most recent call last):
        ...
      TypeError: `fn(batch)` must be a pytree of arrays, one batch. Got a list of
      numbers at x. `numpy.asarray` makes an array of it.
    """
    for keys, node in jax.tree.leaves_with_path(batch, is_leaf=_is_list_of_numbers):
        if _is_list_of_numbers(node):
            got = f"a list of numbers at {path_of(keys)}"
            remedy = "`numpy.asarray` makes an array of it."
            raise TypeError(_no_batch(call, got, remedy))


def is_iterator(node: object) -> bool:
    """Whether a node is an iterator, of which JAX warns where it has to be a leaf."""
    return hasattr(node, "__next__")


def _is_list_of_numbers(node: Any) -> bool:
    """Whether a node is a list or tuple of Python's numbers, or of such lists."""
    return (
        type(node) in (list, tuple)
        and bool(node)
        and all(
            isinstance(x, bool | int | float | complex) or _is_list_of_numbers(x)
            for x in node
        )
    )


def _no_batch(call: str, got: str, remedy: str) -> str:
    return f"`{call}` must be a pytree of arrays, one batch. Got {got}. {remedy}"


def examples_in(batch: PyTree, call: str) -> int:
    """The common leading dimension of all leaves of a batch.

    Args:
      batch: Pytree of arrays, each of shape `(examples, ...)`.
      call: The public function that asks, for the error's text.

    Raises:
      TypeError: A leaf is no array, but an iterator or a list's number, for example.
      ValueError: The batch has no leaf, a scalar leaf, or leaves of unequal length.
    """
    leaves = jax.tree.leaves(batch, is_leaf=is_iterator)
    # A scalar yields (), which is not a length and is refused below.
    try:
        lengths = {leaf.shape[:1] for leaf in leaves}
    except AttributeError:  # Numbers, which `np.shape` reads, more slowly.
        check_batch(call, batch)
        lengths = {np.shape(leaf)[:1] for leaf in leaves}
    if len(lengths) == 1 and () not in lengths:
        return int(lengths.pop()[0])
    check_lists(call, batch)
    shown = ", ".join(
        f"{path}: {len(leaf) if np.ndim(leaf) else 'a scalar'}"
        for path, leaf in named_leaves(batch).items()
        if leaf is not None
    )
    raise ValueError(
        f"`{call}` needs a batch whose leaves all have the same first dimension, the "
        f"examples. Got {shown or 'no leaves at all'}."
    )
