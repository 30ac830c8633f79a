"""Broadcast of initial values, after a comparison between processes.

Within one process there is only one tree of parameters. Another process may have been
started with other code, other data types or another seed. Trees are therefore compared
by structure, shapes and dtypes, and then replaced by replica 0's, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from jdist._compat import called_outside_mesh
from jdist._errors import value_error
from jdist._tree import (
    PyTree,
    check_arrays,
    described,
    first_difference,
    is_key,
    is_shape,
    merge,
    named_leaves,
    owned,
    unworded,
    words,
)
from jdist.data_parallel.replicas.layout import is_divided
from jdist.data_parallel.replicas.mapping import EACH
from jdist.data_parallel.replicas.placement import check_given


@called_outside_mesh
def replicate(
    tree: PyTree,
    mesh: Mesh | None = None,
    *,
    replicas: int | None = None,
    name: str = "params",
) -> PyTree:
    """Copies replica 0's values to every replica.

    With several processes each passes its own tree. They must agree in structure,
    shapes and dtypes, and process 0's goes to all. The copies are new buffers: they may
    be donated while the caller keeps `tree`.

    Args:
      tree: Pytree of arrays and numbers, this process's own. A leaf that lies whole on
        several devices already is taken from the first. One that is divided over them
        is one array of all processes, and stays divided. Or a pytree of shapes.
      mesh: The devices.
      replicas: In place of a mesh: a number of replicas that share one device.
      name: What the tree is, for the error.

    Returns:
      Tree of JAX arrays, replicated over the mesh or divided as they were; shapes for
      shapes.

    Raises:
      TypeError: A leaf is no array and no number; `mesh` is no mesh; or neither a mesh
        nor replicas are given.
      ValueError: Processes have trees of other structure, shapes or dtypes, and the
        message names the leaf and the process; or a mesh and replicas are given.

    Example:
      >>> import jax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> replicate({"w": 1.5}, mesh)["w"].sharding.is_fully_replicated
      True
    """
    check_given("replicate", mesh, replicas)
    return spread(tree, mesh, name)


def spread(tree: PyTree, mesh: Mesh | None, name: str) -> PyTree:
    """Copies replica 0's values to a mesh, or its device; see `replicate`."""
    check_arrays(f"replicate({name}=...)", tree)
    # `jnp.copy` reads an array of NumPy's after it has returned.
    tree = owned(tree)
    if any(map(is_shape, jax.tree.leaves(tree))):
        return jax.tree.map(lambda x: _shape_on(mesh, x), tree)
    divided = jax.tree.map(lambda x: x if is_divided(x) else None, tree)
    tree = jax.tree.map(lambda x: None if is_divided(x) else x, tree)
    # Copies: a step donates what it is given, and the caller keeps its own arrays.
    divided = jax.tree.map(jnp.copy, divided)
    own = jax.tree.map(_first_copy, tree)
    if jax.process_count() > 1:
        # Before the broadcast, which would hang or fail without a path if trees differ.
        _check_processes(own, name)
        own = _from_process_0(own)
    if mesh is None:
        return merge(jax.tree.map(jnp.copy, own), divided)
    place = NamedSharding(mesh, EACH)
    # A placed array may share memory with its source on one of the devices.
    whole = jax.tree.map(lambda x: jnp.copy(_placed(x, place)), own)
    return merge(whole, divided)


def description(tree: PyTree) -> dict[str, str]:
    """Descriptions of all leaves by path, and of the structure under the empty path."""
    leaves = {
        path: "None" if leaf is None else described(leaf)
        for path, leaf in named_leaves(jax.tree.map(_first_copy, tree)).items()
    }
    # As text: a structure may hold classes of the program, which cannot be sent.
    return leaves | {"": str(jax.tree.structure(tree))}


def check_agree(descriptions: Sequence[Mapping[str, str]], argument: str) -> None:
    """Checks that the trees of all processes have one description.

    Raises:
      ValueError: With the first path that differs, and the process.
    """
    first, *others = descriptions
    for rank, other in enumerate(others, start=1):
        if difference := first_difference(first, other):
            path, expected, found = difference
            where = f" at {path}" if path else ""
            rule = f"must agree with process 0: {expected}{where}"
            raise value_error(argument, rule, f"{found} on process {rank}")


def _check_processes(tree: PyTree, name: str) -> None:
    text = np.frombuffer(json.dumps(description(tree)).encode(), np.uint8)
    # Gathered arrays have one shape on all processes, hence lengths first.
    lengths = multihost_utils.process_allgather(np.int32(text.size))
    padded = np.zeros(int(np.max(lengths)), np.uint8)
    padded[: text.size] = text
    rows = zip(multihost_utils.process_allgather(padded), lengths, strict=True)
    texts = [bytes(row[:length]) for row, length in rows]
    check_agree([json.loads(text) for text in texts], f"replicate({name}=...)")


def _from_process_0(tree: PyTree) -> PyTree:
    # A collective takes no keys, and returns arrays of NumPy.
    sent = multihost_utils.broadcast_one_to_all(jax.tree.map(words, tree))
    return jax.tree.map(unworded, sent, tree)


def _first_copy(leaf: Any) -> PyTree:
    """The first device's copy; a number gets the dtype that JAX computes it in."""
    if isinstance(leaf, jax.Array):
        return leaf.addressable_data(0) if leaf.is_fully_replicated else leaf
    return np.asarray(leaf, jnp.result_type(leaf))


def _shape_on(mesh: Mesh | None, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if mesh is None or is_divided(shape):
        return shape
    return shape.update(sharding=NamedSharding(mesh, EACH))


def _placed(leaf: Any, place: NamedSharding) -> jax.Array:
    if jax.process_count() == 1:
        return jax.device_put(leaf, place)
    if is_key(leaf):
        return unworded(_placed(words(leaf), place), leaf)
    # Not `device_put`, which would compare the values between processes once more.
    return jax.make_array_from_process_local_data(place, np.asarray(leaf))
