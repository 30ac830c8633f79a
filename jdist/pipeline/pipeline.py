"""`Pipeline`: a model in stages, run by a schedule on devices or workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, final

import jax
import jax.numpy as jnp
from numpy.typing import ArrayLike

from jdist._compat import Ahead, called_outside_mesh, outside_mesh, with_automatic_axes
from jdist._errors import (
    check_flags,
    check_function,
    check_number,
    check_sequence,
    quoted,
    type_error,
    value_error,
)
from jdist._fit import Metrics
from jdist._tree import PyTree, check_arrays, check_state, is_shape, owned, shapes_of
from jdist.optim import Optimizer
from jdist.optim.internal import started
from jdist.pipeline.places import GivenPlaces, OneProgram, communicator_for
from jdist.pipeline.run.action_timer import ActionTimer
from jdist.pipeline.run.executor import (
    CallInputs,
    ScheduleExecutor,
    StagePrograms,
    check_not_traced,
    trees_of,
)
from jdist.pipeline.run.loss import PipelineLoss
from jdist.pipeline.run.micro_batch import size_of_batch
from jdist.pipeline.run.stage_channels import StageChannels
from jdist.pipeline.run.tied import tied_of
from jdist.pipeline.run.update import (
    PipelineState,
    StageUpdates,
    loss_scale_of,
    optimizers_for,
)
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.spmd.one_program import OneProgramExecutor
from jdist.pipeline.stages.place import (
    automatic_axes,
    moved,
    pacing,
    resident,
    sharded,
    undivided,
)
from jdist.pipeline.stages.stage import Stage
from jdist.pipeline.stages.wiring import wire
from jdist.pipeline.weight_stashing.epoch import PassRecord
from jdist.pipeline.weight_stashing.executor import CALL, EpochExecutor, check_epochs
from jdist.reduction import check_reduction
from jdist.segment.internal import Watched

__all__ = ["Pipeline"]


@final
class Pipeline:
    """A model cut into stages that process micro-batches in the order of a schedule.

    The gradient is that of the whole batch: every example counts by its weight, also
    where micro-batches differ in size or in the sum of their weights.

        dL/dW = S_i S_k w_ik dl_ik/dW / S_i S_k w_ik      (mean; example k of i)

    The backward pass of an example begins with its share w_ik / S_i S_k w_ik, so that
    a rule that is not linear in its cotangent does what it does on one device.

    Args:
      stages: The stages, in order; see `with_ends` for what is before and after equal
        ones.
      loss_fn: `loss_fn(outputs, batch) -> losses`, one per example. `outputs` is the
        last stage's output, or a dict by name if there are several. It runs where the
        last stage runs, and of the batch only what it reads is sent there.
      schedule: The order of each worker's actions; see `gpipe`, `one_f_one_b` and the
        others. An asynchronous one, such as `pipedream`, is for `train_epoch`; other
        calls then make no update between the passes.
      places: Where the stages run: a sequence of devices and meshes of this process,
        one for each worker of the schedule (`Meshes`, where their data axis has another
        name than "data"); `Workers` of rpc; or `OneProgram` on one mesh. By default all
        stages are on JAX's default device.
      optimizer: For training: one of `jdist.optim` for all stages, or one each.
      max_norm: The gradient is scaled down to this norm, over all stages together.
      reduction: "mean", "sum", "max" or "min" over the examples of the batch. The last
        two, with several micro-batches, for rules that are linear in their cotangent.
      loss_inputs: Names of the values that the loss is given, if these are not the last
        stage's outputs.
      has_aux: Whether the loss function returns `(losses, aux)`: any tree of arrays, of
        the same shapes for each micro-batch, which `Metrics` and `value_and_grad`
        return with a new first axis of micro-batches, on every worker. No gradient
        flows into it. An auxiliary value of a stage is an output of the stage that is
        named in `loss_inputs`.

    Attributes:
      passes: The passes of its workers in the last `train_epoch`, with versions.

    Raises:
      ValueError: Stages and schedule do not fit, names do not match, `reduction` is
        unknown, or there is not one place for each worker; a process has devices of no
        worker, or of several.

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
        loss_fn: Callable[..., PyTree],
        schedule: Schedule,
        places: GivenPlaces = None,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        max_norm: float | None = None,
        reduction: str = "mean",
        loss_inputs: Sequence[str] | None = None,
        has_aux: bool = False,
    ) -> None:
        # Arguments are checked before anything is compiled and before this worker waits
        # for others, which an error here would leave waiting.
        check_reduction("Pipeline", reduction)
        check_flags("Pipeline", has_aux=has_aux)
        check_sequence("Pipeline(stages)", stages, Stage, "must be a sequence of Stage")
        self.wiring = wire(stages, loss_inputs)
        check_function("Pipeline(loss_fn)", loss_fn)
        if max_norm is not None:
            call, rule = "Pipeline(max_norm=...)", "must be at least 0"
            check_number(call, max_norm, rule, lambda x: x >= 0)
        _check_schedule(schedule, self.wiring.stages)
        self.schedule = schedule
        self.passes: Sequence[PassRecord] = ()
        self.action_timer: ActionTimer | None = None
        self._optimizer = optimizer
        self._max_norm = max_norm
        # One program's ties are found at the end, after its executor has refused equal
        # stages that share parameters, with a message of its own.
        in_one = isinstance(places, OneProgram)
        self._tied = None if in_one else tied_of(self.stages)
        if schedule.update_policy is not None:
            self._check_epochs(reduction, in_one)
        self._loss = PipelineLoss(
            loss_fn, self.wiring.loss_inputs, reduction, has_aux=has_aux
        )
        about = f"reduction {reduction!r}, max_norm {max_norm}, {self.wiring.named}"
        # Compared between workers, whose pipelines must agree on it.
        about += ", has_aux" if has_aux else ""
        # After the checks above: workers pair their pipelines by counting them here,
        # and a refused one must not count.
        self.communicator = communicator_for(schedule, places, about)
        self._places = self.communicator.places
        self.executor = self._executor(places)
        if in_one:
            self._tied = tied_of(self.stages)

    def _check_epochs(self, reduction: str, in_one: bool) -> None:
        """Refuse arguments that an asynchronous schedule does not support."""
        if in_one:
            rule = "must be a list of places with an asynchronous schedule: "
            rule += "one program updates all stages together"
            call, remedy = "Pipeline(places)", "Give list(mesh.devices)."
            raise type_error(call, rule, "OneProgram", remedy)
        each = None if self._optimizer is None else self._optimizers
        check_epochs(self.stages, reduction, each, self._max_norm)

    def _executor(self, given: GivenPlaces) -> ScheduleExecutor:
        """The executor of the schedule at these places."""
        programs = StagePrograms(self.wiring, self.communicator, self._loss)
        if self.schedule.update_policy is not None:
            each = None if self._optimizer is None else self._optimizers
            return EpochExecutor(programs, each)
        if isinstance(given, OneProgram):
            mesh = automatic_axes("OneProgram(mesh)", given.mesh)
            with_square = self._max_norm is not None
            return OneProgramExecutor(
                programs, mesh, given.axis, with_square, given.overlap
            )
        return ScheduleExecutor(programs, self.schedule, self._tied)

    @cached_property
    def _optimizers(self) -> list[Optimizer]:
        found = optimizers_for(self._optimizer, len(self.stages))
        loss_scale_of(found)  # Called for its check that all scales are equal.
        return found

    @cached_property
    def _contents(self) -> Watched:
        """What the functions read."""
        reads: dict[str, object] = {"loss_fn": self._loss.fn}
        for j, stage in enumerate(self.stages):
            reads[f"stage {j}"] = stage.fn, stage.in_evaluation
        return Watched(reads, "Pipeline")

    @cached_property
    def _updates(self) -> Watched:
        """What the optimizers read, such as a schedule of the user's."""
        return Watched({"optimizer": self._optimizer}, "Pipeline")

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages, by number."""
        return self.wiring.stages

    @property
    def own(self) -> list[int]:
        """Numbers of the stages that run in this process."""
        return list(self._places.stages)

    @called_outside_mesh
    def place(
        self, params: Sequence[PyTree], specs: Sequence[PyTree] | None = None
    ) -> list[PyTree]:
        """Put the parameters (or states) of each stage on its device or mesh.

        A stage with several workers has them on the first one's device. None stands for
        stages that run in other processes. On a mesh an array keeps the specification
        of its sharding; an array without one is replicated.

        Args:
          params: One pytree per stage.
          specs: For each stage on a mesh, None, or a `PartitionSpec` for each array or
            for each subtree.

        Raises:
          ValueError: Not one tree per stage; a specification names an axis that the
            stage's mesh does not have, or that does not divide the array; a call inside
            `jax.jit`.
        """
        trees = trees_of("Pipeline.place(params)", params, len(self.stages))
        check_arrays("Pipeline.place(params)", trees)
        # Copied, since a device may read an array of NumPy's in place.
        params = owned(trees)
        specs = trees_of("Pipeline.place(specs)", specs, len(self.stages))
        if any(device is not None for device in self._places.devices):
            check_not_traced("Pipeline.place(params)", params)
        placed: list[PyTree] = [None] * len(self.stages)
        for j, tree in enumerate(params):
            if j in self._places.stages:
                placed[j] = self._placed(j, tree, specs[j])
            elif isinstance(self.executor, OneProgramExecutor) and tree is not None:
                # One program needs the shapes of parameters in other processes, too.
                self.executor.learn(j, self._placed(j, shapes_of(tree), specs[j]))
        return placed

    def _placed(self, stage: int, tree: PyTree, spec: PyTree) -> PyTree:
        """A stage's tree on the device or mesh of its first worker here, or of all."""
        places, call = self._places, "Pipeline.place"
        worker = places.stages.get(stage, places.worker(stage, 0))
        where = places.devices[worker]
        if spec is None:
            return resident(tree, where, f"{call}(params)", stage)
        return sharded(tree, spec, where, call, stage)

    def value_and_grad(
        self,
        params: Sequence[PyTree],
        batch: Mapping[str, PyTree],
        weights: ArrayLike | None = None,
        *,
        states: Sequence[PyTree] | None = None,
        key: jax.Array | None = None,
    ) -> PyTree:
        """The loss of the batch, and the gradient of every stage's parameters.

        With workers in several processes each of them calls it, with the same batch,
        weights and key, and gets the gradients of its own stages.

        Args:
          params: One pytree per stage, each on its stage's device (`place`). Those of
            stages that run in other processes are ignored.
          batch: Named arrays, each `(examples, ...)`.
          weights: `(examples,)`, non-negative; by default 1 each. An example of weight
            0 is replaced by one that counts, in every entry.
          states: One per stage, None where there is none, if a stage is stateful.
          key: A PRNG key, if a stage takes one: stage j and micro-batch i get
            `fold_in(fold_in(key, j), i)`.

        Returns:
          `(loss, grads)`; with `states`, `(loss, grads, states)`, with the states after
          the last micro-batch. `grads` is a list of trees like the parameters, on their
          devices, with None for leaves that are not floating and for stages that run in
          other processes. With `has_aux` the pair `(loss, aux)` replaces the loss, as
          in `jax.value_and_grad`.

        Raises:
          ValueError, TypeError: The arguments do not fit the stages; the message names
            the stage and the value. An entry of the batch lies on another device than
            the stage that takes it.
          WorkerLost: A worker of the pipeline is lost.
          RpcTimeout: The workers wait for one that has not made the call, or for each
            other, for longer than rpc's default timeout (`rpc.set_rpc_timeout`). Time
            in which a worker computes or compiles does not count.
          Exception: An error of another worker, with its name in a note. If this raises
            on one worker, it raises on all; the next call is not affected.
        """
        # Opened before arguments are checked: workers pair calls by counting them, so
        # that one with wrong arguments must count this call too, and fail it on all.
        with self._opened("value_and_grad") as channels:
            given = self._inputs(params, batch, weights, states, key)
            found = self.executor.gradient(channels, given, None, self.action_timer)
        loss = (found.loss, found.aux) if self._loss.has_aux else found.loss
        if states is None:
            return loss, found.grads
        return loss, found.grads, found.states

    @contextmanager
    def _opened(self, kind: str) -> Iterator[StageChannels]:
        """A call of all processes that runs the stages, if they are as compiled."""
        with outside_mesh(), self.communicator.opened(kind) as channels:
            unchanged = self._check_functions()
            yield channels
            # After the traces, which may write to what they read.
            if not unchanged:
                self._contents.note()
            if not self._updates.holds():
                self._updates.note()

    def _check_functions(self) -> bool:
        """Checks that functions are as compiled; whether nothing at all has changed."""
        unchanged = self._contents.holds()
        # Before the first call nothing is compiled.
        if not unchanged and self._contents.contents is not None:
            self.executor.check_functions()
        if self._updates.contents is not None and not self._updates.holds():
            rule = "must read what it read when its update was first compiled"
            remedy = "Override what changes in `train_step`, or make the optimizer and "
            remedy += "the pipeline anew."
            argument, got = "Pipeline(optimizer=...)", "one that reads something else"
            raise value_error(argument, rule, got, remedy)
        return unchanged

    @called_outside_mesh
    def init(
        self,
        params: Sequence[PyTree],
        states: Sequence[PyTree] | None = None,
        key: jax.Array | None = None,
    ) -> PipelineState:
        """The state before the first training step.

        Args:
          params: One pytree per stage; copied, because training steps donate theirs.
            In full precision: an optimizer with masters rounds the copies. Those of
            stages that run in other processes are ignored. Or their shapes
            (`jax.ShapeDtypeStruct`), for the shapes of the state; see `lower`.
          states: One per stage, None where there is none.
          key: A PRNG key, if a stage takes one; step t uses `fold_in(key, t)`.

        Raises:
          ValueError, TypeError: No optimizer fits; or not one tree per stage. Tied
            parameters are compared, and an error is then raised on all workers.
        """
        if any(map(is_shape, jax.tree.leaves(params))):
            given = trees_of("Pipeline.init(states=...)", states, len(self.stages))
            pairs = zip(self._optimizers, self._shapes("init", params), strict=True)
            ahead = Ahead(places=True)
            begun = [ahead(jax.jit(partial(started, one)), tree) for one, tree in pairs]
            own, opt_states = map(list, zip(*begun, strict=True))
            kept = self._shapes("init", given)
            return PipelineState(0, own, opt_states, kept, shapes_of(key))
        # A call of all workers where copies of one parameter are on several, which
        # compare digests of them.
        tied, call = self._tied, self.communicator.opened
        opened: Any = nullcontext() if tied is None else call("init")
        with opened as channels:
            given = trees_of("Pipeline.init(states=...)", states, len(self.stages))
            check_arrays("Pipeline.init(params)", params)
            check_arrays("Pipeline.init(states=...)", given)
            optimizers = self._optimizers
            # A copy, because training steps donate the state and the caller keeps its
            # own.
            placed = jax.tree.map(jnp.copy, self.place(params))
            copies, kept = list(placed), [None] * len(self.stages)
            for j in self.own:
                copies[j], kept[j] = started(optimizers[j], placed[j])
            state = PipelineState(0, copies, kept, self.place(given), key)
            if tied is not None:
                # Parameters of stages in other processes are compared as they were
                # given.
                pairs = zip(params, placed, strict=True)
                if self.communicator.sees_all:
                    placed = [tree if own is None else own for tree, own in pairs]
                tied.check(placed, optimizers, channels)
        return state

    def _shapes(self, call: str, trees: Sequence[PyTree]) -> list[PyTree]:
        """The shapes of each stage's tree, on the device of its first worker."""
        places = self._places
        argument = f"Pipeline.{call}(params)"
        found = trees_of(argument, trees, len(self.stages))
        return [
            resident(shapes_of(tree), places.devices[places.worker(j, 0)], argument, j)
            for j, tree in enumerate(found)
        ]

    @called_outside_mesh
    def lower(
        self,
        params: Sequence[PyTree] | PipelineState,
        batch: Mapping[str, PyTree],
        weights: ArrayLike | None = None,
        *,
        states: Sequence[PyTree] | None = None,
        key: jax.Array | None = None,
        **overrides: Any,
    ) -> dict[str, jax.stages.Lowered]:
        """Lower the programs of the pipeline, without compiling or running them.

        The devices of the pipeline may be those of a topology
        (`jax.experimental.topologies`), and each array may be a shape.

        Args:
          params: One pytree per stage, for the programs of `value_and_grad`; or a
            training state, for those of `train_step`, or of `train_epoch` if the
            schedule is asynchronous.
          batch: As for that call; one of the batches of an epoch.
          weights: As for that call: numbers, of which only the dtype matters.
          states: As for `value_and_grad`; a training state has its own.
          key: Likewise.
          **overrides: Hyperparameters of the optimizers, as for `train_step`.

        Returns:
          Programs by name: "all stages: gradient" of one program; else
          "stage 0: forward" and so on, one of each kind for every stage and for the
          loss, and others with a number where micro-batches differ in size. With a
          training state also "stage 0: update", unless each backward pass has its
          update in "stage 0: backward".

        Raises:
          ValueError: The stages run in several processes; and what that call raises.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from jdist import pipeline
          >>> first = pipeline.Stage(lambda w, x: jnp.tanh(x @ w), ("x",), ("h",))
          >>> second = pipeline.Stage(lambda w, h: h @ w, ("h",), ("y",))
          >>> schedule = pipeline.one_f_one_b(2, 2)
          >>> pipe = pipeline.Pipeline([first, second], lambda y, b: y[:, 0], schedule)
          >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
          >>> found = pipe.lower([shape(3, 4), shape(4, 1)], {"x": shape(6, 3)})
          >>> [name for name in found if "1:" in name and "ward" in name]
          ['stage 1: forward', 'stage 1: backward']
        """
        if not self.communicator.sees_all:
            rule = "must be called where one process has all stages"
            remedy = "Give devices in place of workers' names: any will do to lower."
            raise value_error("Pipeline.lower", rule, "workers", remedy)
        self._check_functions()
        update = None
        if isinstance(params, PipelineState):
            kept, states, key = list(params.opt_states), params.states, params.key
            trees = self._shapes("lower", params.params)
            opt_states = self._shapes("lower", kept)
            made_of = self._optimizers, trees, opt_states, self._max_norm, overrides
            update = StageUpdates(*made_of)
        else:
            trees = self._shapes("lower", params)
        given = trees_of("Pipeline.lower(states=...)", states, len(self.stages))
        carried = self._shapes("lower", given)
        inputs = CallInputs(trees, shapes_of(batch), weights, carried, shapes_of(key))
        return self.executor.lower(inputs, update)

    def train_step(
        self,
        state: PipelineState,
        batch: Mapping[str, PyTree],
        weights: ArrayLike | None = None,
        **overrides: Any,
    ) -> tuple[PipelineState, Metrics]:
        """Run one step: the gradient of the batch, and an update of every stage.

        Args:
          state: From `init` or the step before; its arrays are donated, unless this
            raises an error of another worker.
          batch: As for `value_and_grad`.
          weights: As for `value_and_grad`.
          **overrides: Hyperparameters of all optimizers for this step, such as
            `lr=1e-3`; as for `Optimizer.step`. A new number needs no compilation.

        Returns:
          The next state, and the metrics of the step.

        Raises: what `value_and_grad` and `Optimizer.step` raise. Stages step together:
          if this raises on one worker, none has stepped.
        """
        with self._opened("train_step") as channels:
            check_state("Pipeline.train_step(state)", state, PipelineState, "pipe")
            step, key = state.step, state.key
            # Derived from the step's number: a resumed run draws the same numbers.
            own = None if key is None else jax.random.fold_in(key, step)
            params, kept = list(state.params), list(state.opt_states)
            made_of = self._optimizers, params, kept, self._max_norm, overrides
            invoke = pacing(self._places.devices, channels.computed)
            update = StageUpdates(*made_of, invoke)
            given = self._inputs(params, batch, weights, state.states, own, step)
            found = self.executor.gradient(channels, given, update, self.action_timer)
            norm = None
            # All workers have agreed to step. Updates come after that because they
            # donate the old state, which a call that fails must leave intact.
            for j, worker in self._places.stages.items():
                # The arguments of one compiled update must be on the same devices.
                stats = moved(found.stats, undivided(self._places.devices[worker]))
                params[j], kept[j], norm = update.apply(j, found.grads[j], stats)
        size = size_of_batch(batch, weights)
        metrics = Metrics(found.loss, *size, norm, found.aux)
        return PipelineState(step + 1, params, kept, found.states, key), metrics

    def train_epoch(
        self,
        state: PipelineState,
        batches: Iterable[PyTree],
        *,
        total: int | None = None,
    ) -> tuple[PipelineState, Metrics]:
        """Train on the batches in order, each one a micro-batch, and drain.

        For an asynchronous schedule, such as `pipedream`: the stages update while
        micro-batches are in flight, by the schedule's `update_policy`.

        A batch is read when a forward pass needs it: the batches of a generator that
        are held at a time are those in flight. With workers in several processes each
        of them calls it with the same batches, which may lack entries that its stages
        and losses do not take.

        Args:
          state: From `init` or the epoch before. It is not donated.
          batches: Named arrays, each `(examples, ...)`; or pairs of such a batch and
            the weights of its examples, as for `value_and_grad`. Numbers of examples
            may differ. All weights of a batch may be 0, but not those of all batches of
            an update.
          total: The number of batches; it is needed where they have no length.

        Returns:
          The next state, with the newest weights, one step later; and the metrics of
          the epoch. The pipeline has drained: all micro-batches are part of an update
          of every stage, and the last update has fewer of them, if `update_every` does
          not divide their number. So a run that continues from a checkpoint of this
          state repeats every bit.

        Raises:
          ValueError: The schedule is synchronous; the workers have read different
            batches, or different numbers of them; there are none, or fewer than
            `total`.
          Exception: What `value_and_grad` raises, and what the iterator raises, on all
            workers, with the name of the worker and the number of the batch in notes.
        """
        executor = self.executor
        if not isinstance(executor, EpochExecutor):
            rule = "must have an asynchronous schedule, such as `pipedream`"
            remedy = "`train_step` makes one update of a batch, `fit` one of each."
            raise value_error(CALL, rule, quoted(self.schedule), remedy)
        # In a list, from which it is popped for `train`: a reference in this frame
        # would keep the first version of all weights alive for the whole epoch.
        held = [state]
        del state
        with self._opened("train_epoch") as channels:
            check_state(f"{CALL}(state)", held[0], PipelineState, "pipe")
            timer = self.action_timer
            result = executor.train(channels, held.pop(), batches, total, timer)
        state, metrics, self.passes = result
        return state, metrics

    def evaluate(
        self,
        params: Sequence[PyTree] | PipelineState,
        batch: Mapping[str, PyTree],
        weights: ArrayLike | None = None,
        *,
        states: Sequence[PyTree] | None = None,
        key: jax.Array | None = None,
        outputs: bool = False,
    ) -> Metrics:
        """The loss of a batch, by forward passes alone, without a change of state.

        Args:
          params: One pytree per stage, or a training state.
          batch: As for `value_and_grad`; it may have fewer examples than there are
            micro-batches.
          weights: As for `value_and_grad`, but no example is replaced.
          states: As for `value_and_grad`; a training state has its own.
          key: A PRNG key, if a stage takes one and has no function for evaluation.
          outputs: Whether to return the inputs of the loss, too.

        Raises: what `value_and_grad` raises.
        """
        with self._opened("evaluate") as channels:
            step = None
            if isinstance(params, PipelineState):
                step, states, params = params.step, params.states, params.params
            call = "Pipeline.evaluate"
            given = self._inputs(params, batch, weights, states, key, step, call)
            return self.executor.evaluate(channels, given, outputs)

    def _inputs(
        self,
        params: Sequence[PyTree],
        batch: Mapping[str, PyTree],
        weights: ArrayLike | None,
        states: Sequence[PyTree] | None,
        key: jax.Array | None,
        step: int | None = None,
        call: str = "Pipeline.value_and_grad",
    ) -> CallInputs:
        """The arguments of a call, with a tree for each stage."""
        stages = len(self.stages)
        kept = trees_of(f"{call}(states=...)", states, stages)
        trees = trees_of(f"{call}(params)", params, stages)
        check_arrays(f"{call}(params)", trees)
        check_arrays(f"{call}(states=...)", kept)
        # What no stage and no loss takes may be anything.
        check_arrays(f"{call}(batch)", batch, others=True)
        own = with_automatic_axes(batch)
        return CallInputs(trees, own, weights, kept, key, step)


def _check_schedule(schedule: object, stages: Sequence[Stage]) -> None:
    """Refuse a schedule that does not fit the stages.

    Raises:
      TypeError: It is not a `Schedule`, but its name, for example.
      ValueError: It does not fit.
    """
    if not isinstance(schedule, Schedule):
        rule, n = "must be a Schedule", len(stages)
        remedy = f"Functions of jdist.pipeline make one: `one_f_one_b({n}, 4)` is 1F1B "
        remedy += "with 4 micro-batches; there are `gpipe`, `interleaved` and others."
        raise type_error("Pipeline(schedule)", rule, quoted(schedule), remedy)
    if schedule.stages != len(stages):
        rule = f"must be one for the {len(stages)} stages"
        raise value_error("Pipeline(schedule)", rule, f"one for {schedule.stages}")
    schedule.validate()
    if schedule.forward_only:
        rule = "must have a backward pass for each forward pass"
        raise value_error("Pipeline(schedule)", rule, schedule.name)
    # A gradient is a sum over replicas, each of which needs one term at least.
    for number, workers in enumerate(schedule.placement):
        if len(workers) > schedule.micro_batches:
            rule = f"must have a micro-batch for each worker of stage {number}"
            got = f"{schedule.micro_batches} for the workers {workers}"
            raise value_error("Pipeline(schedule)", rule, got)
