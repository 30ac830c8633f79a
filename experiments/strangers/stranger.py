"""A stranger on trial: a trainer of another package, and what its step is held against.

Each module of a stranger has `USES`, ways to use it as its documentation shows them. A
use trains for one optimizer step and returns what the trainer exposes to its users: the
gradient, or the parameters after a step of plain gradient descent at rate 1.
"""

import inspect
import io
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np

from experiments.strangers.problem import NOTHING, OPTIONS, Reference, Rule, Step
from jdist import verify
from jdist.verify.comparison import Named, renamed

SECTION = "# --- what the judge needs ---"
"""Marks the part of a stranger's module that a user adds to have a trainer judged."""


@dataclass(frozen=True)
class Use:
    """One way to use a stranger.

    Attributes:
      stranger: The trainer.
      way: How it is used.
      claim: A sentence on what its gradient is said to be.
      show: Trains for one step; returns a pytree of what the trainer exposes.
      shows: "gradient", or "parameters" after a step at learning rate 1.
      documented: What its documentation says about unequal parts.
      link: The address of that documentation.
      names: Maps the parameters' names to the stranger's; None if they are the same.
      divisor: The divisor of the claim, as in `Reference`.
      smoothing: The smoothing of the claim, as in `Reference`.
      lacks: Settings that it cannot express, and why.
      parts: Maps a step to the stranger's own micro-batches or replicas.
      remedy: Whether this is the remedy for another, wrong use.
      offers: Those of `OPTIONS` that it has.
    """

    stranger: str
    way: str
    claim: str
    show: Callable[[Step], Any]
    shows: str
    documented: str
    link: str
    names: Mapping[str, Named] | None = None
    divisor: str = "tokens"
    smoothing: float = 0.0
    lacks: Mapping[str, str] = field(default_factory=dict)
    parts: Callable[[Step], Step] = lambda step: step
    remedy: bool = False
    offers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """The result of one use in one setting.

    Attributes:
      setting: The name of the setting.
      verdict: "right", "wrong", "no step", "not judged" if rounding hides the gradient,
        "refused" or "not offered".
      distance: The relative distance from the claimed gradient, in the 2-norm.
      factor: The factor of the whole gradient, if nothing else differs.
      rule: The rule that a wrong gradient follows, to rounding; empty if unknown.
      why: Why it was refused, is not offered or could not be judged.
      ratio: The largest error/bound.
    """

    setting: str
    verdict: str
    distance: float | None = None
    factor: float | None = None
    rule: str = ""
    why: str = ""
    ratio: float | None = None

    def __str__(self) -> str:
        """The text of a table cell."""
        if self.verdict != "wrong":
            return self.verdict
        if self.factor is not None:
            return f"{self.factor:.4g} x"
        return f"{100 * (self.distance or 0):.3g} % off"


def judged(use: Use, step: Step) -> Finding:
    """Trains for one step and judges it.

    Args:
      use: The use of the stranger.
      step: The data.

    Raises:
      ValueError: Its result cannot be named, as in `verify.compare`.
    """
    if step.setting in use.lacks:
        return Finding(step.setting, "not offered", why=use.lacks[step.setting])
    if step.setting in OPTIONS and step.setting not in use.offers:
        return Finding(step.setting, "not offered", why="left to the user's own code")
    step = use.parts(step)
    try:
        shown = use.show(step)
    except Refused as error:
        return Finding(step.setting, "refused", why=str(error))
    reference = Reference(step, use.divisor, use.smoothing)
    report = _compared(use, reference, reference.rule, shown)
    finding = Finding(step.setting, "right", ratio=report.worst)
    if not report.failures:
        hidden = [*(leaf.path for leaf in report.unjudged), *_hidden(use, reference)]
        why = f"rounding hides the step of {', '.join(hidden)}" if hidden else ""
        return replace(finding, verdict="not judged", why=why) if hidden else finding
    distance, factor = _measured(_gradient(use, step, shown), reference.gradient)
    rule = next(iter(_explained(use, reference, shown)), "")
    verdict = "no step" if rule == NOTHING else "wrong"
    return replace(
        finding, verdict=verdict, distance=distance, factor=factor, rule=rule
    )


class Refused(Exception):
    """The trainer raised an error instead of training."""


def lines(module: ModuleType) -> int:
    """Counts the code lines in the part of a stranger's module that serves the judge.

    Comments, docstrings and empty lines do not count; a statement over several lines
    counts as several. Code that a module shares with another stranger counts for both.

    Args:
      module: The module of the stranger.
    """
    shared = [x for x in vars(module).values() if isinstance(x, ModuleType)]
    own = [x for x in shared if x.__name__.startswith(__package__)]
    sections = (inspect.getsource(x).partition(SECTION)[2] for x in (module, *own))
    return sum(len(code_lines(x.partition("\n# --- ")[0])) for x in sections)


def code_lines(source: str) -> set[int]:
    """The numbers of the lines with code.

    Example:
      >>> sorted(code_lines('# why\\n\\nx = (\\n  1)\\ndef f():\\n  "doc"\\n'))
      [3, 4, 5]
    """
    quiet = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT,
        tokenize.DEDENT, tokenize.ENDMARKER,
    }  # fmt: skip
    found: set[int] = set()
    fresh = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NEWLINE:
            fresh = True
        elif token.type not in quiet:
            # A string at the start of a statement is a docstring.
            if not (fresh and token.type == tokenize.STRING):
                found.update(range(token.start[0], token.end[0] + 1))
            fresh = False
    return found


def _compared(use: Use, reference: Reference, rule: Rule, shown: Any) -> verify.Report:
    """Compares the result with a rule's gradient, or the parameters after its step."""
    if reference.step.mixed:
        found = _gradient(use, reference.step, shown)
        narrow = {name: leaf.astype(np.float32) for name, leaf in found.items()}
        return reference.in_mixed_precision(rule, narrow)
    gradient = reference.of(rule)
    if use.shows == "gradient":
        return verify.compare(
            dict(gradient), shown, reference.terms, reference.scale, names=use.names
        )
    # New parameters are a sum with one more term, the old parameters.
    old = reference.step.params
    return verify.compare(
        {name: old[name] - gradient[name] for name in gradient},
        shown,
        reference.terms + 1,
        {name: np.abs(old[name]) + reference.scale[name] for name in gradient},
        names=use.names,
    )


def _hidden(use: Use, reference: Reference) -> list[str]:
    """The parameters for which a missing step would pass as well."""
    # `verify.compare` itself reports a gradient that is too small to be judged, but not
    # a step that is small beside its parameters.
    if use.shows == "gradient" or reference.step.mixed:
        return []
    gradient, stayed = reference.gradient, dict(reference.step.params)
    report = _compared(replace(use, names=None), reference, reference.rule, stayed)
    return [x.path for x in report.leaves if x.ok and gradient[x.path].any()]


def _explained(use: Use, reference: Reference, shown: Any) -> list[str]:
    """The rules that the result follows, to rounding."""
    return [
        name
        for name, rule in reference.rules().items()
        if _compared(use, reference, rule, shown).ok
    ]


def _gradient(use: Use, step: Step, shown: Any) -> dict[str, np.ndarray]:
    """The result as a gradient, by the parameters' names."""
    named = renamed("compare", dict(step.params), shown, use.names)
    wide = {name: np.asarray(leaf, np.float64) for name, leaf in named.items()}
    if use.shows == "gradient":
        return wide
    return {name: step.params[name] - leaf for name, leaf in wide.items()}


def _measured(
    found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]
) -> tuple[float, float | None]:
    """The relative distance, and the factor if nothing else differs."""
    a, b = (
        np.concatenate([np.ravel(tree[name]) for name in wanted]).astype(np.float64)
        for tree in (wanted, found)
    )
    factor = float(a @ b / (a @ a))
    rest = np.linalg.norm(b - factor * a) / np.linalg.norm(a)
    distance = float(np.linalg.norm(b - a) / np.linalg.norm(a))
    return distance, factor if rest < FACTOR_REST else None


FACTOR_REST = 1e-5
"""The largest relative rest; float32 rounds at 6e-8, gradients sum a hundred terms."""
