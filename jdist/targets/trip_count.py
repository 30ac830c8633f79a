"""Trip counts of a compiled program's loops, by interpreting their counters.

The GPU and CPU compilers annotate loops with their trip counts. The TPU compiler does
not, and its counters take many forms: copies, pairs of 32-bit halves, limits in the
loop's carry. All of these are integers, so a loop's integer scalars are evaluated here,
iteration by iteration.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence

from jdist.targets.hlo import Computation, HloModule, Instruction

LONGEST = 2**16
"""Iterations after which a loop counts as one of unknown length: about two seconds."""

Value = int | Mapping[int, "Value"] | None
"""An integer, the elements of a tuple, or None for what is not known before a run."""

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


def trip_count(
    loop: Instruction, computation: Computation, module: HloModule
) -> int | None:
    """The number of iterations of a while loop.

    Args:
      loop: The loop.
      computation: The computation that contains it.
      module: The module, with its condition and body.

    Returns:
      The number, or None if it depends on the program's data.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known:
        return int(known[1])
    condition = module.computations[loop.called("condition")[0]]
    body = module.computations[loop.called("body")[0]]
    state = _value(loop.operands[0], computation, (), module)
    if not isinstance(state, Mapping):
        return None
    needed = _needed(condition, body)
    # The condition does not depend on the other elements, most of which are arrays.
    state = {index: state.get(index) for index in needed}
    for turn in range(LONGEST):
        goes_on = _value(condition.root.name, condition, (state,), module)
        if not isinstance(goes_on, int):
            return None
        if not goes_on:
            return turn
        following = {
            index: _value(body.root.operands[index], body, (state,), module)
            for index in needed
        }
        # A fixed point of all that the condition reads: the loop would never end.
        if following == state:
            return None
        state = following
    return None


def _needed(condition: Computation, body: Computation) -> tuple[int, ...]:
    """Elements of a loop's carry that its condition depends on, in any iteration."""
    found = _elements(condition.root, condition)
    if body.root.opcode != "tuple":
        return ()
    todo = list(found)
    while todo:
        name = body.root.operands[todo.pop()]
        new = _elements(body.by_name[name], body) - found
        found |= new
        todo += new
    return tuple(sorted(found))


def _elements(wanted: Instruction, computation: Computation) -> set[int]:
    """Elements of a computation's only parameter that an instruction depends on."""
    seen, found, todo = {wanted.name}, set(), [wanted]
    while todo:
        instruction = todo.pop()
        operands = [computation.by_name[name] for name in instruction.operands]
        if instruction.opcode == "get-tuple-element" and (
            operands[0].opcode == "parameter"
        ):
            found.add(int(instruction.attribute("index")))
            continue
        new = [each for each in operands if each.name not in seen]
        seen |= {each.name for each in new}
        todo += new
    return found


def _value(
    name: str, computation: Computation, arguments: Sequence[Value], module: HloModule
) -> Value:
    """The value of an instruction: an integer, a tuple of values, None if unknown."""
    instruction = computation.by_name[name]
    opcode = instruction.opcode
    if opcode == "parameter":
        number = int(instruction.literal)
        return arguments[number] if number < len(arguments) else None
    if opcode == "constant":
        return _constant(instruction.literal)
    if not _is_scalar(instruction):
        return None
    values = [
        _value(operand, computation, arguments, module)
        for operand in instruction.operands
    ]
    if opcode == "fusion":
        inner = module.computations[instruction.called("calls")[0]]
        return _value(inner.root.name, inner, values, module)
    return _combined(instruction, values)


def _combined(instruction: Instruction, values: Sequence[Value]) -> Value:
    if instruction.opcode == "tuple":
        return dict(enumerate(values))
    if instruction.opcode == "get-tuple-element":
        (whole,) = values
        index = int(instruction.attribute("index"))
        return whole.get(index) if isinstance(whole, Mapping) else None
    function = _function(instruction)
    numbers = [value for value in values if isinstance(value, int)]
    if function is None or len(numbers) < len(values):
        return None
    return _wrapped(int(function(*numbers)), instruction.shapes[0].dtype)


def _is_scalar(instruction: Instruction) -> bool:
    # Tuples are followed to their scalars; other arrays are not evaluated.
    in_tuple = instruction.opcode in ("tuple", "get-tuple-element", "fusion")
    return in_tuple or all(not shape.sizes for shape in instruction.shapes)


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
