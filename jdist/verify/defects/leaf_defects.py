"""Defects of a finished gradient: its scale, or one of its leaves."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jdist._tree import PyTree, is_inexact, named_leaves
from jdist.verify.defects.defect import Defect, declared
from jdist.verify.defects.step_call import (
    NoEffect,
    NotApplicable,
    StepCall,
    combined,
    leaf_of,
    like,
    with_leaf,
)

# Size of the noise in an unused leaf, relative to the mean nonzero entry.
NOISE = 1e-3


LEAF_DEFECTS: list[Defect] = []
_gradient = declared(LEAF_DEFECTS, "gradient")
_NONZERO = "leaf that is not all 0"


# --- the whole gradient ---


@_gradient("factor 1.001")
def _slightly_larger(call: StepCall) -> PyTree:
    """The gradient is multiplied by 1.001."""
    return _times(1.001, call)


@_gradient("factor 1.1")
def _larger(call: StepCall) -> PyTree:
    """The gradient is multiplied by 1.1."""
    return _times(1.1, call)


def _times(factor: float, call: StepCall) -> PyTree:
    loss, gradient = call.right
    return loss, combined([factor], [gradient])


@_gradient("sum for mean", "a total weight other than 1")
def _sum_for_mean(call: StepCall) -> PyTree:
    """Loss and gradient are not divided by the total weight (or, where the step returns
    a sum, are divided by it)."""
    total = float(call.weights.sum())
    if total == 1:
        raise NoEffect("the weights add up to 1, so that the sum is the mean")
    return combined(
        [total if call.traits.reduction == "mean" else 1 / total], [call.right]
    )


# --- one leaf ---


@_gradient("negated leaf", f"a {_NONZERO}")
def _negated(call: StepCall) -> PyTree:
    """One leaf has the other sign."""
    return _one_leaf(call, lambda x: like(x, -np.asarray(x)), _nonzero, _NONZERO)


@_gradient("zero leaf", f"a {_NONZERO}")
def _zero(call: StepCall) -> PyTree:
    """One leaf is 0, as behind a `stop_gradient`."""
    return _one_leaf(call, lambda x: like(x, np.zeros(x.shape)), _nonzero, _NONZERO)


@_gradient("missing leaf")
def _missing(call: StepCall) -> PyTree:
    """One leaf is None, so that no optimizer moves its parameter."""
    return _one_leaf(call, lambda x: None, lambda x: True, "floating leaf")


@_gradient("NaN")
def _nan(call: StepCall) -> PyTree:
    """The largest entry of one leaf is NaN."""
    changed = _one_entry(lambda x: np.nan)
    return _one_leaf(call, changed, lambda x: x.size > 0, "leaf with entries")


@_gradient("wrong entry", f"a {_NONZERO}")
def _wrong_entry(call: StepCall) -> PyTree:
    """The largest entry of one leaf is multiplied by 1.1."""
    changed = _one_entry(lambda x: x * x.dtype.type(1.1))
    return _one_leaf(call, changed, _nonzero, _NONZERO)


@_gradient("transposed leaf", "a leaf whose last two axes are longer than 1")
def _transposed(call: StepCall) -> PyTree:
    """One matrix is transposed; where it is not square, it has the transposed one's
    numbers in the right one's shape."""

    def changed(leaf: PyTree) -> PyTree:
        return like(leaf, np.asarray(leaf).swapaxes(-1, -2).reshape(leaf.shape))

    return _one_leaf(call, changed, _matrix, "matrix")


def _one_leaf(
    call: StepCall,
    change: Callable[[Any], Any],
    able: Callable[[np.ndarray], bool],
    wanted: str,
) -> PyTree:
    """Changes one leaf of those that can be changed.

    Args:
      call: The call.
      change: From the leaf to the wrong one.
      able: Whether a leaf, on the host, is one that the change can show in.
      wanted: Which leaf that is, for the error's text.
    """
    loss, gradient = call.right
    leaves = named_leaves(gradient)
    chosen = _chosen(call, [p for p, x in _floating(gradient) if able(x)], wanted)
    return loss, with_leaf(gradient, chosen, change(leaves[chosen]))


def _floating(gradient: PyTree) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in named_leaves(gradient).items():
        if leaf is not None and is_inexact(leaf):
            yield path, np.asarray(leaf)


def _chosen(call: StepCall, paths: list[str], wanted: str) -> str:
    if not paths:
        raise NotApplicable(f"the gradient has no {wanted}")
    return paths[call.choices.integers(len(paths))]


def _nonzero(leaf: np.ndarray) -> bool:
    return bool(leaf.any())


def _matrix(leaf: np.ndarray) -> bool:
    # A vector, or a matrix of one row, is its own transpose.
    return leaf.ndim >= 2 and min(leaf.shape[-2:]) > 1 and _nonzero(leaf)


def _one_entry(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Changes the largest entry of a leaf."""

    def changed(leaf: PyTree) -> PyTree:
        # In a small entry the error could be below the rounding of the leaf.
        at = int(np.abs(np.asarray(leaf)).argmax())
        wrong = np.array(leaf)
        wrong.reshape(-1)[at] = change(wrong.reshape(-1)[at])
        return like(leaf, wrong)

    return changed


@_gradient("swapped leaves", "two leaves of one shape and dtype")
def _swapped(call: StepCall) -> PyTree:
    """Two leaves of one shape have each other's gradient, as two layers would."""
    loss, gradient = call.right
    leaves = dict(_floating(gradient))
    pairs = [
        (a, b)
        for a in leaves
        for b in leaves
        if a < b
        and leaves[a].shape == leaves[b].shape
        and leaves[a].dtype == leaves[b].dtype
    ]
    if not pairs:
        raise NotApplicable("the gradient has no two leaves of one shape and dtype")
    first, second = pairs[call.choices.integers(len(pairs))]
    own = named_leaves(gradient)
    # Both from the right gradient: after the first exchange one of them is gone.
    swapped = with_leaf(gradient, first, own[second])
    return loss, with_leaf(swapped, second, own[first])


@_gradient("noise in an unused leaf", "a leaf that is all 0")
def _noise(call: StepCall) -> PyTree:
    """A parameter that the loss does not depend on gets a small random gradient."""
    loss, gradient = call.right
    leaves = dict(_floating(gradient))
    unused = [path for path, leaf in leaves.items() if leaf.size and not _nonzero(leaf)]
    chosen = _chosen(call, unused, "leaf that is all 0")
    entries = np.concatenate(
        [np.abs(x.astype(np.float64)).ravel() for x in leaves.values()]
    )
    if not entries.any():
        raise NotApplicable("the gradient has no leaf that is not all 0")
    leaf = named_leaves(gradient)[chosen]
    size = NOISE * float(entries[entries > 0].mean())
    # From the defect's own generator, so that a trial can be repeated.
    drawn = size * call.choices.standard_normal(leaf.shape)
    return loss, with_leaf(gradient, chosen, like(leaf, drawn))


@_gradient("tied leaf counted twice", "Traits(tied=...)")
def _tied_twice(call: StepCall) -> PyTree:
    """The gradient of a parameter that is used more than once is doubled, as where two
    stages each add the other's share."""
    if call.traits.tied is None:
        raise NotApplicable("no tied parameter is known: name it, Traits(tied=)")
    loss, gradient = call.right
    leaf = leaf_of(gradient, call.traits.tied, "Traits(tied=...)")
    return loss, with_leaf(gradient, call.traits.tied, combined([2.0], [leaf]))


@_gradient("clipped leaf by leaf", "a leaf with more than half the gradient's norm")
def _clipped(call: StepCall) -> PyTree:
    """Each leaf is clipped to half the gradient's norm by its own norm, and not by the
    norm of all."""
    loss, gradient = call.right
    return loss, clipped_by_leaf(gradient)


def clipped_by_leaf(tree: PyTree) -> PyTree:
    """Each floating leaf clipped by its own norm, to half the norm of all.

    The same tree if no leaf's norm is above half the norm of all.
    """
    # complex128 has room for every floating dtype, complex ones included.
    norms = {
        path: float(np.linalg.norm(leaf.astype(np.complex128)))
        for path, leaf in _floating(tree)
    }
    limit = 0.5 * float(np.linalg.norm(list(norms.values())))
    for path, norm in norms.items():
        if norm > limit:
            leaf = named_leaves(tree)[path]
            tree = with_leaf(tree, path, combined([limit / norm], [leaf]))
    return tree
