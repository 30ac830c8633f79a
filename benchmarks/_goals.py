"""Figures of a measurement, and what they should be."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A median and the quartiles around it, of seconds or of a ratio of such."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of a job, and what it should be.

    Attributes:
      what: What the figure is: "of torch's time".
      figure: As it was measured.
      limit: What it should not exceed.
      at_least: It should not be less instead.
      unit: Of both, where they are no ratio.
    """

    what: str
    figure: Figure
    limit: float
    at_least: bool = False
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the median is on the right side."""
        found = self.figure.median
        return found >= self.limit if self.at_least else found <= self.limit

    @property
    def wanted(self) -> str:
        """The limit, in words."""
        side = "at least" if self.at_least else "at most"
        return f"{side} {self.limit:g}{self.unit}"

    @property
    def found(self) -> str:
        """The figure with its spread."""
        return f"{shown(self.figure)}{self.unit}"

    def __str__(self) -> str:
        verdict = "" if self.met else ", missed"
        return f"{self.found} {self.what} ({self.wanted}{verdict})"

    def worse_than(self, earlier: "Goal") -> bool:
        """Whether it is, by more than the spread of both."""
        if self.at_least:
            return self.figure.high < earlier.figure.low
        return self.figure.low > earlier.figure.high


def ratio(one: Figure, other: Figure) -> Figure:
    """What the one is of the other, at the medians and at the ends of both spreads."""
    return Figure(one.median / other.median, one.low / other.high, one.high / other.low)


def scaled(figure: Figure, factor: float) -> Figure:
    """The figure in another unit."""
    return Figure(*(factor * value for value in dataclasses.astuple(figure)[:3]))


def shown(figure: Figure) -> str:
    """The median, and the quartiles in brackets."""
    return f"{figure.median:.3g} [{figure.low:.3g}, {figure.high:.3g}]"
