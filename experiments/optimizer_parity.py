"""Do thirteen optimizers follow PyTorch's own runs to rounding; and where is optax
PyTorch, and where another formula?

The runs of torch 2.13 are recorded: fifty steps on four parameters (for Muon matrices,
not rounded to bfloat16), with gradients of several magnitudes, some of them None. They
are the golden files of the tests, so that
only JAX is needed here (`make parity` records them again). optax does not accept a
gradient of None; it is compared on the same problem without them.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._result import Claim, Picture, Result, Settings
from jdist import optim

GOLDEN = Path(__file__).parents[1] / "tests" / "optim" / "golden"
FLOAT64 = 1e-12
# In 50 steps both libraries round the parameter once each, and the rounded moments add
# as much again; the tests derive a bound for each run.
FLOAT32 = 4 * 50 * 2.0**-24
LR = 0.01

# torch's formula here, optax's optimizer of that name, and whether they are equal.
COUNTERPARTS: dict[str, tuple[optim.Optimizer, Any, bool]] = {
    "SGD momentum": (optim.sgd(lr=LR, momentum=0.9), optax.sgd(LR, 0.9), True),
    "Adam": (optim.adam(lr=LR), optax.adam(LR), True),
    "AdamW": (optim.adamw(lr=LR), optax.adamw(LR, weight_decay=1e-2), True),
    "Adamax": (optim.adamax(lr=LR), optax.adamax(LR), True),
    "Adadelta": (
        optim.adadelta(lr=1.0),
        optax.adadelta(1.0, rho=0.9, eps=1e-6),
        True,
    ),
    "RMSprop, eps outside": (
        optim.rmsprop(lr=LR),
        optax.rmsprop(LR, decay=0.99, eps_in_sqrt=False),
        True,
    ),
    "RMSprop": (optim.rmsprop(lr=LR), optax.rmsprop(LR), False),
    "AMSGrad": (optim.adam(lr=LR, amsgrad=True), optax.amsgrad(LR), False),
    "Adagrad": (optim.adagrad(lr=LR), optax.adagrad(LR), False),
    "NAdam": (optim.nadam(lr=LR), optax.nadam(LR), False),
    "RAdam": (optim.radam(lr=LR), optax.radam(LR), False),
    "Rprop": (optim.rprop(lr=LR), optax.rprop(LR), False),
}


class Recorded(NamedTuple):
    """An optimizer with one set of options: its largest difference for each dtype."""

    name: str
    case: str
    float64: float
    float32: float


def run(settings: Settings, progress: Progress) -> Result:
    """Compares with torch's records, then with optax."""
    problem = load("inputs")
    with jax.enable_x64(True):
        recorded = against_torch(settings.quick, progress)
        curves = {
            name: against_optax(problem, ours, theirs)
            for name, (ours, theirs, _) in progress.track(
                COUNTERPARTS.items(), description="optax"
            )
        }
    worst = {k: max(getattr(r, k) for r in recorded) for k in ("float64", "float32")}
    names = sorted({r.name for r in recorded})
    return Result(
        claims=claims(worst, names, curves),
        pictures=[
            Picture(
                "torch",
                "The largest difference from torch's recorded runs, relative to each "
                "parameter's size, in both precisions. A difference of 0 stands at the "
                "left edge; the claims are dashed.",
                plot_torch(recorded),
            ),
            Picture(
                "optax",
                "optax beside jdist: in grey those that are claimed to be one formula, "
                "in red the others. A difference of 0 is drawn as 1e-18.",
                plot_optax(curves),
            ),
        ],
        tables={
            "Differences from torch": [
                ["optimizer", "setting", "float64", "float32"],
                *([r.name, r.case, f"{r[2]:.1e}", f"{r[3]:.1e}"] for r in recorded),
            ]
        },
        data={
            "recorded": [r._asdict() for r in recorded],
            "optax": {name: curve.tolist() for name, curve in curves.items()},
        },
    )


def load(name: str) -> Any:
    """Reads a golden file."""
    return json.loads((GOLDEN / f"{name}.json").read_text())


def against_torch(quick: bool, progress: Progress) -> list[Recorded]:
    """Compares every recorded run; in the quick form two settings of each optimizer."""
    found = []
    inputs, matrices = load("inputs"), load("matrices")
    constructors = optim.functional_optim_map.values()
    for constructor in progress.track(list(constructors), description="torch"):
        name = constructor().name
        problem = matrices if name == "muon" else inputs
        cases = list(load(name).items())
        for case, content in cases[:2] if quick else cases:
            options = {
                k: tuple(v) if isinstance(v, list) else v
                for k, v in content["options"].items()
            }
            opt = constructor(**options)
            errors = (
                recorded_error(opt, problem, content[dtype], dtype)
                for dtype in ("float64", "float32")
            )
            found.append(Recorded(name, case, *errors))
    return found


def recorded_error(
    opt: optim.Optimizer, problem: Any, recorded: Mapping[str, Any], dtype: str
) -> float:
    """The largest difference at the recorded steps, relative to a leaf's size."""
    path = steps(opt, problem, problem["grads"], dtype)
    worst = 0.0
    for t, content in recorded.items():
        for leaf, wanted in enumerate(content["params"]):
            size = max(float(np.max(np.abs(row[leaf]))) for row in path)
            error = float(np.max(np.abs(path[int(t)][leaf] - np.asarray(wanted))))
            worst = max(worst, error / size)
    return worst


def steps(
    opt: optim.Optimizer, problem: Any, grads: Sequence[Any], dtype: str
) -> list[list[np.ndarray]]:
    """The parameters after every step."""
    params = [jnp.asarray(p, dtype) for p in problem["params"]]
    state, path = opt.init(params), []
    for row in grads:
        given = [None if g is None else jnp.asarray(g, dtype) for g in row]
        params, state = opt.step(params, given, state)
        path.append([np.asarray(p) for p in params])
    return path


def against_optax(problem: Any, ours: optim.Optimizer, theirs: Any) -> np.ndarray:
    """The largest difference from optax at each step, relative to a leaf's size."""
    # optax does not accept None as a gradient.
    full = [row for row in problem["grads"] if all(g is not None for g in row)]
    mine = steps(ours, problem, full, "float64")
    other = steps(optim.from_optax(theirs), problem, full, "float64")
    return np.array(
        [
            max(
                float(np.max(np.abs(a - b)) / np.max(np.abs(a)))
                for a, b in zip(*rows, strict=True)
            )
            for rows in zip(mine, other, strict=True)
        ]
    )


# --- what is claimed, and shown ---


def claims(
    worst: Mapping[str, float], names: Sequence[str], curves: Mapping[str, np.ndarray]
) -> list[Claim]:
    """The claims of the experiment."""
    same = {k: float(c.max()) for k, c in curves.items() if COUNTERPARTS[k][2]}
    other = {k: float(c.max()) for k, c in curves.items() if not COUNTERPARTS[k][2]}
    return [
        Claim(
            f"float64 runs are torch's within {FLOAT64:.0e} of a parameter's size",
            worst["float64"] <= FLOAT64,
            f"at most {worst['float64']:.1e}, {len(names)} optimizers",
            leads=True,
        ),
        Claim(
            "float32 runs are torch's within the rounding of 50 steps",
            worst["float32"] <= FLOAT32,
            f"at most {worst['float32']:.1e} of {FLOAT32:.1e}",
        ),
        Claim(
            f"optax is the same formula for {', '.join(same)}",
            max(same.values()) <= FLOAT64,
            f"at most {max(same.values()):.1e}",
        ),
        Claim(
            f"optax is another formula for {', '.join(other)}",
            min(other.values()) > FLOAT64,
            ", ".join(f"{k} {v:.0e}" for k, v in other.items()),
        ),
    ]


def plot_torch(recorded: Sequence[Recorded]) -> Figure:
    """A dot for every setting and precision."""
    figure, axes = plt.subplots(figsize=(9, 0.24 * len(recorded) + 1.5))
    rows = np.arange(len(recorded))[::-1]
    # A logarithmic axis has no 0: equal runs are drawn at the left edge.
    for kind, limit, color, size in (
        ("float64", FLOAT64, "tab:blue", 36),
        ("float32", FLOAT32, "tab:orange", 9),
    ):
        errors = [max(getattr(r, kind), 1e-18) for r in recorded]
        axes.scatter(errors, rows, color=color, s=size, label=kind)
        axes.axvline(limit, color=color, linestyle="--", linewidth=1)
    axes.set_yticks(rows, [f"{r.name}: {r.case}" for r in recorded], fontsize=7)
    axes.set(
        xscale="log", xlabel="largest difference from torch / size of the leaf; left: 0"
    )
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_optax(curves: Mapping[str, np.ndarray]) -> Figure:
    """A curve for every counterpart."""
    figure, axes = plt.subplots(figsize=(9, 5))
    greys, reds = (cycle(("-", "--", ":", "-.", ".-", "x-")) for _ in range(2))
    for name, curve in curves.items():
        same = COUNTERPARTS[name][2]
        shown = np.maximum(curve, 1e-18)
        color, style = ("0.4", next(greys)) if same else ("firebrick", next(reds))
        axes.semilogy(shown, style, color=color, linewidth=1, markersize=4, label=name)
    axes.axhline(FLOAT64, color="black", linestyle="--", linewidth=1)
    axes.set(xlabel="step; a curve at the bottom is 0")
    axes.set_ylabel("difference between optax and torch's formula")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
