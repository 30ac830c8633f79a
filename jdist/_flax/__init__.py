"""Flax NNX modules as pytrees and pure functions, without a dependency on Flax.

A module is an object that changes when it is called. All that jdist knows of Flax
stands here; its parts decide what they make of it.

- `modules`: a module split into parts, put together again, and called.
- `streams`: random streams, restarted from a key; which calls draw from them.
- `variables`: Flax, if the program has imported it; what is a module; the variables of
  a module or of a tree, by path.
"""

from jdist._flax.modules import ModuleParts, code_of, put_together, run, taken_apart
from jdist._flax.streams import RandomStreams, may_draw
from jdist._flax.variables import (
    check_module,
    is_module,
    loaded,
    module_leaves,
    other_variables,
    parameters,
)
