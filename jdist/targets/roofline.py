"""Roofline estimate of a step's time: operations over peak, bytes over bandwidth."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from jdist.targets import arithmetic, collectives
from jdist.targets.chips import Chip
from jdist.targets.collectives import Collective, FoundCollective
from jdist.targets.hlo import Computation, HloModule, Instruction
from jdist.targets.trip_count import trip_count

MODEL = (
    "Estimate by roofline: each kernel takes its matrix operations / peak or its bytes "
    "/ memory bandwidth, whichever is longer; all bytes together at least bytes / "
    "bandwidth; a collective its bytes on a ring / bandwidth of the links, less the "
    "kernels between its start and its end. No latency, no host, no input, figures as "
    "published: a real step is slower."
)
PEAKS = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "s8": "int8",
    "u8": "int8",
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated seconds of one step on one device.

    Attributes:
      seconds: Seconds of the step: the larger of `kernels` and `memory`, plus
        `exposed`.
      compute: Seconds of all matrix products at peak FLOP/s.
      memory: Seconds of all memory traffic at full memory bandwidth.
      kernels: Sum over kernels of the longer of compute and memory time.
      communication: Seconds of all collectives, without overlap.
      exposed: The part of `communication` that no kernel hides.
      model: Assumptions of the estimate, and effects that it leaves out, in words.
    """

    seconds: float
    compute: float
    memory: float
    kernels: float
    communication: float
    exposed: float
    model: str


@dataclass(frozen=True, slots=True)
class Cost:
    """Operations, bytes, seconds and collectives of one run on one device."""

    flops: int = 0
    bytes: int = 0
    compute: float = 0.0
    kernels: float = 0.0
    collectives: tuple[Collective, ...] = ()
    unknown_loops: tuple[str, ...] = ()
    """Loops whose length the program decides as it runs; each was counted once."""

    def __add__(self, other: "Cost") -> "Cost":
        names = [field.name for field in fields(Cost)]
        return Cost(*[getattr(self, name) + getattr(other, name) for name in names])

    def times(self, count: int) -> "Cost":
        """The cost of `count` runs."""
        return Cost(
            self.flops * count,
            self.bytes * count,
            self.compute * count,
            self.kernels * count,
            tuple(
                replace(
                    each,
                    count=each.count * count,
                    seconds=each.seconds * count,
                    exposed_seconds=each.exposed_seconds * count,
                )
                for each in self.collectives
            ),
            self.unknown_loops,
        )


@dataclass(slots=True)
class _Started:
    """A collective in flight, between its start and done instructions."""

    found: FoundCollective
    start: Instruction
    seconds: float
    left: float
    """Seconds that no kernel has hidden yet."""
    asynchronous: bool = True
    overlaps: int = 0


@dataclass
class _Walk:
    """One pass over a computation, in the order of its schedule."""

    chip: Chip
    per_host: int
    cost: Cost = field(default_factory=Cost)
    started: list[_Started] = field(default_factory=list)

    def run(self, computation: Computation) -> Cost:
        for instruction in computation.instructions:
            self._visit(instruction)
        # A collective without a done instruction ends with its computation.
        for each in self.started:
            self._finish(each)
        return self.cost

    def _visit(self, instruction: Instruction) -> None:
        if ended := self._ended(instruction):
            self.started.remove(ended)
            self._finish(ended)
            return
        found = collectives.inside(instruction)
        if self._is_overlapping(instruction):
            # It repeats inside the collective that it overlaps. No others: XLA may give
            # two collectives in flight one channel.
            channels = {each.found.channel for each in self.started} - {""}
            found = tuple(each for each in found if each.channel not in channels)
        for each in found:
            self._begin(each, instruction)
        if not found:
            self._hide(self._cost_of(instruction))

    def _is_overlapping(self, instruction: Instruction) -> bool:
        """Whether it is a fusion, but none that starts a collective."""
        targets = collectives.custom_calls(instruction)
        return instruction.opcode == "fusion" and "AsyncCollectiveStart" not in targets

    def _ended(self, instruction: Instruction) -> _Started | None:
        if instruction.opcode.endswith("-done"):
            begun = instruction.operands
            return next((x for x in self.started if x.start in begun), None)
        if "AsyncCollectiveDone" in collectives.custom_calls(instruction):
            (inner,) = instruction.called("calls")
            channels = {each.attribute("channel_id") for each in inner.instructions}
            return next((x for x in self.started if x.found.channel in channels), None)
        return None

    def _begin(self, found: FoundCollective, instruction: Instruction) -> None:
        seconds = collectives.transfer_seconds(found, self.chip, self.per_host)
        each = _Started(found, instruction, seconds, seconds)
        # XLA marks start and done pairs that it runs synchronously.
        is_sync = '"is_sync":true' in instruction.attributes
        in_parts = instruction.opcode.endswith("-start") and not is_sync
        if in_parts or "AsyncCollectiveStart" in collectives.custom_calls(instruction):
            self.started.append(each)
        else:
            each.asynchronous = False
            self._finish(each)

    def _finish(self, each: _Started) -> None:
        found = each.found
        done = Collective(
            found.kind,
            1,
            found.bytes,
            found.devices,
            each.asynchronous,
            each.overlaps,
            each.seconds,
            each.left,
            found.op_name,
        )
        self.cost += Cost(collectives=(done,))

    def _hide(self, cost: Cost) -> None:
        self.cost += cost
        hidden: list[tuple[FoundCollective, float]] = []
        for each in self.started if cost.kernels else ():
            # What hides one collective does not hide another on the same links.
            taken = sum(x for found, x in hidden if _shares_links(found, each.found))
            seconds = min(each.left, max(cost.kernels - taken, 0.0))
            each.left -= seconds
            hidden.append((each.found, seconds))
            each.overlaps += 1

    def _cost_of(self, instruction: Instruction) -> Cost:
        if instruction.opcode == "while":
            # The condition is left out: it compares scalars.
            body = self._inner(instruction.called("body")[0])
            count = trip_count(instruction)
            if count is None:
                place = instruction.op_name or instruction.name
                return replace(body, unknown_loops=(*body.unknown_loops, place))
            return body.times(count)
        if instruction.opcode == "conditional":
            # A conditional on a boolean names its branches by the value.
            names = ("branch_computations", "true_computation", "false_computation")
            branches = map(self._inner, instruction.called(*names))
            # The branch taken is unknown: the most expensive one counts.
            return max(
                branches, key=lambda cost: (cost.kernels, cost.bytes, cost.flops)
            )
        if instruction.opcode in ("call", "async-start"):
            return self._inner(instruction.called("to_apply", "calls")[0])
        return self._kernel(instruction)

    def _inner(self, computation: Computation) -> Cost:
        # A walk of its own: its kernels hide outer collectives as a sum, in `_hide`.
        return _Walk(self.chip, self.per_host).run(computation)

    def _kernel(self, instruction: Instruction) -> Cost:
        moved = arithmetic.bytes_accessed(instruction)
        found = arithmetic.products(instruction)
        compute = sum(each.operations / _peak(self.chip, each) for each in found)
        memory = moved / self.chip.bandwidth
        # An asynchronous copy takes bandwidth, but no kernel time.
        is_awaited = instruction.opcode.endswith("-start")
        kernels = 0.0 if is_awaited else max(compute, memory)
        return Cost(sum(each.operations for each in found), moved, compute, kernels)


def cost(module: HloModule, chip: Chip, per_host: int) -> Cost:
    """The cost of a program on one device in one run.

    Args:
      module: The scheduled program.
      chip: The chip whose figures apply.
      per_host: Chips of a host.
    """
    return _Walk(chip, per_host).run(module.entry)


def estimate(found: Cost, chip: Chip) -> Estimate:
    """Estimates the seconds of a program from its cost."""
    memory = found.bytes / chip.bandwidth
    exposed = sum(each.exposed_seconds for each in found.collectives)
    model = MODEL
    if found.unknown_loops:
        count = len(set(found.unknown_loops))
        model += f" {count} loops of unknown length are counted as one turn each."
    return Estimate(
        # Asynchronous copies take no kernel time, but share the memory bandwidth.
        max(found.kernels, memory) + exposed,
        found.compute,
        memory,
        found.kernels,
        sum(each.seconds for each in found.collectives),
        exposed,
        model,
    )


def _shares_links(one: FoundCollective, other: FoundCollective) -> bool:
    """Whether collectives in flight take bandwidth from each other."""
    if one.kind != "collective-permute" or other.kind != "collective-permute":
        return True
    # A link carries both directions at once, and other pairs use other links or ways.
    return not set(one.groups).isdisjoint(other.groups)


def _peak(chip: Chip, products: arithmetic.MatrixProducts) -> float:
    name = PEAKS.get(products.dtype, "float8" if products.dtype[:2] == "f8" else "")
    # Types without hardware support are computed in a wider one.
    wider: Sequence[str] = {
        "float8": ("float8", "bfloat16", "float32"),
        "int8": ("int8", "bfloat16", "float32"),
        "bfloat16": ("bfloat16", "float32"),
        "float16": ("float16", "bfloat16", "float32"),
    }.get(name, (name,))
    if name == "float32" and products.precision == "highest":
        wider = ("float32_highest", "float32")
    # In order: the first type that the chip has a figure for.
    known = [chip.peak_flops[each] for each in wider if each in chip.peak_flops]
    # A type without a published figure counts as the slowest one.
    return known[0] if known else min(chip.peak_flops.values())
