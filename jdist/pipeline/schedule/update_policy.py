"""Update policies: when the stages of an asynchronous schedule update.

A policy also says which weights a micro-batch uses. It is a field of a schedule;
`versions` computes versions from it and from the order of the actions.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from jdist._errors import check_choice
from jdist.pipeline.schedule.actions import check_counts

UpdateRule = Literal["stashing", "vertical_sync", "2bw", "flush"]


@dataclass(frozen=True, slots=True)
class UpdatePolicy:
    """When stages update, and which version of the weights a micro-batch uses.

    Attributes:
      rule: The weights that a micro-batch uses. "stashing": at each stage the newest
        ones there (weight stashing). "vertical_sync": at every stage the version that
        was the newest at stage 0 when the micro-batch entered. "2bw": the version
        before the newest one that all stages share, w(t-1) for batch t. "flush": the
        newest ones, which are of one version at all stages because the schedule drains
        before each update.
      every: A worker updates its stage after this many of its backward passes.

    Raises:
      ValueError: `every` is not a positive integer, or `rule` is none of the four.

    Source:
      Narayanan et al., PipeDream, SOSP 2019, 3.3; Memory-Efficient Pipeline-Parallel
      DNN Training, ICML 2021.
    """

    rule: UpdateRule = "stashing"
    every: int = 1

    def __post_init__(self) -> None:
        """Checks the rule and the number."""
        check_counts("UpdatePolicy", every=self.every)
        check_choice("UpdatePolicy(rule=...)", self.rule, get_args(UpdateRule))
