"""Calls of candidates, and what excuses a candidate whose values are wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jdist._tree import PyTree
from jdist.verify.bound import Limit, in_double
from jdist.verify.draws import draws_nothing, draws_of_its_own, split_dependent
from jdist.verify.processes.one_device import as_the_caller
from jdist.verify.processes.peers import Peers
from jdist.verify.processes.shards import held

OWN_DRAWS = (
    "it draws random numbers and the loss draws none. Switch them off, or judge it by "
    "the loss that draws them, with a key for each example: verify.keyed(loss_fn)"
)
CHANGES = (
    "three calls with the same arguments gave three answers: it draws random numbers "
    "of its own, or keeps something from call to call. Give each example a key of its "
    "own in the batch: verify.keyed(loss_fn), docs/verify.md, Random numbers"
)

ADDS = (
    "further calls with the same arguments add the same each: it keeps something from "
    "call to call, such as gradients that are not set to zero"
)

# How often a failing candidate is called, to see whether it repeats itself.
CALLS = 3

# By how many bounds a value changes that random numbers do not change twice alike.
CLEAR = 100


def called(
    call: str,
    name: str,
    candidate: Callable[..., Any],
    arguments: Sequence[PyTree],
) -> Any:
    """The result of a candidate on copies of its arguments, under the caller's mesh."""
    with as_the_caller():
        try:
            return candidate(*_lent(arguments))
        except Exception as error:
            error.add_note(f"raised by the candidate {name!r} of verify.{call}")
            raise


def _lent(arguments: Sequence[PyTree]) -> Sequence[PyTree]:
    """Copies of arrays, which a candidate may donate or overwrite."""
    # NumPy's too: the reference is measured again, on what was given.
    kinds = jax.Array | np.ndarray
    return jax.tree.map(lambda x: x.copy() if isinstance(x, kinds) else x, arguments)


def copied(leaf: Any) -> ArrayLike:
    """A result as it is now: the next call may overwrite the buffer that it lies in."""
    # A tensor of torch, which may require a gradient and lie on any device.
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
        # NumPy has no bfloat16, and by DLPack float64 may become float32.
        sixteen = str(leaf.dtype) == "torch.bfloat16"
        leaf = jnp.from_dlpack(leaf.contiguous()) if sixteen else leaf.numpy()
    # Arrays of JAX too: those by `from_dlpack` lie in another framework's buffers.
    if isinstance(leaf, jax.Array):
        return leaf.copy()
    return np.array(leaf) if hasattr(leaf, "__array__") else leaf


def excuse(
    name: str,
    candidate: Callable[..., object],
    arguments: Sequence[PyTree],
    drawn: tuple[Callable[..., PyTree], PyTree, PyTree],
    first: Mapping[str, PyTree],
    again: Callable[[], Mapping[str, PyTree]] | None,
    limits: Mapping[str, Limit | None],
    peers: Peers,
) -> tuple[str, tuple[str, ...]]:
    """The reason why wrong values are not judged, or an empty one, and notes.

    Args:
      name: The candidate's name.
      candidate: The candidate.
      arguments: The arguments of its call.
      drawn: The function whose random numbers count, and its arguments.
      first: The leaves of the candidate's result.
      again: Those of another call; None if it is known to keep state from call to call.
      limits: The limits of its leaves.
      peers: The processes that judge it.
    """
    if split := split_dependent(*drawn):
        return split, ()
    still = draws_nothing(*drawn)
    # None where it cannot be seen.
    with as_the_caller():
        draws = still and draws_of_its_own(candidate, *arguments)
    if draws:
        return OWN_DRAWS, ()
    # Every call has to differ: a candidate that returns a cached result is wrong.
    answers, differ = [first], again is not None
    while again and differ and len(answers) < CALLS:
        answers.append(again())
        # Each process sees its own shards only.
        differ = all(peers.exchange(_apart(answers[-2], answers[-1], limits)))
    if differ:
        # Over several processes no host has whole leaves.
        if peers.size == 1 and _adds_up(answers, limits):
            return "", (f"{name}: {ADDS}",)
        return CHANGES, ()
    if draws is not None:
        return "", ()
    return "", (
        f"{name}: whether it draws random numbers of its own, such as dropout masks, "
        f"cannot be seen. Switch them off: the loss draws none",
    )


def _apart(
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    limits: Mapping[str, Limit | None],
) -> bool:
    """Whether two results differ by more than rounding in this process's shards."""
    for path, limit in limits.items():
        if limit is None or one.get(path) is None or other.get(path) is None:
            continue
        a, b = held(one[path]), held(other[path])
        if a.shape != b.shape:
            return True
        allowed = np.broadcast_to(limit.bound, a.shape)
        for x, y in zip(a.shards, b.shards, strict=True):
            # NumPy would subtract 16-bit values in 16 bits.
            wide = np.result_type(allowed, x.values.dtype)
            # inf - inf is NaN, which is no change.
            with np.errstate(invalid="ignore"):
                difference = np.abs(x.values.astype(wide) - y.values.astype(wide))
            if (difference > allowed[x.index]).any():
                return True
    return False


def _adds_up(
    answers: Sequence[Mapping[str, Any]], limits: Mapping[str, Limit | None]
) -> bool:
    """Whether entries of a leaf change by the same twice, far more than by rounding."""
    for path, limit in limits.items():
        each = [in_double(x[path]) for x in answers if x.get(path) is not None]
        like = limit and {np.shape(limit.bound)}
        if limit is not None and len(each) == 3 and {x.shape for x in each} == like:
            one, two, three = each
            with np.errstate(invalid="ignore"):
                moved = np.abs(two - one) > CLEAR * limit.bound
                again = np.abs(three - 2 * two + one) <= 4 * limit.bound
            if moved.sum() > 1 and again[moved].all():
                return True
    return False
