"""The contract of a loss function: its arguments and its results.

    loss_fn(params, batch)                            -> losses
    loss_fn(params, batch, key)                       with a PRNG key
    loss_fn(params, batch, states=...)           with model state
                                                      -> losses, new_states
    ... and with has_aux=True                         -> losses, [new_states,] aux

`losses` has one entry per example, so that the library can weight them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jdist._errors import value_error
from jdist._tree import PyTree, descriptions, first_difference, named_leaves, type_name


@dataclass(frozen=True, slots=True)
class Loss:
    """A user's loss function, called in one form.

    Attributes:
      fn: See the module.
      has_aux: Whether it returns auxiliary outputs last.
    """

    fn: Callable[..., PyTree]
    has_aux: bool = False

    def __call__(
        self,
        params: PyTree,
        batch: PyTree,
        key: jax.Array | None = None,
        states: PyTree = None,
    ) -> tuple[jax.Array, tuple[PyTree, PyTree]]:
        """Returns the losses, the new model state and aux, None where there is none.

        Raises:
          ValueError: It returned something else than its arguments ask for, or a state
            of other structure, shapes or dtypes than it was given.
        """
        # Flax variables can be written only in the trace that created them.
        states = jax.tree.map(lambda x: x, states)
        keys = () if key is None else (key,)
        named = {} if states is None else {"states": states}
        found = self.fn(params, batch, *keys, **named)
        wanted = ["losses"]
        wanted += ["new_states"] * (states is not None) + ["aux"] * self.has_aux
        if len(wanted) == 1:  # `reduction` checks the losses.
            return found, (None, None)
        if not isinstance(found, tuple) or len(found) != len(wanted):
            rule = f"must return the tuple ({', '.join(wanted)})"
            size = f" of {len(found)}" if isinstance(found, tuple) else ""
            got = f"{type_name(found)}{size}"
            raise value_error("loss_fn(params, batch)", rule, got)
        losses, *rest = found
        new_states = None if states is None else rest[0]
        _check_state(states, new_states)
        return losses, (new_states, rest[-1] if self.has_aux else None)


def _check_state(old: PyTree, new: PyTree) -> None:
    """Checks that the new model state has the paths, shapes and dtypes of the old."""
    # A state that changes its shape would compile every step anew.
    both = (descriptions(named_leaves(state)) for state in (old, new))
    if difference := first_difference(*both):
        path, expected, found = difference
        rule = f"must return a state like the one it was given, {expected} at {path}"
        raise value_error("loss_fn(states=...)", rule, found)
