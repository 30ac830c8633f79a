"""The verdict on one layout, and its reason: which failures are the same."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from jdist.verify.report import LeafReport, Report, worst_first

Outcome = Literal["right", "wrong", "not judged", "refused", "raised", "ended", "hung"]
FAILURES: tuple[Outcome, ...] = ("wrong", "raised", "ended", "hung")

LOSS = "(loss)"
OFF = "off"
OR = " or "
FACTOR = "it is # times the reference"
_ALIKE = re.compile(r"; (it is [^;]*|all its entries [^;]*)")
# Also shapes and places, which are in brackets.
_NUMBER = re.compile(r"\[[^]]*\]|[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a layout fails, without what differs from layout to layout.

    Attributes:
      outcome: How it fails.
      kinds: The kinds of words, without numbers and places.
      parts: The part of a step that is wrong, or several of which it is one; none
        where no step was judged.
      loss_wrong: Whether the loss is wrong too; None where a step was judged.
    """

    outcome: Outcome
    kinds: frozenset[str]
    parts: frozenset[str] = frozenset()
    loss_wrong: bool | None = None

    def same(self, other: Reason) -> bool:
        """Whether two layouts fail for the same reason, as far as words can tell."""
        # A clip by a wrong norm multiplies leaves whose gradient is right.
        read_as = {FACTOR: OFF} if self.parts or other.parts else {}
        mine, theirs = ({read_as.get(x, x) for x in own.kinds} for own in (self, other))
        # A step is compared with a gradient by its words alone.
        losses = {self.loss_wrong, other.loss_wrong} - {None}
        known = self.parts and other.parts
        alike = len(losses) < 2 and not (known and self.parts.isdisjoint(other.parts))
        return self.outcome == other.outcome and alike and bool(mine & theirs)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The finding on one layout.

    Attributes:
      layout: The value of each axis.
      outcome: "right"; "wrong"; "not judged"; "refused": the trainer raised a
        ValueError or NotImplementedError; "raised": it raised another exception;
        "ended": it ended its process, as XLA's checks do; "hung": it had not come back
        at the deadline.
      why: The reason, in words; empty if it is right.
      report: The judge's report, if there is one.
      details: More text, such as a traceback.
    """

    layout: dict[str, Any]
    outcome: Outcome
    why: str = ""
    report: Report | None = None
    details: str = field(default="", repr=False)

    @property
    def fails(self) -> bool:
        """Whether it is a finding."""
        return self.outcome in FAILURES

    @property
    def reason(self) -> Reason:
        """The reason, to be compared with that of another layout."""
        if self.report is None:
            return Reason(self.outcome, frozenset([_without_numbers(self.why)]))
        leaves = [leaf for leaf in self.report.failures if leaf.path != LOSS]
        kinds = frozenset(kind for leaf in leaves for kind in _kinds(leaf))
        # A leaf that looks like something tells more than one that is merely off.
        kinds = (kinds - {OFF}) or frozenset([OFF])
        if causes := self.report.attributions:
            return Reason(self.outcome, kinds, frozenset(causes[0].part.split(OR)))
        loss_wrong = len(leaves) < len(self.report.failures)
        return Reason(self.outcome, kinds, loss_wrong=loss_wrong)


def of_report(layout: dict[str, Any], report: Report) -> Verdict:
    """The verdict that a report of one trainer means."""
    if report.ok:
        return Verdict(layout, "right", report=report)
    wrong = [str(cause).partition(": ")[2] for cause in report.attributions]
    wrong += [f"{row.path}: {row.problem}" for row in worst_first(report.failures)]
    if wrong:
        return Verdict(layout, "wrong", wrong[0], report)
    doubts = [f"{row.path}: {row.unjudged}" for row in report.unjudged]
    if report.oracle is not None and not report.oracle.ok:
        doubts.append(str(report.oracle))
    return Verdict(layout, "not judged", [*doubts, "nothing was compared"][0], report)


def _kinds(leaf: LeafReport) -> list[str]:
    """The kinds of a leaf's words: what it looks like, or what it begins with."""
    words = _without_numbers(leaf.problem)
    # The other leaf that it looks like is not always the same one.
    alike = _ALIKE.findall(re.sub(r"reference's [^;]*", "reference's", words))
    known = ("not finite", "replicas differ", "wrong ", "values that are not")
    found = next((each for each in known if each in words), OFF)
    return alike or [words if found == "wrong " else found]


def _without_numbers(words: str) -> str:
    return _NUMBER.sub("#", words)
