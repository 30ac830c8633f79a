"""Ways in which a gradient comes out wrong, each planted into a right one.

A fault is a pure function of a `Trainer`, which holds the right gradient and what it
was computed from. It returns the wrong gradient, or None if it does not apply. Its name
describes the mistake from the point of view of a reader who has to find it.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from experiments._gradient_problems import GradientProblem, Losses

Leaves = dict[str, np.ndarray]
"""A gradient by leaf, in float64."""

MICRO_BATCHES = 4
PADDED_TO = 8


class Trainer:
    """The gradient of a problem, and of variants of the problem.

    Attributes:
      problem: The problem.
      rng: Random numbers of the faults.
    """

    def __init__(self, problem: GradientProblem, seed: int) -> None:
        self.problem = problem
        self.rng = np.random.default_rng(seed)
        self._programs: dict[Losses, Any] = {}

    @cached_property
    def weights(self) -> np.ndarray:
        """The weight of each example in the sum of losses, `(examples,)`."""
        problem = self.problem
        given = problem.weights
        weights = np.ones(problem.examples) if given is None else given
        # The gradient of an extreme is that of a single example.
        if problem.reduction in ("max", "min"):
            losses = np.asarray(problem.losses(problem.params, problem.batch), float)
            sign = 1 if problem.reduction == "max" else -1
            ranked = np.where(weights > 0, sign * losses, -np.inf)
            return (np.arange(weights.size) == ranked.argmax()).astype(float)
        return weights

    @cached_property
    def right(self) -> Leaves:
        """The right gradient."""
        return self.gradient()

    @cached_property
    def dtypes(self) -> dict[str, Any]:
        """The dtype of each leaf."""
        return {name: leaf.dtype for name, leaf in self.problem.params.items()}

    def gradient(
        self,
        weights: np.ndarray | None = None,
        total: float | None = None,
        params: Any = None,
        batch: Any = None,
        losses: Losses | None = None,
    ) -> Leaves:
        """The gradient of the weighted mean, by one program for all weights.

        Args:
          weights: Replace the problem's.
          total: The divisor; None for the sum of the weights.
          params: Leaves that replace the problem's.
          batch: Entries that replace the problem's.
          losses: Replace the problem's.
        """
        weights = self.weights if weights is None else weights
        total = weights.sum() if total is None else total
        params = {**self.problem.params, **(params or {})}
        batch = {**self.problem.batch, **(batch or {})}
        program = self.program(losses or self.problem.losses)
        found = program(params, batch, jnp.asarray(weights, jnp.float32))
        wide = {name: np.asarray(leaf, np.float64) for name, leaf in found[1].items()}
        return self.stored({name: leaf / total for name, leaf in wide.items()})

    def program(self, losses: Losses) -> Any:
        """Value and gradient of the weighted sum of losses, compiled once."""

        def total(params: Any, batch: Any, weights: jax.Array) -> jax.Array:
            found = losses(params, batch)
            return jnp.sum(weights.astype(found.dtype) * found)

        if losses not in self._programs:
            self._programs[losses] = jax.jit(jax.value_and_grad(total))
        return self._programs[losses]

    def stored(self, leaves: Leaves) -> Leaves:
        """The values rounded to the dtypes of the gradient."""
        return {
            name: leaf.astype(self.dtypes[name]).astype(np.float64)
            for name, leaf in leaves.items()
        }

    def size(self, wrong: Leaves) -> float:
        """The largest relative distance of a leaf from the right one, in the 2-norm."""
        sizes = []
        for name, leaf in self.right.items():
            off, own = np.linalg.norm(wrong[name] - leaf), np.linalg.norm(leaf)
            sizes.append(off / own if own else np.inf * off if off else 0.0)
        return float(max(sizes))

    def any_leaf(self) -> str:
        """The name of a random leaf whose gradient is not all 0."""
        return str(self.rng.choice([k for k, v in self.right.items() if v.any()]))

    def shards(self) -> list[np.ndarray]:
        """The indices of the examples in unequal micro-batches."""
        count = self.problem.examples
        cuts = np.cumsum(np.arange(1, MICRO_BATCHES)) * count // 10
        return np.split(np.arange(count), cuts)


Fault = Callable[[Trainer], Leaves | None]

FAULTS: dict[str, tuple[str, Fault]] = {}
"""The family and the function of each fault, by name."""


def _fault(family: str, name: str) -> Callable[[Fault], Fault]:
    def register(fault: Fault) -> Fault:
        FAULTS[name] = (family, fault)
        return fault

    return register


def plant(trainer: Trainer) -> Iterator[tuple[str, str, Leaves]]:
    """Yields family, name and wrong gradient of every fault that applies."""
    for name, (family, fault) in FAULTS.items():
        wrong = fault(trainer)
        if wrong is not None:
            yield family, name, trainer.stored(wrong)
    for name, losses in trainer.problem.wrong.items():
        yield "model", name, trainer.gradient(losses=losses)


# --- the whole gradient: scale ---


def _scaled(name: str, factor: Callable[[Trainer], float | None]) -> None:
    @_fault("scale", name)
    def scaled(t: Trainer) -> Leaves | None:
        by = factor(t)
        if by is None or by == 1:
            return None
        return {leaf: by * value for leaf, value in t.right.items()}


for _factor in (0.0, -1.0, 0.5, 2.0, 1.001, 1.01, 1.05, 1.1, 0.999, 0.95):
    _names = {0.0: "zero", -1.0: "negated", 0.5: "halved", 2.0: "doubled"}
    _scaled(_names.get(_factor, f"times {_factor}"), lambda t, by=_factor: by)  # type: ignore[misc]
_scaled("sum for mean", lambda t: t.weights.sum())
_scaled("divided by the examples twice", lambda t: 1 / t.weights.sum())
_scaled("micro-batches summed, not averaged", lambda t: MICRO_BATCHES)
_scaled("divided by the micro-batches twice", lambda t: 1 / MICRO_BATCHES)
_scaled("n - 1 for n", lambda t: t.problem.examples / (t.problem.examples - 1))
_scaled("loss scale not undone", lambda t: 1024.0)
_scaled(
    "divided by the padded batch",
    lambda t: t.problem.examples / (-(-t.problem.examples // PADDED_TO) * PADDED_TO),
)


@_fault("scale", "clipped although below the norm")
def _(t: Trainer) -> Leaves:
    norm = np.sqrt(sum(np.sum(v**2) for v in t.right.values()))
    return {k: v * min(1, 0.9 * norm / norm) for k, v in t.right.items()}


@_fault("scale", "each leaf clipped by its own norm")
def _(t: Trainer) -> Leaves:
    norm = np.sqrt(sum(np.sum(v**2) for v in t.right.values()))
    limit = 0.5 * norm
    return {k: v * min(1, limit / max(np.linalg.norm(v), 1e-300)) for k, v in
            t.right.items()}  # fmt: skip


@_fault("scale", "entries clipped")
def _(t: Trainer) -> Leaves:
    limit = 0.7 * max(np.abs(v).max() for v in t.right.values())
    return {k: np.clip(v, -limit, limit) for k, v in t.right.items()}


# --- one leaf ---


def _leaf(name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> None:
    @_fault("leaf", name)
    def changed(t: Trainer) -> Leaves | None:
        able = [k for k, v in t.right.items() if v.any() and change(v) is not None]
        if not able:
            return None
        chosen = str(t.rng.choice(able))
        found = change(t.right[chosen])
        return None if found is None else {**t.right, chosen: found}


_leaf("a leaf zero", lambda v: 0 * v)
_leaf("a leaf negated", lambda v: -v)
_leaf("a leaf doubled", lambda v: 2 * v)
_leaf("a leaf times 1.002", lambda v: 1.002 * v)
_leaf("a leaf times 1.02", lambda v: 1.02 * v)
_leaf("a leaf times 0.9", lambda v: 0.9 * v)
_leaf("a leaf in float16", lambda v: v.astype(np.float16).astype(float))
_leaf(
    "a square leaf transposed",
    lambda v: v.T if v.ndim == 2 and v.shape[0] == v.shape[1] else None,
)
_leaf(
    "a leaf read in column order",
    lambda v: v.ravel(order="F").reshape(v.shape) if v.ndim >= 2 else None,
)
_leaf("rows rolled by one", lambda v: np.roll(v, 1, 0) if v.ndim else None)
_leaf("columns reversed", lambda v: v[..., ::-1] if v.ndim >= 2 else None)
_leaf(
    "bucket offset by one",
    lambda v: np.roll(v.ravel(), 1).reshape(v.shape) if v.size > 1 else None,
)
_leaf("half of a leaf not gathered", lambda v: _half(v, 0.0))
_leaf("half of a leaf summed twice", lambda v: _half(v, 2.0))
_leaf("a row zero", lambda v: _largest_row(v, 0.0))
_leaf("a row doubled", lambda v: _largest_row(v, 2.0))
_leaf("an entry zero", lambda v: _largest_entry(v, 0.0))
_leaf("an entry negated", lambda v: _largest_entry(v, -1.0))
_leaf("an entry off by a tenth", lambda v: _largest_entry(v, 1.1))
_leaf("an entry off by a hundredth", lambda v: _largest_entry(v, 1.01))


def _half(v: np.ndarray, factor: float) -> np.ndarray | None:
    if v.size < 2:
        return None
    flat = v.ravel().copy()
    flat[v.size // 2 :] *= factor
    return flat.reshape(v.shape)


def _largest_row(v: np.ndarray, factor: float) -> np.ndarray | None:
    if v.ndim < 2:
        return None
    found = v.copy()
    found[np.abs(v).reshape(len(v), -1).sum(1).argmax()] *= factor
    return found


def _largest_entry(v: np.ndarray, factor: float) -> np.ndarray | None:
    if v.size < 2:
        return None
    flat = v.ravel().copy()
    flat[np.abs(flat).argmax()] *= factor
    return flat.reshape(v.shape)


@_fault("leaf", "leaves of one shape swapped")
def _(t: Trainer) -> Leaves | None:
    names = list(t.right)
    pairs = [
        (a, b) for a in names for b in names
        if a < b and t.right[a].shape == t.right[b].shape
    ]  # fmt: skip
    if not pairs:
        return None
    a, b = pairs[t.rng.integers(len(pairs))]
    return {**t.right, a: t.right[b], b: t.right[a]}


@_fault("leaf", "the last layer only")
def _(t: Trainer) -> Leaves:
    return {k: v if k == "readout" else 0 * v for k, v in t.right.items()}


@_fault("leaf", "all but the last layer")
def _(t: Trainer) -> Leaves:
    return {k: 0 * v if k == "readout" else v for k, v in t.right.items()}


@_fault("leaf", "bias gradients missing")
def _(t: Trainer) -> Leaves:
    return {k: 0 * v if v.ndim < 2 else v for k, v in t.right.items()}


@_fault("leaf", "biases summed over the batch")
def _(t: Trainer) -> Leaves:
    total = t.weights.sum()
    return {k: total * v if v.ndim < 2 else v for k, v in t.right.items()}


# --- noise, rounding, compression, what is left over ---


def _noisy(name: str, size: float) -> None:
    @_fault("noise", name)
    def noisy(t: Trainer) -> Leaves:
        return {
            k: v + size * np.std(v) * t.rng.normal(size=v.shape) if v.size > 1 else
            v * (1 + size * t.rng.choice([-1, 1]))
            for k, v in t.right.items()
        }  # fmt: skip


for _size in (0.002, 0.02, 0.2):
    _noisy(f"noise of {_size}", _size)


@_fault("noise", "rounded to bfloat16 on the way")
def _(t: Trainer) -> Leaves:
    low = ml_dtypes.bfloat16
    return {k: v.astype(low).astype(float) for k, v in t.right.items()}


@_fault("noise", "rounded to 8 bits on the way")
def _(t: Trainer) -> Leaves:
    def rounded(v: np.ndarray) -> np.ndarray:
        unit = max(np.abs(v).max(), 1e-300) / 127
        return np.round(v / unit) * unit

    # A single number is its own unit, so that rounding would not change it.
    kept = {k: v for k, v in t.right.items() if v.size == 1}
    return {k: rounded(v) for k, v in t.right.items()} | kept


@_fault("noise", "signs only")
def _(t: Trainer) -> Leaves:
    return {k: np.sign(v) * np.abs(v).mean() for k, v in t.right.items()}


@_fault("noise", "the smallest half dropped")
def _(t: Trainer) -> Leaves:
    limits = {k: np.median(np.abs(v)) for k, v in t.right.items()}
    return {k: np.where(np.abs(v) < limits[k], 0, v) for k, v in t.right.items()}


@_fault("noise", "weight decay mixed in")
def _(t: Trainer) -> Leaves:
    params = t.problem.params
    return {k: v + 0.01 * np.asarray(params[k], float) for k, v in t.right.items()}


@_fault("noise", "the batch before not cleared")
def _(t: Trainer) -> Leaves:
    before = t.gradient(_only(t, np.arange(t.problem.examples // 2)), t.weights.sum())
    return {k: v + before[k] for k, v in t.right.items()}


# --- which examples count, and how much ---


def _only(t: Trainer, rows: np.ndarray) -> np.ndarray:
    return np.where(np.isin(np.arange(t.problem.examples), rows), t.weights, 0)


def _example(t: Trainer) -> int:
    return int(t.rng.choice(np.flatnonzero(t.weights)))


def _reweighted(name: str, by: float, renormalised: bool) -> None:
    @_fault("batch", name)
    def reweighted(t: Trainer) -> Leaves | None:
        weights = t.weights.copy()
        weights[_example(t)] *= by
        if not weights.any():
            return None
        return t.gradient(weights, None if renormalised else t.weights.sum())


_reweighted("an example dropped", 0.0, renormalised=False)
_reweighted("an example dropped from the mean", 0.0, renormalised=True)
_reweighted("an example doubled", 2.0, renormalised=False)
_reweighted("an example twice in the mean", 2.0, renormalised=True)
_reweighted("an example's weight off by half", 1.5, renormalised=True)
_reweighted("an example's gradient negated", -1.0, renormalised=False)


def _micro_batch(name: str, by: float) -> None:
    @_fault("batch", name)
    def changed(t: Trainer) -> Leaves:
        shards = t.shards()
        weights = t.weights.copy()
        weights[shards[t.rng.integers(len(shards))]] *= by
        return t.gradient(weights, t.weights.sum())


_micro_batch("a micro-batch dropped", 0.0)
_micro_batch("a micro-batch doubled", 2.0)
_micro_batch("a micro-batch halved", 0.5)


@_fault("batch", "half of the batch")
def _(t: Trainer) -> Leaves | None:
    weights = _only(t, np.arange(t.problem.examples // 2))
    return t.gradient(weights) if weights.any() else None


@_fault("batch", "the last, smaller micro-batch dropped")
def _(t: Trainer) -> Leaves | None:
    kept = t.problem.examples // PADDED_TO * PADDED_TO
    weights = _only(t, np.arange(kept))
    return t.gradient(weights) if weights.any() else None


@_fault("batch", "padding counted")
def _(t: Trainer) -> Leaves | None:
    extra = -t.problem.examples % PADDED_TO
    weights = t.weights.copy()
    weights[-1] *= 1 + extra
    return t.gradient(weights)


@_fault("batch", "mean of the shards' means")
def _(t: Trainer) -> Leaves | None:
    return _by_shards(t, lambda weights: 1.0)


@_fault("batch", "shards counted by examples, not by weight")
def _(t: Trainer) -> Leaves | None:
    return _by_shards(t, lambda weights: float(weights.size))


def _by_shards(t: Trainer, share: Callable[[np.ndarray], float]) -> Leaves | None:
    if t.problem.reduction != "mean":
        return None
    weights = t.weights.copy()
    for rows in t.shards():
        own = t.weights[rows]
        weights[rows] *= share(own) / max(own.sum(), 1e-300)
    return t.gradient(weights)


@_fault("batch", "weights ignored")
def _(t: Trainer) -> Leaves | None:
    if t.problem.weights is None or t.problem.reduction != "mean":
        return None
    return t.gradient(np.ones(t.problem.examples))


@_fault("batch", "weights applied twice")
def _(t: Trainer) -> Leaves | None:
    if t.problem.weights is None or t.problem.reduction != "mean":
        return None
    return t.gradient(t.weights**2)


@_fault("batch", "the largest loss for the mean")
def _(t: Trainer) -> Leaves:
    return t.gradient(_at_rank(t, -1))


@_fault("batch", "the median loss for the mean")
def _(t: Trainer) -> Leaves:
    return t.gradient(_at_rank(t, t.problem.examples // 2))


@_fault("batch", "the mean for the extreme")
def _(t: Trainer) -> Leaves | None:
    if t.problem.reduction == "mean":
        return None
    return t.gradient(np.ones(t.problem.examples))


def _at_rank(t: Trainer, rank: int) -> np.ndarray:
    losses = np.asarray(t.problem.losses(t.problem.params, t.problem.batch), float)
    # The largest loss is the right one for "max"; the second largest is wrong.
    if t.problem.reduction == "max" and rank == -1:
        rank = -2
    return (np.arange(losses.size) == np.argsort(losses)[rank]).astype(float)


# --- what the examples are ---


def _other_batch(name: str, entry: str, change: Callable[[Trainer, Any], Any]) -> None:
    @_fault("data", name)
    def changed(t: Trainer) -> Leaves | None:
        if entry not in t.problem.batch:
            return None
        found = change(t, t.problem.batch[entry])
        return None if found is None else t.gradient(batch={entry: found})


def _floating(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.floating))


_other_batch("labels shifted by one example", "label", lambda t, v: jnp.roll(v, 1, 0))
_other_batch("labels reversed", "label", lambda t, v: v[::-1])
_other_batch(
    "labels off by one class",
    "label",
    lambda t, v: None if _floating(v) else (v + 1) % (jnp.max(v) + 1),
)
_other_batch("inputs shifted by one example", "x", lambda t, v: jnp.roll(v, 1, 0))
_other_batch(
    "inputs scaled by 1.01",
    "x",
    lambda t, v: (v * 1.01).astype(v.dtype) if _floating(v) else None,
)
_other_batch(
    "inputs rounded to bfloat16",
    "x",
    lambda t, v: v.astype(jnp.bfloat16).astype(v.dtype) if _floating(v) else None,
)
_other_batch(
    "a feature zero",
    "x",
    lambda t, v: v.at[..., 0].set(0) if _floating(v) and v.ndim > 1 else None,
)
_other_batch(
    "an example taken twice, its neighbour never",
    "x",
    lambda t, v: v.at[(i := _example(t))].set(v[i - 1]),
)
_other_batch("other keys", "key", lambda t, v: jax.vmap(_next_key)(v))
_other_batch("keys reversed", "key", lambda t, v: v[::-1])
_other_batch("one key for all", "key", lambda t, v: jnp.repeat(v[:1], len(v)))


def _next_key(key: jax.Array) -> jax.Array:
    return jax.random.fold_in(key, 1)


# --- which parameters it was computed at ---


def _at_other_params(
    name: str, change: Callable[[Trainer, str, np.ndarray], np.ndarray]
) -> None:
    @_fault("parameters", name)
    def changed(t: Trainer) -> Leaves:
        params = {
            k: jnp.asarray(change(t, k, np.asarray(v, float)), v.dtype)
            for k, v in t.problem.params.items()
        }
        return t.gradient(params=params)


def _step(t: Trainer, name: str, lr: float) -> np.ndarray:
    return lr * t.right[name]


_at_other_params("one step old", lambda t, k, v: v + _step(t, k, 0.03))
_at_other_params("five steps old", lambda t, k, v: v + _step(t, k, 0.15))
_at_other_params(
    "versions mixed", lambda t, k, v: v + (k != "readout") * _step(t, k, 0.1)
)
_at_other_params(
    "parameters rounded to bfloat16",
    lambda t, k, v: v.astype(ml_dtypes.bfloat16).astype(float),
)
_at_other_params("parameters averaged", lambda t, k, v: 0.99 * v)


@_fault("parameters", "one leaf is another replica's")
def _(t: Trainer) -> Leaves:
    chosen = t.any_leaf()
    leaf = t.problem.params[chosen]
    other = np.asarray(leaf, float) * (1 + 0.01 * t.rng.normal(size=leaf.shape))
    return t.gradient(params={chosen: jnp.asarray(other, leaf.dtype)})
