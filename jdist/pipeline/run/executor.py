"""Executors, which run the calls of a pipeline.

An executor takes checked arguments, within a call that all processes of the pipeline
make. `ScheduleExecutor` runs the actions of a schedule one by one, over devices or over
rpc's workers. The executors of asynchronous epochs (`weight_stashing`) and of the whole
pipeline as one SPMD program (`spmd`) implement the same interface.
"""

import dataclasses
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jdist._compat import is_traced
from jdist._errors import value_error
from jdist._fit import Metrics
from jdist._tree import PyTree, examples_in, is_shape, type_name
from jdist.pipeline.run.action_timer import ActionTimer
from jdist.pipeline.run.compile_ahead import compile_ahead, rehearse
from jdist.pipeline.run.identity import CallArguments
from jdist.pipeline.run.loss import PipelineLoss
from jdist.pipeline.run.lowered import LoweredPrograms
from jdist.pipeline.run.micro_batch import MicroBatchSource, size_of_batch, split_batch
from jdist.pipeline.run.stage_channels import (
    Communicator,
    InProcessChannels,
    Places,
    StageChannels,
)
from jdist.pipeline.run.stage_run import StageRun
from jdist.pipeline.run.step import BatchStep, Routes, StepInputs
from jdist.pipeline.run.tied import Tied
from jdist.pipeline.run.update import (
    NO_STATS,
    GradientStats,
    StageUpdates,
    StepResult,
    joined,
    scale_in,
)
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.stages.place import moved, pacing, resident, undivided
from jdist.pipeline.stages.wiring import StageWiring

CALL = "Pipeline.value_and_grad"


class CallInputs(NamedTuple):
    """The arguments of a call of a pipeline.

    Attributes:
      params: One tree per stage; those of stages of other processes are not read.
      batch: Named arrays.
      weights: Weights of the examples, or None.
      states: One per stage; None for a stage without a state.
      key: The PRNG key of the call, or None.
      step: Step of the training state that holds the parameters; None without one.
    """

    params: Sequence[PyTree]
    batch: Mapping[str, PyTree]
    weights: ArrayLike | None
    states: Sequence[PyTree]
    key: jax.Array | None = None
    step: int | None = None


@final
class StagePrograms:
    """The compiled stages of this process, checked and compiled once for all calls.

    Args:
      wiring: The source and the consumers of every value.
      communicator: Connects the pipeline's processes.
      loss: The loss function.
    """

    def __init__(
        self, wiring: StageWiring, communicator: Communicator, loss: PipelineLoss
    ) -> None:
        self.wiring = wiring
        self.places: Places = communicator.places
        self.loss = loss
        self._sees_all = communicator.sees_all
        self._has_devices = any(device is not None for device in self.places.devices)
        stages = wiring.stages
        # Stages of one function on one device get one label, by which they share
        # compiled programs: eight equal ones take 13 compilations, and 25 without.
        labels = _first_uses([stage.fn for stage in stages], self.places)
        self._compiled = [
            stage.compiled(wiring.from_batch(j), labels[j])
            for j, stage in enumerate(stages)
        ]
        labels = _first_uses([stage.in_evaluation for stage in stages], self.places)
        self._evaluated = [
            stage.evaluated(self._compiled[j], labels[j])
            for j, stage in enumerate(stages)
        ]
        # The entries that the loss reads, by the cases of calls that have succeeded.
        self._read: dict[tuple[Hashable, bool], tuple[str, ...]] = {}

    def check_functions(self) -> None:
        """See `Executor`."""
        for stage in (*self._compiled, *self._evaluated):
            stage.check()
        self.loss.check()

    def runs(
        self,
        given: CallInputs,
        kind: Callable[[int], str],
        *,
        single: bool,
        evaluated: bool = False,
    ) -> dict[tuple[int, int], StageRun]:
        """Makes the stages of this process for one call, by worker and stage.

        Args:
          given: The arguments of the call.
          kind: By the number of a stage, the reduction of its gradients.
          single: As for `StageRun`.
          evaluated: Whether they run the stages' functions for evaluation.
        """
        # Stages on devices of their own cannot be parts of one enclosing program.
        if self._has_devices:
            trees = given.params, given.states, given.key
            check_not_traced("Pipeline(.., devices)", *trees)
        runs = {}
        compiled = self._evaluated if evaluated else self._compiled
        for j in self.places.stages:
            stage, key = self.wiring.stages[j], None
            # A stage's function for evaluation takes no key.
            if stage.keyed and not (evaluated and stage.in_evaluation is not None):
                key = key_given(given.key, j)
                # In `lower` the key is a shape, which is the same for all stages.
                if not is_shape(key):
                    # Stages draw different numbers from the one key of the call.
                    key = jax.random.fold_in(key, j)
            for worker in self.places.schedule.placement[j]:
                # Replicas of a stage may run in other processes.
                if worker not in self.places.own:
                    continue
                place = self.places.devices[worker]
                runs[worker, j] = StageRun(
                    stage,
                    compiled[j],
                    resident(given.params[j], place, f"{CALL}(params)", j),
                    resident(given.states[j], place, f"{CALL}(states=...)", j),
                    moved(key, undivided(place)),
                    kind(j),
                    single,
                )
        return runs

    def inputs(
        self,
        channels: StageChannels,
        routes: Routes,
        runs: Mapping[tuple[int, int], StageRun],
        parts: MicroBatchSource,
        loss: PipelineLoss,
    ) -> StepInputs:
        """Makes the inputs of a step.

        Args:
          channels: The call.
          routes: The messages of the schedule.
          runs: The return value of `runs`.
          parts: The micro-batches.
          loss: The loss, with its scale.
        """
        trees = {j: (run.params, run.state) for (_, j), run in runs.items()}
        # Between processes the signature stays None: a check takes part in an exchange
        # of shapes, and no process can see that the shapes of another one have changed.
        signature = None
        if self._sees_all:
            leaves, structure = jax.tree.flatten((trees, dict(parts[0].batch)))
            kinds = [(np.shape(x), str(jnp.result_type(x))) for x in leaves]
            signature = tuple(kinds), structure
        invoke = pacing(self.places.devices, channels.computed)
        if invoke is not operator.call:
            runs = {at: run.through(invoke) for at, run in runs.items()}
        return StepInputs(routes, runs, channels, loss, (), parts, signature)

    def compile_ahead(self, given: StepInputs) -> StepInputs:
        """Checks shapes that are new, and compiles several stages at the same time.

        They are new until a call has succeeded on all processes (`agreed`).

        Returns:
          The inputs with the entries that the loss reads.

        Raises: what `compile_ahead.compile_ahead` raises.
        """
        read = self._read.get(_case(given))
        if read is not None:
            return given._replace(read=read)
        part = given.parts[0]
        trees = [(run.params, run.state) for run in given.runs.values()]
        inside = _is_transformed(trees, part.batch, part.weights)
        # A single stage of a single process has nothing to compile in parallel. Inside
        # a transformation stages are compiled as a part of the enclosing program.
        several = not self._sees_all or (len(given.runs) > 1 and not inside)
        return given._replace(read=compile_ahead(given, several))

    def agreed(self, given: StepInputs) -> None:
        """Records that a call with these inputs has succeeded on all processes."""
        # Not earlier: after a failure all processes take part in the check once more.
        self._read[_case(given)] = given.read


def _first_uses(functions: Sequence[object], places: Places) -> list[int]:
    """For each stage the first one of the same function on the same devices here.

    Args:
      functions: One for each stage.
      places: The workers of each stage, and their devices.
    """
    first: dict[Hashable, int] = {}
    found = []
    for j, (fn, workers) in enumerate(
        zip(functions, places.schedule.placement, strict=True)
    ):
        devices = tuple(places.devices[w] for w in workers if w in places.own)
        # By identity: a callable of a user may have no hash.
        found.append(first.setdefault((id(fn), devices), j))
    return found


def _case(given: StepInputs) -> tuple[Hashable, bool]:
    """The key of the inputs whose programs are the same."""
    return given.signature, given.routes.places.schedule.forward_only


def _is_transformed(*trees: PyTree) -> bool:
    """Whether trees are inside `jax.jit`, `jax.grad` or another transformation."""
    # Inside `jit` even a new array of zeros is traced: it shows a transformation whose
    # arguments the trees do not have.
    return any(map(is_traced, jax.tree.leaves((trees, jnp.zeros(())))))


class ScheduleExecutor:
    """Runs the actions of a schedule, over devices or over rpc's workers.

    Args:
      programs: The compiled stages.
      schedule: The schedule, with the pipeline's placement.
      tied: Parameters that stages share; None if there are none.

    Attributes:
      runs_actions: Whether the actions of the schedule are run one by one, so that they
        can be timed.
    """

    runs_actions = True

    def __init__(
        self, programs: StagePrograms, schedule: Schedule, tied: Tied | None
    ) -> None:
        self._programs = programs
        self._places = dataclasses.replace(programs.places, schedule=schedule)
        self._routes = Routes(programs.wiring, self._places)
        self._tied = tied
        self._forward: dict[int, Routes] = {}

    def check_functions(self) -> None:
        """Checks that stages and loss read what they read when they were compiled.

        Raises:
          ValueError: One would now be compiled to another program.
        """
        self._programs.check_functions()

    def gradient(
        self,
        channels: StageChannels,
        given: CallInputs,
        update: StageUpdates | None = None,
        timer: ActionTimer | None = None,
    ) -> StepResult:
        """Computes the loss of a batch and the gradients of this process's stages.

        Args:
          channels: The call, upon which all processes agree at the end.
          given: The arguments of the call.
          update: The updates that follow, if any. A gradient that one of them would
            refuse is refused here.
          timer: Times the actions.

        Raises: what `Pipeline.value_and_grad` raises.
        """
        programs, places = self._programs, self._places
        inputs = programs.compile_ahead(self._inputs(channels, given, update))
        # After everything that one process may refuse, because the collectives that
        # follow need all processes of a mesh.
        channels.begin()
        step = BatchStep(inputs)
        step.run(timer)
        grads: list[PyTree] = [None] * places.loss
        for j in places.stages:
            # Master weights take the sum in the wide precision in which it was formed.
            unrounded = update is not None and update.unrounded[j]
            grads[j] = step.gradient(j, unrounded)
        runs = inputs.runs
        params = {j: runs[worker, j].params for j, worker in places.stages.items()}
        # Before norms and overflow flags, which are those of the sums over all copies.
        if self._tied is not None:
            for j, tree in self._tied.summed(params, grads, places, channels).items():
                grads[j] = tree
        told: dict[int, GradientStats] = {}
        if update is not None:
            told = self._stats(dict.fromkeys(params, update), params, grads)
            # A refusal after the vote would leave the stages at different steps.
            for j in params:
                update.check(j, grads[j], told.get(j, NO_STATS))
        # Before the vote: after it no worker may fail alone.
        states = step.states()
        loss_of_all, aux, stats = step.agree(channels, told, (grads, states))
        programs.agreed(inputs)
        together = joined(stats) if stats else NO_STATS
        return StepResult(loss_of_all, grads, together, states, aux)

    def lower(
        self, given: CallInputs, update: StageUpdates | None = None
    ) -> dict[str, jax.stages.Lowered]:
        """Lowers the programs that such a call runs, by name, and runs none of them.

        Args:
          given: The arguments of the call, with shapes in place of arrays.
          update: The updates that follow, if any, of shapes.
        """
        places = self._places
        inputs = self._inputs(InProcessChannels(places.devices), given, update)
        found = LoweredPrograms()
        grads: dict[int, PyTree] = {}
        runs, _ = rehearse(inputs, found.named)
        for (_, j), run in runs.items():
            unrounded = update is not None and update.unrounded[j]
            # The sum over replicas, which calls for each what a step does.
            each_worker = dict.fromkeys(places.schedule.placement[j], run.partial())
            grads[j] = run.finished(run.joined(each_worker), unrounded)
        params = {j: run.params for (_, j), run in inputs.runs.items()}
        named = {j: found.named(f"stage {j}") for j in params}
        if self._tied is not None:
            self._tied.summed(params, grads, places, inputs.channels, named)
        if update is not None:
            each = {j: update.through(named[j]) for j in params}
            stats, told = NO_STATS, self._stats(each, params, grads)
            if told:
                here = undivided(places.devices[places.own[0]])
                stats = found.named("all stages")(joined, moved([*told.values()], here))
            for j, own in each.items():
                there = undivided(places.devices[places.stages[j]])
                own.apply(j, grads[j], moved(stats, there))
        return found.lowered()

    def _inputs(
        self, channels: StageChannels, given: CallInputs, update: StageUpdates | None
    ) -> StepInputs:
        """The inputs of a batch's step, and the identity of its call."""
        programs, loss = self._programs, self._programs.loss
        count = self._places.schedule.micro_batches
        cut = given.batch, given.weights, count, loss.kind, channels.parts
        parts = split_batch(*cut)
        if update is not None and update.loss_scale is not None:
            loss = loss.scaled(scale_in(update.opt_states))
        runs = programs.runs(given, lambda _: loss.gradient_kind, single=count == 1)
        # Every message after this line carries the call's identity, so that a worker
        # with another step or batch is found before its values are used.
        settings = {} if update is None else update.overrides
        channels.identify(
            CallArguments(given.step, settings, given.batch, parts, given.key)
        )
        return programs.inputs(channels, self._routes, runs, parts, loss)

    def _stats(
        self,
        updates: Mapping[int, StageUpdates],
        params: Mapping[int, PyTree],
        grads: Mapping[int, PyTree] | Sequence[PyTree],
    ) -> dict[int, GradientStats]:
        """The statistics of this process's stages, if their updates need them."""
        told = {}
        for j, update in updates.items():
            if update.together:
                # The norm counts a tied parameter once, at one of its stages.
                counted = grads[j]
                if self._tied is not None:
                    counted = self._tied.counted(j, params[j], grads[j])
                told[j] = update.stats(j, grads[j], counted)
        return told

    def evaluate(
        self, channels: StageChannels, given: CallInputs, outputs: bool
    ) -> Metrics:
        """Computes the loss of a batch by forward passes alone.

        Args:
          channels: As for `gradient`.
          given: As for `gradient`.
          outputs: Whether to return the inputs of the loss, too.
        """
        programs, kind = self._programs, self._programs.loss.kind
        examples = examples_in(given.batch, "Pipeline.evaluate")
        count = min(self._places.schedule.micro_batches, examples)
        # A batch with few examples is not split over data axes: an evaluation takes
        # batches of any size, and the last one of a data set is often short.
        rows = 1 if examples < count * channels.parts else channels.parts
        # All examples stay: outputs are those of each, and no gradient can be NaN.
        cut = given.batch, given.weights, count, kind, rows
        parts = split_batch(*cut, replacing=False)
        runs = programs.runs(given, lambda _: kind, single=False, evaluated=True)
        channels.identify(CallArguments(given.step, {}, given.batch, parts, given.key))
        # A batch with fewer examples than micro-batches needs a shorter schedule.
        if count not in self._forward:
            forward = self._places.schedule.forward_passes(count)
            places = dataclasses.replace(self._places, schedule=forward)
            self._forward[count] = Routes(programs.wiring, places)
        routes = self._forward[count]
        inputs = programs.inputs(channels, routes, runs, parts, programs.loss)
        inputs = programs.compile_ahead(inputs)
        channels.begin()
        step = BatchStep(inputs, keep=outputs)
        step.run()
        loss, aux, _ = step.agree(channels, {})
        programs.agreed(inputs)
        size = size_of_batch(given.batch, given.weights)
        return Metrics(loss, *size, aux=aux, outputs=step.kept())


def trees_of(
    argument: str, trees: Sequence[PyTree] | None, stages: int
) -> list[PyTree]:
    """Checks that there is a tree for each stage; None for each if none are given.

    Raises:
      ValueError: There is not one for each stage.
    """
    if trees is None:
        return [None] * stages
    if not isinstance(trees, list | tuple) or len(trees) != stages:
        rule = f"must be a list of {stages} trees, one per stage"
        size = f" of {len(trees)}" if isinstance(trees, list | tuple) else ""
        raise value_error(argument, rule, f"{type_name(trees)}{size}")
    return list(trees)


def key_given(key: PyTree, stage: int) -> PyTree:
    """Checks that a stage that takes a PRNG key has one.

    Raises:
      ValueError: The key is None.
    """
    if key is None:
        rule = f"must be given, because stage {stage} takes a PRNG key"
        raise value_error("Pipeline.value_and_grad(key=...)", rule, "None")
    return key


def check_not_traced(call: str, *trees: PyTree) -> None:
    """Refuses a transformation around a pipeline that has devices of its own.

    Raises:
      ValueError: The call is inside `jax.jit`, `jax.grad` or another one.
    """
    if _is_transformed(*trees):
        rule = "must be called outside of jax.jit, jax.grad and other transformations: "
        rule += "its stages are on devices that it chooses, and compiled for them"
        remedy = "Call it as it is; without devices or a mesh it may be inside jit."
        raise value_error(call, rule, "traced arrays", remedy)
