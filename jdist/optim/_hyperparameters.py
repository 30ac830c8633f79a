"""Hyperparameters: their rules and their values at one step.

A numeric hyperparameter is a Python number, a scalar array (traced or not), or a
*schedule*: a function of the number of steps that the leaf has taken so far, such as
those of `optax.schedules`. Its rule is checked wherever its value is known: at
construction, at an override, and outside jit for the result of a schedule.

Python numbers stay Python numbers up to the arithmetic of the leaf, so that
`1 - 0.999` is computed in double precision for every dtype of the parameter. In
float32, 0.999 has a relative error of 3e-8, and 1 - 0.999 one of 3e-5.
"""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jdist._compat import is_traced
from jdist._errors import (
    check_flags,
    check_type,
    quoted,
    requirement,
    type_error,
    value_error,
)

Number: TypeAlias = float | jax.Array | Callable[[jax.Array], Any]
"""A number, a scalar array, or a schedule from the step count to either."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on a number, as text for errors and as a predicate."""

    says: str
    holds: Callable[[Any], Any]
    optional: bool = False
    """Whether None may stand for the number."""


# NaN satisfies none of them: it compares false with everything, itself included.
A_NUMBER = Rule("must be a number", lambda x: x == x)
AT_LEAST_0 = Rule("must be at least 0", lambda x: x >= 0)
BELOW_1 = Rule("must be at least 0 and below 1", lambda x: x >= 0 and x < 1)
UP_TO_1 = Rule("must be at least 0 and at most 1", lambda x: x >= 0 and x <= 1)

NotNegative: TypeAlias = Annotated[Number, AT_LEAST_0]
"""A number of at least 0."""

Betas: TypeAlias = Annotated[tuple[Number, Number], BELOW_1, BELOW_1]
"""The decays of two moving averages."""


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """One argument of an optimizer.

    Attributes:
      name: Name of the argument, as in torch.
      value: Value passed to the constructor.
      rules: One rule for each number: none for a flag, one for a number, two for a
        pair.
      fixed: The reason why a step cannot override it; empty if it can.
    """

    name: str
    value: Any
    rules: tuple[Rule, ...] = (A_NUMBER,)
    fixed: str = ""

    def check(self, call: str, value: object) -> None:
        """Checks the kind of a value and, unless it is traced, its rule."""
        argument = f"{call}({self.name}=...)"
        if not self.rules:
            check_flags(call, **{self.name: value})
            return
        if len(self.rules) == 1:
            _check_number(argument, self.rules[0], value)
            return
        if not isinstance(value, Sequence) or len(value) != len(self.rules):
            rule = f"must be a sequence of {len(self.rules)} numbers"
            raise type_error(argument, rule, quoted(value))
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
            raise value_error(f"{call}({self.name}=...)", rule, value, remedy)
        argument = f"{call}({self.name}=...)"
        if len(self.rules) > 1:
            resolved = tuple(_at(argument, entry, count, dtype) for entry in value)
        else:
            resolved = _at(argument, value, count, dtype)
        # The result of a schedule is not known before.
        self.check(call, resolved)
        return resolved


NUMERIC = (int, float, np.number, np.ndarray, jax.Array)


_ELSEWHERE = {
    "learning_rate": "lr",
    **dict.fromkeys(("b1", "b2", "beta1", "beta2"), "betas"),
}
"""Names of hyperparameters in optax and other packages; jdist has torch's."""


def unknown(
    call: str, name: str, value: object, known: Collection[str], purpose: str = ""
) -> str:
    """The refusal of a hyperparameter that an optimizer does not have."""
    meant = [_ELSEWHERE[name]] if _ELSEWHERE.get(name) in known else []
    meant += difflib.get_close_matches(name, known, n=1)
    remedy = f"It has {', '.join(known) or 'none'}."
    remedy = f"Say `{meant[0]}=`." if meant else remedy
    rule = f"has no hyperparameter {name!r}{purpose}"
    return requirement(call, rule, f"{name}={value!r}", remedy)


def flag(name: str, value: bool) -> Hyperparameter:
    """A hyperparameter that is on or off and chooses the program."""
    return Hyperparameter(name, value, (), "it chooses the program, and is no number")


def known_zero(value: object) -> bool:
    """Whether a value is a Python 0, so that the program can omit its term."""
    return isinstance(value, int | float) and value == 0


def scheduled(*values: object) -> bool:
    """Whether any value is a schedule, which needs a step count."""
    return any(map(callable, values))


def check_overrides(
    call: str, specs: Mapping[str, Hyperparameter], overrides: Mapping[str, Any]
) -> None:
    """Checks that overrides are known, not fixed, and unless traced within rules."""
    for name, value in overrides.items():
        if name not in specs:
            numeric = [n for n, spec in specs.items() if not spec.fixed]
            raise TypeError(unknown(call, name, value, numeric, " to override"))
        # A flag selects the program, and another value may need a buffer that the state
        # does not have.
        if specs[name].fixed:
            rule = f"cannot be overridden in a step: {specs[name].fixed}"
            raise value_error(f"{call}({name}=...)", rule, value)
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


def _at(argument: str, value: Any, count: jax.Array | None, dtype: DTypeLike) -> Any:
    if value is None:
        return None
    if callable(value):
        # The leaf's own count, which does not advance where the gradient is None.
        value = value(count)
        rule = "must return a number or a scalar array"
        check_type(f"{argument}, a schedule,", value, NUMERIC, rule)
    # NumPy's scalars are strongly typed and would widen a float32 leaf.
    if isinstance(value, np.generic):
        value = value.item()
    # Python numbers stay, as the module says; arrays take the precision of the step,
    # so that a float64 rate does not widen a float32 leaf.
    return value if isinstance(value, int | float) else jnp.asarray(value, dtype)


def _check_number(argument: str, rule: Rule, value: object) -> None:
    if not (callable(value) or (value is None and rule.optional)):
        kind = "must be a number, a scalar array or a schedule"
        check_scalar(argument, rule, value, kind)


def check_scalar(
    argument: str,
    rule: Rule,
    value: object,
    kind: str = "must be a number or a scalar array",
    remedy: str = "For a value per parameter use `by_label`.",
) -> None:
    """Checks that a value is a scalar and, unless it is traced, its rule.

    Raises:
      TypeError: It is no number.
      ValueError: It is an array of several, or breaks its rule.
    """
    # `bool` is an int, and no number.
    if isinstance(value, bool) or not isinstance(value, NUMERIC):
        of_text = "`float` converts it to a number." if isinstance(value, str) else ""
        raise type_error(argument, kind, quoted(value), of_text)
    if np.shape(value) != ():
        got = f"an array of shape {np.shape(value)}"
        raise value_error(argument, "must be a scalar", got, remedy)
    # The value of a tracer is unknown.
    if not is_traced(value) and not rule.holds(value):
        raise value_error(argument, rule.says, value)
