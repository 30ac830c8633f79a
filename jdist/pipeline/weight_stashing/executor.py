"""The executor of asynchronous epochs: updates while micro-batches are in flight."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from jdist._errors import requirement
from jdist._fit import Metrics
from jdist._tree import PyTree
from jdist.optim import Optimizer
from jdist.pipeline.run.action_timer import ActionTimer
from jdist.pipeline.run.compile_ahead import rehearse
from jdist.pipeline.run.executor import CallInputs, ScheduleExecutor, StagePrograms
from jdist.pipeline.run.identity import CallArguments
from jdist.pipeline.run.lowered import LoweredPrograms
from jdist.pipeline.run.micro_batch import MicroBatch
from jdist.pipeline.run.replicas import joined_states
from jdist.pipeline.run.stage_channels import InProcessChannels, StageChannels
from jdist.pipeline.run.stage_run import StageRun, UpdateInBackward
from jdist.pipeline.run.step import Routes, StepInputs
from jdist.pipeline.run.update import (
    PipelineState,
    StageUpdates,
    loss_scale_of,
    scale_in,
    skipped_in,
    static_loss_scale_of,
)
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedule.versions import live_versions
from jdist.pipeline.schedules.one_f_one_b import one_f_one_b
from jdist.pipeline.schedules.pipedream import pipedream
from jdist.pipeline.stages.place import resident
from jdist.pipeline.stages.stage import Stage
from jdist.pipeline.weight_stashing.batch_stream import BatchStream
from jdist.pipeline.weight_stashing.epoch import EpochLosses, EpochStep, PassRecord
from jdist.pipeline.weight_stashing.optimizer import with_weight_stashing
from jdist.pipeline.weight_stashing.stashed_stage import (
    StashedStage,
    update_in_backward,
    updated,
)

CALL = "Pipeline.train_epoch"


@final
class EpochExecutor(ScheduleExecutor):
    """Runs epochs of an asynchronous schedule, with any number of micro-batches.

    The gradient of one batch, and its evaluation, use the same schedule without
    updates.

    Args:
      programs: The compiled stages.
      optimizers: One for each stage, after `check_epochs`; None: it cannot train.
    """

    def __init__(
        self, programs: StagePrograms, optimizers: Sequence[Optimizer] | None
    ) -> None:
        self._schedule = schedule = programs.places.schedule
        assert schedule.update_policy is not None
        super().__init__(programs, schedule_of_step(schedule), None)
        self._policy = schedule.update_policy
        self._epoch_routes = Routes(programs.wiring, programs.places)
        self._scaled = optimizers is not None and loss_scale_of(optimizers) is not None
        self._optimizers = optimizers

    def lower(
        self, given: CallInputs, update: StageUpdates | None = None
    ) -> dict[str, jax.stages.Lowered]:
        """See `ScheduleExecutor`; with updates the programs of an epoch."""
        if update is None or self._optimizers is None:
            return super().lower(given, update)
        places = self._programs.places
        stream = self._stream([(given.batch, given.weights)], 1)
        stream.read(0)
        channels = InProcessChannels(places.devices)
        inputs = self._epoch_inputs(channels, given, update.opt_states, stream[0])
        found = LoweredPrograms()
        for (_, j), run in inputs.runs.items():
            fn = self._update_in_backward(j)
            if fn is not None:
                run.update = UpdateInBackward(fn, update.opt_states[j], run.params)
        runs, _ = rehearse(inputs, found.named)
        for (_, j), run in runs.items():
            if run.update is not None:
                continue  # The backward pass includes the update.
            workers, opt_state = places.schedule.placement[j], update.opt_states[j]
            whole = run.joined(dict.fromkeys(workers, run.partial()))
            arguments = self._optimizers[j], run.params, whole, opt_state, run.kind
            found.named(f"stage {j}")(updated, *arguments)
        return found.lowered()

    def _epoch_inputs(
        self,
        channels: StageChannels,
        given: CallInputs,
        opt_states: Sequence[PyTree],
        first: MicroBatch,
    ) -> StepInputs:
        """The inputs of an epoch, of which one micro-batch represents all."""
        programs, loss = self._programs, self._programs.loss
        runs = programs.runs(given, self._kind, single=self._policy.every == 1)
        if self._scaled:
            loss = loss.scaled(scale_in(opt_states))
        every = dict.fromkeys(range(programs.places.schedule.micro_batches), first)
        return programs.inputs(channels, self._epoch_routes, runs, every, loss)

    def _kind(self, stage: int) -> str:
        """How the gradients of an update of a stage are joined; see `StageRun`."""
        # Each batch begins its backward pass with its own mean: later ones of the same
        # update are not read yet, so that their total is not known.
        return "sum" if self._is_alone(stage) else self._programs.loss.kind

    def _is_alone(self, stage: int) -> bool:
        """Whether an update of a stage is that of one micro-batch on one worker."""
        workers = self._programs.places.schedule.placement[stage]
        return self._policy.every == 1 and len(workers) == 1

    def _update_in_backward(self, stage: int) -> Callable[..., PyTree] | None:
        """The update within a stage's backward pass; None if it comes later."""
        # No other update can be a part of the pass.
        if not self._is_alone(stage):
            return None
        assert self._optimizers is not None
        return update_in_backward(self._optimizers[stage], self._kind(stage))

    def train(
        self,
        channels: StageChannels,
        state: PipelineState,
        batches: Iterable[PyTree],
        total: int | None = None,
        timer: ActionTimer | None = None,
    ) -> tuple[PipelineState, Metrics, Sequence[PassRecord]]:
        """Trains on batches, each a micro-batch, and drains.

        Args:
          channels: The call, upon which all processes agree at the end.
          state: The training state, of which nothing is donated.
          batches: The batches, or pairs of a batch and its weights.
          total: Their number, if they have no length.
          timer: Times the actions.

        Returns:
          The next training state; the metrics of the epoch; and the passes of its
          workers, with versions.
        """
        programs, places = self._programs, self._programs.places
        stream = self._stream(batches, total)
        stream.read(0)
        schedule = self._schedule.resized(stream.length)
        step, key = state.step, state.key
        # The key of the run does not change: each epoch derives its own.
        own = None if key is None else jax.random.fold_in(key, step)
        settings = {
            "first of": stream.length,
            "schedule": f"{self._schedule.name} with {self._policy}",
        }
        # Later batches are compared at the end of the epoch: before each pass it would
        # cost a message per batch.
        part = stream[0]
        channels.identify(CallArguments(step, settings, part.batch, [part], own))
        given = CallInputs(state.params, {}, None, state.states, own)
        # The first batch represents all, because the later ones are not read yet.
        first = self._epoch_inputs(channels, given, state.opt_states, part)
        stashed = self._stashed(schedule, first.runs, state.opt_states)
        # Needed beyond `del state`: the metrics have the difference.
        skipped = skipped_in(state.opt_states) if self._scaled else None
        # Without these references the initial arrays are freed during the epoch, unless
        # the caller keeps them.
        del state, given, part
        first = programs.compile_ahead(first)
        # Read by all processes, for shapes and identity; some have no pass for it.
        if not self._takes(0):
            stream.forget(0)
        inputs = first._replace(parts=stream)
        epoch = EpochStep(inputs, stashed, stream, schedule, self._policy.every)
        epoch.run(timer)
        states = joined_states(channels, places, first.runs, stream.totals)
        # Awaited before the vote: an error in them must fail the epoch on all workers.
        left = [stage.arrays() for stage in stashed.values()]
        losses = epoch.agree_on_epoch(channels, left)
        programs.agreed(first)
        params, opt_states = ([None] * places.loss for _ in range(2))
        for j, worker in places.stages.items():
            params[j] = stashed[worker, j].run.params
            opt_states[j] = stashed[worker, j].stash.opt_state
        if skipped is not None:
            pairs = zip(skipped_in(opt_states), skipped, strict=True)
            skipped = [None if a is None else int(a) - int(b) for a, b in pairs]
        after = PipelineState(step + 1, params, opt_states, states, key)
        return after, self._metrics(losses, skipped), epoch.passes

    def _metrics(self, found: EpochLosses, skipped: list[int | None] | None) -> Metrics:
        """The metrics of an epoch, from the losses and weights of its micro-batches."""
        values, weights, aux = found
        if self._programs.loss.kind == "sum":
            return Metrics(float(values.sum()), aux=aux, losses=values, skipped=skipped)
        loss = float((values * weights).sum() / weights.sum())
        # NaN for a micro-batch of weight 0, which has no mean.
        means = np.where(weights > 0, values, np.full_like(values, np.nan))
        return Metrics(loss, aux=aux, losses=means, skipped=skipped)

    def _stream(self, batches: Iterable[PyTree], total: int | None) -> BatchStream:
        places, every = self._programs.places, self._policy.every
        return BatchStream(
            batches,
            total,
            self._programs.loss.kind,
            {every * len(workers) for workers in places.schedule.placement},
            # The first batch is kept in any case, for shapes and identity.
            lambda micro: micro == 0 or self._takes(micro),
            len(places.own) < places.schedule.workers,
            CALL,
        )

    def _takes(self, micro: int) -> bool:
        """Whether a worker of this process has a pass for a micro-batch."""
        places = self._programs.places
        takers = {places.worker(stage, micro) for stage in range(places.loss)}
        return not takers.isdisjoint(places.own)

    def _stashed(
        self,
        schedule: Schedule,
        runs: Mapping[tuple[int, int], StageRun],
        opt_states: Sequence[PyTree],
    ) -> dict[tuple[int, int], StashedStage]:
        """Makes the stages of this process with their versions and optimizers."""
        if self._optimizers is None:
            rule = "must be given for training"
            raise ValueError(requirement("Pipeline(optimizer=...)", rule, "None"))
        places, stashed = self._programs.places, {}
        versions = schedule.versions_used().tolist()
        kept = live_versions(schedule.columns, self._policy)
        for (worker, j), run in runs.items():
            workers = places.schedule.placement[j]
            own = range(workers.index(worker), schedule.micro_batches, len(workers))
            # A copy for each worker, because its first update donates the state, which
            # belongs to the caller and to the stage's other workers.
            where, argument = places.devices[worker], f"{CALL}(state)"
            there = resident(opt_states[j], where, argument, j)
            stashed[worker, j] = StashedStage(
                run,
                with_weight_stashing(self._optimizers[j], int(kept[j, worker])),
                {micro: versions[j][micro] for micro in own},
                jax.tree.map(jnp.copy, there),
                self._update_in_backward(j),
            )
        return stashed


def schedule_of_step(schedule: Schedule) -> Schedule:
    """The schedule of a synchronous step, from that of an epoch.

    Example:
      >>> schedule_of_step(pipedream(3, 4, policy="flush")) == one_f_one_b(3, 4)
      True
    """
    policy, shape = schedule.update_policy, (schedule.stages, schedule.micro_batches)
    assert policy is not None
    # A flush schedule drains only for its updates: without them each drain would be a
    # needless bubble.
    if policy.rule == "flush" and schedule == pipedream(
        *shape, policy="flush", update_every=policy.every
    ):
        return one_f_one_b(*shape)
    return schedule.synchronous()


def check_epochs(
    stages: Sequence[Stage],
    reduction: str,
    optimizers: Sequence[Optimizer] | None,
    max_norm: float | None,
) -> None:
    """Refuses arguments that epochs cannot have.

    Args:
      stages: The stages.
      reduction: As for `Pipeline`.
      optimizers: One for each stage; None: it cannot train.
      max_norm: As for `Pipeline`.

    Raises:
      ValueError: The reduction is neither mean nor sum; the loss scale is no constant;
        or an update would depend on the gradients of all stages.
    """
    # For max and min the weight of a gradient is known only after all micro-batches.
    if reduction not in ("mean", "sum"):
        rule = "must be 'mean' or 'sum' with an asynchronous schedule"
        raise ValueError(requirement("Pipeline(reduction=...)", rule, reduction))
    if optimizers is not None:
        static_loss_scale_of(optimizers)  # Called for its check.
    tied = [number for number, stage in enumerate(stages) if stage.tied]
    asked: list[tuple[str, str, object]] = []
    if max_norm is not None:
        asked.append(("Pipeline(max_norm=...)", "be None", max_norm))
    if tied:
        first = f"stage {tied[0]} with {dict(stages[tied[0]].tied)}"
        asked.append(("Pipeline(stages)", "not be tied", first))
    for call, without, got in asked:
        rule = f"must {without} with an asynchronous schedule: an update "
        rule += "would wait for the gradients of all stages"
        remedy = "Use a synchronous schedule, such as `one_f_one_b`."
        raise ValueError(requirement(call, rule, got, remedy))
