"""What a compiled program sends: its collectives, read from its text.

Bytes are those that each of K replicas sends with the usual algorithms: a ring for an
all-reduce of n bytes, 2 (K - 1) / K n; for an all-gather (K - 1) times its own part.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

KIND = re.compile(r" = (.+?) (all-reduce|all-gather|collective-permute)(?:-start)?\(")
SHAPE = re.compile(r"\b([a-z]+)(\d+)\w*\[([\d,]*)\]")


class Collective(NamedTuple):
    """A collective: its kind and the bytes of its result."""

    kind: str
    result: int

    def sent(self, replicas: int) -> float:
        """Bytes that each of `replicas` replicas sends."""
        if self.kind == "all-reduce":
            return 2 * (replicas - 1) / replicas * self.result
        if self.kind == "all-gather":
            return (replicas - 1) / replicas * self.result
        return self.result


def collectives(text: str) -> Sequence[Collective]:
    """The collectives in the text of a compiled program, in order."""
    found = []
    for line in text.splitlines():
        match = KIND.search(line)
        if match:
            result, kind = match.groups()
            found.append(Collective(kind, sum(map(_bytes, SHAPE.findall(result)))))
    return found


def _bytes(shape: tuple[str, str, str]) -> int:
    _, bits, dimensions = shape
    size = 1
    for dimension in filter(None, dimensions.split(",")):
        size *= int(dimension)
    return size * int(bits) // 8
