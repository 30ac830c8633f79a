"""Buckets in 8-bit integers with a scale: a quarter of the bytes.

The numbers of a channel, from low = min(x, 0) to high = max(x, 0), are laid on 256
levels, one of which is exactly 0:

    scale = (high - low) / 255      zero = round(-low / scale)
    q     = clip(round(x / scale) + zero, 0, 255)        x ~ scale (q - zero)

Scales differ between replicas, so the integers cannot be summed by the collective: they
are gathered, K times n bytes on every replica, and added in rank order. The error of
each replica is at most half a step, hence per element

    |error|  <=  sum_i scale_i / 2        (and the rounding of the sum)

The share of a replica without examples is 0 and so is its error. A share with NaN or
infinity makes its channel NaN.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdist._errors import check_at_least
from jdist._tree import PyTree, wide_dtype
from jdist.data_parallel.hooks.hook import Bucket, Hook, require_real
from jdist.data_parallel.replicas.mapping import gathered

LEVELS = 255


class _Quantized(NamedTuple):
    """Channels in integers; the first axis is the channel."""

    levels: jax.Array
    scale: jax.Array
    zero: jax.Array


def int8_per_tensor() -> Hook:
    """Quantizes each bucket with one scale.

    The largest number in a bucket sets the step for all others in it.

    References:
      `torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks
      .quantization_pertensor_hook`, which does not go below a scale of 1.2e-7: there
      gradients of that size are lost; here they are not.
    """
    return _quantizing("int8_per_tensor", None)


def int8_per_channel(channel: int = 512) -> Hook:
    """Quantizes runs of `channel` numbers of a bucket with a scale each.

    Args:
      channel: Numbers that share a scale; 5 bytes more are sent for each run.

    Raises:
      ValueError: `channel` is below 1.

    References:
      `torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks
      .quantization_perchannel_hook`.
    """
    check_at_least("int8_per_channel(channel=...)", channel, 1)
    return _quantizing("int8_per_channel", channel)


def _quantizing(name: str, channel: int | None) -> Hook:
    def reduce(state: PyTree, bucket: Bucket) -> tuple[PyTree, Bucket]:
        require_real(name, bucket)
        size, dtype = bucket.buffer.size, bucket.buffer.dtype
        # Never 0, also for an empty bucket: the buffer is divided into rows of it.
        width = channel or max(size, 1)
        # The range of a float16 channel may overflow float16, and so may the sum.
        wide = bucket.buffer.astype(wide_dtype(dtype))
        # Zeros change the range of no channel: 0 is always within it.
        padded = jnp.pad(wide, (0, -size % width)).reshape(-1, width)
        packed = _quantize(padded)
        rows = gathered(_to_bytes(packed), bucket.axis_name)
        total = jnp.zeros_like(padded)
        # In rank order, so that all replicas add the same numbers in the same order.
        for rank in range(bucket.replicas):
            own = _from_bytes(rows[rank], packed)
            total += _dequantize(own).astype(total.dtype)
        sent = _dequantize(packed).astype(total.dtype)
        flat = (x.reshape(-1)[:size].astype(dtype) for x in (total, sent))
        return state, bucket.replaced(*flat)

    return Hook(name, reduce)


def _quantize(channels: jax.Array) -> _Quantized:
    low = jnp.minimum(jnp.min(channels, axis=1), 0)
    high = jnp.maximum(jnp.max(channels, axis=1), 0)
    # float32 whatever is quantized: `_from_bytes` reads four bytes for each.
    scale = ((high - low) / LEVELS).astype(jnp.float32)
    # A channel of zeros would divide by 0; any scale represents it exactly.
    scale = jnp.where(scale == 0, 1, scale)
    # On CPU XLA's extremes of the rows of a matrix can miss a NaN.
    scale = jnp.where(jnp.all(jnp.isfinite(channels), axis=1), scale, jnp.nan)
    step = scale.astype(channels.dtype)
    zero = jnp.round(-low / step)
    levels = jnp.round(channels / step[:, None]) + zero[:, None]
    levels = jnp.clip(levels, 0, LEVELS).astype(jnp.uint8)
    # `zero` fits a byte, since low <= 0 <= high.
    return _Quantized(levels, scale, zero.astype(jnp.uint8))


def _dequantize(packed: _Quantized) -> jax.Array:
    zero = packed.zero.astype(jnp.float32)[:, None]
    return packed.scale[:, None] * (packed.levels.astype(jnp.float32) - zero)


def _to_bytes(packed: _Quantized) -> jax.Array:
    """One flat buffer, so that levels and scales travel in one collective."""
    scale = jax.lax.bitcast_convert_type(packed.scale, jnp.uint8)
    parts = (packed.levels, scale, packed.zero)
    return jnp.concatenate([part.reshape(-1) for part in parts])


def _from_bytes(flat: jax.Array, like: _Quantized) -> _Quantized:
    channels = like.scale.size
    levels, scale, zero = jnp.split(flat, [like.levels.size, flat.size - channels])
    floats = jax.lax.bitcast_convert_type(scale.reshape(channels, 4), jnp.float32)
    return _Quantized(levels.reshape(like.levels.shape), floats, zero)
