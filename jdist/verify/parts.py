"""Losses that are computed of parts of the batch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jdist._errors import check_function, quoted, requirement
from jdist._tree import PyTree

PartFn = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
"""`fn(params, part) -> (of its examples, of the part)`."""


def in_parts(fn: PartFn, parts: int) -> PartFn:
    """A function of equal parts of the batch, as one program of them all.

    For losses of which a term belongs to a part and to no example, such as the
    load-balancing loss of a mixture of experts, which trainers take of each
    micro-batch or shard. The program has the size of one part, and the taps in it are
    compared by example: a loop over the parts has a copy of the loss for each.

    Args:
      fn: `fn(params, part) -> (of_examples, of_part)`: pytrees of arrays; those of the
        examples are `(examples of the part, ...)`.
      parts: Number of parts; they follow each other in the batch.

    Returns:
      `fn(params, batch) -> (of_examples, of_parts)`: arrays `(examples, ...)` and
      `(parts, ...)`.

    Raises:
      TypeError: `fn` is no function.
      ValueError: `parts` is no whole number above 0. On calling: it does not divide
        the number of examples.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import verify
      >>> def losses(w, x):
      ...     return (x * w) ** 2, jnp.abs(x.mean())
      >>> each, load = verify.in_parts(losses, 2)(3.0, jnp.array([1.0, 2.0, 3.0, 5.0]))
      >>> each.tolist(), load.tolist()
      ([9.0, 36.0, 81.0, 225.0], [1.5, 4.0])
    """
    check_function("in_parts(fn=...)", fn)
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        rule = "must be a whole number above 0"
        raise ValueError(requirement("in_parts(parts=...)", rule, quoted(parts)))

    def split(x: jax.Array) -> jax.Array:
        examples = jnp.shape(x)[:1]
        if not examples or examples[0] % parts:
            rule, got = (
                f"must be examples in {parts} equal parts",
                f"shape {jnp.shape(x)}",
            )
            raise ValueError(requirement("in_parts(...)(batch)", rule, got))
        return jnp.reshape(x, (parts, -1, *jnp.shape(x)[1:]))

    def whole(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        rows = jax.tree.map(split, batch)
        of_examples, of_parts = jax.vmap(fn, (None, 0))(params, rows)
        joined = jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])), of_examples)
        return joined, of_parts

    return whole
