"""Pytrees split into arrays and a hashable structure that can travel.

Arrays and Python's numbers take part in differentiation and batching. The rest of a
tree, such as a text or a function among the arguments, is part of *what* is called,
like the code itself.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jdist._errors import requirement
from jdist._tree import PyTree, abbreviated, is_key, named_leaves, type_name
from jdist.autograd.recording.pure import Recordable
from jdist.rpc import RRef

_NUMBERS = (bool, int, float, complex)


class AbstractArray(NamedTuple):
    """The shape and dtype of an array that may not be computed yet.

    Attributes:
      shape: Shape of the array.
      dtype: Dtype of the array.
      weak: Whether its type is weak, so that it yields to others in promotion.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    weak: bool = False

    def __str__(self) -> str:
        return abbreviated(self)

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """The equivalent `jax.ShapeDtypeStruct`."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak)


def abstract_of(array: ArrayLike) -> AbstractArray:
    """Return the shape and dtype of an array, traced or not."""
    known = jax.typeof(array)
    return AbstractArray(known.shape, np.dtype(known.dtype), known.weak_type)


@dataclass(frozen=True, slots=True)
class ArraySlot:
    """The place of an array in a tree.

    Attributes:
      index: Index of the array.
      key: For a PRNG key, whose words are the array, its implementation.
    """

    index: int
    key: str = ""


@dataclass(frozen=True, slots=True)
class VariableSlot:
    """The place of a variable that the callee holds, in a tree of arguments.

    Attributes:
      index: Index of the variable.
    """

    index: int


@dataclass(frozen=True, slots=True)
class StaticLeaf:
    """A leaf that is not an array; compared by type and value."""

    kind: type
    value: Hashable


@dataclass(frozen=True, slots=True)
class Structure:
    """A tree without its arrays.

    Attributes:
      treedef: The containers.
      leaves: For each leaf the place of its array or variable, or its value.
    """

    treedef: jax.tree_util.PyTreeDef
    leaves: tuple[ArraySlot | VariableSlot | StaticLeaf, ...]

    @classmethod
    def of(cls, skeleton: PyTree) -> "Structure":
        """Makes the structure of a skeleton; the inverse of `skeleton`."""
        leaves, treedef = jax.tree.flatten(skeleton)
        places = (
            x if isinstance(x, ArraySlot | VariableSlot) else StaticLeaf(type(x), x)
            for x in leaves
        )
        return cls(treedef, tuple(places))

    @property
    def skeleton(self) -> PyTree:
        """The tree with slots in place of arrays, as a value that can be sent."""
        return self.treedef.unflatten(
            [x.value if isinstance(x, StaticLeaf) else x for x in self.leaves]
        )

    def tree(self, arrays: Sequence[jax.Array], held: Sequence[PyTree] = ()) -> PyTree:
        """Builds the tree with these arrays, and trees of variables, in their slots."""
        return self.treedef.unflatten([_filled(x, arrays, held) for x in self.leaves])


def _filled(
    place: ArraySlot | VariableSlot | StaticLeaf,
    arrays: Sequence[jax.Array],
    held: Sequence[PyTree],
) -> PyTree:
    if isinstance(place, StaticLeaf):
        return place.value
    if isinstance(place, VariableSlot):
        return held[place.index]
    array = arrays[place.index]
    return jax.random.wrap_key_data(array, impl=place.key) if place.key else array


class FlatArguments(NamedTuple):
    """A tree of arguments, split into arrays, references and structure.

    Attributes:
      arrays: The arrays; for a PRNG key, its words.
      references: The references to variables.
      structure: The tree without arrays and references.
    """

    arrays: list[jax.Array]
    references: tuple[RRef, ...]
    structure: Structure


def taken_apart(tree: PyTree, call: str) -> FlatArguments:
    """Split a tree into its arrays, its references and its structure.

    Raises:
      TypeError: A leaf is neither an array nor hashable, or it is recorded.
    """
    leaves, treedef = jax.tree.flatten(tree)
    arrays: list[jax.Array] = []
    references: list[RRef] = []
    places: list[ArraySlot | VariableSlot | StaticLeaf] = []
    for leaf in leaves:
        if _is_array(leaf):
            array, key = _words(leaf)
            places.append(ArraySlot(len(arrays), key))
            arrays.append(array)
        elif isinstance(leaf, RRef):
            places.append(VariableSlot(len(references)))
            references.append(leaf)
        else:
            # With its type: members of two enumerations may be equal, and would find
            # each other's program.
            places.append(StaticLeaf(type(leaf), _hashable(leaf, call)))
    return FlatArguments(arrays, tuple(references), Structure(treedef, tuple(places)))


def arrays_of(tree: PyTree, call: str) -> tuple[list[jax.Array], Structure]:
    """Split a result, all of whose leaves must be arrays, into arrays and structure.

    Raises:
      TypeError: One is not.
    """
    for path, leaf in named_leaves(tree).items():
        if leaf is not None and not _is_array(leaf):
            rule = "must return arrays, in any pytree"
            got = f"{type_name(leaf)} at {path}"
            raise TypeError(requirement(call, rule, got))
    arrays, _, structure = taken_apart(tree, call)
    return arrays, structure


def _is_array(leaf: PyTree) -> bool:
    # Exact types: an enumeration may be derived from int, and is no number.
    return type(leaf) in _NUMBERS or isinstance(
        leaf, jax.Array | np.ndarray | np.generic
    )


def _words(leaf: PyTree) -> tuple[jax.Array, str]:
    if not isinstance(leaf, jax.Array):
        return jnp.asarray(leaf), ""
    if not is_key(leaf):
        return leaf, ""
    # A key has no buffer that could travel; its words are an ordinary array.
    return jax.random.key_data(leaf), str(jax.random.key_impl(leaf))


def _hashable(leaf: PyTree, call: str) -> Hashable:
    # Refused: the primitive's derivatives are JAX's, which know nothing of the recorded
    # history, and the gradient would be lost silently.
    if isinstance(leaf, Recordable):
        rule = "must not be recorded: its derivatives are those of JAX"
        remedy = (
            "Pass the value of a variable, or a reference to a variable of the callee; "
            "for a recorded value call the function by rpc.rpc_sync."
        )
        raise TypeError(requirement(call, rule, leaf, remedy))
    try:
        hash(leaf)
    except TypeError as error:
        rule = "must be arrays, numbers, and values that can be hashed, in any pytree"
        got = type_name(leaf)
        raise TypeError(requirement(call, rule, got)) from error
    return leaf
