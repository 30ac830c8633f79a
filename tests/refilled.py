"""A loader that fills one buffer again for each batch, as fast loaders do."""

from collections.abc import Iterator

import numpy as np

ALIGNED, UNALIGNED = 0, 16
"""Offsets of a buffer from a multiple of 64 bytes: JAX uses the first in place."""


def buffer(shape: tuple[int, ...], offset: int) -> np.ndarray:
    """An array of float32 that begins `offset` bytes after a multiple of 64."""
    size = 4 * int(np.prod(shape))
    memory = np.zeros(size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + size].view(np.float32).reshape(shape)


def refilled(
    rows: np.ndarray, factors: np.ndarray, offset: int
) -> Iterator[np.ndarray]:
    """The rows times each factor, one after another in the same buffer."""
    memory = buffer(rows.shape, offset)
    for factor in factors:
        yield np.multiply(rows, factor, out=memory)
    # A loader may give its memory away when it ends.
    memory[...] = np.nan
