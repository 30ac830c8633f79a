"""One step of a pipeline: the actions of the workers that are in this process.

With several workers a single thread walks through their lists and starts whatever has
its inputs: JAX returns from a computation before it is done, so that all devices are
busy. With one worker the same loop waits for what the other processes send.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jdist import reduction
from jdist._tree import add_trees
from jdist.pipeline.run.action_timer import ActionTimer
from jdist.pipeline.run.auxiliary import merged, stacked
from jdist.pipeline.run.buckets import buckets_of, whole
from jdist.pipeline.run.loss import PipelineLoss
from jdist.pipeline.run.micro_batch import MicroBatches
from jdist.pipeline.run.places import Places
from jdist.pipeline.run.replica_state import joined_state
from jdist.pipeline.run.shapes import entry_of
from jdist.pipeline.run.stage_channels import (
    MessageTag,
    StageChannels,
    ValueChannels,
    moved,
    receive,
)
from jdist.pipeline.run.stage_run import MicroBatchShare, StageRun, join
from jdist.pipeline.run.transfer_log import Transfer, size_of
from jdist.pipeline.schedule.actions import Action
from jdist.pipeline.stages.wiring import BATCH, StageWiring
from jdist.reduction import Partial
from jdist.segment.internal import Invoke, call_now


class Step:
    """What the workers of this process do in one step.

    Args:
      wiring: Which value goes where.
      places: Who runs which stage for which micro-batch, and on what device.
      runs: By worker and stage, of the workers of this process.
      channels: Brings values to other stages.
      loss: The loss function; it runs where the last stage runs.
      read: The entries of the batch that the loss reads.
      parts: The micro-batches.

    Attributes:
      transfers: What was sent from here, in order.
      losses: Of the workers of this process that run the last stage, so far.
    """

    def __init__(
        self,
        wiring: StageWiring,
        places: Places,
        runs: Mapping[tuple[int, int], StageRun],
        channels: ValueChannels,
        loss: PipelineLoss,
        read: tuple[str, ...],
        parts: MicroBatches,
    ) -> None:
        self.transfers: list[Transfer] = []
        self.losses: dict[int, Partial] = {}
        self._invoke: Invoke = call_now
        self._aux: dict[int, Any] = {}
        self._wiring = wiring
        self._places = places
        self._runs = runs
        self._channels = channels
        self._loss = loss
        self._read = read
        self._parts = parts
        last = wiring.source[places.loss]
        self._sources_of_loss = {
            name: source for name, source in last.items() if source != BATCH
        }
        owner = places.schedule.owner
        self._left = {
            (worker, stage): int((owner[stage] == worker).sum())
            for worker, stage in runs
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
            if not moved_on:
                waiting = self._waiting(lists)
                if waiting:  # Else it came since it was looked for.
                    self._channels.wait(waiting)

    def _actions(self, worker: int) -> "Actions":
        """What a worker of this process does."""
        return ListedActions(self._places.schedule.actions(worker))

    def _waiting(self, lists: Mapping[int, "Actions"]) -> dict[MessageTag, str]:
        """What the next actions wait for; nothing if one of them need not."""
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
        if action.kind == "W":
            return []
        needed = self._needed_forward if action.kind == "F" else self._taken_by
        return [tag for tag in needed(action) if not self._channels.has(tag, worker)]

    def _do(self, worker: int, action: Action) -> Any:
        """Starts an action; what it computes beside what its stage keeps."""
        run = self._runs[worker, action.stage]
        if action.kind == "F":
            outputs = self._forward(worker, run, action)
            return outputs, self.losses.get(worker)
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

    def _passed_back(self, worker: int, stage: int) -> None:
        """The gradient of a stage has grown by another micro-batch's."""
        self._left[worker, stage] -= 1
        if not self._left[worker, stage]:
            self._runs[worker, stage].finish()
            self._share_gradient(worker, stage)

    # --- what several workers have to join ---

    def gradient(self, worker: int, stage: int, unrounded: bool = False) -> Any:
        """The finished gradient of a stage, over all workers that run it.

        Args:
          worker: One of this process that runs the stage.
          stage: Its number.
          unrounded: As for `StageRun.finished`.
        """
        run, replicas = self._runs[worker, stage], self._replicas(worker, stage)
        own = run.partial()
        if not replicas:
            return run.finished(own, unrounded)
        sums = []
        for number, bucket in enumerate(buckets_of(own)):
            found = {worker: bucket}
            for other in replicas:
                tag = MessageTag("G", number, "", stage, other)
                found[other] = self._last(worker, tag)
            sums.append(run.joined(found))
        return run.finished(whole(sums, own), unrounded)

    def agree(
        self, channels: StageChannels, stats: Mapping[int, Any], computed: Any
    ) -> tuple[Any, Any, list[Any]]:
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
        here = self._places.devices[self._places.own[0]]
        # Those of several workers of the last stage are on several devices.
        mine = self.losses, stats, stacked(moved(self._aux, here), jnp.stack)
        told = channels.agree(mine, (mine, computed))
        losses: dict[int, Partial] = {}
        stages: dict[int, Any] = {}
        entries = []
        for some, of_stages, aux in moved(told, here):
            losses |= some
            stages = of_stages | stages  # Of replicas, what the first one tells.
            entries.append(aux)
        found = [losses[worker] for worker in sorted(losses)]
        joined = functools.reduce(lambda a, b: join(a, b, self._loss.kind), found)
        loss = _finished(joined, self._loss.kind)
        return loss, merged(entries), [stages[j] for j in sorted(stages)]

    def _share_gradient(self, worker: int, stage: int) -> None:
        """Its last backward pass is done: the others that run the stage get its sum."""
        replicas = self._replicas(worker, stage)
        buckets = buckets_of(self._runs[worker, stage].partial()) if replicas else []
        for number, bucket in enumerate(buckets):
            for other in replicas:
                tag = MessageTag("G", number, "", stage, worker)
                self._channels.put(tag, other, bucket)

    def states(self, totals: Sequence[float]) -> dict[int, Any]:
        """What the stages of this process are left with, over all their workers.

        Args:
          totals: Of the weights of each micro-batch.
        """
        for (worker, stage), run in self._runs.items():
            if run.state is None:
                continue
            for other in self._replicas(worker, stage):
                self._channels.put(self._state_of(worker, stage), other, run.state)
        found: dict[int, Any] = {}
        for (worker, stage), run in sorted(self._runs.items(), key=_place):
            replicas = self._replicas(worker, stage)
            if stage in found or run.state is None or not replicas:
                found.setdefault(stage, run.state)
                continue
            own = {worker: run.state}
            for other in replicas:
                own[other] = self._last(worker, self._state_of(other, stage))
            weights = dict.fromkeys(own, 0.0)
            for micro, total in enumerate(totals):
                weights[self._places.worker(stage, micro)] += float(total)
            ranks = sorted(own)
            found[stage] = joined_state(
                [own[w] for w in ranks], [weights[w] for w in ranks]
            )
        return found

    def _state_of(self, worker: int, stage: int) -> MessageTag:
        return MessageTag("G", -1, "state", stage, worker)

    def _replicas(self, worker: int, stage: int) -> list[int]:
        workers = sorted(self._places.schedule.placement[stage])
        return [other for other in workers if other != worker]

    def _last(self, worker: int, tag: MessageTag) -> Any:
        return receive(self._channels, tag, worker, "the end of the step")

    # --- forward ---

    def _forward(self, worker: int, run: StageRun, action: Action) -> dict[str, Any]:
        _, stage, micro = action
        inputs = {
            tag.name: self._channels.take(tag, worker) for tag in self._inputs(action)
        }
        for name in self._wiring.from_batch(stage):
            inputs[name] = self._entry(worker, micro, name, stage)
        outputs = run.forward(micro, inputs)
        last = self._places.loss
        for name, value in outputs.items():
            for taker in self._wiring.consumers[stage][name]:
                self._send("F", worker, micro, name, stage, taker, value)
        if stage == last - 1:
            self._differentiate_loss(worker, micro)
        return outputs

    def _differentiate_loss(self, worker: int, micro: int) -> None:
        """The losses of a micro-batch; their cotangents start the way back."""
        last, part = self._places.loss, self._parts[micro]
        values, entries = self._taken_by_loss(worker, micro)
        passes = self._loss.passes(part.batch, self._read)
        found, d_values, aux = passes.both(values, entries, part.weights)
        self._add_loss(worker, micro, found, aux)
        share = MicroBatchShare(np.float32(0), part.total)
        if self._loss.kind in ("max", "min"):
            share = MicroBatchShare(found.value, found.weight)
        for name in self._sources_of_loss:
            d_value = d_values[name]
            self._send_back(worker, micro, name, last, (d_value, share))

    def _taken_by_loss(
        self, worker: int, micro: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The values that the loss is given, and the entries that it reads."""
        last = self._places.loss
        values = {
            name: self._entry(worker, micro, name, last)
            for name in self._wiring.from_batch(last)
        }
        for name, source in self._sources_of_loss.items():
            sender = self._places.worker(source, micro)
            tag = MessageTag("F", micro, name, last, sender)
            values[name] = self._channels.take(tag, worker)
        entries = {name: self._entry(worker, micro, name, last) for name in self._read}
        return values, entries

    def _add_loss(self, worker: int, micro: int, found: Partial, aux: Any) -> None:
        """The losses so far, and what the loss function puts out beside them."""
        if self._loss.has_aux:
            self._aux[micro] = aux
        before = self.losses.get(worker)
        if before is not None:
            found = self._invoke(join, before, found, self._loss.kind)
        self.losses[worker] = found

    # --- backward ---

    def _backward(
        self, worker: int, run: StageRun, action: Action, split: bool
    ) -> None:
        _, stage, micro = action
        received: dict[str, list[Any]] = {}
        for tag in self._taken_by(action):
            cotangent, share = self._channels.take(tag, worker)
            received.setdefault(tag.name, []).append(cotangent)
        cotangents = {
            name: summed(parts, self._invoke) for name, parts in received.items()
        }
        d_inputs = run.backward(micro, cotangents, share, split)
        for name, cotangent in d_inputs.items():
            if self._wiring.source[stage][name] != BATCH:
                self._send_back(worker, micro, name, stage, (cotangent, share))

    def _send_back(
        self, worker: int, micro: int, name: str, taker: int, value: Any
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
        value: Any,
    ) -> None:
        self._note(micro, name, source, taker, value, kind == "B")
        stage = taker if kind == "F" else source
        tag = MessageTag(kind, micro, name, stage, worker)
        self._channels.put(tag, self._places.worker(taker, micro), value)

    def _entry(self, worker: int, micro: int, name: str, taker: int) -> Any:
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
        value: Any,
        cotangent: bool,
    ) -> None:
        size = size_of(value[0] if cotangent else value)
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
        """What a forward pass waits for; the last stage's, for the loss's inputs too.

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


class Actions(Protocol):
    """What one worker has still to do, in order."""

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


def _place(item: tuple[tuple[int, int], Any]) -> tuple[int, int]:
    return item[0]


def summed(cotangents: Sequence[Any], invoke: Invoke = call_now) -> Any:
    """The sum over all consumers of a value, the first ones first; None for none."""
    flowing = [cotangent for cotangent in cotangents if cotangent is not None]
    if not flowing:
        return None
    return functools.reduce(functools.partial(invoke, _plus), flowing)


_plus = jax.jit(lambda first, second: add_trees(first, second))


@functools.partial(jax.jit, static_argnums=1)
def _finished(partial: Partial, kind: str) -> Any:
    return reduction.finish(partial, kind, None)[0]
