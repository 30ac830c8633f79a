"""Constructors of optimizers: hyperparameters are declared by their annotations.

    @constructor("SGD")                              torch's name of the class
    def sgd(*, lr: NotNegative = 1e-2, ..., nesterov: bool = False) -> LeafRule:

An annotation carries the rule of a number, or the rules of each number of a tuple. A
plain `Number` may be any, `bool` is a flag, and other types are no hyperparameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import (
    Annotated,
    Any,
    NamedTuple,
    ParamSpec,
    get_args,
    get_origin,
    get_type_hints,
)

from jdist._errors import requirement
from jdist._tree import type_name
from jdist.optim._hyperparameters import (
    A_NUMBER,
    NUMERIC,
    Hyperparameter,
    Number,
    Rule,
    flag,
    unknown,
)
from jdist.optim._optimizer import InitLeaf, Optimizer, StepLeaf, leafwise

Given = ParamSpec("Given")

# torch's class names, which programs written for torch look up.
constructors: dict[str, Callable[..., Optimizer]] = {}
"""The constructors by torch's class names."""


class LeafRule(NamedTuple):
    """What a constructor makes of its hyperparameters; see `leafwise`."""

    init_leaf: InitLeaf

    step_leaf: StepLeaf

    elementwise: bool = True

    dimensions: int | None = None

    rules: Mapping[str, Rule] = {}
    """Rules in the place of declared ones, where they depend on other arguments."""

    fixed: Mapping[str, str] = {}
    """Hyperparameters that no step can override, with the reason or an empty text."""


def constructor(
    torch_name: str,
) -> Callable[[Callable[Given, LeafRule]], Callable[Given, Optimizer]]:
    """Makes an optimizer's constructor of a function from hyperparameters to a rule.

    Args:
      torch_name: The name under which it is in `functional_optim_map`.

    Raises:
      TypeError: In a call: a hyperparameter without its name, the parameters, or a name
        that the optimizer does not have.

    Example:
      >>> from jdist import optim
      >>> optim.sgd(learning_rate=0.5)
      Traceback (most recent call last):
        ...
      TypeError: `sgd` has no hyperparameter 'learning_rate'. Got learning_rate=0.5.
      Say `lr=`.
    """

    def of(function: Callable[Given, LeafRule]) -> Callable[Given, Optimizer]:
        name, signature = function.__name__, inspect.signature(function)
        parameters = signature.parameters
        hints = get_type_hints(function, include_extras=True)

        @functools.wraps(function)
        def made(*unnamed: Given.args, **given: Given.kwargs) -> Optimizer:
            if unnamed:
                raise TypeError(_unnamed(name, unnamed[0], next(iter(parameters))))
            for each, value in given.items():
                if each not in parameters:
                    raise TypeError(unknown(name, each, value, tuple(parameters)))
            rule = function(**given)  # type: ignore[call-arg]
            hyperparameters = [
                _declared(each, given.get(each, parameter.default), hints[each], rule)
                for each, parameter in parameters.items()
                if _rules(hints[each]) is not None
            ]
            return leafwise(
                name,
                hyperparameters,
                rule.init_leaf,
                rule.step_leaf,
                elementwise=rule.elementwise,
                dimensions=rule.dimensions,
            )

        shown = signature.replace(return_annotation="Optimizer")
        setattr(made, "__signature__", shown)  # noqa: B010 - types know no such name
        constructors[torch_name] = made
        return made

    return of


def _declared(name: str, value: Any, hint: Any, rule: LeafRule) -> Hyperparameter:
    rules = (rule.rules[name],) if name in rule.rules else _rules(hint)
    if not rules:
        return flag(name, value)
    return Hyperparameter(name, value, rules, rule.fixed.get(name, ""))


def _rules(hint: Any) -> tuple[Rule, ...] | None:
    """The rules of an annotation: none of a flag; None for no hyperparameter."""
    if get_origin(hint) is Annotated:
        return get_args(hint)[1:]
    return {Number: (A_NUMBER,), bool: ()}.get(hint)


def _unnamed(name: str, value: object, first: str) -> str:
    """The refusal of a hyperparameter, or of parameters, without a name."""
    got = type_name(value)
    remedy = f"Parameters are given to `init`: `{name}(...).init(params)`."
    if callable(value) or isinstance(value, NUMERIC):
        got, remedy = repr(value), f"Say `{name}({first}=...)`."
    rule = "takes its hyperparameters by name"
    return requirement(f"{name}(...)", rule, got, remedy)
