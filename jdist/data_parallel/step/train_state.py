"""What a training step is given and returns: its state, and its metrics.

Everything that lasts from step to step is one tree, the `TrainState`: what is saved
and restored, and what makes a run repeat bit for bit.
"""

from typing import Any, NamedTuple

import jax

from jdist._checkpoint import descriptions
from jdist._errors import requirement
from jdist._tree import path_of


class TrainState(NamedTuple):
    """All that one step hands to the next; made by `TrainStep.init`."""

    step: jax.Array
    """Steps taken, int32 scalar."""

    params: Any
    """The parameters, the same on every replica."""

    opt_state: Any
    """The optimizer's state."""

    states: Any = None
    """State that no gradient reaches, such as batch-norm statistics, or None."""

    key: Any = None
    """The PRNG key of the whole run, which does not change, or None."""

    hook_state: Any = None
    """What a communication hook keeps, a row for each replica, or None. As
    `TrainCheckpoints.restore` reads it, it is by path: its structure is the step's."""


def check_hook_rows(argument: str, kept: Any, replicas: int) -> None:
    """Refuses a hook's state that is not of so many replicas.

    Raises:
      ValueError: It has another number of rows.
    """
    for leaf in jax.tree.leaves(kept):
        if leaf.shape[:1] != (replicas,):
            rule = f"must have what a hook kept of {replicas} replicas"
            got = f"an array of shape {leaf.shape}"
            raise ValueError(requirement(argument, rule, got, _ANEW))


def structured(argument: str, kept: dict[str, Any], like: Any) -> Any:
    """A hook's state in the hook's own structure.

    Args:
      argument: Function and argument, for the error's text.
      kept: Its leaves by path.
      like: A tree of that structure, of shapes and dtypes.

    Raises:
      ValueError: They are not the leaves of such a tree; the message names the first.
    """
    pairs = jax.tree.leaves_with_path(like)
    wanted = {path_of(keys): leaf for keys, leaf in pairs}
    here, there = descriptions(wanted), descriptions(kept)
    for path in sorted(here.keys() | there.keys()):
        want, got = (each.get(path, "no leaf") for each in (here, there))
        if want != got:
            rule = f"must have what this step's hook keeps, {want} at hook_state/{path}"
            raise ValueError(requirement(argument, rule, got, _ANEW))
    structure: Any = jax.tree.structure(like)
    return structure.unflatten(kept[path] for path in wanted)


_ANEW = (
    "It belongs to the hook, its buckets and its replicas. With None in its place the "
    "hook begins anew, as in `state._replace(hook_state=None)`."
)
