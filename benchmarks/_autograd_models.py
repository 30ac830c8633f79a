"""The jobs that both contenders of the autograd benchmark do, and their numbers."""

import numpy as np

ECHO = "rpc_sync of a 3 x 3 array, which comes back"
EXAMPLE = "example (iv): t5 = mul(remote add(t1, t2), t4), forward and backward"
FAST, SMART = f"{EXAMPLE}, FAST", f"{EXAMPLE}, SMART"
COMPILED = f"{SMART}, mul and sum as one segment"
END_TO_END = "end-to-end script: two processes at once, two remote variables, a step"
CHAIN = "three workers, a linear layer of 2000 x 2000 each, 64 rows, and back"
WIDTH, ROWS = 2000, 64
RATE = 0.05


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Random float32 numbers, scaled so that a product with them keeps its size."""
    values = np.random.default_rng(seed).normal(size=shape)
    return (values / np.sqrt(shape[0])).astype(np.float32)


def small(seed: int) -> np.ndarray:
    """A random 3 x 3 array."""
    return numbers(seed, 3, 3)
