"""How many planted faults does the judge find, of a hundred kinds on fourteen losses in
three precisions, and how many false alarms does it raise?

Each loss is differentiated in all ways of right programs (micro-batches, other orders,
shards, forward mode, float64), and wrongly in all ways of a list: scales, leaves,
entries, examples, keys, labels, parameters, mistakes inside the model. The size of a
fault is the largest relative distance of a leaf from the right one in the 2-norm, and
the rates are given by size. The losses include sampled noise, dropout, sampled actions,
casts, recurrence and batch statistics.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._gradient_problems import PROBLEMS, GradientProblem, problem
from experiments._planted_faults import Trainer, plant
from experiments._result import Claim, Picture, Result, Settings
from experiments._right_programs import right_programs
from jdist import verify

DTYPES = ("float32", "float64", "bfloat16")
QUICK = {
    "float32": ("sampled noise",),
    "float64": ("linear regression",),
    "bfloat16": ("linear regression",),
}
# What must be found in a precision: the share of the faults above a size.
WANTED = {"float32": (0.995, 1e-3), "float64": (0.995, 1e-3), "bfloat16": (0.95, 0.05)}
CLASSES = (0.0, 1e-5, 1e-3, 1e-2, 0.05, 0.3, 1.0, np.inf)
# On a loss with random numbers these must never pass, whatever the noise.
UNMISTAKABLE = ("zero", "negated", "doubled", "other keys", "keys reversed")
NORMAL = {"faults": 1800, "kinds": 100, "losses": 14, "right": 500}
SHORT = {"faults": 200, "kinds": 60, "losses": 2, "right": 20}


@dataclass(frozen=True, slots=True)
class Judged:
    """A gradient and its verdict.

    Attributes:
      loss: The name of the problem.
      dtype: The dtype of its parameters.
      precision: The dtype that it computes in: bfloat16 if the loss casts to it.
      family: The family of the fault; empty for a right program.
      name: The name of the fault, or of the right program.
      size: The relative size of the fault; 0 for a right program.
      verdict: "found", "not judged" or "passed".
      ratio: The largest error/bound.
      random: Whether the loss draws random numbers.
    """

    loss: str
    dtype: str
    precision: str
    family: str
    name: str
    size: float
    verdict: str
    ratio: float
    random: bool


def run(settings: Settings, progress: Progress) -> Result:
    """Plants faults, judges gradients and counts verdicts."""
    cells = [
        (dtype, name)
        for dtype in DTYPES
        for name in (QUICK[dtype] if settings.quick else PROBLEMS)
    ]
    found: list[Judged] = []
    oracles: dict[str, str] = {}
    for dtype, name in progress.track(cells, description="judging"):
        with jax.enable_x64(dtype == "float64"):
            given = problem(name, jnp.dtype(dtype), settings.seed)
            rows, oracle = judged(given, dtype, settings.quick)
        found += rows
        oracles[f"{name}, {dtype}"] = oracle
    right = [row for row in found if not row.family]
    faults = [row for row in found if row.family]
    return Result(
        claims=claims(faults, right, oracles, SHORT if settings.quick else NORMAL),
        pictures=[
            Picture(
                "faults",
                "Every fault at its size and at its error over the bound, which is the "
                "dashed line. At the left edge, right programs.",
                plot(faults, right),
            )
        ],
        tables={
            "Faults found, by size": by_size(faults),
            "Faults found, by kind": by_family(faults),
            "Faults not found": [["fault"], *([text] for text in missed(faults))],
        },
        data={
            "judged": [_plain(row) for row in found],
            "oracles": oracles,
            "missed": missed(faults),
        },
        files={"rates.md": partial(write_markdown, faults, right)},
    )


def judged(
    given: GradientProblem, dtype: str, quick: bool = False
) -> tuple[list[Judged], str]:
    """Verdicts on all right programs and faults of a problem, and on its reference."""
    trainer = Trainer(given, seed=0)
    results: dict[str, Any] = {}
    sizes: dict[str, tuple[str, str, float]] = {}
    for name, result in right_programs(trainer, quick):
        results[f"right: {name}"] = result
        sizes[f"right: {name}"] = ("", name, 0.0)
    loss = results["right: compiled"][0]
    for family, name, leaves in plant(trainer):
        size = trainer.size(leaves)
        # A size of 0: the problem cannot show the fault, such as padding that divides.
        if size:
            stored = {k: v.astype(trainer.dtypes[k]) for k, v in leaves.items()}
            results[f"fault: {name}"] = loss, stored
            sizes[f"fault: {name}"] = (family, name, size)
    report = verify.gradients(
        _mean_of(given) if given.coupled else given.losses,
        given.params,
        given.batch,
        {key: partial(_given, result) for key, result in results.items()},
        weights=given.weights,
        reduction=given.reduction,
    )
    precision = "bfloat16" if given.coarse else dtype
    rows = []
    for key, (family, name, size) in sizes.items():
        own = report.of(key)
        verdict, ratio = _verdict(own), float(np.nan_to_num(own.worst, nan=np.inf))
        rows.append(
            Judged(
                given.name, dtype, precision, family, name, size, verdict, ratio,
                given.random,
            )
        )  # fmt: skip
    return rows, str(report.oracle)


def _given(result: Any, params: Any, batch: Any) -> Any:
    return result


def _mean_of(given: GradientProblem) -> Callable[[Any, Any], jax.Array]:
    return lambda params, batch: jnp.mean(given.losses(params, batch))


def _verdict(report: verify.Report) -> str:
    if report.failures:
        return "found"
    return "not judged" if report.unjudged else "passed"


def _plain(row: Judged) -> dict[str, Any]:
    """The row as JSON values; JSON has no infinity."""
    return {
        k: str(v) if isinstance(v, float) and not np.isfinite(v) else v
        for k, v in asdict(row).items()
    }


# --- what is claimed, and shown ---


def claims(
    faults: Sequence[Judged],
    right: Sequence[Judged],
    oracles: dict[str, str],
    least: dict[str, int],
) -> list[Claim]:
    """The claims of the experiment."""
    counted = {
        "faults": len(faults),
        "kinds": len({row.name for row in faults}),
        "losses": len({row.loss for row in faults}),
        "right": len(right),
    }
    condemned = [row for row in right if row.verdict == "found"]
    blind = [row for row in right if row.verdict == "not judged"]
    on_noise = [row for row in faults if row.random and row.name in UNMISTAKABLE]
    noisy = [row for row in on_noise if row.verdict != "found"]
    wrong = [name for name, text in oracles.items() if "WRONG" in text]
    return [
        Claim(
            f"at least {least['faults']} faults of {least['kinds']} kinds over "
            f"{least['losses']} losses, beside {least['right']} right programs",
            all(counted[key] >= number for key, number in least.items()),
            ", ".join(f"{number} {key}" for key, number in counted.items()),
        ),
        *(_rate(precision, faults) for precision in DTYPES),
        Claim(
            "no false alarm: every right program passes",
            not condemned,
            f"{len(condemned)} of {len(right)}, {len(blind)} not judged; error/bound "
            f"at most {max(row.ratio for row in right):.2f}",
            leads=True,
        ),
        Claim(
            f"on random losses nothing passes that is {', '.join(UNMISTAKABLE)}",
            bool(on_noise) and not noisy,
            f"{len(on_noise) - len(noisy)} of {len(on_noise)} found",
        ),
        Claim(
            "no reference is called wrong by its finite difference",
            not wrong,
            ", ".join(wrong) or f"{len(oracles)} losses",
        ),
    ]


def _rate(precision: str, faults: Sequence[Judged]) -> Claim:
    share, size = WANTED[precision]
    able = [row for row in faults if row.precision == precision and row.size > size]
    found = sum(row.verdict == "found" for row in able)
    return Claim(
        f"{precision}: at least {share:.1%} of the faults above {size:g} are found",
        bool(able) and found >= share * len(able),
        f"{found} of {len(able)}, {found / max(len(able), 1):.1%}",
        leads=True,
    )


def missed(faults: Sequence[Judged]) -> list[str]:
    """The faults above a precision's size that were not found."""
    return [
        f"{row.verdict}: {row.name} of size {row.size:.2g} in {row.loss}, {row.dtype} "
        f"(error/bound {row.ratio:.2g})"
        for row in faults
        if row.verdict != "found" and row.size > WANTED[row.precision][1]
    ]


def _classes() -> Iterator[tuple[str, float, float]]:
    for low, high in pairwise(CLASSES):
        text = f"above {low:g}" if np.isinf(high) else f"{low:g} to {high:g}"
        yield text, low, high


def by_size(faults: Sequence[Judged]) -> list[list[str]]:
    """A table of found faults, by size and precision."""
    rows = [["relative size", *DTYPES]]
    for text, low, high in _classes():
        within = [row for row in faults if low < row.size <= high]
        rows.append([text, *(_found(within, "precision", d) for d in DTYPES)])
    return rows


def by_family(faults: Sequence[Judged]) -> list[list[str]]:
    """A table of found faults above their precision's size, by family."""
    rows = [["what is wrong", *DTYPES]]
    able = [row for row in faults if row.size > WANTED[row.precision][1]]
    for family in dict.fromkeys(row.family for row in faults):
        within = [row for row in able if row.family == family]
        rows.append([family, *(_found(within, "precision", d) for d in DTYPES)])
    return rows


def _found(rows: Sequence[Judged], key: str, value: str) -> str:
    own = [row for row in rows if getattr(row, key) == value]
    found = sum(row.verdict == "found" for row in own)
    return f"{found} of {len(own)} ({found / len(own):.1%})" if own else "none"


def write_markdown(
    faults: Sequence[Judged], right: Sequence[Judged], path: Path
) -> None:
    """Writes the table of docs/verify.md."""
    header, *body = by_size(faults)
    lines = [header, ["---", *["---:"] * len(DTYPES)], *body]
    programs = [row for row in right if row.verdict == "found"]
    lines.append(
        ["false alarms, of right programs"]
        + [
            f"{sum(row.precision == d for row in programs)} of "
            f"{sum(row.precision == d for row in right)}"
            for d in DTYPES
        ]
    )
    path.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))


def plot(faults: Sequence[Judged], right: Sequence[Judged]) -> Figure:
    """A dot for each gradient, in a panel for each precision."""
    figure, panels = plt.subplots(1, 3, figsize=(12, 4.5), sharex=True, sharey=True)
    for axes, precision in zip(panels, DTYPES, strict=True):
        own = [row for row in faults if row.precision == precision]
        for verdict, color in (
            ("found", "tab:green"),
            ("not judged", "tab:orange"),
            ("passed", "firebrick"),
        ):
            dots = [row for row in own if row.verdict == verdict]
            axes.scatter(
                [np.clip(row.size, 1e-7, 1e4) for row in dots],
                [np.clip(row.ratio, 1e-3, 1e9) for row in dots],
                s=7, color=color, label=f"fault {verdict}",
            )  # fmt: skip
        beside = [row.ratio for row in right if row.precision == precision]
        axes.scatter(
            np.full(len(beside), 2e-8), np.clip(beside, 1e-3, 1e9),
            s=7, color="black", label="right program",
        )  # fmt: skip
        axes.axhline(1, color="black", linestyle="--", linewidth=1)
        axes.axvline(WANTED[precision][1], color="0.7", linewidth=1)
        axes.set(xscale="log", yscale="log", title=precision)
        axes.set_xlabel("relative size of the fault")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("error / bound")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="upper center", ncols=4, frameon=False, bbox_to_anchor=(0.5, 0.02),
    )  # fmt: skip
    return figure
