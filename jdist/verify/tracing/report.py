"""The report of a trace: the verdict on the gradient, and the first wrong value."""

from collections.abc import Sequence
from dataclasses import dataclass

from jdist._errors import VerificationError
from jdist.verify.report import Report

UNCOMPARED = "no tap could be compared, so that none is known to be right"
"""The note that a report begins with, because the place is then no more than a leaf."""

TOLD = 4
"""Number of groups of wrongly counted examples, or of leaves, that are listed."""

SHOWN = 6
"""Number of names that a list shows before it is abridged."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a candidate differs from the reference.

    Attributes:
      direction: "forward" for a value, "backward" for a cotangent, "gradient" where all
        taps are right and only parameters' gradients are wrong, "loss" where only the
        loss is.
      tap: Label of the tap; for a gradient, the path of its worst leaf.
      examples: The examples that differ there; all of them, if none can be identified.
      ratio: The largest error/bound there; infinite if something is missing.
      words: Description of the difference.
    """

    direction: str
    tap: str
    examples: tuple[int, ...]
    ratio: float
    words: str

    def __str__(self) -> str:
        """One line, such as `forward, block7/mlp, example 12: 31 bounds: ...`."""
        place = f"{self.direction}, {self.tap}"
        if self.examples:
            plural = "s" if len(self.examples) > 1 else ""
            place += f", example{plural} {ranges(self.examples)}"
        size = "missing" if self.ratio == float("inf") else f"{self.ratio:.3g} bounds"
        return f"{place}: {size}: {self.words}"


@dataclass(frozen=True, slots=True)
class Trace:
    """The judge's finding on one candidate: whether it is right, and if not, where.

    It is true where `ok` is.

    Attributes:
      report: The report on the loss and the gradient, which has the verdict.
      difference: The first difference, where there is one. In a right candidate, or one
        that cannot be judged, it is one at a tap that the gradient does not show.
      right: The taps that were found right before it, in order: values first, as
        `forward name`, then cotangents, as `backward name`.
      notes: Further notes for a reader.
    """

    report: Report
    difference: Difference | None
    right: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether loss and gradient were judged, and are right."""
        return self.report.ok

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_failed(self) -> "Trace":
        """Returns the trace if it is ok.

        Raises:
          VerificationError: It is not; the message names the first difference, then the
            leaves that are wrong.
        """
        if self.ok:
            return self
        try:
            self.report.raise_if_failed()
        except VerificationError as error:
            # Without its cause, whose whole text this error repeats.
            raise VerificationError(f"{self._place()}\n{error}") from None
        return self

    def _place(self) -> str:
        words = f"first difference: {self.difference}"
        if self.difference is None:
            words = "no tap differs"
        if UNCOMPARED in self.notes:
            return f"{UNCOMPARED}\n{words}"
        beyond = self.difference and self.difference.direction in ("gradient", "loss")
        return f"{self._compared()}\n{words}" if beyond and self.right else words

    def _compared(self) -> str:
        values = sum(name.startswith("forward ") for name in self.right)
        cotangents = len(self.right) - values
        told = f"values: {values}; cotangents, up to factors of examples: {cotangents}"
        return (
            f"all taps that were compared are right ({told}): the fault is behind them"
        )

    def __str__(self) -> str:
        """A few lines: the place, what is right before it, the leaves, the notes."""
        wrong = [row.path for row in self.report.failures]
        unjudged = [row.path for row in self.report.unjudged]
        lines = ["right" if self.ok else "WRONG" if wrong else "not judged"]
        told = self.difference is not None or not self.ok
        if told:
            lines.append(self._place())
        lines.append(f"right before it: {_list(self.right)}")
        judged = f"{len(self.report.leaves)} leaves judged"
        lines.append(f"{judged}; wrong: {_list(wrong)}" if wrong else judged)
        if unjudged:
            lines.append(f"not judged: {_list(unjudged)}")
        if self.report.oracle is not None:
            lines.append(str(self.report.oracle))
        own = [note for note in self.notes if not (told and note == UNCOMPARED)]
        lines += [f"note: {note}" for note in (*self.report.notes, *own)]
        return "\n".join(lines)


def _list(names: list[str] | tuple[str, ...]) -> str:
    """Names; of many, the first and the last ones."""
    if not names:
        return "nothing"
    if len(names) <= SHOWN:
        return ", ".join(names)
    half = SHOWN // 2
    middle = f"... ({len(names) - SHOWN} more) ..."
    return ", ".join([*names[:half], middle, *names[-half:]])


def counts_told(groups: Sequence[tuple[Sequence[int], float]]) -> str:
    """How often the examples of the first few groups count."""
    return "; ".join(
        f"examples {ranges(tuple(own))} count {round(share, 4) + 0.0:g} times"
        for own, share in groups[:TOLD]
    )


def ranges(numbers: tuple[int, ...]) -> str:
    """Numbers in order, runs of them abridged: 0-3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)
