"""A pure function compiled once into a forward and a backward half.

    seg = segment(fn)                                  # fn(params, *inputs) -> outputs
    outputs, residuals = seg.forward(params, *inputs)
    d_params, d_inputs = seg.backward(params, residuals, d_outputs)

It is the atom of distributed autograd and of pipelines: both run forward passes in one
place and time, backward passes in another, and have many in flight. `jax.vjp` under
`jax.jit` gives the two halves too, but what it carries from one to the other includes
the weights, or what is made of them, once for each call in flight; its pull-back is one
piece; and a lambda written in a loop compiles each time.

- `_programs`: the traced program of a function, cut into forward and backward programs.
- `_lookup`: compiled functions found again, by contents or by program.
- `_residuals`, `_segment`: what passes between the halves; the compiled halves, and
  `segment` itself.
- `internal`: what other parts of jdist may use besides.
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
