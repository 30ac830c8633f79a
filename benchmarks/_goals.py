"""Figures of a measurement, and what they should be."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A median and its quartiles, of seconds or of a ratio of seconds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of a job and the limit that it should meet.

    Attributes:
      what: What the figure measures, as in "of torch's time".
      figure: The measured figure.
      limit: The value that it should not exceed.
      at_least: Whether the limit is a minimum instead.
      unit: The unit of both; empty for a ratio.
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
        """The limit in words."""
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
        """Whether the figure is worse by more than the spread of both."""
        if self.at_least:
            return self.figure.high < earlier.figure.low
        return self.figure.low > earlier.figure.high


def ratio(one: Figure, other: Figure) -> Figure:
    """`one / other`, at the medians and at the opposite ends of both spreads."""
    return Figure(one.median / other.median, one.low / other.high, one.high / other.low)


def scaled(figure: Figure, factor: float) -> Figure:
    """The figure multiplied by `factor`, to convert its unit."""
    return Figure(*(factor * value for value in dataclasses.astuple(figure)[:3]))


def shown(figure: Figure) -> str:
    """The median, and the quartiles in brackets, as text."""
    return f"{figure.median:.3g} [{figure.low:.3g}, {figure.high:.3g}]"
