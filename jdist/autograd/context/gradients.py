"""The gradients that a context has for the variables of one worker."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jdist._compat import beside
from jdist._errors import requirement
from jdist._tree import add_trees
from jdist.autograd.context import container as containers
from jdist.autograd.engine.sweep import plus
from jdist.autograd.graph.variable import Variable

if TYPE_CHECKING:
    from jdist.autograd.context.context import Context


def get_gradients(context_id: int) -> Mapping[Variable, Any]:
    """What backward passes of the context have added up for this worker's variables.

    A gradient is a tree like its variable's value, with None for leaves that nothing
    reached. A variable that nothing reached is not in the mapping, which does not
    change any more when more is added.

    Args:
      context_id: Of the context.

    Raises:
      ContextNotFound: There is no such context on this worker.

    Source: `torch.distributed.autograd.get_gradients`.
    """
    context = containers.here().retrieve(context_id)
    with context.lock:
        return MappingProxyType(dict(context.gradients))


def gradient_of(variable: Variable, cotangents: Sequence[Any]) -> Any:
    """The gradient of one pass: the tree of these leaves, as the hooks make it.

    Each is placed as the leaf of the variable is. What an optimizer makes of both is
    then placed so too, and the next step finds all programs compiled.

    Raises:
      ValueError: A hook returned something of another structure, shape or dtype.
      Exception: Whatever a hook raised.
    """
    gradient = variable.structure.unflatten(cotangents)
    for hook in variable.hooks:
        changed = hook(gradient)
        if changed is not None:
            _check(gradient, changed)
            gradient = changed
    found = variable.structure.flatten_up_to(gradient)
    leaves = variable.flat()[1]
    return variable.structure.unflatten(map(_beside, found, leaves))


def _beside(gradient: Any, leaf: jax.Array) -> Any:
    return beside(gradient, leaf) if isinstance(gradient, jax.Array) else gradient


def _check(gradient: Any, changed: Any) -> None:
    kinds = [
        jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree)
        for tree in (gradient, changed)
    ]
    if kinds[0] != kinds[1]:
        rule = "must return a gradient of the same structure, shapes and dtypes, "
        rule += f"{kinds[0]}"
        raise ValueError(requirement("register_hook(hook)", rule, f"{kinds[1]}"))


def accumulate(context: "Context", gradients: Mapping[Variable, Any]) -> None:
    """Adds the gradients of one pass to those of the context.

    Raises:
      ContextNotFound: It was released.
    """
    with context.lock:
        context.check()
        for variable, gradient in gradients.items():
            known = context.gradients.get(variable)
            if isinstance(known, jax.Array):
                gradient = plus(known, gradient)
            elif known is not None:
                gradient = add_trees(known, gradient, plus)
            context.gradients[variable] = gradient
