"""Variables, the leaves of the graph, with their gradients and locks."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from jdist._compat import beside, is_traced, placed
from jdist._errors import check_function, quoted, type_error, value_error
from jdist._flax import other_variables
from jdist._tree import (
    PyTree,
    abbreviated,
    abbreviated_tree,
    first_difference,
    named_leaves,
    path_of,
)
from jdist.autograd.recording.node import Cotangent, Edge, Node
from jdist.autograd.recording.pure import (
    KEEPS_STATE,
    ONE,
    DifferentiatedTree,
    eager,
    refuse_in_pure,
)
from jdist.autograd.recording.recorded import Operators, Recorded
from jdist.rpc import RpcTimeout
from jdist.rpc.extension import InterruptSafeLock, current

T = TypeVar("T")

Hook = Callable[[PyTree], PyTree]
"""`hook(gradient)`: another gradient in its place, or None to leave it."""


class _FlatTree(NamedTuple):
    """The tree of a variable, flattened once for all its uses."""

    tree: PyTree
    kind: DifferentiatedTree
    leaves: list[jax.Array]

    @classmethod
    def of(cls, tree: PyTree) -> "_FlatTree":
        leaves, structure = jax.tree.flatten(tree)
        wanted = tuple([jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves])
        kind = DifferentiatedTree(structure, wanted)
        # The one object for a single array, which is then known by its identity.
        return cls(tree, ONE if kind == ONE else kind, leaves)

    def is_like(self, other: "_FlatTree") -> bool:
        """Whether structure, shapes and dtypes are the same."""
        return self.kind.structure == other.kind.structure and all(
            one.shape == two.shape and one.dtype == two.dtype
            for one, two in zip(self.leaves, other.leaves, strict=True)
        )


class LeafNode(Node):
    """A variable in the graph: its outputs are the leaves of the variable's tree.

    Cotangents end here: a pass adds them to the gradients of its context.
    """

    __slots__ = ("variable",)

    def __init__(self, variable: "Variable", leaves: int) -> None:
        super().__init__("variable", (), leaves)
        self.variable = variable


class Variable(Operators):
    """A leaf with a gradient: a mutable cell around an immutable tree of arrays.

    A function that `apply` runs receives the tree; so does a pure function on another
    worker. Operators and methods work on it as on a recorded value. Gradients are never
    kept here, but in contexts: `autograd.get_gradients(context_id)[variable]`.

    Attributes:
      value: The tree. Another one of the same structure, shapes and dtypes may be put
        in its place. A backward pass uses the one that its forward pass has used.
      step_lock: Held by the thread that steps it.
    """

    __slots__ = ("__weakref__", "_held", "_hooks", "_lock", "_node", "step_lock")

    def __init__(self, tree: PyTree) -> None:
        if not isinstance(tree, jax.Array):  # An array has no other state.
            _refuse_state(tree)
        self._held = _FlatTree.of(jax.tree.map_with_path(_array, tree))
        if not any(self._held.kind.wanted):
            rule = "must have at least one floating array"
            raise value_error("variable(tree)", rule, tree)
        self._lock = threading.Lock()
        # A weak dictionary of locks would compare variables, which compares arrays.
        self.step_lock = InterruptSafeLock()
        # Weak: the graph keeps its leaves, and a variable keeps no graph.
        self._node: weakref.ref[LeafNode] | None = None
        self._hooks: dict[object, Hook] = {}

    @property
    def value(self) -> PyTree:
        """The tree of arrays."""
        refuse_in_pure("the value of a variable that is no argument")
        return self._held.tree

    @value.setter
    def value(self, tree: PyTree) -> None:
        # Compared as a whole first: paths are worked out for a message only.
        new = _FlatTree.of(jax.tree.map_with_path(_array, tree))
        if not new.is_like(self._held):
            _check_paths(self._held.tree, new.tree)
        self._held = new

    def convert(self, tree: PyTree) -> None:
        """Sets a value of other dtypes, such as compute copies; shapes stay."""
        self._held = _FlatTree.of(tree)

    def __copy__(self, known: object = None) -> NoReturn:
        rule = "must not be given a variable: gradients would go to the original"
        remedy = "Make another one: `autograd.variable(x.value)`."
        raise type_error("copy(x)", rule, quoted(self), remedy)

    __deepcopy__ = __copy__

    @property
    def structure(self) -> jax.tree_util.PyTreeDef:
        """The structure of its tree."""
        return self._held.kind.structure

    @property
    def node(self) -> LeafNode:
        """The variable's node, the same while any history leads to it."""
        with self._lock:
            found = None if self._node is None else self._node()
            if found is None:
                found = LeafNode(self, len(self._held.leaves))
                self._node = weakref.ref(found)
            return found

    def recorded(self) -> PyTree:
        """Returns the tree with recorded values in place of the floating arrays."""
        kind, leaves, edges = self.flat()
        if kind is ONE:
            (leaf,), (edge,) = leaves, edges
            assert edge is not None
            return Recorded(leaf, edge)
        values = [
            leaf if to is None else Recorded(leaf, to)
            for leaf, to in zip(leaves, edges, strict=True)
        ]
        return kind.structure.unflatten(values)

    def register_hook(self, hook: Hook) -> Callable[[], None]:
        """Registers `hook(gradient)` for backward passes that reach the variable.

        It is called once in each pass, with the sum of the pass's gradients. Hooks are
        called in the order in which they were registered.

        Args:
          hook: Gets a tree like the value, with None for leaves that nothing reached.
            Returns another one to take its place, or None.

        Returns:
          A function that removes the hook.

        Source: `torch.Tensor.register_hook`.
        """
        check_function("register_hook(hook)", hook)
        # Under a key of its own, so that a hook registered twice is removed once.
        key = object()
        self._hooks[key] = hook
        return lambda: _discard(self._hooks, key)

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """The hooks, in the order in which they were registered."""
        return tuple(self._hooks.values())

    def gradient(self, cotangents: Sequence[Cotangent]) -> PyTree:
        """Makes the gradient of one pass: a tree of these leaves, changed by the hooks.

        Raises:
          ValueError: A hook returned another structure, shape or dtype.
          Exception: Whatever a hook raised.
        """
        gradient = self.placed(cotangents)
        if not self._hooks:
            return gradient
        for hook in self.hooks:
            changed = hook(gradient)
            if changed is not None:
                _check_hooked(gradient, changed)
                gradient = changed
        # A hook may have returned other containers with equal leaves.
        return self.placed(self.structure.flatten_up_to(gradient))

    def placed(self, cotangents: Sequence[Cotangent]) -> PyTree:
        """Builds the tree of these cotangents, each placed as its leaf is."""
        # Placed as the variable is: what an optimizer makes of both is then placed so
        # too, and the next step finds all programs compiled.
        held = self._held
        if held.kind is ONE:
            (cotangent,) = cotangents
            return None if cotangent is None else beside(cotangent, held.leaves[0])
        placed = [
            None if x is None else beside(x, leaf)
            for x, leaf in zip(cotangents, held.leaves, strict=True)
        ]
        return held.kind.structure.unflatten(placed)

    def flat(
        self,
    ) -> tuple[DifferentiatedTree, Sequence[jax.Array], Sequence[Edge | None]]:
        """See `Recordable`."""
        held = self._held
        kind, leaves = held.kind, held.leaves
        node = self.node
        if len(leaves) == 1:
            return kind, leaves, (Edge(node, 0),)
        edges = [
            Edge(node, index) if wanted else None
            for index, wanted in enumerate(kind.wanted)
        ]
        return kind, leaves, edges

    def __repr__(self) -> str:
        shown = abbreviated_tree(self._held.tree)
        return f"Variable({shown})"


@eager
def variable(tree: PyTree) -> Variable:
    """Makes a variable, a leaf with a gradient.

    Args:
      tree: Pytree of arrays, at least one of them floating; NumPy arrays and Python's
        numbers become JAX's. Leaves that are not floating are passed on, and have no
        gradient.

    Raises:
      TypeError: A leaf is no array, or is recorded or traced; a Flax NNX module in it
        holds more than `nnx.Param`, such as statistics or streams of random numbers:
        these would never change.
      ValueError: No leaf is floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import autograd
      >>> w = autograd.variable({"scale": 2.0, "shift": jnp.zeros(3)})
      >>> w
      Variable({'scale': float32[], 'shift': float32[3]})
      >>> autograd.apply(lambda w, x: w["scale"] * x + w["shift"], w, jnp.arange(3.0))
      Recorded(float32[3] of <lambda>)
    """
    return Variable(tree)


def holding(
    locks: Sequence[InterruptSafeLock], busy: str, action: Callable[[], T]
) -> T:
    """Calls `action` while this thread holds all these locks, and releases them.

    Args:
      locks: In the order in which to acquire them: the same wherever several are.
      busy: Ends the error's text if another thread holds one until the deadline.
      action: The function to call.

    Raises:
      RpcTimeout: The deadline of the call came first.
      RuntimeError: This very thread holds one: it was interrupted meanwhile.
    """
    # The caller's deadline: a lock without one could hold up a worker for ever.
    limit = current.deadline()

    def act() -> T:
        for lock in locks:
            try:
                lock.acquire(limit.at, busy)
            except TimeoutError as error:
                raise RpcTimeout(f"{current.exceeded(limit)} {busy}.") from error
        return action()

    return InterruptSafeLock.releasing_all(locks, act)


def _refuse_state(tree: PyTree) -> None:
    """Refuses a tree with Flax state other than parameters."""
    found = other_variables(tree)
    if found:
        rule = "must hold no state but nnx.Param: it would never change"
        got = ", ".join(sorted(f"{kind} at {path}" for path, kind in found.items()))
        raise type_error("variable(tree)", rule, got, KEEPS_STATE)


def _array(keys: KeyPath, leaf: PyTree) -> jax.Array:
    if isinstance(leaf, jax.Array) and not is_traced(leaf):
        return leaf
    if isinstance(leaf, np.ndarray | np.generic | int | float | complex):
        array = np.asarray(leaf)
        if array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number):
            return _copied(array)
    rule = "must be made of arrays"
    raise type_error("variable(tree)", rule, f"{leaf!r} at {path_of(keys)}")


def _copied(array: np.ndarray) -> jax.Array:
    """Converts a NumPy array of any byte order to JAX."""
    # In a third of the time of `jnp.array`. JAX's memory has the machine's byte order.
    dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
    return placed(np.array(array, dtype, order="C"), None)


def _check_paths(before: PyTree, after: PyTree) -> None:
    """Checks that leaves are like those before; containers may differ."""
    kinds = [
        {path: abbreviated(leaf) for path, leaf in named_leaves(tree).items()}
        for tree in (before, after)
    ]
    if found := first_difference(*kinds):
        path, old, new = found
        raise value_error("Variable.value", f"must be {old} at {path}, as before", new)


def _check_hooked(gradient: PyTree, changed: PyTree) -> None:
    kinds = [
        jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree)
        for tree in (gradient, changed)
    ]
    if kinds[0] != kinds[1]:
        rule = "must return a gradient of the same structure, shapes and dtypes, "
        rule += f"{kinds[0]}"
        raise value_error("register_hook(hook)", rule, f"{kinds[1]}")


def _discard(hooks: dict[object, Hook], key: object) -> None:
    hooks.pop(key, None)
