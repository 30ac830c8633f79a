"""The whole pipeline as one SPMD program: equal stages on the devices of a mesh.

The parameters of a stage stay on the device of its worker; the program sees those of
all stages as arrays that are sharded over the mesh, and returns gradients likewise. One
process may have all the devices, or each of several processes (`jax.distributed`) some
of them; all processes then call the program with the same batch.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist._compat import map_shards, paced, picks_by_row, trace_whole
from jdist._errors import value_error
from jdist._fit import Metrics
from jdist._tree import PyTree, map_some, shapes_of, split_inexact, words
from jdist.pipeline.run.action_timer import ActionTimer
from jdist.pipeline.run.executor import (
    CALL,
    CallInputs,
    ScheduleExecutor,
    StagePrograms,
    check_not_traced,
    key_given,
)
from jdist.pipeline.run.loss import LossPasses
from jdist.pipeline.run.lowered import LoweredPrograms
from jdist.pipeline.run.micro_batch import entry_of
from jdist.pipeline.run.shapes import outputs_of
from jdist.pipeline.run.stage_channels import StageChannels
from jdist.pipeline.run.update import GradientStats, StageUpdates, StepResult
from jdist.pipeline.spmd.feed import Lots, Spread, lots
from jdist.pipeline.spmd.program import Ends, Feed, Model, rounded, run, sums_of
from jdist.pipeline.spmd.rules import (
    check_agreement,
    check_params,
    check_shares,
    check_stages,
    check_value,
    shared_leaves,
)
from jdist.pipeline.spmd.table import tabulate
from jdist.pipeline.stages.array_spec import specs_of
from jdist.pipeline.stages.chain import (
    Chain,
    Parts,
    parts_of,
    put_together,
    taken_apart,
)
from jdist.pipeline.stages.mesh_processes import processes_of, rows_of_processes
from jdist.pipeline.stages.place import common_parts, moved, resident, spec_of
from jdist.pipeline.stages.stage import outputs_by_name


@final
class OneProgramExecutor(ScheduleExecutor):
    """An executor that runs all stages of a pipeline as one program.

    Args:
      programs: The stages; the devices of their places are those of the mesh.
      mesh: The devices of all workers.
      axis: Its axis of workers; over the others each worker's computation is sharded.
      with_square: Whether to compute |g|^2 over all stages.
      overlap: Whether messages are in flight while the next actions run.

    Raises:
      ValueError: The stages, or the shares of the workers, are not equal; or the loss
        has auxiliary outputs.
    """

    runs_actions = False

    def __init__(
        self,
        programs: StagePrograms,
        mesh: Mesh,
        axis: str,
        with_square: bool,
        overlap: bool,
    ) -> None:
        wiring, places = programs.wiring, programs.places
        if programs.loss.has_aux:
            rule = "must be False where one program runs all stages"
            raise value_error("Pipeline(has_aux=...)", rule, True, _REMEDY)
        check_stages(wiring)
        check_shares(places.schedule)
        # Evaluation needs no program of its own: stage by stage on the same devices.
        super().__init__(programs, places.schedule, None)
        self._wiring, self._stages = wiring, wiring.stages
        # The first stage stands for all, which were checked to be equal.
        first, self._block, _ = parts_of(wiring.stages[0])
        *_, last = parts_of(wiring.stages[-1])
        self._first, self._last = first, last
        # Shapes of the first and the last stage's parameters in other processes.
        self._elsewhere: dict[int, PyTree] = {}
        self._mesh, self._loss = mesh, programs.loss
        self._spread = Spread(places, mesh, axis)
        chains = [stage.fn for stage in (wiring.stages[0], wiring.stages[-1])]
        several = len(mesh.axis_names) > 1
        self._model = Model(
            tabulate(places.schedule, overlap),
            self._block.compiled(frozenset(), "SPMD"),
            Ends(
                first and first.compiled(frozenset(first.inputs), "SPMD, first"),
                last and last.compiled(frozenset(), "SPMD, last"),
            ),
            Ends(*(fn if isinstance(fn, Chain) else None for fn in chains)),
            tuple(wiring.stages[-1].outputs),
            self._loss.gradient_kind,
            axis,
            self._block.keyed,
            with_square,
            PartitionSpec(*tuple(self._spread.rows)[1:]) if several else None,
        )
        self._by_signature: dict[Any, _Program] = {}

    def check_functions(self) -> None:
        """See `ScheduleExecutor`."""
        # The others are not traced, and may have changed apart.
        check_stages(self._wiring)
        for part in (self._model.segment, *self._model.ends):
            if part is not None:
                part.check()
        super().check_functions()

    def gradient(
        self,
        channels: StageChannels,
        given: CallInputs,
        update: StageUpdates | None = None,
        timer: ActionTimer | None = None,
    ) -> StepResult:
        """See `ScheduleExecutor`.

        Raises:
          ValueError: The optimizers scale the loss.
        """
        program, arguments = self._prepared(given, update)
        loss, grads, ends, square = program.run(*arguments)
        paced(self._mesh, loss, wait=channels.computed)
        found: list[PyTree] = [None] * len(self._stages)
        stats = GradientStats(_here(square), None)
        for rank in self._places.own:
            for chunk, stage in enumerate(self._model.table.stages[rank]):
                own = self._gradient_of(int(stage), rank, grads[chunk], ends, program)
                if update is None or not update.unrounded[stage]:
                    own = rounded(own, program.shapes[stage])
                found[stage] = own
                # Checked before any stage steps, since a step donates its arguments.
                # Only shapes and dtypes are looked at.
                if update is not None:
                    update.check(stage, own, stats)
        return StepResult(_here(loss), found, stats, [None] * len(found))

    def _gradient_of(
        self, stage: int, rank: int, grads: PyTree, ends: Ends, program: "_Program"
    ) -> PyTree:
        """A stage's gradient, from the arrays over all workers."""
        shapes = taken_apart(self._stages[stage], program.shapes[stage])
        whole = Parts(ends.first, grads, ends.last)
        each = [
            None
            if like is None  # Another stage has this end.
            else map_some(lambda x, s: self._spread.apart(x, rank, s), tree, like)
            for tree, like in zip(whole, shapes, strict=True)
        ]
        return put_together(self._stages[stage], Parts(*each))

    def learn(self, stage: int, params: PyTree) -> None:
        """Record the shapes of a stage's parameters that are in other processes."""
        # Needed for stages with an end alone: its parameters have blanks of the same
        # shapes on all other devices.
        if isinstance(self._stages[stage].fn, Chain):
            self._elsewhere[stage] = shapes_of(params)

    def evaluate(
        self, channels: StageChannels, given: CallInputs, outputs: bool
    ) -> Metrics:
        """See `ScheduleExecutor`.

        Raises:
          ValueError: Other processes have some of the devices.
        """
        devices, here = self._mesh.devices.size, len(self._mesh.local_devices)
        if here < devices:
            rule = "must be called where one process has all devices of the mesh"
            got = f"{here} of {devices} devices"
            remedy = "Evaluate by a pipeline over rpc's workers."
            raise value_error("Pipeline.evaluate", rule, got, remedy)
        return super().evaluate(channels, given, outputs)

    def lower(
        self, given: CallInputs, update: StageUpdates | None = None
    ) -> dict[str, jax.stages.Lowered]:
        """See `ScheduleExecutor`. No device has to be attached."""
        program, arguments = self._prepared(given, update, abstract=True)
        # Without the places of results, which are known: to find them would compile it.
        found = LoweredPrograms(places=False)
        called = found.named("all stages")
        *_, square = called(program.run, *arguments)
        if update is not None:
            stats = GradientStats(jax.tree.map(_shape, square), None)
            for j, tree in enumerate(given.params):
                wide = update.unrounded[j]
                own = sums_of(tree) if wide else split_inexact(tree)[0]
                there = self._places.devices[self._places.worker(j, 0)]
                each = update.through(found.named(f"stage {j}"))
                each.apply(j, *moved((own, stats), there))
        return found.lowered()

    def _prepared(
        self,
        given: CallInputs,
        update: StageUpdates | None = None,
        *,
        abstract: bool = False,
    ) -> tuple["_Program", tuple[list[PyTree], Ends, Feed]]:
        """The program of a call, and its arguments.

        Args:
          given: The arguments of the call.
          update: The updates that follow, if any.
          abstract: Whether all of them are shapes, of all stages.

        Raises:
          ValueError: The optimizers scale the loss.
        """
        if update is not None and update.loss_scale is not None:
            rule = "must not scale the loss where one program runs all stages"
            call, got = "Pipeline(optimizer=...)", f"{update.loss_scale}"
            raise value_error(call, rule, got, _REMEDY)
        # All gradients come from one program: if one stage has masters, they all stay
        # in the dtype of their sums, and are rounded later for the stages without.
        unrounded = update is not None and any(update.unrounded)
        batch, key = given.batch, self._key(given.key)
        call = "Pipeline(.., OneProgram)"
        check_not_traced(call, given.params, batch, given.weights, key)
        count = self._places.schedule.micro_batches
        parts = common_parts(self._places.devices)
        cut = lots(batch, given.weights, count, self._loss.kind, parts)
        # At every step, not only for new shapes: they may be new to one process alone,
        # which would then wait for the others.
        if abstract:
            spread = Spread(self._places, self._mesh, self._model.axis, abstract=True)
            own = dict(enumerate(given.params))
        else:
            spread, own = self._spread, self._resident(given.params)
            self._agree(own, batch, cut, key)
        signature = _signature(own, batch, key), str(cut.weights.dtype), unrounded
        if signature not in self._by_signature:
            self._by_signature[signature] = self._made(own, batch, cut, key, unrounded)
        program = self._by_signature[signature]
        blocks, tails = self._by_part(own)
        whole = [
            jax.tree.map(
                lambda *parts: spread.together(parts), *[blocks[int(j)] for j in chunk]
            )
            for chunk in self._model.table.stages[self._places.own].T
        ]
        at_ends = [
            jax.tree.map(lambda x, j=j: self._at_end(x, j, spread), tree)
            for tree, j in zip(tails, (0, len(self._stages) - 1), strict=True)
        ]
        feed = self._feed(batch, cut, key, program, spread)
        return program, (whole, Ends(*at_ends), feed)

    def _resident(self, params: Sequence[PyTree]) -> dict[int, PyTree]:
        """The parameters that this process knows, by stage."""
        known = dict(self._elsewhere)
        for j, rank in self._places.stages.items():
            place = self._places.devices[rank]
            known[j] = resident(params[j], place, f"{CALL}(params)", j)
        return known

    def _at_end(self, leaf: PyTree, stage: int, spread: Spread) -> jax.Array:
        """A parameter of an end at its stage's worker, and blanks at the others."""
        kind = jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf))
        owner = self._places.worker(stage, 0)
        found: jax.Array = spread.only(owner, kind, lambda: leaf, spec_of(leaf))
        return found

    def _key(self, given: PyTree) -> PyTree:
        """The key of a call; None where no stage takes one."""
        keyed = [j for j, stage in enumerate(self._stages) if stage.keyed]
        return key_given(given, keyed[0]) if keyed else None

    def _by_part(self, own: Mapping[int, PyTree]) -> tuple[dict[int, PyTree], Ends]:
        """The parameters of the equal stages, and those of the ends.

        Raises:
          ValueError: This process does not know the parameters of an end.
        """
        each = {j: taken_apart(self._stages[j], tree) for j, tree in own.items()}
        found = []
        for stage, name in ((0, "first"), (len(self._stages) - 1, "last")):
            if getattr(self._model.ends, name) is not None and stage not in each:
                rule = f"must have had the parameters of stage {stage} once, in each "
                rule += f"process, where a stage has an end (`{name}=` of `with_ends`)"
                remedy = "Give `Pipeline.init` or `Pipeline.place` those of all stages."
                raise value_error("Pipeline.place(params)", rule, "None", remedy)
            found.append(getattr(each[stage], name) if stage in each else None)
        return {j: parts.block for j, parts in each.items()}, Ends(*found)

    def _feed(
        self, batch: PyTree, cut: Lots, key: PyTree, program: "_Program", spread: Spread
    ) -> Feed:
        end, same = len(self._stages), PartitionSpec()
        drawn = jax.eval_shape(words, key) if spread.abstract else words(key)

        def entry(name: str, taker: int) -> PyTree:
            worker = self._places.worker(taker, 0)
            if worker in self._places.own:
                self._places.check(name, batch[name], worker, taker)
            return jax.tree.map(
                lambda x: spread.only(
                    worker,
                    _shape(x, cut.order.shape),
                    lambda: cut.of(x),
                    spread.rows,
                ),
                batch[name],
            )

        return Feed(
            tuple([entry(name, 0) for name in self._stages[0].inputs]),
            {name: entry(name, end) for name in program.read},
            spread.everywhere(cut.weights, spread.rows),
            spread.everywhere(cut.totals, same),
            None if key is None else spread.everywhere(drawn, same),
        )

    # --- once for all batches of equal shapes ---

    def _made(
        self,
        own: Mapping[int, PyTree],
        batch: PyTree,
        cut: Lots,
        key: PyTree,
        unrounded: bool,
    ) -> "_Program":
        shapes = {j: jax.tree.map(_shape, tree) for j, tree in own.items()}
        blocks, ends = self._by_part(shapes)
        check_params(blocks)
        number = min(blocks)
        lot = jax.tree.map(lambda x: _shape(x, cut.order.shape[1:]), batch)
        value, outputs = self._values(ends, lot)
        check_value(number, self._block, blocks[number], value)
        read = self._loss.entries_read(outputs, lot)
        passes = self._loss.passes(lot, read)
        rows = jax.ShapeDtypeStruct(cut.weights.shape[1:], cut.weights.dtype)
        given = outputs, {name: lot[name] for name in read}, rows
        model = self._model._replace(
            tied=shared_leaves(self._first, self._last, (ends.first, ends.last)),
            loss=passes,
            key=specs_of(key),
            unrounded=unrounded,
            whole_at_loss=self._is_whole_at(passes, given),
        )

        def on_device(params: Sequence[PyTree], tails: Ends, feed: Feed) -> PyTree:
            given = [_like(tree, blocks[number]) for tree in params]
            found = run(model, given, _like(tails, ends), feed)
            loss, grads, at_ends, square = found
            # `shard_map` concatenates devices along an axis, which a scalar lacks.
            grads, at_ends = jax.tree.map(jnp.atleast_1d, (grads, at_ends))
            return loss, grads, at_ends, square

        each, same = PartitionSpec(self._model.axis), PartitionSpec()
        mapped = map_shards(
            on_device,
            self._mesh,
            (each, each, each),
            (same, each, each, same),
            self._model.axis,
        )
        # Without these the compiler would choose how gradients are sharded over further
        # axes.
        floating = split_inexact((blocks[number], ends))[0]
        laid, tails = jax.tree.map(
            lambda x: self._spread.sharding(spec_of(x)), floating
        )
        whole = NamedSharding(self._mesh, same)
        placed = whole, [laid] * self._model.table.stages.shape[1], tails, whole
        return _Program(read, shapes, jax.jit(mapped, out_shardings=placed))

    def _is_whole_at(
        self, passes: LossPasses, given: tuple[PyTree, PyTree, PyTree]
    ) -> bool:
        """Whether the inputs of the loss must be sharded by rows alone."""
        further = [
            n for name, n in self._mesh.shape.items() if name != self._model.axis
        ]
        if sum(n > 1 for n in further) < 2:
            return False
        # XLA aborts the process (a failed check in `spmd_partitioner_util.cc`, 0.10.2)
        # at a gather by rows if the rows are sharded over one axis and the operand over
        # another.
        program, _ = trace_whole(passes.both, *given)
        return picks_by_row(program.jaxpr)

    def _values(self, ends: Ends, lot: PyTree) -> tuple[PyTree, PyTree]:
        """Shapes of the values between equal stages, and of the inputs of the loss."""
        first, last = self._first, self._last
        count, names = len(self._stages), self._stages[0].inputs
        given = {name: entry_of(lot, name, "stage 0") for name in names}
        value = given[names[0]]
        if first is not None:
            value = outputs_of(0, first, (ends.first, None), given)
        if last is None:
            return value, {self._stages[-1].outputs[0]: value}
        made = {last.inputs[0]: value}
        made = outputs_of(count - 1, last, (ends.last, None), made)
        call = "Pipeline(last=...)"
        return value, outputs_by_name(call, last.outputs, made)

    def _agree(
        self, own: Mapping[int, PyTree], batch: PyTree, cut: Lots, key: PyTree
    ) -> None:
        """Compare this step's inputs between the processes of the mesh.

        Raises:
          ValueError: They differ, which would abort the processes or make them hang.
        """
        # A single process has nothing to compare.
        if len({*processes_of(self._mesh)}) == 1:
            return
        refused, text = None, ""
        try:
            # One stage stands for all of this process, whose equality is checked next.
            blocks, ends = self._by_part(own)
            first = blocks[min(blocks)], ends
            kinds = specs_of(jax.tree.map(_shape, (first, batch)))
            # By value: each process feeds its own copy of the key to its devices.
            drawn = None if key is None else np.asarray(words(key)).tolist()
            text = f"{self._places.schedule} {self._loss.kind} {kinds} "
            text += f"{cut.order.shape} {specs_of(key)} {drawn} "
            text += f"{jax.tree.map(spec_of, first)}"
        except ValueError as error:
            # Raised after the collective, in which the others wait for this process.
            refused = error
        # A digest, because the collective takes rows of one size from all processes.
        digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
        rows = rows_of_processes(self._mesh, digest)
        if refused is not None:
            raise refused
        check_agreement({process: bytes(row).hex() for process, row in rows.items()})


_REMEDY = "Give a list of devices, or Workers, in place of OneProgram."


class _Program(NamedTuple):
    """The program for batches and parameters of some shapes.

    Attributes:
      read: The entries of the batch that the loss reads.
      shapes: Shapes of the parameters of stages, by number.
      run: `(params, ends, feed) -> (loss, grads, ends, square)`, jitted; all over the
        mesh.
    """

    read: tuple[str, ...]
    shapes: Mapping[int, PyTree]
    run: jax.stages.Wrapped


def _signature(own: Mapping[int, PyTree], batch: PyTree, key: PyTree) -> Hashable:
    """What a program depends on: shapes, dtypes, and shardings of parameters."""
    leaves, structure = jax.tree.flatten((own, batch, key))
    kinds = tuple([(np.shape(x), str(jnp.result_type(x))) for x in leaves])
    specs = tuple([spec_of(x) for x in jax.tree.leaves(own)])
    return kinds, specs, structure


def _shape(x: Any, rows: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    shape = np.shape(x) if rows is None else (*rows, *np.shape(x)[1:])
    sharding = getattr(x, "sharding", None) if rows is None else None
    return jax.ShapeDtypeStruct(shape, jnp.result_type(x), sharding=sharding)


def _like(tree: PyTree, shapes: PyTree) -> PyTree:
    """A tree with scalars in place of arrays of length 1 that stand for them."""
    return map_some(lambda x, s: x if s.shape else x.reshape(()), tree, shapes)


def _here(tree: PyTree) -> PyTree:
    """Replicated arrays, on one device of this process."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)
