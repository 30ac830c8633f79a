"""Mutation testing of a user's test: the planted defects that it notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jdist._errors import VerificationError, requirement
from jdist._tree import type_name
from jdist.verify.defects import ALL, Defect, NotApplicable, PlantedStep, Traits
from jdist.verify.report import as_text

Outcome = Literal["noticed", "missed", "cannot show", "not applicable", "crashed"]

_STYLES = {
    "noticed": "green",
    "missed": "bold red",
    "cannot show": "bold red",
    "crashed": "bold yellow",
    "not applicable": "dim",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a test, with one defect planted.

    Attributes:
      defect: The defect.
      outcome: "noticed": the test failed. "missed": it passed. "cannot show": it passed
        or ended, and on its data the wrong step returned the right results. "not
        applicable": the step cannot have the defect. "crashed": an exception came out
        of the test that is no failed claim, or out of the step.
      size: The largest relative distance of a wrong leaf from the right one.
      reason: The test's message, or why the defect has no effect.
    """

    defect: Defect
    outcome: Outcome
    size: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """The result of mutation testing: `print` it, `assert` it, or `raise_if_missed`.

    It is true where `ok` is.

    Attributes:
      unfit: Why the test proves nothing: it does not pass the right step; else empty.
      trials: One trial for each defect, with `defect`, `outcome`, `size` (of the
        effect) and `reason`; none if the test is unfit.
    """

    unfit: str
    trials: tuple[Trial, ...]

    def having(self, *outcomes: Outcome) -> tuple[Trial, ...]:
        """The trials with one of these outcomes."""
        return tuple(trial for trial in self.trials if trial.outcome in outcomes)

    @property
    def overlooked(self) -> tuple[Trial, ...]:
        """The trials that the test missed, or that its data cannot show."""
        return self.having("missed", "cannot show")

    @property
    def ok(self) -> bool:
        """Whether the right step passes and each defect that applies is noticed."""
        wanting = self.having("missed", "cannot show", "crashed")
        # A test to which no defect applies has shown nothing.
        return bool(self.having("noticed")) and not wanting

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_missed(self) -> Score:
        """Returns the score if it is ok.

        Raises:
          VerificationError: The test fails on the right step, misses a defect or
            crashes; the message names each.
        """
        if self.ok:
            return self
        trials = self.having("missed", "cannot show", "crashed")
        lines = [f"{t.defect.name}: {t.outcome}. {t.reason}".strip() for t in trials]
        raise VerificationError("\n  ".join([self._summary(), *lines]))

    def _summary(self) -> str:
        if self.unfit:
            return f"nothing was planted: {self.unfit}"
        noticed, missed = len(self.having("noticed")), len(self.overlooked)
        crashed, rest = len(self.having("crashed")), len(self.having("not applicable"))
        parts = [f"{noticed} of {noticed + missed + crashed} defects noticed"]
        parts += [f"{missed} overlooked"] if missed else []
        parts += [f"{crashed} crashed"] if crashed else []
        parts += [f"{rest} not applicable"] if rest else []
        return ", ".join(parts)

    def __rich__(self) -> Group:
        """A table for a rich console."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("defect")
        table.add_column("effect", justify="right")
        table.add_column("outcome")
        table.add_column("because", overflow="fold")
        for trial in self.trials:
            size = f"{trial.size:.1e}" if trial.size else ""
            outcome = Text(trial.outcome, style=_STYLES[trial.outcome])
            table.add_row(trial.defect.name, size, outcome, Text(trial.reason))
        return Group(*([table] if self.trials else []), Text(self._summary()))

    def __str__(self) -> str:
        """The table as plain text."""
        return as_text(self)


def score(
    test: Callable[[Callable[..., Any]], bool | None],
    step: Callable[..., Any],
    traits: Traits | None = None,
    *,
    planted: Sequence[Defect] | None = None,
    notices: tuple[type[BaseException], ...] = (AssertionError,),
) -> Score:
    """Runs a test against a right step, and against the step with each defect in it.

    Args:
      test: `test(step)`: notices a wrong step by raising one of `notices` or by
        returning False; passes by returning True or None. It is run once for each
        defect. What else it raises is a crash and not counted as noticing.
      step: A right step, as in `Defect.plant`.
      traits: What is known of the step; None for `Traits()`.
      planted: Which defects; None for all of the step's kind.
      notices: The exceptions that count as noticing. For `pytest.fail` add
        `pytest.fail.Exception`.

    Returns:
      A `Score`. A defect that changes nothing on the test's data, such as ignored
      weights where all are 1, counts as missed: its outcome is "cannot show".

    Raises:
      ValueError: There is no defect to plant.
      TypeError: The test returned something other than a bool or None.

    Example:
      A test on equal parts, with a loose tolerance:

      >>> import jax, jax.numpy as jnp
      >>> from jdist.verify import defects, score
      >>> def loss(w, batch):
      ...     errors = (batch["x"] @ w) ** 2
      ...     return (batch["mask"] * errors).sum() / batch["mask"].sum()
      >>> step = jax.jit(jax.value_and_grad(loss))
      >>> batch = {"x": jnp.arange(24.0).reshape(8, 3), "mask": jnp.ones(8)}
      >>> w = jnp.array([0.1, 0.2, 0.3])
      >>> right = step(w, batch)[1]
      >>> def test(step):
      ...     return bool(jnp.allclose(step(w, batch)[1], right, rtol=1e-2))
      >>> found = score(test, step, defects.Traits(weights="mask"))
      >>> [trial.defect.name for trial in found.overlooked]
      ['factor 1.001', 'mean of means', 'bfloat16 accumulation', 'weights ignored',
       'stale parameters']

    References:
      Mutation testing: DeMillo, Lipton and Sayward, Hints on Test Data Selection,
      IEEE Computer 11(4), 1978.
    """
    given = traits or Traits()
    kind = tuple(defect for defect in ALL if given.kind in defect.kinds)
    chosen = kind if planted is None else tuple(planted)
    if not chosen:
        rule = "must have at least one defect"
        raise ValueError(requirement("score(planted=...)", rule, "none"))
    outcome, reason = _outcome(test, step, notices)
    # A test that passes has noticed nothing, as it must on a right step.
    if outcome != "missed":
        return Score(f"the test does not pass on the right step: {reason}", ())
    trials = (_trial(test, step, given, defect, notices) for defect in chosen)
    return Score("", tuple(trials))


def _trial(
    test: Callable[..., Any],
    step: Callable[..., Any],
    traits: Traits,
    defect: Defect,
    notices: tuple[type[BaseException], ...],
) -> Trial:
    """One run of the test, with the defect planted where it can be."""
    if traits.kind not in defect.kinds:
        reason = f"no step of kind {traits.kind!r} can have it"
        return Trial(defect, "not applicable", reason=reason)
    # Silent: an exception raised to the test would count as noticed or crashed.
    planted = PlantedStep(defect, step, traits, silent=True)
    outcome, reason = _outcome(test, planted, notices)
    if planted.size:
        return Trial(defect, outcome, planted.size, reason)
    if outcome in ("noticed", "crashed"):
        reason = f"although each result was right, the test {outcome}: {reason}"
        return Trial(defect, "crashed", reason=reason)
    if not planted.refusals:
        return Trial(defect, "cannot show", reason="the test does not call the step")
    why = planted.refusals[-1]
    never = isinstance(why, NotApplicable)
    return Trial(defect, "not applicable" if never else "cannot show", reason=str(why))


def _outcome(
    test: Callable[..., Any],
    step: Callable[..., Any],
    notices: tuple[type[BaseException], ...],
) -> tuple[Outcome, str]:
    """Runs the test once; returns its outcome and its message."""
    try:
        result = test(step)
    # What `pytest.fail` raises is no `Exception`.
    except BaseException as error:
        if not isinstance(error, notices) and not isinstance(error, Exception):
            raise  # Such as Ctrl-C.
        lines = str(error).strip().splitlines()
        said = ": ".join([type(error).__name__, *lines[:1]])
        # The step crashed, which is not the test's judgement of a result.
        if isinstance(step, PlantedStep) and error is step.error:
            return "crashed", f"the step itself raised {said}"
        return ("noticed" if isinstance(error, notices) else "crashed"), said
    if result is None:
        return "missed", ""
    # Booleans of NumPy and JAX are accepted; an array or a number is a mistake.
    if np.shape(result) or np.asarray(result).dtype != np.dtype(bool):
        rule, got = "must return True, False or None", type_name(result)
        raise TypeError(requirement("score(test)", rule, got))
    return ("missed", "") if result else ("noticed", "it returned False")
