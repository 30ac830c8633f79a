"""The judge of whole optimizer steps: are these the parameters after the update?

A gradient that is read off a step, (p - q) / lr, carries the rounding of p divided by
lr: at a small learning rate that is more than the gradient. So a trainer that shows
only its new parameters is judged by these, after every step, against the one-device
gradient followed by the optimizer's update (`trajectory`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jdist._errors import requirement
from jdist._tree import PyTree, named_leaves
from jdist.verify.comparison import compare_leaves
from jdist.verify.diagnosis import diagnose
from jdist.verify.draws import check_loss, draws_nothing, split_dependent
from jdist.verify.gradient_check import (
    agreed,
    check_arguments,
    check_options,
    excuse,
    lent,
    unseen,
)
from jdist.verify.processes import TIMEOUT, Peers, Shard, joined
from jdist.verify.report import Attribution, LeafReport, Report
from jdist.verify.steps.attribution import attributed
from jdist.verify.steps.trajectory import Moment, Training, trajectory


class Trained(NamedTuple):
    """What a trainer shows after a step; None for what it keeps to itself.

    Attributes:
      params: The new parameters.
      opt_state: The optimizer's new state.
      states: The model's new state.
      gradient: What the optimizer was given; before clipping, if `update` clips.
    """

    params: PyTree
    opt_state: PyTree = None
    states: PyTree = None
    gradient: PyTree = None


def step(  # noqa: PLR0913 - options, by keyword
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
) -> Report:
    """Judges trainers by their parameters and states after each optimizer step.

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
        is called for one batch after the other, with what it returned before, until a
        step is wrong. None in place of a state: it is not judged, and the candidate
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
      where what the candidate shows cannot tell.

    Raises:
      ValueError: No batches or candidates; a state of another length; as many weights
        as batches are needed; and as `verify.gradients`.
      TypeError: A candidate returned something else than is said above; the loss
        function wants a key.
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
    """
    check_options(reduction, accumulation)
    _check_state(state)
    stateful = len(state) == 3
    training = Training(loss_fn, update, stateful, reduction, accumulation)
    with joined(timeout) as peers:
        given = _weighted(batches, weights)
        start = (*state, ()) if not stateful else tuple(state)
        own = partial(loss_fn, states=start[2]) if stateful else loss_fn
        check_loss("step", own, state[0], given[0][0])
        losses = partial(training.losses, states=start[2])
        for batch, weight in given:
            check_arguments(losses, state[0], batch, candidates, weight, reduction)
        start = jax.tree.map(jnp.asarray, start)
        moments = list(trajectory(training, start, given))
        rows: tuple[LeafReport, ...] = ()
        notes: tuple[str, ...] = ()
        causes: tuple[Attribution, ...] = ()
        judge = partial(_judged, training, start, given, moments, peers)
        for name, candidate in candidates.items():
            own_rows, cause, unsure = judge(name, candidate)
            rows += own_rows
            notes += _equalities(name, own_rows) + unsure
            causes += cause
        return agreed(Report(rows, notes=notes, attributions=causes), peers)


def _check_state(state: object) -> None:
    if isinstance(state, tuple | list) and len(state) in (2, 3):
        return
    rule = "must be (params, opt_state), or (params, opt_state, states)"
    got = type(state).__name__
    if isinstance(state, tuple | list):
        got = f"a {got} of {len(state)}"
    remedy = "An optimizer that keeps nothing has the state ()."
    raise ValueError(requirement("step(state=...)", rule, got, remedy))


def _weighted(
    batches: Sequence[Any], weights: Sequence[Any] | None
) -> list[tuple[Any, Any]]:
    if not isinstance(batches, list | tuple) or not batches:
        rule = "must be a list or tuple of batches, one for each step"
        got = "none" if isinstance(batches, list | tuple) else type(batches).__name__
        raise ValueError(requirement("step(batches=...)", rule, got))
    own = [None] * len(batches) if weights is None else list(weights)
    if len(own) != len(batches):
        rule = f"must be one array for each of {len(batches)} batches"
        raise ValueError(requirement("step(weights=...)", rule, f"{len(own)}"))
    return list(zip(batches, own, strict=True))


def _judged(
    training: Training,
    start: tuple[Any, ...],
    batches: Sequence[tuple[Any, Any]],
    moments: Sequence[Moment],
    peers: Peers,
    name: str,
    candidate: Callable[..., Any],
) -> tuple[tuple[LeafReport, ...], tuple[Attribution, ...], tuple[str, ...]]:
    """The rows after the first wrong step or the last, what was wrong, and notes."""
    state = start if training.stateful else start[:2]
    rows: tuple[LeafReport, ...] = ()
    notes: tuple[str, ...] = ()
    for number, ((batch, _), moment) in enumerate(
        zip(batches, moments, strict=True), 1
    ):
        shown = _trained(name, candidate, *state, batch, peers=peers)
        rows = _rows(name, moment, shown, peers)
        if any(row.ratio > 1 for row in rows):
            given, losses = (*state, batch), partial(training.losses, states=start[2])
            still = draws_nothing(losses, start[0], batch)

            def answers(
                first: Trained = shown, given: tuple[Any, ...] = given
            ) -> Iterator[Mapping[str, Any]]:
                yield _leaves(first)
                # With a state of its own it takes another step at each call.
                while first.opt_state is not None:
                    yield _leaves(_trained(name, candidate, *given, peers=peers))

            why = split_dependent(losses, start[0], batch) or excuse(
                candidate, given, still, answers(), moment.limits, peers
            )
            if why:
                # What follows starts from other parameters than the reference's.
                return _rows(name, moment, shown, peers, why), (), ()
            notes = unseen(name, candidate, given, still)
        if any(row.problem for row in rows):
            causes = attributed(rows, _leaves(shown), moment, number)
            if len(batches) > 1:
                where = f"after step {number} of {len(batches)}: "
                rows = tuple(
                    replace(row, problem=where + row.problem) if row.problem else row
                    for row in rows
                )
            return rows, causes, notes
        state = (shown.params, shown.opt_state, shown.states)[: len(state)]
    return rows, (), notes


def _trained(
    name: str, candidate: Callable[..., Any], *given: Any, peers: Peers
) -> Trained:
    """What a candidate shows of one step."""
    try:
        result: Any = candidate(*lent(given))
    except Exception as error:
        error.add_note(f"raised by the candidate {name!r} of verify.step")
        raise
    parts = "params, opt_state, states" if len(given) == 4 else "params, opt_state"
    call = f"candidates[{name!r}]({parts}, batch)"
    if not isinstance(result, Trained):
        if not isinstance(result, tuple) or len(result) != len(given) - 1:
            rule, got = f"must return ({parts})", f"a {type(result).__name__}"
            raise TypeError(requirement(call, rule, got))
        result = Trained(*result)
    if result.params is None:
        rule = "must return the new parameters: a step is judged by them"
        raise TypeError(requirement(call, rule, "None in their place"))
    return peers.computed(result)


def _parts(trained: Trained) -> dict[str, PyTree]:
    """What a candidate shows, by the first names of its leaves."""
    parts = {
        "gradient": trained.gradient,
        "params": trained.params,
        "state": trained.opt_state,
        "states": trained.states,
    }
    return {name: part for name, part in parts.items() if part is not None}


def _leaves(trained: Trained) -> dict[str, Any]:
    return named_leaves(_parts(trained))


def _rows(
    name: str, moment: Moment, trained: Trained, peers: Peers, excuse: str = ""
) -> tuple[LeafReport, ...]:
    """Of the parts that a candidate shows."""
    parts, found = _parts(trained), _leaves(trained)
    judged = {p: x for p, x in moment.wanted.items() if p.partition("/")[0] in parts}
    describe = partial(_described, moment)
    rows = compare_leaves(name, judged, found, moment.limits, peers, describe, excuse)
    return tuple(_hidden(row, moment) for row in rows)


def _described(
    moment: Moment,
    path: str,
    wanted: Mapping[str, Any],
    shard: Shard,
    ratio: np.ndarray,
) -> str:
    """The words for a shard that fails, in terms of the leaf's step."""
    steps: Mapping[str, Any] = moment.moves if path in moment.moves else wanted
    told, got = "", shard.values
    if steps is moment.moves:
        own = steps[path][shard.index]
        before = np.asarray(moment.before[path])[shard.index]
        got = shard.values.astype(own.dtype) - before.astype(own.dtype)
        told = "its step: "
    slices = {
        other: leaf[shard.index]
        for other, leaf in steps.items()
        if leaf is not None and leaf.shape == steps[path].shape
    }
    where = f"in {shard.place}, " if shard.index else ""
    return f"{where}{told}{diagnose(path, slices, got, ratio, shard.origin)}"


def _hidden(row: LeafReport, moment: Moment) -> LeafReport:
    """Not judged, where no step at all would pass as well."""
    limit, own = moment.limits.get(row.path), moment.moves.get(row.path)
    if limit is None or own is None or not row.ok or row.bit_equal:
        return row
    if not own.any() or (np.abs(own) > limit.bound).any():
        return row
    text = (
        f"its largest step is {np.max(np.abs(own)):.1e} and rounding explains "
        f"{np.max(limit.bound):.1e}: no step at all would pass too"
    )
    return replace(row, unjudged=text)


def _equalities(name: str, rows: Sequence[LeafReport]) -> tuple[str, ...]:
    """Says where no bit differs."""
    params = [row for row in rows if row.path.partition("/")[0] == "params"]
    if all(row.bit_equal for row in params):
        return (f"{name}: every parameter is bit-equal to the reference's",)
    equal = [row.path for row in params if row.bit_equal]
    return (f"{name}: bit-equal in {', '.join(equal)}",) if equal else ()
