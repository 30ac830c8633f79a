"""Parses XLA's text of a scheduled program: computations, instructions, shapes.

The parser relies only on the form `%name = type opcode(operands), attributes`, which is
the same on all platforms and has been stable for years. Attributes are interpreted by
the modules that use them.
"""

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from jdist._errors import value_error

SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
NAME = re.compile(r"%([\w.\-]+)")
HEADER = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\) -> .* \{$")


class ArrayShape(NamedTuple):
    """The type of one array in XLA's notation: `bf16[128,256]{1,0:T(8,128)S(1)}`."""

    dtype: str
    """XLA's short name, such as "bf16"."""

    sizes: tuple[int, ...]

    space: int
    """Memory space: 0 is device memory; others are on-chip memory or the host's."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        """Bytes without padding; 0 for tokens."""
        # Bits, because int4 takes less than a byte per element.
        return self.elements * _bits(self.dtype) // 8


# Without slots, because `cached_property` needs an instance dictionary.
@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation.

    Attributes:
      module: The program.
      name: Name, unique in the program.
      opcode: Opcode, such as "fusion" or "all-reduce-start".
      type: Type of the result, as text.
      operands: Instructions of the same computation, before this one.
      literal: The text between the parentheses: operands, a number or a constant.
      attributes: The text after the parentheses.
      is_root: Whether it yields the result of its computation.
      users: The instructions that read its result, once each.
    """

    module: "HloModule" = field(repr=False)
    name: str
    opcode: str
    type: str
    operands: tuple["Instruction", ...]
    literal: str
    attributes: str
    is_root: bool
    users: list["Instruction"] = field(default_factory=list, repr=False)

    @cached_property
    def shapes(self) -> tuple[ArrayShape, ...]:
        """The arrays of the result, those of a tuple in order."""
        return shapes_of(self.type)

    def attribute(self, name: str) -> str:
        """The text of `name=...` up to the next comma outside braces; "" without."""
        match = re.search(rf"(?:^|, ){name}=", self.attributes)
        return _until_comma(self.attributes[match.end() :]) if match else ""

    def called(self, *attributes: str) -> list["Computation"]:
        """The computations that it calls by these attributes."""
        names = [x for each in attributes for x in NAME.findall(self.attribute(each))]
        return [self.module.computations[name] for name in names]

    @property
    def op_name(self) -> str:
        """The place in the traced function, such as "jit(step)/mul"; "" if unknown."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1].replace("\\'", "'") if match else ""

    @property
    def target(self) -> str:
        """The function that a custom call calls; "" for other instructions."""
        return self.attribute("custom_call_target").strip('"')


@dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def root(self) -> Instruction:
        """Its result."""
        return next(each for each in self.instructions if each.is_root)

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Its parameters, by number."""
        found = [each for each in self.instructions if each.opcode == "parameter"]
        return tuple(sorted(found, key=lambda each: int(each.literal)))


@dataclass(eq=False)
class HloModule:
    """A program for one device of its mesh.

    Attributes:
      header: The first line: aliases, number of partitions.
      computations: The computations by name.
      entry: The entry computation, which is the program.
    """

    header: str
    computations: dict[str, Computation] = field(default_factory=dict)
    entry: Computation = field(init=False)

    @property
    def partitions(self) -> int:
        """Number of devices that run it together."""
        match = re.search(r"num_partitions=(\d+)", self.header)
        return int(match[1]) if match else 1

    @property
    def aliased_parameters(self) -> tuple[int, ...]:
        """Numbers of parameters whose memory a result reuses."""
        found = re.findall(r": \((\d+), ", self._attribute("input_output_alias"))
        return tuple(sorted(set(map(int, found))))

    @property
    def donated_in_vain(self) -> tuple[int, ...]:
        """Numbers of donated parameters whose memory no result reuses."""
        found = re.findall(r"\((\d+), ", self._attribute("buffer_donor"))
        return tuple(sorted({*map(int, found)} - {*self.aliased_parameters}))

    def _attribute(self, name: str) -> str:
        match = re.search(rf", {name}=", self.header)
        return _until_comma(self.header[match.end() :]) if match else ""


def parse(text: str) -> HloModule:
    """Parses the result of `Compiled.as_text()`.

    Args:
      text: The whole text, from `HloModule` on.

    Raises:
      ValueError: It is no such text; the message has the line.
    """
    module = HloModule(text.partition("\n")[0])
    entry = name = ""
    known: dict[str, Instruction] = {}
    for line in text.splitlines()[1:]:
        if match := HEADER.match(line):
            name, known = match[2], {}
            entry = name if match[1] else entry
        # Only the end of a computation is a brace in the first column.
        elif line == "}" and name:
            module.computations[name] = Computation(name, tuple(known.values()))
            name = ""
        elif name and line.strip():
            made = _instruction(line.strip(), module, known)
            known[made.name] = made
    if not module.header.startswith("HloModule") or entry not in module.computations:
        rule = "must be an HLO module with an entry"
        raise value_error("parse(text=...)", rule, module.header[:80])
    module.entry = module.computations[entry]
    return module


def shapes_of(text: str) -> tuple[ArrayShape, ...]:
    """The arrays that a type's text names."""
    found = []
    for dtype, sizes, layout in SHAPE.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        numbers = tuple(int(x.removeprefix("<=")) for x in sizes.split(",") if x)
        found.append(ArrayShape(dtype, numbers, int(space[1]) if space else 0))
    return tuple(found)


def _instruction(
    line: str, module: HloModule, known: dict[str, Instruction]
) -> Instruction:
    """Parses a line; `known` has the instructions before it in its computation."""
    is_root = line.startswith("ROOT ")
    name, equals, rest = line.removeprefix("ROOT ").partition(" = ")
    # A tuple type is in parentheses and contains spaces; an array type does not.
    length = _closing(rest) + 1 if rest.startswith("(") else rest.find(" ")
    opening = rest.find("(", length)
    if not equals or length <= 0 or opening < 0:
        rule = "must be `%name = type opcode(operands)`"
        raise value_error("parse(text=...)", rule, line[:120])
    closing = opening + _closing(rest[opening:])
    literal = rest[opening + 1 : closing]
    made = Instruction(
        module,
        name.lstrip("%"),
        rest[length:opening].strip(),
        rest[:length],
        tuple(known[operand] for operand in NAME.findall(literal)),
        literal,
        rest[closing + 1 :].removeprefix(", "),
        is_root,
    )
    # Once, also where it reads an operand twice.
    for operand in dict.fromkeys(made.operands):
        operand.users.append(made)
    return made


def _closing(text: str) -> int:
    """Index of the parenthesis that closes the first one; the last index if none."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text) - 1


def _until_comma(text: str) -> str:
    depth, quoted = 0, False
    for index, character in enumerate(text):
        # Commas in quotes and in brackets belong to the value.
        quoted ^= character == '"'
        if quoted:
            continue
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            return text[:index]
    return text


def _bits(dtype: str) -> int:
    # XLA stores a boolean in one byte.
    if dtype == "pred":
        return 8
    digits = re.match(r"[a-z]+(\d+)", dtype)
    # A token has no digits in its name, and no size.
    return int(digits[1]) if digits else 0
