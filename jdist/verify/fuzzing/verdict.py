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
      part: The part of a step that is wrong, or "one or another"; None where no step
        was judged.
      loss_wrong: Whether the loss is wrong too; None where a step was judged.
    """

    outcome: Outcome
    kinds: frozenset[str]
    part: str | None = None
    loss_wrong: bool | None = None

    def same(self, other: Reason) -> bool:
        """Whether two layouts fail for the same reason, as far as words can tell."""
        mine, theirs = self.kinds, other.kinds
        if self.part or other.part:
            # A clip by a wrong norm multiplies leaves whose gradient is right.
            mine, theirs = (
                frozenset(OFF if kind == FACTOR else kind for kind in kinds)
                for kinds in (mine, theirs)
            )
        # A step is compared with a gradient by its words alone.
        losses = {self.loss_wrong, other.loss_wrong} - {None}
        alike = len(losses) < 2 and _same_part(self.part, other.part)
        return self.outcome == other.outcome and alike and bool(mine & theirs)


def _same_part(one: str | None, two: str | None) -> bool:
    """Whether a part that is wrong may be the other; either of two, if undecided."""
    if one is None or two is None:
        return True
    return bool(set(one.split(OR)) & set(two.split(OR)))


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
        if self.report.attributions:
            return Reason(self.outcome, kinds, self.report.attributions[0].part)
        loss_wrong = len(leaves) < len(self.report.failures)
        return Reason(self.outcome, kinds, None, loss_wrong)


def of_report(layout: dict[str, Any], report: Report) -> Verdict:
    """The verdict that a report of one trainer means."""
    if report.ok:
        return Verdict(layout, "right", report=report)
    rows = worst_first(report.failures)
    if rows or report.attributions:
        words = [str(cause).partition(": ")[2] for cause in report.attributions]
        words += [f"{row.path}: {row.problem}" for row in rows]
        return Verdict(layout, "wrong", words[0], report)
    words = [f"{row.path}: {row.unjudged}" for row in report.unjudged]
    if report.oracle is not None and not report.oracle.ok:
        words.append(str(report.oracle))
    why = words[0] if words else "nothing was compared"
    return Verdict(layout, "not judged", why, report)


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
