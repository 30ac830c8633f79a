"""`Pipeline`: stages, a schedule and a place for each of them, run as one model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import reduction
from jdist._errors import requirement
from jdist.pipeline.loss import PipelineLoss
from jdist.pipeline.micro_batch import MicroBatch, split_batch
from jdist.pipeline.passage import Passage
from jdist.pipeline.places import Places
from jdist.pipeline.post import InProcessPost, moved
from jdist.pipeline.schedule import Schedule
from jdist.pipeline.shapes import Shapes, find_shapes
from jdist.pipeline.stage import Stage
from jdist.pipeline.stage_run import StageRun
from jdist.pipeline.step import Step
from jdist.pipeline.wiring import wire


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
      devices: One for each worker of the schedule; by default all on JAX's default
        device.
      reduction: "mean", "sum", "max" or "min" over the examples of the batch.
      loss_inputs: Names of the values that the loss is given, if these are not the last
        stage's outputs.

    Raises:
      ValueError: Stages and schedule do not fit, names do not match up, or `reduction` is
        unknown.

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
      1.9557 [(1, 2), (2, 1)]
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        loss_fn: Callable[..., Any],
        schedule: Schedule,
        devices: Sequence[jax.Device] | None = None,
        *,
        reduction: str = "mean",
        loss_inputs: Sequence[str] | None = None,
    ) -> None:
        _check_reduction(reduction)
        self.wiring = wire(stages, loss_inputs)
        self.schedule = schedule
        self.record: list[Passage] = []
        _check_schedule(schedule, len(self.wiring.stages))
        self._places = _places(schedule, devices)
        self._loss = PipelineLoss(loss_fn, self.wiring.loss_inputs, reduction)
        self._compiled = [
            stage.compiled(self.wiring.from_batch(number), number)
            for number, stage in enumerate(self.wiring.stages)
        ]
        self._shapes: dict[Any, Shapes] = {}
        self._steps = 0

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages, by number."""
        return self.wiring.stages

    def place(self, params: Sequence[Any]) -> list[Any]:
        """The parameters (or states) of each stage, on its device.

        Those of a stage with several workers are on the first one's.
        """
        devices = [self._places.devices[w[0]] for w in self.schedule.placement]
        return [moved(tree, d) for tree, d in zip(params, devices, strict=True)]

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

        Args:
          params: One pytree per stage, each on its stage's device (`place`).
          batch: Named arrays, each `(examples, ...)`.
          weights: `(examples,)`, non-negative; by default 1 each.
          states: One per stage, None where there is none, if a stage is stateful.
          key: A PRNG key, if a stage takes one: stage j and micro-batch i get
            `fold_in(fold_in(key, j), i)`.

        Returns:
          `(loss, grads)`; with `states`, `(loss, grads, states)` as the last
          micro-batch left them. `grads` is a list of trees like the parameters, on
          their devices, None at leaves that are not floating.

        Raises:
          ValueError, TypeError: The arguments do not fit the stages; the message names
            the stage and the value. An entry of the batch lies on another device than
            the stage that takes it.
        """
        call = "Pipeline.value_and_grad"
        stages = len(self.stages)
        states = [None] * stages if states is None else list(states)
        _check_count(f"{call}(params)", params, stages)
        _check_count(f"{call}(states=...)", states, stages)
        parts = split_batch(batch, weights, self.schedule.micro_batches)
        shapes = self._shapes_of(params, states, parts)
        runs = self._runs(params, states, key)
        post = InProcessPost(self._places.devices)
        step = Step(
            self._steps,
            self.wiring,
            self._places,
            runs,
            post,
            self._loss,
            shapes.read,
            parts,
        )
        step.run()
        self._steps += 1
        self.record = step.passages
        firsts = [workers[0] for workers in self.schedule.placement]
        grads = [step.gradient(worker, j) for j, worker in enumerate(firsts)]
        loss = step.loss(firsts[-1])
        if all(state is None for state in states):
            return loss, grads
        return loss, grads, [runs[worker, j].state for j, worker in enumerate(firsts)]

    def _shapes_of(
        self, params: Sequence[Any], states: Sequence[Any], parts: list[MicroBatch]
    ) -> Shapes:
        """Checks what does not need numbers, once for all steps of equal shapes."""
        first = parts[0].batch
        leaves, structure = jax.tree.flatten((list(params), states, dict(first)))
        kinds = tuple([(np.shape(x), str(jnp.result_type(x))) for x in leaves])
        found = self._shapes.get((kinds, structure))
        if found is None:
            found = find_shapes(self.wiring, self._loss, params, states, first)
            self._shapes[kinds, structure] = found
        return found

    def _runs(
        self, params: Sequence[Any], states: Sequence[Any], key: Any
    ) -> dict[tuple[int, int], StageRun]:
        runs = {}
        for number, stage in enumerate(self.stages):
            own = None
            if stage.keyed:
                own = jax.random.fold_in(_given(key, number), number)
            for worker in self.schedule.placement[number]:
                device = self._places.devices[worker]
                runs[worker, number] = StageRun(
                    stage,
                    self._compiled[number],
                    moved(params[number], device),
                    moved(states[number], device),
                    moved(own, device),
                    self._loss.kind,
                )
        return runs


def _given(key: Any, number: int) -> Any:
    if key is None:
        rule = f"must be given, because stage {number} takes a PRNG key"
        raise ValueError(requirement("Pipeline.value_and_grad(key=...)", rule, "None"))
    return key


def _check_reduction(kind: str) -> None:
    reduction.check_reduction("Pipeline", kind)


def _check_schedule(schedule: Schedule, stages: int) -> None:
    if schedule.stages != stages:
        rule = f"must be one for the {stages} stages"
        got = f"one for {schedule.stages}"
        raise ValueError(requirement("Pipeline(schedule)", rule, got))
    schedule.validate()
    if schedule.forward_only or schedule.updates is not None:
        rule = "must have a backward pass for each forward pass, and a flush"
        raise ValueError(requirement("Pipeline(schedule)", rule, schedule.name))


def _check_count(argument: str, trees: Sequence[Any], stages: int) -> None:
    if not isinstance(trees, list | tuple) or len(trees) != stages:
        rule = f"must be a list of {stages} trees, one per stage"
        size = f" of {len(trees)}" if isinstance(trees, list | tuple) else ""
        got = f"a {type(trees).__name__}{size}"
        raise ValueError(requirement(argument, rule, got))


def _places(schedule: Schedule, devices: Sequence[jax.Device] | None) -> Places:
    own = range(schedule.workers)
    if devices is None:
        return Places(schedule, [None] * schedule.workers, own)
    if len(devices) != schedule.workers:
        rule = f"must be one device for each of the {schedule.workers} workers"
        raise ValueError(requirement("Pipeline(devices=...)", rule, list(devices)))
    return Places(schedule, list(devices), own)
