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
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table
from rich.text import Text

from jdist._compat import double_precision
from jdist._errors import JdistError, Unavailable
from jdist.verify.oracle import REDUCERS
from jdist.verify.problem import Problem, standard
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
    """Judges the matrix; yields all strategies of one dtype and reduction at a time.

    They share the reference and its measured bound, which cost more than a candidate.
    """
    for dtype in dtypes:
        for reduction in reductions:
            # Not around the yield: the caller would run in double precision too.
            with double_precision():
                cells = _judge_column(rows, reduction, dtype)
            yield cells


def _judge_column(
    rows: Mapping[str, Strategy], reduction: str, dtype: str
) -> list[Cell]:
    problem = standard(jnp.dtype(dtype))
    candidates, skipped = {}, {}
    for name, build in rows.items():
        try:
            candidates[name] = _bound(build(problem.loss_fn, reduction), problem)
        except Unavailable as missing:
            skipped[name] = str(missing)
    reports = {}
    if candidates:
        judged = replace(problem, candidates=candidates, reduction=reduction).judge()
        reports = {name: judged.of(name) for name in candidates}
    return [
        Cell(name, reduction, dtype, reports.get(name), skipped.get(name, ""))
        for name in rows
    ]


def _bound(candidate: Callable[..., Any], problem: Problem) -> Callable[..., Any]:
    return lambda params, batch: candidate(params, batch, problem.weights)


def table(cells: Sequence[Cell]) -> Table:
    """Strategies and dtypes down, reductions across; each cell its error/bound."""
    columns = [name for name in REDUCERS if any(c.reduction == name for c in cells)]
    shown = Table(title="largest error/bound (a right answer stays below 1)")
    for title in ("strategy", "dtype"):
        shown.add_column(title)
    for title in columns:
        shown.add_column(title, justify="right")
    at = {(c.strategy, c.dtype, c.reduction): c for c in cells}
    for strategy in dict.fromkeys(c.strategy for c in cells):
        title = strategy
        for dtype in dict.fromkeys(c.dtype for c in cells):
            shown.add_row(title, dtype, *(at[strategy, dtype, r] for r in columns))
            title = ""
    return shown


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
