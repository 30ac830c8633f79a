"""A pure function compiled once into a forward and a backward half.

    seg = segment(fn)                                  # fn(params, *inputs) -> outputs
    outputs, residuals = seg.forward(params, *inputs)
    d_params, d_inputs = seg.backward(params, residuals, d_outputs)

It is the atom of distributed autograd and of pipelines: both run forward passes in one
place and time, backward passes in another, and have many in flight. `jax.vjp` under
`jax.jit` gives the two halves too, but what it carries from one to the other includes
the weights, or what is made of them, once for each call in flight; its pull-back is one
piece; and a lambda written in a loop compiles each time.

- `_plan`: what is kept, decided on the traced program. `_cut`: the minimum cut behind
  it. `_repeat`: what may be computed again. `_flow`: what depends on what. `_loops`:
  the same cut inside the body of a loop.
- `_backward`: the backward program for one pattern of absent cotangents. `_split`: its
  two halves. `_deferred`: weight gradients for many calls at once.
- `_passing`: backward passes that compute nothing.
- `_traced`: a function by its programs, of one version of what it reads. `_identity`:
  a program as a key.
- `_cache`: what is compiled, by contents and by program. `_contents`: what a function
  is made of. `_reads`: what its code can read.
- `_halves`, `_residuals`, `_segment`: the compiled functions, what passes between them,
  and the public face.
"""

from jdist.segment._lookup.cache import RecompilationWarning as RecompilationWarning
from jdist.segment._residuals import Deferred as Deferred
from jdist.segment._residuals import Residuals as Residuals
from jdist.segment._residuals import Rest as Rest
from jdist.segment._segment import Segment as Segment
from jdist.segment._segment import segment as segment
