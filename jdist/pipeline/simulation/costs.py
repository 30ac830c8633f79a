"""Costs of actions and messages: the input of a simulation."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from jdist._errors import type_error, value_error
from jdist.pipeline.schedule.actions import KINDS, B, F, W
from jdist.pipeline.schedule.memory import PENDING
from jdist.pipeline.simulation.timeline import Timeline

Cost = float | Sequence[float] | np.ndarray
"""One number for all stages; one per stage; or `(stages, micro_batches)`."""

BETWEEN = ("message_bytes", "latency", "bandwidth")
"""Costs per pair of neighbouring stages, one less than there are stages."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Costs:
    """Seconds and bytes, for each stage or for all.

    Without arguments forward takes 1 and backward 2, half of it for the weight
    gradients, and messages nothing: the units in which papers draw schedules.

    Attributes:
      forward: Seconds of F.
      backward: Seconds of a B without a W.
      backward_inputs: Seconds of a B with a W; None: half of `backward`.
      backward_params: Seconds of a W; None: half of `backward`.
      message_bytes: Bytes of an activation from stage j to j + 1, and of its cotangent.
      latency: Seconds that a message takes besides its time on the link. It does not
        delay the next message.
      bandwidth: Bytes per second from one worker to another, in each direction. A link
        carries one message at a time.
      activation_bytes: Bytes that a stage keeps of a micro-batch from F to B.
      pending_bytes: Bytes that a stage keeps of a micro-batch from B to W: activations
        that enter weight gradients, and cotangents. None: twice `activation_bytes`. A
        stage that recomputes, or whose outputs are wider than its inputs, keeps more.
      weight_bytes: Bytes of one version of a stage's weights.

    Raises:
      ValueError: A cost is negative or NaN, or a bandwidth 0. Lengths are checked by
        `simulate`.
    """

    forward: Cost = 1.0
    backward: Cost = 2.0
    backward_inputs: Cost | None = None
    backward_params: Cost | None = None
    message_bytes: Cost = 0.0
    latency: Cost = 0.0
    bandwidth: Cost = float("inf")
    activation_bytes: Cost = 0.0
    pending_bytes: Cost | None = None
    weight_bytes: Cost = 0.0

    def __post_init__(self) -> None:
        """Check the costs, and fill in defaults."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            try:
                array = np.asarray(value)
            except ValueError:  # rows of different lengths
                array = np.empty((), object)
            if array.dtype.kind not in "biuf":
                rule = "must be a number, or an array of numbers"
                raise type_error(f"Costs({field.name}=...)", rule, value)
            array = array.astype(np.float64)
            least = "above 0" if field.name == "bandwidth" else "finite and at least 0"
            fine = array > 0 if field.name == "bandwidth" else np.isfinite(array)
            if not (fine & (array >= 0)).all() or array.ndim > 2:
                rule = f"must be {least}: a number, one per stage, or a table"
                raise value_error(f"Costs({field.name}=...)", rule, value)
        # For a matrix product both halves of a backward pass are products of one size.
        half = np.asarray(self.backward, np.float64) / 2
        for name in ("backward_inputs", "backward_params"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, half)
        if self.pending_bytes is None:
            twice = PENDING * np.asarray(self.activation_bytes, np.float64)
            object.__setattr__(self, "pending_bytes", twice)

    def table(self, name: str, stages: int, micro_batches: int) -> np.ndarray:
        """Expand a cost to each stage (or pair of neighbouring stages) and micro-batch.

        Raises:
          ValueError: It was given for another number of stages or micro-batches.
        """
        # A link belongs to a pair of neighbouring stages.
        rows = stages - 1 if name in BETWEEN else stages
        array = np.asarray(getattr(self, name), np.float64)
        shape = (rows, micro_batches)
        wide = array[:, None] if array.ndim == 1 else array
        if array.ndim and wide.shape not in (shape, (rows, 1)):
            of = "pairs of neighbouring stages" if name in BETWEEN else "stages"
            rule = f"must have one number for each of {rows} {of}, or {shape} of them"
            raise value_error(f"Costs({name}=...)", rule, f"shape {array.shape}")
        # A view: one number for all costs no memory.
        return np.broadcast_to(wide, shape)

    @classmethod
    def measured(cls, timeline: Timeline, **others: Cost) -> "Costs":
        """The costs of a run: medians of its actions per stage and kind, and latencies.

        A run by `timed` also has the bytes that its stages kept of a micro-batch.

        Args:
          timeline: The run; its first micro-batch is left out if there are others.
          others: Costs that a timeline does not contain, such as those of messages;
            they take precedence over measured ones.

        Raises:
          ValueError: A stage has no forward passes.

        Example:
          >>> from jdist.pipeline import gpipe
          >>> from jdist.pipeline import simulate
          >>> run = simulate(gpipe(2, 4), Costs(forward=[3, 4], backward=[5, 6]))
          >>> Costs.measured(run).backward
          array([5., 6.])
        """
        columns = timeline.columns
        stages = int(columns.stage.max()) + 1
        split = columns.index_of(W, stages, int(columns.micro_batch.max()) + 1) >= 0
        halved = split[columns.stage, columns.micro_batch]
        # The first micro-batch may include compilation and cold caches.
        warm = columns.micro_batch > (0 if columns.micro_batch.any() else -1)
        masks = {
            "forward": columns.kind == F,
            "backward": (columns.kind == B) & ~halved,
            "backward_inputs": (columns.kind == B) & halved,
            "backward_params": columns.kind == W,
        }
        seconds = timeline.end - timeline.start
        found: dict[str, Any] = {"latency": timeline.latencies}
        for name, mask in masks.items():
            rows = [
                seconds[mask & warm & (columns.stage == stage)]
                for stage in range(stages)
            ]
            if name == "forward" and not all(map(len, rows)):
                rule = f"must have {KINDS[F]} actions at each of its {stages} stages"
                raise value_error("Costs.measured(timeline)", rule, "none")
            # A cost needs all stages: of a kind that one lacks the default is kept.
            if all(map(len, rows)):
                # The median ignores the few actions that other processes delay.
                found[name] = np.array([np.median(row) for row in rows])
        if timeline.stage_bytes is not None:
            kept = timeline.stage_bytes
            waits = np.isin(np.arange(stages), columns.stage[halved])
            found["activation_bytes"] = kept.activation
            # A run without W at a stage does not show what a W would keep.
            guess = PENDING * kept.activation
            found["pending_bytes"] = np.where(waits, kept.pending, guess)
        return cls(**found | others)
