"""Updates of an asynchronous pipeline that stages can only make together.

The norm of an update's gradient is that of all stages, and the gradient of a tied
parameter is a sum over stages. A stage that has its own part tells it to the others and
goes on; the update is made when the first forward pass that uses its weights is due.
Where all stages use one version for a micro-batch ("flush", "2bw", "vertical_sync")
every part is under way by then. Where each uses its newest weights, it would wait for
the first stage's backward pass at every update, which is a flush.
"""

from collections.abc import Sequence

from jdist._errors import requirement
from jdist.pipeline.pipedream.policy import Policy
from jdist.pipeline.pipedream.stashed_run import StashedRun
from jdist.pipeline.run.places import Places
from jdist.pipeline.run.stage_channels import MessageTag, StageChannels, receive
from jdist.pipeline.run.update import square_of, sum_of_squares
from jdist.pipeline.stages.stage import Stage
from jdist.pipeline.stages.tied import Tied

SAME_VERSION: tuple[Policy, ...] = ("flush", "2bw", "vertical_sync")
"""Policies under which a micro-batch meets one version at all stages."""


def check_together(
    stages: Sequence[Stage], policy: str, max_norm: float | None, scaled: bool
) -> None:
    """Refuses what stages would have to do together, and cannot under a policy.

    Args:
      stages: The stages.
      policy: See `PipeDream`.
      max_norm: See there.
      scaled: Whether the loss is.

    Raises:
      ValueError: Something is refused; the message says why.
    """
    tied = [number for number, stage in enumerate(stages) if stage.tied]
    asked: list[tuple[str, str, object]] = []
    if max_norm is not None:
        asked.append(("PipeDream(max_norm=...)", "be None", max_norm))
    if tied:
        first = f"stage {tied[0]} with {dict(stages[tied[0]].tied)}"
        asked.append(("PipeDream(stages)", "not be tied", first))
    for call, without, got in asked:
        if len(stages) > 1 and policy not in SAME_VERSION:
            rule = f"must {without} with the policy {policy!r}: an update would wait "
            rule += "for the gradients of all stages, which update at different times"
            shown = ", ".join(map(repr, SAME_VERSION))
            remedy = f"Use one of the policies {shown}, or Pipeline."
            raise ValueError(requirement(call, rule, got, remedy))
        if scaled:
            rule = f"must {without} with a loss scale: each stage skips its own "
            rule += "updates, so that what they have in common would part"
            remedy = "Use bfloat16, which needs no scale, or Pipeline, whose stages "
            remedy += "skip together."
            raise ValueError(requirement(call, rule, got, remedy))
    if len(asked) == 2:
        rule = "must be None with tied parameters: the norm would be known one "
        rule += "exchange after the sums"
        remedy = "Use Pipeline, which has both."
        call = "PipeDream(max_norm=...)"
        raise ValueError(requirement(call, rule, max_norm, remedy))


class JointUpdate:
    """What stages tell each other of their gradients before an update.

    Args:
      tied: The parameters that stages share.
      max_norm: To which the gradient of all stages is clipped; None: it is not.
      places: Who runs what.
      channels: Brings the parts to the other stages.
    """

    def __init__(
        self,
        tied: Tied,
        max_norm: float | None,
        places: Places,
        channels: StageChannels,
    ) -> None:
        self._tied = tied
        self._max_norm = max_norm
        self._places = places
        self._channels = channels

    def tell(self, worker: int, stage: int, number: int, run: StashedRun) -> None:
        """Tells the others a stage's part of an update, which it has just got.

        Args:
          worker: Of the stage.
          stage: Its number.
          number: Of the update.
          run: The stage; the gradient is the one that it holds last.
        """
        for name, part in self._tied.parts(stage, run.params, run.held[-1]).items():
            tag = MessageTag("T", number, name, stage, worker)
            for other in self._tied.stages(name):
                if other != stage:
                    self._channels.put(tag, self._worker(other), part)
        if self._max_norm is not None:
            tag = MessageTag("N", number, "", stage, worker)
            square = square_of(run.held[-1])
            for other in self._others(stage):
                self._channels.put(tag, self._worker(other), square)

    def awaited(self, stage: int, number: int) -> list[MessageTag]:
        """What a stage needs of the others for an update."""
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

    def make(self, worker: int, stage: int, run: StashedRun) -> None:
        """Makes the next update of a stage, of the gradient that it holds longest.

        Args:
          worker: Of the stage.
          stage: Its number.
          run: The stage.
        """
        grads, square = run.held[0], None
        told = {
            (tag.name, tag.stage): receive(
                self._channels, tag, worker, "an update of all stages"
            )
            for tag in self.awaited(stage, run.stash.version)
        }
        if self._max_norm is not None:
            squares = {j: told["", j] for j in self._others(stage)}
            squares[stage] = square_of(grads)
            square = sum_of_squares([squares[j] for j in sorted(squares)])
        own = self._tied.parts(stage, run.params, grads)
        parts = {
            name: [
                own[name] if j == stage else told[name, j]
                for j in self._tied.stages(name)
            ]
            for name in own
        }
        grads = self._tied.with_sums(stage, run.params, grads, parts)
        run.update_held(grads, square, self._max_norm)

    def _others(self, stage: int) -> list[int]:
        return [j for j in range(self._places.loss) if j != stage]

    def _worker(self, stage: int) -> int:
        """The worker of a stage, which has one where there are several stages."""
        return self._places.worker(stage, 0)
