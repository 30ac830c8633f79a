"""The reference trajectory of a training run, and bounds on other right ones.

The reference is composed: the one-device gradient of each batch, then the optimizer's
update. How far two right trainers may be apart is found by following other right ones
in float64, piece by piece (`piecewise`). At every step their gradient is moved by the
gradient's own bound, up or down at random in each entry, and every equation of the
update by its rounding; each next gradient is taken at the moved parameters. With D
their largest distance from the unmoved one, R what the reference's own rounding did to
it, and s the way from the start:

    bound = sqrt(2) D + 2 R + lambda u (|p| + sqrt(2 EXTRA) |s|)

The gradient of a later step is taken at moved parameters: what that does to it is added
to its own bound in the same way. A model's state is perturbed by the rounding of the
whole loss, since it is no sum over examples.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.typing import ArrayLike, DTypeLike

from jdist._compat import double_precision
from jdist._tree import PyTree, is_inexact, merge, named_leaves, split_inexact, words
from jdist.verify.arguments import check_references
from jdist.verify.bound import EXTRA, Limit, confidence, unit_roundoff, wide_of
from jdist.verify.evaluation.decisions import Choice
from jdist.verify.evaluation.lockstep import Form, PrecisionPair, Value, paired
from jdist.verify.evaluation.piecewise import (
    DRAWN,
    EXACT,
    Pieces,
    Recording,
    kept_pieces,
)
from jdist.verify.evaluation.products import rounding_note
from jdist.verify.measure import Choices, Counted, Measured, ReducedLoss, choices_in
from jdist.verify.oracle import reduced
from jdist.verify.progress import progress
from jdist.verify.steps.tapped_values import SeenValues, value_path
from jdist.verify.tracing.recording import TapRecording

# How many other right trainers are followed.
FOLLOWED = 16
# Into how many equal parts a batch is divided at most, to explain a wrong gradient.
PARTS = 16


class Training(NamedTuple):
    """A training run: its loss, its update, and how losses are reduced.

    Attributes:
      loss_fn: `loss_fn(params, batch) -> losses`; with a model's state
        `loss_fn(params, batch, states=) -> (losses, new states)`.
      update: `update(params, gradient, opt_state) -> (params, opt_state)`.
      stateful: Whether the model has a state.
      reduction: Reduction of the examples' losses.
      accumulation: The dtype in which 16-bit sums are accumulated.
    """

    loss_fn: Callable[..., Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]
    stateful: bool
    reduction: str
    accumulation: DTypeLike | None

    def losses(self, params: PyTree, batch: PyTree, states: PyTree) -> jax.Array:
        """The examples' losses, without the model's new state."""
        if self.stateful:
            return self.loss_fn(params, batch, states=states)[0]
        return self.loss_fn(params, batch)

    def gradient(
        self, params: PyTree, batch: PyTree, weights: ArrayLike | None, states: PyTree
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """The loss, its gradient, and the model's new state (`()` without one)."""
        trainable, fixed = split_inexact(params)

        def objective(t: PyTree) -> tuple[jax.Array, PyTree]:
            # A list: `reduced` takes a function that returns losses alone.
            new: list[PyTree] = [()]

            def losses(params: PyTree, batch: PyTree) -> jax.Array:
                if not self.stateful:
                    return self.loss_fn(params, batch)
                found, new[0] = self.loss_fn(params, batch, states=states)
                return found

            value = reduced(losses, self.reduction)(merge(t, fixed), batch, weights)
            return value, new[0]

        (loss, new), slope = jax.value_and_grad(objective, has_aux=True)(trainable)
        return loss, slope, new

    def step(
        self, state: tuple[PyTree, ...], batch: PyTree, weights: ArrayLike | None
    ) -> tuple[PyTree, ...]:
        """The gradient, and the state after the step."""
        params, opt_state, states = state
        _, gradient, new = self.gradient(params, batch, weights, states)
        return gradient, *self.update(params, gradient, opt_state), new


class Composed(NamedTuple):
    """The inputs and the program of an update.

    Attributes:
      inputs: The arguments of the update: `(params, gradient, opt_state)`.
      update: The update's program.
    """

    inputs: tuple[PyTree, PyTree, PyTree]
    update: Pieces


class OtherSteps(NamedTuple):
    """A step of the reference in which decisions within rounding are made otherwise.

    Attributes:
      choices: Measures these decisions: changes of the step's results.
      results: The paths of the results, in their order.
      again: The step and those after it, given the changes of results.
    """

    choices: Callable[[], Choices]
    results: Sequence[str]
    again: Callable[[Choice], Iterable["Moment"]]


class InParts(NamedTuple):
    """The gradients of equal parts of a batch.

    Attributes:
      parts: How many.
      shares: By which each gradient is multiplied in the whole batch's.
      gradients: The leaves of each by path, as in `Moment.wanted`.
    """

    parts: int
    shares: Sequence[float]
    gradients: Sequence[Mapping[str, np.ndarray]]


class Moment(NamedTuple):
    """One step of the reference; leaves by path, on the host.

    Attributes:
      before: Parameters, optimizer state and model state before the step.
      wanted: The same after the step, the gradient, and the tapped values of the update
        as `values/NAME`.
      limits: The limit of each leaf in `wanted`.
      moves: The exact step of each floating leaf but the gradient, float64.
      sizes: The size of that step if the gradient's terms do not cancel; 0 if it is not
        known.
      composed: Inputs and program of its update; None for a step that is one function.
      in_parts: Computes the gradients of equal parts of the batch.
      stale: The gradient that the parameters of the step before have on its batch, and
        the steps that the update makes of it; empty in the first step.
      notes: On the step's programs.
      otherwise: The step by other choices, and those after it.
    """

    before: Mapping[str, Any]
    wanted: Mapping[str, Any]
    limits: Mapping[str, Limit | None]
    moves: Mapping[str, np.ndarray]
    sizes: Mapping[str, np.ndarray]
    composed: Composed | None = None
    stale: Mapping[str, np.ndarray] = MappingProxyType({})
    in_parts: Callable[[], Iterable[InParts]] = tuple
    notes: tuple[str, ...] = ()
    otherwise: OtherSteps | None = None


class _Begin(NamedTuple):
    """Where one of the reference's steps begins.

    Attributes:
      programs: Those of gradient and update; the loss that is measured; and the pieces
        of programs.
      state: Parameters, optimizer state and model state.
      others: The leaves of the trainers that are followed.
      number: The number of steps before.
      earlier: The parameters before the last of them.
    """

    programs: tuple[Any, ...]
    state: tuple[PyTree, PyTree, PyTree]
    others: list[np.ndarray]
    number: int = 0
    earlier: PyTree = None


class _Taken(NamedTuple):
    """One of the reference's steps, which other trainers take too.

    Attributes:
      begin: Where it begins.
      gradient: Its gradient.
      batch: Its batch, and the weights.
      limits: The limit of each floating leaf of the gradient.
      change: How other choices change it.
      tapped: Whether the update has taps.
    """

    begin: _Begin
    gradient: PyTree
    batch: tuple[PyTree, Any]
    limits: list[Limit]
    change: list[Any]
    tapped: bool


def named(params: PyTree, opt_state: PyTree, states: PyTree) -> dict[str, Any]:
    """The leaves of a whole training state, by path."""
    return named_leaves({"params": params, "state": opt_state, "states": states})


def trajectory(
    training: Training,
    start: tuple[PyTree, PyTree, PyTree],
    batches: Sequence[tuple[PyTree, Any]],
    begin: _Begin | None = None,
    change: Choice = MappingProxyType({}),
) -> Iterator[Moment]:
    """Yields the reference's steps in order.

    Args:
      training: The training run.
      start: Parameters, optimizer state and model state.
      batches: A batch and its weights for each step.
      begin: The step to begin with; None for the first one.
      change: The changes of that step's results by other choices.
    """
    # Before x64 is enabled, which would give NumPy arrays wider dtypes.
    start, batches = jax.tree.map(jnp.asarray, (start, batches))
    origin = [wide[0] for wide in starts(start)]
    if begin is None:
        compiled = jax.jit(training.gradient), jax.jit(training.update)
        programs = *compiled, _measured_loss(training), kept_pieces()
        begin = _Begin(programs, start, starts(start))
    seen: SeenValues | None = None
    for t, weighted in enumerate(batches[begin.number :], begin.number):
        gradient_of, updated, loss, pieces_of = begin.programs
        (params, opt_state, states), others = begin.state, begin.others
        batch, own, _ = given = _counted(training, loss, params, *weighted)
        # At the reference's parameters: the others are moved in lockstep with it.
        value, gradient, new = gradient_of(params, batch, own, states)
        whole = Counted((batch, own, states), None) if training.stateful else given
        measured = loss.measure(params, whole, (value, gradient))
        known = [x for x in measured.limits.values() if x is not None]
        # The update makes the others of the gradient.
        results = gradient, params, opt_state, new
        (gradient, *_, new), _ = changed(results, (), change)
        by_choice = [change.get(n, 0.0) for n in range(len(known))]
        traced = partial(gradient_of.trace, params, batch, own, states)
        update = _traced_update(updated, params, gradient, opt_state)
        if seen is None:
            seen = SeenValues(update, traced)
        differentiate = traced().jaxpr
        before = [wide[0] for wide in others]
        pieces = pieces_of(differentiate), pieces_of(update, seen.observe)
        of_batch = gradient, (batch, own), known, by_choice
        taken = _Taken(begin, *of_batch, bool(seen.names))
        others, slopes, sizes = _moved(*pieces, taken)
        after = (*updated(params, gradient, opt_state), new)
        wanted = on_host(named(*after))
        limits, moves = limits_of(wanted, others, (origin, before), sizes, t + 1)
        values, bounds = _values(seen, t + 1)
        gradients = named_leaves({"gradient": gradient})
        yield Moment(
            on_host(named(*begin.state)),
            {**on_host(gradients), **values, **wanted},
            {**_gradient_limits(gradients, measured, slopes), **bounds, **limits},
            moves,
            dict(zip(moves, sizes, strict=True)),
            Composed((params, gradient, opt_state), pieces_of(update)),
            _stale(begin, batch, own),
            partial(_in_parts, training, gradient_of, begin.state, weighted),
            rounding_note(differentiate, update),
            OtherSteps(
                cache(partial(_choices, training, measured, begin, (batch, own))),
                [p for p, x in {**gradients, **wanted}.items() if x is not None],
                partial(trajectory, training, start, batches, begin),
            ),
        )
        begin, change = _Begin(begin.programs, after, others, t + 1, params), {}


def _traced_update(updated: jax.stages.Wrapped, *given: PyTree) -> ClosedJaxpr:
    # Taps are part of a program only if it is traced during a recording.
    with TapRecording():
        program = updated.trace(*given).jaxpr
    check_references("step(update=...)", program)
    return program


def _choices(
    training: Training, measured: Measured, begin: _Begin, given: tuple[PyTree, Any]
) -> Choices:
    """Decisions within rounding in a step; in words those of the loss's examples."""
    state, others, accumulation = begin.state, begin.others, training.accumulation
    found = choices_in(training.step, state, others, given, accumulation)
    told = measured.choices()
    return found._replace(words=told.words, note=told.note) if told.words else found


def changed(
    tree: PyTree, others: Sequence[Any], change: Choice
) -> tuple[PyTree, list[Any]]:
    """A tree whose leaves have changed, by their numbers, and its followed leaves."""
    leaves, structure = jax.tree.flatten(tree)
    floating = [number for number, x in enumerate(leaves) if is_inexact(x)]
    for number, move in change.items():
        own = np.asarray(leaves[number])
        wide = own.astype(wide_of(own.dtype)) + move
        leaves[number] = jnp.asarray(wide.astype(own.dtype))
    moved = [x + change.get(n, 0.0) for x, n in zip(others, floating, strict=False)]
    return jax.tree.unflatten(structure, leaves), moved


def _stale(begin: _Begin, batch: PyTree, weights: Any) -> dict[str, np.ndarray]:
    """The gradient of a trainer that misses the last update, and its step, by path."""
    if begin.earlier is None:
        return {}
    gradient_of, updated, *_ = begin.programs
    params, opt_state, states = begin.state
    _, gradient, _ = gradient_of(begin.earlier, batch, weights, states)
    moved = updated(params, gradient, opt_state)[0]
    pairs = zip(jax.tree.leaves(moved), jax.tree.leaves(params), strict=True)
    steps = [new - old if is_inexact(old) else None for new, old in pairs]
    tree = {
        "gradient": gradient,
        "params": jax.tree.unflatten(jax.tree.structure(params), steps),
    }
    found = on_host(named_leaves(tree)).items()
    return {path: x for path, x in found if x is not None}


def _in_parts(
    training: Training,
    gradient_of: Callable[..., Any],
    state: tuple[PyTree, PyTree, PyTree],
    weighted: tuple[PyTree, Any],
) -> Iterator[InParts]:
    """The gradients of 2, 3, .. equal parts of a batch, cut between its examples."""
    batch, weights = weighted
    # Only a loss of each example is known to take fewer of them.
    if training.stateful or training.reduction not in ("mean", "sum"):
        return
    shape = jax.eval_shape(training.loss_fn, state[0], batch).shape
    if not shape:
        return
    (examples,) = shape
    each = np.ones(examples) if weights is None else np.asarray(weights, np.float64)
    for parts in range(2, min(examples, PARTS) + 1):
        if examples % parts:
            continue
        shares: list[float] = []
        gradients: list[Mapping[str, np.ndarray]] = []
        for own in np.split(np.arange(examples), parts):
            part = jax.tree.map(lambda x, i=slice(own[0], own[-1] + 1): x[i], batch)
            weight = None if weights is None else jnp.asarray(weights)[own]
            found = gradient_of(state[0], part, weight, state[2])[1]
            gradients.append(on_host(named_leaves({"gradient": found})))
            mean = each[own].sum() / each.sum()
            shares.append(float(mean) if training.reduction == "mean" else 1.0)
        yield InParts(parts, shares, gradients)


def _measured_loss(training: Training) -> ReducedLoss:
    """The loss whose gradient's bound is measured."""
    if not training.stateful:
        return ReducedLoss(training.loss_fn, training.reduction, training.accumulation)

    def whole(params: PyTree, given: PyTree) -> jax.Array:
        return training.gradient(params, *given)[0]

    # Batch statistics couple the examples, so the loss is measured as a whole.
    return ReducedLoss(whole, "mean", training.accumulation)


def _counted(
    training: Training,
    loss: ReducedLoss,
    params: PyTree,
    batch: PyTree,
    weights: ArrayLike | None,
) -> Counted:
    """The examples that count."""
    if training.stateful or weights is None or np.all(weights):
        return Counted(batch, weights)
    return loss.reference(params, batch, weights)[0]


def on_host(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves on the host, for use after the arrays may have been donated."""
    return {
        path: None if leaf is None else np.asarray(words(leaf))
        for path, leaf in leaves.items()
    }


# --- the trainers that are followed ---


def starts(start: PyTree) -> list[np.ndarray]:
    """The floating leaves of the state in float64, for each trainer; 0 is unmoved."""
    leaves = [x for x in jax.tree.leaves(start) if is_inexact(x)]
    return [
        np.broadcast_to(np.asarray(x, wide_of(x.dtype)), (FOLLOWED + 1, *x.shape))
        for x in leaves
    ]


def each_run(
    pieces: Pieces,
    given: Callable[[int], list[Value]],
    form: Form,
    amplitude: float,
    seed: int,
    *,
    sized: bool = False,
) -> Iterator[list[PrecisionPair]]:
    """The results of each trainer that is followed, by the decisions of the first.

    Args:
      pieces: The program.
      given: The arguments that a trainer has, by its number.
      form: The form of the runs but for the first, which is exact.
      amplitude: Factor of their perturbations.
      seed: Seed of the first; each has its own.
      sized: Whether the first has sizes.
    """
    recording = Recording()
    yield pieces.exact(given(0), recording, sized=sized)
    for number in range(1, FOLLOWED + 1):
        yield pieces.run(
            given(number),
            form,
            amplitude=amplitude,
            seed=seed + number,
            replay=recording,
        )


def stacked(found: Iterable[Sequence[PrecisionPair]]) -> list[np.ndarray]:
    """Floating results of several runs, `(runs, ...)` each."""
    wide = ([np.asarray(x.wide) for x in own if is_inexact(x.wide)] for own in found)
    return [np.stack(x) for x in zip(*wide, strict=True)]


def _moved(
    differentiate: Pieces, update: Pieces, taken: _Taken
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Takes one step of each trainer; returns states, gradients and sizes."""
    with double_precision(), jax.numpy_dtype_promotion("standard"):
        slopes, states = _differentiated(differentiate, taken)
        moved, sizes = _updated(update, taken, slopes)
    return [*moved, *states], slopes, [*sizes, *[np.zeros(())] * len(states)]


def _differentiated(
    pieces: Pieces, taken: _Taken
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Each trainer's gradient, and the model's new state."""
    begin = taken.begin
    leaves = jax.tree.leaves(begin.state)
    params, opt_state, states = (len(jax.tree.leaves(x)) for x in begin.state)
    count = len(jax.tree.leaves(taken.gradient))

    def given(number: int) -> list[Value]:
        state = paired(leaves, (x[number] for x in begin.others))
        batch = jax.tree.leaves(taken.batch)
        return [*state[:params], *batch, *state[params + opt_state :]]

    # The reference's own order of leaves: the loss, the gradient, the new state.
    # The gradient's own rounding is in the bound by which it is moved.
    runs = FOLLOWED + 1 if begin.number else 1  # All start at the same parameters.
    with progress("following other trainers", 0 if pieces.tiny else runs) as advance:

        def gradient_in(found: list[PrecisionPair]) -> list[PrecisionPair]:
            advance()
            return found[1 : count + 1]

        exact = islice(each_run(pieces, given, EXACT, 0.0, 0), runs)
        own = stacked(map(gradient_in, exact))
    slopes = [np.broadcast_to(x, (FOLLOWED + 1, *x.shape[1:])) for x in own]
    if not states:
        return slopes, []
    # No sum over examples: perturbed by the rounding of the whole loss.
    rounding = each_run(pieces, given, DRAWN, _moving(taken), _seed(taken))
    return slopes, stacked(x[count + 1 :] for x in rounding)


def _updated(
    pieces: Pieces, taken: _Taken, slopes: list[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Each trainer's parameters and optimizer state, and the sizes of their steps."""
    params, opt_state, _ = taken.begin.state
    own, count = jax.tree.leaves((params, opt_state)), len(jax.tree.leaves(params))
    numbers = np.arange(FOLLOWED + 1)
    # With size 0, so that sizes of results are those of the steps alone.
    kept = list(map(unsized, paired(own, taken.begin.others)))
    gradient = _shifted(taken, slopes)
    given = [*kept[:count], *gradient, *kept[count:]]
    amplitude = np.where(numbers == 0, 0.0, _moving(taken))
    return run_together(pieces, given, amplitude, _seed(taken) + numbers)


def run_together(
    pieces: Pieces, given: list[Value], amplitude: np.ndarray, seeds: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Runs an update for several trainers at once.

    Args:
      pieces: The update's program.
      given: Its arguments, of which floating ones have a wide side for each trainer.
      amplitude: Factor of the perturbations of each.
      seeds: Their seeds.

    Returns:
      The floating results, `(trainers, ...)` each, and the sizes of the first's.
    """
    form = DRAWN._replace(rounded=True, sized=True, sizes=wide_of, together=True)
    found = pieces.run(given, form, amplitude=amplitude, seed=seeds)
    floating = [x for x in found if is_inexact(x.rounded)]
    # What depends on no floating number has one wide side for all.
    wide = [np.broadcast_to(x.wide, (seeds.size, *x.rounded.shape)) for x in floating]
    return wide, list(map(size_of, floating))


def _moving(taken: _Taken) -> float:
    """How many deviations a right program's rounding may reach in its gradient."""
    return confidence(sum(x.size for x in jax.tree.leaves(taken.gradient)))


def _seed(taken: _Taken) -> int:
    """One seed for each followed trainer and step."""
    return taken.begin.number * (FOLLOWED + 1)


def _shifted(taken: _Taken, slopes: list[np.ndarray]) -> list[PrecisionPair]:
    """The gradients, in which each entry is moved up or down by its bound.

    Trainers 1 and 2 move all entries outwards or inwards if the update has taps: values
    of the whole gradient, as its norm, differ most where its entries err alike.
    """
    leaves = jax.tree.leaves(taken.gradient)
    generator = np.random.default_rng(taken.begin.number)
    shifted = []
    each = zip(leaves, slopes, taken.limits, taken.change, strict=True)
    for own, slope, limit, change in each:
        signs = generator.integers(0, 2, slope.shape, np.int8) * 2.0 - 1
        signs[0] = 0
        if taken.tapped:
            signs = signs.astype(slope.dtype)
            signs[1], signs[2] = np.sign(slope[1]), -np.sign(slope[2])
        size = np.broadcast_to(np.asarray(limit.size, np.float64), own.shape)
        with np.errstate(invalid="ignore"):  # 0 times infinity.
            wide = slope + change + np.where(signs == 0, 0, signs * limit.bound)
        shifted.append(PrecisionPair(own, wide, size))
    return shifted


def unsized(value: Value) -> Value:
    """A leaf of the state with size 0, so that only the size of its step counts."""
    if not isinstance(value, PrecisionPair):
        return value
    return replace(value, size=np.zeros(value.rounded.shape))


def size_of(value: PrecisionPair) -> np.ndarray:
    """The size of what was added to a leaf; 0 where it is unknown."""
    return np.zeros(()) if value.size is None else np.asarray(value.size)


# --- their limits ---


def limits_of(
    wanted: Mapping[str, Any],
    others: list[np.ndarray],
    earlier: tuple[list[np.ndarray], list[np.ndarray]],
    sizes: list[np.ndarray],
    steps: int,
) -> tuple[dict[str, Limit | None], dict[str, np.ndarray]]:
    """The limit of each leaf, and its exact step.

    `earlier` has the exact leaves at the start and before the step; `sizes` how large
    each step is where terms do not cancel.
    """
    values = iter(zip(others, *earlier, sizes, strict=True))
    limits: dict[str, Limit | None] = {}
    moves: dict[str, np.ndarray] = {}
    for path, leaf in wanted.items():
        if leaf is None or not is_inexact(leaf):
            limits[path] = None
            continue
        wide, origin, before, size = next(values)
        exact, own = wide[0], np.asarray(leaf).astype(wide.dtype)
        # Trainer 0 is the unmoved one.
        apart = np.max(np.abs(wide[1:] - exact), axis=0, initial=0)
        moves[path] = exact - before
        # Steps may lead back, and each of them has rounded.
        way = np.maximum(np.abs(exact - origin), np.abs(moves[path]))
        roundings = np.abs(own) + math.sqrt(2 * EXTRA) * way
        # Roundings of independent steps add up as a random walk: sqrt(steps).
        width = confidence(leaf.size) * math.sqrt(steps) * unit_roundoff(leaf.dtype)
        allowed = math.sqrt(2) * apart + 2 * np.abs(own - exact) + width * roundings
        tiny = float(jnp.finfo(leaf.dtype).smallest_normal)
        # Numbers below the smallest normal one may be flushed to zero.
        limits[path] = Limit(allowed + EXTRA * tiny, np.maximum(np.abs(own), size))
    return limits, moves


def _values(
    seen: SeenValues, steps: int
) -> tuple[dict[str, np.ndarray], dict[str, Limit | None]]:
    """The tapped values of the last step's update by path, and their limits."""
    values, others = seen.taken()
    wanted = {value_path(label): own for label, own in values.items()}
    # Beside a start of 0 the way of a value is the whole of it.
    none = [np.zeros_like(wide[0]) for wide in others]
    sizes = [np.zeros(())] * len(none)
    return wanted, limits_of(wanted, others, (none, none), sizes, steps)[0]


def _gradient_limits(
    gradients: Mapping[str, Any], measured: Measured, slopes: list[np.ndarray]
) -> dict[str, Limit | None]:
    """The gradient's own bound, and what moved parameters do to it."""
    values = iter(slopes)
    limits: dict[str, Limit | None] = {}
    for path, own in zip(gradients, measured.limits.values(), strict=True):
        limits[path] = own
        if own is not None:
            wide = next(values)
            apart = np.max(np.abs(wide[1:] - wide[0]), axis=0, initial=0)
            limits[path] = own._replace(bound=own.bound + math.sqrt(2) * apart)
    return limits
