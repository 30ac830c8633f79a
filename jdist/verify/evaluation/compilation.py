"""How the judge's own programs are compiled: most run once or a few times."""

import functools
from typing import Any

import jax

# The entries of the largest value where XLA's code is not worth optimizing.
TINY = 2**16


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
