"""Measures the magnitudes and rounding errors of the terms of each sum.

The gradient program of one example is traced once, in the user's own settings. It is
then run on each example alone, piece by piece (`piecewise`): in float64, several times
with every equation perturbed as rounding would, and as it is where that is needed: for
16 bits, for decisions, or where the reference's own error is larger than perturbations
explain. Small examples are run together, by `vmap`; their gradients stay apart. From
these come the sums over examples that `bound.Sums` lists. The backward pass of an
example begins with its share of the reduced loss, w / sum w for a mean, as that of the
whole batch does: a custom derivative rule may clip, round or take the sign of its
cotangent.

On the way the examples' losses are compared with those of the whole batch: if they
differ, examples influence each other (batch statistics), and no split of the batch can
give the same gradient; the report says so. An example alone then says nothing of the
batch's gradient, so that the batch is measured as one term, as with a scalar loss.

Losses can hide it, as those of `f - stop_gradient(f)` do. So the batch's gradient and
the sum of its examples' own are compared in float64 where a wrong gradient might pass
for it: where it is small beside the bound, or further than the bound from that sum.
A rule that adds a gradient of its own, of a loss over the batch, is found in this way.

Where a candidate fails, or examples seem to influence each other, and the program makes
decisions, those examples are looked for whose decisions rounding may turn: see
`evaluation.decisions`. Their losses and gradients may differ without any influence.
"""

import contextlib
import ctypes
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.typing import ArrayLike, DTypeLike

from jdist._compat import double_precision, equations_in
from jdist._tree import PyTree, examples_in, is_inexact, named_leaves
from jdist.verify.bound import (
    BLIND,
    LARGE,
    ROUNDINGS,
    Limit,
    Sums,
    Undecided,
    accumulated,
    choices_bound,
    confidence,
    in_blocks,
    in_double,
    inner,
    measured_bound,
    single_of,
    unit_roundoff,
    wide_of,
)
from jdist.verify.evaluation.decisions import (
    NATURAL,
    Changes,
    Choice,
    OtherChoices,
    chosen,
)
from jdist.verify.evaluation.lockstep import (
    PrecisionPair,
    RoundedSideNeeded,
    paired,
    summed,
)
from jdist.verify.evaluation.piecewise import (
    BOTH,
    EXACT,
    Abandoned,
    Pieces,
    Recording,
    drawn_form,
    kept_pieces,
    rounds_as_drawn,
)
from jdist.verify.evaluation.products import rounding_note
from jdist.verify.oracle import (
    Exact,
    LossFn,
    Middle,
    differentiated,
    finite_differences,
    own_rules,
    reduced,
    seeded,
)
from jdist.verify.progress import progress
from jdist.verify.report import OracleCheck

# Rounding moves an example's float64 loss by about 1e-15; a batch statistic by 1e-2.
COUPLED = math.sqrt(unit_roundoff("float64"))

# Draws of every term's error, all examples together, and at most for one example; fewer
# where all draws together would have more than WORK entries.
DRAWS, DRAWS_EACH, WORK = 128, 32, 2**23

# Entries of the largest value of the examples that are run together.
TOGETHER = 2**21

# Multiplications of a convolution up to which examples run together. There XLA's CPU
# kernel for many is faster than calls of that for one; at ten times as many
# multiplications it is four times slower, at a hundred times as many a hundred times.
CONVOLVED = 2**17

# Below the distance of two integers: a choice among them is right or wrong.
BETWEEN = 0.5

# Number of undecided examples that a note lists.
LISTED = 6

# Entries of parameters from which on freed memory is given back to the system.
HEAVY = 2**20

# float64 cannot be perturbed by less than its own unit. In a program that is all
# float64, larger perturbations are made, and their effect is divided by as much.
MAGNIFIED = 2.0**24


class Choices(NamedTuple):
    """Decisions that rounding may turn, and the changes of loss and gradient by them.

    Attributes:
      words: What decides within rounding; empty if nothing does.
      note: A sentence on it.
      examples: The examples in which it does, and other choices there; a batch that is
        one term is one example.
      changes: By number: 0 is the loss, floating leaves follow.
      factor: The factor of the changes: 2 for a batch that is one term.
      rows: The examples' numbers in the batch, if these are not all.
    """

    words: str = ""
    note: str = ""
    examples: Mapping[int, Sequence[Choice]] = {}
    changes: Mapping[int, Changes] = {}
    factor: float = 1.0
    rows: np.ndarray | None = None

    def undecided(self, number: int, limit: Limit | None) -> Limit | None:
        """The limit of a result with what other choices explain; None of an integer."""
        own = self.changes.get(number)
        if own is None:
            return limit
        if limit is None:
            total = own.entries.total
            limit = Limit(np.full(total.shape, BETWEEN), np.abs(total))
        explained = choices_bound(own.entries.total.size, NATURAL, *own.entries)
        in_norm = float(choices_bound(1, NATURAL, *own.norm))
        factor = self.factor
        found = Undecided(factor * explained, factor * in_norm, self.words)
        return limit._replace(undecided=found)

    def of_leaves(
        self, limits: Mapping[str, Limit | None], results: Sequence[str] = ()
    ) -> dict[str, Limit | None]:
        """The same of each leaf by path.

        `results` are the paths of all results in order; of none these are the loss and
        the floating leaves.
        """
        results = results or ["", *(path for path, x in limits.items() if x)]
        each = ((n, p) for n, p in enumerate(results) if p in limits)
        return {**limits, **{p: self.undecided(n, limits[p]) for n, p in each}}

    def read_off(
        self,
        paths: Sequence[str],
        wanted: Mapping[str, Any],
        found: Mapping[str, Any],
        limits: Mapping[str, Limit | None],
    ) -> tuple[str, Choice] | None:
        """The choices by which a candidate's leaves are right; None if by none.

        Args:
          paths: The leaves that results are, in their order.
          wanted: The reference's leaves by path.
          found: The candidate's; those of other shapes do not tell.
          limits: Limits of the leaves; None for integers.

        Returns:
          A note on it, and the changes of results by the candidate's choices.
        """
        errors, bounds = {}, {}
        for number, path in enumerate(paths):
            own, other, limit = wanted[path], found.get(path), limits[path]
            if other is not None and np.shape(other) == np.shape(own):
                # An entry without a bound decides about no choice.
                bound = np.full(
                    np.shape(own), BETWEEN if limit is None else limit.bound
                )
                bounds[number] = bound = np.where(bound > 0, bound, np.inf)
                error = in_double(other) - in_double(own)
                errors[number] = np.where(np.isfinite(bound), error, 0)
        taken = chosen(errors, bounds, self.examples)
        if taken is None or not taken[0]:
            return None
        examples, change = taken
        where = "" if self.factor > 1 else f" in example {self.listed(examples)}"
        words = f"decides otherwise than one device{where}, within rounding"
        return f"{words}: the reference takes its choices", change

    def listed(self, examples: Sequence[int]) -> str:
        """The numbers of some examples in the batch that was given."""
        own = examples if self.rows is None else self.rows[list(examples)].tolist()
        return ", ".join([*map(str, own[:LISTED]), *["..."] * (len(own) > LISTED)])


class Measured(NamedTuple):
    """Measurements of a problem, made before any candidate is judged."""

    limits: dict[str, Limit | None]
    """The limits of the parameters' leaves by path; None for a leaf without a
    gradient."""

    loss_limit: Limit
    """The limit of the loss itself."""

    oracle: OracleCheck | None
    """The finite-difference check; None if none was asked for."""

    notes: tuple[str, ...]

    choices: Callable[[], Choices]
    """Measures what decisions within rounding may change."""

    def undecided(self) -> "Measured":
        """With what other choices explain, of which there are some, and a note."""
        choices = self.choices()
        return self._replace(
            limits=choices.of_leaves(self.limits),
            loss_limit=choices.undecided(0, self.loss_limit) or self.loss_limit,
            notes=(*self.notes, choices.note),
        )

    def widened(self) -> "Measured":
        """With bounds for what is in doubt."""
        limits = {k: x and x.widened() for k, x in self.limits.items()}
        return self._replace(limits=limits, loss_limit=self.loss_limit.widened())


class Counted(NamedTuple):
    """A batch without the examples that are excluded by a weight of 0.

    Attributes:
      batch: Pytree, each leaf `(examples, ...)`.
      weights: `(examples,)`, or None for 1 each.
      rows: The numbers of these examples in the batch that was given; None if it has
        no others.
    """

    batch: PyTree
    weights: ArrayLike | None
    rows: np.ndarray | None = None


class ReducedLoss:
    """A loss and its reduction, whose compiled programs are kept between batches.

    Reductions of one loss may share `programs`: compiling them is most of a
    measurement.

    Attributes:
      loss_fn: The loss that was given.
      reduction: A key of `oracle.REDUCERS`.
      scalar: The reduced loss, a function `(params, batch, weights)`.
      programs: The programs of the loss itself.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        reduction: str,
        accumulation: DTypeLike | None,
        programs: "LossPrograms | None" = None,
    ) -> None:
        self.loss_fn = loss_fn
        self.reduction = reduction
        self.scalar = reduced(loss_fn, reduction)
        self.programs = programs or LossPrograms(loss_fn, accumulation)
        self._accumulation = accumulation
        self._value_and_gradient = jax.jit(differentiated(self.scalar))
        self._check = finite_differences(loss_fn, reduction)
        # Nothing of it is traced unless examples influence each other.
        self._of_whole = LossPrograms(lambda p, x: self.scalar(p, *x), accumulation)

    def reference(
        self, params: PyTree, batch: PyTree, weights: ArrayLike | None
    ) -> tuple[Counted, tuple[jax.Array, PyTree]]:
        """The examples that count, and the loss and gradient that they have.

        Examples of weight 0 are left out where they make the reference NaN: multiplied
        by 0, a loss of 0 / 0 or an infinite gradient is NaN. Where others depend on
        such examples, as by batch statistics, nothing is left out.
        """
        whole = Counted(batch, weights)
        found = self._value_and_gradient(params, batch, weights)
        finite = (np.isfinite(in_double(x)).all() for x in jax.tree.leaves(found))
        if weights is None or np.all(weights) or all(finite):
            return whole, found
        rows = np.flatnonzero(weights)
        batch = jax.tree.map(jnp.asarray, batch)
        kept = jax.tree.map(lambda x: x[rows], batch)
        losses = self.programs.losses
        together, apart = (losses(params, x).exact for x in (batch, kept))
        if _coupling(together[rows], apart):
            return whole, found
        counted = Counted(kept, np.asarray(weights)[rows], rows)
        return counted, self._value_and_gradient(params, *counted[:2])

    def draws(self, params: PyTree, batch: PyTree) -> int:
        """Draws of each example's errors in a first measurement."""
        return _draws(params, _leading(batch))

    def measure(
        self,
        params: PyTree,
        counted: Counted,
        reference: tuple[ArrayLike, PyTree],
        *,
        check: bool = False,
        more: int = 1,
    ) -> Measured:
        """Measures the bounds.

        Args:
          params: The parameters.
          counted: The batch.
          reference: The whole batch's loss and gradient, with which candidates are
            compared.
          check: Whether the reference is compared with finite differences.
          more: By how much the number of draws is multiplied.
        """
        batch, weights, rows = counted
        params, batch = jax.tree.map(jnp.asarray, (params, batch))
        trim(params)
        programs = self.programs
        losses = programs.losses(params, batch)
        apart = losses.shape != ()
        shares, notes = _shares(losses, weights, self.reduction)
        examples = int(np.count_nonzero(shares))
        terms = examples if apart else _leading(batch)
        draws = more * _draws(params, examples)
        given = params, batch, shares
        choices = cache(partial(programs.choices, *given, rows))
        bounded = partial(_bounded, params, reference, self._accumulation)
        found = programs.gradients(*given, draws)
        bounds = bounded(found.leaves, terms, (draws, draws * examples))
        coupled = _coupling(losses.exact, found.losses, rows) if apart else ()
        if not (bounds.explained or coupled):
            del bounds
            found = programs.gradients(*given, draws, as_it_rounds=True)
            bounds = bounded(found.leaves, terms, (draws, draws * examples))

        w = None if weights is None else jnp.asarray(weights, losses.dtype)
        if apart:
            hidden = partial(
                _hidden_coupling,
                reference[1],
                bounds.totals,
                exact=partial(self._of_whole.exact_gradient, params, (batch, w)),
                rules=partial(own_rules, losses.program.program),
            )
            coupled = coupled or hidden(bounds.limits)
            if coupled and (turned := list(choices().examples)):
                # Their decisions, and not other examples, may be what differs.
                coupled = _coupling(losses.exact, found.losses, rows, turned) or hidden(
                    choices().of_leaves(bounds.limits)
                )
        if coupled:
            terms, draws = _leading(batch), more * _draws(params, 1)
            given = params, (batch, w), np.ones(())
            found = self._of_whole.gradients(*given, draws, as_it_rounds=True)
            choices = cache(partial(self._of_whole.choices, *given))
            bounds = bounded(found.leaves, terms, (draws, draws))
        notes += coupled + found.notes + _accumulates(params, self._accumulation)
        oracle = None
        if check:
            known = Exact(bounds.totals, found.scatter, losses.middle(shares))
            trim(params)
            oracle = self._check(params, batch, weights, known=known)
        trim(params)
        return Measured(bounds.limits, bounds.of_loss, oracle, notes, choices)


class _Losses:
    """Losses of the whole batch in float64, evaluated when they are first asked for.

    Attributes:
      given: The parameters and the batch.
      program: The program that returns them.
      shape: Their shape.
      dtype: The dtype that the user sees.
    """

    def __init__(self, program: Pieces, given: tuple[PyTree, PyTree]) -> None:
        self.given, self.program = given, program
        aval: Any = program.program.out_avals[0]
        self.shape, self.dtype = aval.shape, aval.dtype
        self._recording: Recording = {}

    @cached_property
    def exact(self) -> np.ndarray:
        with double_precision(), jax.numpy_dtype_promotion("standard"):
            (found,) = self.program.exact(jax.tree.leaves(self.given), self._recording)
        return np.asarray(found.wide)

    def blur(self) -> float:
        """The largest rounding error of a loss in the dtype that is judged."""
        factor, form = magnified(self.program.program), BOTH._replace(drawn=True)
        leaves = jax.tree.leaves(self.given)
        with double_precision(), jax.numpy_dtype_promotion("standard"):
            (found,) = self.program.run(leaves, form, amplitude=factor, seed=1)
        rounded, perturbed = (
            float(np.max(np.abs(in_double(x) - self.exact)))
            for x in (found.rounded, found.wide)
        )
        return max(rounded, perturbed / factor)

    def middle(self, shares: np.ndarray) -> Middle:
        """Their run, for the loss of which they have these shares."""
        exact = self.exact
        return Middle(self.program, self.given, self._recording, exact, shares)


class _ExampleSums(NamedTuple):
    """What is measured of a batch's examples.

    Attributes:
      leaves: The sums of the loss, and then of each floating leaf of the gradient.
      losses: The examples' own losses.
      scatter: How far rounding scatters the batch's loss in float64, one deviation.
      notes: On what could not be measured, or was measured as the device rounds.
    """

    leaves: Iterator[Sums]
    losses: np.ndarray
    scatter: float
    notes: tuple[str, ...]


class LossPrograms:
    """The programs of one loss, traced in the user's settings, run piece by piece.

    They do not depend on the reduction or the weights.

    Attributes:
      pieces_of: The pieces of each program.
    """

    def __init__(self, loss_fn: LossFn, accumulation: DTypeLike | None) -> None:
        self.pieces_of = kept_pieces(accumulation)

        def summed(params: PyTree, batch: PyTree) -> jax.Array:
            return jnp.sum(loss_fn(params, batch))

        # Jitted, because `trace` then caches the program for each set of shapes.
        self._losses_of = jax.jit(loss_fn)
        self._summed = summed
        self._gradient_of = jax.jit(seeded(summed))
        self._gradients_of = jax.jit(jax.vmap(seeded(summed), in_axes=(0, None, 0)))

    def losses(self, params: PyTree, batch: PyTree) -> _Losses:
        """The losses of the whole batch."""
        program = self._losses_of.trace(params, batch).jaxpr
        return _Losses(self.pieces_of(program), (params, batch))

    def gradients(
        self,
        params: PyTree,
        batch: PyTree,
        shares: np.ndarray,
        draws: int,
        *,
        as_it_rounds: bool = False,
    ) -> _ExampleSums:
        """The sums over examples, and each example's own loss.

        With a scalar share the batch is one example. `as_it_rounds` asks for errors of
        the program itself, which are measured in any case where the float64 run needs
        its decisions or its roundings to 16 bits.
        """
        pieces, together = self._examples_program(params, batch, shares)
        found = _Examples(pieces, params, together > 1, as_it_rounds)
        losses = np.zeros(max(shares.size, 1))
        groups = -(-losses.size // together)
        # A tiny program is measured before a bar could be read.
        runs = 0 if pieces.tiny else groups * (1 + found.apart + draws)
        with (
            progress("measuring rounding", runs) as advance,
            double_precision(),
            jax.numpy_dtype_promotion("standard"),
        ):
            for group in _groups(batch, shares, together):
                values = found.add(group, draws, advance)
                losses[group.numbers[group.inside]] = values[group.inside]
        # Not after each group, which would get as many pages anew.
        trim(params)
        missed = ", ".join(sorted(pieces.missed))
        notes = rounding_note(pieces.program)
        if missed:
            words = f"the rounding of {missed} was not measured"
            notes += (f"{words}: there the bound is too narrow",)
        finer = unit_roundoff("float64") / unit_roundoff(found.drawn.wider("float32"))
        scatter = finer * math.sqrt(max(float(found.sums[0].variance), 0.0) / draws)
        return _ExampleSums(found.taken(draws), losses, scatter, notes)

    def choices(
        self,
        params: PyTree,
        batch: PyTree,
        shares: np.ndarray,
        rows: np.ndarray | None = None,
    ) -> Choices:
        """Measures decisions that rounding may turn.

        `rows` are the examples' numbers, if these are not all.
        """
        pieces, together = self._examples_program(params, batch, shares)
        if not pieces.decisions:
            return Choices()
        form, several = drawn_form(pieces.program), together > 1
        found = OtherChoices(pieces, form, several)
        with double_precision(), jax.numpy_dtype_promotion("standard"):
            own = _pairs(params)
            for group in _groups(batch, shares, together):
                if group.shares.any():
                    given = group.leaves(pieces.inputs[0].dtype, several, own)
                    found.add(given, group.numbers, group.shares, group.seed)
        return _choices(found, shares, rows)

    def exact_gradient(
        self, params: PyTree, batch: PyTree, cotangent: float = 1.0
    ) -> list[np.ndarray]:
        """The gradient of the whole batch in float64: its floating leaves in order."""
        program = self._program(params, batch)
        seed = jnp.asarray(cotangent, program.in_avals[0].dtype)
        trim(params)
        leaves = jax.tree.leaves((seed, params, batch))
        with double_precision(), jax.numpy_dtype_promotion("standard"):
            _, *exact = self.pieces_of(program).exact(leaves)
            return [np.asarray(x.wide) for x in exact]

    def _examples_program(
        self, params: PyTree, batch: PyTree, shares: np.ndarray
    ) -> tuple[Pieces, int]:
        """The gradient's program of some examples, and how many it takes together."""
        apart = shares.ndim > 0
        row = jax.tree.map(lambda x: x[:1], batch) if apart else batch
        program, together = self._program(params, row), 1
        if apart and _products_of_convolutions(program) <= CONVOLVED:
            largest = self.pieces_of(program).largest
            together = min(shares.size, max(1, TOGETHER // largest))
            # As many in each group.
            together = -(-shares.size // -(-shares.size // together))
        if together > 1:
            several = _rows(batch, np.arange(together))
            one = jax.ShapeDtypeStruct((together,), program.in_avals[0].dtype)
            program = self._gradients_of.trace(one, params, several).jaxpr
        return self.pieces_of(program), together

    def _program(self, params: PyTree, batch: PyTree) -> ClosedJaxpr:
        """The program `(cotangent, params, batch) -> (loss, gradient)`."""
        loss = jax.eval_shape(self._summed, params, batch)
        return self._gradient_of.trace(loss, params, batch).jaxpr


def trim(params: PyTree) -> None:
    """Gives freed memory back to the system, where parameters are large.

    glibc keeps freed blocks of up to 32 MiB, which most leaves are: with 124 M
    parameters as much as was in use. To get pages anew takes a tenth to a sixth of a
    judgement's time.
    """
    large = sum(x.size for x in jax.tree.leaves(params)) > HEAVY
    if large and sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # Of glibc only.
        if malloc_trim is not None:
            malloc_trim(0)


def _draws(params: PyTree, examples: int) -> int:
    """Draws of each example."""
    entries = sum(x.size for x in jax.tree.leaves(params))
    affordable = WORK // max(examples * entries, 1)
    return max(1, min(DRAWS_EACH, -(-DRAWS // examples), affordable))


def _products_of_convolutions(program: ClosedJaxpr) -> int:
    """The number of multiplications of its largest convolution."""
    largest = 0
    for each in equations_in(program):
        if each.primitive.name == "conv_general_dilated":
            result: Any = each.outvars[0]
            largest = max(largest, result.aval.size * summed(each))
    return largest


def _rows(batch: PyTree, numbers: np.ndarray | np.integer) -> PyTree:
    """Examples, each as a batch of one: `(examples, 1, ...)`, or `(1, ...)`."""
    if np.ndim(numbers):
        return jax.tree.map(lambda x: jnp.expand_dims(x[numbers], 1), batch)
    return jax.tree.map(lambda x: x[numbers : numbers + 1], batch)


class _Group(NamedTuple):
    """Examples that run together.

    Attributes:
      batch: Each a batch of one; the whole batch where it is one term.
      shares: Their shares; 0 for what fills up the last group.
      numbers: Their numbers.
      inside: Which of them do not fill up.
      seed: Seed of their errors.
    """

    batch: PyTree
    shares: np.ndarray
    numbers: np.ndarray
    inside: np.ndarray
    seed: int

    def leaves(self, dtype: Any, several: bool, params: Sequence[Any]) -> list[Any]:
        """The program's arguments."""
        own = jnp.asarray(self.shares if several else self.shares[0], jnp.float64)
        # As in the reference, whose share is rounded to the dtype of the losses.
        start = PrecisionPair(own.astype(dtype), own)
        return [start, *params, *jax.tree.leaves(self.batch)]


def _groups(batch: PyTree, shares: np.ndarray, together: int) -> Iterator[_Group]:
    """All examples; with a scalar share the batch is one."""
    size, apart = max(shares.size, 1), shares.ndim > 0
    for start in range(0, size, together):
        numbers = np.arange(start, start + together)
        # The last group is filled up with an example that does not count.
        inside = numbers < size
        numbers = np.where(inside, numbers, 0)
        own = np.where(inside, shares.reshape(-1)[numbers], 0.0)
        rows = batch
        if apart:
            rows = _rows(batch, numbers if together > 1 else numbers[0])
        yield _Group(rows, own, numbers, inside, start)


def _pairs(params: PyTree) -> list[Any]:
    """The leaves of parameters, all but large ones with a wide side of their own."""
    with double_precision():
        return [
            PrecisionPair(x, x.astype(wide_of(x.dtype)))
            if is_inexact(x) and x.size <= LARGE
            else x
            for x in jax.tree.leaves(params)
        ]


def choices_in(
    function: Callable[..., PyTree],
    state: PyTree,
    others: Sequence[np.ndarray],
    given: tuple[PyTree, ...],
    accumulation: DTypeLike | None,
) -> Choices:
    """Decisions that rounding may turn in a step, whose batch is one term.

    Args:
      function: `function(state, *given) -> results`.
      state: The state before the step.
      others: Each floating leaf of the states of right trainers, in float64; the first
        is exact.
      given: Further arguments.
      accumulation: The dtype in which sums of 16-bit numbers are accumulated.
    """
    program = jax.make_jaxpr(function)(state, *given)
    pieces, each = Pieces(program, accumulation, {}), []
    for own in zip(*others, strict=True):
        pairs = paired(jax.tree.leaves(state), own)
        each.append([*pairs, *jax.tree.leaves(given)])
    found = OtherChoices(pieces, drawn_form(program), several=False)
    if pieces.decisions:
        with double_precision(), jax.numpy_dtype_promotion("standard"):
            found.add(each[0], np.zeros(1, int), np.ones(1), 1, each[1:])
    return _choices(found, np.ones(()), None)


def _choices(
    found: OtherChoices, shares: np.ndarray, rows: np.ndarray | None
) -> Choices:
    """What decisions within rounding change, in words and numbers."""
    several, names = len(found.examples), ", ".join(sorted(found.pieces.decisions))
    if not several:
        return Choices()
    words, factor = f"there are decisions that rounding may turn ({names})", 2.0
    where = ""
    if shares.ndim > 0:
        have = "have decisions" if several > 1 else "has a decision"
        total = np.count_nonzero(shares)
        words = f"{several} of {total} examples {have} that rounding may turn ({names})"
        where, factor = f": {Choices(rows=rows).listed(sorted(found.examples))}", 1.0
    note = (
        f"{words}{where}. A right program may decide otherwise, and what only that "
        f"explains is not judged"
    )
    return Choices(words, note, found.examples, found.changes, factor, rows)


class _Examples:
    """Sums over examples, taken from runs of their gradients' program.

    Args:
      pieces: The program `(cotangent, params, batch) -> (loss, gradient)`.
      params: The parameters.
      several: Whether it takes several examples, along axis 0 of all but `params`.
      as_it_rounds: Whether the program is to run as it rounds.

    Attributes:
      drawn: The form of its draws.
      apart: Whether it runs as it rounds by itself, and not beside that in float64.
      sums: The sums of each result; as variance the sum of all draws' squares.
    """

    def __init__(
        self, pieces: Pieces, params: PyTree, several: bool, as_it_rounds: bool
    ) -> None:
        self.drawn = drawn_form(pieces.program)
        # By how much perturbations exceed rounding.
        self._factor = magnified(pieces.program)
        self._twofold = pieces.deciding > 0 or not rounds_as_drawn(pieces.program)
        self.apart = as_it_rounds and not self._twofold
        self._pieces, self._several = pieces, several
        self._params = _pairs(params)
        self.sums: dict[int, Sums] = {}
        # The sums of squares of errors as the program rounds.
        self._squares: dict[int, jax.Array] = {}

    def add(self, group: _Group, draws: int, advance: Callable[[], None]) -> np.ndarray:
        """Adds examples with their shares; returns their losses.

        `advance` is called after each run.
        """
        leaves = group.leaves(self._pieces.inputs[0].dtype, self._several, self._params)
        # The gradient has the share already, with which its pass began.
        counts = np.asarray(group.shares > 0, np.float64)
        exact: dict[int, jax.Array] = {}

        def factor(number: int) -> np.ndarray:
            return group.shares if number == 0 else counts

        def receive(number: int, value: PrecisionPair) -> None:
            exact[number] = value.wide
            self._add(number, value, factor(number))
            if value.rounded is not None:
                receive_rounded(number, value.rounded)

        def receive_rounded(number: int, rounded: jax.Array) -> None:
            sums = self.sums[number]
            before = sums.drift, self._squares.get(number)
            given = exact[number], rounded, factor(number) / sums.scale
            drift, self._squares[number] = _drifted(before, sums.variance, *given)
            self.sums[number] = sums._replace(drift=drift)

        def draw(number: int, value: PrecisionPair) -> None:
            sums = self.sums[number]
            share = factor(number) / (self._factor * sums.scale)
            variance = _drawn(sums.variance, value.wide, exact[number], share)
            self.sums[number] = sums._replace(variance=variance)

        with self._compiled_beside(leaves):
            recording = self._measured(leaves, receive)
        advance()
        losses = np.asarray(exact[0]).reshape(-1)
        if not counts.any():
            return losses
        if self.apart and not self._twofold:
            self._pieces.run(
                leaves,
                self.drawn,
                receive=lambda number, value: receive_rounded(number, value.wide),
            )
            advance()
        for each in range(draws):
            self._pieces.run(
                leaves,
                self.drawn,
                amplitude=self._factor,
                # A prime above the number of draws: no two draws share a seed.
                seed=group.seed * 65537 + each + 1,
                replay=recording,
                receive=draw,
            )
            advance()
        return losses

    def _measured(
        self, leaves: list[Any], receive: Callable[[int, PrecisionPair], None]
    ) -> Recording:
        """Runs the program in float64, and as it rounds where that is another form."""
        recording = Recording()
        form = EXACT._replace(sized=True, sizes=self.drawn.wider)
        if not self._twofold:
            try:
                self._pieces.run(leaves, form, receive=receive)
                return recording
            except RoundedSideNeeded:
                # Only the first run finds that out.
                self.sums.clear()
                self._twofold = True
        form = form._replace(rounded=True)
        self._pieces.run(leaves, form, recording=recording, receive=receive)
        return recording

    @contextlib.contextmanager
    def _compiled_beside(self, leaves: list[Any]) -> Iterator[None]:
        """Compiles the pieces of a draw on another thread, the first time."""
        # Decisions are not known yet, and a mesh that is set is that of its thread.
        on_mesh = not jax.sharding.get_abstract_mesh().empty
        if self.sums or self._pieces.deciding or on_mesh:
            yield
            return

        def draw() -> None:
            with (
                double_precision(),
                jax.numpy_dtype_promotion("standard"),
                contextlib.suppress(RoundedSideNeeded, Abandoned),
            ):
                self._pieces.run(leaves, self.drawn, receive=lambda *_: None)

        with futures.ThreadPoolExecutor(1) as beside:
            done = beside.submit(draw)
            try:
                yield
            except BaseException:
                with self._pieces.abandoned():
                    futures.wait([done])
                raise
            done.result()

    def _add(self, number: int, value: PrecisionPair, factor: np.ndarray) -> None:
        sums = self.sums.get(number) or self._nothing(value.wide)
        made = _added(sums[:3], value.wide, value.size, factor, sums.scale)
        self.sums[number] = sums._replace(**made)

    def _nothing(self, wide: jax.Array) -> Sums:
        """The sums over no example; `wide` are the results of the first ones."""
        shape = wide.shape[1:] if self._several else wide.shape
        # In single precision squares may be too small, or too large.
        large = math.prod(shape) > LARGE and self.drawn.wider is single_of
        top = float(jnp.max(jnp.abs(wide), initial=0)) if large else 1.0
        usable = large and 0 < top < math.inf
        scale = np.float64(2.0 ** round(math.log2(top)) if usable else 1.0)
        total = jnp.zeros(shape, wide.dtype)
        dtype = single_of(wide.dtype) if large else wide.dtype
        # An array for each, since each is overwritten.
        sizes = (jnp.zeros(shape, dtype).real for _ in range(3))
        return Sums(total, next(sizes), next(sizes), None, next(sizes), scale)

    def taken(self, draws: int) -> Iterator[Sums]:
        """The sums result by result; those that were taken are not kept."""
        for number in sorted(self.sums):
            own = self.sums.pop(number)
            variance = np.asarray(own.variance) / draws
            if number in self._squares:
                # Either estimate of the variance alone may be too small by chance.
                variance = np.maximum(self._squares.pop(number), variance)
            own = own._replace(variance=variance)
            yield jax.tree.map(np.asarray, own)


@partial(jax.jit, donate_argnums=0)
def _added(
    sums: tuple[jax.Array, jax.Array, jax.Array],
    exact: jax.Array,
    size: jax.Array | None,
    factor: jax.Array,
    scale: float,
) -> dict[str, jax.Array]:
    """The total, magnitude and square of `Sums` with further examples, by name.

    The factors, one for each example, are 0 for those that do not count.
    """
    total, magnitude, square = sums
    exact, factor = _of_examples(exact, factor, total)
    largest = factor * jnp.abs(exact) / scale
    # Larger than the value where the terms of its last sum cancel.
    free = largest
    if size is not None:
        free = jnp.maximum(largest, factor * size.reshape(exact.shape) / scale)
    return {
        "total": _plus(total, factor * exact, factor),
        "magnitude": _plus(magnitude, largest, factor),
        "square": _plus(square, free**2, factor),
    }


@jax.jit
def _drifted(
    before: tuple[jax.Array | None, jax.Array | None],
    like: jax.Array,
    exact: jax.Array,
    rounded: jax.Array,
    factor: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The sums of errors and of their squares with examples as the program rounds.

    Those before are None without any; the squares are then made like another sum.
    """
    exact, factor = _of_examples(exact, factor, like)
    rounded = rounded.reshape(exact.shape).astype(exact.dtype)
    error, (drift, square) = factor * (rounded - exact), before
    if drift is None or square is None:
        square = jnp.zeros_like(like)
        dtype = error.dtype
        drift = square.astype(single_of(dtype) if like.dtype == jnp.float32 else dtype)
    return _plus(drift, error, factor), _plus(square, jnp.abs(error) ** 2, factor)


@partial(jax.jit, donate_argnums=0)
def _drawn(
    variance: jax.Array, drawn: jax.Array, exact: jax.Array, factor: jax.Array
) -> jax.Array:
    """The sum of squares with those of a draw's errors."""
    exact, factor = _of_examples(exact, factor, variance)
    error = factor * (drawn.reshape(exact.shape).astype(exact.dtype) - exact)
    return _plus(variance, jnp.abs(error) ** 2, factor)


def _of_examples(
    values: jax.Array, factor: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Values of each example, along axis 0, and the factors beside them."""
    rows = factor.reshape(-1, *[1] * total.ndim)
    return values.reshape(factor.size, *total.shape), rows


def _plus(total: jax.Array, terms: jax.Array, factor: jax.Array) -> jax.Array:
    """The total with the terms that count."""
    return total + jnp.sum(jnp.where(factor > 0, terms, 0), 0).astype(total.dtype)


def magnified(program: ClosedJaxpr) -> float:
    """The factor by which a program's perturbations exceed its rounding.

    It is 1 unless all floating dtypes in the program are float64.
    """
    variables = (
        x for each in equations_in(program) for x in each.invars + each.outvars
    )
    dtypes = {getattr(x.aval, "dtype", jnp.dtype(int)) for x in variables}
    floating = [x for x in dtypes if jnp.issubdtype(x, jnp.inexact)]
    return 1.0 if any(jnp.finfo(x).bits < 64 for x in floating) else MAGNIFIED


class _Bounds(NamedTuple):
    """What is known of a batch's gradient.

    Attributes:
      of_loss: The limit of the loss.
      limits: Those of the parameters' leaves; None for a leaf without a gradient.
      totals: The exact gradient's floating leaves.
    """

    of_loss: Limit
    limits: dict[str, Limit | None]
    totals: list[np.ndarray]

    @property
    def explained(self) -> bool:
        """Whether they explain the reference's own errors, where these stand for D."""
        limits = self.of_loss, *self.limits.values()
        return all(limit is None or limit.explained for limit in limits)


def _bounded(
    params: PyTree,
    reference: tuple[ArrayLike, PyTree],
    accumulation: DTypeLike | None,
    sums: Iterator[Sums],
    terms: int,
    draws: tuple[int, int],
) -> _Bounds:
    totals = []

    def bound(given: ArrayLike) -> Limit:
        own, dtype = next(sums), jnp.result_type(given)
        totals.append(own.total)
        adding = accumulated(dtype, accumulation)
        # Where no program ran as it rounds, the reference's own error stands for D.
        known = given if own.drift is None else None
        return measured_bound(dtype, own, terms, draws, adding, known)

    value, gradient = reference
    of_loss, leaves = bound(value), named_leaves(gradient)
    limits = {
        path: bound(leaves[path]) if is_inexact(leaf) else None
        for path, leaf in named_leaves(params).items()
    }
    return _Bounds(of_loss, limits, totals[1:])


def _accumulates(params: PyTree, accumulation: DTypeLike | None) -> tuple[str, ...]:
    """A note on how 16-bit sums are taken to be accumulated, where there are any."""
    dtypes = [x.dtype for x in jax.tree.leaves(params) if is_inexact(x)]
    narrow = sorted({d.name for d in dtypes if accumulated(d, None) != d})
    if not narrow:
        return ()
    chosen = jnp.dtype(accumulated(jnp.dtype(narrow[0]), accumulation)).name
    return (f"sums of {', '.join(narrow)} are taken to be accumulated in {chosen}",)


def _coupling(
    together: np.ndarray,
    alone: np.ndarray,
    rows: np.ndarray | None = None,
    turned: Sequence[int] = (),
) -> tuple[str, ...]:
    """A note if losses differ.

    Args:
      together: Those of the batch.
      alone: Those of each example alone.
      rows: The examples' numbers, if these are not all.
      turned: The places of those whose decisions rounding may turn, which tell nothing
        unless all of them are.
    """
    if 0 < len(turned) < len(together):
        alone = alone.copy()
        alone[list(turned)] = together[list(turned)]
    # One loss that is NaN or infinite must not hide how large the others are.
    slack = COUPLED * np.abs(together[np.isfinite(together)]).max(initial=0)
    if np.allclose(alone, together, rtol=0, atol=slack, equal_nan=True):
        return ()
    with np.errstate(invalid="ignore"):
        example = int(np.argmax(np.abs(alone - together)))
    number = example if rows is None else rows[example]
    return (
        f"examples influence each other: example {number} has a loss of "
        f"{together[example]:.6g} in the batch and of {alone[example]:.6g} alone. No "
        f"split of the batch reproduces this gradient.",
    )


def _hidden_coupling(
    gradient: PyTree,
    sums: Sequence[np.ndarray],
    limits: dict[str, Limit | None],
    *,
    exact: Callable[..., list[np.ndarray]],
    rules: Callable[[], list[str]],
) -> tuple[str, ...]:
    """A note if the batch's exact gradient is not the sum of its examples' own.

    `sums` are these, leaf by leaf. `exact` computes that of the batch, for a cotangent
    of the loss, and is called only where it may matter; `rules` gives the users'
    derivative rules in the loss.
    """
    leaves, own = named_leaves(gradient), rules()
    known = [(path, limit) for path, limit in limits.items() if limit is not None]
    if not any(
        _is_doubtful(leaves[path], total, limit, adding=bool(own))
        for (path, limit), total in zip(known, sums, strict=True)
    ):
        return ()
    # Without a cotangent of the loss, what is left is what derivative rules add.
    added = map(np.nan_to_num, exact(0.0)) if own else [np.zeros(())] * len(known)
    for (path, limit), total, whole, part in zip(
        known, sums, exact(), added, strict=True
    ):
        unit = unit_roundoff(leaves[path].dtype)
        finer = min(1, ROUNDINGS * unit_roundoff("float64") / unit)
        apart = np.abs(whole - total)
        # Decisions are those of the rounded programs (see `lockstep`), of which the
        # batch's may take some otherwise: a small part of the gradient.
        large = BLIND * np.linalg.norm(part if part.any() else whole)
        allowed = finer * limit.bound
        if limit.undecided is not None:
            large += limit.undecided.in_norm
            allowed = allowed + limit.undecided.bound
        if np.linalg.norm(apart) > large and (apart > allowed).any():
            adds = f" through what a rule adds ({', '.join(own)})"
            return (
                f"examples influence each other{adds if part.any() else ''}: the "
                f"batch's exact gradient at {path} and the sum of its examples' own "
                f"are {apart.max():.1e} apart. No split of the batch reproduces this "
                f"gradient.",
            )
    return ()


def _is_doubtful(given: jax.Array, total: Any, limit: Limit, *, adding: bool) -> bool:
    """Whether a wrong leaf might pass, should the examples influence each other.

    `adding` says whether derivative rules may add to it.
    """
    off, used, squares = False, False, np.zeros(2)
    for leaf, exact, bound in in_blocks(given, total, limit.bound):
        # A NaN is no sum's, and is reported where it is compared.
        off |= bool((np.abs(leaf - exact) > bound).any())
        # An unused leaf has a gradient of 0, and a bound for numbers near it.
        used |= bool(leaf.any() or exact.any())
        unmeasured = ~np.isfinite(bound)
        bound[unmeasured] = leaf[unmeasured] = 0
        squares += [inner(x, x) for x in (bound, leaf)]
    width, size = np.sqrt(squares)
    # A large part of the leaf is looked for, or of what rules add, which may be small.
    seen = min(BLIND / 2, ROUNDINGS * unit_roundoff(given.dtype) if adding else 1.0)
    return off or bool(used and width > seen * size)


def _shares(
    whole: _Losses, weights: ArrayLike | None, reduction: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The factors c_i of the examples' gradients in the gradient of the batch.

    Under max and min rounding may decide which example counts, so that an extreme that
    leads by less than the losses' blur is a note.
    """
    w = np.ones(whole.shape) if weights is None else np.asarray(weights, np.float64)
    if not whole.shape or reduction == "sum":
        return w, ()
    if reduction == "mean":
        return w / w.sum(), ()
    losses = whole.exact
    sign = 1 if reduction == "max" else -1
    ranked = np.where(w > 0, sign * losses, -np.inf)
    ties = ranked == ranked.max()
    rest = ranked[~ties].max(initial=-np.inf)
    gap = ranked.max() - rest
    # The lead must exceed what rounding may do to either of the two losses.
    if gap > confidence(losses.size) * whole.blur():
        return ties / ties.sum(), ()
    note = (
        f"the {reduction} leads by {gap:.1e} only: rounding decides which example's "
        f"gradient is taken"
    )
    return ties / ties.sum(), (note,)


def _leading(batch: PyTree) -> int:
    """The number of examples behind a scalar loss; 1 where leaves differ in length."""
    lengths = {np.shape(leaf)[:1] for leaf in named_leaves(batch).values()}
    return (
        examples_in(batch, "gradients")
        if len(lengths) == 1 and () not in lengths
        else 1
    )
