"""Verification of whole optimizer steps by the parameters after the update.

A gradient that is read off a step, (p - q) / lr, carries the rounding of p divided by
lr: at a small learning rate that is more than the gradient. So a trainer that shows
only its new parameters is judged by these, after every step, against the one-device
gradient followed by the optimizer's update (`trajectory`); or, where neither can be
taken out of the trainer, against a whole step that is known to be right
(`reference_step`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jdist._errors import check_function, requirement
from jdist._tree import PyTree, named_leaves, type_name
from jdist.verify.arguments import check_candidates, check_options, check_problem
from jdist.verify.bound import BLIND
from jdist.verify.candidates import called, excuse
from jdist.verify.comparison import compare_leaves, described_shard
from jdist.verify.draws import check_loss
from jdist.verify.gradient_check import agreed
from jdist.verify.oracle import gradient_of_sum
from jdist.verify.processes import (
    TIMEOUT,
    Peers,
    Shard,
    as_the_caller,
    brought,
    joined,
    on_one_device,
)
from jdist.verify.report import Attribution, LeafReport, Report
from jdist.verify.steps.attribution import (
    STALE,
    attributed,
    attributed_of_whole,
    within,
)
from jdist.verify.steps.reference_step import ReferenceStep, Step, named_state
from jdist.verify.steps.trajectory import Moment, Training, trajectory


class Trained(NamedTuple):
    """A trainer's state after a step; None for the parts that it does not show.

    Attributes:
      params: The new parameters.
      opt_state: The optimizer's new state.
      states: The model's new state.
      gradient: The gradient given to the optimizer; before clipping, if `update` clips.
    """

    params: PyTree
    opt_state: PyTree = None
    states: PyTree = None
    gradient: PyTree = None


@overload
def step(
    loss_fn: Callable[..., Any],
    update: Callable[[Any, Any, Any], tuple[Any, Any]],
    state: tuple[Any, ...],
    batches: Sequence[Any],
    candidates: Mapping[str, Callable[..., Any]],
    *,
    weights: Sequence[Any] | None = None,
    reduction: str = "mean",
    accumulation: DTypeLike | None = None,
    timeout: float = TIMEOUT,
) -> Report: ...
@overload
def step(
    step_fn: Step | Mapping[str, Step],
    reference_step: Step,
    state: PyTree,
    batches: Sequence[Any],
    /,
    *,
    accumulation: DTypeLike | None = None,
    timeout: float = TIMEOUT,
) -> Report: ...
def step(  # noqa: PLR0913 - options, by keyword
    loss_fn: Any,
    update: Callable[..., Any],
    state: PyTree,
    batches: Sequence[Any],
    candidates: Mapping[str, Callable[..., Any]] | None = None,
    *,
    weights: Sequence[Any] | None = None,
    reduction: str = "mean",
    accumulation: DTypeLike | None = None,
    timeout: float = TIMEOUT,
) -> Report:
    """Judges trainers by their parameters and states after each optimizer step.

    Two forms. `step(loss_fn, update, state, batches, candidates)` judges by the
    one-device gradient and the optimizer's update, and says which was wrong.
    `step(step_fn, reference_step, state, batches)` judges a step that is one function
    of a state by another, such as the same trainer on one device: both are
    `fn(state, batch) -> state`, or `-> (state, anything)`, of any pytree; the reference
    is traced. A part of its state that `step_fn` keeps to itself, not of `params`, is
    None. Several are given as a mapping of names.

    Args:
      loss_fn: As in `verify.gradients`; of a model with a state
        `loss_fn(params, batch, states=) -> (losses, new states)`.
      update: `update(params, gradient, opt_state) -> (params, opt_state)`, such as
        `optim.sgd(lr=0.1).step`, with clipping and schedules if there are any. It is
        traced, and must have no Python side effects.
      state: Where training starts: `(params, opt_state)`, such as
        `(params, optim.sgd(lr=0.1).init(params))`; or `(params, opt_state, states)` of
        a model with a state, such as batch-norm statistics.
      batches: One batch for each step, all of the same shapes.
      candidates: Name to `fn(params, opt_state, batch) -> (params, opt_state)`, or with
        a model's state `fn(params, opt_state, states, batch)` and three results. Each
        is called for each batch in turn, with what it returned before, until a step is
        wrong. None in place of a state: it is not judged, and the candidate
        gets None back. A `Trained` may show the gradient too. What a candidate is given
        are copies, which it may donate. One that is wrong is called twice more, to see
        whether it draws random numbers of its own.
      weights: One array `(examples,)` for each batch; None for 1 each.
      reduction: As in `verify.gradients`.
      accumulation: As in `verify.gradients`.
      timeout: As in `verify.gradients`.

    Returns:
      A `Report` with a row for each leaf of what a candidate shows, after the first
      wrong step or else the last. A failing row tells what became of the leaf's *step*,
      the new value minus the old. A leaf is "not judged" where no step at all would
      pass as well. `attributions` say which part of the first wrong step was wrong:
      "gradient", "optimizer update" or "model state"; or "gradient or optimizer update"
      where what the candidate shows cannot tell. In the second form they name the
      part of the state, and say "optimizer update" where the optimizer's state, which
      is made of the gradient, is right.

    Raises:
      ValueError: No batches or candidates; a state of another length; as many weights
        as batches are needed; and as `verify.gradients`. The reference step's new state
        does not depend on the batch; weights or a reduction without a loss.
      TypeError: A candidate returned something other than is said above; the loss
        function wants a key; the reference step returns another kind of state.
      PeersLost: Another process raised, or did not come in time.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> loss = lambda w, x: (x @ w) ** 2
      >>> x, w = jnp.array([[1.0, 2.0], [3.0, 5.0]]), jnp.array([0.3, 0.4])
      >>> sgd = lambda w, g, s: (w - 0.01 * g, s)
      >>> def summed(w, s, x):                        # the sum for the mean
      ...     gradient = jax.grad(lambda w: loss(w, x).sum())(w)
      ...     return Trained(*sgd(w, gradient, s), gradient=gradient)
      >>> report = step(loss, sgd, (w, ()), [x], {"mine": summed})
      >>> report.attributions[0].part, report.failures[0].path
      ('gradient', 'gradient')
      >>> report.failures[1].problem.rpartition("; ")[2]
      'it is 2 times the reference'
      >>> def on_one_device(state, x):
      ...     gradient = jax.grad(lambda w: loss(w, x).mean())(state["params"])
      ...     return {"params": state["params"] - 0.01 * gradient}
      >>> def in_parts(state, x):
      ...     w = state["params"]
      ...     first, second = (jax.grad(lambda w: loss(w, x[i]))(w) for i in (0, 1))
      ...     return {"params": w - 0.01 * (first + second) / 2}
      >>> step(in_parts, on_one_device, {"params": w}, [x, 2 * x]).ok
      True
    """
    check_options("step", reduction, accumulation)
    with joined(timeout) as peers, on_one_device(state, batches):
        if candidates is None:
            _check_without_loss(weights, reduction)
            given = [batch for batch, _ in _weighted(batches, None)]
            report = _of_whole_steps(loss_fn, update, state, given, accumulation, peers)
        else:
            _check_state(state)
            stateful = len(state) == 3
            training = Training(loss_fn, update, stateful, reduction, accumulation)
            weighted = _weighted(batches, weights)
            report = _of_composed(training, state, weighted, candidates, peers)
        return agreed(report, peers)


def _of_composed(
    training: Training,
    state: tuple[PyTree, ...],
    batches: Sequence[tuple[PyTree, Any]],
    candidates: Mapping[str, Callable[..., Any]],
    peers: Peers,
) -> Report:
    """Judges trainers of parameters and states by the gradient and the update."""
    states = tuple(state[2:]) or ((),)
    own_states = brought(states[0])
    check_function("step(loss_fn)", training.loss_fn)
    check_function("step(update)", training.update)
    own = training.loss_fn
    if training.stateful:
        own = partial(own, states=own_states)
    check_loss("step", own, state[0], batches[0][0])
    check_candidates("step", candidates)
    losses = partial(training.losses, states=own_states)
    check = partial(check_problem, "step", losses, state[0], names=("state", "batches"))
    start = _arrays((*state[:2], *states))
    given = [batch for batch, _ in batches]
    with _no_single_batch(partial(losses, brought(state[0])), brought(given)):
        # Every batch is checked before the first step of any candidate is run.
        for batch, weight in batches:
            check(batch, weight, training.reduction)
        # A list, because every candidate goes through these steps.
        moments = list(trajectory(training, brought(start), brought(batches)))
    steps = _Steps(
        # Candidates of a model without a state take no `states`.
        start[: len(state)],
        given,
        moments,
        partial(_trained, peers),
        gradient_of_sum(losses),
        attributed,
    )
    return _report(steps, peers, candidates)


def _of_whole_steps(
    step_fn: Step | Mapping[str, Step],
    reference_step: Step,
    state: PyTree,
    batches: Sequence[PyTree],
    accumulation: DTypeLike | None,
    peers: Peers,
) -> Report:
    """Judges steps of a whole state by a reference step."""
    if isinstance(step_fn, Mapping) and not step_fn:
        rule = "must be a function, or name at least one"
        raise ValueError(requirement("step(step_fn=...)", rule, step_fn))
    start = _arrays(state)
    own, given = brought(start), brought(batches)
    with _no_single_batch(partial(reference_step, own), given):
        reference = ReferenceStep(reference_step, own, given[0])
        moments = list(reference.moments(own, given, accumulation))
    steps = _Steps(
        (start,),
        batches,
        moments,
        partial(_advanced, reference, peers),
        reference.advance,
        partial(attributed_of_whole, reference.of_batch),
    )
    named = step_fn if isinstance(step_fn, Mapping) else {"step_fn": step_fn}
    report = _report(steps, peers, named)
    if not reference.unmeasured:
        return report
    missed = ", ".join(sorted(reference.unmeasured))
    note = f"the rounding of {missed} was not measured: there the bound is too narrow"
    return replace(report, notes=(*report.notes, note))


def _arrays(state: PyTree) -> PyTree:
    """The state that candidates start from, as arrays where the caller has them."""
    with as_the_caller():
        return jax.tree.map(jnp.asarray, state)


def _report(
    steps: _Steps, peers: Peers, candidates: Mapping[str, Callable[..., Any]]
) -> Report:
    rows: tuple[LeafReport, ...] = ()
    notes: tuple[str, ...] = ()
    causes: tuple[Attribution, ...] = ()
    for name, candidate in candidates.items():
        own, cause, unsure = _judged(steps, peers, name, candidate)
        rows += own
        notes += _equalities(name, own) + unsure
        causes += cause
    return Report(rows, notes=notes, attributions=causes)


def _check_without_loss(weights: object, reduction: str) -> None:
    if weights is not None or reduction != "mean":
        rule = "need a loss and candidates"
        got = "two steps"
        remedy = "The reference step has its own."
        call = "step(weights=..., reduction=...)"
        raise ValueError(requirement(call, rule, got, remedy))


def _check_state(state: object) -> None:
    if isinstance(state, tuple | list) and len(state) in (2, 3):
        return
    rule = "must be (params, opt_state), or (params, opt_state, states)"
    got = type_name(state)
    if isinstance(state, tuple | list):
        got = f"{got} of {len(state)}"
    remedy = "An optimizer that keeps nothing has the state ()."
    raise ValueError(requirement("step(state=...)", rule, got, remedy))


_BATCHES = "step(batches=...)"
_ONE_EACH = "must be a list or tuple of batches, one for each step"
_WRAP = "Wrap a single batch in a list."


@contextlib.contextmanager
def _no_single_batch(
    function: Callable[[PyTree], object], batches: Sequence[PyTree]
) -> Iterator[None]:
    """Refuses one batch, such as `(x, y)`, that was given as the list of batches.

    Args:
      function: A function of a batch, which JAX can trace.
      batches: What was given as a batch for each step.

    Raises:
      ValueError: In place of an error in the block, where that explains it.
    """
    try:
        yield
    except Exception as error:
        parts = all(_traces(function, batch) for batch in batches)
        whole = any(_traces(function, kind(batches)) for kind in (tuple, list))
        if parts or not whole:
            raise
        got = "one batch, whose parts are no batches"
        raise ValueError(requirement(_BATCHES, _ONE_EACH, got, _WRAP)) from error


def _traces(function: Callable[[PyTree], object], batch: PyTree) -> bool:
    try:
        jax.eval_shape(function, batch)
    except Exception:  # noqa: BLE001 - by any error the function refuses it
        return False
    return True


def _weighted(
    batches: Sequence[Any], weights: Sequence[Any] | None
) -> list[tuple[Any, Any]]:
    if not isinstance(batches, list | tuple):
        single = isinstance(batches, Mapping) or hasattr(batches, "dtype")
        remedy = _WRAP if single else "`list` makes one of an iterable."
        got = type_name(batches)
        raise ValueError(requirement(_BATCHES, _ONE_EACH, got, remedy))
    if not batches:
        raise ValueError(requirement(_BATCHES, _ONE_EACH, "none"))
    own = [None] * len(batches) if weights is None else weights
    if len(own) != len(batches):
        rule = f"must be one array for each of {len(batches)} batches"
        raise ValueError(requirement("step(weights=...)", rule, f"{len(own)}"))
    return list(zip(batches, own, strict=True))


class _Shown(NamedTuple):
    """The state that a candidate shows after a step.

    Attributes:
      leaves: The leaves by path.
      kept: Path prefixes of the parts that it does not show.
      then: Arguments of the next step, before its batch.
      repeatable: Whether another call would repeat the step, because the candidate
        keeps no state of its own.
    """

    leaves: Mapping[str, Any]
    kept: tuple[str, ...]
    then: tuple[PyTree, ...]
    repeatable: bool


class _Steps(NamedTuple):
    """The reference's steps, and how candidates are called and compared with them.

    Attributes:
      start: Arguments of the first step, before its batch.
      batches: One batch for each step.
      moments: The steps of the reference.
      call: `call(name, candidate, given, batch)`.
      draws: `draws(start[0], batch)`: the function whose random numbers count.
      attributed: `attributed(rows, leaves, moment, step)`.
    """

    start: tuple[PyTree, ...]
    batches: Sequence[PyTree]
    moments: Sequence[Moment]
    call: Callable[[str, Callable[..., Any], tuple[PyTree, ...], PyTree], _Shown]
    draws: Callable[[PyTree, PyTree], Any]
    attributed: Callable[..., tuple[Attribution, ...]]


def _judged(
    steps: _Steps, peers: Peers, name: str, candidate: Callable[..., Any]
) -> tuple[tuple[LeafReport, ...], tuple[Attribution, ...], tuple[str, ...]]:
    """The rows after the first wrong step or the last, what was wrong, and notes."""
    given = steps.start
    rows: tuple[LeafReport, ...] = ()
    notes: tuple[str, ...] = ()
    for number, (batch, moment) in enumerate(
        zip(steps.batches, steps.moments, strict=True), 1
    ):
        shown = steps.call(name, candidate, given, batch)
        rows = _rows(name, moment, shown, peers)
        if any(row.ratio > 1 for row in rows):

            def answers(
                first: _Shown = shown,
                given: tuple[PyTree, ...] = given,
                batch: PyTree = batch,
            ) -> Iterator[Mapping[str, PyTree]]:
                yield first.leaves
                # A further call of a stateful candidate is another step, not a
                # repetition.
                while first.repeatable:
                    yield steps.call(name, candidate, given, batch).leaves

            drawn = (steps.draws, *brought((steps.start[0], batch)))
            why, notes = excuse(
                name,
                candidate,
                (*given, batch),
                drawn,
                answers(),
                moment.limits,
                peers,
            )
            if why:
                # Later steps would start from other parameters than the reference's.
                return _rows(name, moment, shown, peers, why), (), ()
        if any(row.problem for row in rows):
            causes = steps.attributed(rows, shown.leaves, moment, number)
            if len(steps.batches) > 1:
                where = f"after step {number} of {len(steps.batches)}: "
                rows = tuple(
                    replace(row, problem=where + row.problem) if row.problem else row
                    for row in rows
                )
            return rows, causes, notes
        # A candidate continues from its own state, as in a training run.
        given = shown.then
    return rows, (), notes


def _trained(
    peers: Peers,
    name: str,
    candidate: Callable[..., Any],
    given: tuple[PyTree, ...],
    batch: PyTree,
) -> _Shown:
    """Takes one step of a candidate with parameters and states."""
    result = called("step", name, candidate, (*given, batch))
    parts = "params, opt_state, states" if len(given) == 3 else "params, opt_state"
    call = f"candidates[{name!r}]({parts}, batch)"
    if not isinstance(result, Trained):
        if not isinstance(result, tuple) or len(result) != len(given):
            rule, got = f"must return ({parts})", type_name(result)
            raise TypeError(requirement(call, rule, got))
        result = Trained(*result)
    if result.params is None:
        rule = "must return the new parameters: a step is judged by them"
        raise TypeError(requirement(call, rule, "None in their place"))
    result = peers.computed(result)
    found = {
        "gradient": result.gradient,
        "params": result.params,
        "state": result.opt_state,
        "states": result.states,
    }
    kept = tuple(part for part, tree in found.items() if tree is None)
    leaves = named_leaves({p: x for p, x in found.items() if p not in kept})
    then = (result.params, result.opt_state, result.states)[: len(given)]
    # A call of a trainer that keeps its optimizer's state is a further step.
    return _Shown(leaves, kept, then, result.opt_state is not None)


def _advanced(
    reference: ReferenceStep,
    peers: Peers,
    name: str,
    candidate: Callable[..., Any],
    given: tuple[PyTree, ...],
    batch: PyTree,
) -> _Shown:
    """Takes one step of a candidate with one whole state."""
    result = called("step", name, candidate, (*given, batch))
    new = peers.computed(reference.state_of(result))
    leaves, of_batch = named_state(new), reference.of_batch
    kept = tuple(p for p, x in leaves.items() if x is None and p not in of_batch)
    shown = {path: x for path, x in leaves.items() if path not in kept}
    # A None of the reference's own hides nothing.
    hidden = [
        p for p in kept if within(p, "params") and any(within(q, p) for q in of_batch)
    ]
    if hidden:
        rule = "must return all new parameters: a step is judged by them"
        raise TypeError(
            requirement("step_fn(state, batch)", rule, f"None at {hidden[0]}")
        )
    if not any(of_batch.get(path) for path in shown):
        rule = "must return a part of its state that depends on the batch"
        raise TypeError(requirement("step_fn(state, batch)", rule, "none"))
    return _Shown(shown, kept, (new,), not kept)


def _rows(
    name: str, moment: Moment, shown: _Shown, peers: Peers, excuse: str = ""
) -> tuple[LeafReport, ...]:
    """The rows of the parts that a candidate shows."""
    judged = {
        path: x for path, x in moment.wanted.items()
        if not any(within(path, part) for part in shown.kept)
    }  # fmt: skip
    describe = partial(_described, moment)
    rows = compare_leaves(
        name, judged, shown.leaves, moment.limits, peers, describe, excuse
    )
    return tuple(_hidden(row, moment) for row in rows)


def _described(
    moment: Moment,
    path: str,
    wanted: Mapping[str, np.ndarray | None],
    shard: Shard,
    ratio: np.ndarray,
) -> str:
    """The words for a shard that fails, in terms of the leaf's step."""
    steps: dict[str, np.ndarray | None] = {**wanted}
    got, what = shard.values, ""
    if path in moment.moves:
        steps = {**moment.moves}
        wide = moment.moves[path].dtype
        before = np.asarray(moment.before[path])[shard.index]
        # Subtracted in double precision: the step is far smaller than the parameter.
        got, what = got.astype(wide) - before.astype(wide), "its step: "
    if path in moment.stale:
        steps[STALE] = moment.stale[path]
    return described_shard(path, steps, shard, got, ratio, what)


def _hidden(row: LeafReport, moment: Moment) -> LeafReport:
    """Marks a row as not judged where no step at all would pass too."""
    limit, own = moment.limits.get(row.path), moment.moves.get(row.path)
    if limit is None or own is None or not row.ok or row.bit_equal:
        return row
    # A leaf that does not move, or moves by more than its bound, is judged.
    if not own.any() or (np.abs(own) > limit.bound).any():
        return row
    # Terms that cancel, as of a bias before batch statistics, make no step: their
    # rounding is small beside them, and another step would be seen.
    size = moment.sizes[row.path]
    if size.any() and (limit.bound <= BLIND * size)[size > 0].all():
        return row
    text = (
        f"its largest step is {np.max(np.abs(own)):.1e} and rounding explains "
        f"{np.max(limit.bound):.1e}: no step at all would pass too"
    )
    return replace(row, unjudged=text)


def _equalities(name: str, rows: Sequence[LeafReport]) -> tuple[str, ...]:
    """Notes on parameters that are bit-equal to the reference's."""
    params = [row for row in rows if within(row.path, "params")]
    if params and all(row.bit_equal for row in params):
        return (f"{name}: every parameter is bit-equal to the reference's",)
    equal = [row.path for row in params if row.bit_equal]
    return (f"{name}: bit-equal in {', '.join(equal)}",) if equal else ()
