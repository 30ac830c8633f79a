"""What figures should be, what they last were, and the table of all of them."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from experiments._environment import Environment

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "benchmarks" / "recorded.json"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- goals: `make bench` writes this table -->", "<!-- end of goals -->"


@dataclass(frozen=True, slots=True)
class Figure:
    """A median and the quartiles around it, of seconds or of a ratio of such."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of a job, and what it should be.

    Attributes:
      what: What the figure is: "of torch's time".
      figure: As it was measured.
      limit: What it should not exceed.
      at_least: It should not be less instead.
      unit: Of both, where they are no ratio.
    """

    what: str
    figure: Figure
    limit: float
    at_least: bool = False
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the median is on the right side."""
        found = self.figure.median
        return found >= self.limit if self.at_least else found <= self.limit

    @property
    def wanted(self) -> str:
        """The limit, in words."""
        side = "at least" if self.at_least else "at most"
        return f"{side} {self.limit:g}{self.unit}"

    @property
    def found(self) -> str:
        """The figure with its spread."""
        return f"{_shown(self.figure)}{self.unit}"

    def __str__(self) -> str:
        verdict = "" if self.met else ", missed"
        return f"{self.found} {self.what} ({self.wanted}{verdict})"

    def worse_than(self, earlier: "Goal") -> bool:
        """Whether it is, by more than the spread of both."""
        if self.at_least:
            return self.figure.high < earlier.figure.low
        return self.figure.low > earlier.figure.high


@dataclass(frozen=True, slots=True)
class Run:
    """One benchmark's goals, when and where they were measured: job to its goals."""

    date: str
    where: str
    goals: Mapping[str, Sequence[Goal]]


def run(goals: Mapping[str, Sequence[Goal]]) -> Run:
    """The goals, measured here and today."""
    here = Environment()
    where = (
        f"{here.cores} cores, {here.processor}; Python {here.python}, JAX {here.jax}"
    )
    return Run(datetime.date.today().isoformat(), where, goals)


def recorded(path: Path = RECORDED) -> dict[str, Run]:
    """The last recorded run of each benchmark."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Run])


def record(runs: Mapping[str, Run], path: Path = RECORDED, page: Path = PAGE) -> None:
    """Keeps the runs, in place of earlier ones of the same benchmarks."""
    kept = dict(sorted({**recorded(path), **runs}.items()))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{table(kept)}\n{END}{after}")


def worse(earlier: Run, now: Run) -> list[str]:
    """A sentence for each goal that is further away than it was, beyond the spread."""
    was = {
        (job, one.what): one for job, goals in earlier.goals.items() for one in goals
    }
    return [
        f"{job}: {one}; it was {_shown(was[job, one.what].figure)} on {earlier.date}"
        for job, goals in now.goals.items()
        for one in goals
        if (job, one.what) in was and one.worse_than(was[job, one.what])
    ]


def table(runs: Mapping[str, Run]) -> str:
    """All goals as Markdown, and the machines they were measured on."""
    lines = [
        "| `python -m benchmarks` | job | goal | figure | | date, machine |",
        "|---|---|---|---|---|---|",
    ]
    machines = list(dict.fromkeys(one.where for one in runs.values()))
    for name, one in runs.items():
        when = f"{one.date}, {machines.index(one.where) + 1}"
        for job, goals in one.goals.items():
            for goal in goals:
                verdict = "met" if goal.met else "**missed**"
                lines.append(
                    f"| `{name}` | {job} | {goal.wanted} {goal.what} | {goal.found} "
                    f"| {verdict} | {when} |"
                )
    lines += ["", *(f"{k}. {where}" for k, where in enumerate(machines, start=1)), ""]
    return "\n".join(lines)


def ratio(one: Figure, other: Figure) -> Figure:
    """What the one is of the other, at the medians and at the ends of both spreads."""
    return Figure(one.median / other.median, one.low / other.high, one.high / other.low)


def scaled(figure: Figure, factor: float) -> Figure:
    """The figure in another unit."""
    return Figure(*(factor * value for value in dataclasses.astuple(figure)[:3]))


def _shown(figure: Figure) -> str:
    return f"{figure.median:.3g} [{figure.low:.3g}, {figure.high:.3g}]"
