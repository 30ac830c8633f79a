"""Cuts of a model: sets of layers that contain all predecessors of their members.

A chain of n layers can be cut after each of them. In a graph everything in a cut runs
before everything outside. The layers of a stage are the difference of two cuts, one
within the other. PipeDream calls the layers at the edge of such a set its antichain.
"""

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jdist._errors import value_error
from jdist.pipeline.plan.profile import Profile

MOST = 4000
"""The most cuts that are planned; a wide graph has exponentially many."""


@dataclass(frozen=True, eq=False)
class Cuts:
    """All cuts of a profile, from the empty one to all layers, in order of inclusion.

    Attributes:
      names: The layers in topological order.
      inside: For each cut, the layers in it as a bit set.
      seconds: For each cut, forward and backward of all layers in it.
      activation_bytes: Likewise, the size of their outputs.
      parameter_bytes: Likewise, the size of their parameters.
      output_bytes: For each cut, the bytes that cross it: outputs at its edge.
    """

    names: tuple[str, ...]
    inside: tuple[int, ...]
    seconds: np.ndarray
    activation_bytes: np.ndarray
    parameter_bytes: np.ndarray
    output_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.inside)

    @cached_property
    def within(self) -> np.ndarray:
        """Whether cut i lies properly within cut j, bool, `(cuts, cuts)`."""
        found = np.zeros((len(self), len(self)), bool)
        for i, small in enumerate(self.inside):
            for j in range(i + 1, len(self)):
                # Bit sets: inclusion is one operation on integers of any length.
                found[i, j] = small & ~self.inside[j] == 0
        return found

    def between(self, i: int, j: int) -> tuple[str, ...]:
        """The layers of cut j that are not in cut i, in order."""
        wanted = self.inside[j] & ~self.inside[i]
        return tuple(name for bit, name in enumerate(self.names) if wanted >> bit & 1)


def cuts_of(profile: Profile) -> Cuts:
    """All cuts of a profile.

    Inputs ("Input...") cost nothing and belong to the first stage that needs them; they
    are left out, and so are unused outputs (`__getitem__` of a tuple).

    Raises:
      ValueError: Nothing is left, or there are too many ways to cut.
    """
    fed = {source for source, _ in profile.edges}
    feeding = {target for _, target in profile.edges}
    order = [
        name
        for name in profile.order
        if not (_is("Input", profile, name) and name not in feeding)
        and not (_is("__getitem__", profile, name) and name not in fed)
    ]
    if not order:
        rule = "must have a layer that is no input"
        raise value_error("partition(profile=...)", rule, profile.order)
    number = {name: bit for bit, name in enumerate(order)}
    needs, takers = [0] * len(order), [0] * len(order)
    for source, target in profile.edges:
        # Edges from inputs and to unused outputs were left out with these.
        if source in number and target in number:
            takers[number[source]] |= 1 << number[target]
            needs[number[target]] |= 1 << number[source]
    layers = [profile[name] for name in order]
    output = [layer.output_bytes for layer in layers]
    closed = _closures(needs)
    # The first source by the order of the file, as in the published planner.
    names = [layer.name for layer in profile.layers if layer.name in number]
    first = next(number[name] for name in names if not needs[number[name]])
    inside = _closed_sets(first, closed, takers)
    edges = [_antichain(cut, closed, takers) for cut in inside]
    return Cuts(
        tuple(order),
        inside,
        _totals(inside, [layer.seconds for layer in layers]),
        _totals(inside, output),
        _totals(inside, [layer.parameter_bytes for layer in layers]),
        _totals(edges, output),
    )


def _is(kind: str, profile: Profile, name: str) -> bool:
    return profile[name].description.startswith(kind)


def _closures(needs: Sequence[int]) -> list[int]:
    """For each layer, the set of itself and all its predecessors."""
    closed: list[int] = []
    for bit, needed in enumerate(needs):
        # `names` is in topological order, so that predecessors are closed already.
        closed.append(_union(closed[other] for other in _bits(needed)) | 1 << bit)
    return closed


def _antichain(cut: int, closed: Sequence[int], takers: Sequence[int]) -> int:
    """PipeDream's antichain of a cut: its last layers, and some of their predecessors.

    A predecessor of a last layer a belongs to it if one of its successors is not a
    predecessor of a, even if that successor is in the cut behind another last layer.
    This overestimates what crosses between parallel branches, but published plans were
    made so.
    """
    # Layers of the cut without a successor in it.
    last = [bit for bit in _bits(cut) if not takers[bit] & cut]
    found = sum(1 << bit for bit in last)
    for bit in last:
        before = closed[bit] & ~(1 << bit)
        found |= sum(1 << p for p in _bits(before) if takers[p] & ~closed[bit])
    return found


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


def _closed_sets(
    first: int, closed: Sequence[int], takers: Sequence[int]
) -> tuple[int, ...]:
    """Bit sets that contain all predecessors of their members, smaller ones first.

    They grow from the first listed source by one successor at a time, with its
    predecessors. So a further source, such as the embedding of a decoder's input, comes
    with the layer that needs it and not before.
    """
    everything = (1 << len(closed)) - 1
    found = {0, closed[first], everything}
    newest = [closed[first]]
    while newest:
        cut = newest.pop()
        next_ones = _union(takers[bit] for bit in _bits(cut)) & ~cut
        # Growing by closed sets alone: the result is closed without a check.
        for grown in {cut | closed[bit] for bit in _bits(next_ones)} - found:
            found.add(grown)
            newest.append(grown)
        # Refused while growing, because their number may be exponential.
        if len(found) > MOST:
            rule = f"must have at most {MOST} ways to be cut in two"
            remedy = "Join the layers of its widest part into one."
            got = f"more than {MOST}"
            raise value_error("partition(profile=...)", rule, got, remedy)
    # A cut comes after all cuts within it, which have fewer layers.
    return tuple(sorted(found, key=lambda cut: (cut.bit_count(), cut)))


def _totals(cuts: Sequence[int], values: Sequence[float]) -> np.ndarray:
    # Stages are differences of these totals, in which rounding would show.
    return np.array([math.fsum(values[bit] for bit in _bits(cut)) for cut in cuts])


def _bits(cut: int) -> Iterator[int]:
    while cut:
        # In two's complement -cut shares only the lowest set bit with cut.
        lowest = cut & -cut
        yield lowest.bit_length() - 1
        cut ^= lowest
