"""The problem of a search: costs, placement and memory, also in whole numbers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jdist._errors import value_error
from jdist.pipeline.simulation.costs import Costs

ACTIONS = ("forward", "backward", "backward_inputs", "backward_params")
TIMES = (*ACTIONS, "sending", "latency")
BYTES = ("activation_bytes", "pending_bytes", "weight_bytes")
Places = tuple[int, ...]
"""The worker of each stage."""
STEPS = 2**20
"""The most whole numbers up to a makespan: their sums times bytes fit in 64 bits."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SchedulingProblem:
    """The costs of each stage and micro-batch, and the workers and their memory.

    Attributes:
      workers: The worker of each stage; if they are chosen, those to begin with.
      placing: "given"; or chosen: "balanced", as many stages for each worker, or
        "free", at least one.
      forward: Seconds of F, `(stages, micro_batches)`; all costs have this shape.
      backward: Those of a B without a W.
      backward_inputs: Those of a B with a W.
      backward_params: Those of a W.
      sending: For which a message occupies its link, `(stages - 1, micro_batches)`; 0
        between stages that are given to one worker.
      latency: Latency of a message.
      activation_bytes: Bytes from F to B.
      pending_bytes: Bytes from B to W.
      weight_bytes: Bytes of each stage's weights, the same for all micro-batches.
      limit: Bytes of these that each worker may hold, `(workers,)`; None: any number.
    """

    workers: Places
    placing: str
    forward: np.ndarray
    backward: np.ndarray
    backward_inputs: np.ndarray
    backward_params: np.ndarray
    sending: np.ndarray
    latency: np.ndarray
    activation_bytes: np.ndarray
    pending_bytes: np.ndarray
    weight_bytes: np.ndarray
    limit: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        costs: Costs,
        workers: Places,
        micro_batches: int,
        placing: str = "given",
    ) -> "SchedulingProblem":
        """The problem of the costs that `simulate` takes, without a limit.

        Raises:
          ValueError: A cost was given for another number of stages or micro-batches.
        """
        shape = (len(workers), micro_batches)
        given = {
            name: costs.table(name, *shape) for name in (*ACTIONS, "latency", *BYTES)
        }
        sending = costs.table("message_bytes", *shape) / costs.table(
            "bandwidth", *shape
        )
        made = cls(workers=workers, placing=placing, sending=sending, **given)
        return made.given(workers) if placing == "given" else made

    def given(self, workers: Places) -> "SchedulingProblem":
        """The problem of these places."""
        where = np.array(workers)
        away = (where[:-1] != where[1:])[:, None]
        messages = {"sending": away * self.sending, "latency": away * self.latency}
        return replace(self, workers=workers, placing="given", **messages)

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
        shorter = (self.backward_inputs + self.backward_params <= self.backward).all()
        return self.limit is None and bool(shorter)

    def first(self, count: int) -> "SchedulingProblem":
        """The problem of the first micro-batches alone."""
        tables = {name: getattr(self, name)[:, :count] for name in (*TIMES, *BYTES)}
        return replace(self, **tables)

    def seconds(self, stage: int, i: int, split: Any) -> tuple[int, Any, Any]:
        """Of F, B and W in whole numbers, for a variable that says if there is a W."""
        forward, whole, *halves = (
            int(getattr(self, name)[stage, i]) for name in ACTIONS
        )
        inputs, params = halves
        return forward, whole + (inputs - whole) * split, params * split

    def of_each_worker(self, per_stage: np.ndarray, places: Places) -> np.ndarray:
        """Sums over each worker's stages at these places, `(workers, ...)`."""
        found = np.zeros((max(places) + 1, *per_stage.shape[1:]))
        np.add.at(found, list(places), per_stage)
        return found

    def smallest_limit(self, places: Places, in_flight: ArrayLike = 1) -> np.ndarray:
        """The smallest limit of each worker with which there is a schedule at places.

        Before the first B of a micro-batch a worker has done all of its F. One micro-
        batch after the other, with whole backward passes, needs no more than this.
        `in_flight` are the micro-batches that a stage holds at once, `(stages, 1)`.
        """
        held = self.weight_bytes + np.asarray(in_flight) * self.activation_bytes
        return self.of_each_worker(held, places).max(axis=1)

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
        rounded = np.rint if exact else np.floor
        whole = {name: rounded(t / unit).astype(int) for name, t in tables.items()}
        raised = sum(int((whole[name] < 1).sum()) for name in ACTIONS)
        whole |= {name: np.maximum(whole[name], 1) for name in ACTIONS}
        if self.limit is not None:
            sizes, limit = {name: getattr(self, name) for name in BYTES}, self.limit
            if self.placing == "given":  # weights may be any number of bytes
                weights = self.of_each_worker(self.weight_bytes, self.workers)
                limit = limit - weights[:, 0]
                sizes["weight_bytes"] = 0 * self.weight_bytes
            size = common_unit(sizes.values())
            if not size:
                rule = "must have bytes that are multiples of a common unit"
                got = "others, such as measured ones divided by a number"
                raise value_error("synthesize(costs)", rule, got)
            whole |= {name: np.rint(t / size).astype(int) for name, t in sizes.items()}
            # A sum of sizes may lie an ulp above the limit that it was computed for.
            limit = np.floor(limit / size + 1e-9)
            everything = sum(whole[name].sum() for name in BYTES)
            whole["limit"] = np.minimum(limit, everything).astype(int)
        return replace(self, **whole), unit, raised


def common_unit(tables: Iterable[np.ndarray]) -> float:
    """The largest number of which all are multiples; 0 if there is none."""
    values = np.unique(np.concatenate([table.ravel() for table in tables])).tolist()
    fractions = [Fraction(value).limit_denominator(STEPS) for value in values]
    if any(float(f) != value for f, value in zip(fractions, values, strict=True)):
        return 0.0
    below = math.lcm(*(f.denominator for f in fractions))
    return math.gcd(*(int(f * below) for f in fractions)) / below
