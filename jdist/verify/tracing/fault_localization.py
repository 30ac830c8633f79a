"""Fault localization: judges a gradient, and names the first wrong value behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, wraps
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jdist._errors import check_function, requirement
from jdist._tree import PyTree, named_leaves
from jdist.verify.arguments import check_options, check_problem
from jdist.verify.candidates import copied
from jdist.verify.explanations.uses import uses_counted
from jdist.verify.gradient_check import LOSS, Candidate, Reference
from jdist.verify.measure import Counted, ReducedLoss
from jdist.verify.oracle import LossFn
from jdist.verify.processes.one_device import brought, on_one_device
from jdist.verify.processes.peers import TIMEOUT, Peers, joined
from jdist.verify.report import Report
from jdist.verify.tracing.recording import (
    TapRecord,
    TapRecording,
    of_all_processes,
)
from jdist.verify.tracing.reference import TracedReference, traced
from jdist.verify.tracing.report import TOLD, Difference, Trace, counts_told, ranges
from jdist.verify.tracing.search import Findings, search
from jdist.verify.tracing.shares import example_gradients, shares

NAME = "candidate"

WHOLES = (
    "no tapped value has an axis of examples, as far as can be seen: values are "
    "compared as wholes, and not those of parts of the batch"
)


def trace(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    candidate: Candidate,
    *,
    weights: ArrayLike | None = None,
    reduction: str = "mean",
    accumulation: DTypeLike | None = None,
    finite_differences: bool = True,
) -> Trace:
    """Judges a candidate's gradient, and names the first value that is wrong.

    Values that `verify.tap` marks, in `loss_fn` and in what the candidate runs, are
    compared example by example: first values, in the order of the program, then their
    cotangents in reverse, each within a bound measured for it.

    Args:
      loss_fn: As in `verify.gradients`; with taps.
      params: Pytree of parameters.
      batch: Pytree of arrays, each `(examples, ...)`; for a scalar loss of any shapes.
      candidate: `candidate(params, batch) -> (loss, gradient)`. It may split the batch
        in any way: micro-batches, shards, accumulation, pipelines, workers.
      weights: As in `verify.gradients`.
      reduction: As in `verify.gradients`.
      accumulation: As in `verify.gradients`.
      finite_differences: As in `verify.gradients`.

    Returns:
      A `Trace`. Its verdict is that of `verify.gradients`; the taps only say where.

    Raises:
      ValueError: As `verify.gradients`; or the loss has no tap.
      TypeError: The candidate returned something other than a pair.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jdist import verify
      >>> def loss(w, x, scale=1.0):
      ...     hidden = verify.tap(jnp.tanh(x @ w["a"]), "hidden")
      ...     return verify.tap(scale * hidden @ w["b"], "output") ** 2
      >>> w = {"a": jnp.array([[0.3, -0.2], [0.5, 0.7]]), "b": jnp.array([1.0, 2.0])}
      >>> x = jnp.array([[1.0, 2.0], [3.0, 5.0], [2.0, -1.0]])
      >>> def wrong(w, x):
      ...     return jax.value_and_grad(lambda w: loss(w, x, 1.5).mean())(w)
      >>> found = trace(loss, w, x, wrong).difference
      >>> found.direction, found.tap, found.words.partition("; ")[2]
      ('forward', 'output', 'it is 1.5 times the reference')

    References:
      TTrace (arXiv 2506.09280) aligns intermediate tensors of PyTorch trainers.
    """
    judge = trace_judge(
        loss_fn,
        params,
        batch,
        weights=weights,
        reduction=reduction,
        accumulation=accumulation,
        finite_differences=finite_differences,
    )
    return judge(candidate)


def trace_judge(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    *,
    weights: ArrayLike | None = None,
    reduction: str = "mean",
    accumulation: DTypeLike | None = None,
    finite_differences: bool = True,
) -> Callable[[Candidate], Trace]:
    """Builds a reusable `trace` of one batch, which measures the reference once.

    Args:
      loss_fn: As in `trace`.
      params: As in `trace`.
      batch: As in `trace`.
      weights: As in `trace`.
      reduction: As in `trace`.
      accumulation: As in `trace`.
      finite_differences: As in `trace`.

    Returns:
      `judge(candidate) -> Trace`, for any number of candidates.

    Raises:
      ValueError: As `trace`.
    """
    given = params, batch, weights
    with joined(TIMEOUT), on_one_device(given):
        check_options("trace", reduction, accumulation)
        check_problem("trace", loss_fn, *given, reduction)
        loss = ReducedLoss(loss_fn, reduction, accumulation)
        reference = Reference("trace", loss, *given, finite_differences)
        params, batch, weights = brought(given)
        examples = _examples(batch)
        whole = Counted(batch, weights, reference.counted.rows)
        own = traced(loss_fn, params, whole, reduction, accumulation, examples)
        apart = jax.eval_shape(loss_fn, params, batch).shape != ()
    if not own.passages:
        rule = "must mark values with verify.tap"
        remedy = "verify.gradients judges without taps."
        raise ValueError(requirement("trace(loss_fn=...)", rule, "no tap", remedy))
    # A scalar loss of unlike leaves counts as one example.
    w = np.ones(examples or 1) if weights is None else np.asarray(weights, np.float64)
    each = w / w.sum() if reduction == "mean" else w
    summed = apart and reduction in ("mean", "sum")

    @cache
    def parts() -> dict[str, np.ndarray] | None:
        """Each example's part of the gradient; None if it has no such parts."""
        if not summed:
            return None
        return example_gradients(loss_fn, params, batch, each)

    def judge(candidate: Candidate) -> Trace:
        """Judges one candidate on this batch."""
        first: list[tuple[TapRecording, Any]] = []
        with joined(TIMEOUT) as peers, on_one_device(given):
            report = reference.judge({NAME: _recorded(candidate, first, peers)}, peers)
            (recording, result), *_ = first
            records = of_all_processes(recording.records, peers)
            findings = _searched(own, records, w > 0, reference)
            difference = findings.difference
            if difference is None and report.failures:
                difference = _beyond_taps(report, findings, result[1], parts, w)
            # Over several processes no host has a whole gradient to explain.
            if difference is not None and summed and peers.size == 1:
                wrong, terms = (report, difference, result[1]), (loss_fn, params, batch)
                findings.notes += _uses(*wrong, findings, terms, each)
        notes = list(dict.fromkeys(findings.notes))
        if examples and all(passage.layout.axis is None for passage in own.passages):
            notes.append(WHOLES)
        if difference is not None and report.ok:
            notes.append("a tap differs, yet loss and gradient are right")
        return Trace(report, difference, tuple(findings.right), tuple(notes))

    return judge


def _searched(
    own: TracedReference,
    records: Sequence[TapRecord],
    counted: np.ndarray,
    reference: Reference,
) -> Findings:
    """The findings, where a tap differs without what rounding decides."""
    findings = search(own.passages, records, counted)
    if findings.difference and reference.undecided():
        passages = own.undecided()
        findings = search(passages, records, counted)
        each = (x.undecided["forward"] for x in passages if x.layout.axis is not None)
        free = tuple(sorted(next(filter(None, each), ())))
        if free:
            words = f"examples {ranges(free)} have decisions within rounding"
            findings.notes.append(f"{words}: their taps are not compared")
    return findings


def _recorded(
    candidate: Candidate, first: list[tuple[TapRecording, Any]], peers: Peers
) -> Candidate:
    """Wraps a candidate: records the taps and the result of its first call."""
    check_function("trace(candidate=...)", candidate)

    # Marked as a wrapper: the judge looks for random numbers in what is wrapped.
    @wraps(candidate)
    def recorded(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        # It may be called again, to see whether its results repeat.
        if first:
            return candidate(params, batch)
        with TapRecording() as recording:
            result = candidate(params, batch)
            # Taps arrive while the program runs, which must end within the recording.
            peers.computed(result)
        # A copy: the next call may overwrite it, or give its memory away.
        first.append((recording, jax.tree.map(copied, result)))
        return result

    return recorded


def _beyond_taps(
    report: Report,
    findings: Findings,
    gradient: PyTree,
    parts: Callable[[], dict[str, np.ndarray] | None],
    weights: np.ndarray,
) -> Difference:
    """The difference of a wrong candidate whose taps are all right."""
    leaves = [row for row in report.failures if row.path != LOSS]
    if not leaves:
        (row,) = report.failures
        return Difference("loss", LOSS, (), row.ratio, row.problem)
    # NaN would compare false with every ratio.
    worst = max(leaves, key=lambda row: np.nan_to_num(row.ratio, nan=np.inf))
    words = worst.problem
    if len(leaves) > 1:
        words += f"; {len(leaves)} leaves are wrong"
    # A leaf of another structure, or not finite, has no shares; and no host has those
    # that are divided over several processes.
    paths = [row.path for row in leaves if np.isfinite(row.ratio)]
    here = all(
        not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
        for x in jax.tree.leaves(gradient)
    )
    each = parts() if paths and here else None
    if each is not None:
        place = (worst.path, worst.ratio, words)
        wrong = {row.path for row in leaves}
        if not all(path in wrong for path, own in each.items() if own.any()):
            # Cotangents of the last tap that are wrong make every leaf wrong.
            findings = replace(findings, entered="")
        groups = _partition(findings.groups, weights > 0)
        found = shares(gradient, paths, each, groups)
        if found is not None:
            return _of_shares(findings, groups, found, place, weights)
        # Replicas by `vmap` are one call, which need not count as one.
        single = _partition((), weights > 0)
        found = shares(gradient, paths, each, single)
        if found is not None:
            alike: dict[float, list[int]] = {round(share, 3): [] for share in found}
            for group, share in zip(single, found, strict=True):
                alike[round(share, 3)] += group
            together = [tuple(own) for own in alike.values()]
            return _of_shares(findings, together, list(alike), place, weights)
    return Difference("gradient", worst.path, (), worst.ratio, words)


def _uses(
    report: Report,
    difference: Difference,
    gradient: PyTree,
    findings: Findings,
    loss: tuple[LossFn, PyTree, PyTree],
    each: np.ndarray,
) -> list[str]:
    """Notes on leaves of which a use counts wrongly for some calls' examples.

    Args:
      report: The verdict.
      difference: The first difference.
      gradient: The wrong gradient.
      findings: What the taps told.
      loss: The loss, its parameters and its batch.
      each: The factor of each example in the loss.
    """
    groups = sorted(_partition(findings.groups, each > 0))
    # Examples that count wrongly in all uses explain the gradient already.
    if difference.direction != "gradient" or difference.examples or len(groups) < 2:
        return []
    loss_fn, params, batch = loss
    leaves = named_leaves(gradient)
    wrong = {
        row.path: np.asarray(leaves[row.path])
        for row in report.failures
        if row.path != LOSS and np.isfinite(row.ratio)
    }
    few = {path: x for path, x in islice(wrong.items(), TOLD) if not np.iscomplexobj(x)}
    shares = np.zeros((len(groups), len(each)))
    for own, group in zip(shares, groups, strict=True):
        own[list(group)] = each[list(group)]

    def terms(params: PyTree) -> jax.Array:
        losses = loss_fn(params, batch)
        return jnp.asarray(shares, losses.dtype) @ losses

    names = [f"examples {ranges(group)}" for group in groups]
    counts = uses_counted(terms, params, few, names)
    return [
        f"{path}: the uses that it counts: {words}"
        for path, words in counts.items()
        if " of examples " in words
    ]


def _examples(batch: PyTree) -> int | None:
    """The number of examples in the batch; None if its leaves differ in it."""
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    return lengths.pop()[0] if len(lengths) == 1 and () not in lengths else None


def _partition(
    groups: Sequence[tuple[int, ...]], counted: np.ndarray
) -> list[tuple[int, ...]]:
    """Groups of the examples that count; an example in no group is its own group."""
    own = [tuple(e for e in group if counted[e]) for group in groups]
    met = {e for group in own for e in group}
    rest = [(int(e),) for e in np.flatnonzero(counted) if e not in met]
    return [group for group in own if group] + rest


def _of_shares(
    findings: Findings,
    groups: Sequence[tuple[int, ...]],
    found: Sequence[float],
    place: tuple[str, float, str],
    weights: np.ndarray,
) -> Difference:
    """Says which examples count wrongly, and whether their cotangents already do."""
    path, ratio, words = place
    # Sorted, because calls arrive in any order.
    odd = sorted((g, s) for g, s in zip(groups, found, strict=True) if s != 1)
    examples = tuple(sorted(e for group, _ in odd for e in group))
    told = counts_told(odd)
    # All shares alike are one wrong factor, not a list of wrong examples.
    if len(odd) == len(groups) and len({round(s, 3) for _, s in odd}) == 1:
        told = f"all examples count {round(found[0], 4):g} times"
    if findings.entered and _scaled_before(findings.factors, groups, found, weights):
        return Difference("backward", findings.entered, examples, ratio, told)
    return Difference("gradient", path, examples, ratio, f"{told}; {words}")


def _scaled_before(
    factors: dict[int, complex],
    groups: Sequence[tuple[int, ...]],
    found: Sequence[float],
    weights: np.ndarray,
) -> bool:
    """Whether the cotangents of the last tap have the wrong shares already.

    A trainer may differentiate the mean of the batch, or sums, or means of its calls.
    """
    own = np.array([np.mean([factors.get(e, 0.0) for e in g]) for g in groups]).real
    wanted = np.array(found)
    sizes = np.array([len(g) for g in groups])
    totals = np.array([weights[list(g)].sum() for g in groups])
    for scaled in (own, own * sizes, own * totals):
        usual = scaled[wanted == 1]
        # In units of the examples that count once: one factor for all is allowed.
        unit = np.median(usual) if len(usual) else 1.0
        if unit and np.allclose(scaled / unit, wanted, rtol=1e-2, atol=1e-2):
            # Equal everywhere: then only the factor itself can tell.
            return bool(len(usual)) or scaled is own
    return False
