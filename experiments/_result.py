"""What an experiment returns: claims, each with what was measured, and the evidence.

An experiment asks a question and judges claims. Every statement on the outcome, on the
terminal, in the JSON and on the page, is made here from claims and their verdicts: no
other place writes a sentence about a result. Everything else (captions, notes, titles)
says what is shown and how it was found, and not what came out.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

Verdict = Literal["holds", "does not hold", "not judged"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of the command line.

    Attributes:
      quick: Whether to run a shorter form, which names the claims it cannot judge.
      devices: The largest number of devices to use.
      seed: Seed of all random numbers.
      here: Whether to run on this machine's devices, for an experiment on others.
      out: The folder of results, for an experiment that goes on where it was.
    """

    quick: bool = False
    devices: int = 8
    seed: int = 0
    here: bool = False
    out: str = "results"


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence, and whether the measurement supports it.

    Attributes:
      text: The sentence, worded as if it holds.
      holds: Whether it holds; None if it was not judged.
      measured: The measurement that decides.
      why_not: The reason why it was not judged; empty if it was.
      leads: Whether the line at the end of a run repeats it.

    Raises:
      ValueError: It is not judged and has no reason, or the other way round.
    """

    text: str
    holds: bool | None
    measured: str
    why_not: str = ""
    leads: bool = False

    def __post_init__(self) -> None:
        """Checks that the claim is judged or has a reason why it is not."""
        if (self.holds is None) != bool(self.why_not):
            raise ValueError(f"not judged and no reason, or both: {self.text!r}")

    @property
    def verdict(self) -> Verdict:
        """The verdict in words."""
        if self.holds is None:
            return "not judged"
        return "holds" if self.holds else "does not hold"

    @property
    def sentence(self) -> str:
        """The claim with its measurement, or with the reason why there is none."""
        shown = self.measured if self.holds is not None else self.why_not
        return f"{self.text} ({shown})" if shown else self.text

    def unless(self, why_not: str) -> "Claim":
        """This claim, or an unjudged one if there is a reason.

        Args:
          why_not: The reason; empty for none.
        """
        return replace(self, holds=None, why_not=why_not) if why_not else self


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure, with a caption that says what is drawn."""

    name: str
    caption: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of an experiment.

    Attributes:
      claims: The claims.
      pictures: Plots.
      tables: Title to rows; the first row is the header.
      data: All underlying numbers, as JSON values.
      notes: How things were measured, and what was left out.
      files: For each evidence file a function that writes it to a path.
    """

    claims: Sequence[Claim]
    pictures: Sequence[Picture] = ()
    tables: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    files: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)

    def having(self, verdict: Verdict) -> list[Claim]:
        """The claims with that verdict."""
        return [claim for claim in self.claims if claim.verdict == verdict]

    @property
    def holds(self) -> bool:
        """Whether at least one claim was judged, and all of those hold."""
        return bool(self.having("holds")) and not self.having("does not hold")

    @property
    def word(self) -> Literal["Proved", "Proved in part", "FAILED"]:
        """The outcome in short: in part, if a claim was not judged."""
        if not self.holds:
            return "FAILED"
        return "Proved in part" if self.having("not judged") else "Proved"

    @property
    def outcome(self) -> str:
        """The line at the end of a run, composed of the claims alone."""
        held, failed = self.having("holds"), self.having("does not hold")
        left = self.having("not judged")
        shown = failed or [claim for claim in held if claim.leads]
        told = "; ".join(claim.sentence for claim in shown)
        # Of all claims: a share of those that were judged would hide the others.
        count = f"{len(held)} of {len(self.claims)} claims hold"
        count += f", {len(left)} were not judged" if left else ""
        if failed:
            parts = [f"{count}. Does not hold: {told}."]
        else:
            parts = [f"{count}: {told}." if told else f"{count}."]
        reasons: dict[str, list[str]] = {}
        for claim in left:
            found = f" ({claim.measured})" if claim.measured else ""
            reasons.setdefault(claim.why_not, []).append(f"{claim.text}{found}")
        for why, texts in reasons.items():
            parts.append(f"Not judged, because {why}: {'; '.join(texts)}.")
        return " ".join(parts)


def write_whole(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a record as JSON; what interrupts it leaves no half of a file."""
    write_file(path, json.dumps(record, indent=1, allow_nan=False).encode())


def write_file(path: Path, content: bytes) -> None:
    """Writes a file; what interrupts it leaves no half of one."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(content)
    unfinished.replace(path)
