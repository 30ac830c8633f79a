"""Assignment of gradients to buckets, each summed by one collective.

A collective has a cost per call and a cost per byte. Many small gradients in one flat
buffer pay the first only once, but a bucket cannot be sent before its last gradient is
ready, and a large gradient gains nothing from the copy. Buckets therefore have limits,
and are filled in the order in which gradients become ready
(`jdist.data_parallel.gradient.gradient_order`).
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp

from jdist._compat import is_traced
from jdist._errors import check_sequence, quoted, type_error, value_error
from jdist._tree import PyTree

Cap = float | Sequence[float] | None
"""One limit in MiB, or a list of them."""

MIB = 2**20
FIRST_LIMIT = 1 * MIB
"""torch's limit in bytes for the bucket that is ready first, so that it leaves
early."""
LIMIT = 25 * MIB
"""torch's limit in bytes for all other buckets."""
ALONE = 1 * MIB
"""Size in bytes from which on copying a leaf into a bucket cost more than a call of its
own, between two CPU processes over gloo (docs/data_parallel.md, "Buckets")."""


def assign_buckets(
    leaves: Sequence[PyTree], limits: Sequence[float]
) -> list[list[int]]:
    """Divides leaves, in the order given, into buckets by PyTorch's rule.

    Leaves of one dtype and one device fill a bucket in turn. A bucket is closed when it
    holds *at least* its limit, so that the last leaf may overshoot it. Each dtype and
    device walks the list of limits by itself and stays at the last.

    Args:
      leaves: Arrays, or anything with a `shape` and a `dtype`, such as
        `jax.ShapeDtypeStruct`; these are taken to be on one device.
      limits: Bytes, at least 0: of the first bucket, of the second, and so on.

    Returns:
      Lists of indices into `leaves`, each ascending, ordered by their first.

    Raises:
      ValueError: There are no limits, or one is negative or NaN.
      TypeError: `leaves` are no arrays, or `limits` no numbers.

    Example:
      >>> import jax
      >>> sizes = (3, 1, 4, 1, 5, 2)                      # of float32: 4 bytes each
      >>> leaves = [jax.ShapeDtypeStruct((n,), "float32") for n in sizes]
      >>> assign_buckets(leaves, [12, 20])
      [[0], [1, 2], [3, 4], [5]]

    References:
      `torch.distributed._compute_bucket_assignment_by_size`; Li et al., PyTorch
      Distributed, VLDB 2020, section 4.2.
    """
    argument, rule = "assign_buckets(leaves=...)", "must be a list of arrays"
    check_sequence(argument, leaves, object, rule)
    for leaf in leaves:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise type_error(argument, rule, quoted(leaf))
    limits = _check_limits("assign_buckets(limits=...)", limits)
    done: list[list[int]] = []
    filling: dict[Any, list[int]] = {}
    held: dict[Any, int] = {}
    step: dict[Any, int] = {}
    for index, leaf in enumerate(leaves):
        # A flat buffer has one dtype and lies on one device.
        key = (jnp.dtype(leaf.dtype), _device_of(leaf))
        filling.setdefault(key, []).append(index)
        held[key] = held.get(key, 0) + bytes_of(leaf)
        at = step.setdefault(key, 0)
        if held[key] >= limits[at]:
            done.append(filling.pop(key))
            held[key] = 0
            # The last limit holds for all further buckets of this dtype and device.
            step[key] = min(at + 1, len(limits) - 1)
    return sorted([*done, *filling.values()], key=lambda bucket: bucket[0])


def plan_buckets(
    leaves: Sequence[PyTree], ready: Sequence[int], cap: Cap
) -> list[list[int]]:
    """The buckets of a gradient, in the order in which they are sent.

    Args:
      leaves: The gradient's leaves, of which shapes and dtypes are used.
      ready: When each leaf becomes final; see
        `jdist.data_parallel.gradient.gradient_order`.
      cap: None: a first limit of 1 MiB and then 25 MiB, in the order of `ready`, and
        leaves of 1 MiB and more alone. Numbers: the only limits, in MiB.

    Returns:
      Lists of indices into `leaves`; a bucket is sent when its last leaf is ready.
    """
    order = sorted(range(len(leaves)), key=lambda i: (ready[i], i))
    # Ties keep the order of leaves, so that all processes make the same buckets.
    rank = {leaf: place for place, leaf in enumerate(order)}
    # A large leaf saves little by sharing a call, and would pay for a copy.
    alone = {i for i in order if cap is None and bytes_of(leaves[i]) >= ALONE}
    small = [i for i in order if i not in alone]
    limits = limits_of("plan_buckets(cap=...)", cap)
    assigned = assign_buckets([leaves[i] for i in small], limits)
    found = [[small[i] for i in bucket] for bucket in assigned]
    found += [[i] for i in alone]
    # A bucket is sent after its last leaf, in whatever order it was filled.
    return sorted(found, key=lambda bucket: max(rank[i] for i in bucket))


def limits_of(argument: str, cap: Cap) -> tuple[float, ...]:
    """The limits of a cap, in bytes.

    Raises:
      ValueError: A limit is negative or NaN, or there are none.
      TypeError: It is neither None nor limits.
    """
    if cap is None:
        return FIRST_LIMIT, LIMIT
    numbers: Any = cap if isinstance(cap, Sequence) else (cap,)
    if not all(isinstance(limit, Real) for limit in numbers):
        raise type_error(argument, "must be None, or limits in MiB", quoted(cap))
    return tuple(limit * MIB for limit in _check_limits(argument, numbers))


def bytes_of(leaf: Any) -> int:
    """Number of bytes of an array, or of anything with a shape and a dtype."""
    return math.prod(leaf.shape) * int(jnp.dtype(leaf.dtype).itemsize)


def _device_of(leaf: Any) -> PyTree:
    # A traced array has no devices before its program runs.
    if isinstance(leaf, jax.Array) and not is_traced(leaf):
        return frozenset(leaf.devices())
    return None


def _check_limits(argument: str, limits: Sequence[float]) -> tuple[float, ...]:
    check_sequence(argument, limits, Real, "must be numbers")
    limits = tuple(limits)
    if not limits:
        raise value_error(argument, "must have at least one limit", limits)
    # `not >=` and not `<`, so that NaN is refused too.
    wrong = [limit for limit in limits if not limit >= 0]
    if wrong:
        raise value_error(argument, "must be at least 0 each", wrong[0])
    return limits
