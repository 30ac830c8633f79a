"""JAX's transformations of a function as data that can be sent.

Each transformation of a call is the same call with one more transform behind the
function's name. The callee thus needs only the name, the transforms and the arrays;
and a transformation of the result is again of this form, to any order.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

Flat = Callable[..., list[Any]]
"""A function from arrays to a list of arrays."""


class Pullback(NamedTuple):
    """Maps arguments and cotangents of results to cotangents of arguments.

    Attributes:
      wanted: Indices of the arguments whose cotangents are computed.
      present: Numbers of the results that have one; the others' are absent, and are
        neither sent nor computed with.
    """

    wanted: tuple[int, ...]
    present: tuple[int, ...]


class Vmap(NamedTuple):
    """Maps over a new axis of some arguments, the first axis of all results.

    Attributes:
      axes: For each argument, the index of that axis; None if it has none.
    """

    axes: tuple[int | None, ...]


Transform = Pullback | Vmap


def transformed(function: Flat, operations: Sequence[Transform]) -> Flat:
    """Apply transforms to a function, in order.

    Example:
      >>> double_and_sum = lambda x, y: [2 * x, x + y]
      >>> pulled = transformed(double_and_sum, [Pullback((0,), (0, 1))])
      >>> [float(d) for d in pulled(1.0, 5.0, 10.0, 100.0)]
      [120.0]
    """
    for operation in operations:
        if isinstance(operation, Pullback):
            function = _pulled_back(function, *operation)
        else:
            function = jax.vmap(function, in_axes=operation.axes)
    return function


def _pulled_back(
    function: Flat, wanted: tuple[int, ...], present: tuple[int, ...]
) -> Flat:
    def pull(*arrays: jax.Array) -> list[jax.Array]:
        count = len(arrays) - len(present)
        arguments, cotangents = arrays[:count], arrays[count:]

        def of_wanted(*varied: jax.Array) -> list[jax.Array]:
            inserted = dict(zip(wanted, varied, strict=True))
            results = function(*[inserted.get(i, x) for i, x in enumerate(arguments)])
            # Without the absent ones: their cotangents are symbolic zeros, which were
            # neither sent nor made here.
            return [results[i] for i in present]

        # Only the wanted ones vary: the others' cotangents would be computed for
        # nothing.
        _, pullback = jax.vjp(of_wanted, *[arguments[i] for i in wanted])
        return list(pullback(list(cotangents)))

    return pull
