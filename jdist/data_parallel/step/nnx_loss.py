"""Flax NNX modules as parameters, model state and a loss function of arrays.

    nnx.Param variables                      the parameters
    batch statistics and other variables     the model state
    random streams                           restarted from the step's key

A training step is a function, and a module an object that changes when it is called.
The module is therefore built inside the step, called, and split again.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jdist._errors import check_function, value_error
from jdist._flax import (
    ModuleParts,
    RandomStreams,
    check_module,
    other_variables,
    put_together,
    run,
    taken_apart,
)
from jdist._tree import PyTree
from jdist.segment.internal import READS

if TYPE_CHECKING:
    from flax import nnx


class FromNNX(NamedTuple):
    """A loss function of arrays, and its initial values: see `from_nnx`."""

    loss_fn: Callable[..., PyTree]
    in_evaluation: Callable[..., PyTree]
    params: PyTree
    states: PyTree
    module: Callable[..., PyTree]


def from_nnx(model: "nnx.Module | Any", loss_fn: Callable[..., PyTree]) -> FromNNX:
    """Converts the loss of a Flax NNX module for `train_step`.

    Args:
      model: The module; it is read, not changed.
      loss_fn: `loss_fn(model, batch)`, which returns one loss per example, or with
        `has_aux=True` the pair `(losses, aux)`. It may call the model in any way.

    Returns:
      A tuple `made` of

      - `loss_fn`: the loss function for `train_step`;
      - `in_evaluation`: that for `train_step(in_evaluation=...)`, with the module in
        evaluation mode, in which batch normalisation uses its averages and dropout is
        off;
      - `params`: parameters for `TrainStep.init`, an `nnx.State` of the module's
        `nnx.Param`s;
      - `states`: states for `TrainStep.init`, an `nnx.State` of all other variables;
        None without any;
      - `module`: `made.module(params, states)` is a module with these values, such as
        those of a `TrainState`.

    Raises:
      TypeError: `model` is no NNX module.
      ValueError: In a step: the model draws random numbers, as dropout does, and the
        state has no key for them. Give `init` one.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jdist import data_parallel, optim
      >>> class Net(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.norm = nnx.BatchNorm(3, rngs=rngs)
      ...         self.dense = nnx.Linear(3, 1, rngs=rngs)
      ...
      ...     def __call__(self, x):
      ...         return self.dense(self.norm(x))[:, 0]
      >>> made = from_nnx(Net(nnx.Rngs(0)), lambda net, b: (net(b[0]) - b[1]) ** 2)
      >>> step = data_parallel.train_step(made.loss_fn, optim.adam(), replicas=2)
      >>> state = step.init(made.params, states=made.states)
      >>> x = jax.random.normal(jax.random.key(1), (8, 3))
      >>> state, _ = step(state, (x, x[:, 0]))
      >>> trained = made.module(state.params, state.states)
      >>> bool(jnp.all(trained.norm.mean[...] != 0))
      True
    """
    check_module("from_nnx(model=...)", model)
    check_function("from_nnx(loss_fn=...)", loss_fn)
    parts = taken_apart(model)
    streams = RandomStreams.of(parts.streams)
    stateful = bool(jax.tree.leaves(parts.rest))

    def parts_of(params: PyTree, states: PyTree) -> ModuleParts:
        rest = parts.rest if states is None else states
        return parts._replace(params=params, rest=rest)

    def losses(
        params: PyTree,
        batch: PyTree,
        key: jax.Array | None = None,
        states: PyTree = None,
    ) -> PyTree:
        given = parts_of(params, states)
        if key is not None:
            given = given._replace(streams=streams.begun(key))
        found = run(lambda model: loss_fn(model, batch), given)
        # Asked for only where a draw is an error: the answer may take another call.
        if key is None and found.drew():
            rule = "must be given where the model draws random numbers, as dropout does"
            remedy = "Without it all replicas and steps would draw the same ones."
            raise value_error("init(key=...)", rule, None, remedy)
        if not stateful:
            return found.output
        output = found.output
        first, *aux = output if isinstance(output, tuple) else (output,)
        return first, found.rest, *aux

    def in_evaluation(
        params: PyTree, batch: PyTree, *, states: PyTree = None
    ) -> PyTree:
        # With the streams of the model: in evaluation mode dropout draws nothing.
        given = parts_of(params, states)
        return loss_fn(put_together(*given, evaluation=True), batch)

    def module(params: PyTree, states: PyTree = None) -> "nnx.Module":
        return put_together(*parts_of(params, states))

    for fn in (losses, in_evaluation):
        setattr(fn, READS, (loss_fn, parts.graph))
    states = parts.rest if stateful else None
    return FromNNX(losses, in_evaluation, parts.params, states, module)


def check_stateless(argument: str, params: PyTree) -> None:
    """Checks that parameters are not a Flax module with other variables.

    Args:
      argument: Function and argument, such as `"init(params=...)"`.
      params: Pytree of arrays.

    Raises:
      ValueError: There is an NNX module, or a state of one, with variables that are no
        parameters: batch statistics would be differentiated, and their update lost.
    """
    found = other_variables(params)
    if found:
        got = ", ".join(f"{kind} at {path}" for path, kind in found.items())
        remedy = (
            "Take the module apart by `data_parallel.from_nnx(model, loss_fn)`, or by "
            "`nnx.split(model, nnx.Param, ...)` and give the rest as `states`."
        )
        raise value_error(argument, "must hold parameters alone", got, remedy)
