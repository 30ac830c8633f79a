"""Evaluation: the forward passes of a pipeline's schedule, where its workers are.

Nothing is kept for a backward pass, and no state moves on: each micro-batch is given
the states as training left them.
"""

import dataclasses
from collections.abc import Sequence
from typing import final

import jax
import jax.numpy as jnp

from jdist._tree import PyTree
from jdist.pipeline.run.stage_channels import Places, StageChannels
from jdist.pipeline.run.stage_run import StageRun
from jdist.pipeline.run.step import ListedActions, LossSum, Step, StepInputs
from jdist.pipeline.schedule.schedule import Schedule
from jdist.reduction import Partial


@final
class EvaluationStep(Step):
    """The forward passes of one batch.

    Args:
      given: What it works on; its schedule has forward passes alone.
      keep: Whether what the loss is given is kept.
    """

    def __init__(self, given: StepInputs, keep: bool) -> None:
        super().__init__(given)
        self._sum = LossSum(given.loss)
        self._kept: dict[int, dict[str, PyTree]] | None = {} if keep else None

    def _actions(self, worker: int) -> ListedActions:
        return ListedActions(self._places.actions[worker])

    def _passed_back(self, worker: int, stage: int) -> None:
        raise AssertionError("a schedule of forward passes has no backward pass")

    def _outputs(
        self, run: StageRun, micro: int, inputs: dict[str, PyTree]
    ) -> dict[str, PyTree]:
        return run.outputs(micro, inputs)

    def _lose(self, worker: int, micro: int) -> Partial:
        """The losses of a micro-batch alone."""
        values, entries = self._taken_by_loss(worker, micro)
        part = self._parts[micro]
        passes = self._loss.passes(part.batch, self._read)
        found, aux = passes.losses(values, entries, part.weights)
        self._add_loss(worker, micro, found, aux)
        if self._kept is not None:
            self._kept[micro] = values
        return found

    def _add_loss(self, worker: int, micro: int, found: Partial, aux: PyTree) -> None:
        self._sum.add(worker, micro, found, aux)

    def agree(self, channels: StageChannels) -> tuple[jax.Array, PyTree, PyTree]:
        """The loss, the auxiliary outputs, and what the loss was given, if it is kept.

        Args:
          channels: The call that the step is made in, which ends with it.
        """
        loss, aux, _ = self._sum.agree(channels, self._places, {}, self._kept)
        return loss, aux, self._joined_outputs()

    def _joined_outputs(self) -> PyTree:
        """The inputs of the loss that were kept, all micro-batches as one."""
        if not self._kept:
            return None
        parts = [self._kept[micro] for micro in sorted(self._kept)]
        home = jax.tree.leaves(parts[0])[0].sharding
        found = jax.tree.map(
            lambda *rows: _joined([jax.device_put(x, home) for x in rows]), *parts
        )
        return found if len(found) > 1 else next(iter(found.values()))


def _joined(rows: Sequence[jax.Array]) -> jax.Array:
    """The examples of all micro-batches; one number each of what has no examples."""
    return jnp.concatenate(rows) if rows[0].ndim else jnp.stack(rows)


def forward_places(places: Places, micro_batches: int) -> Places:
    """The same places with a schedule of forward passes, in the order of training's.

    Args:
      places: Of a pipeline.
      micro_batches: How many of its micro-batches there are.
    """
    schedule = places.schedule
    programs = [
        [
            action
            for action in schedule.actions(worker)
            if action.kind == "F" and action.micro_batch < micro_batches
        ]
        for worker in range(schedule.workers)
    ]
    name = f"{schedule.name}, forward"
    forward = Schedule.of(programs, name=name, placement=schedule.placement)
    return dataclasses.replace(places, schedule=forward)
