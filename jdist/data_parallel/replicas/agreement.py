"""A check that all replicas hold the same bits, for `debug=True`.

The results of a step are declared to be the same on all replicas, and JAX does not
check it: with a hook that does not communicate, one array has different values on every
device. In debug mode each replica computes a checksum of each gradient inside the
program, the checksums are gathered, and the host compares them.

    checksum = sum over positions i of  mix(bits of number i + c i)     modulo 2^32

mix is a bijection that spreads each bit over all others. A difference in one number is
therefore always detected, any other with probability 1 - 2^-32. Without mix, sign flips
in an even number of places would cancel, as in a negated gradient.
"""

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._compat import is_traced
from jdist._errors import JdistError, requirement
from jdist._tree import PyTree, named_leaves
from jdist.data_parallel.replicas.placement import Placement


class ReplicasDiffer(JdistError):
    """Replicas hold different bits of one gradient; raised on every process."""


def checksums(tree: PyTree, axis_name: Hashable) -> dict[str, jax.Array]:
    """Checksums of the leaves on all replicas; call it where the axis is bound.

    Returns:
      For each path `(replicas,)`, uint32, the same on all replicas.
    """
    named = {
        path: leaf for path, leaf in named_leaves(tree).items() if leaf is not None
    }
    if not named:
        return {}
    # One small collective for all leaves.
    own = jnp.stack([_checksum(leaf) for leaf in named.values()])
    return dict(zip(named, jax.lax.all_gather(own, axis_name, axis=1), strict=True))


def _checksum(array: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(array):  # A bitcast takes real numbers only.
        array = jnp.stack([array.real, array.imag])
    bits = jnp.finfo(array.dtype).bits
    # 64-bit numbers become two words each.
    words: Any = jax.lax.bitcast_convert_type(array, f"uint{min(bits, 32)}")
    words = words.astype(jnp.uint32).reshape(-1)
    # A word's place enters its mix: a permutation of the numbers changes the sum.
    # 2^32 over the golden ratio: odd, so that every place has an offset of its own.
    places = jnp.arange(words.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    return jnp.sum(_mixed(words + places), dtype=jnp.uint32)


def _mixed(words: jax.Array) -> jax.Array:
    """A bijection of 32-bit words: each bit changes about half of the others."""
    # Shifts and multipliers of the hash `lowbias32` (Wellons, 2018).
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        words = (words ^ (words >> shift)) * jnp.uint32(factor)
    return words ^ (words >> 16)


def check_agreement(call: str, sums: Mapping[str, Any], placement: Placement) -> None:
    """Checks that the leaves of a result are the same on all replicas.

    Args:
      call: The public function, for the error's text.
      sums: What `checksums` returned.
      placement: The replicas.

    Raises:
      ReplicasDiffer: They do; the message names the first such leaf, and the devices.
      ValueError: The call is part of a jit, where there are no values to compare.
    """
    if any(map(is_traced, sums.values())):
        rule = "must be left out inside jit"
        remedy = "Nothing can be compared before the program runs."
        raise ValueError(requirement(f"{call}(debug=...)", rule, True, remedy))
    for path, found in sums.items():
        held: dict[int, list[int]] = {}
        for replica, value in enumerate(np.asarray(found).tolist()):
            held.setdefault(value, []).append(replica)
        if len(held) == 1:
            continue
        groups = "; ".join(
            f"checksum {value:08x} on {_named(replicas, placement)}"
            for value, replicas in held.items()
        )
        raise ReplicasDiffer(
            f"`{call}`: the gradient at {path} is not the same on all replicas: "
            f"{groups}. A hook must leave every replica with the same buffer: reduce "
            f"it by a collective over `bucket.axis_name`."
        )


def _named(replicas: list[int], placement: Placement) -> str:
    if placement.mesh is None:
        return f"replica {', '.join(map(str, replicas))}"
    rows = placement.devices()
    names = (
        f"{replica} ({', '.join(map(str, rows[replica]))})" for replica in replicas
    )
    return f"replica {', '.join(names)}"
