"""What a pipeline refuses before it begins: the rules for its arguments."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist._compat import is_traced
from jdist._errors import requirement
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.stages.stage import Stage


def key_given(key: Any, stage: int) -> Any:
    """The key.

    Raises:
      ValueError: There is none.
    """
    if key is None:
        rule = f"must be given, because stage {stage} takes a PRNG key"
        raise ValueError(requirement("Pipeline.value_and_grad(key=...)", rule, "None"))
    return key


def check_not_traced(call: str, *trees: Any) -> None:
    """Refuses a transformation around a pipeline that has devices of its own.

    Raises:
      ValueError: The call is inside `jax.jit`, `jax.grad` or another one.
    """
    # Inside `jit` even an array of zeros is traced.
    if any(is_traced(leaf) for leaf in jax.tree.leaves((trees, jnp.zeros(())))):
        rule = "must be called outside of jax.jit, jax.grad and other transformations: "
        rule += "its stages are on devices that it chooses, and compiled for them"
        remedy = "Call it as it is; without devices or a mesh it may be inside jit."
        raise ValueError(requirement(call, rule, "traced arrays", remedy))


def check_arguments(
    schedule: Schedule, stages: Sequence[Stage], reduction: str
) -> None:
    """Refuses a schedule or a reduction that does not go with the stages.

    Raises:
      TypeError: It is no schedule, but its name, for example.
      ValueError: It does not.
    """
    _check_no_name(schedule, len(stages))
    _check_schedule(schedule, stages)
    _check_joining(stages, reduction)


def _check_no_name(schedule: object, stages: int) -> None:
    """Refuses the name of a schedule, and the function that makes one.

    Raises:
      TypeError: It is no schedule.
    """
    if not isinstance(schedule, Schedule):
        rule = "must be a Schedule"
        remedy = (
            f"Functions of jdist.pipeline make one: `one_f_one_b({stages}, 4)` is 1F1B "
            "with 4 micro-batches; there are `gpipe`, `interleaved` and others."
        )
        raise TypeError(requirement("Pipeline(schedule)", rule, repr(schedule), remedy))


def _check_schedule(schedule: Schedule, stages: Sequence[Stage]) -> None:
    """Refuses a schedule that does not fit the stages, or not a pipeline that flushes.

    Raises:
      ValueError: It does not.
    """
    if schedule.stages != len(stages):
        rule = f"must be one for the {len(stages)} stages"
        got = f"one for {schedule.stages}"
        raise ValueError(requirement("Pipeline(schedule)", rule, got))
    schedule.validate()
    if schedule.forward_only or schedule.update_policy is not None:
        rule = "must have a backward pass for each forward pass, and a flush"
        raise ValueError(requirement("Pipeline(schedule)", rule, schedule.name))
    for number, workers in enumerate(schedule.placement):
        if len(workers) > schedule.micro_batches:
            rule = f"must have a micro-batch for each worker of stage {number}"
            got = f"{schedule.micro_batches} for the workers {workers}"
            raise ValueError(requirement("Pipeline(schedule)", rule, got))


def _check_joining(stages: Sequence[Stage], reduction: str) -> None:
    """Refuses to join the weight gradients of an extreme, which few examples hold.

    Raises:
      ValueError: A stage asks for it.
    """
    joining = [j for j, stage in enumerate(stages) if stage.join_weight_gradients]
    if joining and reduction in ("max", "min"):
        rule = (
            f"must be 'mean' or 'sum', because stage {joining[0]} joins weight "
            "gradients: which micro-batches hold the extreme is known too late"
        )
        raise ValueError(requirement("Pipeline(reduction=...)", rule, repr(reduction)))


def trees_of(argument: str, trees: Sequence[Any] | None, stages: int) -> list[Any]:
    """A tree for each stage; None for each if none were given.

    Raises:
      ValueError: There is not one for each stage.
    """
    if trees is None:
        return [None] * stages
    if not isinstance(trees, list | tuple) or len(trees) != stages:
        rule = f"must be a list of {stages} trees, one per stage"
        size = f" of {len(trees)}" if isinstance(trees, list | tuple) else ""
        raise ValueError(requirement(argument, rule, f"a {type(trees).__name__}{size}"))
    return list(trees)
