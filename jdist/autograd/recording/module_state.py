"""Flax modules among the arguments of pure functions: no state that would be lost."""

import contextlib
from collections.abc import Iterator

import jax

from jdist._errors import requirement
from jdist._flax import module_leaves, other_variables
from jdist._tree import PyTree

_REMEDY = (
    "`autograd.TrainableModule(module)` keeps its state from call to call. By hand: "
    "`graph, params, rest = nnx.split(module, nnx.Param, ...)`. Make the "
    "variable of `params`, give `rest` to the function as an input, and have it return "
    "the new one as an output: `module = nnx.merge(graph, params, rest)`, and "
    "`nnx.state(module, nnx.Not(nnx.Param))`."
)


def refuse_state(argument: str, tree: PyTree) -> None:
    """Refuses a tree with Flax state other than parameters.

    Raises:
      TypeError: A module in it holds more than `nnx.Param`, or something in it is an
        `nnx.Variable` of another kind.
    """
    found = other_variables(tree)
    if found:
        rule = "must hold no state but nnx.Param: it would never change"
        got = ", ".join(sorted(f"{kind} at {path}" for path, kind in found.items()))
        raise TypeError(requirement(argument, rule, got, _REMEDY))


@contextlib.contextmanager
def state_kept(call: str, arguments: PyTree) -> Iterator[list[PyTree]]:
    """Refuses changes of modules in `arguments` that the function within would lose.

    Yields:
      A list for the function's result: changes that it contains are not lost.

    Raises:
      TypeError: The function has changed a module, and does not return the change.
    """
    before = module_leaves(arguments)
    returned: list[PyTree] = []
    yield returned
    if not before:
        return
    # By identity: a module writes a new array where it changes its state.
    kept = {id(leaf) for _, leaf in before} | set(map(id, jax.tree.leaves(returned)))
    after = module_leaves(arguments)
    lost = sorted(path for path, leaf in after if id(leaf) not in kept)
    if lost:
        rule = "must not change a module that it is given: the change would be lost"
        raise TypeError(requirement(call, rule, ", ".join(lost), _REMEDY))
