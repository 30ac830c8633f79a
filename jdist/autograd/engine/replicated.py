"""Replicated variables, which several trainers hold, each with its own data.

Every trainer makes its own contexts and calls `backward` itself; the parameters that
other workers own are theirs alone, and the replicated ones get the gradient of all
trainers' examples. Passes are matched by number: the k-th that begins on one trainer
belongs to the k-th on the others. Each has one collective of the trainers, at its end,
when everything else has succeeded, about all replicated variables by their numbers. So
neither the order in which a trainer uses them matters, nor whether it does.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np

from jdist import reduction
from jdist._compat import beside
from jdist._errors import listed, value_error
from jdist._tree import (
    PyTree,
    abbreviated,
    first_difference,
    is_key,
    named_leaves,
    wide_dtype,
)
from jdist.autograd.contexts import Container, here
from jdist.autograd.recording.errors import AutogradError, refused
from jdist.autograd.recording.variable import Variable
from jdist.rpc import CollectiveMismatch, RpcError, RpcTimeout, WorkerLost
from jdist.rpc.extension import (
    Agent,
    InterruptSafeLock,
    current,
)

Weight = float | Callable[[], float] | None
"""The weight of a trainer's gradient, or a function that returns it at each pass; None
for gradients that are added."""

STATE = "jdist.autograd.replicated"
"""The key under which a worker keeps its replicas."""

_CALL = "replicated"
_INSTANT = 1e-9
"""Seconds to wait where the deadline has passed; 0 would be no limit."""


def replicated(
    params: PyTree,
    group: Iterable[str],
    weight: Weight = 1.0,
    timeout: float = current.DEFAULT,
) -> Variable:
    """Makes a variable that all trainers of a group hold, with their joint gradient.

    All trainers call this, in the same order, and get a variable with the values of the
    first one (that of the lowest rank). From then on each `backward` that begins on a
    trainer is a pass of all of them: they meet at its end, once, and the gradient in
    each trainer's context is the weighted mean of the gradients of their own passes,

        dL/dW = sum_i (B_i / B) dL_i/dW        with B_i = `weight` and B = sum_i B_i

    added in the order of ranks, so that all have the same bits; an optimizer of each
    trainer keeps them equal. A variable, or a leaf of one, that a trainer's pass does
    not reach counts as zero there. Hooks see the trainer's own gradient.

    Args:
      params: Pytree of arrays, as for `variable`, of the same structure, shapes and
        dtypes on all trainers. Each keeps its own placement.
      group: Names of the trainers, this worker's among them.
      weight: A number that is not negative, such as that of the examples in this
        trainer's batch where its loss is their mean; or a function that is called
        once in each pass. A weight of 0 leaves a trainer out. None on all
        trainers: their gradients are added, for losses that are shares of the whole
        batch's, S w l / B over the trainer's own examples. The backward pass of each
        example then begins with its share w / B, as in `jax.grad` of the whole mean; by
        weights it begins with that of the trainer's own mean. The two differ for rules
        that are not linear in their cotangent, such as clipping.
      timeout: Seconds; -1 for the default, 0 for no limit. Passes have their own.

    Returns:
      A `Variable`. All passes take part until `unreplicate`, or rpc's end.

    Raises:
      ValueError: The group does not contain this worker, or is not of rpc's; the
        parameters differ between trainers, which is raised on all; the weight is no
        such number.
      TypeError: As `variable`.
      AutogradError: The arguments were refused on another trainer, with its name.
      CollectiveMismatch, RpcTimeout, RpcError, WorkerLost: As `rpc.all_gather`.

    `backward` then also raises, on all trainers: `WorkerLost` where one is gone;
    `RpcTimeout` where one has not come to its pass in time, with its name;
    `CollectiveMismatch` where one does something else meanwhile; `AutogradError` with
    the name and the error of the trainer whose pass has failed; and `ValueError` where
    no weight is positive. None of them has got a gradient of its replicated variables
    then, and the next pass is in step again.

    Passes of a trainer run one at a time, and begin on trainers: a pass that reaches a
    replicated variable from another worker's `backward` is refused.

    Source: PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC
    Framework"; Li et al., PyTorch Distributed, VLDB 2020.

    Example:
      >>> import jax.numpy as jnp
      >>> from concurrent.futures import ThreadPoolExecutor
      >>> from jdist import autograd, rpc
      >>> def train(name, examples):
      ...     with rpc.use_worker(name):
      ...         w0 = jnp.float32(2)
      ...         w = autograd.replicated(w0, ["a", "b"], weight=len(examples))
      ...         with autograd.context() as context_id:
      ...             loss = autograd.apply(lambda w, x: (w * x).mean(), w, examples)
      ...             autograd.backward(context_id, [loss])
      ...             return autograd.get_gradients(context_id)[w].item()
      >>> with rpc.local_cluster(["a", "b"]), ThreadPoolExecutor(2) as threads:
      ...     data = jnp.array([1.0, 2.0, 6.0]), jnp.array([11.0])
      ...     list(threads.map(train, ["a", "b"], data))
      [5.0, 5.0]
    """
    container = here()
    names = _names(container.agent, group)
    made = ReplicaGroup(container, names)
    return of(container).groups.setdefault(names, made).add(params, weight, timeout)


def unreplicate(variable: Variable) -> None:
    """Ends the replication of a variable; all trainers must call it.

    Without replicated variables passes are the trainer's own again. Dropping a variable
    does not suffice: trainers would notice that at different passes.

    Raises:
      ValueError: It is not replicated.

    Example:
      >>> from jdist import autograd, rpc
      >>> with rpc.local_cluster(["a"]):
      ...     w = autograd.replicated(2.0, ["a"])
      ...     autograd.unreplicate(w)
    """
    if not any(group.remove(variable) for group in of(here()).groups.values()):
        rule = "must be a replicated variable of this worker"
        raise value_error("unreplicate(variable)", rule, variable)


Contribution = dict[int, tuple[float | None, list[Any]]]
"""One trainer's share of a pass: weights and leaves, by variable's number.

Leaves are None where the pass did not reach them.
"""


class ReplicaGroup:
    """The replicated variables of one group of trainers, on one of them.

    Args:
      container: That of the worker.
      names: Names of the trainers, by rank.

    Attributes:
      names: The argument of the same name.
      members: The variables and their weights, by number.
      passes: Number of passes of this trainer that have begun.
    """

    def __init__(self, container: Container, names: tuple[str, ...]) -> None:
        self.names = names
        self.members: dict[int, tuple[Variable, Weight]] = {}
        self.passes = 0
        self._container = container
        self._made = 0

    def remove(self, variable: Variable) -> bool:
        """Makes a variable the worker's own; returns whether it was in the group."""
        for number, (member, _) in self.members.items():
            if member is variable:
                del self.members[number]
                self._container.replicated.discard(variable)
                return True
        return False

    def add(self, params: PyTree, weight: Weight, timeout: float) -> Variable:
        """Makes a variable with the first trainer's values on all trainers."""
        # Counted before anything can fail, so that trainers stay in step.
        number, self._made = self._made, self._made + 1
        tag = f"replicated variable {number}"
        try:
            made = Variable(params)
            if weight is not None and not callable(weight):
                _check_weight(weight)
        except Exception as error:
            self.refuse(error, tag)
            raise
        leaves = jax.tree.leaves(made.value)
        kinds = {path: abbreviated(x) for path, x in named_leaves(made.value).items()}
        # Only the first one's values count, and only they are sent.
        first = self._container.agent.info.name == self.names[0]
        found = self._gather([kinds, leaves if first else None], timeout, tag)
        for name, (others, _) in found.items():
            _check_alike(found[self.names[0]][0], others, self.names[0], name)
        pairs = zip(found[self.names[0]][1], leaves, strict=True)
        made.value = made.structure.unflatten([_like(*pair) for pair in pairs])
        self.members[number] = made, weight
        self._container.replicated.add(made)
        return made

    def contribution(self, found: Mapping[Variable, PyTree]) -> Contribution:
        """Makes this trainer's share from the gradients of its pass.

        Raises:
          ValueError: A weight is none.
          Exception: What the function that gives a weight has raised.
        """
        own: Contribution = {}
        for number, (variable, weight) in self.members.items():
            # At each pass: the number of examples may differ from batch to batch.
            weight = weight() if callable(weight) else weight
            leaves: list[Any] = [None] * variable.structure.num_leaves
            if variable in found:
                leaves = variable.structure.flatten_up_to(found[variable])
            own[number] = None if weight is None else _check_weight(weight), leaves
        return own

    def reduce(
        self, own: Contribution, deadline: current.Deadline
    ) -> dict[Variable, PyTree]:
        """Exchanges contributions; returns the gradients of all trainers' examples.

        Raises: what is said at `replicated`.
        """
        left = deadline.remaining()
        seconds = 0.0 if left is None else max(left, _INSTANT)
        found = self._gather(own, seconds, self.tag)
        parts = [found[name] for name in self.names]
        # Before any sum: a variable that one trainer has left would shift the others.
        self._check_numbers(parts)
        gradients = {}
        for number, (variable, _) in self.members.items():
            gradient = _mean(parts, number, self.names)
            if gradient is not None:
                gradients[variable] = variable.placed(gradient)
        return gradients

    def _check_numbers(self, parts: Sequence[Contribution]) -> None:
        numbers = [sorted(part) for part in parts]
        if any(each != numbers[0] for each in numbers):
            rule = "must be called for the same variables on all trainers"
            got = ", ".join(
                f"variables {each} left on {name!r}"
                for name, each in zip(self.names, numbers, strict=True)
            )
            raise value_error("unreplicate(variable)", rule, got)

    @property
    def tag(self) -> str:
        """Names the pass under way in its collective."""
        return f"replicated pass {self.passes}"

    def refuse(self, error: BaseException, tag: str) -> None:
        """Fails a collective on all trainers, without waiting for them."""
        group = self._container.agent.group
        group.refuse(self.names, error, "all_gather", tag)

    def _gather(self, brought: PyTree, seconds: float, tag: str) -> dict[str, Any]:
        try:
            group = self._container.agent.group
            found = group.all_gather(brought, self.names, seconds, "all_gather", tag)
        except (WorkerLost, RpcTimeout, CollectiveMismatch):
            raise
        except RpcError as error:
            told = f"The replicated variables were not reduced: {error}"
            raise AutogradError(told) from error
        return found


class Replicas:
    """All replicated variables of one worker, by their groups.

    Attributes:
      groups: By the names of their trainers.
      lock: Held by the thread on which a pass of this trainer begins, while it lasts.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[str, ...], ReplicaGroup] = {}
        self.lock = InterruptSafeLock()

    def reduced(
        self, run: Callable[[dict[Variable, PyTree]], current.Deadline]
    ) -> dict[Variable, PyTree]:
        """Runs a pass of this trainer; returns the gradients of all trainers' examples.

        Takes the lock; `lock.releasing` releases it.

        Args:
          run: `run(found)` runs the pass, adds its own gradients of the variables to
            `found`, and returns its deadline.

        Raises: what is said at `replicated`.
        """
        if not self.lock.try_acquire():
            rule = "must run alone where variables are replicated: passes of trainers "
            rule += "belong together by their order"
            raise refused("backward()", rule, "another pass of this worker under way")
        # Sorted: trainers of two groups meet in the same order, and not in a circle.
        groups = [group for _, group in sorted(self.groups.items()) if group.members]
        for group in groups:
            # Counted where a pass begins, so that one that fails counts on all trainers
            # alike.
            group.passes += 1
        awaited = list(groups)
        found: dict[Variable, PyTree] = {}
        gradients: dict[Variable, PyTree] = {}
        try:
            deadline = run(found)
            # All weights are asked for before the first collective: a function that
            # raises then fails every collective alike.
            contributions = [group.contribution(found) for group in groups]
            for group, own in zip(groups, contributions, strict=True):
                awaited.remove(group)
                gradients |= group.reduce(own, deadline)
        except BaseException as error:
            for group in awaited:
                group.refuse(error, group.tag)
            raise
        return gradients


def install(container: Container) -> None:
    """Gives the worker with these contexts its replicas."""
    container.agent.extension_state[STATE] = Replicas()


def of(container: Container) -> Replicas:
    """Return the replicas of the worker with these contexts."""
    found: Replicas = container.agent.extension_state[STATE]
    return found


# --- arguments ---


def _names(agent: Agent, group: Iterable[str]) -> tuple[str, ...]:
    """Check the trainers' names and sort them by rank."""
    names = [group] if isinstance(group, str) else group
    chosen = set(listed(f"{_CALL}(group)", names, str, "must be names of workers"))
    ranks = {worker.name: worker.id for worker in agent.group.workers()}
    if agent.info.name not in chosen or not chosen <= ranks.keys():
        rule = f"must be workers of the group, {agent.info.name} among them"
        raise value_error(f"{_CALL}(group)", rule, sorted(map(str, chosen)))
    return tuple(sorted(chosen, key=lambda name: ranks[name]))


def _check_weight(weight: SupportsFloat) -> float:
    """Check a weight and return it as a float."""
    number = isinstance(weight, int | float | np.number) or (
        isinstance(weight, np.ndarray | jax.Array) and weight.shape == ()
    )
    if isinstance(weight, bool) or not number or not 0 <= float(weight) < float("inf"):
        rule = "must be a number that is not negative, or a function that returns one"
        raise value_error(f"{_CALL}(weight=...)", rule, weight)
    return float(weight)


def _like(array: jax.Array | np.ndarray, own: jax.Array) -> jax.Array:
    """Copy a received array, placed like `own`."""
    # A copy: within one process another trainer may own the array.
    if is_key(array):
        return jax.device_put(array, own.sharding)
    return beside(jax.device_put(np.array(array)), own)


def _check_alike(
    kinds: Mapping[str, str], others: Mapping[str, str], first: str, name: str
) -> None:
    if found := first_difference(kinds, others):
        path, one, other = found
        rule = f"must be alike on all trainers: {one} at {path} on {first!r}"
        raise value_error(f"{_CALL}(params)", rule, f"{other} on {name!r}")


# --- the mean ---


def _mean(
    parts: Sequence[Contribution], number: int, names: Sequence[str]
) -> list[Any] | None:
    """Return the weighted mean of a variable's leaves, or their sum without weights.

    None if no pass reached it.

    Raises:
      ValueError: No weight is positive, or some trainers have none.
    """
    given = [part[number][0] for part in parts]
    weights = [weight for weight in given if weight is not None]
    if weights and len(weights) < len(given):
        rule = f"must be None on all of {', '.join(names)}, or on none"
        raise value_error(f"{_CALL}(weight=...)", rule, given)
    rows = list(zip(*(part[number][1] for part in parts), strict=True))
    if all(leaf is None for row in rows for leaf in row):
        return None
    if weights and not (sum(weights) > 0 and isfinite(sum(weights))):
        rule = f"must be positive on one of {', '.join(names)}"
        raise value_error(f"{_CALL}(weight=...)", rule, weights)
    return [_leaf_mean(row, weights) for row in rows]


def _leaf_mean(row: Sequence[Any], weights: Sequence[float]) -> jax.Array | None:
    like = next((leaf for leaf in row if leaf is not None), None)
    if like is None:
        return None
    # NumPy zeros in place of absent leaves: one program for all patterns and devices.
    nothing = np.zeros(like.shape, like.dtype)
    filled = [nothing if leaf is None else np.asarray(leaf) for leaf in row]
    return _weighted(filled, list(weights))


@jax.jit
def _weighted(leaves: Sequence[Any], weights: Sequence[Any]) -> jax.Array:
    """Return the weighted mean in the order of ranks, in float32 at least.

    The sum where there are no weights.
    """
    wide = [leaf.astype(wide_dtype(leaf.dtype)) for leaf in leaves]
    if not weights:
        return functools.reduce(jnp.add, wide).astype(leaves[0].dtype)
    summands = [
        jnp.where(weight == 0, jnp.zeros_like(leaf), reduction.scaled(leaf, weight))
        for leaf, weight in zip(wide, weights, strict=True)
    ]
    total = functools.reduce(jnp.add, summands)
    mean = reduction.divided(total, functools.reduce(jnp.add, weights))
    return mean.astype(leaves[0].dtype)
