"""How a device rounds the operands of float32 products.

Recent GPUs round them to TF32 and TPUs to bfloat16, unless the precision of the product
says otherwise; no program shows it. So one product is run on the device: of numbers
with an identity matrix, whose results are the numbers as they were rounded. What holds
for it is taken to hold for every product and convolution of the same precision: a
device may choose another kernel for another shape, and the judge must not depend on
which one it chooses for an example alone.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jdist._compat import equations_in

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})

# Rows and columns of the matrix: enough that GPUs use their matrix units.
SIZE = 256

# Bits behind the leading one of a float32 number.
STORED = 23

_NAMES = {10: "TF32", 7: "bfloat16"}


def kept_bits(equation: JaxprEqn) -> int | None:
    """How many bits behind the leading one a product keeps of its operands.

    Returns:
      The number; None if it keeps all, or if the equation is no product of float32.
    """
    if equation.primitive.name not in PRODUCTS:
        return None
    operands: list[Any] = [x.aval for x in equation.invars]
    if any(x.dtype not in (jnp.float32, jnp.complex64) for x in operands):
        return None
    config: Any = jax.config
    where = jax.default_backend(), config.jax_default_device
    return _kept(equation.params["precision"], where)


def rounding_note(*programs: ClosedJaxpr) -> tuple[str, ...]:
    """A sentence on programs whose products round their operands; none without."""
    kept = [kept_bits(x) for program in programs for x in equations_in(program)]
    found = [bits for bits in kept if bits is not None]
    if not found:
        return ()
    least = min(found)
    name = f" ({_NAMES[least]})" if least in _NAMES else ""
    return (
        f"this device rounds float32 operands of products to {least + 1} bits{name}, "
        "and so may a right program: the bound is as much wider. Under "
        'jax.default_matmul_precision("highest") smaller faults are seen',
    )


@functools.cache
def _kept(precision: Any, where: tuple[str, Any]) -> int | None:
    """Measures it on the default device."""
    drawn = np.random.default_rng(7).uniform(1, 2, (SIZE, SIZE))
    given, identity = drawn.astype(np.float32), np.eye(SIZE, dtype=np.float32)
    # The caller may be tracing a program.
    with jax.ensure_compile_time_eval():
        product = jax.jit(functools.partial(jnp.dot, precision=precision))
        found = np.asarray(product(given, identity), np.float64)
    error = float(np.max(np.abs(found / given.astype(np.float64) - 1)))
    if error == 0:
        return None
    # Rounded to nearest, a number at 1 is off by half of its last bit.
    bits = math.floor(-math.log2(error)) - 1
    return bits if bits < STORED else None
