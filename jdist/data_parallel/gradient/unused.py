"""Detection of parameters that no loss depends on: their gradient is None, not zero.

An optimizer treats the two differently. A zero gradient still decays the weight, moves
it by its momentum, and counts as a step; None leaves parameter, state and count
unchanged. PyTorch's `DistributedDataParallel` searches its graph for such parameters
after every forward pass and agrees on them with all ranks. Here they are known once,
when the program is compiled: JAX does not propagate a cotangent that it knows to be
zero, so a parameter whose backward rule is never traced is unused.

A dependence decided by *values* (a branch of `lax.cond` that no example takes) is part
of the program: its gradient is zero, not None.
"""

import jax

from jdist._tree import PyTree, is_inexact, path_of


def watched(params: PyTree, used: set[str]) -> PyTree:
    """Marks parameters, so that the paths of those with a cotangent enter `used`.

    Args:
      params: Pytree, the argument of the loss function.
      used: Receives the paths of leaves, while the backward pass is traced.
    """
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: (
            _marked(leaf, path_of(keys), used) if is_inexact(leaf) else leaf
        ),
        params,
    )


def only(tree: PyTree, used: set[str]) -> PyTree:
    """The tree with None in the place of every leaf that is not in `used`."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: leaf if path_of(keys) in used else None, tree
    )


def _marked(leaf: jax.Array, path: str, used: set[str]) -> jax.Array:
    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return x, None

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        # Traced only if a cotangent arrives: JAX prunes symbolic zeros before.
        used.add(path)
        return (cotangent,)

    identity.defvjp(forward, backward)
    return identity(leaf)
