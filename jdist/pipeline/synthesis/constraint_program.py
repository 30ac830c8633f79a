"""The search for a schedule as a constraint program, solved by OR-Tools' CP-SAT.

Every action is an interval; those of a worker do not overlap, nor do the messages of a
link; the makespan is minimized. Where memory is limited, or workers are chosen, each
pair of actions that may share a worker has a literal, which says which is first. What a
worker holds after an action is then linear in these literals. This proves optima
where intervals that share a cumulative resource leave a gap, because orders of
memory and of time are the same variables.

Where all micro-batches cost the same, each stage takes them in turn. No schedule is
lost: given any, call the k-th F, B and W of each stage those of micro-batch k. The
k-th smallest end at a stage is no later than the k-th smallest start at the next, so
that the schedule stays valid, and its makespan and its memory stay the same.
"""

import math
from collections import defaultdict
from itertools import combinations, combinations_with_replacement, product
from typing import Any, NamedTuple

import numpy as np

from jdist._errors import Unavailable, extra
from jdist.pipeline.schedule.actions import KINDS, Action
from jdist.pipeline.synthesis.lower_bound import lower_bound
from jdist.pipeline.synthesis.problem import Places, SchedulingProblem

Starts = dict[Action, int]
"""The start of each action, in the problem's whole numbers."""

THREADS = 4
"""Strategies of CP-SAT at a time, on any machine; on two cores 8 prove less in time."""


class Interval(NamedTuple):
    """The variables of an action, of CP-SAT's types."""

    start: Any
    end: Any
    seconds: Any
    split: Any
    """Whether its micro-batch has a W; if not, W is empty, at the end of B."""


def search(
    problem: SchedulingProblem, known: Starts, makespan: int, seconds: float
) -> tuple[Starts, Places, float]:
    """The best schedule found in time, and a lower bound of all schedules.

    Args:
      problem: In whole numbers.
      known: A schedule to begin with.
      makespan: Its makespan.
      seconds: When the search ends, if not by a proof.

    Returns:
      The start of each action of a schedule, `known` if none is shorter; the worker of
      each stage; the bound.

    Raises:
      Unavailable: OR-Tools is not installed.
    """
    program = _Search(problem)
    program.time(makespan)
    if problem.limit is not None:
        program.order()
        program.hold(problem.limit)
    # Not above a whole number by an error of rounding.
    least = math.ceil(lower_bound(problem) - 1e-6)
    total = program.model.new_int_var(least, makespan, "makespan")
    for own in program.actions.values():
        program.model.add(own.end <= total)
    program.model.add_hint(total, makespan)
    program.hint(known)
    program.model.minimize(total)
    solver, is_found = solved(program.model, seconds)
    if not is_found:
        return known, problem.workers, max(solver.best_objective_bound, least)
    found = {
        action: solver.value(own.start)
        for action, own in program.actions.items()
        if action.kind != "W" or solver.value(own.split)
    }
    return found, program.chosen(solver), solver.best_objective_bound


def roomiest(problem: SchedulingProblem, seconds: float) -> Places:
    """Workers for stages whose micro-batches, one at a time, exceed the limits least.

    Args:
      problem: In whole numbers, with a limit.
      seconds: The limit of time.

    Raises:
      Unavailable: OR-Tools is not installed.
    """
    program = _Search(problem)
    sizes = (problem.weight_bytes + problem.activation_bytes).T
    excess = program.model.new_int_var(0, int(sizes.sum()), "excess")
    for (worker, limit), each in product(enumerate(np.array(problem.limit)), sizes):
        pairs = zip(each, program.workers, strict=True)
        held = sum(int(size) * there[worker] for size, there in pairs)
        program.model.add(held <= int(limit) + excess)
    program.model.minimize(excess)
    solver, is_found = solved(program.model, seconds)
    return program.chosen(solver) if is_found else problem.workers


def new_model() -> Any:
    """An empty constraint program; OR-Tools is imported for searches only.

    Raises:
      Unavailable: It is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        what = f"a search for a schedule needs OR-Tools: {extra('synthesize')}"
        raise Unavailable(what) from error
    return cp_model.CpModel()


def solved(model: Any, seconds: float) -> tuple[Any, bool]:
    """The solver after a search of at most some seconds, and whether it has found."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = THREADS
    # Of thousands of orders the default, thrice, takes longer than most of a search.
    solver.parameters.probing_deterministic_time_limit = 0.1
    return solver, solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)


class _Search:
    """Variables and rules of a search.

    Attributes:
      actions: Each action's interval.
      workers: Of each stage, whether it has each worker that it may have.
      together: Whether two stages, the first one first, may and do share a worker.
      first: Whether an action is before another one, per pair that may share a worker.
    """

    def __init__(self, problem: SchedulingProblem) -> None:
        """A program of the places of stages."""
        self.problem = problem
        self.alike = problem.alike
        self.model = new_model()
        self.always, self.never = map(self.model.new_constant, (1, 0))
        self.actions: dict[Action, Interval] = {}
        self.first: dict[tuple[Action, Action], Any] = {}
        where = problem.workers
        self.workers = [{worker: self.always} for worker in where]
        pairs = combinations_with_replacement(range(len(where)), 2)
        self.together = {(a, b): self.always for a, b in pairs if where[a] == where[b]}
        if problem.placing != "given":
            self._place(max(where) + 1)

    def chosen(self, solver: Any) -> Places:
        """The worker of each stage in a solution."""
        return tuple(
            next(worker for worker, there in own.items() if solver.value(there))
            for own in self.workers
        )

    def time(self, makespan: int) -> None:
        """Actions that wait for others, and of which no two of a worker overlap."""
        model, always = self.model, self.problem.always_split
        for stage, i in product(*map(range, self.problem.shape)):
            split = self.always if always else model.new_bool_var("")
            sizes = self.problem.seconds(stage, i, split)
            for kind, size in zip(KINDS, sizes, strict=True):
                start, end = (model.new_int_var(0, makespan, "") for _ in range(2))
                model.add(end == start + size)
                made = Interval(start, end, size, split)
                self.actions[Action(kind, stage, i)] = made
            after = self.actions[Action("B", stage, i)].end
            model.add(start == after).only_enforce_if(~split)
        of_worker = defaultdict(list)
        for action, (start, end, size, _) in self.actions.items():
            for worker, there in self.workers[action.stage].items():
                interval = model.new_optional_interval_var(start, size, end, there, "")
                of_worker[worker].append(interval)
        for intervals in of_worker.values():
            model.add_no_overlap(intervals)
        self._wait(makespan)

    def _place(self, count: int) -> None:
        """Stages on workers of the solver's choice."""
        model, limit = self.model, self.problem.limit
        stages, some = range(len(self.workers)), range(count)
        own = [{w: model.new_bool_var("") for w in some} for _ in stages]
        for stage, there in enumerate(own):
            model.add_exactly_one(there.values())
            model.add_hint(there[self.problem.workers[stage]], 1)
            for worker in some[1:]:
                # Workers of one limit are exchangeable: the first one comes first.
                if limit is None or limit[worker - 1] == limit[worker]:
                    before = [earlier[worker - 1] for earlier in own[:stage]]
                    model.add_bool_or([~there[worker], *before])
        balanced = self.problem.placing == "balanced"
        for worker in some:
            load = sum(there[worker] for there in own)
            model.add(load == len(own) // count if balanced else load >= 1)
        self.workers = own
        for a, b in combinations(stages, 2):
            self.together[a, b] = same = model.new_bool_var("")
            for worker in some:
                one, two = own[a][worker], own[b][worker]
                model.add_bool_or([~one, ~two, same])
                model.add_bool_or([~one, two, ~same])

    def _wait(self, makespan: int) -> None:
        """Let actions wait for results of others, and micro-batches for earlier ones.

        If sending takes longer than the shortest action, links have queues. Otherwise
        each message of a worker has left before the next one is there.
        """
        problem, model = self.problem, self.model
        tables = problem.forward, problem.backward, problem.backward_inputs
        queues = problem.sending.max(initial=0) > min(table.min() for table in tables)
        links = defaultdict(list)
        for action, own in self.actions.items():
            kind, stage, i = action
            if self.alike and i:
                before = self.actions[Action(kind, stage, i - 1)]
                in_turn = model.add(own.start >= before.end)
                if kind == "W":
                    in_turn.only_enforce_if(own.split, before.split)
            source = _source(action, problem.shape[0])
            if source is None:
                continue
            ready = self.actions[source].end
            if source.stage != stage:
                pair = min(stage, source.stage)
                sending = int(problem.sending[pair, i])
                if queues and sending:
                    ready = model.new_int_var(0, makespan, "")
                    model.add(ready >= self.actions[source].end)
                    ends = self.workers[source.stage], self.workers[stage]
                    for a, b in product(*ends):
                        used = model.new_bool_var("")
                        model.add_bool_or([~ends[0][a], ~ends[1][b], used])
                        message = ready, sending, used, ""
                        sent = model.new_optional_fixed_size_interval_var(*message)
                        links[a, b].append(sent)
                same = self.together.get((pair, pair + 1), 0)
                ready = ready + (sending + int(problem.latency[pair, i])) * (1 - same)
            model.add(own.start >= ready)
        for (a, b), messages in links.items():
            if a != b:
                model.add_no_overlap(messages)

    def hint(self, known: Starts) -> None:
        """Begin with a schedule, of which all variables of a given placement follow."""
        at = {}
        for action, own in self.actions.items():
            kind, stage, i = action
            b, w = (action._replace(kind="B"), action._replace(kind="W"))
            sizes = self.problem.seconds(stage, i, w in known)
            start = known.get(action, known[b] + sizes[1])
            self.model.add_hint(own.start, start)
            self.model.add_hint(own.end, start + sizes[KINDS.index(kind)])
            if action == w and own.split is not self.always:
                self.model.add_hint(own.split, w in known)
            # An empty W is before all that follows its B.
            at[action] = known.get(action, known[b] + 0.5)
        for a, b in combinations(self.actions, 2):
            first = self.first.get((a, b), self.always)
            if first is not self.always and first is not self.never:
                self.model.add_hint(first, at[a] < at[b])

    def order(self) -> None:
        """Which action is first, for each pair that may share a worker."""
        for one, two in combinations(self.actions, 2):
            same = self.together.get((one.stage, two.stage))
            if same is None:
                continue
            there = [self.actions[a].split for a in (one, two) if a.kind == "W"]
            first, second = self.always, self.never
            if _known(two, one, self.alike):
                first, second = second, first
            elif not _known(one, two, self.alike):
                first = self.model.new_bool_var("")
                second = ~first
                for a, b, holds in ((one, two, first), (two, one, second)):
                    apart = self.actions[a].end <= self.actions[b].start
                    self.model.add(apart).only_enforce_if(holds, same, *there)
            self.first[one, two], self.first[two, one] = first, second
        for (a, b), first in self.first.items():
            if first is not self.always:
                self._follow(a, b)

    def _follow(self, a: Action, b: Action) -> None:
        """Let an action be first where a later one is.

        These rules follow from the times. The solver needs them for its proofs.
        """
        kind, _, i = a
        first, split = self.first[a, b], self.actions[a].split
        later = [a._replace(kind=KINDS[KINDS.index(kind) + 1])] if kind != "W" else []
        if self.alike and i + 1 < self.problem.shape[1]:
            later.append(a._replace(micro_batch=i + 1))
        for c in later:
            if self.first.get((c, b), self.never) is not self.never:
                # Only those W that exist are in turn.
                there = [~self.actions[c].split] if kind == "W" else []
                self.model.add_bool_or([~self.first[c, b], first, *there])
        # An empty W is where its B is.
        own = a._replace(kind="B")
        if kind == "W" and b.kind != "W" and b != own:
            self.model.add_bool_or([~self.first[own, b], first, split])

    def hold(self, limit: np.ndarray) -> None:
        """Keep what each worker holds after each action within its limit."""
        for at in (action for action in self.actions if action.kind != "W"):
            total = 0
            for stage in range(len(self.workers)):
                same = self.together.get((min(stage, at.stage), max(stage, at.stage)))
                if same is self.always:
                    total += self._held(stage, at)
                elif same is not None:
                    kept = self.model.new_int_var(0, int(limit.max()), "")
                    held = self._held(stage, at)
                    self.model.add(kept >= held).only_enforce_if(same)
                    total += kept
            own = self.workers[at.stage].items()
            most = sum(int(limit[worker]) * there for worker, there in own)
            self.model.add(total <= most)

    def _held(self, stage: int, at: Action) -> Any:
        """What a stage holds after an action of its worker."""
        held = int(self.problem.weight_bytes[stage, 0])
        for i in range(self.problem.shape[1]):
            activation = int(self.problem.activation_bytes[stage, i])
            pending = int(self.problem.pending_bytes[stage, i])
            f, b, w = (Action(kind, stage, i) for kind in KINDS)
            if at == f:
                held += activation
            elif at == b:
                held += pending * self.actions[b].split
            else:
                held += activation * (self.first[f, at] - self.first[b, at])
                held += pending * (self.first[b, at] - self.first[w, at])
        return held


def _source(action: Action, stages: int) -> Action | None:
    """The action whose result it needs; its other needs follow from that."""
    kind, stage, i = action
    if kind == "F":
        return Action("F", stage - 1, i) if stage else None
    if kind == "W":
        return Action("B", stage, i)
    return Action("B", stage + 1, i) if stage < stages - 1 else Action("F", stage, i)


def _known(one: Action, two: Action, alike: bool) -> bool:
    """Whether an action is before another one of its stage in all schedules."""
    if one.stage != two.stage or KINDS.index(one.kind) > KINDS.index(two.kind):
        return False
    i, j = one.micro_batch, two.micro_batch
    return i <= j if alike else i == j
