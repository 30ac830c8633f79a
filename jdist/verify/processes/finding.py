"""Findings of the processes about a leaf, merged into one row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jdist.verify.processes.shards import Replicas, replicas_differ
from jdist.verify.report import LeafReport, nan_last


class Products(NamedTuple):
    """Sums from which the angle between two leaves follows, over any of their parts.

    Attributes:
      both: Real part of the inner product of the reference with the candidate.
      reference: Inner product of the reference with itself.
      candidate: Inner product of the candidate with itself.
    """

    both: float = 0.0
    reference: float = 0.0
    candidate: float = 0.0

    @property
    def cosine(self) -> float:
        """Cosine of the angle; 1 if both are 0, NaN if a number is not finite."""
        if self.reference == 0 or self.candidate == 0:
            return 1.0 if self.reference == self.candidate else 0.0
        # Divided in turn: the product of both norms may overflow or underflow.
        return min(1.0, self.both / self.reference**0.5 / self.candidate**0.5)


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of one process about its shards of a leaf.

    Attributes:
      row: The largest differences, and a description of the worst shard.
      products: Sums over the shards that are the first of their replicas.
      replicas: The digests of shards that other devices hold too.
    """

    row: LeafReport
    products: Products = field(default_factory=Products)
    replicas: Replicas = field(default_factory=dict)


def restored(content: Mapping[str, Any]) -> Finding:
    """Inverse of `asdict`, also after JSON."""
    row = dict(content["row"])
    row["shape"] = tuple(row["shape"])
    products = Products(*content["products"])
    return Finding(LeafReport(**row), products, content["replicas"])


def worst_of(rows: Sequence[LeafReport]) -> LeafReport:
    """Merges the rows of a leaf's parts: largest differences, the worst one's words."""
    # A problem in words, such as a wrong replica, outweighs any ratio.
    worst = max(rows, key=lambda row: (bool(row.problem), nan_last(row.ratio)))
    return replace(
        worst,
        max_abs=max((row.max_abs for row in rows), key=nan_last),
        max_rel=max((row.max_rel for row in rows), key=nan_last),
        max_ulp=max((row.max_ulp for row in rows), key=nan_last),
        unjudged=next((row.unjudged for row in rows if row.unjudged), ""),
    )


def merged(findings: Mapping[int, Finding], processes: int) -> LeafReport:
    """Merges the findings of all processes into one row, the same on each of them.

    Args:
      findings: By the process that made them.
      processes: How many there are.
    """
    row = worst_of([finding.row for finding in findings.values()])
    products = [finding.products for finding in findings.values()]
    cosine = Products(*map(sum, zip(*products, strict=True))).cosine
    failing = [rank for rank, finding in findings.items() if finding.row.problem]
    problem = row.problem
    if problem and len(failing) < processes:
        problem = f"on process {', '.join(map(str, failing))}: {problem}"
    differ = replicas_differ([finding.replicas for finding in findings.values()])
    problem = "; ".join(filter(None, [differ, problem]))
    # A row without numbers, such as one of a missing leaf, has no angle either.
    known = row.cosine == row.cosine
    return replace(row, problem=problem, cosine=cosine if known else row.cosine)
