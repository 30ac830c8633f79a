"""`PipeDream`: a pipeline that never drains within an epoch, and updates as it goes."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdist._errors import requirement
from jdist._fit import Metrics
from jdist.optim import Optimizer
from jdist.pipeline.checkpoint import PipelineCheckpoints
from jdist.pipeline.pipedream.batch_stream import BatchStream, Supply
from jdist.pipeline.pipedream.epoch import EpochPlan, EpochStep, PassRecord
from jdist.pipeline.pipedream.joint_update import JointUpdate, check_together
from jdist.pipeline.pipedream.policy import Policy, schedule_of_epoch
from jdist.pipeline.pipedream.stashed_run import StashedRun, VersionRule
from jdist.pipeline.pipedream.weight_stashing import with_weight_stashing
from jdist.pipeline.pipeline import Pipeline
from jdist.pipeline.run.auxiliary import stacked
from jdist.pipeline.run.micro_batch import MicroBatch
from jdist.pipeline.run.stage_channels import StageChannels, moved
from jdist.pipeline.run.training import PipelineState, optimizers_for
from jdist.pipeline.run.update import scale_in, skipped_in, static_loss_scale_of
from jdist.pipeline.schedule.open_schedule import OpenSchedule
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.stages.stage import Stage

_CALL = "PipeDream.train_epoch"


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
      workers_or_devices: As for `Pipeline`, but no mesh: one for each worker, stage by
        stage.
      optimizer: One of `jdist.optim` for all stages, or one each. A learning rate may
        be a schedule of the stage's own updates. With a loss scale, which has to be a
        constant, each stage skips those of its updates that overflow.
      policy: "stashing", "vertical_sync", "2bw", "flush" or "none".
      replicas: Workers of each stage, which take micro-batches in turn and update
        together; None: one each. With "stashing" and "none" only.
      update_every: Micro-batches of a worker per update (macro-batches): the gradient
        is the mean (or sum) over all their examples. None: 1, or n for "2bw", which
        needs n at least.
      max_norm: The gradient of each update is scaled down to this norm, over all stages
        together. With "flush", "2bw" and "vertical_sync", whose updates can wait for
        that of all stages; with one stage under any policy. Not with tied parameters.
      reduction: "mean" or "sum" over the examples of an update.
      loss_inputs: As for `Pipeline`.
      has_aux: As for `Pipeline`.

    Attributes:
      passes: What the workers of this process did in the last epoch, with versions.

    Raises:
      ValueError, TypeError: What `Pipeline` raises; the policy is none of these, or
        cannot have replicas, clipping or tied parameters; the loss scale follows
        overflows.

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

    def __init__(  # noqa: PLR0913 - each is given by its name
        self,
        stages: Sequence[Stage],
        loss_fn: Callable[..., Any],
        workers_or_devices: Sequence[str] | Sequence[jax.Device] | None = None,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        policy: Policy = "stashing",
        replicas: Sequence[int] | None = None,
        update_every: int | None = None,
        max_norm: float | None = None,
        reduction: str = "mean",
        loss_inputs: Sequence[str] | None = None,
        has_aux: bool = False,
    ) -> None:
        def schedule(m: int) -> Schedule:
            return schedule_of_epoch(policy, len(stages), m, replicas, update_every)

        places: Any = workers_or_devices
        if isinstance(places, Mesh):
            rule = "must be devices or names of workers: a mesh is for one program, "
            rule += "which updates all stages together"
            call, got = "PipeDream(workers_or_devices=...)", "a Mesh"
            raise TypeError(requirement(call, rule, got, "Give list(mesh.devices)."))
        if reduction not in ("mean", "sum"):
            rule = "must be 'mean' or 'sum'"
            raise ValueError(requirement("PipeDream(reduction=...)", rule, reduction))
        self._scaled = _is_scaled(stages, optimizer, reduction)
        updates = schedule(1).update_policy
        assert updates is not None
        self._updates = updates
        check_together(stages, policy, max_norm, self._scaled)
        self.epoch_schedule = schedule
        self.passes: list[PassRecord] = []
        self._policy = policy
        # For what `Pipeline` does: no worker idles, and nobody updates by itself.
        workers = schedule(1).workers
        synchronous = schedule_of_epoch("stashing", len(stages), workers, replicas, 1)
        super().__init__(
            stages,
            loss_fn,
            synchronous.synchronous(),
            workers_or_devices,
            optimizer=optimizer,
            max_norm=max_norm,
            reduction=reduction,
            loss_inputs=loss_inputs,
            has_aux=has_aux,
        )

    def train_epoch(
        self,
        state: PipelineState,
        batches: Iterable[Any],
        weights: Iterable[Any] | None = None,
        *,
        checkpoints: PipelineCheckpoints | None = None,
        save_every: int | None = None,
    ) -> tuple[PipelineState, Metrics]:
        """Trains on the batches in order, each a micro-batch, and drains.

        A batch is read when a forward pass needs it: of a generator no more are held
        than are under way in the pipeline, and its length need not be known. With
        workers in several processes each of them calls it with the same batches, which
        may lack the entries that its stages and losses do not take.

        Args:
          state: From `init` or the epoch before. Nothing of it is donated.
          batches: Named arrays, each `(examples, ...)`; or pairs of such a batch and
            its weights. Numbers of examples may differ.
          weights: Of the examples of each batch, as for `value_and_grad`; those of a
            whole batch may be 0, but not those of all batches of an update.
          checkpoints: Where the state is saved: after each `save_every` batches, and at
            the end.
          save_every: See there. The pipeline drains before it saves, as if there was a
            call for each `save_every` batches: a run that goes on from a checkpoint
            repeats every bit.

        Returns:
          The next state, with the newest weights, one step later for each time that the
          pipeline has drained; and what the epoch found out. When it drains every stage
          makes an update of every micro-batch: the last one has fewer micro-batches, if
          `update_every` does not divide them.

        Raises:
          ValueError: The workers have read other batches than each other, or more;
            there are none; `save_every` is less than 1, or without `checkpoints`.
          Exception: What `value_and_grad` raises, and what the iterator raises, on all
            workers, with the name of the worker and the number of the batch in notes.
        """
        held, found = [state], []
        del state  # Unless the caller keeps it, versions go when no batch needs them.
        supply: Supply | None = None
        while supply is None or supply.more():
            with self.executor.opened("train_epoch") as channels:
                if supply is None:
                    _check_saving(checkpoints, save_every)
                    supply = Supply(batches, weights, _CALL)
                after, metrics = self._part(channels, held.pop(), supply, save_every)
            held.append(after)
            found.append(metrics)
            del after
            if checkpoints is not None:
                checkpoints.save(held[0])
        return held.pop(), self._joined(found)

    def _part(
        self,
        channels: StageChannels,
        state: PipelineState,
        supply: Supply,
        limit: int | None,
    ) -> tuple[PipelineState, "_EpochPart"]:
        """Trains on the next batches, `limit` at most, and drains."""
        stream = self._stream(supply, limit)
        stream.reaches(0)
        schedule = OpenSchedule(self.epoch_schedule(1), stream)
        key = state.key
        step, own = state.step, None
        if key is not None:
            own = jax.random.fold_in(key, step)
        self._identify(channels, step, supply, limit, stream, own)
        runs = self._stashed_runs(schedule, state, own)
        loss, skipped = self._loss, None
        if self._scaled:
            loss = loss.scaled(scale_in(state.opt_states), None)
            skipped = skipped_in(state.opt_states)
        del state
        read = self._shapes.read(channels, runs, stream[0].batch)
        # The first batch stands for all: those after it are not read yet.
        parts = _OneForAll(stream[0])
        sizes = [0] * self.schedule.micro_batches
        given = self.wiring, self._places, runs, channels, loss, read
        self._compile_ahead((*given, parts), sizes)
        if not self._takes(0):
            stream.forget(0)
        joint = None
        if self._max_norm is not None or self._tied:
            joint = JointUpdate(self._tied, self._max_norm, self._places, channels)
        plan = EpochPlan(stream, schedule, self._updates.every, joint)
        epoch = EpochStep(*given, plan)
        epoch.run(self.action_timer)
        after_epoch = epoch.states(stream.totals)
        left = [run.arrays() for run in runs.values()]
        more = limit is not None and supply.more()
        found = epoch.agree_on_epoch(channels, more, left)
        self._shapes.agreed(read)
        self._compiled_ahead = True
        self.transfer_log, self.passes = epoch.transfers, epoch.passes
        params, opt_states, states = ([None] * len(self.stages) for _ in range(3))
        for j in self.own:
            run = runs[self._first(j), j]
            params[j], opt_states[j] = run.params, run.stash.opt_state
            states[j] = after_epoch[j]
        if skipped is not None:
            pairs = zip(skipped_in(opt_states), skipped, strict=True)
            skipped = [None if a is None else int(a) - int(b) for a, b in pairs]
        after = PipelineState(step + 1, params, opt_states, states, key)
        return after, _EpochPart(*found, skipped)

    def _stream(self, supply: Supply, limit: int | None) -> BatchStream:
        placement, every = self.schedule.placement, self._updates.every
        return BatchStream(
            supply,
            limit,
            self._loss.kind,
            {every * len(workers) for workers in placement},
            lambda micro: micro == 0 or self._takes(micro),
            not self.executor.sees_all,
            _CALL,
        )

    def _takes(self, micro: int) -> bool:
        """Whether a worker of this process has a pass for a micro-batch."""
        placement = self.schedule.placement
        takers = {workers[micro % len(workers)] for workers in placement}
        return not takers.isdisjoint(self._places.own)

    def _identify(
        self,
        channels: StageChannels,
        step: int,
        supply: Supply,
        limit: int | None,
        stream: BatchStream,
        key: Any,
    ) -> None:
        """Compares the first batch; the rest is compared when the epoch ends."""
        first = stream[0]
        settings = {
            "first of": "a stream" if supply.count is None else supply.count,
            "schedule": f"{self.epoch_schedule(1).name} with {self._updates}",
        }
        if limit is not None:
            settings["save_every"] = limit
        channels.identify(step, settings, [first.batch], [first], key)

    def _joined(self, parts: Sequence["_EpochPart"]) -> Metrics:
        """What the parts of an epoch have found."""
        values, weights = (
            np.concatenate([part[field] for part in parts]) for field in (0, 1)
        )
        starts = np.cumsum([0, *(len(part.values) for part in parts)]).tolist()
        firsts = [jax.tree.map(lambda rows: rows[0], part.aux) for part in parts]
        stacked(dict(zip(starts, firsts, strict=False)), np.stack)  # if they are alike
        aux = jax.tree.map(
            lambda *rows: np.concatenate(rows), *(part.aux for part in parts)
        )
        skipped = None
        if self._scaled:
            columns = zip(*(part.skipped or [] for part in parts), strict=True)
            skipped = [None if c[0] is None else sum(c) for c in columns]
        if self._loss.kind == "sum":
            return Metrics(float(values.sum()), aux=aux, losses=values, skipped=skipped)
        means = np.divide(
            values, weights, out=np.full_like(values, np.nan), where=weights > 0
        )
        loss = float(values.sum() / weights.sum())
        return Metrics(loss, aux=aux, losses=means, skipped=skipped)

    def _stashed_runs(
        self,
        schedule: OpenSchedule,
        state: PipelineState,
        key: Any,
    ) -> dict[tuple[int, int], StashedRun]:
        optimizers = optimizers_for(self._optimizer, len(self.stages))
        runs = {}
        plain_runs = self._runs(state.params, state.states, key, self._loss.kind)
        for (worker, j), plain in plain_runs.items():
            workers = self.schedule.placement[j]
            consistent = self._policy != "none"
            versions = int(schedule.kept[j, worker]) if consistent else 1
            rule = VersionRule(
                with_weight_stashing(optimizers[j], versions),
                functools.partial(schedule.version, j),
                functools.partial(schedule.may_have, worker),
                workers.index(worker),
                len(workers),
                consistent,
                self._scaled,
                self._updates.every == 1,
            )
            device = self._places.devices[worker]
            # A copy for each worker, because an update donates it.
            opt_state = jax.tree.map(jnp.copy, moved(state.opt_states[j], device))
            runs[worker, j] = StashedRun(plain, rule, opt_state)
        return runs


class _EpochPart(NamedTuple):
    """What a part of an epoch found out; by micro-batch, and by stage.

    Attributes:
      values: The weighted sums of the losses.
      weights: The sums of the weights.
      aux: See `Metrics`.
      skipped: Likewise.
    """

    values: np.ndarray
    weights: np.ndarray
    aux: Any
    skipped: list[int | None] | None


class _OneForAll:
    """Micro-batches of which one stands for all."""

    def __init__(self, part: MicroBatch) -> None:
        self._part = part

    def __getitem__(self, number: int) -> MicroBatch:
        return self._part


def _check_saving(
    checkpoints: PipelineCheckpoints | None, save_every: int | None
) -> None:
    call = f"{_CALL}(save_every=...)"
    if save_every is None:
        return
    if checkpoints is None:
        rule = "must come with the checkpoints where the state is saved"
        raise ValueError(requirement(call, rule, "checkpoints=None"))
    if save_every < 1:
        raise ValueError(requirement(call, "must be 1 at least", save_every))


def _is_scaled(
    stages: Sequence[Stage],
    optimizer: Optimizer | Sequence[Optimizer] | None,
    kind: str,
) -> bool:
    """Whether the loss is scaled; refuses what stages cannot do by themselves then."""
    if optimizer is None:
        return False
    if static_loss_scale_of(optimizers_for(optimizer, len(stages))) is None:
        return False
    for number, stage in enumerate(stages):
        if stage.join_weight_gradients and kind == "mean":
            rule = "must not join weight gradients with a loss scale: those of each "
            rule += "micro-batch are weighted before they are added"
            raise ValueError(requirement("PipeDream(stages)", rule, f"stage {number}"))
    return True
