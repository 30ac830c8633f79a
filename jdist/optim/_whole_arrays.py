"""Rules of whole arrays, such as an orthogonalization: where they may be applied.

In the global view, under `jax.jit` and outside, a parameter is whole however it lies on
its devices. Inside `jax.shard_map` and `jax.pmap` each device sees an array of its own,
which may be a shard of the parameter. That is nothing to an elementwise rule. A rule of
whole arrays would step each shard by itself, which is another algorithm, and no shape
tells.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jdist._compat import tracks_varying_axes, varying_axes
from jdist._errors import value_error
from jdist._tree import described, is_inexact, path_of

_copied: ContextVar[frozenset[Hashable]] = ContextVar("copied", default=frozenset())


@contextmanager
def copies_over(axis_name: Hashable) -> Iterator[None]:
    """Says that the members of an axis, or of several, have whole parameters each."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    token = _copied.set(_copied.get() | frozenset(names))
    try:
        yield
    finally:
        _copied.reset(token)


def check_leaf(
    argument: str,
    keys: Any,
    param: ArrayLike,
    elementwise: bool,
    dimensions: int | None,
) -> None:
    """Checks that a rule may be applied to a parameter.

    Args:
      argument: For the error, such as `"muon.init(params)"`.
      keys: The parameter's path.
      param: The parameter.
      elementwise: Whether the rule is elementwise, and may be applied to shards.
      dimensions: The number of dimensions that it takes; None for any.

    Raises:
      ValueError: The parameter is none that the rule takes, or may be a shard of one.
    """
    if (elementwise and dimensions is None) or not is_inexact(param):
        return
    if dimensions is not None and jnp.ndim(param) != dimensions:
        rule = f"must have parameters of {dimensions} dimensions only"
        got = f"{described(param)} at {path_of(keys)}"
        remedy = "Step others with another optimizer: `by_label({...}, labels)`; a "
        remedy += "stack of matrices by `jax.vmap` of `init` and `step`."
        raise value_error(argument, rule, got, remedy)
    if elementwise:
        return
    if jnp.issubdtype(jnp.result_type(param), jnp.complexfloating):
        rule = "must have real parameters only, as in torch"
        got = f"{described(param)} at {path_of(keys)}"
        remedy = "Step complex ones with another optimizer: `by_label({...}, labels)`."
        raise value_error(argument, rule, got, remedy)
    axes = _axes_of_shards(param)
    if axes:
        rule = "must have whole parameters, as a step of each shard would be another"
        got = f"an array at {path_of(keys)} inside shard_map or pmap that may be a "
        got += f"shard over {', '.join(map(repr, axes))}"
        remedy = (
            "Step outside of it, under jit. If each device has the whole parameter, "
            "give it by `in_specs=PartitionSpec()` with `check_vma=True`, or step with "
            "`data_parallel.averaged(opt, axis_name)`."
        )
        raise value_error(argument, rule, got, remedy)


def _axes_of_shards(param: ArrayLike) -> list[Hashable]:
    """The mapped axes over which a parameter may be divided."""
    mesh = jax.sharding.get_abstract_mesh()
    return [
        axis
        for axis in mesh.manual_axes
        # An axis of one device divides nothing.
        if mesh.shape[axis] > 1
        and axis not in _copied.get()
        and not (
            tracks_varying_axes(axis) and axis not in varying_axes(jnp.asarray(param))
        )
    ]
