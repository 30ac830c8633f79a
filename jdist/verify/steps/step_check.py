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
from typing import Any, NamedTuple

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
from jdist.verify.processes.one_device import as_the_caller, brought, on_one_device
from jdist.verify.processes.peers import TIMEOUT, Peers, joined
from jdist.verify.processes.shards import Shard
from jdist.verify.report import Attribution, LeafReport, Report
from jdist.verify.steps.attribution import (
    STALE,
    attributed,
    attributed_of_whole,
    bare,
    within,
)
from jdist.verify.steps.reference_step import ReferenceStep, named_state
from jdist.verify.steps.tapped_values import VALUES, shown_values
from jdist.verify.steps.trajectory import Moment, Training, trajectory
from jdist.verify.tracing.recording import TapRecording


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
    is traced. A part of the state that `step_fn` does not show, other than `params`, is
    None. Pass several steps as a mapping of names.

    Args:
      loss_fn: As in `verify.gradients`; of a model with a state
        `loss_fn(params, batch, states=) -> (losses, new states)`.
      update: `update(params, gradient, opt_state) -> (params, opt_state)`, such as
        `optim.sgd(lr=0.1).step`, with clipping and schedules if there are any. It is
        traced, and must have no Python side effects. Values that `verify.tap` marks in
        it are compared with those of the same name in a candidate's step.
      state: Where training starts: `(params, opt_state)`, such as
        `(params, optim.sgd(lr=0.1).init(params))`; or `(params, opt_state, states)` of
        a model with a state, such as batch-norm statistics.
      batches: One batch for each step, all of the same shapes.
      candidates: Name to `fn(params, opt_state, batch) -> (params, opt_state)`, or with
        a model's state `fn(params, opt_state, states, batch)` and three results. Each
        is called for each batch in turn, with what it returned before, until a step is
        wrong. None in place of a state: it is not judged, and the candidate gets None
        back. A `Trained` may show the gradient too. Candidates receive copies, which
        they may donate. One that is wrong is called at most twice more, to see
        whether it draws random numbers of its own.
      weights: One array `(examples,)` for each batch; None for 1 each.
      reduction: As in `verify.gradients`.
      accumulation: As in `verify.gradients`.
      timeout: As in `verify.gradients`.

    Returns:
      A `Report` with a row for each leaf of what a candidate shows, after the first
      wrong step or else the last. A failing row describes the leaf's *step*, the new
      value minus the old. A leaf is "not judged" where no step at all would pass as
      well. `attributions` say which part of the first wrong step was wrong: "gradient",
      "optimizer update" or "model state"; or "gradient or optimizer update" where what
      the candidate shows cannot tell; or the name of the value, tapped in `update`,
      that is wrong first. In the second form they name the part of the state, and
      say "optimizer update" where a leaf of the optimizer is wrong that does not depend
      on the batch, such as a count.

    Raises:
      ValueError: No batches or candidates; a state of another length; not as many
        weights as batches; and as `verify.gradients`. The reference step's new state
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
    whole = candidates is None
    given = (update, state, batches) if whole else (loss_fn, update, state, batches)
    # Before the reference is measured, which may take minutes; other processes are told
    # of a refusal.
    with joined(timeout):
        named = _named(loss_fn if whole else candidates, whole)
    judge = step_judge(
        *given,
        weights=weights,
        reduction=reduction,
        accumulation=accumulation,
        timeout=timeout,
    )
    return judge(named)


def step_judge(
    loss_fn: Any,
    update: Any,
    state: PyTree,
    batches: Sequence[Any] | None = None,
    *,
    weights: Sequence[Any] | None = None,
    reduction: str = "mean",
    accumulation: DTypeLike | None = None,
    timeout: float = TIMEOUT,
) -> Callable[..., Report]:
    """Builds a reusable `step`, which measures the reference's steps once.

    Two forms, as of `step`: `step_judge(loss_fn, update, state, batches)`, and
    `step_judge(reference_step, state, batches)` for steps that are one function.

    Args:
      loss_fn: As in `step`.
      update: As in `step`.
      state: As in `step`.
      batches: As in `step`.
      weights: As in `step`.
      reduction: As in `step`.
      accumulation: As in `step`.
      timeout: As in `step`.

    Returns:
      `judge(candidates) -> Report`, for any candidates as in `step`; in the second form
      `judge(step_fn)`, or with a mapping of names.

    Raises:
      ValueError: As `step`. On calling: as `step`, for what concerns candidates.
      TypeError: As `step`. On calling: as `step`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> loss = lambda w, x: (x @ w) ** 2
      >>> x, w = jnp.array([[1.0, 2.0], [3.0, 5.0]]), jnp.array([0.3, 0.4])
      >>> sgd = lambda w, g, s: (w - 0.01 * g, s)
      >>> judge = step_judge(loss, sgd, (w, ()), [x])
      >>> gradient = jax.grad(lambda w, x: loss(w, x).mean())
      >>> right = lambda w, s, x: sgd(w, gradient(w, x), s)
      >>> wrong = lambda w, s, x: sgd(w, 2 * gradient(w, x), s)
      >>> judge({"right": right}).ok, judge({"wrong": wrong}).ok
      (True, False)
    """
    check_options("step", reduction, accumulation)
    options = weights, reduction, accumulation
    whole = batches is None
    given = (loss_fn, update, state) if whole else (loss_fn, update, state, batches)
    measured: Callable[..., _Steps] = _whole_steps if whole else _composed_steps
    with joined(timeout), on_one_device(*given[-2:]):
        steps = measured(*given, *options)

    def judge(candidates: Any) -> Report:
        with joined(timeout) as peers, on_one_device(*given[-2:]):
            return agreed(_report(steps, peers, _named(candidates, whole)), peers)

    return judge


def _named(candidates: Any, whole: bool) -> Mapping[str, Callable[..., Any]]:
    """The candidates by name, which are checked; `whole` if each is one function."""
    if whole and not isinstance(candidates, Mapping):
        return {"step_fn": candidates}
    check_candidates("step", candidates)
    named: Mapping[str, Callable[..., Any]] = candidates
    return named


def _composed_steps(
    loss_fn: Callable[..., Any],
    update: Callable[..., Any],
    state: tuple[PyTree, ...],
    batches: Any,
    weights: Sequence[Any] | None,
    *options: Any,
) -> _Steps:
    """The steps of a loss's gradient and an update."""
    _check_state(state)
    weighted = _weighted(batches, weights)
    check_function("step(loss_fn)", loss_fn)
    check_function("step(update)", update)
    params, _, *states = state
    own = {"states": brought(states[0])} if states else {}
    check_loss("step", partial(loss_fn, **own), params, batches[0])
    training = Training(loss_fn, update, bool(states), *options)
    losses = partial(training.losses, states=own.get("states", ()))
    check = partial(check_problem, "step", losses, params, names=("state", "batches"))
    start = _arrays((*state, ())[:3])
    with _batches_noted(batches):
        # Every batch is checked before the first step of any candidate is run.
        for batch, weight in weighted:
            check(batch, weight, training.reduction)
        # A list, because every candidate goes through these steps.
        moments = list(trajectory(training, brought(start), brought(weighted)))
    # Candidates of a model without a state take no `states`.
    start = start[: len(state)]
    draws = gradient_of_sum(losses)
    return _Steps(start, list(batches), moments, _trained, draws, attributed)


def _whole_steps(
    reference_step: Callable[..., Any],
    state: PyTree,
    batches: Any,
    weights: Sequence[Any] | None,
    reduction: str,
    accumulation: DTypeLike | None,
) -> _Steps:
    """The steps of a reference step of a whole state."""
    if weights is not None or reduction != "mean":
        rule, got = "need a loss and candidates", "two steps"
        remedy = "The reference step has its own."
        call = "step(weights=..., reduction=...)"
        raise ValueError(requirement(call, rule, got, remedy))
    _weighted(batches, None)
    start = _arrays(state)
    own, given = brought(start), brought(batches)
    with _batches_noted(batches):
        reference = ReferenceStep(reference_step, own, given[0])
        moments = list(reference.moments(own, given, accumulation))
    missed = ", ".join(sorted(reference.unmeasured))
    note = f"the rounding of {missed} was not measured: there the bound is too narrow"
    return _Steps(
        (start,),
        list(batches),
        moments,
        partial(_advanced, reference),
        reference.advance,
        partial(attributed_of_whole, reference.of_batch),
        (note,) if missed else (),
    )


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
        notes += unsure
        causes += cause
    notes += steps.notes + steps.moments[0].notes
    return Report(rows, notes=notes, attributions=causes)


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
def _batches_noted(batches: Sequence[Any]) -> Iterator[None]:
    """Says beside an error what `batches` are, if they may be the arrays of one."""
    try:
        yield
    except Exception as error:
        if any(hasattr(batch, "dtype") for batch in batches):
            got = f"{len(batches)}, each of which was taken for a batch"
            error.add_note(requirement(_BATCHES, _ONE_EACH, got, _WRAP))
        raise


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
      name: The candidate's name.
      peers: The processes that judge it.
      leaves: The leaves by path.
      kept: Path prefixes of the parts that it does not show.
      then: Arguments of the next step, before its batch.
      repeatable: Whether another call would repeat the step, because the candidate
        keeps no state of its own.
      unseen: Tapped values of the update that it does not show.
    """

    name: str
    peers: Peers
    leaves: Mapping[str, Any]
    kept: tuple[str, ...]
    then: tuple[PyTree, ...]
    repeatable: bool
    unseen: tuple[str, ...] = ()


class _Steps(NamedTuple):
    """The reference's steps, and how candidates are called and compared with them.

    Attributes:
      start: Arguments of the first step, before its batch.
      batches: One batch for each step.
      moments: The steps of the reference.
      call: `call(peers, moment, name, candidate, given, batch)`.
      draws: `draws(start[0], batch)`: the function whose random numbers count.
      attributed: `attributed(rows, leaves, moment, step)`.
      notes: Notes on the reference.
    """

    start: tuple[PyTree, ...]
    batches: Sequence[PyTree]
    moments: Sequence[Moment]
    call: Callable[..., _Shown]
    draws: Callable[[PyTree, PyTree], Any]
    attributed: Callable[..., tuple[Attribution, ...]]
    notes: tuple[str, ...] = ()


def _judged(
    steps: _Steps, peers: Peers, name: str, candidate: Callable[..., Any]
) -> tuple[tuple[LeafReport, ...], tuple[Attribution, ...], tuple[str, ...]]:
    """The rows after the first wrong step or the last, what was wrong, and notes."""
    given, moments = steps.start, list(steps.moments)
    rows: tuple[LeafReport, ...] = ()
    notes: tuple[str, ...] = ()
    for number, batch in enumerate(steps.batches, 1):
        moment = moments[number - 1]
        call = partial(steps.call, peers, moment, name, candidate, given, batch)
        shown = call()
        rows = _rows(moment, shown)
        if any(row.ratio > 1 for row in rows):
            rows, again, told = _decided(moment, shown, rows)
            moments[number - 1 :] = again or moments[number - 1 :]
            notes += tuple(f"step {number}: {note}" for note in told)
            if not again and not any(row.problem for row in rows):
                # Later steps would start from other choices than the reference's.
                return rows, (), notes + _unseen(shown)
        if any(row.ratio > 1 and row.problem for row in rows):
            # A further call of a stateful candidate is another step, no repetition.
            repeat = (lambda own=call: _returned(own())) if shown.repeatable else None
            drawn = (steps.draws, *brought((steps.start[0], batch)))
            asked = name, candidate, (*given, batch)
            own = _returned(shown), repeat, moment.limits
            why, unsure = excuse(*asked, drawn, *own, peers)
            if why:
                # Later steps would start from other parameters than the reference's.
                return _rows(moment, shown, why), (), ()
            notes += unsure
        if any(row.problem for row in rows):
            causes = steps.attributed(rows, shown.leaves, moment, number)
            if len(steps.batches) > 1:
                where = f"after step {number} of {len(steps.batches)}: "
                rows = tuple(
                    replace(row, problem=where + row.problem) if row.problem else row
                    for row in rows
                )
            return rows, causes, notes + _unseen(shown)
        # A candidate continues from its own state, as in a training run.
        given = shown.then
    return rows, (), notes + _unseen(shown)


def _decided(
    moment: Moment, shown: _Shown, rows: tuple[LeafReport, ...]
) -> tuple[tuple[LeafReport, ...], list[Moment], tuple[str, ...]]:
    """The rows of a candidate that may decide otherwise within rounding, and a note.

    With them the reference's steps from this one on by the choices of the candidate;
    none where it is compared with the reference's own.
    """
    other, wanted, limits = moment.otherwise, moment.wanted, moment.limits
    if other is None or not (choices := other.choices()).examples:
        return rows, [], ()
    # Over several processes no host has whole leaves.
    alone, results = shown.peers.size == 1, other.results
    if taken := alone and choices.read_off(results, wanted, shown.leaves, limits):
        words, change = taken
        again = list(other.again(change))
        own = _rows(again[0], shown)
        if all(row.ratio <= 1 for row in own):
            return own, again, (f"{shown.name} {words}",)
    moment = moment._replace(limits=choices.of_leaves(limits, results))
    # Nothing is known of values inside an update.
    shown = shown._replace(kept=(*shown.kept, VALUES))
    return _rows(moment, shown), [], (choices.note,)


def _returned(shown: _Shown) -> dict[str, Any]:
    """The leaves that a candidate returns, which tell whether its results repeat.

    Which wrong value stands for which of the reference's is no result of its own.
    """
    return {p: x for p, x in shown.leaves.items() if not within(p, VALUES)}


def _unseen(shown: _Shown) -> tuple[str, ...]:
    """A note on tapped values that were not compared."""
    if not shown.unseen:
        return ()
    values = ", ".join(bare(path) for path in shown.unseen)
    return (
        f"{shown.name}: not compared, since no value of this name and shape is tapped "
        f"in its step: {values}",
    )


def _trained(
    peers: Peers,
    moment: Moment,
    name: str,
    candidate: Callable[..., Any],
    given: tuple[PyTree, ...],
    batch: PyTree,
) -> _Shown:
    """Takes one step of a candidate with parameters and states."""
    tapped = [path for path in moment.wanted if within(path, VALUES)]
    # Only of an update with taps: a recording traces a compiled step again.
    recording = TapRecording() if tapped else None
    with recording or contextlib.nullcontext():
        result = called("step", name, candidate, (*given, batch))
        if tapped:
            # Taps arrive while the program runs, which must end within the recording.
            jax.block_until_ready(result)
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
    values: dict[str, np.ndarray] = {}
    # Devices of other processes show their values there.
    if recording is not None and peers.size == 1:
        values = shown_values(recording.records, moment.wanted, moment.limits)
    unseen = tuple(path for path in tapped if path not in values)
    leaves |= values
    kept += unseen
    then = (result.params, result.opt_state, result.states)[: len(given)]
    # A call of a trainer that keeps its optimizer's state is a further step.
    repeatable = result.opt_state is not None
    return _Shown(name, peers, leaves, kept, then, repeatable, unseen)


def _advanced(
    reference: ReferenceStep,
    peers: Peers,
    moment: Moment,
    name: str,
    candidate: Callable[..., Any],
    given: tuple[PyTree, ...],
    batch: PyTree,
) -> _Shown:
    """Takes one step of a candidate with one whole state."""
    del moment
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
    return _Shown(name, peers, shown, kept, (new,), not kept)


def _rows(moment: Moment, shown: _Shown, excuse: str = "") -> tuple[LeafReport, ...]:
    """The rows of the parts that a candidate shows."""
    judged = {
        path: x for path, x in moment.wanted.items()
        if not any(within(path, part) for part in shown.kept)
    }  # fmt: skip
    describe = partial(_described, moment)
    options = moment.limits, shown.peers, describe, excuse
    rows = compare_leaves(shown.name, judged, shown.leaves, *options)
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
    what = ""
    if path in moment.moves:
        steps = {**moment.moves}
        wide = moment.moves[path].dtype
        before = np.asarray(moment.before[path])[shard.index]
        # Subtracted in double precision: the step is far smaller than the parameter.
        step = shard.values.astype(wide) - before.astype(wide)
        shard, what = replace(shard, values=step), "its step: "
    if path in moment.stale:
        steps[STALE] = moment.stale[path]
    told = described_shard(path, steps, shard, ratio, what)
    own = wanted[path]
    # A factor would say nothing of one number of many, and everything of a norm.
    if within(path, VALUES) and own is not None and own.size == 1 and own.all():
        told += f"; it is {(shard.values / own).item():.4g} times the reference"
    return told


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
