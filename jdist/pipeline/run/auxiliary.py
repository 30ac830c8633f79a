"""Auxiliary outputs of the loss function: an entry for each micro-batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdist._errors import requirement
from jdist.pipeline.run.shapes import describe

Entries = tuple[list[int], Any]
"""Numbers of micro-batches, and a tree whose leaves have an entry for each of them."""


def stacked(
    found: Mapping[int, Any], stack: Callable[[Sequence[Any]], Any]
) -> Entries | None:
    """Trees as one, each leaf with a new first axis.

    Args:
      found: By number of the micro-batch; None if there are none.
      stack: `jnp.stack`, or `np.stack` for arrays on the host.

    Raises:
      ValueError: They are not alike in structure, shapes and dtypes.

    Example:
      >>> stacked({0: {"hits": np.int32(3)}, 1: {"hits": np.int32(5)}}, np.stack)
      ([0, 1], {'hits': array([3, 5], dtype=int32)})
    """
    if not found:
        return None
    numbers = sorted(found)
    trees = [found[number] for number in numbers]
    first = _shapes(trees[0])
    for number, tree in zip(numbers, trees, strict=True):
        if _shapes(tree) != first:
            rule = "must return auxiliary outputs of the same shapes for all "
            rule += f"micro-batches, as for the first, {describe(trees[0])}"
            got = f"{describe(tree)} for micro-batch {number}"
            remedy = "Reduce what has a row for each example, or make the batch "
            remedy += "divisible by the number of micro-batches."
            call = "loss_fn(outputs, batch)"
            raise ValueError(requirement(call, rule, got, remedy))
    return numbers, jax.tree.map(lambda *entries: stack(entries), *trees)


def merged(parts: Sequence[Entries | None]) -> Any:
    """The entries of all processes, in the order of the micro-batches; None for none.

    Args:
      parts: What `stacked` made in each process.

    Example:
      >>> parts = [([0, 2], np.array([5, 7])), None, ([1], np.array([6]))]
      >>> merged(parts)
      array([5, 6, 7])
    """
    there = [part for part in parts if part is not None]
    if len(there) < 2:
        return there[0][1] if there else None
    order = np.argsort(np.concatenate([numbers for numbers, _ in there]))
    return jax.tree.map(
        lambda *rows: _sorted(rows, order), *(tree for _, tree in there)
    )


def _shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _sorted(rows: Sequence[Any], order: np.ndarray) -> Any:
    where: Any = np if all(isinstance(row, np.ndarray) for row in rows) else jax.numpy
    return where.concatenate(rows)[order]
