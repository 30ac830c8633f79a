"""The search over layouts: a covering array, then random ones, each failure shrunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from jdist._errors import (
    check_choice,
    check_function,
    check_positive_seconds,
    listed,
)
from jdist.verify.fuzzing.coverage import covering_rows, isolating_rows, uncovered
from jdist.verify.fuzzing.judging_process import JudgingProcess
from jdist.verify.fuzzing.layout_grid import Layout, LayoutGrid, layout_grid, named
from jdist.verify.fuzzing.layout_judge import LayoutJudge
from jdist.verify.fuzzing.report import FuzzReport, WrongLayout
from jdist.verify.fuzzing.shrinking import shrink
from jdist.verify.fuzzing.verdict import Verdict
from jdist.verify.progress import progress

AGAIN = 2
"""Further layouts that are tried for a combination that was refused."""


def fuzz(  # noqa: PLR0913 - options, by keyword
    problem: Callable[[Layout], Any],
    claim: Callable[[Layout], Any],
    trainer: Callable[[Layout], Callable[..., Any]],
    *,
    axes: Mapping[str, Sequence[Any]],
    model: Sequence[str] = (),
    valid: Callable[[Layout], bool] | None = None,
    strength: int = 2,
    seconds: float | None = None,
    deadline: float | None = 600.0,
) -> FuzzReport:
    """Looks for the smallest layout in which a trainer is wrong.

    A layout gives each axis a value: sizes of a mesh, micro-batches, a mask, dropout.
    First come the layouts of a covering array, in which each pair of values of two axes
    occurs; then random ones, while there is time. A layout that fails is shrunk: axes
    go back to their first values, those of the layout before those of the model, as
    long as it fails for the same reason. What is left is the interaction that is wrong.

    Layouts are judged in another process, and in a new one after a layout has ended it:
    an abort of XLA and a trainer that hangs are findings like others. That process has
    this one's devices and settings of JAX, and imports `problem`, `claim` and `trainer`
    by their modules and names. Do not use an accelerator in both.

    Args:
      problem: `problem(layout) -> (params, batch)`, or `(params, batch, weights)`, as
        in `verify.gradients`. It is given the axes in `model` alone.
      claim: `claim(layout) -> loss_fn`, of one device, as in `verify.gradients`; or
        `(loss_fn, update)` or `(loss_fn, update, init)`, as in `verify.step`, whose
        optimizer's state is `init(params)`, or `()`. It is given the axes in `model`
        alone, and its reference is measured once for each of their combinations.
      trainer: `trainer(layout) -> candidate`, of all axes: a candidate of
        `verify.gradients`, or of `verify.step` where the claim has an update. A
        ValueError or NotImplementedError, here or when the candidate is called, means
        that it does not support the layout.
      axes: The values of each axis, by its name; the simplest value first.
      model: The axes that the problem and the claim depend on.
      valid: `valid(layout) -> bool`: which layouts there are; None for all.
      strength: The number of axes whose values are all combined: 2 for pairs.
      seconds: How long random layouts, others in each search, are judged after the
        covering array, counted from the start. None for no random layouts.
      deadline: Seconds in which a layout has to be judged, the compilation and the
        reference included. None judges in this process, which an abort ends and a hang
        stops: for a debugger, or functions that another process cannot import.

    Returns:
      A `FuzzReport`. It is ok if every layout that the trainer does not refuse is
      right, and there is one. Combinations of which all layouts were refused are in its
      `uncovered`.

    Raises:
      ValueError: No axes; an axis without values, or with one twice; `model` names no
        axis; a strength below 1 or above the number of axes; more than 262144
        combinations; `valid` allows none; a function that another process cannot
        import; a problem or a claim that cannot be judged.
      TypeError: An argument is of another type, or an axis's value cannot be hashed.
      KeyboardInterrupt: It was interrupted. The findings so far are printed on standard
        error.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def problem(layout):
      ...     return jnp.array([0.3, 0.4]), jnp.arange(12.0).reshape(6, 2) / 9
      >>> def claim(layout):
      ...     return lambda w, x: jnp.tanh(x @ w) ** 2
      >>> def trainer(layout):
      ...     parts = layout["micro"]
      ...     def mean(w, x):                       # scaled for "fast" micro-batches
      ...         scale = 2 if parts > 1 and layout["fast"] else 1
      ...         return scale * (jnp.tanh(x @ w) ** 2).mean()
      ...     def candidate(w, x):
      ...         each = [jax.value_and_grad(mean)(w, x) for x in jnp.split(x, parts)]
      ...         return jax.tree.map(lambda *g: sum(g) / parts, *each)
      ...     return candidate
      >>> axes = {"micro": (1, 2, 3), "fast": (False, True), "remat": (False, True)}
      >>> found = fuzz(problem, claim, trainer, axes=axes, deadline=None)
      >>> found.ok, found.smallest
      (False, {'micro': 2, 'fast': True, 'remat': False})
      >>> found.findings[0].axes
      {'micro': 2, 'fast': True}

    References:
      Kuhn, Wallace and Gallo, Software Fault Interactions and Implications for Software
      Testing, IEEE Transactions on Software Engineering 30(6), 2004: most faults show
      in the values of one or two parameters.
    """
    given = {"problem": problem, "claim": claim, "trainer": trainer}
    for name, fn in given.items():
        check_function(f"fuzz({name}=...)", fn)
    for name, limit in {"seconds": seconds, "deadline": deadline}.items():
        if limit is not None:
            check_positive_seconds(f"fuzz({name}=...)", limit)
    grid = layout_grid("fuzz", axes, valid, strength)
    own = listed("fuzz(model=...)", model, str, "must be names of axes")
    for name in own:
        check_choice("fuzz(model=...)", name, axes)
    until = None if seconds is None else time.monotonic() + seconds
    here = LayoutJudge(problem, claim, trainer, own)
    with (
        nullcontext(here)
        if deadline is None
        else closing(JudgingProcess(here, axes, deadline))
    ) as judge:
        search = LayoutSearch(grid, own, strength, judge)
        try:
            search.run(until, shown=deadline is not None)
        except KeyboardInterrupt:
            console = Console(stderr=True)
            console.print(search.report())
            raise
    return search.report()


@dataclass(eq=False)
class LayoutSearch:
    """One search: what was judged, and what was found.

    Attributes:
      grid: The layouts that are allowed.
      model: The axes that go back to their first values last.
      strength: The number of axes whose values are all combined.
      judge: What judges a layout.
      seed: Seed of the covering array.
    """

    grid: LayoutGrid
    model: Sequence[str]
    strength: int
    judge: LayoutJudge | JudgingProcess
    seed: int = 0
    _known: dict[tuple[Any, ...], Verdict] = field(default_factory=dict, init=False)
    _tried: dict[int, Verdict] = field(default_factory=dict, init=False)
    _findings: list[WrongLayout] = field(default_factory=list, init=False)
    _tell: Callable[..., None] = field(init=False)

    def run(self, until: float | None, shown: bool) -> None:
        """Judges the covering array, then random layouts until then."""
        rows = self.grid.rows
        chosen = covering_rows(rows, self.strength, self.seed)
        for _ in range(1 + AGAIN):
            self._try(chosen, None, shown)
            # Combinations that were in refused layouts only.
            refused = [row for row in self._tried if row not in self._judged()]
            usable = ~np.isin(np.arange(len(rows)), refused)
            chosen = isolating_rows(rows, self.strength, usable, self._judged())
        if until is not None:
            order = np.random.default_rng().permutation(len(rows))
            self._try(order.tolist(), until, shown)

    def report(self) -> FuzzReport:
        """The report of what has been judged so far."""
        missing = uncovered(self.grid, self.strength, self._judged())
        verdicts = tuple(self._tried.values())
        found = tuple(sorted(self._findings, key=lambda each: len(each.axes)))
        return FuzzReport(self.grid.axes, verdicts, found, tuple(missing))

    def _judged(self) -> list[int]:
        """The layouts that were tried and not refused."""
        return [row for row, v in self._tried.items() if v.outcome != "refused"]

    def _try(self, rows: Sequence[int], until: float | None, shown: bool) -> None:
        """Judges layouts, and shrinks each that fails as none before."""
        with progress("judging layouts", len(rows) * shown) as self._tell:
            for row in rows:
                if until is not None and time.monotonic() >= until:
                    return
                if row not in self._tried:
                    verdict = self._verdict(self.grid.layout(row))
                    self._tried[row] = verdict
                    if verdict.fails and not self._explained(verdict):
                        self._findings.append(self._shrunk(verdict))
                self._tell()

    def _verdict(self, layout: dict[str, Any]) -> Verdict:
        """The verdict on a layout, which is judged once."""
        key = tuple(layout.values())
        if key not in self._known:
            self._tell(f"judging {named(layout)}", runs=0)
            self._known[key] = self.judge.judge(layout)
        return self._known[key]

    def _explained(self, verdict: Verdict) -> bool:
        """Whether a finding is in this layout too."""
        return any(
            found.axes.keys() <= self.grid.moved(verdict.layout).keys()
            and found.verdict.reason.same(verdict.reason)
            for found in self._findings
        )

    def _shrunk(self, verdict: Verdict) -> WrongLayout:
        """The smallest layout that fails as this one does."""
        before = len(self._known)

        def fails(layout: dict[str, Any]) -> bool:
            found = self._verdict(layout)
            return found.fails and found.reason.same(verdict.reason)

        # Those of the layout go back before those of the model.
        order = sorted(self.grid.axes.items(), key=lambda item: item[0] in self.model)
        least = shrink(verdict.layout, dict(order), self.grid.valid, fails)
        judged = len(self._known) - before
        axes = self.grid.moved(least)
        right = [v.layout for v in self._known.values() if v.outcome == "right"]
        kept = tuple(a for a in axes if {**least, a: self.grid.axes[a][0]} not in right)
        smallest = self._verdict(least)
        wrong = smallest.outcome == "wrong"
        told = self.judge.trace(least) if wrong else (None, "nothing came back")
        return WrongLayout(smallest, axes, kept, verdict.layout, judged, *told)
