"""Modules: layers of a model as pure functions with named inputs and outputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from jdist._tree import PyTree


@dataclass(frozen=True)
class Module:
    """A layer with the names of its inputs and outputs.

    Attributes:
      name: Name of the layer, unique.
      fn: `fn(params, *inputs) -> outputs`, pure; a tuple if there are several outputs.
        With a state it is `fn(params, state, *inputs) -> (outputs, state)`; with a key,
        the key is its last argument: as for `Stage`.
      params: A pytree.
      inputs: Names of its inputs.
      outputs: Names of its outputs.
      state: A pytree such as batch-norm statistics; None: it has no state.
      keyed: Whether it takes a PRNG key.
      in_evaluation: The function that evaluation calls instead of `fn`, as for `Stage`.
      tied: Parameters that it shares with other modules: from the path of its copy to a
        name, as for `Stage`.
    """

    name: str
    fn: Callable[..., PyTree]
    params: PyTree
    inputs: tuple[str, ...] = ("x",)
    outputs: tuple[str, ...] = ("x",)
    state: PyTree = None
    keyed: bool = False
    in_evaluation: Callable[..., PyTree] | None = None
    tied: Mapping[str, str] = field(default_factory=dict)

    def restored(self, params: PyTree, state: PyTree) -> object:
        """The layer with other parameters and state, in the form that was given."""
        return replace(self, params=params, state=state)
