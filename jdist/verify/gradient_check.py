"""Judges candidates by the one-device gradient of a loss, and explains failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jdist._errors import check_flags, check_function, requirement
from jdist._tree import PyTree, named_leaves, type_name
from jdist.verify.arguments import check_candidates, check_options, check_problem
from jdist.verify.bound import (
    POOLED,
    Limit,
    confidence,
    confidence_in_norm,
    in_blocks,
    in_double,
    inner,
    unit_roundoff,
)
from jdist.verify.candidates import called, copied, excuse
from jdist.verify.comparison import Describe, Named, compare_leaves, renamed
from jdist.verify.explanations.uses import uses_counted
from jdist.verify.measure import Measured, ReducedLoss, trim
from jdist.verify.oracle import LossFn, gradient_of_sum
from jdist.verify.processes.one_device import as_the_caller, brought, on_one_device
from jdist.verify.processes.peers import TIMEOUT, Peers, joined
from jdist.verify.report import Attribution, LeafReport, OracleCheck, Report, looseness

LOSS = "(loss)"

Candidate = Callable[[PyTree, PyTree], tuple[jax.Array, PyTree]]
"""`candidate(params, batch) -> (loss, gradient)`."""

# Factors of the number of draws, in turn, before a leaf fails that is not grossly
# wrong; in smaller steps from fewer than FEW draws of each example on. Errors that few
# draws do not show, such as a decision that one program in a thousand takes otherwise,
# are small compared with a leaf.
LOOKS, FROM_FEW = (1, 16), (5, 16, 64)
FEW = 3
# The fewest draws that show a leaf to be wrong for certain are three.
FEWEST = 3

# The relative error, in the 2-norm, above which a leaf is grossly wrong.
GROSS = 0.005

# Most bounds are less than this many roundings of the leaf wide, in the 2-norm.
FAR = 2.0**12

# Maximum number of failing leaves to explain: each traces the loss again.
EXPLAINED = 8


def gradients(  # noqa: PLR0913 - options, by keyword
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    candidates: Mapping[str, Candidate],
    *,
    weights: ArrayLike | None = None,
    reduction: str = "mean",
    accumulation: DTypeLike | None = None,
    finite_differences: bool = True,
    names: Mapping[str, Named] | None = None,
) -> Report:
    """Judges ways to compute a loss and its gradient against `jax.value_and_grad`.

    The reference is computed on one device over the whole batch, so that the backward
    pass of an example begins with w / sum w for a mean. How far a right answer may be
    from it is derived from the number of examples, and from the magnitudes and the
    rounding of each example's own gradient, which are measured here (see
    `jdist.verify.bound`). The reference itself is compared with a finite difference.

    In a run of several processes (`jax.distributed`) every process calls it with the
    same arguments, and all get the same report: each has the reference for itself, and
    compares the shards of the candidates' arrays that it holds. Replicas of an array
    must have the same bits.

    Random numbers must not depend on how the batch is split: see `verify.keyed`. A
    failing candidate is *not judged* where the loss draws otherwise, or where its own
    answers change from call to call, for which it is called at most twice more.
    Each call is given copies of the parameters and the batch, which may be donated or
    overwritten. Where these lie on a mesh with explicit axes, or under `jax.set_mesh`,
    the reference has a mesh of the same axes, each of one device.

    Args:
      loss_fn: `loss_fn(params, batch)`: one loss per example, `(examples,)`, or a
        scalar. With a scalar the examples' own gradients cannot be seen: the bound then
        rests on the batch's gradient as a whole.
      params: Pytree; leaves that are not floating must have None as gradient.
      batch: Pytree; for losses per example each leaf is `(examples, ...)`.
      candidates: Name to `fn(params, batch) -> (loss, gradient)`.
      weights: `(examples,)`, at least 0, as in `data_parallel`. None for 1 each. An
        example of weight 0 is excluded: where its loss or gradient is not finite it is
        left out of the reference, unless others depend on it.
      reduction: "mean", "sum", "max" or "min".
      finite_differences: Whether the reference itself is compared with finite
        differences.
      accumulation: The dtype in which programs accumulate sums of 16-bit numbers. None
        for float32, as XLA's reductions and dot products do; the numbers' own dtype
        for programs that add them up one by one.
      names: For candidates in another framework, which may return its tensors: the
        parameters' paths to those of the candidates' gradients, as in `compare`.

    Returns:
      A `Report` with a row for the loss and for each leaf of each candidate. A leaf
      whose every digit may be lost to rounding is *not judged*, and the report not ok.

    Raises:
      ValueError: No candidates; no floating parameter; an unknown reduction; an
        accumulation that is no floating dtype; weights with a scalar loss, of the wrong
        shape, negative, not finite or all 0; a batch whose leaves differ in length, or
        have none; `names` that are no complete map, as in `compare`; a loss with
        shardings of a mesh that the reference does not have.
      TypeError: A candidate returned something other than a pair; the loss function
        wants a key.
      PeersLost: Another process raised, or did not come within 300 seconds;
        `gradients_judge` takes another number.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> loss = lambda w, x: (x @ w) ** 3
      >>> x, w = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), jnp.array([0.3, 0.4])
      >>> def half_and_rest(w, x):                       # 2 examples, then 1
      ...     f = jax.value_and_grad(lambda w, x: loss(w, x).mean())
      ...     (a, da), (b, db) = f(w, x[:2]), f(w, x[2:])
      ...     return (2 * a + b) / 3, (2 * da + db) / 3
      >>> gradients(loss, w, x, {"split": half_and_rest}).ok
      True

    References:
      The bound: `jdist.verify.bound`. Chex's `assert_numerical_grads` and torch's
      `gradcheck` compare with finite differences only.
    """
    names_of = "gradients", "gradients"
    judge = _judge(names_of, loss_fn, reduction, accumulation, TIMEOUT)
    return judge(
        params,
        batch,
        candidates,
        weights=weights,
        finite_differences=finite_differences,
        names=names,
    )


def gradients_judge(
    loss_fn: LossFn,
    *,
    reduction: str = "mean",
    accumulation: DTypeLike | None = None,
    timeout: float = TIMEOUT,
) -> Callable[..., Report]:
    """Builds a reusable `gradients` of one loss, which compiles once.

    For judging every step of a training run. What it returns is called like
    `gradients`, without the loss and its options:

        judge(
            params, batch, candidates, *,
            weights=None, finite_differences=True, names=None,
        ) -> Report

    One finite difference pins the reference: leave it out at later steps.

    Args:
      loss_fn: As in `gradients`.
      reduction: As in `gradients`.
      accumulation: As in `gradients`.
      timeout: Seconds to wait for other processes, at each point where they meet.

    Raises:
      ValueError: An unknown reduction or accumulation. On calling: as `gradients`.
      TypeError: On calling: as `gradients`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> judge = gradients_judge(lambda w, x: (x - w) ** 2)
      >>> x, w = jnp.array([1.0, 2.0, 4.0]), jnp.array(0.5)
      >>> right = lambda w, x: (((x - w) ** 2).mean(), -2 * (x - w).mean())
      >>> wrong = lambda w, x: (((x - w) ** 2).mean(), -2 * (x - w).sum())
      >>> judge(w, x, {"right": right}).ok, judge(w, x, {"wrong": wrong}).ok
      (True, False)
    """
    names = "gradients_judge", "gradients_judge(...)"
    return _judge(names, loss_fn, reduction, accumulation, timeout)


def _judge(
    names: tuple[str, str],
    loss_fn: LossFn,
    reduction: str,
    accumulation: DTypeLike | None,
    timeout: float,
) -> Callable[..., Report]:
    """Builds a judge; `names` are what takes the loss and what takes candidates."""
    maker, call = names
    check_options(maker, reduction, accumulation)
    check_function(f"{maker}(loss_fn=...)", loss_fn)
    # Its compiled programs serve every step of a run.
    loss = ReducedLoss(loss_fn, reduction, accumulation)

    def judge(
        params: PyTree,
        batch: PyTree,
        candidates: Mapping[str, Candidate],
        *,
        weights: ArrayLike | None = None,
        finite_differences: bool = True,
        names: Mapping[str, Named] | None = None,
    ) -> Report:
        """Judges candidates at these parameters on this batch."""
        given = params, batch, weights
        with joined(timeout) as peers, on_one_device(given):
            check_flags(call, finite_differences=finite_differences)
            check_candidates(call, candidates)
            check_problem(call, loss_fn, *given, reduction)
            reference = Reference(call, loss, *given, finite_differences)
            return reference.judge(candidates, peers, names)

    return judge


class Answer(NamedTuple):
    """What a candidate returned.

    Attributes:
      name: The candidate's name.
      leaves: Its loss, and its gradient's leaves by the reference's paths.
      peers: The processes that judge it.
    """

    name: str
    leaves: Mapping[str, Any]
    peers: Peers


class Reference:
    """The one-device gradient of a batch, which judges any number of candidates.

    Its bounds are measured once, and again with more draws where a candidate fails.

    Args:
      call: The public function that asks, for the errors' text.
      loss: The loss.
      params: The parameters, as the caller has them.
      batch: The batch, likewise.
      weights: The examples' weights, likewise.
      finite_differences: Whether the reference itself is checked.

    Attributes:
      counted: The examples that count.
      leaves: The loss and its gradient's leaves by path.
    """

    def __init__(
        self,
        call: str,
        loss: ReducedLoss,
        params: PyTree,
        batch: PyTree,
        weights: ArrayLike | None,
        finite_differences: bool,
    ) -> None:
        self._call = call
        self._loss = loss
        self._given = params, batch
        self._params, batch, weights = brought((params, batch, weights))
        self.counted, self._found = loss.reference(self._params, batch, weights)
        value, gradient = self._found
        self.leaves: dict[str, Any] = {LOSS: value, **named_leaves(gradient)}
        self._check = finite_differences
        self._oracle: OracleCheck | None = None
        self._measured: dict[int, Measured] = {}

    def judge(
        self,
        candidates: Mapping[str, Candidate],
        peers: Peers,
        names: Mapping[str, Named] | None = None,
    ) -> Report:
        """Judges candidates in turn."""
        calls = {
            name: partial(self._answer, name, candidate, peers, names)
            for name, candidate in candidates.items()
        }
        answers = {name: call() for name, call in calls.items()}
        rows: tuple[LeafReport, ...] = ()
        notes: tuple[str, ...] = ()
        for name, answer in answers.items():
            own, told = self._judged(answer, candidates[name], calls[name])
            rows += own
            notes += tuple(x for x in told if x not in notes)
        return agreed(Report(rows, self._oracle, notes + looseness(rows)), peers)

    def _judged(
        self, answer: Answer, candidate: Candidate, again: Callable[[], Answer]
    ) -> tuple[tuple[LeafReport, ...], tuple[str, ...]]:
        """The rows of one candidate, and notes."""
        # By looks of its own: a verdict must not depend on its neighbours.
        rows, measured = self._looked_at(answer)
        notes: tuple[str, ...] = ()
        if any(row.ratio > 1 for row in rows) and measured.choices().examples:
            measured = measured.undecided()
            rows, notes = self._decided(answer, measured)
        notes += measured.notes
        if any(row.ratio > 1 and row.problem for row in rows):
            drawn = gradient_of_sum(self._loss.loss_fn), *brought(self._given)
            asked = answer.name, candidate, self._given
            own = answer.leaves, lambda: again().leaves, measured.limits
            why, unsure = excuse(*asked, drawn, *own, answer.peers)
            if why:
                rows = self._rows(answer, measured, why)
            notes += unsure
            # Over several processes no host has a whole gradient to explain.
            if answer.peers.size == 1:
                notes += self._uses(answer, rows)
        return rows, notes

    def undecided(self) -> bool:
        """Whether there are decisions that rounding may turn."""
        return bool(list(self._measured.values())[-1].choices().examples)

    def _measure(self, more: int) -> Measured:
        if more not in self._measured:
            measured = self._loss.measure(
                self._params,
                self.counted,
                self._found,
                check=self._check and not self._measured,
                more=more,
            )
            self._oracle = self._oracle or measured.oracle
            self._measured[more] = measured
        return self._measured[more]

    def _answer(
        self,
        name: str,
        candidate: Candidate,
        peers: Peers,
        names: Mapping[str, Named] | None,
    ) -> Answer:
        with as_the_caller():
            result = called(self._call, name, candidate, self._given)
            if not isinstance(result, tuple) or len(result) != 2:
                rule = "must return (loss, gradient)"
                where, got = f"candidates[{name!r}](params, batch)", type_name(result)
                raise TypeError(requirement(where, rule, got))
            # Computed before the next call, which may overwrite what is copied here.
            loss, gradient = peers.computed(jax.tree.map(copied, result))
            if not (loss is None or isinstance(loss, jax.Array)):
                loss = np.asarray(loss)
            # A loss in a wider dtype than the reference's is judged in the reference's.
            number = loss is not None and loss.shape == ()
            if number and jnp.issubdtype(loss.dtype, jnp.floating):
                loss = loss.astype(self.leaves[LOSS].dtype)
            leaves = renamed(self._call, self._found[1], gradient, names)
            return Answer(name, {LOSS: loss, **leaves}, peers)

    def _looked_at(self, answer: Answer) -> tuple[tuple[LeafReport, ...], Measured]:
        """The rows of a candidate, and the measurement that decides about it."""
        looks: Sequence[int] = LOOKS
        if self._loss.draws(self._params, self.counted.batch) < FEW:
            # Over several processes no host has whole leaves.
            distance = self._distance(answer) if answer.peers.size == 1 else 0.0
            looks = _looks(distance)
        for more in looks:
            measured = self._measure(more)
            # To describe what fails takes longer than to find it.
            rows = self._rows(answer, measured, describe=lambda *_: "fails")
            failing = [row for row in rows if row.ratio > 1]
            doubtful = [self._may_be_right(x, answer, measured) for x in failing]
            if not any(doubtful):
                if not any(row.problem for row in rows):
                    return rows, measured
                return self._rows(answer, measured), measured
            # A leaf is wrong for certain, whatever more draws would say of the others.
            if not all(doubtful):
                break
        # What is in doubt still has the bound beyond which no draws explain it.
        measured = measured.widened()
        return self._rows(answer, measured), measured

    def _decided(
        self, answer: Answer, measured: Measured
    ) -> tuple[tuple[LeafReport, ...], tuple[str, ...]]:
        """The rows with what other choices explain.

        Where the candidate's own can be read off, the reference takes them; a note says
        so.
        """
        choices, rows = measured.choices(), self._rows(answer, measured)
        limits = {k: x for k, x in _limits(measured).items() if x is not None}
        wanted = dict(self.leaves)
        # Over several processes no host has whole leaves.
        if answer.peers.size == 1 and (
            taken := choices.read_off(list(limits), wanted, answer.leaves, limits)
        ):
            words, change = taken
            for number, path in enumerate(limits):
                leaf = in_double(wanted[path]) + change.get(number, 0.0)
                wanted[path] = leaf.astype(wanted[path].dtype)
            again = self._rows(answer, measured, wanted=wanted)
            if all(row.ratio <= 1 for row in again):
                return again, (f"{answer.name}: {words}",)
        return rows, ()

    def _distance(self, answer: Answer) -> float:
        """How far the worst leaf is off, over the width of most bounds."""
        distances = (
            _relative(wanted, own) / (FAR * unit_roundoff(wanted.dtype))
            for path, wanted in self.leaves.items()
            if path != LOSS
            and (own := answer.leaves.get(path)) is not None
            and np.shape(own) == np.shape(wanted)
            and jnp.issubdtype(np.asarray(own).dtype, jnp.inexact)
        )
        return max(distances, default=0.0)

    def _may_be_right(
        self, row: LeafReport, answer: Answer, measured: Measured
    ) -> bool:
        """Whether more draws might explain the difference of a failing leaf."""
        limit = _limits(measured).get(row.path)
        if limit is None:
            return False
        # Over several processes no host has whole leaves.
        if answer.peers.size > 1:
            return True
        wanted, own = self.leaves[row.path], answer.leaves[row.path]
        certain = row.ratio > limit.doubt or _in_norm(wanted, own, limit)
        return not (certain and _relative(wanted, own) > GROSS)

    def _rows(
        self,
        answer: Answer,
        measured: Measured,
        excuse: str = "",
        wanted: Mapping[str, Any] | None = None,
        describe: Describe | None = None,
    ) -> tuple[LeafReport, ...]:
        """A row for the loss and for each leaf; `wanted` is None for the reference."""
        name, found, peers = answer
        own, limits = wanted or self.leaves, _limits(measured)
        return compare_leaves(name, own, found, limits, peers, describe, excuse)

    def _uses(self, answer: Answer, rows: Sequence[LeafReport]) -> tuple[str, ...]:
        """Notes on failing leaves that lack some uses, or have some twice."""
        leaves = named_leaves(self._params)
        failing = {
            row.path: answer.leaves[row.path]
            for row in rows
            if row.problem
            and row.ratio > 1  # A number that is wrong, and none that is missing.
            and row.path in leaves
            and not jnp.iscomplexobj(answer.leaves[row.path])
        }
        # The first few show what is wrong.
        few = dict(islice(failing.items(), EXPLAINED))
        if not few:
            return ()
        # The comparison's arrays are freed: the gradients of the uses need as much.
        trim(self._params)
        batch, weights, _ = self.counted
        scalar = self._loss.scalar
        counts = uses_counted(lambda p: scalar(p, batch, weights), self._params, few)
        return tuple(
            f"{answer.name}: {path}: the uses that it counts: {words}"
            for path, words in counts.items()
        )


def _looks(distance: float) -> Sequence[int]:
    """Factors of a single draw, for a candidate that is so far off (`_distance`).

    One draw shows no leaf to be wrong for certain, and each look begins anew.
    """
    for first in (FEWEST, FROM_FEW[0]):
        if distance > confidence_in_norm(first) / confidence(1, POOLED):
            return first, *FROM_FEW[1:]
    return 1, *FROM_FEW


def _limits(measured: Measured) -> dict[str, Limit | None]:
    return {LOSS: measured.loss_limit, **measured.limits}


def _relative(expected: ArrayLike, found: ArrayLike) -> float:
    """The error of a leaf as a share of its size, in the 2-norm."""
    squares = np.zeros(2)
    with np.errstate(divide="ignore", invalid="ignore"):
        for wanted, own in in_blocks(expected, found):
            squares += [inner(x, x) for x in (own - wanted, wanted)]
        return float(np.sqrt(squares[0] / squares[1]))


def _in_norm(expected: ArrayLike, found: ArrayLike, limit: Limit) -> bool:
    """Whether no draws could explain a leaf's difference as a whole."""
    apart = np.linalg.norm(in_double(found) - in_double(expected))
    return bool(apart > limit.doubt_in_norm * np.linalg.norm(limit.bound))


def agreed(report: Report, peers: Peers) -> Report:
    """Makes the report the same on all processes."""
    if peers.size == 1:
        return report
    # Rows are merged already. These are those of process 0: on other hosts the last
    # digits may differ.
    shared: dict[str, Any] = {
        "oracle": OracleCheck | None,
        "notes": tuple[str, ...],
        "attributions": tuple[Attribution, ...],
    }
    own = {name: msgspec.to_builtins(getattr(report, name)) for name in shared}
    first = peers.exchange(own)[0]
    found = {name: msgspec.convert(first[name], kind) for name, kind in shared.items()}
    return replace(report, **found)
