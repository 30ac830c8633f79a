"""How the judge's own programs are compiled: most run once or a few times."""

import functools
import math
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jdist._compat import equations_in

# The entries of the largest value where XLA's code is not worth optimizing.
TINY = 2**16


def is_tiny(*programs: ClosedJaxpr) -> bool:
    """Whether no value that the programs compute has more than `TINY` entries."""
    made: list[Any] = [
        x.aval
        for program in programs
        for each in equations_in(program)
        for x in each.outvars
    ]
    return all(math.prod(getattr(x, "shape", ())) <= TINY for x in made)


@functools.cache
def quick_to_compile(tiny: bool) -> dict[str, Any]:
    """Options by which XLA compiles for a CPU in two thirds of the time, or less.

    A product is a library's, and the rest of a program is seldom slower for it at level
    1. Level 0 compiles sooner still, and takes twice as long where values are large.

    Args:
      tiny: Whether values have at most `TINY` entries.
    """
    wanted = {
        "xla_backend_optimization_level": int(not tiny),
        "xla_cpu_use_fusion_emitters": False,
    }
    return {k: x for k, x in wanted.items() if _takes({k: x})}


def _takes(options: dict[str, Any]) -> bool:
    if jax.default_backend() != "cpu":
        return False
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:  # Another version of XLA has others.
        return False
    return True
