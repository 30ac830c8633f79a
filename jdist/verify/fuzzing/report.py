"""The report of a search: all verdicts, and the smallest layouts that fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jdist._errors import VerificationError
from jdist.verify.fuzzing.layout_grid import named
from jdist.verify.fuzzing.verdict import Reason, Verdict
from jdist.verify.report import as_text
from jdist.verify.tracing.report import Trace

COLUMNS = ("right", "fails", "not judged", "refused")
SHOWN = 10
"""Number of uncovered combinations that the text lists."""


@dataclass(frozen=True, slots=True)
class WrongLayout:
    """A smallest layout that fails.

    Attributes:
      verdict: The verdict on it, with its layout.
      axes: The axes that are not at their first values, with their values: the
        interaction that fails.
      kept: Those of them that may not be needed: with the axis at its first value the
        layout is not allowed, refused, not judged, or fails for another reason.
      first: The layout in which the failure was first seen.
      judged: Number of layouts that were judged to shrink it.
      trace: The first wrong value, if the loss has taps; None if there is none.
      untraced: Why there is no trace, in words.
    """

    verdict: Verdict
    axes: dict[str, Any]
    kept: tuple[str, ...]
    first: dict[str, Any]
    judged: int
    trace: Trace | None = None
    untraced: str = ""

    def __str__(self) -> str:
        """One line: the axes, and the first wrong value or the words of the verdict."""
        where = " and ".join(f"{axis}={value}" for axis, value in self.axes.items())
        where = f"if {where}" if where else "with every axis at its first value"
        if self.kept:
            where += f" (not known to be needed: {', '.join(self.kept)})"
        traced = self.trace.difference if self.trace is not None else None
        return f"{self.verdict.outcome} {where}: {traced or self.verdict.why}"


@dataclass(frozen=True, slots=True)
class FuzzReport:
    """The findings of `verify.fuzz`: `print` it, `assert` it, or `raise_if_failed`.

    It is true where `ok` is.

    Attributes:
      axes: The values of each axis.
      verdicts: The verdicts on the layouts, in order, without those of shrinking.
      findings: The smallest layout of each failure, with `axes`, `verdict` and `trace`;
        those with the fewest axes first.
      uncovered: The combinations of values that are in no layout that was judged: the
        trainer refuses them, or the search was cut short.
    """

    axes: Mapping[str, Sequence[Any]]
    verdicts: tuple[Verdict, ...]
    findings: tuple[WrongLayout, ...]
    uncovered: tuple[dict[str, Any], ...]

    @property
    def ok(self) -> bool:
        """Whether a layout was judged, and all that were not refused are right."""
        told = [each for each in self.verdicts if each.outcome != "refused"]
        return bool(told) and all(each.outcome == "right" for each in told)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def refusals(self) -> dict[str, tuple[dict[str, Any], ...]]:
        """The layouts that were refused, by the reason.

        Reasons that differ in their numbers alone are one, in the first one's words. An
        error that the trainer did not intend, such as one of JAX about shapes, is among
        them where it is a ValueError.
        """
        kinds: dict[Reason, list[Verdict]] = {}
        for each in self.verdicts:
            if each.outcome == "refused":
                kinds.setdefault(each.reason, []).append(each)
        groups = kinds.values()
        return {own[0].why: tuple(each.layout for each in own) for own in groups}

    @property
    def smallest(self) -> dict[str, Any] | None:
        """The layout that fails with the fewest axes; None if none fails."""
        return self.findings[0].verdict.layout if self.findings else None

    @property
    def trace(self) -> Trace | None:
        """The first wrong value in it; None if the loss has no taps."""
        return self.findings[0].trace if self.findings else None

    def raise_if_failed(self) -> FuzzReport:
        """Returns the report if it is ok.

        Raises:
          VerificationError: A layout fails, or none could be judged; the message is the
            report's text.
        """
        if self.ok:
            return self
        raise VerificationError(f"the trainer is not proved right\n{self}")

    def __rich__(self) -> Group:
        """The layouts, a table of the axes' values, and what fails."""
        tried = [_line(number, each) for number, each in enumerate(self.verdicts, 1)]
        found = []
        for each in self.findings:
            how = f"  met in {named(each.first)}; {each.judged} more to shrink it"
            found += [Text(str(each), style="bold red"), Text(how)]
        return Group(*tried, self._table(), *found, *map(Text, self._remarks()))

    def __str__(self) -> str:
        """The same as plain text."""
        return as_text(self)

    def _table(self) -> Table:
        """How many layouts of each value were right."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("axis")
        for name in COLUMNS:
            table.add_column(name, justify="right")
        for axis, values in self.axes.items():
            for value in values:
                own = [each for each in self.verdicts if each.layout[axis] == value]
                counts = Counter("fails" if v.fails else v.outcome for v in own)
                cells = [str(counts[name] or "") for name in COLUMNS]
                table.add_row(Text(f"{axis}={value}"), *cells)
        return table

    def _remarks(self) -> Iterator[str]:
        """What was refused, what is not covered, and a summary."""
        for why, layouts in self.refusals.items():
            yield f"refused in {len(layouts)}, such as {named(layouts[0])}: {why}"
        for each in self.uncovered[:SHOWN]:
            yield f"not covered: {named(each)}"
        if (more := len(self.uncovered) - SHOWN) > 0:
            yield f"not covered: {more} more"
        counts = Counter(each.outcome for each in self.verdicts)
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        yield (
            f"{'ok' if self.ok else 'NOT OK'}: {len(self.verdicts)} layouts: "
            f"{told or 'none'}; {len(self.uncovered)} combinations not covered"
        )


def _line(number: int, verdict: Verdict) -> Text:
    style = "green" if verdict.outcome == "right" else "yellow"
    why = f": {verdict.why}" if verdict.why else ""
    words = f"{number:3} {verdict.outcome:10} {named(verdict.layout)}{why}"
    return Text(words, "red" if verdict.fails else style)
