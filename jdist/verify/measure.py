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
from jdist.verify.oracle import STEPS, differentiated, pinned, reduced, slopes
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

    oracle: OracleCheck | None
    """The finite-difference check, where one was asked for."""

    notes: tuple[str, ...]


def measurer(
    loss_fn: Callable[[Any, Any], jax.Array], reduction: str
) -> Callable[..., Measured]:
    """Builds the measurement of one loss; its compiled parts are kept between calls."""
    losses_of = jax.jit(loss_fn)
    whole = jax.jit(lambda *arguments: _pair(loss_fn, *arguments)[1])
    by_example = jax.jit(lambda *arguments: _by_example(loss_fn, *arguments))
    slopes_of = jax.jit(slopes(reduced(loss_fn, reduction)))

    def measure(params: Any, batch: Any, weights: Any, seed: int | None) -> Measured:
        """Measures terms and magnitudes, and pins the oracle unless `seed` is None."""
        # In float64 a closure's own float32 constants are promoted, as they must be.
        with double_precision(), jax.numpy_dtype_promotion("standard"):
            kinds = ("exact", "rounded")
            given = tuple((_cast(params, k), _cast(batch, k)) for k in kinds)
            exact = losses_of(*given[0])
            blur = 0.0
            if reduction in ("max", "min"):
                judged = jax.eval_shape(loss_fn, params, batch).dtype
                blur = _blur(exact, losses_of(*given[1]), judged)
            shares, notes = _shares(exact, blur, weights, reduction)
            if exact.ndim == 0:
                terms, sums = _leading(batch), whole(*given)
            else:
                terms = int(np.count_nonzero(shares))
                sums, alone = by_example(*given, jnp.asarray(shares))
                notes += _coupling(np.asarray(exact), np.asarray(alone))
            scale, loss_scale = _scales(sums, terms)
            oracle = None
            if seed is not None and reduction in ("max", "min") and terms > 1:
                oracle = OracleCheck(skipped=f"{terms} examples tie, which is a kink")
            elif seed is not None:
                rounding = float(bound("float64", 1, terms, loss_scale))
                results = [
                    slopes_of(*given[0], weights, seed, jnp.float64(h)) for h in STEPS
                ]
                oracle = pinned(results, rounding)
        return Measured(terms, scale, loss_scale, oracle, notes)

    return measure


def _blur(exact: jax.Array, rough: jax.Array, judged: Any) -> float:
    """The largest rounding error of a loss in the dtype that is judged."""
    units = unit_roundoff(judged) / unit_roundoff(rough.dtype)
    return units * float(jnp.max(jnp.abs(rough.astype(exact.dtype) - exact)))


def _coupling(together: np.ndarray, alone: np.ndarray) -> tuple[str, ...]:
    slack = COUPLED * np.abs(together).max(initial=0)
    if np.allclose(alone, together, rtol=0, atol=slack, equal_nan=True):
        return ()
    example = int(np.argmax(np.abs(alone - together)))
    return (
        f"examples influence each other: example {example} has a loss of "
        f"{together[example]:.6g} in the batch and of {alone[example]:.6g} alone. No "
        f"split of the batch reproduces this gradient.",
    )


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
    loss_fn: Callable[[Any, Any], jax.Array], exact: Any, rounded: Any
) -> tuple[jax.Array, _Sums]:
    """One term: its loss, its magnitudes, and its distance from float64."""
    evaluate = differentiated(lambda params, batch: jnp.sum(loss_fn(params, batch)))
    loss, gradient = evaluate(*exact)
    rough_loss, rough = evaluate(*rounded)

    def error(coarse: jax.Array, fine: jax.Array) -> jax.Array:
        unit = unit_roundoff(coarse.dtype)
        return jnp.abs(coarse.astype(fine.dtype) - fine) / unit

    errors = jax.tree.map(error, rough, gradient)
    magnitudes = jax.tree.map(jnp.abs, gradient)
    return loss, _Sums(magnitudes, errors, jnp.abs(loss), error(rough_loss, loss))


def _by_example(
    loss_fn: Callable[[Any, Any], jax.Array],
    exact: Any,
    rounded: Any,
    shares: jax.Array,
) -> tuple[_Sums, jax.Array]:
    """The sums, one example at a time so that memory does not grow with the batch."""

    def one(index: jax.Array) -> tuple[jax.Array, _Sums]:
        def row(batch: Any) -> Any:
            take = jax.lax.dynamic_slice_in_dim
            return jax.tree.map(lambda x: take(x, index, 1), batch)

        (params, batch), (rough_params, rough_batch) = exact, rounded
        return _pair(loss_fn, (params, row(batch)), (rough_params, row(rough_batch)))

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
