"""PipeDream's planner: which layers on which workers.

A machine has levels: workers in a server, servers in a rack. At the innermost level a
dynamic programme finds, for every span of layers and every number of workers, the best
pipeline; at the next level a "worker" is a whole server and a span's time is what its
best pipeline inside a server takes; and so on. With C the time and P the parameter
bytes of a span, a the bytes that cross a cut, B the level's bandwidth, r of its workers
and M workers in each of them:

    one stage on r workers:   T = (C + 4 (r-1) P / (B r) / M) / r
    or split after cut k, with the last stage on r' of the r:
      A(i, j, r) = min over k, r' of max( A(i, k, r - r'),
                                          (C(k..j] + 4 (r'-1) P(k..j] / (B r')) / r',
                                          2 a(k) / (B r'),
                                          2 a(j) / (B r') unless j is the end )

The last two only where transfers count. All workers are used.
"""

import math
from collections.abc import Iterator, Sequence

from jdist._errors import requirement
from jdist.pipeline.cuts import Cuts, cuts_of
from jdist.pipeline.layer_profile import Profile
from jdist.pipeline.plan import Plan, PlannedStage
from jdist.pipeline.programme import Level, Programme, Rules, spans
from jdist.pipeline.schedule_program import check_counts


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
      transfers: Whether activations that cross a cut take time. They do; False is for
        links that are used behind the computation.
      memory: Bytes of a worker. A stage with w workers from it to the end, r of them
        its own, has ceil(w / r) micro-batches in flight, each with its activations and
        a version of the weights. With several levels each level counts its own workers
        only, and the plan found is checked as a whole.
      replicate: False plans a straight pipeline, one worker per stage.

    Returns:
      Stages with their layers, workers and times. Several plans may be equally good.

    Raises:
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
    levels = _levels(workers, bandwidths)
    if memory is not None and not memory > 0:
        rule = "must be above 0 bytes"
        raise ValueError(requirement("partition(memory=...)", rule, memory))
    cuts = cuts_of(profile)
    seconds = spans(cuts, cuts.seconds)
    programmes: list[Programme] = []
    inside = 1
    for level in levels:
        limit = None if memory is None else memory * inside
        rules = Rules(transfers, limit, replicate)
        whole = level is levels[-1]
        programmes.append(Programme(cuts, level, rules, seconds, whole))
        seconds = programmes[-1].best[:, -1]
        inside *= level.workers
    bottleneck = float(seconds[0, -1])
    total = math.prod(level.workers for level in levels)
    if not bottleneck < math.inf:
        rule = f"must allow a plan for all {total} workers"
        got = f"{len(cuts.names)} layers, memory={memory}, replicate={replicate}"
        remedy = "Use fewer workers, allow replicas, or give each more memory."
        raise ValueError(requirement("partition(...)", rule, got, remedy))
    placed = _placed(programmes, 0, len(cuts) - 1, [range(total)])
    plan = Plan(
        bottleneck,
        _data_parallel(cuts, levels),
        tuple(_stage(profile, cuts, *each) for each in placed),
        tuple(level.workers for level in levels),
        tuple(level.bandwidth for level in levels),
    )
    _check_memory(plan, memory)
    return plan


def _levels(
    workers: Sequence[int] | int, bandwidths: Sequence[float] | float
) -> list[Level]:
    counts = tuple(workers) if isinstance(workers, Sequence) else (workers,)
    speeds = tuple(bandwidths) if isinstance(bandwidths, Sequence) else (bandwidths,)
    if not counts or len(counts) != len(speeds):
        rule = "must have a bandwidth for each level of workers, at least one"
        got = f"{counts} and {speeds}"
        raise ValueError(requirement("partition(bandwidths=...)", rule, got))
    for count, speed in zip(counts, speeds, strict=True):
        check_counts("partition", workers=count)
        if not speed > 0:
            rule = "must be above 0 bytes per second"
            raise ValueError(requirement("partition(bandwidths=...)", rule, speed))
    inside = (1, *counts[:-1])
    levels = zip(counts, inside, speeds, strict=True)
    return [Level(count, within, float(speed)) for count, within, speed in levels]


def _placed(
    programmes: Sequence[Programme], begin: int, end: int, machines: Sequence[range]
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Begin, end and ranks of each stage.

    Args:
      programmes: Of the levels, innermost first; the last one divides the span.
      begin: Of the span.
      end: Of the span.
      machines: The ranks of those machines of the level outside that share the span.
    """
    *inner, programme = programmes
    taken = 0
    for first, last, own in programme.stages(begin, end):
        wanted = slice(taken, taken + own)
        taken += own
        parts = [
            part
            for machine in machines
            for part in _divided(machine, programme.level.workers)[wanted]
        ]
        if inner:
            yield from _placed(inner, first, last, parts)
        else:
            yield first, last, tuple(rank for part in parts for rank in part)


def _divided(machine: range, parts: int) -> list[range]:
    size = len(machine) // parts
    return [machine[i * size : (i + 1) * size] for i in range(parts)]


def _stage(
    profile: Profile, cuts: Cuts, begin: int, end: int, ranks: tuple[int, ...]
) -> PlannedStage:
    names = cuts.between(begin, end)
    layers = [profile[name] for name in names]
    return PlannedStage(
        names,
        ranks,
        math.fsum(layer.forward for layer in layers),
        math.fsum(layer.backward for layer in layers),
        math.fsum(layer.parameter_bytes for layer in layers),
        math.fsum(layer.output_bytes for layer in layers),
        float(cuts.output_bytes[end]),
    )


def _data_parallel(cuts: Cuts, levels: Sequence[Level]) -> float:
    """Every worker has all layers; gradients are reduced level by level."""
    seconds, parameters = float(cuts.seconds[-1]), float(cuts.parameter_bytes[-1])
    for level in levels:
        reduce = 4 * (level.workers - 1) * parameters / level.bandwidth / level.workers
        seconds = (seconds + reduce / level.inside) / level.workers
    return seconds


def _check_memory(plan: Plan, memory: float | None) -> None:
    for stage, held in enumerate(plan.bytes_per_worker):
        if memory is not None and held > memory:
            rule = f"must allow the plan found, {plan.configuration}"
            got = f"{memory:.0f} bytes, and {held:.0f} on each worker of stage {stage}"
            remedy = "With one level of workers the limit is kept while planning."
            raise ValueError(requirement("partition(memory=...)", rule, got, remedy))
