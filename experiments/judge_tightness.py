"""What is the smallest factor on a gradient that the judge still sees, in each dtype?

A right gradient is multiplied by 1 + e, rounded to its dtype and judged. The smallest e
that fails is found by bisection, for several models and batch sizes: a tight bound
comes near the dtype's own rounding, and a loose one detects large factors only.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._result import Claim, Picture, Result, Settings
from jdist import verify
from jdist.verify import Report

DTYPES = ("float64", "float32", "bfloat16", "float16")
SIZES = (8, 64)
QUICK_DTYPES, QUICK_SIZES = ("float32", "bfloat16"), (8,)

# The largest e that may be overlooked in a precision.
WANTED = {"float64": 1e-13, "float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}

# The range of factors. Each round of the judge measures anew, which costs more than
# judging many factors at once: a round divides the bracket into 61.
SMALLEST, LARGEST = 2.0**-54, 4.0
POINTS, ROUNDS = 60, 2

NOT_RUN = "not run in this form"

Losses = Callable[[Any, Any], jax.Array]


def run(settings: Settings, progress: Progress) -> Result:
    """Bisects for each model, dtype and batch size."""
    sizes = QUICK_SIZES if settings.quick else SIZES
    dtypes = QUICK_DTYPES if settings.quick else DTYPES
    models = list(MODELS)[:1] if settings.quick else list(MODELS)
    cells = [(m, d, n) for m in models for d in dtypes for n in sizes]
    seen: dict[tuple[str, str, int], float] = {}
    right: dict[tuple[str, str, int], bool] = {}
    for cell in progress.track(cells, description="bisecting"):
        model, dtype, size = cell
        with jax.enable_x64(dtype == "float64"):
            seen[cell], right[cell] = smallest(
                model, jnp.dtype(dtype), size, settings.seed
            )
    return Result(
        claims=claims(seen, right),
        pictures=[Picture("smallest", "The smallest factor seen, less 1.", plot(seen))],
        tables={"Smallest e of a factor 1 + e that is seen": table(seen)},
        # JSON knows no infinity.
        data={"smallest": [[*cell, f"{found:.3g}"] for cell, found in seen.items()]},
        notes=["e is known to 1 %"],
        files={"tightness.md": partial(write_markdown, seen)},
    )


def smallest(model: str, dtype: Any, size: int, seed: int) -> tuple[float, bool]:
    """The smallest e that is seen, infinite if none is; and whether e = 0 passes."""
    losses, params, batch = MODELS[model](np.random.default_rng(seed), dtype, size)
    loss, gradient = jax.jit(
        jax.value_and_grad(lambda p, b: jnp.mean(losses(p, b)))
    )(params, batch)  # fmt: skip
    judged = verify.gradients_judge(losses)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), gradient)

    def fails(each: np.ndarray) -> list[bool]:
        """Whether the judge sees each e."""
        scaled = {
            str(i): jax.tree.map(lambda x, e=e: (x * (1 + e)).astype(dtype), wide)
            for i, e in enumerate(each)
        }
        candidates = {
            name: lambda p, b, found=found: (loss, found)
            for name, found in scaled.items()
        }
        report: Report = judged(params, batch, candidates, finite_differences=False)
        return [bool(report.of(name).failures) for name in candidates]

    lowest, highest = SMALLEST, LARGEST
    right = True
    for _ in range(ROUNDS):
        bracket = np.geomspace(lowest, highest, POINTS + 2)
        # The largest factor always fails, so that the judge does its second, closer
        # measurement in every round.
        wrong, *seen, _ = fails(np.array([0.0, *bracket[1:], LARGEST]))
        right = right and not wrong
        if not seen[-1]:
            return np.inf, right
        first = seen.index(True)
        lowest, highest = float(bracket[first]), float(bracket[first + 1])
    return highest, right


# --- models ---


def _normal(rng: np.random.Generator, dtype: Any, *shape: int) -> jax.Array:
    scale = shape[-2] ** -0.5 if len(shape) > 1 else 0.5
    return jnp.asarray(rng.normal(size=shape) * scale, dtype)


def linear_regression(rng: np.random.Generator, dtype: Any, size: int) -> Any:
    """The squared errors of a linear map."""

    def losses(p: Any, b: Any) -> jax.Array:
        return (b["x"] @ p["w"] + p["bias"] - b["y"]) ** 2

    params = {"w": _normal(rng, dtype, 6), "bias": _normal(rng, dtype)}
    x = jnp.asarray(rng.normal(size=(size, 6)), dtype)
    return losses, params, {"x": x, "y": _normal(rng, dtype, size)}


def perceptron(rng: np.random.Generator, dtype: Any, size: int) -> Any:
    """The cross-entropy of two hidden layers."""

    def losses(p: Any, b: Any) -> jax.Array:
        hidden = jnp.tanh(b["x"] @ p["first"] + p["bias"][None])
        scores = jax.nn.log_softmax(jnp.tanh(hidden @ p["second"]) @ p["readout"])
        return -jnp.take_along_axis(scores, b["label"][:, None], axis=1)[:, 0]

    params = {
        "first": _normal(rng, dtype, 6, 12),
        "bias": _normal(rng, dtype, 12),
        "second": _normal(rng, dtype, 12, 9),
        "readout": _normal(rng, dtype, 9, 4),
    }
    x = jnp.asarray(rng.normal(size=(size, 6)), dtype)
    return losses, params, {"x": x, "label": jnp.asarray(rng.integers(4, size=size))}


def attention(rng: np.random.Generator, dtype: Any, size: int) -> Any:
    """An attention block over five tokens, with a residual connection and a mean."""

    def losses(p: Any, b: Any) -> jax.Array:
        x = b["x"]
        query, key, value = (x @ p[name] for name in ("query", "key", "value"))
        weights = jax.nn.softmax(jnp.einsum("nsd,ntd->nst", query, key) / 2)
        mixed = x + jnp.einsum("nst,ntd->nsd", weights, value)
        scores = jax.nn.log_softmax(mixed.mean(axis=1) @ p["readout"])
        return -jnp.take_along_axis(scores, b["label"][:, None], axis=1)[:, 0]

    params = {n: _normal(rng, dtype, 4, 4) for n in ("query", "key", "value")}
    params["readout"] = _normal(rng, dtype, 4, 3)
    x = jnp.asarray(rng.normal(size=(size, 5, 4)), dtype)
    return losses, params, {"x": x, "label": jnp.asarray(rng.integers(3, size=size))}


MODELS = {
    "linear regression": linear_regression,
    "perceptron": perceptron,
    "attention": attention,
}

Cells = dict[tuple[str, str, int], float]


# --- what is claimed, and shown ---


def claims(seen: Cells, right: dict[tuple[str, str, int], bool]) -> list[Claim]:
    """Claims of a limit for each precision, and that the right gradient passes."""
    found = []
    for dtype in DTYPES:
        own = [e for (_, d, _), e in seen.items() if d == dtype] or [np.inf]
        unit = float(jnp.finfo(dtype).eps) / 2
        claim = Claim(
            f"{dtype}: every factor of 1 + {WANTED[dtype]:g} is seen",
            max(own) <= WANTED[dtype],
            f"the smallest seen is {min(own):.1e} to {max(own):.1e}, "
            f"{min(own) / unit:.0f} to {max(own) / unit:.0f} rounding units",
            leads=True,
        )
        judged = any(d == dtype for _, d, _ in seen)
        found.append(claim if judged else replace(claim, measured="").unless(NOT_RUN))
    passed = sum(right.values())
    text = "the right gradient passes"
    found.append(Claim(text, passed == len(right), f"{passed} of {len(right)}"))
    return found


def table(seen: Cells) -> list[list[str]]:
    """A table with a row for each dtype and model, a column for each batch size."""
    sizes = sorted({size for _, _, size in seen})
    rows = [["dtype", "rounding unit", "model", *(f"{n} examples" for n in sizes)]]
    for dtype in dict.fromkeys(d for _, d, _ in sorted(seen, key=_rank)):
        for model in dict.fromkeys(m for m, _, _ in seen):
            own = [f"{seen[model, dtype, n]:.1e}" for n in sizes]
            unit = float(jnp.finfo(dtype).eps) / 2
            rows.append([dtype, f"{unit:.1e}", model, *own])
    return rows


def _rank(cell: tuple[str, str, int]) -> int:
    return DTYPES.index(cell[1])


def write_markdown(seen: Cells, path: Path) -> None:
    """Writes the table of docs/verify.md."""
    header, *body = table(seen)
    rule = ["---", "---:", "---", *["---:"] * (len(header) - 3)]
    path.write_text("".join(f"| {' | '.join(x)} |\n" for x in (header, rule, *body)))


def plot(seen: Cells) -> Figure:
    """A line for each dtype and model, over the batch size."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for color, dtype in enumerate(DTYPES):
        for model, style in zip(MODELS, ("-", "--", ":"), strict=True):
            line = sorted(
                (n, e) for (m, d, n), e in seen.items() if (m, d) == (model, dtype)
            )
            if line:
                label = f"{dtype}, {model}"
                # A line through a single batch size is invisible; a dot is not.
                form = f"C{color}o" + (style if len(line) > 1 else "")
                axes.plot(*zip(*line, strict=True), form, label=label, ms=3)
    axes.set(xscale="log", yscale="log", xlabel="examples", ylabel="smallest e seen")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=6, bbox_to_anchor=(1, 1))
    return figure
