"""The share of a distributed optimizer on one owner of parameters.

Each owner has the variables there, one functional optimizer for all of them, and its
state. Every leaf of state and parameters has a path, `params/0/w` or
`state/0/w/exp_avg`, with the number of the variable on this owner.

Steps on common parameters run one after another: each variable has a lock. Steps on
sets without a common variable run side by side.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jdist._compat import placed_as
from jdist._errors import type_error, value_error
from jdist._tree import (
    PyTree,
    described,
    first_difference,
    named_leaves,
    type_name,
    unworded,
    words,
)
from jdist.autograd.contexts import here
from jdist.autograd.nnx_module import TrainableModule
from jdist.autograd.optimizer.compiled_optimizer import (
    CompiledOptimizer,
    compiled_optimizer,
)
from jdist.autograd.recording.variable import Variable, holding
from jdist.optim.internal import computed_in, square
from jdist.rpc import Parameter, ProtocolError, RpcTimeout, RRef, WorkerInfo
from jdist.rpc.extension import Agent, current

T = TypeVar("T")


class OwnedOptimizer:
    """One functional optimizer for the variables of one owner.

    Args:
      program: Makes the steps.
      variables: By their positions among all references of the distributed optimizer.
    """

    def __init__(
        self, program: CompiledOptimizer, variables: Mapping[int, Variable]
    ) -> None:
        self._program = program
        self._positions = tuple(variables)
        self._variables = tuple(variables.values())
        # In one order on all threads, so that steps never wait in a circle. Addresses
        # serve as long as the variables live, and this keeps them.
        self._locks = [each.step_lock for each in sorted(self._variables, key=id)]
        self._state = self._alone(self._init)
        # The values that this optimizer gave its variables last.
        self._copies: list[Any] = []

    @property
    def has_masters(self) -> bool:
        """Whether the variables are to hold compute copies."""
        return self._program.optimizer.precision is not None

    def begin(self) -> None:
        """Rounds the variables to the compute copies of the masters, if there are."""

        def act() -> None:
            _refuse_if_given_up()
            self._copies = computed_in(self._program.optimizer, self._values())
            for variable, value in zip(self._variables, self._copies, strict=True):
                variable.convert(value)

        self._alone(act)

    def squares(self, context_id: int) -> dict[int, list[np.ndarray]]:
        """Returns each variable's sums of squares, one per leaf of its gradient."""
        gradients = _gradients(context_id)
        return {
            position: [
                np.asarray(_square(leaf))
                for leaf in jax.tree.leaves(gradients.get(variable))
            ]
            for position, variable in zip(self._positions, self._variables, strict=True)
        }

    def step(self, context_id: int, factor: Any, overrides: Mapping[str, Any]) -> None:
        """Makes one step; parameters without a gradient keep value, state and count.

        Args:
          context_id: Id of the context whose gradients here are taken.
          factor: A number by which they are multiplied, or None.
          overrides: Hyperparameters for this step.

        Raises:
          RpcTimeout: The caller gave up before this step had the locks.
          Exception: What the optimizer raised. Nothing has changed then.
        """
        gradients = _gradients(context_id)
        reached = [gradients.get(variable) for variable in self._variables]
        # Nothing would move, and the locks of others' steps are not waited for.
        if not jax.tree.leaves(reached):
            return
        self._check(overrides)

        def act() -> None:
            # The caller may have given up while this step waited for the locks.
            _refuse_if_given_up()
            values = self._values()
            if self.has_masters:
                self._check_copies(values)
            grads = [
                jax.tree.map(lambda _: None, value) if grad is None else grad
                for value, grad in zip(values, reached, strict=True)
            ]
            # One program can have arrays of one set of devices only.
            apart = len(_places(values)) > 1
            run = self._program.leaf_by_leaf if apart else self._program.compiled
            new, state = run(values, grads, self._state, factor, dict(overrides))
            # An error on a device is raised here, before anything has changed.
            jax.block_until_ready((new, state))
            for variable, value, grad in zip(self._variables, new, grads, strict=True):
                if jax.tree.leaves(grad):
                    variable.value = value
            self._state = state
            if self.has_masters:
                self._copies = self._values()

        self._alone(act)

    def read(self) -> dict[str, np.ndarray]:
        """Returns all numbers of the parameters and the state, by path."""
        # Under the locks: a step in between would mix old parameters with new state.
        leaves = _leaves(self._alone(self._tree)).items()
        return {path: np.asarray(words(jnp.asarray(leaf))) for path, leaf in leaves}

    def describe(self) -> dict[str, str]:
        """Returns the dtypes and shapes of the same numbers, by path."""
        return _kinds(_leaves(self._alone(self._tree)))

    def write(self, numbers: Mapping[str, np.ndarray]) -> None:
        """Sets all numbers, each placed like the array that it replaces.

        Raises:
          ValueError: They are of other paths, shapes or dtypes than what is here.
        """

        def act() -> None:
            _refuse_if_given_up()
            leaves = _leaves(self._tree())
            # Under the locks, and before the first value is set.
            check_same({p: described(x) for p, x in numbers.items()}, _kinds(leaves))
            structure: Any = jax.tree.structure(self._tree())
            tree = structure.unflatten(
                [_refilled(numbers[path], leaf) for path, leaf in leaves.items()]
            )
            for variable, value in zip(self._variables, tree["params"], strict=True):
                variable.value = value
            self._state = tree["state"]
            self._copies = self._values()

        self._alone(act)

    def _check_copies(self, values: Sequence[Any]) -> None:
        """Checks that no other has changed the variables: masters would undo that."""
        for position, *pair in zip(self._positions, values, self._copies, strict=True):
            now, ours = map(jax.tree.leaves, pair)
            if any(x is not y for x, y in zip(now, ours, strict=True)):
                argument = f"DistributedOptimizer(params_rrefs[{position}])"
                rule = "must be changed by the optimizer with its masters alone"
                got = "a value that another optimizer, or you, have set"
                remedy = "Give all trainers one optimizer, or none that has masters."
                raise value_error(argument, rule, got, remedy)

    def _alone(self, action: Callable[[], T]) -> T:
        """Calls `action` while this thread holds the variables' locks."""
        busy = "while another step held one of the parameters"
        return holding(self._locks, busy, action)

    def _init(self) -> Any:
        values = self._values()
        # A compiled `init` would not place the state as committed parameters are.
        init = self._program.optimizer.init if _places(values) else self._program.init
        return init(values)

    def _values(self) -> list[Any]:
        return [variable.value for variable in self._variables]

    def _tree(self) -> dict[str, Any]:
        return {"params": self._values(), "state": self._state}

    def _check(self, overrides: Mapping[str, Any]) -> None:
        """Checks the values of overrides, which a compiled step cannot see."""
        optimizer = self._program.optimizer
        for name, value in overrides.items():
            if name in optimizer.hyperparameters:
                optimizer.hyperparameters[name].check(f"{optimizer.name}.step", value)


def check_same(saved: Mapping[str, str], here: Mapping[str, str], at: str = "") -> None:
    """Checks that a state has the paths, dtypes and shapes of the one it replaces."""
    if difference := first_difference(here, saved):
        path, there, found = difference
        rule = f"must be like the optimizer's own, {there} at {at}{path}"
        raise value_error("DistributedOptimizer.load_state(state)", rule, found)


_square = jax.jit(square)


def _places(values: Sequence[Any]) -> set[frozenset[jax.Device]]:
    """Returns the sets of devices to which arrays among these are committed."""
    # A compiled program takes arrays that are committed to one set of devices only.
    return {frozenset(x.devices()) for x in jax.tree.leaves(values) if x.committed}


def _refuse_if_given_up() -> None:
    """Raises if the caller of this step or write has given up."""
    # It was told that the call failed, and may have repeated it.
    scope = current.scope.get()
    execution = None if scope is None else scope.execution
    if execution is not None and execution.cancelled is not None:
        raise RpcTimeout(f"Nothing was changed: {execution.cancelled}.")


# --- leaves by path ---


def _leaves(tree: PyTree) -> dict[str, Any]:
    return named_leaves(tree, is_leaf=None)


def _kinds(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Returns the dtypes and shapes of leaves as they travel."""
    return {p: described(words(jnp.asarray(x))) for p, x in leaves.items()}


def _refilled(numbers: np.ndarray, leaf: PyTree) -> jax.Array:
    before = jnp.asarray(leaf)
    return placed_as(unworded(jnp.asarray(numbers), before), before)


CREATE = "optimizer.create"
"""Kind of the requests that make an owner's part."""


def kind_of(operation: Callable[..., Any]) -> str:
    """The kind of the requests for a method of `OwnedOptimizer`."""
    return f"optimizer.{operation.__name__}"


def install(agent: Agent) -> None:
    """Registers the handlers by which others step this worker's variables."""
    agent.register(CREATE, _create)
    owned = OwnedOptimizer
    for operation in (
        owned.begin, owned.squares, owned.step, owned.read, owned.describe, owned.write
    ):  # fmt: skip
        agent.register(kind_of(operation), _answering(operation))


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


def _gradients(context_id: int) -> dict[Variable, PyTree]:
    """Returns a context's gradients on this worker; empty if it took no part."""
    context = here().find(context_id)
    if context is None:
        return {}
    with context.lock:
        # A copy: a pass of another trainer may be adding to it.
        return dict(context.gradients)


def _create(
    caller: WorkerInfo, body: _Creation, meta: dict[str, Any]
) -> tuple[RRef[Any], bool]:
    factory, args, kwargs, references = body
    steps = compiled_optimizer(factory, args, kwargs)
    owned = OwnedOptimizer(steps, _variables(references))
    return RRef(owned), owned.has_masters


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
                remedy = "Make the module with `RemoteModule(..., trainable=True)`."
            elif isinstance(value, TrainableModule):
                remedy = "Give references to each of `module.parameters().values()`."
            raise type_error(argument, rule, type_name(value), remedy)
        if value in first:
            rule = "must refer to a variable that does not come twice"
            raise value_error(argument, rule, f"that of params_rrefs[{first[value]}]")
        found[position] = value
        first[value] = position
    return found
