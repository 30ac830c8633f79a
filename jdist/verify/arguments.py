"""Checks of the arguments that the judge's functions have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.typing import ArrayLike, DTypeLike

from jdist._compat import has_references
from jdist._errors import check_choice, check_function, check_type, requirement
from jdist._tree import (
    PyTree,
    check_arrays,
    check_batch,
    check_lists,
    examples_in,
    is_inexact,
)
from jdist.verify.draws import check_loss
from jdist.verify.oracle import REDUCERS, LossFn
from jdist.verify.processes.one_device import as_the_caller, brought


def check_options(call: str, reduction: str, accumulation: DTypeLike | None) -> None:
    """Raises for an unknown reduction, or an accumulation that is no floating dtype."""
    check_choice(f"{call}(reduction=...)", reduction, REDUCERS)
    if accumulation is not None and not _is_floating(accumulation):
        rule = "must be a floating dtype or None"
        got = repr(accumulation)
        raise ValueError(requirement(f"{call}(accumulation=...)", rule, got))


def _is_floating(dtype: DTypeLike) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except (TypeError, ValueError):  # NumPy reads a dict as the fields of a structure.
        return False


def check_candidates(call: str, candidates: Mapping[str, Any]) -> None:
    """Raises unless candidates are functions by name, and at least one."""
    argument = f"{call}(candidates=...)"
    rule = "must be a mapping from names to functions"
    check_type(argument, candidates, Mapping, rule)
    for name, candidate in candidates.items():
        own = f"{call}(candidates={{{name!r}: ...}})"
        check_function(own, candidate, "must be a function, and not what it returns")
    if not candidates:
        rule = "must name at least one function"
        raise ValueError(requirement(argument, rule, candidates))


def check_problem(
    call: str,
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    weights: ArrayLike | None,
    reduction: str,
    names: tuple[str, str] = ("params", "batch"),
) -> None:
    """Raises for a loss, parameters and a batch that cannot be judged.

    `call` is the public function that asks, `names` its arguments with the parameters
    and the batch, for the errors' text.
    """
    params_argument, batch_argument = (f"{call}({name}=...)" for name in names)
    check_function(f"{call}(loss_fn=...)", loss_fn)
    _check_params(params_argument, params)
    check_loss(call, loss_fn, params, batch)
    check_batch(batch_argument, batch)
    try:
        given = brought((params, batch))
        program, losses = jax.make_jaxpr(loss_fn, return_shape=True)(*given)
        shape = losses.shape
    except Exception as error:
        # A loss may take a list's numbers as they are, so that only now it is wrong.
        check_lists(batch_argument, batch)
        _check_mesh_of_loss(call, loss_fn, params, batch, error)
        raise
    check_references(f"{call}(loss_fn=...)", program)
    if shape == ():
        # A scalar has been reduced already, so these would have no effect.
        if weights is not None or reduction != "mean":
            argument = f"{call}(weights=..., reduction=...)"
            rule, got = "need one loss per example", "a scalar loss"
            remedy = "Return the losses before their mean."
            raise ValueError(requirement(argument, rule, got, remedy))
        return
    count = examples_in(batch, batch_argument)
    if not count:
        rule = "must have at least one example"
        raise ValueError(requirement(batch_argument, rule, "none"))
    if weights is not None:
        _check_weights(f"{call}(weights=...)", weights, count)


def _check_params(argument: str, params: PyTree) -> None:
    leaves = jax.tree.leaves(params)
    if any(map(callable, leaves)):
        check_arrays(argument, params)
    if not any(map(is_inexact, leaves)):
        rule = "must have a floating leaf: otherwise there is no gradient"
        raise ValueError(requirement(argument, rule, "none"))


def _check_weights(argument: str, weights: ArrayLike, count: int) -> None:
    if np.shape(weights) != (count,):
        rule = f"must be one per example, shape ({count},)"
        raise ValueError(requirement(argument, rule, f"shape {np.shape(weights)}"))
    values = np.asarray(weights, np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
        rule = "must be finite, at least 0, and not all 0"
        raise ValueError(requirement(argument, rule, values.tolist()))


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
