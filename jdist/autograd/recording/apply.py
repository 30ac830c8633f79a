"""`apply`: a pure function of recorded values, on this worker."""

from collections.abc import Callable
from typing import Any

from jdist._errors import check_function
from jdist._tree import PyTree
from jdist.autograd.recording.recorded import record


def apply(fn: Callable[..., Any], /, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Runs `fn(*args, **kwargs)` and records it for `backward`.

    The function receives arrays where the arguments have recorded values, and the
    whole tree where they have a variable. It is compiled once, with its backward half;
    a lambda written in a loop too. Where nothing among the arguments is recorded the
    function simply runs.

    Args:
      fn: A pure function of its arguments.
      *args: Pytrees of recorded values, variables, arrays, and Python values. Arrays
        and floating numbers are inputs; integers, booleans, strings and functions are
        part of the compiled function, so that shapes and axes can be given.
      **kwargs: As `args`.

    Returns:
      What the function returns, with recorded values in place of floating arrays that
      depend on recorded ones.

    Raises:
      TypeError: An argument can be neither an input nor a constant; the function refers
        to recorded values that are no arguments, or makes calls to other workers; or
        there are traced arrays beside recorded ones.
      Exception: Whatever the function raises.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import autograd
      >>> w = autograd.variable(jnp.array([1.0, 2.0, 4.0]))
      >>> total, half = autograd.apply(lambda w, n: (w[:n].sum(), n / 2), w, 2)
      >>> total.value.item(), half.item()
      (3.0, 1.0)
    """
    check_function("apply(fn)", fn)
    return record(fn, args, kwargs)
