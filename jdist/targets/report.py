"""The report on a compiled program: memory, collectives, operations, estimates."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jdist.targets.collectives import Collective
from jdist.targets.roofline import Estimate

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on each device while a program runs.

    Attributes:
      arguments: Bytes of all arguments.
      outputs: Bytes of all results.
      aliased: Bytes of results in the memory of donated arguments; counted in both
        above.
      temporaries: Bytes of intermediate values: the compiler's peak allocation.
      code: Bytes of the program itself, if the compiler reports them.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """The sum of all kinds, with aliased memory counted once."""
        return (
            self.arguments + self.outputs - self.aliased + self.temporaries + self.code
        )


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """The report of `compile`: measures of a program, and estimates of its time.

    Printing shows a table. Bytes, collectives, aliases and operations are read from the
    compiled program; seconds are estimates. If the compiler refused the program, fields
    that need a compiled program are empty.

    Attributes:
      target: Name of the hardware.
      bytes_per_device: Bytes on each device by kind; None if the compiler refused the
        program.
      memory: Device memory in bytes; see `Chip.memory`.
      refused: Why the program does not fit, with the bytes that it needs; "" if it
        fits.
      wanted_bytes: Bytes needed on each device, if the compiler reports them;
        `bytes_per_device.total` if the program fits.
      collectives: The collectives, in the order of the program.
      flops: FLOPs of matrix products in one step on one device, loops unrolled; a
        multiplication and an addition count as two.
      bytes_accessed: Bytes of device memory that one step reads and writes.
      estimate: The roofline estimate; None if the compiler refused the program.
      compiler_seconds: XLA's own estimate, `optimal_seconds`, which ignores the
        network and counts a loop as one iteration; TPU only, None where XLA has none.
      float64: Places of the traced function that compute in 64 bits.
      host_callbacks: Places that call back into Python on the host.
      donated: Donated arguments whose memory results reuse, as "dtype[shape]" on one
        device.
      donated_in_vain: Donated arguments whose memory no result reuses.
    """

    target: str
    memory: int
    bytes_per_device: DeviceMemory | None
    refused: str = ""
    wanted_bytes: int | None = None
    collectives: tuple[Collective, ...] = ()
    flops: int = 0
    bytes_accessed: int = 0
    estimate: Estimate | None = None
    compiler_seconds: float | None = None
    float64: tuple[str, ...] = ()
    host_callbacks: tuple[str, ...] = ()
    donated: tuple[str, ...] = ()
    donated_in_vain: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether each device has the memory."""
        return not self.refused

    @property
    def seconds(self) -> float | None:
        """Estimated seconds of a step, `estimate.seconds`; None if it was refused."""
        return self.estimate.seconds if self.estimate else None

    def to_json(self) -> str:
        """Everything as JSON."""
        # `asdict` leaves out properties.
        derived = {"fits": self.fits, "seconds": self.seconds}
        return json.dumps({**asdict(self), **derived}, indent=1)

    def __rich__(self) -> Group:
        """A table for the terminal."""
        parts: list[Table | Text] = [self._heading(), self._facts()]
        if self.collectives:
            parts.append(_collective_table(self.collectives))
        if self.estimate:
            parts.append(Text(self.estimate.model, style="dim"))
        return Group(*parts)

    def __str__(self) -> str:
        """The table as plain text."""
        # Independent of the terminal, so that the text is the same everywhere.
        console = Console(
            width=96, color_system=None, force_terminal=False, force_jupyter=False
        )
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip()

    def _heading(self) -> Text:
        if self.fits:
            return Text(f"{self.target}: fits", style="bold green")
        return Text(f"{self.target}: does not fit. {self.refused}", style="bold red")

    def _facts(self) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_column()
        used = self.bytes_per_device
        if used:
            share = f"{used.total / self.memory:.1%} of {size_text(self.memory)}"
            table.add_row("bytes per device", size_text(used.total), share)
            for kind, count in asdict(used).items():
                table.add_row(f"  {kind}", size_text(count), "")
        if self.estimate:
            table.add_row("matrix operations", f"{self.flops / 1e9:.4g} GFLOP", "")
            table.add_row("memory traffic", size_text(self.bytes_accessed), "")
            _estimate_rows(table, self.estimate)
        if self.compiler_seconds is not None:
            note = "estimate; no network, loops once"
            table.add_row("XLA's own", seconds_text(self.compiler_seconds), note)
        for title, places in (
            ("float64", self.float64),
            ("host callbacks", self.host_callbacks),
            ("donated in vain", self.donated_in_vain),
        ):
            if places:
                style = "bold yellow"
                table.add_row(
                    title, f"{len(places)}", ", ".join(places[:4]), style=style
                )
        if self.donated:
            table.add_row("donated and reused", f"{len(self.donated)}", "")
        return table


def size_text(count: int) -> str:
    """Formats a number of bytes to four digits, with a unit."""
    value, units = float(count), iter(UNITS)
    unit = next(units)
    while abs(value) >= 1024 and unit != UNITS[-1]:
        value, unit = value / 1024, next(units)
    return f"{value:.4g} {unit}"


def seconds_text(seconds: float) -> str:
    """Formats a time to three digits, with a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _estimate_rows(table: Table, estimate: Estimate) -> None:
    table.add_row("step", seconds_text(estimate.seconds), "estimate", style="bold")
    table.add_row("  compute", seconds_text(estimate.compute), "estimate")
    table.add_row("  memory", seconds_text(estimate.memory), "estimate")
    table.add_row("  kernels", seconds_text(estimate.kernels), "estimate")
    shown = f"estimate; {seconds_text(estimate.exposed)} not hidden"
    table.add_row("  collectives", seconds_text(estimate.communication), shown)


def _collective_table(found: Iterable[Collective]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("collective", "runs", "bytes", "devices", "", "hidden", "place"):
        is_number = title in ("runs", "bytes", "devices", "hidden")
        table.add_column(title, justify="right" if is_number else "left")
    for each in found:
        # A collective that takes no time, as within one device, has no share to hide.
        hidden = "-"
        if each.seconds:
            hidden = f"{1 - each.exposed_seconds / each.seconds:.0%}"
        table.add_row(
            each.kind,
            str(each.count),
            size_text(each.bytes),
            str(each.devices),
            f"asynchronous over {each.overlaps} kernels"
            if each.asynchronous
            else "waits",
            hidden,
            each.op_name.rpartition("/")[2],
        )
    return table
