"""Rows of distributed autograd: workers of this process compute parts of the losses.

The examples are divided into uneven parts; the caller computes the reduction.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from jdist import autograd, rpc
from jdist._tree import PyTree, examples_in, is_inexact, is_none
from jdist.autograd import Variable
from jdist.matrix.row import Candidate, LossFn, Result, Row, precision_of_caller

WORKERS = ("worker0", "worker1", "worker2", "worker3")

Forward = Callable[[int, Variable, list[PyTree]], PyTree]
"""`(number of the loss, params, parts) -> losses`, recorded."""


def rows() -> dict[str, Row]:
    """Rows of one worker, of three in both modes, and of a chain of three workers."""
    named: dict[str, Row] = {
        "here, in parts": partial(_row, _here, "smart"),
        "smart, over 3 workers": partial(_row, _over_workers, "smart"),
        "fast, over 3 workers": partial(_row, _over_workers, "fast"),
        "smart, through 3 workers": partial(_row, _through_workers, "smart"),
        "fast, through 3 workers": partial(_row, _through_workers, "fast"),
    }
    return {f"autograd {name}": row for name, row in named.items()}


def _row(forward: Forward, mode: str, loss_fn: LossFn, reduction: str) -> Candidate:
    def candidate(params: PyTree, batch: PyTree, weights: jax.Array | None) -> Result:
        count = examples_in(batch, "candidate")
        parts = [jax.tree.map(lambda x, c=cut: x[c], batch) for cut in _cuts(count)]
        weights = jnp.ones(count) if weights is None else jnp.asarray(weights)
        variable = autograd.variable(params)
        # A cluster for each gradient: other rows create workers in this process too.
        with (
            precision_of_caller(),
            _registered(loss_fn) as number,
            rpc.local_cluster(WORKERS),
            autograd.context() as context_id,
        ):
            losses = forward(number, variable, parts)
            loss = autograd.apply(_reduced, losses, weights, reduction)
            autograd.backward(context_id, [loss], mode)
            found = autograd.get_gradients(context_id)[variable]
        return loss.value, jax.tree.map(_zeros_for_none, params, found, is_leaf=is_none)

    return candidate


def _cuts(count: int) -> list[slice]:
    """Slices of uneven parts: a half, two thirds of the rest, and the remainder."""
    ends = [0, -(-count // 2), -(-5 * count // 6), count]
    # Few examples leave parts empty, and a loss of no examples is not called.
    return [slice(a, b) for a, b in itertools.pairwise(ends) if a < b]


def _here(number: int, params: Variable, parts: list[PyTree]) -> PyTree:
    return autograd.apply(_joined, *[_part(number, params, part) for part in parts])


def _over_workers(number: int, params: Variable, parts: list[PyTree]) -> PyTree:
    calls = [
        rpc.rpc_async(1 + rank, _part, args=(number, params, part))
        for rank, part in enumerate(parts)
    ]
    return autograd.apply(_joined, *rpc.wait_all(calls))


def _through_workers(number: int, params: Variable, parts: list[PyTree]) -> PyTree:
    # A variable cannot be sent to a worker; its recorded value can, with its history.
    return rpc.rpc_sync(1, _onwards, args=(1, number, params.recorded(), parts))


# Eager, since it calls the next worker: a compiled function could not.
@autograd.eager
def _onwards(rank: int, number: int, params: PyTree, parts: list[PyTree]) -> PyTree:
    """Computes one part, and calls the next worker for the rest."""
    own = _part(number, params, parts[0])
    if not parts[1:]:
        return own
    args = (rank + 1, number, params, parts[1:])
    return autograd.apply(_joined, own, rpc.rpc_sync(rank + 1, _onwards, args=args))


# Eager, since it looks its loss up in this process.
@autograd.eager
def _part(number: int, params: PyTree, batch: PyTree) -> PyTree:
    """The losses of some examples."""
    return autograd.apply(_LOSSES[number], params, batch)


_LOSSES: dict[int, LossFn] = {}
_numbers = itertools.count()


@contextlib.contextmanager
def _registered(loss_fn: LossFn) -> Iterator[int]:
    """Registers a loss under a number, by which workers of this process find it."""
    # rpc sends functions by name, and a loss of the judge may have none.
    number = next(_numbers)
    _LOSSES[number] = loss_fn
    try:
        yield number
    finally:
        del _LOSSES[number]


def _joined(*losses: jax.Array) -> jax.Array:
    return jnp.concatenate(losses)


def _reduced(losses: jax.Array, weights: jax.Array, reduction: str) -> jax.Array:
    weights = weights.astype(losses.dtype)
    if reduction in ("max", "min"):
        # Weight 0 excludes an example; other weights do not matter.
        worst = jnp.inf if reduction == "min" else -jnp.inf
        extreme = jnp.min if reduction == "min" else jnp.max
        return extreme(losses, where=weights > 0, initial=worst)
    total = jnp.sum(weights * losses)
    return total if reduction == "sum" else total / jnp.sum(weights)


def _zeros_for_none(param: PyTree, gradient: PyTree) -> PyTree:
    """Replaces a missing gradient by zeros, as `jax.grad` returns them."""
    if gradient is None and is_inexact(param):
        return jnp.zeros_like(param)
    return gradient
