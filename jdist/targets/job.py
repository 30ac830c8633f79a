"""Jobs: functions of hardware and batch size that return a program to compile."""

import inspect
from collections.abc import Callable
from typing import Any

from jdist._errors import value_error
from jdist._own_code import named, own_code
from jdist._tree import PyTree, type_name
from jdist.targets.compilation import compile
from jdist.targets.hardware import Hardware
from jdist.targets.report import CompiledProgram

Job = Callable[..., tuple[Any, ...]]
"""`job(hardware)` or `job(hardware, batch)`: the function to compile, then the shapes
of its arguments. A default of `batch` is taken unless another is asked for."""


def load(specification: str) -> Job:
    """Loads a job by `module:name`.

    Raises:
      ValueError: There is none, or it is no function of hardware.
      OwnCodeRaised: The module raised.
    """
    found = named(specification, "job")
    if not callable(found) or not _parameters(found):
        rule = "must be a function of the hardware, and of the batch size if it has one"
        raise value_error(specification, rule, type_name(found))
    return found


def takes_batch(job: Job) -> bool:
    """Whether a job has a batch size."""
    return "batch" in _parameters(job)


def program_of(
    job: Job, hardware: Hardware, batch: int | None = None
) -> CompiledProgram:
    """Compiles the program that a job returns.

    Args:
      job: The job.
      hardware: Its first argument.
      batch: Its batch size; None for its default.

    Raises:
      ValueError: It has no batch size, or it returned something else; and what
        `compile` raises.
      OwnCodeRaised: The job raised.
      Unavailable: See `Hardware.devices`.
    """
    name = getattr(job, "__name__", "job")
    if batch is not None and not takes_batch(job):
        rule = "must have a parameter `batch` to be tried with another one"
        raise value_error(f"{name}(hardware)", rule, f"batch={batch}")
    # A missing compiler is raised here, before a job that makes a mesh would raise it
    # as an error of its own.
    _ = hardware.devices
    with own_code(f"{name}({hardware.name})"):
        found = job(hardware) if batch is None else job(hardware, batch=batch)
    if not isinstance(found, tuple) or len(found) < 2 or not _compiles(found[0]):
        rule = "must return the function to compile and the shapes of its arguments"
        raise value_error(f"{name}(hardware)", rule, _told(found))
    fn, *shapes = found
    return compile(fn, *shapes, target=hardware)


def _compiles(found: PyTree) -> bool:
    return callable(found) or hasattr(found, "lower")


def _told(found: PyTree) -> str:
    if not isinstance(found, tuple):
        return type_name(found)
    return f"({', '.join(map(type_name, found))})"


def _parameters(job: Job) -> list[str]:
    return list(inspect.signature(job).parameters)
