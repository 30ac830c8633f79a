"""The type of a hook, of the buckets that it sums, and the hooks that lose nothing."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jdist._errors import check_type, type_error
from jdist._tree import PyTree
from jdist.data_parallel.replicas.mapping import summed


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of one replica in one flat buffer, to be summed over replicas.

    Attributes:
      buffer: Shape `(n,)`, float32 or wider: this replica's *share* of the batch's
        gradient. Shares are weighted already, so that the gradient is their plain sum
        for any numbers of examples:
        `sum_i share_i = sum_i (B_i / B) dL_i/dW`.
      weight: Scalar, this replica's part of the total weight, B_i / B.
      index: The bucket's number; bucket 0 is sent first.
      is_last: Whether no other bucket follows.
      axis_name: The axis of replicas, for collectives.
      paths: Paths of the gradients in the buffer, in order.
      shapes: Shapes of the gradients, in the same order.
      sent: The part of `buffer` that reached the sum, set by hooks that approximate:
        the sum over replicas of `sent` is the buffer that the hook returns. None for
        all of it.
    """

    buffer: jax.Array
    weight: jax.Array
    index: int
    is_last: bool
    axis_name: Hashable
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sent: jax.Array | None = None

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return int(jax.lax.axis_size(self.axis_name))

    def gradients(self) -> list[jax.Array]:
        """Splits the buffer into the gradients."""
        return split(self.buffer, self.shapes)

    def replaced(self, buffer: jax.Array, sent: jax.Array | None = None) -> "Bucket":
        """The bucket with another buffer."""
        return dataclasses.replace(self, buffer=buffer, sent=sent)


@dataclass(frozen=True, slots=True)
class Hook:
    """A sum of a bucket over replicas, exact or approximate.

    A plain function `(state, bucket) -> (state, bucket)` serves as a hook without
    state: it is given `()`.

    Attributes:
      name: Name in reports.
      reduce: `(state, bucket) -> (state, bucket)`, pure: the bucket that it returns
        holds the sum of all replicas' buffers, or an approximation, with the same shape
        and dtype, the same on all replicas. The state is this replica's, for this
        bucket.
      init: Maps a bucket (zeros, before the first step) to the first state; None if
        the hook is stateless.
    """

    name: str
    reduce: Callable[[PyTree, Bucket], tuple[PyTree, Bucket]]
    init: Callable[[Bucket], Any] | None = None

    def start(self, bucket: Bucket) -> PyTree:
        """The state before the first step, `()` without `init`."""
        return () if self.init is None else self.init(bucket)


def flatten(arrays: Sequence[jax.Array]) -> jax.Array:
    """Arrays of one dtype in one flat buffer."""
    flat = [x.reshape(-1) for x in arrays]
    # A concatenation of one array would still be a copy.
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def split(buffer: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """The inverse of `flatten`."""
    pieces, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        pieces.append(jax.lax.slice(buffer, (start,), (end,)).reshape(shape))
        start = end
    return pieces


def require_real(name: str, bucket: Bucket) -> None:
    """Checks that a bucket has real gradients.

    Raises:
      TypeError: It is one.
    """
    if jnp.iscomplexobj(bucket.buffer):
        got = f"{bucket.buffer.dtype} at {bucket.paths[0]}"
        raise type_error(f"hooks.{name}", "must be used with real gradients", got)


def check_hook(argument: str, given: object) -> None:
    """Checks that an argument is a `Hook`, as those of `data_parallel.hooks`.

    Raises:
      TypeError: It is anything else, such as a function that makes one.
    """
    rule = "must be a hook, such as data_parallel.hooks.bf16()"
    check_type(argument, given, Hook, rule)


def all_reduce() -> Hook:
    """Sums each bucket by one all-reduce, without loss.

    Gives the same gradient, up to rounding, as no hook. Other hooks are compared with
    it, and are composed with it.

    References:
      `torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook`.
    """

    def reduce(state: PyTree, bucket: Bucket) -> tuple[PyTree, Bucket]:
        return state, bucket.replaced(summed(bucket.buffer, bucket.axis_name))

    return Hook("all_reduce", reduce)


def error_feedback(hook: Hook) -> Hook:
    """Adds the error of `hook` on each replica to its gradient of the next step.

        given_i  = share_i + error_i                replica i's input to the inner hook
        error_i <- given_i - sent_i                 the part that did not reach the sum

    Summed over replicas and over steps 1 .. T only the last error is missing:

        sum_t result_t  =  sum_t gradient_t  -  sum_i error_i(T)

    for any inner hook. If its errors stay bounded, the mean over steps is therefore the
    mean of the gradients.

    Args:
      hook: A lossy hook that says what it sent (`Bucket.sent`), as all hooks here do.

    References:
      Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et
      al., Error feedback fixes SignSGD, ICML 2019.
    """

    check_hook("error_feedback(hook)", hook)

    def init(bucket: Bucket) -> PyTree:
        return hook.start(bucket), jnp.zeros_like(bucket.buffer)

    def reduce(state: PyTree, bucket: Bucket) -> tuple[PyTree, Bucket]:
        inner, error = state
        given = bucket.replaced(bucket.buffer + error)
        inner, result = hook.reduce(inner, given)
        # A hook that does not say what it sent has sent all of it.
        sent = given.buffer if result.sent is None else result.sent
        return (inner, given.buffer - sent), bucket.replaced(result.buffer, sent)

    return Hook(f"error_feedback({hook.name})", reduce, init)
