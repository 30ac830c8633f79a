"""The registry of functional optimizers, by torch's class names."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jdist._errors import check_function, check_type, requirement
from jdist.optim._optimizer import Optimizer
from jdist.optim.algorithms.adadelta import adadelta
from jdist.optim.algorithms.adafactor import adafactor
from jdist.optim.algorithms.adagrad import adagrad
from jdist.optim.algorithms.adam import adam
from jdist.optim.algorithms.adamax import adamax
from jdist.optim.algorithms.adamw import adamw
from jdist.optim.algorithms.asgd import asgd
from jdist.optim.algorithms.muon import muon
from jdist.optim.algorithms.nadam import nadam
from jdist.optim.algorithms.radam import radam
from jdist.optim.algorithms.rmsprop import rmsprop
from jdist.optim.algorithms.rprop import rprop
from jdist.optim.algorithms.sgd import sgd

# torch's class names, which programs written for torch look up.
_constructors: dict[str, Callable[..., Optimizer]] = {
    "Adadelta": adadelta,
    "Adafactor": adafactor,
    "Adagrad": adagrad,
    "Adam": adam,
    "Adamax": adamax,
    "AdamW": adamw,
    "ASGD": asgd,
    "Muon": muon,
    "NAdam": nadam,
    "RAdam": radam,
    "RMSprop": rmsprop,
    "Rprop": rprop,
    "SGD": sgd,
}

# Read-only: names are added only by the function below, which never replaces one.
functional_optim_map: Mapping[str, Callable[..., Optimizer]] = MappingProxyType(
    _constructors
)
"""Constructors by torch's class name; `register_functional_optim` adds to it."""


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
    check_type(f"{call}(name=...)", name, str, "must be a text")
    rule = "must be a function that returns an optimizer"
    check_function(f"{call}(constructor=...)", constructor, rule)
    # One atomic operation: if two threads register a name, one of them is refused.
    if _constructors.setdefault(name, constructor) is not constructor:
        rule = "must be a name that is free"
        remedy = "It belongs to another constructor; choose another name."
        raise ValueError(requirement(f"{call}(name=...)", rule, name, remedy))
