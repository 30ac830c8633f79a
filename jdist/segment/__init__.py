"""A pure function compiled once into a forward and a backward half.

    seg = segment(fn)                                  # fn(params, *inputs) -> outputs
    outputs, residuals = seg.forward(params, *inputs)
    d_params, d_inputs = seg.backward(params, residuals, d_outputs)

Distributed autograd and pipelines are built on it: both run forward and backward passes
at different places and times, with many calls in flight. `jax.vjp` under `jax.jit` also
yields two halves, but its residuals include the weights, or values computed from them,
once for each call in flight; its pull-back cannot be split; and a lambda written in a
loop is compiled in every iteration.

- `_programs`: the traced program of a function, cut into forward and backward programs.
- `_lookup`: compiled functions found again, by identity or by program.
- `_residuals`, `_segment`: the values that pass between the halves; the compiled
  halves, and `segment` itself.
- `internal`: further names for the other packages of jdist.
"""

from jdist.segment._lookup.cache import RecompilationWarning
from jdist.segment._residuals import Residuals, Rest
from jdist.segment._segment import Fold, LoweredHalves, Segment, segment

__all__ = [
    "Fold",
    "LoweredHalves",
    "RecompilationWarning",
    "Residuals",
    "Rest",
    "Segment",
    "segment",
]


def __dir__() -> list[str]:
    return __all__
