"""A model's profile: the costs of each layer, and the edges between layers.

The text form is PipeDream's, so that published profiles can be read and profiles
written here can be planned there:

    node1 -- Linear(10, 10) -- forward_compute_time=0.021, backward_compute_time=0.043,
        activation_size=800.0, parameter_size=440.000          (on one line)
    \tnode1 -- node2

Times are milliseconds, sizes bytes.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from numbers import Real
from pathlib import Path

from jdist._errors import check_sequence, check_type, type_error, value_error

_COSTS = (
    "forward_compute_time",
    "backward_compute_time",
    "activation_size",
    "parameter_size",
)
_LAYER = re.compile(
    r"(?P<name>\S+) -- (?P<description>.*) -- "
    + ", ".join(rf"{cost}=(?P<{cost}>[^,]+?)" for cost in _COSTS)
    + r"(?: -- stage_id=\d+)?"
)
_PAIR = 2
_EDGE = re.compile(r"\t\s*(\S+) -- (\S+)")


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and its costs for one micro-batch.

    Attributes:
      name: Unique within the profile.
      description: Free text; "Input..." marks an input, which costs nothing.
      forward: Seconds.
      backward: Seconds.
      activation_bytes: Sizes of its outputs, one number each.
      parameter_bytes: Size of its parameters.
    """

    name: str
    description: str
    forward: float
    backward: float
    activation_bytes: tuple[float, ...]
    parameter_bytes: float

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward + self.backward

    @property
    def output_bytes(self) -> float:
        """Size of all outputs together."""
        return sum(self.activation_bytes)


@dataclass(frozen=True)
class Profile:
    """Layers and the edges between them.

    Attributes:
      layers: In any order.
      edges: Pairs of names; the second layer reads an output of the first.

    Raises:
      TypeError: Something is no layer, no pair of names or no number.
      ValueError: A name occurs twice or has blanks, an edge names no layer, layers feed
        each other in a circle, or a cost is negative, infinite or NaN.

    Example:
      >>> first = Layer("a", "Linear(10, 10)", 1e-3, 2e-3, (800.0,), 440.0)
      >>> second = Layer("b", "ReLU()", 1e-4, 1e-4, (800.0,), 0.0)
      >>> profile = Profile((first, second), (("a", "b"),))
      >>> print(profile.to_text(), end="")
      a -- Linear(10, 10) -- forward_compute_time=1.000, backward_compute_time=2.000,
          activation_size=800.0, parameter_size=440.000
      b -- ReLU() -- forward_compute_time=0.100, backward_compute_time=0.100,
          activation_size=800.0, parameter_size=0.000
      <BLANKLINE>
          a -- b
    """

    layers: tuple[Layer, ...]
    edges: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        """Checks names and costs."""
        # All checks here, so that a profile that exists can be planned and written.
        rule = "must be a sequence of Layer"
        check_sequence("Profile(layers=...)", self.layers, Layer, rule)
        names = [layer.name for layer in self.layers]
        rule = "must have strings as names"
        check_sequence("Profile(layers=...)", names, str, rule)
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            rule = "must have different names"
            raise value_error("Profile(layers=...)", rule, repeated)
        for layer in self.layers:
            rule = "must have finite costs of at least 0"
            sizes: object = layer.activation_bytes
            fine = isinstance(sizes, Sequence) and not isinstance(sizes, str | bytes)
            given = [layer.forward, layer.backward, layer.parameter_bytes]
            for value in (*given, *(layer.activation_bytes if fine else (None,))):
                # Otherwise a sum of costs fails, which names no layer.
                if isinstance(value, bool) or not isinstance(value, Real):
                    raise type_error("Profile(layers=...)", rule, repr(layer))
            costs = (layer.seconds, layer.output_bytes)
            values = (*given, *layer.activation_bytes, *costs)
            # False for NaN as well. Spans are differences of totals, and inf - inf is
            # NaN.
            if not all(0 <= value < math.inf for value in values):
                raise value_error("Profile(layers=...)", rule, layer)
        known = set(names)
        # The text form separates names by blanks.
        spaced = [name for name in names if not re.fullmatch(r"\S+", name)]
        if spaced:
            rule = "must have names without blanks"
            raise value_error("Profile(layers=...)", rule, spaced)
        rule = "must be pairs of names"
        check_sequence("Profile(edges=...)", self.edges, Sequence, rule)
        for edge in self.edges:
            check_sequence("Profile(edges=...)", edge, str, rule)
            if len(edge) != _PAIR or not known >= set(edge):
                rule = "must join two of its layers"
                raise value_error("Profile(edges=...)", rule, edge)
        try:
            # Sorting is the check for circles.
            _ = self.order
        except CycleError as error:
            rule = "must not lead in a circle"
            circle = " -> ".join(error.args[1])
            raise value_error("Profile(edges=...)", rule, circle) from None

    @classmethod
    def chain(cls, layers: Sequence[Layer]) -> "Profile":
        """A profile in which each layer reads the output of the one before."""
        rule = "must be a sequence of Layer"
        check_sequence("Profile.chain(layers)", layers, Layer, rule)
        names = [layer.name for layer in layers]
        return cls(tuple(layers), tuple(pairwise(names)))

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Names in topological order; the order of `layers` decides ties."""
        # In the order of `layers`, which the sorter keeps where edges leave a choice.
        before: dict[str, list[str]] = {layer.name: [] for layer in self.layers}
        for source, target in self.edges:
            before[target].append(source)
        return tuple(TopologicalSorter(before).static_order())

    def __getitem__(self, name: str) -> Layer:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    def to_text(self) -> str:
        """The profile in PipeDream's format, with times rounded to a microsecond."""
        return "".join([*map(_line, self.layers), *map(_edge, self.edges)])

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the text to a file."""
        Path(path).write_text(self.to_text())


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Reads a profile in PipeDream's format.

    Raises:
      TypeError: `path` is no path.
      ValueError: A line is neither a layer nor an edge, with its number; or `Profile`
        refuses the profile.
    """
    check_type("load_profile(path)", path, (str, os.PathLike), "must be a path")
    layers: list[Layer] = []
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        edge = _EDGE.fullmatch(line)
        layer = None if edge else _LAYER.fullmatch(line)
        if edge:
            edges.append((edge[1], edge[2]))
        elif layer:
            layers.append(_layer(layer, number))
        # Blank lines are allowed anywhere.
        elif line.strip():
            rule = f"must have a layer or an edge in line {number}"
            raise value_error("load_profile(path=...)", rule, line)
    return Profile(tuple(layers), tuple(edges))


def _layer(found: re.Match[str], number: int) -> Layer:
    try:
        forward, backward, parameters = (float(found[_COSTS[i]]) for i in (0, 1, 3))
        # A single number, or "[a; b]" of several outputs.
        outputs = found["activation_size"].strip("[]").split("; ")
        activations = tuple(float(size) for size in outputs)
    except ValueError as error:
        rule = f"must have numbers in line {number}"
        raise value_error("load_profile(path=...)", rule, str(error)) from None
    return Layer(
        found["name"],
        found["description"],
        # The file has milliseconds.
        forward / 1e3,
        backward / 1e3,
        activations,
        parameters,
    )


def _line(layer: Layer) -> str:
    sizes = "; ".join(f"{size:.1f}" for size in layer.activation_bytes)
    # PipeDream writes a list only where there are several outputs.
    if len(layer.activation_bytes) != 1:
        sizes = f"[{sizes}]"
    # A line break would end the entry.
    description = layer.description.replace("\n", "")
    costs = (
        f"forward_compute_time={layer.forward * 1e3:.3f}, "
        f"backward_compute_time={layer.backward * 1e3:.3f}, "
        f"activation_size={sizes}, parameter_size={layer.parameter_bytes:.3f}"
    )
    return f"{layer.name} -- {description} -- {costs}\n"


def _edge(edge: tuple[str, str]) -> str:
    return f"\t{edge[0]} -- {edge[1]}\n"
