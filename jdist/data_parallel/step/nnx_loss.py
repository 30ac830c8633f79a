"""Flax NNX modules as parameters, model state and a loss function of arrays.

    nnx.Param variables                      the parameters
    batch statistics and other variables     the model state
    random streams                           restarted from the step's key

A module is an object that changes when it is called; a training step is a function. The
module is therefore built inside the step, called, and split again.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from jdist._errors import check_function, requirement
from jdist._nnx import ModuleParts, RandomStreams, drawn, is_module, taken_apart
from jdist._tree import PyTree, path_of, type_name
from jdist.segment.internal import READS

if TYPE_CHECKING:
    from flax import nnx


@dataclass(frozen=True, slots=True)
class FromNNX:
    """A loss function of arrays, and its initial values; made by `from_nnx`.

    Attributes:
      loss_fn: The loss function for `train_step`.
      in_evaluation: The loss function for `train_step` with the module in evaluation
        mode, in which batch normalisation uses its averages and dropout is off.
      params: Parameters for `TrainStep.init`: an `nnx.State` of the module's
        `nnx.Param`s.
      states: State for `TrainStep.init`: an `nnx.State` of all other variables; None
        without any.
      module: `module(params, states) -> nnx.Module` with these values, such as
        those of a `TrainState`.
    """

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
      >>> step = data_parallel.train_step(made.loss_fn, optim.adam(), mesh=2)
      >>> state = step.init(made.params, states=made.states)
      >>> x = jax.random.normal(jax.random.key(1), (8, 3))
      >>> state, _ = step(state, (x, x[:, 0]))
      >>> trained = made.module(state.params, state.states)
      >>> bool(jnp.all(trained.norm.mean[...] != 0))
      True
    """
    if not is_module(model):
        rule = "must be a Flax NNX module"
        got = type_name(model)
        raise TypeError(requirement("from_nnx(model=...)", rule, got))
    check_function("from_nnx(loss_fn=...)", loss_fn)
    # Imported on use: Flax is an optional dependency.
    from flax import nnx

    parts = taken_apart(model)
    streams = RandomStreams.of(parts.streams)
    stateful = bool(jax.tree.leaves(parts.rest))

    def made(
        params: PyTree, state: PyTree, random: PyTree = parts.streams
    ) -> "nnx.Module":
        kept = parts.rest if state is None else state
        # Copied: a Flax variable can be written only in the trace that created it.
        return nnx.merge(parts.graph, params, random, kept, copy=True)

    def losses(
        params: PyTree,
        batch: PyTree,
        key: jax.Array | None = None,
        states: PyTree = None,
    ) -> PyTree:
        def called(random: PyTree) -> tuple[PyTree, ModuleParts]:
            model = made(params, states, random)
            return loss_fn(model, batch), taken_apart(model)

        begun = parts.streams if key is None else streams.begun(key)
        found, after = called(begun)
        # `drawn` may call the loss again, hence only where a draw would be an error.
        if key is None and drawn(begun, after.streams, lambda own: called(own)[1]):
            rule = "must be given where the model draws random numbers, as dropout does"
            remedy = "Without it all replicas and steps would draw the same ones."
            raise ValueError(requirement("init(key=...)", rule, None, remedy))
        if not stateful:
            return found
        first, *aux = found if isinstance(found, tuple) else (found,)
        return first, after.rest, *aux

    def in_evaluation(
        params: PyTree, batch: PyTree, *, states: PyTree = None
    ) -> PyTree:
        # With the streams of the model: in evaluation mode dropout draws nothing.
        model = made(params, states)
        model.eval()  # A copy of the module; the caller's keeps its mode.
        return loss_fn(model, batch)

    def module(params: PyTree, states: PyTree = None) -> PyTree:
        return made(params, states)

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
    nnx = sys.modules.get("flax.nnx")  # Without that import there are no modules.
    if nnx is None:
        return

    def is_variable(x: object) -> bool:
        return isinstance(x, nnx.Variable)

    for keys, leaf in jax.tree.leaves_with_path(params, is_leaf=is_variable):
        if is_variable(leaf) and not isinstance(leaf, nnx.Param):
            rule = "must hold parameters alone"
            got = f"{type_name(leaf)} at {path_of(keys)}"
            remedy = (
                "Take the module apart by `data_parallel.from_nnx(model, loss_fn)`, or "
                "by `nnx.split(model, nnx.Param, ...)` and give the rest as "
                "`states`."
            )
            raise ValueError(requirement(argument, rule, got, remedy))
