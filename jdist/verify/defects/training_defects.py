"""Defects of an optimizer's step: its size, its count, its state, its clipping."""

import jax
import jax.numpy as jnp
import numpy as np

from jdist._tree import PyTree, is_inexact, named_leaves
from jdist.verify.defects.defect import Defect, declared
from jdist.verify.defects.leaf_defects import clipped_by_leaf
from jdist.verify.defects.step_call import (
    NoEffect,
    NotApplicable,
    StepCall,
    combined,
    like,
    with_leaf,
)

TRAINING_DEFECTS: list[Defect] = []
_training = declared(TRAINING_DEFECTS, "training")


@_training("learning rate times 1.001")
def _slightly_larger(call: StepCall) -> PyTree:
    """The step of all parameters is multiplied by 1.001."""
    return _learning_rate(1.001, call)


@_training("learning rate times 1.1")
def _larger(call: StepCall) -> PyTree:
    """The step of all parameters is multiplied by 1.1."""
    return _learning_rate(1.1, call)


def _learning_rate(factor: float, call: StepCall) -> PyTree:
    params, state = call.right
    # old + factor (new - old), rounded once.
    return combined([factor, 1 - factor], [params, call.arguments[0]]), state


@_training("count off by one", "a number in the state that a step adds 1 to")
def _count_off_by_one(call: StepCall) -> PyTree:
    """The optimizer computes with a count that is 1 too high."""
    params, old, *rest = call.arguments
    before, after = named_leaves(old), named_leaves(call.right[1])
    counts = [path for path in before if _counted(before[path], after.get(path))]
    if not counts:
        raise NotApplicable("the optimizer's state has no count that a step adds 1 to")
    for path in counts:
        old = with_leaf(old, path, like(before[path], np.asarray(before[path]) + 1))
    found, state = call.step(params, old, *rest)
    for path in counts:
        # The returned counts are right, so that only the update shows the mistake.
        state = with_leaf(state, path, after[path])
    return found, state


def _counted(old: PyTree, new: PyTree) -> bool:
    """Whether a leaf is a number to which the step adds 1."""
    if old is None or new is None or np.ndim(old) or not hasattr(old, "dtype"):
        return False
    # Some optimizers count in floating point.
    real = is_inexact(old) or np.issubdtype(old.dtype, np.integer)
    return bool(real and np.asarray(new) == np.asarray(old) + 1)


@_training("state not kept", "a state that a step changes")
def _state_lost(call: StepCall) -> PyTree:
    """The optimizer's state is returned as it was, so that momentum is lost."""
    return call.right[0], call.arguments[1]


@_training("state in bfloat16", "a state of floats of more than 16 bits")
def _sixteen_bit_state(call: StepCall) -> PyTree:
    """The optimizer's state is rounded to bfloat16 after each step."""
    params, state = call.right
    own = jax.tree.leaves(state)
    if not any(is_inexact(x) and jnp.finfo(x.dtype).bits > 16 for x in own):
        raise NotApplicable("the optimizer's state has no floats of more than 16 bits")

    def rounded(leaf: PyTree) -> PyTree:
        # Numbers in bfloat16's precision, in the dtype that the step returns.
        return like(leaf, jnp.asarray(leaf, jnp.bfloat16)) if is_inexact(leaf) else leaf

    return params, jax.tree.map(rounded, state)


@_training("leaf left behind", "a step that moves a parameter")
def _leaf_left(call: StepCall) -> PyTree:
    """One parameter is not moved."""
    params, state = call.right
    before, after = named_leaves(call.arguments[0]), named_leaves(params)
    moved = [
        path
        for path, leaf in after.items()
        if leaf is not None and not np.array_equal(before[path], leaf)
    ]
    if not moved:
        raise NoEffect("no parameter moves")
    chosen = moved[call.choices.integers(len(moved))]
    return with_leaf(params, chosen, before[chosen]), state


@_training("step clipped leaf by leaf", "a leaf with more than half the step's norm")
def _clipped(call: StepCall) -> PyTree:
    """Each leaf's step is clipped to half the norm of the whole step by its own
    norm."""
    params, state = call.right
    old = call.arguments[0]
    # The step of this call alone is clipped: the optimizer's state stays right.
    taken = clipped_by_leaf(combined([1.0, -1.0], [params, old]))
    return combined([1.0, 1.0], [old, taken]), state
