"""Handlers of the requests of distributed optimizers, on owners of parameters."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jdist._errors import requirement
from jdist.autograd.contexts.context import here
from jdist.autograd.modules.nnx_module import TrainableModule
from jdist.autograd.optimizer.compiled_optimizer import compiled_optimizer
from jdist.autograd.optimizer.owned_optimizer import Gradients, OwnedOptimizer
from jdist.autograd.recording.variable import Variable
from jdist.rpc import Parameter, ProtocolError, RRef, WorkerInfo
from jdist.rpc.extension import Agent

CREATE = "optimizer.create"
SQUARES = "optimizer.squares"
STEP = "optimizer.step"
READ = "optimizer.read"
DESCRIBE = "optimizer.describe"
WRITE = "optimizer.write"


def install(agent: Agent) -> None:
    """Lets others step the variables of this worker."""
    agent.register(CREATE, _create)
    operations: dict[str, Callable[..., Any]] = {
        SQUARES: _squares,
        STEP: _step,
        READ: OwnedOptimizer.read,
        DESCRIBE: OwnedOptimizer.describe,
        WRITE: OwnedOptimizer.write,
    }
    for kind, operation in operations.items():
        agent.register(kind, _answering(operation))


def _answering(operation: Callable[..., Any]) -> Callable[..., Any]:
    def answer(caller: WorkerInfo, body: object, meta: dict[str, Any]) -> object:
        if type(body) is not tuple or not body or type(body[0]) is not RRef:
            raise ProtocolError(
                "A distributed optimizer names its part by a reference."
            )
        owned = body[0].local_value()
        if type(owned) is not OwnedOptimizer:
            raise ProtocolError("The reference is to no part of an optimizer.")
        return operation(owned, *body[1:])

    return answer


_Creation = tuple[
    Callable[..., object], Sequence[Any], Mapping[str, Any], Mapping[int, RRef[Any]]
]
"""A constructor with its arguments, and references to variables by position."""


def _squares(owned: OwnedOptimizer, context_id: int) -> object:
    return owned.squares(_gradients(context_id))


def _step(
    owned: OwnedOptimizer,
    context_id: int,
    factor: object,
    overrides: Mapping[str, Any],
) -> None:
    owned.step(_gradients(context_id), factor, overrides)


def _gradients(context_id: int) -> Gradients:
    """A context's gradients on this worker; none if it took no part in it."""
    context = here().find(context_id)
    if context is None:
        return {}
    with context.lock:
        # A copy: a pass of another trainer may be adding to it.
        return dict(context.gradients)


def _create(caller: WorkerInfo, body: _Creation, meta: dict[str, Any]) -> RRef[Any]:
    factory, args, kwargs, references = body
    steps = compiled_optimizer(factory, args, kwargs)
    return RRef(OwnedOptimizer(steps, _variables(references)))


def _variables(references: Mapping[int, RRef[Any]]) -> dict[int, Variable]:
    found: dict[int, Variable] = {}
    first: dict[Variable, int] = {}
    for position, rref in references.items():
        value = rref.local_value()
        argument = f"DistributedOptimizer(params_rrefs[{position}])"
        if not isinstance(value, Variable):
            rule = "must refer to a variable"
            remedy = "Make one with `autograd.variable(value)` where the value is."
            if isinstance(value, Parameter):
                remedy = "Make the module with `remote_module(..., trainable=True)`."
            elif isinstance(value, TrainableModule):
                remedy = "Give references to each of `module.parameters().values()`."
            got = f"a {type(value).__qualname__}"
            raise TypeError(requirement(argument, rule, got, remedy))
        if value in first:
            rule = "must refer to a variable that does not come twice"
            got = f"that of params_rrefs[{first[value]}]"
            raise ValueError(requirement(argument, rule, got))
        found[position] = value
        first[value] = position
    return found
