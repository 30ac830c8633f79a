"""The problem of a search: costs, placement and memory, also in whole numbers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from jdist._errors import value_error
from jdist.pipeline.simulation.costs import Costs

ACTIONS = ("forward", "whole", "inputs", "params")
TIMES = (*ACTIONS, "sending", "latency")
BYTES = ("activation", "pending")
STEPS = 2**20
"""The most whole numbers up to a makespan: their sums times bytes fit in 64 bits."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SchedulingProblem:
    """The costs of each stage and micro-batch, and the workers and their memory.

    Attributes:
      workers: The worker of each stage.
      forward: Seconds of F, `(stages, micro_batches)`; all costs have this shape.
      whole: Those of a B without a W.
      inputs: Those of a B with a W.
      params: Those of a W.
      sending: For which a message occupies its link, `(stages - 1, micro_batches)`; 0
        between stages of one worker.
      latency: Latency of a message.
      activation: Bytes from F to B.
      pending: Bytes from B to W.
      limit: Bytes of these that each worker may hold, `(workers,)`; None: any number.
    """

    workers: tuple[int, ...]
    forward: np.ndarray
    whole: np.ndarray
    inputs: np.ndarray
    params: np.ndarray
    sending: np.ndarray
    latency: np.ndarray
    activation: np.ndarray
    pending: np.ndarray
    limit: np.ndarray | None = None

    @classmethod
    def of(
        cls, costs: Costs, workers: tuple[int, ...], micro_batches: int
    ) -> "SchedulingProblem":
        """The problem of the costs that `simulate` takes, without a limit.

        Raises:
          ValueError: A cost was given for another number of stages or micro-batches.
        """
        shape = (len(workers), micro_batches)
        where = np.array(workers)
        away = (where[:-1] != where[1:])[:, None]
        bandwidth = costs.table("bandwidth", *shape)
        return cls(
            workers=workers,
            forward=costs.table("forward", *shape),
            whole=costs.table("backward", *shape),
            inputs=costs.table("backward_inputs", *shape),
            params=costs.table("backward_params", *shape),
            sending=away * costs.table("message_bytes", *shape) / bandwidth,
            latency=away * costs.table("latency", *shape),
            activation=costs.table("activation_bytes", *shape),
            pending=costs.table("pending_bytes", *shape),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Stages and micro-batches."""
        stages, micro_batches = self.forward.shape
        return stages, micro_batches

    @property
    def alike(self) -> bool:
        """Whether all micro-batches have the same costs."""
        tables = [getattr(self, name) for name in (*TIMES, *BYTES)]
        return all((table == table[:, :1]).all() for table in tables)

    @property
    def always_split(self) -> bool:
        """Whether whole backward passes have no advantage over B and then W at once."""
        shorter = (self.inputs + self.params <= self.whole).all()
        return self.limit is None and bool(shorter)

    def first(self) -> "SchedulingProblem":
        """The problem of the first micro-batch alone."""
        tables = {name: getattr(self, name)[:, :1] for name in (*TIMES, *BYTES)}
        return replace(self, **tables)

    def of_each_worker(self, per_stage: np.ndarray) -> np.ndarray:
        """Sums over each worker's stages, `(workers, ...)`."""
        found = np.zeros((max(self.workers) + 1, *per_stage.shape[1:]))
        np.add.at(found, list(self.workers), per_stage)
        return found

    def smallest_limit(self) -> np.ndarray:
        """The smallest limit of each worker with which there is a schedule.

        Before the first B of a micro-batch a worker has done all of its F. One micro-
        batch after the other, with whole backward passes, needs no more than this.
        """
        return self.of_each_worker(self.activation).max(axis=1)

    def in_whole_numbers(
        self, makespan: float
    ) -> tuple["SchedulingProblem", float, int]:
        """The problem in whole numbers of units.

        Multiples of a common unit stay exact. Other seconds are rounded down, which
        makes no schedule longer, except that no action takes less than 1.

        Args:
          makespan: Seconds of a schedule; at most 2^20 units.

        Returns:
          The problem; the unit in seconds; and the number of actions that were raised
          to 1, each of which makes a schedule longer by less than a unit.

        Raises:
          ValueError: The bytes are no multiples of a common unit.
        """
        tables = {name: getattr(self, name) for name in TIMES}
        unit = common_unit(tables.values())
        positive = all(tables[name].all() for name in ACTIONS)
        exact = positive and unit * STEPS >= makespan
        unit = unit if exact else makespan / STEPS
        units = {name: table / unit for name, table in tables.items()}
        whole = {
            name: (np.rint(table) if exact else np.floor(table)).astype(int)
            for name, table in units.items()
        }
        raised = sum(int((whole[name] < 1).sum()) for name in ACTIONS)
        whole |= {name: np.maximum(whole[name], 1) for name in ACTIONS}
        if self.limit is not None:
            sizes = {name: getattr(self, name) for name in BYTES}
            size = common_unit(sizes.values())
            if not size:
                rule = "must have bytes that are multiples of a common unit"
                got = "others, such as measured ones divided by a number"
                raise value_error("synthesize(costs)", rule, got)
            whole |= {name: np.rint(t / size).astype(int) for name, t in sizes.items()}
            # A sum of sizes may lie an ulp above the limit that it was computed for.
            whole["limit"] = np.floor(self.limit / size + 1e-9).astype(int)
        return replace(self, **whole), unit, raised


def common_unit(tables: Iterable[np.ndarray]) -> float:
    """The largest number of which all are multiples; 0 if there is none."""
    values = np.unique(np.concatenate([table.ravel() for table in tables])).tolist()
    fractions = [Fraction(value).limit_denominator(STEPS) for value in values]
    if any(float(f) != value for f, value in zip(fractions, values, strict=True)):
        return 0.0
    below = math.lcm(*(f.denominator for f in fractions))
    return math.gcd(*(int(f * below) for f in fractions)) / below
