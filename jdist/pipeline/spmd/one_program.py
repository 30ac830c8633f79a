"""The whole pipeline as one SPMD program: equal stages on the devices of a mesh.

The parameters of a stage stay where they are, on the device of its worker: seen
together they are arrays that are divided over the mesh, and so are the gradients. One
process may have all the devices, or each of several processes (`jax.distributed`) some
of them, and all call the program with the same batch.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist._compat import map_shards
from jdist._errors import requirement
from jdist._fit import Metrics
from jdist._tree import PyTree, is_none, split_inexact, words
from jdist.pipeline.run.action_timer import ActionTimer
from jdist.pipeline.run.executor import (
    CALL,
    CallInputs,
    Executor,
    ScheduleExecutor,
    StagePrograms,
    check_not_traced,
    key_given,
)
from jdist.pipeline.run.lowered import LoweredPrograms
from jdist.pipeline.run.micro_batch import entry_of
from jdist.pipeline.run.stage_channels import StageChannels, Transfer
from jdist.pipeline.run.update import GradientStats, StageUpdates, StepResult
from jdist.pipeline.spmd.feed import Lots, Spread, lots
from jdist.pipeline.spmd.program import Feed, Model, run
from jdist.pipeline.spmd.rules import (
    check_agreement,
    check_params,
    check_shares,
    check_stages,
    check_value,
)
from jdist.pipeline.spmd.table import tabulate
from jdist.pipeline.stages.array_spec import ArraySpec, specs_of
from jdist.pipeline.stages.place import common_parts, moved, resident, spec_of


@final
class OneProgramExecutor(Executor):
    """Runs all stages of a pipeline as one program.

    Args:
      programs: The stages; the devices of their places are those of the mesh.
      mesh: The devices of all workers.
      axis: Its axis of workers; the others divide what each worker computes.
      with_square: Whether |g|^2 over all stages is wanted.
      overlap: Whether messages are under way while the next actions run.

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
            call = "Pipeline(has_aux=...)"
            raise ValueError(requirement(call, rule, True, _REMEDY))
        check_stages(wiring)
        check_shares(places.schedule)
        self._places = places
        self._stages = wiring.stages
        # One stands for all: that they are equal was checked.
        self._compiled = wiring.stages[0].compiled(frozenset(), "SPMD")
        self._mesh, self._axis = mesh, axis
        self._loss = programs.loss
        self._with_square = with_square
        self._table = tabulate(places.schedule, overlap)
        self._spread = Spread(places, mesh, axis)
        self._programs: dict[Any, _Program] = {}
        self._checked: set[Any] = set()
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._everywhere = jax.jit(lambda rows: rows, out_shardings=everywhere)
        # Forward passes alone are run one by one, on the same devices.
        self._in_evaluation = ScheduleExecutor(programs, places.schedule, None)

    def gradient(
        self,
        channels: StageChannels,
        given: CallInputs,
        update: StageUpdates | None = None,
        timer: ActionTimer | None = None,
    ) -> StepResult:
        """See `Executor`.

        Raises:
          ValueError: The optimizers scale the loss.
        """
        _check_unscaled(update)
        masters = [False] * len(self._stages) if update is None else update.unrounded
        # One program makes all gradients: one master is enough to keep them wide.
        program, arguments = self._prepared(given, any(masters))
        loss, grads, square = program.run(*arguments)
        found: list[PyTree] = [None] * len(self._stages)
        stats = GradientStats(_here(square), None)
        for rank in self._places.own:
            for chunk, stage in enumerate(self._table.stages[rank]):
                own = self._apart(grads[chunk], rank, program.shapes)
                own = own if masters[stage] else _rounded(own, program.shapes)
                found[stage] = own
                # Before any stage steps; only its shapes and dtypes matter.
                if update is not None:
                    update.check(stage, own, stats, self._checked)
        return StepResult(_here(loss), found, stats, [None] * len(found))

    def evaluate(
        self, channels: StageChannels, given: CallInputs, outputs: bool
    ) -> tuple[Metrics, list[Transfer]]:
        """See `Executor`.

        Raises:
          ValueError: Other processes have some of the devices.
        """
        devices, here = self._mesh.devices.size, len(self._mesh.local_devices)
        if here < devices:
            rule = "must be called where one process has all devices of the mesh"
            got = f"{here} of {devices} devices"
            remedy = "Evaluate by a pipeline over rpc's workers."
            raise ValueError(requirement("Pipeline.evaluate", rule, got, remedy))
        return self._in_evaluation.evaluate(channels, given, outputs)

    def lower(
        self, given: CallInputs, update: StageUpdates | None = None
    ) -> dict[str, jax.stages.Lowered]:
        """See `Executor`. The devices may be anywhere."""
        _check_unscaled(update)
        batch, unrounded = given.batch, [False] * len(self._stages)
        if update is not None:
            unrounded = list(update.unrounded)
        count = self._places.schedule.micro_batches
        cut = lots(batch, given.weights, count, self._loss.kind, self._parts)
        own = dict(enumerate(given.params))
        key = self._key(given.key)
        program = self._program(own, batch, cut, key, any(unrounded))
        # Stages are alike, which was checked: one stands for all of a chunk.
        whole = [jax.tree.map(self._spread.shape, own[0])] * self._table.stages.shape[1]
        weights = self._spread.shape(cut.weights, self._spread.rows)
        totals = self._spread.shape(cut.totals)
        feed: PyTree = (
            self._entry_shape(batch[self._stages[0].inputs[0]], cut),
            {name: self._entry_shape(batch[name], cut) for name in program.read},
            weights,
            totals,
            None if key is None else self._spread.shape(jax.eval_shape(words, key)),
        )
        # To find the places of its results it would be compiled: they are known.
        found = LoweredPrograms(places=False)
        _, grads, square = found.named("all stages")(program.run, whole, Feed(*feed))
        if update is not None:
            for j, tree in own.items():
                like, _ = split_inexact(tree)
                kinds = grads[0] if unrounded[j] else like
                stats = GradientStats(jax.tree.map(_shape, square), None)
                given_back = jax.tree.map(_with_dtype_of, like, kinds), stats
                there = self._places.devices[self._places.worker(j, 0)]
                each = update.through(found.named(f"stage {j}"))
                each.apply(j, *moved(given_back, there))
        return found.lowered()

    def _entry_shape(self, entry: PyTree, cut: Lots) -> PyTree:
        spread = self._spread
        return jax.tree.map(
            lambda x: spread.shape(_kind(x, cut).struct, spread.rows), entry
        )

    def _prepared(
        self, given: CallInputs, unrounded: bool
    ) -> tuple["_Program", tuple[list[PyTree], Feed]]:
        params, batch, key = given.params, given.batch, self._key(given.key)
        check_not_traced("Pipeline(.., mesh)", params, batch, given.weights, key)
        count = self._places.schedule.micro_batches
        cut = lots(batch, given.weights, count, self._loss.kind, self._parts)
        own = {
            j: resident(params[j], self._places.devices[rank], f"{CALL}(params)", j)
            for j, rank in self._places.stages.items()
        }
        # At each step: one process may know the shapes while another one does not.
        self._agree(own, batch, cut, key)
        program = self._program(own, batch, cut, key, unrounded)
        whole = [
            jax.tree.map(lambda *parts: self._spread.together(parts), *trees)
            for trees in self._by_chunk(own)
        ]
        return program, (whole, self._feed(batch, cut, key, program.read))

    def _key(self, given: PyTree) -> PyTree:
        """The key of a call; None where no stage takes one."""
        return key_given(given, 0) if self._stages[0].keyed else None

    def _by_chunk(self, own: Mapping[int, PyTree]) -> list[list[PyTree]]:
        """For each chunk the parameters of this process's workers."""
        stages = self._table.stages[self._places.own].T
        return [[own[int(j)] for j in chunk] for chunk in stages]

    def _feed(self, batch: PyTree, cut: Lots, key: PyTree, read: Sequence[str]) -> Feed:
        spread, end = self._spread, len(self._stages)

        def entry(name: str, taker: int) -> PyTree:
            worker = self._places.worker(taker, 0)
            if worker in self._places.own:
                self._places.check(name, batch[name], worker, taker)
            return jax.tree.map(
                lambda x: spread.only(worker, _kind(x, cut), lambda: cut.of(x)),
                batch[name],
            )

        return Feed(
            entry(self._stages[0].inputs[0], 0),
            {name: entry(name, end) for name in read},
            self._everyone(cut.weights, spread.rows),
            self._everyone(cut.totals),
            None if key is None else self._everyone(words(key)),
        )

    def _everyone(self, value: PyTree, spec: PartitionSpec | None = None) -> jax.Array:
        """The same value for all workers."""
        spec = PartitionSpec() if spec is None else spec
        return self._spread.together([value] * len(self._places.own), spec)

    def _apart(self, tree: PyTree, rank: int, shapes: PyTree) -> PyTree:
        """A worker's part of arrays over all workers."""
        return jax.tree.map(
            lambda x, like: None if x is None else self._spread.apart(x, rank, like),
            tree,
            shapes,
            is_leaf=is_none,
        )

    # --- once for all batches of equal shapes ---

    def _program(
        self,
        own: Mapping[int, PyTree],
        batch: PyTree,
        cut: Lots,
        key: PyTree,
        unrounded: bool,
    ) -> "_Program":
        leaves, structure = jax.tree.flatten((own, batch, key))
        kinds = tuple([(np.shape(x), str(jnp.result_type(x))) for x in leaves])
        specs = tuple([spec_of(x) for x in jax.tree.leaves(own)])
        signature = kinds, specs, structure, str(cut.weights.dtype), unrounded
        if signature not in self._programs:
            self._programs[signature] = self._made(own, batch, cut, key, unrounded)
        return self._programs[signature]

    def _made(
        self,
        own: Mapping[int, PyTree],
        batch: PyTree,
        cut: Lots,
        key: PyTree,
        unrounded: bool,
    ) -> "_Program":
        shapes = {j: jax.tree.map(_shape, tree) for j, tree in own.items()}
        check_params(shapes)
        stage, number = self._stages[0], min(own)
        lot = jax.tree.map(lambda x: _shape(x, cut.order.shape[1:]), batch)
        value = entry_of(lot, stage.inputs[0], "stage 0")
        check_value(number, stage, shapes[number], value)
        name = self._stages[-1].outputs[0]
        read = self._loss.entries_read({name: value}, lot)
        model = Model(
            self._table,
            self._compiled,
            self._loss.passes(lot, read),
            name,
            self._loss.kind,
            self._axis,
            specs_of(key),
            self._with_square,
            unrounded,
            in_step=len(self._mesh.axis_names) > 1,
        )

        def on_device(params: Sequence[PyTree], feed: Feed) -> PyTree:
            given = [_like(tree, shapes[number]) for tree in params]
            loss, grads, square = run(model, given, feed)
            # `shard_map` joins devices along an axis, which a scalar has not.
            return loss, jax.tree.map(jnp.atleast_1d, grads), square

        each, same = PartitionSpec(self._axis), PartitionSpec()
        mapped = map_shards(
            on_device, self._mesh, (each, each), (same, each, same), self._axis
        )
        # What a gradient is divided like over further axes, the compiler would choose.
        floating = split_inexact(shapes[number])[0]
        laid = jax.tree.map(lambda x: self._spread.sharding(spec_of(x)), floating)
        whole = NamedSharding(self._mesh, same)
        placed = whole, [laid] * self._table.stages.shape[1], whole
        run_it = jax.jit(mapped, out_shardings=placed)
        return _Program(read, shapes[number], run_it)

    def _agree(
        self, own: Mapping[int, PyTree], batch: PyTree, cut: Lots, key: PyTree
    ) -> None:
        """Before each step: what differs between processes would abort or hang them."""
        devices = list(self._mesh.devices.flat)
        processes = [device.process_index for device in devices]
        # One process calls one program: nothing can differ.
        if len({*processes}) == 1:
            return
        # Stages are alike, which is checked next: one stands for all of a process.
        first = own[min(own)]
        kinds = specs_of(jax.tree.map(_shape, (first, batch)))
        drawn = None if key is None else np.asarray(words(key)).tolist()
        text = f"{self._places.schedule} {self._loss.kind} {kinds} {cut.order.shape}"
        text += f" {specs_of(key)} {drawn} {jax.tree.map(spec_of, first)}"
        digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
        layout = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        rows = jax.make_array_from_callback(
            (len(devices), digest.size), layout, lambda _: digest[None]
        )
        found = np.asarray(self._everywhere(rows).addressable_data(0))
        check_agreement(
            {p: bytes(row).hex() for p, row in zip(processes, found, strict=True)}
        )

    @property
    def _parts(self) -> int:
        return common_parts(self._places.devices)


_REMEDY = "Give a list of devices, or names of workers, in place of the mesh."


class _Program(NamedTuple):
    """The program for batches and parameters of some shapes.

    Attributes:
      read: The entries of the batch that the loss reads.
      shapes: Of a stage's parameters.
      run: `(params, feed) -> (loss, grads, square)`, jitted; all over the mesh.
    """

    read: tuple[str, ...]
    shapes: PyTree
    run: jax.stages.Wrapped


def _check_unscaled(update: StageUpdates | None) -> None:
    """Refuses a scaled loss.

    Raises:
      ValueError: The optimizers scale it.
    """
    if update is not None and update.loss_scale is not None:
        rule = "must not scale the loss where one program runs all stages"
        call, got = "Pipeline(optimizer=...)", f"{update.loss_scale}"
        raise ValueError(requirement(call, rule, got, _REMEDY))


def _with_dtype_of(x: jax.ShapeDtypeStruct, kind: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, kind.dtype)


def _shape(x: Any, rows: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    shape = np.shape(x) if rows is None else (*rows, *np.shape(x)[1:])
    sharding = getattr(x, "sharding", None) if rows is None else None
    return jax.ShapeDtypeStruct(shape, jnp.result_type(x), sharding=sharding)


def _kind(x: jax.Array | np.ndarray, cut: Lots) -> ArraySpec:
    return ArraySpec((*cut.order.shape, *x.shape[1:]), str(jnp.result_type(x)))


def _like(tree: PyTree, shapes: PyTree) -> PyTree:
    """Scalars again what crosses the program's border with an axis of one."""
    return jax.tree.map(
        lambda x, shape: x if x is None or shape.shape else x.reshape(()),
        tree,
        shapes,
        is_leaf=is_none,
    )


def _rounded(tree: PyTree, shapes: PyTree) -> PyTree:
    """A gradient in the dtypes of its parameters."""
    return jax.tree.map(
        lambda x, shape: None if x is None else x.astype(shape.dtype),
        tree,
        shapes,
        is_leaf=is_none,
    )


def _here(tree: PyTree) -> PyTree:
    """Arrays that are the same everywhere, on a device of this process."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)
