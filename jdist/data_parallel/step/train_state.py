"""What a training step is given and returns: its state, and its metrics.

Everything that lasts from step to step is one tree, the `TrainState`: what is saved
and restored, and what makes a run repeat bit for bit.
"""

from typing import Any, NamedTuple

import jax

from jdist._checkpoint import described
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


def check_state(call: str, state: object) -> None:
    """Refuses what is not the state of a training run, such as the parameters alone.

    Raises:
      TypeError: It is anything else.
    """
    if not isinstance(state, TrainState):
        rule = "must be a TrainState"
        remedy = (
            "`state = step.init(params)` makes one, and each step returns the next."
        )
        raise TypeError(requirement(call, rule, f"a {type(state).__name__}", remedy))


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
    here, there = described(wanted), described(kept)
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


class Metrics(NamedTuple):
    """What a step found out, before it moved the parameters."""

    loss: jax.Array
    """The whole batch's loss, scalar, the same on every replica."""

    grad_norm: jax.Array | None = None
    """Global norm of the gradient before clipping, or None without clipping."""

    aux: Any = None
    """Auxiliary outputs, each with a new first axis of `replicas * accumulate`: an
    entry for each call of the loss function, in the order of the batch's rows."""

    examples: Any = None
    """How many examples have a weight above 0, as `fit` counts them; else None."""

    weight: Any = None
    """The sum of their weights, as `fit` counts it; else None."""
