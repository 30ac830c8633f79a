"""One epoch of an asynchronous pipeline: a step that interleaves passes and updates.

A stage's updates are numbered. To each update every worker of the stage contributes
`every` micro-batches, in the order of their backward passes; the last update of an
epoch has the remaining ones. Workers that share a stage send their sums to each other
and continue with the stage once all sums have arrived: so all have the same version at
the same point of their lists.

Batches are read when a forward pass needs them, by each process from its own stream.
"""

import functools
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import numpy as np

from jdist._errors import requirement
from jdist._tree import PyTree
from jdist.pipeline.run.action_timer import ActionTimer
from jdist.pipeline.run.loss import merged, stacked
from jdist.pipeline.run.stage_channels import MessageTag, StageChannels, receive
from jdist.pipeline.run.stage_run import StageRun
from jdist.pipeline.run.step import Step, StepInputs
from jdist.pipeline.schedule.actions import Action
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.weight_stashing.batch_stream import BatchStream
from jdist.pipeline.weight_stashing.stashed_stage import StashedStage
from jdist.reduction import Partial

_CALL = "Pipeline.train_epoch"

AHEAD = 32
"""Micro-batches whose losses may still be computed while another one is read. JAX
starts computations before devices are free: it would read what none can take yet."""


class PassRecord(NamedTuple):
    """A pass of a worker, and the version of the weights that it used.

    Versions are numbered from the beginning of the epoch: version v is the result of v
    updates of the initial weights.

    Attributes:
      kind: "F" or "B".
      worker: Rank of the worker.
      stage: The stage.
      micro_batch: The micro-batch.
      version: The version that it used.
      newest: The newest version when the pass began; `newest - version` is the
        staleness of the version.
      held: Number of versions that the stage keeps on this worker after the pass.
    """

    kind: str
    worker: int
    stage: int
    micro_batch: int
    version: int
    newest: int
    held: int


EpochLosses = tuple[np.ndarray, np.ndarray, PyTree]
"""For all micro-batches of an epoch: the means or sums of the losses, the `total` of
each, and the auxiliary outputs."""


@final
class EpochStep(Step):
    """The passes and updates of one epoch, or of a part of one.

    Args:
      given: The inputs of the step; its micro-batches are those of the stream.
      stashed: The stages by worker and stage, with versions of their weights.
      stream: The micro-batches.
      schedule: The schedule of all workers, for the length of the stream.
      every: Number of micro-batches of a worker in an update.

    Attributes:
      passes: The passes of this process, in order.
    """

    def __init__(
        self,
        given: StepInputs,
        stashed: Mapping[tuple[int, int], StashedStage],
        stream: BatchStream,
        schedule: Schedule,
        every: int,
    ) -> None:
        super().__init__(given)
        self.passes: list[PassRecord] = []
        self._stashed = stashed
        self._stream, self._schedule, self._every = stream, schedule, every
        self._computing: deque[tuple[int, Any]] = deque()
        self._found: dict[int, PyTree] = {}

    def run(self, action_timer: ActionTimer | None = None) -> None:
        """See `Step`; then drains, with the remaining updates of all stages."""
        super().run(action_timer)
        # All processes read to the end, since their checksums are compared.
        self._stream.read(self._stream.length - 1)
        for (worker, stage), stashed in self._stashed.items():
            while self._contributions(stage, stashed.stash.version):
                self._update(worker, stage)

    def _actions(self, worker: int) -> list[Action]:
        return self._schedule.actions(worker)

    # An update may follow each backward pass, and needs the whole gradient.
    def _is_split(self, action: Action) -> bool:
        return False

    # --- results ---

    def agree_on_epoch(self, channels: StageChannels, computed: PyTree) -> EpochLosses:
        """Commits the epoch on all workers, or on none; returns the losses of all.

        Args:
          channels: The call of the epoch.
          computed: The results of the epoch; see `StageChannels.agree`.

        Raises:
          ValueError: Other workers have read other batches.
          Exception: What `StageChannels.agree` raises.
        """
        self._fetch(0)
        # Alone first: an error then shows nothing but the auxiliary outputs.
        stacked({micro: aux for micro, (_, _, aux) in self._found.items()}, np.stack)
        found = stacked(self._found, np.stack)
        told = channels.agree((found, self._stream.checksums), computed)
        # After the exchange: all processes have the same reports and raise the same.
        _check_alike([checksums for _, checksums in told])
        # Those of workers with a mesh have arrived on it.
        losses = jax.tree.map(np.asarray, merged([entries for entries, _ in told]))
        values, weights, aux = losses
        return values, weights, aux

    def _add_loss(self, worker: int, micro: int, found: Partial, aux: PyTree) -> None:
        # Fetched later, because a transfer to the host waits for the device.
        total = self._stream.totals[micro]
        self._computing.append((micro, (found.value, total, aux)))
        self._fetch(AHEAD)

    def _fetch(self, left: int) -> None:
        """Fetches the losses of all micro-batches but the last `left`."""
        # The wait bounds how far dispatch runs ahead of the device, and so the batches
        # and activations in memory.
        while len(self._computing) > left:
            micro, found = self._computing.popleft()
            self._found[micro] = jax.tree.map(np.asarray, found)

    # --- passes ---

    def _missing(self, worker: int, action: Action) -> list[MessageTag]:
        stage = action.stage
        due = self._due(worker, stage) if self._full(worker, stage) else []
        late = [tag for tag in due if not self._channels.has(tag, worker)]
        return late or super()._missing(worker, action)

    def _do(self, worker: int, action: Action) -> PyTree:
        kind, stage, micro = action
        # An update with other workers was not made at once: their sums are here now.
        if self._full(worker, stage):
            self._update(worker, stage)
        stashed = self._stashed[worker, stage]
        used, newest = stashed.used[micro], stashed.stash.version
        computed = super()._do(worker, action)
        if kind == "B":
            self._stream.forget(micro)  # All its forward passes here are done.
        held = len(stashed.stash.kept)
        self.passes.append(PassRecord(kind, worker, stage, micro, used, newest, held))
        return computed, stashed.arrays()

    def _forward(self, worker: int, run: StageRun, action: Action) -> PyTree:
        self._stream.read(action.micro_batch)
        self._stashed[worker, action.stage].begin_forward(action.micro_batch)
        return super()._forward(worker, run, action)

    def _backward(
        self, worker: int, run: StageRun, action: Action, split: bool
    ) -> None:
        stashed = self._stashed[worker, action.stage]
        stashed.begin_backward(action.micro_batch)
        super()._backward(worker, run, action, split)
        stashed.end_backward(action.micro_batch)

    # --- updates ---

    def _passed_back(self, worker: int, stage: int) -> None:
        if not self._full(worker, stage):
            return
        stashed = self._stashed[worker, stage]
        for other in self._places.replicas(worker, stage):
            tag = MessageTag("G", stashed.stash.version, "", stage, worker)
            self._channels.put(tag, other, stashed.run.partial())
        # Without other workers the update needs no message, and is made at once.
        if not self._due(worker, stage):
            self._update(worker, stage)

    def _full(self, worker: int, stage: int) -> bool:
        """Whether a worker has its whole contribution to an update that is not made."""
        stashed = self._stashed[worker, stage]
        grown, number = stashed.grown, stashed.stash.version
        return 0 < grown == self._contributions(stage, number)[worker]

    def _due(self, worker: int, stage: int) -> list[MessageTag]:
        """Tags of other workers' contributions to the next update."""
        number = self._stashed[worker, stage].stash.version
        return [
            MessageTag("G", number, "", stage, other)
            for other in sorted(self._contributions(stage, number))
            if other != worker
        ]

    def _update(self, worker: int, stage: int) -> None:
        others = {}
        for tag in self._due(worker, stage):
            others[tag.sender] = receive(self._channels, tag, worker, "an update")
        self._stashed[worker, stage].update(others, worker)

    def _contributions(self, stage: int, number: int) -> Counter[int]:
        """See `contributions`; empty for an update after the last one."""
        workers = self._places.schedule.placement[stage]
        size = self._every * len(workers)
        return contributions(workers, size, number, self._stream.length)


# Cached, because it is asked for several times in each action.
@functools.lru_cache(maxsize=256)
def contributions(
    workers: Sequence[int], size: int, number: int, length: int
) -> Counter[int]:
    """Number of micro-batches that each worker of a stage contributes to an update.

    Args:
      workers: The workers of the stage, which take micro-batches in turn.
      size: Number of micro-batches in an update.
      number: Number of the update.
      length: Number of micro-batches in the epoch.

    Example:
      >>> [dict(contributions((0, 1), 4, update, 5)) for update in (0, 1)]
      [{0: 2, 1: 2}, {0: 1}]
    """
    first = number * size
    end = min(first + size, length)
    return Counter(workers[micro % len(workers)] for micro in range(first, end))


def _check_alike(told: Sequence[Mapping[str, int]]) -> None:
    """Refuses an epoch whose workers have not read the same batches.

    Args:
      told: Checksums of the batches that each process has read.
    """
    # By entry, with the first worker that has it: a process need not load all entries.
    seen: dict[str, tuple[int, int]] = {}
    for rank, checksums in enumerate(told):
        for name, checksum in checksums.items():
            first, expected = seen.setdefault(name, (rank, checksum))
            if checksum != expected:
                rule = "must be the same batches and weights on all workers"
                got = f"another {name} on worker {rank} of the schedule than on {first}"
                remedy = "Read the data in one order on all workers; leave out of a "
                remedy += "worker's batch what its stages do not take."
                raise ValueError(requirement(f"{_CALL}(batches)", rule, got, remedy))
