"""How far two correct implementations of one formula may be apart.

The gradients of a `cases.Problem` are given, not computed from the parameters, so that
rounding errors add up but do not feed on each other. With u the rounding unit, half of
the spacing relative to a number, and N steps:

- A moment or buffer is a sum of at most N terms and has at most 4 roundings a step, in
  each of the two implementations: they differ by at most 2 * 4 N u times its largest
  magnitude on the way.
- A parameter is rounded once a step, by u |p|, in each; and each of its updates, made
  of such moments, is off by at most 8 N u of its size. The updates' sizes add up.
- Centered RMSprop divides by the root of s - a^2. Relative to that difference, the
  errors of its two terms are larger by s / (s - a^2): all of the above times this. A
  gradient that hardly changes makes the difference pure rounding, in torch as here, and
  then nothing can be compared: the bound is infinite.

For float64 the issue's 1e-12 of the largest magnitude is used, which is stricter than
that in all cases but one: bias corrections. torch computes 1 - beta**t with an error of
u / (1 - beta**t), which is 1e-13 for beta = 0.999 at t = 1.
"""

from itertools import pairwise

import numpy as np

from tests.optim.runs import largest

FLOAT64 = 1e-12
UNIT = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
}


def of_param(seen, leaf, dtype, start):
    """For one parameter over a whole run that began at `start`."""
    path = [start, *(row[leaf] for row in seen.params)]
    amplified = amplification([row[leaf] for row in seen.states], dtype)
    if dtype == "float64":
        return amplified * FLOAT64 * largest(path)
    steps = len(seen.params)
    moved = sum(largest([np.subtract(new, old)]) for old, new in pairwise(path))
    return amplified * UNIT[dtype] * 2 * (steps * largest(path) + 4 * steps * moved)


def of_state(seen, leaf, name, dtype):
    """For one array of a parameter's state over a whole run."""
    values = [row[leaf][name] for row in seen.states if name in row[leaf]]
    amplified = amplification([row[leaf] for row in seen.states], dtype)
    if dtype == "float64":
        return amplified * FLOAT64 * largest(values)
    return amplified * UNIT[dtype] * 8 * len(seen.params) * largest(values)


def amplification(states, dtype):
    """s / (s - a^2) of centered RMSprop, at its worst over a leaf and its steps."""
    worst = 1.0
    for state in states:
        if "grad_avg" not in state or not np.any(state["square_avg"]):
            continue
        square = np.asarray(state["square_avg"], np.float64)
        left = square - np.asarray(state["grad_avg"], np.float64) ** 2
        if not np.all(left > 100 * UNIT[dtype] * square):
            return np.inf
        worst = max(worst, float(np.max(square / left)))
    return worst
