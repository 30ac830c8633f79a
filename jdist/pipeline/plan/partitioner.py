"""PipeDream's planner: the assignment of layers to workers.

A machine has levels: workers in a server, servers in a rack. At the innermost level a
dynamic program finds, for every span of layers and every number of workers, the best
pipeline; at the next level a "worker" is a whole server and a span's time is that of
its best pipeline inside a server; and so on. With C the time and P the parameter
bytes of a span, a the bytes that cross a cut, B the level's bandwidth, r of its workers
and M workers in each of them:

    one stage on r workers:   T = (C + 4 (r-1) P / (B r) / M) / r
    or split after cut k, with the last stage on r' of the r:
      A(i, j, r) = min over k, r' of max( A(i, k, r - r'),
                                          (C(k..j] + 4 (r'-1) P(k..j] / (B r')) / r',
                                          2 a(k) / (B r'),
                                          2 a(j) / (B r') unless j is the end )

The last two terms count only if `transfers` is set. All workers are used.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from jdist._errors import check_number, check_type, value_error
from jdist.pipeline.plan.cuts import Cuts, cuts_of
from jdist.pipeline.plan.dynamic_program import (
    ANY,
    DynamicProgram,
    Level,
    Machine,
    SpanSeconds,
    spans,
)
from jdist.pipeline.plan.plan import Plan, PlannedStage
from jdist.pipeline.plan.profile import Profile
from jdist.pipeline.schedule.actions import check_counts


def partition(
    profile: Profile,
    workers: Sequence[int] | int,
    bandwidths: Sequence[float] | float,
    *,
    transfers: bool = True,
    memory: float | None = None,
    replicate: bool = True,
) -> Plan:
    """The plan with the smallest bottleneck time.

    1000 layers on 256 workers take less than a minute.

    Args:
      profile: The layers; see `load_profile`.
      workers: Per level, innermost first: (4, 2) are 2 servers of 4.
      bandwidths: Bytes per second within each level.
      transfers: Whether activations that cross a cut take time; False where transfers
        overlap with the computation.
      memory: Bytes of a worker. A stage with w workers from it to the end, r of them
        its own, has ceil(w / r) micro-batches in flight, each with its activations (the
        outputs of its layers and its inputs from the stages before) and a version of
        the weights. Gradients, optimizers and arrays that layers keep inside are not
        counted. With several levels this takes longer: inner ones are planned for each
        number of workers that may come after them.
      replicate: False plans a straight pipeline, one worker per stage.

    Returns:
      Stages with their layers, workers and times. Several plans may be equally good.

    Raises:
      TypeError: An argument is of another type.
      ValueError: `workers` and `bandwidths` do not match or are not positive, the
        profile cannot be planned, or no plan keeps the rules.

    Source:
      Narayanan et al., PipeDream, SOSP 2019, 3.1, and its published planner.

    Example:
      >>> from jdist.pipeline import Layer, Profile
      >>> layers = [Layer(f"l{i}", "", 1.0, 2.0, (8.0,), 4.0) for i in range(3)]
      >>> plan = partition(Profile.chain(layers), workers=3, bandwidths=1e9)
      >>> plan.bottleneck_time, [stage.layers for stage in plan.stages]
      (3.0, [('l0',), ('l1',), ('l2',)])
    """
    check_type("partition(profile)", profile, Profile, "must be a Profile")
    flags = {"transfers": transfers, "replicate": replicate}
    for name, flag in flags.items():
        check_type(f"partition({name}=...)", flag, bool, "must be True or False")
    limited = memory is not None
    levels = _levels(workers, bandwidths, transfers, replicate, limited)
    if memory is not None:
        rule = "must be above 0 bytes"
        check_number("partition(memory=...)", memory, rule, lambda x: x > 0)
    cuts = cuts_of(profile)
    planner = Planner(cuts, levels, memory)
    # The whole model on all workers of the outermost level.
    bottleneck = float(planner.program().best[0, -1, -1])
    # Ranks are numbered over all levels, innermost fastest.
    total = math.prod(level.workers for level in levels)
    # Infinite where no assignment keeps the rules.
    if not bottleneck < math.inf:
        rule = f"must allow a plan for all {total} workers"
        got = f"{len(cuts.names)} layers, memory={memory}, replicate={replicate}"
        remedy = "Use fewer workers, allow replicas, or give each more memory."
        raise value_error("partition(...)", rule, got, remedy)
    placed = planner.placed(0, len(cuts) - 1, [range(total)])
    return Plan(
        bottleneck,
        _data_parallel(cuts, levels),
        tuple(_stage(profile, cuts, *each) for each in placed),
        tuple(level.workers for level in levels),
        tuple(level.bandwidth for level in levels),
    )


class Planner:
    """The dynamic programs of all levels, each solved once, on first use.

    With a memory limit an inner level is solved for each number of workers that may
    come after it, since they determine what is in flight; without one, only once.
    """

    def __init__(
        self, cuts: Cuts, levels: Sequence[Level], memory: float | None
    ) -> None:
        self.cuts, self.levels, self.memory = cuts, levels, memory
        self._solved: dict[tuple[int, Fraction], DynamicProgram] = {}

    def program(self, depth: int = -1, after: Fraction = ANY) -> DynamicProgram:
        """The program of one level; `after` is as in `DynamicProgram`."""
        depth %= len(self.levels)
        # A Fraction, because equal cases must have equal keys.
        key = (depth, after)
        if key not in self._solved:
            level, whole = self.levels[depth], depth == len(self.levels) - 1
            machine = self._inside(depth) if depth else self._worker()
            made = DynamicProgram(self.cuts, level, machine, after, whole=whole)
            self._solved[key] = made
        return self._solved[key]

    def placed(
        self,
        begin: int,
        end: int,
        machines: Sequence[range],
        depth: int = -1,
        after: Fraction = ANY,
    ) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Begin, end and ranks of each stage of a span.

        Args:
          begin: The cut at which the span begins.
          end: The cut at which it ends.
          machines: The ranks of each of the equal machines that share the span.
          depth: The level of their workers.
          after: As in `program`.
        """
        depth %= len(self.levels)
        program, taken = self.program(depth, after), 0
        for stage in program.stages(begin, end):
            # The same workers of each of the equal machines.
            wanted = slice(taken, taken + stage.workers)
            taken += stage.workers
            count = program.level.workers
            parts = [part for m in machines for part in _divided(m, count)[wanted]]
            if depth:
                # What is in flight on an inner stage depends on the workers after the
                # outer one.
                later = self._later(depth, stage.after)
                span = (stage.begin, stage.end)
                yield from self.placed(*span, parts, depth - 1, later)
            else:
                ranks = tuple(rank for part in parts for rank in part)
                yield stage.begin, stage.end, ranks

    def _later(self, depth: int, after: Fraction) -> Fraction:
        """`after` of a stage of `depth`, in workers of the level inside."""
        limited = self.memory is not None
        return after * self.levels[depth - 1].workers if limited else ANY

    def _inside(self, depth: int) -> Machine:
        def machine(cases: Sequence[Fraction]) -> SpanSeconds:
            tables = [
                self.program(depth - 1, self._later(depth, case)).best[:, -1]
                for case in cases
            ]
            return lambda end: np.stack([table[:, end] for table in tables])

        return machine

    def _worker(self) -> Machine:
        seconds = spans(self.cuts, self.cuts.seconds)
        held = spans(self.cuts, self.cuts.activation_bytes + self.cuts.parameter_bytes)
        # A stage keeps its inputs from other stages for its backward pass.
        held += self.cuts.output_bytes[:, None]

        def machine(cases: Sequence[Fraction]) -> SpanSeconds:
            # ceil(w / r) with w = r + the workers after it.
            in_flight = np.array([math.ceil(1 + case) for case in cases])[:, None]

            def column(end: int) -> np.ndarray:
                if self.memory is None:
                    return seconds[None, :, end]
                # Cases x beginnings: one comparison for all.
                fits = in_flight * held[:, end] <= self.memory
                return np.where(fits, seconds[:, end], np.inf)

            return column

        return machine


def _levels(
    workers: Sequence[int] | int,
    bandwidths: Sequence[float] | float,
    transfers: bool,
    replicate: bool,
    limited: bool,
) -> list[Level]:
    # A text is a sequence of letters, of which each would be refused by itself.
    several = (Sequence, np.ndarray)
    lists: list[tuple[Any, ...]] = [
        tuple(given)
        if isinstance(given, several) and not isinstance(given, str | bytes)
        else (given,)
        for given in (workers, bandwidths)
    ]
    counts, speeds = lists
    if not counts or len(counts) != len(speeds):
        rule = "must have a bandwidth for each level of workers, at least one"
        raise value_error("partition(bandwidths=...)", rule, f"{counts} and {speeds}")
    for count, speed in zip(counts, speeds, strict=True):
        check_counts("partition", workers=count)
        rule = "must be above 0 bytes per second"
        check_number("partition(bandwidths=...)", speed, rule, lambda x: x > 0)
    inside = (1, *counts[:-1])
    rules = (transfers, replicate, limited)
    levels = zip(counts, inside, speeds, strict=True)
    return [Level(own, within, float(speed), *rules) for own, within, speed in levels]


def _divided(machine: range, parts: int) -> list[range]:
    # Ranks of a machine are consecutive.
    size = len(machine) // parts
    return [machine[i * size : (i + 1) * size] for i in range(parts)]


def _stage(
    profile: Profile, cuts: Cuts, begin: int, end: int, ranks: tuple[int, ...]
) -> PlannedStage:
    names = cuts.between(begin, end)
    layers = [profile[name] for name in names]
    taken = float(cuts.output_bytes[begin])
    return PlannedStage(
        names,
        ranks,
        math.fsum(layer.forward for layer in layers),
        math.fsum(layer.backward for layer in layers),
        math.fsum(layer.parameter_bytes for layer in layers),
        math.fsum([*(layer.output_bytes for layer in layers), taken]),
        float(cuts.output_bytes[end]),
    )


def _data_parallel(cuts: Cuts, levels: Sequence[Level]) -> float:
    """Seconds with all layers on every worker, gradients reduced level by level."""
    seconds, parameters = float(cuts.seconds[-1]), float(cuts.parameter_bytes[-1])
    for level in levels:
        reduce = 4 * (level.workers - 1) * parameters / level.bandwidth / level.workers
        seconds = (seconds + reduce / level.inside) / level.workers
    return seconds
