"""The lowered programs of a pipeline by name, also for devices not attached."""

from functools import partial
from typing import Any, final

import jax

from jdist._compat import Ahead
from jdist._tree import PyTree
from jdist.segment.internal import Invoke

_OF_SEGMENTS = {
    "first": "backward, inputs",
    "second": "backward, parameters",
}
_OTHERS = {
    "_finished": "gradient",
    "_plus": "cotangent",
    "_sum": "tied gradients",
    "_update": "update",
    "updated": "update",
    "both": "forward and backward",
    "join": "loss",
    "joined": "norm",
    "nothing_yet": "zeros",
    "on_device": "gradient",
    "square_of": "norm",
}
"""The purposes of compiled functions, by name."""


@final
class LoweredPrograms:
    """Collects the programs that a rehearsal calls, in the order of their first calls.

    Programs of one name and equal shapes are one program.

    Args:
      places: See `Ahead`.
    """

    def __init__(self, *, places: bool = True) -> None:
        self._ahead = Ahead(places=places, called=False)
        self._found: dict[str, jax.stages.Traced] = {}
        self._known: dict[Any, str] = {}

    def named(self, label: str) -> Invoke:
        """Returns a function that traces calls and collects them under a label."""
        return partial(self._call, label)

    def lowered(self) -> dict[str, jax.stages.Lowered]:
        """The programs by label and function; repeated names get a number."""
        return {name: traced.lower() for name, traced in self._found.items()}

    def _call(self, label: str, function: Any, *arguments: PyTree) -> PyTree:
        found = self._ahead(function, *arguments)
        traced = self._ahead.traced[-1]
        name = f"{label}: {_part(function.__name__)}"
        # By shapes: workers that share a stage call one program each, in their turn.
        kinds = [str(x) for x in jax.tree.leaves(traced.in_avals)]
        case = name, tuple(kinds)
        if case not in self._known:
            again = sum(known == name for known, _ in self._known)
            self._known[case] = name if not again else f"{name} ({again + 1})"
            self._found[self._known[case]] = traced
        return found


def _part(name: str) -> str:
    # A segment's programs are named after the stage's function, which is `body`.
    half = name.removeprefix("body_")
    if half != name:
        return _OF_SEGMENTS.get(half, half)
    return _OTHERS.get(name, name.strip("_"))
