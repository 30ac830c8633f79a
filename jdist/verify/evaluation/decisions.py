"""Other results of right programs, whose near decisions fall otherwise.

A decision near a tie (a route, an order, an argmax) is rounding's, and two right
programs may make it differently. How much that changes the result is measured without
a model of the program. It runs *free*, with random errors and the decisions that these
lead to; then the same decisions are replayed without errors. The result is that of the
recorded decisions to the last bit unless one differs that matters. So the differences
are, example by example, the changes by other choices.

Errors are of natural size in `NATURAL` runs, which show how often decisions differ. In
`PAIRS` pairs of runs they are `WITHIN` times as large, once with each sign: a decision
whose margin is less than its own deviation is missed by all of them once in 3000, and
one of a margin beyond `WITHIN` deviations is no program's to make otherwise.

Where few examples are concerned, their choices can be read off a program's answer:
`chosen` finds those that explain its difference. Nothing else does to rounding.

References:
  Parker, Monte Carlo Arithmetic, UCLA CSD TR-970002, 1997.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist.verify.evaluation.lockstep import Form, Value
from jdist.verify.evaluation.piecewise import BOTH, Pieces, Recording

# Runs with errors of natural size; pairs of runs with larger ones, and how much larger.
NATURAL, PAIRS, WITHIN = 8, 4, 8.0

# Examples whose other choices are kept one by one, and how many of each; of a batch
# that is one term twice as many.
FEW, KEPT = 8, 4

Choice = Mapping[int, np.ndarray]
"""The changes of results, by their numbers, by one choice of one example."""


class Extent(NamedTuple):
    """How far changes go, over all examples: numbers, or arrays of them.

    Attributes:
      total: Sum over examples of the largest change.
      largest: The largest change by one example.
      square: Sum over examples of the mean square in runs with natural errors.
    """

    total: Any
    largest: Any
    square: Any

    def plus(self, other: "Extent") -> "Extent":
        """That over the examples of both."""
        largest = np.maximum(self.largest, other.largest)
        return Extent(self.total + other.total, largest, self.square + other.square)


class Changes(NamedTuple):
    """Changes of one result by other choices: of each entry, and of the 2-norm."""

    entries: Extent
    norm: Extent

    def plus(self, other: "Changes") -> "Changes":
        """The changes over the examples of both."""
        return Changes(self.entries.plus(other.entries), self.norm.plus(other.norm))


@dataclass(slots=True)
class OtherChoices:
    """Collects changes by other choices.

    Args:
      pieces: A program that decides.
      form: The form of its draws.
      several: Whether axis 0 of its results is that of examples; else the whole batch
        is one of them.

    Attributes:
      changes: By number of the result; none where nothing changes.
      examples: Those that may decide otherwise, by number, with their choices; of more
        than `FEW` examples these are not kept.
    """

    pieces: Pieces
    form: Form
    several: bool
    changes: dict[int, Changes] = field(default_factory=dict)
    examples: dict[int, list[Choice]] = field(default_factory=dict)

    def add(
        self,
        leaves: Sequence[Value],
        numbers: np.ndarray,
        shares: np.ndarray,
        seed: int,
        moved: Sequence[Sequence[Value]] = (),
    ) -> None:
        """Adds examples; to be called with 64-bit types enabled.

        Args:
          leaves: The program's arguments.
          numbers: The numbers of the examples.
          shares: Their shares, by which result 0, the loss, is multiplied; 0 for those
            that do not count.
          seed: Seed of the errors.
          moved: The arguments that other right programs may have, for the free runs in
            turn; none if they are the same.
        """
        recorded: Recording = {}
        # As examples are measured, which is compiled already.
        both = BOTH._replace(sized=True, sizes=self.form.wider)
        self.pieces.run(leaves, both, recording=recorded, receive=lambda *_: None)
        usual = self._results(leaves, recorded)
        found: dict[int, _Range] = {}
        begin = itertools.cycle(moved or [leaves])
        for (amplitude, own), given in zip(errors(seed), begin, strict=False):
            free: Recording = {}
            self.pieces.run(
                given,
                self.form,
                amplitude=amplitude,
                seed=own,
                recording=free,
                replay=recorded,
                free=True,
            )
            choices: dict[int, dict[int, np.ndarray]] = {}
            results = self._results(leaves, free)
            for number, pair in enumerate(zip(usual, results, strict=True)):
                differs, change = _change(*pair)
                rows = np.flatnonzero(np.asarray(differs) & (shares > 0))
                if not rows.size:
                    continue
                turned = np.zeros(change.shape)
                factor = shares if number == 0 else np.ones_like(shares)
                for row in rows:
                    turned[row] = np.asarray(change[row]) * factor[row]
                    choices.setdefault(int(numbers[row]), {})[number] = turned[row]
                if number not in found:
                    found[number] = _Range(*(np.zeros(turned.shape) for _ in range(3)))
                found[number].take(turned, abs(amplitude) == 1)
            self._keep(choices)
        for number, each in found.items():
            before = self.changes.get(number)
            changes = each.changes()
            self.changes[number] = changes if before is None else before.plus(changes)

    def _results(
        self, leaves: Sequence[Value], decisions: Recording
    ) -> list[jax.Array]:
        """The results with some decisions, `(examples, ...)`."""
        # In the form of the draws, which is compiled already.
        found = self.pieces.run(leaves, self.form, amplitude=0.0, replay=decisions)
        return [x.wide if self.several else x.wide[None] for x in found]

    def _keep(self, choices: Mapping[int, Choice]) -> None:
        for example, own in choices.items():
            kept = self.examples.setdefault(example, [])
            most = KEPT if self.several else 2 * KEPT
            few = len(self.examples) <= FEW and len(kept) < most
            if few and not any(_same(own, other) for other in kept):
                kept.append(own)
        if len(self.examples) > FEW:
            for kept in self.examples.values():
                kept.clear()


@dataclass(slots=True)
class _Range:
    """The changes of one result in the runs of some examples, `(examples, ...)`."""

    low: np.ndarray
    high: np.ndarray
    square: np.ndarray

    def take(self, change: np.ndarray, natural: bool) -> None:
        self.low = np.minimum(self.low, change.real)
        self.high = np.maximum(self.high, change.real)
        if natural:
            self.square += np.abs(change) ** 2 / NATURAL

    def changes(self) -> Changes:
        # The reference and a candidate may both choose otherwise than the record.
        width = self.high - self.low
        norms = np.sqrt(np.sum(width**2, axis=tuple(range(1, width.ndim))))
        entries = Extent(width.sum(0), width.max(0), self.square.sum(0))
        return Changes(entries, Extent(norms.sum(), norms.max(), self.square.sum()))


def errors(seed: int) -> Iterator[tuple[float, int]]:
    """Amplitudes and seeds of the runs."""
    for each in range(NATURAL):
        yield 1.0, seed * 65537 + each + 1
    for each in range(PAIRS):
        for amplitude in (WITHIN, -WITHIN):
            yield amplitude, seed * 65537 + NATURAL + each + 1


@jax.jit
def _change(usual: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which examples changed, and the changes; of a complex number its size."""
    same = (usual == other) | (jnp.isnan(usual) & jnp.isnan(other))
    differs = ~jnp.all(same.reshape(same.shape[0], math.prod(same.shape[1:])), 1)
    change = jnp.where(same, 0, other - usual)
    real = 2 * jnp.abs(change) if jnp.iscomplexobj(change) else change
    return differs, real.astype(jnp.float64)


def _same(first: Choice, second: Choice) -> bool:
    return first.keys() == second.keys() and all(
        np.allclose(first[x], second[x], rtol=1e-3, atol=0) for x in first
    )


def chosen(
    errors: Choice, bounds: Choice, examples: Mapping[int, Sequence[Choice]]
) -> tuple[list[int], Choice] | None:
    """The choices that explain differences to rounding; None if none do.

    Args:
      errors: A candidate's results without the reference's, by number.
      bounds: The largest differences that rounding explains, above 0, likewise.
      examples: The examples' other choices.

    Returns:
      The examples in which the candidate chooses otherwise than the reference, and the
      changes of all results by these choices.
    """
    change: Choice = {}
    left, rest, taken = errors, dict(examples), []
    while any((np.abs(left[number]) > own).any() for number, own in bounds.items()):
        moves = (
            (_distance(_plus(left, first, second), bounds), example, first, second)
            for example, choices in rest.items()
            # Either of the two may have made the recorded choice, or none.
            for first, second in itertools.permutations([{}, *choices], 2)
        )
        found = min(moves, key=lambda x: x[0], default=None)
        if found is None or not found[0] < _distance(left, bounds):
            return None
        _, example, first, second = found
        left, change = _plus(left, first, second), _plus(change, second, first)
        taken.append(example)
        del rest[example]
    return sorted(taken), change


def _plus(own: Choice, first: Choice, second: Choice) -> Choice:
    """Own results with those of the first choice, without those of the second."""
    numbers, none = {*own, *first, *second}, np.zeros(())
    return {
        n: own.get(n, none) + first.get(n, none) - second.get(n, none) for n in numbers
    }


def _distance(errors: Choice, bounds: Choice) -> float:
    each = (np.abs(errors[number] / own) ** 2 for number, own in bounds.items())
    return float(sum(map(np.sum, each)))
