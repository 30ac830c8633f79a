"""Constructors of optimizers, declared by their annotations, by torch's class names.

    @constructor("SGD")                              torch's name of the class
    def sgd(*, lr: NotNegative = 1e-2, ..., nesterov: bool = False) -> LeafRule:

An annotation carries the rule of a number, or the rules of each number of a tuple. A
plain `Number` may be any, `bool` is a flag, and other types are no hyperparameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    NamedTuple,
    ParamSpec,
    get_args,
    get_origin,
    get_type_hints,
)

from jdist._errors import check_function, check_type, requirement, value_error
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
_constructors: dict[str, Callable[..., Optimizer]] = {}

# Read-only: names are added only by the function below, which never replaces one.
functional_optim_map: Mapping[str, Callable[..., Optimizer]] = MappingProxyType(
    _constructors
)
"""Constructors by torch's class name; `register_functional_optim` adds to it."""


class LeafRule(NamedTuple):
    """The rule that a constructor makes from its hyperparameters; see `leafwise`."""

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
        declared = {each: _rules(hints[each]) for each in parameters}

        @functools.wraps(function)
        def made(*unnamed: Given.args, **given: Given.kwargs) -> Optimizer:
            if unnamed:
                raise TypeError(_unnamed(name, unnamed[0], next(iter(parameters))))
            for each, value in given.items():
                if each not in parameters:
                    raise TypeError(unknown(name, each, value, tuple(parameters)))
            rule = function(**given)  # type: ignore[call-arg]
            hyperparameters = [
                _declared(each, given.get(each, parameters[each].default), rules, rule)
                for each, rules in declared.items()
                if rules is not None
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
        _constructors[torch_name] = made
        return made

    return of


def _declared(
    name: str, value: Any, rules: tuple[Rule, ...], made: LeafRule
) -> Hyperparameter:
    if not rules:
        return flag(name, value)
    rules = (made.rules[name],) if name in made.rules else rules
    return Hyperparameter(name, value, rules, made.fixed.get(name, ""))


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
    return requirement(f"{name}(...)", "takes its hyperparameters by name", got, remedy)


def register_functional_optim(name: str, constructor: Callable[..., Optimizer]) -> None:
    """Adds a constructor to `functional_optim_map`.

    Args:
      name: A name that is free, or already this constructor's.
      constructor: Takes hyperparameters by keyword; returns an `Optimizer`, such as
        one made by `leafwise` or `from_optax`.

    Raises:
      TypeError: The name is no text, or the constructor no function.
      ValueError: The name belongs to another constructor. (torch's function silently
        keeps the old one.)

    Example:
      >>> import optax
      >>> from jdist import optim
      >>> def lion(*, lr):
      ...     return optim.from_optax(optax.lion(lr))
      >>> optim.register_functional_optim("Lion", lion)
      >>> optim.functional_optim_map["Lion"] is lion
      True

    References:
      `torch.distributed.optim.utils.register_functional_optim`.
    """
    call = "register_functional_optim"
    check_type(f"{call}(name=...)", name, str, "must be a string")
    rule = "must be a function that returns an optimizer"
    check_function(f"{call}(constructor=...)", constructor, rule)
    # One atomic operation: if two threads register a name, one of them is refused.
    if _constructors.setdefault(name, constructor) is not constructor:
        rule = "must be a name that is free"
        remedy = "It belongs to another constructor; choose another name."
        raise value_error(f"{call}(name=...)", rule, name, remedy)
