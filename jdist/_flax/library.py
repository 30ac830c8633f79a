"""Flax NNX, which is looked up and never imported.

Flax is an optional dependency, and slow to import. A program that has a module has
imported it.
"""

import sys
from types import ModuleType

from jdist._errors import requirement
from jdist._tree import type_name


def loaded() -> ModuleType | None:
    """Returns `flax.nnx`, or None if the program has not imported it."""
    found = sys.modules.get("flax.nnx")
    # Another thread may be half-way through importing it.
    return found if hasattr(found, "Module") and hasattr(found, "split") else None


def is_module(value: object) -> bool:
    """Whether a value is a Flax NNX module; no value is, where Flax is not imported."""
    nnx = loaded()
    return nnx is not None and isinstance(value, nnx.Module)


def check_module(argument: str, value: object, remedy: str = "") -> None:
    """Checks that a value is a Flax NNX module.

    Args:
      argument: Function and argument, as for `requirement`.
      value: What was given.
      remedy: As for `requirement`.

    Raises:
      TypeError: It is none.
    """
    if not is_module(value):
        rule = "must be a Flax NNX module"
        raise TypeError(requirement(argument, rule, type_name(value), remedy))
