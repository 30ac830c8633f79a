"""Findings of the processes about a leaf, merged into one row."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jdist.verify.processes.shards import Replicas, replicas_differ
from jdist.verify.report import LeafReport, nan_last


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of one process about its shards of a leaf.

    Attributes:
      row: The largest differences, and a description of the worst shard.
      replicas: The digests of shards that other devices hold too.
    """

    row: LeafReport
    replicas: Replicas = field(default_factory=dict)


def record(finding: Finding) -> dict[str, Any]:
    """Converts a finding to values that JSON can hold."""
    return asdict(finding)


def restored(content: Mapping[str, Any]) -> Finding:
    """Inverse of `record`, also after JSON."""
    row = dict(content["row"])
    row["shape"] = tuple(row["shape"])
    return Finding(LeafReport(**row), content["replicas"])


def worst_of(rows: Sequence[LeafReport]) -> LeafReport:
    """Merges the rows of a leaf's parts: largest differences, the worst one's words."""
    # A problem in words, such as a wrong replica, outweighs any ratio.
    worst = max(rows, key=lambda row: (bool(row.problem), nan_last(row.ratio)))
    return replace(
        worst,
        max_abs=max((row.max_abs for row in rows), key=nan_last),
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
    failing = [rank for rank, finding in findings.items() if finding.row.problem]
    problem = row.problem
    if problem and len(failing) < processes:
        problem = f"on process {', '.join(map(str, failing))}: {problem}"
    differ = replicas_differ([finding.replicas for finding in findings.values()])
    return replace(row, problem="; ".join(filter(None, [differ, problem])))
