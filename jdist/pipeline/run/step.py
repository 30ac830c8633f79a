"""The loop over the actions of this process's workers.

A single thread walks through the lists of all workers and starts each action whose
inputs are there. Asynchronous dispatch keeps all devices busy. With one worker in a
process the same loop waits for messages of the other processes.
"""

import functools
import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from jdist import reduction
from jdist._tree import PyTree, add_trees
from jdist.pipeline.run.action_timer import ActionTimer
from jdist.pipeline.run.loss import PipelineLoss, merged, stacked
from jdist.pipeline.run.micro_batch import MicroBatchSource, entry_of
from jdist.pipeline.run.replicas import joined_gradient, joined_states, share_gradient
from jdist.pipeline.run.stage_channels import (
    MessageTag,
    Places,
    StageChannels,
    ValueChannels,
)
from jdist.pipeline.run.stage_run import StageRun, join
from jdist.pipeline.schedule.actions import Action
from jdist.pipeline.stages.place import beside, moved, place_of, undivided
from jdist.pipeline.stages.wiring import BATCH, StageWiring
from jdist.reduction import Partial
from jdist.segment.internal import Invoke

_NO_VALUE = np.float32(0)
"""The value of a micro-batch's share where the reduction is a mean or a sum."""


class StepInputs(NamedTuple):
    """The stages, micro-batches and channels of one step.

    Attributes:
      routes: The messages of every action.
      runs: The stages of this process, by worker and stage.
      channels: The channels to other stages.
      loss: The loss function; it runs where the last stage runs.
      read: The entries of the batch that the loss reads, once they are known.
      parts: The micro-batches.
      signature: Shapes and dtypes of all inputs, if this process sees all of them;
        else None.
    """

    routes: "Routes"
    runs: Mapping[tuple[int, int], StageRun]
    channels: ValueChannels
    loss: PipelineLoss
    read: tuple[str, ...]
    parts: MicroBatchSource
    signature: Hashable = None


RoutedMessage = tuple[MessageTag, int]
"""A message that an action sends: its tag, and the rank of its receiver."""


class Route(NamedTuple):
    """The messages and other inputs of an action.

    Attributes:
      awaited: Tags of the messages without which it cannot start.
      taken: Tags of the messages that it takes.
      entries: Names of the entries of the batch that it takes.
      sent: The messages that it sends, in order.
    """

    awaited: Sequence[MessageTag]
    taken: Sequence[MessageTag]
    entries: Sequence[str]
    sent: Sequence[RoutedMessage]


@final
class Routes:
    """The route of each action, found once for all steps of a schedule.

    Args:
      wiring: The source and the consumers of every value.
      places: The worker of each stage and micro-batch, and its device.

    Attributes:
      wiring: As above.
      places: As above.
      of: The route of an action. With the number of stages for its stage and "F" for
        its kind it is the loss of a micro-batch and the gradient of this loss.
    """

    def __init__(self, wiring: StageWiring, places: Places) -> None:
        self.wiring = wiring
        self.places = places
        # All actions of a schedule and its losses: an epoch's have no limit.
        most = len(places.schedule.columns) + places.schedule.micro_batches
        self.of: Callable[[Action], Route] = functools.lru_cache(most)(self._made)

    def _made(self, action: Action) -> Route:
        kind, stage, micro = action
        loss = self.places.loss
        if stage == loss:
            taken = self._inputs(loss, micro)
            back = self._cotangents(loss, micro)
            return Route(taken, taken, self._entries(loss), back)
        # W needs only residuals of its own B, which comes before it in the same list.
        if kind == "W":
            return Route([], [], [], [])
        if kind == "B":
            consumers = self.wiring.consumers[stage].items()
            taken = [
                MessageTag("B", micro, name, taker, self.places.worker(taker, micro))
                for name, takers in consumers
                for taker in takers
            ]
            return Route(taken, taken, [], self._cotangents(stage, micro))
        awaited = taken = self._inputs(stage, micro)
        # The loss follows the last stage at once. Without the outputs of this stage,
        # which its pass produces.
        if stage == loss - 1:
            own = self.wiring.consumers[stage]
            others = self._inputs(loss, micro)
            awaited = [*taken, *(tag for tag in others if tag.name not in own)]
        # One message for each consumer, because they may be on several workers.
        sent = [
            self._message("F", micro, name, stage, taker)
            for name, takers in self.wiring.consumers[stage].items()
            for taker in takers
        ]
        return Route(awaited, taken, self._entries(stage), sent)

    def _inputs(self, stage: int, micro: int) -> Sequence[MessageTag]:
        """Tags of the values that a stage or the loss takes from stages."""
        return [
            MessageTag("F", micro, name, stage, self.places.worker(source, micro))
            for name, source in self.wiring.source[stage].items()
            if source != BATCH
        ]

    def _entries(self, stage: int) -> Sequence[str]:
        source = self.wiring.source[stage].items()
        return [name for name, where in source if where == BATCH]

    def _cotangents(self, taker: int, micro: int) -> Sequence[RoutedMessage]:
        """The messages with the cotangents of what a stage or the loss has taken."""
        # Entries of the batch have no stage that takes their cotangents.
        return [
            self._message("B", micro, name, taker, source)
            for name, source in self.wiring.source[taker].items()
            if source != BATCH
        ]

    def _message(
        self, kind: str, micro: int, name: str, source: int, destination: int
    ) -> RoutedMessage:
        # Tagged with the consumer in both directions: each consumer of a value sends
        # a cotangent, and their tags must differ.
        consumer = destination if kind == "F" else source
        worker = self.places.worker
        tag = MessageTag(kind, micro, name, consumer, worker(source, micro))
        return tag, worker(destination, micro)


class Step(ABC):
    """Runs the actions of this process's workers and sends values to other stages.

    Args:
      given: The inputs of the step.
      invoke: Calls compiled functions; see `Segment.through`.
    """

    def __init__(self, given: StepInputs, invoke: Invoke = operator.call) -> None:
        self._routes, self._runs, self._channels = given[:3]
        self._loss, self._read, self._parts = given[3:6]
        self._places = self._routes.places
        self._invoke = invoke
        self._forward_only = self._places.schedule.forward_only

    def run(self, action_timer: ActionTimer | None = None) -> None:
        """Runs all actions of this process's workers, each worker's in its order.

        Args:
          action_timer: Times each action.

        Raises:
          ValueError: The workers wait for each other.
        """
        if action_timer is not None:
            action_timer.clear()
        lists = {worker: deque(self._actions(worker)) for worker in self._places.own}
        while True:
            moved_on = False
            waiting: dict[MessageTag, Action] = {}
            for worker, actions in lists.items():
                # A worker's order is the schedule's: what bounds its memory, and on a
                # mesh over processes what pairs its collectives. So no later action
                # overtakes one whose inputs are missing.
                while actions:
                    missing = self._missing(worker, actions[0])
                    if missing:
                        waiting |= dict.fromkeys(missing, actions[0])
                        break
                    self._start(worker, actions.popleft(), action_timer)
                    moved_on = True
            if not waiting:
                return
            # Waiting while another worker of this process could start an action would
            # leave its device idle.
            if not moved_on:
                self._channels.wait(waiting)

    def _start(self, worker: int, action: Action, timer: ActionTimer | None) -> None:
        """Runs an action; an error gets a note that names it."""
        try:
            if timer is None:
                self._do(worker, action)
            else:
                do = functools.partial(self._do, worker, action)
                timer.time(worker, action, do, self._runs)
        except Exception as error:
            passes = {"F": "forward pass", "B": "backward pass", "W": "weight gradient"}
            what = f"the {passes[action.kind]} of stage {action.stage}"
            error.add_note(
                f"It came up in {what} for micro-batch {action.micro_batch}, on worker "
                f"{worker} of the schedule."
            )
            raise

    def _actions(self, worker: int) -> Iterable[Action]:
        """The actions of a worker of this process, in order."""
        return self._places.actions[worker]

    def _missing(self, worker: int, action: Action) -> list[MessageTag]:
        has = self._channels.has
        return [tag for tag in self._routes.of(action).awaited if not has(tag, worker)]

    def _do(self, worker: int, action: Action) -> PyTree:
        """Starts an action; returns its results that its stage does not keep."""
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
        return bool(self._places.schedule.split[action.stage, action.micro_batch])

    def _passed_back(self, worker: int, stage: int) -> None:  # noqa: B027 - a hook
        """Called when the gradient of a micro-batch has been added to a stage's sum."""

    @abstractmethod
    def _add_loss(self, worker: int, micro: int, found: Partial, aux: PyTree) -> None:
        """Adds the loss of a micro-batch, and its auxiliary outputs, to the results."""

    # --- forward ---

    def _forward(self, worker: int, run: StageRun, action: Action) -> PyTree:
        _, stage, micro = action
        forward = run.outputs if self._forward_only else run.forward
        outputs = forward(micro, self._inputs(worker, stage, micro))
        for tag, receiver in self._routes.of(action).sent:
            self._channels.put(tag, receiver, outputs[tag.name])
        last = stage == self._places.loss - 1
        return outputs, self._lose(worker, micro) if last else None

    def _lose(self, worker: int, micro: int) -> Partial:
        """Computes the losses of a micro-batch and sends their cotangents."""
        part, last = self._parts[micro], self._places.loss
        values = self._inputs(worker, last, micro)
        entries = {name: self._entry(worker, micro, name, last) for name in self._read}
        passes = self._loss.passes(part.batch, self._read)
        if self._forward_only:
            found, aux = passes.losses(values, entries, part.weights)
            self._add_loss(worker, micro, found, aux)
            return found
        # Moved at each call: several workers of the last stage compute the loss on
        # several devices.
        scale = moved(self._loss.scale, self._places.devices[worker])
        found, d_values, aux = passes.both(values, entries, part.weights, scale)
        self._add_loss(worker, micro, found, aux)
        # Numbers on the host, so that each stage's device can take them without a
        # transfer between devices.
        share: tuple[PyTree, PyTree] = _NO_VALUE, part.total
        # For max and min each partial keeps its extreme loss: which micro-batch holds
        # the extreme of the batch is known only when all partials are joined.
        if self._loss.kind in ("max", "min"):
            share = found.value, found.weight
        for tag, receiver in self._routes.of(Action("F", last, micro)).sent:
            self._channels.put(tag, receiver, (d_values[tag.name], share))
        return found

    def _inputs(self, worker: int, stage: int, micro: int) -> dict[str, PyTree]:
        """The values that a stage, or the loss, takes, by name."""
        route = self._routes.of(Action("F", stage, micro))
        inputs = {tag.name: self._channels.take(tag, worker) for tag in route.taken}
        for name in route.entries:
            inputs[name] = self._entry(worker, micro, name, stage)
        return inputs

    # --- backward ---

    def _backward(
        self, worker: int, run: StageRun, action: Action, split: bool
    ) -> None:
        route, micro = self._routes.of(action), action.micro_batch
        received: dict[str, list[PyTree]] = {}
        for tag in route.taken:
            cotangent, share = self._channels.take(tag, worker)
            received.setdefault(tag.name, []).append(cotangent)
        # A value with several consumers has a cotangent from each of them. The sum is
        # in the order of the stages, whatever order the messages arrive in.
        cotangents = {
            name: summed(parts, self._invoke) for name, parts in received.items()
        }
        # A message has it as a plain tuple: a class would be looked up by its name.
        value, weight = share
        own = Partial(value, None, weight)
        d_inputs = run.backward(micro, cotangents, own, split)
        for tag, receiver in route.sent:
            self._channels.put(tag, receiver, (d_inputs[tag.name], share))

    def _entry(self, worker: int, micro: int, name: str, taker: int) -> PyTree:
        """An entry of the batch, on the device of its consumer."""
        who = "the loss" if taker == self._places.loss else f"stage {taker}"
        entry = entry_of(self._parts[micro].batch, name, who)
        self._places.check(name, entry, worker, taker)
        return moved(entry, self._places.devices[worker])


@final
class BatchStep(Step):
    """The step of a synchronous schedule, or its forward passes alone.

    Args:
      given: The inputs of the step.
      keep: Whether to keep the inputs of the loss.
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

    def _passed_back(self, worker: int, stage: int) -> None:
        # Counted, because the last micro-batch need not come last in a schedule.
        self._left[worker, stage] -= 1
        shared = len(self._places.schedule.placement[stage]) > 1
        if shared and not self._left[worker, stage]:
            # Sent now, so that the messages overlap with this worker's other stages.
            own = self._runs[worker, stage].partial()
            share_gradient(self._channels, self._places, worker, stage, own)

    def _add_loss(self, worker: int, micro: int, found: Partial, aux: PyTree) -> None:
        if self._loss.has_aux:
            self._aux[micro] = aux
        before, kind = self._losses.get(worker), self._loss.kind
        self._losses[worker] = found if before is None else join(before, found, kind)

    def _inputs(self, worker: int, stage: int, micro: int) -> dict[str, PyTree]:
        inputs = super()._inputs(worker, stage, micro)
        if self._kept is not None and stage == self._places.loss:
            self._kept[micro] = inputs
        return inputs

    def gradient(self, stage: int, unrounded: bool) -> PyTree:
        """The finished gradient of a stage of this process, over all its workers.

        Args:
          stage: Number of the stage.
          unrounded: As for `StageRun.finished`.
        """
        worker = self._places.stages[stage]
        run, places = self._runs[worker, stage], self._places
        # Without replicas the partial of this worker is that of the stage.
        if len(places.schedule.placement[stage]) == 1:
            return run.finished(run.partial(), unrounded)
        joined = joined_gradient(self._channels, places, worker, stage, run)
        return run.finished(joined, unrounded)

    def states(self) -> list[PyTree]:
        """The final state of each stage of this process; None for other stages."""
        places = self._places
        if max(map(len, places.schedule.placement)) > 1:
            micro_batches = range(places.schedule.micro_batches)
            totals = [self._parts[i].total for i in micro_batches]
            return joined_states(self._channels, places, self._runs, totals)
        # Each stage has one worker, whose state has seen all micro-batches.
        left = {j: self._runs[worker, j].state for j, worker in places.stages.items()}
        return [left.get(j) for j in range(places.loss)]

    def agree(
        self,
        channels: StageChannels,
        stats: Mapping[int, PyTree],
        computed: PyTree = None,
    ) -> tuple[jax.Array, PyTree, list[PyTree]]:
        """Ends the step on all workers, or on none.

        Args:
          channels: The call of the step.
          stats: Statistics of each stage of this process, for all workers.
          computed: The results of the step; see `StageChannels.agree`.

        Returns:
          The loss of the whole batch, over all workers that run the last stage; the
          auxiliary outputs of its micro-batches; and the stats of every stage that has
          some, in order.

        Raises: what `StageChannels.agree` raises.
        """
        loss = self._loss
        here = beside(self._places.devices[self._places.own[0]])
        # Several workers of the last stage have theirs on several devices, but one
        # program that stacks them needs them on one.
        aux = moved(self._aux, here) if loss.has_aux else {}
        mine = self._losses, stats, stacked(aux, jnp.stack) if aux else None
        told = moved(channels.agree(mine, (mine, computed, self._kept)), here)
        losses: dict[int, Partial] = {}
        stages: dict[int, PyTree] = {}
        for some, of_stages, _ in told:
            losses |= some
            stages = of_stages | stages  # Replicas send equal ones: the first counts.
        # In the order of ranks, so that the sum has the same bits on all workers.
        in_order = [losses[worker] for worker in sorted(losses)]
        whole = functools.reduce(lambda a, b: join(a, b, loss.kind), in_order)
        found = merged([entries for *_, entries in told]) if loss.has_aux else None
        return _finished(whole, loss.kind), found, [stages[j] for j in sorted(stages)]

    def kept(self) -> PyTree:
        """The inputs of the loss, over all micro-batches; None if they are not kept.

        A dict by name, or the value itself if there is a single one.
        """
        if not self._kept:
            return None
        parts = [self._kept[micro] for micro in sorted(self._kept)]
        # As in `agree`: one program that concatenates them needs one device.
        home = undivided(place_of(jax.tree.leaves(parts[0])[0]))
        found = jax.tree.map(lambda *rows: _in_one(moved(rows, home)), *parts)
        return found if len(found) > 1 else next(iter(found.values()))


def summed(cotangents: Sequence[PyTree], invoke: Invoke = operator.call) -> PyTree:
    """The sum over all consumers of a value, in their order; None for no cotangent."""
    # Most values have one consumer.
    if len(cotangents) == 1:
        return cotangents[0]
    flowing = [cotangent for cotangent in cotangents if cotangent is not None]
    if not flowing:
        return None
    return functools.reduce(functools.partial(invoke, _plus), flowing)


@jax.jit
def _plus(first: PyTree, second: PyTree) -> PyTree:
    return add_trees(first, second)


def _in_one(rows: Sequence[jax.Array]) -> jax.Array:
    """Concatenates the examples of all micro-batches; stacks scalars."""
    return jnp.concatenate(rows) if rows[0].ndim else jnp.stack(rows)


@functools.partial(jax.jit, static_argnums=1)
def _finished(partial: Partial, kind: str) -> PyTree:
    return reduction.finish(partial, kind, None)[0]
