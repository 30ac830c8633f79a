"""Judges candidates by the one-device gradient of a loss, and explains failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import islice, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.typing import ArrayLike, DTypeLike

from jdist._compat import has_references
from jdist._errors import (
    check_choice,
    check_function,
    check_number,
    check_type,
    requirement,
)
from jdist._tree import (
    PyTree,
    check_arrays,
    check_batch,
    check_lists,
    examples_in,
    is_inexact,
    named_leaves,
    type_name,
)
from jdist.verify.bound import Limit, in_double
from jdist.verify.comparison import Named, compare_leaves, renamed
from jdist.verify.draws import (
    check_loss,
    draws_nothing,
    draws_of_its_own,
    split_dependent,
)
from jdist.verify.measure import LossPrograms, Measured, measurer
from jdist.verify.oracle import REDUCERS, LossFn, gradient_of_sum, reduced
from jdist.verify.processes import (
    TIMEOUT,
    Peers,
    as_the_caller,
    brought,
    held,
    joined,
    on_one_device,
)
from jdist.verify.report import Attribution, LeafReport, OracleCheck, Report, looseness
from jdist.verify.uses import uses_counted

LOSS = "(loss)"

OWN_DRAWS = (
    "it draws random numbers and the loss draws none. Switch them off, or judge it by "
    "the loss that draws them, with a key for each example: verify.keyed(loss_fn)"
)
CHANGES = (
    "three calls with the same arguments gave three answers: it draws random numbers "
    "of its own, or keeps something from call to call. Give each example a key of its "
    "own in the batch: verify.keyed(loss_fn), docs/verify.md, Random numbers"
)

Candidate = Callable[[PyTree, PyTree], tuple[jax.Array, PyTree]]
"""`candidate(params, batch) -> (loss, gradient)`."""

# By how much the draws are multiplied before anything is condemned that is not grossly
# wrong. Errors that few draws show nothing of, as of a decision that one program in a
# thousand takes otherwise, are small beside a leaf.
LOOKS = (1, 16)

# The share of its size by which a leaf that is grossly wrong is off, in the 2-norm.
GROSS = 0.01

# Of how many failing leaves the uses are looked at: each traces the loss again.
EXPLAINED = 8

# How often a failing candidate is called, to see whether it repeats itself.
CALLS = 3


def gradients(  # noqa: PLR0913 - options, by keyword
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    candidates: Mapping[str, Candidate],
    *,
    weights: ArrayLike | None = None,
    reduction: str = "mean",
    seed: int | None = 0,
    accumulation: DTypeLike | None = None,
    names: Mapping[str, Named] | None = None,
    timeout: float = TIMEOUT,
) -> Report:
    """Judges ways to compute a loss and its gradient against `jax.value_and_grad`.

    The reference is computed on one device over the whole batch, so that the backward
    pass of an example begins with w / sum w for a mean. How far a right answer may be
    from it is derived from the number of examples, and from the magnitudes and the
    rounding of each example's own gradient, which are measured here (see
    `jdist.verify.bound`). The reference itself is held against a finite difference.

    In a run of several processes (`jax.distributed`) every process calls it with the
    same arguments, and all get the same report: each has the reference for itself, and
    compares the shards of the candidates' arrays that it holds. Replicas of an array
    must have the same bits.

    Random numbers must not depend on how the batch is split: see `verify.keyed`. A
    failing candidate is *not judged* where the loss draws otherwise, or where the
    candidate's own answers change from call to call; for that it is called twice more.
    Each call is given copies of the parameters and the batch, which may be donated or
    overwritten. Where these lie on a mesh with explicit axes, or under `jax.set_mesh`,
    the reference has a mesh of the same axes, each of one device.

    Args:
      loss_fn: `loss_fn(params, batch)`: one loss per example, `(examples,)`, or a
        scalar. With a scalar the examples' own gradients cannot be seen: the bound then
        rests on the batch's gradient as a whole.
      params: Pytree; leaves that are not floating must have None as gradient.
      batch: Pytree; for losses per example each leaf is `(examples, ...)`.
      candidates: Name to `fn(params, batch) -> (loss, gradient)`.
      weights: `(examples,)`, at least 0, as in `data_parallel`. None for 1 each. An
        example of weight 0 is excluded: where its loss or gradient is not finite it is
        left out of the reference, unless others depend on it.
      reduction: "mean", "sum", "max" or "min".
      seed: Of the finite differences that the reference itself is held against; None
        leaves them out.
      accumulation: The dtype in which programs accumulate sums of 16-bit numbers. None
        for float32, as XLA's reductions and dot products do; the numbers' own dtype
        for programs that add them up one by one.
      names: For candidates in another framework, which may return its tensors: the
        parameters' paths to those of the candidates' gradients, as in `compare`.
      timeout: Seconds to wait for other processes, at each point where they meet.

    Returns:
      A `Report` with a row for the loss and for each leaf of each candidate. A leaf
      whose every digit may be lost to rounding is *not judged*, and the report not ok.

    Raises:
      ValueError: No candidates; no floating parameter; an unknown reduction; an
        accumulation that is no floating dtype; weights with a scalar loss, of the wrong
        shape, negative, not finite or all 0; a batch whose leaves differ in length, or
        have none; `names` that are no complete map, as in `compare`; a loss with
        shardings of a mesh that the reference does not have.
      TypeError: A candidate returned something else than a pair; the loss function
        wants a key.
      PeersLost: Another process raised, or did not come in time.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> loss = lambda w, x: (x @ w) ** 3
      >>> x, w = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), jnp.array([0.3, 0.4])
      >>> def half_and_rest(w, x):                       # 2 examples, then 1
      ...     f = jax.value_and_grad(lambda w, x: loss(w, x).mean())
      ...     (a, da), (b, db) = f(w, x[:2]), f(w, x[2:])
      ...     return (2 * a + b) / 3, (2 * da + db) / 3
      >>> gradients(loss, w, x, {"split": half_and_rest}).ok
      True

    References:
      The bound: `jdist.verify.bound`. Chex's `assert_numerical_grads` and torch's
      `gradcheck` compare with finite differences only.
    """
    judged = _judge(
        ("gradients", "gradients"), loss_fn, reduction, accumulation, timeout
    )
    return judged(params, batch, candidates, weights=weights, seed=seed, names=names)


def judge(
    loss_fn: LossFn,
    *,
    reduction: str = "mean",
    accumulation: DTypeLike | None = None,
    timeout: float = TIMEOUT,
) -> Callable[..., Report]:
    """Builds a reusable judge of one loss, which compiles once.

    For judging every step of a training run. What it returns is called like
    `gradients`, without the first argument:

        judged(
            params, batch, candidates, *, weights=None, seed=0, names=None
        ) -> Report

    With `seed=None` the finite difference is left out: pin the oracle once, not at
    every step.

    Args:
      loss_fn: As in `gradients`.
      reduction: As in `gradients`.
      accumulation: As in `gradients`.
      timeout: As in `gradients`.

    Raises:
      ValueError: An unknown reduction or accumulation. On calling: as `gradients`.
      TypeError: On calling: as `gradients`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> judged = judge(lambda w, x: (x - w) ** 2)
      >>> x, w = jnp.array([1.0, 2.0, 4.0]), jnp.array(0.5)
      >>> right = lambda w, x: (((x - w) ** 2).mean(), -2 * (x - w).mean())
      >>> wrong = lambda w, x: (((x - w) ** 2).mean(), -2 * (x - w).sum())
      >>> judged(w, x, {"right": right}).ok, judged(w, x, {"wrong": wrong}).ok
      (True, False)
    """
    names = "judge", "judge(...)"
    return _judge(names, loss_fn, reduction, accumulation, timeout)


def _judge(
    names: tuple[str, str],
    loss_fn: LossFn,
    reduction: str,
    accumulation: DTypeLike | None,
    timeout: float,
) -> Callable[..., Report]:
    """Builds a judge; `names` are what takes the loss and what takes candidates."""
    maker, call = names
    prepare = prepared(maker, loss_fn, reduction, accumulation)

    def judged(
        params: PyTree,
        batch: PyTree,
        candidates: Mapping[str, Candidate],
        *,
        weights: ArrayLike | None = None,
        seed: int | None = 0,
        names: Mapping[str, Named] | None = None,
    ) -> Report:
        """Judges candidates at these parameters on this batch."""
        given = params, batch, weights
        with joined(timeout) as peers, on_one_device(given):
            check_candidates(call, candidates)
            check_arguments(
                call, loss_fn, params, batch, candidates, weights, reduction
            )
            return prepare(*given, seed, names)(candidates, peers)

    return judged


Prepared = Callable[[Mapping[str, Candidate], Peers], Report]
"""Judges candidates against a reference that is measured once."""


def prepared(
    call: str,
    loss_fn: LossFn,
    reduction: str,
    accumulation: DTypeLike | None,
    programs: LossPrograms | None = None,
) -> Callable[..., Prepared]:
    """Builds a two-stage judge: measure the reference, then judge candidates by it.

    Judges of one loss for several reductions may share `programs`. `call` is the public
    function that asks, for the errors' text.

    Returns:
      `prepare(params, batch, weights, seed, names=None)`; its result judges any number
      of candidates, one after the other.

    Raises:
      ValueError: An unknown reduction or accumulation.
    """
    check_options(call, reduction, accumulation)
    check_function(f"{call}(loss_fn=...)", loss_fn)
    # Compiled parts are kept in the closure, for every step of a run.
    programs = programs or LossPrograms(loss_fn, accumulation)
    reference, scalar = programs.reference(reduction), reduced(loss_fn, reduction)
    measure = measurer(loss_fn, reduction, accumulation, programs)

    def prepare(
        params: PyTree,
        batch: PyTree,
        weights: ArrayLike | None,
        seed: int | None,
        names: Mapping[str, Named] | None = None,
    ) -> Prepared:
        _check_seed(call, seed)
        given = params, batch
        params, batch, weights = brought((*given, weights))
        counted = programs.counted(reduction, params, batch, weights)
        expected = reference(params, *counted[:2])

        # Measured once for all candidates.
        @cache
        def look(more: int) -> Measured:
            own = seed if more == LOOKS[0] else None
            return measure(params, counted, expected[1], own, more)

        measured = look(LOOKS[0])

        def judge_all(candidates: Mapping[str, Candidate], peers: Peers) -> Report:
            naming = partial(renamed, call, expected[1], names=names)
            answer = partial(_answer, call, given, peers, naming)
            found = {n: answer(n, x) for n, x in candidates.items()}
            rows: tuple[LeafReport, ...] = ()
            notes = measured.notes
            for name, own in found.items():
                # By looks of its own: a verdict must not depend on its neighbours.
                verdict, seen = _looked_at(name, expected, own, look, peers)
                if any(row.ratio > 1 for row in verdict):
                    asked = answer, name, candidates[name], own[1]
                    why, unsure = _excuse(*asked, loss_fn, given, seen.limits, peers)
                    verdict = _rows(name, expected, own, seen, peers, why)
                    notes += unsure
                    # Over several processes no host has a whole gradient to explain.
                    if peers.size == 1:
                        notes += _uses(
                            lambda p: scalar(p, *counted[:2]), params, own[1], verdict
                        )
                rows += verdict
            return agreed(Report(rows, measured.oracle, notes + looseness(rows)), peers)

        return judge_all

    return prepare


def _looked_at(
    name: str,
    expected: tuple[Any, Any],
    found: tuple[Any, Any],
    look: Callable[[int], Measured],
    peers: Peers,
) -> tuple[tuple[LeafReport, ...], Measured]:
    """The rows of a candidate, and the measurement that decides about it."""
    for more in LOOKS:
        measured = look(more)
        rows = _rows(name, expected, found, measured, peers)
        limits = {LOSS: measured.loss_limit, **measured.limits}
        wanted = {LOSS: expected[0], **named_leaves(expected[1])}
        own = {LOSS: found[0], **found[1]}
        unsure = [
            row.path
            for row in rows
            if (limit := limits.get(row.path)) is not None
            and row.ratio > 1
            and not (
                # Over several processes no host has whole leaves.
                peers.size == 1
                and row.ratio > limit.doubt
                and _is_gross(wanted[row.path], own[row.path])
            )
        ]
        if not unsure:
            break
    return rows, measured


def _is_gross(expected: ArrayLike, found: ArrayLike) -> bool:
    """Whether a leaf is off by more than a share of its size."""
    wanted, own = in_double(expected), in_double(found)
    return bool(np.linalg.norm(own - wanted) > GROSS * np.linalg.norm(wanted))


def _uses(
    loss: Callable[[PyTree], jax.Array],
    params: PyTree,
    own: Mapping[str, Any],
    rows: Sequence[LeafReport],
) -> tuple[str, ...]:
    """Notes on failing leaves that lack some of their uses, or have some twice."""
    leaves = named_leaves(params)
    failing = {
        row.path: own[row.path]
        for row in rows
        if row.problem
        and row.ratio > 1  # A number that is wrong, and none that is missing.
        and row.path in leaves
        and not jnp.iscomplexobj(own[row.path])
    }
    # Each costs a trace of the loss, and the first few show what is wrong.
    few = dict(islice(failing.items(), EXPLAINED))
    counts = uses_counted(loss, params, few) if few else {}
    return tuple(
        f"{rows[0].candidate}: {path}: it counts its uses so: {words}"
        for path, words in counts.items()
    )


def agreed(report: Report, peers: Peers) -> Report:
    """Makes the report the same on all processes."""
    if peers.size == 1:
        return report
    own = None if report.oracle is None else asdict(report.oracle)
    causes = [asdict(cause) for cause in report.attributions]
    record = {"oracle": own, "notes": report.notes, "attributions": causes}
    # Rows are merged already. The oracle and the notes are those of process 0: on other
    # hosts their last digits may differ.
    first = peers.exchange(record)[0]
    oracle = None
    if first["oracle"] is not None:
        rules = tuple(first["oracle"]["own_rules"])
        oracle = OracleCheck(**{**first["oracle"], "own_rules": rules})
    return replace(
        report,
        oracle=oracle,
        notes=tuple(first["notes"]),
        attributions=tuple(Attribution(**cause) for cause in first["attributions"]),
    )


def check_options(call: str, reduction: str, accumulation: DTypeLike | None) -> None:
    """Raises for an unknown reduction, or an accumulation that is no floating dtype."""
    check_choice(f"{call}(reduction=...)", reduction, REDUCERS)
    if accumulation is not None and not _is_floating(accumulation):
        rule = "must be a floating dtype or None"
        got = repr(accumulation)
        raise ValueError(requirement(f"{call}(accumulation=...)", rule, got))


def check_candidates(call: str, candidates: Mapping[str, Any]) -> None:
    """Raises TypeError unless candidates are functions by name."""
    rule = "must be a mapping from names to functions"
    check_type(f"{call}(candidates=...)", candidates, Mapping, rule)
    for name, candidate in candidates.items():
        check_function(f"{call}(candidates={{{name!r}: ...}})", candidate)


def _check_seed(call: str, seed: int | None) -> None:
    if seed is not None:
        argument, rule = f"{call}(seed=...)", "must be at least 0 and below 2**31"
        check_number(argument, seed, rule, lambda n: 0 <= n < 2**31, whole=True)


def _is_floating(dtype: DTypeLike) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except (TypeError, ValueError):  # NumPy reads a dict as the fields of a structure.
        return False


def _rows(
    name: str,
    expected: tuple[Any, Any],
    found: tuple[Any, Any],
    measured: Measured,
    peers: Peers,
    excuse: str = "",
) -> tuple[LeafReport, ...]:
    """A row for the loss and for each leaf of a candidate."""
    value, wanted = np.asarray(expected[0]), named_leaves(expected[1])
    loss, gradient = found
    is_array = loss is None or isinstance(loss, jax.Array)
    own = loss if is_array else np.asarray(loss)
    # A loss in a wider dtype than the reference's is judged in the reference's.
    if own is not None and jnp.issubdtype(own.dtype, jnp.floating) and own.shape == ():
        with as_the_caller():
            own = own.astype(value.dtype)
    limits = {LOSS: measured.loss_limit, **measured.limits}
    leaves = {LOSS: own, **gradient}
    return compare_leaves(
        name, {LOSS: value, **wanted}, leaves, limits, peers, excuse=excuse
    )


def _excuse(
    answer: Callable[[str, Candidate], tuple[Any, Mapping[str, Any]]],
    name: str,
    candidate: Candidate,
    first: Mapping[str, Any],
    loss_fn: LossFn,
    given: tuple[PyTree, PyTree],
    limits: Mapping[str, Limit | None],
    peers: Peers,
) -> tuple[str, tuple[str, ...]]:
    """The excuse of a candidate with findings, and notes; see `excuse`."""

    def answers() -> Iterator[Mapping[str, PyTree]]:
        yield first
        while True:
            yield answer(name, candidate)[1]

    drawn = (gradient_of_sum(loss_fn), *brought(given))
    return excuse(name, candidate, given, drawn, answers(), limits, peers)


def excuse(
    name: str,
    candidate: Callable[..., object],
    arguments: Sequence[PyTree],
    drawn: tuple[Callable[..., PyTree], PyTree, PyTree],
    answers: Iterator[Mapping[str, PyTree]],
    limits: Mapping[str, Limit | None],
    peers: Peers,
) -> tuple[str, tuple[str, ...]]:
    """The reason why wrong values are not judged, or an empty one, and notes.

    Args:
      name: Of the candidate.
      candidate: A function.
      arguments: Of its call.
      drawn: The function whose random numbers count, and its arguments.
      answers: The leaves of the candidate's first result and of further calls; endless
        unless it is known to keep state from call to call.
      limits: Of its leaves.
      peers: The processes that judge it.
    """
    if split := split_dependent(*drawn):
        return split, ()
    still = draws_nothing(*drawn)
    # None where it cannot be seen.
    with as_the_caller():
        draws = still and draws_of_its_own(candidate, *arguments)
    if draws:
        return OWN_DRAWS, ()
    calls = list(islice(answers, CALLS))
    # Every call has to differ: a candidate that returns a cached result is wrong.
    apart = len(calls) == CALLS and all(
        _apart(*pair, limits) for pair in pairwise(calls)
    )
    # Each process sees its own shards only.
    if all(peers.exchange(apart)):
        return CHANGES, ()
    if draws is not None:
        return "", ()
    return "", (
        f"{name}: whether it draws random numbers of its own, such as dropout masks, "
        f"cannot be seen. Switch them off: the loss draws none",
    )


def _apart(
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    limits: Mapping[str, Limit | None],
) -> bool:
    """Whether two results differ by more than rounding in this process's shards."""
    for path, limit in limits.items():
        if limit is None or one.get(path) is None or other.get(path) is None:
            continue
        a, b = held(one[path]), held(other[path])
        if a.shape != b.shape:
            return True
        allowed = np.broadcast_to(limit.bound, a.shape)
        for x, y in zip(a.shards, b.shards, strict=True):
            # NumPy would subtract 16-bit values in 16 bits.
            wide = np.result_type(allowed, x.values.dtype)
            # inf - inf is NaN, which is no change.
            with np.errstate(invalid="ignore"):
                difference = np.abs(x.values.astype(wide) - y.values.astype(wide))
            if (difference > allowed[x.index]).any():
                return True
    return False


def lent(tree: PyTree) -> PyTree:
    """Copies of a tree's arrays, which a candidate may donate or overwrite."""
    # NumPy's too: the reference is measured again, on what was given.
    kinds = jax.Array | np.ndarray
    return jax.tree.map(lambda x: x.copy() if isinstance(x, kinds) else x, tree)


def _answer(
    call: str,
    given: tuple[PyTree, PyTree],
    peers: Peers,
    naming: Callable[[PyTree], Mapping[str, Any]],
    name: str,
    candidate: Candidate,
) -> tuple[Any, Mapping[str, Any]]:
    """A candidate's loss, and its gradient's leaves by the reference's paths."""
    with as_the_caller():
        try:
            result: Any = candidate(*lent(given))
        except Exception as error:
            error.add_note(f"raised by the candidate {name!r} of verify.{call}")
            raise
        if not isinstance(result, tuple) or len(result) != 2:
            rule = "must return (loss, gradient)"
            where, got = f"candidates[{name!r}](params, batch)", type_name(result)
            raise TypeError(requirement(where, rule, got))
        # Computed before the next call, which may overwrite what is copied here.
        loss, gradient = peers.computed(jax.tree.map(copied, result))
        return loss, naming(gradient)


def copied(leaf: Any) -> ArrayLike:
    """A result as it is now: the next call may overwrite the buffer that it lies in."""
    # A tensor of torch, which may require a gradient and lie on any device.
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
        # NumPy has no bfloat16, and by DLPack float64 may become float32.
        sixteen = str(leaf.dtype) == "torch.bfloat16"
        leaf = jnp.from_dlpack(leaf.contiguous()) if sixteen else leaf.numpy()
    # Arrays of JAX too: those by `from_dlpack` lie in another framework's buffers.
    if isinstance(leaf, jax.Array):
        return leaf.copy()
    return np.array(leaf) if hasattr(leaf, "__array__") else leaf


def _check_mesh_of_loss(
    call: str, loss_fn: LossFn, params: PyTree, batch: PyTree, error: Exception
) -> None:
    """Raises for a loss that JAX traces with the caller's mesh alone."""
    if brought(batch) is batch:
        return
    with as_the_caller():
        jax.jit(loss_fn).trace(params, batch)  # Raises if the loss itself is wrong.
    rule = (
        "must name axes by PartitionSpec, under `jax.set_mesh`: the reference is "
        "traced with a mesh of the same axes, each of one device"
    )
    got = f"a loss that only its own mesh can trace ({error})"
    remedy = "Replace shardings of that mesh, as in reshard(x, NamedSharding(...))."
    raise ValueError(requirement(f"{call}(loss_fn=...)", rule, got, remedy)) from error


def _check_params(argument: str, params: PyTree) -> None:
    leaves = jax.tree.leaves(params)
    if any(map(callable, leaves)):
        check_arrays(argument, params)
    if not any(map(is_inexact, leaves)):
        rule = "must have a floating leaf: there is no gradient else"
        raise ValueError(requirement(argument, rule, "none"))


def check_references(argument: str, program: ClosedJaxpr) -> None:
    """Checks that a program to be judged makes or takes no mutable reference.

    Raises:
      ValueError: It does. The judge runs a program equation by equation in two
        precisions, and a reference has one.
    """
    if has_references(program):
        rule = "must be without `jax.new_ref`: the judge reads pure programs"
        remedy = (
            "Return the array instead, or carry it through `jax.lax.scan`. A candidate "
            "may use references."
        )
        raise ValueError(requirement(argument, rule, "a mutable reference", remedy))


def check_arguments(
    call: str,
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    candidates: Mapping[str, Any],
    weights: ArrayLike | None,
    reduction: str,
    names: tuple[str, str] = ("params", "batch"),
) -> None:
    """Raises for arguments that cannot be judged.

    `call` is the public function that asks, `names` its arguments with the parameters
    and the batch, for the errors' text.
    """
    check_function(f"{call}(loss_fn=...)", loss_fn)
    if not candidates:
        rule = "must name at least one function"
        raise ValueError(requirement(f"{call}(candidates=...)", rule, candidates))
    _check_params(f"{call}({names[0]}=...)", params)
    check_loss(call, loss_fn, params, batch)
    check_batch(f"{call}({names[1]}=...)", batch)
    try:
        given = brought((params, batch))
        program, losses = jax.make_jaxpr(loss_fn, return_shape=True)(*given)
        shape = losses.shape
    except Exception as error:
        # A loss may take a list's numbers as they are, so that only now it is wrong.
        check_lists(f"{call}({names[1]}=...)", batch)
        _check_mesh_of_loss(call, loss_fn, params, batch, error)
        raise
    check_references(f"{call}(loss_fn=...)", program)
    if shape == ():
        # A scalar has been reduced already, so these would have no effect.
        if weights is not None or reduction != "mean":
            rule = "need one loss per example"
            raise ValueError(
                requirement(
                    f"{call}(weights=..., reduction=...)",
                    rule,
                    "a scalar loss",
                    "Return the losses before their mean.",
                )
            )
        return
    count = examples_in(batch, f"{call}({names[1]}=...)")
    if not count:
        rule, got = "must have at least one example", "none"
        raise ValueError(requirement(f"{call}({names[1]}=...)", rule, got))
    if weights is None:
        return
    if np.shape(weights) != (count,):
        rule = f"must be one per example, shape ({count},)"
        got = f"shape {np.shape(weights)}"
        raise ValueError(requirement(f"{call}(weights=...)", rule, got))
    values = np.asarray(weights, np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
        rule = "must be finite, at least 0, and not all 0"
        raise ValueError(requirement(f"{call}(weights=...)", rule, values.tolist()))
