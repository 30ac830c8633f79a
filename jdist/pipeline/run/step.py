"""The steps of a pipeline: the actions of the workers of this process, in order.

With several workers a single thread walks through their lists and starts whatever has
its inputs: JAX returns from a computation before it is done, so that all devices are
busy. With one worker the same loop waits for what the other processes send.
"""

import contextlib
import functools
import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np

from jdist import reduction
from jdist._tree import PyTree, add_trees
from jdist.pipeline.run.action_timer import ActionTimer
from jdist.pipeline.run.loss import PipelineLoss, merged, stacked
from jdist.pipeline.run.micro_batch import MicroBatchSource, entry_of
from jdist.pipeline.run.replicas import (
    joined_gradient,
    joined_states,
    share_gradient,
)
from jdist.pipeline.run.stage_channels import (
    MessageTag,
    Places,
    StageChannels,
    Transfer,
    ValueChannels,
)
from jdist.pipeline.run.stage_run import MicroBatchShare, StageRun, join
from jdist.pipeline.schedule.actions import Action
from jdist.pipeline.stages.place import beside, moved, place_of, undivided
from jdist.pipeline.stages.wiring import BATCH, StageWiring
from jdist.reduction import Partial
from jdist.segment.internal import Invoke


class StepInputs(NamedTuple):
    """The stages, micro-batches and channels of one step.

    Attributes:
      wiring: Which value goes where.
      places: The worker of each stage and micro-batch, and its device.
      runs: By worker and stage, of the workers of this process.
      channels: Bring values to other stages.
      loss: The loss function; it runs where the last stage runs.
      read: The entries of the batch that the loss reads.
      parts: The micro-batches.
      signature: What equal inputs have in common, if this process sees all of them.
    """

    wiring: StageWiring
    places: Places
    runs: Mapping[tuple[int, int], StageRun]
    channels: ValueChannels
    loss: PipelineLoss
    read: tuple[str, ...]
    parts: MicroBatchSource
    signature: Hashable = None


class Step(ABC):
    """Walks through the actions of this process's workers, and passes values on.

    Args:
      given: What it works on.
      invoke: Calls compiled functions; see `Segment.through`.

    Attributes:
      transfers: What was sent from here, in order.
    """

    def __init__(self, given: StepInputs, invoke: Invoke = operator.call) -> None:
        self.transfers: list[Transfer] = []
        self._wiring, self._places, self._runs = given[:3]
        self._channels, self._loss, self._read, self._parts = given[3:7]
        self._invoke = invoke
        self._forward_only = self._places.schedule.forward_only
        self._from_batch = [
            [name for name, where in source.items() if where == BATCH]
            for source in self._wiring.source
        ]
        self._sources_of_loss = {
            name: source
            for name, source in self._wiring.source[self._places.loss].items()
            if source != BATCH
        }

    def run(self, action_timer: ActionTimer | None = None) -> None:
        """Does all actions of this process's workers, each worker's in its order.

        Args:
          action_timer: Times each of them.

        Raises:
          ValueError: The workers wait for each other.
        """
        if action_timer is not None:
            action_timer.clear()
        lists = {worker: self._actions(worker) for worker in self._places.own}
        while True:
            moved_on, left = False, False
            for worker, actions in lists.items():
                while (action := actions.next()) is not None:
                    if self._missing(worker, action):
                        left = True
                        break
                    # Before it is done: an error in it must not repeat it.
                    actions.advance()
                    with _naming(worker, action):
                        if action_timer is None:
                            self._do(worker, action)
                        else:
                            do = functools.partial(self._do, worker, action)
                            action_timer.time(worker, action, do, self._runs)
                    moved_on = True
            if not left:
                return
            # Values of other processes are waited for only if nothing can start.
            if not moved_on:
                waiting = self._waiting(lists)
                if waiting:  # Else it came since it was looked for.
                    self._channels.wait(waiting)

    @abstractmethod
    def _actions(self, worker: int) -> "Actions":
        """The actions of a worker of this process, in order."""

    def _waiting(self, lists: Mapping[int, "Actions"]) -> dict[MessageTag, str]:
        """The values that the next actions wait for; empty if one of them can start."""
        waiting: dict[MessageTag, str] = {}
        for worker, actions in lists.items():
            action = actions.next()
            if action is None:
                continue
            missing = self._missing(worker, action)
            if not missing:
                return {}
            waiting |= dict.fromkeys(missing, str(action))
        return waiting

    def _missing(self, worker: int, action: Action) -> list[MessageTag]:
        # Its own B came before it in the same list.
        if action.kind == "W":
            return []
        needed = self._needed_forward if action.kind == "F" else self._taken_by
        return [tag for tag in needed(action) if not self._channels.has(tag, worker)]

    def _do(self, worker: int, action: Action) -> PyTree:
        """Starts an action; what it computes beside what its stage keeps."""
        run = self._runs[worker, action.stage]
        if action.kind == "F":
            return self._forward(worker, run, action)
        split = self._is_split(action)
        if action.kind == "B":
            self._backward(worker, run, action, split)
        else:
            run.backward_params(action.micro_batch)
        if action.kind == ("W" if split else "B"):
            self._passed_back(worker, action.stage)
        return None

    def _is_split(self, action: Action) -> bool:
        schedule = self._places.schedule
        return bool(schedule.split[action.stage, action.micro_batch])

    @abstractmethod
    def _passed_back(self, worker: int, stage: int) -> None:
        """The gradient of a stage has grown by another micro-batch's."""

    @abstractmethod
    def _add_loss(self, worker: int, micro: int, found: Partial, aux: PyTree) -> None:
        """The loss of a micro-batch, and its auxiliary outputs, are computed."""

    # --- forward ---

    def _forward(self, worker: int, run: StageRun, action: Action) -> PyTree:
        _, stage, micro = action
        inputs = {
            tag.name: self._channels.take(tag, worker) for tag in self._inputs(action)
        }
        for name in self._from_batch[stage]:
            inputs[name] = self._entry(worker, micro, name, stage)
        forward = run.outputs if self._forward_only else run.forward
        outputs = forward(micro, inputs)
        last = self._places.loss
        for name, value in outputs.items():
            # To each taker apart: they may be on several workers.
            for taker in self._wiring.consumers[stage][name]:
                self._send("F", worker, micro, name, stage, taker, value)
        lost = self._lose(worker, micro) if stage == last - 1 else None
        return outputs, lost

    def _lose(self, worker: int, micro: int) -> Partial:
        """The losses of a micro-batch; their cotangents start the way back."""
        last, part = self._places.loss, self._parts[micro]
        values, entries = self._taken_by_loss(worker, micro)
        passes = self._loss.passes(part.batch, self._read)
        if self._forward_only:
            found, aux = passes.losses(values, entries, part.weights)
            self._add_loss(worker, micro, found, aux)
            return found
        found, d_values, aux = passes.both(values, entries, part.weights)
        self._add_loss(worker, micro, found, aux)
        # On the host: each stage's device takes it from there.
        share = MicroBatchShare(np.float32(0), part.total)
        # Which micro-batch holds the extreme is known when all are joined.
        if self._loss.kind in ("max", "min"):
            share = MicroBatchShare(found.value, found.weight)
        for name in self._sources_of_loss:
            d_value = d_values[name]
            self._send_back(worker, micro, name, last, (d_value, share))
        return found

    def _taken_by_loss(
        self, worker: int, micro: int
    ) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
        """The values that the loss is given, and the entries that it reads."""
        last = self._places.loss
        values = {
            name: self._entry(worker, micro, name, last)
            for name in self._from_batch[last]
        }
        for name, source in self._sources_of_loss.items():
            sender = self._places.worker(source, micro)
            tag = MessageTag("F", micro, name, last, sender)
            values[name] = self._channels.take(tag, worker)
        entries = {name: self._entry(worker, micro, name, last) for name in self._read}
        return values, entries

    # --- backward ---

    def _backward(
        self, worker: int, run: StageRun, action: Action, split: bool
    ) -> None:
        _, stage, micro = action
        received: dict[str, list[PyTree]] = {}
        for tag in self._taken_by(action):
            cotangent, share = self._channels.take(tag, worker)
            received.setdefault(tag.name, []).append(cotangent)
        # A value that several stages took has a cotangent from each of them.
        cotangents = {
            name: summed(parts, self._invoke) for name, parts in received.items()
        }
        d_inputs = run.backward(micro, cotangents, share, split)
        for name, cotangent in d_inputs.items():
            # Nothing waits for the cotangent of an entry of the batch.
            if self._wiring.source[stage][name] != BATCH:
                self._send_back(worker, micro, name, stage, (cotangent, share))

    def _send_back(
        self, worker: int, micro: int, name: str, taker: int, value: PyTree
    ) -> None:
        source = self._wiring.source[taker][name]
        self._send("B", worker, micro, name, taker, source, value)

    # --- passing on ---

    def _send(
        self,
        kind: str,
        worker: int,
        micro: int,
        name: str,
        source: int,
        taker: int,
        value: PyTree,
    ) -> None:
        self._note(micro, name, source, taker, value, kind == "B")
        # By the stage that took the value: several may take it, each with a cotangent.
        stage = taker if kind == "F" else source
        tag = MessageTag(kind, micro, name, stage, worker)
        self._channels.put(tag, self._places.worker(taker, micro), value)

    def _entry(self, worker: int, micro: int, name: str, taker: int) -> PyTree:
        """An entry of the batch, where it is taken."""
        who = "the loss" if taker == self._places.loss else f"stage {taker}"
        entry = entry_of(self._parts[micro].batch, name, who)
        self._places.check(name, entry, worker, taker)
        self._note(micro, name, BATCH, taker, entry, False)
        return moved(entry, self._places.devices[worker])

    def _note(
        self,
        micro: int,
        name: str,
        source: int,
        taker: int,
        value: PyTree,
        cotangent: bool,
    ) -> None:
        arrays = jax.tree.leaves(value[0] if cotangent else value)
        size = sum(array.nbytes for array in arrays)
        self.transfers.append(
            Transfer(self._channels.number, micro, name, source, taker, cotangent, size)
        )

    def _inputs(self, action: Action) -> list[MessageTag]:
        _, stage, micro = action
        return [
            MessageTag("F", micro, name, stage, self._places.worker(source, micro))
            for name, source in self._wiring.source[stage].items()
            if source != BATCH
        ]

    def _needed_forward(self, action: Action) -> list[MessageTag]:
        """The inputs of a forward pass; at the last stage those of the loss, too.

        Those of the loss that the last stage puts out are there when it is done.
        """
        _, stage, micro = action
        last = self._places.loss
        needed = self._inputs(action)
        if stage == last - 1:
            needed += [
                MessageTag("F", micro, name, last, self._places.worker(source, micro))
                for name, source in self._sources_of_loss.items()
                if source != stage
            ]
        return needed

    def _taken_by(self, action: Action) -> list[MessageTag]:
        """The cotangents of a stage's outputs, one from each stage that took one."""
        _, stage, micro = action
        return [
            MessageTag("B", micro, name, taker, self._places.worker(taker, micro))
            for name, takers in self._wiring.consumers[stage].items()
            for taker in takers
        ]


@final
class BatchStep(Step):
    """The step of a synchronous schedule, or its forward passes alone.

    Args:
      given: What it works on.
      keep: Whether what the loss is given is kept.
    """

    def __init__(self, given: StepInputs, *, keep: bool = False) -> None:
        super().__init__(given)
        self._losses: dict[int, Partial] = {}
        self._aux: dict[int, PyTree] = {}
        self._kept: dict[int, dict[str, PyTree]] | None = {} if keep else None
        owner = self._places.schedule.owner
        self._left = {
            (worker, stage): int((owner[stage] == worker).sum())
            for worker, stage in self._runs
        }

    def _actions(self, worker: int) -> "ListedActions":
        return ListedActions(self._places.actions[worker])

    def _passed_back(self, worker: int, stage: int) -> None:
        # Counted, because a schedule may end a stage's passes in any order.
        self._left[worker, stage] -= 1
        if not self._left[worker, stage]:
            run = self._runs[worker, stage]
            run.finish()
            # The others get it while this worker goes on with its other stages.
            if len(self._places.schedule.placement[stage]) > 1:
                own = run.partial()
                share_gradient(self._channels, self._places, worker, stage, own)

    def _add_loss(self, worker: int, micro: int, found: Partial, aux: PyTree) -> None:
        if self._loss.has_aux:
            self._aux[micro] = aux
        before, kind = self._losses.get(worker), self._loss.kind
        self._losses[worker] = found if before is None else join(before, found, kind)

    def _taken_by_loss(
        self, worker: int, micro: int
    ) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
        values, entries = super()._taken_by_loss(worker, micro)
        if self._kept is not None:
            self._kept[micro] = values
        return values, entries

    def gradient(self, stage: int, unrounded: bool) -> PyTree:
        """The finished gradient of a stage of this process, over all its workers.

        Args:
          stage: Its number.
          unrounded: As for `StageRun.finished`.
        """
        worker = self._places.stages[stage]
        run, places = self._runs[worker, stage], self._places
        # Without replicas there is no message to wait for.
        if len(places.schedule.placement[stage]) == 1:
            return run.finished(run.partial(), unrounded)
        joined = joined_gradient(self._channels, places, worker, stage, run)
        return run.finished(joined, unrounded)

    def states(self) -> list[PyTree]:
        """The state that each stage of this process is left with; None elsewhere."""
        places = self._places
        if max(map(len, places.schedule.placement)) == 1:
            # One worker has seen all micro-batches.
            left = {j: self._runs[w, j].state for j, w in places.stages.items()}
        else:
            totals = [
                self._parts[i].total for i in range(places.schedule.micro_batches)
            ]
            left = joined_states(self._channels, places, self._runs, totals)
        return [left.get(j) for j in range(places.loss)]

    def agree(
        self,
        channels: StageChannels,
        stats: Mapping[int, PyTree],
        computed: PyTree = None,
    ) -> tuple[jax.Array, PyTree, list[PyTree]]:
        """Ends the step on all workers, or on none.

        Args:
          channels: The call that the step is made in.
          stats: What each stage of this process has to tell all workers.
          computed: What the step leaves behind; see `StageChannels.agree`.

        Returns:
          The loss of the whole batch, over all workers that run the last stage; the
          auxiliary outputs of its micro-batches; and the stats of every stage that has
          some, in order.

        Raises: what `StageChannels.agree` raises.
        """
        loss = self._loss
        here = beside(self._places.devices[self._places.own[0]])
        # Those of several workers of the last stage are on several devices.
        aux = moved(self._aux, here) if loss.has_aux else {}
        mine = self._losses, stats, stacked(aux, jnp.stack) if aux else None
        told = moved(channels.agree(mine, (mine, computed, self._kept)), here)
        losses: dict[int, Partial] = {}
        stages: dict[int, PyTree] = {}
        for some, of_stages, _ in told:
            losses |= some
            stages = of_stages | stages  # Of replicas, what the first one tells.
        # By rank, so that the sum has the same bits on all workers.
        in_order = [losses[worker] for worker in sorted(losses)]
        whole = functools.reduce(lambda a, b: join(a, b, loss.kind), in_order)
        found = merged([entries for *_, entries in told]) if loss.has_aux else None
        return _finished(whole, loss.kind), found, [stages[j] for j in sorted(stages)]

    def kept(self) -> PyTree:
        """The inputs of the loss, all micro-batches as one; None if they are not kept.

        By name; a single one alone.
        """
        if not self._kept:
            return None
        parts = [self._kept[micro] for micro in sorted(self._kept)]
        # Those of several workers of the last stage are on several devices.
        home = undivided(place_of(jax.tree.leaves(parts[0])[0]))
        found = jax.tree.map(lambda *rows: _in_one(moved(rows, home)), *parts)
        return found if len(found) > 1 else next(iter(found.values()))


class Actions(Protocol):
    """The actions that are left to one worker, in order."""

    def next(self) -> Action | None:
        """The next action; None if all are done."""

    def advance(self) -> None:
        """The next action is done."""


class ListedActions:
    """The actions of a schedule; see `Actions`.

    Args:
      actions: Of one worker.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self._left = deque(actions)

    def next(self) -> Action | None:
        """See `Actions`."""
        return self._left[0] if self._left else None

    def advance(self) -> None:
        """See `Actions`."""
        self._left.popleft()


@contextlib.contextmanager
def _naming(worker: int, action: Action) -> Iterator[None]:
    """Says in a note of any error at which action it came up."""
    try:
        yield
    except Exception as error:
        passes = {"F": "forward pass", "B": "backward pass", "W": "weight gradient"}
        what = f"the {passes[action.kind]} of stage {action.stage}"
        error.add_note(
            f"It came up in {what} for micro-batch {action.micro_batch}, on worker "
            f"{worker} of the schedule."
        )
        raise


def summed(cotangents: Sequence[PyTree], invoke: Invoke = operator.call) -> PyTree:
    """The sum over all consumers of a value, the first ones first; None for none."""
    flowing = [cotangent for cotangent in cotangents if cotangent is not None]
    if not flowing:
        return None
    return functools.reduce(functools.partial(invoke, _plus), flowing)


_plus = jax.jit(lambda first, second: add_trees(first, second))


def _in_one(rows: Sequence[jax.Array]) -> jax.Array:
    """The examples of all micro-batches; one number each of what has no examples."""
    return jnp.concatenate(rows) if rows[0].ndim else jnp.stack(rows)


@functools.partial(jax.jit, static_argnums=1)
def _finished(partial: Partial, kind: str) -> PyTree:
    return reduction.finish(partial, kind, None)[0]
