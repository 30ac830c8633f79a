"""The state of a communication hook: one row per replica, in the hook's own structure.

A hook may keep a state for each bucket, such as a residual or a factor. It depends on
the buckets, and so on the model, the bucket cap and the number of replicas.
"""

from typing import Any

import jax

from jdist._errors import value_error
from jdist._tree import PyTree, descriptions, first_difference, named_leaves


def check_hook_rows(argument: str, kept: PyTree, replicas: int) -> None:
    """Checks that a hook's state has a row for each replica.

    Raises:
      ValueError: It has another number of rows.
    """
    for leaf in jax.tree.leaves(kept):
        if leaf.shape[:1] != (replicas,):
            rule = f"must have what a hook kept of {replicas} replicas"
            got = f"an array of shape {leaf.shape}"
            raise value_error(argument, rule, got, _ANEW)


def structured(argument: str, kept: dict[str, Any], like: PyTree) -> PyTree:
    """Rebuilds a hook's state in the hook's own structure.

    Args:
      argument: Function and argument, for the error's text.
      kept: The leaves of the state by path.
      like: A tree of that structure with shapes and dtypes.

    Raises:
      ValueError: They are not the leaves of such a tree; the message names the first.
    """
    wanted = named_leaves(like, is_leaf=None)
    if found := first_difference(descriptions(wanted), descriptions(kept)):
        path, want, got = found
        rule = f"must have what this step's hook keeps, {want} at hook_state/{path}"
        raise value_error(argument, rule, got, _ANEW)
    structure: Any = jax.tree.structure(like)
    return structure.unflatten(kept[path] for path in wanted)


_ANEW = (
    "It belongs to the hook, its buckets and its replicas. With None in its place the "
    "hook begins anew, as in `state._replace(hook_state=None)`."
)
