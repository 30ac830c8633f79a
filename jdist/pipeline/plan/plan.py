"""Plans: layers grouped into stages, and the workers of each stage."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from jdist._errors import check_type, value_error
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedules.pipedream import pipedream
from jdist.pipeline.simulation.costs import Costs

FORMAT = "jdist.pipeline.plan/1"


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage of a plan.

    Attributes:
      layers: Names in topological order.
      ranks: The workers that run it; several take micro-batches in turn.
      forward: Seconds for one micro-batch on one worker.
      backward: Likewise.
      parameter_bytes: Size of one version of its weights.
      activation_bytes: Size of its layers' outputs for one micro-batch, and of its
        inputs from the stages before.
      output_bytes: Bytes that it sends to the next stage.
    """

    layers: tuple[str, ...]
    ranks: tuple[int, ...]
    forward: float
    backward: float
    parameter_bytes: float
    activation_bytes: float
    output_bytes: float

    @property
    def share(self) -> float:
        """Seconds of computation per micro-batch, divided by its workers."""
        return (self.forward + self.backward) / len(self.ranks)


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in order, and their times in the planner's model.

    `print(plan)` shows the configuration, `rich.print(plan)` a table.

    Attributes:
      bottleneck_time: Seconds per micro-batch in steady state: of the slowest stage or
        transfer.
      data_parallel_time: The same if every worker had all layers.
      stages: First to last.
      workers: Number of workers per level of the machine, innermost first.
      bandwidths: Bytes per second within each level.
    """

    bottleneck_time: float
    data_parallel_time: float
    stages: tuple[PlannedStage, ...]
    workers: tuple[int, ...]
    bandwidths: tuple[float, ...]

    @property
    def configuration(self) -> str:
        """Workers per stage, as the paper writes it: "15-1"."""
        return "-".join(str(len(stage.ranks)) for stage in self.stages)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Workers per stage, as `PipeDream` takes them."""
        return tuple(len(stage.ranks) for stage in self.stages)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Micro-batches in flight, and weight versions, on each stage's workers."""
        counts = self.replicas
        # As many as 1F1B keeps: the workers from here to the end, divided by the own.
        return tuple(math.ceil(sum(counts[j:]) / own) for j, own in enumerate(counts))

    @property
    def bytes_per_worker(self) -> tuple[float, ...]:
        """Per stage, bytes of activations and weights of micro-batches in flight."""
        return tuple(
            flight * (stage.activation_bytes + stage.parameter_bytes)
            for flight, stage in zip(self.in_flight, self.stages, strict=True)
        )

    @property
    def reduction_seconds(self) -> tuple[float, ...]:
        """Per stage, seconds of a worker per micro-batch for reducing gradients.

        The planner adds the time of a level's reduction to that of the level inside:

            T_d = (T_(d-1) + 4 (r_d - 1) P_d / (B_d r_d) / M_d) / r_d

        with r_d replicas at level d of the P_d bytes that one machine of that level
        holds. A worker has r_0 r_1 ... T seconds for each of its micro-batches, of
        which the reductions take

            sum over d of r_0 ... r_(d-1) * 4 (r_d - 1) P_d / (B_d r_d) / M_d
        """
        found = [0.0] * len(self.stages)
        size, inside = 1, 1
        for count, bandwidth in zip(self.workers, self.bandwidths, strict=True):
            # The machines of this level on which each stage runs.
            machines = [{rank // size for rank in s.ranks} for s in self.stages]
            outside = [{unit // count for unit in own} for own in machines]
            for j, own in enumerate(machines):
                # One machine of this level holds all stages that have the same ones.
                held = math.fsum(
                    stage.parameter_bytes
                    for stage, other in zip(self.stages, machines, strict=True)
                    if other == own
                )
                # Replicas at this level within one machine of the level outside.
                replicas = len(own) // len(outside[j])
                seconds = 4 * (replicas - 1) * held / (bandwidth * replicas) / inside
                # The quotient is r_0 ... r_(d-1).
                found[j] += len(self.stages[j].ranks) / len(own) * seconds
            size, inside = size * count, count
        return tuple(found)

    def schedule(self, micro_batches: int) -> Schedule:
        """PipeDream's schedule of the plan; workers are numbered stage by stage.

        Raises:
          ValueError: There is less than one micro-batch.
        """
        return pipedream(len(self.stages), micro_batches, replicas=self.replicas)

    def costs(self, *, reductions: bool = False, **others: Any) -> Costs:
        """The costs of its schedule, for a simulation.

        Args:
          reductions: Whether `reduction_seconds` are added to backward passes.
          others: Further costs, such as `bandwidth` or `latency`.
        """
        backward = [stage.backward for stage in self.stages]
        if reductions:
            # To backward passes, which produce the gradients.
            pairs = zip(backward, self.reduction_seconds, strict=True)
            backward = [own + reducing for own, reducing in pairs]
        return Costs(
            forward=[stage.forward for stage in self.stages],
            backward=backward,
            # The last stage sends nothing on.
            message_bytes=[stage.output_bytes for stage in self.stages[:-1]],
            activation_bytes=[stage.activation_bytes for stage in self.stages],
            weight_bytes=[stage.parameter_bytes for stage in self.stages],
            **others,
        )

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Writes the plan as JSON; see `load_plan`."""
        record = {"format": FORMAT, **asdict(self)}
        Path(path).write_text(json.dumps(record, indent=1))
        return Path(path)

    def __str__(self) -> str:
        machine = " x ".join(map(str, self.workers))
        return (
            f"{self.configuration} on {machine} workers: "
            f"{1e3 * self.bottleneck_time:.4g} ms per micro-batch, "
            f"{self.data_parallel_time / self.bottleneck_time:.2f} times data parallel"
        )

    def __rich__(self) -> Table:
        columns = ("stage", "layers", "ranks", "ms", "ms / workers", "in flight")
        table = Table(*columns, "MiB per worker", title=str(self))
        rows = zip(self.stages, self.in_flight, self.bytes_per_worker, strict=True)
        for number, (stage, in_flight, held) in enumerate(rows):
            # A stage may have a thousand layers: its ends are shown.
            first, last = stage.layers[0], stage.layers[-1]
            table.add_row(
                str(number),
                f"{first} .. {last} ({len(stage.layers)})",
                " ".join(map(str, stage.ranks)),
                f"{1e3 * (stage.forward + stage.backward):.4g}",
                f"{1e3 * stage.share:.4g}",
                str(in_flight),
                f"{held / 2**20:.1f}",
            )
        return table


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan that `Plan.write` wrote.

    Raises:
      TypeError: `path` is no path.
      ValueError: The file is of another format, or something is missing in it.
    """
    check_type("load_plan(path)", path, (str, os.PathLike), "must be a path")
    record = json.loads(Path(path).read_text())
    found = record.get("format") if isinstance(record, Mapping) else None
    if found != FORMAT:
        rule = f"must be of the format {FORMAT}"
        raise value_error("load_plan(path=...)", rule, found)
    try:
        # With tuples, which JSON has not.
        return msgspec.convert(record, Plan)
    except msgspec.ValidationError as error:
        rule = "must have everything that `Plan.write` writes"
        raise value_error("load_plan(path=...)", rule, str(error)) from None
