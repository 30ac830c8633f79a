"""Error feedback: the error of a lossy hook is added to the next gradient.

    given_i  = share_i + error_i                replica i's input to the inner hook
    error_i <- given_i - sent_i                 the part that did not reach the sum

Summed over replicas and over steps 1 .. T only the last error is missing:

    sum_t result_t  =  sum_t gradient_t  -  sum_i error_i(T)

for any inner hook. If its errors stay bounded, the mean over steps is therefore the
mean of the gradients.
"""

import jax.numpy as jnp

from jdist._tree import PyTree
from jdist.data_parallel.hooks.hook import Bucket, Hook, check_hook


def error_feedback(hook: Hook) -> Hook:
    """Adds the error of `hook` on each replica to its gradient of the next step.

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
