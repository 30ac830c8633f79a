"""Pytrees split into arrays and a hashable structure that can travel.

Arrays and Python's numbers take part in differentiation and batching. The rest of a
tree, such as a text or a function among the arguments, is part of *what* is called,
like the code itself.
"""

from collections.abc import Hashable, Iterator, Sequence
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


Place = str | tuple[type, Hashable]
"""What a tree has for a leaf: of an array "", or for a PRNG key, whose words are the
array, its implementation; of all else the type and the value."""


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
    def of(cls, packed: PyTree) -> "Structure":
        """Makes the structure that was packed."""
        containers, rows = packed
        places = [x if isinstance(x, str) else _static(*x) for x in rows]
        return cls(jax.tree.structure(containers), tuple(places))

    def pack(self) -> PyTree:
        """Returns the structure as values that can be sent."""
        # With their types alone: a value tells its own.
        rows = [x if isinstance(x, str) else x[1:] for x in self.leaves]
        return self.treedef.unflatten(range(len(rows))), rows

    def tree(self, arrays: Sequence[jax.Array]) -> PyTree:
        """Builds the tree with these arrays, in order."""
        given = iter(arrays)
        return self.treedef.unflatten([_filled(x, given) for x in self.leaves])


def _static(leaf: Hashable) -> Place:
    # With its type: members of two enumerations may be equal, and would find each
    # other's program.
    return type(leaf), leaf


def _filled(place: Place, given: Iterator[jax.Array]) -> PyTree:
    if not isinstance(place, str):
        return place[1]
    array = next(given)
    return jax.random.wrap_key_data(array, impl=place) if place else array


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
            places.append(key)
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
