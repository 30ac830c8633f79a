"""Compiled optimizers, cached by constructor and arguments.

A script makes a new distributed optimizer for each model, and many trainers may make
the same one for the same parameters. Compiling a step takes as long as a thousand
steps, so a compiled optimizer is cached by its constructor, as long as nothing changes
that its code refers to, and by the arguments: plain values, and other objects by
identity. State is never shared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jdist._errors import type_error, value_error
from jdist._tree import PyTree, type_name
from jdist.optim import Optimizer, from_optax
from jdist.optim.internal import loss_scaling, scaled
from jdist.segment.internal import Contents, FunctionCache, GuardedJit

_ARGUMENT = "DistributedOptimizer(optimizer)"


@dataclass(frozen=True, slots=True)
class CompiledOptimizer:
    """An optimizer, and its step in two forms.

    Attributes:
      contents: What its constructor reads.
      optimizer: The optimizer.
      init: The compiled function that makes its state for parameters on the default
        device.
      compiled: `compiled(params, grads, state, factor, overrides)`: the new parameters
        and state; gradients are first multiplied by the factor unless it is None.
      leaf_by_leaf: The same, each operation by itself: for parameters on several
        devices, which no single program can have.
    """

    contents: Contents
    optimizer: Optimizer
    init: Callable[..., Any]
    compiled: Callable[..., Any]
    leaf_by_leaf: Callable[..., Any]


def compiled_optimizer(
    factory: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> CompiledOptimizer:
    """Compiles the optimizer that `factory(*args, **kwargs)` makes, once.

    Raises:
      TypeError: It makes neither an optimizer nor an optax transformation.
      ValueError: It makes one with a loss scale.
      Exception: What it raises.
    """
    make = partial(factory, *args, **kwargs)
    reads = factory, *args, *kwargs.items()
    return _CACHE.get(reads, (), lambda contents: _program(make, contents))


_CACHE: FunctionCache[CompiledOptimizer] = FunctionCache(
    "DistributedOptimizer", size=64
)


def _program(make: Callable[[], Any], contents: Contents) -> CompiledOptimizer:
    optimizer = _optimizer(make())

    def step(
        params: Sequence[Any],
        grads: Sequence[Any],
        state: PyTree,
        factor: Any,
        overrides: Mapping[str, Any],
    ) -> tuple[Any, Any]:
        if factor is not None:
            # In the step's own program: gradients are read once.
            grads = jax.tree.map(lambda g: scaled(g, factor), grads)
        return optimizer.step(params, grads, state, **overrides)

    # A schedule is the user's code, and may read something that changes.
    compiled = GuardedJit(step, _CACHE.user, {"optimizer": optimizer})
    init = jax.jit(optimizer.init)
    return CompiledOptimizer(contents, optimizer, init, compiled, step)


def _optimizer(made: object) -> Optimizer:
    if isinstance(made, Optimizer):
        optimizer = made
    elif hasattr(made, "init") and hasattr(made, "update"):
        optimizer = from_optax(made)
    else:
        rule = "must make an optimizer of jdist.optim or an optax transformation"
        raise type_error(_ARGUMENT, rule, f"{type_name(made)} from it")
    if loss_scaling(optimizer) is not None:
        rule = "must make an optimizer without a loss scale"
        remedy = (
            "Its scale would be in its state, on the owners, and the loss is "
            "elsewhere. bfloat16 needs none."
        )
        raise value_error(_ARGUMENT, rule, optimizer.name, remedy)
    return optimizer
