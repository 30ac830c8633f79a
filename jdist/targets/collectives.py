"""Collectives of a program: their bytes, devices, time and overlap."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jdist._errors import value_error
from jdist.targets.chips import Chip
from jdist.targets.hlo import Instruction

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a program, with all its runs in a step.

    Attributes:
      kind: XLA's name, such as "all-reduce".
      count: Number of runs in one step, iterations of loops included.
      bytes: Size in bytes of one run on one device: of the whole array that is reduced,
        scattered or exchanged, or of a gather's result.
      devices: Number of devices in each group; for a permute, in all pairs.
      asynchronous: Whether it has separate start and done instructions.
      overlaps: Number of kernels that run in between.
      seconds: Estimated seconds of all runs without overlap; see `Estimate.model`.
      exposed_seconds: Estimated seconds that no kernel between start and end hides.
      op_name: The place in the traced function; "" where the compiler made it.
    """

    kind: str
    count: int
    bytes: int
    devices: int
    asynchronous: bool
    overlaps: int
    seconds: float
    exposed_seconds: float
    op_name: str


@dataclass(frozen=True, slots=True)
class FoundCollective:
    """A collective as read from the program, before its time is estimated.

    Attributes:
      kind: See `Collective`.
      bytes: See `Collective`.
      groups: Devices of each group, by their number in the program.
      channel: Channel id that its start and end share; "" if it has none.
      op_name: See `Collective`.
    """

    kind: str
    bytes: int
    groups: Groups
    channel: str
    op_name: str

    @property
    def devices(self) -> int:
        """See `Collective`."""
        # Pairs overlap: a device may both send and receive.
        if self.kind == "collective-permute":
            return len({device for pair in self.groups for device in pair})
        return max(map(len, self.groups), default=0)


def inside(instruction: Instruction) -> tuple[FoundCollective, ...]:
    """The collectives of an instruction: itself, or those inside its fusion."""
    kind = instruction.opcode.removesuffix("-start")
    if kind in KINDS:
        return (_found(kind, instruction),)
    if instruction.opcode not in ("fusion", "async-start"):
        return ()
    (inner,) = instruction.called("calls")
    found = tuple(x for each in inner.instructions for x in inside(each))
    # XLA for TPUs writes a reduce-scatter as a fused all-reduce and slice.
    if "all-reduce-scatter" in inner.name and len(found) == 1:
        place = instruction.op_name
        return (replace(found[0], kind="reduce-scatter", op_name=place),)
    return found


def custom_calls(instruction: Instruction) -> set[str]:
    """Targets of the custom calls inside a fusion."""
    if instruction.opcode != "fusion":
        return set()
    (inner,) = instruction.called("calls")
    return {each.target for each in inner.instructions}


def transfer_seconds(found: FoundCollective, chip: Chip, per_host: int) -> float:
    """Estimates the time of a collective: its bytes over the bandwidth of its ring.

    Args:
      found: The collective.
      chip: The chip whose links and network carry it.
      per_host: Chips of a host; device number // per_host is its host.

    Returns:
      Seconds of one run, without latency; infinite if there is no bandwidth.
    """
    share = 0.0
    for group in found.groups:
        if found.kind == "collective-permute":
            bandwidth = _bandwidth(group, chip, per_host, ring=False)
            steps = 1.0
        else:
            bandwidth = _bandwidth(group, chip, per_host, ring=True)
            # A ring all-reduce is a reduce-scatter and an all-gather: two passes.
            passes = 2 if found.kind == "all-reduce" else 1
            steps = passes * (len(group) - 1) / len(group)
        seconds = steps * found.bytes / bandwidth if bandwidth else math.inf
        # Groups run concurrently: the slowest decides. A group of one sends nothing.
        share = max(share, seconds if len(set(group)) > 1 else 0.0)
    return share


def _bandwidth(group: Sequence[int], chip: Chip, per_host: int, *, ring: bool) -> float:
    # A ring takes the two links of one axis of a torus; a permute one of them.
    lanes = min(2 if ring else 1, chip.links)
    links = chip.link_bandwidth / chip.links * lanes
    hosts = [device // per_host for device in group]
    if len(set(hosts)) == 1 or not chip.network_bandwidth:
        return links
    # A ring between hosts can use the adapters of all its members in a host.
    members = min(hosts.count(host) for host in set(hosts)) if ring else 1
    return min(links, chip.network_bandwidth * members)


def _found(kind: str, instruction: Instruction) -> FoundCollective:
    # The arrays of tuples one by one.
    operands = [shape for each in instruction.operands for shape in each.shapes]
    if kind == "collective-permute":
        # The in-place form has further operands: its output buffer and offsets.
        operands = operands[:1] or operands
        numbers = _numbers(instruction.attribute("source_target_pairs"))
        groups: Groups = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    else:
        groups = replica_groups(instruction)
    size = sum(shape.bytes for shape in operands)
    if kind == "all-gather":
        # Operands are the parts of one device; `bytes` is of the gathered array.
        size *= len(groups[0])
    channel = instruction.attribute("channel_id")
    return FoundCollective(kind, size, groups, channel, instruction.op_name)


def replica_groups(instruction: Instruction) -> Groups:
    """The devices of each group, in any of the forms that XLA writes.

    Raises:
      ValueError: The groups are written in another form.
    """
    text = instruction.attribute("replica_groups")
    # Absent or empty groups mean one group of all devices.
    if text in ("", "{}"):
        return (tuple(range(instruction.module.partitions)),)
    if text.startswith("{"):
        return tuple(map(_numbers, re.findall(r"\{([\d,]+)\}", text)))
    # The iota form: device numbers reshaped, transposed, and read row by row.
    if match := re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _rows(_transposed(match[2], match[3]).reshape(_numbers(match[1])))
    if listed := instruction.attribute("device_ids"):
        text += f" device_ids={listed}"
    if match := _MESH.fullmatch(text):
        axes = {name: int(size) for name, size in re.findall(_AXIS, match["axes"])}
        chosen = [name.strip().strip("'") for name in match["chosen"].split(",")]
        # Part of an axis is written `'axis':(2)4`, which this parser does not support.
        if set(chosen) <= set(axes):
            devices = _ordered(match, math.prod(axes.values()))
            last = [list(axes).index(name) for name in chosen]
            rest = [axis for axis in range(len(axes)) if axis not in last]
            # With the chosen axes last, each row is one group.
            devices = devices.reshape(list(axes.values())).transpose(rest + last)
            count = math.prod(axes[name] for name in chosen)
            return _rows(devices.reshape(-1, count))
    rule = "has groups of devices that this version of jdist cannot read"
    raise value_error(instruction.name, rule, text)


_AXIS = r"'([^']+)'=(\d+)"
_MESH = re.compile(
    r"mesh\[(?P<axes>[^\]]*)\]"
    r"(?: device_ids=\((?:\[(?P<sizes>[\d,]+)\]T\((?P<order>[\d,]+)\)|"
    r"(?P<listed>[\d,]+))\))?"
    r"\s*\{(?P<chosen>[^}]*)\}"
)
"""Axes of a mesh, the order of its devices, and the axes along which a group lies."""


def _ordered(match: re.Match[str], count: int) -> np.ndarray:
    """Device numbers in the order of a mesh."""
    if match["listed"]:
        return np.array(_numbers(match["listed"]))
    return _transposed(match["sizes"] or str(count), match["order"])


def _transposed(sizes: str, order: str | None) -> np.ndarray:
    """Device numbers reshaped to `sizes`, with their axes transposed to `order`."""
    shape = _numbers(sizes)
    devices = np.arange(math.prod(shape)).reshape(shape)
    return devices.transpose(_numbers(order) if order else None)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(map(int, row)) for row in array)
