"""The loss of a pipeline and its gradient with respect to the last outputs."""

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import reduction
from jdist._compat import trace, without_unread
from jdist._errors import value_error
from jdist._tree import PyTree, merge, split_inexact, type_name
from jdist.pipeline.stages.array_spec import blank, describe
from jdist.reduction import Partial
from jdist.segment.internal import (
    PATIENCE_WITH_MODELS,
    VERSIONS,
    Contents,
    FunctionCache,
    Invoke,
    Traced,
)


class LossPasses(NamedTuple):
    """The compiled functions of a loss function.

    Attributes:
      both: Maps `(values, entries, weights)` to the losses' partial without a
        gradient, the cotangents of the values, and the auxiliary outputs, None if
        there are none; a fourth argument scales the cotangents.
      losses: Maps `(values, entries, weights)` to the partial and the auxiliary
        outputs.
    """

    both: Callable[..., tuple[Partial, dict[str, PyTree], PyTree]]
    losses: Callable[..., tuple[Partial, PyTree]]


class _LossOptions(NamedTuple):
    """What the passes of a loss function depend on besides the function.

    Attributes:
      names, kind, has_aux: See `PipelineLoss`.
      unread: Shapes and dtypes of the batch's leaves that the losses do not read.
      structure: The tree of these leaves.
    """

    names: tuple[str, ...]
    kind: str
    has_aux: bool
    unread: tuple[tuple[tuple[int, ...], Any], ...]
    structure: jax.tree_util.PyTreeDef


class _CompiledLoss:
    """The programs of one loss function, shared by all pipelines that use it.

    Args:
      fn: The loss function.

    Attributes:
      fn: The loss function as its traced programs.
    """

    def __init__(self, fn: Callable[..., PyTree]) -> None:
        self.fn = Traced(fn, _CACHE.user)
        self._passes: dict[_LossOptions, LossPasses] = {}

    @property
    def contents(self) -> Contents:
        """See `Traced.contents`."""
        return self.fn.contents

    def passes(self, options: _LossOptions) -> LossPasses:
        """See `PipelineLoss.passes`."""
        made = self._passes.get(options)
        if made is None:
            VERSIONS.note(_CACHE.user, self.contents, options, PATIENCE_WITH_MODELS)
            made = self._passes[options] = _compiled(self.fn, options)
        return made


_CACHE: FunctionCache[_CompiledLoss] = FunctionCache("Pipeline(loss_fn)", size=64)


@dataclass(eq=False)
class PipelineLoss:
    """The loss function `loss_fn(outputs, batch)`, given only entries that it reads.

    The outputs are one value if the pipeline has a single output, else a dict by name.

    Args:
      fn: The loss function: one loss per example.
      names: Names of the values that it takes.
      kind: The reduction.
      has_aux: Whether it returns a pair of losses and auxiliary outputs.

    Attributes:
      scale: The factor of its cotangents, a scalar on any device; None for 1.
    """

    fn: Callable[..., PyTree]
    names: tuple[str, ...]
    kind: str
    has_aux: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Finds what was compiled for the function."""
        self.scale: PyTree = None
        self._invoke: Invoke = operator.call
        self._compiled = _CACHE.get(self.fn, (), lambda _: _CompiledLoss(self.fn))

    @property
    def gradient_kind(self) -> str:
        """The reduction by which the stages' gradients are joined."""
        # The weights of a mean are shares of the batch: the stages only add.
        return "sum" if self.kind == "mean" else self.kind

    def scaled(self, scale: jax.typing.ArrayLike) -> "PipelineLoss":
        """A copy of the loss with a scale."""
        made = copy.copy(self)
        made.scale = scale
        return made

    def through(self, invoke: Invoke) -> "PipelineLoss":
        """A copy that calls compiled functions through another function.

        Args:
          invoke: See `Segment.through`.
        """
        made = copy.copy(self)
        made._invoke = invoke
        return made

    def entries_read(
        self, values: PyTree, batch: Mapping[str, PyTree]
    ) -> tuple[str, ...]:
        """Names of the entries of the batch that the losses depend on.

        Args:
          values: Shapes of the values that it takes, by name.
          batch: The batch, or its shapes.
        """
        entries = dict(batch)

        def losses_of(entries: PyTree, values: PyTree) -> PyTree:
            return _called(self._compiled.fn, self.names, values, entries)

        program, _ = trace(losses_of, entries, values)
        structure: Any = jax.tree.structure(entries)
        _, read = without_unread(program, structure.num_leaves)
        leaves = structure.unflatten(read)
        return tuple(
            name for name in sorted(batch) if any(jax.tree.leaves(leaves[name]))
        )

    def passes(self, batch: Mapping[str, PyTree], read: tuple[str, ...]) -> LossPasses:
        """Compiled passes for micro-batches of these shapes.

        Args:
          batch: A micro-batch, or its shapes.
          read: The return value of `entries_read`.
        """
        entries = {name: x for name, x in batch.items() if name not in read}
        leaves, structure = jax.tree.flatten(entries)
        canonical = partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)
        unread = tuple([(x.shape, canonical(x.dtype)) for x in leaves])
        own = self.names, self.kind, self.has_aux
        found = self._compiled.passes(_LossOptions(*own, unread, structure))
        return LossPasses(*(partial(self._invoke, each) for each in found))

    def check(self) -> None:
        """Checks that the function reads what it read when it was first compiled.

        Raises:
          ValueError: It would now be compiled to another program.
        """
        self._compiled.fn.check()


def _called(
    fn: Callable[..., PyTree], names: tuple[str, ...], values: PyTree, batch: PyTree
) -> PyTree:
    try:
        return fn(values[names[0]] if len(names) == 1 else values, batch)
    except KeyError as error:
        given = [*batch, *(names if len(names) > 1 else ())]
        # A key that exists was missing in a mapping of the user's own.
        if not error.args or error.args[0] in given:
            raise
        named = f"outputs named {list(names)} and " if len(names) > 1 else ""
        rule = f"must read only what is there: {named}a batch of {sorted(batch)}"
        got = f"{error.args[0]!r}"
        raise value_error("loss_fn(outputs, batch)", rule, got) from error
    except Exception as error:
        error.add_note("It was raised by the loss function.")
        raise


def _compiled(fn: Callable[..., PyTree], options: _LossOptions) -> LossPasses:
    names, kind, has_aux, unread, structure = options

    def losses_of(
        values: PyTree, entries: PyTree, weights: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        # Entries that the loss does not read are not sent to it. It may still index
        # them, so constants of their shapes take their place.
        blanks = [blank(jax.ShapeDtypeStruct(*kind)) for kind in unread]
        batch = {**jax.tree.unflatten(structure, blanks), **entries}
        found = _called(fn, names, values, batch)
        found, aux = _with_aux(found) if has_aux else (found, None)
        reduction.check_losses(found, weights.shape)
        return found, aux

    def both(
        values: PyTree, entries: PyTree, weights: jax.Array, scale: PyTree = None
    ) -> tuple[Partial, dict[str, PyTree], PyTree]:
        # Differentiated without integers: their cotangents would have the dtype
        # float0, which the backward passes of stages do not take.
        floating, fixed = split_inexact(values)
        found, pull_back, aux = jax.vjp(
            lambda v: losses_of(merge(v, fixed), entries, weights),
            floating,
            has_aux=True,
        )
        value, seeds, weight = reduction.seeds(found, weights, kind)
        if kind in ("max", "min"):
            # Ties share equally, as in `jnp.max`; the stages weight by their number.
            seeds = seeds / jnp.maximum(weight, 1)
        if scale is not None:
            seeds = seeds * jnp.asarray(scale, seeds.dtype)
        # Seeds have the dtype of the losses, which may round them; `rounding` restores
        # their total.
        given, rounding = reduction.rounded(seeds, found.dtype)
        (d_values,) = pull_back(given)
        part = Partial(value, None, weight)
        return part, reduction.scaled(d_values, rounding), aux

    def losses(
        values: PyTree, entries: PyTree, weights: jax.Array
    ) -> tuple[Partial, PyTree]:
        found, aux = losses_of(values, entries, weights)
        value, _, weight = reduction.seeds(found, weights, kind)
        return Partial(value, None, weight), aux

    return LossPasses(jax.jit(both), jax.jit(losses))


def _with_aux(found: PyTree) -> tuple[PyTree, PyTree]:
    """The losses and the auxiliary outputs that a loss function returned.

    Raises:
      ValueError: It is not a pair.
    """
    call = "loss_fn(outputs, batch)"
    if not isinstance(found, tuple) or len(found) != 2:
        rule = "must return the tuple (losses, aux)"
        size = f" of {len(found)}" if isinstance(found, tuple) else ""
        raise value_error(call, rule, f"{type_name(found)}{size}")
    losses, aux = found
    return losses, aux


# --- auxiliary outputs ---

Entries = tuple[list[int], PyTree]
"""Numbers of micro-batches, and a tree whose leaves have an entry for each of them."""


def stacked(
    found: Mapping[int, PyTree], stack: Callable[[Sequence[PyTree]], PyTree]
) -> Entries | None:
    """Stacks trees along a new first axis of each leaf; None for no tree.

    Args:
      found: The trees, by number of the micro-batch.
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
            raise value_error("loss_fn(outputs, batch)", rule, got, remedy)
    return numbers, jax.tree.map(lambda *entries: stack(entries), *trees)


def merged(parts: Sequence[Entries | None]) -> PyTree:
    """Joins the entries of all processes in the order of micro-batches.

    None if there are none.

    Args:
      parts: The return value of `stacked` in each process.

    Example:
      >>> parts = [([0, 2], np.array([5, 7])), None, ([1], np.array([6]))]
      >>> merged(parts)
      array([5, 6, 7])
    """
    # Processes that make up one worker send the same entries.
    there = list({tuple(part[0]): part for part in parts if part is not None}.values())
    if len(there) < 2:
        return there[0][1] if there else None
    # Workers of the last stage take micro-batches in turn, so that entries interleave.
    order = np.argsort(np.concatenate([numbers for numbers, _ in there]))
    return jax.tree.map(
        lambda *rows: _sorted(rows, order), *(tree for _, tree in there)
    )


def _shapes(tree: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _sorted(rows: Sequence[PyTree], order: np.ndarray) -> PyTree:
    where: Any = np if all(isinstance(row, np.ndarray) for row in rows) else jax.numpy
    return where.concatenate(rows)[order]
