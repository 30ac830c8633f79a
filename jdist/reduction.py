"""Reductions as partial results that combine, for every split of a batch.

A batch of examples e with losses l_e and weights w_e is reduced to one loss, and its
gradient is a sum over examples with *seeds* s_e, the cotangents of the losses:

    sum         L = S w l           dL/dW = S s dl/dW         s = w
    mean        L = S (w / S w) l   dL/dW = S s dl/dW         s = w / S w
    max, min    L = extreme of l    dL/dW = S s dl/dW         s = 1 / ties where l = L

(over w > 0 for max and min: ties share equally, as in `jnp.max`.) A shard of a batch,
or a micro-batch, yields a value, a sum of seeded gradients and a weight for its own
examples: a `Partial`. Partials combine by addition (for max and min: of those that hold
the extreme), so that any split gives the whole batch's gradient:

    dL/dW = sum_i (B_i / B) dL_i/dW                 with B_i = S w over shard i

Seeds. `shares` divides the weights of a mean by the total of the whole batch, which is
known before the backward pass; a mean is a sum from there on. An example's backward
pass thus begins with its share w / S w, as in `jax.grad` of the mean, and a rule that
is not linear in its cotangent (which clips or rounds it, or adds something to it) does
what it does there, in every split. The extreme of a batch is known beforehand if the
batch is one pass, or one pass on each replica: `partial_with_aux` then divides by the
ties. Elsewhere (micro-batches) each part divides by its own ties, and `finish` by the
sum of what counts: equal for rules that are linear.

Weights enter through the seeds and not afterwards, so that a loss that uses collectives
(batch statistics over all replicas) gets its right gradient too.

Weight 0 excludes an example: before the forward pass `without_excluded` puts the first
example that counts in its place. A seed of 0 alone would not do, since 0 times the
infinite derivative of a loss such as 0 / 0 is NaN.

Precision. Partials are float32 or wider, and so are their sums and their total; the
finished gradient is rounded once. A loss in 16 bits takes its cotangent rounded to 16
bits. `partial` multiplies what comes back by S seed / S rounded seed, so that the
roundings do not change the total: equal weights stay exact, and B_i / B is.

Weights that are negative or NaN give NaN on every replica: inside a compiled function
nothing can be refused. Weights that are all zero give a loss of NaN, the mean of
nothing (a sum of nothing is 0), and a gradient of 0, since no example counts: a step of
an optimizer then keeps its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jdist._compat import tracks_varying_axes, varying_axes, zeros_of
from jdist._errors import check_choice, quoted, requirement
from jdist._tree import (
    PyTree,
    check_arrays,
    described,
    is_inexact,
    merge,
    named_leaves,
    split_inexact,
    type_name,
    wide_dtype,
)

__all__ = [
    "REDUCTIONS", "Partial", "aligned", "combine", "empty", "finish", "partial",
    "partial_with_aux", "shares", "weight_array",
]  # fmt: skip
"""For your own trainers; `weighted_mean` is part of `data_parallel`, too."""

REDUCTIONS = ("mean", "sum", "max", "min")
"""The names of the reductions."""


class Partial(NamedTuple):
    """The contribution of a shard, micro-batch or replica to the batch's gradient."""

    value: jax.Array
    """Scalar, float32 or wider: S w l, or the extreme loss of the examples here."""

    gradient: PyTree
    """Tree like the parameters, float32 or wider: S seed * dl/dW. None where a
    parameter is not a floating array."""

    weight: jax.Array
    """Scalar: S w; of a mean's shares, so that it is 1 for the whole batch, to
    rounding; or the number of examples that hold the extreme. NaN marks a result that
    must not be trusted, and survives every combination."""


def check_reduction(call: str, reduction: str) -> None:
    """Checks that a name is in `REDUCTIONS`."""
    check_choice(f"{call}(reduction=...)", reduction, REDUCTIONS)


# --- one shard's own part ---


def partial(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    batch: PyTree,
    weights: jax.Array,
    reduction: str,
    axis_name: Hashable | None = None,
) -> Partial:
    """One forward and backward pass over a shard.

    Args:
      loss_fn: `loss_fn(params, batch) -> losses`, one per example, `(examples,)`.
      params: Pytree; leaves that are not floating arrays get no gradient.
      batch: Pytree of arrays, each `(examples, ...)`.
      weights: `(examples,)`, non-negative; 0 leaves an example out. From `shares`.
      reduction: One of `REDUCTIONS`.
      axis_name: The bound axis of replicas if this is the only pass of each: the
        extreme of max and min is then found over all of them before the backward pass.

    Raises:
      ValueError: `loss_fn` returned something else than one loss per example.
    """

    def without_aux(params: PyTree, batch: PyTree) -> tuple[jax.Array, None]:
        return loss_fn(params, batch), None

    part, _ = partial_with_aux(
        without_aux, params, batch, weights, reduction, axis_name
    )
    return part


def partial_with_aux(
    loss_fn: Callable[..., tuple[jax.Array, Any]],
    params: PyTree,
    batch: PyTree,
    weights: jax.Array,
    reduction: str,
    axis_name: Hashable | None = None,
) -> tuple[Partial, Any]:
    """`partial` for a loss function that returns `(losses, aux)`; returns aux too."""
    trainable, fixed = split_inexact(params)
    # Before the passes: a gradient is final once nothing costly follows (see
    # `jdist.data_parallel.gradient.gradient_order`).
    some = jnp.any(weights != 0)
    batch = without_excluded(batch, weights)

    def losses_of(trainable: PyTree) -> tuple[jax.Array, Any]:
        losses, aux = loss_fn(merge(trainable, fixed), batch)
        check_losses(losses, weights.shape)
        return losses, aux

    losses, pull_back, aux = jax.vjp(losses_of, trainable, has_aux=True)
    value, cotangents, weight = seeds(losses, weights, reduction)
    held = None  # Divided by at the seeds, and not yet known to be the whole batch's.
    if reduction in ("max", "min"):
        if axis_name is None:
            held = jnp.maximum(weight, 1)
            cotangents = cotangents / held
        else:
            value, cotangents, weight = _over_replicas(
                value, cotangents, weight, reduction, axis_name
            )
    given, factor = rounded(cotangents, losses.dtype)
    (gradient,) = pull_back(given)
    if held is not None:
        factor = held if factor is None else factor * held
    # Widened before any sum: a total of many shards in 16 bits would lose terms.
    gradient = scaled(jax.tree.map(_widen, gradient), factor)
    # Without an example that counts there was none to put in the place of the others.
    gradient = jax.tree.map(lambda g: jnp.where(some, g, 0), gradient)
    return Partial(value, gradient, weight), aux


def shares(
    weights: ArrayLike,
    reduction: str,
    total: ArrayLike | None = None,
    dtype: DTypeLike = float,
) -> jax.Array:
    """Weights as shares of their total, w / S w, for a mean.

    A mean with these weights is a sum; see the module.

    Args:
      weights: `(examples,)`, of one shard.
      reduction: Any but "mean" leaves the weights as they are.
      total: The sum of all shards' weights, a scalar; None for the sum of `weights`.
      dtype: Dtype of the shares of a mean; losses convert theirs to their own dtype.
        By default as wide as the precision in use allows.

    Returns:
      `(examples,)`; 0 if the total is 0, NaN if it is negative, NaN or infinite.

    Example:
      >>> import jax.numpy as jnp
      >>> shares(jnp.array([5.0, 1.0, 2.0]), "mean")
      Array([0.625, 0.125, 0.25 ], dtype=float32)
    """
    weights = wide_weights(weights)
    if reduction != "mean":
        return weights
    weights = weights.astype(jnp.result_type(dtype))
    whole = jnp.sum(weights) if total is None else jnp.asarray(total, weights.dtype)
    usable = (whole > 0) & jnp.isfinite(whole)
    # XLA multiplies by a reciprocal, which is 0 for the largest totals of float32; a
    # power of two rounds nothing.
    power = jnp.where(whole > 2.0**64, 2.0**-64, 1.0)
    found = jnp.where(usable, weights * power / (whole * power), jnp.nan)
    # For weights that are all 0; a negative one among them is NaN.
    return jnp.where((whole == 0) & (weights == 0), 0, found)


def total_weight(weights: ArrayLike, dtype: DTypeLike = float) -> jax.Array:
    """The sum of a shard's weights, in the precision of `shares`."""
    return jnp.sum(wide_weights(weights).astype(jnp.result_type(dtype)))


def wide_of(tree: PyTree) -> DTypeLike:
    """float64 if any leaf is of it, or of complex128; else float32."""
    wide = [jnp.dtype(jnp.float64), jnp.dtype(jnp.complex128)]
    found = any(jnp.result_type(leaf) in wide for leaf in jax.tree.leaves(tree))
    return jnp.float64 if found else jnp.float32


def without_excluded(batch: PyTree, weights: jax.Array) -> PyTree:
    """Puts the first example that counts in the place of those of weight 0.

    What an excluded example's own numbers would make of the backward pass (NaN, if its
    loss is 0 / 0) cannot reach the gradient. A batch of weights that are all 0 stays as
    it is.

    Args:
      batch: Pytree of arrays, each `(examples, ...)`.
      weights: `(examples,)`.

    Example:
      >>> import jax.numpy as jnp
      >>> without_excluded(jnp.array([5.0, 7.0, 3.0]), jnp.array([0, 2, 1]))
      Array([7., 7., 3.], dtype=float32)
    """
    excluded = weights == 0
    first = jnp.argmax(weights != 0)

    def included(leaf: jax.Array) -> jax.Array:
        chosen = jax.lax.dynamic_index_in_dim(leaf, first, keepdims=True)
        mask = excluded.reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(mask, chosen, leaf)

    return jax.tree.map(included, batch)


def weight_array(argument: str, weights: Any) -> jax.Array | np.ndarray:
    """Weights as an array, float32 if they are a mask or counts of tokens.

    Args:
      argument: Function and argument, for the error's text.
      weights: What was given.

    Raises:
      TypeError: They are no numbers.
    """
    rule = "must be an array of numbers, one for each example"
    try:
        array = weights if isinstance(weights, jax.Array) else np.asarray(weights)
    except jax.errors.TracerArrayConversionError:  # A list under `jax.jit`.
        array = jnp.asarray(weights)
    except ValueError as error:  # Lists of unequal lengths.
        raise TypeError(requirement(argument, rule, quoted(weights))) from error
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array
    if array.dtype != bool and not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(requirement(argument, rule, f"dtype {array.dtype}"))
    return array.astype(np.float32)


def host_weights(argument: str, weights: Any) -> np.ndarray:
    """`weight_array` on the host, in float32 or float64."""
    found = np.asarray(weight_array(argument, weights))
    # float64 is kept for models in double precision.
    return found if found.dtype == np.float64 else found.astype(np.float32)


def wide_weights(weights: ArrayLike) -> jax.Array:
    """Weights, or a single one, in at least float32: 16-bit sums overflow."""
    weights = jnp.asarray(weights)
    return _widen(weights) if is_inexact(weights) else weights.astype(jnp.float32)


def seeds(
    losses: jax.Array, weights: jax.Array, reduction: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The value, the cotangent of each loss, and the total of one shard.

    All three are float32 or wider. The cotangents of max and min are 1, and not divided
    by the number of ties yet.
    """
    losses = _widen(losses)
    weights = wide_weights(weights).astype(losses.dtype)
    # NaN compares false as well, and stays NaN.
    weights = jnp.where(weights >= 0, weights, jnp.nan)
    if reduction in ("mean", "sum"):
        # A loss of weight 0 must not matter, even when it is infinite.
        weighted = jnp.where(weights == 0, 0, weights * losses)
        return jnp.sum(weighted), weights, jnp.sum(weights)
    extreme, excluded = {
        "max": (jnp.max, -jnp.inf),
        "min": (jnp.min, jnp.inf),
    }[reduction]
    # What is left out is infinitely far from the extreme.
    value = extreme(jnp.where(weights == 0, excluded, losses))
    ties = jnp.where((losses == value) & (weights > 0), 1, 0).astype(losses.dtype)
    # Not `isnan(value)`: on CPU XLA's maximum of the rows of a matrix can miss a NaN.
    broken = jnp.any(jnp.isnan(losses) & (weights > 0)) | jnp.isnan(jnp.sum(weights))
    return value, ties, jnp.where(broken, jnp.nan, jnp.sum(ties))


def check_losses(losses: PyTree, expected: tuple[int, ...]) -> None:
    """Checks that a loss function returned one real loss per example."""
    shape = getattr(losses, "shape", None)
    if shape == expected and jnp.issubdtype(losses.dtype, jnp.floating):
        return
    rule = f"must return one real loss per example, floating, shape {expected}"
    got = type_name(losses) if shape is None else described(losses)
    remedy = (
        "Return a single array of the losses before their mean or sum: jdist weights "
        "and reduces them, so that uneven shards count right."
    )
    raise ValueError(requirement("loss_fn(params, batch)", rule, got, remedy))


def rounded(
    cotangents: jax.Array, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array | None]:
    """Cotangents of losses, in the dtype of the losses.

    Args:
      cotangents: `(examples,)`, float32 or wider, as `seeds` gives them.
      dtype: Dtype of the losses.

    Returns:
      The cotangents; and the scalar by which what they are pulled back to is to be
      multiplied, so that their rounding does not change their total. None for 1.

    Example:
      >>> import jax.numpy as jnp
      >>> given, factor = rounded(jnp.array([0.3, 0.3, 0.4]), jnp.bfloat16)
      >>> bool(jnp.isclose(given.astype("float32").sum() * factor, 1.0))
      True
    """
    given = cotangents.astype(dtype)
    if wide_dtype(dtype) == dtype:
        return given, None
    total, sent = jnp.sum(cotangents), jnp.sum(_widen(given))
    # Where all have rounded to 0 there is nothing to correct, and 0 / 0 would be NaN.
    return given, jnp.where(sent == 0, 1, total / sent)


def scaled(gradient: PyTree, factor: jax.Array | None) -> PyTree:
    """Multiplies a tree by the factor that `rounded` returned, or by a weight."""
    if factor is None:
        return gradient
    # 16-bit leaves in float32: in 16 bits the factor may round to 1.
    return jax.tree.map(
        lambda g: _scaled(jnp.multiply, _widen(g), factor).astype(g.dtype), gradient
    )


def _over_replicas(
    value: jax.Array,
    ties: jax.Array,
    count: jax.Array,
    reduction: str,
    axis_name: Hashable,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The extreme of all replicas, its seeds here, and the weight of the partial."""
    pick = jax.lax.pmax if reduction == "max" else jax.lax.pmin
    whole = pick(value, axis_name)
    ties = jnp.where(value == whole, ties, 0)
    here = jnp.where(jnp.isnan(count), count, jnp.sum(ties))
    held = jax.lax.psum(here, axis_name)
    # The seeds are divided: what is left for `finish` to divide by is 1 in all.
    first = jnp.where(jax.lax.axis_index(axis_name) == 0, 1, 0).astype(count.dtype)
    weight = jnp.where(held > 0, first, held * first)
    return whole, ties / jnp.where(held == 0, 1, held), weight


def _widen(array: jax.Array) -> jax.Array:
    return array.astype(wide_dtype(array.dtype))


# --- combining parts ---


def combine(first: Partial, second: Partial, reduction: str) -> Partial:
    """The partial of two disjoint sets of examples; the order of sums is as given."""
    if reduction in ("mean", "sum"):
        return jax.tree.map(jnp.add, first, second)
    pick = jnp.maximum if reduction == "max" else jnp.minimum
    # A part that does not hold the extreme of both adds zeros; if both do, they tie.
    value = pick(first.value, second.value)
    return Partial(
        value,
        jax.tree.map(jnp.add, *(_holders(p, value).gradient for p in (first, second))),
        _holders(first, value).weight + _holders(second, value).weight,
    )


def empty(like: PyTree, reduction: str) -> Partial:
    """The partial of no examples: combined with any other, it changes nothing.

    Args:
      like: A `Partial`, or its shapes.
      reduction: One of `REDUCTIONS`.
    """
    nothing = {"max": -jnp.inf, "min": jnp.inf}.get(reduction, 0.0)
    zeros = jax.tree.map(zeros_of, like)
    return zeros._replace(value=jnp.full(like.value.shape, nothing, like.value.dtype))


def aligned(part: Partial, reduction: str, axis_name: Hashable) -> Partial:
    """Prepares one replica's partial for a sum; call it where the axis is bound.

    For mean and sum that is the partial itself. For max and min the extreme over all
    replicas is found here, by a collective of one scalar, and a replica that does not
    hold it gets a gradient and a weight of zero. The value is then final.
    """
    if reduction in ("mean", "sum"):
        return part
    pick = jax.lax.pmax if reduction == "max" else jax.lax.pmin
    value = pick(part.value, axis_name)
    return _holders(part, value)._replace(value=value)


def finish(part: Partial, reduction: str, like: PyTree) -> tuple[jax.Array, Any]:
    """The loss, and the gradient in the dtypes of `like`, from the sum of partials."""
    loss, gradient, total = part
    if reduction in ("max", "min"):
        gradient = divided(gradient, total)
    # A sum of nothing is 0; a mean or an extreme of nothing is nothing.
    usable = total >= 0 if reduction == "sum" else total > 0
    loss = jnp.where(usable, loss, jnp.nan)
    trainable, _ = split_inexact(like)
    # Rounded to the parameters' dtypes once.
    return loss, jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, trainable)


def divided(tree: PyTree, total: jax.Array) -> PyTree:
    """Divides sums by their total; those of nothing, whose total is 0, stay 0."""
    total = jnp.where(total == 0, 1, total)
    return jax.tree.map(lambda x: _scaled(jnp.divide, x, total), tree)


def _holders(part: Partial, value: jax.Array) -> Partial:
    """The part if it holds the extreme `value`, else zeros; a NaN weight stays."""
    # A NaN value compares unequal, but its weight must still mark the result.
    holds = part.value == value
    return Partial(
        part.value,
        jax.tree.map(lambda g: jnp.where(holds, g, 0), part.gradient),
        jnp.where(holds | jnp.isnan(part.weight), part.weight, 0),
    )


def _scaled(
    operate: Callable[..., jax.Array], array: jax.Array, scalar: jax.Array
) -> jax.Array:
    """Multiplies or divides by a real scalar in the array's own precision."""
    scalar = scalar.astype(jnp.finfo(array.dtype).dtype)
    # A complex division rounds more often, and would turn an infinite part into NaN.
    if jnp.iscomplexobj(array):
        parts = (operate(part, scalar) for part in (array.real, array.imag))
        return jax.lax.complex(*parts)
    return operate(array, scalar)


# --- gradients that are computed already ---


def weighted_mean(tree: PyTree, weight: ArrayLike, axis_name: Hashable) -> PyTree:
    """Averages a tree over replicas in proportion to each replica's weight.

        mean = sum_i weight_i * tree_i / sum_i weight_i

    With the number of examples (or of tokens) as weight and each replica's own *mean*
    gradient as tree, this is the whole batch's gradient, dL/dW = sum_i (B_i/B) dL_i/dW,
    also where the B_i differ; a plain `pmean` is not. Works inside `jax.shard_map` with
    and without its check of varying axes, `jax.pmap` and `jax.vmap(axis_name=...)`.

    Args:
      tree: Pytree of floating arrays; the same structure, shapes and dtypes on all
        replicas. None leaves stay None.
      weight: Scalar, this replica's weight, at least 0. A replica of weight 0
        contributes nothing, even if its tree is NaN.
      axis_name: Name of the mapped axis, or a tuple of names.

    Returns:
      Tree like `tree`, equal on all replicas. Sums are made in float32 or wider and
      returned in the leaf's dtype. NaN everywhere if any weight is negative or NaN or
      if all are 0: none of that can be refused inside a compiled function.

    Raises:
      ValueError: `weight` is not a scalar. Or a leaf does not vary over `axis_name`
        although shard_map checks it: such a leaf has been summed already, by the
        transposition of a replicated parameter, and would be counted once per replica.
      TypeError: A leaf is not a floating array.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> gradients = jnp.array([1.0, 4.0])             # of 3 examples and of 1
      >>> jax.vmap(lambda g, n: weighted_mean(g, n, "data"), axis_name="data")(
      ...     gradients, jnp.array([3.0, 1.0])
      ... )
      Array([1.75, 1.75], dtype=float32)

    References:
      Li et al., PyTorch Distributed, VLDB 2020, section 3.2 (there unweighted).
    """
    if jnp.shape(weight) != ():
        got = f"shape {jnp.shape(weight)}"
        remedy = "Give each replica the sum of its examples' weights."
        rule = "must be one scalar per replica"
        raise ValueError(requirement("weighted_mean(weight=...)", rule, got, remedy))
    check_arrays("weighted_mean(tree=...)", tree)
    _check_reducible(tree, axis_name)
    weight = wide_weights(weight)
    weight = jnp.where(weight >= 0, weight, jnp.nan)

    def weighted(leaf: jax.Array) -> jax.Array:
        wide = _widen(jnp.asarray(leaf))
        # Not a plain product: 0 * NaN is NaN.
        return jnp.where(weight == 0, 0, _scaled(jnp.multiply, wide, weight))

    # One collective for all leaves and the total.
    sums, total = jax.lax.psum((jax.tree.map(weighted, tree), weight), axis_name)
    return jax.tree.map(
        lambda s, x: _scaled(jnp.divide, s, total).astype(jnp.result_type(x)),
        sums,
        tree,
    )


def _check_reducible(tree: PyTree, axis_name: Hashable) -> None:
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    checked = [axis for axis in axes if tracks_varying_axes(axis)]
    for path, leaf in named_leaves(tree).items():
        if leaf is None:
            continue
        if not is_inexact(leaf):
            got = f"{jnp.result_type(leaf)} at {path}"
            rule = "must have floating leaves only"
            raise TypeError(requirement("weighted_mean(tree=...)", rule, got))
        same_on = [axis for axis in checked if axis not in varying_axes(leaf)]
        if same_on:
            raise ValueError(
                f"`weighted_mean(tree=...)` must differ between replicas, but leaf "
                f"{path} is the same over axis {same_on[0]!r}. Inside shard_map with "
                f"check_vma=True the gradient of a replicated parameter arrives "
                f"already summed over the axis. Differentiate with respect to "
                f"`jax.lax.pcast(params, {same_on[0]!r}, to='varying')`, or use "
                f"`data_parallel.value_and_grad`, which does it all."
            )
