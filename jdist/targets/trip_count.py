"""Trip counts of a compiled program's loops, by interpreting their counters.

The GPU and CPU compilers annotate loops with their trip counts. The TPU compiler does
not, and its counters take many forms: copies, pairs of 32-bit halves, limits in the
loop's carry. All of these are integers, so a loop's integer scalars are evaluated here,
iteration by iteration.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from jdist.targets.hlo import Instruction

LONGEST = 2**16
"""Iterations after which a loop counts as one of unknown length: about two seconds."""

Value: TypeAlias = "int | _Tuple | None"
"""An integer, a tuple, or None for what is not known before a run."""

SAME = ("bitcast", "bitcast-convert", "convert", "copy", "reshape")
FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.not_,
    "maximum": max,
    "minimum": min,
    "select": lambda condition, yes, no: yes if condition else no,
    **dict.fromkeys(SAME, operator.index),
}


class _Tuple:
    """A tuple whose elements are evaluated when they are read, and once.

    Most elements of a loop's carry are arrays, on which its condition does not depend.
    """

    def __init__(
        self, operands: Sequence[Instruction], arguments: Sequence[Value]
    ) -> None:
        self._operands, self._arguments = operands, arguments
        self._known: dict[int, Value] = {}

    def element(self, index: int) -> Value:
        if index not in self._known:
            self._known[index] = _value(self._operands[index], self._arguments)
        return self._known[index]


def trip_count(loop: Instruction) -> int | None:
    """The number of iterations of a while loop; None if it depends on data."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known:
        return int(known[1])
    condition, body = loop.called("condition", "body")
    state = _value(loop.operands[0], ())
    for turn in range(LONGEST):
        goes_on = _value(condition.root, (state,))
        if not isinstance(goes_on, int):
            return None
        if not goes_on:
            return turn
        state = _value(body.root, (state,))
    return None


def _value(instruction: Instruction, arguments: Sequence[Value]) -> Value:
    """The value of an instruction: an integer, a tuple of values, None if unknown."""
    opcode = instruction.opcode
    if opcode == "parameter":
        number = int(instruction.literal)
        return arguments[number] if number < len(arguments) else None
    if opcode == "constant":
        return _constant(instruction.literal)
    if opcode == "tuple":
        return _Tuple(instruction.operands, arguments)
    # Tuples are followed to their scalars; other arrays are not evaluated.
    in_tuple = opcode in ("get-tuple-element", "fusion")
    if not in_tuple and any(shape.sizes for shape in instruction.shapes):
        return None
    values = [_value(operand, arguments) for operand in instruction.operands]
    if opcode == "fusion":
        (inner,) = instruction.called("calls")
        return _value(inner.root, values)
    return _combined(instruction, values)


def _combined(instruction: Instruction, values: Sequence[Value]) -> Value:
    if instruction.opcode == "get-tuple-element":
        (whole,) = values
        index = int(instruction.attribute("index"))
        return whole.element(index) if isinstance(whole, _Tuple) else None
    function = _function(instruction)
    numbers = [value for value in values if isinstance(value, int)]
    if function is None or len(numbers) < len(values):
        return None
    return _wrapped(int(function(*numbers)), instruction.shapes[0].dtype)


def _function(instruction: Instruction) -> Callable[..., int] | None:
    """The integer function of an instruction; None if it has none here."""
    opcode = instruction.opcode
    if opcode == "compare":
        # XLA's names of the comparisons are Python's, in capitals.
        compare: Callable[..., int]
        compare = getattr(operator, instruction.attribute("direction").lower())
        return compare
    # On integers `not` flips every bit, which `operator.not_` does not.
    if opcode == "not" and instruction.shapes[0].dtype != "pred":
        return None
    return FUNCTIONS.get(opcode)


def _wrapped(number: int, dtype: str) -> int | None:
    """An integer wrapped to the range of its dtype; None for another kind of dtype."""
    if dtype == "pred":
        return int(bool(number))
    match = re.fullmatch(r"([su])(\d+)", dtype)
    if match is None:
        return None
    bits = int(match[2])
    # Two's complement: a counter in two halves relies on overflow.
    number %= 2**bits
    return number - 2**bits if match[1] == "s" and number >= 2 ** (bits - 1) else number


def _constant(literal: str) -> int | None:
    if literal in ("true", "false"):
        return int(literal == "true")
    # Counters are integers: other constants stay unknown.
    return int(literal) if re.fullmatch(r"-?\d+", literal) else None
