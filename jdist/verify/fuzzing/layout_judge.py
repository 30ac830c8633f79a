"""Judges a trainer in one layout after the other, by references that are kept."""

import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from jdist._errors import requirement
from jdist._tree import type_name
from jdist.verify.arguments import check_problem
from jdist.verify.fuzzing.layout_grid import Layout, named
from jdist.verify.fuzzing.verdict import Verdict, of_report
from jdist.verify.gradient_check import Reference
from jdist.verify.measure import ReducedLoss
from jdist.verify.processes import TIMEOUT, joined, on_one_device
from jdist.verify.report import Report
from jdist.verify.steps import step_judge
from jdist.verify.tracing import Trace, trace

TRAINER = "trainer"
STEPS = 2
"""Steps of a trainer with an optimizer: stale parameters show in the second."""


class FaultyProblem(Exception):
    """A problem or its claim cannot be judged, whatever the trainer does."""


class _Refused(Exception):
    """The trainer says that it does not support a layout."""


class LayoutJudge:
    """The judge of one trainer; it measures each claim once.

    Args:
      problem: `problem(layout) -> params, batch`, or with weights.
      claim: `claim(layout) -> loss_fn`, or with an update and its first state.
      trainer: `trainer(layout) -> candidate`.
      model: The axes that the problem and the claim depend on.
      reduction: The reduction of the examples' losses, as in `verify.gradients`.
      finite_differences: Whether a loss is compared with its differences, likewise.
    """

    def __init__(
        self,
        problem: Callable[[Layout], Any],
        claim: Callable[[Layout], Any],
        trainer: Callable[[Layout], Callable[..., Any]],
        model: Sequence[str],
        reduction: str = "mean",
        finite_differences: bool = True,
    ) -> None:
        self._reduction = reduction
        self._checked = finite_differences
        self._problem = problem
        self._claim = claim
        self._trainer = trainer
        self._model = model
        self._judges: dict[tuple[Any, ...], Callable[..., Report]] = {}

    def judge(self, layout: dict[str, Any]) -> Verdict:
        """The verdict on one layout.

        Raises:
          FaultyProblem: The problem or the claim cannot be judged.
        """
        key = tuple(layout[axis] for axis in self._model)
        if key not in self._judges:
            self._judges[key] = self._defined(layout, self._reference)
        judge = self._judges[key]
        try:
            return of_report(layout, judge(_guarded(self._trainer)(layout)))
        except Exception as error:  # noqa: BLE001 - any is a finding, or a refusal
            text = "".join(traceback.format_exception(error))
            if isinstance(error, _Refused):
                return Verdict(layout, "refused", str(error), details=text)
            return Verdict(layout, "raised", _first_line(error), details=text)

    def trace(self, layout: dict[str, Any]) -> Trace | str:
        """The first wrong value of a layout, or why there is none."""
        terms = self._defined(layout, self._terms)
        (loss_fn, *update), (params, batch, weights) = terms
        if update:
            return "a step was judged: see the report's attributions"
        try:
            candidate = self._trainer(layout)
            return trace(
                loss_fn,
                params,
                batch,
                candidate,
                weights=weights,
                reduction=self._reduction,
            )
        except Exception as error:  # noqa: BLE001 - the finding stands without it
            return _first_line(error)

    def _defined(self, layout: Layout, make: Callable[[Layout], Any]) -> Any:
        """Calls what only depends on the model's axes, and tells its errors apart."""
        own = {axis: layout[axis] for axis in self._model}
        try:
            return make(own)
        except Exception as error:
            words = f"{_first_line(error)}, for {named(own) or 'the only claim'}"
            if isinstance(error, KeyError) and error.args[0] in layout:
                words += f"; the axis {error.args[0]!r} is not in `model`"
            raise FaultyProblem(words) from error

    def _terms(self, own: Layout) -> tuple[tuple[Any, ...], tuple[Any, Any, Any]]:
        """The claim, with its parameters, batch and weights."""
        given, claimed = self._problem(own), self._claim(own)
        if not isinstance(given, tuple) or len(given) not in (2, 3):
            rule = "must return (params, batch) or (params, batch, weights)"
            raise TypeError(requirement("problem", rule, type_name(given)))
        claims = claimed if isinstance(claimed, tuple) else (claimed,)
        if len(claims) not in (1, 2, 3):
            rule = "must return loss_fn, (loss_fn, update) or (loss_fn, update, init)"
            raise TypeError(requirement("claim", rule, f"{len(claims)} results"))
        params, batch, *weights = given
        return claims, (params, batch, weights[0] if weights else None)

    def _reference(self, own: Layout) -> Callable[[Callable[..., Any]], Report]:
        """The judge of one claim."""
        (loss_fn, *update), given = self._terms(own)
        params, batch, weights = given
        if update:
            step, *init = update
            state = params, init[0](params) if init else ()
            each = None if weights is None else [weights] * STEPS
            judge = step_judge(
                loss_fn,
                step,
                state,
                [batch] * STEPS,
                weights=each,
                reduction=self._reduction,
            )
            return lambda candidate: judge({TRAINER: _guarded(candidate)})
        with joined(TIMEOUT), on_one_device(given):
            check_problem("fuzz", loss_fn, params, batch, weights, self._reduction)
            loss = ReducedLoss(loss_fn, self._reduction, None)
            reference = Reference("fuzz", loss, *given, self._checked)

        def judged(candidate: Callable[..., Any]) -> Report:
            with joined(TIMEOUT) as peers, on_one_device(given):
                return reference.judge({TRAINER: _guarded(candidate)}, peers)

        return judged


def _guarded(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose refusals are told from errors of the judge."""

    # Marked as a wrapper: the judge looks for random numbers in what is wrapped.
    @wraps(fn)
    def guarded(*arguments: Any) -> Any:
        try:
            return fn(*arguments)
        except (ValueError, NotImplementedError) as error:
            raise _Refused(_first_line(error)) from error

    return guarded


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])
