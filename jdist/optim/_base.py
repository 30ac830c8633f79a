"""The form that all optimizers share, and the driver that applies a rule per leaf.

An algorithm's file gives two small functions: `init_leaf(param) -> state`, and
`step_leaf(param, grad, state, h) -> (param, state)` with `h` its hyperparameters. All
that is the same for every algorithm is here, once: walking the tree, skipping None,
precision, validation, and overriding a hyperparameter for one step.

A parameter whose gradient is None does not change, nor do its state and its step
count, bit for bit. A leaf that is not a floating array is never updated.

16-bit parameters and their state are widened to float32 within a step and rounded once
at its end, so that an update smaller than the parameter's spacing is rounded, not lost
operation by operation. The state has the dtype of its parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from jdist._compat import is_traced
from jdist._errors import requirement
from jdist._tree import is_inexact, is_none, path_of, wide_dtype

LeafState = Any


@dataclass(frozen=True, slots=True)
class Rule:
    """What a hyperparameter must satisfy; checked whenever its value can be seen."""

    name: str
    says: str
    holds: Callable[[Any], bool]


def at_least_zero(*names: str) -> list[Rule]:
    """The rule that most of torch's hyperparameters share."""
    return [Rule(name, "must be at least 0", lambda x: x >= 0) for name in names]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A pure optimizer: how to make the state, and how to make a step.

    Attributes:
      name: The algorithm's name, as in `optim.sgd`.
      hyperparameters: All of its arguments, by torch's names.
      init_leaf: `init_leaf(param) -> state` of one leaf.
      step_leaf: `step_leaf(param, grad, state, h) -> (param, state)` of one leaf.
      rules: What the numeric hyperparameters must satisfy.
      fixed: Hyperparameters that shape the program or the state and so cannot be
        overridden in a step, with the reason.
    """

    name: str
    hyperparameters: Mapping[str, Any]
    init_leaf: Callable[[jax.Array], LeafState]
    step_leaf: Callable[..., tuple[jax.Array, LeafState]]
    rules: Sequence[Rule] = ()
    fixed: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses hyperparameters that break a rule."""
        self._check(self.hyperparameters)

    def init(self, params: Any) -> Any:
        """The state before the first step: each floating leaf's own NamedTuple.

        Args:
          params: Any pytree.

        Returns:
          Tree like `params`, with a NamedTuple in the place of each floating leaf and
          None in the place of any other.

        Raises:
          ValueError: `params` has no leaves.
        """
        if not jax.tree.leaves(params):
            rule = "must have at least one leaf"
            raise ValueError(requirement(f"{self.name}.init(params)", rule, "none"))
        return jax.tree.map(
            lambda p: self.init_leaf(jnp.asarray(p)) if is_inexact(p) else None, params
        )

    def step(
        self, params: Any, grads: Any, state: Any, **overrides: Any
    ) -> tuple[Any, Any]:
        """One step: pure, so it may be jitted, vmapped, sharded and donated to.

        Args:
          params: The parameters.
          grads: Tree like `params`: a gradient of the leaf's shape and dtype, or None
            to leave that parameter, its state and its count unchanged.
          state: What `init` or the last step returned.
          **overrides: Numeric hyperparameters for this step only; they may be traced
            (no recompilation when they change).

        Returns:
          The new parameters and the new state.

        Raises:
          ValueError: The trees do not match, a gradient's shape or dtype is not its
            parameter's, or an override breaks its rule.
          TypeError: An override is not one of the optimizer's numeric hyperparameters.
        """
        h = self._overridden(overrides)
        structure: Any
        pairs, structure = jax.tree_util.tree_flatten_with_path(params)
        grad_leaves = self._matching(structure, grads, "grads", params)
        state_leaves = self._matching(structure, state, "state", params)
        new = [
            self._step_one(path_of(keys), param, grad, leaf_state, h)
            for (keys, param), grad, leaf_state in zip(
                pairs, grad_leaves, state_leaves, strict=True
            )
        ]
        new_params, new_state = ([pair[i] for pair in new] for i in (0, 1))
        return structure.unflatten(new_params), structure.unflatten(new_state)

    def _step_one(
        self, path: str, param: Any, grad: Any, state: LeafState, h: Mapping[str, Any]
    ) -> tuple[Any, LeafState]:
        if grad is None or not is_inexact(param):
            return param, state
        param = jnp.asarray(param)
        self._check_gradient(path, param, grad)
        wide = wide_dtype(param.dtype)
        real = jnp.finfo(wide).dtype
        values = SimpleNamespace(
            **{
                k: v.astype(real) if isinstance(v, jax.Array) else v
                for k, v in h.items()
            }
        )
        new_param, new_state = self.step_leaf(
            param.astype(wide),
            jnp.asarray(grad).astype(wide),
            jax.tree.map(lambda s: _widened(s, param, wide), state),
            values,
        )
        narrow = jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, state)
        return new_param.astype(param.dtype), narrow

    def _matching(self, structure: Any, tree: Any, name: str, params: Any) -> list[Any]:
        try:
            return structure.flatten_up_to(tree)
        except ValueError as error:
            got = jax.tree.structure(tree, is_leaf=is_none)
            raise ValueError(
                f"`{self.name}.step({name}=...)` must have the structure of params, "
                f"{jax.tree.structure(params)}, with a leaf or None for each "
                f"parameter. Got {got}."
            ) from error

    def _check_gradient(self, path: str, param: jax.Array, grad: Any) -> None:
        expected = (param.shape, param.dtype)
        got = (jnp.shape(grad), jnp.result_type(grad))
        if got != expected:
            raise ValueError(
                f"`{self.name}.step(grads=...)` must match its parameter at {path}, "
                f"{expected[1]} of shape {expected[0]}. Got {got[1]} of shape {got[0]}."
            )

    def _overridden(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        call = f"{self.name}.step"
        numeric = [k for k, v in self.hyperparameters.items() if not _is_flag(v)]
        for name in overrides:
            if name in self.fixed:
                raise ValueError(
                    f"`{call}({name}=...)` cannot be overridden in a "
                    f"step: {self.fixed[name]}."
                )
            if name not in numeric:
                raise TypeError(
                    f"`{call}` has no numeric hyperparameter {name!r} to override. "
                    f"It has {', '.join(numeric)}."
                )
        self._check(overrides)
        return {**self.hyperparameters, **overrides}

    def _check(self, values: Mapping[str, Any]) -> None:
        for rule in self.rules:
            value = values.get(rule.name)
            if value is None or is_traced(value):
                continue
            if not rule.holds(value):
                argument = f"{self.name}({rule.name}=...)"
                raise ValueError(requirement(argument, rule.says, value))


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool | str)


def _widened(leaf: jax.Array, param: jax.Array, wide: Any) -> jax.Array:
    """Moments and buffers, which have their parameter's dtype; counts stay."""
    return leaf.astype(wide) if leaf.dtype == param.dtype else leaf
