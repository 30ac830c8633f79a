"""Taps: identities that mark values, without an equation outside of recordings."""

from typing import Any, TypeVar

import jax

from jdist._errors import requirement
from jdist._tree import PyTree, is_inexact, path_of
from jdist.verify.tracing.primitive import show
from jdist.verify.tracing.recording import deliver, under_way

Tree = TypeVar("Tree")


def tap(x: Tree, name: str) -> Tree:
    """Marks a value for `verify.trace`; the identity, also to derivatives.

    Args:
      x: Array or pytree of arrays, of any shapes. Its floating leaves are marked.
      name: The value's name, such as "block3/attention". It may occur again: in a
        loop, or where a layer is called twice. Leaves of a tree get their paths added.

    Returns:
      `x`. Outside of a recording no equation is added to the program.

    Raises:
      ValueError: The name is not a string, or empty.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> hidden = lambda w, x: tap(jnp.tanh(x * w), "hidden")
      >>> [str(e.primitive) for e in jax.make_jaxpr(hidden)(2.0, 3.0).eqns]
      ['mul', 'tanh']
    """
    if not (isinstance(name, str) and name):
        rule = "must be a string that is not empty"
        raise ValueError(requirement("tap(name=...)", rule, repr(name)))
    # Part of the key of JAX's caches: programs are traced again in a recording.
    if not under_way.value:
        return x

    def marked(keys: tuple[Any, ...], leaf: PyTree) -> PyTree:
        if not (hasattr(leaf, "dtype") and is_inexact(leaf)):
            return leaf
        own = f"{name}/{path_of(keys)}" if keys else name
        return show(leaf, name=own, receive=deliver)

    found: Tree = jax.tree.map_with_path(marked, x)
    return found
