"""A layer of a model as a planner sees it: a function, and the names of its values."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jdist._errors import requirement


class Module(NamedTuple):
    """A layer with what it reads and writes.

    Attributes:
      name: Unique.
      fn: `fn(params, *inputs) -> outputs`, pure; a tuple if there are several outputs.
        With a state it is `fn(params, state, *inputs) -> (outputs, state)`; with a key,
        the key is its last argument: as for `Stage`.
      params: A pytree.
      inputs: Names of the values that it takes.
      outputs: Names of the values that it gives.
      state: A pytree such as batch-norm statistics; None: it has no state.
      keyed: Whether it takes a PRNG key.
      in_evaluation: What an evaluation calls instead of `fn`, as for `Stage`.
      tied: Parameters that it shares with other modules: from the path of its copy to a
        name, as for `Stage`.
      restore: `restore(params, state)` is the layer in its own form, such as a Flax
        module; None: a `Module`.
    """

    name: str
    fn: Callable[..., Any]
    params: Any
    inputs: tuple[str, ...] = ("x",)
    outputs: tuple[str, ...] = ("x",)
    state: Any = None
    keyed: bool = False
    in_evaluation: Callable[..., Any] | None = None
    tied: Mapping[str, str] = MappingProxyType({})
    restore: Callable[[Any, Any], Any] | None = None

    def restored(self, params: Any, state: Any) -> Any:
        """The layer with other parameters and another state, in its own form."""
        if self.restore is not None:
            return self.restore(params, state)
        return self._replace(params=params, state=state)


def outputs_by_name(call: str, names: Sequence[str], returned: Any) -> dict[str, Any]:
    """What a module's function returned, by name.

    Raises:
      ValueError: It returned another number of values than there are names.
    """
    if len(names) == 1:
        return {names[0]: returned}
    if not isinstance(returned, tuple | list) or len(returned) != len(names):
        rule = f"must return the {len(names)} outputs {tuple(names)}"
        size = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        raise ValueError(requirement(call, rule, f"a {type(returned).__name__}{size}"))
    return dict(zip(names, returned, strict=True))
