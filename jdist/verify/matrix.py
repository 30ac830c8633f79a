"""The equivalence matrix: every strategy, judged for each reduction and dtype.

The rows are found by the entry-point group `jdist.verify`, so that the judge imports no
strategy and any package can add its own. An entry point names a function without
arguments that returns strategies by name, and a strategy is

    build(loss_fn, reduction) -> candidate
    candidate(params, batch, weights) -> (loss, gradient)

`build` raises `jdist.Unavailable` where the hardware is missing; the row is then
skipped by name, with the reason. A mapping in the place of a strategy holds further
ones: combinations of what other rows show, which are judged on request only.
"""

import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import metadata
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.text import Text

from jdist import _compilation_cache
from jdist._compat import double_precision, set_cpu_device_count
from jdist._errors import JdistError, Unavailable
from jdist.verify.gradient_check import Reference
from jdist.verify.measure import LossPrograms, ReducedLoss
from jdist.verify.problem import Problem, standard, with_rules
from jdist.verify.processes.peers import TIMEOUT, joined
from jdist.verify.report import Report

GROUP = "jdist.verify"
DTYPES = ("float32", "float64", "bfloat16")
PROBLEMS = {"standard": standard, "rules": with_rules}
"""The losses that strategies are judged on: the common one, and one with derivative
rules that are not linear in their cotangent, for mean and sum."""

Strategy = Callable[[Callable[..., jax.Array], str], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One strategy judged for one reduction in one dtype.

    Attributes:
      strategy: The row's name.
      reduction: The column's name.
      dtype: Dtype of the parameters and the batch.
      report: The judge's findings, or None where the row was skipped.
      skipped: Why the row was skipped.
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

    def __bool__(self) -> bool:
        return self.ok

    def __rich__(self) -> Text:
        """The largest error/bound, or why there is none."""
        if self.report is None:
            return Text("skipped", style="yellow")
        worst = "bit-equal" if self.report.bit_equal else f"{self.report.worst:.2g}"
        return Text(worst, style="green") if self.ok else Text(f"FAILS {worst}", "red")


class Devices(NamedTuple):
    """The devices that a process computes on.

    Attributes:
      cpu_count: Number of CPU devices.
      platform: JAX's name of one platform; None leaves the choice to JAX.
    """

    cpu_count: int
    platform: str | None

    def set_up(self) -> None:
        """Selects the devices; before the process's first computation only."""
        set_cpu_device_count(self.cpu_count)
        if self.platform:
            jax.config.update("jax_platforms", self.platform)
        _compilation_cache.switch_on()


def strategies(combinations: bool = True) -> dict[str, Strategy]:
    """The strategies of all installed packages, by name.

    Args:
      combinations: Whether those in mappings of their own are among them.

    Raises:
      JdistError: Nothing is registered, which means that jdist itself is not installed;
        or two packages use one name.
    """
    found: dict[str, Strategy] = {}
    for entry in metadata.entry_points(group=GROUP):
        for title, given in entry.load()().items():
            if isinstance(given, Mapping) and not combinations:
                continue
            own = given if isinstance(given, Mapping) else {title: given}
            if twice := found.keys() & own.keys():
                names = ", ".join(map(repr, sorted(twice)))
                raise JdistError(f"two entry points of {GROUP!r} provide {names}")
            found |= own
    if not found:
        raise JdistError(
            f"no strategy is registered under the entry-point group {GROUP!r}. Is "
            f"jdist installed? `pip install -e .` in its folder registers its own."
        )
    return found


def judge(
    rows: Mapping[str, Strategy],
    reductions: Sequence[str],
    dtypes: Sequence[str],
    problem: str = "standard",
) -> Iterator[list[Cell]]:
    """Judges the matrix; yields a strategy's reductions in one dtype as they are done.

    All strategies share the references and their measured bounds, which cost more than
    a candidate. `problem` is a key of `PROBLEMS`.
    """
    columns = {dtype: _Columns(problem, dtype) for dtype in dtypes}
    for name, build in rows.items():
        for dtype in dtypes:
            yield columns[dtype].row(name, build, reductions)


def judge_in_processes(
    names: Sequence[str],
    reductions: Sequence[str],
    dtypes: Sequence[str],
    count: int,
    devices: Devices,
    problem: str = "standard",
) -> Iterator[list[Cell]]:
    """Judges the matrix like `judge`, in several processes at the same time.

    Tracing and lowering take most of the time, and use one core of each process.

    Args:
      names: The names of installed strategies.
      reductions: The reductions of each strategy.
      dtypes: The dtypes of each strategy.
      count: The number of processes.
      devices: The devices of each process.
      problem: A key of `PROBLEMS`.

    Raises:
      RuntimeError: One of them was killed.
      Exception: What a strategy raised.
    """
    # Neighbours share compiled programs: each process gets a range of strategies.
    cuts = [len(names) * n // count for n in range(count + 1)]
    # Not fork, which would copy locks that JAX's threads hold.
    start = multiprocessing.get_context("spawn")
    with ExitStack() as at_end:
        lines = []
        for first, end in pairwise(cuts):
            # A pool of one each, so that a range of strategies stays in one process.
            one = ProcessPoolExecutor(1, start, devices.set_up)
            # Waited for, also after an error: Python 3.11 wakes the threads of pools
            # that are ending at its exit, by pipes that they may have closed: an
            # ignored OSError (Bad file descriptor).
            at_end.callback(one.shutdown, cancel_futures=True)
            line = partial(_of_installed, reductions, dtypes, problem)
            lines += [one.submit(line, name) for name in names[first:end]]
        for done in as_completed(lines):
            try:
                yield from done.result()
            except BrokenProcessPool as error:
                raise RuntimeError(
                    f"One of {count} processes that judge was killed, as the system "
                    "does when memory runs out. --processes 1 needs the least."
                ) from error


def _of_installed(
    reductions: Sequence[str], dtypes: Sequence[str], problem: str, name: str
) -> list[list[Cell]]:
    """Judges one strategy in a worker process of `judge_in_processes`."""
    build = _installed()[name]
    return [_columns(problem, dtype).row(name, build, reductions) for dtype in dtypes]


class _Columns:
    """The reductions in one dtype, each measured when its first strategy is judged."""

    def __init__(self, problem: str, dtype: str) -> None:
        self._make, self._dtype = PROBLEMS[problem], dtype
        self._references: dict[str, Reference] = {}

    @cached_property
    def _problem(self) -> Problem:
        return self._make(jnp.dtype(self._dtype))

    @cached_property
    def _programs(self) -> LossPrograms:
        # Shared by all reductions: compiling them is most of a measurement.
        return LossPrograms(self._problem.loss_fn, self._problem.accumulation)

    def row(self, name: str, build: Strategy, reductions: Sequence[str]) -> list[Cell]:
        """One strategy's cells."""
        with double_precision():
            return [self._cell(name, build, reduction) for reduction in reductions]

    def _cell(self, name: str, build: Strategy, reduction: str) -> Cell:
        """One strategy's cell; skipped where its hardware is missing."""
        try:
            candidate = build(self._problem.loss_fn, reduction)
        except Unavailable as missing:
            return Cell(name, reduction, self._dtype, None, str(missing))
        # After the strategy was built: a skipped row needs no reference.
        if reduction not in self._references:
            self._references[reduction] = self._reference(reduction)
        with joined(TIMEOUT) as peers:
            found = {name: _bound(candidate, self._problem)}
            report = self._references[reduction].judge(found, peers)
        return Cell(name, reduction, self._dtype, report)

    def _reference(self, reduction: str) -> Reference:
        own = self._problem
        programs = self._programs
        loss = ReducedLoss(own.loss_fn, reduction, own.accumulation, programs)
        given = own.params, own.batch, own.weights
        return Reference("gradients", loss, *given, own.finite_differences)


# Caches of a worker process, whose strategies share references and imports.
_columns = cache(_Columns)
_installed = cache(strategies)


def _bound(candidate: Callable[..., Any], problem: Problem) -> Callable[..., Any]:
    return lambda params, batch: candidate(params, batch, problem.weights)


def heading(reductions: Sequence[str]) -> Text:
    """The header line of the matrix."""
    return _line("", [Text(name) for name in reductions])


def line(cells: Sequence[Cell]) -> Text:
    """A line of the matrix: one strategy's cells in one dtype."""
    return _line(cells[0].dtype, [cell.__rich__() for cell in cells])


def _line(title: str, columns: Sequence[Text]) -> Text:
    """A line of fixed-width columns: 74 characters with all four reductions."""
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
            "report": None
            if cell.report is None
            else json.loads(cell.report.to_json()),
        }
        for cell in cells
    ]
    return json.dumps(records, indent=1)
