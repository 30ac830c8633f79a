"""Floating-point operations and memory traffic of one instruction of a program."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jdist.targets.hlo import ArrayShape, Instruction

FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
        *("after-all", "partition-id", "replica-id", "opt-barrier", "domain"),
        *("add-dependency", "async-update", "send", "recv"),
        *("while", "conditional", "call"),
    }
)
"""Instructions that move no data themselves; what some of them call does."""


class MatrixProducts(NamedTuple):
    """Floating-point operations of matrix products and convolutions."""

    dtype: str
    """XLA's name of the operands' type, such as "bf16"."""

    precision: str
    """"highest", "high" or "default"."""

    operations: int
    """Number of operations; a multiplication and an addition count as two."""


def products(instruction: Instruction) -> tuple[MatrixProducts, ...]:
    """Matrix products of an instruction, including those inside a fusion."""
    # Other arithmetic is not counted: on all of these chips, memory traffic bounds it.
    if instruction.opcode == "fusion":
        (inner,) = instruction.called("calls")
        return tuple(found for each in inner.instructions for found in products(each))
    count = _counter(instruction)
    if count is None:
        return ()
    arrays = [each.shapes[0] for each in instruction.operands if each.shapes]
    precision = instruction.attribute("operand_precision").strip("{}").split(",")[0]
    operations = count(instruction, arrays, instruction.shapes[0])
    return (MatrixProducts(arrays[0].dtype, precision or "default", operations),)


def bytes_accessed(instruction: Instruction) -> int:
    """Bytes of device memory that an instruction reads and writes.

    A slice counts the elements taken, not the whole array, and an in-place update the
    elements written; the same holds inside a fusion. On-chip memory counts as 0.
    """
    opcode = instruction.opcode
    # The traffic of an asynchronous instruction is counted at its start.
    is_end = opcode.endswith("-done")
    if opcode in FREE or is_end or instruction.target == "AllocateBuffer":
        return 0
    if opcode != "fusion":
        return _own_bytes(instruction)
    (inner,) = instruction.called("calls")
    pairs = zip(inner.parameters, instruction.operands, strict=True)
    # A fusion may read a value in several slices, but at most all of it.
    read = sum(min(_read_of(x), _traffic(operand.shapes)) for x, operand in pairs)
    return read + min(_written_by(inner.root), _traffic(instruction.shapes))


def _own_bytes(instruction: Instruction) -> int:
    """Bytes that an instruction other than a fusion moves."""
    opcode, operands = instruction.opcode, instruction.operands
    written = _traffic(instruction.shapes)
    # The elements taken are read once and written once.
    if opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * written
    # In place: the update is read and written, the rest of the array is not touched.
    if opcode == "dynamic-update-slice":
        return 2 * _traffic(operands[1].shapes)
    if opcode == "copy-start":
        # The result type lists both sides, and the operand is one of them.
        return _traffic(instruction.shapes[:2])
    if opcode.endswith("slice-start"):
        # An asynchronous slice: its result type lists the source and the elements
        # taken.
        source, taken = instruction.shapes[:2]
        return (0 if source.space else taken.bytes) + _traffic([taken])
    return written + sum(_traffic(operand.shapes) for operand in operands)


Count = Callable[[Instruction, list[ArrayShape], ArrayShape], int]


def _dot(instruction: Instruction, arrays: list[ArrayShape], out: ArrayShape) -> int:
    dimensions = instruction.attribute("lhs_contracting_dims")
    summed = [arrays[0].sizes[int(x)] for x in re.findall(r"\d+", dimensions)]
    # One multiplication and one addition for each contracted element.
    return 2 * out.elements * math.prod(summed)


def _gemm(instruction: Instruction, arrays: list[ArrayShape], out: ArrayShape) -> int:
    # A library call keeps its dimensions in the backend's own configuration.
    match = re.search(
        r'"lhs_contracting_dimensions":(\[[^\]]*\])', instruction.attributes
    )
    summed = [arrays[0].sizes[int(x)] for x in json.loads(match[1])] if match else []
    return 2 * out.elements * math.prod(summed)


def _convolution(
    instruction: Instruction, arrays: list[ArrayShape], out: ArrayShape
) -> int:
    left, right, result = re.split("_|->", instruction.attribute("dim_labels"))
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", instruction.attribute("window")))
    groups = int(instruction.attribute("batch_group_count") or 1)
    taps = 1
    # Spatial axes are independent, so their counts multiply.
    for axis in sorted(x for x in left if x.isdigit()):
        size = arrays[0].sizes[left.index(axis)]
        kernel = arrays[1].sizes[right.index(axis)]
        along = {name: text.split("x")[int(axis)] for name, text in window.items()}
        taps *= _taps(size, kernel, out.sizes[result.index(axis)], along)
    # Batch groups split the batch: each group has output features of its own.
    batch = arrays[0].sizes[left.index("b")] // groups
    # With feature groups, the kernel's input dimension is already that of one group.
    inputs = arrays[1].sizes[right.index("i")]
    return 2 * batch * inputs * arrays[1].sizes[right.index("o")] * taps


def _taps(size: int, kernel: int, out: int, window: Mapping[str, str]) -> int:
    """Pairs of an output and a kernel element that meet an input, not padding."""
    stride = int(window.get("stride", 1))
    low = int(window.get("pad", "0_0").split("_")[0])
    dilation = int(window.get("lhs_dilate", 1))
    spread = int(window.get("rhs_dilate", 1))
    starts = np.arange(out)[:, None] * stride - low
    places = starts + np.arange(kernel)[None, :] * spread
    # A dilated input has zeros between its elements.
    inside = (places >= 0) & (places <= (size - 1) * dilation)
    return int((inside & (places % dilation == 0)).sum())


def _cudnn(instruction: Instruction, arrays: list[ArrayShape], out: ArrayShape) -> int:
    """Operations of a cuDNN convolution, forward or backward."""
    # Backward calls carry the window and dimensions of the forward convolution, so the
    # shapes are put in the forward order.
    first, second = arrays[:2]
    if "BackwardInput" in instruction.target:
        return _convolution(instruction, [out, second], first)
    if "BackwardFilter" in instruction.target:
        return _convolution(instruction, [first, out], second)
    return _convolution(instruction, [first, second], out)


def _counter(instruction: Instruction) -> Count | None:
    target = instruction.target
    if target.startswith(("__cublas$", "__onednn$matmul")):
        return _gemm
    if target.startswith("__cudnn$conv"):
        return _cudnn
    return {"dot": _dot, "convolution": _convolution}.get(instruction.opcode)


def _traffic(shapes: Iterable[ArrayShape]) -> int:
    # Space 0 is device memory; others do not take its bandwidth.
    return sum(shape.bytes for shape in shapes if not shape.space)


def _read_of(value: Instruction) -> int:
    """Bytes that a computation reads of one of its values, at most all of them."""
    whole = sum(shape.bytes for shape in value.shapes)
    read = 0
    for user in value.users:
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            # As the index operand, the value is read as a whole.
            is_sliced = user.operands[0] is value
            read += sum(s.bytes for s in user.shapes) if is_sliced else whole
        elif user.opcode == "dynamic-update-slice":
            # The array that is updated stays in place and is not read.
            read += 0 if user.operands[0] is value else whole
        elif user.opcode == "bitcast":
            read += _read_of(user)
        elif user.opcode == "fusion":
            (inner,) = user.called("calls")
            pairs = zip(inner.parameters, user.operands, strict=True)
            read += sum(_read_of(parameter) for parameter, x in pairs if x is value)
        else:
            # Any other use may read every element.
            return whole
    return min(read, whole)


def _written_by(root: Instruction) -> int:
    """Bytes written by a fusion with this root instruction."""
    if root.opcode in ("tuple", "bitcast"):
        return sum(map(_written_by, root.operands))
    if root.opcode == "dynamic-update-slice":
        return sum(shape.bytes for shape in root.operands[1].shapes)
    if root.opcode == "fusion":
        (inner,) = root.called("calls")
        return _written_by(inner.root)
    return _traffic(root.shapes)
