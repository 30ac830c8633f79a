"""Checks that the arrays of a compiled step are alive and on its devices.

JAX refuses a program whose arrays are committed to different devices, and may end the
process where a donated buffer is used again. Both are checked before the program runs:
a donated array is refused by its path, and an array on other devices is moved if its
values mean the same there.

In most calls there is nothing to refuse or to move. `are_ready` finds that out in one
pass over the leaves; only otherwise do the checks look at them, which can name a leaf.
"""

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jdist._compat import ArrayImpl, is_traced
from jdist._errors import value_error
from jdist._tree import PyTree, check_arrays, is_shape, path_of
from jdist.data_parallel.replicas.mapping import EACH
from jdist.data_parallel.replicas.placement import Placement
from jdist.data_parallel.replicas.shards import Weights, rows_in, weights_given


def are_ready(tree: PyTree, mesh: Mesh | None) -> bool:
    """Whether a program can take all arrays as they are.

    If so, none is donated or deleted, those that are committed lie on the devices of
    the program, and nothing is a shape or no array at all. What else may be wrong with
    them follows from their shapes and dtypes.

    Args:
      tree: All arguments of the program. With replicas on one device the first
        committed array determines it.
      mesh: The devices; None for replicas on one device.
    """
    home = last = None
    # Nothing is remembered from call to call: one pass over the leaves costs no more
    # than a look-up with a key that is made of them.
    for leaf in jax.tree.leaves(tree):
        # The type first, because it is known in a seventh of the time.
        if type(leaf) is not ArrayImpl and not _is_array(leaf):
            # JAX itself places what is on the host.
            numbers = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcV"
            if not numbers and not is_traced(leaf):
                return False
        elif leaf.is_deleted():
            return False
        # The arrays that a program returns share few objects of shardings.
        elif (place := leaf.sharding) is not last and leaf.committed:
            last, devices = place, place.device_set
            if home is None:
                home = devices
            elif devices is not home and devices != home:
                return False
    return home is None or mesh is None or home == _devices_of(mesh)


def check_alive(argument: str, tree: PyTree) -> None:
    """Checks that no array was donated or deleted.

    Args:
      argument: Function and argument, such as `"step(state=...)"`.
      tree: What was given.

    Raises:
      ValueError: There are some, and the message names the first.
    """
    for keys, leaf in jax.tree.leaves_with_path(tree):
        if _is_array(leaf) and leaf.is_deleted():
            got = f"one at {path_of(keys)} whose buffer was donated or deleted"
            remedy = (
                "A step takes over the buffers of the state it is given: continue with "
                "the state that it returns, or give it a copy, "
                "`jax.tree.map(jnp.copy, state)`."
            )
            raise value_error(argument, "must hold arrays that are in use", got, remedy)


def check_place(argument: str, state: PyTree, placement: Placement) -> None:
    """Checks that a state is on the devices of the mesh.

    Args:
      argument: Function and argument, such as `"step(state=...)"`.
      state: What `init` or the last step returned.
      placement: The replicas. On one device they use that of their state.

    Raises:
      ValueError: A leaf lies elsewhere, and the message names the first.
    """
    place = _home(state) if placement.mesh is None else placement.whole
    for keys, leaf in jax.tree.leaves_with_path(state):
        if place is not None and _is_elsewhere(leaf, place):
            rule = f"must lie on the step's devices, {_listed(place)}"
            got = f"{path_of(keys)} on {_listed(leaf.sharding)}"
            remedy = (
                "Make it by `init` of this step; a state of other devices goes through "
                "`TrainCheckpoints`, which restores it like one of `init`."
            )
            raise value_error(argument, rule, got, remedy)


def brought(
    argument: str, placement: Placement, whole: PyTree, rows: PyTree
) -> tuple[PyTree, PyTree]:
    """Moves arrays that are committed to other devices to those of the program.

    Traced and uncommitted arrays are left to JAX. A shape gets the sharding that the
    array would be moved to.

    Args:
      argument: Function and argument, for the error's text.
      placement: The replicas. Where they share a device, it is that of the first
        committed array.
      whole: Arrays that each replica has whole, such as parameters.
      rows: Arrays divided over the replicas, such as a batch and its weights.

    Raises:
      ValueError: The mesh spans several processes, and an array is tied to devices of
        this one: it cannot be known to be the same in all.
    """
    if placement.mesh is None:
        home = _home((whole, rows))
        return (whole, rows) if home is None else _moved((whole, rows), home, argument)
    return (
        _moved(whole, placement.whole, argument),
        _moved(rows, placement.rows, argument),
    )


def prepared(
    call: str,
    placement: Placement,
    state: PyTree,
    batch: PyTree,
    weights: Weights,
    *,
    divisor: int,
    reduction: str,
) -> tuple[PyTree, PyTree]:
    """A batch and its weights, checked, on the devices of a step's program.

    Args:
      call: The function, for the error's text.
      placement: The replicas.
      state: What `init` or the last step returned; it stays where it is.
      batch: The batch.
      weights: Its weights, or None.
      divisor: The number of a batch's rows must be a multiple of it.
      reduction: The reduction of the step.

    Raises:
      TypeError: The batch is no pytree of arrays.
      ValueError: An array was donated; the state lies on other devices; and what
        `rows_in`, `weights_given` and `brought` refuse.
    """
    count = rows_in(call, batch, divisor)
    weights = weights_given(call, batch, weights, count, reduction)
    if are_ready((state, batch, weights), placement.mesh):
        return batch, weights
    argument = f"{call}(batch=...)"
    check_arrays(argument, batch)
    check_alive(f"{call}(state=...)", state)
    check_alive(argument, (batch, weights))
    check_place(f"{call}(state=...)", state, placement)
    _, given = brought(argument, placement, state, (batch, weights))
    return given


def _moved(tree: PyTree, place: Any, argument: str) -> PyTree:
    # With shapes, the devices may be absent: no program is run, but one is lowered.
    is_lowered = any(map(is_shape, jax.tree.leaves(tree)))

    def moved(leaf: Any) -> Any:
        if is_shape(leaf):
            kept = leaf.sharding
            stays = kept is not None and kept.device_set == place.device_set
            return leaf if stays else leaf.update(sharding=place)
        if is_lowered or not _is_elsewhere(leaf, place):
            return leaf
        if not place.is_fully_addressable:  # `device_put` would need all processes.
            rule = "must be arrays over the devices of all processes, or of none"
            remedy = "Use `shard_batch` for batches and `replicate` for parameters."
            raise value_error(argument, rule, "arrays of this one", remedy)
        return jax.device_put(leaf, place)

    return jax.tree.map(moved, tree)


def _home(tree: PyTree) -> PyTree:
    """The sharding of the first committed array; None if there is none."""
    for leaf in jax.tree.leaves(tree):
        if _is_tied(leaf):
            place = leaf.sharding
            is_named = isinstance(place, NamedSharding)
            # Without its spec, which fits arrays of its own rank only.
            return NamedSharding(place.mesh, EACH) if is_named else place
    return None


@lru_cache(maxsize=16)
def _devices_of(mesh: Mesh) -> set[jax.Device]:
    return NamedSharding(mesh, EACH).device_set


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and not is_traced(leaf)


def _is_tied(leaf: Any) -> bool:
    # JAX itself moves arrays that are not committed to a device.
    return _is_array(leaf) and leaf.committed


def _is_elsewhere(leaf: Any, place: Any) -> bool:
    # Devices only: the program changes the layout as it needs.
    return _is_tied(leaf) and leaf.sharding.device_set != place.device_set


def _listed(place: Any) -> str:
    return ", ".join(sorted(map(str, place.device_set)))
