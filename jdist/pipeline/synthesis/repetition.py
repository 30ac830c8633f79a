"""A pattern that every micro-batch repeats: modulo scheduling, by CP-SAT.

Micro-batch i does what micro-batch 0 does, i periods later. An action starts at a phase
of a period, q periods after the first; the phases of a worker's actions do not overlap
in the circle of a period. What a worker holds after an action then follows from q and
from the order of phases, and is the same in every period; at the beginning and at the
end some micro-batches are missing, and it is less. The program has one micro-batch's
actions, whatever their number is. The shortest period is found by bisection: with a
given one all rules are linear.
"""

import math
import time
from itertools import combinations
from typing import Any, NamedTuple

from jdist.pipeline.schedule.actions import KINDS, Action
from jdist.pipeline.synthesis.constraint_program import Starts, new_model, solved
from jdist.pipeline.synthesis.problem import TIMES, SchedulingProblem

SHARE, FINEST = 1 / 3, 1e-4
"""A period is tried for this part of the time that is left, until bisection is as fine
as this."""

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
) -> tuple[Starts | None, int]:
    """The start of each action of micro-batch 0, and the period of all others.

    Args:
      problem: One micro-batch, in whole numbers.
      micro_batches: The number of those that repeat it.
      seconds: The limit of time.

    Returns:
      What makes the last micro-batch end earliest; None if nothing was found in time.

    Raises:
      Unavailable: OR-Tools is not installed.
    """
    longest = 2 * sum(int(getattr(problem, name).sum()) for name in TIMES)
    least, most = 1, longest
    best: tuple[float, int, Starts | None] = (math.inf, longest, None)
    ends = time.monotonic() + seconds
    while most - least > FINEST * most and (left := ends - time.monotonic()) > 0:
        period = (least + most) // 2
        found = _Pattern(problem, period, longest // period + 2).solved(left * SHARE)
        if found is None:  # Or none was found in time.
            least = period + 1
        else:
            most, (end, starts) = period, found
            best = min(best, (end + (micro_batches - 1) * period, period, starts))
    return best[2], best[1]


class _Pattern:
    """Variables and rules of a pattern with a given period.

    Args:
      problem: One micro-batch.
      period: The period.
      turns: How many of them a micro-batch takes at most.

    Attributes:
      splits: Whether there is a W, per stage.
      actions: The actions of a micro-batch, each after those that it waits for.
    """

    def __init__(self, problem: SchedulingProblem, period: int, turns: int) -> None:
        self.problem, self.period, self.turns = problem, period, turns
        self.model = model = new_model()
        always = int(problem.always_split)
        self.splits = [model.new_int_var(always, 1, "") for _ in problem.workers]
        self.actions: dict[Action, Phase] = {}
        last = len(self.splits) - 1
        for stage, split in enumerate(self.splits):
            sizes = problem.seconds(stage, 0, split)
            for kind, size in zip(KINDS, sizes, strict=True):
                periods = model.new_int_var(0, self.turns, "")
                phase = model.new_int_var(0, period - 1, "")
                made = Phase(periods, phase, periods * period + phase, size)
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
        for worker in set(problem.workers):
            there = [a for a in self.actions if problem.workers[a.stage] == worker]
            orders = self._in_a_circle(there)
            if problem.limit is not None:
                self._hold(int(problem.limit[worker]), there, orders)

    def solved(self, seconds: float) -> tuple[int, Starts] | None:
        """The end of a micro-batch, and the start of each of its actions; or None."""
        end = self.model.new_int_var(0, (self.turns + 2) * self.period, "")
        for own in self.actions.values():
            self.model.add(own.start + own.seconds <= end)
        self.model.minimize(end)
        solver, is_found = solved(self.model, seconds)
        if not is_found:
            return None
        return solver.value(end), {
            action: solver.value(own.start)
            for action, own in self.actions.items()
            if action.kind != "W" or solver.value(self.splits[action.stage])
        }

    def _in_a_circle(self, own: list[Action]) -> Orders:
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

    def _hold(self, limit: int, own: list[Action], orders: Orders) -> None:
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
