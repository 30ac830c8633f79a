"""Evaluation: the forward passes of a pipeline's schedule, where its workers are.

Nothing is kept for a backward pass, and no state moves on: each micro-batch is given
the states as training left them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist._fit import Metrics
from jdist.pipeline.run.loss import PipelineLoss
from jdist.pipeline.run.micro_batch import MicroBatch
from jdist.pipeline.run.places import Places
from jdist.pipeline.run.stage_channels import StageChannels
from jdist.pipeline.run.stage_run import StageRun, fold
from jdist.pipeline.run.step import Step
from jdist.pipeline.run.transfer_log import Transfer
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.stages.stage import Stage
from jdist.pipeline.stages.wiring import StageWiring


class EvaluationRun(StageRun):
    """The forward passes of one stage, of which nothing is kept."""

    def forward(self, micro: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs by name."""
        given = tuple([inputs[name] for name in self._stage.inputs])
        key = None if self._key is None else fold(self._key, micro)
        returned, _ = self._compiled.outputs(self.params, self.state, given, key)
        return self._stage.named(returned)


def draws(stage: Stage) -> bool:
    """Whether a stage takes a key in evaluation, too."""
    return stage.keyed and stage.in_evaluation is None


class EvaluationStep(Step):
    """One pass over a batch.

    Attributes:
      kept: By micro-batch, what the loss was given; None to keep nothing.
    """

    kept: dict[int, dict[str, Any]] | None = None

    def _differentiate_loss(self, worker: int, micro: int) -> None:
        """The losses of a micro-batch alone."""
        values, entries = self._taken_by_loss(worker, micro)
        part = self._parts[micro]
        passes = self._loss.passes(part.batch, self._read)
        found, aux = passes.losses(values, entries, part.weights)
        self._add_loss(worker, micro, found, aux)
        if self.kept is not None:
            self.kept[micro] = values

    def outputs(self) -> Any:
        """What was kept, all micro-batches as one."""
        if not self.kept:
            return None
        parts = [self.kept[micro] for micro in sorted(self.kept)]
        home = jax.tree.leaves(parts[0])[0].sharding
        found = jax.tree.map(
            lambda *rows: _joined([jax.device_put(x, home) for x in rows]),
            *parts,
        )
        return found if len(found) > 1 else next(iter(found.values()))


def _joined(rows: Sequence[jax.Array]) -> jax.Array:
    """The examples of all micro-batches; one number each of what has no examples."""
    return jnp.concatenate(rows) if rows[0].ndim else jnp.stack(rows)


class Evaluator:
    """Runs a pipeline's forward passes.

    Args:
      wiring: Which value goes where.
      places: Of the pipeline.
      loss: The loss function.
    """

    def __init__(self, wiring: StageWiring, places: Places, loss: PipelineLoss) -> None:
        self._wiring = wiring
        self._places = places
        self._loss = loss
        self._forward: dict[int, Places] = {}

    def run(
        self,
        channels: StageChannels,
        runs: Mapping[tuple[int, int], StageRun],
        parts: Sequence[MicroBatch],
        read: tuple[str, ...],
        outputs: bool,
    ) -> tuple[list[Transfer], Metrics]:
        """What was sent, and what was found; see `Step` and `Pipeline.evaluate`."""
        if len(parts) not in self._forward:
            self._forward[len(parts)] = forward_places(self._places, len(parts))
        places = self._forward[len(parts)]
        step = EvaluationStep(
            self._wiring, places, runs, channels, self._loss, read, parts
        )
        step.kept = {} if outputs else None
        step.run()
        examples = sum(len(part.weights) for part in parts)
        weight = sum(part.given for part in parts)
        loss, aux, _ = step.agree(channels, {}, step.kept)
        found = Metrics(loss, examples, weight, aux=aux, outputs=step.outputs())
        return step.transfers, found


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
