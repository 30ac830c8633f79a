"""Tied parameters: parameters that several stages share, by a copy in each.

A single stage with two ends has both copies.

The gradient of a tied parameter is the sum over its stages, in their order. Every stage
gets the gradients of all copies and adds them up itself, and the same optimizer makes
the same step of each copy: the copies stay equal, bit for bit.
"""

import functools
import hashlib
import itertools
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import final

import jax

from jdist._errors import quoted, value_error
from jdist._tree import PyTree, abbreviated, named_leaves, wide_dtype
from jdist.optim import Optimizer
from jdist.pipeline.run.stage_channels import (
    MessageTag,
    Places,
    StageChannels,
    ValueChannels,
    receive,
)
from jdist.pipeline.stages.place import laid_like, on_host
from jdist.pipeline.stages.stage import Stage
from jdist.segment.internal import Invoke

_CALL = "Stage(tied=...)"


@final
class Tied:
    """The parameters that stages share; made by `tied_of`.

    Args:
      groups: By name, the paths of the copies in each stage.
    """

    def __init__(self, groups: Mapping[str, Mapping[int, Sequence[str]]]) -> None:
        self._groups = groups

    def check(
        self,
        params: Sequence[PyTree],
        optimizers: Sequence[Optimizer],
        channels: StageChannels,
    ) -> None:
        """Refuses copies that are not equal, or would not stay equal.

        Raises on all processes, and ends the call by its `agree`.

        Args:
          params: The parameters of each stage of this process.
          optimizers: The optimizer of each stage.
          channels: The call in which all processes compare their copies.

        Raises:
          ValueError: A path is unknown; copies differ in shape, dtype or value; their
            stages have different optimizers.
          Exception: Another process has failed.
        """
        for group in self._groups.values():
            if len({optimizers[j].rule for j in group}) > 1:
                which = f"the stages {list(group)}, which share parameters"
                rule = f"must be one and the same object for {which}"
                raise value_error("Pipeline(optimizer=...)", rule, "different ones")
        channels.begin()
        mine = [
            [name, j, path, *_described(params[j], j, path)]
            for name, group in self._groups.items()
            for j, paths in group.items()
            if params[j] is not None
            for path in paths
        ]
        # Digests in place of copies, which may be embeddings of a GiB. Errors are sent
        # as text and raised below, so that all processes raise the same one.
        told = channels.agree(mine)
        reports = sorted(itertools.chain(*told), key=operator.itemgetter(0, 1))
        first: dict[str, Sequence[PyTree]] = {}
        for name, *report, complaint in reports:
            if complaint:
                raise ValueError(complaint)
            stage, path, kinds, digests = report
            before, other_path, others, expected = first.setdefault(name, report)
            _check_alike(before, others, stage, kinds)
            for leaf in digests:
                if digests[leaf] != expected[leaf]:
                    rule = "must begin with equal values at the stages "
                    rule += f"{before} and {stage}"
                    got = f"different ones at {other_path}{leaf} and {path}{leaf}"
                    raise value_error(_CALL, rule, got, "Copy one.")

    def summed(
        self,
        params: Mapping[int, PyTree],
        grads: Sequence[PyTree] | Mapping[int, PyTree],
        places: Places,
        channels: ValueChannels,
        invoke: Mapping[int, Invoke] = MappingProxyType({}),
    ) -> dict[int, PyTree]:
        """Replaces the gradient of each copy by the sum over all copies.

        Args:
          params: The parameters of each stage of this process.
          grads: The gradient of each stage; None for stages of other processes.
          places: The worker of each stage.
          channels: The channels to other stages.
          invoke: For each stage, calls compiled functions; see `Segment.through`.

        Returns:
          The gradients of the stages of this process.

        Raises:
          ValueError: A path is unknown, or copies differ in shape or dtype.
        """
        where = {j: self._copies(j, tree) for j, tree in params.items()}
        # A gradient may have None as a leaf, which `jax.tree.leaves` would skip.
        leaves = {
            j: _structure(tree).flatten_up_to(grads[j]) for j, tree in params.items()
        }
        for name, group in self._groups.items():
            own = {
                j: [
                    {below: leaves[j][i] for below, i in indices.items()}
                    for indices in where[j][name]
                ]
                for j in group
                if j in params
            }
            told = self._exchanged(name, own, places, channels) if own else {}
            copies = [copy for part in told.values() for copy in part]
            for j, mine in own.items():
                call = invoke.get(j, operator.call)
                for indices, like in zip(where[j][name], mine, strict=True):
                    # All copies on this stage's devices: one program takes them. The
                    # sum has the sharding of the parameter, or the update would compile
                    # again.
                    here = [laid_like(copy, like) for copy in copies]
                    total = laid_like(call(_sum, here), like)
                    for below, i in indices.items():
                        leaves[j][i] = total[below]
        return {j: _structure(tree).unflatten(leaves[j]) for j, tree in params.items()}

    def _copies(self, stage: int, params: PyTree) -> dict[str, list[dict[str, int]]]:
        """The indices of the leaves of each copy in a stage, by name.

        Raises:
          ValueError: A path is unknown.
        """
        structure = _structure(params)
        return {
            name: [leaves_at(structure, stage, path) for path in group[stage]]
            for name, group in self._groups.items()
            if stage in group
        }

    def counted(self, stage: int, params: PyTree, gradient: PyTree) -> PyTree:
        """The leaves of a gradient that count for the norm: tied ones at one stage.

        Args:
          stage: Number of the stage.
          params: Its parameters.
          gradient: Its gradient.
        """
        leaves = _structure(params).flatten_up_to(gradient)
        for name, copies in self._copies(stage, params).items():
            # The copies are one parameter, whose gradient the norm counts once.
            for indices in copies[stage == min(self._groups[name]) :]:
                for i in indices.values():
                    leaves[i] = None
        return leaves

    def _exchanged(
        self,
        name: str,
        own: Mapping[int, list[PyTree]],
        places: Places,
        channels: ValueChannels,
    ) -> dict[int, list[PyTree]]:
        """Exchanges the gradients of one tied parameter between its stages."""
        placement = places.schedule.placement
        group = self._groups[name]
        involved = sorted({worker for j in group for worker in placement[j]})
        for j, part in own.items():
            sender = min(placement[j])
            if sender not in places.own:
                continue  # The stage's first worker sends for all replicas.
            for worker in involved:
                # Replicas of the stage have the same sum already.
                if worker not in places.own and worker not in placement[j]:
                    channels.put(MessageTag("T", -1, name, j, sender), worker, part)
        parts = {}
        for j in group:
            tag = MessageTag("T", -1, name, j, min(placement[j]))
            here = places.own[0]
            part = (
                own[j] if j in own else receive(channels, tag, here, "tied gradients")
            )
            parts[j] = part
            # Parameters given to `value_and_grad` have not passed `check`.
            first, (model, *_) = next(iter(parts.items()))
            for copy in part:
                _check_alike(first, _kinds(model), j, _kinds(copy))
        return parts


def tied_of(stages: Sequence[Stage]) -> Tied | None:
    """The parameters that stages share; None if they share none.

    Args:
      stages: All of them, in order.

    Raises:
      ValueError: There is only one parameter of some name.
    """
    groups: dict[str, dict[int, list[str]]] = {}
    for number, stage in enumerate(stages):
        for path, name in stage.tied.items():
            groups.setdefault(name, {}).setdefault(number, []).append(path)
    for name, group in groups.items():
        if sum(map(len, group.values())) < 2:
            rule = f"must have the name {name!r} at two stages or more"
            raise value_error(_CALL, rule, f"stage {min(group)} alone")
    return Tied(groups) if groups else None


def _described(
    params: PyTree, stage: int, path: str
) -> tuple[dict[str, str | None], dict[str, str], str]:
    """Shape and dtype of every leaf of a copy; their digests; and an error text."""
    # Returned and not raised, so that every process takes part in the comparison.
    try:
        found = leaves_at(_structure(params), stage, path)
    except ValueError as error:
        return {}, {}, str(error)
    leaves = jax.tree.leaves(params)
    arrays = {name: on_host(leaves[i]) for name, i in found.items()}
    digests = {
        name: hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
        for name, array in arrays.items()
    }
    return _kinds(arrays), digests, ""


def _kinds(copy: dict[str, PyTree]) -> dict[str, str | None]:
    """Shape and dtype of every leaf of a copy, as text; None for no gradient."""
    kinds: dict[str, str | None] = jax.tree.map(abbreviated, copy)
    return kinds


def _structure(tree: PyTree) -> PyTree:
    return jax.tree.structure(tree)


# Cached, because making the paths as text in every step is slow.
@functools.lru_cache(maxsize=256)
def leaves_at(
    structure: jax.tree_util.PyTreeDef, stage: int | str, path: str
) -> dict[str, int]:
    """Indices of the leaves at or below a path, by the rest of their paths.

    Args:
      structure: Structure of the parameters.
      stage: Their stage, for the error's text.
      path: The path.

    Raises:
      ValueError: There is no such path.
    """
    numbered = structure.unflatten(range(structure.num_leaves))
    names = named_leaves(numbered, is_leaf=None)
    found = {
        name.removeprefix(path): i
        for name, i in sorted(names.items())
        if name == path or name.startswith(f"{path}/")
    }
    if not found:
        rule = f"must name parameters of stage {stage}, which has {sorted(names)}"
        raise value_error(_CALL, rule, quoted(path))
    return found


def _check_alike(
    first: int, kinds: Mapping[str, object], stage: int, others: Mapping[str, object]
) -> None:
    if kinds != others:
        # A copy that is a single array has no name below its path.
        own, other = (each.get("", each) for each in (kinds, others))
        rule = f"must be copies of one shape and dtype: stage {first} has {own}"
        raise value_error(_CALL, rule, f"{other} at stage {stage}")


@jax.jit
def _sum(parts: Sequence[dict[str, PyTree]]) -> dict[str, PyTree]:
    """The sum in the order of the stages."""

    def added(*copies: jax.Array) -> jax.Array:
        # In 32 bits at least and rounded once. Every stage adds in the same order, so
        # that the copies stay equal.
        wide = [copy.astype(wide_dtype(copy.dtype)) for copy in copies]
        return functools.reduce(jax.numpy.add, wide).astype(copies[0].dtype)

    return jax.tree.map(added, *parts)
