"""A hook that switches from one hook to another after a number of steps."""

import jax
import jax.numpy as jnp

from jdist._errors import check_at_least
from jdist._tree import PyTree
from jdist.data_parallel.hooks.hook import Bucket, Hook, check_hook


def switch(first: Hook, then: Hook, at: int) -> Hook:
    """Uses `first` for `at` steps and `then` for all later ones.

    Each has a state of its own. Both are in the compiled program, and a count of steps,
    equal on all replicas, selects the one that runs.

    Args:
      first: The hook of steps 0 to at - 1.
      then: The hook from step `at` on.
      at: At least 0; 0 for `then` alone.

    Raises:
      ValueError: `at` is negative.
    """
    for argument, hook in (("first", first), ("then", then)):
        check_hook(f"switch({argument})", hook)
    check_at_least("switch(at=...)", at, 0)
    if at == 0:
        return then
    hooks = (first, then)

    # Both states from the start: the compiled step needs a state of one structure.
    def init(bucket: Bucket) -> PyTree:
        return jnp.zeros((), jnp.int32), tuple(hook.start(bucket) for hook in hooks)

    def reduce(state: PyTree, bucket: Bucket) -> tuple[PyTree, Bucket]:
        count, states = state
        states, result = one_of(count < at, hooks, states, bucket)
        # The count stops at `at`, so that it cannot overflow in a long run.
        return (jnp.minimum(count + 1, at), states), result

    name = f"switch({first.name}, {then.name}, at={at})"
    return Hook(name, reduce, init)


def one_of(
    is_first: jax.Array,
    hooks: tuple[Hook, Hook],
    states: tuple[PyTree, PyTree],
    bucket: Bucket,
) -> tuple[tuple[PyTree, PyTree], Bucket]:
    """Sums a bucket by one of two hooks.

    Args:
      is_first: Scalar, equal on all replicas: whether the first one is used.
      hooks: The two hooks.
      states: Their states.
      bucket: The bucket.
    """

    def run(place: int, states: PyTree, buffer: jax.Array) -> PyTree:
        own, result = hooks[place].reduce(states[place], bucket.replaced(buffer))
        states = tuple(own if i == place else s for i, s in enumerate(states))
        return states, result.buffer, buffer if result.sent is None else result.sent

    # All replicas take the same branch: a collective inside would otherwise never end.
    # `cond` returns arrays, so the bucket is split here and rebuilt after it.
    states, buffer, sent = jax.lax.cond(
        is_first,
        lambda *given: run(0, *given),
        lambda *given: run(1, *given),
        states,
        bucket.buffer,
    )
    return states, bucket.replaced(buffer, sent)
