"""A step whose micro-batches have losses of their own; and evaluation, which is one."""

from typing import Any

import numpy as np

from jdist.pipeline.post import Parcel
from jdist.pipeline.schedule_actions import Action
from jdist.pipeline.step import Step
from jdist.reduction import Partial


class SeparateLosses(Step):
    """A step that keeps the losses of each micro-batch apart; arguments as `Step`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._found: dict[int, dict[int, Partial]] = {}

    def separate(self, worker: int) -> tuple[np.ndarray, np.ndarray]:
        """The weighted sum of each micro-batch's losses, and the sum of its weights.

        Args:
          worker: One of this process. Every process asks, and gets all of them.
        """
        schedule = self._places.schedule
        for sender, found in self._found.items():
            order = sorted(found)
            told = tuple(
                np.stack([np.asarray(getattr(found[i], field)) for i in order])
                for field in ("value", "weight")
            )
            for other in range(schedule.workers):
                self._post.put(self._losses_of(sender), other, told)
        senders = schedule.placement[-1]
        # With fewer micro-batches than workers some had none.
        parts = [
            self._last(worker, self._losses_of(sender))
            for sender in senders[: schedule.micro_batches]
        ]
        values, weights = (
            np.empty(schedule.micro_batches, np.asarray(x).dtype) for x in parts[0]
        )
        for turn, part in enumerate(parts):
            values[turn :: len(senders)], weights[turn :: len(senders)] = part
        return values, weights

    def _losses_of(self, sender: int) -> Parcel:
        return Parcel("L", -1, "", self._places.loss, sender)

    def _add_loss(self, worker: int, micro: int, found: Partial) -> None:
        self._found.setdefault(worker, {})[micro] = found


class Evaluation(SeparateLosses):
    """Forward passes alone; arguments as `Step`."""

    def _do(self, worker: int, action: Action) -> None:
        super()._do(worker, action)
        self._runs[worker, action.stage].forget(action.micro_batch)

    def _differentiate_loss(self, worker: int, micro: int) -> None:
        """The losses alone."""
        part = self._parts[micro]
        values, entries = self._taken_by_loss(worker, micro)
        passes = self._loss.passes(part.batch, self._read)
        self._add_loss(worker, micro, passes.losses(values, entries, part.weights))
