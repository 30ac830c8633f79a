"""The type of a row of the equivalence matrix, and helpers of several rows.

A row builds, for a loss function and a reduction, a candidate for the judge: a function
that computes the loss and its gradient by one strategy. Rows import the strategies and
never the judge, which finds rows by the entry-point group `jdist.verify`.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from jdist._errors import Unavailable
from jdist._tree import PyTree, is_none
from jdist.optim import Optimizer

LossFn = Callable[[PyTree, PyTree], jax.Array]
"""`(params, batch) -> losses`, one for each example."""

Result = tuple[jax.Array, PyTree]
"""The loss and its gradient."""

Candidate = Callable[[PyTree, PyTree, jax.Array | None], Result]
"""`(params, batch, weights) -> (loss, gradient)`."""

Row = Callable[[LossFn, str], Candidate]
"""`(loss_fn, reduction) -> candidate`; raises `Unavailable` where hardware is missing,
or where the strategy does not know the reduction."""


def devices(count: int) -> list[jax.Device]:
    """Returns the first `count` devices.

    Raises:
      Unavailable: There are fewer.
    """
    found = jax.devices()
    if len(found) < count:
        kind = found[0].device_kind
        raise Unavailable(f"needs {count} devices, there are {len(found)} ({kind})")
    return found[:count]


def recorder() -> Optimizer:
    """An optimizer that keeps the parameters; its state is the gradient, 0 for None."""

    def step(
        params: PyTree, grads: PyTree, state: PyTree, _: object
    ) -> tuple[PyTree, PyTree]:
        kept = jax.tree.map(
            lambda g, s: s if g is None else g, grads, state, is_leaf=is_none
        )
        return params, kept

    return Optimizer("recorder", lambda p: jax.tree.map(jnp.zeros_like, p), step)


@contextlib.contextmanager
def precision_of_caller() -> Iterator[None]:
    """Sets the caller's float width in all threads while its block runs."""
    # The judge calls candidates under `jax.enable_x64`, a setting of its thread alone,
    # and workers compute in other threads. The setting of those is read in a new one.
    with ThreadPoolExecutor(1) as other:
        before = other.submit(_is_wide).result()
    jax.config.update("jax_enable_x64", _is_wide())
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def _is_wide() -> bool:
    return bool(jnp.result_type(float) == jnp.float64)
