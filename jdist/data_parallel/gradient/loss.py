"""The contract of a loss function: what it is given, and what it returns.

    loss_fn(params, batch)                            -> losses
    loss_fn(params, batch, key)                       with a PRNG key
    loss_fn(params, batch, model_state=...)           with model state
                                                      -> losses, new_state
    ... and with has_aux=True                         -> losses, [new_state,] aux

`losses` has one entry per example, so that the library can weight them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jdist._errors import requirement
from jdist._tree import described, named_leaves


@dataclass(frozen=True, slots=True)
class Loss:
    """A user's loss function with all its forms brought to one.

    Attributes:
      fn: See the module.
      has_aux: Whether it returns auxiliary outputs last.
    """

    fn: Callable[..., Any]
    has_aux: bool = False

    def __call__(
        self, params: Any, batch: Any, key: Any = None, model_state: Any = None
    ) -> tuple[jax.Array, tuple[Any, Any]]:
        """Losses, and the new model state and aux, None where there is none.

        Raises:
          ValueError: It returned something else than its arguments ask for, or a state
            of other structure, shapes or dtypes than it was given.
        """
        # Variables of Flax may be written to in the trace only that made them.
        model_state = jax.tree.map(lambda x: x, model_state)
        keys = () if key is None else (key,)
        named = {} if model_state is None else {"model_state": model_state}
        found = self.fn(params, batch, *keys, **named)
        wanted = ["losses"]
        wanted += ["new_state"] * (model_state is not None) + ["aux"] * self.has_aux
        if len(wanted) == 1:
            return found, (None, None)
        if not isinstance(found, tuple) or len(found) != len(wanted):
            rule = f"must return the tuple ({', '.join(wanted)})"
            size = f" of {len(found)}" if isinstance(found, tuple) else ""
            got = f"a {type(found).__name__}{size}"
            raise ValueError(requirement("loss_fn(params, batch)", rule, got))
        losses, *rest = found
        new_state = None if model_state is None else rest[0]
        _check_state(model_state, new_state)
        return losses, (new_state, rest[-1] if self.has_aux else None)


def _check_state(old: Any, new: Any) -> None:
    """A state that changed its shape would compile every step anew."""
    before, after = (
        {
            path: described(leaf)
            for path, leaf in named_leaves(state).items()
            if leaf is not None
        }
        for state in (old, new)
    )
    for path in sorted(before.keys() | after.keys()):
        expected, found = (d.get(path, "no leaf") for d in (before, after))
        if expected != found:
            rule = f"must return a state like the one it was given, {expected} at "
            argument = "loss_fn(model_state=...)"
            raise ValueError(requirement(argument, rule + path, found))
