"""Variables that the callee holds, as arguments of remote calls.

The caller passes a reference. The function gets the variable's tree. Its gradient stays
on the callee: the backward call adds it to the context of which it brings the id.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._errors import requirement
from jdist._tree import PyTree, is_inexact, is_none, type_name
from jdist.autograd.contexts import Context, of, recorded_into
from jdist.autograd.recording.errors import AutogradError
from jdist.autograd.recording.variable import Variable
from jdist.rpc import RRef
from jdist.rpc.extension import Agent, current


class CalleeVariables(NamedTuple):
    """The variables of one call with their current values.

    Attributes:
      leaves: The arrays of the variables.
      structures: The tree structure of each variable.
      variables: The variables.
    """

    leaves: list[jax.Array]
    structures: tuple[jax.tree_util.PyTreeDef, ...]
    variables: tuple[Variable, ...]

    @property
    def floating(self) -> tuple[int, ...]:
        """Numbers of the leaves that have a gradient."""
        return tuple(i for i, leaf in enumerate(self.leaves) if is_inexact(leaf))

    def accumulate(self, context: Context, cotangents: Sequence[jax.Array]) -> None:
        """Adds gradients, those of the floating leaves, to a context.

        Raises:
          ContextNotFound: It was released.
          Exception: What a hook raises.
        """
        placed = {
            # The call may have run on another device than the variable is on.
            i: jax.device_put(ct, self.leaves[i].sharding)
            for i, ct in zip(self.floating, cotangents, strict=True)
        }
        found = trees(self.structures, [placed.get(i) for i in range(len(self.leaves))])
        sums: dict[Variable, Any] = {}
        for variable, gradient in zip(self.variables, found, strict=True):
            if variable in sums:
                # Two references may lead to one variable, which has one gradient.
                gradient = jax.tree.map(jnp.add, sums[variable], gradient)
            sums[variable] = gradient
        context.accumulate(
            {v: v.gradient(_leaves(gradient)) for v, gradient in sums.items()}
        )


def variables_of(references: Sequence[RRef], call: str) -> CalleeVariables:
    """Returns this worker's variables to which references lead.

    Raises:
      TypeError: One leads to something that is no variable.
      ValueError: One leads to another worker.
    """
    variables = tuple([_local(reference, call) for reference in references])
    flat = [jax.tree.flatten(variable.value) for variable in variables]
    leaves = [leaf for each, _ in flat for leaf in each]
    return CalleeVariables(
        leaves, tuple([structure for _, structure in flat]), variables
    )


def trees(
    structures: Sequence[jax.tree_util.PyTreeDef], leaves: Sequence[jax.Array | None]
) -> list[jax.Array]:
    """Builds the trees of these structures from their concatenated leaves."""
    rest = iter(leaves)
    return [s.unflatten([next(rest) for _ in range(s.num_leaves)]) for s in structures]


def context_for(agent: Agent, to: str, jitted: bool) -> int | None:
    """Finds the context for variables' gradients and adds `to` to it.

    That of this thread of control. A call inside a jitted program has none: there it is
    the one that this worker has made and not yet left.

    Returns:
      Its id, or None if there is none.

    Raises:
      AutogradError: There are several of these.
    """
    own = of(agent)
    if jitted:
        # A callback runs on a thread of XLA, which is within no context.
        made = [each for each in own.contexts() if each.origin == own.ids.worker]
        if len(made) > 1:
            raise AutogradError(
                f"A jitted remote_call to {to!r} has a variable's gradient, and "
                f"{agent.info.name!r} has {len(made)} contexts to which it could go. "
                "Have one context at a time, or differentiate outside of jit."
            )
        found = made[0] if made else None
    else:
        found = recorded_into(own)
    if found is None:
        return None
    found.meet(agent.directory.find(to).info)
    return found.id


def context_of(agent: Agent, context_id: int) -> Context:
    """Finds the context whose id the running backward call has brought.

    Raises:
      ContextNotFound: It was released.
    """
    # A worker that only holds variables learns of the context by this call.
    context = of(agent).get_or_create(context_id)
    scope = current.scope.get()
    assert scope is not None
    assert scope.execution is not None
    # The caller is told if the context ends here.
    context.meet(scope.execution.worker)
    return context


def _local(reference: RRef, call: str) -> Variable:
    if not reference.is_owner():
        rule = "must be a reference to a variable of the worker that is called"
        raise ValueError(requirement(call, rule, str(reference)))
    variable = reference.local_value()
    if not isinstance(variable, Variable):
        rule = "must be a reference to a variable"
        got = f"one to {type_name(variable)}"
        raise TypeError(requirement(call, rule, got))
    return variable


def _leaves(gradient: PyTree) -> list[jax.Array]:
    return jax.tree.leaves(gradient, is_leaf=is_none)
