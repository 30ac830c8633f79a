"""Measures the magnitudes and rounding errors of the terms of each sum.

The gradient program of one example is traced once, in the user's own settings. It is
then run on each example alone, as it is and in float64, in lockstep (`lockstep`): once
exactly, and several times with every equation perturbed as rounding would. From these
come the sums over examples that `bound.Sums` lists. The backward pass of an example
begins with its share of the reduced loss, w / sum w for a mean, as that of the whole
batch does: a custom derivative rule may clip, round or take the sign of its cotangent.

On the way the examples' losses are compared with those of the whole batch: if they
differ, examples influence each other (batch statistics), and no split of the batch can
give the same gradient; the report says so. An example alone then says nothing of the
batch's gradient, so that the batch is measured as one term, as with a scalar loss.

Losses can hide it, as those of `f - stop_gradient(f)` do. So the batch's gradient and
the sum of its examples' own are compared in float64 where a wrong gradient might pass
for it: where it is small beside the bound, or further than the bound from that sum.
A rule that adds a gradient of its own, of a loss over the batch, is found in this way.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.typing import ArrayLike, DTypeLike

from jdist._compat import double_precision, equations_in, fast_in_loops
from jdist._tree import PyTree, examples_in, is_inexact, named_leaves
from jdist.verify.bound import (
    BLIND,
    ROUNDINGS,
    Limit,
    Sums,
    accumulated,
    confidence,
    doubtful_width,
    in_double,
    measured_bound,
    unit_roundoff,
    wide_of,
)
from jdist.verify.lockstep import Perturbation, PrecisionPair, run
from jdist.verify.oracle import (
    LossFn,
    differentiated,
    finite_differences,
    own_rules,
    reduced,
    seeded,
)
from jdist.verify.report import OracleCheck

# Rounding moves an example's float64 loss by about 1e-15; a batch statistic by 1e-2.
COUPLED = math.sqrt(unit_roundoff("float64"))

# Draws of every term's error, all examples together, and at most for one example.
DRAWS, DRAWS_EACH = 128, 32

# float64 cannot be perturbed by less than its own unit. In a program that is all
# float64, larger perturbations are made, and their effect is divided by as much.
MAGNIFIED = 2.0**24


class Measured(NamedTuple):
    """Measurements of a problem, made before any candidate is judged."""

    limits: dict[str, Limit | None]
    """The limits of the parameters' leaves by path; None for a leaf without a
    gradient."""

    loss_limit: Limit
    """The limit of the loss itself."""

    oracle: OracleCheck | None
    """The finite-difference check; None if none was asked for."""

    notes: tuple[str, ...]


class Counted(NamedTuple):
    """A batch without the examples that are excluded by a weight of 0.

    Attributes:
      batch: Pytree, each leaf `(examples, ...)`.
      weights: `(examples,)`, or None for 1 each.
      rows: The numbers of these examples in the batch that was given; None if it has
        no others.
    """

    batch: PyTree
    weights: ArrayLike | None
    rows: np.ndarray | None = None


class _Collected(NamedTuple):
    """Sums over examples, of the loss and of each floating leaf of the gradient."""

    total: list[jax.Array]
    magnitude: list[jax.Array]
    square: list[jax.Array]
    drift: list[jax.Array]
    drift_square: list[jax.Array]
    variance: list[jax.Array]


class ReducedLoss:
    """A loss and its reduction, whose compiled programs are kept between batches.

    Reductions of one loss may share `programs`: compiling them is most of a
    measurement.

    Attributes:
      loss_fn: The loss that was given.
      reduction: A key of `oracle.REDUCERS`.
      scalar: The reduced loss, a function `(params, batch, weights)`.
      programs: The programs of the loss itself.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        reduction: str,
        accumulation: DTypeLike | None,
        programs: "LossPrograms | None" = None,
    ) -> None:
        self.loss_fn = loss_fn
        self.reduction = reduction
        self.scalar = reduced(loss_fn, reduction)
        self.programs = programs or LossPrograms(loss_fn, accumulation)
        self._accumulation = accumulation
        self._value_and_gradient = jax.jit(differentiated(self.scalar))
        self._check = finite_differences(loss_fn, reduction)
        # Nothing of it is traced unless examples influence each other.
        self._of_whole = LossPrograms(lambda p, x: self.scalar(p, *x), accumulation)

    def reference(
        self, params: PyTree, batch: PyTree, weights: ArrayLike | None
    ) -> tuple[Counted, tuple[jax.Array, PyTree]]:
        """The examples that count, and the loss and gradient that they have.

        Examples of weight 0 are left out where they make the reference NaN: multiplied
        by 0, a loss of 0 / 0 or an infinite gradient is NaN. Where others depend on
        such examples, as by batch statistics, nothing is left out.
        """
        whole = Counted(batch, weights)
        found = self._value_and_gradient(params, batch, weights)
        finite = (np.isfinite(in_double(x)).all() for x in jax.tree.leaves(found))
        if weights is None or np.all(weights) or all(finite):
            return whole, found
        rows = np.flatnonzero(weights)
        batch = jax.tree.map(jnp.asarray, batch)
        kept = jax.tree.map(lambda x: x[rows], batch)
        losses = self.programs.losses
        together, apart = (losses(params, x).exact for x in (batch, kept))
        if _coupling(together[rows], apart):
            return whole, found
        counted = Counted(kept, np.asarray(weights)[rows], rows)
        return counted, self._value_and_gradient(params, *counted[:2])

    def measure(
        self,
        params: PyTree,
        counted: Counted,
        gradient: PyTree,
        *,
        check: bool = False,
        more: int = 1,
    ) -> Measured:
        """Measures the bounds.

        Args:
          params: The parameters.
          counted: The batch.
          gradient: That of the whole batch, with which candidates are compared.
          check: Whether the reference is held against finite differences.
          more: By how much the number of draws is multiplied.
        """
        batch, weights, rows = counted
        params, batch = jax.tree.map(jnp.asarray, (params, batch))
        programs, reduction = self.programs, self.reduction
        losses = programs.losses(params, batch)
        apart = losses.exact.ndim > 0
        # Under max and min, rounding may decide which example counts.
        blur = programs.blur(params, batch) if reduction in ("max", "min") else 0.0
        shares, notes = _shares(losses.exact, blur, weights, reduction)
        examples = int(np.count_nonzero(shares))
        terms = examples if apart else _leading(batch)
        draws = more * min(DRAWS_EACH, -(-DRAWS // examples))
        found = programs.gradients(params, batch, shares, draws)
        bounds = partial(_limits, params, losses.dtype, self._accumulation)
        loss_limit, limits = bounds(found.sums, terms, (draws, draws * examples))

        w = None if weights is None else jnp.asarray(weights, losses.dtype)
        coupled: tuple[str, ...] = ()
        if apart:
            coupled = _coupling(losses.exact, found.losses, rows) or _hidden_coupling(
                gradient,
                found.sums,
                limits,
                partial(self._of_whole.exact_gradient, params, (batch, w)),
                partial(programs.own_rules, params, batch),
            )
        if coupled:
            terms, draws = _leading(batch), more * DRAWS_EACH
            found = self._of_whole.gradients(params, (batch, w), np.ones(()), draws)
            loss_limit, limits = bounds(found.sums, terms, (draws, draws))
        notes += coupled + found.notes + _accumulates(params, self._accumulation)
        oracle = self._check(params, batch, weights) if check else None
        return Measured(limits, loss_limit, oracle, notes)


class _Losses(NamedTuple):
    exact: np.ndarray
    dtype: Any


class _ExampleSums(NamedTuple):
    sums: _Collected
    losses: np.ndarray
    notes: tuple[str, ...]


class LossPrograms:
    """The programs of one loss, traced in the user's settings, run in lockstep.

    They do not depend on the reduction or the weights.
    """

    def __init__(self, loss_fn: LossFn, accumulation: DTypeLike | None) -> None:
        self._accumulation = accumulation
        self._unmeasured: dict[ClosedJaxpr, set[str]] = {}

        def summed(params: PyTree, batch: PyTree) -> jax.Array:
            return jnp.sum(loss_fn(params, batch))

        # Jitted, because `trace` then caches the program for each set of shapes.
        self._losses_of = jax.jit(loss_fn)
        self._summed = summed
        self._gradient_of = jax.jit(seeded(summed))
        self._run_together = jax.jit(self._together, static_argnums=(0, 2))
        self._run_gradients = jax.jit(self._by_example, static_argnums=0)

    def losses(self, params: PyTree, batch: PyTree) -> _Losses:
        """Losses of the whole batch in float64, and the dtype that the user sees."""
        program = self._losses_of.trace(params, batch).jaxpr
        with double_precision(), jax.numpy_dtype_promotion("standard"):
            leaves = jax.tree.leaves((params, batch))
            _, (exact,) = self._run_together(program, leaves, None)
        return _Losses(np.asarray(exact), program.out_avals[0].dtype)

    def blur(self, params: PyTree, batch: PyTree) -> float:
        """The largest rounding error of a loss in the dtype that is judged."""
        program = self._losses_of.trace(params, batch).jaxpr
        leaves, factor = jax.tree.leaves((params, batch)), magnified(program)
        with double_precision(), jax.numpy_dtype_promotion("standard"):
            (rounded,), (exact,) = self._run_together(program, leaves, None)
            _, (perturbed,) = self._run_together(program, leaves, factor)
            own = jnp.max(jnp.abs(rounded.astype(exact.dtype) - exact))
            return float(jnp.maximum(own, jnp.max(jnp.abs(perturbed - exact)) / factor))

    def gradients(
        self, params: PyTree, batch: PyTree, shares: np.ndarray, draws: int
    ) -> _ExampleSums:
        """The sums over examples, and each example's own loss.

        With a scalar share the batch is one example.
        """
        apart = shares.ndim > 0
        row = jax.tree.map(lambda x: x[:1], batch) if apart else batch
        program = self._program(params, row)
        with double_precision(), jax.numpy_dtype_promotion("standard"):
            sums, losses = self._run_gradients(
                program, params, batch, jnp.asarray(shares, jnp.float64), draws
            )
        missed = ", ".join(sorted(self._unmeasured[program]))
        notes = (
            f"the rounding of {missed} was not measured: there the bound is too narrow",
        )
        sums = jax.tree.map(np.asarray, sums)
        return _ExampleSums(sums, np.asarray(losses), notes if missed else ())

    def exact_gradient(
        self, params: PyTree, batch: PyTree, cotangent: float = 1.0
    ) -> list[np.ndarray]:
        """The gradient of the whole batch in float64: its floating leaves in order."""
        program = self._program(params, batch)
        seed = jnp.asarray(cotangent, program.in_avals[0].dtype)
        # By a program that is never perturbed, which compiles in half the time.
        with double_precision(), jax.numpy_dtype_promotion("standard"):
            leaves = jax.tree.leaves((seed, params, batch))
            _, (_, *exact) = self._run_together(program, leaves, None)
        return list(map(np.asarray, exact))

    def own_rules(self, params: PyTree, batch: PyTree) -> list[str]:
        """The functions in the loss that have derivative rules of their own."""
        return own_rules(self._losses_of.trace(params, batch).jaxpr)

    def _program(self, params: PyTree, batch: PyTree) -> ClosedJaxpr:
        """The program `(cotangent, params, batch) -> (loss, gradient)`."""
        loss = jax.eval_shape(self._summed, params, batch)
        return self._gradient_of.trace(loss, params, batch).jaxpr

    def _together(
        self, program: ClosedJaxpr, leaves: list[jax.Array], amplitude: float | None
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The rounded and the wide results of a program on the whole batch."""
        strength = None if amplitude is None else jnp.float64(amplitude)
        noise = Perturbation(strength, jnp.uint32(1), self._accumulation)
        pairs = run(program, leaves, noise)
        return [pair.rounded for pair in pairs], [pair.wide for pair in pairs]

    def _by_example(
        self,
        program: ClosedJaxpr,
        params: PyTree,
        batch: PyTree,
        shares: jax.Array,
        draws: jax.Array,
    ) -> tuple[_Collected, jax.Array]:
        """Sums over all examples and draws; and the examples' losses."""
        missed = self._unmeasured.setdefault(program, set())
        factor = magnified(program)
        count = max(shares.size, 1)

        def evaluate(index: jax.Array, draw: jax.Array | None) -> list[PrecisionPair]:
            row = batch
            if shares.ndim:
                take = jax.lax.dynamic_slice_in_dim
                row = jax.tree.map(lambda x: take(x, index, 1), batch)
            if draw is None:
                noise = Perturbation(None, jnp.uint32(0), self._accumulation)
            else:
                # A prime above the number of draws: no two draws share a seed.
                seed = (index * 65537 + draw).astype(jnp.uint32)
                amplitude = jnp.float64(factor)
                noise = Perturbation(amplitude, seed, self._accumulation, missed)
            # As in the reference, whose share is rounded to the dtype of the losses.
            share = shares.reshape(-1)[index]
            start = PrecisionPair(share.astype(program.in_avals[0].dtype), share)
            return run(program, [start, *jax.tree.leaves((params, row))], noise)

        def step(index: jax.Array, state: PyTree) -> PyTree:
            sums, losses = state
            pairs, share = evaluate(index, None), shares.reshape(-1)[index]
            exact = [pair.wide for pair in pairs]
            losses = losses.at[index].set(exact[0])
            # The gradient has the share already, with which its backward pass began.
            factors: list[ArrayLike] = [share, *[1.0] * len(exact[1:])]
            each = [x**2 / (factor**2 * draws) for x in factors]

            def drawn(draw: jax.Array, variance: list[jax.Array]) -> list[jax.Array]:
                # XLA computes nothing else of a draw.
                again = [pair.wide for pair in evaluate(index, draw)]
                return [
                    v + e * jnp.abs(x - base) ** 2
                    for v, e, x, base in zip(variance, each, again, exact, strict=True)
                ]

            # An example without a share needs its loss only.
            counts = share > 0
            sums = _add(sums, pairs, factors, counts)
            turns = jnp.where(counts, draws, 0)
            variance = jax.lax.fori_loop(1, turns + 1, drawn, sums.variance)
            return sums._replace(variance=variance), losses

        # One example and draw at a time: memory does not grow with their number. The
        # numbers are arguments: more draws compile nothing anew.
        loop = fast_in_loops(partial(jax.lax.fori_loop, 0, count, step))
        sums, losses = loop((_nothing(program), jnp.zeros(count, jnp.float64)))
        return sums, losses


def _nothing(program: ClosedJaxpr) -> _Collected:
    """The sums over no example, of the outputs of a program."""
    exact = [jnp.zeros(a.shape, wide_of(a.dtype)) for a in program.out_avals]
    real = [jnp.zeros(e.shape, jnp.float64) for e in exact]
    return _Collected(exact, real, real, exact, real, real)


def _add(
    sums: _Collected,
    pairs: list[PrecisionPair],
    shares: Sequence[ArrayLike],
    counts: jax.Array,
) -> _Collected:
    """Adds an example to the sums, but for the variance of its draws."""
    columns = []
    for *old, variance, pair, share in zip(*sums, pairs, shares, strict=True):
        base = pair.wide
        error = pair.rounded.astype(base.dtype) - base
        size = jnp.abs(base)
        # Larger than the value where the terms of its last sum cancel.
        free = size if pair.size is None else jnp.maximum(size, pair.size)
        new = (
            share * base,
            share * size,
            share**2 * free**2,
            share * error,
            share**2 * jnp.abs(error) ** 2,
        )
        added = [o + jnp.where(counts, x, 0) for o, x in zip(old, new, strict=True)]
        columns.append([*added, variance])
    return _Collected(*map(list, zip(*columns, strict=True)))


def magnified(program: ClosedJaxpr) -> float:
    """The factor by which a program's perturbations exceed its rounding.

    It is 1 unless all floating dtypes in the program are float64.
    """
    variables = (
        x for each in equations_in(program) for x in each.invars + each.outvars
    )
    dtypes = {getattr(x.aval, "dtype", jnp.dtype(int)) for x in variables}
    floating = [x for x in dtypes if jnp.issubdtype(x, jnp.inexact)]
    return 1.0 if any(jnp.finfo(x).bits < 64 for x in floating) else MAGNIFIED


def _limits(
    params: PyTree,
    loss_dtype: DTypeLike,
    accumulation: DTypeLike | None,
    sums: _Collected,
    terms: int,
    draws: tuple[int, int],
) -> tuple[Limit, dict[str, Limit | None]]:
    leaves = named_leaves(params)
    dtypes = [loss_dtype, *(x.dtype for x in leaves.values() if is_inexact(x))]
    found = []
    for dtype, total, magnitude, square, drift, own, drawn in zip(
        dtypes, *sums, strict=True
    ):
        # Either estimate of the variance alone may be too small by chance.
        measured = Sums(total, magnitude, square, drift, np.maximum(own, drawn))
        adding = accumulated(dtype, accumulation)
        found.append(measured_bound(dtype, measured, terms, draws, adding))
    of_leaves = iter(found[1:])
    limits = {p: next(of_leaves) if is_inexact(x) else None for p, x in leaves.items()}
    return found[0], limits


def _accumulates(params: PyTree, accumulation: DTypeLike | None) -> tuple[str, ...]:
    """A note on how 16-bit sums are taken to be accumulated, where there are any."""
    dtypes = [x.dtype for x in jax.tree.leaves(params) if is_inexact(x)]
    narrow = sorted({d.name for d in dtypes if accumulated(d, None) != d})
    if not narrow:
        return ()
    chosen = jnp.dtype(accumulated(jnp.dtype(narrow[0]), accumulation)).name
    return (f"sums of {', '.join(narrow)} are taken to be accumulated in {chosen}",)


def _coupling(
    together: np.ndarray, alone: np.ndarray, rows: np.ndarray | None = None
) -> tuple[str, ...]:
    """A note if losses differ; `rows` are their numbers, if these are not all."""
    # One loss that is NaN or infinite must not hide how large the others are.
    slack = COUPLED * np.abs(together[np.isfinite(together)]).max(initial=0)
    if np.allclose(alone, together, rtol=0, atol=slack, equal_nan=True):
        return ()
    with np.errstate(invalid="ignore"):
        example = int(np.argmax(np.abs(alone - together)))
    number = example if rows is None else rows[example]
    return (
        f"examples influence each other: example {number} has a loss of "
        f"{together[example]:.6g} in the batch and of {alone[example]:.6g} alone. No "
        f"split of the batch reproduces this gradient.",
    )


def _hidden_coupling(
    gradient: PyTree,
    alone: _Collected,
    limits: dict[str, Limit | None],
    exact: Callable[..., list[np.ndarray]],
    rules: Callable[[], list[str]],
) -> tuple[str, ...]:
    """A note if the batch's exact gradient is not the sum of its examples' own.

    `exact` computes that of the batch, for a cotangent of the loss, and is called only
    where it may matter; `rules` are the derivative rules in the loss.
    """
    leaves = named_leaves(gradient)
    known = [(path, limit) for path, limit in limits.items() if limit is not None]
    sums = alone.total[1:]
    if not any(
        _is_doubtful(leaves[path], total, limit)
        for (path, limit), total in zip(known, sums, strict=True)
    ):
        return ()
    # Without a cotangent of the loss, what is left is what derivative rules add.
    added = map(np.nan_to_num, exact(0.0))
    for (path, limit), total, whole, part in zip(
        known, sums, exact(), added, strict=True
    ):
        unit = unit_roundoff(leaves[path].dtype)
        finer = min(1, ROUNDINGS * unit_roundoff("float64") / unit)
        apart = np.abs(whole - total)
        # Decisions are those of the rounded programs (see `lockstep`), of which the
        # batch's may take some otherwise: a small part of the gradient.
        large = BLIND * np.linalg.norm(part if part.any() else whole)
        if np.linalg.norm(apart) > large and (apart > finer * limit.bound).any():
            adds = f" through what a rule adds ({', '.join(rules())})"
            return (
                f"examples influence each other{adds if part.any() else ''}: the "
                f"batch's exact gradient at {path} and the sum of its examples' own "
                f"are {apart.max():.1e} apart. No split of the batch reproduces this "
                f"gradient.",
            )
    return ()


def _is_doubtful(given: jax.Array, total: Any, limit: Limit) -> bool:
    """Whether a wrong leaf might pass, should the examples influence each other."""
    leaf, measured = in_double(given), np.isfinite(limit.bound)
    # A NaN is no sum's, and is reported where it is compared.
    off = np.abs(leaf - total) > limit.bound
    width = np.linalg.norm(limit.bound[measured])
    wide = width > doubtful_width(given.dtype) * np.linalg.norm(leaf[measured])
    # An unused leaf has a gradient of 0, and a bound for numbers near it.
    used = leaf.any() or total.any()
    return bool(off.any() or (wide and used))


def _shares(
    losses: np.ndarray, blur: float, weights: ArrayLike | None, reduction: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The factors c_i of the examples' gradients in the gradient of the batch.

    `blur` is the rounding error of a loss: an extreme that leads by less is a note.
    """
    w = np.ones(losses.shape) if weights is None else np.asarray(weights, np.float64)
    if losses.ndim == 0 or reduction == "sum":
        return w, ()
    if reduction == "mean":
        return w / w.sum(), ()
    sign = 1 if reduction == "max" else -1
    ranked = np.where(w > 0, sign * losses, -np.inf)
    ties = ranked == ranked.max()
    rest = ranked[~ties].max(initial=-np.inf)
    gap = ranked.max() - rest
    # The lead must exceed what rounding may do to either of the two losses.
    if gap > confidence(losses.size) * blur:
        return ties / ties.sum(), ()
    note = (
        f"the {reduction} leads by {gap:.1e} only: rounding decides which example's "
        f"gradient is taken"
    )
    return ties / ties.sum(), (note,)


def _leading(batch: PyTree) -> int:
    """The number of examples behind a scalar loss; 1 where leaves differ in length."""
    lengths = {np.shape(leaf)[:1] for leaf in named_leaves(batch).values()}
    return (
        examples_in(batch, "gradients")
        if len(lengths) == 1 and () not in lengths
        else 1
    )
