"""The registry of functional optimizers, by torch's class names."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jdist._errors import check_function, check_type, requirement
from jdist.optim._optimizer import Optimizer
from jdist.optim.algorithms.constructor import constructors

# Read-only: names are added only by the function below, which never replaces one.
functional_optim_map: Mapping[str, Callable[..., Optimizer]] = MappingProxyType(
    constructors
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
    if constructors.setdefault(name, constructor) is not constructor:
        rule = "must be a name that is free"
        remedy = "It belongs to another constructor; choose another name."
        raise ValueError(requirement(f"{call}(name=...)", rule, name, remedy))
