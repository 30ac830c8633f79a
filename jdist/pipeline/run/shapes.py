"""Shape inference over a pipeline, which checks its values before the first step."""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from jdist._errors import value_error
from jdist._tree import PyTree, type_name
from jdist.pipeline.run.loss import PipelineLoss
from jdist.pipeline.run.micro_batch import entry_of
from jdist.pipeline.run.stage_channels import MessageTag, Places, ValueChannels, receive
from jdist.pipeline.stages.array_spec import describe, is_spec, specs_of
from jdist.pipeline.stages.stage import Stage
from jdist.pipeline.stages.wiring import BATCH, StageWiring


class ShapeCheck(NamedTuple):
    """The evaluation of a pipeline on shapes alone.

    Attributes:
      wiring: The source and the consumers of every value.
      places: The worker of each stage.
      channels: The channels to other stages.
      batch: A micro-batch.
    """

    wiring: StageWiring
    places: Places
    channels: ValueChannels
    batch: Mapping[str, PyTree]

    def run(
        self, loss: PipelineLoss, trees: Mapping[int, tuple[PyTree, PyTree]]
    ) -> tuple[str, ...]:
        """Evaluates the stages of this process and the loss, in order.

        Every worker checks its own stages and sends their output shapes to the
        consumers.

        Args:
          loss: The loss function.
          trees: Parameters and state of each stage of this process.

        Returns:
          The entries of the batch that the loss reads; empty where it does not run.

        Raises:
          ValueError: A value is neither an output of a stage nor in the batch; a stage
            cannot take its inputs, or returns another number of values than it names.
        """
        places = self.places
        for number, stage in enumerate(self.wiring.stages):
            # Micro-batch 0 represents all of them; of a stage's replicas only the
            # worker that runs it checks.
            worker = places.worker(number, 0)
            if worker not in places.own:
                continue
            returned = outputs_of(number, stage, trees[number], self._given(number))
            for name, value in stage.named(returned).items():
                # `ArraySpec` in place of `ShapeDtypeStruct`, which rpc does not send.
                packed = specs_of(value)
                for taker in self.wiring.consumers[number][name]:
                    tag = MessageTag("S", 0, name, taker, worker)
                    self.channels.put(tag, places.worker(taker, 0), packed)
        return self._read(loss)

    def _read(self, loss: PipelineLoss) -> tuple[str, ...]:
        """The entries that the loss reads, on all workers of the last stage."""
        places, last = self.places, self.places.schedule.placement[-1]
        first = places.worker(places.loss, 0)
        tag = MessageTag("S", 0, "", places.loss, first)
        if first in places.own:
            # Traced on one worker: the result is the same on all.
            read = loss.entries_read(self._given(places.loss), self.batch)
            for worker in last:
                self.channels.put(tag, worker, read)
        read = ()
        for worker in last:
            if worker in places.own:
                read = tuple(receive(self.channels, tag, worker, "shapes"))
        return read

    def _given(self, number: int) -> dict[str, PyTree]:
        """The shapes of the inputs of a stage, or of the loss."""
        places = self.places
        taker = "the loss" if number == places.loss else f"stage {number}"
        worker, found = places.worker(number, 0), {}
        for name, source in self.wiring.source[number].items():
            if source == BATCH:
                found[name] = entry_of(self.batch, name, taker)
                continue
            tag = MessageTag("S", 0, name, number, places.worker(source, 0))
            packed = receive(self.channels, tag, worker, f"shapes of {name!r}")
            found[name] = jax.tree.map(lambda s: s.struct, packed, is_leaf=is_spec)
        return found


def outputs_of(
    number: int,
    stage: Stage,
    trees: tuple[PyTree, PyTree],
    inputs: Mapping[str, PyTree],
) -> PyTree:
    """The shapes of a stage's outputs, without its state.

    Args:
      number: Number of the stage.
      stage: The stage.
      trees: Its parameters and its state.
      inputs: Shapes, by name.

    Raises:
      ValueError: It cannot take them, or a stateful one returns no state like its own.
      Exception: Any other error of its function, with the stage in a note.
    """
    params, state = trees
    # Evaluated, because the shape of a key depends on the default generator.
    key = jax.eval_shape(lambda: jax.random.key(0))
    given = [state] * stage.stateful + list(inputs.values()) + [key] * stage.keyed
    try:
        returned = jax.eval_shape(stage.fn, params, *given)
    except Exception as error:
        shown = ", ".join(f"{name}: {describe(x)}" for name, x in inputs.items())
        # JAX raises these for shapes and dtypes that do not fit: the wiring is wrong.
        if isinstance(error, TypeError | ValueError):
            rule = f"must fit together: stage {number} cannot take {shown}"
            got = f"{type(error).__name__}: {error}"
            raise value_error("Pipeline(stages)", rule, got) from error
        error.add_note(f"It was raised by stage {number}, which was given {shown}.")
        raise
    if not stage.stateful:
        return returned
    if not isinstance(returned, tuple) or len(returned) != 2:
        rule = f"must return (outputs, state) where it is stateful, as stage {number}"
        raise value_error("Stage(fn)", rule, type_name(returned))
    _check_state(number, state, returned[1])
    return returned[0]


def _check_state(number: int, before: PyTree, after: PyTree) -> None:
    # The next micro-batch takes the new state, in the same compiled program.
    if describe(before) != describe(after):
        rule = f"must return a state like the one it was given, at stage {number} "
        raise value_error(
            "Stage(stateful=True)", rule + describe(before), describe(after)
        )
