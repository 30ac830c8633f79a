"""Modules: layers of a model as pure functions with named inputs and outputs."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jdist._tree import PyTree


class Module(NamedTuple):
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
      restore: `restore(params, state)` is the layer in its original form, such as a
        Flax module; None: a `Module`.
    """

    name: str
    fn: Callable[..., PyTree]
    params: PyTree
    inputs: tuple[str, ...] = ("x",)
    outputs: tuple[str, ...] = ("x",)
    state: PyTree = None
    keyed: bool = False
    in_evaluation: Callable[..., PyTree] | None = None
    tied: Mapping[str, str] = MappingProxyType({})
    restore: Callable[[PyTree, PyTree], object] | None = None

    def restored(self, params: PyTree, state: PyTree) -> object:
        """The layer with other parameters and state, in its original form."""
        if self.restore is not None:
            return self.restore(params, state)
        return self._replace(params=params, state=state)
