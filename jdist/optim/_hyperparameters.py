"""Hyperparameters: their rules, and their values at one step.

A numeric hyperparameter is a Python number, a scalar array (traced or not), or a
*schedule*: a function of the number of steps that the leaf has taken so far, such as
those of `optax.schedules`. Its rule is checked whenever its value can be seen: at
construction, at an override, and outside jit for what a schedule returns.

Python numbers stay Python numbers up to the arithmetic of the leaf, so that
`1 - 0.999` is computed in double precision whatever the dtype of the parameter: in
float32, 0.999 alone is already wrong by 3e-8, and 1 minus it by 3e-5.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jdist._compat import is_traced
from jdist._errors import requirement

Number: TypeAlias = float | jax.Array | Callable[[jax.Array], Any]
"""A number, a scalar array, or a schedule from the step count to either."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on a number: in words, and as a test."""

    says: str
    holds: Callable[[Any], Any]


# NaN satisfies none of them: it compares false with everything, itself included.
A_NUMBER = Rule("must be a number", lambda x: x == x)
AT_LEAST_0 = Rule("must be at least 0", lambda x: x >= 0)
BELOW_1 = Rule("must be at least 0 and below 1", lambda x: x >= 0 and x < 1)


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """One argument of an optimizer.

    Attributes:
      name: As in torch.
      value: As given to the constructor.
      rules: One per number: none for a flag, one for a number, two for a pair.
      fixed: Why no step can override it; empty if a step can.
    """

    name: str
    value: Any
    rules: tuple[Rule, ...] = (A_NUMBER,)
    fixed: str = ""

    def check(self, call: str, value: object) -> None:
        """Refuses a value of the wrong kind, or one that is seen to break a rule."""
        argument = f"{call}({self.name}=...)"
        if not self.rules:
            if not isinstance(value, bool):
                raise TypeError(
                    requirement(argument, "must be True or False", repr(value))
                )
            return
        if len(self.rules) == 1:
            _check_number(argument, self.rules[0], value)
            return
        if not isinstance(value, Sequence) or len(value) != len(self.rules):
            rule = f"must be a sequence of {len(self.rules)} numbers"
            raise TypeError(requirement(argument, rule, repr(value)))
        for index, entry in enumerate(value):
            name = f"{self.name}[{index}]"
            _check_number(f"{call}({name}=...)", self.rules[index], entry)

    def at(
        self, call: str, value: Any, count: jax.Array | None, dtype: DTypeLike
    ) -> Any:
        """The value at one step: schedules called, arrays in the leaf's precision."""
        if not self.rules:
            return value
        if count is None and callable(value):
            rule = "must be a number: without a schedule at construction no steps are "
            rule += "counted"
            remedy = "Give a schedule to the constructor, or its value to the step."
            raise ValueError(
                requirement(f"{call}({self.name}=...)", rule, value, remedy)
            )
        if len(self.rules) > 1:
            resolved = tuple(_at(entry, count, dtype) for entry in value)
        else:
            resolved = _at(value, count, dtype)
        # What a schedule returns is seen here for the first time.
        self.check(call, resolved)
        return resolved


_NUMERIC = (int, float, np.number, np.ndarray, jax.Array)


def flag(name: str, value: bool) -> Hyperparameter:
    """A hyperparameter that is on or off and chooses the program."""
    return Hyperparameter(name, value, (), "it chooses the program, and is no number")


def known_zero(value: object) -> bool:
    """Whether a value is a Python 0, so that the program can leave its term out."""
    return isinstance(value, int | float) and value == 0


def scheduled(*values: object) -> bool:
    """Whether any value is a schedule, which needs a step count."""
    return any(map(callable, values))


def check_overrides(
    call: str, specs: Mapping[str, Hyperparameter], overrides: Mapping[str, Any]
) -> None:
    """Refuses overrides that are unknown, fixed, or seen to break a rule."""
    for name, value in overrides.items():
        if name not in specs:
            numeric = ", ".join(n for n, spec in specs.items() if not spec.fixed)
            rule = f"has no hyperparameter {name!r} to override"
            remedy = f"It has {numeric or 'none'}."
            raise TypeError(requirement(call, rule, f"{name}={value!r}", remedy))
        # A flag chooses the program, and a state may lack what another value would
        # need.
        if specs[name].fixed:
            rule = f"cannot be overridden in a step: {specs[name].fixed}"
            raise ValueError(requirement(f"{call}({name}=...)", rule, value))
        specs[name].check(call, value)


def resolved(
    call: str,
    specs: Mapping[str, Hyperparameter],
    overrides: Mapping[str, Any],
    count: jax.Array | None,
    dtype: DTypeLike,
) -> SimpleNamespace:
    """All hyperparameters of one leaf at one step, by name."""
    return SimpleNamespace(
        **{
            name: spec.at(call, overrides.get(name, spec.value), count, dtype)
            for name, spec in specs.items()
        }
    )


def _at(value: Any, count: jax.Array | None, dtype: DTypeLike) -> Any:
    if callable(value):
        # A schedule sees the leaf's own count, which stands still where a gradient is
        # None.
        value = value(count)
    # NumPy's scalars are strongly typed and would widen a float32 leaf.
    if isinstance(value, np.generic):
        value = value.item()
    # Python's numbers stay, see the module; arrays take the precision of the step.
    return value if isinstance(value, int | float) else jnp.asarray(value, dtype)


def _check_number(argument: str, rule: Rule, value: object) -> None:
    if callable(value):
        return
    # `bool` is an int, and no number.
    if isinstance(value, bool) or not isinstance(value, _NUMERIC):
        kind = "must be a number, a scalar array or a schedule"
        remedy = "`float` makes a number of a text." if isinstance(value, str) else ""
        raise TypeError(requirement(argument, kind, repr(value), remedy))
    if np.shape(value) != ():
        got = f"an array of shape {np.shape(value)}"
        remedy = "For a value per parameter use `by_label`."
        raise ValueError(requirement(argument, "must be a scalar", got, remedy))
    # A traced value cannot be looked at, and is trusted.
    if not is_traced(value) and not rule.holds(value):
        raise ValueError(requirement(argument, rule.says, value))
