"""Does `verify.fuzz` find each planted interaction of axes, and name just its axes?

Faults of one, two and three axes are planted, one at a time, in a trainer over data,
tensors, sequences, stages and micro-batches, with masks, tied parameters, dropout,
rematerialization, clipping and mixed precision. Layouts come from covering arrays of
strength two and three; a failing layout is shrunk. The right trainer is judged as well,
and one that aborts in a layout and hangs in another.
Verdicts are written to a file: an interrupted study goes on where it was.
"""

import hashlib
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments import _planted_layouts
from experiments._planted_layouts import (
    AXES,
    FAULTS,
    MODEL,
    claim,
    planted,
    problem,
    trainer,
    valid,
)
from experiments._result import Claim, Picture, Result, Settings, write_file
from jdist import verify
from jdist.verify.fuzzing.layout_grid import Layout, layout_grid
from jdist.verify.fuzzing.layout_judge import LayoutJudge
from jdist.verify.fuzzing.layout_search import LayoutSearch

STRENGTHS = (2, 3)
LEAST = {False: 24, True: 2}
"""The number of interactions, by whether the form is the quick one."""
EXACT = 0.9

# The quick form has two claims to measure references for.
QUICK_AXES = ("pp", "micro", "mask")
QUICK = (
    "mean of micro-batches' means",
    "token mask of the next micro-batch",
)


@dataclass(frozen=True, slots=True)
class Found:
    """What one search found.

    Attributes:
      fault: The fault; empty for the right trainer.
      planted: Its axes.
      strength: That of the covering array.
      met: The number of the first layout that failed; 0 if none did.
      array: The number of layouts of the array.
      judged: The number of layouts that were judged, those of shrinking included.
      seconds: The processor's time for that: the judgements, and their references.
      left: The axes of each finding.
      passed: The number of layouts that have the fault and did not fail.
    """

    fault: str
    planted: tuple[str, ...]
    strength: int
    met: int
    array: int
    judged: int
    seconds: float
    left: tuple[tuple[str, ...], ...]
    passed: int

    @property
    def exact(self) -> bool:
        """Whether all findings are of just the planted axes, and there is one."""
        return {frozenset(axes) for axes in self.left} == {frozenset(self.planted)}


class Bench:
    """Searches for one fault after the other, with references that are kept.

    Where a fault is not planted the trainer is the right one, which is judged once.

    Args:
      axes: The values of each axis.
      seed: Of the covering arrays.
      folder: Where verdicts are kept, and those of the same code are read; None to keep
        none.
    """

    def __init__(
        self, axes: Mapping[str, Sequence[Any]], seed: int, folder: Path | None = None
    ) -> None:
        self.axes, self._seed = axes, seed
        self._path = folder and folder / f"verdicts-{_code()}.pickle"
        self._fault: str | None = None
        self._judge = LayoutJudge(
            problem, claim, lambda layout: trainer(layout, self._fault), MODEL
        )
        self._known: dict[Any, tuple[verify.Verdict, float]] = {}
        if self._path and self._path.exists():
            self._known = pickle.loads(self._path.read_bytes())

    def search(self, fault: str, strength: int) -> Found:
        """A search for a fault; empty for the right trainer."""
        grid = layout_grid("fuzz", self.axes, valid, strength)
        asked: dict[Any, float] = {}
        passed = 0

        def judge(layout: dict[str, Any]) -> verify.Verdict:
            nonlocal passed
            simplest = {a: v if a in MODEL else AXES[a][0] for a, v in layout.items()}
            # The first layout of a claim measures its reference.
            for each in (simplest, layout):
                verdict, asked[tuple(each.values())] = self._verdict(each, fault)
            passed += planted(layout, fault) and not verdict.fails
            return verdict

        judges: Any = SimpleNamespace(judge=judge, trace=lambda _: (None, "not asked"))
        search = LayoutSearch(grid, MODEL, strength, judges, self._seed)
        search.run(None, shown=False)
        report = search.report()
        fails = [each.fails for each in report.verdicts]
        shrunk = sum(each.judged for each in report.findings)
        return Found(
            fault,
            FAULTS.get(fault, ()),
            strength,
            1 + fails.index(True) if any(fails) else 0,
            len(fails),
            len(fails) + shrunk,
            sum(asked.values()),
            tuple(tuple(each.axes) for each in report.findings),
            passed,
        )

    def _verdict(self, layout: Layout, fault: str) -> tuple[verify.Verdict, float]:
        self._fault = fault if planted(layout, fault) else None
        key = self._fault, tuple(layout.values())
        if key not in self._known:
            start = time.process_time()
            verdict = self._judge.judge(dict(layout))
            self._known[key] = verdict, time.process_time() - start
            self._keep()
        return self._known[key]

    def _keep(self) -> None:
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._path, pickle.dumps(self._known))

    def right(self) -> list[verify.Verdict]:
        """All verdicts on the right trainer."""
        return [found for (fault, _), (found, _) in self._known.items() if not fault]

    def random_draws(self, fault: str) -> float:
        """The mean number of layouts, drawn at random, up to one that has the fault."""
        grid = layout_grid("fuzz", self.axes, valid, 1)
        count = len(grid.rows)
        having = sum(planted(grid.layout(row), fault) for row in range(count))
        return (count + 1) / (having + 1)


def _code() -> str:
    """A hash of the sources that verdicts depend on."""
    own = sorted(Path(verify.__file__).parent.rglob("*.py"))
    files = [Path(_planted_layouts.__file__), *own]
    return hashlib.sha256(b"".join(x.read_bytes() for x in files)).hexdigest()[:16]


def run(settings: Settings, progress: Progress) -> Result:
    """Plants each fault, and searches by arrays of both strengths."""
    axes, faults = AXES, tuple(FAULTS)
    if settings.quick:
        axes = {a: own[: 1 + (a in QUICK_AXES)] for a, own in AXES.items()}
        faults = QUICK
    bench = Bench(axes, settings.seed, Path(settings.out) / "fuzz_study-verdicts")
    cells = [(fault, strength) for fault in ("", *faults) for strength in STRENGTHS]
    found = [
        bench.search(fault, strength)
        for fault, strength in progress.track(cells, description="searching")
    ]
    planted_ones = [each for each in found if each.fault]
    draws = {fault: bench.random_draws(fault) for fault in faults}
    by_count, by_fault = counted(planted_ones, draws), listed(planted_ones, draws)
    shown = claims(planted_ones, bench.right(), LEAST[settings.quick])
    return Result(
        claims=[*shown, endings(quick=settings.quick)],
        pictures=[
            Picture(
                "layouts",
                "The layouts up to the first one that fails, beside the mean number of "
                "random layouts up to one that has the fault.",
                plot(planted_ones, draws),
            )
        ],
        tables={"By the number of axes": by_count, "By fault": by_fault},
        data={"searches": [asdict(each) for each in found], "random draws": draws},
        notes=[
            "The seconds of a search are the processor's, of its own judgements and "
            "references; here they were shared."
        ],
        files={"faults.md": partial(_write_markdown, [by_count, by_fault])},
    )


# --- a trainer that ends its process, which another process imports ---

ENDINGS = {"abort": "ended", "hang": "hung"}
"""How it ends, and what the verdict is."""


def endings(*, quick: bool) -> Claim:
    """Whether an abort and a hang are findings like others."""
    text = "a layout that aborts and one that hangs are findings, named by their axis"
    if quick:
        return Claim(text, None, "", "a hang takes its deadline: in the full form only")
    axes = {"way": ("right", *ENDINGS), "micro": (1, 2)}
    options: dict[str, Any] = {"axes": axes, "deadline": 60.0}
    found = verify.fuzz(_line, _claimed, _ending, **options)
    met = {
        each.axes["way"]: each.verdict.outcome
        for each in found.findings
        if each.axes.keys() == {"way"}
    }
    return Claim(text, met == ENDINGS, str(met))


def _line(_: Layout) -> tuple[Any, Any]:
    x = np.arange(22, dtype=np.float32).reshape(11, 2) / 9
    return np.array([0.3, -0.7], np.float32), x


def _squares(w: Any, x: Any) -> Any:
    return (x @ w) ** 2


def _claimed(_: Layout) -> Any:
    return _squares


def _ending(layout: Layout) -> Any:
    if layout["way"] == "abort":
        os.abort()
    while layout["way"] == "hang":
        time.sleep(1)
    return jax.value_and_grad(lambda w, x: _squares(w, x).mean())


# --- what is claimed, and shown ---


def claims(
    found: Sequence[Found], right: Sequence[verify.Verdict], least: int
) -> list[Claim]:
    """The claims of the experiment."""
    sizes = {each.fault: len(each.planted) for each in found}
    pairs = [e for e in found if e.strength == 2 and len(e.planted) <= 2]
    triples = [e for e in found if e.strength == 3]
    exact = [each for each in found if each.exact]
    bad = [each for each in right if each.outcome != "right"]
    per_size = ", ".join(
        f"{list(sizes.values()).count(n)} of {n}" for n in sorted(set(sizes.values()))
    )
    return [
        Claim(
            f"at least {least} interactions, of up to three axes, were planted",
            len(sizes) >= least and max(sizes.values(), default=0) == 3,
            f"{len(sizes)}: {per_size}",
        ),
        _all_met("pairs find all interactions of one and two axes", pairs),
        _all_met("triples find all interactions", triples),
        Claim(
            f"in {EXACT:.0%} of the searches just the planted axes are left",
            bool(found) and len(exact) >= EXACT * len(found),
            f"{len(exact)} of {len(found)}",
            leads=True,
        ),
        Claim(
            "the right trainer is right in each layout that was tried",
            bool(right) and not bad,
            f"{len(right) - len(bad)} of {len(right)}",
            leads=True,
        ),
    ]


def _all_met(text: str, found: Sequence[Found]) -> Claim:
    met = sum(each.met > 0 for each in found)
    return Claim(
        text, bool(found) and met == len(found), f"{met} of {len(found)}", leads=True
    )


def counted(found: Sequence[Found], draws: Mapping[str, float]) -> list[list[str]]:
    """A table of the searches by the number of planted axes and strength."""
    rows = [
        [
            "axes",
            "strength",
            "planted",
            "found",
            "just its axes",
            "layouts to the first that fails: mean, largest",
            "random layouts: mean, largest",
            "judged: mean, largest",
            "seconds: mean, largest",
        ]
    ]
    for size in sorted({len(each.planted) for each in found}):
        for strength in STRENGTHS:
            own = [e for e in found if (len(e.planted), e.strength) == (size, strength)]
            met = [each for each in own if each.met]
            rows.append(
                [
                    str(size),
                    str(strength),
                    str(len(own)),
                    str(len(met)),
                    str(sum(each.exact for each in own)),
                    _spread([each.met for each in met]),
                    _spread([draws[each.fault] for each in own]),
                    _spread([each.judged for each in own]),
                    _spread([each.seconds for each in own]),
                ]
            )
    return rows


def _spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.1f}, {max(values):.0f}" if values else ""


def listed(found: Sequence[Found], draws: Mapping[str, float]) -> list[list[str]]:
    """A table of the faults, with the findings of each strength."""
    header = ["fault", "axes", "random layouts, mean"]
    for strength in STRENGTHS:
        header += [f"strength {strength}: layout", "judged", "left"]
    rows = [header]
    for fault, axes in {each.fault: each.planted for each in found}.items():
        row = [fault, ", ".join(axes), f"{draws[fault]:.1f}"]
        for each in (e for e in found if e.fault == fault):
            left = "; ".join(", ".join(axes) for axes in each.left)
            layout = f"{each.met} of {each.array}" if each.met else "none"
            row += [layout, str(each.judged), "just these" if each.exact else left]
        rows.append(row)
    return rows


def _write_markdown(tables: Sequence[Sequence[Sequence[str]]], path: Path) -> None:
    """Writes the tables of docs/verify.md."""
    lines: list[str] = []
    for header, *body in tables:
        rows = [header, ["---"] * len(header), *body]
        lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    path.write_text("\n".join(lines))


def plot(found: Sequence[Found], draws: Mapping[str, float]) -> Figure:
    """A row for each fault: a dot for each strength, and a line for random layouts."""
    faults = list(draws)
    figure, axes = plt.subplots(figsize=(7, 0.25 * len(faults) + 1))
    styles = {2: ("tab:blue", "o"), 3: ("tab:orange", "x")}
    for strength, (color, marker) in styles.items():
        own = [e for e in found if e.strength == strength and e.met]
        axes.scatter(
            [each.met for each in own], [faults.index(each.fault) for each in own],
            s=16, c=color, marker=marker, label=f"strength {strength}",
        )  # fmt: skip
    axes.scatter(
        list(draws.values()), range(len(faults)), c="0.6", marker="|", label="random"
    )
    axes.set(xscale="log", xlabel="layouts")
    axes.set_yticks(range(len(faults)), faults, fontsize=7)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
