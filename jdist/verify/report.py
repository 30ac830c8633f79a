"""The judge's findings: one row per leaf, a verdict, tables and JSON."""

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from jdist._errors import VerificationError

SUSPICIOUSLY_LOOSE = 1e-3

_STYLES = {"FAILS": "bold red", "not judged": "bold yellow"}

WIDTH = 110
"""Columns of a text for no terminal."""

_COLUMNS = {
    "candidate": lambda leaf: leaf.candidate,
    "leaf": lambda leaf: leaf.path,
    "dtype": lambda leaf: leaf.dtype,
    "shape": lambda leaf: "x".join(map(str, leaf.shape)) or "scalar",
    "max abs": lambda leaf: f"{leaf.max_abs:.1e}",
    "max rel": lambda leaf: f"{leaf.max_rel:.1e}",
    "ulp": lambda leaf: f"{leaf.max_ulp:.3g}",
    "error/bound": lambda leaf: f"{leaf.ratio:.3g}",
    "1 - cosine": lambda leaf: f"{1 - leaf.cosine:.0e}",
    "verdict": lambda leaf: leaf.verdict,
}
# The order in which columns are left out where the width is too small.
_DROPPED = ("1 - cosine", "ulp", "max rel", "shape", "dtype", "max abs")
# The least characters of a shortened name, unless others would then read alike.
_SHORTENED = {"candidate": 12, "leaf": 24}


@dataclass(frozen=True, slots=True)
class LeafReport:
    """How one leaf of a candidate compares with the reference.

    Attributes:
      candidate: Name of the candidate.
      path: Name of the leaf; `(loss)` for the loss itself.
      dtype: The reference's dtype.
      shape: The reference's shape.
      max_abs: Largest absolute difference.
      max_rel: Largest difference relative to the reference's entry; infinite where
        only the reference is 0.
      max_ulp: Largest distance in representable numbers of the dtype.
      ratio: Largest error/bound; a right answer stays below 1.
      cosine: Cosine of the angle between the two leaves as vectors; 1 if both are 0.
      problem: Why the leaf fails, in words; empty if it does not.
      unjudged: Why the leaf could not be judged, in words; empty if it was.
    """

    candidate: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    max_abs: float = float("nan")
    max_rel: float = float("nan")
    max_ulp: float = float("nan")
    ratio: float = float("nan")
    cosine: float = float("nan")
    problem: str = ""
    unjudged: str = ""

    @property
    def ok(self) -> bool:
        """Whether the leaf was judged, and rounding explains the difference."""
        return not self.problem and not self.unjudged

    def __bool__(self) -> bool:
        return self.ok

    @property
    def bit_equal(self) -> bool:
        """Whether there is no difference at all, not even in the sign of a zero."""
        return self.ok and self.max_ulp == 0

    @property
    def verdict(self) -> str:
        """One word for the table."""
        if self.problem:
            return "FAILS"
        if self.unjudged:
            return "not judged"
        return "bit-equal" if self.bit_equal else "equal"


@dataclass(frozen=True, slots=True)
class OracleCheck:
    """The reference itself, compared with a finite difference in float64.

    Attributes:
      slope: The reference gradient along a random direction.
      difference: The central finite difference of the loss along it.
      tolerance: The difference that truncation and rounding of the finite difference
        explain.
      skipped: Why no comparison was possible; empty if there was one.
      own_rules: The user's derivative rules in a loss that fails the comparison: they
        may differ from the derivative on purpose.
    """

    slope: float = float("nan")
    difference: float = float("nan")
    tolerance: float = float("nan")
    skipped: str = ""
    own_rules: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the reference is the derivative, as far as can be seen."""
        return not self.wrong and not self.own_rules

    def __bool__(self) -> bool:
        return self.ok

    @property
    def wrong(self) -> bool:
        """Whether it is not the derivative, though no rule says that it should not."""
        if self.skipped or self.own_rules:
            return False
        # Not `>`: a difference of NaN is no agreement.
        return not abs(self.slope - self.difference) <= self.tolerance

    def __str__(self) -> str:
        """One line."""
        if self.skipped:
            return f"oracle not pinned: {self.skipped}"
        if self.own_rules:
            return (
                f"oracle not judged: the loss has a derivative of its own "
                f"({', '.join(self.own_rules)}): slope {self.slope:.6g}, and "
                f"{self.difference:.6g} by finite difference. Correct the rule or, if "
                f"it is meant so, leave the check out: finite_differences=False, "
                f"--no-finite-differences"
            )
        verdict = "WRONG" if self.wrong else "pinned"
        return (
            f"oracle {verdict}: slope {self.slope:.9g} by differentiation, "
            f"{self.difference:.9g} by finite difference "
            f"(difference {abs(self.slope - self.difference):.1e}, "
            f"explained {self.tolerance:.1e})"
        )


@dataclass(frozen=True, slots=True)
class Attribution:
    """Which part of a training step was wrong, where a whole step was judged.

    Attributes:
      candidate: Name of the trainer.
      step: The first wrong step, from 1.
      part: "gradient", "gradient clipping" where it was clipped in parts, "optimizer
        update", "model state", or "gradient or optimizer update" where what the trainer
        shows cannot tell; or the name of a value that is tapped in the update. Of a
        step that is one function also another part of its state, by its name.
      why: The reason, in words.
    """

    candidate: str
    step: int
    part: str
    why: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.candidate}: step {self.step}, wrong {self.part}: {self.why}"


@dataclass(frozen=True, slots=True)
class Report:
    """The judge's findings: `print` it, `assert` it, or `raise_if_failed`.

    It is true where `ok` is.

    Attributes:
      leaves: One row per candidate and leaf.
      oracle: The check of the reference itself, where one was made: `slope`,
        `difference` and `tolerance`, or `skipped` and `own_rules`, which say why it
        proves nothing; true where the reference is the derivative.
      notes: Assumptions and suspicions that a reader should know, in words.
      attributions: For whole steps, what was wrong first, each with its `candidate`,
        `step`, `part` and `why`.
    """

    leaves: tuple[LeafReport, ...]
    oracle: OracleCheck | None = None
    notes: tuple[str, ...] = ()
    attributions: tuple[Attribution, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every leaf of every candidate, and the oracle, was judged and holds.

        A report without leaves is not ok: nothing was compared.
        """
        judged = bool(self.leaves) and all(leaf.ok for leaf in self.leaves)
        return judged and (self.oracle is None or self.oracle.ok)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def failures(self) -> tuple[LeafReport, ...]:
        """The rows that fail."""
        return tuple(leaf for leaf in self.leaves if leaf.problem)

    @property
    def unjudged(self) -> tuple[LeafReport, ...]:
        """The rows that could not be judged."""
        return tuple(leaf for leaf in self.leaves if leaf.unjudged)

    @property
    def bit_equal(self) -> bool:
        """Whether no bit differs anywhere."""
        return bool(self.leaves) and all(leaf.bit_equal for leaf in self.leaves)

    @property
    def worst(self) -> float:
        """The largest error/bound of all leaves; NaN ranks above every number."""
        ratios = (leaf.ratio for leaf in self.leaves)
        return max(ratios, key=nan_last, default=float("nan"))

    def of(self, candidate: str) -> "Report":
        """The findings on one candidate alone."""
        leaves = tuple(leaf for leaf in self.leaves if leaf.candidate == candidate)
        causes = tuple(x for x in self.attributions if x.candidate == candidate)
        return replace(self, leaves=leaves, attributions=causes)

    def raise_if_failed(self) -> "Report":
        """Returns the report if it is ok.

        Raises:
          VerificationError: Something does not hold, or could not be judged; the
            message names each leaf.
        """
        if self.ok:
            return self
        wrong = [*map(str, self.attributions), *map(_why, worst_first(self.failures))]
        unjudged = list(map(_why, worst_first(self.unjudged)))
        if not self.leaves:
            unjudged.append("no leaf of any candidate was compared")
        if self.oracle is not None and not self.oracle.ok:
            (wrong if self.oracle.wrong else unjudged).append(str(self.oracle))
        parts = [("gradients differ", wrong), ("not judged", unjudged)]
        raise VerificationError(
            "\n".join("\n  ".join([f"{what}:", *why]) for what, why in parts if why)
        )

    def to_json(self) -> str:
        """The report as JSON, numbers in full precision; NaN and inf as strings."""
        record = {
            "ok": self.ok,
            "leaves": [
                {**asdict(leaf), "verdict": leaf.verdict} for leaf in self.leaves
            ],
            "oracle": asdict(self.oracle) if self.oracle is not None else None,
            "notes": self.notes,
            "attributions": [asdict(cause) for cause in self.attributions],
        }
        return json.dumps(_finite(record), indent=1)

    def text(self, width: int | None = None) -> str:
        """The report as plain text: a table, worst rows first, and sentences.

        Args:
          width: Columns of the table, which drops its own and shortens paths on the
            left until it fits. None for those of the terminal, or 110 without one.
            Sentences have a line each.
        """
        return as_text(self, width)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        """A table and sentences for a rich console."""
        yield _table(worst_first(self.leaves), options.max_width)
        for cause in self.attributions:
            yield Text(str(cause), style="bold red")
        for leaf in worst_first(self.failures):
            yield Text(_why(leaf), style="red")
        for leaf in worst_first(self.unjudged):
            yield Text(f"not judged: {_why(leaf)}", style="yellow")
        if self.oracle is not None:
            yield Text(str(self.oracle), style="" if self.oracle.ok else "red")
        for note in self.notes:
            yield Text(f"note: {note}")

    def __str__(self) -> str:
        """The same as `text()`."""
        return self.text()

    def __repr__(self) -> str:
        """One line, for an assertion that fails."""
        wrong, unjudged = len(self.failures), len(self.unjudged)
        said = f"{'ok' if self.ok else 'not ok'}, of {len(self.leaves)} leaves "
        said += f"{wrong} wrong and {unjudged} not judged"
        for leaf in worst_first(self.failures + self.unjudged)[:1]:
            said += f"; {_why(leaf)}"
        return f"<Report: {said}>"


def as_text(shown: RenderableType, width: int | None = None) -> str:
    """Renders a rich object as plain text."""
    columns = width or shutil.get_terminal_size((WIDTH, 0)).columns
    # In a notebook rich would show it instead, and capture nothing.
    console = Console(
        width=columns, color_system=None, force_terminal=False, force_jupyter=False
    )
    with console.capture() as captured:
        # Sentences are not broken, so that they can be searched for.
        console.print(shown, soft_wrap=True)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def looseness(leaves: Iterable[LeafReport]) -> tuple[str, ...]:
    """A note if the bound is far above every error: a blunt judge proves little."""
    # Leaves without a difference do not show how wide the bound is.
    ratios = [leaf.ratio for leaf in leaves if leaf.ok and leaf.ratio > 0]
    if not ratios or max(ratios) >= SUSPICIOUSLY_LOOSE:
        return ()
    return (
        f"the bound is suspiciously loose: the largest error is {max(ratios):.1e} of "
        f"it. Are `terms` and `scale` right?",
    )


def _why(leaf: LeafReport) -> str:
    return f"{leaf.candidate}: {leaf.path}: {leaf.problem or leaf.unjudged}"


def _table(leaves: Sequence[LeafReport], width: int) -> Table:
    """A row for each leaf, in as many columns as there is room for."""
    cells = {name: list(map(cell, leaves)) for name, cell in _COLUMNS.items()}
    sizes = {name: max(map(len, [name, *own])) for name, own in cells.items()}
    least = {
        name: max(len(name), _telling(cells[name], size))
        for name, size in _SHORTENED.items()
    }
    for dropped in ("", *_DROPPED):
        sizes.pop(dropped, None)
        fixed = sum(size for name, size in sizes.items() if name not in least)
        # Two spaces between columns.
        room = width - fixed - 2 * (len(sizes) - 1)
        if room >= sum(least.values()):
            break
    own = min(sizes["candidate"], max(room - sizes["leaf"], least["candidate"]))
    sizes |= {"candidate": own, "leaf": min(sizes["leaf"], max(room - own, 2))}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, size in sizes.items():
        numeric = name not in ("candidate", "leaf", "dtype", "shape", "verdict")
        justify: Any = "right" if numeric else "left"
        table.add_column(name, justify=justify, min_width=size, no_wrap=True)
    for number, leaf in enumerate(leaves):
        row = {name: _shortened(cells[name][number], n) for name, n in sizes.items()}
        style = _STYLES.get(leaf.verdict, "green")
        table.add_row(
            *(Text(x, style * (name == "verdict")) for name, x in row.items())
        )
    return table


def _telling(names: Sequence[str], least: int) -> int:
    """The size to which names can be shortened, and differ as they do."""
    different, longest = set(names), max(map(len, names), default=0)
    for size in range(least, longest):
        if len({_shortened(name, size) for name in different}) == len(different):
            return size
    return longest


def _shortened(name: str, size: int) -> str:
    """A name without its beginning, where it is too long."""
    return name if len(name) <= size else f"…{name[1 - size :]}"


def worst_first(leaves: Iterable[LeafReport]) -> list[LeafReport]:
    """Failures, then what is not judged, then the rest; each by error/bound."""
    falling = sorted(leaves, key=lambda leaf: nan_last(leaf.ratio), reverse=True)
    order = [*_STYLES, "equal", "bit-equal"]
    return sorted(falling, key=lambda leaf: order.index(leaf.verdict))


def nan_last(number: float) -> tuple[bool, float]:
    """A sort key under which NaN is larger than any number, infinity included."""
    # NaN alone differs from itself.
    return number != number, number


def _finite(record: object) -> object:
    """Replaces NaN and infinities by the strings "nan", "inf" and "-inf"."""
    # JSON has no numbers for them.
    if isinstance(record, dict):
        return {key: _finite(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [_finite(value) for value in record]
    if isinstance(record, float) and (record != record or abs(record) == float("inf")):
        return str(record)
    return record
