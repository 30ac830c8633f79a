"""Runs an optimizer of jdist over a problem, and keeps what it goes through."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Run:
    """Parameters and state after each step: per step a list of leaves.

    `states[t][leaf]` is a dict by torch's names, without None and without `step`
    where torch has none.
    """

    params: list
    states: list


def run(opt, problem, dtype, overrides=None, *, compiled=False):
    """All steps; `overrides[t]` go into step t.

    Not compiled unless said: compiling for each None pattern takes longer than fifty
    steps of small arrays.
    """
    params = [jnp.asarray(p, dtype) for p in problem.params]
    state = opt.init(params)
    step = jax.jit(opt.step) if compiled else opt.step
    seen = Run([], [])
    for t, row in enumerate(problem.grads):
        grads = [None if g is None else jnp.asarray(g, dtype) for g in row]
        extra = {} if overrides is None else overrides[t]
        params, state = step(params, grads, state, **extra)
        seen.params.append([np.asarray(p) for p in params])
        seen.states.append([as_dict(leaf) for leaf in state])
    return seen


def as_dict(leaf_state):
    """A leaf's NamedTuple by torch's names, as NumPy arrays."""
    return {
        name: np.asarray(value)
        for name, value in leaf_state._asdict().items()
        if value is not None
    }


def largest(arrays):
    """The largest magnitude in a list of arrays, NaN left out."""
    return max(float(np.nanmax(np.abs(a), initial=0.0)) for a in arrays)
