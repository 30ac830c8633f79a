"""Schedules made for given costs and memory, with a certificate."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import numpy as np

from jdist._errors import (
    check_choice,
    check_number,
    check_sequence,
    check_type,
    value_error,
)
from jdist.pipeline.schedule.actions import KINDS, Action, check_counts
from jdist.pipeline.schedule.drain import split_drain
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedules.dualpipe_v import dualpipe_v
from jdist.pipeline.schedules.gpipe import gpipe
from jdist.pipeline.schedules.interleaved import interleaved
from jdist.pipeline.schedules.looped_bfs import looped_bfs
from jdist.pipeline.schedules.one_f_one_b import one_f_one_b
from jdist.pipeline.schedules.v_shaped import v_half, v_min
from jdist.pipeline.schedules.zbv import zbv
from jdist.pipeline.schedules.zero_bubble import zero_bubble
from jdist.pipeline.simulation.costs import Costs
from jdist.pipeline.simulation.simulator import simulate
from jdist.pipeline.synthesis.constraint_program import Starts, roomiest, search
from jdist.pipeline.synthesis.lower_bound import lower_bound
from jdist.pipeline.synthesis.problem import ACTIONS, Places, SchedulingProblem
from jdist.pipeline.synthesis.repetition import repetition

Placement = Literal["looped", "v", "balanced", "free"]
"""Chunks of worker j: stages j, n + j, 2n + j .. or j, 2n - 1 - j, 2n + j ..; or those
that the solver chooses, as many for each worker, or at least one."""


SEARCHED = 2000
"""The most actions whose order is searched; more repeat that of one micro-batch."""

LONG, FIRST = 300, 1 / 3
"""Where memory binds, a search of so many actions begins with those that repeat that of
one micro-batch, looked for in this part of the time."""


@dataclass(frozen=True)
class Found:
    """A schedule, and a proof of how good it is.

    Attributes:
      schedule: The schedule.
      makespan: Its seconds, those of `simulate(schedule, costs)`.
      lower_bound: Seconds below which no schedule of the same memory and the same
        places, or any if they were chosen, ends; see `synthesize`.
      peak: Bytes of weights and activations of each worker, as `simulate` counts them.
    """

    schedule: Schedule
    makespan: float
    lower_bound: float
    peak: tuple[float, ...]

    @property
    def gap(self) -> float:
        """The fraction of the makespan that a better schedule could save; 0: none."""
        return 1 - self.lower_bound / self.makespan if self.makespan else 0.0


def synthesize(
    costs: Costs,
    *,
    workers: int,
    micro_batches: int,
    chunks: int = 1,
    placement: Placement | Sequence[int] = "looped",
    memory: float | Sequence[float] | None = None,
    seconds: float = 60.0,
) -> Found:
    """The shortest schedule found for given costs within a limit of memory.

    A solver begins with the best family of this placement that fits, and improves it
    until it has proved that nothing is better, or its time is over. It decides for each
    backward pass whether it is split, and which stages a worker has, if `placement`
    lets it. It does not run where the best family is known to be optimal. More than
    2000 actions of equal micro-batches repeat a pattern: the solver looks for one with
    a short period (modulo scheduling), at places that are good for few micro-batches,
    and the bound is the largest of those below but the solver's. With a limit of
    memory and more than 300 actions it looks for that first, and improves it.

    The lower bound is the largest of

    - the critical path of a micro-batch: all F, all B and the first stage's W;
    - for each worker, the time until a micro-batch can reach it, and all its work;
    - for each worker with a limit, the time until a micro-batch can reach it, and the
      area of what it holds, in bytes by seconds, divided by the limit. A stage holds
      the activations of a micro-batch at least while this goes from there to the last
      stage and back, then what W needs during W, or activations during the rest of a
      whole B; without this last part, the way of the last cotangent to the first stage
      comes on top. The area begins with F itself: what F makes fits beside all that is
      held while it runs, for its worker does nothing else;
    - if the solver places stages, the same without messages for each stage alone, and
      for all: their work by the number of workers, their area by the sum of limits;
    - the solver's own. Its costs are whole numbers: exact if all seconds have a common
      unit, otherwise rounded down to some 10^-6 of the makespan each. With smaller
      costs no schedule gets longer, so that it is a bound for the given ones. There
      links may send messages in any order, which only admits more schedules.

    Args:
      costs: Seconds and bytes for each of `workers * chunks` stages, as for `simulate`.
      workers: The number of workers.
      micro_batches: The number of micro-batches.
      chunks: Stages of each worker.
      placement: "looped": worker j has stages j, workers + j ..; "v": every second
        chunk in reverse, j, 2 workers - 1 - j ..; or the worker of each stage. Chosen
        by the solver: "balanced", `chunks` stages for each worker; "free", at least
        one. Messages between stages of one worker cost nothing.
      memory: Bytes that a worker may hold, of `weight_bytes` and what micro-batches
        keep (`Timeline.peak_bytes`): one number for all workers or one for each; None:
        any number. Optimizer states and gradients count if `weight_bytes` has them.
      seconds: The time that the solver may take.

    Raises:
      TypeError: An argument is of another type.
      ValueError: A number is below 1; a cost has another number of stages; the
        placement does not give each worker `chunks` stages; bytes have no common unit;
        or the memory is too small for any schedule: the message has the smallest, for
        places of the solver's choice those that exceed the given memory least.
      Unavailable: OR-Tools is not installed; the extra `synthesize` brings it.

    Source:
      The solver is CP-SAT of OR-Tools. The area is energetic reasoning: Baptiste et
      al., Constraint-Based Scheduling, 2001. Solvers for schedules: OptPipe, arXiv
      2510.05186.

    Example:
      >>> costs = Costs(forward=[1, 2, 1], backward=[2, 4, 2])
      >>> found = synthesize(costs, workers=3, micro_batches=4)
      >>> found.schedule.name, found.makespan, found.lower_bound, found.gap
      ('ZB-H1', 25.0, 25.0, 0.0)
    """
    counts = {"workers": workers, "micro_batches": micro_batches, "chunks": chunks}
    check_counts("synthesize", **counts)
    check_type("synthesize(costs)", costs, Costs, "must be Costs")
    rule = "must be above 0 seconds"
    check_number("synthesize(seconds=...)", seconds, rule, lambda x: x > 0)
    places, placing = _placed(placement, workers, chunks)
    problem = SchedulingProblem.of(costs, places[0], micro_batches, placing)
    if memory is not None:
        problem, places = _limited(problem, places, memory, seconds)
    limits = np.inf if problem.limit is None else problem.limit
    fitting = [
        (made, played)
        for start in places
        for made in _families(replace(problem, workers=start), chunks)
        if (np.array((played := simulate(made, costs)).peak_bytes) <= limits).all()
    ]
    best, timeline = min(fitting, key=lambda pair: pair[1].makespan)
    bound, actions = lower_bound(problem), len(timeline.start)
    binds = problem.limit is not None and actions > LONG
    share = problem.alike * (1.0 if actions > SEARCHED else FIRST * binds)
    for look, part in (_repeated, share), (_searched, 1 - share):
        if part and bound < timeline.makespan:
            at = replace(problem, workers=tuple(w for (w,) in best.placement))
            found, proved = look(at, best, timeline.makespan, part * seconds)
            bound, again = max(bound, proved), simulate(found, costs)
            if again.makespan < timeline.makespan:
                best, timeline = found, again
    # Sums of the same seconds in another order differ in their last bits.
    bound = min(bound, timeline.makespan)
    return Found(best.validate(), timeline.makespan, bound, timeline.peak_bytes or ())


def _placed(
    placement: Placement | Sequence[int], workers: int, chunks: int
) -> tuple[list[Places], str]:
    """The worker of each stage, or some to begin with, and whether it is given."""
    call, stages = "synthesize(placement=...)", workers * chunks
    if isinstance(placement, str):
        check_choice(call, placement, get_args(Placement))
        ahead, back = range(workers), reversed(range(workers))
        rounds = {"v": (*ahead, *back), "looped": (*ahead, *ahead)}
        made = {name: (pair * chunks)[:stages] for name, pair in rounds.items()}
        if placement in made:
            return [made[placement]], "given"
        return [*made.values()], placement
    rule = f"must name each of {workers} workers {chunks} times, a worker per stage"
    check_sequence(call, placement, int | np.integer, rule)
    if sorted(placement) != sorted([*range(workers)] * chunks):
        raise value_error(call, rule, placement)
    return [tuple(placement)], "given"


def _limited(
    problem: SchedulingProblem,
    places: list[Places],
    memory: float | Sequence[float],
    seconds: float,
) -> tuple[SchedulingProblem, list[Places]]:
    """The problem with a limit, and places where a micro-batch fits alone."""
    call, rule = "synthesize(memory=...)", "must be bytes, for all workers or for each"
    limits = np.asarray(memory)
    workers = max(problem.workers) + 1
    if limits.dtype.kind not in "iuf" or limits.shape not in ((), (workers,)):
        raise value_error(call, rule, memory)
    limits = np.broadcast_to(limits, workers).astype(float)
    problem = replace(problem, limit=limits)

    def fits(own: Places) -> bool:
        return bool((limits >= problem.smallest_limit(own)).all())

    chosen = problem.placing != "given" and not np.isnan(limits).any()
    if chosen and not any(map(fits, places)):
        whole, _, _ = problem.in_whole_numbers(lower_bound(problem))
        places = [roomiest(whole, seconds)]
    if not any(map(fits, places)):
        rule = "must be at least the weights and one micro-batch's activations of each "
        rule += f"worker, {problem.smallest_limit(places[0]).tolist()} bytes"
        raise value_error(call, rule, memory)
    return problem, places


def _families(problem: SchedulingProblem, chunks: int) -> Iterator[Schedule]:
    """All schedules of the problem's placement, and last one that fits its memory."""
    n, m = max(problem.workers) + 1, problem.shape[1]
    families: list[Callable[[int, int], Schedule]] = [
        *(gpipe, one_f_one_b, zero_bubble, zbv, v_half, v_min, dualpipe_v),
        *(partial(family, chunks=chunks) for family in (interleaved, looped_bfs)),
    ]
    placement = tuple((worker,) for worker in problem.workers)
    for family in families:
        # Some need more micro-batches, or a multiple of the workers.
        with contextlib.suppress(ValueError):
            made = family(n, m)
            if made.placement == placement:
                yield from (made, split_drain(made))
    yield _in_flight(problem)


def _in_flight(problem: SchedulingProblem) -> Schedule:
    """1F1B, whose micro-batches follow each other as soon as the memory allows.

    Where all passes take a unit of time, 1F1B starts a micro-batch every second unit,
    and one micro-batch at a time every 2n units.
    """
    stages, m = problem.shape
    between = range(2 * stages - 1, 0, -2)  # F and B of a micro-batch
    for period in range(2, 2 * stages + 1):
        in_flight = np.array([[-(-each // period)] for each in between])
        needed = problem.smallest_limit(problem.workers, in_flight)
        if problem.limit is None or (needed <= problem.limit).all():
            break
    starts = {
        Action(kind, stage, i): i * period + stage + between[stage] * (kind == "B")
        for i in range(m)
        for stage in range(stages)
        for kind in KINDS[:2]
    }
    return _ordered(problem.workers, starts, f"1F1B, a micro-batch in {period} units")


def _searched(
    problem: SchedulingProblem, known: Schedule, makespan: float, seconds: float
) -> tuple[Schedule, float]:
    """The schedule that the solver finds, and a lower bound in seconds."""
    whole, unit, raised = problem.in_whole_numbers(makespan)
    given = {name: getattr(whole, name) for name in (*ACTIONS, "latency")}
    costs = Costs(**given, message_bytes=whole.sending, bandwidth=1.0)
    played = simulate(known, costs)
    starts = {Action(*record[1:4]): round(record.start) for record in played.records()}
    found, places, bound = search(whole, starts, round(played.makespan), seconds)
    return _ordered(places, found), (bound - raised) * unit


def _repeated(
    problem: SchedulingProblem, known: Schedule, makespan: float, seconds: float
) -> tuple[Schedule, float]:
    """The schedule whose micro-batches repeat a pattern, or the known; no bound."""
    micro_batches = problem.shape[1]
    if problem.placing != "given":
        # Places that are good for as many as are in flight at most.
        seconds /= 2
        few = problem.first(2 * (max(problem.workers) + 1))
        made, _ = _searched(few, _in_flight(few), lower_bound(few), seconds)
        problem = problem.given(tuple(worker for (worker,) in made.placement))
    one = problem.first(1)
    whole, _, _ = one.in_whole_numbers(lower_bound(one))
    found, period = repetition(whole, micro_batches, seconds)
    if found is None:
        return known, 0.0
    starts = {
        Action(kind, stage, i): start + i * period
        for (kind, stage, _), start in found.items()
        for i in range(micro_batches)
    }
    return _ordered(problem.workers, starts), 0.0


def _ordered(places: Places, starts: Starts, name: str = "synthesized") -> Schedule:
    """The schedule of the order in which actions start."""
    programs: list[list[Action]] = [[] for _ in set(places)]
    for action in sorted(starts, key=starts.__getitem__):
        programs[places[action.stage]].append(action)
    return Schedule.of(programs, name=name)
