"""The traced program of a function, cut into a forward and a backward program.

- `min_cut`: the cheapest set of values from which others can be recomputed.
- `recompute`: which equations may run again, and which values depend on which.
- `loops`: the cut inside the body of a loop.
- `plan`: the forward program, and what it keeps.
- `backward`: the backward program for one pattern of absent cotangents.
- `split`: the backward program in two halves.
"""

__all__: list[str] = []
