"""`Pipeline`: stages, a schedule and a place for each of them, run as one model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jdist._fit import Metrics, check_state
from jdist._tree import examples_in
from jdist.optim import Optimizer
from jdist.pipeline.run.action_timer import ActionTimer
from jdist.pipeline.run.arguments import (
    check_arguments,
    check_not_traced,
    key_given,
    trees_of,
)
from jdist.pipeline.run.compile_ahead import compile_ahead
from jdist.pipeline.run.evaluation import EvaluationRun, Evaluator, draws
from jdist.pipeline.run.executor import executor_for
from jdist.pipeline.run.loss import PipelineLoss
from jdist.pipeline.run.micro_batch import MicroBatch, size_of_batch, split_batch
from jdist.pipeline.run.shapes import Shapes
from jdist.pipeline.run.stage_channels import StageChannels, moved
from jdist.pipeline.run.stage_run import StageRun
from jdist.pipeline.run.step import Step
from jdist.pipeline.run.training import (
    PipelineState,
    optimizers_for,
)
from jdist.pipeline.run.transfer_log import Transfer
from jdist.pipeline.run.update import (
    NO_STATS,
    GradientStats,
    StageUpdates,
    StepResult,
    joined,
    loss_scale_of,
    started,
)
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.spmd.one_program import one_program_on
from jdist.pipeline.stages.stage import Stage
from jdist.pipeline.stages.tied import Tied
from jdist.pipeline.stages.wiring import wire
from jdist.reduction import check_reduction


class Pipeline:
    """A model cut into stages, which work on micro-batches as a schedule says.

    The gradient is that of the whole batch: every example counts by its weight, also
    where micro-batches differ in size or in the sum of their weights.

        dL/dW = S_i S_k w_ik dl_ik/dW / S_i S_k w_ik      (mean; example k of i)

    Args:
      stages: The stages.
      loss_fn: `loss_fn(outputs, batch) -> losses`, one per example. `outputs` is the
        last stage's output, or a dict by name if there are several. It runs where the
        last stage runs, and of the batch only what it reads is sent there.
      schedule: Who does what in which order; see `gpipe`, `one_f_one_b` and the others.
      workers_or_devices: One for each worker of the schedule: devices of this process,
        or names of rpc's workers, each of which makes the same pipeline and calls it.
        By default all stages are on JAX's default device. Or a mesh with one axis of
        devices, of one process or several: then equal stages run as one SPMD program.
      optimizer: For `train_step`: one of `jdist.optim` for all stages, or one each.
      max_norm: The gradient is scaled down to this norm, over all stages together.
      reduction: "mean", "sum", "max" or "min" over the examples of the batch.
      loss_inputs: Names of the values that the loss is given, if these are not the last
        stage's outputs.
      has_aux: Whether the loss function returns `(losses, aux)`: any tree of arrays, of
        the same shapes for each micro-batch, that `Metrics` and `value_and_grad` hand
        out with a new first axis of micro-batches, on every worker. No gradient flows
        into it. What a stage has to say, it puts out as a value that is one of
        `loss_inputs`.

    Raises:
      ValueError: Stages and schedule do not fit, names do not match up, `reduction` is
        unknown, or there is not one place for each worker.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import pipeline
      >>> first = pipeline.Stage(lambda w, x: jnp.tanh(x @ w), ("x",), ("h",))
      >>> second = pipeline.Stage(lambda w, h: h @ w, ("h",), ("y",))
      >>> pipe = pipeline.Pipeline(
      ...     [first, second],
      ...     lambda y, batch: ((y - batch["target"]) ** 2).sum(-1),
      ...     pipeline.one_f_one_b(2, 3),
      ... )
      >>> params = [jnp.array([[0.5, -0.3]]), jnp.array([[1.0], [2.0]])]
      >>> batch = {"x": jnp.arange(5.0)[:, None], "target": jnp.ones((5, 1))}
      >>> loss, grads = pipe.value_and_grad(params, batch)
      >>> print(f"{loss:.4f}", [g.shape for g in grads])
      1.8425 [(1, 2), (2, 1)]
    """

    def __init__(  # noqa: PLR0913 - each is given by its name
        self,
        stages: Sequence[Stage],
        loss_fn: Callable[..., Any],
        schedule: Schedule,
        workers_or_devices: Sequence[str] | Sequence[jax.Device] | Mesh | None = None,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        max_norm: float | None = None,
        reduction: str = "mean",
        loss_inputs: Sequence[str] | None = None,
        has_aux: bool = False,
    ) -> None:
        check_reduction("Pipeline", reduction)
        self.wiring = wire(stages, loss_inputs)
        self.schedule = schedule
        self.transfer_log: list[Transfer] = []
        self.action_timer: ActionTimer | None = None
        check_arguments(schedule, self.wiring.stages, reduction)
        about = f"reduction {reduction!r}, max_norm {max_norm}, {self.wiring.named}"
        about += ", has_aux" if has_aux else ""
        self.executor = executor_for(schedule, workers_or_devices, about)
        self._places = self.executor.places
        self._loss = PipelineLoss(
            loss_fn, self.wiring.loss_inputs, reduction, has_aux=has_aux
        )
        self.one_program = one_program_on(
            workers_or_devices, self.wiring, self._places, self._loss, max_norm
        )
        self._compiled = [
            stage.compiled(self.wiring.from_batch(number), number)
            for number, stage in enumerate(self.wiring.stages)
        ]
        self._evaluated = [
            stage.evaluated(compiled, number)
            for number, (stage, compiled) in enumerate(
                zip(self.wiring.stages, self._compiled, strict=True)
            )
        ]
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._tied = Tied(self.stages)
        self._shapes = Shapes(self.wiring, self.executor, self._loss)
        self._evaluator = Evaluator(self.wiring, self._places, self._loss)
        self._rehearsed: set[Any] = set()
        self._compiled_ahead = False

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages, by number."""
        return self.wiring.stages

    @property
    def own(self) -> list[int]:
        """Numbers of the stages that run in this process."""
        here = set(self._places.own)
        placement = self.schedule.placement
        return [j for j, workers in enumerate(placement) if here.intersection(workers)]

    @property
    def _has_devices(self) -> bool:
        """Whether its workers have devices that were given."""
        return any(device is not None for device in self._places.devices)

    def place(self, params: Sequence[Any]) -> list[Any]:
        """The parameters (or states) of each stage, on its device.

        Those of a stage with several workers are on the first one's; None takes the
        place of stages that run in other processes.
        """
        params = trees_of("Pipeline.place(params)", params, len(self.stages))
        if self._has_devices:
            check_not_traced("Pipeline.place(params)", params)
        placed: list[Any] = [None] * len(self.stages)
        for number in self.own:
            device = self._places.devices[self._first(number)]
            placed[number] = moved(params[number], device)
        return placed

    def value_and_grad(
        self,
        params: Sequence[Any],
        batch: Mapping[str, Any],
        weights: Any = None,
        *,
        states: Sequence[Any] | None = None,
        key: Any = None,
    ) -> Any:
        """The loss of the batch, and the gradient of every stage's parameters.

        With workers in several processes each of them calls it, with the same batch,
        weights and key, and gets the gradients of its own stages.

        Args:
          params: One pytree per stage, each on its stage's device (`place`). Those of
            stages that run in other processes are not looked at.
          batch: Named arrays, each `(examples, ...)`.
          weights: `(examples,)`, non-negative; by default 1 each.
          states: One per stage, None where there is none, if a stage is stateful.
          key: A PRNG key, if a stage takes one: stage j and micro-batch i get
            `fold_in(fold_in(key, j), i)`.

        Returns:
          `(loss, grads)`; with `states`, `(loss, grads, states)` as the last
          micro-batch left them. `grads` is a list of trees like the parameters, on
          their devices, None at leaves that are not floating and in the place of
          stages that run in other processes. With `has_aux` the pair `(loss, aux)`
          takes the place of the loss, as in `jax.value_and_grad`.

        Raises:
          ValueError, TypeError: The arguments do not fit the stages; the message names
            the stage and the value. An entry of the batch lies on another device than
            the stage that takes it.
          WorkerLost: A worker of the pipeline is gone.
          RpcTimeout: The workers wait for one that has not made the call, or for each
            other, for longer than rpc's default timeout (`rpc.set_rpc_timeout`).
            One that computes or compiles is waited for.
          Exception: Whatever went wrong on another worker, with its name in a note. If
            this raises on one worker, it does on all; the next call is right again.
        """
        with self.executor.opened("value_and_grad") as channels:
            found = self._run(channels, params, batch, weights, states, key)
        loss = (found.loss, found.aux) if self._loss.has_aux else found.loss
        if states is None:
            return loss, found.grads
        return loss, found.grads, found.states

    def init(
        self,
        params: Sequence[Any],
        states: Sequence[Any] | None = None,
        key: Any = None,
    ) -> PipelineState:
        """The state before the first training step.

        Args:
          params: One pytree per stage; copied, because training steps donate theirs.
            In full precision: an optimizer with masters rounds the copies. Those of
            stages that run in other processes are not looked at.
          states: One per stage, None where there is none.
          key: A PRNG key, if a stage takes one; step t uses `fold_in(key, t)`.

        Raises:
          ValueError, TypeError: No optimizer fits; or not one tree per stage. With tied
            parameters, which are compared, on all workers if on one.
        """
        if not self._tied:
            return self._initial(params, states, key)[0]
        with self.executor.opened("init") as channels:
            state, given = self._initial(params, states, key)
            optimizers = optimizers_for(self._optimizer, len(self.stages))
            self._tied.check(given, optimizers, channels)
        return state

    def _initial(
        self, params: Sequence[Any], states: Sequence[Any] | None, key: Any
    ) -> tuple[PipelineState, list[Any]]:
        """The state, and the parameters in full precision."""
        stages = len(self.stages)
        given = trees_of("Pipeline.init(states=...)", states, stages)
        optimizers = optimizers_for(self._optimizer, stages)
        loss_scale_of(optimizers)
        placed = jax.tree.map(jnp.copy, self.place(params))
        copies, kept = list(placed), [None] * stages
        for j in self.own:
            copies[j], kept[j] = started(optimizers[j], placed[j])
        return PipelineState(0, copies, kept, self.place(given), key), placed

    def train_step(
        self,
        state: PipelineState,
        batch: Mapping[str, Any],
        weights: Any = None,
        **overrides: Any,
    ) -> tuple[PipelineState, Metrics]:
        """One step: the gradient of the batch, and an update of every stage.

        Args:
          state: From `init` or the step before; its arrays are donated, but if this
            raises what another worker has raised.
          batch: As for `value_and_grad`.
          weights: As for `value_and_grad`.
          **overrides: Of all optimizers for this step, such as `lr=1e-3`; as for
            `Optimizer.step`. A new number compiles nothing.

        Returns:
          The next state, and what the step found out.

        Raises: what `value_and_grad` and `Optimizer.step` raise. Stages step together:
          if this raises on one worker, none has stepped.
        """
        with self.executor.opened("train_step") as channels:
            check_state("Pipeline.train_step(state)", state, PipelineState, "pipe")
            optimizers = optimizers_for(self._optimizer, len(self.stages))
            step, key = state.step, state.key
            own = None if key is None else jax.random.fold_in(key, step)
            params, kept = list(state.params), list(state.opt_states)
            update = StageUpdates(optimizers, params, kept, self._max_norm, overrides)
            states = state.states
            found = self._run(
                channels, params, batch, weights, states, own, update, step
            )
            norm = None
            # From here on all workers have agreed to step.
            for j in self.own:
                stats = moved(found.stats, self._places.devices[self._first(j)])
                params[j], kept[j], norm = update.apply(j, found.grads[j], stats)
        size = size_of_batch(batch, weights)
        metrics = Metrics(found.loss, *size, norm, found.aux)
        return PipelineState(step + 1, params, kept, found.states, key), metrics

    def evaluate(
        self,
        params: Sequence[Any] | PipelineState,
        batch: Mapping[str, Any],
        weights: Any = None,
        *,
        states: Sequence[Any] | None = None,
        key: Any = None,
        outputs: bool = False,
    ) -> Metrics:
        """The loss of a batch, by forward passes alone; nothing is changed by it.

        Args:
          params: One pytree per stage, or a training state.
          batch: As for `value_and_grad`; it may have fewer examples than there are
            micro-batches.
          weights: As for `value_and_grad`.
          states: As for `value_and_grad`; a training state has its own.
          key: A PRNG key, if a stage takes one and has no function for evaluation.
          outputs: Whether what the loss is given is wanted, too.

        Raises: what `value_and_grad` raises.
        """
        call, stages = "Pipeline.evaluate", len(self.stages)
        with self.executor.opened("evaluate") as channels:
            step = None
            if isinstance(params, PipelineState):
                step, states, params = params.step, params.states, params.params
            given = trees_of(f"{call}(states=...)", states, stages)
            trees = trees_of(f"{call}(params)", params, stages)
            if self.one_program is not None:
                self.one_program.check_alone(call)
            count = min(self.schedule.micro_batches, examples_in(batch, call))
            parts = split_batch(batch, weights, count, self._loss.kind)
            runs = self._runs(trees, given, key, self._loss.kind, EvaluationRun)
            channels.identify(step, {}, [batch], parts, key)
            read = self._shapes.read(channels, runs, parts[0].batch)
            self.transfer_log, found = self._evaluator.run(
                channels, runs, parts, read, outputs
            )
            self._shapes.agreed(read)
        return found

    def _run(
        self,
        channels: StageChannels,
        params: Sequence[Any],
        batch: Mapping[str, Any],
        weights: Any,
        states: Sequence[Any] | None,
        key: Any,
        update: StageUpdates | None = None,
        step: int | None = None,
    ) -> StepResult:
        """The passes of one call, upon which all workers have agreed."""
        call = "Pipeline.value_and_grad"
        stages = len(self.stages)
        given = trees_of(f"{call}(states=...)", states, stages)
        trees = trees_of(f"{call}(params)", params, stages)
        if self.one_program is not None:
            found = self.one_program(trees, batch, weights, update)
            if update is not None:
                told = dict.fromkeys(self.own, found.stats)
                self._rehearse(update, found.grads, told)
            return found
        count = self.schedule.micro_batches
        parts = split_batch(batch, weights, count, self._loss.kind)
        loss = self._loss
        if update is not None and update.loss_scale is not None:
            loss = loss.scaled(update.scale, sum(part.total for part in parts))
        runs = self._runs(trees, given, key, loss.gradient_kind)
        settings = {} if update is None else update.settings
        channels.identify(step, settings, [batch], parts, key)
        return self._step(channels, runs, parts, loss, update)

    def _rehearse(
        self,
        update: StageUpdates,
        grads: Sequence[Any],
        told: Mapping[int, GradientStats],
    ) -> None:
        for j in self.own:
            update.rehearse(j, grads[j], told.get(j, NO_STATS), self._rehearsed)

    def _step(
        self,
        channels: StageChannels,
        runs: Mapping[tuple[int, int], StageRun],
        parts: Sequence[MicroBatch],
        loss: PipelineLoss,
        update: StageUpdates | None,
    ) -> StepResult:
        read = self._shapes.read(channels, runs, parts[0].batch)
        given = self.wiring, self._places, runs, channels, loss, read, parts
        self._compile_ahead(given, [len(part.weights) for part in parts])
        step = Step(*given)
        step.run(self.action_timer)
        grads: list[Any] = [None] * len(self.stages)
        for j in self.own:
            unrounded = update is not None and update.unrounded(j)
            grads[j] = step.gradient(self._first(j), j, unrounded)
        params = {j: runs[self._first(j), j].params for j in self.own}
        grads = self._tied.summed(params, grads, self._places, channels)
        told: dict[int, GradientStats] = {}
        if update is not None and update.together:
            counted = {j: self._tied.counted(j, params[j], grads[j]) for j in self.own}
            told = {j: update.stats(j, grads[j], own) for j, own in counted.items()}
        if update is not None:
            self._rehearse(update, grads, told)
        left = step.states([part.total for part in parts])
        after = [left.get(j) for j in range(len(self.stages))]
        loss_of_all, aux, stats = step.agree(channels, told, (grads, after))
        self._shapes.agreed(read)
        self._compiled_ahead = True
        self.transfer_log = step.transfers
        together = joined(stats) if stats else NO_STATS
        return StepResult(loss_of_all, grads, together, after, aux)

    def _compile_ahead(self, given: tuple[Any, ...], sizes: Sequence[int]) -> None:
        """Compiles the programs of several processes at the same time.

        Only until a step has succeeded on all of them: no process sees whether the
        others have compiled for other shapes since, and all must take part.

        Args:
          given: The arguments of `Step`.
          sizes: The number of examples of each micro-batch.
        """
        if not (self.executor.sees_all or self._compiled_ahead):
            compile_ahead(*given, sizes=sizes)

    def _first(self, stage: int) -> int:
        """The first worker of this process that runs a stage."""
        return min(set(self.schedule.placement[stage]).intersection(self._places.own))

    def _runs(
        self,
        params: Sequence[Any],
        states: Sequence[Any],
        key: Any,
        kind: str,
        made: type[StageRun] = StageRun,
    ) -> dict[tuple[int, int], StageRun]:
        if self._has_devices:
            check_not_traced("Pipeline(.., devices)", params, states, key)
        runs = {}
        compiled = self._evaluated if made is EvaluationRun else self._compiled
        for number in self.own:
            stage, own = self.stages[number], None
            if draws(stage) if made is EvaluationRun else stage.keyed:
                own = jax.random.fold_in(key_given(key, number), number)
            for worker in self.schedule.placement[number]:
                if worker not in self._places.own:
                    continue
                device = self._places.devices[worker]
                runs[worker, number] = made(
                    stage,
                    compiled[number],
                    moved(params[number], device),
                    moved(states[number], device),
                    moved(own, device),
                    kind,
                    self.schedule.micro_batches == 1,
                )
        return runs
