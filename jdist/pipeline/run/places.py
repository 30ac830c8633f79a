"""Where the stages of a pipeline run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jdist._errors import requirement
from jdist.pipeline.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Places:
    """Who runs which stage for which micro-batch, and on which device.

    Attributes:
      schedule: The schedule, whose workers have ranks.
      devices: Of each worker; None for JAX's default one.
      own: Ranks of the workers that are in this process.
    """

    schedule: Schedule
    devices: Sequence[jax.Device | None]
    own: Sequence[int]

    @property
    def loss(self) -> int:
        """In the place of a stage: the loss, which is where the last stage is."""
        return self.schedule.stages

    def worker(self, stage: int, micro_batch: int) -> int:
        """The rank of who runs a stage, or the loss, for a micro-batch."""
        return self.schedule.worker(min(stage, self.loss - 1), micro_batch)

    def check(self, name: str, entry: Any, worker: int, taker: int) -> None:
        """Refuses an entry of the batch that was put elsewhere than where it is taken.

        Raises:
          ValueError: So it was. Arrays that were put nowhere in particular, such as
            NumPy's, are moved without a word.
        """
        device = self.devices[worker]
        if device is None:
            return
        for leaf in jax.tree.leaves(entry):
            if not isinstance(leaf, jax.Array) or not leaf.committed:
                continue
            if leaf.devices() != {device}:
                who = "the loss" if taker == self.loss else f"stage {taker}"
                rule = f"must have {name!r} on {device}, where {who} takes it"
                got = f"{name!r} on {', '.join(sorted(map(str, leaf.devices())))}"
                remedy = "Put it there with jax.device_put, or pass a NumPy array."
                call = "Pipeline.value_and_grad(batch)"
                raise ValueError(requirement(call, rule, got, remedy))


def places_on(schedule: Schedule, mesh: Mesh) -> Places:
    """The workers of a schedule on the devices of a mesh, in order.

    Raises:
      ValueError: The mesh has not one axis as long as there are workers, or no device
        of this process.
    """
    call = "Pipeline(mesh)"
    if mesh.devices.shape != (schedule.workers,):
        rule = f"must have one axis, of the schedule's {schedule.workers} workers"
        raise ValueError(requirement(call, rule, dict(mesh.shape)))
    devices = list(mesh.devices)
    here = jax.process_index()
    own = [rank for rank, one in enumerate(devices) if one.process_index == here]
    if not own:
        rule = "must have a device of each process that calls it"
        raise ValueError(requirement(call, rule, f"{devices} in process {here}"))
    return Places(schedule, devices, own)
