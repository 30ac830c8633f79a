"""Updates of an asynchronous pipeline that depend on the gradients of all stages.

The norm of an update's gradient is that of all stages, and the gradient of a tied
parameter is a sum over stages. A stage sends its part to the others when it is computed
and continues; it makes the update at the first forward pass that uses its weights.
Where all stages use one version for a micro-batch ("flush", "2bw", "vertical_sync")
every part has been sent before that pass. Where each uses its newest weights, it would
wait for the first stage's backward pass at every update, which is a flush.
"""

from collections.abc import Sequence
from typing import final

from jdist._errors import requirement
from jdist.pipeline.run.stage_channels import (
    MessageTag,
    Places,
    ValueChannels,
    receive,
)
from jdist.pipeline.run.tied import Tied
from jdist.pipeline.run.update import square_of, sum_of_squares
from jdist.pipeline.schedule.update_policy import UpdatePolicy
from jdist.pipeline.stages.stage import Stage
from jdist.pipeline.weight_stashing.stashed_stage import StashedStage


def check_together(
    stages: Sequence[Stage],
    policy: UpdatePolicy,
    max_norm: float | None,
    scaled: bool,
) -> None:
    """Refuses clipping and tied parameters under a policy that rules them out.

    Args:
      stages: The stages.
      policy: The policy of the schedule.
      max_norm: As for `Pipeline`.
      scaled: Whether the loss is scaled.

    Raises:
      ValueError: One of them is refused; the message has the reason.
    """
    tied = [number for number, stage in enumerate(stages) if stage.tied]
    asked: list[tuple[str, str, object]] = []
    if max_norm is not None:
        asked.append(("Pipeline(max_norm=...)", "be None", max_norm))
    if tied:
        first = f"stage {tied[0]} with {dict(stages[tied[0]].tied)}"
        asked.append(("Pipeline(stages)", "not be tied", first))
    for call, without, got in asked:
        if len(stages) > 1 and not policy.one_version:
            rule = f"must {without} with the policy {policy.rule!r}: an update would "
            rule += "wait for the gradients of all stages, which update at different "
            rule += "times"
            remedy = "Use 'flush', '2bw' or 'vertical_sync', or a synchronous schedule."
            raise ValueError(requirement(call, rule, got, remedy))
        if scaled:
            rule = f"must {without} with a loss scale: each stage skips its own "
            rule += "updates, so that what they have in common would part"
            remedy = "Use bfloat16, which needs no scale, or a synchronous schedule, "
            remedy += "whose stages skip together."
            raise ValueError(requirement(call, rule, got, remedy))
    if len(asked) == 2:
        rule = "must be None with tied parameters: the norm would be known one "
        rule += "exchange after the sums"
        remedy = "Use a synchronous schedule, which has both."
        call = "Pipeline(max_norm=...)"
        raise ValueError(requirement(call, rule, max_norm, remedy))


@final
class JointUpdate:
    """The exchange between stages before an update that depends on all of them.

    Args:
      tied: The parameters that stages share.
      max_norm: Bound of the norm over all stages; None for no clipping.
      places: The worker of each stage.
      channels: The channels to other stages.
    """

    def __init__(
        self,
        tied: Tied,
        max_norm: float | None,
        places: Places,
        channels: ValueChannels,
    ) -> None:
        self._tied = tied
        self._max_norm = max_norm
        self._places = places
        self._channels = channels

    def tell(self, worker: int, stage: int, number: int, stashed: StashedStage) -> None:
        """Sends a stage's part of an update to the other stages.

        Args:
          worker: The worker of the stage.
          stage: Number of the stage.
          number: Number of the update.
          stashed: The stage, whose newest held gradient is sent.
        """
        # Sent as soon as it is computed: the other stages need it at a later pass, so
        # that the message overlaps with the passes before that one.
        for name, part in self._tied.parts(
            stage, stashed.run.params, stashed.held[-1]
        ).items():
            tag = MessageTag("T", number, name, stage, worker)
            for other in self._tied.stages(name):
                if other != stage:
                    self._channels.put(tag, self._worker(other), part)
        if self._max_norm is not None:
            tag = MessageTag("N", number, "", stage, worker)
            square = square_of(stashed.held[-1])
            for other in self._others(stage):
                self._channels.put(tag, self._worker(other), square)

    def awaited(self, stage: int, number: int) -> list[MessageTag]:
        """Tags of the messages of other stages that an update needs."""
        found = [
            MessageTag("T", number, name, other, self._worker(other))
            for name in self._tied.names(stage)
            for other in self._tied.stages(name)
            if other != stage
        ]
        if self._max_norm is not None:
            found += [
                MessageTag("N", number, "", other, self._worker(other))
                for other in self._others(stage)
            ]
        return found

    def make(self, worker: int, stage: int, stashed: StashedStage) -> None:
        """Makes the next update of a stage, from the oldest gradient that it holds.

        Args:
          worker: The worker of the stage.
          stage: Number of the stage.
          stashed: The stage.
        """
        # In the order of updates: tags have the number of the update that is next.
        grads, square = stashed.held[0], None
        told = {
            (tag.name, tag.stage): receive(
                self._channels, tag, worker, "an update of all stages"
            )
            for tag in self.awaited(stage, stashed.stash.version)
        }
        if self._max_norm is not None:
            # Added in the order of stages, so that all of them get the same bits and
            # clip by the same factor.
            squares = {j: told["", j] for j in self._others(stage)}
            squares[stage] = square_of(grads)
            square = sum_of_squares([squares[j] for j in sorted(squares)])
        own = self._tied.parts(stage, stashed.run.params, grads)
        parts = {
            name: [
                own[name] if j == stage else told[name, j]
                for j in self._tied.stages(name)
            ]
            for name in own
        }
        grads = self._tied.with_sums(stage, stashed.run.params, grads, parts)
        stashed.update_held(grads, square, self._max_norm)

    def _others(self, stage: int) -> list[int]:
        return [j for j in range(self._places.loss) if j != stage]

    def _worker(self, stage: int) -> int:
        """The worker of a stage."""
        # With several stages, the policies that allow joint updates refuse replicas.
        return self._places.worker(stage, 0)
