"""The program of one device in the SPMD form of a pipeline: a loop over clocks.

    at each clock    the action in the tables: F, loss, B, or W of one micro-batch
                     then messages to the workers that are `distance` further on

With `overlap` the messages of the previous clock are sent first and received last. No
action of this clock depends on them, so XLA may run the actions while they are in
flight.

All devices run the same program, and each selects its own actions. Where every worker
has a mesh of several devices, all workers execute the actions of all, in lockstep, and
keep their own results. An idle worker loses nothing by this; where workers do different
actions at one clock, as in 1F1B, the clock takes the time of all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdist import reduction
from jdist._compat import fast_in_loops
from jdist._tree import PyTree, is_none, map_some, split_inexact, unworded, wide_dtype
from jdist.optim.internal import square, sum_of
from jdist.pipeline.run.loss import LossPasses
from jdist.pipeline.run.stage_run import (
    contribution,
    fold,
    gradient_of,
)
from jdist.pipeline.schedule.actions import B, F, W
from jdist.pipeline.spmd.table import INPUTS, NOTHING, Clock, Row, Table
from jdist.pipeline.stages.array_spec import blank
from jdist.pipeline.stages.stage import outputs_by_name
from jdist.reduction import Partial
from jdist.segment import Residuals, Rest, Segment


class Feed(NamedTuple):
    """The inputs from the batch: arrays of the same shapes on every device, with their
    values on the devices that read them."""

    values: tuple[PyTree, ...]
    """Inputs of the first stage, in order, `(micro_batches, rows, ...)`."""
    entries: dict[str, PyTree]
    """The entries that the loss reads, likewise."""
    weights: jax.Array
    """Weights of the examples, `(micro_batches, rows)`; 0 where a row is padding."""
    totals: jax.Array
    """The sums of the micro-batches' weights, `(micro_batches,)`."""
    key: jax.Array | None = None
    """The words of the call's PRNG key, if the stages take keys."""


Share = Partial | None
"""Beside a cotangent, for max and min: what its micro-batch counts for."""


class StageMessage(NamedTuple):
    """A message from stage to stage."""

    value: PyTree
    """A stage's output, or the cotangent of one."""
    share: Share


class Ends(NamedTuple):
    """A pair for the functions before the first stage and after the last one; None for
    an absent one."""

    first: Any
    last: Any


class State(NamedTuple):
    """The carry of the loop over the clocks."""

    mail: StageMessage
    """Values that wait for their action, by slot; the last one is to be sent."""
    activations: list[jax.Array]
    """The residuals of forward passes, by slot."""
    rests: tuple[list[jax.Array], Share]
    """The rests of split backward passes, by slot."""
    partials: list[Partial]
    """The gradient so far of each of the device's stages."""
    ends: Ends
    """The gradient so far of what is before the first stage and after the last one."""
    loss: Partial
    """The partial of the losses computed here."""


class Model(NamedTuple):
    """Constants of the program, the same on all devices and at all clocks.

    Attributes:
      table: The schedule.
      segment: The segment of every stage.
      ends: The segments before and after them.
      chains: The first and the last stage with their ends, which derive keys.
      names: Names of the outputs.
      kind: The reduction by which gradients are joined; see `PipelineLoss`.
      axis: The mesh's axis of workers.
      keyed: Whether the stages themselves take keys.
      with_square: Whether to compute |g|^2 over all stages.
      rows: Sharding of values between stages over further axes of the mesh, by rows. If
        there are such axes, all workers do an action that one of them does. None: there
        are none.
      tied: Pairs of leaf numbers of both ends that are one parameter. It and the
        following ones are those of batches and parameters of some shapes.
      loss: The passes of the loss, given the outputs by name.
      key: Shape and dtype of the call's PRNG key; None if it takes none.
      unrounded: Whether gradients stay in the precision of their sums, for masters.
      whole_at_loss: Whether the inputs of the loss are constrained to be sharded by
        rows.
    """

    table: Table
    segment: Segment
    ends: Ends
    chains: Ends
    names: tuple[str, ...]
    kind: str
    axis: str
    keyed: bool
    with_square: bool
    rows: PartitionSpec | None
    tied: tuple[tuple[int, int], ...] = ()
    loss: LossPasses | None = None
    key: jax.ShapeDtypeStruct | None = None
    unrounded: bool = False
    whole_at_loss: bool = False

    def laid(self, value: PyTree) -> PyTree:
        """Constrain a value between stages to be sharded by rows alone."""
        if self.rows is None:
            return value
        return jax.tree.map(
            # A scalar has no rows.
            lambda x: jax.lax.with_sharding_constraint(x, self.rows) if x.ndim else x,
            value,
        )

    def place_of(self, stage: int) -> tuple[int, int]:
        """Worker and chunk of a stage."""
        worker, chunk = np.argwhere(self.table.stages == stage)[0]
        return int(worker), int(chunk)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return int(self.table.stages.size)


def run(
    model: Model, params: Sequence[PyTree], ends: Ends, feed: Feed
) -> tuple[jax.Array, list[PyTree], Ends, jax.Array | None]:
    """Run one device's part of the program; to be mapped over the mesh.

    Args:
      model: The constants of the program.
      params: Parameters of each of the device's stages.
      ends: Parameters before and after the stages; blanks on all other devices.
      feed: The inputs from the batch.

    Returns:
      The loss of the batch; the gradients of the device's stages; those of the ends,
      0 on all other devices; and the sum of |g|^2 over all stages, if `with_square`.
    """
    rank = jax.lax.axis_index(model.axis)
    device = _Device(model, params, ends, feed, rank)

    def clock(state: State, at: tuple[Row, Clock]) -> tuple[State, None]:
        row, all_of_them = at
        return device.turn(state, Row(*(x[rank] for x in row)), all_of_them), None

    # Scanned, not unrolled: the size of the program does not grow with the schedule.
    clocks = jax.tree.map(jnp.asarray, (model.table.row, model.table.clock))
    scan = fast_in_loops(partial(jax.lax.scan, clock))
    state, _ = scan(device.start(), clocks)
    grads = [
        gradient_of(part, model.kind, part.gradient if model.unrounded else own)
        for part, own in zip(state.partials, params, strict=True)
    ]
    # Only the last stage's device has computed losses; to add zeros to them is exact.
    last, _ = model.place_of(model.stages - 1)
    loss = jax.tree.map(
        lambda x: jax.lax.psum(jnp.where(rank == last, x, 0), model.axis), state.loss
    )
    at_ends = _finished_ends(model, state.ends, ends)
    squares = _square(model, grads, at_ends) if model.with_square else None
    return reduction.finish(loss, model.kind, None)[0], grads, at_ends, squares


def _finished_ends(model: Model, parts: Ends, params: Ends) -> Ends:
    """Gradients of the ends; of shared parameters, the sum of both."""
    rank, wide = jax.lax.axis_index(model.axis), []
    for part, stage in zip(parts, (0, model.stages - 1), strict=True):
        grads = None
        if part is not None:
            grads = gradient_of(part, model.kind, part.gradient)
        # On the other devices the sum of the weights is 0, and a maximum's would be
        # 0 / 0.
        here = rank == model.place_of(stage)[0]
        wide.append(jax.tree.map(lambda g, here=here: jnp.where(here, g, 0), grads))
    flat: Any = [jax.tree.flatten(tree, is_none) for tree in wide]
    (first, _), (last, _) = flat
    for one, other in model.tied:
        # Each is 0 on all devices but one: with two terms at most, the order in which
        # `psum` adds them does not change the result.
        total = jax.lax.psum(first[one] + last[other], model.axis)
        first[one] = last[other] = total
    found = Ends(*(structure.unflatten(leaves) for leaves, structure in flat))
    return found if model.unrounded else rounded(found, params)


def rounded(grads: PyTree, params: PyTree) -> PyTree:
    """Gradients in the dtypes of their parameters."""
    return map_some(lambda g, x: g.astype(x.dtype), grads, params)


def _square(model: Model, grads: Sequence[PyTree], ends: Ends) -> jax.Array:
    """The sum of |g|^2 over all stages, added in the order of the stages."""
    nothing = jnp.zeros((), jnp.float32)
    shared = {other for _, other in model.tied}
    first = jax.tree.leaves(ends.first)
    # Shared leaves are counted once: the copies are one parameter.
    numbered = enumerate(jax.tree.leaves(ends.last, is_leaf=is_none))
    last = [g for n, g in numbered if g is not None and n not in shared]
    # `psum` has put the gradients of shared leaves on all devices: one counts them.
    rank, here = jax.lax.axis_index(model.axis), model.place_of(0)[0]
    at_ends = [jnp.where(rank == here, square(g), 0) for g in first]
    at_ends += [square(g) for g in last]
    own = [sum_of([nothing, *map(square, jax.tree.leaves(g))]) for g in grads]
    own[0] = sum_of([own[0], *at_ends])
    # Gathered and added here, because the order in which `psum` adds is unspecified.
    squares = jax.lax.all_gather(own, model.axis)
    place = {stage: at for at, stage in np.ndenumerate(model.table.stages)}
    ordered = [place[stage] for stage in sorted(place)]
    return sum_of([squares[chunk][worker] for worker, chunk in ordered])


Wanted = jax.Array | Literal[True]
"""Whether a device wants the action that it does; True where it does no other."""

Act = Callable[[Wanted, Row, State], State]


@dataclass(eq=False)
class _Device:
    """The actions of one device, as functions from state to state."""

    model: Model
    params: Sequence[PyTree]
    ends: Ends
    feed: Feed
    rank: jax.Array
    # Static structures of residuals and rests, recorded when F and the split B are
    # traced and read when B and W are.
    plan: Any = None
    split: Any = None

    def start(self) -> State:
        """The initial state: empty slots and empty sums."""
        model, slots = self.model, self.model.table.slots
        # Shapes alone count, which are those of any micro-batch.
        value = jax.eval_shape(lambda: self._entered(0)[0])
        residuals, rest, d_params = jax.eval_shape(self._passes, value)
        found, *_ = jax.eval_shape(self._lost, value, 0)
        share = found if self._shares_travel else None
        counted = share or self._share_of(0)

        def nothing(d_own: PyTree) -> Partial:
            part = Partial(counted.value, d_own, counted.weight)
            return reduction.empty(part, model.kind)

        ends = [None if own is None else nothing(sums_of(own)) for own in self.ends]
        return State(
            _empty(StageMessage(value, share), slots.mail),
            _empty(residuals, slots.activations),
            _empty((rest, share), slots.rests),
            [nothing(d_own) for d_own in d_params],
            Ends(*ends),
            reduction.empty(found, model.kind),
        )

    @property
    def _shares_travel(self) -> bool:
        """Whether cotangents are sent with the share of their micro-batch."""
        # For max and min a stage must know which micro-batches hold the extreme.
        return self.model.kind in ("max", "min")

    def _passes(self, value: PyTree) -> PyTree:
        """Results of each kind of action, to be evaluated for their shapes."""
        segment, own = self.model.segment, self.params[0]
        key = self._key(0, 0) if self.model.keyed else None
        residuals = segment.forward(own, None, (value,), key)[1]
        rest: list[PyTree] = []
        if INPUTS in self.model.table.kinds:
            found = segment.backward_inputs(own, residuals, (value, None))[1]
            rest = found.computed
        d_params = [sums_of(own) for own in self.params]
        return list(residuals.arrays), rest, d_params

    def turn(self, state: State, at: Row, clock: Clock) -> State:
        """Execute one clock: at most one action, and the messages of all workers."""
        under_way = []
        if self.model.table.overlap:
            # Results of the previous clock, sent at every clock and not in `when`: in a
            # loop of zero or one iterations the start and the end of a collective have
            # no action between them to overlap with.
            left = jax.tree.map(lambda x: x[-1], state.mail)
            distances = range(len(self.model.table.distances))
            under_way = [self._passed(number, left) for number in distances]
        # Traced in this order: F records the structure that B and INPUTS read, and
        # INPUTS the one that W reads.
        acts = {
            F: self._forward,
            B: self._backward,
            INPUTS: self._backward_inputs,
            W: self._backward_params,
        }
        if self.model.ends.first is not None:
            # Before F: the first stage reads this output at the same clock.
            begun = self._is_at(0, at) & (at.kind == F)
            state = self._done(begun, clock.begins, self._enter, at, state)
        # Code for each chunk, because a selection from stacked parameters would copy
        # them.
        for chunk in range(len(self.params)):
            for kind in (kind for kind in acts if kind in self.model.table.kinds):
                act = partial(acts[kind], chunk)
                wanted = (at.kind == kind) & (at.chunk == chunk)
                state = self._done(wanted, clock.acts[kind, chunk], act, at, state)
        if self.model.ends.first is not None:
            # After B, which puts the cotangent of this output into its result slot.
            back = self._is_at(0, at) & ((at.kind == B) | (at.kind == INPUTS))
            state = self._done(back, clock.returns, self._leave, at, state)
        # After F: the cotangent replaces the output in the result slot.
        ended = self._is_at(self.model.stages - 1, at) & (at.kind == F)
        state = self._done(ended, clock.ends, self._lose, at, state)
        for number in range(len(self.model.table.distances)):
            if under_way:
                state = self._delivered(number, under_way[number], at, state)
                continue
            # A collective must be entered by all devices or none: `travels` is the same
            # on all of them, where `receive` is not.
            pass_on = partial(self._pass_on, number)
            state = when(clock.travels[number], pass_on, at, state)
        return state

    def _is_at(self, stage: int, at: Row) -> jax.Array:
        """Whether the action at this clock is one of this stage."""
        worker, chunk = self.model.place_of(stage)
        return (at.chunk == chunk) & (self.rank == worker)

    def _done(
        self, wanted: jax.Array, somewhere: jax.Array, act: Act, at: Row, state: State
    ) -> State:
        """The state after an action, if it is wanted on this device."""
        if self.model.rows is None:
            return when(wanted, partial(act, True), at, state)
        # Over further axes XLA puts collectives into the action and may let all devices
        # of the program join one. A loop that some devices skip would then block the
        # others for ever, so all of them enter it and select the result.
        return when(somewhere, partial(act, wanted), at, state)

    def _forward(self, chunk: int, wanted: Wanted, at: Row, state: State) -> State:
        # Slot -1 reads an arbitrary slot, whose value the select below discards.
        held = take(state.mail.value, at.mail)
        if self.model.ends.first is not None:
            # `_enter` has put its output into the slot for the output of this pass.
            from_batch = take(state.mail.value, at.result)
        else:
            (entry,) = self.feed.values
            from_batch = take(entry, at.micro_batch)
        value = jax.tree.map(
            lambda a, b: jnp.where(at.mail == NOTHING, a, b), from_batch, held
        )
        value = self.model.laid(value)
        key = self._key(chunk, at.micro_batch) if self.model.keyed else None
        given = self.params[chunk], None, (value,), key
        (output, _), residuals = self.model.segment.forward(*given)
        # Residuals hold neither parameters nor values made of parameters alone, which
        # would take a slot for each micro-batch.
        self.plan, kept = residuals.plan, list(residuals.arrays)
        activations = put(state.activations, at.activation, kept, wanted)
        state = state._replace(activations=activations)
        output = self.model.laid(output)
        mail = put(state.mail.value, at.result, output, wanted)
        return state._replace(mail=state.mail._replace(value=mail))

    def _key(self, chunk: int, micro_batch: jax.Array | int) -> jax.Array:
        """The key of a stage and a micro-batch, the same as with other executors."""
        chains, last = self.model.chains, self.model.stages - 1
        stage = jnp.asarray(self.model.table.stages)[self.rank, chunk]
        key = self._key_of(stage, micro_batch)
        # A stage with an end folds the number of the part into its key. Which stage a
        # chunk is depends on the device: the key is selected by value.
        for number, chain in ((0, chains.first), (last, chains.last)):
            if chain is not None:
                own = chain.key_of(chain.block, self._key_of(number, micro_batch))
                key = jnp.where(stage == number, own, key)
        return key

    def _key_of(
        self, stage: jax.Array | int, micro_batch: jax.Array | int
    ) -> jax.Array:
        assert self.model.key is not None
        assert self.feed.key is not None
        key: jax.Array = unworded(self.feed.key, blank(self.model.key))
        return fold(fold(key, jnp.asarray(stage)), micro_batch)

    # --- the ends ---

    def _enter(self, wanted: Wanted, at: Row, state: State) -> State:
        """Run the function before the first stage, and store its output for F."""
        value, _ = self._entered(at.micro_batch)
        mail = put(state.mail.value, at.result, value, wanted)
        return state._replace(mail=state.mail._replace(value=mail))

    def _leave(self, wanted: Wanted, at: Row, state: State) -> State:
        """Add the gradient of the function before the first stage."""
        fn, own = self.model.ends.first, self.ends.first
        # Recomputed: slots for these residuals would take memory on every device, and
        # the function is mostly a lookup in a table of embeddings.
        _, residuals = self._entered(at.micro_batch)
        sent = take(state.mail, at.result)
        d_own, _ = fn.backward(own, residuals, (sent.value, None))
        first = self._added(state.ends.first, d_own, sent.share, wanted, at)
        return state._replace(ends=state.ends._replace(first=first))

    def _entered(self, micro_batch: jax.Array | int) -> tuple[PyTree, PyTree]:
        """The first stage's input; and residuals of the function before that stage."""
        given, fn = take(self.feed.values, micro_batch), self.model.ends.first
        if fn is None:
            return given[0], None
        key = self._key_of_end(self.model.chains.first, 0, 0, micro_batch)
        (value, _), residuals = fn.forward(self.ends.first, None, given, key)
        return value, residuals

    def _key_of_end(
        self, chain: Any, part: int, stage: int, micro_batch: jax.Array | int
    ) -> PyTree:
        """The key of a part of a stage that is an end; None if it takes none."""
        if not chain.parts[part].keyed:
            return None
        return chain.key_of(part, self._key_of(stage, micro_batch))

    def _lose(self, wanted: Wanted, at: Row, state: State) -> State:
        """Compute the losses of a micro-batch; their cotangent replaces the output."""
        value = take(state.mail.value, at.result)
        found, d_value, d_own = self._lost(value, at.micro_batch)
        sent = found if self._shares_travel else None
        loss = reduction.combine(state.loss, found, self.model.kind)
        state = state._replace(
            mail=put(state.mail, at.result, StageMessage(d_value, sent), wanted),
            loss=kept_unless(wanted, loss, state.loss),
        )
        if d_own is None:
            return state
        last = self._added(state.ends.last, d_own, sent, wanted, at)
        return state._replace(ends=state.ends._replace(last=last))

    def _lost(
        self, value: PyTree, micro_batch: jax.Array | int
    ) -> tuple[Partial, PyTree, PyTree]:
        """The losses, the cotangent of the last stage's output, and the gradient of the
        function after it."""
        names, last, own = self.model.names, self.model.ends.last, self.ends.last
        passes = self.model.loss
        assert passes is not None
        entries, weights = take((self.feed.entries, self.feed.weights), micro_batch)

        def both(values: PyTree) -> PyTree:
            if not self.model.whole_at_loss:
                return passes.both(values, entries, weights)
            # Before and after the loss: XLA propagates shardings in both directions.
            values = self.model.laid(values)
            found, d_values, aux = passes.both(values, entries, weights)
            return found, self.model.laid(d_values), aux

        if last is None:
            found, d_values, _ = both({names[0]: value})
            return found, d_values[names[0]], None
        chain, stage = self.model.chains.last, self.model.stages - 1
        key = self._key_of_end(chain, len(chain.parts) - 1, stage, micro_batch)
        (made, _), residuals = last.forward(own, None, (value,), key)
        outputs = outputs_by_name("Pipeline(last=...)", names, made)
        found, d_values, _ = both(outputs)
        d_made = tuple([d_values[name] for name in names])
        d_made = d_made if len(names) > 1 else d_made[0]
        d_own, (_, (d_value,), _) = last.backward(own, residuals, (d_made, None))
        return found, _or_zeros(d_value, value), d_own

    def _backward(self, chunk: int, wanted: Wanted, at: Row, state: State) -> State:
        cotangent, given = self._called_back(chunk, at, state)
        d_own, d_inputs = self.model.segment.backward(*given)
        before, share = state.partials[chunk], cotangent.share
        part = self._added(before, d_own, share, wanted, at)
        state = _with_partial(state, chunk, part)
        return _answered(state, at, d_inputs, cotangent, wanted)

    def _backward_inputs(
        self, chunk: int, wanted: Wanted, at: Row, state: State
    ) -> State:
        cotangent, given = self._called_back(chunk, at, state)
        d_inputs, rest = self.model.segment.backward_inputs(*given)
        self.split = rest.split
        left = rest.computed, cotangent.share
        state = state._replace(rests=put(state.rests, at.rest, left, wanted))
        return _answered(state, at, d_inputs, cotangent, wanted)

    def _backward_params(
        self, chunk: int, wanted: Wanted, at: Row, state: State
    ) -> State:
        computed, share = take(state.rests, at.rest)
        own, kept = self.params[chunk], take(state.activations, at.activation)
        rest = Rest.of(self.split, jax.tree.leaves(own), kept, computed)
        d_own = self.model.segment.backward_params(rest)
        part = self._added(state.partials[chunk], d_own, share, wanted, at)
        return _with_partial(state, chunk, part)

    def _called_back(
        self, chunk: int, at: Row, state: State
    ) -> tuple[StageMessage, tuple[PyTree, Residuals, PyTree]]:
        """The message of a backward pass, and the arguments of its program."""
        kept, sent = take(state.activations, at.activation), take(state.mail, at.mail)
        sent = sent._replace(value=self.model.laid(sent.value))
        residuals = Residuals(self.plan, tuple(kept))
        return sent, (self.params[chunk], residuals, (sent.value, None))

    def _added(
        self, before: Partial, d_own: PyTree, share: Share, wanted: Wanted, at: Row
    ) -> Partial:
        """The gradient so far, with a micro-batch's term if it is wanted."""
        counted = share or self._share_of(at.micro_batch)
        own = contribution(self.model.kind, d_own, counted)
        # The sum so far first, so that terms are added in the order of the schedule.
        joined = reduction.combine(before, own, self.model.kind)
        return kept_unless(wanted, joined, before)

    def _share_of(self, micro_batch: jax.Array | int) -> Partial:
        total = take(self.feed.totals, micro_batch)
        return Partial(jnp.zeros_like(total), None, total)

    def _pass_on(self, number: int, at: Row, state: State) -> State:
        """Send and receive the messages of one distance."""
        arrived = self._passed(number, take(state.mail, at.result))
        return self._delivered(number, arrived, at, state)

    def _passed(self, number: int, message: StageMessage) -> StageMessage:
        """The message received when every device sends one over a distance."""
        table = self.model.table
        distance, workers = table.distances[number], len(table.stages)
        receivers = np.flatnonzero(table.row.receive[:, :, number].max(0) != NOTHING)
        # A device that is no receiver gets zeros, which nothing reads.
        pairs = [(int(w - distance) % workers, int(w)) for w in receivers]
        return jax.tree.map(
            lambda x: jax.lax.ppermute(x, self.model.axis, pairs), message
        )

    def _delivered(
        self, number: int, arrived: StageMessage, at: Row, state: State
    ) -> State:
        def deliver(wanted: Wanted, at: Row, state: State) -> State:
            mail = put(state.mail, at.receive[number], arrived, wanted)
            return state._replace(mail=mail)

        wanted = at.receive[number] != NOTHING
        if self.model.rows is not None:
            return deliver(wanted, at, state)
        return when(wanted, partial(deliver, True), at, state)


def when(
    wanted: jax.Array, act: Callable[[Row, State], State], at: Row, state: State
) -> State:
    """`act(at, state)` if it is wanted, else the state."""
    # `lax.cond` may copy operands that a branch passes through unchanged, such as sums
    # of gradients. A loop of zero or one iterations updates its carry in place.
    turns = wanted.astype(jnp.int32)

    def turn(number: jax.Array, state: State) -> State:
        # XLA hoists loop-invariant code, which would run unwanted actions. To add the
        # iteration number, which is 0, makes all indices depend on the loop.
        return act(Row(*(place + number for place in at)), state)

    return jax.lax.fori_loop(jnp.int32(0), turns, turn, state)


def put(slots: PyTree, slot: jax.Array, value: PyTree, wanted: Wanted = True) -> PyTree:
    """The slots with a value written to one of them, if it is wanted."""
    if wanted is not True:
        # The select is on one slot, so that the whole buffer is still updated in place.
        value = kept_unless(wanted, value, take(slots, slot))
    return jax.tree.map(
        lambda s, x: jax.lax.dynamic_update_index_in_dim(s, x, slot, 0), slots, value
    )


def kept_unless(wanted: Wanted, new: PyTree, old: PyTree) -> PyTree:
    """The new value if it is wanted, else the old one."""
    if wanted is True:
        return new
    return jax.tree.map(lambda a, b: jnp.where(wanted, a, b), new, old)


def take(slots: PyTree, slot: jax.Array | int) -> PyTree:
    """The value in a slot."""
    return jax.tree.map(
        lambda s: jax.lax.dynamic_index_in_dim(s, slot, 0, keepdims=False), slots
    )


def _empty(value: PyTree, count: int) -> PyTree:
    # Recomputation keeps PRNG keys among the residuals.
    return jax.tree.map(
        lambda x: blank(jax.ShapeDtypeStruct((count, *x.shape), x.dtype)), value
    )


def _with_partial(state: State, chunk: int, part: Partial) -> State:
    """The state with another gradient of one of the stages."""
    partials = [*state.partials[:chunk], part, *state.partials[chunk + 1 :]]
    return state._replace(partials=partials)


def _answered(
    state: State,
    at: Row,
    d_inputs: PyTree,
    cotangent: StageMessage,
    wanted: Wanted,
) -> State:
    """The state with the cotangent of the stage's input as its message."""
    _, (d_value,), _ = d_inputs
    value = _or_zeros(d_value, cotangent.value)
    mail = put(state.mail, at.result, cotangent._replace(value=value), wanted)
    return state._replace(mail=mail)


def _or_zeros(cotangent: PyTree, value: PyTree) -> PyTree:
    """The cotangent of a value, with zeros for leaves that have none."""
    return jax.tree.map(
        lambda d, x: jnp.zeros_like(x) if d is None else d,
        cotangent,
        value,
        is_leaf=is_none,
    )


def sums_of(params: PyTree) -> PyTree:
    """The shapes of a gradient, in the dtypes in which it is summed."""
    return jax.eval_shape(
        lambda own: jax.tree.map(_wide, split_inexact(own)[0]), params
    )


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(wide_dtype(leaf.dtype))
