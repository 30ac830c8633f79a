"""`PipeDream`: a pipeline that never drains within an epoch, and updates as it goes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist._errors import requirement
from jdist.optim import Optimizer
from jdist.pipeline.epoch import EpochStep, Pass
from jdist.pipeline.micro_batch import MicroBatch, micro_batch_of, normalized
from jdist.pipeline.pipeline import Pipeline
from jdist.pipeline.policy import Policy, schedule_of_epoch
from jdist.pipeline.post import moved
from jdist.pipeline.schedule import Schedule
from jdist.pipeline.schedule_versions import live_versions, versions_used
from jdist.pipeline.stage import Stage
from jdist.pipeline.stashed_run import Rule, StashedRun
from jdist.pipeline.training import PipelineState, optimizers_for
from jdist.pipeline.update import scale_in, skipped_in, static_loss_scale_of
from jdist.pipeline.weight_stashing import with_weight_stashing


class EpochMetrics(NamedTuple):
    """What an epoch found out; the losses are the same on every worker.

    Attributes:
      losses: Of each micro-batch, with the weights that it met; `(micro_batches,)`.
      loss: Over all examples of the epoch.
      skipped: How many updates each stage has skipped, because they overflowed; None
        for stages of other processes, which know theirs. None without a loss scale.
    """

    losses: np.ndarray
    loss: float
    skipped: list[int | None] | None = None


class PipeDream(Pipeline):
    """A pipeline whose stages update themselves while micro-batches are under way.

    A micro-batch has a gradient and an update of its own (or `update_every` of them
    have one together), and the pipeline drains at the end of an epoch only. So a
    micro-batch meets weights that do not know of the ones before it yet. With n stages
    numbered from 1, w_j(t) the weights of stage j after t updates, and w_j(t) = w_j(0)
    for t < 0, an update of each policy is

        stashing       w(t+1) = w(t) - lr grad f(w_1(t-n+1), w_2(t-n+2), .., w_n(t))
        vertical_sync  w(t+1) = w(t) - lr grad f(w_1(t-n+1), .., w_n(t-n+1))
        2bw            w(t+1) = w(t) - lr grad f(w(t-1))
        flush          w(t+1) = w(t) - lr grad f(w(t))

    and likewise for any optimizer. "none" is the control: its backward passes use the
    newest weights with activations that older ones have made, which is the gradient of
    nothing. Every epoch counts from 0: its w(0) are the weights that it begins with.
    `evaluate`, `value_and_grad` and `train_step` are those of a pipeline that flushes,
    with as many micro-batches as workers.

    Args:
      stages: The stages, as for `Pipeline`; see `stages_from_modules`.
      loss_fn: As for `Pipeline`.
      workers_or_devices: As for `Pipeline`: one for each worker, stage by stage.
      optimizer: One of `jdist.optim` for all stages, or one each. A learning rate may
        be a schedule of the stage's own updates. With a loss scale, which has to be a
        constant, each stage skips those of its updates that overflow.
      policy: "stashing", "vertical_sync", "2bw", "flush" or "none".
      replicas: Workers of each stage, which take micro-batches in turn and update
        together; None: one each. With "stashing" and "none" only.
      update_every: Micro-batches of a worker per update (macro-batches): the gradient
        is the mean over all their examples. None: 1, or n for "2bw", which needs n at
        least.
      loss_inputs: As for `Pipeline`.

    Attributes:
      passes: What the workers of this process did in the last epoch, with versions.

    Raises:
      ValueError, TypeError: What `Pipeline` raises; the policy is none of these, or
        cannot have replicas; the loss scale follows overflows.

    Source:
      Narayanan et al., PipeDream, SOSP 2019; Memory-Efficient Pipeline-Parallel DNN
      Training, ICML 2021.

    Example:
      >>> import numpy as np
      >>> from jdist import optim, pipeline
      >>> stages = [
      ...     pipeline.Stage(lambda w, x: x * w, ("x",), ("h",)),
      ...     pipeline.Stage(lambda w, h: h * w, ("h",), ("y",)),
      ... ]
      >>> runtime = pipeline.PipeDream(
      ...     stages, lambda y, batch: (y - 1) ** 2, optimizer=optim.sgd(lr=0.01)
      ... )
      >>> state = runtime.init([np.float32(0.5), np.float32(2.0)])
      >>> batches = [{"x": np.array([1.0, 2.0], np.float32)}] * 4
      >>> state, metrics = runtime.train_epoch(state, batches)
      >>> metrics.losses.round(2)
      array([0.5 , 0.49, 0.34, 0.23], dtype=float32)
      >>> [p.version for p in runtime.passes if p.stage == 0 and p.kind == "B"]
      [0, 0, 1, 2]
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        loss_fn: Callable[..., Any],
        workers_or_devices: Sequence[str] | Sequence[jax.Device] | None = None,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        policy: Policy = "stashing",
        replicas: Sequence[int] | None = None,
        update_every: int | None = None,
        loss_inputs: Sequence[str] | None = None,
    ) -> None:
        def schedule(m: int) -> Schedule:
            return schedule_of_epoch(policy, len(stages), m, replicas, update_every)

        self._scaled = _check_apart(stages, optimizer)
        self.epoch_schedule = schedule
        self.passes: list[Pass] = []
        self._policy = policy
        # For what `Pipeline` does: no worker idles, and nobody updates by itself.
        workers = schedule(1).workers
        synchronous = schedule_of_epoch("stashing", len(stages), workers, replicas, 1)
        super().__init__(
            stages,
            loss_fn,
            replace(synchronous, updates=None),
            workers_or_devices,
            optimizer=optimizer,
            loss_inputs=loss_inputs,
        )

    def train_epoch(
        self,
        state: PipelineState,
        batches: Sequence[Mapping[str, Any]],
        weights: Sequence[Any] | None = None,
    ) -> tuple[PipelineState, EpochMetrics]:
        """Trains on the batches in order, each a micro-batch, and drains.

        With workers in several processes each of them calls it with the same batches,
        which may lack the entries that its stages and losses do not take.

        Args:
          state: From `init` or the epoch before. Nothing of it is donated.
          batches: Named arrays, each `(examples, ...)`.
          weights: Of the examples of each batch, as for `value_and_grad`.

        Returns:
          The next state, one step later, with the newest weights; and the losses. At
          the end of an epoch every stage has made an update of every micro-batch: the
          last one has fewer micro-batches, if `update_every` does not divide them.

        Raises: what `value_and_grad` raises.
        """
        with self.executor.opened("train_epoch") as post:
            parts = _parts(batches, weights, "PipeDream.train_epoch")
            schedule = self.epoch_schedule(len(parts))
            step, key = state.step, state.key
            own = None if key is None else jax.random.fold_in(key, step)
            settings = {"schedule": f"{schedule!r} with {schedule.updates}"}
            post.identify(step, settings, [part.batch for part in parts], parts, own)
            runs = self._stashed_runs(schedule, state, own)
            loss, skipped = self._loss, None
            if self._scaled:
                loss = loss.scaled(scale_in(state.opt_states), None)
                skipped = skipped_in(state.opt_states)
            del (
                state
            )  # Unless the caller keeps it, versions go when no batch needs them.
            places = replace(self._places, schedule=schedule)
            read = self._shapes.read(post, runs, parts[0].batch)
            epoch = EpochStep(self.wiring, places, runs, post, loss, read, parts)
            epoch.run(self.stopwatch)
            after_epoch = epoch.states()
            left = [run.arrays() for run in runs.values()]
            values, totals = epoch.agree_on_losses(left)
            self._shapes.agreed(read)
        self.record, self.passes = epoch.passages, epoch.passes
        params, opt_states, states = ([None] * len(self.stages) for _ in range(3))
        for j in self.own:
            run = runs[self._first(j), j]
            params[j], opt_states[j] = run.params, run.stash.opt_state
            states[j] = after_epoch[j]
        after = PipelineState(step + 1, params, opt_states, states, key)
        if skipped is not None:
            pairs = zip(skipped_in(opt_states), skipped, strict=True)
            skipped = [None if a is None else int(a) - int(b) for a, b in pairs]
        mean = float(values.sum() / totals.sum())
        return after, EpochMetrics(values / totals, mean, skipped)

    def _stashed_runs(
        self, schedule: Schedule, state: PipelineState, key: Any
    ) -> dict[tuple[int, int], StashedRun]:
        optimizers = optimizers_for(self._optimizer, len(self.stages))
        used = versions_used(schedule)
        kept = live_versions(schedule.columns, schedule.updates)
        runs = {}
        plain_runs = self._runs(state.params, state.states, key, self._loss.kind)
        for (worker, j), plain in plain_runs.items():
            own = schedule.owner[j] == worker
            consistent = self._policy != "none"
            versions = int(kept[j, worker]) if consistent and own.any() else 1
            rule = Rule(
                with_weight_stashing(optimizers[j], versions),
                np.where(own, used[j], -1),
                consistent,
                self._scaled,
                schedule.updates is not None and schedule.updates.every == 1,
            )
            device = self._places.devices[worker]
            # A copy for each worker, because an update donates it.
            opt_state = jax.tree.map(jnp.copy, moved(state.opt_states[j], device))
            runs[worker, j] = StashedRun(plain, rule, opt_state)
        return runs


def _check_apart(
    stages: Sequence[Stage], optimizer: Optimizer | Sequence[Optimizer] | None
) -> bool:
    """Refuses what stages would have to do together; whether the loss is scaled."""
    for number, stage in enumerate(stages):
        if stage.tied:
            rule = "must not be tied: stages update at different times"
            got = f"stage {number} with {dict(stage.tied)}"
            raise ValueError(requirement("PipeDream(stages)", rule, got))
    if optimizer is None:
        return False
    if static_loss_scale_of(optimizers_for(optimizer, len(stages))) is None:
        return False
    for number, stage in enumerate(stages):
        if stage.join_weight_gradients:
            rule = "must not join weight gradients with a loss scale: those of each "
            rule += "micro-batch are weighted before they are added"
            raise ValueError(requirement("PipeDream(stages)", rule, f"stage {number}"))
    return True


def _parts(
    batches: Sequence[Mapping[str, Any]], weights: Sequence[Any] | None, call: str
) -> list[MicroBatch]:
    if not hasattr(batches, "__len__"):
        rule = "must be a sequence: the schedule depends on how many there are"
        got = f"a {type(batches).__name__}"
        remedy = "Give list(batches)."
        raise TypeError(requirement(f"{call}(batches)", rule, got, remedy))
    if not len(batches):
        rule = "must have one batch at least"
        raise ValueError(requirement(f"{call}(batches)", rule, "none"))
    given = [None] * len(batches) if weights is None else list(weights)
    if len(given) != len(batches):
        rule = f"must be one array for each of the {len(batches)} batches"
        raise ValueError(requirement(f"{call}(weights=...)", rule, f"{len(given)}"))
    parts = [
        micro_batch_of(number, batch, own, call)
        for number, (batch, own) in enumerate(zip(batches, given, strict=True))
    ]
    parts = normalized(parts, "mean", call)
    least = min(parts, key=lambda part: part.total)
    most = max(parts, key=lambda part: part.total)
    if least.total < 2.0**-64 * most.total:
        rule = "must have totals within a factor of 2^64 of each other"
        got = f"totals from {least.given:.3g} to {most.given:.3g}"
        raise ValueError(requirement(f"{call}(weights=...)", rule, got))
    return parts
