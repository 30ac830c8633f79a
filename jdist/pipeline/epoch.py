"""One epoch of an asynchronous pipeline: a step in which the stages update themselves.

A stage's updates are numbered. For each its workers contribute `every` micro-batches
each, in the order of their backward passes; the last update of an epoch takes what is
left. With several workers each sends its sum to the others, and goes on with the stage
once it has all of them: so all have the same version at the same point of their lists.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jdist.pipeline.loss import PipelineLoss
from jdist.pipeline.micro_batch import MicroBatch
from jdist.pipeline.places import Places
from jdist.pipeline.post import Parcel, Post, receive
from jdist.pipeline.schedule import Schedule
from jdist.pipeline.schedule_actions import Action
from jdist.pipeline.stashed_run import StashedRun
from jdist.pipeline.step import Step
from jdist.pipeline.stopwatch import Stopwatch
from jdist.pipeline.wiring import Wiring
from jdist.reduction import Partial


class Pass(NamedTuple):
    """What a worker did, and with which weights.

    Versions are numbered from the beginning of the epoch: version v is what v updates
    have made of the weights that it began with.

    Attributes:
      kind: "F" or "B".
      worker: Rank of the worker.
      stage: The stage.
      micro_batch: The micro-batch.
      version: The version that it used.
      newest: The newest version there when it began; `newest - version` is the
        staleness of what it used.
      held: Versions that the stage keeps on this worker afterwards.
    """

    kind: str
    worker: int
    stage: int
    micro_batch: int
    version: int
    newest: int
    held: int


class EpochStep(Step):
    """What the workers of this process do in one epoch.

    Args:
      wiring: Which value goes where.
      places: Who runs which stage for which micro-batch, and on what device.
      runs: By worker and stage, of the workers of this process.
      post: Brings values to other stages.
      loss: The loss function.
      read: The entries of the batch that the loss reads.
      parts: The micro-batches.

    Attributes:
      passes: What was done here, in order.
    """

    def __init__(
        self,
        wiring: Wiring,
        places: Places,
        runs: Mapping[tuple[int, int], StashedRun],
        post: Post,
        loss: PipelineLoss,
        read: tuple[str, ...],
        parts: Sequence[MicroBatch],
    ) -> None:
        super().__init__(wiring, places, runs, post, loss, read, parts)
        self.passes: list[Pass] = []
        self._stashed = runs
        self._found: dict[int, dict[int, Partial]] = {}
        self._updates = {stage: updates(places.schedule, stage) for _, stage in runs}

    def run(self, stopwatch: Stopwatch | None = None) -> None:
        """See `Step`; then the drain: stages make the updates that are left."""
        super().run(stopwatch)
        for (worker, stage), run in self._stashed.items():
            while run.stash.version < len(self._updates[stage]):
                self._update(worker, stage)

    def agree_on_losses(self, computed: Any) -> tuple[np.ndarray, np.ndarray]:
        """Ends the epoch on all workers, or on none.

        Args:
          computed: What the epoch leaves behind; see `Post.agree`.

        Returns:
          The weighted sum of each micro-batch's losses, and the sum of its weights, of
          all micro-batches on every worker.

        Raises: what `Post.agree` raises.
        """
        schedule = self._places.schedule
        mine = {}
        for worker, found in self._found.items():
            order = sorted(found)
            mine[worker] = tuple(
                np.stack([np.asarray(getattr(found[i], field)) for i in order])
                for field in ("value", "weight")
            )
        told: dict[int, Any] = {}
        for some in self._post.agree(mine, computed):
            told |= some
        senders = schedule.placement[-1]
        # With fewer micro-batches than workers some had none.
        parts = [told[sender] for sender in senders[: schedule.micro_batches]]
        values, weights = (
            np.empty(schedule.micro_batches, np.asarray(x).dtype) for x in parts[0]
        )
        for turn, part in enumerate(parts):
            values[turn :: len(senders)], weights[turn :: len(senders)] = part
        return values, weights

    def _add_loss(self, worker: int, micro: int, found: Partial) -> None:
        self._found.setdefault(worker, {})[micro] = found

    # --- passes ---

    def _missing(self, worker: int, action: Action) -> list[Parcel]:
        stage = action.stage
        due = self._due(worker, stage) if self._full(worker, stage) else []
        late = [parcel for parcel in due if not self._post.has(parcel, worker)]
        return late or super()._missing(worker, action)

    def _do(self, worker: int, action: Action) -> Any:
        kind, stage, micro = action
        if self._full(worker, stage):
            self._update(worker, stage)
        run = self._stashed[worker, stage]
        newest = run.stash.version
        computed = super()._do(worker, action)
        used = run.used[micro] if kind == "F" else run.used.pop(micro)
        held = len(run.stash.kept)
        self.passes.append(Pass(kind, worker, stage, micro, used, newest, held))
        return computed

    # --- updates ---

    def _passed_back(self, worker: int, stage: int) -> None:
        if not self._full(worker, stage):
            return
        run = self._stashed[worker, stage]
        for other in self._replicas(worker, stage):
            parcel = Parcel("G", run.stash.version, "", stage, worker)
            self._post.put(parcel, other, run.partial())
        if not self._due(worker, stage):  # Before it waits for anything else.
            self._update(worker, stage)

    def _full(self, worker: int, stage: int) -> bool:
        """Whether a worker has contributed all it has to, and not updated yet."""
        run = self._stashed[worker, stage]
        if run.stash.version == len(self._updates[stage]):
            return False
        wanted = self._updates[stage][run.stash.version][worker]
        return 0 < wanted == run.grown

    def _due(self, worker: int, stage: int) -> list[Parcel]:
        """What others contribute to the next update."""
        version = self._stashed[worker, stage].stash.version
        return [
            Parcel("G", version, "", stage, other)
            for other in sorted(self._updates[stage][version])
            if other != worker
        ]

    def _update(self, worker: int, stage: int) -> None:
        others = {
            parcel.sender: receive(self._post, parcel, worker, "an update")
            for parcel in self._due(worker, stage)
        }
        self._stashed[worker, stage].update(others, worker)


def updates(schedule: Schedule, stage: int) -> list[Counter[int]]:
    """How many micro-batches each worker contributes to each update of a stage.

    Example:
      >>> from jdist.pipeline.schedules import pipedream
      >>> schedule = pipedream(2, 5, replicas=(2, 1), update_every=2)
      >>> [dict(each) for each in updates(schedule, 0)]
      [{0: 2, 1: 2}, {0: 1}]
    """
    assert schedule.updates is not None
    workers, every = schedule.placement[stage], schedule.updates.every
    found: list[Counter[int]] = []
    for micro in range(schedule.micro_batches):
        if micro % (every * len(workers)) == 0:
            found.append(Counter())
        found[-1][schedule.worker(stage, micro)] += 1
    return found
