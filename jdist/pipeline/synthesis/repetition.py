"""A pattern that every micro-batch repeats: modulo scheduling, by CP-SAT.

Micro-batch i does what micro-batch 0 does, i periods later. An action starts at a phase
of a period, q periods after the first; the phases of a worker's actions do not overlap
in the circle of a period. What a worker holds after an action then follows from q and
from the order of phases, and is the same in every period; at the beginning and at the
end some micro-batches are missing, and it is less. The program has one micro-batch's
actions, whatever their number is.
"""

from itertools import combinations
from typing import Any, NamedTuple

from jdist.pipeline.schedule.actions import KINDS, Action
from jdist.pipeline.synthesis.constraint_program import THREADS, Starts, solver_module
from jdist.pipeline.synthesis.problem import SchedulingProblem

Orders = dict[tuple[Action, Action], Any]
"""Whether the first action's phase is not after the second's, per pair of a worker."""


class Phase(NamedTuple):
    """The variables of an action of micro-batch 0."""

    periods: Any
    phase: Any
    start: Any
    seconds: Any


def repetition(
    problem: SchedulingProblem, micro_batches: int, seconds: float
) -> tuple[Starts, int] | None:
    """The start of each action of micro-batch 0, and the period of all others.

    Args:
      problem: One micro-batch, in whole numbers.
      micro_batches: The number of those that repeat it.
      seconds: The limit of time.

    Returns:
      What makes the last micro-batch end earliest; None: nothing was found in time.

    Raises:
      Unavailable: OR-Tools is not installed.
    """
    cp_model = solver_module()
    model = cp_model.CpModel()
    tables = (problem.forward, problem.whole, problem.inputs, problem.params)
    # One micro-batch after the other, with room for the messages.
    longest = sum(int(table.sum()) for table in (*tables, *2 * (problem.sending,)))
    longest += 2 * int(problem.latency.sum())
    period = model.new_int_var(1, longest, "period")
    end = model.new_int_var(0, longest, "end")
    splits = [model.new_bool_var("") for _ in problem.workers]
    actions = _phases(model, problem, splits, period, longest)
    for action, own in actions.items():
        model.add(own.start + own.seconds <= end)
        if problem.always_split and action.kind == "W":
            model.add(splits[action.stage] == 1)
    for worker in set(problem.workers):
        there = [a for a in actions if problem.workers[a.stage] == worker]
        orders = _in_a_circle(model, actions, there, splits, period)
        if problem.limit is not None:
            limit = int(problem.limit[worker])
            _hold(model, problem, limit, actions, orders, splits)
    model.minimize((micro_batches - 1) * period + end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = THREADS
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    found = {
        action: solver.value(own.start)
        for action, own in actions.items()
        if action.kind != "W" or solver.value(splits[action.stage])
    }
    return found, solver.value(period)


def _phases(
    model: Any, problem: SchedulingProblem, splits: list[Any], period: Any, longest: int
) -> dict[Action, Phase]:
    """The actions of a micro-batch, each after those that it waits for."""
    found, last = {}, len(splits) - 1
    delay = [int(d) for d in (problem.sending + problem.latency)[:, 0]]
    for stage, split in enumerate(splits):
        forward, whole, inputs, params = (
            int(table[stage, 0])
            for table in (
                problem.forward,
                problem.whole,
                problem.inputs,
                problem.params,
            )
        )
        sizes = (forward, whole + (inputs - whole) * split, params * split)
        for kind, size in zip(KINDS, sizes, strict=True):
            periods = model.new_int_var(0, 2 * last + 2, "")
            phase, start = (model.new_int_var(0, longest, "") for _ in range(2))
            whole_periods = model.new_int_var(0, longest, "")
            model.add_multiplication_equality(whole_periods, [periods, period])
            model.add(start == whole_periods + phase)
            model.add(phase < period)
            found[Action(kind, stage, 0)] = Phase(periods, phase, start, size)
    for stage, split in enumerate(splits):
        f, b, w = (found[Action(kind, stage, 0)] for kind in KINDS)
        if stage:
            before = found[Action("F", stage - 1, 0)]
            model.add(f.start >= before.start + before.seconds + delay[stage - 1])
        after = found[Action("B", stage + 1, 0)] if stage < last else f
        waits = delay[stage] if stage < last else 0
        model.add(b.start >= after.start + after.seconds + waits)
        model.add(w.start >= b.start + b.seconds).only_enforce_if(split)
        # Where there is no W it stands for nothing, at the same time as its B.
        model.add(w.start == b.start).only_enforce_if(~split)
        model.add(w.periods == b.periods).only_enforce_if(~split)
    return found


def _in_a_circle(
    model: Any,
    actions: dict[Action, Phase],
    own: list[Action],
    splits: list[Any],
    period: Any,
) -> Orders:
    """Keep the phases of a worker's actions apart, and say in which order they are."""
    orders: Orders = {(action, action): 1 for action in own}
    for first, second in combinations(own, 2):
        earlier = model.new_bool_var("")
        orders[first, second], orders[second, first] = earlier, 1 - earlier
        there = [splits[a.stage] for a in (first, second) if a.kind == "W"]
        one, two = actions[first], actions[second]
        for a, b, holds in ((one, two, earlier), (two, one, ~earlier)):
            apart = (
                a.phase + a.seconds <= b.phase,
                b.phase + b.seconds <= a.phase + period,
            )
            for rule in apart:
                model.add(rule).only_enforce_if([holds, *there])
    return orders


def _hold(
    model: Any,
    problem: SchedulingProblem,
    limit: int,
    actions: dict[Action, Phase],
    orders: Orders,
    splits: list[Any],
) -> None:
    """Keep what a worker holds after each of its actions within its limit."""
    own = {action for action, _ in orders}
    for at in own:
        held = 0
        for stage in {action.stage for action in own}:
            f, b, w = (Action(kind, stage, 0) for kind in KINDS)
            # How many more have begun than ended: whole periods, and this one.
            flight = actions[b].periods - actions[f].periods
            flight += orders[f, at] - orders[b, at]
            pending = actions[w].periods - actions[b].periods
            pending += orders[b, at] - orders[w, at]
            held += int(problem.activation[stage, 0]) * flight
            held += int(problem.pending[stage, 0]) * pending
            # Without a W nothing is pending, whatever the order.
            tied = orders[b, at] == orders[w, at] if at not in (b, w) else None
            none = orders[b, w] == 0 if tied is None else tied
            model.add(none).only_enforce_if(~splits[stage])
        model.add(held <= limit)
