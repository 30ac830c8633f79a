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

from jdist._errors import type_error
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


Place = ArraySlot | tuple[type, Hashable]
"""What a tree has for a leaf: the slot of an array; else the leaf's type and value."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A tree without its arrays.

    Attributes:
      treedef: The containers.
      leaves: For each leaf its place.
    """

    treedef: jax.tree_util.PyTreeDef
    leaves: tuple[Place, ...]

    @classmethod
    def of(cls, skeleton: PyTree) -> "Structure":
        """Makes the structure of a skeleton; the inverse of `skeleton`."""
        leaves, treedef = jax.tree.flatten(skeleton)
        places = [x if isinstance(x, ArraySlot) else _static(x) for x in leaves]
        return cls(treedef, tuple(places))

    @property
    def skeleton(self) -> PyTree:
        """The tree with slots in place of arrays, as a value that can be sent."""
        return self.treedef.unflatten(
            [x if isinstance(x, ArraySlot) else x[1] for x in self.leaves]
        )

    def tree(self, arrays: Sequence[jax.Array]) -> PyTree:
        """Builds the tree with these arrays in their slots."""
        return self.treedef.unflatten([_filled(x, arrays) for x in self.leaves])


def _static(leaf: Hashable) -> Place:
    # With its type: members of two enumerations may be equal, and would find each
    # other's program.
    return type(leaf), leaf


def _filled(place: Place, arrays: Sequence[jax.Array]) -> PyTree:
    if not isinstance(place, ArraySlot):
        return place[1]
    array = arrays[place.index]
    return jax.random.wrap_key_data(array, impl=place.key) if place.key else array


def taken_apart(tree: PyTree, call: str) -> tuple[list[jax.Array], Structure]:
    """Split a tree into its arrays, for a PRNG key its words, and its structure.

    Raises:
      TypeError: A leaf is neither an array nor hashable, or it is recorded or a
        reference.
    """
    leaves, treedef = jax.tree.flatten(tree)
    arrays: list[jax.Array] = []
    places: list[Place] = []
    for leaf in leaves:
        if _is_array(leaf):
            array, key = _words(leaf)
            places.append(ArraySlot(len(arrays), key))
            arrays.append(array)
        else:
            places.append(_static(_hashable(leaf, call)))
    return arrays, Structure(treedef, tuple(places))


def arrays_of(tree: PyTree, call: str) -> tuple[list[jax.Array], Structure]:
    """Split a result, all of whose leaves must be arrays, into arrays and structure.

    Raises:
      TypeError: One is not.
    """
    for path, leaf in named_leaves(tree).items():
        if leaf is not None and not _is_array(leaf):
            rule = "must return arrays, in any pytree"
            raise type_error(call, rule, f"{type_name(leaf)} at {path}")
    return taken_apart(tree, call)


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
    # The primitive's derivatives are JAX's, which know nothing of a recorded history:
    # its gradient would be lost silently. JAX's caches would keep a reference alive.
    if isinstance(leaf, Recordable | RRef):
        rule = "must be neither recorded nor a reference: its derivatives are JAX's"
        remedy = "Pass the value itself, or call the function by rpc.rpc_sync."
        raise type_error(call, rule, leaf, remedy)
    try:
        hash(leaf)
    except TypeError as error:
        rule = "must be arrays, numbers, and values that can be hashed, in any pytree"
        raise type_error(call, rule, type_name(leaf)) from error
    return leaf
