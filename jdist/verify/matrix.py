"""The equivalence matrix: every strategy, every reduction, every dtype, one verdict.

The rows are found by the entry-point group `jdist.verify`, so that the judge imports no
strategy and any package can add its own. An entry point names a function without
arguments that returns strategies by name, and a strategy is

    build(loss_fn, reduction) -> candidate
    candidate(params, batch, weights) -> (loss, gradient)

`build` raises `jdist.Unavailable` where the hardware is missing; the row is then
skipped by name, with the reason.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
from rich.text import Text

from jdist._compat import double_precision
from jdist._errors import JdistError, Unavailable
from jdist.verify.gradient_check import Prepared, prepared
from jdist.verify.measure import LossPrograms
from jdist.verify.problem import Problem, standard
from jdist.verify.processes import TIMEOUT, joined
from jdist.verify.report import Report

GROUP = "jdist.verify"
DTYPES = ("float32", "float64", "bfloat16")

Strategy = Callable[[Callable[..., jax.Array], str], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One strategy judged for one reduction in one dtype.

    Attributes:
      strategy: The row's name.
      reduction: The column's name.
      dtype: Of the parameters and the batch.
      report: The judge's findings, or None where the row was skipped.
      skipped: Why it was skipped.
    """

    strategy: str
    reduction: str
    dtype: str
    report: Report | None = None
    skipped: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing was found wrong."""
        return self.report is None or self.report.ok

    def __rich__(self) -> Text:
        """The largest error/bound, or why there is none."""
        if self.report is None:
            return Text("skipped", style="yellow")
        worst = "bit-equal" if self.report.bit_equal else f"{self.report.worst:.2g}"
        return Text(worst, style="green") if self.ok else Text(f"FAILS {worst}", "red")


def strategies() -> dict[str, Strategy]:
    """All strategies of all installed packages, by name.

    Raises:
      JdistError: Nothing is registered, which means that jdist itself is not installed;
        or two packages use one name.
    """
    found: dict[str, Strategy] = {}
    for entry in metadata.entry_points(group=GROUP):
        for name, strategy in entry.load()().items():
            if name in found:
                raise JdistError(f"two entry points of {GROUP!r} provide {name!r}")
            found[name] = strategy
    if not found:
        raise JdistError(
            f"no strategy is registered under the entry-point group {GROUP!r}. Is "
            f"jdist installed? `pip install -e .` in its folder registers its own."
        )
    return found


def judge(
    rows: Mapping[str, Strategy], reductions: Sequence[str], dtypes: Sequence[str]
) -> Iterator[list[Cell]]:
    """Judges the matrix; yields a strategy's reductions in one dtype as they are done.

    All strategies share the references and their measured bounds, which cost more than
    a candidate.
    """
    columns = {dtype: _Columns(dtype) for dtype in dtypes}
    for name, build in rows.items():
        for dtype in dtypes:
            # Not around the yield: the caller would run in double precision too.
            with double_precision():
                cells = [columns[dtype].judge(name, build, r) for r in reductions]
            yield cells


class _Columns:
    """The reductions in one dtype, each measured when its first strategy is judged."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._prepared: dict[str, Prepared] = {}

    @cached_property
    def _problem(self) -> Problem:
        return standard(jnp.dtype(self._dtype))

    @cached_property
    def _programs(self) -> LossPrograms:
        # To compile these takes most of a measurement.
        return LossPrograms(self._problem.loss_fn, self._problem.accumulation)

    def judge(self, name: str, build: Strategy, reduction: str) -> Cell:
        """One strategy's cell; skipped where its hardware is missing."""
        try:
            candidate = build(self._problem.loss_fn, reduction)
        except Unavailable as missing:
            return Cell(name, reduction, self._dtype, None, str(missing))
        if reduction not in self._prepared:
            self._prepared[reduction] = self._reference(reduction)
        with joined(TIMEOUT) as peers:
            found = {name: _bound(candidate, self._problem)}
            report = self._prepared[reduction](found, peers)
        return Cell(name, reduction, self._dtype, report)

    def _reference(self, reduction: str) -> Prepared:
        problem = self._problem
        prepare = prepared(
            problem.loss_fn, reduction, problem.accumulation, self._programs
        )
        return prepare(problem.params, problem.batch, problem.weights, problem.seed)


def _bound(candidate: Callable[..., Any], problem: Problem) -> Callable[..., Any]:
    return lambda params, batch: candidate(params, batch, problem.weights)


def heading(reductions: Sequence[str]) -> Text:
    """The line above the rows."""
    return _line("", [Text(name) for name in reductions])


def line(cells: Sequence[Cell]) -> Text:
    """A strategy's cells in one dtype, below the line with its name."""
    return _line(cells[0].dtype, [cell.__rich__() for cell in cells])


def _line(title: str, columns: Sequence[Text]) -> Text:
    """At most 74 characters for the four reductions there are."""
    text = Text(f"  {title:12}")
    for column in columns:
        column.align("right", 15)
        text.append_text(column)
    return text


def to_json(cells: Sequence[Cell]) -> str:
    """All cells with their full reports."""
    records = [
        {
            "strategy": cell.strategy,
            "reduction": cell.reduction,
            "dtype": cell.dtype,
            "skipped": cell.skipped,
            "report": json.loads(cell.report.to_json()) if cell.report else None,
        }
        for cell in cells
    ]
    return json.dumps(records, indent=1)
