"""Sums of buckets in a 16-bit type: half the bytes.

Each share is rounded once, and the sum of K of them at most K - 1 times, each time by
at most u of a partial sum's magnitude. With S = sum_i |share_i|, per element,

    |error|  <=  ((1 + u)^K - 1) S + K tiny       u = 2^-11 (float16), 2^-8 (bfloat16)

where tiny is half the smallest subnormal number, the error of a share near zero.

Error feedback sees the rounding of the shares, but not that of the sum.

XLA's CPU backend computes bfloat16 in float32, collectives included: there `bf16`
rounds the shares but saves no bytes. float16 is sent in 16 bits.
"""

from typing import Any

import jax.numpy as jnp

from jdist._tree import PyTree
from jdist.data_parallel.hooks.hook import (
    Bucket,
    Hook,
    all_reduce,
    check_hook,
    require_real,
)


def fp16(hook: Hook | None = None) -> Hook:
    """Compresses buckets to float16: 11 bits of precision, magnitudes 6e-8 to 65504.

    Shares are weighted before they are cast, so that their sum overflows only where
    the batch's gradient does. That takes a mean: the "sum" over a large batch can be
    beyond 65504, which gives infinity.

    Args:
      hook: Sums the compressed buckets; None for a plain all-reduce.

    References:
      `torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook`
      and `fp16_compress_wrapper`.
    """
    return _cast("fp16", jnp.float16, hook)


def bf16(hook: Hook | None = None) -> Hook:
    """Compresses buckets to bfloat16: 8 bits of precision, the range of float32.

    Args:
      hook: Sums the compressed buckets; None for a plain all-reduce.

    References:
      `torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook`
      and `bf16_compress_wrapper`.
    """
    return _cast("bf16", jnp.bfloat16, hook)


def _cast(name: str, dtype: Any, hook: Hook | None) -> Hook:
    if hook is not None:
        check_hook(f"{name}(hook)", hook)
    inner = hook or all_reduce()

    def narrow(bucket: Bucket) -> Bucket:
        # A cast to a real dtype would drop imaginary parts.
        require_real(name, bucket)
        return bucket.replaced(bucket.buffer.astype(dtype))

    def reduce(state: PyTree, bucket: Bucket) -> tuple[PyTree, Bucket]:
        given = narrow(bucket)
        state, result = inner.reduce(state, given)
        # What reaches the sum is the rounded share; error feedback keeps the rest.
        sent = given.buffer if result.sent is None else result.sent
        wide = bucket.buffer.dtype
        return state, bucket.replaced(result.buffer.astype(wide), sent.astype(wide))

    init = inner.init
    return Hook(
        name if hook is None else f"{name}({hook.name})",
        reduce,
        # The inner hook keeps state in the dtype of the buckets that it is given.
        None if init is None else lambda bucket: init(narrow(bucket)),
    )
