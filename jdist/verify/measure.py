"""Measuring what the bound needs: the terms of each sum and their magnitudes.

Each example's gradient is evaluated alone, twice: in the precision that is judged (for
float64: in float32, scaled), and in float64. From these come, per entry of a leaf,

    S = sum_i c_i |g_i|                     the sum of magnitudes
    K = sum_i c_i |g_i - g_i in float64| / u        what the terms' own rounding adds

with c_i the example's share (w_i / sum w for a mean). One entry's K is a single draw of
a random error and may be small by luck, so its leaf's root mean square is added.

On the way the examples' losses are compared with those of the whole batch: if they
differ, examples influence each other (batch statistics), and no split of the batch can
give the same gradient; the report says so.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist._compat import double_precision
from jdist._tree import examples_in, merge, named_leaves, split_inexact
from jdist.verify.bound import EXTRA, bound, confidence, unit_roundoff
from jdist.verify.oracle import pin, reduced_loss
from jdist.verify.report import OracleCheck

# Rounding moves an example's float64 loss by about 1e-15; a batch statistic by 1e-2.
COUPLED = math.sqrt(unit_roundoff("float64"))


class Measured(NamedTuple):
    """What is known of a problem before any candidate is judged."""

    terms: int
    """Examples that contribute."""

    scale: Any
    """Tree like the parameters, float64: S + K / sqrt(terms + EXTRA)."""

    loss_scale: float
    """The same for the loss itself."""

    oracle: OracleCheck
    """The finite-difference check."""

    notes: tuple[str, ...]


def measure(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    batch: Any,
    weights: Any,
    reduction: str,
    seed: int,
) -> Measured:
    """Measures terms and magnitudes, and pins the oracle, in float64."""
    # In float64 a closure's own float32 constants are promoted, as they must be.
    with double_precision(), jax.numpy_dtype_promotion("standard"):
        exact, rounded = (_cast(params, kind) for kind in ("exact", "rounded"))
        batches = tuple(_cast(batch, kind) for kind in ("exact", "rounded"))
        losses = jax.jit(loss_fn)(exact, batches[0])
        rough = jax.jit(loss_fn)(rounded, batches[1])
        judged = jax.eval_shape(loss_fn, params, batch).dtype
        units = unit_roundoff(judged) / unit_roundoff(rough.dtype)
        blur = units * float(jnp.max(jnp.abs(rough.astype(losses.dtype) - losses)))
        shares, notes = _shares(losses, blur, weights, reduction)
        if jnp.ndim(losses) == 0:
            terms = _leading(batch)
            sums, alone = _whole(loss_fn, exact, rounded, batches), losses
        else:
            terms = int(np.count_nonzero(shares))
            sums, alone = _by_example(loss_fn, exact, rounded, batches, shares)
        if not np.allclose(alone, losses, rtol=COUPLED, atol=0, equal_nan=True):
            example = int(np.argmax(np.abs(np.asarray(alone - losses))))
            notes += (
                f"examples influence each other: example {example} has a loss of "
                f"{losses[example]:.6g} in the batch and of {alone[example]:.6g} "
                f"alone. No split of the batch reproduces this gradient.",
            )
        scale, loss_scale = _scales(sums, terms)
        rounding = float(bound("float64", 1, terms, loss_scale))
        scalar = reduced_loss(loss_fn, batches[0], weights, reduction)
        if reduction in ("max", "min") and terms > 1:
            oracle = OracleCheck(skipped=f"{terms} examples tie, which is a kink")
        else:
            oracle = pin(scalar, exact, rounding, seed)
    return Measured(terms, scale, loss_scale, oracle, notes)


def _cast(tree: Any, kind: str) -> Any:
    """Floating leaves to float64, or to the precision whose rounding is measured."""

    def one(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        is_complex = jnp.iscomplexobj(leaf)
        if kind == "exact":
            return leaf.astype(jnp.complex128 if is_complex else jnp.float64)
        if jnp.finfo(leaf.dtype).bits == 64:
            return leaf.astype(jnp.complex64 if is_complex else jnp.float32)
        return leaf

    inexact, rest = split_inexact(tree)
    return merge(jax.tree.map(one, inexact), rest)


def _shares(
    losses: jax.Array, blur: float, weights: Any, reduction: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """c_i: what each example's gradient is multiplied by in the batch's.

    `blur` is the rounding error of a loss: an extreme that leads by less is a note.
    """
    values = np.asarray(losses)
    w = np.ones(values.shape) if weights is None else np.asarray(weights, np.float64)
    if values.ndim == 0 or reduction == "sum":
        return w, ()
    if reduction == "mean":
        return w / w.sum(), ()
    sign = 1 if reduction == "max" else -1
    ranked = np.where(w > 0, sign * values, -np.inf)
    ties = ranked == ranked.max()
    rest = ranked[~ties].max(initial=-np.inf)
    gap = ranked.max() - rest
    if gap > confidence(values.size) * blur:
        return ties / ties.sum(), ()
    note = (
        f"the {reduction} leads by {gap:.1e} only: rounding decides which example's "
        f"gradient is taken"
    )
    return ties / ties.sum(), (note,)


class _Sums(NamedTuple):
    """Sums over examples: of magnitudes, and of differences to float64."""

    gradient: Any
    gradient_error: Any
    loss: jax.Array
    loss_error: jax.Array


def _pair(
    loss_fn: Callable[[Any, Any], jax.Array], exact: Any, rounded: Any, batches: Any
) -> tuple[jax.Array, _Sums]:
    """One term: its loss, its magnitudes, and its distance from float64."""

    def evaluate(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        trainable, fixed = split_inexact(params)
        return jax.value_and_grad(lambda t: jnp.sum(loss_fn(merge(t, fixed), batch)))(
            trainable
        )

    loss, gradient = evaluate(exact, batches[0])
    rough_loss, rough = evaluate(rounded, batches[1])

    def error(coarse: jax.Array, fine: jax.Array) -> jax.Array:
        unit = unit_roundoff(coarse.dtype)
        return jnp.abs(coarse.astype(fine.dtype) - fine) / unit

    errors = jax.tree.map(error, rough, gradient)
    magnitudes = jax.tree.map(jnp.abs, gradient)
    return loss, _Sums(magnitudes, errors, jnp.abs(loss), error(rough_loss, loss))


def _whole(
    loss_fn: Callable[[Any, Any], jax.Array], exact: Any, rounded: Any, batches: Any
) -> _Sums:
    """A scalar loss cannot be taken apart: the whole batch is one term."""
    return jax.jit(lambda *a: _pair(loss_fn, *a)[1])(exact, rounded, batches)


def _by_example(
    loss_fn: Callable[[Any, Any], jax.Array],
    exact: Any,
    rounded: Any,
    batches: Any,
    shares: np.ndarray,
) -> tuple[_Sums, jax.Array]:
    """The sums, one example at a time so that memory does not grow with the batch."""

    @jax.jit
    def run(exact: Any, rounded: Any, batches: Any, shares: jax.Array) -> Any:
        def one(index: jax.Array) -> tuple[jax.Array, _Sums]:
            row = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1), batches
            )
            return _pair(loss_fn, exact, rounded, row)

        def add(sums: _Sums, index: jax.Array) -> tuple[_Sums, jax.Array]:
            loss, term = one(index)
            share = shares[index]
            added = jax.tree.map(
                lambda s, t: s + jnp.where(share > 0, share * t, 0), sums, term
            )
            return added, loss

        shapes = jax.eval_shape(one, 0)[1]
        start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.scan(add, start, jnp.arange(shares.size))

    return run(exact, rounded, batches, jnp.asarray(shares))


def _scales(sums: _Sums, terms: int) -> tuple[Any, float]:
    share = 1 / math.sqrt(terms + EXTRA)

    def scale(magnitude: jax.Array, error: jax.Array) -> np.ndarray:
        typical = np.sqrt(np.mean(np.asarray(error) ** 2)) if error.size else 0
        return np.asarray(magnitude) + share * (np.asarray(error) + typical)

    gradient = jax.tree.map(scale, sums.gradient, sums.gradient_error)
    return gradient, float(scale(sums.loss, sums.loss_error))


def _leading(batch: Any) -> int:
    """The number of terms behind a scalar loss: its examples, where that is plain."""
    lengths = {np.shape(leaf)[:1] for leaf in named_leaves(batch).values()}
    return (
        examples_in(batch, "gradients")
        if len(lengths) == 1 and () not in lengths
        else 1
    )
