"""The judge's word on both forms of an exhibit."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from experiments.museum.exhibit import Exhibit, names_the_place
from experiments.museum.meshes import Judge, Trainer
from jdist import verify


@dataclass(frozen=True)
class Finding:
    """What the judge says of one form.

    Attributes:
      ok: Whether it passes.
      failed: Whether it is condemned; one that is only not judged is not.
      lines: The report, line by line.
      seconds: How long it took.
    """

    ok: bool
    failed: bool
    lines: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """The findings on one exhibit.

    Attributes:
      exhibit: The exhibit.
      buggy: The finding on the buggy form.
      fixed: The finding on the fixed form.
      measuring: The seconds that the reference took.
      confused: The labels of other exhibits whose reports name this one's place.
    """

    exhibit: Exhibit
    buggy: Finding
    fixed: Finding
    measuring: float
    confused: tuple[str, ...] = ()

    @property
    def caught(self) -> bool:
        """Whether the buggy form is condemned."""
        return self.buggy.failed

    @property
    def named(self) -> bool:
        """Whether the report of the buggy form names the place, and no other does."""
        expected = self.exhibit.expected
        return (
            names_the_place(expected, self.buggy.lines)
            and not names_the_place(expected, self.fixed.lines)
            and not self.confused
        )

    @property
    def seconds(self) -> float:
        """How long both verdicts took, and the reference."""
        return self.measuring + self.buggy.seconds + self.fixed.seconds

    @property
    def passes(self) -> bool:
        """Whether the fixed form passes."""
        return self.fixed.ok


def verdict(exhibit: Exhibit) -> Verdict:
    """Asks the judge about both forms of an exhibit."""
    start = time.perf_counter()
    judge = exhibit.module.judge()
    measured = time.perf_counter() - start
    buggy = asked(judge, exhibit.trainer(fixed=False))
    fixed = asked(judge, exhibit.trainer(fixed=True))
    return Verdict(exhibit, buggy, fixed, measured)


def asked(judge: Judge, trainer: Trainer) -> Finding:
    """Asks a judge about one form."""
    start = time.perf_counter()
    found = judge(trainer)
    seconds = time.perf_counter() - start
    report = found.report if isinstance(found, verify.Trace) else found
    failed = bool(report.failures)
    return Finding(found.ok, failed, tuple(_lines(found, report)), seconds)


def _lines(found: verify.Trace | verify.Report, report: verify.Report) -> Iterator[str]:
    """The report as a reader sees it; each leaf's words on one line."""
    if isinstance(found, verify.Trace):
        yield from str(found).splitlines()
    else:
        yield "right" if found.ok else "WRONG" if report.failures else "not judged"
        yield from (str(each) for each in report.attributions)
        yield from (f"note: {note}" for note in report.notes)
    for row in report.failures:
        yield f"{row.path}: {row.problem}"
    for row in report.unjudged:
        yield f"{row.path}: not judged: {row.unjudged}"


def compared(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts, each with the other exhibits that it is confused with."""
    return [
        replace(each, confused=tuple(_naming(each.exhibit, others)))
        for each in verdicts
        if (others := [other for other in verdicts if other is not each]) is not None
    ]


def _naming(exhibit: Exhibit, others: Sequence[Verdict]) -> Iterator[str]:
    for other in others:
        lines = (*other.buggy.lines, *other.fixed.lines)
        if names_the_place(exhibit.expected, lines):
            yield other.exhibit.label
