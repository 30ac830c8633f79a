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
from jdist.pipeline.synthesis.constraint_program import Starts, new_model, solved
from jdist.pipeline.synthesis.problem import ACTIONS, SchedulingProblem

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
    pattern = _Pattern(problem)
    model, actions = pattern.model, pattern.actions
    end = model.new_int_var(0, pattern.longest, "end")
    for own in actions.values():
        model.add(own.start + own.seconds <= end)
    for worker in set(problem.workers):
        there = [a for a in actions if problem.workers[a.stage] == worker]
        orders = pattern.in_a_circle(there)
        if problem.limit is not None:
            pattern.hold(int(problem.limit[worker]), there, orders)
    model.minimize((micro_batches - 1) * pattern.period + end)
    solver, is_found = solved(model, seconds)
    if not is_found:
        return None
    found = {
        action: solver.value(own.start)
        for action, own in actions.items()
        if action.kind != "W" or solver.value(pattern.splits[action.stage])
    }
    return found, solver.value(pattern.period)


class _Pattern:
    """Variables and rules of a pattern.

    Attributes:
      longest: One micro-batch after the other, with room for the messages.
      period: The variable of the period.
      splits: Whether there is a W, per stage.
      actions: The actions of a micro-batch, each after those that it waits for.
    """

    def __init__(self, problem: SchedulingProblem) -> None:
        """Actions of a micro-batch, but no rule of workers."""
        self.problem = problem
        self.model = model = new_model()
        names = *ACTIONS, "sending", "sending", "latency", "latency"
        self.longest = sum(int(getattr(problem, name).sum()) for name in names)
        self.period = model.new_int_var(1, self.longest, "period")
        always = int(problem.always_split)
        self.splits = [model.new_int_var(always, 1, "") for _ in problem.workers]
        self.actions: dict[Action, Phase] = {}
        last = len(self.splits) - 1
        for stage, split in enumerate(self.splits):
            sizes = problem.seconds(stage, 0, split)
            for kind, size in zip(KINDS, sizes, strict=True):
                periods = model.new_int_var(0, 2 * last + 2, "")
                phase, start, whole_periods = (
                    model.new_int_var(0, self.longest, "") for _ in range(3)
                )
                model.add_multiplication_equality(whole_periods, [periods, self.period])
                model.add(start == whole_periods + phase)
                model.add(phase < self.period)
                made = Phase(periods, phase, start, size)
                self.actions[Action(kind, stage, 0)] = made
        delay = [int(d) for d in (problem.sending + problem.latency)[:, 0]]
        for stage, split in enumerate(self.splits):
            f, b, w = (self.actions[Action(kind, stage, 0)] for kind in KINDS)
            if stage:
                before = self.actions[Action("F", stage - 1, 0)]
                model.add(f.start >= before.start + before.seconds + delay[stage - 1])
            after = self.actions[Action("B", stage + 1, 0)] if stage < last else f
            waits = delay[stage] if stage < last else 0
            model.add(b.start >= after.start + after.seconds + waits)
            model.add(w.start >= b.start + b.seconds).only_enforce_if(split)
            # Where there is no W it stands for nothing, at the same time as its B.
            model.add(w.start == b.start).only_enforce_if(~split)
            model.add(w.periods == b.periods).only_enforce_if(~split)

    def in_a_circle(self, own: list[Action]) -> Orders:
        """Keep the phases of a worker's actions apart, and say how they are ordered."""
        orders: Orders = {(action, action): 1 for action in own}
        for first, second in combinations(own, 2):
            earlier = self.model.new_bool_var("")
            orders[first, second], orders[second, first] = earlier, 1 - earlier
            there = [self.splits[a.stage] for a in (first, second) if a.kind == "W"]
            one, two = self.actions[first], self.actions[second]
            for a, b, holds in ((one, two, earlier), (two, one, ~earlier)):
                around = b.phase + b.seconds <= a.phase + self.period
                for rule in (a.phase + a.seconds <= b.phase, around):
                    self.model.add(rule).only_enforce_if([holds, *there])
        return orders

    def hold(self, limit: int, own: list[Action], orders: Orders) -> None:
        """Keep what a worker holds after each of its actions within its limit."""
        for at in own:
            held = 0
            for stage in {action.stage for action in own}:
                f, b, w = (Action(kind, stage, 0) for kind in KINDS)
                # How many more have begun than ended: whole periods, and this one.
                begun, turned, ended = (
                    orders[a, at] - self.actions[a].periods for a in (f, b, w)
                )
                held += int(self.problem.activation_bytes[stage, 0]) * (begun - turned)
                held += int(self.problem.pending_bytes[stage, 0]) * (turned - ended)
                # Without a W nothing is pending, whatever the order.
                tied = orders[b, at] == orders[w, at] if at not in (b, w) else None
                none = orders[b, w] == 0 if tied is None else tied
                self.model.add(none).only_enforce_if(~self.splits[stage])
            self.model.add(held <= limit)
