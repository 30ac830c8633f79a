"""The search for a schedule as a constraint program, solved by OR-Tools' CP-SAT.

Every action is an interval. Those of a worker do not overlap, nor do the messages of a
link; bytes are a cumulative resource; the makespan is minimized. Where all micro-
batches cost the same, each stage takes them in turn. No schedule is lost: given any,
call the k-th F, B and W of each stage those of micro-batch k. The k-th smallest end at
a stage is no later than the k-th smallest start at the next, so that the schedule stays
valid, and its makespan and its memory stay the same.
"""

import math
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from jdist._errors import Unavailable, extra
from jdist.pipeline.schedule.actions import KINDS, Action
from jdist.pipeline.synthesis.lower_bound import lower_bound
from jdist.pipeline.synthesis.problem import SchedulingProblem

Starts = dict[Action, int]
"""The start of each action, in the problem's whole numbers."""

THREADS = 8
"""Strategies of CP-SAT at a time, as many as complement each other, on any machine."""


class Interval(NamedTuple):
    """The variables of an action, of CP-SAT's types."""

    start: Any
    end: Any
    interval: Any
    present: Any
    """Whether there is such an action: no W follows a whole B."""


def search(
    problem: SchedulingProblem, known: Starts, makespan: int, seconds: float
) -> tuple[Starts, float]:
    """The best schedule found in time, and a lower bound of all schedules.

    Args:
      problem: In whole numbers.
      known: A schedule to begin with.
      makespan: Its makespan.
      seconds: When the search ends, if not by a proof.

    Returns:
      The start of each action of a schedule, `known` if none is shorter; the bound.

    Raises:
      Unavailable: OR-Tools is not installed.
    """
    cp_model = solver_module()
    model = cp_model.CpModel()
    actions = _actions(model, problem, makespan)
    _wait(model, problem, actions, makespan)
    if problem.limit is not None:
        _hold(model, problem, problem.limit, actions, makespan)
    # Not above a whole number by an error of rounding.
    least = math.ceil(lower_bound(problem) - 1e-6)
    total = model.new_int_var(least, makespan, "makespan")
    for action, variables in actions.items():
        model.add(variables.end <= total)
        if action in known:
            model.add_hint(variables.start, known[action])
        if action.kind == "W" and not problem.always_split:
            model.add_hint(variables.present, action in known)
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = THREADS
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return known, max(solver.best_objective_bound, least)
    found = {
        action: solver.value(variables.start)
        for action, variables in actions.items()
        if solver.value(variables.present)
    }
    return found, solver.best_objective_bound


def solver_module() -> Any:
    """OR-Tools' module `cp_model`, which is imported for searches only.

    Raises:
      Unavailable: It is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        what = f"a search for a schedule needs OR-Tools: {extra('synthesize')}"
        raise Unavailable(what) from error
    return cp_model


def _actions(
    model: Any, problem: SchedulingProblem, makespan: int
) -> dict[Action, Interval]:
    """Intervals of all actions, in each stage's order; no two of a worker overlap."""
    stages, micro_batches = problem.shape
    found, of_worker = {}, defaultdict(list)
    for stage, i in ((s, i) for s in range(stages) for i in range(micro_batches)):
        split = True if problem.always_split else model.new_bool_var("")
        whole, inputs = int(problem.whole[stage, i]), int(problem.inputs[stage, i])
        sizes = (
            int(problem.forward[stage, i]),
            whole + (inputs - whole) * split,
            int(problem.params[stage, i]),
        )
        for kind, size in zip(KINDS, sizes, strict=True):
            start = model.new_int_var(0, makespan, "")
            end = model.new_int_var(0, makespan, "")
            present = split if kind == "W" else True
            interval = model.new_optional_interval_var(start, size, end, present, "")
            found[Action(kind, stage, i)] = Interval(start, end, interval, present)
            of_worker[problem.workers[stage]].append(interval)
    for intervals in of_worker.values():
        model.add_no_overlap(intervals)
    return found


def _wait(
    model: Any,
    problem: SchedulingProblem,
    actions: dict[Action, Interval],
    makespan: int,
) -> None:
    """Let actions wait for results of others, and micro-batches for those before."""
    stages, alike = problem.shape[0], problem.alike
    shortest = min(
        table.min() for table in (problem.forward, problem.whole, problem.inputs)
    )
    # Otherwise each message of a worker has left before the next one is there.
    queues = problem.sending.max(initial=0) > shortest
    links = defaultdict(list)
    for action, own in actions.items():
        kind, stage, i = action
        if alike and i:
            before = actions[Action(kind, stage, i - 1)]
            in_turn = model.add(own.start >= before.end)
            if kind == "W" and not problem.always_split:
                in_turn.only_enforce_if(own.present, before.present)
        source = _source(action, stages)
        if source is None:
            continue
        ready = actions[source].end
        if source.stage != stage:
            pair = min(stage, source.stage)
            sending = int(problem.sending[pair, i])
            if queues and sending:
                begin = model.new_int_var(0, makespan, "")
                model.add(begin >= ready)
                link = (problem.workers[source.stage], problem.workers[stage])
                links[link].append(
                    model.new_fixed_size_interval_var(begin, sending, "")
                )
                ready = begin
            ready = ready + sending + int(problem.latency[pair, i])
        model.add(own.start >= ready)
    for messages in links.values():
        model.add_no_overlap(messages)


def _source(action: Action, stages: int) -> Action | None:
    """The action whose result it needs; its other needs follow from that."""
    kind, stage, i = action
    if kind == "F":
        return Action("F", stage - 1, i) if stage else None
    if kind == "W":
        return Action("B", stage, i)
    return Action("B", stage + 1, i) if stage < stages - 1 else Action("F", stage, i)


def _hold(
    model: Any,
    problem: SchedulingProblem,
    limit: np.ndarray,
    actions: dict[Action, Interval],
    makespan: int,
) -> None:
    """Keep what each worker holds within its limit."""
    held = defaultdict(list)
    for (kind, stage, i), own in actions.items():
        if kind == "F":
            continue
        # From the start of F, not its end: nothing is given back in between, so that
        # the same schedules fit, and the solver's bounds are closer.
        table = problem.activation if kind == "B" else problem.pending
        first = actions[Action("F", stage, i)].start
        begin = first if kind == "B" else actions[Action("B", stage, i)].end
        size = model.new_int_var(0, makespan, "")
        kept = model.new_optional_interval_var(begin, size, own.end, own.present, "")
        held[problem.workers[stage]].append((kept, int(table[stage, i])))
    for worker, pairs in held.items():
        intervals, amounts = zip(*pairs, strict=True)
        model.add_cumulative(intervals, amounts, int(limit[worker]))
