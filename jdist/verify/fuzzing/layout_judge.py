"""Judges a trainer in one layout after the other, by references that are kept."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from jdist._errors import requirement, type_error
from jdist._tree import type_name
from jdist.verify.arguments import check_problem
from jdist.verify.fuzzing.layout_grid import Layout, named
from jdist.verify.fuzzing.verdict import Verdict, of_report
from jdist.verify.gradient_check import Reference
from jdist.verify.measure import ReducedLoss
from jdist.verify.processes.one_device import on_one_device
from jdist.verify.processes.peers import TIMEOUT, joined
from jdist.verify.report import Report
from jdist.verify.steps.step_check import step_judge
from jdist.verify.tracing.fault_localization import trace
from jdist.verify.tracing.report import Trace

STEPS = 2
"""Steps of a trainer with an optimizer: stale parameters show in the second."""


class FaultyProblem(ValueError):
    """A problem or its claim cannot be judged, whatever the trainer does."""


class _Refused(Exception):
    """The trainer says that it does not support a layout."""


@dataclass(frozen=True, eq=False)
class LayoutJudge:
    """The judge of one trainer; it measures each claim once.

    Attributes:
      problem: `problem(layout) -> params, batch`, or with weights.
      claim: `claim(layout) -> loss_fn`, or with an update and its first state.
      trainer: `trainer(layout) -> candidate`.
      model: The axes that the problem and the claim depend on.
    """

    problem: Callable[[Layout], Any]
    claim: Callable[[Layout], Any]
    trainer: Callable[[Layout], Callable[..., Any]]
    model: Sequence[str]
    _known: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False)

    def judge(self, layout: dict[str, Any]) -> Verdict:
        """The verdict on one layout.

        Raises:
          FaultyProblem: The problem or the claim cannot be judged.
        """
        judge, *_ = self._reference(layout)
        try:
            candidate = _guarded(_guarded(self.trainer)(layout))
            return of_report(layout, judge({"trainer": candidate}))
        except Exception as error:  # noqa: BLE001 - any is a finding, or a refusal
            text = "".join(traceback.format_exception(error))
            if isinstance(error, _Refused):
                return Verdict(layout, "refused", str(error), details=text)
            return Verdict(layout, "raised", _first_line(error), details=text)

    def trace(self, layout: dict[str, Any]) -> tuple[Trace | None, str]:
        """The first wrong value of a layout, or None and the reason."""
        _, claims, (params, batch, weights) = self._reference(layout)
        if len(claims) > 1:
            return None, "a step was judged: see the report's attributions"
        try:
            own = self.trainer(layout)
            return trace(claims[0], params, batch, own, weights=weights), ""
        except Exception as error:  # noqa: BLE001 - the finding stands without it
            return None, _first_line(error)

    def _reference(self, layout: Layout) -> tuple[Callable[..., Report], Any, Any]:
        """A claim's judge, with the claim, and its parameters, batch and weights."""
        own = {axis: layout[axis] for axis in self.model}
        key = tuple(own.values())
        if key not in self._known:
            try:
                terms = _terms(self.problem(own), self.claim(own))
                self._known[key] = self._measured(*terms), *terms
            except Exception as error:
                got = f"{_first_line(error)}, for {named(own) or 'the only claim'}"
                if isinstance(error, KeyError) and error.args[0] in layout:
                    got += f"; the axis {error.args[0]!r} is not in `model`"
                argument = "fuzz(problem=..., claim=...)"
                rule = "must give what can be judged, for all values of the axes in"
                words = requirement(argument, f"{rule} `model`", got)
                raise FaultyProblem(words) from error
        return self._known[key]

    def _measured(
        self, claims: tuple[Any, ...], given: tuple[Any, Any, Any]
    ) -> Callable[..., Report]:
        """The judge of one claim."""
        loss_fn, *update = claims
        params, batch, weights = given
        if update:
            step, *init = update
            state = params, init[0](params) if init else ()
            each = None if weights is None else [weights] * STEPS
            return step_judge(loss_fn, step, state, [batch] * STEPS, weights=each)
        with joined(TIMEOUT), on_one_device(given):
            check_problem("fuzz", loss_fn, params, batch, weights, "mean")
            loss = ReducedLoss(loss_fn, "mean", None)
            reference = Reference("fuzz", loss, *given, finite_differences=True)

        def judged(candidates: Mapping[str, Callable[..., Any]]) -> Report:
            with joined(TIMEOUT) as peers, on_one_device(given):
                return reference.judge(candidates, peers)

        return judged


def _terms(given: Any, claimed: Any) -> tuple[tuple[Any, ...], tuple[Any, Any, Any]]:
    """The claim's functions; parameters, batch and weights."""
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        rule = "must return (params, batch) or (params, batch, weights)"
        raise type_error("problem", rule, type_name(given))
    claims = claimed if isinstance(claimed, tuple) else (claimed,)
    if len(claims) not in (1, 2, 3):
        rule = "must return loss_fn, (loss_fn, update) or (loss_fn, update, init)"
        raise type_error("claim", rule, f"{len(claims)} results")
    params, batch, *weights = given
    return claims, (params, batch, weights[0] if weights else None)


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
