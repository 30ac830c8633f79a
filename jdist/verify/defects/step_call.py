"""One call of a user's step, from which defects make wrong results.

A defect combines results of the right step. It calls the step only with batches of the
shape that it was given, so that a step compiled for one shape or a mesh will do:
a part of the batch is the whole batch with the other examples' weights at zero or,
where the step has no weights, with the other rows replaced by a row of the part, whose
share is then taken off.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np
from jax.typing import ArrayLike

from jdist._errors import JdistError, check_at_least, check_choice
from jdist._tree import (
    PyTree,
    examples_in,
    is_inexact,
    is_key,
    is_none,
    named_leaves,
    path_of,
)
from jdist.verify.bound import in_double

Step = Callable[..., Any]
"""`(params, batch, *rest) -> (loss, gradient)`, or, of kind "training",
`(params, opt_state, batch, *rest) -> (params, opt_state)`."""

Kind = Literal["gradient", "training"]


class NotApplicable(JdistError):
    """The step lacks what the defect needs, such as weights or a second leaf."""


class NoEffect(JdistError):
    """The defect changes nothing here: in this call the wrong result is the right one.

    Attributes:
      final: Whether the call should have shown it. A stale value shows itself in later
        calls only.
    """

    def __init__(self, reason: str, final: bool = True) -> None:
        super().__init__(reason)
        self.final = final


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a step that defects cannot see.

    Attributes:
      kind: "gradient": `step(params, batch, *rest) -> (loss, gradient)`. "training":
        `step(params, opt_state, batch, *rest) -> (params, opt_state)`.
      reduction: How the step combines the examples' losses: "mean" (weighted where
        there are weights) or "sum".
      weights: Path of the batch's leaf of weights or masks, `(examples, ...)`, such as
        "mask". None: each example counts the same.
      keys: Path of the batch's leaf of random keys where they are plain integers; typed
        keys are found without.
      tied: Path of the parameter that the model uses more than once.
      micro_batches: Number of parts into which the batch is cut; the last part is
        shorter if the number does not divide that of the examples.

    Raises:
      ValueError: An unknown kind or reduction, or fewer than 2 micro-batches.
    """

    kind: Kind = "gradient"
    reduction: Literal["mean", "sum"] = "mean"
    weights: str | None = None
    keys: str | None = None
    tied: str | None = None
    micro_batches: int = 4

    def __post_init__(self) -> None:
        check_choice("Traits(kind=...)", self.kind, ("gradient", "training"))
        check_choice("Traits(reduction=...)", self.reduction, ("mean", "sum"))
        check_at_least("Traits(micro_batches=...)", self.micro_batches, 2)


# Without slots, because `cached_property` needs an instance dictionary.
@dataclass(frozen=True)
class StepCall:
    """One call of the right step.

    Attributes:
      step: The right step.
      arguments: Arguments of the call.
      previous: Arguments of the previous call; None in the first one.
      traits: Known properties of the step.
      name: The defect's name, the seed of its random choices.
    """

    step: Step
    arguments: tuple[Any, ...]
    previous: tuple[Any, ...] | None
    traits: Traits
    name: str

    @cached_property
    def right(self) -> PyTree:
        """The result of the right step."""
        return self.step(*self.arguments)

    @cached_property
    def choices(self) -> np.random.Generator:
        """Random numbers for choices of leaves, parts and examples.

        They depend on the defect alone.
        """
        # By name, so that a selection of defects plants what all of them would.
        return np.random.default_rng([0, *self.name.encode()])

    # --- the batch ---

    @property
    def batch_at(self) -> int:
        """The batch's position among the arguments."""
        return 1 if self.traits.kind == "gradient" else 2

    @property
    def batch(self) -> PyTree:
        """The batch."""
        return self.arguments[self.batch_at]

    def on(self, batch: PyTree) -> PyTree:
        """The step's result on another batch."""
        at = self.batch_at
        return self.step(*self.arguments[:at], batch, *self.arguments[at + 1 :])

    @cached_property
    def examples(self) -> int:
        """The number of examples in the batch.

        Raises:
          NotApplicable: The batch's leaves do not share their first dimension.
        """
        try:
            return examples_in(self.batch, "Defect.plant")
        except ValueError as error:
            raise NotApplicable(str(error)) from error

    @cached_property
    def weights(self) -> np.ndarray:
        """Each example's weight, `(examples,)`, in float64."""
        if self.traits.weights is None:
            return np.ones(self.examples)
        leaf = leaf_of(self.batch, self.traits.weights, "Traits(weights=...)")
        given = np.asarray(leaf).astype(np.float64)
        # A mask of tokens counts by its sum.
        return given.reshape(self.examples, -1).sum(axis=1)

    def reweighted(self, change: Callable[[Any], Any]) -> PyTree:
        """The batch with other weights.

        Raises:
          NotApplicable: The step has no weights.
        """
        path = self.traits.weights
        if path is None:
            raise NotApplicable("no weights are known: name them, Traits(weights=)")
        leaf = leaf_of(self.batch, path, "Traits(weights=...)")
        return with_leaf(self.batch, path, change(leaf))

    # --- parts of the batch ---

    @cached_property
    def parts(self) -> list[np.ndarray]:
        """Rows of each micro-batch that counts: at least two.

        Raises:
          NotApplicable: There are fewer.
        """
        size = -(-self.examples // self.traits.micro_batches)
        rows = np.split(np.arange(self.examples), range(size, self.examples, size))
        # A part that is all padding has no share in the result.
        counted = [own for own in rows if self.weights[own].any()]
        if len(counted) < 2:
            raise NotApplicable("the batch has no two micro-batches that count")
        return counted

    def one_part(self) -> np.ndarray:
        """The rows of a micro-batch."""
        return self.parts[self.choices.integers(len(self.parts))]

    def one_example(self) -> np.ndarray:
        """The row of an example that counts, if it is not the only one.

        Raises:
          NotApplicable: At most one counts.
        """
        counted = np.flatnonzero(self.weights)
        if len(counted) < 2:
            raise NotApplicable("the batch has no two examples that count")
        return counted[[self.choices.integers(len(counted))]]

    def share(self, rows: np.ndarray) -> float:
        """The factor of the result of some rows in the result of all."""
        if self.traits.reduction == "sum":
            # Sums of parts add up without a factor.
            return 1.0
        return float(self.weights[rows].sum() / self.weights.sum())

    def over(self, rows: np.ndarray) -> PyTree:
        """The result of some rows alone, as if they were the batch."""
        if self.traits.weights is not None:
            kept = np.isin(np.arange(self.examples), rows)

            def only(leaf: PyTree) -> PyTree:
                # Broadcast over tokens, where each example has several weights.
                wide = kept.reshape(-1, *[1] * (np.ndim(leaf) - 1))
                return like(leaf, np.where(wide, leaf, 0))

            return self.on(self.reweighted(only))
        # Repeated in turn: if the part divides the batch, each row counts equally
        # often, and the mean is the part's own.
        filled = np.resize(rows, self.examples)
        if self.traits.reduction == "mean" and self.examples % len(rows) == 0:
            return self.on(taken(self.batch, filled))
        rest = self.examples - len(rows)
        # Otherwise the first row fills up the batch, and its own result is taken off.
        filled[len(rows) :] = rows[0]
        of_first = self.on(taken(self.batch, np.full(self.examples, rows[0])))
        both = [self.on(taken(self.batch, filled)), of_first]
        if self.traits.reduction == "sum":
            return combined([1.0, -rest / self.examples], both)
        return combined([self.examples / len(rows), -rest / len(rows)], both)


# --- results and trees ---


def taken(tree: PyTree, rows: np.ndarray) -> PyTree:
    """The rows of each leaf."""

    def one(leaf: PyTree) -> PyTree:
        # Typed keys do not convert to NumPy arrays.
        return leaf[rows] if is_key(leaf) else like(leaf, np.asarray(leaf)[rows])

    return jax.tree.map(one, tree)


def combined(factors: Sequence[float], results: Sequence[Any]) -> PyTree:
    """The sum of results, each times its factor, rounded once to the first's dtypes.

    Leaves that are not floating are the first one's.
    """

    def one(first: PyTree, *others: PyTree) -> PyTree:
        if not is_inexact(first):
            return first
        leaves = zip(factors, (first, *others), strict=True)
        # Summed in double precision: rounding of the parts would be a second defect.
        return like(first, sum(factor * in_double(leaf) for factor, leaf in leaves))

    return jax.tree.map(one, *results)


def like(leaf: PyTree, values: ArrayLike) -> PyTree:
    """Converts host values to the dtype and the kind of array of a leaf."""
    rounded = np.asarray(values).astype(leaf.dtype if hasattr(leaf, "dtype") else float)
    if not isinstance(leaf, jax.Array):
        return rounded
    # On the leaf's devices: a step compiled for a mesh refuses others. An uncommitted
    # leaf stays free to move.
    return jax.device_put(rounded, leaf.sharding if leaf.committed else None)


def leaf_of(tree: PyTree, path: str, argument: str) -> PyTree:
    """The leaf at a path.

    Raises:
      ValueError: There is none.
    """
    leaves = named_leaves(tree)
    check_choice(argument, path, (p for p, leaf in leaves.items() if leaf is not None))
    return leaves[path]


def with_leaf(tree: PyTree, path: str, leaf: PyTree) -> PyTree:
    """The tree with another leaf at a path."""
    return jax.tree.map_with_path(
        lambda keys, own: leaf if path_of(keys) == path else own, tree, is_leaf=is_none
    )
