"""What an experiment returns: claims, each with what was measured, and the evidence."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line chooses.

    Attributes:
      quick: A shorter form that still tests every claim.
      devices: How many devices to use at most.
      seed: Of everything random.
    """

    quick: bool = False
    devices: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence, whether it holds, and the measurement that decides."""

    text: str
    holds: bool
    measured: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure with the sentence that says what to see in it."""

    name: str
    caption: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of an experiment.

    Attributes:
      proved: One line that says what was proved, for the end of the run.
      claims: What is asserted.
      pictures: Plots.
      tables: Title to rows; the first row is the header.
      data: Every number behind it, as JSON can hold it.
      notes: What was skipped, and what a reader must know.
      files: By name, what writes a file of evidence to a path.
    """

    proved: str
    claims: Sequence[Claim]
    pictures: Sequence[Picture] = ()
    tables: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    files: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether every claim holds; an experiment without claims proves nothing."""
        return bool(self.claims) and all(claim.holds for claim in self.claims)
