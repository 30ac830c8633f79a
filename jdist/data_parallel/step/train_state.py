"""The state of a training run: everything that lasts from one step to the next.

One tree, so that it is saved and restored as a whole, and a run repeats bit for bit.
"""

from typing import NamedTuple

import jax

from jdist._tree import PyTree


class TrainState(NamedTuple):
    """The values that one step passes to the next; made by `TrainStep.init`."""

    step: jax.Array
    """Steps taken, int32 scalar."""

    params: PyTree
    """The parameters, the same on every replica."""

    opt_state: PyTree
    """The optimizer's state."""

    states: PyTree = None
    """State that no gradient reaches, such as batch-norm statistics, or None."""

    key: jax.Array | None = None
    """The PRNG key of the whole run, which does not change, or None."""

    hook_state: PyTree = None
    """State of the communication hook, one row for each replica, or None. As read by
    `TrainCheckpoints.restore`, it is a dict by path: its structure is the step's."""
