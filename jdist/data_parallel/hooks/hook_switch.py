"""One hook for the first steps, another from then on."""

import jax
import jax.numpy as jnp

from jdist._errors import requirement
from jdist._tree import PyTree
from jdist.data_parallel.hooks.hook import Bucket, Hook


def switch(first: Hook, then: Hook, at: int) -> Hook:
    """Uses `first` for `at` steps and `then` for all later ones.

    Each keeps its own state, which the other leaves alone. Both are in the compiled
    program; which of them runs is decided by a count of steps, the same on all
    replicas.

    Args:
      first: For steps 0 to at - 1.
      then: From step `at` on.
      at: At least 0; 0 is `then` alone.

    Raises:
      ValueError: `at` is negative.
    """
    if at < 0:
        raise ValueError(requirement("switch(at=...)", "must be at least 0", at))
    if at == 0:
        return then
    hooks = (first, then)

    # Both states from the start: a state must not change its structure at a step.
    def init(bucket: Bucket) -> PyTree:
        return jnp.zeros((), jnp.int32), tuple(hook.start(bucket) for hook in hooks)

    def reduce(state: PyTree, bucket: Bucket) -> tuple[PyTree, Bucket]:
        count, states = state
        states, result = one_of(count < at, hooks, states, bucket)
        # It stops there, so that a run of any length does not overflow it.
        return (jnp.minimum(count + 1, at), states), result

    name = f"switch({first.name}, {then.name}, at={at})"
    return Hook(name, reduce, init, first.replicated and then.replicated)


def one_of(
    is_first: jax.Array,
    hooks: tuple[Hook, Hook],
    states: tuple[PyTree, PyTree],
    bucket: Bucket,
) -> tuple[tuple[PyTree, PyTree], Bucket]:
    """Lets one of two hooks sum a bucket, chosen by a scalar equal on all replicas."""

    def run(place: int, states: PyTree, buffer: jax.Array) -> PyTree:
        own, result = hooks[place].reduce(states[place], bucket.replaced(buffer))
        states = tuple(own if i == place else s for i, s in enumerate(states))
        return states, result.buffer, buffer if result.sent is None else result.sent

    # `cond` returns arrays: a bucket is taken apart here and put together after it.
    states, buffer, sent = jax.lax.cond(
        is_first,
        lambda *given: run(0, *given),
        lambda *given: run(1, *given),
        states,
        bucket.buffer,
    )
    return states, bucket.replaced(buffer, sent)
