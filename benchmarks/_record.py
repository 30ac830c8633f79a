"""The last run of each benchmark, kept in a file and shown on two pages.

Every table of figures in docs/benchmarks.md and docs/benchmarks_all.md is written from
`recorded.json`: a block between two comments for each benchmark, one for the goals of
all, and one that sums up.
"""

import datetime
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks._goals import Figure, Goal, ratio, shown
from benchmarks._harness import Case, duration
from experiments._environment import Environment

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "benchmarks" / "recorded.json"
PAGE = ROOT / "docs" / "benchmarks.md"
APPENDIX = ROOT / "docs" / "benchmarks_all.md"
PICTURES = ROOT / "docs" / "_static"
GOALS = "goals"
SUMMARY = "summary"


class Beside(NamedTuple):
    """A row of the summary: jdist, and what one would use in its place."""

    job: str
    instead: str
    benchmark: str
    case: str
    ours: str
    theirs: str


_AUTOGRAD = "example (iv): t5 = mul(remote add(t1, t2), t4), forward and backward, FAST"
BESIDE = (
    Beside(
        "training step on one device, 4 layers of 512",
        "the plain jitted step",
        "data_parallel",
        "training step alone, 4 layers of 512, 256 examples",
        "train_step, a mesh of one",
        "plain jitted step",
    ),
    Beside(
        "training step over two processes, 4 layers of 2048",
        "torch's DDP",
        "ddp",
        "4 x 2048, batch 128",
        "step, jdist",
        "step, torch as shipped",
    ),
    Beside(
        "elastic step over two processes, 8 layers of 1024",
        "`train_step`",
        "elastic",
        "step, 8 x 1024, batch 256",
        "elastic",
        "train_step",
    ),
    Beside(
        "a segment's two halves, a transformer block",
        "`jax.value_and_grad`",
        "segment",
        "transformer block, (4, 128, 256)",
        "segment",
        "value_and_grad of the whole",
    ),
    Beside(
        "`rpc_sync` of a 3 x 3 array",
        "torch's `rpc_sync`",
        "steady",
        "rpc_sync of a 3 x 3 array, which comes back",
        "jdist, quiet",
        "torch as shipped, quiet",
    ),
    Beside(
        "distributed autograd: one remote call, forward and backward",
        "torch's",
        "autograd",
        _AUTOGRAD,
        "jdist",
        "torch",
    ),
    Beside(
        "1F1B, two processes, 8 micro-batches",
        "torch.distributed.pipelining",
        "pipeline",
        "m = 8",
        "1F1B, m = 8, jdist",
        "1F1B, m = 8, torch as shipped",
    ),
    Beside(
        "PipeDream, a micro-batch of 256 rows",
        "1F1B with a flush",
        "pipedream",
        "256 rows",
        "PipeDream",
        "1F1B with a flush, m = 8",
    ),
    Beside(
        "AdamW, 25 M parameters in 16 arrays",
        "optax",
        "optim_step",
        "AdamW, 16 tensors of 25 M",
        "jdist",
        "optax",
    ),
    Beside(
        "AdamW, 25 M parameters in 16 arrays",
        "torch, fused",
        "optim_step",
        "AdamW, 16 tensors of 25 M",
        "jdist",
        "torch fused",
    ),
    Beside(
        "a judgement of one gradient, 64 examples",
        "the gradient itself",
        "data_parallel",
        "judgement, 2 layers of 64, 64 examples",
        "verify.gradients_judge",
        "jax.value_and_grad",
    ),
)
"""The rows of the summary: one job of each part that has a counterpart elsewhere."""

EXPERIMENTS = (
    "ddp_buckets",
    "judge_cost",
    "pipeline_schedules",
    "resnet50_model_parallel",
    "rpc_cost",
)
"""Experiments whose tables are figures of speed, also shown on the page."""

_BLOCK = re.compile(
    r"(<!-- (\w+): `make bench` writes this -->\n).*?(<!-- end of \2 -->)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a benchmark or of an experiment.

    Attributes:
      date: The date of the run, in ISO format.
      where: The machine.
      cases: The measured cases; runs before 24 November 2026 have the goals alone.
      tables: The tables of an experiment: title to rows, of which the first is the
        header.
      seconds: The duration of the run; 0 if it was not recorded.
    """

    date: str
    where: str
    cases: Sequence[Case] = ()
    tables: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def goals(self) -> dict[tuple[str, str], Goal]:
        """The goals of all cases, by job and by what the figure measures."""
        return {
            (case.name, goal.what): goal for case in self.cases for goal in case.goals
        }

    @property
    def times(self) -> dict[tuple[str, str], Figure]:
        """Seconds of the cases without goals, by the job and its first contender.

        In cases with goals the goals are compared instead; their other contenders vary
        with the machine.
        """
        return {
            (case.name, name): figure
            for case in self.cases
            if not case.goals
            for name, figure in [*case.timings.items()][:1]
        }


def run(
    cases: Sequence[Case] = (),
    tables: Mapping[str, Sequence[Sequence[str]]] | None = None,
    seconds: float = 0.0,
) -> Run:
    """A run that ended now on this machine."""
    here = Environment()
    where = (
        f"{here.cores} cores, {here.processor}; Python {here.python}, JAX {here.jax}"
    )
    today = datetime.date.today().isoformat()
    return Run(today, where, cases, tables or {}, round(seconds, 1))


def recorded(path: Path = RECORDED) -> dict[str, Run]:
    """The last recorded run of each benchmark."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Run])


def record(
    runs: Mapping[str, Run],
    path: Path = RECORDED,
    pages: Sequence[Path] = (PAGE, APPENDIX),
) -> None:
    """Stores the runs, replacing those of the same benchmarks; writes the pages."""
    kept = dict(sorted({**recorded(path), **runs}.items()))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    for page in pages:
        page.write_text(written(page.read_text(), kept))


def draw(name: str, folder: Path = PICTURES) -> None:
    """Draws the pictures of a benchmark on the page, if it has any: its `draw`."""
    if name not in EXPERIMENTS:
        module = importlib.import_module(f"benchmarks.{name}")
        if hasattr(module, "draw"):
            module.draw(folder)


def worse(earlier: Run, now: Run) -> list[str]:
    """A sentence for each figure that got worse by more than the spread of both.

    Times of cases without goals are compared only if the machine is the same.
    """
    was, found = earlier.goals, now.goals
    lines = [
        f"{key[0]}: {one}; it was {shown(was[key].figure)} on {earlier.date}"
        for key, one in found.items()
        if key in was and one.worse_than(was[key])
    ]
    # Goals are mostly ratios, which another machine leaves alone; seconds are not.
    if earlier.where != now.where:
        return lines
    before = earlier.times
    return lines + [
        f"{job}: {name} takes {duration(one.median)}; it was "
        f"{duration(before[job, name].median)} on {earlier.date}"
        for (job, name), one in now.times.items()
        if (job, name) in before and one.low > before[job, name].high
    ]


def written(text: str, runs: Mapping[str, Run]) -> str:
    """The page's text with every block written from the runs."""
    machines = list(dict.fromkeys(one.where for one in runs.values()))

    def block(found: re.Match[str]) -> str:
        name = found[2]
        if name == GOALS:
            rows = _goals(runs, machines)
        elif name == SUMMARY:
            rows = _summary(runs)
        else:
            rows = _section(runs.get(name), machines)
        return f"{found[1]}\n{rows}\n\n{found[3]}"

    return _BLOCK.sub(block, text)


def blocks(text: str) -> list[str]:
    """The names of a page's blocks in order."""
    return [found[2] for found in _BLOCK.finditer(text)]


def _goals(runs: Mapping[str, Run], machines: Sequence[str]) -> str:
    """The table of all goals, and a numbered list of the machines."""
    rows = [
        [
            f"`{name}`", job, f"{goal.wanted} {what}", goal.found,
            "met" if goal.met else "**missed**", _when(one, machines),
        ]
        for name, one in runs.items()
        for (job, what), goal in one.goals.items()
    ]  # fmt: skip
    header = ["`python -m benchmarks`", "job", "goal", "figure", "", "date, machine"]
    numbered = [f"{k}. {where}" for k, where in enumerate(machines, start=1)]
    return "\n".join([_table([header, *rows]), "", *numbered])


def _summary(runs: Mapping[str, Run]) -> str:
    """The table of what jdist costs beside what one would use in its place."""
    rows = []
    for row in BESIDE:
        cases = {case.name: case.timings for case in runs[row.benchmark].cases}
        ours, theirs = (cases[row.case][name] for name in (row.ours, row.theirs))
        found = shown(ratio(ours, theirs))
        times = [duration(one.median) for one in (ours, theirs)]
        rows.append([row.job, times[0], row.instead, times[1], found])
    header = ["job", "jdist", "in its place", "", "ratio, and its spread"]
    return _table([header, *rows])


def _section(one: Run | None, machines: Sequence[str]) -> str:
    """The section of one benchmark, with date and machine."""
    if one is None:
        return "No run is recorded."
    when = _when(one, machines)
    timed = [case for case in one.cases if case.timings]
    if not timed and not one.tables:
        return f"Of the last recorded run ({when}) the goals above are kept alone."
    took = f"; the run took {one.seconds:.0f} s" if one.seconds else ""
    parts = [f"Date, machine: {when}{took}."]
    if timed:
        header = ["job", "contender", "median", "middle half", "to the first"]
        parts.append(_table([header, *(row for case in timed for row in _rows(case))]))
    notes = [f"- {case.name}: {case.note}" for case in timed if case.note]
    if notes:
        parts.append("\n".join(notes))
    for title, rows in one.tables.items():
        parts += [f"{title}:", _table(rows)]
    return "\n\n".join(parts)


def _rows(case: Case) -> list[list[str]]:
    first = next(iter(case.timings.values())).median
    rows = [
        [
            "", name, duration(found.median),
            f"{duration(found.low)} to {duration(found.high)}",
            f"{found.median / first:.2f}",
        ]
        for name, found in case.timings.items()
    ]  # fmt: skip
    rows[0][0] = case.name
    if case.limit is not None:
        share = f"{case.limit / first:.2f}"
        rows.append(["", "physical limit", duration(case.limit), "", share])
    return rows


def _table(rows: Sequence[Sequence[str]]) -> str:
    header, *rest = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([header, "|" + "---|" * len(rows[0]), *rest])


def _when(one: Run, machines: Sequence[str]) -> str:
    return f"{one.date}, {machines.index(one.where) + 1}"
